"""The summary: what counts, what is only shown, and why the rest did not run."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from result_cases import NAMES, machine, place

from fusion_evidence.lib import paths
from fusion_evidence.lib.measure import machine as machine_module
from fusion_evidence.lib.measure.compare import upper_bound
from fusion_evidence.lib.report import article, labels, plots_summary, summary
from fusion_evidence.lib.report.evidence import Measurement, Verdict, evidence_path, read_evidence

FIRST, SECOND, FOURTH, SIXTH = NAMES[0], NAMES[1], NAMES[3], NAMES[5]


@pytest.fixture
def collection(tmp_path, monkeypatch, write_notebook):
    """An empty collection on a CPU: six tiny notebooks and no results."""
    monkeypatch.delenv("FUSION_EVIDENCE_RUN_DIR", raising=False)
    monkeypatch.setattr(machine_module, "detect", lambda: machine("cpu"))
    for name, folder in (("NOTEBOOKS", "notebooks"), ("RUNS", "runs"), ("ACCEPTED", "accepted")):
        monkeypatch.setattr(paths, name, tmp_path / folder)
    for name in NAMES:
        write_notebook(paths.NOTEBOOKS / f"{name}.ipynb", "pass", parameters="n: int = 1")
    return tmp_path


def by_name(found):
    return {result.notebook: result for result in found}


# --- results


def test_nothing_at_all_is_no_error(collection):
    assert summary.machines() == []
    assert summary.machines(["gfx936"]) == ["gfx936"]
    found = summary.results("gfx936")
    assert [(r.notebook, r.state) for r in found] == [(name, "missing") for name in NAMES]
    assert all(fact.verdict == "NOT_RUN" and fact.why for fact in summary.facts(found))
    missing = summary.not_run(found)
    assert list(missing.claim) == ["the whole notebook"] * 6
    assert set(missing.why) == {"no result on gfx936"}
    assert summary.all_there(found)[0] is Verdict.NOT_RUN
    assert summary.all_fresh(found)[0] is Verdict.NOT_RUN


def test_machines_are_the_accepted_ones_and_this_one(collection):
    place(FIRST, "h200")
    (paths.ACCEPTED / "archive" / "x").mkdir(parents=True)
    (paths.ACCEPTED / "archive" / "archive.json").write_text("{}")  # no result of a notebook
    assert summary.machines() == ["h200"]
    place(FIRST, "cpu", folder=paths.RUNS / "cpu")
    assert summary.machines() == ["cpu", "h200"]


def spoil(folder, how):
    path = evidence_path(folder, FIRST)
    if how == "garbage":
        path.write_text('{"schema_version": 1, "noteb')
    elif how == "other notebook":
        place(SECOND, "h200", folder=folder).model_copy()
        evidence_path(folder, SECOND).rename(path)
    elif how == "other machine":
        place(FIRST, "a100", folder=folder)
    elif how == "not finished":
        place(FIRST, "h200", {"bits_compiled": "PASS"}, run="incomplete", reason="out of memory")
    elif how == "other source":
        place(FIRST, "h200", {"bits_compiled": "PASS"}, fingerprint="0" * 64)


@pytest.mark.parametrize(
    ("how", "state", "why"),
    [
        ("garbage", "unreadable", "not readable"),
        ("other notebook", "unreadable", "is of 02_trace_specialization on h200"),
        ("other machine", "unreadable", "on a100"),
        ("not finished", "incomplete", "out of memory"),
        ("other source", "stale", "has changed since"),
    ],
)
def test_what_does_not_count_is_named(collection, how, state, why):
    place(FIRST, "h200")
    spoil(paths.ACCEPTED / "h200", how)
    place(FOURTH, "h200", {"texts_unchanged": "PASS"})
    found = summary.results("h200")
    first = by_name(found)[FIRST]
    assert (first.state, first.counts) == (state, False)
    assert why in first.why
    table = summary.claims(found)
    assert summary.counts(table).loc["h200"].to_dict() == {
        "PASS": 1,
        "PASS_WITH_LIMITATIONS": 0,
        "FAIL": 0,
        "INCONCLUSIVE": 0,
        "NOT_RUN": 0,
    }
    assert list(summary.proved(table).claim) == ["texts_unchanged"]
    assert list(summary.not_counted(found).notebook) == [FIRST]
    verdict, said = summary.all_readable(found)
    assert (verdict is Verdict.FAIL) == (state == "unreadable")
    assert ("01_primitive_benchmark.json" in said) == (state == "unreadable")
    verdict, said = summary.all_fresh(found)
    assert (FIRST in said) == (state in ("stale", "incomplete"))
    assert summary.all_there(found)[0] is Verdict.INCONCLUSIVE


def test_a_fresh_result_is_preferred_wherever_it_lies(collection):
    place(FIRST, "cpu", {"bits_compiled": "PASS"})
    place(FIRST, "cpu", {"bits_compiled": "FAIL"}, folder=paths.RUNS / "cpu", fingerprint="0")
    assert by_name(summary.results("cpu"))[FIRST].evidence.tally() == "1 PASS"
    place(FIRST, "cpu", {"bits_compiled": "FAIL"}, folder=paths.RUNS / "cpu")
    assert by_name(summary.results("cpu"))[FIRST].evidence.tally() == "1 FAIL"
    (own,) = [r for r in summary.results("cpu", [paths.ACCEPTED / "cpu"]) if r.notebook == FIRST]
    assert own.evidence.tally() == "1 PASS"  # a card of accepted results sees no local run


def test_a_run_that_was_handed_in_keeps_its_machine_under_another_folder(collection):
    folder = paths.ACCEPTED / "somebody"
    place(FIRST, "gfx936", {"bits_compiled": "PASS"}, folder=folder)
    assert by_name(summary.results("somebody"))[FIRST].state == "unreadable"
    (folder / "archive.json").write_text(json.dumps({"machine": "gfx936"}))
    first = by_name(summary.results("somebody"))[FIRST]
    assert (first.state, first.handed_in) == ("fresh", True)


# --- lists


def test_machines_and_reasons_share_a_line(collection):
    place(FIRST, "cpu", {"bits_compiled": "PASS"}, whys={"bits_compiled": "0 of 10"})
    place(FIRST, "h200", {"bits_compiled": "PASS"}, whys={"bits_compiled": "0 of 99"})
    place(FOURTH, "h200", {"texts_unchanged/x": "FAIL", "times_repeat": "NOT_RUN"})
    found = [*summary.results("cpu"), *summary.results("h200")]
    table = summary.claims(found)
    (line,) = summary.proved(table).to_dict("records")
    assert (line["machines"], line["why"]) == ("cpu, h200", "cpu: 0 of 10; h200: 0 of 99")
    (line,) = summary.not_proved(table).to_dict("records")
    assert (line["claim"], line["arm"], line["verdict"]) == ("texts_unchanged", "x", "FAIL")
    rest = summary.not_run(found)
    assert "times_repeat" in set(rest.claim)
    assert list(rest.notebook) == sorted(rest.notebook)
    (both,) = rest[rest.notebook == NAMES[4]].to_dict("records")
    assert both["machines"] == "cpu, h200"


# --- claims about the collection

HOLDS = {
    FIRST: {"bits_compiled": "PASS", "faster_than_compiled": "PASS"},
    SECOND: {"branch_folded/guards_dropped": "PASS", "kernel_reached/guards_dropped": "FAIL"},
    FOURTH: {"texts_unchanged/control": "PASS", "texts_unchanged/own": "FAIL"},
}
ARM = [
    Measurement(metric="texts_changed", labels={"arm": arm}, value=0) for arm in ("control", "own")
]


def article_reproduced(changes, *, without=(), stale=()):
    for notebook, verdicts in HOLDS.items():
        if notebook not in without:
            own = {name: changes.get(name, verdict) for name, verdict in verdicts.items()}
            fields = {"fingerprint": "0"} if notebook in stale else {}
            place(notebook, "h200", own, ARM if notebook == FOURTH else None, **fields)
    return summary.together(summary.results("h200"), summary.ARTICLE)


@pytest.mark.parametrize(
    ("changes", "missing", "stale", "verdict", "said"),
    [
        ({}, (), (), "PASS_WITH_LIMITATIONS", "[own] FAIL (the article does not say whether"),
        (
            {"bits_compiled": "PASS_WITH_LIMITATIONS"},
            (),
            (),
            "PASS_WITH_LIMITATIONS",
            "LIMITATIONS",
        ),
        ({"texts_unchanged/own": "PASS"}, (), (), "FAIL", "[own] PASS"),
        ({"branch_folded/guards_dropped": "FAIL"}, (FIRST,), (), "FAIL", "branch_folded"),
        ({}, (FIRST,), (FOURTH,), "NOT_RUN", "01 is missing"),
        ({"faster_than_compiled": "NOT_RUN"}, (), (), "NOT_RUN", "as measured"),
        ({}, (), (FOURTH,), "INCONCLUSIVE", "04 is stale"),
        ({"bits_compiled": "INCONCLUSIVE"}, (), (), "INCONCLUSIVE", "bits_compiled"),
    ],
)
def test_a_claim_of_the_whole_rests_on_all_its_parts(
    collection, changes, missing, stale, verdict, said
):
    found, why = article_reproduced(changes, without=missing, stale=stale)
    assert found.value == verdict
    assert said in why


def test_a_summary_knows_when_a_result_has_changed_since(collection):
    place(FIRST, "h200")
    place(FOURTH, "h200")
    found = summary.results("h200")
    read = [
        Measurement(
            metric="result",
            labels={"notebook": r.notebook, "machine": r.machine},
            value=r.evidence.run_id,
        )
        for r in found
    ]
    own = read_evidence(evidence_path(paths.ACCEPTED / "h200", FIRST))
    own.measurements = read
    assert summary.outdated(own, found) == []
    place(FOURTH, "h200", run_id="another")
    place(SIXTH, "h200")
    changed = summary.outdated(own, summary.results("h200"))
    assert changed == ["04_text_regression on h200", "06_bit_exact_integration on h200"]


# --- figures


def fact(key, *measured, notebook=FOURTH, verdicts=None, **fields):
    place(notebook, "h200", verdicts, list(measured), **fields)
    return next(f for f in summary.facts(summary.results("h200")) if f.key == key)


def test_both_figures_are_given_in_one_unit(collection):
    labels_ = {"arm": "own", "run": "free", "stat": "p99", "part": "all"}
    ttft = Measurement(metric="ttft", labels=labels_, value=781.0, unit="ms", low=500.0, high=800.0)
    found = fact("ttft_candidate", *ARM, ttft)
    assert (found.value, found.low, found.high) == pytest.approx((0.781, 0.5, 0.8))
    assert (found.unit, found.published, found.published_label) == ("s", 76, "published, gfx936")
    found = fact("saving_token", notebook=FIRST)
    assert found.published == pytest.approx(719.0)  # us, stated as 0.719 ms
    assert (found.value, found.verdict) == (None, "NOT_RUN")


def test_a_sum_counts_each_output_once_and_only_what_is_computed(collection):
    rows = [("q", 1, 100), ("k", 2, 20), ("v", 4, 1000), ("all", 7, 120)]
    rows = [
        Measurement(
            metric="mismatch", labels={"oracle": "compiled", "T": 1, "output": out}, value=v, n=n
        )
        for out, v, n in rows
    ]
    rows.append(rows[0].model_copy(update={"labels": {**rows[0].labels, "rounding": "per_op"}}))
    found = fact("mismatch_compiled", *rows, notebook=FIRST)
    assert (found.value, found.n, found.zero_bound) == (7, 120, None)
    found = fact(
        "mismatch_compiled", *(m.model_copy(update={"value": 0}) for m in rows), notebook=FIRST
    )
    assert found.zero_bound == upper_bound(120)


def test_a_path_that_no_arm_takes_is_not_a_zero(collection):
    count = {"where": "device", "path": "decode", "arm": "own"}
    ran = Measurement(metric="marker", labels=count, value=0)
    expected = {"path": "decode", "arm": "own"}
    none = Measurement(metric="marker_expected", labels=expected, value=0)
    why = {"candidate_ran": "the fused kernel needs a device"}
    found = fact("marker_served", *ARM, ran, none, verdicts={"candidate_ran": "NOT_RUN"}, whys=why)
    assert (found.value, found.why) == (None, "the fused kernel needs a device")
    six = none.model_copy(update={"value": 6})
    found = fact("marker_served", *ARM, ran, six)
    assert (found.value, found.n, found.verdict) == (0, 6, "")


def test_not_comparable_is_kept_with_and_without_a_value(collection):
    labels_ = {"per": "token", "arm": "own"}
    gated = Measurement(metric="saving", labels=labels_, value=None, not_comparable="other texts")
    found = fact("saving_candidate", *ARM, gated)
    assert (found.value, found.verdict, found.why) == (None, "not_comparable", "other texts")


def test_figures_are_known_by_article_labels_and_claims():
    known = {spec.key for spec in summary.FIGURES}
    assert len(known) == len(summary.FIGURES)
    assert known == labels.FIGURES.keys()
    for spec in summary.FIGURES:
        assert spec.claim is None or spec.claim in labels.CLAIMS, spec.key
        if spec.published:
            assert article.label(spec.published) in ("published, gfx936", "not stated")
    for needed in (*summary.ARTICLE, *summary.DRIFT, *summary.BOTH):
        assert needed.claim in labels.CLAIMS


ACCEPTED = paths.ACCEPTED / "h200"


@pytest.mark.parametrize("notebook", sorted(path.stem for path in ACCEPTED.glob("0[1-7]_*.json")))
def test_every_figure_is_found_in_a_real_result(notebook):
    """The names here are those that the notebooks record; a renamed metric fails this.

    What did not run there has its claim's reason instead.
    """
    found = summary.results("h200", [ACCEPTED])
    own = [f for f in summary.facts(found) if f.notebook == notebook]
    assert own
    for one in own:
        assert not one.why.endswith("did not measure it"), one.key


# --- drawings


def matrix(**columns):
    rows = [
        {"claim": "bits_compiled", "arm": "", "machine": "cpu", "verdict": "NOT_RUN"},
        {"claim": "bits_compiled", "arm": "", "machine": "h200", "verdict": "PASS"},
        {"claim": "texts_unchanged", "arm": "own", "machine": "h200", "verdict": "FAIL"},
    ]
    return pd.DataFrame(rows).assign(**columns)


def test_every_verdict_has_a_sign_of_its_own_beside_its_colour():
    said = [text for _, text, _ in plots_summary.VERDICTS.values()]
    assert plots_summary.VERDICTS.keys() == {verdict.value for verdict in Verdict}
    assert len(set(said)) == len(said)
    (axes,) = plots_summary.verdicts(matrix()).axes
    assert [text.get_text() for text in axes.texts] == ["– not run", "✔ pass", "✘ fail"]
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "bits compiled",
        "texts unchanged [own]",
    ]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["cpu", "h200"]


def test_a_stale_verdict_says_so_and_is_hatched():
    (axes,) = plots_summary.verdicts(matrix(state="stale")).axes
    assert all(text.get_text().endswith(", stale") for text in axes.texts)
    assert all(patch.get_hatch() for patch in axes.patches)


def test_bars_have_the_length_of_their_figures_and_none_where_there_is_none():
    nan = float("nan")
    columns = ["figure", "source", "value", "low", "high", "text", "counts"]
    rows = [
        ["speedup", "published, gfx936", 2.98, nan, nan, "2.98×", True],
        ["speedup", "cpu", nan, nan, nan, "NOT_RUN: no device", True],
        ["speedup", "h200", 6.1, 6.0, 6.2, "6.1× [6.0, 6.2]", False],
    ]
    (axes,) = plots_summary.beside_published(pd.DataFrame(rows, columns=columns)).axes
    assert [bar.get_width() for bar in axes.patches] == [2.98, 6.1]
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [False, True]
    assert "NOT_RUN: no device" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("draw", [plots_summary.verdicts, plots_summary.beside_published])
def test_nothing_to_draw_is_an_error(draw):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(pd.DataFrame())
