"""The doctor: real on this machine, and what it says on broken ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
    for name in (
        *("python", "disk", "packages", "torch", "device", "bf16", "compiler", "triton"),
        *("kernel", "cross-compile", "sockets", "notebook"),
    ):
        assert lines[name][15:23].strip() == "ok", lines[name]
    copies = torch.__version__ < "2.6"  # views of one allocation, for an operator
    assert ("has no models for" in lines["oracle"]) != ("has Qwen3.5" in lines["oracle"])
    assert lines["in place"][15:23].strip() == ("NO" if copies else "ok"), lines["in place"]
    assert "interpreter" in lines["triton"]
    assert "amd, nvidia" in lines["cross-compile"]
    assert "configurations first" in lines["pins"]
    for name in ("hip", "clocks", "inductor", "graph capture"):
        assert "not here" in lines[name]
        assert lines[name].rstrip()[-1] != "s", "a check that does not apply must say why"
    assert "Profile here: cpu" in said
    assert "NOT_RUN: device times" in said
    for notebook in (SCRIPT.parent.parent / "notebooks").glob("*.ipynb"):
        assert f"  {notebook.stem} " in said


@pytest.mark.slow
def test_whole_on_this_machine():
    status, said, error = examine()
    assert status == 0, said + error
    lines = {line[:14].strip(): line for line in said.splitlines()}
    assert "compiled and ran" in lines["inductor"]
    assert "compiles for gfx90a, gfx942, sm_90; refused: gfx936" in lines["cross-compile"]


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


@pytest.mark.parametrize(
    ("version", "old"),
    [("2.3.1", True), ("2.4.1+das.opt1.dtk25041", False), ("2.10.0a0", False), ("git", False)],
)
def test_which_versions_are_too_old(version, old):
    assert subject.older(version, subject.TORCH) is old


def test_a_torch_without_custom_operators_is_a_blocker(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.3.1+das1.1'\n")
    status, said, error = examine(sys.executable, "--quick", PYTHONPATH=str(tmp_path))
    assert (status, error) == (1, "")
    assert "2.3.1+das1.1, which has no torch.library.custom_op" in said


def test_a_triton_nobody_tried_is_said_to_be_one(monkeypatch):
    monkeypatch.setattr(subject, "TRITON", (1000, 0))
    check = subject._triton(subject.Findings(device="cpu" if ON_CPU else "cuda"), quick=True)
    assert check.status == "no"
    assert "a kernel ran" in check.detail


def test_a_kernel_of_other_bits_is_seen(monkeypatch):
    both = "run(one.qkv_prologue, inputs, shape, numerics) for one in (fused, reference)"
    assert both in subject._KERNEL
    other = "run(one.qkv_prologue, inputs, shape, n) for one, n in "
    other += "((fused, numerics), (reference, Numerics('per_op', Reduction(32, 2))))"
    monkeypatch.setattr(subject, "_KERNEL", subject._KERNEL.replace(both, other))
    check = subject._kernel(subject.Findings(device="cpu" if ON_CPU else "cuda"), quick=True)
    assert check.status == "no"
    assert "elements that differ" in check.detail
    assert "triton" in check.remedy


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

    whole = {"_python", "_disk", "_hip", "_sockets"}
    names = subject._run_checks.__code__.co_names
    steps = {name for name in names if name.startswith("_") and not name.startswith("__")}
    assert whole < steps
    for name in steps - whole:
        monkeypatch.setattr(subject, name, broken)
    assert subject.doctor(quick=True) == 0
    said = capsys.readouterr().out
    assert len(steps) > 15
    assert said.partition("Profile here")[0].count("no such property") == len(steps - whole)
    assert "NOT_RUN: everything: no kernel starts (RuntimeError: no such property)" in said
    assert "sockets        ok" in said


def test_no_compiler_is_said_before_a_compile_is_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    found = subject.Findings(device="cpu")
    check = subject._compiler(found, quick=False)
    assert (check.status, check.blocker) == ("no", False)
    assert check.remedy == "apt-get install gcc g++"
    found.checks.append(check)
    assert subject._inductor(found, quick=False).status == "no"


def test_a_compiler_that_does_not_work_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert "C++: none works" in subject._compiler(subject.Findings(), quick=False).detail


@pytest.mark.skipif(torch.__version__ < "2.5", reason="it copies views and has no other way")
def test_a_torch_that_copies_views_says_what_to_set():
    from torch._inductor import config

    with config.patch(enable_auto_functionalized_v2=False):
        check = subject._in_place(subject.Findings(), quick=True)
    assert (check.status, check.remedy) == ("no", "set TORCHDYNAMO_AUTO_FUNCTIONALIZED_V2=1")
    found = subject.Findings(checks=[check])
    assert any("03 says FAIL of views" in line for line in subject.consequences(found))


def test_a_torch_that_keeps_its_guards(keeps_its_guards):
    check = subject._guards(subject.Findings(), quick=True)
    assert check.status == "not here"
    text = "\n".join(subject.consequences(subject.Findings(checks=[check])))
    lacks = f"torch {torch.__version__} has no guard_filter_fn for torch.compile"
    assert f"drops guards, as vLLM does (a compiled graph cannot drop its guards: {lacks})" in text


def test_a_temporary_folder_too_deep_for_sockets(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(subject.tempfile, "tempdir", str(deep))
    check = subject._sockets(subject.Findings(), quick=True)
    assert check.status == "no"
    assert "TMPDIR" in check.remedy


def test_a_process_over_its_time_is_ended():
    ok, text = subject._python_process("import time; time.sleep(60)", limit=1)
    assert (ok, text) == (False, "no answer within 1 s")


OPEN, CLOSED = subject.Node(True), subject.Node(False, "render")
EVERYTHING = dict(kfd=OPEN, mkfd=OPEN, dri=OPEN, hyhal=OPEN)


class TestHip:
    """Of a DCU's container there is none here: what the process finds there is given."""

    @staticmethod
    def check(hip=True, device=False, environ=None, **places):
        given = {f"/dev/{name}": node for name, node in places.items()}
        given["/opt/hyhal"] = given.pop("/dev/hyhal", None)
        return subject.hip_check(hip, device, environ or {}, given.get)

    def test_not_a_hip_build(self):
        assert self.check(hip=False).status == "not here"

    def test_a_device_that_is_seen_is_fine_whatever_the_nodes(self):
        check = self.check(device=True, environ={"HIP_VISIBLE_DEVICES": "3"}, kfd=CLOSED)
        assert check.status == "ok"
        assert "HIP_VISIBLE_DEVICES '3'" in check.detail

    def test_missing_nodes_are_named_with_the_container_options(self):
        check = self.check(dri=OPEN)
        assert check.blocker
        assert "missing /dev/kfd, /dev/mkfd, /opt/hyhal" in check.detail
        assert "--device=/dev/mkfd" in check.remedy

    def test_nodes_of_a_group_this_process_is_not_in(self):
        check = self.check(**{**EVERYTHING, "dri": CLOSED, "kfd": subject.Node(False, "39")})
        assert check.blocker
        assert "not allowed to open /dev/kfd (group 39), /dev/dri (group render)" in check.detail
        assert check.remedy.endswith("--group-add 39 --group-add render")

    @pytest.mark.parametrize("value", ["", "-1", "none", "GFX-1,0"])
    @pytest.mark.parametrize("name", subject.HIDING)
    def test_hidden_devices_are_the_cause_when_they_are(self, name, value):
        check = self.check(environ={name: value}, **EVERYTHING)
        assert check.blocker
        assert f"unset {name}:" in check.remedy

    @pytest.mark.parametrize("value", ["0", "1,0", "GPU-8a5f"])
    def test_lists_that_name_a_device_are_not(self, value):
        check = self.check(environ={"HIP_VISIBLE_DEVICES": value}, **EVERYTHING)
        assert check.blocker
        assert "hy-smi" in check.remedy


class TestNodes:
    def test_a_real_one_and_none(self, tmp_path):
        assert subject._look_at(str(tmp_path / "kfd")) is None
        node = subject._look_at("/dev/null")
        assert node == subject.Node(True, node.group)
        assert node.group

    @pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
    @pytest.mark.parametrize(("mode", "allowed"), [(0o666, True), (0o660, False)])
    def test_of_a_folder_the_nodes_in_it_count(self, mode, allowed):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            node = Path(folder, "renderD128")
            node.touch()
            node.chmod(mode)
            code = "import os, sys; from fusion_evidence.lib import doctor; os.setgroups([]); "
            code += "os.setgid(65534); os.setuid(65534); "
            code += "sys.exit(10 + doctor._look_at(sys.argv[1]).allowed)"
            done = subprocess.run([sys.executable, "-c", code, folder])
        assert done.returncode == 10 + allowed


def test_consequences_follow_the_findings(monkeypatch):
    monkeypatch.setattr(subject, "_importable", lambda module: True)

    def said(**changes):
        found = subject.Findings(**changes)
        names = {need.check for need in subject.NEEDS} - {"accelerator", "vllm"}
        found.checks = [subject.Check(name, "ok", "") for name in [*names, "in place"]]
        return found

    def without(found, name, why):
        checks = [c if c.name != name else subject.Check(name, "no", why) for c in found.checks]
        found = subject.Findings(checks, found.device, found.hip)
        return "\n".join(subject.consequences(found))

    dcu = said(device="cuda", hip=True)
    text = "\n".join(subject.consequences(dcu))
    assert "Profile here: dcu" in text
    assert "gfx936" not in text
    assert text.count("runs whole") == len(subject.consequences(dcu)) - 1
    text = without(dcu, "kernel", "refused gfx936")
    assert text.count("NOT_RUN: all that runs the fused kernel (refused gfx936)") >= 6
    assert "captured and replayed, its times included (no)" in without(dcu, "graph capture", "no")
    cpu = said(device="cpu")
    assert "captured and replayed" not in without(cpu, "graph capture", "needs a device")
    assert "No figure measured here says anything of gfx936." in subject.consequences(cpu)
    monkeypatch.setattr(subject, "_importable", lambda module: module != "vllm")
    lost = [line for line in subject.consequences(dcu) if "NOT_RUN" in line]
    assert lost == ["    NOT_RUN: the real service (vLLM is not installed)"]


def test_what_was_left_out_is_not_said_to_be_missing():
    check = subject.Check("inductor", "not here", "left out by --quick", left_out=True)
    assert not any("compiled" in line for line in subject.consequences(subject.Findings([check])))
