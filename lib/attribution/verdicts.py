"""What the compared arms say: a verdict on every suspect, and the finding in plain sentences.

Nothing is claimed under the floor, the most records in which one rebuild of the unchanged baseline differs
from another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from fusion_evidence.lib.attribution import records
from fusion_evidence.lib.attribution.factorial import (
    AGAIN,
    BASELINE,
    DETERMINISTIC,
    FALLBACK_ONLY,
    PINNED,
    PREFILL,
    UNRECORDED,
    Compared,
    Pair,
    Recording,
    code_difference,
    compare_common_logits,
)
from fusion_evidence.lib.attribution.fingerprint import Fingerprint, fingerprint
from fusion_evidence.lib.measure.timing import Timing, ratio
from fusion_evidence.lib.report import article
from fusion_evidence.lib.report.evidence import Verdict
from fusion_evidence.lib.service.arms import Arm
from fusion_evidence.lib.service.jobs import JobResult

Answer = Literal["moves bits", "moves no bit", "not above the floor", "not run"]
_Graph = Literal["prefill", "decode"]

COMPILED = "opaque_compiled__opaque_compiled"


@dataclass(frozen=True)
class Suspect:
    """A suspected cause, and pairs of arms that differ in it alone.

    between: of each pair the arm without and the arm with it. how: what the two differ in.
    """

    cause: str
    between: tuple[tuple[str, str], ...]
    how: str


def suspects(
    traced: Iterable[int] = (), body_traced: Iterable[int] = (), kernel: bool = True
) -> list[Suspect]:
    """The article's five, and three that it does not name.

    traced, body_traced: T of first traces, see `Plan`. kernel: the fitted arms run the fused kernel; an
    emulation in PyTorch writes its intermediates to memory too, and tells nothing about them.
    """
    return [
        Suspect(
            "reduction_tree",
            (("calibrated", "other_tree"),),
            "the same operator, its squares added in another order",
        ),
        Suspect(
            "materialized_intermediates",
            ((FALLBACK_ONLY, "emulated_fallback"),) if kernel else (),
            "eager code, which writes every intermediate to memory, and one kernel with the same "
            "rounding, which writes none",
        ),
        Suspect(
            "cast_positions",
            (("calibrated", "casts_per_op"), ("calibrated", "casts_storage")),
            "the same operator and tree, rounding after every operation, or where a tensor is stored",
        ),
        Suspect(
            "fusion_boundary",
            ((BASELINE, COMPILED),),
            "the same code, compiled inside the model's graph or as a graph of its own",
        ),
        Suspect(
            "stride_and_layout",
            ((COMPILED, "padded"),),
            "the same operator, given contiguous rows or rows of a wider tensor",
        ),
        Suspect(
            "neighbours",
            ((BASELINE, "without_configurations"), (BASELINE, DETERMINISTIC)),
            "the same model, its kernels' configurations chosen by timing them, or as Inductor's "
            "deterministic mode chooses them",
        ),
        Suspect(
            "first_traced",
            tuple((BASELINE, f"first_traced_{T}") for T in traced),
            "the same model, first traced at the pinned T or at another (prefill alone)",
        ),
        Suspect(
            "body_first_traced",
            tuple(("opaque_compiled__in_graph", f"body_first_traced_{T}") for T in body_traced),
            "the compiled fallback first traced at the model's T or at another (prefill alone)",
        ),
    ]


def stands_in(suspect: Suspect, present: Iterable[str]) -> Suspect:
    """With an arm that is compiled only at prefill where the one that is at both was not run."""
    names = set(present)
    half = "opaque_compiled__in_graph"
    if COMPILED in names or half not in names or suspect.cause == "stride_and_layout":
        return suspect
    pairs = tuple(
        tuple(half if name == COMPILED else name for name in pair) for pair in suspect.between
    )
    return Suspect(suspect.cause, pairs, suspect.how)  # type: ignore[arg-type]


def pairs(listed: Iterable[Suspect], results: Mapping[str, JobResult]) -> dict[str, Pair]:
    """Recordings to compare, as far as both arms were run, by `pair_name`."""
    return {
        pair_name(one, other): (Recording(results[one]), Recording(results[other]))
        for suspect in listed
        for one, other in suspect.between
        if one in results and other in results
    }


def generated(suspect: Suspect, results: Mapping[str, JobResult], brief: bool = False) -> str:
    """For a suspect that acts through what is compiled: what differs there, pair by pair. brief: without
    the kernels' names."""
    if suspect.cause not in ("fusion_boundary", "neighbours", "first_traced"):
        return ""
    return "".join(
        f"; compiled, {other}: {explain(results[one], results[other], brief=brief)}"
        for one, other in suspect.between
        if one in results and other in results
    )


def pair_name(one: str, other: str) -> str:
    """Of the comparison of two arms."""
    return f"{one} / {other}"


@dataclass(frozen=True)
class Judgement:
    """The verdict on one suspect, and what it rests on; brief: the same, without where it began."""

    suspect: Suspect
    answer: Answer
    why: str
    brief: str

    def __str__(self) -> str:
        return f"{self.answer}: {self.why}"


def judge(suspect: Suspect, compared: Mapping[str, Compared], floor: int) -> Judgement:
    """From the pairs that were compared: the strongest of what they say."""
    said: list[tuple[Answer, str]] = []
    brief: list[str] = []
    for one, other in suspect.between:
        found = compared.get(pair_name(one, other))
        if found is None:
            continue
        brief.append(f"{other}: {found}")
        if found.error:
            said.append(("not run", brief[-1]))
            continue
        text = f"{other} against {one}: {found}"
        if found.differing > floor:
            said.append(("moves bits", f"{text}, first in {found.first}"))
        elif found.differing:
            said.append(("not above the floor", f"{text}, the floor is {floor:,}"))
        else:
            said.append(("moves no bit", text))
    if not said:
        why = "its arms were not asked for, or cannot run here"
        return Judgement(suspect, "not run", why, why)
    order: list[Answer] = ["moves bits", "not above the floor", "moves no bit", "not run"]
    answer = min((answer for answer, _ in said), key=order.index)
    return Judgement(suspect, answer, "; ".join(text for _, text in said), "; ".join(brief))


# --- what a fixed point takes


def differs(name: str, compared: Mapping[str, Compared], least: int | None) -> tuple[Verdict, str]:
    """Does an arm differ by more than the floor?"""
    found = compared.get(name)
    if found is None:
        return Verdict.NOT_RUN, f"{name} was not run"
    if found.error:
        return Verdict.INCONCLUSIVE, f"{name}: {found.error}"
    if found.differing and (least is None or found.differing <= least):
        return Verdict.INCONCLUSIVE, f"{found}; {_floor(least)}"
    return (Verdict.PASS if found.differing else Verdict.FAIL), f"{found}; {_floor(least)}"


def equal(name: str, compared: Mapping[str, Compared], least: int | None) -> tuple[Verdict, str]:
    """Is an arm equal to its partner? Where it differs by less than a rebuild does, nobody knows."""
    verdict, why = differs(name, compared, least)
    opposite = {Verdict.PASS: Verdict.FAIL, Verdict.FAIL: Verdict.PASS}
    return opposite.get(verdict, verdict), why


def _floor(least: int | None) -> str:
    return "no rebuild to tell it from" if least is None else f"floor {least:,}"


def floor(compared: Mapping[str, Compared]) -> int | None:
    """Most records in which a rebuild (arms ``rebuild_...``) differs; None where none was compared."""
    found = [
        c.differing for name, c in compared.items() if name.startswith("rebuild_") and not c.error
    ]
    return max(found, default=None)


def explain(
    one: JobResult,
    other: JobResult,
    suffix: str = "",
    graphs: Sequence[str] = ("prefill", "decode"),
    brief: bool = False,
) -> str:
    """What the two processes compiled: source, configurations and machine code of each graph; brief: as of
    `CodeDifference`."""
    differences = [code_difference(one.graphs, other.graphs, graph, suffix) for graph in graphs]
    known = [found for found in differences if found is not None]
    said = [found.brief if brief else str(found) for found in known]
    return "; ".join(said) or "no generated code was kept"


def cause(one: JobResult, other: JobResult, found: Compared, suffix: str = "") -> str:
    """Where a difference between two compilations of one program can come from; empty: there is none."""
    if found.error or not found.differing:
        return ""
    graphs = ("prefill", "decode")
    known = [code_difference(one.graphs, other.graphs, graph, suffix) for graph in graphs]
    if all(difference is not None and difference.same for difference in known):
        return (
            "source, configurations and machine code of all generated kernels are equal, so it arises "
            "outside them, in library kernels such as matrix products"
        )
    return explain(one, other, suffix)


def recompiled(results: Mapping[str, JobResult]) -> dict[str, tuple[Pair, str]]:
    """Each further compilation inside a rebuild's process, to compare with the baseline, and what of its
    code differs from it; by name, ``recompiled_2``, ..."""
    found = {}
    for name, result in results.items():
        for number, how in enumerate(result.job.recordings, start=2):
            if how == "recompiled" and name.startswith("rebuild_"):
                pair = Recording(results[BASELINE]), Recording(result, number)
                text = explain(results[BASELINE], result, f"@{number}")
                found[f"recompiled_{number}"] = pair, text
    return found


def deterministic_mode() -> str:
    """How long Inductor's deterministic mode lasts when its option is set, by compiling something here."""
    import torch
    from torch._inductor import config

    if not hasattr(config, "deterministic"):
        return f"torch {torch.__version__} has no deterministic mode of Inductor"

    def something(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with config.patch({"deterministic": True}):
        torch.compile(something, backend="eager")(torch.zeros(3))
        lasts = bool(config.deterministic)
    if lasts:
        return "Inductor's option `deterministic` is still on after a compilation"
    return (
        f"in torch {torch.__version__}, Inductor's option `deterministic` is off again after the first "
        "graph: Dynamo restores PyTorch's global state with `use_deterministic_algorithms`, which sets the "
        "option too; a second compilation in the process is of another program"
    )


def passive(results: Mapping[str, JobResult]) -> tuple[Verdict, str]:
    """Does recording leave the code and the logits as they are without it?"""
    if UNRECORDED not in results:
        return Verdict.NOT_RUN, "the baseline was not run without a recording"
    base, bare = results[BASELINE], results[UNRECORDED]
    said, equal_so_far = [], True
    for graph in ("prefill", "decode"):
        difference = code_difference(base.graphs, bare.graphs, graph)
        if difference is None:
            return Verdict.INCONCLUSIVE, f"no generated code of {graph}: {bare.error or base.error}"
        said.append(str(difference))
        equal_so_far &= difference.source
    try:
        with_it = Recording(base).logits(recorded=True)
        without_it = Recording(bare).logits(recorded=False)
        if with_it is None or without_it is None:
            return Verdict.INCONCLUSIVE, f"no logits: {bare.error or base.error}"
        pairs = {"unrecorded": without_it}
        if "logits.recorded" in base.files:
            pairs["replayed"] = base.path("logits")
        for name, path in pairs.items():
            frame = compare_common_logits(with_it, path)
            moved, n = int(frame["mismatches"].sum()), int(frame["elements"].sum())
            said.append(f"{moved:,} of {n:,} logits differ, recorded against {name}")
            equal_so_far &= moved == 0
    except ValueError as error:
        return Verdict.INCONCLUSIVE, str(error)
    return (Verdict.PASS if equal_so_far else Verdict.FAIL), "; ".join(said)


NOISE_LIMIT = 5.0
"""How far from zero, in percent, an A/A pair of decode steps may be where a pin's cost is looked for."""
NO_PIN = "none (A/A)"


@dataclass(frozen=True)
class PinCost:
    """Time of the pinned decode step over the one without a pin, less 1, in percent, with its interval.

    pin: `NO_PIN` of two that are pinned alike. how: ``in turn`` in one process, or each in its ``own
    process``. floor: how far from zero the A/A pair of that kind reaches, with its interval; NaN without.
    method: of the times.
    """

    pin: str
    how: str
    value: float
    low: float
    high: float
    floor: float
    method: str

    @property
    def not_comparable(self) -> str | None:
        """Why the cost says nothing; None where it does, and of an A/A pair."""
        if self.pin == NO_PIN or self.floor <= NOISE_LIMIT:
            return None
        if math.isnan(self.floor):
            return f"no A/A pair was timed ({self.how})"
        return f"the A/A pair ({self.how}) reaches {self.floor:.1f} %, over {NOISE_LIMIT:g} %"


def pin_costs(results: Mapping[str, JobResult]) -> list[PinCost]:
    """What the pins cost a decode step, as far as that was timed. Each is held against a step that was
    timed in the same way, and beside an A/A pair that was too."""
    turns = results[UNRECORDED].decode_times if UNRECORDED in results else {}
    apart = {
        name: result.decode_times[name]
        for name, result in results.items()
        if name in result.decode_times and (name in PINNED or name.startswith("without_"))
    }
    ways = {"in turn": (turns, UNRECORDED, AGAIN), "own process": (apart, *PINNED)}
    found = []
    for how, (times, base, again) in ways.items():
        others = [name for name in times if name != base] if base in times else []
        percent = {name: _percent_over(times[base], times[name]) for name in others}
        floor = max(map(abs, percent.get(again, (math.nan,))))
        for name in others:
            pin = NO_PIN if name == again else name.removeprefix("without_")
            method = times[name].method
            if how != "in turn":  # `timing` says of any number of arms that they took turns
                method = method.replace("arms interleaved", "alone in its process")
            found.append(PinCost(pin, how, *percent[name], floor, method))
    return found


def _percent_over(pinned: Timing, other: Timing) -> tuple[float, float, float]:
    value, low, high = (100 * (one - 1) for one in ratio(pinned, other))
    return value, low, high


# --- the kernel against the fallback


def kernel_against_fallback(results: Mapping[str, JobResult]) -> dict[str, Pair]:
    """Pairs of the factorial with the same prefill: decode by the eager fallback, and by the kernel (or
    what emulates it)."""
    found = {}
    for prefill in PREFILL:
        fallback = f"{prefill}__opaque_eager"
        for kernel in (f"{prefill}__fused", f"{prefill}__opaque_reference"):
            if fallback in results and kernel in results:
                pair = Recording(results[fallback]), Recording(results[kernel])
                found[pair_name(fallback, kernel)] = pair
    return found


def kernel_cleared(decode: Mapping[str, Compared], least: int | None) -> tuple[Verdict, str]:
    """Did taking the kernel away leave the decode steps as they were? ``decode``: of each such pair."""
    if not decode:
        return Verdict.NOT_RUN, "no two arms have the same prefill, one with the kernel"
    said = {name: equal(name, decode, least) for name in decode}
    text = _after_each({name: why for name, (_, why) in said.items()})
    return _worst([verdict for verdict, _ in said.values()]), text


def _after_each(said: Mapping[str, str]) -> str:
    """What is said of such pairs, once where it is the same, by their prefill."""
    prefills: dict[str, list[str]] = {}
    for name, why in said.items():
        prefills.setdefault(why, []).append(name.partition("__")[0])
    return "; ".join(f"after prefill {', '.join(names)}: {why}" for why, names in prefills.items())


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    order = [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.PASS]
    return min(verdicts, key=order.index)


def compiled_arm(names: Iterable[str]) -> str:
    """The arm whose only change is the boundary: compiled behind the operator, in both graphs, or in
    prefill's where there is no other."""
    known, half = set(names), "opaque_compiled__in_graph"
    return half if half in known and COMPILED not in known else COMPILED


def explained(
    compared: Mapping[str, Compared], between: Mapping[str, Compared], least: int | None
) -> tuple[Verdict, str]:
    """Do the numerics alone give either side: the operator with the baseline's, and with the fallback's?"""
    fallback = [name for name in between if name.endswith(" / emulated_fallback")]
    arms = {"calibrated": compared} | dict.fromkeys(fallback, between)
    said = {name: equal(name, where, least) for name, where in arms.items() if name in where}
    if not said:
        return Verdict.NOT_RUN, "no arm with the numerics of either side was run"
    verdict = _worst([verdict for verdict, _ in said.values()])
    if verdict is Verdict.PASS and (len(said) < 2):
        verdict = Verdict.PASS_WITH_LIMITATIONS
    return verdict, "; ".join(f"{name}: {why}" for name, (_, why) in said.items())


# --- which numerics each side has

SIDES: dict[str, tuple[str | None, _Graph]] = {
    "baseline_prefill": (BASELINE, "prefill"),
    "baseline_decode": (BASELINE, "decode"),
    "fallback": (None, "prefill"),
    "fallback_decode": (None, "decode"),
}
"""Side -> whose outputs, and of which graph; None: of the opaque arm with the eager body."""


def fingerprints(
    results: Mapping[str, JobResult], device: str | None = None
) -> dict[str, Fingerprint | str]:
    """`fingerprint` of each of `SIDES`, or why there is none.

    The inputs are those of an opaque arm; of several, of one with a compiled body, whose later layers
    are more often given what the baseline's are.
    """
    return {side: _fingerprint(results, *SIDES[side], device) for side in SIDES}


def _fingerprint(
    results: Mapping[str, JobResult], observed: str | None, graph: _Graph, device: str | None
) -> Fingerprint | str:
    bodies = ("opaque_eager",) if observed is None else ("opaque_compiled", "opaque_eager")
    given = [
        result
        for body in bodies
        for result in results.values()
        if result.job.record_inputs
        and "records" in result.files
        and not result.job.fault
        and getattr(Arm.parse(result.job.arm), graph) == body
    ]
    why = f"no arm recorded the inputs of an opaque {graph}"
    for result in given:
        seen = result if observed is None else results[observed]
        try:
            return fingerprint(result.path("records"), seen.path("records"), graph, device=device)
        except ValueError as error:
            why = str(error)
    return why


# --- changed tokens


def changed_tokens(compared: Mapping[str, Compared]) -> pd.DataFrame:
    """Of all arms, the steps whose most likely token changed: arm and the columns of `records.flips`."""
    found = [
        records.flips(one.logits).assign(arm=arm)
        for arm, one in compared.items()
        if one.logits is not None
    ]
    rows = [frame for frame in found if not frame.empty]
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=["arm"])


def margins(compared: Mapping[str, Compared]) -> pd.Series[float] | None:
    """First less second logit of the baseline, of every step; from the arm compared at most steps."""
    frames = [one.logits for one in compared.values() if one.logits is not None]
    return max(frames, key=len)["margin_a"] if frames else None


# --- the finding


def finding(
    machine: str,
    least: int | None,
    compared: Mapping[str, Compared],
    between: Mapping[str, Compared],
    prints: Mapping[str, Fingerprint | str],
    judgements: Sequence[Judgement],
    tokens: pd.DataFrame,
    unstable: Mapping[str, str] = {},
) -> list[str]:
    """What is due to what on this machine, in sentences made of the figures.

    least: the floor. between: the pairs of the suspects and of fused against fallback. unstable: what
    differs from the baseline though it is one, and its `cause`.
    """
    said = [_fixed_point(machine, least)]
    said += [
        f"The {name.replace('_', ' ')} differs from it: {why}." for name, why in unstable.items()
    ]
    forced = compared.get(FALLBACK_ONLY)
    if forced is not None and not forced.error:
        drifts = forced.differing > (least or 0)
        said.append(
            f"With the fallback forced at every T, so that no fused kernel runs, {forced}: "
            + (
                "the kernel is not needed for the drift."
                if drifts
                else "there is no drift to explain."
            )
        )
    alone = {"prefill": "opaque_eager__in_graph", "decode": "in_graph__opaque_eager"}
    moved = {graph: compared[arm] for graph, arm in alone.items() if arm in compared}
    if len(moved) == 2 and not any(one.error for one in moved.values()):
        text = ", ".join(f"at {graph} {one}" for graph, one in moved.items())
        both = all(one.differing > (least or 0) for one in moved.values())
        said.append(
            f"The eager fallback in one graph alone: {text}."
            + (" Forcing it at T = 1 too moves what it was meant to clear." if both else "")
        )
    said += _kernel_and_fallback(compared, between, least)
    said += _numerics(prints, compared, between)
    for answer in ("moves bits", "not above the floor", "moves no bit", "not run"):
        causes = [j.suspect.cause.replace("_", " ") for j in judgements if j.answer == answer]
        if causes:
            said.append(f"{_ANSWERS[answer]}: {', '.join(causes)}.")
    if len(tokens):
        tossed = int(tokens["coin_toss"].sum())
        said.append(
            f"{len(tokens):,} most likely tokens changed over all arms; {tossed:,} of them are coin "
            f"tosses, of a margin at most {records.NEAR} times the noise that all logits of the step have."
        )
    return said


def _kernel_and_fallback(
    compared: Mapping[str, Compared], between: Mapping[str, Compared], least: int | None
) -> list[str]:
    """Of the decode steps after the same prefill, and of both against the baseline's after its own."""
    kernels = {"fused": "the kernel", "opaque_reference": "what emulates the kernel"}
    decode = {
        name: one.of_graph("decode")
        for name, one in between.items()
        if name.endswith(tuple(f"__{kernel}" for kernel in kernels)) and not one.error
    }
    differ = {name: one.differing > (least or 0) for name, one in decode.items()}
    said = []
    for verdict, wanted in (("do not give", True), ("give", False)):
        if names := [name for name in decode if differ[name] is wanted]:
            kernel = kernels[names[0].rpartition("__")[2]]
            said.append(
                f"{kernel[0].upper()}{kernel[1:]} and the fallback {verdict} the same decode steps "
                f"({_after_each({name: str(decode[name]) for name in names})})."
            )
    against = {
        text: compared[arm].of_graph("decode")
        for body, text in {"opaque_eager": "the fallback", **kernels}.items()
        if (arm := f"in_graph__{body}") in compared and not compared[arm].error
    }
    if any(differ.values()) and len(against) > 1:
        text = ", ".join(f"{name}: {one}" for name, one in against.items())
        said.append(
            "Each has numerics of its own at decode. Against the baseline, after the baseline's prefill: "
            f"{text}."
        )
    return said


_ANSWERS: dict[Answer, str] = {
    "moves bits": "Moves bits here",
    "not above the floor": "Cannot be told from a rebuild here",
    "moves no bit": "Moves no bit here",
    "not run": "Not tried here",
}


def _fixed_point(machine: str, least: int | None) -> str:
    if least is None:
        return f"On {machine} no rebuild was compared: nothing below is told from a rebuild."
    if least:
        return (
            f"On {machine} the baseline is no fixed point: a rebuild of it differs in up to {least:,} "
            "records, and nothing is claimed under that."
        )
    return f"On {machine} the baseline is a fixed point under these pins: no rebuild differs in a record."


def _numerics(
    prints: Mapping[str, Fingerprint | str],
    compared: Mapping[str, Compared],
    between: Mapping[str, Compared],
) -> list[str]:
    said = []
    ours, theirs = prints.get("baseline_prefill"), prints.get("fallback")
    if isinstance(ours, Fingerprint) and isinstance(theirs, Fingerprint):
        same = ours.closest.rounding == theirs.closest.rounding
        said.append(
            f"In the baseline's graph prefill rounds {ours.closest.rounding}, in the fallback "
            f"{theirs.closest.rounding}" + (", so rounding is not it." if same else ".")
        )
    calibrated = compared.get("calibrated")
    emulated = between.get(pair_name(FALLBACK_ONLY, "emulated_fallback"))
    if calibrated is not None and not calibrated.error:
        said.append(
            f"The operator with the baseline's numerics, against the baseline: {calibrated}."
        )
    if emulated is not None and not emulated.error:
        said.append(f"The operator with the fallback's numerics, against the fallback: {emulated}.")
    return said


def article_limits() -> dict[str, tuple[str, ...]]:
    """What the article's own data can tell, what they cannot, and what would settle it."""
    fused = article.figure("tokens_fused_decode_first_three")
    fallback = article.figure("tokens_fallback_only_first_three")
    return {
        "What the article's data can tell": (
            "The drift remains when the fused kernel never runs: that kernel is not needed for it.",
            "The service drifted although the fallback, compiled alone, was bit-equal: such an equality "
            "proves nothing about a whole model.",
        ),
        "What they cannot": (
            "Whether the fused kernel adds drift of its own. The forced fallback put a third form in its "
            f"place at T = 1, and the two runs differ from each other as well ({fused} and {fallback} "
            "tokens).",
            "How much a rebuild of the unchanged baseline would have drifted: there is no control and no "
            "rebuild.",
            "Which of its five suspects did it: no run separates them, and text is the only record.",
            "Whether the service's fallback was compiled, or first traced at another T than the model.",
        ),
        "What would settle it": (
            "This notebook on gfx936: an arm with the compiled fallback that differs from the baseline "
            "while no rebuild does would be the article's case. First traces at other T are its first "
            "candidate.",
        ),
    }
