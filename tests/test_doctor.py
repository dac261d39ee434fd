"""The doctor: real on this machine, and what it says on broken ones."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from fusion_evidence.lib import doctor as subject

SCRIPT = Path(subject.__file__)
ON_CPU = not torch.cuda.is_available()


def examine(python=sys.executable, *arguments, **environ):
    """Run the doctor as a program; (exit status, what it printed, its error output)."""
    done = subprocess.run(
        [str(python), str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not ON_CPU, reason="says what a CPU can run")
def test_quick_on_this_machine():
    status, said, error = examine(sys.executable, "--quick")
    assert status == 0, said + error
    assert "Traceback" not in error
    lines = {line[:14].strip(): line for line in said.splitlines()}
    for name in ("python", "disk", "packages", "torch", "device", "bf16", "triton", "notebook"):
        assert lines[name][15:23].strip() == "ok", lines[name]
    assert "interpreter" in lines["triton"]
    for name in ("hip", "clocks", "inductor", "graph capture"):
        assert "not here" in lines[name]
        assert lines[name].rstrip()[-1] != "s", "a check that does not apply must say why"
    assert "Profile here: cpu" in said
    assert "01, 06: device times" in said


@pytest.mark.slow
def test_whole_on_this_machine():
    status, said, error = examine()
    assert status == 0, said + error
    inductor = next(line for line in said.splitlines() if line.startswith("inductor"))
    assert "compiled and ran" in inductor


def test_a_bare_python_is_a_blocker_with_a_remedy_and_no_traceback(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    status, said, error = examine(tmp_path / "bare" / "bin" / "python", PYTHONPATH="")
    assert status == 1
    assert error == ""
    assert "missing: click" in said
    assert "remedy: make run" in said
    assert said.rstrip().endswith("Stopped at: packages. Nothing after it could work.")
    assert "triton" not in said


def test_a_torch_that_does_not_import_is_a_blocker(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libgalaxyhip.so.5: cannot open shared object file')"
    )
    status, said, error = examine(sys.executable, "--quick", PYTHONPATH=str(tmp_path))
    assert status == 1
    assert error == ""
    assert "libgalaxyhip.so.5: cannot open shared object file" in said
    assert "remedy: on a DCU image load the toolkit first" in said
    assert "Stopped at: torch." in said


def test_a_torch_that_crashes_is_a_blocker(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.kill(os.getpid(), 11)")
    status, said, _ = examine(sys.executable, "--quick", PYTHONPATH=str(tmp_path))
    assert status == 1
    assert "died of signal 11" in said


def test_a_triton_that_computes_wrongly_is_seen(tmp_path, monkeypatch):
    assert "* 2, mask" in subject._TRITON
    monkeypatch.setattr(subject, "_TRITON", subject._TRITON.replace("* 2, mask", "* 3, mask"))
    check = subject._triton(subject.Findings(device="cpu" if ON_CPU else "cuda"), quick=True)
    assert check.status == "no"


def test_too_little_disk_is_a_blocker(monkeypatch, capsys):
    monkeypatch.setattr(subject, "DISK_GB", 1e9)
    assert subject.doctor(quick=True) == 1
    said = capsys.readouterr().out
    assert "Stopped at: disk" in said
    assert "TORCHINDUCTOR_CACHE_DIR" in said


def test_a_check_that_breaks_is_a_line_and_the_others_go_on(monkeypatch, capsys):
    def broken(found, quick):
        raise RuntimeError("no such property")

    for name in ("_torch", "_device", "_bf16", "_triton", "_notebook", "_packages", "_clocks"):
        monkeypatch.setattr(subject, name, broken)
    assert subject.doctor(quick=True) == 0
    said = capsys.readouterr().out
    assert said.count("RuntimeError: no such property") == 7
    assert "all notebooks: no kernel starts" in said


def test_no_cxx_compiler_is_said_before_a_compile_is_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check = subject._inductor(subject.Findings(device="cpu"), quick=False)
    assert (check.status, check.blocker) == ("no", False)
    assert "g++" in check.remedy


def test_a_process_over_its_time_is_ended():
    ok, text = subject._python_process("import time; time.sleep(60)", limit=1)
    assert (ok, text) == (False, "no answer within 1 s")


class TestHip:
    @staticmethod
    def check(hip=True, device=False, environ=None, present=()):
        return subject.hip_check(hip, device, environ or {}, lambda place: place in present)

    def test_not_a_hip_build(self):
        assert self.check(hip=False).status == "not here"

    def test_a_device_that_is_seen_is_fine_whatever_the_nodes(self):
        check = self.check(device=True, environ={"HIP_VISIBLE_DEVICES": "3"})
        assert check.status == "ok"
        assert "HIP_VISIBLE_DEVICES '3'" in check.detail

    def test_missing_nodes_are_named_with_the_container_options(self):
        check = self.check(present=("/dev/dri",))
        assert check.blocker
        assert "missing /dev/kfd, /opt/hyhal" in check.detail
        assert "--device=/dev/kfd" in check.remedy

    @pytest.mark.parametrize("hidden", ["", "-1"])
    def test_hidden_devices_are_the_cause_when_they_are(self, hidden):
        places = ("/dev/kfd", "/dev/dri", "/opt/hyhal")
        check = self.check(environ={"HIP_VISIBLE_DEVICES": hidden}, present=places)
        assert check.blocker
        assert check.remedy == "unset HIP_VISIBLE_DEVICES"


def test_consequences_follow_the_findings():
    def said(**changes):
        found = subject.Findings(**changes)
        found.checks = [
            subject.Check(name, "ok", "") for name in ("triton", "inductor", "graph capture")
        ] + [subject.Check("notebook", "ok", "")]
        return found

    dcu = said(device="cuda", hip=True)
    text = "\n".join(subject.consequences(dcu))
    assert "Profile here: dcu" in text
    assert "gfx936" not in text
    dcu.checks[0] = subject.Check("triton", "no", "refused gfx936")
    dcu.checks[2] = subject.Check("graph capture", "no", "unsupported")
    text = "\n".join(subject.consequences(dcu))
    assert "every arm with the fused kernel" in text
    assert "times by graph replay" in text
