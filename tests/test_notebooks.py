"""Every source notebook from top to bottom, with small parameters: by the runner, and as Run All."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import yaml

from fusion_evidence.lib import batch, paths
from fusion_evidence.lib.report.evidence import Evidence, Verdict, read_evidence

pytestmark = pytest.mark.usefixtures("compile_cache")

#: The smallest parameters with which a notebook still shows what it is about.
SMALL: dict[str, dict[str, Any]] = {
    "00_summary": dict(machines=["h200"], lang="zh"),
    "01_primitive_benchmark": dict(
        shape_name="compact",
        tokens=[1, 3],
        elements=2000,
        kernel_tokens=3,
        time_tokens=[1],
        samples=5,
    ),
    "02_trace_specialization": dict(
        layers=1,
        first_trace=64,
        prompt_tokens=5,
        new_tokens=2,
        modes=["mark_dynamic", "skip_all_guards", "cond_skip_all_guards"],
    ),
    "03_custom_op_fallback": dict(
        layers=1, prompt_tokens=3, decode_steps=2, replays=10, tokens=[3, 5], cache_blocks=64
    ),
    "04_text_regression": dict(
        requests=["r01", "r02", "r03"],
        new_tokens=3,
        forced_passes=1,
        max_tokens=144,
        prefill_times=[3],
        prefill_samples=2,
        decode_samples=2,
        backend="eager",
    ),
    # Nothing is compiled: what is compared is eager code, whose arms are equal but for the kernel's.
    "05_drift_attribution": dict(
        requests=["r01"],
        short_requests=["r01"],
        new_tokens=3,
        short_tokens=2,
        arms=["opaque_eager__opaque_eager", "opaque_eager__fused"],
        rebuilds=1,
        pins=[],
        traced=[],
        body_traced=[],
        padded=False,
        fitted=["calibrated"],
        faults=["dropped_mask"],
        decode_samples=0,
        max_tokens=80,
        parallel=2,
        backend="eager",
    ),
    "06_bit_exact_integration": dict(
        requests=["r01"],
        new_tokens=3,
        max_tokens=80,
        calibration_requests=0,
        arms=["rebuild", "integrated"],
        article_lengths=[],
        elements=1000,
        parallel=2,
        backend="eager",
    ),
    "07_vllm_service": dict(requests=["r01"], new_tokens=2, arms=["native", "integrated"]),
}

#: Without a vLLM, which the tests' environment has not, nothing of it runs.
NOTHING_RUNS = {"07_vllm_service"}

#: Claims that are there to fail, or may on some hardware; no other may.
MAY_FAIL = {
    "00_summary": {"every_result_fresh"},
    "01_primitive_benchmark": {"eager_batch_invariant", "near_the_floor", "ahead_of_peers"},
    "02_trace_specialization": {"kernel_reached"},
    "03_custom_op_fallback": {"marker_cheap"},
    "04_text_regression": {
        "texts_unchanged",
        "times_repeat",
        "resolves_mean_tpot",
        "resolves_p99_tpot",
        "prefill_not_slower",
    },
    "05_drift_attribution": {
        "fixed_point",
        "drift_without_the_kernel",
        "prefill_drifts",
        "located",
        "fallback_clears_the_kernel",
        "boundary_alone",
        "fingerprint",
        "numerics_explain_it",
        "coin_tosses",
    },
    "06_bit_exact_integration": set(),
    "07_vllm_service": set(),
}

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


def profile(folder: Path, notebook: Path) -> Path:
    """A profile file with the notebook's small parameters."""
    assert notebook.stem in SMALL, "a new notebook needs an entry in SMALL"
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump({notebook.stem: SMALL[notebook.stem]}))
    return file


def failed(evidence: Evidence) -> set[str]:
    return {claim.claim for claim in evidence.claims if claim.verdict is Verdict.FAIL}


def run_with_runner(
    notebook: Path, folder: Path, *settings: str
) -> tuple[int, Evidence, list[str]]:
    lines: list[str] = []
    status = batch.run(
        [notebook],
        folder / "out",
        profile_file=profile(folder, notebook),
        settings=settings,
        report=lines.append,
    )
    return status, read_evidence(folder / "out" / f"{notebook.stem}.json"), lines


def run_all(notebook: Path, folder: Path) -> Evidence:
    """Run All in a folder of its own, with other values in the notebook's own parameters cell."""
    document = nbformat.read(notebook, as_version=4)
    (cell,) = (c for c in document.cells if "parameters" in c.metadata.get("tags", ()))
    tree, values = ast.parse(cell.source), dict(SMALL[notebook.stem])
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) in values:
            value = repr(values.pop(ast.unparse(statement.target)))
            statement.value = ast.parse(value, mode="eval").body
    assert not values
    cell.source = ast.unparse(tree)
    source, results = folder / "notebooks" / notebook.name, folder / "out"
    source.parent.mkdir()
    results.mkdir()
    nbformat.write(document, source)
    environment = os.environ | {
        "FUSION_EVIDENCE_NOTEBOOKS": str(source.parent),
        "FUSION_EVIDENCE_RUN_DIR": str(results),
    }
    here = {"metadata": {"path": str(source.parent)}}
    nbclient.NotebookClient(document, timeout=600, resources=here).execute(env=environment)
    nbformat.write(document, results / notebook.name)
    assert batch.verify(source, results) == []
    return read_evidence(results / f"{notebook.stem}.json")


# CI has the runner execute all of them after the tests.
QUICK = ("02_trace_specialization", "run all")
CASES = [
    pytest.param(
        path,
        way,
        id=f"{path.stem}, {way}",
        marks=[] if (path.stem, way) == QUICK else [pytest.mark.slow],
    )
    for path in NOTEBOOKS
    for way in ("runner", "run all")
]


@pytest.mark.parametrize(("notebook", "way"), CASES)
def test_from_top_to_bottom(notebook, way, tmp_path):
    if way == "runner":
        status, evidence, lines = run_with_runner(notebook, tmp_path)
        assert status == 0, "\n".join(lines)
        assert batch.verify(notebook, tmp_path / "out", evidence.parameters) == []
    else:
        evidence = run_all(notebook, tmp_path)
    assert evidence.run == "complete"
    assert evidence.parameters.items() >= SMALL[notebook.stem].items()
    assert failed(evidence) <= MAY_FAIL[notebook.stem]
    if notebook.stem in NOTHING_RUNS:
        assert {claim.verdict for claim in evidence.claims} == {Verdict.NOT_RUN}
    else:
        assert any(claim.verdict.passed for claim in evidence.claims)


# --- a reader's own kernel in the first notebook

FIRST = paths.NOTEBOOKS / "01_primitive_benchmark.ipynb"

WRONG = '''
"""The project's kernel with one wrong bit, in one head, at T = 3 alone."""
import torch
from fusion_evidence.kernels import fused


def qkv_prologue(*args):
    outputs = fused.qkv_prologue(*args)
    if args[0].shape[0] == 3:
        outputs[0].view(torch.int16)[0, 4, 5] ^= 1
    return outputs
'''


@pytest.mark.slow  # the same kernel stands before the same oracles, quickly, in test_oracles
def test_a_wrong_candidate_is_found_and_no_saving_is_claimed_for_it(tmp_path, monkeypatch):
    (tmp_path / "wrong_kernel.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, evidence, lines = run_with_runner(
        FIRST, tmp_path, "candidate=wrong_kernel:qkv_prologue"
    )
    assert status == 0, "\n".join(lines)  # the run is sound: it is the kernel that is not
    assert evidence.run == "complete"
    assert failed(evidence) >= {"bits_reference", "bits_compiled", "batch_invariant"}
    frame = evidence.frame("mismatch", oracle="reference")
    assert dict(frame[frame.output == "q"].set_index("T").value) == {1: 0, 3: 1}
    for metric in ("speedup", "saving", "saving_share"):
        for measured in evidence.select(metric):
            assert measured.value is None
            assert "bits_compiled is FAIL" in measured.not_comparable
    executed = (tmp_path / "out" / FIRST.name).read_text()
    assert "with one wrong bit" not in executed  # the function is shown, not its module
    assert "def qkv_prologue(*args):" in executed


def test_a_candidate_that_cannot_be_imported_is_one_error(tmp_path):
    status, evidence, lines = run_with_runner(FIRST, tmp_path, "candidate=no_such_module:kernel")
    assert status == 1
    assert evidence.run == "incomplete"
    assert evidence.reason.startswith("cell 3 raised ValueError: candidate: 'no_such_module:")
    assert "\n" not in evidence.reason
    assert sum("failed: " in line for line in lines) == 1
