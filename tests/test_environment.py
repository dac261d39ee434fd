"""Making .venv: an installed torch is seen and kept; a broken one is an error, not replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from fusion_evidence.lib import environment as subject

VERSION = "2.4.1+das.opt1.dtk25041"
ROOT = Path(__file__).resolve().parent.parent


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")


def site_of(folder: Path) -> Path:
    return next((folder / "lib").glob("python*/site-packages"))


@pytest.fixture
def vendor(tmp_path):
    """An environment with a vendor's torch (a package of that name), made without a network."""
    folder = tmp_path / "vendor"
    venv.create(folder, with_pip=False)
    site = site_of(folder)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(f"__version__ = {VERSION!r}\n")
    record = site / f"torch-{VERSION}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {VERSION}\n")
    (record / "INSTALLER").write_text("vendor\n")
    return folder


def lend_packages(folder: Path) -> None:
    """Let an environment see the packages these tests run with, after its own."""
    (site_of(folder) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")


def make(python: str, target: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, str(ROOT / "lib" / "environment.py"), str(target)],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )


def test_torch_is_found_where_it_is_and_only_there(tmp_path, vendor):
    venv.create(tmp_path / "plain", with_pip=False)
    assert subject.has_torch(python_of(vendor))
    assert not subject.has_torch(python_of(tmp_path / "plain"))


def test_probe_reads_the_version_that_imports(vendor):
    lend_packages(vendor)
    seen = subject.probe(python_of(vendor))
    assert seen["torch"] == seen["packages"]["torch"] == VERSION
    assert seen["torch_file"].startswith(str(vendor))


def test_frozen_constraints_hold_everything_but_the_installer_and_this_project():
    packages = {"torch": VERSION, "numpy": "1.26.4", "pip": "23.0", "setuptools": "59.6.0"}
    packages |= {"fusion-evidence": "0.1.0"}
    assert subject.frozen_constraints(packages) == f"numpy==1.26.4\ntorch=={VERSION}\n"


def test_an_installed_torch_is_kept(tmp_path, vendor):
    """The whole way, offline: what the environment imports is the vendor's, nothing reinstalled."""
    lend_packages(vendor)
    (tmp_path / "no-wheels").mkdir()
    target = tmp_path / "made"
    done = make(python_of(vendor), target, WHEELHOUSE=str(tmp_path / "no-wheels"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"uses the installed torch {VERSION}" in done.stdout
    assert f"torch=={VERSION}" in (target / subject.FROZEN).read_text().splitlines()
    assert not (site_of(target) / "torch").exists()
    code = "import torch, fusion_evidence.lib as l; print(torch.__version__, l.__file__)"
    seen = subprocess.run(
        [python_of(target), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert seen.stdout.split() == [VERSION, str(ROOT / "lib" / "__init__.py")]


def test_a_torch_that_does_not_import_is_an_error_with_a_remedy(tmp_path, vendor):
    (site_of(vendor) / "torch" / "__init__.py").write_text("raise ImportError('libhipblas.so.2')")
    done = make(python_of(vendor), tmp_path / "made")
    assert done.returncode == 2
    assert "libhipblas.so.2" in done.stderr
    assert "source /opt/dtk/env.sh" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "made").exists()


def test_a_replaced_torch_is_refused():
    outer = {"torch": VERSION, "torch_file": "a", "triton": "3.1.0"}
    subject._unchanged(outer, dict(outer))
    for changed in ({"torch": "2.13.0"}, {"triton": "3.9.0"}, {"triton": None}):
        with pytest.raises(subject.EnvironmentProblem, match="would replace"):
            subject._unchanged(outer, {**outer, **changed})


def test_an_environment_of_the_other_case_or_broken_is_not_reused(tmp_path):
    target = tmp_path / "made"
    assert not subject._reusable(target, shared=False)
    venv.create(target, with_pip=True)
    assert subject._reusable(target, shared=False)
    assert not subject._reusable(target, shared=True)
    (target / "bin" / "python").unlink()
    assert not subject._reusable(target, shared=False)


def test_make_is_instant_when_nothing_changed(tmp_path):
    (tmp_path / ".ready").touch()
    command = ["make", "-n", f"VENV={tmp_path}", f"PYTHON={sys.executable}", "test"]
    fresh = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "environment.py" not in fresh.stdout
    os.utime(tmp_path / ".ready", (0, 0))
    stale = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "environment.py" in stale.stdout


@pytest.mark.parametrize(
    ("extras", "shared", "request_"),
    [
        ("dev", False, ".[torch,dev]"),
        ("dev", True, ".[dev]"),
        ("", True, "."),
        ("", False, ".[torch]"),
    ],
)
def test_torch_is_requested_only_where_there_is_none(extras, shared, request_):
    assert subject._request(extras, shared) == request_
