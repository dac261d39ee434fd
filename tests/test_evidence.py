"""Evidence: what is written is valid, gated, atomic, and known to be stale when it is."""

from __future__ import annotations

import errno
import json
import os

import pytest

from fusion_evidence.lib import paths
from fusion_evidence.lib.measure import machine
from fusion_evidence.lib.report import Measurement, Recorder, Verdict, is_fresh, load_evidence
from fusion_evidence.lib.report import evidence as evidence_module
from fusion_evidence.lib.report.evidence import freshness_hash, read_evidence, write_text

SOURCE = "from fusion_evidence.lib.report import Recorder"


@pytest.fixture
def notebook(tmp_path, monkeypatch, write_notebook):
    tiny = machine.Machine(
        name="cpu",
        profile="cpu",
        device="cpu",
        device_name="<tiny>",
        arch="x86_64",
        cpu_cores=1,
        versions={},
    )
    monkeypatch.setattr(machine, "detect", lambda: tiny)
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(paths, "ACCEPTED", tmp_path / "accepted")
    return write_notebook(
        tmp_path / "notebooks" / "01_tiny.ipynb", SOURCE, parameters="count: int = 2"
    )


@pytest.fixture
def book(notebook):
    return Recorder.open("01_tiny", {"count": 3})


def test_by_hand_a_notebook_takes_the_profile_and_says_so(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("FUSION_EVIDENCE_RUN_DIR", raising=False)
    monkeypatch.setattr(paths, "PARAMETERS", tmp_path)
    (tmp_path / "cpu.yaml").write_text("01_tiny: {count: 9}\n01_other: {size: 3}\n")
    namespace = {"count": 2}
    assert Recorder.open("01_tiny", namespace).evidence.parameters == {"count": 9}
    assert namespace["count"] == 9
    assert "From cpu.yaml" in (said := capsys.readouterr().out)
    assert "count = 9" in said
    assert Recorder.open("01_tiny", {"count": 3}).evidence.parameters == {"count": 3}
    monkeypatch.setenv("FUSION_EVIDENCE_RUN_DIR", str(tmp_path))  # the runner has passed its own
    assert Recorder.open("01_tiny", {"count": 2}).evidence.parameters == {"count": 2}
    assert capsys.readouterr().out == ""


def test_every_record_is_on_disk_at_once(book):
    on_disk = read_evidence(book.path)
    assert (on_disk.run, on_disk.parameters) == ("incomplete", {"count": 3})
    book.measure("time", 2.11, unit="us", n=200, low=2.0, high=2.2, impl="fused", T=1)
    assert read_evidence(book.path).value("time", impl="fused", T=1) == 2.11
    book.declare("right", rule="0 mismatches")
    book.finish()
    on_disk = read_evidence(book.path)
    assert (on_disk.run, on_disk.reason) == ("complete", None)
    assert on_disk.claim("right").verdict is Verdict.NOT_RUN
    assert not [name for name in os.listdir(book.path.parent) if name != "01_tiny.json"]

    book.measure("time", 2.0, impl="fused", T=4)  # a cell run again after the last one
    assert read_evidence(book.path).run == "incomplete"


def test_values_that_json_has_not(book):
    import numpy as np
    import torch

    book.measure("time", float("nan"), low=float("-inf"), high=np.float32(2.5), T=np.int64(1))
    book.measure("device", "H200")
    book.measure("zero", torch.tensor(0), bound=float("inf"))
    book.measure("nothing", None, note="not stated")
    text = book.path.read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    time, device, zero, nothing = read_evidence(book.path).measurements
    assert (time.value, time.low, time.high, time.labels) == (None, None, 2.5, {"T": 1})
    assert "value was nan" in time.note
    assert "low was -inf" in time.note
    assert (device.value, zero.value, nothing.value) == ("H200", 0, None)
    assert zero.labels == {"bound": "inf"}
    with pytest.raises(TypeError, match=r"time.*list"):
        book.measure("time", [1, 2])


def test_claims_are_declared_before_they_are_concluded(book):
    with pytest.raises(ValueError, match="bits was not declared"):
        book.conclude("bits", Verdict.PASS, why="0")
    with pytest.raises(ValueError, match="bits was not declared"):
        book.gated("speedup", 2.0, requires="bits")
    book.declare("bits", rule="0 mismatches")
    book.conclude("bits", "PASS", why="0 of 10")
    book.declare("bits", rule="0 mismatches")  # the cell runs again: nothing is lost
    assert book.evidence.claim("bits").verdict is Verdict.PASS
    book.declare("bits", rule="at most 3 mismatches")  # a rule made after the fact decides nothing
    assert book.evidence.claim("bits").verdict is Verdict.NOT_RUN


def test_speedup_and_saving_need_a_passed_claim(book):
    for metric in ("speedup", "saving", "saving_share"):
        with pytest.raises(ValueError, match="gated"):
            book.measure(metric, 4.8)
    book.declare("bits", rule="0 mismatches")
    book.declare("bits", arm="integrated", rule="0 mismatches")
    book.conclude("bits", Verdict.PASS_WITH_LIMITATIONS, why="0 of 10, 10 only")
    book.conclude("bits", Verdict.FAIL, why="3 of 10", arm="integrated")
    assert book.gated("speedup", 4.8, requires="bits", low=4.7, high=4.9, arm="alone")
    assert not book.gated("speedup", 1.1, requires=("bits", "integrated"), low=1.0, arm="whole")
    alone, whole = read_evidence(book.path).select("speedup")
    assert (alone.value, alone.not_comparable) == (4.8, None)
    assert (whole.value, whole.low) == (None, None)
    assert whole.not_comparable == "bits is FAIL: 3 of 10"


def test_a_cell_replaces_what_it_recorded_but_never_silently(notebook):
    cells = ["", "the first cell"]
    book = Recorder.open("01_tiny", {"count": 3, "In": cells})
    book.measure("time", 1.0, T=1)
    with pytest.raises(ValueError, match="twice"):
        book.measure("time", 2.0, T=1)
    cells.append("the same cell again")
    book.measure("time", 3.0, T=1)
    assert [m.value for m in book.evidence.measurements] == [3.0]


def test_frame_has_one_column_per_label(book):
    for tokens, value in ((1, 2.1), (4, 2.3)):
        book.measure("time", value, unit="us", impl="fused", T=tokens)
    book.measure("time", 0.7, unit="us", impl="empty")
    frame = book.frame("time", impl="fused")
    assert list(frame["T"]) == [1, 4]
    assert list(frame["value"]) == [2.1, 2.3]
    with pytest.raises(ValueError, match="2 measurements"):
        book.evidence.value("time", impl="fused")


def test_missing_and_damaged_results_are_not_run(notebook, tmp_path):
    missing = load_evidence("05_other")
    assert (missing.run, missing.claim("any").verdict) == ("not_run", Verdict.NOT_RUN)
    assert "no result on this machine" in missing.reason
    (tmp_path / "runs" / "cpu").mkdir(parents=True)
    (tmp_path / "runs" / "cpu" / "01_tiny.json").write_text('{"schema_version": 1, "noteb')
    assert "not readable" in load_evidence("01_tiny").reason


def test_labels_that_are_no_mapping_are_not_readable(notebook, tmp_path):
    (tmp_path / "runs" / "cpu").mkdir(parents=True)
    strange = (
        '{"notebook": "01_tiny", "run": "complete", "measurements": [{"metric": "a", "labels": 1}]}'
    )
    (tmp_path / "runs" / "cpu" / "01_tiny.json").write_text(strange)
    assert "not readable" in load_evidence("01_tiny").reason


def test_a_fresh_accepted_result_beats_a_stale_run(notebook, tmp_path, write_notebook):
    book = Recorder.open("01_tiny", {"count": 3})
    book.finish()
    accepted = tmp_path / "accepted" / "cpu" / "01_tiny.json"
    accepted.parent.mkdir(parents=True)
    accepted.write_text(book.path.read_text())
    book.evidence.fingerprint = "of another source"
    book.finish()
    assert load_evidence("01_tiny").fingerprint == read_evidence(accepted).fingerprint
    accepted.unlink()
    assert load_evidence("01_tiny").fingerprint == "of another source"  # better than nothing
    assert load_evidence("01_tiny", machine="gfx936").run == "not_run"


def test_fresh_follows_cells_parameters_and_imported_modules(
    notebook, tmp_path, monkeypatch, write_notebook
):
    book = Recorder.open("01_tiny", {"count": 3})
    assert is_fresh(book.evidence)
    assert not is_fresh(book.evidence.model_copy(update={"parameters": {"count": 4}}))

    lib = tmp_path / "lib"
    for name, text in {
        "__init__.py": "",
        "report/__init__.py": "from fusion_evidence.lib.report.recorder import Recorder",
        "report/recorder.py": "from . import plots\nfrom ..deep import f\nstart = ['-m', "
        "'fusion_evidence.lib.arm']",
        "report/plots.py": "",
        "deep.py": "",
        "arm.py": "",
        "stranger.py": "",
    }.items():
        (lib / name).parent.mkdir(parents=True, exist_ok=True)
        (lib / name).write_text(text)
    monkeypatch.setitem(evidence_module._FOLDERS, "lib", lib)

    def hash_after_change(name: str) -> bool:
        before = freshness_hash(notebook, {})
        (lib / name).write_text((lib / name).read_text() + "\n# changed\n")
        return freshness_hash(notebook, {}) != before

    for name in ("__init__.py", "report/__init__.py", "report/recorder.py", "deep.py", "arm.py"):
        assert hash_after_change(name), name
    for name in ("report/plots.py", "stranger.py"):
        assert not hash_after_change(name), name

    before = freshness_hash(notebook, {})
    write_notebook(notebook, SOURCE, "%matplotlib inline\n1 + 1", parameters="count: int = 2")
    assert freshness_hash(notebook, {}) != before


def test_verdict_box_is_readable_and_escaped(book):
    from fusion_evidence.lib.report.box import box_html

    book.declare("T<1", rule="a < b")
    book.conclude("T<1", Verdict.FAIL, why="<script>")
    page = box_html(book.evidence)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "T&lt;1" in page
    assert "&lt;tiny&gt;" in page
    assert "color:inherit" in page  # the page's own colour, dark or light


def test_a_full_disk_leaves_the_earlier_file_whole(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    write_text(target, "earlier")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(target, "later")
    assert target.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_measurement_refuses_unknown_fields():
    with pytest.raises(ValueError, match="extra"):
        Measurement(metric="time", value=1.0, units="us")
