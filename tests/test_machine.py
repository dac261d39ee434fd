"""Machine detection: this machine for real, other machines through the shape of torch."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from fusion_evidence.lib.measure import machine as subject


def fake_torch(hip=None, cuda=None, version="2.5.1", **properties):
    """An object shaped like torch on a machine with one device."""
    device = SimpleNamespace(**properties)
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(hip=hip, cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_properties=lambda index: device,
        ),
    )


def silent(command):
    return None


H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "L2_cache_size": 62914560,
    "total_memory": 150754820096,
    "warp_size": 32,
}
DCU = {
    "name": "BW1000",
    "major": 9,
    "minor": 3,
    "gcnArchName": "gfx936:sramecc+:xnack-",
    "multi_processor_count": 80,
    "total_memory": 64 << 30,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_this_machine_is_a_cpu():
    machine = subject.detect()
    assert (machine.name, machine.profile, machine.device) == ("cpu", "cpu", "cpu")
    assert machine.wavefront is None
    assert machine.multiprocessors is None
    assert machine.arch == os.uname().machine
    assert machine.cpu_cores == len(os.sched_getaffinity(0))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.memory_bytes == pytest.approx(pages, rel=0.01)
    assert machine.versions["torch"] == torch.__version__
    assert {"python", "papermill", "transformers"} <= machine.versions.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
def test_this_machine_has_a_device():
    machine = subject.detect()
    assert machine.profile == ("dcu" if torch.version.hip else "cuda")
    assert machine.device == "cuda"
    assert machine.wavefront in (32, 64)
    assert machine.l2_bytes is None or machine.l2_bytes > 1 << 20
    assert machine.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_detection_is_cached_and_frozen():
    machine = subject.detect()
    assert subject.detect() is machine
    with pytest.raises(ValidationError):
        machine.name = "other"


def test_cuda_machine():
    asked = []

    def ask(command):
        asked.append(command)
        return "580.159.03, 1980 MHz, 1980 MHz, 3201 MHz, 3201 MHz, 700.00 W"

    machine = subject.describe(fake_torch(cuda="13.0", **H200), ask)
    assert (machine.name, machine.profile, machine.arch) == ("h200", "cuda", "sm_90")
    assert (machine.wavefront, machine.multiprocessors) == (32, 132)
    assert machine.l2_bytes == 62914560
    assert machine.driver == "580.159.03"
    assert machine.clocks == (
        "SM 1980 MHz of 1980 MHz, memory 3201 MHz of 3201 MHz, power limit 700.00 W"
    )
    assert machine.versions["cuda"] == "13.0"
    assert "hip" not in machine.versions
    # Read only: a query, and of one device.
    assert len(asked) == 1
    assert all(not word.startswith(("-lgc", "-ac", "-pl")) for word in asked[0])


@pytest.mark.parametrize("reply", [None, "", "No devices were found", "1, 2, 3"])
def test_cuda_machine_without_a_usable_tool(reply):
    machine = subject.describe(fake_torch(cuda="12.4", **H200), lambda command: reply)
    assert (machine.driver, machine.clocks) == (None, None)


def test_dcu_is_named_by_its_architecture_not_its_features():
    torch_like = fake_torch(hip="6.3.25211", version="2.4.1+das.opt1.dtk25041", **DCU)
    machine = subject.describe(torch_like, silent)
    assert (machine.name, machine.profile, machine.arch) == ("gfx936", "dcu", "gfx936")
    assert machine.device == "cuda"  # what PyTorch calls it
    assert machine.versions["hip"] == "6.3.25211"
    assert machine.versions["torch"] == "2.4.1+das.opt1.dtk25041"
    assert (machine.driver, machine.clocks) == (None, None)


def test_dcu_without_warp_size_is_64_wide_and_without_l2_says_so():
    machine = subject.describe(fake_torch(hip="6.3.1", **DCU), silent)
    assert machine.wavefront == 64
    assert machine.l2_bytes is None


def test_the_property_wins_over_the_guess():
    machine = subject.describe(fake_torch(hip="6.3.1", **{**DCU, "warp_size": 32}), silent)
    assert machine.wavefront == 32


def test_rdna_is_32_wide():
    machine = subject.describe(fake_torch(hip="6.3.1", **{**DCU, "gcnArchName": "gfx1100"}), silent)
    assert (machine.arch, machine.wavefront) == ("gfx1100", 32)


def test_dcu_clocks_come_from_the_vendors_tool_even_outside_path():
    reply = "===== clocks =====\nHCU[0]: sclk clock level: 8 (1500Mhz)\nHCU[0]: mclk 1800Mhz\nend\n"

    def ask(command):
        assert command[1:] == ["--showclocks"]
        return reply if command[0] == "/opt/hyhal/bin/hy-smi" else None

    machine = subject.describe(fake_torch(hip="6.3.1", **DCU), ask)
    assert machine.clocks == "HCU[0]: sclk clock level: 8 (1500Mhz); HCU[0]: mclk 1800Mhz"


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("", "unknown"),
        ("../../etc", "etc"),
    ],
)
def test_machine_names_are_safe_folder_names(device_name, name):
    assert subject.machine_name(device_name) == name


def test_a_tool_that_hangs_or_fails_is_none(tmp_path, monkeypatch):
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho partial\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert subject._ask(["tool"]) is None
    tool.write_text("#!/bin/sh\necho fine\n")
    assert subject._ask(["tool"]) == "fine"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    assert subject._ask(["tool"]) is None
    assert subject._ask(["no-such-tool-here"]) is None
