"""Does a result agree with itself? What can be computed again from the evidence alone.

Every verdict in `RULES` follows from measurements that stand in the same file, every ratio from two
times, every upper bound from its counts. Someone who changes one of them has to change all that
hangs on it; someone who invents a whole run consistently is not found out here.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from fusion_evidence.kernels.shapes import PRESETS
from fusion_evidence.lib.measure.machine import machine_name
from fusion_evidence.lib.report.box import claim_title
from fusion_evidence.lib.report.evidence import Claim, Evidence, Measurement, Verdict

MAX_MEASUREMENTS = 5_000
MAX_CLAIMS = 500
MAX_TEXT = 20_000
MAX_ELEMENTS = 10**13
#: Of figures that the notebook computed from the very numbers in the file.
_CLOSE = 1e-9
#: Times and what was made of them: a median, or a ratio of two, lies at its interval.
_MEDIANS = ("time", "prefill", "speedup", "saving", "times_the_copy", "tpot_saving")

Problems = Iterator[str]


def examine(evidence: Evidence) -> dict[str, list[str]]:
    """Every examination of one complete result: what was examined -> what is wrong with it."""
    examinations: dict[str, Callable[[Evidence], Problems]] = {
        "sizes and dates": _plausible,
        "its machine's names agree": _machine,
        "each claim and measurement once": _once,
        "intervals hold their values": _intervals,
        "upper bounds follow from counts": _bounds,
        "ratios and savings follow from times": _derived,
        "speed-ups stand on passed claims": _gates,
        "verdicts follow from measurements": _verdicts,
    }
    found: dict[str, list[str]] = {}
    for what, examination in examinations.items():
        if found.get("sizes and dates"):  # the rest could take for ever
            break
        try:
            found[what] = list(examination(evidence))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            found[what] = [f"cannot be computed again: {type(error).__name__}: {error}"]
    return found


# --- one value at a time ------------------------------------------------------------------------


def _plausible(evidence: Evidence) -> Problems:
    if len(evidence.measurements) > MAX_MEASUREMENTS or len(evidence.claims) > MAX_CLAIMS:
        yield f"over {MAX_MEASUREMENTS:,} measurements or {MAX_CLAIMS} claims"
    texts = [text for claim in evidence.claims for text in (claim.claim, claim.rule, claim.why)]
    texts += [str(part) for m in evidence.measurements for part in (m.value, m.note, *m.labels)]
    if any(len(text) > MAX_TEXT for text in texts):
        yield f"a text of over {MAX_TEXT:,} characters"
    if not re.fullmatch("[0-9a-f]{32}", evidence.run_id or ""):
        yield f"run_id {evidence.run_id!r} is none"
    started, finished = (
        datetime.fromisoformat(one or "") for one in (evidence.started, evidence.finished)
    )
    if not started <= finished:
        yield f"finished {evidence.finished} before it started {evidence.started}"
    if evidence.seed != evidence.parameters.get("seed"):
        yield "the seed is not the one among its parameters"


def _machine(evidence: Evidence) -> Problems:
    if (machine := evidence.machine) is None:
        yield "it names no machine"
        return
    arch = {"cuda": r"sm_\d+", "dcu": r"gfx[\w-]+"}.get(machine.profile, r"(?!sm_|gfx).+")
    if not re.fullmatch(arch, machine.arch):
        yield f"profile {machine.profile} with architecture {machine.arch}"
    name = {"cpu": "cpu", "dcu": machine.arch}.get(machine.profile)
    if machine.name != (name or machine_name(machine.device_name)):
        yield f"{machine.device_name} ({machine.arch}) is called {machine.name}"
    if (machine.device == "cpu") != (machine.profile == "cpu"):
        yield f"profile {machine.profile} on the device {machine.device}"
    toolkits = {"cuda": "cuda", "dcu": "hip"}
    if (kit := toolkits.get(machine.profile)) and kit not in machine.versions:
        yield f"profile {machine.profile} with a torch that has no {kit}"
    graphs = [m.metric for m in evidence.measurements if "CUDA-graph" in (m.method or "")]
    if machine.profile == "cpu" and graphs:
        yield f"a CPU replayed CUDA graphs: {graphs[0]}"


def _once(evidence: Evidence) -> Problems:
    claims = Counter(claim_title(claim) for claim in evidence.claims)
    labelled = Counter(name_of(m) for m in evidence.measurements)
    yield from (f"{name} is there {n} times" for name, n in (claims + labelled).items() if n > 1)


def _intervals(evidence: Evidence) -> Problems:
    for m in evidence.measurements:
        if m.low is None or m.high is None:
            continue
        width = m.high - m.low
        if width < 0:
            yield f"{name_of(m)}: low {m.low} above high {m.high}"
        elif m.metric in _MEDIANS and not m.low - width <= number(m) <= m.high + width:
            yield f"{name_of(m)}: {m.value} is not near [{m.low}, {m.high}]"


def _bounds(evidence: Evidence) -> Problems:
    from fusion_evidence.lib.measure.compare import upper_bound

    for m in evidence.measurements:
        if m.metric not in ("mismatch", "calibration", "fingerprint"):
            continue
        # A fingerprint counts mismatches among all elements, its bound is of the distinct ones.
        n = m.labels.get("distinct") if m.metric == "fingerprint" else m.n
        count = m.value if m.metric == "mismatch" else m.labels.get("mismatches")
        if n is None or count is None:
            continue
        if not isinstance(n, int) or not isinstance(count, int) or not 0 < n <= MAX_ELEMENTS:
            yield f"{name_of(m)}: {count} of {n} elements"
        elif not 0 <= count <= (m.n or 0):
            yield f"{name_of(m)}: {count} of {m.n} elements"
        elif m.high is not None:
            expected = upper_bound(n, min(count, n))
            if not near(m.high, expected, 1e-6):
                yield f"{name_of(m)}: {count} of {n} give the bound {expected:.4g}, not {m.high:.4g}"
    for m in evidence.select("mismatch"):
        if m.n is None:
            yield f"{name_of(m)}: a count without the number of elements"
    for bound in evidence.select("calibration", what="bound"):
        (elements,) = evidence.select("calibration", **{**bound.labels, "what": "elements"})
        if not near(number(bound), upper_bound(int(number(elements))), 1e-6):
            yield f"{name_of(bound)} does not follow from {elements.value} elements"


# --- values made of others ----------------------------------------------------------------------


def _derived(evidence: Evidence) -> Problems:
    derive = {
        "01_primitive_benchmark": _derived_alone,
        "04_text_regression": _derived_served,
        "06_bit_exact_integration": _derived_integrated,
    }.get(evidence.notebook)
    for m, expected in derive(evidence) if derive else ():
        if not near(number(m), expected):
            yield f"{name_of(m)} is {m.value}, but its times give {expected:.6g}"


def _derived_alone(evidence: Evidence) -> Iterator[tuple[Measurement, float]]:
    shape = evidence.parameters["shape_name"]

    def time(impl: str, **at: Any) -> Measurement:
        return one(evidence, "time", impl=impl, cache="cold", **at)

    here = {"T": 1, "shape": shape, "positions": "3d"}
    for m in valued(evidence, "speedup"):
        over = time(str(m.labels["over"]), **here)
        yield m, number(over) / number(time("fused", **here))
    for m in valued(evidence, "times_the_copy"):
        yield m, number(time("fused", **m.labels)) / number(time("copy", **m.labels))
    for m in valued(evidence, "saving"):
        layers = {"layer": 1, "token": PRESETS[shape].attention_layers}[str(m.labels["per"])]
        yield m, layers * (number(time("compiled", **here)) - number(time("fused", **here)))


def _derived_served(evidence: Evidence) -> Iterator[tuple[Measurement, float]]:
    for m in valued(evidence, "saving"):
        yield m, number(one(evidence, "tpot_difference", arm=m.labels["arm"], how="in turn"))


def _derived_integrated(evidence: Evidence) -> Iterator[tuple[Measurement, float]]:
    pairs = {
        "realised": ("baseline", "integrated"),
        "net": ("default", "integrated"),
        "control": ("baseline", "control"),
        "pins": ("default", "baseline"),
    }
    for m in valued(evidence, "tpot_saving"):
        if pair := pairs.get(str(m.labels["kind"])):
            slow, fast = (number(one(evidence, "tpot", arm=arm)) for arm in pair)
            yield m, slow - fast


def _gates(evidence: Evidence) -> Problems:
    gates = {"01_primitive_benchmark": "bits_compiled", "04_text_regression": "texts_unchanged"}
    titles = {claim_title(c): c for c in evidence.claims}
    for m in evidence.measurements:
        gated = m.metric.split("_")[0] in ("speedup", "saving")
        if gated and m.value is not None and (gate := gates.get(evidence.notebook)):
            arm = m.labels.get("arm") if gate == "texts_unchanged" else None
            if not evidence.claim(gate, None if arm is None else str(arm)).verdict.passed:
                yield f"{name_of(m)} has a value, but {gate} did not pass"
        elif gated and m.value is None and not m.not_comparable:
            yield f"{name_of(m)} is missing without a reason"
        said = re.match(r"(\w+) is ([A-Z_]+): ", m.not_comparable or "")
        claims = [c for c in titles.values() if said and c.claim == said[1]]
        if said and claims and said[2] not in [c.verdict.value for c in claims]:
            yield f"{name_of(m)} rests on {said[1]} being {said[2]}, which no verdict says"
    for changed in evidence.select("texts_changed"):
        arm = changed.labels.get("arm")
        for m in evidence.select("tpot", arm=arm, run="free") if changed.value else ():
            if not m.not_comparable:
                yield f"{name_of(m)} is of changed texts, and not marked as such"


# --- verdicts -----------------------------------------------------------------------------------


def _verdicts(evidence: Evidence) -> Problems:
    for claim in evidence.claims:
        if (rule := RULES.get((evidence.notebook, claim.claim))) is None:
            continue
        if claim.verdict in (Verdict.NOT_RUN, Verdict.INCONCLUSIVE):
            continue
        holds = rule(evidence, claim)
        if holds is not None and holds != claim.verdict.passed:
            what = "holds" if holds else "does not hold"
            yield f"{claim_title(claim)} is {claim.verdict.value}, but by its measurements it {what}"


Rule = Callable[[Evidence, Claim], bool | None]
"""True: the claim holds, so it is no FAIL; False: it does not; None: the file cannot tell."""


def zero(metric: str, **labels: Any) -> Rule:
    """Something was counted, and all counts are 0."""

    def rule(evidence: Evidence, _: Claim) -> bool:
        found = evidence.select(metric, **labels)
        return bool(found) and all(m.value == 0 for m in found)

    return rule


def every(*rules: Rule) -> Rule:
    """All of them hold."""

    def rule(evidence: Evidence, claim: Claim) -> bool | None:
        said = [rule(evidence, claim) for rule in rules]
        return False if False in said else None if None in said else True

    return rule


def needs(inner: Rule) -> Rule:
    """It must hold for a PASS; a FAIL may have other reasons, which the file does not hold."""

    def rule(evidence: Evidence, claim: Claim) -> bool | None:
        return False if inner(evidence, claim) is False else None

    return rule


def of_arm(make: Callable[..., Rule], metric: str, label: str = "arm", **labels: Any) -> Rule:
    """The same for the claim's arm alone."""

    def rule(evidence: Evidence, claim: Claim) -> bool | None:
        return make(metric, **{label: claim.arm}, **labels)(evidence, claim)

    return rule


def markers(metric: str = "marker", **labels: Any) -> Rule:
    """The device counted what was expected, on every path."""

    def rule(evidence: Evidence, _: Claim) -> bool | None:
        found = evidence.select(metric, where="device", **labels)
        if not found:
            return None
        expected = {
            m.labels.get("path"): m.value for m in evidence.select(f"{metric}_expected", **labels)
        }
        everywhere = expected.get(None)  # notebook 02 expects the same of every arm
        return all(m.value == expected.get(m.labels["path"], everywhere) for m in found)

    return rule


def _markers_reached(evidence: Evidence, claim: Claim) -> bool:
    return evidence.value("marker", arm=claim.arm) == evidence.value("marker_expected")


def _marker_exact(evidence: Evidence, claim: Claim) -> bool | None:
    run = [m for m in evidence.select("marker", where="device") if m.method == claim.arm]
    return markers()(evidence, claim) if run else None


def _independent(evidence: Evidence, claim: Claim) -> bool:
    bound = float(re.findall(r"within ([\d.]+) ULP", claim.rule)[0])
    return all(number(m) <= bound for m in evidence.select("ulp", oracle="independent"))


def _near_the_floor(evidence: Evidence, claim: Claim) -> bool:
    limits = ast.literal_eval(claim.rule[claim.rule.index("{") :])
    at = {"shape": evidence.parameters["shape_name"], "positions": "3d"}
    ratios = {T: number(one(evidence, "times_the_copy", T=T, **at)) for T in limits}
    return all(ratios[T] <= limit for T, limit in limits.items())


def _faster(evidence: Evidence, _: Claim) -> bool | None:
    low = one(evidence, "speedup", over="compiled").low
    return None if low is None else low > 1  # its bits were wrong, so the figure was left out


def _faults_seen(evidence: Evidence, _: Claim) -> bool:
    return all(number(m) > 0 for m in evidence.select("planted_fault"))


def _marker_cheap(evidence: Evidence, _: Claim) -> bool:
    high = one(evidence, "marker_cost", form="ratio").high
    return high is not None and high < 1.05


def _nothing_false(metric: str, **labels: Any) -> Rule:
    def rule(evidence: Evidence, _: Claim) -> bool:
        return all(m.value is not False for m in evidence.select(metric, **labels))

    return rule


def _repeats(evidence: Evidence, claim: Claim) -> bool:
    at = dict(arm=claim.arm, passes="all", stat="mean")
    m = one(evidence, "tpot_change_percent", **at)
    return m.low is not None and m.high is not None and m.low <= 0 <= m.high


def _resolves(stat: str) -> Rule:
    def rule(evidence: Evidence, claim: Claim) -> bool:
        limit = float(re.findall(r"([\d.]+) %", claim.rule)[0])  # rounded as it is said
        found = one(evidence, "detectable_tpot_percent", passes="one", stat=stat)
        return number(found) <= limit + 0.005

    return rule


def _saving_arrives(evidence: Evidence, claim: Claim) -> bool:
    saving = one(evidence, "saving", per="token", arm=claim.arm)
    again = one(evidence, "tpot_difference", arm="control", how="in turn")
    noise = max(abs(x) for x in (again.value, again.low, again.high) if isinstance(x, (int, float)))
    return saving.value is not None and saving.low is not None and saving.low > noise


def _fixed_point(evidence: Evidence, _: Claim) -> bool | None:
    found = evidence.select("records_differing", arm="rebuild")  # none, if the worst one failed
    return all(m.value == 0 for m in found) if found else None


def _drifts(arm: str) -> Rule:
    def rule(evidence: Evidence, _: Claim) -> bool:
        again = evidence.value("records_differing", arm="rebuild") or 0
        return number(one(evidence, "records_differing", arm=arm)) > float(again)

    return rule


def _fingerprint(evidence: Evidence, claim: Claim) -> bool:
    return one(evidence, "fingerprint", side=claim.arm).labels["mismatches"] == 0


def _coin_tosses(evidence: Evidence, _: Claim) -> bool:
    counts = [sum(number(m) for m in evidence.select(k)) for k in ("coin_tosses", "tokens_flipped")]
    return counts[0] == counts[1]


def _all_same(arm: str) -> Rule:
    """In notebook 06: no record, no logit and no text of an arm differs, of the claim's model."""

    def rule(evidence: Evidence, claim: Claim) -> bool | None:
        metrics = ("records_differing", "logits_differing", "texts_changed")
        of = {"arm": arm, "model": claim.arm}
        found = [m for metric in metrics for m in evidence.select(metric, **of)]
        return all(m.value == 0 for m in found) if found else None

    return rule


def _can_see(evidence: Evidence, claim: Claim) -> bool | None:
    again = evidence.value("records_differing", arm="rebuild", model=claim.arm)
    wrong = number(one(evidence, "records_differing", arm="per_op", model=claim.arm))
    if again is None:  # the rebuild is another notebook's
        return None if wrong else False
    return wrong > float(again)


def _net_saving(evidence: Evidence, _: Claim) -> bool | None:
    net, again = (one(evidence, "tpot_saving", kind=kind) for kind in ("net", "control"))
    if None in (net.low, net.high, again.low, again.high):
        return None
    noise = max(abs(again.low or 0.0), abs(again.high or 0.0))
    return (net.low or 0.0) > noise


def _as_predicted(evidence: Evidence, _: Claim) -> bool:
    made, said = (one(evidence, "tpot_saving", kind=kind) for kind in ("realised", "predicted"))
    return 0.9 <= number(made) / number(said) <= 1.15


RULES: dict[tuple[str, str], Rule] = {
    (f"{notebook}", claim): rule
    for notebook, rules in {
        "01_primitive_benchmark": {
            "bits_reference": zero("mismatch", oracle="reference"),
            "bits_compiled": needs(zero("mismatch", oracle="compiled")),
            "bits_independent": _independent,
            "batch_invariant": zero("changed_by_batch", impl="kernel"),
            "eager_batch_invariant": every(
                zero("changed_by_batch", impl="eager"),
                zero("changed_by_batch", impl="eager fp32 mean"),
            ),
            "faults_are_seen": _faults_seen,
            "baseline_in_place": zero("cache_sized_work"),
            "overlap_same_bits": zero("mismatch", oracle="without overlap"),
            "near_the_floor": _near_the_floor,
            "faster_than_compiled": _faster,
        },
        "02_trace_specialization": {
            "kernel_reached": _markers_reached,
            "branch_folded": needs(of_arm(zero, "marker")),
            "finder_silent_on_clean": lambda e, _: (
                e.value("finder", case="without_branch") == "nothing found"
            ),
        },
        "03_custom_op_fallback": {
            "marker_exact": _marker_exact,
            "replay_unseen_by_host": needs(zero("marker", where="host")),
            "fallback_bits": needs(
                every(zero("mismatch", oracle="standalone"), zero("cache_hits"))
            ),
            "no_cache_copy": needs(zero("cache_copies")),
            "marker_cheap": _marker_cheap,
        },
        "04_text_regression": {
            "texts_unchanged": of_arm(zero, "texts_changed"),
            "candidate_ran": needs(of_arm(markers, "marker")),
            "same_program": of_arm(_nothing_false, "identical"),
            "times_repeat": _repeats,
            "resolves_mean_tpot": _resolves("mean"),
            "resolves_p99_tpot": _resolves("p99"),
            "saving_arrives": _saving_arrives,
        },
        "05_drift_attribution": {
            "control": needs(zero("records_differing", arm="control")),
            "fixed_point": _fixed_point,
            "drift_without_the_kernel": _drifts("opaque_eager__opaque_eager"),
            "prefill_drifts": _drifts("opaque_eager__in_graph"),
            "fingerprint": _fingerprint,
            "coin_tosses": _coin_tosses,
        },
        "06_bit_exact_integration": {
            "fixed_point": needs(_all_same("control")),
            "integrated_exact": needs(_all_same("integrated")),
            "test_can_see": _can_see,
            "prefill_untouched": of_arm(_nothing_false, "prefill_identical", "model"),
            "kernel_ran": needs(of_arm(markers, "marker", "model")),
            "saving_as_predicted": needs(_as_predicted),
            "net_saving": needs(_net_saving),
        },
    }.items()
    for claim, rule in rules.items()
}
"""What a verdict needs, by notebook and claim, as far as the measurements of the file can tell."""


# --- helpers ------------------------------------------------------------------------------------


def one(evidence: Evidence, metric: str, **labels: Any) -> Measurement:
    """The one measurement with these labels; ValueError when there is none, or another."""
    found = evidence.select(metric, **labels)
    if len(found) != 1:
        raise ValueError(f"{len(found)} measurements of {metric} {labels}")
    return found[0]


def valued(evidence: Evidence, metric: str) -> list[Measurement]:
    """The measurements of a metric that have a value."""
    return [m for m in evidence.select(metric) if m.value is not None]


def number(m: Measurement) -> float:
    """A measurement's value as a number; ValueError when it is none."""
    if isinstance(m.value, bool) or not isinstance(m.value, (int, float)):
        raise ValueError(f"{name_of(m)} is no number")
    return float(m.value)


def near(value: float, expected: float, tolerance: float = _CLOSE) -> bool:
    """Equal but for rounding."""
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=1e-12)


def name_of(m: Measurement) -> str:
    """A measurement's metric and labels, for a message."""
    labels = ", ".join(f"{key}={value}" for key, value in sorted(m.labels.items()))
    return f"{m.metric} [{labels}]"[:200]
