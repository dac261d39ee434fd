"""A grid of notebooks over parameter values, through submitit: processes here or one Slurm array.

A point is a notebook with one set of values. Its result lies in a folder named after what it
depends on (`freshness_hash` and the profile), so that a point is run again when that has changed or
when its result is not verified, and at no other time. Each worker runs its point as
`fusion-evidence run` does, with the same verification.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from fusion_evidence.lib import batch, paths
from fusion_evidence.lib.batch import BatchError
from fusion_evidence.lib.measure import machine as machine_module
from fusion_evidence.lib.parameters import (
    ParameterError,
    parse_value,
    read_parameters,
    unknown_names,
)
from fusion_evidence.lib.report.evidence import (
    Evidence,
    Measurement,
    evidence_path,
    freshness_hash,
    read_evidence,
    write_text,
)

if TYPE_CHECKING:  # loading pandas takes longer than checking a grid
    import pandas as pd

SWEEPS = paths.RUNS / "sweeps"
_PARAMETERS = "parameters.yaml"
_POLL, _LOOK, _HEARTBEAT, _GRACE = 0.2, 5.0, 60.0, 20.0  # seconds
_WEEK = 7 * 24 * 60  # minutes; the limits of a point are its profile's

Report = batch.Report


# --- the grid file ------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Local(_Strict):
    """Processes on this machine."""

    kind: Literal["local"]
    #: At a time; default: one for every accelerator, on a CPU one for every core.
    workers: PositiveInt | None = None
    threads: PositiveInt | None = None  #: CPU threads of each; default: an equal share of the cores


class Slurm(_Strict):
    """One Slurm array; what is None is left to the cluster's defaults."""

    kind: Literal["slurm"]
    array_parallelism: PositiveInt = 4  #: points at a time
    time: PositiveInt  #: minutes a point may take
    cpus: PositiveInt = 1
    gres: str | None = None  #: of a point, for example ``gpu:1`` or ``dcu:1``
    partition: str | None = None
    mem: str | None = None  #: for example ``32G``
    setup: list[str] = []  #: shell lines before Python starts, for example ``module load ...``
    options: dict[str, str | int | bool] = {}  #: further ones of sbatch, for example ``account``


class Explicit(_Strict):
    """One point that no product gives."""

    notebook: str
    parameters: dict[str, Any] = {}


class Grid(_Strict):
    """A grid file: see `data/parameters/sweep-example.yaml`."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    profile: machine_module.Profile
    #: Notebook (or the start of its name) -> parameter -> values; every combination is a point.
    grid: dict[str, dict[str, Annotated[list[Any], Field(min_length=1)]]] = {}
    points: list[Explicit] = []
    executor: Annotated[Local | Slurm, Field(discriminator="kind")]


def read_grid(file: Path) -> Grid:
    """The grid of a file, named after the file unless it says otherwise; BatchError: it is none."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BatchError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BatchError(f"{file.name}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise BatchError(f"{file.name}: expected a mapping with profile, executor, grid or points")
    try:
        return Grid.model_validate({"name": file.stem} | content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        wrong = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise BatchError(f"{file.name}: {place}: {wrong}, got {first['input']!r}") from None


# --- points -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One notebook with one set of values."""

    notebook: Path
    given: dict[str, Any]  #: by the grid
    passed: dict[str, Any]  #: to the notebook: the profile's values and the given
    complete: dict[str, Any]  #: of all its parameters
    limits: dict[str, float]  #: the profile's, in seconds
    folder: Path
    varied: frozenset[str]  #: names that other points of the sweep give other values

    def __str__(self) -> str:
        values = (f"{name}={v}" for name, v in self.given.items() if name in self.varied)
        return " ".join([self.notebook.stem, *values])

    def evidence(self) -> Evidence:
        """Its result as it is now; ``not_run`` when there is none."""
        return read_evidence(evidence_path(self.folder, self.notebook.stem))

    def problems(self) -> list[str]:
        """Why its result does not count; empty when it is verified."""
        return batch.verify(self.notebook, self.folder, self.complete)


def plan(grid: Grid, root: Path) -> list[Point]:
    """The points of a grid, each once, with folders in ``root``.

    Raises BatchError for a notebook, a parameter or a value that does not exist or fit.
    """
    wanted = [
        (_notebook(name), dict(zip(lists, values, strict=True)))
        for name, lists in grid.grid.items()
        for values in itertools.product(*lists.values())
    ]
    wanted += [(_notebook(point.notebook), point.parameters) for point in grid.points]
    if not wanted:
        raise BatchError(f"{grid.name}: neither grid nor points name a notebook")
    notebooks = list(dict.fromkeys(notebook for notebook, _ in wanted))
    profile_file = paths.PARAMETERS / f"{grid.profile}.yaml"
    passed, complete, limits = batch.plan_parameters(notebooks, profile_file)
    typed = [(notebook, _typed(grid.name, notebook, values)) for notebook, values in wanted]
    names = {name for _, given in typed for name in given}
    varied = frozenset(n for n in names if len({repr(given.get(n)) for _, given in typed}) > 1)
    found: dict[Path, Point] = {}
    for notebook, given in typed:
        everything = complete[notebook.stem] | given
        key = f"{freshness_hash(notebook, everything)} {grid.profile}"
        folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
        point = Point(
            notebook, given, passed[notebook.stem] | given, everything, limits, folder, varied
        )
        found.setdefault(folder, point)
    return list(found.values())


def _notebook(name: str) -> Path:
    """The one notebook that a name or the start of one means."""
    known = batch.select_notebooks(paths.NOTEBOOKS)
    fitting = [path for path in known if path.stem.startswith(name.removesuffix(".ipynb"))]
    if len(fitting) != 1 or not name:
        wrong = "means several notebooks" if fitting else "no such notebook"
        raise BatchError(f"{name!r}: {wrong}; there are {', '.join(path.stem for path in known)}")
    return fitting[0]


def _typed(grid: str, notebook: Path, values: dict[str, Any]) -> dict[str, Any]:
    declared = read_parameters(notebook)
    try:
        if problem := unknown_names(values, declared):
            raise ParameterError(problem)
        return {name: parse_value(declared[name], value) for name, value in values.items()}
    except ParameterError as error:
        raise BatchError(f"{grid}: {notebook.stem}: {error}") from None


# --- in a worker --------------------------------------------------------------------------------


def run_point(
    notebook: Path, folder: Path, profile: str, environment: dict[str, str], owner: int | None
) -> str:
    """Execute one point; returns why it was refused, "" when its evidence says how it went.

    ``environment``: set before anything looks at devices or threads. ``owner``: a process with
    which the worker ends.
    """
    os.environ |= environment
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
    if owner is not None:
        threading.Thread(target=_end_with, args=(owner, os.getppid()), daemon=True).start()
    try:
        if profile != "cpu":
            batch.check_profile(profile, machine_module.detect())
        batch.run([notebook], folder, profile_file=folder / _PARAMETERS, resume=True)
    except BatchError as error:
        return str(error)
    return ""


def _end_with(*owners: int) -> None:
    """Stop this process when one of the others has ended: they can no longer do it."""
    try:
        processes = [psutil.Process(owner) for owner in owners]
        while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            time.sleep(1)
    except psutil.NoSuchProcess:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


# --- workers ------------------------------------------------------------------------------------


class _Workers(Protocol):
    """Where points run; ``jobs`` are submitit's."""

    def submit(self, waiting: deque[Point]) -> Iterable[tuple[Point, Any]]:
        """Start as many of the waiting points as there is room for, and take them out."""

    def ended(self, jobs: Iterable[Any]) -> list[Any]:
        """Those that run no more, whatever the way they ended."""

    def cancel(self, jobs: Sequence[Any]) -> None:
        """End these and what they started."""


class _LocalWorkers:
    def __init__(self, settings: Local, profile: str, jobs: Path, points: int) -> None:
        import submitit

        self._idle = _devices(settings, profile, points)  # one item is one worker that is free
        self._devices: dict[str, str] = {}
        cores = len(os.sched_getaffinity(0))
        self._threads = settings.threads or max(1, cores // len(self._idle))
        self._profile = profile
        self._executor = submitit.LocalExecutor(jobs)
        self._executor.update_parameters(timeout_min=_WEEK)

    def submit(self, waiting: deque[Point]) -> Iterator[tuple[Point, Any]]:
        while waiting and self._idle:
            point, device = waiting.popleft(), self._idle.pop(0)
            environment = _environment(self._threads, device)
            # They inherit the mask: the terminal's Ctrl-C is for this process, which ends them.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                job = self._executor.submit(
                    run_point, point.notebook, point.folder, self._profile, environment, os.getpid()
                )
                self._devices[job.job_id] = device
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            yield point, job

    def ended(self, jobs: Iterable[Any]) -> list[Any]:
        over = [job for job in jobs if job.done()]
        self._idle += [self._devices.pop(job.job_id) for job in over]
        return over

    def cancel(self, jobs: Sequence[Any]) -> None:
        deadline = time.monotonic() + _GRACE
        while alive := [job for job in jobs if not job.done()]:
            for job in alive:  # submitit's controller of a worker passes SIGTERM on
                late = time.monotonic() > deadline
                os.kill(int(job.job_id), signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(1)


class _SlurmArray:
    def __init__(self, settings: Slurm, profile: str, jobs: Path, name: str) -> None:
        import submitit

        self._profile = profile
        self._environment = _environment(settings.cpus, "-1" if profile == "cpu" else None)
        self._looked, self._alive = -_LOOK, set[str]()
        self._executor = submitit.SlurmExecutor(jobs)
        options = {"gres": settings.gres, "partition": settings.partition, "mem": settings.mem}
        self._executor.update_parameters(
            job_name=name,
            time=settings.time,
            cpus_per_task=settings.cpus,
            srun_args=[f"--cpus-per-task={settings.cpus}"],  # srun no longer takes sbatch's
            array_parallelism=settings.array_parallelism,
            setup=settings.setup,
            additional_parameters=settings.options,
            **{option: value for option, value in options.items() if value is not None},
        )

    def submit(self, waiting: deque[Point]) -> Iterable[tuple[Point, Any]]:
        from submitit.core.utils import FailedJobError

        points = list(waiting)
        waiting.clear()
        if not points:
            return []
        fixed = ([value] * len(points) for value in (self._profile, self._environment, None))
        notebooks, folders = [p.notebook for p in points], [p.folder for p in points]
        try:
            jobs = self._executor.map_array(run_point, notebooks, folders, *fixed)
        except FailedJobError as error:
            raise BatchError(f"sbatch refused the array: {_last_line(str(error))}") from None
        self._alive, self._looked = {job.job_id for job in jobs}, time.monotonic()
        return zip(points, jobs, strict=True)

    def ended(self, jobs: Iterable[Any]) -> list[Any]:
        """By their results and by squeue: accounting, which submitit asks, is not everywhere."""
        if time.monotonic() >= self._looked + _LOOK:
            self._looked = time.monotonic()
            command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
            listed = subprocess.run(command, capture_output=True, text=True)
            if listed.returncode == 0:  # else the controller is busy: ask again
                self._alive = set(listed.stdout.split())
        return [
            job for job in jobs if job.paths.result_pickle.exists() or job.job_id not in self._alive
        ]

    def cancel(self, jobs: Sequence[Any]) -> None:
        if jobs:
            subprocess.run(["scancel", *(job.job_id for job in jobs)], capture_output=True)


def _environment(threads: int, device: str | None) -> dict[str, str]:
    """What keeps a worker to its share. ``device``: as in CUDA_VISIBLE_DEVICES; None: as it is."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    shares = dict.fromkeys(names, str(threads))
    if device is not None:
        shares |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), device)
    return shares


def _devices(settings: Local, profile: str, points: int) -> list[str]:
    """For every worker the one device it may see; ``-1``: none. BatchError: too few there."""
    if profile == "cpu":
        workers = settings.workers or len(os.sched_getaffinity(0))
        return ["-1"] * min(workers, points)
    import torch

    batch.check_profile(profile, machine_module.detect())
    here = [str(number) for number in range(torch.cuda.device_count())]
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if visible := os.environ.get(variable):  # what this process was given, it divides
            here = visible.split(",")
            break
    workers = settings.workers or len(here)
    if workers > len(here):
        raise BatchError(f"executor.workers: {workers} wanted, {len(here)} accelerators here")
    return here[: min(workers, points)]


def _workers(grid: Grid, root: Path, points: int) -> _Workers:
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise BatchError("submitit is missing: pip install 'fusion-evidence[sweep]'") from None
    if isinstance(grid.executor, Local):
        return _LocalWorkers(grid.executor, grid.profile, root / "jobs", points)
    try:
        return _SlurmArray(grid.executor, grid.profile, root / "jobs", grid.name)
    except RuntimeError:
        raise BatchError("executor: there is no Slurm here (no srun)") from None


# --- the sweep ----------------------------------------------------------------------------------


def sweep(file: Path, *, gather_only: bool = False, report: Report = print) -> int:
    """Run what is not verified of a grid file, then gather all; returns the exit status.

    0 when every point is verified, 1 when one is not, 128 + n after signal n. Raises BatchError
    before anything starts for a grid that cannot be run.
    """
    grid = read_grid(file)
    root = SWEEPS / grid.name
    points = plan(grid, root)
    if gather_only:
        return gather(points, root, report)
    with batch.locked(root):
        waiting = deque(point for point in points if point.problems())
        kept = len(points) - len(waiting)
        report(f"{grid.name}: {len(points)} points, {kept} verified already -> {root}")
        try:
            if waiting:
                workers = _workers(grid, root, len(waiting))
                for point in waiting:
                    values = {"_limits": point.limits, point.notebook.stem: point.passed}
                    write_text(point.folder / _PARAMETERS, yaml.safe_dump(values))
                with batch.signals_raise():
                    _follow(workers, waiting, len(points), report)
            return gather(points, root, report)
        except batch.Interrupted as stop:
            report(f"{stop}: its workers were ended, verified points are kept; call it again")
            return 128 + stop.number
        except BrokenPipeError:  # nobody reads the progress any more
            raise
        except OSError as error:
            raise batch.unwritable(root, error) from error


def _follow(workers: _Workers, waiting: deque[Point], total: int, report: Report) -> None:
    """Run the waiting points and say how each went; ends what runs when it is interrupted."""
    running: dict[Any, tuple[Point, float]] = {}
    number, spoken = total - len(waiting), time.monotonic()
    try:
        while waiting or running:
            for point, job in workers.submit(waiting):
                running[job] = (point, time.monotonic())
                report(f"{point}: submitted, {len(waiting)} waiting")
            for job in workers.ended(running):
                point, started = running.pop(job)
                number, spoken = number + 1, time.monotonic()
                clock = f"{(spoken - started) / 60:.1f} min"
                report(f"[{number}/{total}] {point}: {_outcome(point, job)} after {clock}")
            if time.monotonic() >= spoken + _HEARTBEAT:
                spoken = time.monotonic()
                for job, (point, _) in running.items():
                    report(f"{point}: still running: {_last_line(_read(job.paths.stdout))}")
            time.sleep(_POLL)
    finally:
        workers.cancel(list(running))


def _outcome(point: Point, job: Any) -> str:
    if not point.problems():
        return f"verified: {point.evidence().tally()}"
    return f"unfinished: {_ended(job) or '; '.join(point.problems())}"


def _ended(job: Any) -> str:
    """What a worker says of its point that the evidence does not, "" when nothing."""
    if job.paths.result_pickle.exists():
        try:
            return str(job.result())
        except Exception as error:  # submitit gives the worker's traceback
            return _last_line(str(error))
    log = job.paths.stderr
    return f"its worker ended without a word: {_last_line(_read(log)) or 'was it killed?'} ({log})"


def _read(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# --- gathering ----------------------------------------------------------------------------------

#: Columns beside the parameters', which take another name than these.
_COLUMNS = {*Measurement.model_fields, "point", "notebook", "status", "reason", "machine", "claims"}


def gather(points: Sequence[Point], root: Path, report: Report = print) -> int:
    """Write ``table.csv``, ``measurements.csv`` and ``plots/`` into ``root``; print the table.

    Only verified points bring measurements. Returns 0 when all are verified, else 1.
    """
    import pandas as pd

    found = [(point, point.evidence(), point.problems()) for point in points]
    table = pd.DataFrame([_row(*each) for each in found], dtype=object)
    verified = [(point, evidence) for point, evidence, problems in found if not problems]
    rows = [row for point, evidence in verified for row in _measurements(point, evidence)]
    measured = pd.DataFrame(rows, dtype=object)
    write_text(root / "table.csv", table.to_csv(index=False))
    write_text(root / "measurements.csv", measured.to_csv(index=False))
    swept = list(dict.fromkeys(_column(n) for p in points for n in p.given if n in p.varied))
    drawn = _draw(measured, swept, root / "plots") if rows else 0
    shown = table[["notebook", *swept, "status", "claims", "reason"]]
    report(shown.dropna(axis="columns", how="all").fillna("").to_string(index=False))
    report(f"{len(verified)} of {len(points)} points verified; {drawn} plots; all in {root}")
    return int(len(verified) < len(points))


def _column(parameter: str) -> str:
    return f"parameter {parameter}" if parameter in _COLUMNS else parameter


def _given(point: Point) -> dict[str, Any]:
    """Column -> value of what the grid gives: lists as text."""
    plain = (bool, int, float, str)
    return {
        _column(name): value if isinstance(value, plain) else str(value)
        for name, value in point.given.items()
    }


def _row(point: Point, evidence: Evidence, problems: list[str]) -> dict[str, Any]:
    never = evidence.run == "not_run"
    row = {"point": point.folder.name, "notebook": point.notebook.stem} | _given(point)
    row["status"] = "not run" if never else "unfinished" if problems else "verified"
    row["reason"] = None if never or not problems else "; ".join(problems)
    row["machine"] = evidence.machine.name if evidence.machine else None
    row["claims"] = None if problems else evidence.tally()
    for claim in () if problems else evidence.claims:
        arm = f"[{claim.arm}]" if claim.arm else ""
        row[f"claim {claim.claim}{arm}"] = claim.verdict.value
    return row


def _measurements(point: Point, evidence: Evidence) -> Iterator[dict[str, Any]]:
    head = {"point": point.folder.name, "notebook": point.notebook.stem} | _given(point)
    for measurement in evidence.measurements:
        labels = " ".join(f"{name}={label}" for name, label in measurement.labels.items())
        yield head | measurement.model_dump() | {"labels": labels}


def _draw(measured: pd.DataFrame, swept: Sequence[str], folder: Path) -> int:
    """One figure for every number that changes over what was swept; returns how many."""
    from fusion_evidence.lib.report import plots_sweep, style

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    drawn = 0
    for (notebook, metric), frame in measured.groupby(["notebook", "metric"]):
        varied = [name for name in swept if name in frame and frame[name].nunique() > 1]
        figure = plots_sweep.over_parameters(frame, varied, title=f"{notebook}: {metric}")
        if figure is not None:
            name = re.sub(r"[^\w.-]", "_", f"{notebook}-{metric}.png")
            (folder / name).write_bytes(style.png(figure))
            drawn += 1
    return drawn
