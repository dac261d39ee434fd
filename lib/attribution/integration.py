"""Bit-exact integration: calibrate on a recorded baseline, check at start-up, integrate, count the saving.

The compiled baseline says nowhere how it rounds. So it is recorded beside a run of the same tokens whose
prologue is opaque, so that its inputs are seen; the declared numerics that make of these inputs what the
baseline made of them are its own (`fingerprint`). They go into a file with all they were found for, and
with a sample, so that whoever integrates can check both at start-up.
"""

from __future__ import annotations

import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusion_evidence.kernels import fused, reference
from fusion_evidence.kernels.candidate import load_kernel
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.attribution import factorial
from fusion_evidence.lib.attribution.calibrated import (
    CalibrationFile,
    Candidate,
    Graph,
    GraphCalibration,
    Revalidation,
    StaleCalibration,
)
from fusion_evidence.lib.attribution.factorial import Compared, Recording
from fusion_evidence.lib.attribution.fingerprint import Fingerprint, Rows, capture, identify
from fusion_evidence.lib.attribution.records import RecordFile
from fusion_evidence.lib.measure.inputs import Inputs
from fusion_evidence.lib.measure.machine import Machine, detect
from fusion_evidence.lib.measure.primitive import in_batches, own_arms, time_arms
from fusion_evidence.lib.measure.timing import Timing
from fusion_evidence.lib.report.evidence import Evidence
from fusion_evidence.lib.service.arms import Pins
from fusion_evidence.lib.service.jobs import Beside, Job, JobResult, Tokens
from fusion_evidence.lib.service.model import ModelConfig
from fusion_evidence.lib.service.prompts import COMPACT

GRAPHS: tuple[Graph, Graph] = ("decode", "prefill")
SAMPLE = 32
"""Tokens of each layer that go into the start-up check."""
ENOUGH = 20
"""Mismatches that reject a candidate beyond doubt."""


# --- which processes there are


@dataclass(frozen=True)
class Case:
    """One model to integrate into, and the requests it is tried on.

    model: as in `Job`. served: of `Job`, which requests and how many tokens. calibrated_on: the same of
    the requests to calibrate on, some of the served ones or others; None: all of the served ones. A
    recording is fed random tokens, which vary more than a model's own; a free pass gives the texts.

    on_device: the fused kernel runs; else the reference stands for it, with the same bits.
    candidate: a kernel in its place, on any machine, see `kernels.candidate`.
    opaque: the arm whose inputs are captured; the nearer to the baseline, the more of them are its own.
    options: further fields of every `Job`.
    """

    model: str
    pins: Pins
    served: Mapping[str, Any]
    calibrated_on: Mapping[str, Any] | None = None
    on_device: bool = True
    opaque: str = "opaque_compiled__opaque_compiled"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    candidate: str = ""

    def name(self, arm: str) -> str:
        """Of the job of an arm."""
        return f"{self.model}.{arm}"

    @property
    def vocabulary(self) -> int:
        """Tokens the model knows."""
        if self.model == "article":
            return ModelConfig.article().vocab_size
        if self.model == "compact-random":
            return int(self.served.get("vocab") or ModelConfig.compact().vocab_size)
        folder = COMPACT if self.model == "compact" else Path(self.model)
        return int(json.loads((folder / "config.json").read_text())["vocab_size"])

    def job(
        self, name: str, arm: str, requests: Mapping[str, Any] | None = None, **options: Any
    ) -> Job:
        """A recorded job of this case, of the served ``requests`` if it is not given others."""
        requests = requests or self.served
        forced = random_tokens(requests, self.vocabulary, self.seed)
        settings: dict[str, Any] = dict(pins=self.pins, seed=self.seed, passes=["free"])
        settings |= {"model": self.model, "candidate": self.candidate}
        settings |= {**self.options, **requests, **options}
        (made,) = factorial.jobs([arm], forced, **settings)
        return made.model_copy(update={"name": self.name(name)})

    @property
    def apart(self) -> bool:
        """The requests to calibrate on are others than those that are served."""
        chosen = self.calibrated_on or self.served
        return not set(names(chosen)) <= set(names(self.served))

    def observation(self, rebuild: bool = False) -> list[Job]:
        """The baseline, and what it takes to calibrate: the same tokens with the inputs seen.

        rebuild: the baseline once more, in another process.
        """
        chosen = self.calibrated_on or self.served
        only: dict[str, Any] = dict(requests=chosen, passes=[], logits=False)
        jobs = [self.job("baseline", "baseline", passes=["free", "free"], recordings=["again"])]
        if self.apart:
            jobs.append(self.job("observed", "baseline", **only))
        jobs.append(self.job("captured", self.opaque, record_inputs=True, **only))
        if rebuild:
            jobs.append(self.job("rebuild", "rebuild"))
        return jobs

    def observed(self, results: Mapping[str, JobResult]) -> tuple[JobResult, JobResult]:
        """Of `observation`: the run with the inputs, and the baseline's run of the same tokens."""
        baseline = "observed" if self.apart else "baseline"
        return results[self.name("captured")], results[self.name(baseline)]

    def calibrate(self, results: Mapping[str, JobResult], path: Path) -> Calibrated:
        """`calibrate` from the jobs of `observation`, or their errors."""
        try:
            inputs, observed = (one.path("records") for one in self.observed(results))
        except ValueError as error:
            return Calibrated(path, {}, dict.fromkeys(GRAPHS, str(error)), 0.0)
        return calibrate(inputs, observed, path, self.pins)

    def keep_code(self, results: Mapping[str, JobResult], folder: Path) -> None:
        """Copy the baseline's generated source, as far as there is any, to ``<model>.<graph>.py``."""
        baseline = results[self.name("baseline")]
        folder.mkdir(parents=True, exist_ok=True)
        for graph in GRAPHS:
            if f"code/{graph}" in baseline.files:
                shutil.copy(baseline.path(f"code/{graph}"), folder / f"{self.model}.{graph}.py")

    def integration(self, calibrated: Calibrated, arms: Sequence[str]) -> list[Job]:
        """The arms with declared numerics, of those in `ARMS`, as far as their calibration was found.

        The file says what the baseline computes, and is checked by the project's kernel; whether a
        candidate computes it too, its records say. It may ignore numerics, so that the arms that are wrong
        on purpose, which show what the comparison can see, are the project's.
        """
        file = {"calibration": str(calibrated.path)}
        own = "in_graph__fused" if self.on_device else "in_graph__opaque_reference"
        body, wrong = "in_graph__fused" if self.candidate else own, {"candidate": ""}
        known: dict[str, tuple[str, dict[str, str]]] = {}
        if decode := calibrated.found("decode"):
            known |= {
                "integrated": (body, file),
                "per_op": (own, wrong | {"decode_numerics": str(per_op(decode.numerics))}),
                "other_tree": (own, wrong | {"decode_numerics": str(other_tree(decode.numerics))}),
                "opaque_eager__fused": ("opaque_eager__fused", file),
            }
            if calibrated.found("prefill"):
                known["opaque_fused__fused"] = ("opaque_fused__fused", file)
        chosen = [(arm, *known[arm]) for arm in arms if arm in known]
        return [self.job(arm, compiled, None, **options) for arm, compiled, options in chosen]

    def timed(self, decode: Numerics, *, samples: int, steps: int) -> Job:
        """One process that decodes the same tokens through each arm and times all of them in turn.

        Beside the baseline: itself compiled once more (A/A), ``integrated``, and ``default``, the
        baseline without pins, which is what users run today.
        """
        beside = [
            Beside(name="control", arm="baseline"),
            Beside(name="integrated", arm="integrated", decode_numerics=str(decode)),
            Beside(name="default", arm="baseline", pins=Pins()),
        ]
        timing: dict[str, Any] = dict(decode_samples=samples, decode_steps=steps, beside=beside)
        return self.job("timed", "baseline", record="none", **timing)


ARMS = {
    "rebuild": "the baseline, compiled from nothing in another process",
    "integrated": "calibrated op at T = 1, prefill as it was",
    "per_op": "the same, rounded after every operation",
    "other_tree": "the same, another order of adding",
    "opaque_eager__fused": "calibrated op at T = 1, opaque eager code at every other T",
    "opaque_fused__fused": "the calibrated op at every T",
}
"""What can be held against the baseline."""

ON_ANY_MACHINE = ("rebuild", "integrated", "per_op", "other_tree")
"""Those of `ARMS` that the reference can stand for."""


def names(requests: Mapping[str, Any]) -> list[str]:
    """Ids of the requests that ``requests``, fields of `Job`, ask for."""
    return requests.get("request_ids") or [f"T{length}" for length in requests["lengths"]]


def random_tokens(requests: Mapping[str, Any], vocabulary: int, seed: int) -> Tokens:
    """Tokens to feed each of them, its own whichever others there are."""

    def draw(name: str) -> list[int]:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        return torch.randint(vocabulary, (requests["new_tokens"],), generator=generator).tolist()

    return {name: draw(name) for name in names(requests)}


def per_op(numerics: Numerics) -> Numerics:
    """The same trees, rounded after every operation as eager PyTorch does."""
    return replace(numerics, rounding="per_op", contraction="none")


def other_tree(numerics: Numerics) -> Numerics:
    """The same rounding with one of the trees that a kernel's author might write without asking."""
    size = numerics.reduction.size
    trees = [Reduction(32 // warps, size // 32, warps) for warps in (1, 2, 4)]
    different = next(tree for tree in trees if tree not in numerics.reductions)
    return replace(numerics, reduction=different, k_reduction=None)


# --- calibration


@dataclass(frozen=True)
class Calibrated:
    """What calibration found, whether or not it is of use.

    prints: by graph, of those that could be read. errors: why another could not. path: of the file, which
    has the graphs whose numerics reproduce everything.
    """

    path: Path
    prints: Mapping[Graph, Fingerprint]
    errors: Mapping[Graph, str]
    seconds: float

    @cached_property
    def file(self) -> CalibrationFile:
        """As whoever uses it reads it."""
        return CalibrationFile.load(self.path)

    def found(self, graph: Graph) -> GraphCalibration | None:
        """The graph's calibration, if there is one."""
        return self.file.graphs.get(graph) if graph in self.prints else None

    def facts(self, graph: Graph) -> dict[str, str | int | float]:
        """What was found, by name; nothing if there is no calibration."""
        if (found := self.found(graph)) is None:
            return {}
        numerics, (q, k) = found.numerics, found.numerics.reductions
        return {
            "rounding": numerics.rounding,
            "reduction": str(q) if q == k else f"Q {q}, K {k}",
            "contraction": numerics.contraction,
            "elements": found.elements,
            "bound": found.bound,
            "rejected": len(found.rejected),
            "fewest_mismatches": min((one.mismatches for one in found.rejected), default=0),
            "also_fit": _some([str(one.numerics) for one in found.alike]),
        }

    def verdict(self, graph: Graph, least: int) -> tuple[str, str]:
        """Of the claim that ``graph`` has one calibration, of ``least`` elements or more."""
        if graph in self.errors:
            return "INCONCLUSIVE", self.errors[graph]
        said, found = str(self.prints[graph]), self.found(graph)
        if found is None:
            return "FAIL", said
        few = found.rejected_by_fewer_than(ENOUGH)
        if found.alike:
            said += f"; taken: {found.numerics}"
            other = settling(self.prints, graph)
            said += f", which {other} computes and no other candidate" if other else ""
        said += f"; {len(found.rejected)} candidates rejected"
        said += f", {len(few)} of them by fewer than {ENOUGH} mismatches" if few else ""
        limited = found.elements < least or found.alike or few
        return ("PASS_WITH_LIMITATIONS" if limited else "PASS"), said


def _some(names: Sequence[str], most: int = 4) -> str:
    rest = len(names) - most
    return "; ".join(sorted(names)[:most] + [f"{rest} more"] * (rest > 0)) or "none"


def settled(prints: Mapping[Graph, Fingerprint]) -> dict[Graph, Fingerprint]:
    """The same, where several candidates fit with the one as ``closest`` that another graph of the model
    computes beyond doubt; without such a graph with the first that was tried, as before."""
    found = {}
    for graph, one in prints.items():
        known = [sure for other, sure in _sure(prints).items() if other != graph]
        taken = next((way for way in one.alike if way in known), one.closest)
        fits = [one.closest, *one.alike]
        rest = tuple(way for way in fits if way != taken)
        found[graph] = replace(one, closest=taken, alike=rest)
    return found


def settling(prints: Mapping[Graph, Fingerprint], graph: Graph) -> Graph | None:
    """Which other graph computes beyond doubt what was taken for ``graph``."""
    taken = prints[graph].closest
    return next((g for g, sure in _sure(prints).items() if g != graph and sure == taken), None)


def _sure(prints: Mapping[Graph, Fingerprint]) -> dict[Graph, Numerics]:
    return {g: one.numerics for g, one in prints.items() if one.numerics and not one.alike}


def calibrate(
    inputs: Path,
    observed: Path,
    path: Path,
    pins: Pins,
    machine: Machine | None = None,
    device: str | None = None,
) -> Calibrated:
    """Find what each graph of ``observed`` computes, and write it to ``path`` with a sample beside it.

    Args:
        inputs, observed: recordings as of `fingerprint`. pins: those of both runs.
        machine: the one they were made on; default: this one.

    A graph of which nothing can be said, or that no candidate reproduces, is left out of the file. Of
    several that reproduce it the file has the one that another graph settles, see `settled`.
    """
    began = time.perf_counter()
    shape = RecordFile(inputs).shape
    prints: dict[Graph, Fingerprint] = {}
    errors: dict[Graph, str] = {}
    sample: dict[Graph, dict[int, Rows]] = {}
    for graph in GRAPHS:
        try:
            sample[graph] = capture(inputs, observed, graph, device)
            prints[graph] = identify(sample[graph], graph, shape, reject=ENOUGH)
        except ValueError as error:
            errors[graph] = str(error)
    prints = settled(prints)
    graphs: dict[Graph, GraphCalibration] = {
        graph: calibration_of(found)
        for graph, found in prints.items()
        # With another table than the op is given, it would have to round that first.
        if found.numerics and found.table == _dtype(next(iter(sample[graph].values()))[0].cos_sin)
    }
    pinned = pins.model_dump(mode="json")
    CalibrationFile.of(machine or detect(), shape, pinned, graphs).save(path)
    save_sample(sample_path(path), {graph: sample[graph] for graph in graphs})
    return Calibrated(path, prints, errors, time.perf_counter() - began)


def calibration_of(found: Fingerprint) -> GraphCalibration:
    """A fingerprint that fits, as an entry of the file; its elements are the distinct ones."""
    alike = [Candidate(numerics=n, mismatches=0, elements=found.elements) for n in found.alike]
    rejected = [
        Candidate(numerics=one.numerics, mismatches=one.mismatches, elements=one.elements)
        for one in found.rejected
    ]
    return GraphCalibration(
        numerics=found.closest,
        elements=found.distinct,
        bound=found.bound,
        alike=tuple(alike),
        rejected=tuple(rejected),
    )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# --- the check at start-up


def sample_path(calibration: Path) -> Path:
    """Where the sample of a calibration file lies."""
    return calibration.with_suffix(".safetensors")


def save_sample(path: Path, captured: Mapping[Graph, Mapping[int, Rows]]) -> None:
    """Keep `SAMPLE` tokens of every layer: the prologue's inputs, and the compiled code's Q and K."""
    tensors: dict[str, Tensor] = {}
    for graph, layers in captured.items():
        for layer, (inputs, outputs) in layers.items():
            few = slice(SAMPLE)
            of_layer = {
                "qkv": inputs.qkv[few],
                "positions": inputs.positions[..., few],
                "q_weight": inputs.q_weight,
                "k_weight": inputs.k_weight,
                "q": outputs["q"][few],
                "k": outputs["k"][few],
            }
            tensors |= {f"{graph}/{layer}/{name}": t for name, t in of_layer.items()}
            tensors["cos_sin"] = inputs.cos_sin
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path)


def load_sample(path: Path, graph: Graph, shape: AttentionShape, device: str) -> list[Rows]:
    """What `save_sample` kept of a graph. StaleCalibration: there is no such file, or nothing in it."""
    if not path.is_file():
        raise StaleCalibration(f"there is no sample at {path}: calibrate again")
    with safe_open(path, framework="pt", device=device) as file:
        names = set(file.keys())
        layers = sorted({int(n.split("/")[1]) for n in names if n.startswith(f"{graph}/")})
        if not layers:
            raise StaleCalibration(f"{path} has no sample of {graph}: calibrate again")
        rows: list[Rows] = []
        for layer in layers:
            one = {
                name: file.get_tensor(f"{graph}/{layer}/{name}")
                for name in ("qkv", "positions", "q_weight", "k_weight", "q", "k")
            }
            qkv = one["qkv"]
            cache = qkv.new_zeros(1, 1, shape.kv_heads, shape.head_dim)
            inputs = Inputs(
                qkv=qkv,
                q_weight=one["q_weight"],
                k_weight=one["k_weight"],
                cos_sin=file.get_tensor("cos_sin"),
                positions=one["positions"],
                slot_mapping=torch.full((qkv.shape[0],), -1, device=device),
                key_cache=cache,
                value_cache=cache.clone(),
            )
            rows.append((inputs, {"q": one["q"], "k": one["k"]}))
    return rows


def start_up(
    path: Path,
    shape: AttentionShape,
    pins: Pins,
    graphs: Sequence[Graph] = ("decode",),
    machine: Machine | None = None,
    device: str | None = None,
) -> tuple[CalibrationFile, dict[Graph, Revalidation]]:
    """What a service does before it uses a calibration: is it of this machine, and does it still hold?

    The kernel, or on a CPU the reference, computes the sample again, at T = 1 for decode. Seconds are
    without the kernel's compilation, which a service needs anyway.

    Raises:
        StaleCalibration: no, and why.
    """
    machine = machine or detect()
    device = device or machine.device
    file = CalibrationFile.load(path)
    file.check(machine, shape, pins.model_dump(mode="json"))
    found: dict[Graph, Revalidation] = {}
    for graph in graphs:
        if graph not in file.graphs:
            raise StaleCalibration(f"{path} has no calibration of {graph}: calibrate again")
        kernel: Callable[..., Any] = reference.qkv_prologue
        if device != "cpu":
            kernel = fused.qkv_prologue
            kernel = in_batches(kernel, 1) if graph == "decode" else kernel
        rows = load_sample(sample_path(path), graph, file.shape, device)
        kernel(*rows[0][0].clone().args(), file.shape, file.graphs[graph].numerics)  # compiles it
        observe, batches = _recorded(rows)
        found[graph] = file.revalidate(graph, observe, batches, kernel)
    return file, found


def refusals(calibration: Path, pins: Pins, graph: Graph = "decode") -> dict[str, str]:
    """What `start_up` says to a file from elsewhere, and to a sample with one bit flipped, by what was
    changed; nothing, where it takes no notice."""
    file, said = CalibrationFile.load(calibration), {}
    foreign: dict[str, dict[str, Any]] = {
        "another torch": {"versions": {**file.versions, "torch": "elsewhere"}},
        "another machine": {"machine": "elsewhere"},
        "another device": {"arch": "elsewhere"},
        "another shape": {"shape": replace(file.shape, eps=1e-5)},
        "another pin": {"pins": {**file.pins, "first_traced": pins.first_traced + 1}},
        "one flipped bit": {},
    }
    sample = load_file(sample_path(calibration))
    q = sample[f"{graph}/{min(int(n.split('/')[1]) for n in sample if n.startswith(graph))}/q"]
    for what, update in foreign.items():
        with TemporaryDirectory() as folder:
            path = Path(folder) / "calibration.json"
            file.model_copy(update=update).save(path)
            if not update:
                q.view(torch.int16)[-1, -1, 3] ^= 1
            save_file(sample, sample_path(path))
            try:
                start_up(path, file.shape, pins, [graph])
                said[what] = ""
            except StaleCalibration as refusal:
                said[what] = str(refusal)
    return said


def _recorded(
    rows: Sequence[Rows],
) -> tuple[Callable[[Inputs], Mapping[str, Tensor]], Iterator[Inputs]]:
    """Recorded outputs as what observes, and their inputs as batches."""
    current: Mapping[str, Tensor] = {}

    def batches() -> Iterator[Inputs]:
        nonlocal current
        for inputs, current in rows:  # noqa: B007 - read by what observes
            yield inputs

    return (lambda _: current), batches()


# --- what the arms did


@dataclass(frozen=True)
class Outcome:
    """An arm held against the baseline: records, logits and texts that differ, of how many.

    error: why there is nothing to hold, or to hold it against; empty otherwise.
    """

    arm: str
    records: int = 0
    records_total: int = 0
    logits: int = 0
    logits_total: int = 0
    texts: int = 0
    texts_total: int = 0
    tokens_total: int = 0
    first: str = ""
    error: str = ""

    @property
    def same(self) -> bool:
        """Something was compared, and no bit of it differs."""
        compared = bool(self.records_total or self.logits_total)
        return not self.error and compared and not (self.records or self.logits or self.texts)

    def __str__(self) -> str:
        if self.error:
            return self.error
        counts = [
            f"{getattr(self, what):,} of {total:,} {what}"
            for what in ("records", "logits", "texts")
            if (total := getattr(self, f"{what}_total"))
        ]
        said = f"{', '.join(counts) or 'nothing was compared'}{' differ' * bool(counts)}"
        return said + (f"; first {self.first}" if self.first else "")


def compare(case: Case, results: Mapping[str, JobResult], workers: int = 1) -> dict[str, Compared]:
    """The records and logits of ``control``, the baseline's second recording, and of every arm of
    ``results``, held against the baseline's."""
    baseline = results[case.name("baseline")]
    pairs = {"control": (Recording(baseline), Recording(baseline, 2))}
    pairs |= {
        arm: (Recording(baseline), Recording(results[case.name(arm)]))
        for arm in ARMS
        if case.name(arm) in results
    }
    return factorial.compare(pairs, workers=workers)


def outcomes(
    case: Case, results: Mapping[str, JobResult], compared: Mapping[str, Compared]
) -> dict[str, Outcome]:
    """Of what `compare` found, with the texts of the free passes."""
    baseline = results[case.name("baseline")]
    found = {}
    for name, row in factorial.table(compared).set_index("arm").iterrows():
        arm = str(name)
        other = results.get(case.name(arm), baseline)
        if error := baseline.error or other.error or row["error"]:
            found[arm] = Outcome(arm, error=f"{other.job.name}: {error}")
            continue
        found[arm] = Outcome(
            arm,
            int(row["records_differing"]),
            int(row["records_total"]),
            int(row["logits_differing"]),
            int(row["logits_total"]),
            *_texts(baseline, other),
            first=row["first"],
        )
    return found


def _texts(baseline: JobResult, other: JobResult) -> tuple[int, int, int]:
    """Texts that changed, texts, and tokens of the baseline, each reply's tokens being its text."""
    mine = baseline.passes[0].replies
    theirs = (other.passes[1] if other is baseline else other.passes[0]).replies
    changed = sum(a.tokens != b.tokens for a, b in zip(mine, theirs, strict=True))
    return changed, len(mine), sum(len(reply.tokens) for reply in mine)


def exact(outcome: Outcome, floor: Outcome) -> tuple[str, str]:
    """Verdict on "no bit changed", which holds only where the baseline, compiled again, changes none."""
    if outcome.error:
        return "INCONCLUSIVE", outcome.error
    if not (outcome.records_total or outcome.logits_total):
        return "INCONCLUSIVE", "nothing was compared"
    if outcome.same:
        if floor.same:
            return "PASS", f"{outcome}; {floor.arm}: {floor}"
        return "INCONCLUSIVE", f"{outcome}; but the floor, {floor.arm}: {floor}"
    within = outcome.records <= floor.records and outcome.logits <= floor.logits
    if floor.error or (within and not floor.same):
        return "INCONCLUSIVE", f"{outcome}; not beyond the floor, {floor.arm}: {floor}"
    return "FAIL", f"{outcome}; {floor.arm}: {floor}"


def floor_of(evidence: Evidence) -> Outcome:
    """The rebuild that notebook 05 made on this machine, where this one makes none."""
    found = evidence.select("records_differing", arm="rebuild")
    if evidence.run != "complete" or not found or found[0].n is None:
        reason = evidence.reason or "it made no rebuild"
        return Outcome(
            "rebuild", error=f"no rebuild here, and none of {evidence.notebook}: {reason}"
        )
    return Outcome("rebuild", records=int(str(found[0].value)), records_total=found[0].n)


def as_table(found: Mapping[str, Outcome]) -> pd.DataFrame:
    """One row per arm: what it is, and what differs of how much."""
    rows = [
        {
            "arm": arm,
            "what": ARMS.get(arm, "the baseline again, in its process"),
            "records": f"{one.records:,} of {one.records_total:,}",
            "logits": f"{one.logits:,} of {one.logits_total:,}",
            "texts": f"{one.texts} of {one.texts_total}",
            "first difference, in": one.error or one.first,
        }
        for arm, one in found.items()
    ]
    return pd.DataFrame(rows).set_index("arm")


def timed_outcomes(timed: JobResult) -> dict[str, Outcome]:
    """The arms that a timed job decoded beside its own, held against it: logits of replayed decode."""
    found = {}
    for beside in timed.job.beside:
        kind = f"logits.{beside.name}"
        if timed.error or kind not in timed.files:
            found[beside.name] = Outcome(beside.name, error=timed.error or f"no {kind}")
            continue
        frame = factorial.records.compare_logits(timed.path("logits"), timed.path(kind))
        found[beside.name] = Outcome(
            beside.name,
            logits=int(frame["mismatches"].sum()),
            logits_total=int(frame["elements"].sum()),
            texts=int((frame["top1_a"] != frame["top1_b"]).groupby(frame["request"]).any().sum()),
            texts_total=frame["request"].nunique(),
            tokens_total=len(frame),
        )
    return found


# --- what it saves


def primitive_times(
    shape: AttentionShape,
    numerics: Numerics,
    pins: Pins,
    *,
    samples: int,
    seed: int,
    candidate: str = "",
) -> dict[str, dict[str, Timing]]:
    """``hot`` and ``cold`` times of the kernel and of the region compiled alone, at T = 1, under pins.

    RuntimeError: there is no device.
    """
    machine = detect()
    if machine.device == "cpu":
        raise RuntimeError("the kernel has no time on a CPU: Triton's interpreter says nothing")
    found = {}
    for cache in ("hot", "cold"):
        with pins.apply():
            kernel = load_kernel(candidate)
            arms = own_arms(kernel, shape, numerics, machine, with_eager=False)
            found[cache] = time_arms(
                arms, shape, 1, machine, cold=cache == "cold", seed=seed, samples=samples
            )
    return found


def predictions(
    alone: Mapping[str, Mapping[str, Timing]], first: Evidence, shape: str, layers: int
) -> pd.DataFrame:
    """Region and kernel alone at T = 1 in us, and what they save a token of ``layers``: of
    `primitive_times`, and of notebook 01's result ``first``, as far as it has them."""
    rows = {
        ("here, pinned", cache): (times["compiled"].median_us, times["fused"].median_us)
        for cache, times in alone.items()
    }
    for cache in alone:
        at: dict[str, Any] = dict(T=1, cache=cache, shape=shape, positions="3d")
        compiled, kernel = (first.value("time", impl=impl, **at) for impl in ("compiled", "fused"))
        if compiled is not None and kernel is not None:
            rows["notebook 01", cache] = float(compiled), float(kernel)
    table = pd.DataFrame(rows, index=["compiled, us", "kernel, us"]).T
    table["saved a token, us"] = (table["compiled, us"] - table["kernel, us"]) * layers
    return table.rename_axis(["taken", "buffers"])


@dataclass(frozen=True)
class Effect:
    """A difference of two medians in microseconds, with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int = field(default=0, compare=False)

    def __mul__(self, times: float) -> Effect:
        return Effect(self.value * times, self.low * times, self.high * times, self.n)

    def __str__(self) -> str:
        return f"{self.value:.1f} us [{self.low:.1f}, {self.high:.1f}]"


def saved(slow: Timing, fast: Timing, resamples: int = 4000, seed: int = 0) -> Effect:
    """Median of ``slow`` minus median of ``fast``; the interval is the bootstrap's over rounds.

    ValueError: other numbers of samples, which were not taken in turn.
    """
    a, b = np.asarray(slow.samples_us), np.asarray(fast.samples_us)
    if a.shape != b.shape:
        raise ValueError(f"samples were not taken in turn: {len(a)} and {len(b)}")
    rounds = np.random.default_rng(seed).integers(len(a), size=(resamples, len(a)))
    found = np.median(a[rounds], axis=1) - np.median(b[rounds], axis=1)
    low, high = np.quantile(found, (0.025, 0.975))
    return Effect(slow.median_us - fast.median_us, float(low), float(high), len(a))


def over(realised: Effect, predicted: Effect) -> Effect:
    """Their ratio, its interval from the worst corners of both."""
    if predicted.low <= 0:
        return Effect(realised.value / predicted.value, -np.inf, np.inf)
    corners = [
        r / p for r in (realised.low, realised.high) for p in (predicted.low, predicted.high)
    ]
    return Effect(realised.value / predicted.value, min(corners), max(corners))


def as_predicted(ratio: Effect, least: float = 0.9, most: float = 1.15) -> str:
    """Verdict on a realised saving: is it what was predicted?"""
    inside = least <= ratio.value <= most
    if inside:
        return "PASS" if least <= ratio.low and ratio.high <= most else "PASS_WITH_LIMITATIONS"
    return "INCONCLUSIVE" if ratio.low <= most and ratio.high >= least else "FAIL"


def effects(found: Mapping[str, Effect], noise: float) -> pd.DataFrame:
    """As `plots.effects` takes them, with the A/A difference as what cannot be told from nothing."""
    rows = [dict(effect=n, value=e.value, low=e.low, high=e.high) for n, e in found.items()]
    rows.append(dict(effect="A/A", value=0.0, low=-noise, high=noise))
    return pd.DataFrame(rows).assign(unit="us", n=next(iter(found.values())).n)
