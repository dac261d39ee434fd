"""Run the collection, verify what it left, accept verified results.

Papermill's word is not taken for anything: after a dead kernel or a timeout it leaves a notebook in
which every cell says ``completed``. A result counts when the process ended well *and* `verify`
finds nothing wrong with the executed notebook and its evidence.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fusion_evidence.lib import paths
from fusion_evidence.lib.executor import STOP, kernel_spec
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.nbformat_quickly import nbformat
from fusion_evidence.lib.notebook import read_cells
from fusion_evidence.lib.parameters import (
    Parameter,
    ParameterError,
    parse_value,
    read_parameters,
    unknown_names,
)
from fusion_evidence.lib.report.evidence import (
    Evidence,
    Verdict,
    evidence_path,
    is_fresh,
    read_evidence,
    write_evidence,
    write_text,
)
from fusion_evidence.lib.report.recorder import SENTINEL

#: Seconds, unless the profile's ``_limits`` says otherwise.
LIMITS = {"cell_seconds": 1800.0, "notebook_seconds": 7200.0}
MAX_COPY_BYTES = 1_000_000
_HEARTBEAT = 60.0
_GRACE = 10.0
_SUMMARY = "00_summary"
#: In a folder of accepted results: they came in an archive; see `lib.report.archive_check`.
ARCHIVE_RECORD = "archive.json"

Report = Callable[[str], None]


class BatchError(Exception):
    """Something that stops the whole batch; the message is for the person who called it."""


class Interrupted(BaseException):
    """The runner was asked to stop by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@dataclass
class Result:
    """One line of the final table."""

    notebook: str
    status: str = "not started"  #: verified, kept, failed, not started
    minutes: float = 0.0
    evidence: Evidence | None = None
    problems: list[str] = field(default_factory=list)


# --- what to run --------------------------------------------------------------------------------


def select_notebooks(folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """The notebooks of a folder in order, the summary last; ``only`` holds names or prefixes.

    Raises BatchError for a name that selects nothing.
    """
    found = sorted(folder.glob("*.ipynb"), key=lambda path: (path.stem == _SUMMARY, path.stem))
    if not found:
        raise BatchError(f"no notebooks in {folder}")
    wanted = [name.removesuffix(".ipynb") for name in only]
    for name in wanted:
        if not any(path.stem.startswith(name) for path in found):
            known = ", ".join(path.stem for path in found)
            raise BatchError(f"--only {name}: no such notebook; there are {known}")
    return [path for path in found if not wanted or path.stem.startswith(tuple(wanted))]


def read_profile(file: Path) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """(values by notebook, limits) of a profile file; both empty when there is no file.

    Raises BatchError when it is no mapping of notebooks to parameters.
    """
    if not file.exists():
        return {}, dict(LIMITS)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise BatchError(f"{file.name}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise BatchError(f"{file.name}: expected a mapping from notebook to parameters")
    limits = content.pop("_limits", None) or {}
    for name, seconds in limits.items():
        good = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0
        if name not in LIMITS or not good:
            known = ", ".join(LIMITS)
            raise BatchError(
                f"{file.name}: _limits takes seconds for {known}, got {name}: {seconds!r}"
            )
    values = {notebook: given or {} for notebook, given in content.items()}
    for notebook, given in values.items():
        if not isinstance(given, dict):
            raise BatchError(f"{file.name}: {notebook}: expected a mapping of parameters")
    return values, LIMITS | limits


def plan_parameters(
    notebooks: Sequence[Path], profile_file: Path, settings: Sequence[str] = ()
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, float]]:
    """(values to pass, all values, limits), the first two by notebook name, typed and checked.

    A setting is ``name=value``, for every selected notebook that has the parameter, or
    ``notebook.name=value``, where a prefix of the notebook's name is enough. Raises BatchError.
    """
    profile, limits = read_profile(profile_file)
    passed: dict[str, dict[str, Any]] = {}
    declared: dict[str, dict[str, Parameter]] = {}
    siblings = {path.stem for path in notebooks[0].parent.glob("*.ipynb")}
    if strange := sorted(set(profile) - siblings):
        raise BatchError(f"{profile_file.name}: no such notebook: {', '.join(strange)}")
    for path in notebooks:
        name = path.stem
        try:
            declared[name] = read_parameters(path)
            given = profile.get(name, {})
            if problem := unknown_names(given, declared[name]):
                raise ParameterError(problem)
            passed[name] = {key: parse_value(declared[name][key], v) for key, v in given.items()}
        except (ValueError, SyntaxError) as error:
            raise BatchError(f"{name} with {profile_file.name}: {error}") from None

    for setting in settings:
        left, equals, text = setting.partition("=")
        if not equals or not left:
            raise BatchError(f"--set {setting}: expected name=value")
        notebook, dot, key = left.rpartition(".")
        targets = [name for name in declared if not dot or name.startswith(notebook)]
        if not targets:
            raise BatchError(f"--set {setting}: {notebook} is not among the selected notebooks")
        having = [name for name in targets if key in declared[name]]
        if not having:
            known = {k: p for name in targets for k, p in declared[name].items()}
            raise BatchError(f"--set {setting}: {unknown_names([key], known)}")
        for name in having:
            try:
                passed[name][key] = parse_value(declared[name][key], text)
            except ParameterError as error:
                raise BatchError(f"--set {setting}: {name}: {error}") from None

    complete = {
        name: {key: p.default for key, p in declared[name].items()} | passed[name]
        for name in declared
    }
    return passed, complete, limits


def check_profile(profile: str | None, machine: Machine) -> str:
    """The profile to use; raises BatchError when the machine cannot serve the one asked for."""
    if profile in (None, machine.profile):
        return machine.profile
    needs = {"cpu": "no GPU", "cuda": "an NVIDIA GPU", "dcu": "a DCU or another ROCm GPU"}
    raise BatchError(
        f"--profile {profile} needs {needs[str(profile)]}, but torch sees "
        f"{machine.device_name} (profile {machine.profile})"
    )


# --- verification -------------------------------------------------------------------------------


def verify(
    notebook: Path,
    results: Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    stale: bool = False,
) -> list[str]:
    """What is wrong with a notebook's result in the folder ``results``; empty when nothing is.

    ``parameters``: the values the result must have been made with, where that matters. ``stale``:
    it may be of sources that have changed since, the notebook's among them.
    """
    name = notebook.stem
    evidence = read_evidence(evidence_path(results, name))
    if evidence.run != "complete":
        return [f"run is {evidence.run}: {evidence.reason}"]
    problems = []
    if evidence.notebook != name:
        problems.append(f"the evidence is of {evidence.notebook}")
    if evidence.machine is None:
        problems.append("the evidence names no machine")
    if not stale and not is_fresh(evidence, notebook.parent):
        problems.append("stale: the notebook or a module it imports has changed since")
    if parameters is not None and evidence.parameters != parameters:
        changed = [k for k in parameters if evidence.parameters.get(k) != parameters[k]]
        problems.append(f"made with other parameters: {', '.join(changed)}")
    copy = results / notebook.name
    if not stale and copy.exists() and not _same_cells(notebook, copy):
        problems.append("the executed notebook has other cells than the source")
    return problems + _verify_copy(copy, evidence)


def _same_cells(one: Path, other: Path) -> bool:
    def sources(notebook: Path) -> list[tuple[str, str]]:
        return [(cell.kind, cell.source) for cell in read_cells(notebook)]

    with suppress(ValueError):  # what cannot be read is a problem of its own
        return sources(one) == sources(other)
    return True


def _verify_copy(copy: Path, evidence: Evidence) -> list[str]:
    try:
        executed = nbformat.read(copy, as_version=4)
    except FileNotFoundError:
        return ["the executed notebook is missing"]
    except Exception as error:  # half-written: nbformat raises many types
        return [f"the executed notebook is not readable: {type(error).__name__}"]
    problems = []
    code = [cell for cell in executed.cells if cell.cell_type == "code" and cell.source.strip()]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        problems.append("the cells were not executed once each, from top to bottom")
    errors = [
        f"cell {number} raised {output.get('ename')}"
        for number, cell in enumerate(code, 1)
        for output in cell.outputs
        if output.output_type == "error"
    ]
    sentinels = [
        output.data[SENTINEL]
        for output in (code[-1].outputs if code else [])
        if SENTINEL in output.get("data", {})
    ]
    if sentinels != [{"notebook": copy.stem, "run_id": evidence.run_id}]:
        problems.append("the last cell did not finish the recorder of this evidence")
    return problems + errors


# --- running ------------------------------------------------------------------------------------


def run(
    notebooks: Sequence[Path],
    results: Path,
    *,
    profile_file: Path,
    settings: Sequence[str] = (),
    resume: bool = False,
    report: Report = print,
) -> int:
    """Execute notebooks one after another into ``results``; returns the exit status.

    0 when every notebook is verified (whatever its verdicts), 1 when one is not, 128 + n after
    signal n. ``resume`` keeps what is verified already. Raises BatchError before anything starts
    for parameters that do not fit and for a folder that cannot be written, and when the disk is
    full.
    """
    passed, complete, limits = plan_parameters(notebooks, profile_file, settings)
    table = [Result(path.stem) for path in notebooks]
    with locked(results), signals_raise():
        try:
            for path, result in zip(notebooks, table, strict=True):
                started = time.monotonic()
                if resume and not verify(path, results, complete[path.stem]):
                    result.status = "kept"
                    report(f"{path.stem}: verified already, kept")
                else:
                    result.status = "failed"
                    try:
                        result.problems = _run_one(
                            path, results, passed[path.stem], complete[path.stem], limits, report
                        )
                    except Interrupted as stop:
                        result.problems = [str(stop)]
                        raise
                    finally:
                        result.minutes = (time.monotonic() - started) / 60
                    result.status = "failed" if result.problems else "verified"
                result.evidence = read_evidence(evidence_path(results, path.stem))
        except Interrupted as stop:
            report(_table(table))
            report(f"{stop}: results so far are kept in {results}; `run --resume` goes on")
            return 128 + stop.number
        except BrokenPipeError:  # nobody reads the progress any more
            raise
        except OSError as error:
            raise unwritable(results, error) from error
    report(_table(table))
    return int(any(result.status == "failed" for result in table))


def _run_one(
    path: Path,
    results: Path,
    passed: Mapping[str, Any],
    complete: Mapping[str, Any],
    limits: Mapping[str, float],
    report: Report,
) -> list[str]:
    """Execute one notebook; returns its problems, which its evidence then has as the reason."""
    target = evidence_path(results, path.stem)
    # Replaces the evidence of an earlier run, which would otherwise speak for this one if the
    # notebook died before it opened its recorder.
    write_evidence(target, Evidence(notebook=path.stem, run="incomplete", reason="started"))
    (results / path.name).unlink(missing_ok=True)
    problem: str | None = "stopped"
    try:
        problem = _execute(path, results, passed, limits, report)
    except Interrupted as stop:
        problem = str(stop)
        raise
    finally:
        problems = [problem] if problem else verify(path, results, complete)
        if problems:
            evidence = read_evidence(target)
            evidence.run, evidence.reason = "incomplete", "; ".join(problems)
            write_evidence(target, evidence)
            report(f"{path.stem}: failed: {evidence.reason}")
        else:
            _shorten_paths(results / path.name)
    return problems


def _execute(
    path: Path,
    results: Path,
    passed: Mapping[str, Any],
    limits: Mapping[str, float],
    report: Report,
) -> str | None:
    """Run a notebook in its own process; returns what went wrong, or None."""
    cells = sum(cell.kind == "code" and bool(cell.source.strip()) for cell in read_cells(path))
    cells += bool(passed)  # papermill adds one
    with tempfile.TemporaryDirectory(prefix="fe-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        spec = scratch / "kernels" / "python3" / "kernel.json"
        write_text(spec, json.dumps(kernel_spec()))
        job = {
            "parent": os.getpid(),
            "source": str(path.resolve()),
            "output": str((results / path.name).resolve()),
            "parameters": dict(passed),
            "scratch": str(scratch),
        }
        write_text(scratch / "job.json", json.dumps(job))
        environment = os.environ | {
            "FUSION_EVIDENCE_RUN_DIR": str(results.resolve()),
            "FUSION_EVIDENCE_NOTEBOOKS": str(path.parent.resolve()),
            "JUPYTER_PATH": str(scratch),
            "JUPYTER_RUNTIME_DIR": str(scratch),
            "IPYTHONDIR": str(scratch / "ipython"),  # no start-up files, no shared history
        }
        with open(scratch / "log", "w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fusion_evidence.lib.executor", str(scratch / "job.json")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C is for the runner
            )
            try:
                problem = _follow(process, path.stem, cells, limits, report)
            finally:
                _stop(process)
            if process.returncode and problem is None:
                log.seek(0)
                last = [line.strip() for line in log if line.strip()][-1:]
                problem = ": ".join([f"process ended with status {process.returncode}", *last])
    return problem


def _follow(
    process: subprocess.Popen[bytes],
    name: str,
    cells: int,
    limits: Mapping[str, float],
    report: Report,
) -> str | None:
    """Report progress until the process ends or a limit is reached; returns what went wrong."""
    assert process.stdout is not None
    start = spoken = time.monotonic()
    cell_start = math.inf  # the start of the kernel counts towards the notebook's limit alone
    cell, problem, rest = "start of the kernel", None, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            due = {
                "notebook": start + limits["notebook_seconds"],
                "cell": cell_start + limits["cell_seconds"],
            }
            for what, moment in due.items():
                if now >= moment:
                    return f"{cell}: over the limit of {limits[f'{what}_seconds']:g} s per {what}"
            if now >= spoken + _HEARTBEAT:
                spoken = now
                report(f"{name}  {cell}  {_clock(now - start)}  still running")
            moment = min(*due.values(), spoken + _HEARTBEAT)
            if not selector.select(max(0.0, moment - now)):
                continue
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                process.wait()
                return problem
            *lines, rest = (rest + chunk).split(b"\n")
            for line in map(json.loads, lines):
                if "error" in line:
                    problem = line["error"]
                    continue
                cell_start = spoken = time.monotonic()
                cell = f"cell {line['cell']}/{cells}"
                report(f"{name}  {cell}  {_clock(cell_start - start)}  {line['title']}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End an executor and all it started; does nothing when it has ended already."""
    if process.poll() is None:
        process.send_signal(STOP)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()  # its kernel dies with it
            process.wait()
    if process.stdout:
        process.stdout.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def _shorten_paths(copy: Path) -> None:
    """Take this machine's repository folder out of warnings and tracebacks."""
    text = copy.read_text(encoding="utf-8")
    shorter = text.replace(f"{paths.ROOT}{os.sep}", "")
    if shorter != text:
        write_text(copy, shorter)


def _table(table: Sequence[Result]) -> str:
    width = max(len(result.notebook) for result in table)
    lines = ["", f"{'notebook':{width}}  {'status':11}  minutes  claims"]
    for result in table:
        claims = "; ".join(result.problems)
        if not claims and result.evidence:
            claims = result.evidence.tally()
            verdicts = {claim.verdict for claim in result.evidence.claims}
            if verdicts == {Verdict.NOT_RUN}:
                reasons = {claim.why for claim in result.evidence.claims}
                claims = f"nothing ran here: {claims} ({'; '.join(sorted(reasons))})"
        left = f"{result.notebook:{width}}  {result.status:11}  {result.minutes:7.1f}"
        lines.append(f"{left}  {claims}".rstrip())
    return "\n".join(lines)


@contextmanager
def locked(results: Path) -> Iterator[None]:
    """Hold a results folder for one runner; raises BatchError when it cannot be written."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        # Finds a folder that cannot be written, or a full disk, before a kernel starts.
        probe = results / ".probe"
        write_text(probe, " " * 65536)
        probe.unlink()
        lock = open(results / ".lock", "a")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise unwritable(results, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchError(f"another run is writing to {results}") from None
        yield


def unwritable(results: Path, error: OSError) -> BatchError:
    return BatchError(f"cannot write {error.filename or results}: {error.strerror or error}")


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn the signals that ask a program to end into Interrupted, once."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def interrupt(number: int, _frame: Any) -> None:
        for each in numbers:  # a second one must not disturb the clean-up
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {
        number: signal.signal(number, interrupt)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- accepting ----------------------------------------------------------------------------------


_ABSOLUTE = re.compile(
    r"(?<![\w./:-])(?:/|(?:\.\./)+)(?:[\w.+@-]+/)+(?=(?:fusion_evidence/)?(?:kernels|lib|notebooks)/|[\w-]+\.ipynb\b)"
)


def portable(text: str) -> str:
    """Text of a result without the folders of the machine it was made on.

    What stays of a path to the project's own files is the part below the project, of a path to a
    notebook its name: a result says what happened, not where somebody keeps their work.
    """
    return _ABSOLUTE.sub("", text)


def accept(
    notebooks: Sequence[Path], results: Path, accepted: Path, *, report: Report = print
) -> int:
    """Copy verified results to ``accepted/<machine>``; returns 1 when one had to be refused.

    Notebooks without a result are passed over. Raises BatchError when there is nothing at all.
    """
    refused = 0
    present = [path for path in notebooks if evidence_path(results, path.stem).exists()]
    if not present:
        raise BatchError(f"no results in {results}")
    for path in present:
        copy = results / path.name
        evidence = read_evidence(evidence_path(results, path.stem))
        problems = verify(path, results)
        if evidence.machine and (accepted / evidence.machine.name / ARCHIVE_RECORD).exists():
            problems.append(f"{accepted.name}/{evidence.machine.name} holds a run handed in")
        if not problems and (size := copy.stat().st_size) > MAX_COPY_BYTES:
            problems = [f"the executed notebook has {size:,} bytes, over {MAX_COPY_BYTES:,}"]
        if problems or evidence.machine is None:
            refused += 1
            report(f"{path.stem}: refused: {'; '.join(problems)}")
            continue
        folder = accepted / evidence.machine.name
        for file in (copy, evidence_path(results, path.stem)):
            write_text(folder / file.name, portable(file.read_text(encoding="utf-8")))
        note = " (made with uncommitted changes)" if evidence.dirty else ""
        report(f"{path.stem}: accepted: {evidence.tally()}{note}")
    return int(refused > 0)
