"""Archives of a run: made from a real one, opened when they are made to do harm."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fusion_evidence.lib import batch, cli, paths
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.report import archive, archive_check, consistency, handed_in, packing
from fusion_evidence.lib.report.archive import ArchiveError
from fusion_evidence.lib.report.evidence import Verdict, read_evidence

NAME = "01_primitive_benchmark"
HOMES = "/" + "home"  # in two: no tracked file names a place of a machine
H200 = dict(
    name="h200", profile="cuda", device="cuda", device_name="NVIDIA H200", arch="sm_90",
    wavefront=32, cpu_cores=2, versions={"cuda": "13.0"}, clocks="SM 345 MHz of 1980 MHz",
)  # fmt: skip
HERE = Machine(**H200 | dict(name="cpu", profile="cpu", device="cpu", arch="x86_64"))  # type: ignore[arg-type]

PARAMETERS = 'shape_name: str = "qwen3.5-27b"\nseed: int = 0'
OPEN = f"""
from fusion_evidence.lib.measure import machine
tiny = machine.Machine(**{H200!r})
machine.detect = lambda: tiny
from fusion_evidence.lib.report import Recorder
book = Recorder.open({NAME!r}, globals())
book.declare("bits_compiled", rule="0 differ")
book.declare("bits_reference", rule="0 differ")
book.declare("faster_than_compiled", rule="the whole interval is above 1")
book.verdict_box()
"""
MEASURE = """
from fusion_evidence.lib.measure.compare import upper_bound
for oracle, wrong in (("compiled", 0), ("reference", 3)):
    book.measure("mismatch", wrong, n=10_000, high=upper_bound(10_000, wrong), oracle=oracle, T=1)
book.conclude("bits_compiled", "PASS", "0 of 10,000")
book.conclude("bits_reference", "FAIL", "3 < 4 of 10,000")
at = dict(cache="cold", T=1, shape=shape_name, positions="3d", unit="us", n=11)
book.measure("time", 2.0, low=1.9, high=2.1, impl="fused", **at)
book.measure("time", 12.0, low=11.0, high=13.0, impl="compiled", **at)
book.gated("speedup", 12.0 / 2.0, low=5.9, high=6.1, requires="bits_compiled", over="compiled", T=1)
book.gated("speedup", 0, requires="bits_reference", over="eager", T=1)
book.conclude("faster_than_compiled", "PASS", "6.00 [5.90, 6.10]")
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, write_notebook) -> tuple[Path, Path]:
    """(notebooks, results) of one real run."""
    root = tmp_path_factory.mktemp("ran")
    cells = (OPEN, MEASURE, "book.finish()")
    source = write_notebook(root / "notebooks" / f"{NAME}.ipynb", *cells, parameters=PARAMETERS)
    profile = root / "cpu.yaml"
    profile.write_text(f"{NAME}: {{seed: 3}}\n")
    results = root / "runs" / "h200"
    assert batch.run([source], results, profile_file=profile) == 0
    job = results / f"{NAME}.jobs" / "baseline"
    job.mkdir(parents=True)
    (job / "code_decode.py").write_text(
        f"# {paths.ROOT}/lib\n# {HOMES}/somebody/kernels/fused.py\n"
    )
    (job / "job.json").write_text('{"pins": {"sdpa": "math"}}')
    (job / "log.txt").write_text("somebody@host\n")
    (job / "records.safetensors").write_bytes(b"\0" * 100)
    return root / "notebooks", results


@pytest.fixture
def packed(ran, tmp_path) -> Path:
    """A good archive."""
    return pack(ran, tmp_path / "run.zip")


def pack(ran: tuple[Path, Path], target: Path, **options) -> Path:
    notebooks, results = ran
    packing.pack(batch.select_notebooks(notebooks), results, target, here=HERE, **options)
    return target


def entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return path


def change(path: Path, edit: Callable[[dict[str, bytes]], None], *, rehash: bool = True) -> Path:
    """The archive with its files edited, and hashes that fit again."""
    files = entries(path)
    edit(files)
    if rehash:
        manifest = json.loads(files["manifest.json"])
        found = {name: data for name, data in files.items() if name != "manifest.json"}
        manifest["files"] = {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            for name, data in found.items()
        }
        files["manifest.json"] = json.dumps(manifest).encode()
    return write_zip(path, files)


def edit_json(name: str, edit: Callable[[dict], None]) -> Callable[[dict[str, bytes]], None]:
    def edited(files: dict[str, bytes]) -> None:
        document = json.loads(files[name])
        edit(document)
        files[name] = json.dumps(document).encode()

    return edited


def evidence(edit: Callable[[dict], None]) -> Callable[[dict[str, bytes]], None]:
    return edit_json(f"results/{NAME}.json", edit)


def notebook(edit: Callable[[list[dict]], None]) -> Callable[[dict[str, bytes]], None]:
    return edit_json(
        f"results/{NAME}.ipynb",
        lambda document: edit([c for c in document["cells"] if c["cell_type"] == "code"]),
    )


def manifest(edit: Callable[[dict], None]) -> Callable[[dict[str, bytes]], None]:
    return edit_json("manifest.json", edit)


def replaced(old: str, new: str, *suffixes: str) -> Callable[[dict[str, bytes]], None]:
    """Text replaced in the results, and nothing else to give it away."""

    def edited(files: dict[str, bytes]) -> None:
        for suffix in suffixes:
            before = files[f"results/{NAME}.{suffix}"].decode()
            assert old in before
            files[f"results/{NAME}.{suffix}"] = before.replace(old, new).encode()

    return edited


def failures(path: Path, ran: tuple[Path, Path]) -> str:
    result = archive_check.verify(path, ran[0])
    assert bool(result.failed) != result.accepted(stale=True)
    return "\n".join(map(str, result.failed))


# --- a good one ---------------------------------------------------------------------------------


def test_a_packed_run_verifies_elsewhere(ran, packed):
    result = archive_check.verify(packed, ran[0])
    assert result.accepted(), "\n".join(map(str, result.checks))
    assert {check.status for check in result.checks} == {"OK"}
    assert result.archive is not None
    assert result.archive.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()
    said = result.archive.manifest
    assert (said.machine, list(said.notebooks)) == ("h200", [NAME])
    assert "lib.report.recorder" in (said.notebooks[NAME].sources or {})
    assert "NOT_RUN" in said.absent["assembly"]  # packed on a CPU


def test_what_a_run_left_is_packed_without_tensors_logs_and_homes(packed):
    files = entries(packed)
    left = {name for name in files if name.startswith("left/")}
    assert left == {f"left/{NAME}.jobs/baseline/{n}" for n in ("code_decode.py", "job.json")}
    code = files[f"left/{NAME}.jobs/baseline/code_decode.py"].decode()
    assert code == "# lib\n# kernels/fused.py\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"File {HOMES}/alice/x.py", "File ~/x.py"),
        (f"'/{'root'}/.cache/torch'", "'~/.cache/torch'"),
        ("/opt/torch/bin/python3, 3/rooted", "/opt/torch/bin/python3, 3/rooted"),
        (f"{paths.ROOT}/kernels/op.py", "kernels/op.py"),
        (f"/public{HOMES}/bob/fe/lib/batch.py:3", "lib/batch.py:3"),
    ],
)
def test_texts_lose_the_folders_of_their_machine(text, expected):
    assert packing.anonymous(text) == expected


def test_the_same_run_gives_the_same_files_in_the_same_order(ran, tmp_path):
    one, other = (entries(pack(ran, tmp_path / name)) for name in ("a.zip", "b.zip"))
    assert list(one) == list(other)
    assert list(one)[1:] == sorted(list(one)[1:])
    for files in (one, other):
        files["manifest.json"] = re.sub(rb'"created": "[^"]+"', b"", files["manifest.json"])
    assert one == other


@pytest.mark.slow
def test_on_the_machine_that_ran_the_kernel_is_compiled_for_it():
    absent: dict[str, str] = {}
    files = packing.assembly_of(Machine(**H200), [], absent)  # type: ignore[arg-type]
    assert not absent
    assert ".target sm_90" in files["assembly/sm_90.0.ptx"]
    rows = json.loads(files["assembly/resources.json"])
    assert all(row["registers"] > 0 and row["file"] in files for row in rows)


def test_assembly_that_nobody_can_compile_here_is_not_run():
    absent: dict[str, str] = {}
    assert packing.assembly_of(HERE, [], absent) == {}
    assert absent == {"assembly": "NOT_RUN: no accelerator here"}


# --- what is not packed -------------------------------------------------------------------------


def test_only_verified_results_are_packed(ran, tmp_path):
    results = tmp_path / "h200"
    results.mkdir()
    with pytest.raises(ArchiveError, match="no results in"):
        pack((ran[0], results), tmp_path / "run.zip")
    text = (ran[1] / f"{NAME}.json").read_text()
    (results / f"{NAME}.json").write_text(text.replace('"complete"', '"incomplete"'))
    (results / f"{NAME}.ipynb").write_text((ran[1] / f"{NAME}.ipynb").read_text())
    with pytest.raises(ArchiveError, match=f"{NAME}: run is incomplete"):
        pack((ran[0], results), tmp_path / "run.zip")
    (results / f"{NAME}.json").write_text(text.replace('"value": 6.0', '"value": 7.0'))
    with pytest.raises(ArchiveError, match="would not be verified"):
        pack((ran[0], results), tmp_path / "run.zip")
    with pytest.raises(ArchiveError, match="holds results of h200"):
        pack(ran, tmp_path / "run.zip", machine="gfx936")
    assert not list(tmp_path.glob("*.zip"))
    assert not list(tmp_path.glob(".pack-*"))


def test_an_existing_file_is_not_overwritten_and_a_full_disk_loses_nothing(
    ran, tmp_path, monkeypatch
):
    target = tmp_path / "run.zip"
    target.write_text("mine")
    with pytest.raises(ArchiveError, match="is there already"):
        pack(ran, target)
    with pytest.raises(ArchiveError, match=r"call it something\.zip"):
        pack(ran, tmp_path / "run.tar")
    with monkeypatch.context() as patch:
        patch.setattr(archive.os, "fsync", full_disk)
        with pytest.raises(ArchiveError, match="No space left"):
            pack(ran, target, replace=True)
    assert target.read_text() == "mine"
    pack(ran, target, replace=True)
    assert archive_check.verify(target, ran[0]).accepted()


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_stale_results_need_to_be_asked_for_and_say_so(ran, packed, tmp_path, write_notebook):
    cells = (OPEN, MEASURE, "book.finish()  # edited")
    source = tmp_path / "notebooks" / f"{NAME}.ipynb"
    write_notebook(source, *cells, parameters=PARAMETERS)
    newer = (source.parent, ran[1])

    result = archive_check.verify(packed, source.parent)
    assert not result.failed
    (stale,) = result.stale
    assert re.match("made from another notebook(;|$)", stale.why)  # and from the same modules
    assert not result.accepted()
    assert result.accepted(stale=True)

    with pytest.raises(ArchiveError, match="stale"):
        pack(newer, tmp_path / "stale.zip")
    pack(newer, tmp_path / "stale.zip", stale=True)
    result = archive_check.verify(tmp_path / "stale.zip", source.parent)
    assert not result.failed
    assert "as it says itself" in result.stale[0].why
    assert result.archive is not None
    assert result.archive.manifest.notebooks[NAME].stale


# --- edited by hand, with hashes that fit -------------------------------------------------------


def _measured(metric: str, **labels: object) -> Callable[[dict], dict]:
    def find(document: dict) -> dict:
        (found,) = (
            m
            for m in document["measurements"]
            if m["metric"] == metric and labels.items() <= m["labels"].items()
        )
        return found

    return find


SPEEDUP = _measured("speedup", over="compiled")
EAGER = _measured("speedup", over="eager")
TIME = _measured("time", impl="fused")
WRONG = _measured("mismatch", oracle="reference")


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (evidence(lambda e: SPEEDUP(e).update(value=6.05)), "speedup .* its times give 6"),
        (evidence(lambda e: TIME(e).update(value=1.95)), "speedup .* its times give 6.15"),
        (evidence(lambda e: TIME(e).update(value=1.0)), r"is not near \[1.9, 2.1\]"),
        (evidence(lambda e: TIME(e).update(low=3.0)), "low 3.0 above high 2.1"),
        (evidence(lambda e: WRONG(e).update(high=1e-6)), "3 of 10000 give the bound"),
        (evidence(lambda e: WRONG(e).update(value=20_000)), "20000 of 10000"),
        (evidence(lambda e: WRONG(e).update(n=None)), "without the number of elements"),
        (evidence(lambda e: WRONG(e).update(n=10**15)), "of 1000000000000000 elements"),
        (evidence(lambda e: EAGER(e).update(not_comparable=None)), "missing without a reason"),
        (
            evidence(lambda e: EAGER(e).update(not_comparable="bits_reference is NOT_RUN: x")),
            "which no verdict says",
        ),
        (evidence(lambda e: e["claims"][1].update(verdict="PASS")), "the page shows the verdicts"),
        (evidence(lambda e: e["claims"][1].update(why="0 of 10,000")), "the page shows"),
        (replaced("FAIL", "PASS", "json", "ipynb"), "bits_reference is PASS, but .* does not hold"),
        (replaced("PASS: bits_c", "FAIL: bits_c", "ipynb"), "as text it has other verdicts"),
        (replaced("FAIL</span>", "PASS</span>", "ipynb"), "does not show FAIL for bits_reference"),
        (
            evidence(lambda e: e["claims"][0].update(verdict="FAIL")),
            "has a value, but bits_compiled did not pass",
        ),
        (evidence(lambda e: e["measurements"].append(SPEEDUP(e))), "is there 2 times"),
        (evidence(lambda e: e["measurements"].remove(TIME(e))), "0 measurements of time"),
        (evidence(lambda e: e["parameters"].update(seed=4)), "fingerprint"),
        (evidence(lambda e: e.update(fingerprint="0" * 64)), "fingerprint"),
        (evidence(lambda e: e.update(finished="2020-01-01T00:00:00+00:00")), "before it started"),
        (evidence(lambda e: e.update(finished="yesterday")), "cannot be computed again"),
        (evidence(lambda e: e["machine"].update(name="gfx936")), "of gfx936, the archive of h200"),
        (evidence(lambda e: e["machine"].update(arch="gfx936")), "profile cuda with architecture"),
        (evidence(lambda e: e["machine"].update(versions={})), "a torch that has no cuda"),
        (evidence(lambda e: e.update(run="incomplete")), "run incomplete"),
        (evidence(lambda e: e.update(schema_version=2)), "schema_version"),
        (evidence(lambda e: e.update(surprise=1)), "surprise"),
        (evidence(lambda e: SPEEDUP(e).update(value=[1])), "value"),
        (evidence(lambda e: e.update(claims=e["claims"] * 200)), "over .* 500 claims"),
        (evidence(lambda e: e.update(claims=[])), "verdict"),
    ],
)
def test_edited_evidence_contradicts_itself(ran, packed, edit, found):
    assert re.search(found, failures(change(packed, edit), ran))


def _show(cell: dict, kind: str, text: str) -> None:
    cell["outputs"].append({"output_type": "display_data", "metadata": {}, "data": {kind: text}})


ERROR = {"output_type": "error", "ename": "KeyError", "evalue": "", "traceback": []}


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (notebook(lambda code: code[2]["outputs"].append(ERROR)), "raised KeyError"),
        (notebook(lambda code: code[2].update(execution_count=9)), "once each"),
        (notebook(lambda code: code[-1].update(outputs=[])), "did not finish"),
        (notebook(lambda code: code[3].update(source="1 + 1")), "it executed the cells it names"),
        (notebook(lambda code: code[1].update(source="seed = 4")), "other values of seed"),
        (notebook(lambda code: code[1].update(source="import os")), "injected code"),
        (notebook(lambda code: code[1].update(source="seed = open('x')")), "malformed node"),
        (notebook(lambda code: code[1].update(source="(" * 60_000)), "parameters it says"),
        (notebook(lambda code: code[1].update(source="seed = 1\n" * 9_000)), "does not make"),
        (notebook(lambda code: code[1].update(cell_type="markdown")), "does not make"),
        (
            notebook(lambda code: code[3]["metadata"].update(tags=["injected-parameters"])),
            "does not make",
        ),
        (notebook(lambda code: code[2].update(outputs=7)), "cannot be read"),
        (notebook(lambda code: code[2].update(source=None)), "executed"),
        (
            notebook(lambda code: _show(code[3], "text/html", "<b onclick='x()'>")),
            "a browser would run or load: <b onclick",
        ),
        (
            notebook(lambda code: _show(code[3], "text/markdown", "**x** <ScRiPt>")),
            "a browser would run or load: <script>",
        ),
        (
            notebook(lambda code: _show(code[3], "text/html", "<img src=//tracker/x.png>")),
            "a browser would run or load: <img src",
        ),
        (notebook(lambda code: _show(code[3], "application/javascript", "x")), "of kind"),
        (edit_json(f"results/{NAME}.ipynb", lambda d: d.update(nbformat=3)), "format 4"),
        (edit_json(f"results/{NAME}.ipynb", lambda d: d.update(cells=[1])), "cannot be read"),
    ],
)
def test_an_edited_page_is_found_out(ran, packed, edit, found):
    assert found in failures(change(packed, edit), ran)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", "is not the JSON"),
        (b"\xff", "is not the JSON"),
        (b'{"value": NaN}', "NaN is no number"),
        (b'{"value": 1e999}', "is too large"),
        (b'{"value": ' + b"9" * 5000 + b"}", "is too large"),
        (b'{"run": 1, "run": 2}', "a key is there twice"),
        (b"[" * 50 + b"]" * 50, "nested more than 40 deep"),
        (b"[" * 30_000 + b"]" * 30_000, "nested too deeply"),
        (b'"' + os.urandom(4 << 20).hex().encode() + b'"', "over 8,388,608 for JSON"),
        (b"[]", "dictionary"),
    ],
)
def test_hostile_json_is_refused(ran, packed, text, found):
    assert found in failures(
        change(packed, lambda files: files.update({f"results/{NAME}.json": text})), ran
    )
    # A manifest's own text, of which the hash says nothing.
    other = change(packed, lambda files: files.update({"manifest.json": text}), rehash=False)
    assert archive_check.verify(other, ran[0]).failed


CALIBRATION = """{"schema_version": 1, "machine": "h200", "arch": "sm_90", "versions": {}, "pins": {},
"shape": {"hidden": 64, "q_heads": 2}, "graphs": {}}"""


def test_other_files_are_read_too(ran, packed):
    add = {"left/calibration/compact.json": CALIBRATION.encode(), "left/code.py": b"\xff"}
    found = failures(change(packed, lambda files: files.update(add)), ran)
    assert "left/calibration/compact.json: shape" in found
    assert "left/code.py is no text" in found


# --- the file itself ----------------------------------------------------------------------------


def _info(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def _with(*extra: tuple[zipfile.ZipInfo | str, bytes]) -> Callable[[bytes], bytes]:
    """The archive with further entries, which the manifest need not know to be refused."""

    def made(data: bytes) -> bytes:
        buffer = io.BytesIO(data)
        with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as file:
            for info, content in extra:
                file.writestr(info, content)
        return buffer.getvalue()

    return made


def _patched(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def made(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return made


def _encrypted(data: bytes) -> bytes:
    at = data.index(b"PK\1\2")
    return data[: at + 8] + b"\1" + data[at + 9 :]


def _resized(data: bytes) -> bytes:
    """The first file claims fewer bytes than it unpacks to."""
    at = data.index(b"PK\1\2") + 24
    size = int.from_bytes(data[at : at + 4], "little")
    return data[:at] + (size - 1).to_bytes(4, "little") + data[at + 4 :]


def _overlapping(data: bytes) -> bytes:
    """The second file is where the first one is."""
    first = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 4)
    return data[: second + 42] + data[first + 42 : first + 46] + data[second + 46 :]


def _flipped(data: bytes) -> bytes:
    return data[:400] + bytes([data[400] ^ 1]) + data[401:]


def _many(data: bytes) -> bytes:
    return _with(*[(f"left/{i}.py", b"") for i in range(archive.MAX_FILES)])(data)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda data: b"", "not a ZIP file"),
        (lambda data: b"\0" * 1000, "not a ZIP file"),
        (lambda data: data[:-100], "not a ZIP file, or it was cut short"),
        (lambda data: data[: len(data) // 2], "not a ZIP file, or it was cut short"),
        (lambda data: b"#!/bin/sh\n" + data, "with something around it"),
        (lambda data: data + data, "with something around it"),
        (lambda data: data + b"more\0\0", "not a ZIP file"),
        (_flipped, "is damaged"),
        (_many, "more than 1000 files"),
        (_with(("../escaped.py", b"")), "not a plain relative file name"),
        (_with(("left/../../escaped.py", b"")), "not a plain relative file name"),
        (_with(("/etc/escaped.py", b"")), "not a plain relative file name"),
        (_with(("left\\..\\escaped.py", b"")), "not a plain relative file name"),
        (_with(("C:/escaped.py", b"")), "not a plain relative file name"),
        (_with(("left/.git", b"")), "not a plain relative file name"),
        (_with(("left//x.py", b"")), "not a plain relative file name"),
        (_with(("left/", b"")), "not a plain relative file name"),
        (_with(("left/a b\n.py", b"")), "not a plain relative file name"),
        (_with(("left/" + "x" * 300, b"")), "not a plain relative file name"),
        (_with(("a/b/c/d/e/f/g/h.py", b"")), "not a plain relative file name"),
        (_patched(b"left/", b"lef\0/"), "zero byte"),
        (_with(("left/x.py", b""), ("left/X.py", b"")), "where letters have no case"),
        (_with(("left/x.py", b""), ("Left/y.py", b"")), "where letters have no case"),
        (_with(("left/x", b""), ("left/x/y.py", b"")), "a file and a folder"),
        (_with((_info("left/link", stat.S_IFLNK | 0o777), b"/etc/passwd")), "is no file but a"),
        (_with((_info("left/pipe", stat.S_IFIFO | 0o644), b"")), "is no file but a"),
        (_with((_info("left/null", stat.S_IFCHR | 0o644), b"")), "is no file but a"),
        (_with(("left/bomb.py", b"\0" * (20 << 20))), "150 times its size"),
        (_with(("left/large.py", b"\0" * (33 << 20))), "over 33,554,432"),
        (_encrypted, "is encrypted"),
        (_patched(b"\x08\x00\x00\x00\x21\x00", b"\x0c\x00\x00\x00\x21\x00"), "in a way that is not"),
        (_resized, "is damaged"),
        (_overlapping, "shares its bytes"),
        (_with(("left/more.py", b"")), "not in the manifest: left/more.py"),
        (_with(("results/02_x.json", b"{}")), "of no notebook|not in the manifest"),
        (_with(("setup.py", b"")), "in none of its folders: setup.py"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_archives_are_refused_before_anything_is_written(
    ran, packed, tmp_path, make, found
):
    bad = tmp_path / "bad" / "bad.zip"
    bad.parent.mkdir()
    bad.write_bytes(make(packed.read_bytes()))
    result, folder = handed_in.import_archive(bad, tmp_path / "accepted", notebooks=ran[0])
    assert result.archive is None
    assert folder is None
    assert re.search(found, str(result.failed[-1])), result.failed
    assert not (tmp_path / "accepted").exists()
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_the_same_name_twice_is_refused(ran, packed):
    name = f"results/{NAME}.json"
    packed.write_bytes(_with((name, b"{}"))(packed.read_bytes()))
    assert f"{name} is there twice" in failures(packed, ran)


@pytest.mark.parametrize(
    ("edit", "rehash", "found"),
    [
        (evidence(lambda e: SPEEDUP(e).update(value=7.0)), False, "bytes, not|another SHA-256"),
        (lambda f: f.pop(f"results/{NAME}.ipynb"), False, "but not in the archive"),
        (lambda f: f.pop(f"results/{NAME}.ipynb"), True, "missing: results"),
        (lambda f: f.pop("manifest.json"), False, "there is no manifest.json"),
        (manifest(lambda m: m.update(schema_version=2)), True, "this checkout reads 1"),
        (manifest(lambda m: m.update(kind="other")), True, "not that of a fusion-evidence run"),
        (manifest(lambda m: m.update(machine="../../x")), True, "machine: String should match"),
        (manifest(lambda m: m.update(machine="..")), True, "machine: String should match"),
        (manifest(lambda m: m.update(machine="x" * 41)), True, "machine: String should match"),
        (manifest(lambda m: m.update(notebooks={"../x": {}})), True, "notebooks"),
        (manifest(lambda m: m["notebooks"][NAME].update(stale=True)), True, "sources are named"),
        (manifest(lambda m: m.update(machine="gfx936")), True, "it is of h200"),
        (
            manifest(lambda m: m["notebooks"][NAME]["sources"].update({"lib.paths": "0" * 64})),
            True,
            "its fingerprint is of the sources it names",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(ran, packed, edit, rehash, found):
    assert re.search(found, failures(change(packed, edit, rehash=rehash), ran))


def test_what_is_no_file_is_refused(ran, tmp_path):
    for path in (tmp_path, tmp_path / "missing.zip", Path("/dev/zero")):
        assert archive_check.verify(path, ran[0]).failed


def test_what_a_stranger_wrote_cannot_move_the_cursor():
    assert "\x1b" not in str(archive_check.Check("archive", "x", "FAILED", "\x1b[2J\n"))


# --- importing ----------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_an_imported_run_is_the_one_handed_in_and_says_so(ran, packed, tmp_path):
    accepted = tmp_path / "data"
    result, folder = handed_in.import_archive(packed, accepted, notebooks=ran[0])
    assert folder == accepted / "h200"
    found = tree(folder)
    for name, content in entries(packed).items():
        if name != "manifest.json":
            assert found[name.removeprefix("results/")] == content
    record = handed_in.handed_in(folder)
    assert record is not None
    assert result.archive is not None
    assert (record.note, record.sha256) == (handed_in.HANDED_IN, result.archive.sha256)
    assert (record.machine, record.stale) == ("h200", [])
    assert record.clocks == H200["clocks"]
    assert not batch.verify(ran[0] / f"{NAME}.ipynb", folder)  # as any accepted result

    lines: list[str] = []  # own results do not mix with it
    sources = batch.select_notebooks(ran[0])
    assert batch.accept(sources, ran[1], accepted, report=lines.append) == 1
    assert "handed in" in lines[0]
    assert tree(folder) == found

    (folder / "02_more.json").write_text("{}")
    with pytest.raises(ArchiveError, match=r"02_more\.json is not of the run handed in"):
        handed_in.handed_in(folder)
    (folder / f"{NAME}.json").write_text("{}")
    with pytest.raises(ArchiveError, match="no longer the file handed in"):
        handed_in.handed_in(folder)
    (folder / "archive.json").write_text("{}")
    with pytest.raises(ArchiveError, match=r"archive\.json"):
        handed_in.handed_in(folder)
    (folder / "archive.json").unlink()
    assert handed_in.handed_in(folder) is None


def test_results_that_are_there_stay(ran, packed, tmp_path, monkeypatch):
    accepted = tmp_path / "data"
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    own = accepted / "h200"
    own.mkdir(parents=True)
    (own / "mine.json").write_text("mine")
    with pytest.raises(ArchiveError, match="holds this project's own results"):
        handed_in.import_archive(packed, accepted, notebooks=ran[0])
    _, folder = handed_in.import_archive(packed, accepted, name="h200-theirs", notebooks=ran[0])
    assert folder == accepted / "h200-theirs"
    with pytest.raises(ArchiveError, match="holds another archive's results"):
        handed_in.import_archive(packed, accepted, name="h200-theirs", notebooks=ran[0])
    for name in ("../x", "a/b", "..", ".hidden", "H200", "x" * 41):
        with pytest.raises(ArchiveError, match="--as"):
            handed_in.import_archive(packed, accepted, name=name, notebooks=ran[0])
    assert tree(own) == {"mine.json": b"mine"}

    handed_in.import_archive(packed, accepted, replace=True, notebooks=ran[0])
    assert handed_in.handed_in(own) is not None
    (kept,) = (tmp_path / "runs").iterdir()
    assert tree(kept) == {"mine.json": b"mine"}
    assert sorted(os.listdir(accepted)) == ["h200", "h200-theirs"]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_leaves_everything_as_it_was(ran, packed, tmp_path, monkeypatch, after, there):
    accepted = tmp_path / "data"
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    if there:
        (accepted / "h200").mkdir(parents=True)
        (accepted / "h200" / "mine.json").write_text("mine")
    before, calls = tree(tmp_path), iter(range(after))
    monkeypatch.setattr(
        archive.os, "fsync", lambda _: None if next(calls, None) is not None else full_disk()
    )
    with pytest.raises(ArchiveError, match="No space left"):
        handed_in.import_archive(packed, accepted, replace=True, notebooks=ran[0])
    assert tree(tmp_path) == before
    assert not list(accepted.glob(".*"))


def test_a_folder_that_cannot_be_renamed_comes_back(ran, packed, tmp_path, monkeypatch):
    accepted = tmp_path / "data"
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    (accepted / "h200").mkdir(parents=True)
    (accepted / "h200" / "mine.json").write_text("mine")
    rename = os.rename

    def fails(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".import-"):
            full_disk()
        rename(source, target)

    monkeypatch.setattr(handed_in.os, "rename", fails)
    with pytest.raises(ArchiveError, match="No space left"):
        handed_in.import_archive(packed, accepted, replace=True, notebooks=ran[0])
    assert tree(accepted) == {"h200/mine.json": b"mine"}


# --- the command --------------------------------------------------------------------------------


def test_the_command_says_what_it_found(ran, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "NOTEBOOKS", ran[0])
    monkeypatch.setattr(paths, "ACCEPTED", tmp_path / "data")
    good = CliRunner().invoke(cli.main, ["verify", str(packed)])
    assert good.exit_code == 0, good.output
    assert "does not prove" in good.output
    assert f"sha256 {hashlib.sha256(packed.read_bytes()).hexdigest()}" in good.output
    put = CliRunner().invoke(cli.main, ["import", str(packed)])
    assert put.exit_code == 0, put.output
    assert (tmp_path / "data" / "h200" / "archive.json").exists()
    again = CliRunner().invoke(cli.main, ["import", str(packed)])
    assert again.exit_code == 2
    assert again.output.startswith("error: ")
    change(packed, evidence(lambda e: SPEEDUP(e).update(value=7.0)))
    for command in ("verify", "import"):
        bad = CliRunner().invoke(cli.main, [command, str(packed)])
        assert bad.exit_code == 2
        assert re.search(r"FAILED .*its times give 6", bad.output)
    nothing = CliRunner().invoke(
        cli.main, ["pack", "--from", str(tmp_path / "none"), str(tmp_path / "x.zip")]
    )
    assert (nothing.exit_code, "no results in" in nothing.output) == (2, True)


# --- the accepted runs --------------------------------------------------------------------------


def test_every_accepted_run_verifies_here_and_a_tampered_one_does_not(tmp_path):
    sources = batch.select_notebooks(paths.NOTEBOOKS)
    machines = [one for one in sorted(paths.ACCEPTED.iterdir()) if one.is_dir()]
    assert "h200" in [one.name for one in machines]
    for results in machines:
        target = tmp_path / f"{results.name}.zip"
        packing.pack(sources, results, target, here=HERE, stale=True)
        assert archive_check.verify(target).accepted(stale=True)
    target = tmp_path / "h200.zip"
    name = "results/02_trace_specialization.json"
    change(target, edit_json(name, lambda e: e["claims"][2].update(verdict="PASS")))
    found = "\n".join(map(str, archive_check.verify(target).failed))
    assert "does not show PASS for kernel_reached [guards_dropped]" in found
    assert (
        "kernel_reached [guards_dropped] is PASS, but by its measurements it does not hold" in found
    )


def test_a_flipped_verdict_of_an_accepted_result_contradicts_its_measurements():
    other = {"PASS": "FAIL", "PASS_WITH_LIMITATIONS": "FAIL", "FAIL": "PASS"}
    caught, verdicts = 0, "verdicts follow from measurements"
    for path in sorted((paths.ACCEPTED / "h200").glob("0[1-6]_*.json")):
        found = read_evidence(path)
        assert not any(consistency.examine(found).values())
        for claim in found.claims:
            said = claim.verdict
            if claim.verdict.value in other:
                claim.verdict = Verdict(other[claim.verdict.value])
                problems = consistency.examine(found)[verdicts]
                assert len(problems) <= 1
                caught += len(problems)
            claim.verdict = said
    assert caught >= 15


def test_each_rule_is_of_a_claim_that_a_notebook_makes():
    for name, claim in consistency.RULES:
        text = (paths.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
        stem = re.sub("_(mean|p99)_", "_{stat}_", claim)
        assert f'\\"{claim}\\"' in text or f'\\"{stem}\\"' in text, (name, claim)
