"""One archive of a machine's run: its form, and how one from a stranger is opened.

A ZIP file with ``manifest.json``, ``results/`` (each notebook's evidence and executed copy),
``left/`` (what the run left beside them: generated code, chosen configurations, calibration) and
``assembly/`` (of the kernel, where the archive was made on the device). The manifest has the size
and the SHA-256 of every other file.

Nothing in it is believed. It is read whole into memory under the limits below, no path of it is
ever used before it was found plain, nothing is extracted by the ZIP library, and nothing of it is
imported, unpickled or executed.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fusion_evidence.lib.batch import BatchError
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.report.evidence import write_bytes

KIND = "fusion-evidence run"
MANIFEST = "manifest.json"
RESULTS = "results"

MAX_ARCHIVE_BYTES = 64 << 20
MAX_FILES = 1000
MAX_FILE_BYTES = 32 << 20
MAX_TOTAL_BYTES = 256 << 20
MAX_JSON_BYTES = 8 << 20
MAX_DEPTH = 40
#: Uncompressed over compressed size, of a file large enough for it to matter.
MAX_RATIO = 150

#: Folder names that sort, quote and mean the same on every system.
MACHINE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.@+=-]*"
_PLAIN = re.compile(rf"{_PART}(?:/{_PART}){{0,5}}")
_END = struct.Struct("<4s4H2LH")  # the record that ends a ZIP file


class ArchiveError(BatchError):
    """The archive, or what should become one, is not as it must be; one line for a person."""


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """What the manifest says of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Digest
    size: int = Field(ge=0, le=MAX_FILE_BYTES)


class Packed(BaseModel):
    """A notebook's result in the archive.

    stale: it was, in the checkout that packed it. sources: `evidence.source_hashes` of the checkout
    that gave the result; None where it was stale, since nobody knows them any more.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stale: bool
    sources: dict[str, Digest] | None

    @model_validator(mode="after")
    def _says_what_it_was_made_from(self) -> Packed:
        if self.stale != (self.sources is None):
            raise ValueError("sources are named where the result was not stale, and only there")
        return self


class Manifest(BaseModel):
    """``manifest.json``.

    machine: the folder its results belong to. created: ISO 8601, UTC. commit, dirty: of the checkout
    that packed it. here: the machine as it was then, with its clocks, and packages: the versions of
    what is installed there; both None where it was packed on another one. absent: what the archive
    does not hold, and why.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    kind: Literal["fusion-evidence run"] = "fusion-evidence run"
    machine: str = Field(pattern=rf"^{MACHINE_NAME.pattern}$")
    created: str
    commit: str | None = None
    dirty: bool | None = None
    here: Machine | None = None
    packages: dict[str, str] | None = None
    notebooks: dict[Annotated[str, Field(pattern=r"^\d\d_[a-z0-9_]{1,60}$")], Packed] = Field(
        min_length=1
    )
    absent: dict[str, str] = {}
    files: dict[str, Entry]


@dataclass(frozen=True)
class Archive:
    """An archive that was opened. files: by name, without the manifest."""

    sha256: str
    manifest: Manifest
    files: Mapping[str, bytes]


# --- writing ------------------------------------------------------------------------------------


def is_plain(name: str) -> bool:
    """Whether a file may have this name: relative, no hidden or parent folder, nothing to quote."""
    return len(name) <= 200 and _PLAIN.fullmatch(name) is not None and not name.endswith(".")


def sha256(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def manifest_files(files: Mapping[str, bytes]) -> dict[str, Entry]:
    """The manifest's part about files."""
    return {
        name: Entry(sha256=sha256(data), size=len(data)) for name, data in sorted(files.items())
    }


def write_archive(target: Path, manifest: Manifest, files: Mapping[str, bytes]) -> str:
    """Write the ZIP file, whole or not at all, in an order that is always the same.

    Returns its SHA-256. Raises OSError, for instance when the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    head = {MANIFEST: (manifest.model_dump_json(indent=1) + "\n").encode()}
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in [*head.items(), *sorted(files.items())]:
            info = zipfile.ZipInfo(name)  # dated 1980: the order of writing is no fact
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED, 9)
    write_bytes(target, buffer.getvalue())
    return sha256(buffer.getvalue())


# --- reading ------------------------------------------------------------------------------------


class Steps:
    """The examinations an archive went through, in order: (what, why it failed or ``""``)."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One examination; an ArchiveError inside is its outcome, and goes on."""
        try:
            yield
        except ArchiveError as error:
            self.done.append((what, str(error)))
            raise
        self.done.append((what, ""))


def read_archive(path: Path, steps: Steps | None = None) -> Archive:
    """Open an archive that may have been made to do harm; raises ArchiveError.

    What is returned has plain names, the sizes and hashes its manifest says, and no file more or
    less than that.
    """
    steps = steps or Steps()
    with steps.step("a ZIP file of bearable size"):
        data = _read_bounded(path)
        infos = _directory(data)
    with steps.step("every name is plain, and there once"):
        _check_names([info.filename for info in infos])
    with steps.step("nothing but files, none a bomb"):
        _check_entries(infos, len(data))
    with steps.step("every file unpacks to what it should"):
        files = {info.filename: content for info, content in _contents(data, infos)}
    with steps.step("the manifest is one of this version"):
        manifest = _read_manifest(files.pop(MANIFEST, None))
    with steps.step("it lists these files, with these hashes"):
        _check_files(manifest, files)
    return Archive(sha256(data), manifest, files)


def _read_bounded(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ArchiveError(f"{path} is not a file")
        with open(path, "rb") as file:
            data = file.read(MAX_ARCHIVE_BYTES + 1)
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_ARCHIVE_BYTES:
        raise ArchiveError(f"it is larger than {MAX_ARCHIVE_BYTES:,} bytes")
    return data


def _directory(data: bytes) -> list[zipfile.ZipInfo]:
    """The table of contents of exactly one plain ZIP file: nothing before it, nothing after it."""
    if len(data) < _END.size or not data.endswith(b"\0\0"):  # its comment is empty
        raise ArchiveError("it is not a ZIP file, or it was cut short")
    mark, disk, start_disk, here, count, size, offset, _ = _END.unpack(data[-_END.size :])
    if mark != b"PK\5\6" or data[-42:-38] == b"PK\6\7" or (disk, start_disk, here) != (0, 0, count):
        raise ArchiveError("it is not a ZIP file, or it was cut short")
    if offset + size + _END.size != len(data):
        raise ArchiveError("it holds more than one ZIP file, or one with something around it")
    if count > MAX_FILES or size > MAX_FILES * 512:
        raise ArchiveError(f"it has more than {MAX_FILES} files")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
    except Exception as error:  # a hostile one can make the library raise anything
        raise ArchiveError(f"its table of contents is damaged: {error}") from None
    if len(infos) != count:
        raise ArchiveError("its table of contents is damaged: another number of files than it says")
    if any(info.filename != info.orig_filename for info in infos):
        raise ArchiveError("a file's name holds a zero byte")
    return infos


def _check_names(names: Iterable[str]) -> None:
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        if not is_plain(name):
            raise ArchiveError(f"{name[:80]!r} is not a plain relative file name")
        if (other := files.setdefault(name.lower(), name)) is not name:
            same = "is there twice" if other == name else f"is {other} where letters have no case"
            raise ArchiveError(f"{name} {same}")
        for folder in (name[:i] for i, letter in enumerate(name) if letter == "/"):
            if folders.setdefault(folder.lower(), folder) != folder:
                raise ArchiveError(f"{folder} is there twice where letters have no case")
    if both := files.keys() & folders.keys():
        raise ArchiveError(f"{min(both)} is a file and a folder")


def _check_entries(infos: Iterable[zipfile.ZipInfo], archive_bytes: int) -> None:
    total, end = 0, 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name, kind = info.filename, stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG) or info.is_dir():
            raise ArchiveError(f"{name} is no file but a link, a folder or a device")
        if info.flag_bits & 0x1:
            raise ArchiveError(f"{name} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(f"{name} is compressed in a way that is not read here")
        if info.file_size > MAX_FILE_BYTES:
            raise ArchiveError(f"{name} has {info.file_size:,} bytes, over {MAX_FILE_BYTES:,}")
        if info.file_size > max(1 << 16, MAX_RATIO * info.compress_size):
            raise ArchiveError(f"{name} unpacks to over {MAX_RATIO} times its size")
        if info.header_offset < end:
            raise ArchiveError(f"{name} shares its bytes with another file")
        end = info.header_offset + 30 + info.compress_size
        total += info.file_size
    if end > archive_bytes:
        raise ArchiveError("its files have more bytes than it has itself")
    if total > MAX_TOTAL_BYTES:
        raise ArchiveError(f"its files have {total:,} bytes, over {MAX_TOTAL_BYTES:,}")


def _contents(
    data: bytes, infos: Iterable[zipfile.ZipInfo]
) -> Iterator[tuple[zipfile.ZipInfo, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in infos:
            try:
                with archive.open(info) as file:
                    content = file.read(info.file_size + 1)
                    rest = file.read(1)  # the end, where the checksum is compared
            except Exception as error:  # a hostile one can make the library raise anything
                raise ArchiveError(f"{info.filename} is damaged: {error}") from None
            if len(content) != info.file_size or rest:
                raise ArchiveError(f"{info.filename} has another size than it says")
            yield info, content


def _read_manifest(content: bytes | None) -> Manifest:
    if content is None:
        raise ArchiveError(f"there is no {MANIFEST}")
    document = read_json(content, MANIFEST)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ArchiveError(f"{MANIFEST} is not that of a {KIND}")
    version = document.get("schema_version")
    if version != Manifest.model_fields["schema_version"].default:
        raise ArchiveError(f"{MANIFEST} has schema_version {version!r}; this checkout reads 1")
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        raise ArchiveError(f"{MANIFEST}: {first_problem(error)}") from None


def _check_files(manifest: Manifest, files: Mapping[str, bytes]) -> None:
    wanted = {
        f"{RESULTS}/{name}.{kind}" for name in manifest.notebooks for kind in ("json", "ipynb")
    }
    found = {name for name in files if name.startswith(f"{RESULTS}/")}
    others = {name for name in files if name.split("/")[0] not in (RESULTS, "left", "assembly")}
    for what, names in (
        ("in none of its folders", others),
        ("not in the manifest", set(files) - set(manifest.files)),
        ("in the manifest but not in the archive", set(manifest.files) - set(files)),
        ("of no notebook in the manifest", found - wanted),
        ("missing", wanted - found),
    ):
        if names:
            raise ArchiveError(f"{what}: {', '.join(sorted(names)[:5])}")
    for name, entry in manifest.files.items():
        if len(files[name]) != entry.size:
            raise ArchiveError(f"{name} has {len(files[name]):,} bytes, not {entry.size:,}")
        if sha256(files[name]) != entry.sha256:
            raise ArchiveError(f"{name} has another SHA-256 than the manifest says")


# --- JSON ---------------------------------------------------------------------------------------


def read_json(content: bytes, name: str) -> Any:
    """Strict JSON from a stranger: finite numbers, no key twice, limited size and nesting.

    Raises ArchiveError.
    """
    if len(content) > MAX_JSON_BYTES:
        raise ArchiveError(f"{name} has {len(content):,} bytes, over {MAX_JSON_BYTES:,} for JSON")
    try:
        document = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_small,
        )
    except RecursionError:
        raise ArchiveError(f"{name} is nested too deeply") from None
    except ValueError as error:  # that of JSON and of UTF-8 too
        raise ArchiveError(f"{name} is not the JSON that it should be: {error}") from None
    level, depth = [document], 0
    while level:
        if depth > MAX_DEPTH:
            raise ArchiveError(f"{name} is nested more than {MAX_DEPTH} deep")
        lists = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for one in lists for item in one if isinstance(item, (dict, list))]
        depth += 1
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _small(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"{text[:20]}... is too large")
    return int(text)


def first_problem(error: ValidationError) -> str:
    """The first thing pydantic found wrong, on one line: where, and what."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part)[:60] for part in problem["loc"])
    return " ".join(f"{where}: {problem['msg']}".split())
