"""Texts and times of arms: what counts as changed, what may be compared, what could have been seen."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fusion_evidence.lib.measure.timing import Timing
from fusion_evidence.lib.measure.timing import summarize as timing
from fusion_evidence.lib.report import article, load_evidence, plots
from fusion_evidence.lib.report.evidence import Claim, Evidence, Measurement, Verdict
from fusion_evidence.lib.service import jobs as j
from fusion_evidence.lib.service import regression as r
from fusion_evidence.lib.service.arms import Pins
from fusion_evidence.lib.service.metrics import Reply

FUSED = "opaque_eager__fused"
SMALL = dict(
    model="compact-random",
    layers=1,
    vocab=64,
    lengths=[9, 4],
    new_tokens=5,
    max_tokens=32,
    backend="eager",
    pins=Pins(first_traced=6),
    prefill_times=[5],
    prefill_samples=2,
)


def reply(name: str, *tokens: int, gap: float = 0.01, **other) -> Reply:
    times = [1.0 + gap * i for i in range(len(tokens))]
    return Reply(name, 7, list(tokens), token_times_s=times, prefill_s=1.0, **other)


# --- the runs


@pytest.mark.parametrize(
    ("candidate", "device", "runs"),
    [
        (FUSED, "cuda", FUSED),
        (FUSED, "cpu", "opaque_eager__in_graph"),
        ("opaque_fused__fused", "cpu", "opaque_reference__in_graph"),
        ("opaque_eager__opaque_compiled", "cpu", "opaque_eager__opaque_compiled"),
    ],
)
def test_what_runs_in_a_candidates_place(candidate, device, runs):
    assert r.stand_in(candidate, device) == runs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Real arms, uncompiled; the candidate's weights are multiplied by w in place of 1 + w."""
    made = r.arm_jobs("fallback_only", forced_passes=2, decode_samples=3, **SMALL)
    *others, candidate = made
    wrong = candidate.model_copy(update={"fault": "forgotten_one_plus_w"})
    folder = tmp_path_factory.mktemp("arms")
    return r.run_arms([*others, wrong], folder, parallel=2, report=lambda line: None)


def test_every_arm_is_free_first_and_then_fed_the_baselines_tokens(results):
    assert [result.error for result in results.values()] == ["", "", ""]
    arms = r.served(results)
    assert list(arms) == ["baseline", "control", "rebuild", "fallback_only"]
    own = {one.id: one.tokens for one in arms["baseline"].free}
    for name, arm in arms.items():
        assert [one.id for one in arm.free] == ["T9", "T4"], name
        assert [one.id for one in arm.forced] == ["T9", "T4"] * 2, name
        assert not arm.error
        if name != "fallback_only":
            assert {one.id: one.tokens for one in arm.forced} == own, name
    assert results["fallback_only"].job.forced == own
    baseline = results["baseline"]
    assert [one.kind for one in baseline.passes] == ["free"] * 2 + ["forced"] * 4
    assert arms["baseline"].free is baseline.passes[0].replies
    assert arms["control"].free is baseline.passes[1].replies
    dealt = [one.replies for one in baseline.passes if one.kind == "forced"]
    assert arms["control"].forced == dealt[1] + dealt[3]
    turns = ["baseline", "control", "fallback_only"]
    assert list(baseline.decode_times) == list(baseline.prefill_times) == turns
    assert not any(results[arm].prefill_times for arm in ("rebuild", "fallback_only"))


def test_only_the_faulty_arm_changes_texts(results):
    arms = r.served(results)
    changes = {name: r.text_changes(arms["baseline"].free, arm.free) for name, arm in arms.items()}
    assert r.noise_floor(changes, 2) == 0
    verdicts = {name: r.text_verdict(frame, 2)[0] for name, frame in changes.items()}
    assert verdicts.pop("fallback_only") is Verdict.FAIL
    assert set(verdicts.values()) == {Verdict.PASS}


def test_without_the_baselines_tokens_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(j.sys, "executable", "/bin/false")
    made = r.arm_jobs("fallback_only", forced_passes=1, decode_samples=0, **SMALL)
    results = r.run_arms(made, tmp_path, report=lambda line: None)
    assert [result.job.passes for result in results.values()][1:] == [["free"], ["free"]]
    arms = r.served(results)
    assert {arm.error for arm in arms.values()} == {"not started (status 1)"}
    changes = {name: r.text_changes(arms["baseline"].free, arm.free) for name, arm in arms.items()}
    assert r.noise_floor(changes, 2) is None
    for frame in changes.values():
        verdict, why = r.text_verdict(frame, 2)
        assert (verdict, why) == (Verdict.INCONCLUSIVE, "0 of 0 texts changed; 2 not completed")
    table = r.article_table(arms, dict.fromkeys(arms))
    assert set(table["rebuild"]) == {"NOT_RUN"}


# --- texts


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 2], 1),
        ([], [], None),
    ],
)
def test_first_changed_token(one, other, at):
    assert r.first_changed(one, other) == at


def test_changes_of_what_both_completed():
    ours = [reply("a", 1, 2, 3), reply("b", 4, 5), reply("c", 6), reply("d", 7)]
    theirs = [
        reply("b", 4, 5),
        reply("a", 1, 9, 3, 4),
        reply("c", 9, finish_reason="error", error="x"),
    ]
    frame = r.text_changes(ours, theirs)
    assert frame.request.tolist() == ["a", "b"]
    assert frame.changed.tolist() == [True, False]
    assert frame.first_changed.tolist()[0] == 1
    assert frame.first_changed.isna().tolist() == [False, True]
    assert frame[["tokens_baseline", "tokens"]].to_numpy().tolist() == [[3, 4], [2, 2]]
    assert r.text_changes([], theirs).empty


@pytest.mark.parametrize(
    ("changed", "wanted", "floor", "verdict"),
    [
        (0, 4, 0, "PASS"),
        (1, 4, 0, "FAIL"),
        (3, 4, 2, "FAIL"),
        (2, 4, 2, "INCONCLUSIVE"),
        (0, 4, 1, "INCONCLUSIVE"),
        (4, 4, None, "INCONCLUSIVE"),
        (1, 5, 0, "INCONCLUSIVE"),
    ],
)
def test_nothing_is_claimed_under_the_floor(changed, wanted, floor, verdict):
    ours = [reply(str(i), 1, 2) for i in range(4)]
    theirs = [reply(str(i), 1, 2 + (i < changed)) for i in range(4)]
    found, why = r.text_verdict(r.text_changes(ours, theirs), wanted, floor)
    assert found.value == verdict
    assert f"{changed} of 4 texts changed" in why


def test_the_floor_is_the_worse_of_the_two_unchanged_arms():
    ours = [reply(str(i), 1, 2) for i in range(3)]
    changed = {n: [reply(str(i), 1, 2 + (i < n)) for i in range(3)] for n in range(4)}
    frames = {n: r.text_changes(ours, one) for n, one in changed.items()}
    both = {"control": frames[1], "rebuild": frames[2], "other": frames[3]}
    assert r.noise_floor(both, 3) == 2
    assert r.noise_floor({"control": frames[0]}, 3) is None


def test_excerpt_is_what_both_say_and_how_each_goes_on():
    words = "zero one two three four five six".split()
    one, other = reply("a", 0, 1, 2, 3, 4), reply("a", 0, 1, 2, 5)

    def decode(ids):
        return " ".join(words[i] for i in ids)

    assert r.excerpt(one, other, decode, before=2, after=2) == ("one two", "three four", "five")
    with pytest.raises(ValueError, match="a: the tokens are the same"):
        r.excerpt(one, one, decode)


# --- times


def streams(scale: float = 1.0, noise: float = 0.01, seed: int = 0) -> list[Reply]:
    """Ten requests whose gaps differ by ten percent, each arm with its own noise."""
    gaps = 0.01 * (1 + 0.1 * np.random.default_rng(1).standard_normal(10))
    jitter = 1 + noise * np.random.default_rng(seed).standard_normal(10)
    return [reply(str(i), *range(50), gap=g * scale) for i, g in enumerate(gaps * jitter)]


def test_a_change_is_seen_when_it_is_larger_than_what_can_be_resolved():
    same, slower = (
        r.tpot_change(streams(seed=2), streams(scale, seed=3), "mean") for scale in (1.0, 1.05)
    )
    assert (same.n, same.resolved, slower.resolved) == (10, False, True)
    assert slower.low < slower.percent < slower.high
    assert slower.percent == pytest.approx(5, abs=1.5)
    assert 0.2 < same.detectable < 3
    value, low, high = slower.saved_us(tpot_ms=10.0)
    assert value == pytest.approx(-100 * slower.percent)
    assert low < value < high < 0, "slower: nothing is saved"
    assert r.tpot_change(streams()[:2], streams()[:2], "mean") is None


def test_saved_in_turn_has_the_sign_of_a_saving():
    rounds = np.random.default_rng(0).normal(0, 1, 31)
    times = {name: timing(us + rounds, "test") for name, us in (("baseline", 100), ("fused", 90))}
    value, low, high = r.saved_us(times, "fused")
    assert low < value < high
    assert value == pytest.approx(10, abs=0.5)
    assert r.saved_us(times, "baseline") == pytest.approx((0, 0, 0))


def primitive(shapes: dict[str, tuple[float, float]], verdict: Verdict = Verdict.PASS) -> Evidence:
    rows = [
        Measurement(
            metric="time",
            labels=dict(impl=impl, T=1, cache="cold", shape=shape, positions="3d"),
            value=value,
            low=value - 0.5,
            high=value + 0.5,
        )
        for shape, pair in shapes.items()
        for impl, value in zip(("compiled", "fused"), pair, strict=True)
    ]
    claim = Claim(claim="bits_compiled", rule="", verdict=verdict, why="because")
    return Evidence(
        notebook="01",
        run="complete",
        parameters={"shape_name": "large"},
        measurements=rows,
        claims=[claim],
    )


def test_prediction_is_of_this_shape_or_says_that_it_is_not():
    both = r.predicted_saving(primitive({"large": (12, 2), "small": (9, 3)}), "small", 4)
    assert (both.value, both.low, both.high, both.same_shape) == (24, 20, 28, True)
    other = r.predicted_saving(primitive({"large": (12, 2)}), "small", 4)
    assert (other.value, other.same_shape) == (40, False)
    assert "another shape, small was not timed there" in other.why


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (Evidence(notebook="01", run="not_run", reason="no result"), "notebook 01: no result"),
        (primitive({"large": (12, 2)}, Verdict.FAIL), "bits_compiled is FAIL: because"),
        (primitive({}), "no cold times at T = 1 of small or large"),
    ],
)
def test_no_prediction_without_an_exact_kernel_and_its_times(evidence, why):
    found = r.predicted_saving(evidence, "small", 4)
    assert not found.known
    assert why in found.why


def test_no_prediction_of_another_kernel():
    found = r.predicted_saving(primitive({"small": (9, 3)}), "small", 4, "mine:kernel")
    assert found.why == "notebook 01 is of the project's kernel, not of mine:kernel"
    own = primitive({"small": (9, 3)})
    own.parameters["candidate"] = "mine:kernel"
    assert r.predicted_saving(own, "small", 4, "mine:kernel").value == 24
    assert not r.predicted_saving(own, "small", 4).known


def test_prediction_from_the_accepted_result_is_its_own_saving():
    evidence = load_evidence("01_primitive_benchmark", "h200")
    (saving,) = evidence.select("saving", per="layer", T=1)
    found = r.predicted_saving(evidence, str(evidence.parameters["shape_name"]), 1)
    assert (found.value, found.low, found.high) == (saving.value, saving.low, saving.high)


def test_every_effect_has_the_floor_of_its_kind():
    changes = {
        arm: r.tpot_change(streams(seed=2), streams(scale, seed=4), "mean")
        for arm, scale in (("control", 1.0), ("rebuild", 1.0), (FUSED, 0.97))
    }
    turns = {"control": (0.1, -0.2, 0.3), FUSED: (30.0, 28.0, 32.0)}
    frame = r.effects(r.Prediction(40, 38, 42), turns, changes, 10.0)
    assert frame.how.tolist() == ["predicted", *["in turn"] * 2, *["served"] * 3]
    assert frame.effect[0] == "01 predicts,\nother shape"
    assert (frame.low <= frame.value).all()
    assert (frame.value <= frame.high).all()
    floors = frame.groupby("how", sort=False).floor.unique()
    assert math.isnan(floors["predicted"].item())
    assert floors["in turn"].item() == 0.3
    ends = [abs(x) for arm in ("control", "rebuild") for x in changes[arm].saved_us(10.0)]
    assert floors["served"].item() == max(*ends, 100 * changes["control"].detectable)
    assert "candidate,\nserved" in frame.effect.tolist()
    plots.effects(frame)
    assert r.effects(r.Prediction(), {}, {}, 0.0).empty
    alone = r.effects(r.Prediction(40, 38, 42), {}, {}, 10.0)
    assert alone.floor.isna().all()


# --- prefill


def prefill(**by_T: float) -> dict[int, Timing]:
    """By T, times within 1 % of so many us."""
    return {
        int(T.lstrip("T")): timing([us * (1 + 0.01 * i / 4) for i in range(-4, 5)], "by hand")
        for T, us in by_T.items()
    }


@pytest.mark.parametrize(
    ("control", "arm", "verdict", "says"),
    [
        (dict(T65=101, T1024=99), dict(T65=90, T1024=98), Verdict.PASS, "T=65 0.900 (1.010)"),
        (dict(T65=101, T1024=99), dict(T65=90, T1024=130), Verdict.FAIL, "T=1024 1.300 (0.990)"),
        (  # what is slower at a T that decides nothing does not count, nor does what is not
            dict(T65=54, T1024=99),
            dict(T65=108, T1024=98),
            Verdict.PASS_WITH_LIMITATIONS,
            "T=65 1.080 (0.540, decides nothing), T=1024 0.980 (0.990)",
        ),
        (dict(T65=54, T1024=99), dict(T65=50, T1024=130), Verdict.FAIL, "decides nothing), T=1024"),
        (dict(T65=54, T1024=120), dict(T65=90, T1024=90), Verdict.INCONCLUSIVE, "0.900 (1.200, d"),
        (dict(T65=106, T1024=100), dict(T65=105, T1024=100), Verdict.PASS, "T=65 1.050 (1.060)"),
    ],
)
def test_prefill_is_judged_where_an_unchanged_arm_is_steady(control, arm, verdict, says):
    times = {"baseline": prefill(T65=100, T1024=100), "control": prefill(**control)}
    found, why = r.prefill_verdict(times | {FUSED: prefill(**arm)}, FUSED)
    assert (found, says in why) == (verdict, True), why


# --- the article's table


def test_the_articles_table_invents_nothing_and_marks_times_of_other_texts():
    arms = {
        "baseline": r.Served(free=[reply(str(i), 1, 2, 3) for i in range(4)]),
        FUSED: r.Served(free=[reply(str(i), 1, 2, 9, 9) for i in range(4)]),
        "rebuild": r.Served(error="died"),
    }
    table = r.article_table(arms, {"baseline": 0, FUSED: 4, "rebuild": None})
    published = table["published, candidate"]
    assert published["requests whose text changed"] == "3"
    assert published["tokens, first three"] == "602"
    assert published["p99 TTFT, s"] == "over 76"
    assert table["published, baseline"]["tokens, first three"] == "631"
    for row in ("mean TPOT, ms", "p99 TPOT, ms", "throughput, tokens/s", "completed / failed"):
        assert published[row] == article.NOT_STATED, row
    assert table[FUSED]["tokens, all requests"] == "16"
    assert table["baseline"]["mean TPOT, ms"] == "10.000"
    times = [row for row in table.index if "T" in row or "throughput" in row]
    assert len(times) == 4
    assert all(table[FUSED][row].endswith("(not comparable)") for row in times)
    assert not table["baseline"].str.contains("comparable").any()
    assert set(table["rebuild"]) == {"NOT_RUN"}


def test_the_articles_queue_is_long_enough_for_its_first_token():
    assert r.article_queue_s() == pytest.approx(84.0, abs=0.1)
    assert r.article_queue_s() > article.figure("p99_ttft_lower_bound")


def test_endpoint_figures_are_recorded_by_part(tmp_path, monkeypatch, write_notebook):
    from fusion_evidence.lib import paths
    from fusion_evidence.lib.report.recorder import Recorder

    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.setenv("FUSION_EVIDENCE_RUN_DIR", str(tmp_path / "out"))
    write_notebook(tmp_path / "04.ipynb", parameters="n: int = 1")
    book = Recorder.open("04", {"n": 1})
    replies = [reply(str(i), 1, 2, 3) for i in range(5)]
    r.record_endpoint(book, replies, arm="baseline", run="forced")
    r.record_endpoint(book, replies, arm=FUSED, run="free", not_comparable="5 of 5 texts changed")
    kept = dict(arm="baseline", run="forced", stat="mean")
    assert book.evidence.value("tpot", **kept) == pytest.approx(10)
    parts = {part: book.evidence.value("ttft", part=part, **kept) for part in r.TTFT_PARTS}
    assert parts == {"queue": 0, "first_call": 0, "prefill": 1000}
    assert book.evidence.value("ttft", part="all", **kept) == 1000
    marked = {m.not_comparable for m in book.evidence.select("tpot", arm=FUSED)}
    assert marked == {"5 of 5 texts changed"}
    assert len(book.evidence.select("tpot", arm=FUSED)) == 4
