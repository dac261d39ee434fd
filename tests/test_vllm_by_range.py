"""vLLM's own compilation by range, through Inductor, in a real server on the CPU: `make test-vllm`.

What an accelerator's server does, without its CUDA graphs; the CPU's platform takes it away, and the plugin
leaves it. The definition computes in the kernel's place. About eight minutes on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fusion_evidence.lib.service import vllm_records
from fusion_evidence.lib.service.endpoint import Endpoint, serve
from fusion_evidence.lib.service.prompts import load_requests
from fusion_evidence.lib.service.vllm_checkpoint import export
from fusion_evidence.lib.service.vllm_evidence import prefill_identical
from fusion_evidence.lib.service.vllm_server import as_text, ask_workers, markers, running

pytestmark = pytest.mark.vllm

TOKENS, SIZES = 16, (1, 4)
REQUESTS = as_text(load_requests()[:3], TOKENS)
DEFINITION = "fusion_evidence.kernels.reference:qkv_prologue"
STEPS = len(REQUESTS) * (TOKENS - 1)


@dataclass(frozen=True)
class Left:
    """What a server left: its texts, its records, its evidence, and what each layer counted."""

    texts: list[list[int]]
    choices: dict[str, list[int]]
    records: Path
    graphs: Path
    counted: set[tuple[int, int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return export(tmp_path_factory.mktemp("ranges") / "checkpoint")


def served(checkpoint: Path, name: str, **settings: Any) -> Left:
    """Free texts first, then tokens that are the same for every server, and are recorded."""
    folder = checkpoint.parent / name
    folder.mkdir()
    around = {
        "VLLM_CPU_CI_ENV": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    words = ["--compilation-config", f'{{"compile_sizes": {list(SIZES)}}}']
    words += ["--logits-processors", vllm_records.FORCED_TOKENS]
    given = {"by_range": True, "records": 600, "graphs": str(folder / "graphs"), **settings}
    with running(
        checkpoint, folder / "log", given, around=around, extra=words, eager=False
    ) as ready:
        url, endpoint = ready.base_url, Endpoint(ready.base_url)
        free = serve(endpoint, REQUESTS)
        ask_workers(url, "fusion_reset_records")
        markers(url, reset=True)
        for place, request in enumerate(REQUESTS):
            said = [(37 * step + 11 * place) % 900 + 5 for step in range(TOKENS)]
            fields = vllm_records.forced(request.id, said)
            (reply,) = serve(endpoint, [request], extra=fields)
            assert reply.tokens == said
        counted = {tuple(one) for one in markers(url).values()}
        kept = ask_workers(url, "fusion_records", str(folder / "records.safetensors"))
        assert kept["lost"] == 0
        assert ask_workers(url, "fusion_graphs")["graphs"] > len(SIZES)
        choices = ask_workers(url, "fusion_choices")
    return Left(
        [reply.tokens for reply in free],
        choices,
        folder / "records.safetensors",
        folder / "graphs" / "0",
        counted,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def native(checkpoint):
    return served(checkpoint, "native", mode="native")


@pytest.fixture(scope="module")
def operator(checkpoint):
    per_op = "per_op, 1x16x4 strided, contraction none"
    return served(
        checkpoint, "operator", mode="opaque_eager", numerics=per_op, candidate=DEFINITION
    )


@pytest.fixture(scope="module")
def calibrated(native, operator):
    return vllm_records.calibrate(native.records, operator.records, tokens=[1])[1]


@pytest.fixture(scope="module")
def integrated(checkpoint, calibrated):
    numerics = {"1": str(calibrated.numerics)}
    return served(
        checkpoint, "integrated", mode="integrated", numerics=numerics, candidate=DEFINITION
    )


def differing(one: Left, other: Left) -> pd.Series:
    frame = vllm_records.compare(one.records, other.records)
    for side in vllm_records.opened(one.records, other.records):
        assert set(frame.groupby(["layer", "tensor"]).records.sum()) == {len(side.index)}
    return frame.groupby(frame.tokens == 1).differing.sum()


def test_its_decode_graph_computes_one_of_the_declared_numerics(calibrated):
    assert calibrated.numerics is not None, str(calibrated.fingerprint)
    assert calibrated.rows == STEPS
    assert calibrated.numerics.rounding == "fp32_through"


def test_the_kernel_runs_in_every_decode_step_and_in_no_other(integrated, operator):
    assert integrated.counted == {(STEPS, 0)}
    assert operator.counted == {(STEPS, len(REQUESTS))}


def test_no_record_and_no_text_differs(native, integrated):
    assert differing(native, integrated).to_dict() == {False: 0, True: 0}
    assert integrated.texts == native.texts
    assert integrated.choices == native.choices
    assert all(len(made) == TOKENS for made in native.choices.values())


def test_another_rounding_does_differ(native, operator):
    assert differing(native, operator)[True] > STEPS


def test_only_the_graph_of_one_token_is_another(native, integrated):
    frame = prefill_identical(native.graphs, integrated.graphs)
    ranges = frame.groupby(["first", "last"]).identical.agg(lambda same: bool(same.dropna().all()))
    assert ranges.to_dict() == {(1, 1): False, (4, 4): True, (1, 2048): True}
    compared = frame[frame.identical.notna() & (frame["last"] == 2048)]
    assert {"graph", "source", "binary"} <= set(compared.what)


def test_without_the_mend_its_decode_graph_reads_other_positions(checkpoint, operator):
    """vLLM's own strides: nothing that is declared computes what comes of them."""
    left = served(checkpoint, "assumed", mode="native", true_strides=False)
    found = vllm_records.calibrate(left.records, operator.records, tokens=[1])[1]
    assert found.numerics is None
    assert found.fingerprint.mismatches > 100
    assert found.fingerprint.elements == STEPS * 8 * 64
