"""What a reader gets from an arm: its texts and its times, beside those of arms that change nothing.

Three processes, one after the other: the baseline, which serves everything twice (the second time is the
arm ``control``), ``rebuild``, and the candidate. Each serves its own texts first; then all are fed the
baseline's tokens, so that their times are of the same work. At the end of the baseline's process the same
model is compiled once more, again ``control``, and the candidate, and prefill and the decode step of the
three are timed in turn. A difference counts only beyond what ``control`` and ``rebuild`` show, and a time
is compared only where the words are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from fusion_evidence.lib.measure.timing import Timing, ratio
from fusion_evidence.lib.report import article
from fusion_evidence.lib.report.evidence import Evidence, Verdict
from fusion_evidence.lib.report.recorder import Recorder
from fusion_evidence.lib.service.arms import Arm
from fusion_evidence.lib.service.jobs import Beside, Job, JobResult, run_jobs
from fusion_evidence.lib.service.metrics import (
    Reply,
    change_percent,
    detectable_percent,
    paired_tpot,
    summarize,
)

BASELINE, CONTROL, REBUILD = "baseline", "control", "rebuild"
Kind = Literal["free", "forced"]
TTFT_PARTS = ("queue", "first_call", "prefill")


# --- the runs


def stand_in(arm: str, device: str) -> str:
    """The part of an arm that runs on a device: on a CPU, one without the fused kernel.

    Its prefill is the arm's; its decode stays in the graph, as the baseline's.
    """
    one = Arm.parse(arm)
    if device != "cpu" or not one.needs_device:
        return arm
    prefill = "opaque_reference" if one.prefill == "opaque_fused" else one.prefill
    return f"{prefill}__in_graph"


def arm_jobs(
    arm: str,
    *,
    forced_passes: int,
    prefill_times: Sequence[int],
    prefill_samples: int,
    decode_samples: int,
    decode_numerics: str | None = None,
    **common: Any,
) -> list[Job]:
    """Jobs of ``baseline`` (with ``control``), ``rebuild`` and ``arm``, in the order to run them.

    Args:
        forced_passes: of every arm, with the baseline's tokens.
        prefill_times, prefill_samples, decode_samples: as of `Job`, in the baseline's process, where
            ``control`` and ``arm`` are compiled once more and take turns with it.
        common: further fields of every `Job`.
    """
    compiled: dict[str, Any] = dict(arm=arm, decode_numerics=decode_numerics)
    own: list[Kind] = ["free"]
    forced: list[Kind] = ["forced"] * forced_passes
    return [
        Job(
            name=BASELINE,
            passes=[*own, *own, *forced, *forced],
            prefill_times=list(prefill_times),
            prefill_samples=prefill_samples,
            decode_samples=decode_samples,
            beside=[Beside(name=CONTROL), Beside(name=arm, **compiled)],
            **common,
        ),
        Job(name=REBUILD, arm=REBUILD, passes=[*own, *forced], **common),
        Job(name=arm, passes=[*own, *forced], **compiled, **common),
    ]


def run_arms(
    jobs: Sequence[Job],
    folder: Path,
    *,
    parallel: int = 1,
    report: Callable[[str], None] = print,
) -> dict[str, JobResult]:
    """Run the first job, then the others with its tokens; by name.

    parallel: of the others, at a time; above 1 their times mean nothing. Where the first gave no tokens,
    the others serve their own texts and no forced passes.
    """
    first, *others = jobs
    results = run_jobs([first], folder, report=report)
    tokens = next((one.replies for one in results[first.name].passes if one.kind == "free"), [])
    forced = {reply.id: reply.tokens for reply in tokens}
    if forced:
        others = [job.model_copy(update={"forced": forced}) for job in others]
    else:
        others = [job.model_copy(update={"passes": ["free"]}) for job in others]
    return results | run_jobs(others, folder, parallel=parallel, report=report)


@dataclass(frozen=True)
class Served:
    """What one arm served. free: its own texts. forced: the baseline's tokens, all passes in one list.
    error: what kept it from being complete, else empty."""

    free: Sequence[Reply] = ()
    forced: Sequence[Reply] = ()
    error: str = ""
    job: JobResult | None = field(default=None, repr=False, compare=False)


def served(results: Mapping[str, JobResult]) -> dict[str, Served]:
    """Arm -> what it served; the baseline's passes are dealt out to it and to ``control``."""
    found = {}
    for name, result in results.items():
        free, forced = (
            [one.replies for one in result.passes if one.kind == kind]
            for kind in ("free", "forced")
        )
        failed = [
            f"{reply.id}: {reply.error}"
            for one in result.passes
            for reply in one.replies
            if reply.finish_reason == "error"
        ]
        error = result.error or "; ".join(dict.fromkeys(failed))
        for turn, arm in enumerate((BASELINE, CONTROL) if name == BASELINE else (name,)):
            turns = 2 if name == BASELINE else 1
            found[arm] = Served(
                free=free[turn] if turn < len(free) else (),
                forced=[reply for one in forced[turn::turns] for reply in one],
                error=error,
                job=result,
            )
    return found


# --- texts


def first_changed(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or of the first that only one of them has; None: equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def text_changes(baseline: Sequence[Reply], other: Sequence[Reply]) -> pd.DataFrame:
    """One row for each request that both completed.

    Columns: ``request``, ``prompt_tokens``, ``tokens_baseline``, ``tokens``, ``changed`` (any token
    differs) and ``first_changed``, nullable.
    """
    theirs = {reply.id: reply for reply in other if reply.completed}
    rows = []
    for reply in baseline:
        if reply.completed and reply.id in theirs:
            tokens = theirs[reply.id].tokens
            at = first_changed(reply.tokens, tokens)
            sizes = reply.prompt_tokens, len(reply.tokens), len(tokens)
            rows.append((reply.id, *sizes, at is not None, at))
    columns = ["request", "prompt_tokens", "tokens_baseline", "tokens", "changed", "first_changed"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"first_changed": "Int64", "changed": bool})


def noise_floor(changes: Mapping[str, pd.DataFrame], wanted: int) -> int | None:
    """The most texts that ``control`` or ``rebuild`` changed; None where one of them is not complete.

    changes: by arm, `text_changes`. wanted: requests that there should be.
    """
    unchanged = [changes[arm] for arm in (CONTROL, REBUILD) if arm in changes]
    if len(unchanged) < 2 or any(len(frame) < wanted for frame in unchanged):
        return None
    return max(int(frame.changed.sum()) for frame in unchanged)


def text_verdict(changes: pd.DataFrame, wanted: int, floor: int | None = 0) -> tuple[Verdict, str]:
    """Whether an arm's texts are the baseline's.

    floor: of a candidate, `noise_floor`: as few changed texts as an unchanged arm has are no evidence of a
    change, and none at all no evidence of sameness. The arms that make the floor have none.
    """
    changed, n = int(changes.changed.sum()), len(changes)
    at = ", ".join(
        f"{r.request} at {r.first_changed}" for r in changes[changes.changed].itertuples()
    )
    why = f"{changed} of {n} texts changed" + (f", first token: {at}" if at else "")
    if n < wanted:
        return Verdict.INCONCLUSIVE, f"{why}; {wanted - n} not completed"
    if floor is None:
        return Verdict.INCONCLUSIVE, f"{why}; control or rebuild is not complete"
    if floor and changed <= floor:
        return Verdict.INCONCLUSIVE, f"{why}; an unchanged arm changed {floor}"
    if changed:
        return Verdict.FAIL, why
    return Verdict.PASS, f"{why}, {int(changes.tokens.sum()):,} tokens"


def excerpt(
    one: Reply,
    other: Reply,
    decode: Callable[[Sequence[int]], str],
    before: int = 20,
    after: int = 30,
) -> tuple[str, str, str]:
    """Around the first changed token: what both say, then how each goes on.

    ValueError: they have the same tokens.
    """
    at = first_changed(one.tokens, other.tokens)
    if at is None:
        raise ValueError(f"{one.id}: the tokens are the same")
    common = decode(one.tokens[max(0, at - before) : at])
    ours, theirs = (decode(reply.tokens[at : at + after]) for reply in (one, other))
    return common, ours, theirs


# --- times


_ENDPOINT = {part: ("ttft", {"part": part}) for part in TTFT_PARTS} | {
    "ttft": ("ttft", {"part": "all"}),
    "tpot": ("tpot", {}),
}
_METHODS = {
    "free": "served one by one; interval: bootstrap by request",
    "forced": "fed the baseline's tokens; interval: bootstrap by request",
}


def record_endpoint(
    book: Recorder,
    replies: Sequence[Reply],
    *,
    arm: str,
    run: str,
    not_comparable: str | None = None,
) -> None:
    """Record ``tpot`` by stat, and ``ttft`` by stat and part, of which ``all`` is the whole; in ms.

    run: ``free`` or ``forced``, a label. not_comparable: why these times compare with no others. Nothing is
    recorded of nothing.
    """
    if not any(reply.completed for reply in replies):
        return
    for row in summarize(replies).itertuples():
        if str(row.metric) in _ENDPOINT:
            metric, labels = _ENDPOINT[str(row.metric)]
            book.measure(
                metric,
                row.value,
                low=row.low,  # type: ignore[arg-type]
                high=row.high,  # type: ignore[arg-type]
                n=row.n,  # type: ignore[arg-type]
                unit="ms",
                method=_METHODS[run],
                not_comparable=not_comparable,
                arm=arm,
                run=run,
                stat=row.stat,
                **labels,
            )


@dataclass(frozen=True)
class Change:
    """TPOT of an arm against the baseline's, in percent, over paired requests fed the same tokens.

    detectable: the smallest change these requests could have resolved. n: pairs.
    """

    stat: str
    percent: float
    low: float
    high: float
    detectable: float
    n: int

    @property
    def resolved(self) -> bool:
        """It is as large as what could be resolved."""
        return abs(self.percent) >= self.detectable

    def saved_us(self, tpot_ms: float) -> tuple[float, float, float]:
        """As time saved a token, with its interval, where the baseline's TPOT is ``tpot_ms``."""
        value, high, low = (-10 * tpot_ms * p for p in (self.percent, self.low, self.high))
        return value, low, high


def tpot_change(baseline: Sequence[Reply], other: Sequence[Reply], stat: str) -> Change | None:
    """See `Change`; None where fewer than three requests can be paired."""
    a, b = paired_tpot(baseline, other)
    if len(a) < 3:
        return None
    return Change(stat, *change_percent(a, b, stat), detectable_percent(a, b, stat), len(a))


def saved_us(times: Mapping[str, Timing], arm: str) -> tuple[float, float, float]:
    """What a decode step of ``arm`` takes less than the baseline's: (us, low, high).

    The interval is the bootstrap's, over rounds in which both took turns.
    """
    base = times[BASELINE]
    value, low, high = ratio(times[arm], base)
    return (1 - value) * base.median_us, (1 - high) * base.median_us, (1 - low) * base.median_us


STEADY = 0.1
"""How far from the baseline's the prefill of the same model may be, for its T to decide anything."""


def prefill_verdict(times: Mapping[str, Mapping[int, Timing]], arm: str) -> tuple[Verdict, str]:
    """Whether an arm's prefill is slower than the baseline's by more than ``control`` is, T by T.

    times: by arm and T, of one process, in turn. A T at which ``control`` is not within `STEADY` of the
    baseline decides nothing.
    """
    slower, decided, said = [], [], []
    for T, base in times[BASELINE].items():
        over, again = (ratio(times[one][T], base) for one in (arm, CONTROL))
        steady = abs(again[0] - 1) <= STEADY
        decided += [T] if steady else []
        slower += [T] if steady and over[1] > max(1.0, again[2]) else []
        said.append(f"T={T} {over[0]:.3f} ({again[0]:.3f}{'' if steady else ', decides nothing'})")
    why = f"over the baseline ({CONTROL} over it): {', '.join(said)}"
    if not decided:
        return Verdict.INCONCLUSIVE, why
    if slower:
        return Verdict.FAIL, why
    return Verdict.PASS if len(decided) == len(said) else Verdict.PASS_WITH_LIMITATIONS, why


@dataclass(frozen=True)
class Prediction:
    """What notebook 01 says a token saves. value, low, high: us; NaN without. same_shape: it was
    measured for this model's heads. why: where the figure comes from, or why there is none."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    same_shape: bool = False
    why: str = ""

    @property
    def known(self) -> bool:
        """There is a figure."""
        return not math.isnan(self.value)


def predicted_saving(
    primitive: Evidence, shape_name: str, layers: int, candidate: str = ""
) -> Prediction:
    """Notebook 01's saving at T = 1 with cold caches, static compile less kernel, times ``layers``.

    Where this shape was not timed, the shape it was run for stands in, and the result says so. Of another
    kernel than ``candidate`` there is none.
    """
    if primitive.run == "not_run":
        return Prediction(why=f"notebook 01: {primitive.reason}")
    if (timed := str(primitive.parameters.get("candidate", ""))) != candidate:
        kernels = (one or "the project's kernel" for one in (timed, candidate))
        return Prediction(why="notebook 01 is of {}, not of {}".format(*kernels))
    exact = primitive.claim("bits_compiled")
    if not exact.verdict.passed:
        return Prediction(why=f"notebook 01: bits_compiled is {exact.verdict.value}: {exact.why}")
    own = str(primitive.parameters.get("shape_name"))
    for name in dict.fromkeys((shape_name, own)):
        wanted: dict[str, Any] = dict(T=1, cache="cold", positions="3d", shape=name)
        found = {
            impl: primitive.select("time", impl=impl, **wanted) for impl in ("compiled", "fused")
        }
        if all(found.values()):
            base, fused = (found[impl][0] for impl in ("compiled", "fused"))
            value, low, high = (
                layers * (float(a) - float(b))  # type: ignore[arg-type]
                for a, b in (
                    (base.value, fused.value),
                    (base.low, fused.high),
                    (base.high, fused.low),
                )
            )
            same = name == shape_name
            why = f"notebook 01, {name}, {layers} layers" + (
                "" if same else f": another shape, {shape_name} was not timed there"
            )
            return Prediction(value, low, high, same, why)
    return Prediction(why=f"notebook 01 has no cold times at T = 1 of {shape_name} or {own}")


def effects(
    prediction: Prediction,
    in_turn: Mapping[str, tuple[float, float, float]],
    changes: Mapping[str, Change],
    tpot_ms: float,
) -> pd.DataFrame:
    """Everything that says what a token saves, in us, for `plots.effects`.

    Args:
        in_turn: by arm, `saved_us`. changes: by arm, of mean TPOT. tpot_ms: the baseline's mean.

    Returns columns ``effect``, ``arm``, ``how`` (``predicted``, ``in turn``, ``served``), ``value``,
    ``low``, ``high``, ``unit`` and ``floor``: as far from zero as anything of an unchanged arm's interval
    reaches when it is measured in the same way, and of served requests at least what they resolve. A
    prediction has none.
    """
    rows: list[tuple[str, str, str, float, float, float]] = []
    if prediction.known:
        name = "01 predicts" if prediction.same_shape else "01 predicts,\nother shape"
        ends = prediction.value, prediction.low, prediction.high
        rows.append((name, "", "predicted", *ends))
    arms = dict.fromkeys((*in_turn, *changes))
    names = {arm: arm if arm in (CONTROL, REBUILD) else "candidate" for arm in arms}
    rows += [
        (f"{names[arm]},\nstep in turn", arm, "in turn", *saved) for arm, saved in in_turn.items()
    ]
    rows += [
        (f"{names[arm]},\nserved", arm, "served", *change.saved_us(tpot_ms))
        for arm, change in changes.items()
    ]
    columns = ["effect", "arm", "how", "value", "low", "high"]
    frame = pd.DataFrame(rows, columns=columns)
    unchanged = frame[frame.arm.isin([CONTROL, REBUILD])]
    floors = unchanged[["value", "low", "high"]].abs().max(axis=1).groupby(unchanged.how).max()
    if CONTROL in changes:
        floors["served"] = max(floors["served"], 10 * tpot_ms * changes[CONTROL].detectable)
    return frame.assign(unit="us", floor=frame.how.map(floors))


# --- the article's table

_ROWS = {
    "requests": ("requests", "requests"),
    "requests whose text changed": (None, "requests_text_changed"),
    "tokens, all requests": ("tokens_total_ten_requests", "tokens_total_ten_requests"),
    "tokens, first three": ("tokens_baseline_first_three", "tokens_fused_decode_first_three"),
    "completed / failed": (article.NOT_STATED, article.NOT_STATED),
    "mean TPOT, ms": ("baseline_mean_tpot", article.NOT_STATED),
    "p99 TPOT, ms": ("p99_tpot", "p99_tpot"),
    "p99 TTFT, s": ("p99_ttft_baseline", "p99_ttft_lower_bound"),
    "throughput, tokens/s": ("throughput", "throughput"),
}


def article_table(arms: Mapping[str, Served], changed: Mapping[str, int | None]) -> pd.DataFrame:
    """The article's table of fixed requests: its two columns as far as its text states them, then ours.

    arms: what they served, each its own texts. changed: by arm, how many texts changed; None: unknown.
    Times of an arm whose texts changed are marked.
    """

    def published(name: str | None) -> str:
        if name is None:
            return ""
        value = name if name == article.NOT_STATED else article.figure(name)
        return f"over {value}" if name == "p99_ttft_lower_bound" else str(value)

    columns: dict[str, list[str]] = {
        f"published, {side}": [published(names[i]) for names in _ROWS.values()]
        for i, side in enumerate(("baseline", "candidate"))
    }
    for arm, one in arms.items():
        columns[arm] = _column(one.free, changed.get(arm))
    return pd.DataFrame(columns, index=pd.Index(list(_ROWS), name="free-running"))


def _column(replies: Sequence[Reply], changed: int | None) -> list[str]:
    if not replies:
        return ["NOT_RUN"] * len(_ROWS)
    done = [reply for reply in replies if reply.completed]
    tokens = [len(reply.tokens) for reply in replies]
    stats = {
        (row.metric, row.stat): float(row.value)  # type: ignore[arg-type]
        for row in summarize(replies, resamples=1).itertuples()
    }
    seconds = max((reply.e2e_s or 0.0 for reply in done), default=0.0)
    mark = " (not comparable)" if changed else ""
    times = [
        f"{stats['tpot', 'mean']:.3f}",
        f"{stats['tpot', 'p99']:.3f}",
        f"{stats['ttft', 'p99'] / 1000:.3f}",
        f"{sum(tokens) / seconds:.0f}" if seconds else "none",
    ]
    return [
        str(len(replies)),
        "" if changed is None else str(changed),
        f"{sum(tokens):,}",
        f"{sum(tokens[:3]):,}",
        f"{len(done)} / {len(replies) - len(done)}",
        *(text + mark for text in times),
    ]


def article_queue_s() -> float:
    """How long the last of the article's requests waited, if they were served one by one: an inference.

    The tokens per request of its baseline's first three, at the mean TPOT of its fallback-only run.
    """
    tokens = article.figure("tokens_baseline_first_three") / article.figure(
        "fallback_only_requests"
    )
    return (
        (article.figure("requests") - 1) * tokens * article.figure("fallback_only_mean_tpot") / 1e3
    )
