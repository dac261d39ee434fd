"""The article's integrations in a real vLLM server on the CPU, by its device markers: `make test-vllm`.

A CPU has no Triton kernel: the definition computes in its place, as a candidate does.
"""

from __future__ import annotations

import pytest

from fusion_evidence.lib.service.endpoint import EndpointError
from fusion_evidence.lib.service.prompts import load_requests
from fusion_evidence.lib.service.vllm_checkpoint import export
from fusion_evidence.lib.service.vllm_server import as_text, visit

pytestmark = pytest.mark.vllm

TOKENS = 8
REQUESTS = as_text(load_requests()[:3], TOKENS)
KERNEL = {
    "numerics": "per_op, 1x16x4 strided, contraction none",
    "candidate": "fusion_evidence.kernels.reference:qkv_prologue",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return export(tmp_path_factory.mktemp("modes") / "checkpoint")


def served(checkpoint, settings, *, eager, concurrency=1):
    """(tokens of each request, what every layer counted)."""
    log = checkpoint.parent / "server.log"
    seen = visit(checkpoint, REQUESTS, log, settings, eager=eager, concurrency=concurrency)
    assert all(reply.completed for reply in seen.replies), seen.replies
    return [reply.tokens for reply in seen.replies], seen.counted


@pytest.fixture(scope="module")
def native(checkpoint):
    return served(checkpoint, {"mode": "native"}, eager=False)


def test_the_baseline_counts_nothing(native):
    assert native[1] is None


def test_the_branch_is_there_in_eager_mode_and_gone_in_the_compiled_service(checkpoint, native):
    settings = {"mode": "python_branch", **KERNEL}
    decode_steps = len(REQUESTS) * (TOKENS - 1)
    assert served(checkpoint, settings, eager=True)[1] == (decode_steps, 0)
    texts, counted = served(checkpoint, settings, eager=False)
    assert counted == (0, 0)  # and no word of it: the texts are the baseline's
    assert texts == native[0]


def test_behind_the_operator_every_step_takes_its_path(checkpoint):
    settings = {"mode": "opaque_eager", **KERNEL}
    decode_steps = len(REQUESTS) * (TOKENS - 1)
    _, counted = served(checkpoint, settings, eager=False)
    assert counted == (decode_steps, len(REQUESTS))


def test_three_at_a_time_the_kernel_for_one_token_hardly_runs(checkpoint):
    settings = {"mode": "opaque_eager", **KERNEL}
    alone = len(REQUESTS) * (TOKENS - 1)
    _, counted = served(checkpoint, settings, eager=False, concurrency=3)
    assert counted[0] < alone / 2


def test_a_range_of_decode_sizes_takes_the_batched_steps_too(checkpoint):
    settings = {"mode": "opaque_eager", "decode": [1, 4], **KERNEL}
    _, counted = served(checkpoint, settings, eager=False, concurrency=3)
    assert counted[0] >= TOKENS - 1
    assert counted[1] <= len(REQUESTS) + 1


def test_what_it_cannot_do_is_said_in_one_line(checkpoint):
    wrong = (
        ({"mode": "integrated", **KERNEL}, "needs vLLM's own compilation by range"),
        ({"mode": "opaque"}, "fusion_evidence.mode: expected off"),
    )
    for settings, says in wrong:
        log = checkpoint.parent / "refused.log"
        with pytest.raises(EndpointError, match="ended with status"):
            visit(checkpoint, REQUESTS, log, settings, eager=False)
        assert says in log.read_text()
