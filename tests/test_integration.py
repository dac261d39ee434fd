"""Calibrated from records, refused where it does not hold, and equal to the baseline bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from forced_runs import forced, model
from safetensors.torch import load_file, save_file

from fusion_evidence.kernels import op
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.attribution import integration as i
from fusion_evidence.lib.attribution.calibrated import StaleCalibration
from fusion_evidence.lib.attribution.fingerprint import Fingerprint
from fusion_evidence.lib.measure.machine import detect
from fusion_evidence.lib.measure.timing import summarize
from fusion_evidence.lib.report.evidence import Evidence, Measurement
from fusion_evidence.lib.service.arms import Pins
from fusion_evidence.lib.service.jobs import JobResult, run_job

COMPACT = preset("compact")
KNOWN = Numerics("fp32_through", Reduction(16, 4, order="strided"), "cos")
PINS = Pins(first_traced=6)
REQUESTS = {"image": (300, True)}
SERVED = dict(lengths=[9, 4], new_tokens=4, layers=1, vocab=64, max_tokens=32, backend="eager")
CASE = i.Case("compact-random", PINS, SERVED, on_device=False, opaque="opaque_eager__opaque_eager")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Of one layer: inputs seen by the operator, and what known numerics made of them."""
    folder = tmp_path_factory.mktemp("records")
    operator = op.OpaquePrologue(op.Configuration(COMPACT, KNOWN, force_fallback=True))
    options = dict(dtype=torch.float16)
    opaque = model(1, KNOWN, operator, **options)
    given = forced(opaque, folder / "given", requests=REQUESTS, inputs=True)
    observed = forced(model(1, KNOWN, **options), folder / "observed", requests=REQUESTS)
    return given, observed


@pytest.fixture(scope="module")
def calibrated(records, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    return i.calibrate(*records, path, PINS)


def test_what_the_records_computed_is_found_and_written(calibrated):
    assert not calibrated.errors
    for graph, tokens in (("prefill", 300), ("decode", 3)):
        found = calibrated.found(graph)
        assert found.numerics.rounding == "fp32_through"
        assert KNOWN in (found.numerics, *(one.numerics for one in found.alike))
        assert found.elements <= tokens * (COMPACT.q_size + COMPACT.kv_size)
        verdict, why = calibrated.verdict(graph, 10**7)
        assert verdict == "PASS_WITH_LIMITATIONS"
        assert f"{graph} computes fp32_through" in why
    rejected = calibrated.found("prefill").rejected
    assert max(one.mismatches for one in rejected) >= i.ENOUGH


def fingerprint(graph, *fits, mismatches=0):
    return Fingerprint(graph, fits[0], "float16", mismatches, 9, 9, (0,), fits[1:], ())


def test_of_candidates_that_fit_the_one_another_graph_settles_is_taken():
    other, third = replace(KNOWN, contraction="none"), replace(KNOWN, contraction="sin")
    tied = fingerprint("prefill", other, third, KNOWN)
    prints = {"decode": fingerprint("decode", KNOWN), "prefill": tied}
    found = i.settled(prints)
    assert found["decode"] == prints["decode"]
    assert (found["prefill"].closest, found["prefill"].alike) == (KNOWN, (other, third))
    assert i.settling(found, "prefill") == "decode"
    assert i.calibration_of(found["prefill"]).numerics == KNOWN
    for decode in (
        fingerprint("decode", KNOWN, other),  # tied itself
        fingerprint("decode", KNOWN, mismatches=1),
        fingerprint("decode", replace(KNOWN, rounding="storage")),  # fits here only
    ):
        found = i.settled({"decode": decode, "prefill": tied})
        assert found == {"decode": decode, "prefill": tied}
        assert i.settling(found, "prefill") is None


def test_what_was_taken_of_several_is_said(records, tmp_path, monkeypatch):
    other = replace(KNOWN, contraction="none")

    def identify(captured, graph, *_, **__):
        return fingerprint(graph, *((other, KNOWN) if graph == "prefill" else (KNOWN,)))

    monkeypatch.setattr(i, "identify", identify)
    found = i.calibrate(*records, tmp_path / "calibration.json", PINS)
    assert found.found("prefill").numerics == KNOWN
    verdict, why = found.verdict("prefill", 1)
    assert verdict == "PASS_WITH_LIMITATIONS"
    assert f"taken: {KNOWN}, which decode computes and no other candidate" in why
    assert found.facts("prefill")["also_fit"] == str(other)
    assert found.facts("decode")["also_fit"] == "none"
    assert "taken" not in found.verdict("decode", 1)[1]


def test_at_start_up_the_sample_is_computed_again(calibrated):
    file, found = i.start_up(calibrated.path, COMPACT, PINS, i.GRAPHS)
    assert file == calibrated.file
    per_token = COMPACT.q_size + COMPACT.kv_size
    assert found["prefill"].elements == i.SAMPLE * per_token
    assert found["decode"].elements == 3 * per_token
    assert all(one.seconds < 2 for one in found.values())


@pytest.fixture
def copied(calibrated, tmp_path):
    """The file and its sample, to be spoiled."""
    path = tmp_path / "calibration.json"
    path.write_text(calibrated.path.read_text())
    sample = i.sample_path(path)
    sample.write_bytes(i.sample_path(calibrated.path).read_bytes())
    return path, sample


def test_a_calibration_of_something_else_is_refused(copied):
    path, sample = copied
    elsewhere = detect().model_copy(update={"name": "elsewhere"})
    with pytest.raises(StaleCalibration, match="machine was 'cpu', is 'elsewhere'"):
        i.start_up(path, COMPACT, PINS, machine=elsewhere)
    with pytest.raises(StaleCalibration, match=r"pins\.first_traced was 6, is 65"):
        i.start_up(path, COMPACT, Pins())
    with pytest.raises(StaleCalibration, match=r"shape\.eps"):
        i.start_up(path, replace(COMPACT, eps=1e-5), PINS)
    raw = json.loads(path.read_text())
    raw["versions"]["torch"] = "2.4.0"
    path.write_text(json.dumps(raw))
    with pytest.raises(StaleCalibration, match=r"versions.torch was '2.4.0', is .*calibrate again"):
        i.start_up(path, COMPACT, PINS)
    sample.unlink()
    path.unlink()
    with pytest.raises(StaleCalibration, match="calibrate first"):
        i.start_up(path, COMPACT, PINS)


def test_refusals_are_shown(calibrated):
    said = i.refusals(calibrated.path, PINS)
    assert len(said) == 6
    assert "versions.torch was 'elsewhere'" in said["another torch"]
    assert "no longer holds: 1 of" in said["one flipped bit"]
    assert all("calibrate again" in text for text in said.values())


@pytest.mark.parametrize("output", ["q", "k"])
@pytest.mark.parametrize("graph", i.GRAPHS)
def test_one_flipped_bit_is_noticed(copied, graph, output):
    path, sample = copied
    tensors = load_file(sample)
    tensors[f"{graph}/0/{output}"].view(torch.int16)[2, 1, 40] ^= 1
    save_file(tensors, sample)
    with pytest.raises(StaleCalibration, match=rf"{graph}, .*no longer holds: 1 of"):
        i.start_up(path, COMPACT, PINS, i.GRAPHS)


def test_without_a_sample_or_a_graph_it_is_refused(copied, calibrated):
    path, sample = copied
    tensors = {name: t for name, t in load_file(sample).items() if not name.startswith("decode")}
    save_file(tensors, sample)
    with pytest.raises(StaleCalibration, match="no sample of decode"):
        i.start_up(path, COMPACT, PINS)
    sample.unlink()
    with pytest.raises(StaleCalibration, match="there is no sample at"):
        i.start_up(path, COMPACT, PINS)
    only = {"prefill": calibrated.file.graphs["prefill"]}
    calibrated.file.model_copy(update={"graphs": only}).save(path)
    with pytest.raises(StaleCalibration, match="no calibration of decode"):
        i.start_up(path, COMPACT, PINS)


def test_a_candidate_is_in_the_arms_that_are_not_wrong_on_purpose(records, tmp_path):
    found = i.calibrate(*records, tmp_path / "calibration.json", PINS)
    case = replace(CASE, candidate="mine:kernel")
    jobs = {job.name.rpartition(".")[2]: job for job in case.integration(found, list(i.ARMS))}
    assert jobs["integrated"].arm == "in_graph__fused"
    assert {jobs[arm].candidate for arm in ("integrated", "opaque_fused__fused")} == {"mine:kernel"}
    for wrong in ("per_op", "other_tree"):
        assert (jobs[wrong].arm, jobs[wrong].candidate) == ("in_graph__opaque_reference", "")


def test_what_no_numerics_reproduce_is_left_out(records, tmp_path):
    given, observed = records
    tensors = load_file(observed)
    for name, tensor in tensors.items():
        if name.endswith("/q"):
            tensor.view(torch.int16)[..., ::97] ^= 1
    from safetensors import safe_open

    with safe_open(observed, framework="pt") as file:
        save_file(tensors, tmp_path / "moved", file.metadata())
    found = i.calibrate(given, tmp_path / "moved", tmp_path / "calibration.json", PINS)
    assert found.file.graphs == {}
    verdict, why = found.verdict("prefill", 1)
    assert verdict == "FAIL"
    assert "none of the declared numerics" in why
    assert (found.found("decode"), found.facts("prefill")) == (None, {})
    assert [job.arm for job in CASE.integration(found, list(i.ARMS))] == []
    unread = i.calibrate(observed, observed, tmp_path / "other.json", PINS)
    assert unread.verdict("decode", 1)[0] == "INCONCLUSIVE"
    assert "no inputs of decode" in unread.errors["decode"]


# --- in whole models, uncompiled: their numerics are eager's, which are the per_op ones


def done(job, folder) -> JobResult:
    torch._dynamo.reset()
    return run_job(job, folder / job.name)


@pytest.fixture(scope="module")
def integrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    results = {job.name: done(job, folder) for job in CASE.observation(rebuild=True)}
    path = folder / "calibration.json"
    found = CASE.calibrate(results, path)
    results |= {job.name: done(job, folder) for job in CASE.integration(found, ["integrated"])}
    elsewhere = dict(decode_numerics=str(replace(KNOWN, contraction="none")))
    wrong = CASE.job("per_op", "in_graph__opaque_reference", **elsewhere)
    results[wrong.name] = done(wrong, folder)
    return found, results


def test_the_calibrated_arm_is_the_baseline_bit_for_bit(integrated):
    found, results = integrated
    assert found.found("decode").numerics.rounding == "per_op"
    outcomes = i.outcomes(CASE, results, i.compare(CASE, results))
    assert list(outcomes) == ["control", "rebuild", "integrated", "per_op"]
    for arm in ("control", "rebuild", "integrated"):
        assert outcomes[arm].same, str(outcomes[arm])
    one = outcomes["integrated"]
    assert (one.records_total, one.texts_total, one.tokens_total) == (2 * 4, 2, 8)
    assert one.logits_total == 2 * 4 * 64
    assert i.exact(one, outcomes["rebuild"])[0] == "PASS"
    seen = outcomes["per_op"]
    assert not seen.same
    assert seen.records > 0
    assert "of layer 0 in" in seen.first
    assert "decode step 1" in seen.first
    assert i.exact(seen, outcomes["rebuild"])[0] == "FAIL"


def test_the_arm_took_its_numerics_from_the_file_it_checked(integrated):
    found, results = integrated
    result = results["compact-random.integrated"]
    assert result.job.decode_numerics == str(found.found("decode").numerics)
    assert result.revalidated.keys() == {"decode"}
    assert result.revalidated["decode"][0] > 0
    assert result.markers["device"] == result.expected
    assert result.expected["prefill"] > 0


def test_jobs_that_failed_calibrate_nothing(integrated, tmp_path):
    _, results = integrated
    lost = results["compact-random.captured"].model_copy(update={"error": "died", "files": {}})
    found = CASE.calibrate(results | {lost.job.name: lost}, tmp_path / "calibration.json")
    verdict, why = found.verdict("decode", 1)
    assert (verdict, found.found("decode")) == ("INCONCLUSIVE", None)
    assert "compact-random.captured has no 'records'" in why
    assert "died" in why


def test_the_baselines_source_is_kept_as_far_as_there_is_any(integrated, tmp_path):
    _, results = integrated
    CASE.keep_code(results, tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []
    baseline = results["compact-random.baseline"]
    (tmp_path / "code.py").write_text("kernels")
    compiled = baseline.model_copy(update={"folder": tmp_path, "files": {"code/decode": "code.py"}})
    CASE.keep_code({compiled.job.name: compiled}, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    assert (kept.name, kept.read_text()) == ("compact-random.decode.py", "kernels")


def test_the_floor_may_be_that_of_another_notebook():
    def measured(value, n):
        return Measurement(metric="records_differing", labels={"arm": "rebuild"}, value=value, n=n)

    five = Evidence(notebook="05", run="complete", measurements=[measured(0, 96)])
    assert i.floor_of(five) == i.Outcome("rebuild", records_total=96)
    assert i.floor_of(five).same
    assert not i.floor_of(five.model_copy(update={"measurements": [measured(28, 96)]})).same
    for other in (
        five.model_copy(update={"measurements": []}),
        Evidence(notebook="05", run="not_run"),
    ):
        assert "none of 05" in i.floor_of(other).error
        assert not i.floor_of(other).same


def test_an_arm_with_a_stale_calibration_does_not_start(integrated, tmp_path):
    found, _ = integrated
    (job,) = CASE.integration(found, ["integrated"])
    stale = job.model_copy(update={"pins": Pins(first_traced=7)})
    with pytest.raises(StaleCalibration, match=r"pins\.first_traced was 6, is 7"):
        done(stale, tmp_path)
    result = JobResult.load(tmp_path / job.name)
    assert result.error.startswith("start: StaleCalibration: the calibration is of something else")
    assert result.passes == []


def test_a_failed_arm_is_told_apart_from_one_that_differs(integrated):
    _, results = integrated
    failed = results["compact-random.integrated"].model_copy(update={"error": "died"})
    results = results | {"compact-random.integrated": failed}
    outcomes = i.outcomes(CASE, results, i.compare(CASE, results))
    assert outcomes["integrated"].error == "compact-random.integrated: died"
    assert i.exact(outcomes["integrated"], outcomes["rebuild"])[0] == "INCONCLUSIVE"
    assert outcomes["rebuild"].same


def test_bits_and_times_come_from_one_process(integrated, tmp_path):
    found, _ = integrated
    numerics = found.found("decode").numerics
    job = CASE.timed(numerics, samples=2, steps=1)
    assert [beside.name for beside in job.beside] == ["control", "integrated", "default"]
    assert job.beside[1].decode_numerics == str(numerics)
    assert job.beside[2].pins == Pins()
    # Without a device: the reference in the kernel's place.
    body = "in_graph__opaque_reference"
    there = [
        job.beside[0],
        job.beside[1].model_copy(update={"arm": body}),
        job.beside[2].model_copy(update={"arm": body, "decode_numerics": str(KNOWN)}),
    ]
    result = done(job.model_copy(update={"beside": there}), tmp_path)
    assert list(result.decode_times) == [job.name, "control", "integrated", "default"]
    outcomes = i.timed_outcomes(result)
    assert outcomes["control"].same
    assert outcomes["integrated"].same
    assert outcomes["integrated"].logits_total == 2 * 4 * 64
    assert outcomes["default"].logits > 0
    broken = i.timed_outcomes(result.model_copy(update={"error": "died"}))
    assert broken["integrated"].error == "died"
    assert not broken["integrated"].same


# --- verdicts and effects

FINE = i.Outcome("rebuild", 0, 8, 0, 64, 0, 2, 8)
FLOOR = replace(FINE, records=3, logits=9)


def test_the_prediction_stands_beside_notebook_01s():
    def alone(compiled, fused):
        return {"compiled": summarize([compiled], "given"), "fused": summarize([fused], "given")}

    def timed(value, **labels):
        labels = dict(T=1, shape="s", positions="3d", cache="hot") | labels
        return Measurement(metric="time", labels=labels, value=value)

    here = {"hot": alone(10.0, 1.5), "cold": alone(12.0, 2.0)}
    measured = [
        timed(11.5, impl="compiled"),
        timed(1.5, impl="fused"),
        timed(9.0, impl="fused", positions="1d"),
        timed(14.0, impl="compiled", cache="cold"),  # its kernel was not timed
    ]
    first = Evidence(notebook="01", run="complete", measurements=measured)
    table = i.predictions(here, first, "s", 16)
    assert table["saved a token, us"].to_dict() == {
        ("here, pinned", "hot"): 136.0,
        ("here, pinned", "cold"): 160.0,
        ("notebook 01", "hot"): 160.0,
    }
    none = Evidence(notebook="01", run="not_run")
    assert len(i.predictions(here, none, "s", 16)) == 2


def test_the_floor_is_named():
    control = replace(FINE, arm="control")
    assert i.exact(FINE, control)[1].endswith(
        "; control: 0 of 8 records, 0 of 64 logits, 0 of 2 texts differ"
    )


@pytest.mark.parametrize(
    ("outcome", "floor", "verdict"),
    [
        (FINE, FINE, "PASS"),
        (FINE, FLOOR, "INCONCLUSIVE"),
        (FINE, replace(FINE, error="died"), "INCONCLUSIVE"),
        (replace(FINE, error="died"), FINE, "INCONCLUSIVE"),
        (i.Outcome("empty"), FINE, "INCONCLUSIVE"),
        (replace(FINE, records=1), FINE, "FAIL"),
        (replace(FINE, texts=1), FINE, "FAIL"),
        (replace(FINE, records=3, logits=8), FLOOR, "INCONCLUSIVE"),
        (replace(FINE, records=4, logits=8), FLOOR, "FAIL"),
    ],
)
def test_no_bit_changed_is_claimed_above_a_floor_of_zero_alone(outcome, floor, verdict):
    assert i.exact(outcome, floor)[0] == verdict


def timing(*samples):
    return summarize(samples, "made up")


def test_a_saving_has_the_interval_of_its_rounds():
    slow = timing(*(100.0 + drift for drift in range(30)))
    fast = timing(*(88.0 + drift for drift in range(30)))
    effect = i.saved(slow, fast)
    assert effect.value == 12
    # What slowed a round slowed both: only the difference counts.
    assert 10 < effect.low <= 12 <= effect.high < 14
    assert (effect * 16).value == 12 * 16
    with pytest.raises(ValueError, match="not taken in turn: 30 and 2"):
        i.saved(slow, timing(1.0, 2.0))


@pytest.mark.parametrize(
    ("realised", "verdict"),
    [
        ((100, 98, 102), "PASS"),
        ((113, 108, 118), "PASS_WITH_LIMITATIONS"),
        ((120, 114, 126), "INCONCLUSIVE"),
        ((130, 125, 135), "FAIL"),
        ((80, 75, 85), "FAIL"),
    ],
)
def test_realised_against_predicted(realised, verdict):
    ratio = i.over(i.Effect(*realised), i.Effect(100, 99, 101))
    assert ratio.value == realised[0] / 100
    assert ratio.low < realised[1] / 100
    assert i.as_predicted(ratio) == verdict


def test_nothing_predicted_is_no_scale():
    ratio = i.over(i.Effect(5, 4, 6), i.Effect(1, -1, 3))
    assert i.as_predicted(ratio) == "INCONCLUSIVE"


def test_arms_whose_numerics_are_wrong_on_purpose():
    assert i.per_op(KNOWN).rounding == "per_op"
    assert i.as_table({"rebuild": FINE}).loc["rebuild", "records"] == "0 of 8"
    for tree in (Reduction(32, 2), Reduction(16, 4)):
        changed = i.other_tree(Numerics("storage", tree, "sin", Reduction(16, 2, 2)))
        assert (changed.rounding, changed.contraction) == ("storage", "sin")
        assert tree not in changed.reductions


def test_tokens_to_feed_are_the_same_for_every_arm():
    tokens = i.random_tokens(dict(lengths=[3, 5], new_tokens=4), 64, 0)
    assert tokens == i.random_tokens(dict(lengths=[3, 5], new_tokens=4), 64, 0)
    assert tokens.keys() == {"T3", "T5"}
    assert all(len(row) == 4 and max(row) < 64 for row in tokens.values())
    few = dict(lengths=[3, 5], new_tokens=4, request_ids=["T5"])
    assert i.random_tokens(few, 64, 0) == {"T5": tokens["T5"]}


def test_calibration_on_other_requests_has_a_baseline_of_its_own(tmp_path):
    few = SERVED | {"request_ids": ["T9"]}
    part, other = (
        replace(CASE, calibrated_on=few),
        replace(CASE, calibrated_on=SERVED | {"lengths": [7]}),
    )
    assert [job.name.split(".")[1] for job in part.observation()] == ["baseline", "captured"]
    assert [list(job.forced) for job in part.observation()] == [["T9", "T4"], ["T9"]]
    jobs = {job.name.split(".")[1]: job for job in other.observation()}
    assert list(jobs) == ["baseline", "observed", "captured"]
    assert jobs["observed"].forced == jobs["captured"].forced
    results = {name: JobResult(job=job, folder=tmp_path) for name, job in jobs.items()}
    named = {one.job.name: one for one in results.values()}
    assert other.observed(named) == (results["captured"], results["observed"])
    assert part.observed(named) == (results["captured"], results["baseline"])


def test_vocabularies_of_the_models():
    assert i.Case("compact", PINS, {}).vocabulary == 2048
    assert i.Case("article", PINS, {}).vocabulary == 4096
