"""The plan of the attribution's processes, their comparison, and what is concluded from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch

from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.lib.attribution import factorial as f
from fusion_evidence.lib.attribution import verdicts as v
from fusion_evidence.lib.attribution.factorial import Compared, Plan
from fusion_evidence.lib.attribution.fingerprint import Fingerprint
from fusion_evidence.lib.measure.timing import summarize
from fusion_evidence.lib.report.evidence import Verdict
from fusion_evidence.lib.service.arms import Arm
from fusion_evidence.lib.service.graphs import GraphReport
from fusion_evidence.lib.service.jobs import JobResult, run_job

pytestmark = pytest.mark.usefixtures("one_thread")


TOKENS = {"r01": [5, 6, 7, 8], "r03": [7, 8, 9, 10]}
FULL = Plan(
    requests=["r01", "r03"],
    new_tokens=4,
    short=["r03"],
    short_tokens=2,
    traced=[2, 1000],
    body_traced=[4096],
    faults=["stale_slot"],
    decode_samples=3,
)
FOUND = Numerics("fp32_through", Reduction(32, 2), "cos")


# --- the plan


def test_every_arm_differs_from_the_baseline_in_what_its_name_says(tmp_path):
    first, *prefill = FULL.first()
    jobs = [*prefill, *FULL.forced(TOKENS, tmp_path), *FULL.alone(TOKENS)]
    names = [first.name, *(job.name for job in jobs)]
    assert len(set(names)) == len(names)
    assert (first.name, first.pins, first.passes) == ("baseline", f.PINS, ["free"])
    assert [job.name for job in prefill] == [
        "first_traced_2",
        "first_traced_1000",
        "body_first_traced_4096",
    ]
    assert all(job.new_tokens == 1 and not job.forced for job in prefill)
    pinned_otherwise = {job.name: job.pins for job in jobs if job.pins != f.PINS}
    for name, pins in pinned_otherwise.items():
        changed = {field for field, value in pins if value != getattr(f.PINS, field)}
        if name == "default":
            assert changed == set(f.UNPINNED)
        elif name == f.DETERMINISTIC:
            assert changed == {"configurations", "deterministic"}
        else:
            assert name.removeprefix("without_").startswith(changed.pop())
            assert not changed
    assert len(pinned_otherwise) == 3 + len(f.UNPINNED) + 2
    by_name = {job.name: job for job in jobs}
    assert {str(Arm.parse(job.arm)) for name, job in by_name.items() if "__" in name} == set(
        f.FACTORIAL
    )
    assert len(f.FACTORIAL) == 3 * 4 - 1
    assert [name for name, job in by_name.items() if job.fault] == ["fault_stale_slot"]
    assert [name for name, job in by_name.items() if job.padded] == ["padded"]
    assert by_name["unrecorded"].record == "none"
    unrecorded, *others = FULL.alone(TOKENS)
    assert [one.name for one in unrecorded.beside] == ["again", "without_sdpa"]
    apart = ["without_workspace", "without_configurations"]
    assert [job.name for job in others] == [*f.PINNED, *apart]
    assert all(job.decode_samples == 3 for job in (unrecorded, *others))
    assert {job.record for job in others if job.pins == f.PINS} == {"none"}
    in_turn = replace(FULL, unpinned=["sdpa"]).alone(TOKENS)
    assert [job.name for job in in_turn] == ["unrecorded"], "none is timed in a process of its own"
    assert by_name["padded"].forced == {"r03": [7, 8]}
    assert by_name["opaque_eager__fused"].forced == TOKENS


def test_rebuilds_serve_in_two_orders(tmp_path):
    rebuilds = [job for job in FULL.forced(TOKENS, tmp_path) if job.arm == "rebuild"]
    assert len(rebuilds) == 5
    assert [job.requests is None for job in rebuilds] == [True, False, True, False, True]
    lines = (tmp_path / "reversed.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["r03", "r01"]
    assert rebuilds[0].recordings == ["recompiled", "recompiled"]
    assert not any(job.recordings for job in rebuilds[1:])
    assert not any(job.pins.caches_off for job in rebuilds), "each has empty ones of its own"
    shared = replace(FULL, common={"cache": "shared"}).forced(TOKENS, tmp_path)
    assert all(job.pins.caches_off for job in shared if job.arm == "rebuild")


def test_without_tokens_nothing_is_forced(tmp_path):
    failed = {"baseline": JobResult(job=f.jobs(["baseline"])[0], folder=tmp_path)}
    assert f.tokens_of(failed) == {}
    assert (
        FULL.forced({}, tmp_path)
        == FULL.alone({})
        == FULL.fitted({}, {}, "baseline", f.FITTED)
        == []
    )
    with pytest.raises(KeyError):
        f.without("no_such_pin")


def test_fitted_arms_change_one_thing_each():
    sides = {"baseline_prefill": FOUND, "baseline_decode": replace(FOUND, contraction="sin")}
    arm = "opaque_reference__opaque_reference"
    jobs = {job.name: job for job in FULL.fitted(TOKENS, sides, arm, f.FITTED)}
    assert list(jobs) == ["calibrated", "other_tree", "casts_per_op", "casts_storage"]
    assert jobs["calibrated"].decode_numerics == "fp32_through, 1x32x2 sequential, contraction sin"
    assert jobs["other_tree"].prefill_numerics == "fp32_through, 2x32x1 sequential, contraction cos"
    assert jobs["casts_per_op"].prefill_numerics == "per_op, 1x32x2 sequential, contraction none"
    fallback = {"fallback_prefill": FOUND, "fallback_decode": FOUND}
    found = FULL.fitted(TOKENS, fallback, arm, f.FITTED)
    assert [job.name for job in found] == ["emulated_fallback"]
    assert FULL.fitted(TOKENS, fallback, arm, ["calibrated"]) == []


def test_a_candidate_is_in_every_arm_but_those_with_numerics_that_were_found(tmp_path):
    plan = replace(FULL, common={**FULL.common, "candidate": "mine:kernel"})
    jobs = [*plan.first(), *plan.forced(TOKENS, tmp_path), *plan.alone(TOKENS)]
    assert {job.candidate for job in jobs} == {"mine:kernel"}
    sides = {"baseline_prefill": FOUND, "baseline_decode": FOUND}
    fitted = plan.fitted(TOKENS, sides, "opaque_reference__opaque_reference", f.FITTED)
    assert {job.candidate for job in fitted} == {""}


@pytest.mark.parametrize("tree", Reduction.candidates(64) + Reduction.candidates(256), ids=str)
def test_another_tree_is_another_order(tree):
    other = f._another_tree(Numerics(reduction=tree)).reduction
    assert (other.size, other != tree) == (tree.size, True)


def test_the_fused_kernel_is_emulated_only_where_it_must_be():
    assert f.fused_or_emulated("in_graph__fused", device=True) == "in_graph__fused"
    assert f.fused_or_emulated("in_graph__fused", device=False) == "in_graph__opaque_reference"
    both = f.fused_or_emulated("opaque_fused__fused", device=False)
    assert both == "opaque_reference__opaque_reference"
    assert f.fused_or_emulated("opaque_eager__in_graph", device=False) == "opaque_eager__in_graph"


# --- real processes' work, without a compiler: what is compared is the model's own code


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, JobResult]:
    folder = tmp_path_factory.mktemp("plan")
    plan = Plan(
        arms=["opaque_eager__opaque_eager", "opaque_eager__opaque_reference"],
        requests=["r01", "r03"],
        new_tokens=3,
        short=["r01"],
        short_tokens=2,
        rebuilds=1,
        unpinned=[],
        padded=False,
        faults=["dropped_mask"],
        common=dict(
            model="compact-random",
            layers=2,
            vocab=2048,
            backend="eager",
            max_tokens=160,
            cuda_graph=False,
        ),
    )
    results = {}

    def run(jobs):
        for job in jobs:
            torch._dynamo.reset()
            results[job.name] = run_job(job, folder / job.name)

    run(plan.first())
    tokens = f.tokens_of(results)
    run([*plan.forced(tokens, folder), *plan.alone(tokens)])
    results["failed"] = JobResult(job=f.jobs(["rebuild"])[0], folder=folder, error="it died")
    return results


@pytest.fixture(scope="module")
def compared(ran) -> dict[str, Compared]:
    return f.differing_by_arm(ran)


def test_records_are_counted_by_arm(compared):
    rows = f.table(compared).set_index("arm")
    assert list(rows.index) == [
        "control",
        "rebuild_1",
        "opaque_eager__opaque_eager",
        "opaque_eager__opaque_reference",
        "fault_dropped_mask",
        "failed",
    ]
    steps = 2 * 3 * 2  # requests, steps, layers
    assert rows.records_total.fillna(-1).tolist() == [steps, steps, steps, steps, 4, -1]
    equal = ["control", "rebuild_1", "opaque_eager__opaque_eager"]
    assert rows.loc[equal, ["records_differing", "logits_differing"]].eq(0).all(axis=None)
    reference = rows.loc["opaque_eager__opaque_reference"]
    assert 0 < reference.records_differing <= steps - 4  # at decode alone
    assert "decode step 1 of r0" in reference["first"]
    assert "V is equal" in reference["first"]
    assert rows.error["failed"] == "job rebuild has no 'records', only nothing: it died"
    assert v.floor(compared) == 0
    assert v.floor({"control": compared["control"]}) is None


def test_the_kernel_is_compared_with_the_fallback_after_the_same_prefill(ran):
    pairs = v.kernel_against_fallback(ran)
    assert list(pairs) == ["opaque_eager__opaque_eager / opaque_eager__opaque_reference"]
    found = f.compare(pairs)
    (one,) = found.values()
    assert one.of_graph("prefill").differing == 0
    assert one.of_graph("decode").differing == one.differing > 0
    decode = {name: c.of_graph("decode") for name, c in found.items()}
    verdict, why = v.kernel_cleared(decode, 0)
    assert verdict is Verdict.FAIL
    assert f"{one.differing} of 8 records differ (" in why
    assert v.kernel_cleared({}, 0)[0] is Verdict.NOT_RUN
    two = {
        f"{prefill}__opaque_eager / {prefill}__fused": c
        for prefill in "ab"
        for c in decode.values()
    }
    assert v.kernel_cleared(two, 0)[1] == why.replace("opaque_eager", "a, b")


def test_comparing_in_processes_gives_the_same(ran, compared):
    pairs = {
        n: (f.Recording(ran["baseline"]), f.Recording(ran[n])) for n in ("rebuild_1", "failed")
    }
    pairs |= v.kernel_against_fallback(ran)
    one, many = f.compare(pairs), f.compare(pairs, workers=2)
    assert list(one) == list(many)
    for name in one:
        pd.testing.assert_frame_equal(one[name].records, many[name].records)


def test_what_a_recording_changes(ran):
    verdict, why = v.passive(ran)
    assert verdict is Verdict.INCONCLUSIVE  # nothing is generated here
    assert "no generated code" in why
    graphs = {name: report(name) for name in ("prefill", "decode")}
    results = {n: r.model_copy(update={"graphs": graphs}) for n, r in ran.items()}
    verdict, why = v.passive(results)
    assert (verdict, "0 of 4,096 logits differ, recorded against unrecorded" in why) == (
        Verdict.PASS,
        True,
    )
    results["unrecorded"] = results["unrecorded"].model_copy(
        update={"graphs": graphs | {"decode": report("decode", source="other")}}
    )
    assert v.passive(results)[0] is Verdict.FAIL


def test_the_fallbacks_numerics_are_found(ran):
    found = v.fingerprints(ran)
    assert list(found) == list(v.SIDES)
    assert all(isinstance(one, Fingerprint) for one in found.values())
    # Uncompiled, the baseline is eager code too.
    assert {one.closest.rounding for one in found.values()} == {"per_op"}
    assert all(one.mismatches < 1e-4 * one.elements for one in found.values())
    alone = {name: ran[name] for name in ("baseline", "rebuild_1")}
    assert v.fingerprints(alone)["fallback"] == "no arm recorded the inputs of an opaque prefill"


def test_margins_are_the_baselines(compared):
    assert len(v.margins(compared)) == 6
    assert (v.margins(compared) >= 0).all()
    assert v.margins({}) is None


# --- what was compiled


def report(name: str, source: str = "x", block: int = 8, code: str | None = "a") -> GraphReport:
    return GraphReport(name, source, {"k1": {"R0": block, "num_warps": 2}}, {"k1": code})


def test_a_difference_of_code_is_named():
    one = {"prefill": report("prefill")}
    same = f.code_difference(one, one, "prefill")
    assert same.same
    assert str(same) == "prefill: source equal"
    again = {"prefill@2": report("prefill", block=16, code="b")}
    other = f.code_difference(one, again, "prefill", "@2")
    assert not other.same
    assert str(other) == (
        "prefill: source equal, 1 of 1 kernels configured differently (k1 R0 8 -> 16), "
        "machine code of 1 kernels differs"
    )
    assert other.brief == "prefill: source equal, 1 of 1 kernels configured differently"
    assert f.code_difference(one, again, "prefill") is None
    unknown = {"prefill": report("prefill", source="y", code=None)}
    assert str(f.code_difference(one, unknown, "prefill")) == "prefill: source different"


def test_a_kernels_name_is_shortened_to_what_tells_it_apart():
    assert f._short("triton_per_fused__to_copy_mean_pow_view_13") == "triton_per_..._13"
    assert f._short("cpp_fused_mean_0") == "cpp_fused_mean_0"


# --- what a pin costs


def timed(tmp_path, **times: float) -> JobResult:
    """A result in which each of these decode steps took so many us, give or take 1 %."""
    name = next(iter(times))
    spread = [1 + 0.01 * (i - 4) / 4 for i in range(9)]
    found = {
        one: summarize([us * s for s in spread], "x, arms interleaved") for one, us in times.items()
    }
    return JobResult(job=f.jobs(["baseline"], name=name)[0], folder=tmp_path, decode_times=found)


def test_a_pin_is_held_against_a_step_timed_in_the_same_way(tmp_path):
    one, other = f.PINNED
    results = {
        f.UNRECORDED: timed(tmp_path, unrecorded=100, again=101, without_sdpa=50),
        one: timed(tmp_path, pinned_1=200),
        other: timed(tmp_path, pinned_2=180),
        "without_workspace": timed(tmp_path, without_workspace=100),
        "baseline": timed(tmp_path, baseline=1),
    }
    found = {(one.pin, one.how): one for one in v.pin_costs(results)}
    assert list(found) == [
        ("none (A/A)", "in turn"),
        ("sdpa", "in turn"),
        ("none (A/A)", "own process"),
        ("workspace", "own process"),
    ]
    sdpa, workspace = found["sdpa", "in turn"], found["workspace", "own process"]
    assert (sdpa.value, workspace.value) == pytest.approx((100, 100))
    assert sdpa.low <= sdpa.value <= sdpa.high
    assert sdpa.floor == found["none (A/A)", "in turn"].floor == pytest.approx(100 / 101)
    assert sdpa.not_comparable is found[v.NO_PIN, "own process"].not_comparable is None
    assert (sdpa.method, workspace.method) == ("x, arms interleaved", "x, alone in its process")
    assert workspace.floor == pytest.approx(100 / 9, rel=0.2)
    assert "the A/A pair (own process) reaches 1" in workspace.not_comparable


def test_without_an_a_a_pair_a_cost_is_none(tmp_path):
    results = {f.UNRECORDED: timed(tmp_path, unrecorded=100, without_sdpa=50)}
    (sdpa,) = v.pin_costs(results)
    assert sdpa.not_comparable == "no A/A pair was timed (in turn)"
    results = {"without_workspace": timed(tmp_path, without_workspace=100)}
    assert v.pin_costs(results) == []


# --- what is concluded


def counted(differing: int, total: int = 8) -> Compared:
    """So many records differ, one of Q's elements each."""
    rows = [
        dict(
            request="r01",
            step=step,
            layer=0,
            tensor=tensor,
            elements=64,
            differs=(wrong := tensor == "q" and step < differing),
            mismatches=int(wrong),
            max_ulp=int(wrong),
            first_index=(0, 0, 3) if wrong else None,
            unrotated=0,
            pair_ulps=float(wrong),
            relative=0.0,
        )
        for step in range(total)
        for tensor in ("q", "k", "v")
    ]
    return Compared(pd.DataFrame(rows))


@pytest.mark.parametrize(
    ("differing", "least", "differs", "equal"),
    [
        (0, 0, Verdict.FAIL, Verdict.PASS),
        (3, 0, Verdict.PASS, Verdict.FAIL),
        (3, 3, Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE),
        (4, 3, Verdict.PASS, Verdict.FAIL),
        (0, 3, Verdict.FAIL, Verdict.PASS),
        (3, None, Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE),
    ],
)
def test_nothing_is_claimed_under_the_floor(differing, least, differs, equal):
    found = {"arm": counted(differing), "dead": Compared(error="it died")}
    assert v.differs("arm", found, least)[0] is differs
    assert v.equal("arm", found, least)[0] is equal
    assert v.equal("dead", found, least) == (Verdict.INCONCLUSIVE, "dead: it died")
    assert v.equal("other", found, least) == (Verdict.NOT_RUN, "other was not run")


CASTS = v.Suspect("cast_positions", (("a", "b"), ("a", "c")), "how")


@pytest.mark.parametrize(
    ("b", "c", "answer"),
    [
        (counted(0), counted(5), "moves bits"),
        (counted(0), counted(2), "not above the floor"),
        (counted(0), counted(0), "moves no bit"),
        (Compared(error="it died"), counted(0), "moves no bit"),
        (Compared(error="it died"), Compared(error="this too"), "not run"),
    ],
)
def test_a_suspect_is_judged_by_its_strongest_pair(b, c, answer):
    judged = v.judge(CASTS, {"a / b": b, "a / c": c}, floor=2)
    assert judged.answer == answer
    for other, one in (("b", b), ("c", c)):
        assert (one.error or f"{other} against a: {one}") in judged.why
        assert f"{other}: {one}" in judged.brief
    assert v.judge(CASTS, {}, floor=2).answer == "not run"


def test_suspects_are_the_articles_five_and_three_more():
    causes = [one.cause for one in v.suspects([2], [2])]
    assert len(causes) == 5 + 3
    assert next(s for s in v.suspects() if s.cause == "first_traced").between == ()
    emulated = {s.cause: s for s in v.suspects(kernel=False)}
    assert emulated["materialized_intermediates"].between == ()
    boundary = emulated["fusion_boundary"]
    half = "opaque_compiled__in_graph"
    assert v.stands_in(boundary, ["baseline", half]).between == (("baseline", half),)
    assert v.stands_in(boundary, ["baseline", half, v.COMPILED]) == boundary
    assert v.compiled_arm(["baseline", half]) == half


def test_numerics_explain_the_drift_from_both_ends():
    name = v.pair_name(f.FALLBACK_ONLY, "emulated_fallback")
    both = {"calibrated": counted(0)}, {name: counted(0)}
    assert v.explained(*both, 0)[0] is Verdict.PASS
    assert v.explained({"calibrated": counted(0)}, {}, 0)[0] is Verdict.PASS_WITH_LIMITATIONS
    assert v.explained({"calibrated": counted(1)}, both[1], 0)[0] is Verdict.FAIL
    assert v.explained({"calibrated": counted(1)}, both[1], 1)[0] is Verdict.INCONCLUSIVE
    assert v.explained({}, {}, 0)[0] is Verdict.NOT_RUN


def test_the_finding_says_what_the_figures_do():
    compared = {f.FALLBACK_ONLY: counted(5), "opaque_eager__in_graph": counted(5)}
    compared |= {"in_graph__opaque_eager": counted(4), "in_graph__fused": counted(0)}
    name = v.pair_name("in_graph__opaque_eager", "in_graph__fused")
    judged = [v.judge(CASTS, {"a / b": counted(5), "a / c": counted(0)}, 0)]
    tokens = pd.DataFrame({"arm": ["x", "x"], "coin_toss": [True, False]})
    said = v.finding("h200", 0, compared, {name: counted(3)}, {}, judged, tokens)
    text = " ".join(said)
    for part in (
        "On h200 the baseline is a fixed point",
        "5 of 8 records differ (0.0033 of all elements): the kernel is not needed for the drift",
        "at prefill 5 of 8 records differ (0.0033 of all elements), at decode 4 of 8",
        "Forcing it at T = 1 too moves what it was meant to clear.",
        "The kernel and the fallback do not give the same decode steps (after prefill in_graph: 2 of 7 "
        "records differ",
        "after the baseline's prefill: the fallback: 3 of 7 records differ (",
        ", the kernel: 0 of 7 records differ.",
        "Moves bits here: cast positions.",
        "2 most likely tokens changed over all arms; 1 of them are coin tosses, of a margin at most 4 "
        "times the noise",
    ):
        assert part in text
    alike = " ".join(v.finding("h200", 0, compared, {name: counted(0)}, {}, [], tokens.iloc[:0]))
    assert (
        "The kernel and the fallback give the same decode steps (after prefill in_graph: " in alike
    )
    assert "numerics of its own" not in alike
    said = v.finding("cpu", 7, {}, {}, {}, [], tokens.iloc[:0])
    assert len(said) == 1
    assert "differs in up to 7 records" in said[0]
