"""Which results a site may show: those `accept` would take again today."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusion_evidence.lib.batch import ARCHIVE_RECORD, BatchError, verify
from fusion_evidence.lib.nbformat_quickly import nbformat
from fusion_evidence.lib.report import summary
from fusion_evidence.lib.report.archive import ArchiveError
from fusion_evidence.lib.report.evidence import Evidence, evidence_path, read_evidence
from fusion_evidence.lib.report.handed_in import HandedIn, handed_in


@dataclass(frozen=True)
class Page:
    """One notebook's result on one machine, verified and fresh."""

    machine: str
    notebook: str
    evidence: Evidence
    copy: Path  #: the executed notebook
    since: tuple[str, ...] = ()  #: for the summary: results of other machines it did not see yet

    @property
    def document(self) -> str:
        """The page's place in the site, without a suffix; the same as in the repository."""
        return f"data/runs/{self.machine}/{self.notebook}"


@dataclass
class MachineResults:
    """What one folder of accepted results gives to the site."""

    name: str
    folder: Path
    archive: HandedIn | None = None  #: they were handed in: verified, not run by this project
    pages: list[Page] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  #: notebook -> why
    absent: list[str] = field(default_factory=list)  #: notebooks without a result here


def collect(
    accepted: Path, notebooks: Path, *, only: Sequence[str] = (), skip_stale: bool = False
) -> list[MachineResults]:
    """Every machine's results under ``accepted``, each verified against the source ``notebooks``.

    Raises BatchError when there is nothing, for an unknown machine, and when a result is corrupt,
    unverified or stale, with what to run again; ``skip_stale`` records those as left out instead.
    """
    folders = _folders(accepted)
    names = [folder.name for folder in folders]
    if not names:
        raise BatchError(f"no accepted results in {accepted}; run, then accept")
    for name in only:
        if name not in names:
            raise BatchError(f"--only {name}: no such machine; there are {', '.join(names)}")
    machines = [_collect(f, notebooks) for f in folders if not only or f.name in only]
    if not skip_stale and any(machine.left_out for machine in machines):
        raise BatchError(_what_to_do(machines))
    if not any(machine.pages for machine in machines):
        raise BatchError(f"nothing left to show:\n{_refusals(machines)}")
    return machines


def _collect(folder: Path, notebooks: Path) -> MachineResults:
    sources = {path.stem for path in notebooks.glob("*.ipynb")}
    files = (path for path in folder.iterdir() if path.suffix in (".json", ".ipynb"))
    present = {path.stem for path in files if path.name != ARCHIVE_RECORD}
    machine = MachineResults(folder.name, folder, absent=sorted(sources - present))
    damaged = []
    try:
        machine.archive = handed_in(folder)
    except ArchiveError as error:
        damaged = [str(error)]
    measured_on = machine.archive.machine if machine.archive else folder.name
    for name in sorted(present):
        problems = damaged or _problems(folder, name, notebooks / f"{name}.ipynb", measured_on)
        evidence = read_evidence(evidence_path(folder, name))
        since = _since(evidence, folder) if name == summary.SUMMARY and not problems else []
        if own := [result for result in since if result.endswith(f" on {folder.name}")]:
            problems = [f"stale: accepted since it ran: {', '.join(own)}"]
        if problems:
            machine.left_out[name] = "; ".join(problems)
        else:
            copy = folder / f"{name}.ipynb"
            machine.pages.append(Page(folder.name, name, evidence, copy, tuple(since)))
    return machine


def _since(evidence: Evidence, folder: Path) -> list[str]:
    """Results that are others now than those a summary read; its own hash does not see them."""
    asked = evidence.parameters.get("machines")
    asked = asked if isinstance(asked, list) else []
    names = [f.name for f in _folders(folder.parent) if not asked or f.name in asked]
    found = [result for name in names for result in summary.results(name, [folder.parent / name])]
    changed = summary.outdated(evidence, found)
    return [result for result in changed if result.rpartition(" on ")[2] in names]


def _folders(accepted: Path) -> list[Path]:
    return sorted(p for p in accepted.glob("[!.]*") if p.is_dir() and any(p.glob("*.json")))


def _problems(folder: Path, name: str, source: Path, measured_on: str) -> list[str]:
    if not re.fullmatch(r"[\w.-]+", f"{folder.name}{name}", re.ASCII):
        return ["a name with other signs than letters, digits, '.', '_' and '-'"]
    if not source.is_file():
        return ["no such notebook in this version"]
    if any((folder / f"{name}{suffix}").is_symlink() for suffix in (".json", ".ipynb")):
        return ["a link, not a file"]
    problems = verify(source, folder)
    evidence = read_evidence(evidence_path(folder, name))
    if evidence.machine and evidence.machine.name != measured_on:
        problems.append(f"measured on {evidence.machine.name}, not on {measured_on}")
    return problems or _bad_copy(folder / f"{name}.ipynb")


def _bad_copy(copy: Path) -> list[str]:
    """What verification leaves open and a page would stumble over."""
    executed: Any = nbformat.read(copy, as_version=4)
    try:
        nbformat.validate(executed)
        nbformat.writes(executed).encode()  # no half of a character
    except (nbformat.ValidationError, UnicodeError) as error:
        return [f"the executed notebook is not valid: {str(error).splitlines()[0]}"]
    # Papermill's cell is not compared with the source, so nothing but code may call itself that.
    injected = [c for c in executed.cells if "injected-parameters" in c.metadata.get("tags", ())]
    if len(injected) > 1 or any(cell.cell_type != "code" for cell in injected):
        return ["the executed notebook has cells that the source has not"]
    return []


def _refusals(machines: Sequence[MachineResults]) -> str:
    return "\n".join(
        f"  {machine.name}/{name}: {why}"
        for machine in machines
        for name, why in machine.left_out.items()
    )


def _what_to_do(machines: Sequence[MachineResults]) -> str:
    count = sum(len(machine.left_out) for machine in machines)
    lines = [f"{count} accepted results cannot be published:", _refusals(machines)]
    for machine in machines:
        if not machine.left_out:
            continue
        names = " ".join(f"--only {name}" for name in machine.left_out)
        if (machine.folder / ARCHIVE_RECORD).exists():
            lines.append(f"on {machine.name}, by who handed it in: fusion-evidence run {names}")
            lines.append("    then pack there, and import here with --replace")
        else:
            lines.append(f"on {machine.name}: fusion-evidence run {names}")
            lines.append(f"    then fusion-evidence accept {names}")
    lines.append("or leave them out, which the summary will say: --skip-stale")
    return "\n".join(lines)
