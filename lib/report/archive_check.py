"""Verify an archive without the device and without running any of it.

What this can show: the files are those that were packed, the notebooks were executed from top to
bottom without an error, their cells and modules are those of this checkout, the figures agree with
one another, and what the pages show is what the files say. **What it cannot show:** that the
figures were measured. Whoever writes a whole run by hand, consistently, passes. There is no
signature: a SHA-256 quoted where the run is announced ties the archive to that announcement, and
trust in whoever wrote it stays a matter between people, as does running it again on such a machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from fusion_evidence.lib import batch, paths
from fusion_evidence.lib.report import archive, consistency, page_check
from fusion_evidence.lib.report.archive import RESULTS, Archive, ArchiveError, Packed
from fusion_evidence.lib.report.evidence import (
    Evidence,
    cells_hash,
    fingerprint,
    is_fresh,
    source_hashes,
)

Status = Literal["OK", "FAILED", "STALE"]

NOT_PROVED = (
    "This does not prove that the figures were measured: a forger who invents a whole run "
    "consistently passes. Quote the SHA-256 where you announce a run."
)


@dataclass(frozen=True)
class Check:
    """One examination. subject: ``archive`` or a notebook. why: empty when all is well."""

    subject: str
    what: str
    status: Status
    why: str = ""

    def __str__(self) -> str:
        text = f"{self.status:6}  {self.subject}: {self.what}"
        text = f"{text}: {self.why}" if self.why else text
        return printable(text)


def printable(text: str) -> str:
    """A stranger's text, in which nothing moves a terminal's cursor."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


@dataclass
class Verification:
    """What came of verifying an archive; archive is None when it could not be opened safely."""

    checks: list[Check] = field(default_factory=list)
    archive: Archive | None = None

    @property
    def failed(self) -> list[Check]:
        """The examinations that found something wrong."""
        return [check for check in self.checks if check.status == "FAILED"]

    @property
    def stale(self) -> list[Check]:
        """Those that found older sources than this checkout's."""
        return [check for check in self.checks if check.status == "STALE"]

    def accepted(self, stale: bool = False) -> bool:
        """Nothing is wrong; with ``stale``, older sources count as nothing wrong."""
        return self.archive is not None and not self.failed and (stale or not self.stale)


def verify(path: Path, notebooks: Path | None = None) -> Verification:
    """Every examination of an archive against the notebooks of this checkout; never raises for
    what is in it."""
    result, steps = Verification(), archive.Steps()
    with suppress(ArchiveError):  # the last of the steps says why
        result.archive = archive.read_archive(path, steps)
    for what, why in steps.done:
        result.checks.append(Check("archive", what, "FAILED" if why else "OK", why))
    if result.archive is not None:
        for check in _examine(result.archive, notebooks or paths.NOTEBOOKS):
            result.checks.append(check)
    return result


def _examine(opened: Archive, notebooks: Path) -> Iterator[Check]:
    yield _check("archive", "what was left beside the results is readable", _left(opened))
    machines = set()
    for name, packed in sorted(opened.manifest.notebooks.items()):
        try:
            evidence = read_packed(opened, name)
            executed = _read_notebook(opened, name)
        except ArchiveError as error:
            yield Check(name, "evidence and executed notebook are readable", "FAILED", str(error))
            continue
        yield Check(name, "evidence and executed notebook are readable", "OK")
        machine = evidence.machine
        machines.add(machine and (machine.name, machine.device_name, machine.arch))
        yield _check(name, "it is of the archive's machine", _whose(opened, evidence))
        yield from _freshness(name, packed, evidence, opened, notebooks)
        yield _check(name, "executed from top to bottom, no error", _executed(opened, name))
        source = notebooks / f"{name}.ipynb"
        for what, problems in page_check.examine(evidence, executed, source).items():
            yield _check(name, what, problems)
        for what, problems in consistency.examine(evidence).items():
            yield _check(name, what, problems)
    yield _check("archive", "one machine", [] if len(machines) < 2 else ["several machines"])


def _check(subject: str, what: str, problems: list[str]) -> Check:
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    why = "; ".join(problem[:300] for problem in problems[:3]) + more
    return Check(subject, what, "FAILED" if problems else "OK", why)


# --- files --------------------------------------------------------------------------------------


def read_packed(opened: Archive, name: str) -> Evidence:
    """The evidence of a notebook in an archive; ArchiveError when it is none of a complete run."""
    file = f"{RESULTS}/{name}.json"
    document = archive.read_json(opened.files[file], file)
    try:
        evidence = Evidence.model_validate(document)
    except ValidationError as error:
        raise ArchiveError(f"{file}: {archive.first_problem(error)}") from None
    if evidence.run != "complete" or evidence.notebook != name:
        raise ArchiveError(f"{file} is of {evidence.notebook[:80]}, run {evidence.run}")
    return evidence


def _read_notebook(opened: Archive, name: str) -> dict[str, Any]:
    file = f"{RESULTS}/{name}.ipynb"
    if len(opened.files[file]) > batch.MAX_COPY_BYTES:
        raise ArchiveError(f"{file} has over {batch.MAX_COPY_BYTES:,} bytes")
    document = archive.read_json(opened.files[file], file)
    if not isinstance(document, dict) or document.get("nbformat") != 4:
        raise ArchiveError(f"{file} is no notebook of format 4")
    return document


def _left(opened: Archive) -> list[str]:
    problems = []
    for name, content in opened.files.items():
        if name.startswith(f"{RESULTS}/"):
            continue
        try:
            if name.endswith(".json"):
                document = archive.read_json(content, name)
                if name.startswith("left/calibration/"):
                    problems += _calibration(opened, name, document)
            else:
                content.decode("utf-8")
        except UnicodeDecodeError:
            problems.append(f"{name} is no text")
        except ArchiveError as error:
            problems.append(str(error))
    return problems


def _calibration(opened: Archive, name: str, document: Any) -> list[str]:
    from fusion_evidence.lib.attribution.calibrated import CalibrationFile
    from fusion_evidence.lib.measure.compare import upper_bound

    try:
        found = CalibrationFile.model_validate(document)
    except ValidationError as error:
        return [f"{name}: {archive.first_problem(error)}"]
    except (TypeError, ValueError) as error:  # of numerics that contradict themselves
        return [f"{name}: {error}"]
    if found.machine != opened.manifest.machine:
        return [f"{name} is of {found.machine}"]
    counted = {kind: (graph.elements, graph.bound) for kind, graph in found.graphs.items()}
    return [
        f"{name}: {elements} {kind} elements do not give the bound {bound}"
        for kind, (elements, bound) in counted.items()
        if elements < 1 or not consistency.near(bound, upper_bound(elements), 1e-6)
    ]


def _whose(opened: Archive, evidence: Evidence) -> list[str]:
    machine, manifest = evidence.machine, opened.manifest
    if machine is None or machine.name != manifest.machine:
        return [f"it is of {machine and machine.name}, the archive of {manifest.machine}"]
    if manifest.here and manifest.here.arch != machine.arch:
        return [f"it ran on {machine.arch} and was packed on {manifest.here.arch}"]
    return []


def _executed(opened: Archive, name: str) -> list[str]:
    """What the runner would say of it: it looks at files, so give it some."""
    with tempfile.TemporaryDirectory(prefix="fe-") as folder:
        for kind in ("json", "ipynb"):
            file = f"{name}.{kind}"
            (Path(folder) / file).write_bytes(opened.files[f"{RESULTS}/{file}"])
        try:
            return batch.verify(Path(folder) / f"{name}.ipynb", Path(folder), stale=True)
        except Exception as error:  # whatever a notebook that is none makes of the reader
            return [f"cannot be read: {type(error).__name__}"]


# --- freshness ----------------------------------------------------------------------------------


def _freshness(
    name: str, packed: Packed, evidence: Evidence, opened: Archive, notebooks: Path
) -> Iterator[Check]:
    source = notebooks / f"{name}.ipynb"
    fresh = source.is_file() and is_fresh(evidence, notebooks)
    made_from = packed.sources or (source_hashes(source) if fresh else None)
    if made_from:
        print_of = fingerprint(made_from, evidence.parameters)
        problems = [] if evidence.fingerprint == print_of else ["with its parameters, of others"]
        yield _check(name, "its fingerprint is of the sources it names", problems)
        same = made_from.get("notebook") == _cells_hash(opened, name)
        problems = [] if same else ["those are other cells"]
        yield _check(name, "it executed the cells it names", problems)
    if fresh:
        why = ""
    elif made_from is None:
        why = "it is stale, as it says itself, and does not name what it was made from"
    elif not source.is_file():
        why = "there is no such notebook here"
    else:
        here = source_hashes(source)
        names = sorted(here.keys() | made_from.keys())
        other = [one for one in names if here.get(one) != made_from.get(one)]
        why = f"made from another {', '.join(other)}" if other else "made from something else"
        why += f"; check out {evidence.commit}" if evidence.commit and not evidence.dirty else ""
    yield Check(name, "its sources are those of this checkout", "STALE" if why else "OK", why)


def _cells_hash(opened: Archive, name: str) -> str | None:
    with tempfile.TemporaryDirectory(prefix="fe-") as folder:
        copy = Path(folder) / f"{name}.ipynb"
        copy.write_bytes(opened.files[f"{RESULTS}/{name}.ipynb"])
        try:
            return cells_hash(copy)
        except (AttributeError, TypeError, ValueError):
            return None
