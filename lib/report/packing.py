"""Making an archive of a machine's run: see `fusion_evidence.lib.report.archive` for its form."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from fusion_evidence.lib import batch, paths
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.report import archive, archive_check
from fusion_evidence.lib.report.archive import RESULTS, ArchiveError, Manifest, Packed
from fusion_evidence.lib.report.evidence import (
    Evidence,
    evidence_path,
    is_fresh,
    read_evidence,
    revision,
    source_hashes,
)

Report = Callable[[str], None]

#: What a run leaves beside its results is text of these kinds; tensors and logs stay where they are.
_KINDS = (".json", ".py", ".ptx", ".amdgcn", ".s", ".ttir", ".ttgir", ".llir", ".yaml")
#: Folders of a run that are not called after their notebook.
_OWNERS = {"calibration": "06_bit_exact_integration"}
_START = r"(?<![\w.~/-])"  # of an absolute path
_HOME = re.compile(rf"{_START}/(?:(?:home|Users)/[\w.@-]+|root)(?=/|\b)")
_NOT_HERE = "NOT_RUN: packed on another machine than the one that ran"


def pack(
    notebooks: Sequence[Path],
    results: Path,
    target: Path,
    *,
    here: Machine,
    machine: str | None = None,
    stale: bool = False,
    replace: bool = False,
    report: Report = print,
) -> archive_check.Verification:
    """Write the archive ``target`` of the results of these notebooks in the folder ``results``, and
    verify it as whoever gets it will.

    Notebooks without a result are passed over. here: the machine this is, machine: the one that the
    results must be of. stale: results of older sources are packed too, and the archive says so.
    Raises ArchiveError, before anything is written, for a result that is not verified, and for an
    existing target unless ``replace``.
    """
    _check_target(target, replace)
    present = [path for path in notebooks if evidence_path(results, path.stem).exists()]
    if not present:
        raise ArchiveError(f"no results in {results}")
    of, packed = _examined(present, results, machine, stale)
    on_it = (here.name, here.device_name, here.arch) == (of.name, of.device_name, of.arch)
    files, absent = _files(results, list(packed), here if on_it else None)
    _warn(files, report)
    contents = {name: text.encode() for name, text in files.items()}
    commit, dirty = revision()
    manifest = Manifest(
        machine=of.name,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit,
        dirty=dirty,
        here=here if on_it else None,
        packages=installed() if on_it else None,
        notebooks=packed,
        absent=absent,
        files=archive.manifest_files(contents),
    )
    try:
        return _write(target, manifest, contents, present[0].parent, stale)
    except OSError as error:
        raise ArchiveError(f"cannot write {target}: {error.strerror or error}") from None


def _files(
    results: Path, notebooks: Sequence[str], here: Machine | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Texts by name in the archive, and what is not among them, with the reason.

    here: this machine, if it is the one that ran.
    """
    absent: dict[str, str] = {}
    files = _left(results, notebooks, absent) | {
        f"{RESULTS}/{name}.{kind}": _text(results / f"{name}.{kind}")
        for name in notebooks
        for kind in ("json", "ipynb")
    }
    if here is not None:
        files |= assembly_of(here, _numerics(results), absent)
    else:
        absent |= dict.fromkeys(("assembly", "clocks", "packages"), _NOT_HERE)
    return files, absent


def _write(
    target: Path, manifest: Manifest, contents: Mapping[str, bytes], notebooks: Path, stale: bool
) -> archive_check.Verification:
    """Write a draft beside the target and verify it, before it takes the target's name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pack-", dir=target.parent) as folder:
        draft = Path(folder) / target.name
        archive.write_archive(draft, manifest, contents)
        result = archive_check.verify(draft, notebooks)
        if not result.accepted(stale):
            found = " | ".join(map(str, result.failed or result.stale))
            raise ArchiveError(f"not packed, since it would not be verified: {found}")
        os.replace(draft, target)
    return result


def _check_target(target: Path, replace: bool) -> None:
    if target.suffix != ".zip":
        raise ArchiveError(f"{target}: the archive is a ZIP file, call it something.zip")
    if target.exists() and not replace:
        raise ArchiveError(f"{target} is there already; --replace overwrites it")


def _examined(
    notebooks: Sequence[Path], results: Path, machine: str | None, stale: bool
) -> tuple[Machine, dict[str, Packed]]:
    """The machine that the results are of, and what the manifest says of each."""
    problems, packed, machines = [], {}, {}
    for path in notebooks:
        evidence = read_evidence(evidence_path(results, path.stem))
        found = batch.verify(path, results, stale=stale)
        if not found and (size := (results / path.name).stat().st_size) > batch.MAX_COPY_BYTES:
            found = [f"the executed notebook has {size:,} bytes, over {batch.MAX_COPY_BYTES:,}"]
        if found or evidence.machine is None:
            problems.append(f"{path.stem}: {'; '.join(found)}")
            continue
        fresh = is_fresh(evidence, path.parent)
        packed[path.stem] = Packed(stale=not fresh, sources=source_hashes(path) if fresh else None)
        machines[evidence.machine.name] = evidence.machine
    if problems:
        hint = "--only packs the others" + ("" if stale else ", --stale packs stale ones as such")
        raise ArchiveError(f"not packed: {' | '.join(problems)} ({hint})")
    if len(machines) > 1 or machine not in (None, *machines):
        raise ArchiveError(f"{results} holds results of {', '.join(sorted(machines))}")
    return next(iter(machines.values())), packed


def _left(results: Path, notebooks: Iterable[str], absent: dict[str, str]) -> dict[str, str]:
    """What the run left beside the results of these notebooks, by name in the archive."""
    found = {}
    for folder in sorted(one for one in results.iterdir() if one.is_dir()):
        owner = _OWNERS.get(folder.name, folder.name.partition(".")[0])
        for file in sorted(folder.rglob("*")) if owner in notebooks else ():
            name = f"left/{file.relative_to(results).as_posix()}"
            if file.is_symlink() or not file.is_file() or file.suffix not in _KINDS:
                continue
            if not archive.is_plain(name) or file.stat().st_size > archive.MAX_JSON_BYTES:
                absent[name[:200]] = "left out for its name or its size"
                continue
            found[name] = _text(file)
    if not found:
        absent["left"] = "NOT_RUN: the run left no generated code and no configurations here"
    return found


def _text(file: Path) -> str:
    try:
        return anonymous(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArchiveError(f"cannot read {file}: {error}") from None


def anonymous(text: str) -> str:
    """A text without the folders of this machine and the names of its users' homes."""
    text = batch.portable(text.replace(f"{paths.ROOT}/", ""))
    for folder, short in ((str(Path.home()), "~"), (tempfile.gettempdir(), "/tmp")):
        if folder not in ("/", short):
            text = re.sub(rf"{_START}{re.escape(folder)}(?=/|\b)", short, text)
    return _HOME.sub("~", text)


def _warn(files: Mapping[str, str], report: Report) -> None:
    """Say which files still name the user or the host; a word may mean something else too."""
    for what, word in (("user", getpass.getuser()), ("host", socket.gethostname().split(".")[0])):
        whole = re.compile(rf"\b{re.escape(word)}\b")
        named = [name for name, text in files.items() if word != "root" and whole.search(text)]
        if named and len(word) > 2:
            report(f"look at these before you hand them in, they hold this {what}'s name: {named}")


def installed() -> dict[str, str]:
    """Versions of the packages installed here, by name, as ``pip freeze`` has them but no address."""
    found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    return {name: found[name] for name in sorted(filter(None, found), key=str.lower)}


# --- assembly -----------------------------------------------------------------------------------


def _numerics(results: Path) -> list[str]:
    """Numerics that notebook 01 calibrated the kernel to, for every T."""
    evidence: Evidence = read_evidence(evidence_path(results, "01_primitive_benchmark"))
    return list(dict.fromkeys(str(m.value) for m in evidence.select("calibration")))


def assembly_of(here: Machine, numerics: Sequence[str], absent: dict[str, str]) -> dict[str, str]:
    """The kernel's assembly for this machine and its figures, by name in the archive.

    Compiled now, by the compiler that is installed, with the kernel's default numerics and those
    given. Where that cannot be, ``absent`` says why.
    """
    if here.device == "cpu":
        absent["assembly"] = "NOT_RUN: no accelerator here"
        return {}
    from fusion_evidence.kernels.numerics import Numerics
    from fusion_evidence.lib.measure import assembly
    from fusion_evidence.lib.service.arms import parse_numerics

    hip = here.profile == "dcu"
    arch: str | int = here.arch if hip else int(here.arch.removeprefix("sm_"))
    target = assembly.Target("hip" if hip else "cuda", arch, here.wavefront or 64)
    try:
        wanted = dict.fromkeys([Numerics(), *map(parse_numerics, numerics)])
        found = assembly.resources([target], numerics=list(wanted))
    except (RuntimeError, ValueError) as error:
        absent["assembly"] = f"NOT_RUN: {error}"
        return {}
    files, rows = {}, []
    for number, one in enumerate(found):
        name = f"assembly/{target}.{number}.{'amdgcn' if hip else 'ptx'}"
        if one.assembly:
            files[name] = anonymous(one.assembly)
        rows.append({"file": name if one.assembly else None, **one.row()})
    files["assembly/resources.json"] = json.dumps(rows, indent=1) + "\n"
    if reasons := {one.unavailable for one in found if one.unavailable}:
        absent["assembly"] = f"NOT_RUN: {'; '.join(sorted(reasons))}"
    return files
