"""Runs that somebody handed in as an archive: into ``data/runs``, and recognized there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from fusion_evidence.lib import batch, paths
from fusion_evidence.lib.report import archive
from fusion_evidence.lib.report.archive import RESULTS, ArchiveError, Digest, sha256
from fusion_evidence.lib.report.archive_check import Verification, read_packed, verify
from fusion_evidence.lib.report.evidence import write_bytes

HANDED_IN = "handed in and verified, not run by this project"


class HandedIn(BaseModel):
    """``archive.json`` beside results that somebody handed in.

    sha256: of the archive. machine: its machine, which the folder may be called otherwise. stale:
    what was stale when it was imported. files: SHA-256 by name below the folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    note: str = HANDED_IN
    sha256: Digest
    imported: str
    machine: str
    created: str
    commit: str | None
    dirty: bool | None
    versions: dict[str, str]
    packages: dict[str, str] | None
    clocks: str | None
    stale: list[str]
    absent: dict[str, str]
    files: dict[str, Digest]


def import_archive(
    path: Path,
    accepted: Path,
    *,
    name: str | None = None,
    stale: bool = False,
    replace: bool = False,
    notebooks: Path | None = None,
) -> tuple[Verification, Path | None]:
    """Verify an archive and put it, byte for byte, into ``accepted/<name>``.

    name: of the folder, default the archive's machine. Returns the verification and the folder,
    None when it was refused. replace: results that are there already move to ``runs/`` first.
    Outputs are not cleaned, so that hashes stay checkable: JupyterLab shows a notebook that it does
    not trust without its scripts, and publishing cleans HTML. Raises ArchiveError for a bad name,
    for a folder that is there already, and when it cannot be written; then nothing has changed.
    """
    result = verify(path, notebooks)
    if not result.accepted(stale) or result.archive is None:
        return result, None
    folder = accepted / (name or result.archive.manifest.machine)
    if not archive.MACHINE_NAME.fullmatch(folder.name) or folder.parent != accepted:
        raise ArchiveError(
            f"--as {name}: expected up to 40 of a-z, 0-9, '.', '_' and '-', a letter or digit first"
        )
    if folder.exists() and not replace:
        whose = (
            "another archive's"
            if (folder / batch.ARCHIVE_RECORD).exists()
            else "this project's own"
        )
        raise ArchiveError(
            f"{folder} holds {whose} results; --as NAME keeps both, --replace moves them to runs/"
        )
    try:
        _place(result, folder)
    except OSError as error:
        raise ArchiveError(f"cannot write {folder}: {error.strerror or error}") from None
    return result, folder


def _place(result: Verification, folder: Path) -> None:
    """Write all files beside the folder, then let them take its name."""
    assert result.archive is not None
    files = {
        name.removeprefix(f"{RESULTS}/"): content for name, content in result.archive.files.items()
    }
    handed_in = _handed_in(result, files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".import-", dir=folder.parent))
    try:
        for name, content in files.items():
            write_bytes(new / name, content)
        text = json.dumps(handed_in.model_dump(mode="json"), indent=1)
        write_bytes(new / batch.ARCHIVE_RECORD, f"{text}\n".encode())
        os.chmod(new, 0o755)
        _take_name(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _take_name(new: Path, folder: Path) -> None:
    if not folder.exists():
        os.rename(new, folder)
        return
    now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%f")
    kept = paths.RUNS / f"{folder.name}.replaced-{now}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(folder, kept)  # runs/ may be on another disk
    except OSError:
        shutil.rmtree(kept, ignore_errors=True)
        raise
    aside = folder.parent / f".replaced-{now}"
    os.rename(folder, aside)
    try:
        os.rename(new, folder)
    except OSError:
        os.rename(aside, folder)
        raise
    shutil.rmtree(aside)


def _handed_in(result: Verification, files: Mapping[str, bytes]) -> HandedIn:
    assert result.archive is not None
    manifest = result.archive.manifest
    first = read_packed(result.archive, min(manifest.notebooks)).machine
    assert first is not None
    return HandedIn(
        sha256=result.archive.sha256,
        imported=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=manifest.machine,
        created=manifest.created,
        commit=manifest.commit,
        dirty=manifest.dirty,
        versions=first.versions,
        packages=manifest.packages,
        clocks=manifest.here.clocks if manifest.here else first.clocks,
        stale=sorted({check.subject for check in result.stale}),
        absent=manifest.absent,
        files={name: sha256(content) for name, content in sorted(files.items())},
    )


def handed_in(folder: Path) -> HandedIn | None:
    """The record of results that somebody handed in; None for this project's own.

    Raises ArchiveError where the record is damaged, or the folder no longer holds what was handed in.
    """
    record = folder / batch.ARCHIVE_RECORD
    if not record.exists():
        return None
    try:
        found = HandedIn.model_validate(archive.read_json(record.read_bytes(), record.name))
        for name, digest in found.files.items():
            if not archive.is_plain(name) or sha256((folder / name).read_bytes()) != digest:
                raise ArchiveError(f"{folder.name}/{name} is no longer the file handed in")
    except ValidationError as error:
        raise ArchiveError(f"{record.name}: {archive.first_problem(error)}") from None
    except OSError as error:
        raise ArchiveError(f"{error.filename}: {error.strerror}") from None
    results = {path.name for path in folder.iterdir() if path.suffix in (".json", ".ipynb")}
    if added := results - found.files.keys() - {record.name}:
        raise ArchiveError(f"{folder.name}/{min(added)} is not of the run handed in")
    return found
