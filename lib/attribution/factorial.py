"""The arms of the attribution: which processes there are, and what their records say of one another.

Every arm is a job of its own (`lib.service.jobs`), pinned alike and fed the tokens of the baseline, so
that it differs from its partner in what its name says and in nothing else. What was recorded inside the
attention op is then compared bit by bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.lib.attribution import records
from fusion_evidence.lib.attribution.records import Divergence, RecordFile
from fusion_evidence.lib.service.arms import Arm, Pins
from fusion_evidence.lib.service.graphs import GraphReport
from fusion_evidence.lib.service.jobs import Beside, Job, JobResult, Tokens

PINS = Pins(configurations="first", sdpa="math", workspace=":4096:8", first_traced=65)
"""What every arm of the collection holds fixed unless its name says otherwise."""

BASELINE, CONTROL, UNRECORDED = "baseline", "control", "unrecorded"
AGAIN = "again"
"""`UNRECORDED` once more in its process, to be timed in turn with it."""
PINNED = ("pinned_1", "pinned_2")
"""The same, each in a process of its own, to be timed there."""
DETERMINISTIC = "deterministic_mode"
"""The baseline with Inductor's own mode in place of the first configurations."""
FALLBACK_ONLY = "opaque_eager__opaque_eager"
PREFILL = ("in_graph", "opaque_eager", "opaque_compiled")
DECODE = ("in_graph", "opaque_eager", "opaque_compiled", "fused")
FACTORIAL = tuple(f"{p}__{d}" for p in PREFILL for d in DECODE if (p, d) != ("in_graph",) * 2)
"""Its cells, without the baseline's own."""

FITTED = ("calibrated", "other_tree", "casts_per_op", "casts_storage", "emulated_fallback")
"""Arms with numerics that were found: the baseline's, with one thing of them changed, the fallback's."""

UNPINNED: dict[str, Any] = {
    "sdpa": "default",
    "workspace": None,
    "configurations": "timed",
}
"""Each pin of `PINS` as it is without it. ``first_traced`` always has some value."""

_OF_A_PROCESS = ("configurations", "workspace")
"""Pins that a process has from its start: a kernel of the same source is configured once in it."""


def without(*pins: str) -> Pins:
    """`PINS` but for these, by name. KeyError: there is no such pin."""
    return PINS.model_copy(update={name: UNPINNED[name] for name in pins})


# --- the processes


def jobs(arms: Iterable[str], forced: Tokens | None = None, **options: Any) -> list[Job]:
    """One recorded job for each arm, named after it, under `PINS`.

    forced: tokens that every arm is fed, by request, in place of its own; None: each is free and then fed
    its own. options: further fields of `Job`, or others in place of these.
    """
    settings: dict[str, Any] = dict(pins=PINS, record="tensors", logits=True)
    if forced is not None:
        settings |= dict(passes=["forced"], forced=forced)
    return [Job(**dict(name=arm, arm=arm) | settings | options) for arm in arms]


@dataclass(frozen=True)
class Plan:
    """The processes of notebook 05, in three rounds, and the timed ones.

    arms: cells of the factorial beside the baseline. requests, new_tokens: of these and of the rebuilds.
    short, short_tokens: of the arms that test one pin, suspect or fault. rebuilds: processes.
    unpinned: pins to take away, one at a time; all of them together is the arm ``default``.
    traced, body_traced: T of the first trace of the whole model, and of the compiled fallback alone.
    faults: to plant in the article's arm. decode_samples: of the timed arms; 0: none is timed.
    common: fields of every job.
    """

    arms: Sequence[str] = FACTORIAL
    requests: Sequence[str] = ("r01", "r02", "r03")
    new_tokens: int = 24
    short: Sequence[str] = ("r01", "r02", "r03")
    short_tokens: int = 24
    rebuilds: int = 5
    unpinned: Sequence[str] = tuple(UNPINNED)
    traced: Sequence[int] = ()
    body_traced: Sequence[int] = ()
    padded: bool = True
    faults: Sequence[str] = ()
    decode_samples: int = 0
    decode_numerics: str | None = None
    common: Mapping[str, Any] = field(default_factory=dict)

    def _jobs(self, arms: Iterable[str], tokens: Tokens | None, **options: Any) -> list[Job]:
        core = dict(request_ids=list(self.requests), new_tokens=self.new_tokens)
        return jobs(arms, tokens, **core | dict(self.common) | options)

    def _short(self, name: str, arm: str, tokens: Tokens, **options: Any) -> Job:
        few: dict[str, Any] = dict(
            name=name,
            passes=[],
            request_ids=list(self.short),
            new_tokens=self.short_tokens,
        )
        fed = {one: tokens[one][: self.short_tokens] for one in self.short if one in tokens}
        return self._jobs([arm], fed, **few | options)[0]

    def _prefill(self, name: str, arm: str, pins: Pins) -> Job:
        return self._jobs([arm], None, name=name, pins=pins, passes=[], new_tokens=1)[0]

    def first(self) -> list[Job]:
        """The baseline, which gives the tokens, and what needs none: prefill after other first traces."""
        whole = [
            self._prefill(
                f"first_traced_{T}", BASELINE, PINS.model_copy(update={"first_traced": T})
            )
            for T in self.traced
        ]
        body = [
            self._prefill(
                f"body_first_traced_{T}",
                "opaque_compiled__in_graph",
                PINS.model_copy(update={"body_first_traced": T}),
            )
            for T in self.body_traced
        ]
        return [*self._jobs([BASELINE], None, recordings=["again"]), *whole, *body]

    def forced(self, tokens: Tokens, folder: Path) -> list[Job]:
        """What is fed the baseline's tokens: rebuilds, the factorial, one pin less, suspects, faults.

        A rebuild reads no compiler cache. Every other one serves the requests in reverse order, from a file
        in ``folder``; the first is compiled twice more in its process. Nothing without tokens.
        """
        if not tokens:
            return []
        reverse = str(_reversed(self.requests, folder)) if self.rebuilds > 1 else None
        rebuilds = [
            self._jobs(
                ["rebuild"],
                tokens,
                name=f"rebuild_{number}",
                pins=PINS.model_copy(update={"caches_off": self.common.get("cache") == "shared"}),
                passes=[],
                recordings=["recompiled", "recompiled"]
                if number == 1 and self.rebuilds > 1
                else [],
                **({} if number % 2 else dict(requests=reverse)),
            )[0]
            for number in range(1, self.rebuilds + 1)
        ]
        cells = self._jobs(
            self.arms,
            tokens,
            passes=["free"],
            record_inputs=True,
            decode_numerics=self.decode_numerics,
        )
        without_one = [
            self._short(f"without_{pin}", BASELINE, tokens, pins=without(pin))
            for pin in self.unpinned
            if not (pin in _OF_A_PROCESS and self.decode_samples)  # those are timed
        ]
        if "configurations" in self.unpinned:
            instead = without("configurations").model_copy(update={"deterministic": True})
            without_one.append(self._short(DETERMINISTIC, BASELINE, tokens, pins=instead))
        if self.unpinned:
            pins = without(*UNPINNED)
            without_one.append(self._short("default", BASELINE, tokens, pins=pins))
        compiled = "opaque_compiled__opaque_compiled"
        padded = [self._short("padded", compiled, tokens, padded=True)] if self.padded else []
        faults = [
            self._short(f"fault_{fault}", FALLBACK_ONLY, tokens, fault=fault)
            for fault in self.faults
        ]
        return [*rebuilds, *cells, *without_one, *padded, *faults]

    def fitted(
        self, tokens: Tokens, sides: Mapping[str, Numerics | None], arm: str, wanted: Sequence[str]
    ) -> list[Job]:
        """The operator with numerics that were found: those ``wanted`` of `FITTED`, as far as they were.

        sides: ``baseline_prefill``, ``baseline_decode``, ``fallback_prefill``, ``fallback_decode``.
        arm: of all of them; one that has declared numerics in both graphs. A candidate may ignore them, so
        it is not in these: they ask what the compiler computes.
        """
        ways = {
            "calibrated": [sides.get(f"baseline_{graph}") for graph in ("prefill", "decode")],
            "emulated_fallback": [
                sides.get(f"fallback_{graph}") for graph in ("prefill", "decode")
            ],
        }
        prefill, decode = ways["calibrated"]
        if not tokens:
            return []
        if prefill is not None and decode is not None:
            both = (prefill, decode)
            ways["other_tree"] = [_another_tree(one) for one in both]
            for rounding in ("per_op", "storage"):
                ways[f"casts_{rounding}"] = [
                    replace(one, rounding=rounding, contraction="none") for one in both
                ]
        return [
            self._short(
                name, arm, tokens, prefill_numerics=str(p), decode_numerics=str(d), candidate=""
            )
            for name, (p, d) in ways.items()
            if name in wanted and p is not None and d is not None
        ]

    def alone(self, tokens: Tokens) -> list[Job]:
        """The baseline without any recording; where decode is timed, its decode step takes turns with
        itself and with itself without a pin. Then those that were started without a pin that their process
        has as a whole, and what those are held against: `PINNED`."""
        if not tokens:
            return []
        beside = [Beside(name=AGAIN)]
        beside += [
            Beside(name=f"without_{pin}", pins=without(pin))
            for pin in self.unpinned
            if pin not in _OF_A_PROCESS
        ]
        if not self.decode_samples:
            return [self._short(UNRECORDED, BASELINE, tokens, record="none")]
        samples: dict[str, Any] = dict(decode_samples=self.decode_samples)
        found = [self._short(UNRECORDED, BASELINE, tokens, record="none", beside=beside, **samples)]
        apart = [
            self._short(f"without_{pin}", BASELINE, tokens, pins=without(pin), **samples)
            for pin in self.unpinned
            if pin in _OF_A_PROCESS
        ]
        pinned = [
            self._short(name, BASELINE, tokens, record="none", logits=False, **samples)
            for name in (PINNED if apart else ())
        ]
        return [*found, *pinned, *apart]


def _reversed(requests: Sequence[str], folder: Path) -> Path:
    from fusion_evidence.lib.service.prompts import REQUESTS

    lines = [line for line in REQUESTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    path = folder / "reversed.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [line for line in lines if json.loads(line)["id"] in requests]
    path.write_text("\n".join(reversed(kept)) + "\n", encoding="utf-8")
    return path


def _another_tree(numerics: Numerics) -> Numerics:
    """The same but for the reduction: elements added in another order."""

    def other(tree: Reduction) -> Reduction:
        lanes, elements, warps = tree.lanes, tree.elements, tree.warps
        if warps > 1:
            return Reduction(lanes, elements * warps, 1, tree.order)
        return Reduction(lanes, elements // 2, 2) if elements > 1 else Reduction(lanes // 2, 1, 2)

    q, k = numerics.reductions
    return replace(numerics, reduction=other(q), k_reduction=other(k))


def tokens_of(results: Mapping[str, JobResult]) -> Tokens:
    """The baseline's own, by request; none where it did not get so far."""
    try:
        return results[BASELINE].tokens
    except ValueError:
        return {}


def fused_or_emulated(arm: str, device: bool) -> str:
    """The arm, or where there is no device to run the fused kernel the one that emulates its numerics."""
    one = Arm.parse(arm)
    if device or not one.needs_device:
        return arm
    prefill = "opaque_reference" if one.prefill == "opaque_fused" else one.prefill
    return str(Arm(prefill, "opaque_reference" if one.decode == "fused" else one.decode))


# --- what their records say


@dataclass(frozen=True)
class Compared:
    """How one recorded run differs from another.

    records, logits: frames of `records.compare_records` and `compare_logits`; logits is None where one of
    the two kept none. error: why nothing could be compared; the frames are empty then.
    """

    records: pd.DataFrame = field(default_factory=pd.DataFrame)
    logits: pd.DataFrame | None = None
    error: str = ""

    @property
    def total(self) -> int:
        """Records compared: layers of forward calls."""
        return 0 if self.error else len(records.records(self.records))

    @property
    def differing(self) -> int:
        """Records in which any bit of Q, K or V differs."""
        return 0 if self.error else records.differing(self.records)

    @property
    def first(self) -> Divergence | None:
        """The first of them."""
        return None if self.error else records.first_divergence(self.records)

    def of_graph(self, graph: str) -> Compared:
        """Of the prefill calls, or of the decode steps, alone."""
        if self.error:
            return self
        prefill = self.records["step"] == 0
        return Compared(self.records[prefill if graph == "prefill" else ~prefill])

    def __str__(self) -> str:
        if self.error:
            return self.error
        text = f"{self.differing:,} of {self.total:,} records differ"
        if self.differing and not self.records["mismatches"].isna().any():
            share = self.records["mismatches"].sum() / self.records["elements"].sum()
            text += f" ({share:.2g} of all elements)"
        return text


@dataclass(frozen=True)
class Recording:
    """One recording of a job: its first, or further ones (`Job.recordings`) from 2 on."""

    result: JobResult
    number: int = 1

    @property
    def records(self) -> Path:
        """Raises ValueError where there are none, with the job's error."""
        return self.result.path("records" if self.number == 1 else f"records.{self.number}")

    def logits(self, recorded: bool) -> Path | None:
        """Those of the recorded calls themselves, or of the replays that a service would run."""
        kinds = ["logits.recorded", "logits"] if recorded else ["logits"]
        kinds = kinds if self.number == 1 else [f"logits.{self.number}"]
        found = [kind for kind in kinds if kind in self.result.files]
        return self.result.path(found[0]) if found else None


Pair = tuple[Recording, Recording]


def compare(pairs: Mapping[str, Pair], workers: int = 1) -> dict[str, Compared]:
    """Compare the second of each pair with the first, by name, as far as both were recorded.

    That is a request's first steps, as many as the shorter of the two has. workers: processes to compare
    in. A pair of which one side failed has the error.
    """
    files = {name: _files(*pair) for name, pair in pairs.items()}
    known = {name: paths for name, paths in files.items() if not isinstance(paths, str)}
    found = {name: Compared(error=text) for name, text in files.items() if isinstance(text, str)}
    if workers > 1 and len(known) > 1:
        count = min(workers, len(known))
        pool = ProcessPoolExecutor(
            count, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        )
        with pool:
            compared = list(pool.map(_compare, known.values()))
    else:
        compared = [_compare(paths) for paths in known.values()]
    found |= dict(zip(known, compared, strict=True))
    return {name: found[name] for name in pairs}


_Files = tuple[Path, Path, Path | None, Path | None]


def _files(one: Recording, other: Recording) -> _Files | str:
    recorded = (one.number, other.number) != (1, 1)
    try:
        return one.records, other.records, one.logits(recorded), other.logits(recorded)
    except ValueError as error:
        return str(error)


def _compare(files: _Files) -> Compared:
    a, b, logits_a, logits_b = files
    try:
        common = _common(RecordFile(a).calls(), RecordFile(b).calls())
        frame = records.compare_records(a, b, common)
        logits = None
        if logits_a is not None and logits_b is not None:
            logits = records.compare_logits(logits_a, logits_b, common)
        return Compared(frame, logits)
    except ValueError as error:
        return Compared(error=str(error))


def compare_common_logits(a: Path, b: Path) -> pd.DataFrame:
    """`records.compare_logits` of the first steps of each request, as many as are in both files."""
    return records.compare_logits(a, b, _common(records.logit_calls(a), records.logit_calls(b)))


def _common(one: Iterable[tuple[str, int]], other: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Request -> steps in both."""
    both = set(one) & set(other)
    return {name: 1 + max(step for n, step in both if n == name) for name in {n for n, _ in both}}


def differing_by_arm(
    results: Mapping[str, JobResult], baseline: str = BASELINE, workers: int = 1
) -> dict[str, Compared]:
    """Every other recorded job compared with the baseline's, and as `CONTROL` the baseline's second
    recording; see `compare`."""
    base = results[baseline]
    pairs = {
        name: (Recording(base), Recording(result))
        for name, result in results.items()
        if name != baseline and result.job.record != "none"
    }
    if "again" in base.job.recordings:
        pairs = {CONTROL: (Recording(base), Recording(base, 2))} | pairs
    return compare(pairs, workers)


def table(compared: Mapping[str, Compared]) -> pd.DataFrame:
    """One row per arm: arm, records_total, records_differing, logits_total, logits_differing, first, error.

    first: the first divergence as a sentence. Where nothing could be compared the counts are missing.
    """
    rows = []
    for arm, one in compared.items():
        logits = one.logits
        rows.append(
            {
                "arm": arm,
                "records_total": None if one.error else one.total,
                "records_differing": None if one.error else one.differing,
                "logits_total": None if logits is None else int(logits["elements"].sum()),
                "logits_differing": None if logits is None else int(logits["mismatches"].sum()),
                "first": str(one.first or ""),
                "error": one.error,
            }
        )
    counts = ["records_total", "records_differing", "logits_total", "logits_differing"]
    frame = pd.DataFrame(rows, columns=["arm", *counts, "first", "error"])
    return frame.astype(dict.fromkeys(counts, "Int64"))


# --- what was compiled


@dataclass(frozen=True)
class CodeDifference:
    """How two compilations of one graph differ.

    source: the generated source is the same, but for names and hashes. configs: kernel -> the two
    configurations, where they differ. binaries: kernels whose machine code differs, as far as files of it
    were found. kernels: in both.
    """

    graph: str
    source: bool
    configs: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
    binaries: Sequence[str]
    kernels: int

    @property
    def brief(self) -> str:
        """Without the names of kernels and what of their configurations differs."""
        text = f"{self.graph}: source {'equal' if self.source else 'different'}"
        if self.configs:
            text += f", {len(self.configs)} of {self.kernels} kernels configured differently"
        return text

    def __str__(self) -> str:
        text = self.brief
        if self.configs:
            shown = [
                f"{_short(kernel)} {_changed(*both)}"
                for kernel, both in list(self.configs.items())[:2]
            ]
            text += f" ({'; '.join(shown)}{', ...' if len(self.configs) > 2 else ''})"
        if self.binaries:
            text += f", machine code of {len(self.binaries)} kernels differs"
        return text

    @property
    def same(self) -> bool:
        """Nothing that is known of them differs."""
        return self.source and not self.configs and not self.binaries


def _short(kernel: str) -> str:
    """A generated kernel's kind and number, which tell it from the others of its graph."""
    return re.sub(r"^(triton_[a-z]+)_.+_(\d+)$", r"\1_..._\2", kernel)


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {one.get(name)} -> {other.get(name)}" for name in names)


def code_difference(
    one: Mapping[str, GraphReport], other: Mapping[str, GraphReport], graph: str, suffix: str = ""
) -> CodeDifference | None:
    """Of ``graph`` in two results' `JobResult.graphs`; None where one of them has no such graph.

    suffix: of the other's name, such as ``@2`` for a second compilation in the process.
    """
    a, b = one.get(graph), other.get(graph + suffix)
    if a is None or b is None:
        return None
    shared = [kernel for kernel in a.configs if kernel in b.configs]
    return CodeDifference(
        graph=graph,
        source=a.source_sha256 == b.source_sha256,
        configs={
            kernel: (a.configs[kernel], b.configs[kernel])
            for kernel in shared
            if a.configs[kernel] != b.configs[kernel]
        },
        binaries=[
            kernel
            for kernel, digest in a.binaries.items()
            if digest and b.binaries.get(kernel) and b.binaries[kernel] != digest
        ],
        kernels=len(shared) or len(a.binaries),
    )
