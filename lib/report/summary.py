"""What all results together say: results by machine, claims, figures beside the published ones.

Everything here reads result files and changes none. A result that is missing, unreadable, incomplete
or stale is a state with its reason, never an error; only a complete and fresh one counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from fusion_evidence.lib import paths
from fusion_evidence.lib.measure import machine as machine_module
from fusion_evidence.lib.report import article
from fusion_evidence.lib.report.evidence import (
    Evidence,
    Measurement,
    Scalar,
    Verdict,
    evidence_path,
    is_fresh,
    read_evidence,
    results_folder,
)

State = Literal["fresh", "stale", "incomplete", "unreadable", "missing"]
Part = Literal["primitive", "integration"]
Section = Literal["performance", "correctness", "dispatch", "graph", "text", "endpoint"]

SUMMARY = "00_summary"
PARTS: dict[Part, tuple[Section, ...]] = {
    "primitive": ("performance", "correctness"),
    "integration": ("dispatch", "graph", "text", "endpoint"),
}
_NAME = re.compile(r"\d\d_\w+")


# --- results


@dataclass(frozen=True)
class Result:
    """One notebook on one machine."""

    notebook: str
    machine: str
    evidence: Evidence
    state: State
    why: str  #: why it does not count; empty for a fresh one
    path: Path  #: where it lies, or would
    handed_in: bool = False  #: verified, but not run by this project

    @property
    def counts(self) -> bool:
        """Complete, and made by the notebook and the code as they are now."""
        return self.state == "fresh"

    @property
    def link(self) -> str:
        """Its file, as seen from the repository."""
        inside = self.path.is_relative_to(paths.ROOT)
        return self.path.relative_to(paths.ROOT).as_posix() if inside else self.path.name


def machines(asked: Sequence[str] = ()) -> list[str]:
    """Machines that have results: the accepted ones, and this one if it is running or has run.

    ``asked`` limits them, and may name one that has none: its results are then ``missing``.
    """
    here = machine_module.detect().name
    where = {folder.name: folder for folder in paths.ACCEPTED.glob("*")}
    found = {name for name, folder in where.items() if _named(folder)}
    if _named(results_folder(here)):
        found.add(here)
    return list(dict.fromkeys(asked)) or sorted(found)


def folders(machine: str) -> list[Path]:
    """Where results of a machine are looked for, the first with a fresh one winning."""
    here = [results_folder(machine)] if machine == machine_module.detect().name else []
    return [*here, paths.ACCEPTED / machine]


def ladder(*where: Path) -> list[str]:
    """Names of the notebooks, without the summary: those in the collection and those with results."""
    return sorted(set().union(*map(_named, where), _named(paths.NOTEBOOKS, "ipynb")) - {SUMMARY})


def _named(folder: Path, suffix: str = "json") -> set[str]:
    """Notebook names among the files of a folder; other files, such as an archive's, are not."""
    return {f.stem for f in folder.glob(f"*.{suffix}") if _NAME.fullmatch(f.stem)}


def results(machine: str, where: Sequence[Path] | None = None) -> list[Result]:
    """Every notebook's result on a machine, in order; ``where``: its folders, else `folders`."""
    where = folders(machine) if where is None else where
    found = []
    for notebook in ladder(*where):
        each = [_read(notebook, machine, folder) for folder in where]
        order: tuple[State, ...] = ("fresh", "stale", "incomplete", "unreadable", "missing")
        found.append(min(each, key=lambda result: order.index(result.state)))
    return found


def _read(notebook: str, machine: str, folder: Path) -> Result:
    path = evidence_path(folder, notebook)
    evidence = read_evidence(path)
    record = _handed_in(folder)
    made_on = evidence.machine.name if evidence.machine else "no machine"
    state: State = "fresh"
    why = ""
    if not path.exists():
        state, why = "missing", f"no result on {machine}"
    elif evidence.run == "not_run":
        state, why = "unreadable", evidence.reason or "it holds no run"
    elif (evidence.notebook, made_on) != (notebook, record or machine):
        state, why = "unreadable", f"{path.name} is of {evidence.notebook} on {made_on}"
    elif evidence.run != "complete":
        state, why = "incomplete", evidence.reason or "it was not finished"
    elif not is_fresh(evidence):
        state, why = "stale", "the notebook or a module it imports has changed since"
    return Result(notebook, machine, evidence, state, why, path, record is not None)


def _handed_in(folder: Path) -> str | None:
    """The machine of a run that somebody handed in, whose folder may be called otherwise."""
    try:
        return str(json.loads((folder / "archive.json").read_text(encoding="utf-8"))["machine"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- claims


def claims(found: Iterable[Result]) -> pd.DataFrame:
    """One row per claim, arm and machine.

    Columns: notebook, claim, arm, machine, verdict, why, rule, state, counts, link. A result that is
    missing or unreadable has no claims, hence no rows.
    """
    rows = [
        {
            "notebook": result.notebook,
            "claim": claim.claim,
            "arm": claim.arm or "",
            "machine": result.machine,
            "verdict": claim.verdict.value,
            "why": claim.why,
            "rule": claim.rule,
            "state": result.state,
            "counts": result.counts,
            "link": result.link,
        }
        for result in found
        if result.state not in ("missing", "unreadable")
        for claim in result.evidence.claims
    ]
    names = "notebook claim arm machine verdict why rule state counts link".split()
    return pd.DataFrame(rows, columns=names)


def counts(table: pd.DataFrame, machines: Iterable[str] = ()) -> pd.DataFrame:
    """Claims that count, by machine (rows, also of ``machines``) and verdict (columns, all five)."""
    counted = table[table.counts.astype(bool)]
    crossed = pd.crosstab(counted.machine, counted.verdict)
    order = sorted({*machines, *table.machine})
    return crossed.reindex(index=order, columns=[v.value for v in Verdict], fill_value=0)


def proved(table: pd.DataFrame) -> pd.DataFrame:
    """Claims that hold, and on which machines; those with limitations say so."""
    return _merged(table[table.counts.astype(bool) & table.verdict.str.startswith("PASS")])


def not_proved(table: pd.DataFrame) -> pd.DataFrame:
    """Claims that were put to the test and do not hold, or could not be decided."""
    undecided = table.verdict.isin([Verdict.FAIL.value, Verdict.INCONCLUSIVE.value])
    return _merged(table[table.counts.astype(bool) & undecided])


def not_counted(found: Iterable[Result]) -> pd.DataFrame:
    """Results that exist and count for nothing: stale, incomplete or unreadable, with the reason."""
    rows = [
        [r.notebook, r.machine, r.state, r.why, r.evidence.tally()]
        for r in found
        if r.state in ("stale", "incomplete", "unreadable")
    ]
    return pd.DataFrame(rows, columns=["notebook", "machines", "state", "why", "claims"])


def not_run(found: Iterable[Result]) -> pd.DataFrame:
    """What did not run: whole notebooks, and claims of fresh results, with the reason."""
    found = list(found)
    whole = [
        {"notebook": r.notebook, "claim": "the whole notebook", "machine": r.machine, "why": r.why}
        for r in found
        if r.state == "missing"
    ]
    table = claims(found)
    asked = table[table.counts.astype(bool) & table.verdict.eq(Verdict.NOT_RUN.value)]
    rows = pd.concat([pd.DataFrame(whole).reindex(columns=table.columns, fill_value=""), asked])
    rows = rows.assign(verdict=Verdict.NOT_RUN.value)
    return _merged(rows)


def _merged(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per claim, arm and verdict, by notebook, with its machines and their reasons."""
    merged: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for row in rows.sort_values("notebook", kind="stable").itertuples():
        arm = str(row.arm)
        key = (str(row.notebook), str(row.claim), arm, str(row.verdict))
        line = merged.setdefault(key, {"machines": [], "why": {}})
        line["machines"].append(str(row.machine))
        line["why"].setdefault(str(row.why), str(row.machine))
    lines = [
        {
            "notebook": notebook,
            "claim": claim,
            "arm": arm,
            "verdict": verdict,
            "machines": ", ".join(line["machines"]),
            "why": _reasons(line["why"]),
        }
        for (notebook, claim, arm, verdict), line in merged.items()
    ]
    return pd.DataFrame(lines, columns="notebook claim arm verdict machines why".split())


def _reasons(by_machine: Mapping[str, str]) -> str:
    if len(by_machine) == 1:
        return next(iter(by_machine))
    return "; ".join(f"{machine}: {why}" for why, machine in by_machine.items())


# --- claims about the collection


@dataclass(frozen=True)
class Needed:
    """A claim that another one rests on, and whether it has to hold or to fail."""

    notebook: str
    claim: str
    arm: str | None = None  #: ``"candidate"``: the arm that stood for the article's
    holds: bool = True
    assumes: str = ""  #: what nobody measured; it limits the whole


ARTICLE = (
    Needed("01_primitive_benchmark", "bits_compiled"),
    Needed("01_primitive_benchmark", "faster_than_compiled"),
    Needed("02_trace_specialization", "branch_folded", "guards_dropped"),
    Needed("02_trace_specialization", "kernel_reached", "guards_dropped", holds=False),
    Needed("04_text_regression", "texts_unchanged", "control"),
    Needed(
        "04_text_regression",
        "texts_unchanged",
        "candidate",
        holds=False,
        assumes="the article does not say whether its service's fallback was eager",
    ),
)
DRIFT = tuple(
    Needed("05_drift_attribution", claim)
    for claim in ("fixed_point", "located", "numerics_explain_it", "faults_found")
)
BOTH = (
    Needed("06_bit_exact_integration", "integrated_exact", "article"),
    Needed("06_bit_exact_integration", "kernel_ran", "article"),
    Needed("06_bit_exact_integration", "same_run"),
    Needed("06_bit_exact_integration", "saving_as_predicted"),
    Needed("06_bit_exact_integration", "net_saving"),
)
SERVICE = (
    Needed("07_vllm_service", "fixed_point"),
    Needed("07_vllm_service", "integrated_exact", "integrated"),
    Needed("07_vllm_service", "marker_exact", "integrated"),
    Needed("07_vllm_service", "prefill_untouched", "integrated"),
    Needed("07_vllm_service", "test_can_see"),
    Needed("07_vllm_service", "integrated_exact", "article"),
    Needed("07_vllm_service", "marker_exact", "article_integrated"),
    Needed("07_vllm_service", "saving_as_predicted", "integrated"),
)


def together(found: Sequence[Result], needed: Sequence[Needed]) -> tuple[Verdict, str]:
    """Whether all of ``needed`` is as it has to be, on one machine.

    One that is otherwise decides (FAIL). Else what is missing makes it NOT_RUN, what is stale,
    incomplete or undecided INCONCLUSIVE, and a limitation of one is a limitation of all.
    """
    by_name = {result.notebook: result for result in found}
    parts = [_part(by_name.get(need.notebook), need) for need in needed]
    for verdict in (Verdict.FAIL, Verdict.NOT_RUN, Verdict.INCONCLUSIVE):
        those = list(dict.fromkeys(why for v, why in parts if v is verdict))
        if those:
            return verdict, "; ".join(those)
    limited = any(verdict is Verdict.PASS_WITH_LIMITATIONS for verdict, _ in parts)
    verdict = Verdict.PASS_WITH_LIMITATIONS if limited else Verdict.PASS
    return verdict, "; ".join(why for _, why in parts)


def _part(result: Result | None, need: Needed) -> tuple[Verdict, str]:
    number = need.notebook[:2]
    if result is None or not result.counts:
        state = result.state if result else "missing"
        missing = state in ("missing", "unreadable")
        verdict = Verdict.NOT_RUN if missing else Verdict.INCONCLUSIVE
        return verdict, f"{number} is {state}"
    arm = candidate(result.evidence) if need.arm == "candidate" else need.arm
    claim = result.evidence.claim(need.claim, arm)
    text = f"{number} {need.claim}{f' [{arm}]' if arm else ''} {claim.verdict.value}"
    if claim.verdict in (Verdict.NOT_RUN, Verdict.INCONCLUSIVE):
        return claim.verdict, f"{text}: {claim.why}"
    if claim.verdict.passed != need.holds:
        return Verdict.FAIL, f"{text}: {claim.why}"
    if need.assumes:
        return Verdict.PASS_WITH_LIMITATIONS, f"{text} ({need.assumes})"
    return claim.verdict if need.holds else Verdict.PASS, text


def candidate(evidence: Evidence) -> str | None:
    """The arm that stood for the article's in notebook 04: on a CPU another one than was asked for."""
    arms = [str(m.labels["arm"]) for m in evidence.select("texts_changed") if "arm" in m.labels]
    return next((arm for arm in arms if arm not in ("baseline", "control", "rebuild")), None)


def all_readable(found: Iterable[Result]) -> tuple[Verdict, str]:
    """PASS when no result file is damaged; else FAIL, naming each."""
    found = [result for result in found if result.state != "missing"]
    bad = [f"{result.link}: {result.why}" for result in found if result.state == "unreadable"]
    return (Verdict.FAIL, "; ".join(bad)) if bad else (Verdict.PASS, f"{len(found)} results")


def all_fresh(found: Iterable[Result]) -> tuple[Verdict, str]:
    """PASS when every result is complete and fresh; else FAIL, naming what has to run again."""
    found = [result for result in found if result.state not in ("missing", "unreadable")]
    bad = [f"{r.notebook} on {r.machine} is {r.state}" for r in found if not r.counts]
    if not found:
        return Verdict.NOT_RUN, "no results"
    return (Verdict.FAIL, "; ".join(bad)) if bad else (Verdict.PASS, f"{len(found)} results")


def all_there(found: Sequence[Result]) -> tuple[Verdict, str]:
    """PASS when every notebook of the collection has a result that counts, on one machine."""
    bad = [f"{result.notebook[:2]} {result.state}" for result in found if not result.counts]
    if not bad:
        return Verdict.PASS, f"{len(found)} notebooks"
    states = {result.state for result in found if not result.counts}
    verdict = Verdict.NOT_RUN if states == {"missing"} else Verdict.INCONCLUSIVE
    return verdict, ", ".join(bad)


def outdated(summary: Evidence, found: Iterable[Result]) -> list[str]:
    """Results that are no longer those which a summary read; its own hash does not see them.

    A summary records the run of every result (`result`); this compares them with what is there now.
    """
    read = {
        (str(m.labels.get("notebook")), str(m.labels.get("machine"))): m.value
        for m in summary.select("result")
    }
    now = {(r.notebook, r.machine): r.evidence.run_id for r in found if r.state != "missing"}
    changed = [key for key in dict.fromkeys([*read, *now]) if read.get(key) != now.get(key)]
    return sorted(f"{notebook} on {machine}" for notebook, machine in changed)


# --- figures


@dataclass(frozen=True)
class Spec:
    """A figure that is looked for in a result, and the published one that belongs beside it."""

    key: str
    section: Section
    notebook: str
    metric: str
    labels: Mapping[str, Scalar]
    unit: str  #: in which both are given; "" for counts and ratios
    published: str | None = None  #: name in article.json
    total: str | None = None  #: metric that holds the count which this one is out of
    claim: str | None = None  #: the claim that says why, when there is no value
    n_of: str | None = None  #: metric of the same notebook whose n is behind this one
    add: str | None = None  #: label over whose values the value and n are added up
    n_only: tuple[str, ...] = ()  #: of these, the values of ``add`` that count for n


@dataclass(frozen=True)
class Fact:
    """A figure as measured on one machine, beside the published one."""

    key: str
    part: Part
    section: Section
    machine: str
    notebook: str
    link: str
    state: State
    metric: str
    labels: dict[str, Scalar]
    unit: str
    value: Scalar = None
    n: int | None = None
    low: float | None = None
    high: float | None = None
    not_comparable: str | None = None
    why: str = ""  #: why there is no value
    published: Any = None  #: None: the article has no such figure; "not stated": it gives no number
    published_of: int | None = None
    published_label: str = ""

    @property
    def verdict(self) -> str:
        """What stands in the figure's place, or beside it; empty for one that speaks for itself."""
        if self.not_comparable:
            return "not_comparable"
        return Verdict.NOT_RUN.value if self.value is None else ""

    @property
    def counts(self) -> bool:
        """Whether the result it is from is complete and fresh."""
        return self.state == "fresh"

    @property
    def out_of(self) -> bool:
        """Whether the value is a count out of ``n``."""
        return self.metric in _COUNTED and self.n is not None

    @property
    def zero_bound(self) -> float | None:
        """Upper 95 % bound of the rate that a zero among ``n`` elements implies."""
        if self.metric != "mismatch" or self.value != 0 or not self.n:
            return None
        from fusion_evidence.lib.measure.compare import upper_bound  # loads torch

        return upper_bound(self.n)


#: Metrics whose values are counts out of their ``n``.
_COUNTED = ("mismatch", "marker", "records_differing", "texts_changed")
_T1: dict[str, Scalar] = dict(T=1, cache="cold", positions="3d", shape="{shape_name}")
_01, _02, _03, _04, _05, _06, _07 = (
    "01_primitive_benchmark",
    "02_trace_specialization",
    "03_custom_op_fallback",
    "04_text_regression",
    "05_drift_attribution",
    "06_bit_exact_integration",
    "07_vllm_service",
)
_CANDIDATE = "{candidate}"
_SIX: dict[str, Any] = dict(add="output", n_only=("q", "k"))

FIGURES = (
    Spec(
        "time_fused", "performance", _01, "time", {"impl": "fused", **_T1}, "us",
        published="primitive_time_candidate", claim="faster_than_compiled",
    ),
    Spec(
        "time_compiled", "performance", _01, "time", {"impl": "compiled", **_T1}, "us",
        published="primitive_time_baseline", claim="faster_than_compiled",
    ),
    Spec(
        "speedup", "performance", _01, "speedup", {"over": "compiled", "T": 1}, "x",
        published="primitive_speedup", claim="faster_than_compiled", n_of="time",
    ),
    Spec(
        "saving_layer", "performance", _01, "saving", {"per": "layer"}, "us",
        published="primitive_saving_per_layer", claim="faster_than_compiled", n_of="time",
    ),
    Spec(
        "saving_token", "performance", _01, "saving", {"per": "token"}, "us",
        published="primitive_saving_per_token", claim="faster_than_compiled", n_of="time",
    ),
    Spec(
        "mismatch_reference", "correctness", _01, "mismatch", {"oracle": "reference", "T": 1}, "",
        claim="bits_reference", **_SIX,
    ),
    Spec(
        "mismatch_compiled", "correctness", _01, "mismatch", {"oracle": "compiled", "T": 1}, "",
        published="primitive_mismatches", claim="bits_compiled", **_SIX,
    ),
    Spec(
        "marker_folded", "dispatch", _02, "marker", {"arm": "guards_dropped"}, "",
        published="decode_marker_hits_act_1", total="marker_expected", claim="kernel_reached",
    ),
    Spec(
        "marker_eager", "dispatch", _02, "marker", {"arm": "eager_same_module"}, "",
        total="marker_expected", claim="kernel_reached",
    ),
    Spec(
        "marker_replay", "dispatch", _03, "marker", {"where": "device", "path": "decode"}, "",
        total="marker_expected", claim="marker_exact",
    ),
    Spec(
        "marker_served", "dispatch", _04, "marker", {"path": "decode", "arm": _CANDIDATE}, "",
        total="marker_expected", claim="candidate_ran",
    ),
    Spec(
        "marker_integrated", "dispatch", _06, "marker",
        {"where": "device", "path": "decode", "model": "article"}, "",
        total="marker_expected", claim="kernel_ran",
    ),
    Spec(
        "fallback_mismatch", "graph", _03, "mismatch", {"oracle": "standalone", "part": "computed"},
        "", published="fallback_bit_exact_tokens", claim="fallback_bits", add="T",
    ),
    Spec(
        "rebuild_records", "graph", _05, "records_differing", {"arm": "rebuild"}, "",
        claim="fixed_point",
    ),
    Spec(
        "fallback_records", "graph", _05, "records_differing",
        {"arm": "opaque_eager__opaque_eager"}, "", claim="drift_without_the_kernel",
    ),
    Spec(
        "integrated_records", "graph", _06, "records_differing",
        {"arm": "integrated", "model": "article"}, "", claim="integrated_exact",
    ),
    Spec(
        "per_op_records", "graph", _06, "records_differing",
        {"arm": "per_op", "model": "article"}, "", claim="test_can_see",
    ),
    Spec(
        "texts_control", "text", _04, "texts_changed", {"arm": "control"}, "",
        claim="texts_unchanged",
    ),
    Spec(
        "texts_candidate", "text", _04, "texts_changed", {"arm": _CANDIDATE}, "",
        published="requests_text_changed", claim="texts_unchanged",
    ),
    Spec("tokens_baseline", "text", _04, "tokens", {"arm": "baseline"}, ""),
    Spec(
        "tokens_candidate", "text", _04, "tokens", {"arm": _CANDIDATE}, "",
        published="tokens_total_ten_requests",
    ),
    Spec(
        "texts_integrated", "text", _06, "texts_changed",
        {"arm": "integrated", "model": "compact"}, "", claim="integrated_exact",
    ),
    Spec(
        "tpot_candidate", "endpoint", _04, "tpot",
        {"arm": _CANDIDATE, "run": "free", "stat": "mean"}, "ms",
        published="fallback_only_mean_tpot",
    ),
    Spec(
        "tpot_change", "endpoint", _04, "tpot_change_percent",
        {"arm": _CANDIDATE, "passes": "all", "stat": "mean"}, "%",
    ),
    Spec(
        "ttft_candidate", "endpoint", _04, "ttft",
        {"arm": _CANDIDATE, "run": "free", "stat": "p99", "part": "all"}, "s",
        published="p99_ttft_lower_bound",
    ),
    Spec(
        "saving_candidate", "endpoint", _04, "saving", {"per": "token", "arm": _CANDIDATE}, "us",
        claim="saving_arrives",
    ),
    Spec(
        "saving_predicted", "endpoint", _06, "tpot_saving", {"kind": "predicted"}, "us",
        claim="saving_as_predicted",
    ),
    Spec(
        "saving_realised", "endpoint", _06, "tpot_saving", {"kind": "realised"}, "us",
        claim="saving_as_predicted",
    ),
    Spec("saving_net", "endpoint", _06, "tpot_saving", {"kind": "net"}, "us", claim="net_saving"),
    Spec(
        "service_records", "graph", _07, "records_differing", {"mode": "integrated"}, "",
        claim="integrated_exact",
    ),
    Spec(
        "service_texts", "text", _07, "texts_changed",
        {"mode": "integrated", "model": "compact"}, "", claim="integrated_exact",
    ),
    Spec(
        "service_marker", "dispatch", _07, "marker",
        {"mode": "integrated", "concurrency": 1, "model": "compact"}, "",
        total="marker_expected", claim="marker_exact",
    ),
    Spec(
        "service_saving_predicted", "endpoint", _07, "tpot_saving", {"kind": "predicted", "T": 1}, "us",
        claim="saving_as_predicted",
    ),
    Spec(
        "service_saving", "endpoint", _07, "tpot_saving",
        {"mode": "integrated", "concurrency": 1}, "us", claim="saving_as_predicted",
    ),
    Spec(
        "service_saving_net", "endpoint", _07, "tpot_saving",
        {"mode": "integrated, against absent", "concurrency": 1}, "us", claim="net_saving",
    ),
    Spec(
        "service_tpot", "endpoint", _07, "tpot",
        {"mode": "integrated", "concurrency": 1, "stat": "mean", "model": "compact"}, "ms",
    ),
    Spec(
        "service_ttft", "endpoint", _07, "ttft",
        {"mode": "integrated", "part": "all", "stat": "p99", "model": "compact"}, "s",
    ),
)  # fmt: skip

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_OUT_OF = {"requests_text_changed": "requests"}


def facts(found: Iterable[Result]) -> list[Fact]:
    """Every figure of `FIGURES` on one machine, by section; without a value where there is none."""
    by_name = {result.notebook: result for result in found}
    machine = next((result.machine for result in by_name.values()), "")
    order = [section for sections in PARTS.values() for section in sections]
    specs = sorted(FIGURES, key=lambda spec: order.index(spec.section))
    return [_fact(spec, by_name.get(spec.notebook), machine) for spec in specs]


def _fact(spec: Spec, result: Result | None, machine: str) -> Fact:
    part: Part = "primitive" if spec.section in PARTS["primitive"] else "integration"
    common: dict[str, Any] = dict(
        key=spec.key,
        part=part,
        section=spec.section,
        machine=machine,
        notebook=spec.notebook,
        metric=spec.metric,
        unit=spec.unit,
        **_published(spec),
    )
    if result is None or result.state in ("missing", "unreadable"):
        state: State = result.state if result else "missing"
        why = result.why if result else f"no result on {machine}"
        link = result.link if result else ""
        return Fact(**common, labels=dict(spec.labels), link=link, state=state, why=why)
    evidence = result.evidence
    labels = {key: _filled(label, evidence) for key, label in spec.labels.items()}
    common |= dict(labels=labels, link=result.link, state=result.state)
    measured = evidence.select(spec.metric, **labels)
    if spec.add:
        # Rows of the same metric with further labels (a rounding, say) are another question's.
        measured = [m for m in measured if m.labels.keys() == {*labels, spec.add}]
        measured = [m for m in measured if m.labels[spec.add] != "all"]
    values = _values(spec, evidence, measured) if measured else {}
    known = values and (values["value"] is not None or values["not_comparable"])
    if not known or (spec.total and not values["n"]):  # none expected: that path is not in the arm
        return Fact(**common, why=_reason(spec, result))
    return Fact(**common, **values)


def _values(spec: Spec, evidence: Evidence, measured: Sequence[Measurement]) -> dict[str, Any]:
    first = measured[0]
    if spec.add:
        counted = [m for m in measured if not spec.n_only or m.labels[spec.add] in spec.n_only]
        n = sum(m.n or 0 for m in counted) or None
        total = sum(int(m.value or 0) for m in measured)
        return {"value": total, "n": n, "not_comparable": None}
    scale = _scale(first.unit, spec.unit)
    value, low, high = (
        number * scale if scale != 1.0 and isinstance(number, (int, float)) else number
        for number in (first.value, first.low, first.high)
    )
    n = first.n
    if spec.total:
        labels = {key: v for key, v in first.labels.items() if key != "where"}
        totals = [
            m
            for m in evidence.select(spec.total)
            if all(labels.get(key) == v for key, v in m.labels.items())
        ]
        n = int(totals[0].value) if len(totals) == 1 else None  # type: ignore[arg-type]
    if spec.n_of and n is None:
        n = next((m.n for m in evidence.select(spec.n_of, impl="fused", T=1)), None)
    why = "" if first.value is not None else first.not_comparable or ""
    return dict(value=value, n=n, low=low, high=high, not_comparable=first.not_comparable, why=why)


def _filled(label: Scalar, evidence: Evidence) -> Scalar:
    if label == _CANDIDATE:
        return candidate(evidence)
    return evidence.parameters.get("shape_name") if label == "{shape_name}" else label


def _reason(spec: Spec, result: Result) -> str:
    """Why a readable result lacks a figure: in the words of its claim, where there is one."""
    if result.state == "incomplete":
        return result.why
    named = [claim for claim in result.evidence.claims if claim.claim == spec.claim]
    undone = [claim.why for claim in named if not claim.verdict.passed]
    return next(iter(undone), f"{result.notebook[:2]} did not measure it")


def _published(spec: Spec) -> dict[str, Any]:
    if spec.published is None:
        return {}
    value, unit = article.figure(spec.published), article.unit(spec.published)
    if isinstance(value, (int, float)):
        value *= _scale(unit, spec.unit)
    of = _OUT_OF.get(spec.published)
    return dict(
        published=value,
        published_of=article.figure(of) if of else None,
        published_label=article.label(spec.published),
    )


def _scale(unit: str | None, to: str) -> float:
    """Factor from one unit of time to another; 1 where they are none."""
    name = (unit or "").split("/")[0]
    return _SECONDS[name] / _SECONDS[to] if name in _SECONDS and to in _SECONDS else 1.0
