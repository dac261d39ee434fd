"""Notebook 07's servers, real ones on the CPU: `make test-vllm`."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from fusion_evidence.lib.service import vllm_findings as findings
from fusion_evidence.lib.service.vllm_study import Plan, Study

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    plan = Plan(
        python=sys.executable,
        version=metadata.version("vllm"),
        on_device=False,
        requests=("r01", "r02"),
        new_tokens=6,
        concurrency=(1, 4),
        sizes=(1,),
        calibration_requests=3,
        calibration_tokens=6,
        parallel=1,
    )
    made = Study(plan, tmp_path_factory.mktemp("study"))
    made.checkpoints()
    made.run(["native", "opaque_eager"])
    return made


def test_what_the_layers_counted_is_what_vllms_own_statistics_say(study):
    assert {name: one.error for name, one in study.results.items()} == {
        "native": "",
        "opaque_eager": "",
    }
    alone, crowd = findings.counts(study.results)
    assert (alone.method, crowd.method) == (
        "the replies' tokens",
        "vLLM's statistics of its steps",
    )
    assert alone.exact
    assert crowd.exact
    assert alone.share > 0.5 > crowd.share
    steps = [one.engine for one in study.results["native"].passes if one.concurrency == 1]
    assert {one["steps of 1"] for one in steps} == {2 * 5}


def test_forced_tokens_give_both_the_same_rows_and_one_shows_the_others_numerics(study):
    found = findings.outcome(study, "opaque_eager")
    layers, tensors, rows = 4, 3, sum(len(r.ids) + 5 for r in study.plan.fixed())
    assert found.records_total == layers * tensors * rows
    assert (found.records, found.texts, found.error) == (0, 0, "")
    (decode, *_) = findings.calibrate(study, "compact").values()
    assert decode.numerics is not None
    assert decode.numerics.rounding == "per_op"
