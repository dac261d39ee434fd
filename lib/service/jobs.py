"""One arm in one fresh process: what it is asked, what it leaves behind, and how many run side by side.

    python -m fusion_evidence.lib.service.jobs JOB.json FOLDER

A job's folder holds everything of it: ``job.json``, ``log.txt``, ``result.json`` (written anew after every
part, so that a job that dies keeps what it had), the records, and the generated source of every graph.
"""

from __future__ import annotations

import ctypes
import faulthandler
import getpass
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fusion_evidence.lib.measure.timing import Timing
from fusion_evidence.lib.service.arms import Arm, Built, Pins, build, parse_numerics
from fusion_evidence.lib.service.graphs import GraphReport
from fusion_evidence.lib.service.graphs import identical as identical_graphs
from fusion_evidence.lib.service.metrics import Reply

if TYPE_CHECKING:
    from fusion_evidence.lib.service.engine import Engine, Settings
    from fusion_evidence.lib.service.model import CompactModel
    from fusion_evidence.lib.service.prompts import Request

Tokens = dict[str, list[int]]
"""By request id."""

_TAIL = 40  # lines of a log in a result
_SET_PDEATHSIG = 1


class _Compiled(BaseModel):
    """What is compiled: an arm with its numerics."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[\w.+-]+$")
    arm: str = "baseline"
    prefill_numerics: str | None = None
    decode_numerics: str | None = None

    @field_validator("arm")
    @classmethod
    def _known_arm(cls, text: str) -> str:
        Arm.parse(text)
        return text

    @field_validator("prefill_numerics", "decode_numerics")
    @classmethod
    def _read_numerics(cls, text: str | None) -> str | None:
        if text is not None:
            parse_numerics(text)
        return text

    def build(self, model: CompactModel, pins: Pins, **options: Any) -> Built:
        """See `arms.build`."""
        prefill, decode = (
            None if text is None else parse_numerics(text)
            for text in (self.prefill_numerics, self.decode_numerics)
        )
        return build(
            model,
            Arm.parse(self.arm),
            prefill_numerics=prefill,
            decode_numerics=decode,
            body_first_traced=pins.body_first_traced,
            **options,
        )


class Beside(_Compiled):
    """Another arm in the process of a job, to time its steps in turn with the job's own.

    Where no prefill is timed, its prefill is the job's own. With `Job.logits` it first serves the job's
    pass that keeps them too: its times and its bits are of one run. pins: None: the job's.
    """

    pins: Pins | None = None


class Job(_Compiled):
    """What one process does.

    name: of its folder and in the results. arm: see `arms.Arm.parse`. prefill_numerics,
    decode_numerics: ``str(Numerics)`` of the bodies that have declared ones.

    model: ``compact`` (the trained checkpoint), ``compact-random``, ``article`` (random, 24/4 heads of 256
        and hidden 5120), or the folder of a checkpoint. layers, vocab: of a random model. seed: of its
        weights and of synthetic prompts. device: None: the machine's.
    calibration: a file of ``lib.attribution.calibrated``, with its sample beside it: gives the numerics
        of the bodies that have declared ones, once it was checked in this process, and is refused where
        it does not hold.
    pins, backend: of the compilation. fault: one of ``lib.attribution.faults``, planted in both graphs.
        padded: opaque operators get padded rows. candidate: see `arms.build`; of the arms ``beside`` too.
    requests: a file as in ``prompts.load_requests``; None: the project's. request_ids: only these, in the
        file's order. lengths: synthetic random prompts ``T<length>`` in their place. new_tokens: of every
        request; None: the request's own, of a synthetic one 8.
    passes: each serves all requests once, timed: ``free``, or ``forced`` to the tokens in ``forced``, or
        where that is empty to those of the first free pass.
    record: one more pass, with no captured graphs, in which the attention op's arguments are kept, as
        ``tensors`` or ``hashes``; record_inputs: those of opaque prologues too. logits: keep the logits of
        one more pass; replayed decode has one of its own, and those of the recording are kept beside
        them. Both are forced to the same tokens if there are any. record_ids, record_tokens: their limits.
    recordings: further passes of the same, each ``again`` or ``recompiled``, in this process, with an
        empty Dynamo, which shows what a second compilation changes.
    cuda_graph: replay decode; None: where there is a device and the arm can be captured.
    max_tokens, block_size, in_flight, stop_token: see ``engine.Settings``.
    prefill_times: prompt lengths to time prefill at, prefill_samples each. decode_samples: of the decode
        step, each of decode_steps calls. Both in turn with the arms ``beside``.
    cache: ``fresh``: compiler caches of its own, deleted afterwards; ``shared``: those of the environment;
        None: shared on a machine without a device except for the arm ``rebuild``, else fresh.

    ValueError: an unknown arm or numerics, forced tokens that nothing gives, recorded hashes of inputs,
    layers or vocab of a checkpoint, names twice.
    """

    model: str = "compact"
    layers: int | None = Field(default=None, ge=1)
    vocab: int | None = Field(default=None, ge=2)
    seed: int = 0
    device: Literal["cpu", "cuda"] | None = None

    calibration: str | None = None
    pins: Pins = Pins()
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    fault: str | None = None
    padded: bool = False
    candidate: str = ""

    requests: str | None = None
    request_ids: list[str] | None = None
    lengths: list[int] = []
    new_tokens: int | None = Field(default=None, ge=1)

    passes: list[Literal["free", "forced"]] = ["free"]
    forced: Tokens = {}
    record: Literal["none", "tensors", "hashes"] = "none"
    record_inputs: bool = False
    logits: bool = False
    record_ids: list[str] | None = None
    record_tokens: int | None = Field(default=None, ge=1)
    recordings: list[Literal["again", "recompiled"]] = []

    cuda_graph: bool | None = None
    max_tokens: int = Field(default=2048, ge=1)
    block_size: int = Field(default=16, ge=1)
    in_flight: int = Field(default=1, ge=1)
    stop_token: int | None = None

    prefill_times: list[int] = []
    prefill_samples: int = Field(default=15, ge=1)
    decode_samples: int = Field(default=0, ge=0)
    decode_steps: int = Field(default=16, ge=1)
    beside: list[Beside] = []

    cache: Literal["fresh", "shared"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        forced_at = self.passes.index("forced") if "forced" in self.passes else None
        if forced_at is not None and not self.forced and "free" not in self.passes[:forced_at]:
            raise ValueError(
                "passes: a forced pass needs tokens in `forced` or a free pass before it"
            )
        if self.record_inputs and self.record != "tensors":
            raise ValueError(f"record_inputs: expected record 'tensors', got {self.record!r}")
        if not self.random and (self.layers or self.vocab):
            raise ValueError(f"layers, vocab: model {self.model!r} is a checkpoint and has its own")
        names = [self.name, *(one.name for one in self.beside)]
        if len(set(names)) < len(names):
            raise ValueError(f"beside: a name twice in {names}")
        return self

    @property
    def timed(self) -> bool:
        """It has a part that is timed, for which `run_jobs` keeps the others still."""
        return bool(self.prefill_times or self.decode_samples)

    @property
    def random(self) -> bool:
        """Its model has random weights."""
        return self.model in ("compact-random", "article")


class Pass(BaseModel):
    """One serving of all requests."""

    kind: Literal["free", "forced"]
    replies: list[Reply]


class JobResult(BaseModel):
    """What came of a job.

    error: empty when all of it was done; otherwise what happened, and the fields hold what there was.
    log_tail: the end of its log, with an error.
    passes: the replies of each. markers: runs of the opaque operator on the device and on the host, by
        body (``decode``: the fused kernel), over the passes and the recording; expected: what the device
        must have counted, from ``calls``, the forward calls of that time. layers: of the model.
    warm_up: seconds, see ``Engine.warm_up``. graphs: what Inductor made, by name, with ``@2`` and so on
        for what a further recording compiled. seconds: of the parts.
    decode_times: by name, the job's own first; prefill_times: by name, then by prompt length.
    revalidated: by graph, elements of a calibration's sample that were found equal, and the seconds it
        took.
    unavailable: pins that this torch lacks. files: kind -> name in ``folder``; ``records``, ``logits``,
        ``logits.recorded``, ``code/<graph>``, ``records.2``, ``logits.2``, ... of further recordings,
        and ``logits.<name>`` of arms beside.
    """

    job: Job
    folder: Path
    error: str = "not started"
    log_tail: str = ""
    passes: list[Pass] = []
    markers: dict[str, dict[str, int]] = {}
    expected: dict[str, int] = {}
    calls: dict[str, int] = {}
    layers: int = 0
    warm_up: dict[str, float] = {}
    graphs: dict[str, GraphReport] = {}
    seconds: dict[str, float] = {}
    decode_times: dict[str, Timing] = {}
    prefill_times: dict[str, dict[int, Timing]] = {}
    machine: str = ""
    versions: dict[str, str] = {}
    revalidated: dict[str, tuple[int, float]] = {}
    unavailable: list[str] = []
    peak_bytes: int | None = None
    files: dict[str, str] = {}

    @property
    def ok(self) -> bool:
        """All was done and no request failed."""
        return not self.error and all(r.finish_reason != "error" for r in self._replies())

    def _replies(self) -> list[Reply]:
        return [reply for one in self.passes for reply in one.replies]

    def replies(self, kind: Literal["free", "forced"]) -> list[Reply]:
        """Of the first pass of that kind; ValueError when there was none."""
        for one in self.passes:
            if one.kind == kind:
                return one.replies
        raise ValueError(
            f"job {self.job.name} has no {kind} pass" + (self.error and f": {self.error}")
        )

    @property
    def tokens(self) -> Tokens:
        """Of the first free pass, by request: what other arms can be forced to."""
        return {reply.id: reply.tokens for reply in self.replies("free")}

    def path(self, kind: str) -> Path:
        """A file of the job. ValueError naming those it has."""
        if kind not in self.files:
            raise ValueError(
                f"job {self.job.name} has no {kind!r}, only {', '.join(self.files) or 'nothing'}"
                + (self.error and f": {self.error}")
            )
        return self.folder / self.files[kind]

    def save(self) -> None:
        """Write ``result.json`` into the folder, whole or not at all."""
        temporary = self.folder / "result.json.part"
        temporary.write_text(self.model_dump_json(indent=1, exclude={"folder"}), encoding="utf-8")
        temporary.replace(self.folder / "result.json")

    @classmethod
    def load(cls, folder: Path) -> JobResult:
        """Read a job's folder, also one that was moved."""
        text = (folder / "result.json").read_text(encoding="utf-8")
        return cls(folder=folder, **json.loads(text))


def identical(one: JobResult, other: JobResult, graph: str = "prefill") -> dict[str, bool | None]:
    """`graphs.identical` of two jobs: ``source``, ``config`` and ``binary`` of a graph."""
    return identical_graphs(one.graphs, other.graphs, graph)


def run_job(job: Job, folder: Path) -> JobResult:
    """Do a job in this process. Meant for a fresh one: caches and compiled code stay behind.

    What goes wrong is raised; ``result.json`` then holds what was done until there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = JobResult(job=job, folder=folder)
    work = _Work(result)
    with work.part("start"):
        work.start()
    with job.pins.apply():
        for part in ("warm_up", "serve", "record", "read_graphs", "time", "record_again"):
            with work.part(part):
                getattr(work, part)()
    result.error = ""
    result.save()
    return result


class _Work:
    """The parts of a job, one after the other."""

    def __init__(self, result: JobResult) -> None:
        self.result, self.job, self.folder = result, result.job, result.folder

    def part(self, name: str) -> _Part:
        return _Part(self.result, name)

    def start(self) -> None:
        import torch

        from fusion_evidence.lib.measure.machine import detect

        job, machine = self.job, detect()
        self.result.machine, self.result.versions = machine.name, dict(machine.versions)
        self.device = job.device or machine.device
        self.result.unavailable = job.pins.unavailable
        torch.manual_seed(job.seed)
        self.model, self.tokenizer = _load_model(job, self.device)
        self.result.layers = self.model.config.layers
        self.requests = _requests(job, self.model.config.vocab_size)
        if job.calibration is not None:
            self.calibrate(Path(job.calibration))
        self.built = self.make()

    def calibrate(self, path: Path) -> None:
        """Take the numerics of a calibration that holds here. StaleCalibration: it does not."""
        from fusion_evidence.lib.attribution.integration import GRAPHS, start_up

        job, arm = self.job, Arm.parse(self.job.arm)
        declared = ("fused", "opaque_fused", "opaque_reference")
        graphs = [graph for graph in GRAPHS if getattr(arm, graph) in declared]
        file, found = start_up(path, self.model.config.shape, job.pins, graphs, device=self.device)
        numerics = {f"{graph}_numerics": str(file.graphs[graph].numerics) for graph in found}
        self.job = self.result.job = job.model_copy(update=numerics)
        self.result.revalidated = {
            graph: (one.elements, one.seconds) for graph, one in found.items()
        }

    def make(self) -> Built:
        job = self.job
        options: dict[str, Any] = {}
        if job.fault is not None:
            from fusion_evidence.lib.attribution.faults import fault

            planted = fault(job.fault)
            options = {"wrap_prologue": planted.prologue, "wrap_forward": planted.forward}
        options |= dict(padded=job.padded, candidate=job.candidate)
        return job.build(self.model, job.pins, backend=job.backend, **options)

    def engine(self, built: Built, cuda_graph: bool) -> Engine:
        from fusion_evidence.lib.service.engine import Engine, Settings

        job = self.job
        settings: Settings = Settings(
            max_tokens=job.max_tokens,
            block_size=job.block_size,
            in_flight=job.in_flight,
            cuda_graph=cuda_graph,
            stop_token=job.stop_token,
        )
        return Engine(built.model, built.prefill, built.decode, settings, self.tokenizer)

    def warm_up(self) -> None:
        if self.job.timed and self.job.pins.configurations == "timed":
            _wait_for_quiet(self.folder)
        self.server = self.engine(self.built, self.replays(self.built))
        self.result.warm_up = self.server.warm_up(self.job.pins.first_traced)
        self.built.reset_markers()
        self.calls: Counter[str] = Counter()

    def replays(self, built: Built) -> bool:
        """Whether decode is a captured graph."""
        if self.job.cuda_graph is not None:
            return self.job.cuda_graph
        return self.device == "cuda" and built.arm.decode != "opaque_reference"

    def counted(self, engine: Engine, work: Callable[[], Any]) -> Any:
        """Do it, and add what was called and what the operator's markers say to the result."""
        before = Counter(engine.calls)
        done = work()
        self.calls += engine.calls - before
        self.result.calls = dict(self.calls)
        self.result.markers = self.built.read_markers()
        self.result.expected = _expected(self.built.arm, self.calls, self.result.layers)
        return done

    @property
    def forced(self) -> Mapping[str, Sequence[int]] | None:
        if self.job.forced:
            return self.job.forced
        if any(one.kind == "free" for one in self.result.passes):
            return self.result.tokens
        return None

    def serve(self) -> None:
        for kind in self.job.passes:
            forced = self.forced if kind == "forced" else None
            if forced is not None and (
                missing := [r.id for r in self.requests if r.id not in forced]
            ):
                raise ValueError(f"forced: no tokens for {', '.join(missing)}")
            serve = partial(self.server.serve, self.requests, forced=forced)
            replies = self.counted(self.server, serve)
            self.result.passes.append(Pass(kind=kind, replies=replies))
            self.result.save()

    def record(self) -> None:
        engine, job = self.server, self.job
        records = None if job.record == "none" else "records"
        logits = "logits" if job.logits else None
        if engine.settings.cuda_graph and records:
            # Replays run no Python: they give logits, and arguments of nothing.
            self.counted(engine, partial(self.observe, engine, None, logits))
            engine = self.engine(self.built, cuda_graph=False)
            logits = logits and "logits.recorded"
        self.counted(engine, partial(self.observe, engine, records, logits))

    def observe(self, engine: Engine, records: str | None, logits: str | None) -> None:
        """One pass of which ``records`` and ``logits`` are kept under these names, None: not."""
        from fusion_evidence.lib.attribution.records import LogitTape, Tape

        job = self.job
        requests = [r for r in self.requests if job.record_ids is None or r.id in job.record_ids]
        forced = self.forced
        if (limit := job.record_tokens) is not None:
            requests = [replace(r, max_new_tokens=min(limit, r.max_new_tokens)) for r in requests]
            forced = forced and {name: tokens[:limit] for name, tokens in forced.items()}
        options: dict[str, Any] = {}
        with ExitStack() as stack:
            if records:
                hashes = job.record == "hashes"
                tape = Tape(self.model.config.shape, hashes=hashes, inputs=job.record_inputs)
                options["on_step"] = stack.enter_context(tape).at
            if logits:
                logit_tape = LogitTape()
                options["on_logits"] = logit_tape.at
            replies = engine.serve(requests, forced=forced, **options) if options else []
        failed = [f"{r.id}: {r.error}" for r in replies if r.finish_reason == "error"]
        if failed:
            raise RuntimeError(f"nothing to record of {'; '.join(failed)}")
        if records:
            self.keep(records, f"{records}.safetensors", tape.save)
        if logits:
            self.keep(logits, f"{logits}.safetensors", logit_tape.save)

    def record_again(self) -> None:
        import torch

        for number, how in enumerate(self.job.recordings, start=2):
            built = self.built
            if how == "recompiled":
                torch._dynamo.reset()
                built = self.make()
            engine = self.engine(built, cuda_graph=False)
            if how == "recompiled":
                engine.warm_up(self.job.pins.first_traced)
                self.read_graphs(built, f"@{number}")
            self.observe(
                engine,
                None if self.job.record == "none" else f"records.{number}",
                f"logits.{number}" if self.job.logits else None,
            )
            self.result.save()

    def keep(self, kind: str, name: str, save: Callable[[Path], None]) -> None:
        save(self.folder / name)
        self.result.files[kind] = name

    def read_graphs(self, built: Built | None = None, suffix: str = "") -> None:
        for name, (report, code) in (built or self.built).graphs().items():
            self.result.graphs[name + suffix] = report
            self.keep(f"code/{name}{suffix}", f"code_{name}{suffix}.py", partial(_write, code))

    def time(self) -> None:
        import torch

        from fusion_evidence.lib.service.engine import time_decode, time_prefill

        job, engines = self.job, {self.job.name: self.server}
        for other in job.beside if job.timed else ():
            pins = other.pins or job.pins
            if pins.configurations == "timed":
                _wait_for_quiet(self.folder)
            same: dict[str, Any] = dict(backend=job.backend, candidate=job.candidate)
            # The job's own are there already, and take none of a call's time.
            if other.pins is not None:
                same["wrap_forward"] = _pinned(pins)
            built = other.build(self.model, pins, **same)
            if not job.prefill_times:
                built.prefill = self.built.prefill
            engines[other.name] = engine = self.engine(built, self.replays(built))
            engine.warm_up(pins.first_traced if job.prefill_times else None)
            if job.logits:
                self.observe(engine, None, f"logits.{other.name}")
        if job.timed:
            _wait_for_quiet(self.folder)
        for tokens in job.prefill_times:
            times = time_prefill(engines, tokens, samples=job.prefill_samples)
            for name, timing in times.items():
                self.result.prefill_times.setdefault(name, {})[tokens] = timing
        if job.decode_samples:
            self.result.decode_times = time_decode(
                engines, self.requests[0], steps=job.decode_steps, samples=job.decode_samples
            )
        if self.device == "cuda":
            self.result.peak_bytes = torch.cuda.max_memory_allocated()


_READY, _GO = "ready", "go"
_ASKS_FOR_QUIET = "FUSION_EVIDENCE_JOB_ASKS"


def _wait_for_quiet(folder: Path) -> None:
    """In a process of `run_jobs`: say that all is ready to be timed, and wait until nobody else works."""
    go = folder / _GO
    if os.environ.get(_ASKS_FOR_QUIET) and not go.exists():
        (folder / _READY).touch()
        while not go.exists():
            time.sleep(0.05)


class _Part:
    """A part of a job: said in the log, timed, and in the result's error for as long as it lasts."""

    def __init__(self, result: JobResult, name: str) -> None:
        self.result, self.name = result, name

    def __enter__(self) -> None:
        self.began = time.monotonic()
        self.result.error = f"ended during {self.name}"
        self.result.save()
        print(f"{self.result.job.name}: {self.name}", flush=True)

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.result.seconds[self.name] = time.monotonic() - self.began
        if error is not None:
            self.result.error = f"{self.name}: {type(error).__name__}: {error}"
            self.result.save()


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _pinned(pins: Pins) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with pins.apply():
                return step(*arguments)

        return call

    return wrap


def _expected(arm: Arm, calls: Mapping[str, int], layers: int) -> dict[str, int]:
    """Runs of the operator's bodies that these forward calls make; none without an operator."""
    expected = {"decode": 0, "prefill": 0}
    for side, body in (("prefill", arm.prefill), ("decode", arm.decode)):
        if body != "in_graph":
            path = "decode" if body.removeprefix("opaque_") == "fused" else "prefill"
            expected[path] += layers * calls.get(side, 0)
    return expected


def _load_model(job: Job, device: str) -> tuple[CompactModel, Any]:
    """The model and, of a checkpoint that has one, its tokenizer."""
    from fusion_evidence.kernels import eager
    from fusion_evidence.lib.service import model as models

    if job.random:
        article = job.model == "article"
        make = models.ModelConfig.article if article else models.ModelConfig.compact
        sizes = {} if job.vocab is None else {"vocab_size": job.vocab}
        config = make(layers=job.layers, **sizes)
        draw_on = device if article else "cpu"  # 6e9 numbers take minutes on a CPU
        model = models.random_model(
            config, eager.qkv_prologue, seed=job.seed, device=device, draw_on=draw_on
        )
        return model, None
    from fusion_evidence.lib.service.prompts import COMPACT, load_tokenizer

    folder = COMPACT if job.model == "compact" else Path(job.model)
    model = models.load(folder, eager.qkv_prologue, device=device)
    return model, load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None


def _requests(job: Job, vocabulary: int) -> list[Request]:
    import torch

    from fusion_evidence.lib.service.prompts import Request, load_requests

    if job.lengths:
        draw = torch.Generator().manual_seed(job.seed)
        requests = [
            Request(
                id=f"T{length}",
                text="",
                ids=tuple(torch.randint(vocabulary, (length,), generator=draw).tolist()),
                positions=None,
                max_new_tokens=8,
            )
            for length in job.lengths
        ]
    else:
        requests = load_requests(Path(job.requests)) if job.requests else load_requests()
    if job.request_ids is not None:
        known = [request.id for request in requests]
        if unknown := [name for name in job.request_ids if name not in known]:
            raise ValueError(f"request_ids: no {', '.join(unknown)} in {', '.join(known)}")
        requests = [request for request in requests if request.id in job.request_ids]
    if job.new_tokens is not None:
        requests = [replace(request, max_new_tokens=job.new_tokens) for request in requests]
    return requests


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    *,
    parallel: int = 1,
    devices: Sequence[int] | None = None,
    timeout: float = 1800.0,
    report: Callable[[str], None] = print,
) -> dict[str, JobResult]:
    """Run every job in a fresh process, ``parallel`` at a time, each in ``folder/<name>``.

    What a job is asked to time at its end (`Job.timed`) it times when no other job works: it is prepared
    beside them, then waits until the others have ended or wait too, and they until it has. If a compiler is
    to choose by timing in it, it waits before that. Times of passes mean little with others on the device.
    Call it from a thread that outlives the jobs.

    Args:
        devices: numbers of the devices to spread the running jobs over; None: whatever each finds.
        timeout: seconds a job may take.
        report: called with a line when a job starts and when it ends.

    Returns:
        By name, in the order of ``jobs``. A job that fails, dies or takes too long is a result whose
        ``error`` says so; the others go on.

    ValueError: names twice, parallel < 1.
    """
    names = [job.name for job in jobs]
    if len(set(names)) < len(names) or parallel < 1:
        raise ValueError(f"expected distinct names and parallel >= 1, got {names}, {parallel}")
    waiting, results = list(jobs), dict[str, JobResult]()
    running: list[_Running] = []
    free = list(range(parallel))
    try:
        while waiting or running:
            while waiting and free and not any(one.timing for one in running):
                slot, job = free.pop(0), waiting.pop(0)
                device = None if devices is None else devices[slot % len(devices)]
                running.append(_Running(job, folder / job.name, slot, parallel, device, timeout))
                report(f"{job.name}: started")
            for one in [one for one in running if one.ended()]:
                running.remove(one)
                free.append(one.slot)
                results[one.job.name] = result = one.result()
                report(f"{one.job.name}: {result.error or 'done'} ({one.seconds():.0f} s)")
            if running and all(one.asks() for one in running) and not (waiting and free):
                running[0].go()
            if running:
                time.sleep(0.1)
    finally:
        for one in running:
            one.stop()
    return {name: results[name] for name in names}


class _Running:
    """A job's process."""

    def __init__(
        self, job: Job, folder: Path, slot: int, parallel: int, device: int | None, timeout: float
    ) -> None:
        self.job, self.folder, self.slot, self.timeout = job, folder, slot, timeout
        folder.mkdir(parents=True, exist_ok=True)
        for old in ("result.json", _READY, _GO):
            (folder / old).unlink(missing_ok=True)
        (folder / "job.json").write_text(job.model_dump_json(indent=1), encoding="utf-8")
        self.cache = _new_cache() if _fresh_cache(job) else None
        environment = _environment(job, self.cache, parallel, device)
        self.began = time.monotonic()
        self.limit, self.timing = "", False
        with open(folder / "log.txt", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder / "job.json"), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C is for the parent
            )

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def asks(self) -> bool:
        """It waits until nobody else works."""
        return not self.timing and (self.folder / _READY).exists()

    def go(self) -> None:
        """Let it take its times."""
        self.timing = True
        (self.folder / _GO).touch()

    def ended(self) -> bool:
        if self.process.poll() is None and self.seconds() > self.timeout:
            self.limit = f"over the limit of {self.timeout:g} s"
            self.stop()
        return self.process.poll() is not None

    def stop(self) -> None:
        """Kill the process and all it started."""
        try:
            descendants = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            descendants = []
        self.process.kill()
        for descendant in descendants:
            try:
                descendant.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        self._drop_cache()

    def _drop_cache(self) -> None:
        if self.cache is not None:
            shutil.rmtree(self.cache, ignore_errors=True)

    def result(self) -> JobResult:
        self._drop_cache()
        try:
            result = JobResult.load(self.folder)
        except (FileNotFoundError, ValueError) as error:
            result = JobResult(job=self.job, folder=self.folder)
            if isinstance(error, ValueError):  # half a disk, or written by other code than this
                result.error = f"result.json cannot be read: {error}"
        if status := self.process.returncode:
            died = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            if result.error.startswith(("not started", "ended during")):  # it could not say why
                result.error = f"{result.error} ({self.limit or died})"
            log = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
            result.log_tail = "\n".join(log.splitlines()[-_TAIL:])
            result.save()
        return result


def _fresh_cache(job: Job) -> bool:
    if job.cache is not None:
        return job.cache == "fresh"
    from fusion_evidence.lib.measure.machine import detect

    return (job.device or detect().device) != "cpu" or job.arm == "rebuild"


def _new_cache() -> Path:
    """An empty folder for compiler caches, its path as long as that of the shared one.

    A kernel that checks an index holds the name of its file, and on a CPU or an AMD device its machine
    code holds offsets beyond that text: with paths of one length the same source gives the same code.
    "torchinductor" in the name is what `generated_code.normalized` knows file names by.
    """
    user = re.sub(r"\W", "_", getpass.getuser())
    default = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    shared = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default).absolute()
    shared.parent.mkdir(parents=True, exist_ok=True)
    size = max(5, len(shared.name) - len("torchinductor"))
    while True:
        folder = shared.with_name(f"torchinductor{secrets.token_hex(size)[:size]}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def _environment(job: Job, cache: Path | None, parallel: int, device: int | None) -> dict[str, str]:
    """Of a job's process: caches, compile threads, device, and what its pins need."""
    from fusion_evidence.lib.measure.machine import detect

    always = {"PYTHONUNBUFFERED": "1", _ASKS_FOR_QUIET: "1"}
    environment = dict(os.environ) | always | job.pins.environment
    # Inductor would start a worker for every core in each of the processes.
    threads = max(1, detect().cpu_cores // parallel)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    if (job.device or detect().device) == "cpu":
        # C++ is generated for a number of threads, which must not depend on how many jobs run; and the
        # threads of several jobs would wait for one another's cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    if cache is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        environment["TRITON_CACHE_DIR"] = str(cache / "triton")
    if device is not None:
        hip = detect().profile == "dcu"
        environment["HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES"] = str(device)
    return environment


def main(arguments: Sequence[str]) -> int:
    """Entry point of a job's process: ``JOB.json FOLDER``; 0 when all of it was done."""
    if sys.platform == "linux":  # nothing outlives a runner that was killed
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    file, folder = map(Path, arguments)
    try:
        run_job(Job.model_validate_json(file.read_text(encoding="utf-8")), folder)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
