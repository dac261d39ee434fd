"""What notebook 07's servers show: markers, texts, records, graphs and times, and the verdicts on them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.lib.attribution.integration import (
    Effect,
    Outcome,
    as_predicted,
    exact,
    over,
)
from fusion_evidence.lib.report.recorder import Recorder
from fusion_evidence.lib.service import regression, vllm_evidence, vllm_records
from fusion_evidence.lib.service.metrics import Reply, summarize
from fusion_evidence.lib.service.vllm_records import Calibrated, VllmRecords
from fusion_evidence.lib.service.vllm_study import (
    ARMS,
    IN_EVERY_LAYER,
    OPERATORS,
    ArmResult,
    Model,
    Pass,
    Study,
)

Said = tuple[str, str]
"""A verdict and why."""

BUSY = 16
"""Requests at a time, from which on a service is called busy."""
NOTHING: Said = ("INCONCLUSIVE", "nothing was compared")


def settled(word: Said | None, why: Said | None) -> Said:
    """A verdict, or why there is none to give."""
    decided = word is not None and word[0] != "INCONCLUSIVE"
    return word if word is not None and decided else why or word or NOTHING


# --- markers


@dataclass(frozen=True)
class Count:
    """What one pass of an arm counted, over all layers, beside what it should have.

    expected: of kernel and fallback, by the tokens of the replies with one request at a time, else by
    vLLM's own statistics of its steps; None where there are none. steps: that the engine made, times
    layers.
    """

    mode: str
    model: Model
    concurrency: int
    kernel: int
    fallback: int | None
    expected: tuple[int, int | None] | None
    steps: int | None
    method: str

    @property
    def arm(self) -> str:
        return f"article_{self.mode}" if self.model == "article" else self.mode

    @property
    def share(self) -> float | None:
        """Of all steps, those that took the kernel."""
        return self.kernel / self.steps if self.steps else None

    @property
    def exact(self) -> bool | None:
        """Counted as expected; None where nothing is known."""
        return None if self.expected is None else (self.kernel, self.fallback) == self.expected


def counts(results: Mapping[str, ArmResult]) -> list[Count]:
    """The first pass at each concurrency of every arm that counts."""
    return [
        _count(name, one)
        for name, result in results.items()
        for one in result.passes
        if one.counted and one.turn == 0
    ]


def _count(name: str, one: Pass) -> Count:
    arm, layers = ARMS[name], len(one.counted)
    kernel, fallback = one.totals or (0, 0)
    steps, method = _steps(one, arm.last)
    expected = None
    if steps is not None:
        every, inside = steps
        takes = {"opaque_fused": every, "fallback_only": 0}.get(arm.mode, inside)
        # Where the graph decides, what is not the kernel's stays the model's own, and counts nothing.
        other = every - takes if arm.mode.startswith(("opaque", "fallback")) else 0
        expected = layers * takes, layers * other
    every_step = None if steps is None else layers * steps[0]
    mode = name.removeprefix("article_")
    return Count(mode, arm.model, one.concurrency, kernel, fallback, expected, every_step, method)


def _steps(one: Pass, last: int) -> tuple[tuple[int, int] | None, str]:
    """(all steps, those of 1 to ``last`` tokens) and how they are known.

    Prompts have more than 16 tokens, and each is one step when it comes alone.
    """
    if one.concurrency == 1 and all(reply.completed for reply in one.replies):
        decode = sum(len(reply.tokens) - 1 for reply in one.replies)
        return (decode + len(one.replies), decode), "the replies' tokens"
    small = one.engine.get("steps of 1" if last == 1 else "steps to 16")
    if small is None or "steps" not in one.engine:
        return None, "vLLM gives no statistics"
    return (int(one.engine["steps"]), int(small)), "vLLM's statistics of its steps"


def marker_verdict(found: Sequence[Count]) -> Said:
    """Whether every pass of one arm counted what it should."""
    known = [one for one in found if one.exact is not None]
    if not known:
        return "INCONCLUSIVE", "no pass is known to have counted" if found else "it did not run"
    said = "; ".join(
        f"{one.concurrency} at a time: kernel {one.kernel:,}, fallback {one.fallback:,}, expected "
        f"{one.expected[0]:,} and {one.expected[1]:,}"
        for one in known
        if one.expected
    )
    whole = any(one.expected[0] or one.expected[1] for one in known if one.expected)
    right = all(one.exact for one in known)
    return ("PASS" if right and whole else "FAIL"), said


def folded_verdict(compiled: Sequence[Count], eager: Sequence[Count]) -> Said:
    """Compiled, the branch is never taken; eager, by every step that it names."""
    if not compiled or not eager:
        return "INCONCLUSIVE", "one of the two servers did not run"
    missed = [one.expected[0] for one in compiled if one.expected]
    ran, (word, why) = sum(one.kernel for one in compiled), marker_verdict(eager)
    said = f"compiled: {ran:,} of {sum(missed):,}; eager: {why}"
    return ("PASS" if ran == 0 < sum(missed) and word == "PASS" else "FAIL"), said


def busy_verdict(one: Sequence[Count], busiest: int) -> Said:
    """With many requests at a time, a kernel for one token hardly runs: in under a tenth of all steps."""
    shares = {count.concurrency: count.share for count in one if count.share is not None}
    if 1 not in shares or busiest not in shares or busiest < BUSY:
        return "INCONCLUSIVE", f"it was not served both alone and {BUSY} at a time"
    said = ", ".join(f"{share:.1%} of steps at {c} at a time" for c, share in shares.items())
    return ("PASS" if shares[busiest] < 0.1 < shares[1] else "FAIL"), said


# --- texts and records


def outcome(study: Study, name: str, baseline: str = "native") -> Outcome:
    """An arm held against the baseline: records of the attention under forced tokens, and free texts."""
    results = study.results
    for one in (baseline, name):
        if one not in results or results[one].error or not results[one].replies():
            why = results[one].cause if one in results else "did not run"
            return Outcome(name, error=f"{one}: {why or 'it served nothing'}")
    changes = regression.text_changes(results[baseline].replies(), results[name].replies())
    texts = Outcome(
        name,
        texts=int(changes.changed.sum()),
        texts_total=len(changes),
        tokens_total=int(changes.tokens.sum()),
    )
    try:
        frame = differences(study, name, baseline)
    except (OSError, ValueError) as error:
        return replace(texts, error=f"no records: {error}")
    first = frame[frame.differing > 0].head(1)
    where = [f"{r.layer}, {r.tensor}, T = {r.tokens}" for r in first.itertuples()]
    return replace(
        texts,
        records=int(frame.differing.sum()),
        records_total=int(frame.records.sum()),
        first=", ".join(where),
    )


def recorded(study: Study, arms: tuple[str, str], what: str) -> tuple[VllmRecords, VllmRecords]:
    """What two arms recorded, as many rows of each. OSError, ValueError: it is not so, or lacks some."""
    for one in arms:
        if lost := study.results[one].records.get(what, {}).get("lost", 0):
            raise ValueError(f"{one}: {lost} rows did not fit")
    a, b = vllm_records.opened(*(study.file(one, what) for one in arms))
    if len(a.index) != len(b.index):
        raise ValueError(f"{' and '.join(arms)} recorded {len(a.index)} and {len(b.index)} rows")
    return a, b


def differences(study: Study, name: str, baseline: str = "native") -> pd.DataFrame:
    """`vllm_records.compare` of what both recorded of the fixed requests.

    A row whose first V is another was computed otherwise before its first prologue: it counts as different
    in all of its records, under the layer ``before the first prologue``.

    OSError, ValueError: there is nothing to compare, or not the same rows.
    """
    a, b = recorded(study, (baseline, name), "served")
    rows = vllm_records.matched(a, b)
    parts = [] if rows.empty else [vllm_records.compared(a, b, rows)]
    if alone := len(a.index) - len(rows):
        n = alone * len(a.layers)
        unmatched = {
            "layer": "before the first prologue",
            "tensor": ["q", "k", "v"],
            "tokens": 0,
            "records": n,
            "differing": n,
            "elements": 0,
            "mismatches": 0,
        }
        parts.insert(0, pd.DataFrame(unmatched))
    return pd.concat(parts, ignore_index=True)


def exact_verdict(found: Outcome | None, floor: Outcome) -> Said:
    """Nothing differs, and nothing of the baseline in a second server either."""
    return exact(found, floor) if found is not None else NOTHING


def every_size_verdict(study: Study, name: str, found: Outcome | None, floor: Outcome) -> Said:
    """As `exact_verdict`, and in the first layer nothing differs at any size that is compiled for."""
    word, why = exact_verdict(found, floor)
    try:
        sizes = by_size(study, name)
    except (OSError, ValueError) as error:
        return ("FAIL" if word == "FAIL" else "INCONCLUSIVE"), f"{why}; {error}"
    differ, of = int(sizes.mismatches.sum()), int(sizes.elements.sum())
    said = f"{why}; first layer, T = {', '.join(map(str, sizes.tokens))}: {differ:,} of {of:,} elements"
    return ("FAIL" if differ else word), said


def fixed_verdict(first: Sequence[Reply], again: Sequence[Reply], floor: Outcome) -> Said:
    """The same server says the same again, and a second one differs in nothing."""
    changes = regression.text_changes(first, again)
    changed = int(changes.changed.sum())
    said = f"same server again: {changed} of {len(changes)} texts changed; second server: {floor}"
    if floor.error or not len(changes):
        return "INCONCLUSIVE", said
    return ("PASS" if floor.same and not changed else "FAIL"), said


def differs_verdict(found: Outcome | None, floor: Outcome) -> Said:
    """More differs than between two servers of the baseline."""
    if found is None or found.error:
        return "INCONCLUSIVE", str(found or "it did not run")
    more = found.records > floor.records or found.texts > floor.texts
    return ("PASS" if more else "FAIL"), f"{found}; native_again: {floor}"


def boundary_verdict(study: Study, name: str) -> Said:
    """The compiled fallback behind the operator gives prefill the baseline's bits: its records of more
    tokens than any graph of its own has, which no decode step comes before."""
    try:
        frame = differences(study, name)
    except (OSError, ValueError) as error:
        return "INCONCLUSIVE", str(error)
    prefill = (frame.tokens > max(study.plan.sizes)) | (frame.tokens == 0)
    (differing, of), (others, of_others) = (
        (int(part.differing.sum()), int(part.records.sum()))
        for part in (frame[prefill], frame[~prefill])
    )
    if not of:
        return "INCONCLUSIVE", "no prefill records"
    said = f"{differing:,} of {of:,} prefill records differ; "
    said += f"not judged: {others:,} of {of_others:,} decode records do"
    return ("FAIL" if differing else "PASS"), said


def changed_choices(results: Mapping[str, ArmResult], name: str) -> tuple[int, int]:
    """(tokens that an arm would choose otherwise than the baseline after the same tokens, of how many)."""
    one, other = results["native"].choices, results[name].choices
    pairs = [pair for id in one if id in other for pair in zip(one[id], other[id], strict=False)]
    return sum(a != b for a, b in pairs), len(pairs)


def by_size(study: Study, name: str, baseline: str = "native") -> pd.DataFrame:
    """By T, what an arm's first layer gives the attention beside the baseline's, for the same projection.

    Returns columns ``tokens``, ``records``, ``differing``, ``elements``, ``mismatches``; of q and k, which
    are computed. OSError, ValueError: there are no records of it.
    """
    frame = vllm_records.compare(
        study.file(baseline, "calibration"), study.file(name, "calibration")
    )
    sizes = study.plan.sizes_of(ARMS[name].model)
    own = (frame.layer == frame.layer.iloc[0]) & frame.tensor.isin(["q", "k"])
    kept = frame[own & frame.tokens.isin(sizes)]
    columns = ["records", "differing", "elements", "mismatches"]
    return kept.groupby("tokens", as_index=False)[columns].sum()


def of_the_stack(study: Study, name: str) -> pd.DataFrame:
    """How an arm of the article's shape differs from the baseline that it was calibrated on.

    Of what both were forced to say, only what has the same history in both: requests that came one at a
    time in every layer, prompts and decode; of any number at a time, which a server batches as they come,
    the first layer at each size that is compiled for, since nothing but the prologue ran before it.

    Returns `vllm_records.compare`'s columns and ``at_a_time`` (``1`` or ``any``). OSError, ValueError:
    there are no such records, or not the same rows.
    """
    baseline, sizes = OPERATORS["article"][0], study.plan.sizes_of("article")
    a, b = recorded(study, (baseline, name), "calibration")
    asked, uneven = divmod(len(a.index), len(sizes))
    if uneven:
        raise ValueError(f"{baseline} and {name} did not record the same rows")
    rows = vllm_records.matched(a, b)
    rows = rows[rows.tokens.isin(sizes)]
    if rows.empty:
        raise ValueError(f"{baseline} and {name} have no row of such a size in common")
    parts = [vllm_records.compared(a, b, rows, a.layers[:1]).assign(at_a_time="any")]
    if 1 in sizes:  # each size has all requests anew, in that order
        pass_ = slice(first := asked * sizes.index(1), first + asked)
        mine, theirs = (
            one.index.iloc[pass_][["tokens", "positions", "v"]].reset_index() for one in (a, b)
        )
        if not mine.equals(theirs):
            raise ValueError(f"{baseline} and {name}, one at a time, recorded other rows")
        alone = mine.assign(one=mine["index"], other=mine["index"])
        parts.insert(0, vllm_records.compared(a, b, alone).assign(at_a_time="1"))
    return pd.concat(parts, ignore_index=True)


def stack_verdict(study: Study, least: int, frame: pd.DataFrame, control: pd.DataFrame) -> Said:
    """No record of `of_the_stack` differs: of ``least`` computed elements or more at each size, where
    another server's, rounded otherwise, do differ."""
    if frame.empty:
        return NOTHING
    said = [_counted(frame), f"{OPERATORS['article'][1]}, rounded otherwise: {_counted(control)}"]
    sizes = study.plan.sizes_of("article")
    elements = frame[frame.tensor.isin(["q", "k"])].groupby("tokens").elements.sum()
    few = [T for T in sizes if elements.get(T, 0) < least]
    blind = [T for T in sizes if not control[control.tokens == T].differing.sum()]
    for sort, found in ((f"fewer than {least:,} elements", few), ("no control", blind)):
        said += [f"{sort} at T = {', '.join(map(str, found))}"] * bool(found)
    if frame.differing.sum():
        return "FAIL", "; ".join(said)
    whole = not few and not blind and "1" in set(frame.at_a_time)
    return ("PASS" if whole else "PASS_WITH_LIMITATIONS"), "; ".join(said)


def _counted(frame: pd.DataFrame) -> str:
    """What differs of how many, of `of_the_stack`."""
    said = []
    for at_a_time, part in frame.groupby("at_a_time"):
        sizes, layers = sorted(part.tokens.unique()), part.layer.nunique()
        where = "1 layer" if layers == 1 else f"{layers} layers"
        counts = f"{part.differing.sum():,} of {part.records.sum():,} records"
        said.append(f"{at_a_time} at a time, {where}, T = {', '.join(map(str, sizes))}: {counts}")
    return ", ".join(said) + " differ"


# --- calibration


def calibrate(study: Study, model: Model, observed: str | None = None) -> dict[int, Calibrated]:
    """What the baseline's graphs compute, by T, for every size that is compiled, and for prompts.

    Of prompts in every layer, where a server was given the same there; else in the first. observed: another
    server's in its place. Empty where a server is missing, or its records are of no use, which `Study.say`
    is told.
    """
    baseline, operator = OPERATORS[model]
    seen = observed or baseline
    native, given = (study.file(name, "calibration") for name in (seen, operator))
    if not (native.is_file() and given.is_file()):
        return {}
    sizes, prompts = study.plan.sizes_of(model), study.plan.prompts_of(model)
    try:
        found = vllm_records.calibrate(native, given, tokens=sizes)
        more = study.file(IN_EVERY_LAYER, "calibration")
        if seen != "native" or not more.is_file():
            return found | vllm_records.calibrate(native, given, tokens=prompts)
        return found | vllm_records.calibrate(native, more, tokens=prompts, every_layer=True)
    except ValueError as error:
        study.say(f"{seen} is not calibrated: {error}")
        return {}


def take(study: Study, model: Model, found: Mapping[int, Calibrated]) -> None:
    """Let the arms that start from now on have these numerics."""
    sizes = study.plan.sizes_of(model)
    by_size = {str(size): found[size].numerics for size in sizes if size in found}
    common = fitting_all(study, model, found)
    by_size["*"] = next(
        (one for one in common if one in by_size.values()), next(iter(common), None)
    )
    study.numerics[model] = {size: str(one) for size, one in by_size.items() if one is not None}


def fitting_all(study: Study, model: Model, found: Mapping[int, Calibrated]) -> list[Numerics]:
    """What reproduces every element of prompts of all lengths, which one graph computes.

    Prompts of one length leave several candidates; others tell them apart. Empty where one has no rows.
    """
    lengths = study.plan.prompts_of(model)
    if any(length not in found or found[length].numerics is None for length in lengths):
        return []
    prints = [found[length].fingerprint for length in lengths]
    fits = [[one.closest, *one.alike] for one in prints]
    return [one for one in fits[0] if all(one in others for others in fits)]


def prompts_verdict(study: Study, model: Model, found: Mapping[int, Calibrated]) -> Said:
    """One candidate, and no other, fits prompts of every length."""
    lengths = ", ".join(map(str, study.plan.prompts_of(model)))
    if not found:
        return "INCONCLUSIVE", "there are no records of it"
    common = fitting_all(study, model, found)
    if not common:
        return "FAIL", f"no candidate fits prompts of all of {lengths} tokens"
    said = f"taken: {study.numerics[model]['*']}; {len(common)} fit prompts of {lengths} tokens"
    return ("PASS" if len(common) == 1 else "PASS_WITH_LIMITATIONS"), said


def calibration_verdict(found: Calibrated | None, least: int) -> Said:
    """One candidate reproduces every element, of ``least`` or more, and no other does."""
    if found is None:
        return "INCONCLUSIVE", "there are no records of it"
    said = str(found.fingerprint).replace("decode computes", f"T = {found.tokens} computes")
    said = said.replace("prefill computes", f"T = {found.tokens} computes")
    if found.numerics is None:
        return "FAIL", said
    few = found.fingerprint.elements < least or bool(found.fingerprint.alike)
    return ("PASS_WITH_LIMITATIONS" if few else "PASS"), said


# --- graphs


def untouched(study: Study, name: str, baseline: str = "native") -> pd.DataFrame:
    """`vllm_evidence.prefill_identical`, without the ranges that only ``name`` is to have the kernel in.

    OSError, ValueError: one of the servers wrote nothing down, or other ranges.
    """
    frame = vllm_evidence.prefill_identical(study.graphs(baseline), study.graphs(name))
    inside = (frame["first"] == frame["last"]) & (frame["last"] <= ARMS[name].last)
    kernels = [ARMS[one].last * (ARMS[one].mode == "integrated") for one in (name, baseline)]
    taken = inside if kernels[0] != kernels[1] else inside & False
    return frame[~taken]


def untouched_verdict(frame: pd.DataFrame) -> Said:
    """All that could be compared is the same."""
    if frame.empty or frame.identical.isna().all():
        return NOTHING
    other = frame[frame.identical.eq(False).fillna(False).astype(bool)]
    ranges = len(frame[["first", "last"]].drop_duplicates())
    if len(other):
        names = [f"{r.what} of {r.first} to {r.last}" for r in other.itertuples()]
        return "FAIL", f"not the same: {', '.join(names)}"
    unknown = frame[frame.identical.isna()].what.unique().tolist()
    said = f"{', '.join(frame.what.unique())} of {ranges} ranges"
    if unknown:
        return "PASS_WITH_LIMITATIONS", f"{said}; nothing to compare of {', '.join(unknown)}"
    return "PASS", said


# --- times


def in_turn(results: Mapping[str, ArmResult], concurrency: int) -> dict[str, np.ndarray]:
    """Timed arm -> TPOT in microseconds, one value a round: the mean of the requests of that turn.

    Only rounds that all of them completed.
    """
    by_arm: dict[str, dict[int, float]] = {}
    for name, result in results.items():
        if ARMS[name].timed and not result.error:
            by_arm[name] = {
                one.turn: float(np.mean([reply.tpot_s for reply in one.replies])) * 1e6
                for one in result.passes
                if one.concurrency == concurrency and all(map(_timed, one.replies))
            }
    common = sorted(set.intersection(*map(set, by_arm.values()))) if by_arm else []
    return {name: np.array([turns[turn] for turn in common]) for name, turns in by_arm.items()}


def _timed(reply: Reply) -> bool:
    return reply.completed and reply.tpot_s is not None


def saved(slow: np.ndarray, fast: np.ndarray, resamples: int = 4000, seed: int = 0) -> Effect:
    """Median over rounds of what ``fast`` took less, microseconds a token; interval: bootstrap by round.

    ValueError: fewer than three rounds.
    """
    difference = slow - fast
    if len(difference) < 3:
        raise ValueError(f"expected three rounds or more, got {len(difference)}")
    rounds = np.random.default_rng(seed).integers(
        len(difference), size=(resamples, len(difference))
    )
    low, high = np.quantile(np.median(difference[rounds], axis=1), (0.025, 0.975))
    return Effect(float(np.median(difference)), float(low), float(high), len(difference))


EQUAL = (("native", "native_again"), ("plain", "plain_again"), ("absent", "absent_again"))
"""Timed arms that are the same server twice."""
PLAIN, ABSENT = EQUAL[1:]
AGAINST_ABSENT = {"plain": PLAIN, "integrated": ("integrated",), "range": ("range",)}
"""What is also held against the mean of the servers without the plugin, by mode."""


def savings(times: Mapping[str, np.ndarray]) -> dict[str, Effect]:
    """By mode, what each timed arm saves against ``native``, from `in_turn`'s times; as ``<mode>, against
    absent``, see `AGAINST_ABSENT`; and of other equal servers, as ``<again>, against <mode>``. Nothing of
    fewer than three rounds."""

    def mean(modes: Sequence[str]) -> np.ndarray:
        found = [times.get(f"article_{mode}", np.array([])) for mode in modes]
        return np.mean(found, axis=0) if all(map(len, found)) else np.array([])

    modes = [name.removeprefix("article_") for name in times]
    held: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        mode: (["native"], [mode]) for mode in modes if mode != "native"
    }
    held |= {f"{again}, against {one}": ([one], [again]) for one, again in (PLAIN, ABSENT)}
    held |= {f"{mode}, against absent": (ABSENT, arms) for mode, arms in AGAINST_ABSENT.items()}
    means = {name: (mean(slow), mean(fast)) for name, (slow, fast) in held.items()}
    return {
        name: saved(slow, fast)
        for name, (slow, fast) in means.items()
        if len(slow) == len(fast) >= 3
    }


class Floor(NamedTuple):
    """The farthest that an interval of equal servers reaches from zero, in microseconds a token, and how
    many pairs of them say so."""

    us: float
    pairs: int

    def __str__(self) -> str:
        return f"equal servers, {self.pairs} of {len(EQUAL)} pairs, within {self.us:.1f} us"

    def limit(self, word: str) -> str:
        """A PASS that rests on fewer pairs than there should be has that limitation."""
        limited = word == "PASS" and self.pairs < len(EQUAL)
        return "PASS_WITH_LIMITATIONS" if limited else word


def floor_of(effects: Mapping[str, Effect]) -> Floor | None:
    """None where there are no two equal servers."""
    names = [EQUAL[0][1], *(f"{again}, against {one}" for one, again in (PLAIN, ABSENT))]
    equal = [effects[name] for name in names if name in effects]
    if not equal:
        return None
    return Floor(max(max(abs(one.low), abs(one.high)) for one in equal), len(equal))


def kept(realised: Effect, expected: Effect, floor: Floor) -> Effect:
    """Their ratio. Each server is faster or slower by an offset of its own, which more rounds do not
    average out: so the interval reaches the floor's microseconds farther at both ends."""
    low, high = realised.low - floor.us, realised.high + floor.us
    return over(Effect(realised.value, low, high, realised.n), expected)


def saving_verdict(realised: Effect, expected: Effect | None, why: str, floor: Floor) -> Said:
    """Between 0.9 and 1.15 of what was predicted, where that can be told from nothing."""
    if expected is None:
        return "NOT_RUN", why
    ratio = kept(realised, expected, floor)
    said = (
        f"{realised} of {expected}: {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] with the floor; "
        f"{floor}; {why}"
    )
    if floor.us >= abs(realised.value):
        return "INCONCLUSIVE", said
    return floor.limit(as_predicted(ratio)), said


def net_verdict(effect: Effect, floor: Floor) -> Said:
    """More is saved against servers that do not load the plugin than equal servers differ by."""
    said = f"{effect} a token; {floor}"
    if effect.low > floor.us:
        return floor.limit("PASS"), said
    return ("FAIL" if effect.high < -floor.us else "INCONCLUSIVE"), said


def off_verdict(results: Mapping[str, ArmResult], effect: Effect, floor: Floor) -> Said:
    """The plugin, switched off, changes no generated code and takes no more time than equal servers
    differ by. Where the code is known to be the same, whose more time than that is, is undecided."""
    same, code = same_code(results)
    said = f"{code}; {effect} a token; {floor}"
    if same is False:
        return "FAIL", said
    if abs(effect.value) > floor.us:
        return ("INCONCLUSIVE" if same else "FAIL"), said
    return (floor.limit("PASS") if same else "PASS_WITH_LIMITATIONS"), said


def same_code(results: Mapping[str, ArmResult]) -> tuple[bool | None, str]:
    """Whether Inductor generated the same with the plugin, switched off, and without; None where nothing
    of one kind was read, or servers of one kind differ."""
    kinds = [[results[f"article_{mode}"].code for mode in modes] for modes in (PLAIN, ABSENT)]
    read = [[code for code in kind if code] for kind in kinds]
    if not all(read):
        return None, "generated code: nothing to compare"
    if any(code != kind[0] for kind in read for code in kind):
        return None, "generated code: servers of one kind differ, so kinds cannot be compared"
    plain, absent = (set(kind[0]) for kind in read)
    if alone := plain ^ absent:
        of = len(plain | absent)
        return False, f"generated code: {len(alone)} of {of} graphs are of one kind alone"
    return True, f"generated code: all {len(plain)} graphs the same"


def pairs(times: Mapping[str, np.ndarray]) -> list[tuple[str, str]]:
    """Timed arms, two and two, whose code ought to be the same: equal ones, and those with the plugin off
    beside those without it. Of those that have three rounds or more."""
    every = [EQUAL[0], *itertools.combinations((*PLAIN, *ABSENT), 2)]
    return [
        pair for pair in every if all(len(times.get(f"article_{mode}", ())) >= 3 for mode in pair)
    ]


def configurations(results: Mapping[str, ArmResult]) -> dict[tuple[str, str], tuple[int, int]]:
    """Two bare timed arms -> (kernels that the clock gave another configuration, of those that both tuned).
    Pairs that share no kernel are left out."""
    bare = [mode for mode in (*PLAIN, *ABSENT) if f"article_{mode}" in results]
    found = {}
    for one, other in itertools.combinations(bare, 2):
        a, b = (results[f"article_{mode}"].chosen for mode in (one, other))
        if both := a.keys() & b.keys():
            found[one, other] = sum(a[kernel] != b[kernel] for kernel in both), len(both)
    return found


def record_times(
    book: Recorder,
    mode: str,
    model: str,
    result: ArmResult,
    not_comparable: str | None = None,
) -> None:
    """Record ``tpot`` and ``ttft`` of the first pass at each concurrency, in milliseconds; TTFT's parts
    ``queue`` and ``prefill`` by vLLM's own statistics; and, of another request and so no part of that
    mean, ``first_call``: the very first request's excess over the same one later."""
    for one in result.passes:
        common: dict[str, Any] = dict(mode=mode, model=model, concurrency=one.concurrency)
        common["not_comparable"] = not_comparable
        if one.turn or not any(reply.completed for reply in one.replies):
            continue
        for row in summarize(one.replies).itertuples():
            if row.metric in ("tpot", "ttft"):
                book.measure(
                    str(row.metric),
                    row.value,
                    unit="ms",
                    low=row.low,  # type: ignore[arg-type]
                    high=row.high,  # type: ignore[arg-type]
                    n=row.n,  # type: ignore[arg-type]
                    stat=row.stat,
                    **(common | ({"part": "all"} if row.metric == "ttft" else {})),
                )
        parts = {name: one.engine.get(name) for name in ("queue", "prefill")}
        asked = one.engine.get("requests")
        for part, seconds in parts.items():
            if seconds is not None and asked:
                ms = 1e3 * seconds / asked
                book.measure("ttft", ms, unit="ms", n=int(asked), part=part, stat="mean", **common)
        again = one.replies[0].ttft_s
        if one.concurrency == 1 and result.first_s and again:
            ms = 1e3 * (result.first_s - again)
            book.measure("ttft", ms, unit="ms", n=1, part="first_call", stat="mean", **common)
