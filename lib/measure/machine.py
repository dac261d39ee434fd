"""What machine this is: profile, device, wavefront width, memory, versions, clocks.

Nothing here changes a setting; clocks are read with the vendor's tool under a short time limit and
are ``None`` where there is no such tool.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Profile = Literal["cpu", "cuda", "dcu"]

#: Packages whose versions a result depends on, by distribution name.
VERSIONED = ("papermill", "nbclient", "transformers", "numpy", "vllm", "aiter")

#: Names by which a result folder is known, looked for in the device's own name.
_KNOWN = ("h200", "h100", "h800", "h20", "a100", "a800", "l40s", "l40", "l20", "b200", "mi300x")


class Machine(BaseModel):
    """A machine as results are labelled with it."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Folder name of its results: ``cpu``, ``h200``, ``a100``, ``gfx936``, else a slug."""
    profile: Profile
    device: Literal["cpu", "cuda"]
    """torch device string; ROCm and DCU builds call theirs ``cuda`` too."""
    device_name: str
    arch: str
    """``sm_90``, ``gfx936`` or the processor's architecture, ``x86_64``."""
    wavefront: int | None = None
    """Lanes that run together: 32 or 64; None on a CPU."""
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    """L2 cache (on a CPU: the last-level cache, where the kernel tells), bytes."""
    memory_bytes: int | None = None
    """Device memory (on a CPU: main memory), bytes."""
    cpu_cores: int
    """Cores this process may use."""
    versions: dict[str, str]
    driver: str | None = None
    clocks: str | None = None


@functools.lru_cache(maxsize=1)
def detect() -> Machine:
    """The machine this process runs on; cached.

    Raises ImportError naming the remedy when torch is not installed.
    """
    try:
        import torch
    except ImportError as problem:
        raise ImportError(f"torch does not import ({problem}); make .venv with `make`") from problem
    return describe(torch)


def describe(torch: Any, ask: Callable[[list[str]], str | None] | None = None) -> Machine:
    """``Machine`` from a torch module (or an object shaped like one).

    ``ask`` runs a vendor's command and returns its text, or None; default: really run it.
    """
    ask = ask or _ask
    versions = _versions(torch)
    cores = _cores()
    if not torch.cuda.is_available():
        return Machine(
            name="cpu",
            profile="cpu",
            device="cpu",
            device_name=_cpu_name(),
            arch=platform.machine(),
            l2_bytes=_cpu_cache_bytes(),
            memory_bytes=_main_memory_bytes(),
            cpu_cores=cores,
            versions=versions,
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    hip = getattr(torch.version, "hip", None)
    if hip:
        # "gfx936:sramecc+:xnack-": what follows the colon are features, not the architecture.
        arch = str(getattr(properties, "gcnArchName", "")).split(":")[0] or "gfx-unknown"
        # Every gfx9 part, the DCUs among them, runs 64 lanes together; later ones run 32.
        wavefront = _number(properties, "warp_size") or (64 if arch.startswith("gfx9") else 32)
        name = arch
        driver, clocks = _hip_readings(ask)
    else:
        arch = f"sm_{properties.major}{properties.minor}"
        wavefront = _number(properties, "warp_size") or 32
        name = machine_name(properties.name)
        driver, clocks = _cuda_readings(ask)
    return Machine(
        name=name,
        profile="dcu" if hip else "cuda",
        device="cuda",
        device_name=str(properties.name),
        arch=arch,
        wavefront=wavefront,
        multiprocessors=_number(properties, "multi_processor_count"),
        # Spelled so since torch 2.2; the lower-case name is what some vendor builds print.
        l2_bytes=_number(properties, "L2_cache_size") or _number(properties, "l2_cache_size"),
        memory_bytes=_number(properties, "total_memory"),
        cpu_cores=cores,
        versions=versions,
        driver=driver,
        clocks=clocks,
    )


def machine_name(device_name: str) -> str:
    """Short folder name for a device name: 'NVIDIA H200' -> 'h200'; unknown ones become a slug."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    for known in _KNOWN:
        if known in words:
            return known
    kept = [word for word in words if word not in {"nvidia", "amd", "geforce", "tesla"}]
    return "-".join(kept) or "unknown"


def _number(properties: Any, name: str) -> int | None:
    """A positive whole number among the device's properties, or None (older torch lacks some)."""
    value = getattr(properties, name, None)
    return int(value) if isinstance(value, int) and value > 0 else None


def _versions(torch: Any) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        import triton

        found["triton"] = str(triton.__version__)
    except ImportError:
        pass
    for toolkit in ("cuda", "hip"):
        value = getattr(torch.version, toolkit, None)
        if value:
            found[toolkit] = str(value)
    for package in VERSIONED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _main_memory_bytes() -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _cpu_cache_bytes() -> int | None:
    sizes = []
    for index in range(5):
        text = _read(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size").strip()
        found = re.fullmatch(r"(\d+)([KM]?)", text)
        if found:
            sizes.append(int(found.group(1)) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found.group(2)])
    return max(sizes, default=None)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _ask(command: list[str]) -> str | None:
    """Text of a read-only vendor command, or None when it is absent, fails or takes over 5 s."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=5, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _cuda_readings(ask: Callable[[list[str]], str | None]) -> tuple[str | None, str | None]:
    """Driver version and clocks of the first visible GPU, by nvidia-smi."""
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={visible}"]
    parts = [part.strip() for part in (ask(query) or "").split(",")]
    if len(parts) != 6:
        return None, None
    driver, sm, sm_max, memory, memory_max, power = parts
    return driver, f"SM {sm} of {sm_max}, memory {memory} of {memory_max}, power limit {power}"


def _hip_readings(ask: Callable[[list[str]], str | None]) -> tuple[str | None, str | None]:
    """Driver and clocks of a ROCm or DCU machine: hy-smi (also outside PATH), else rocm-smi."""
    modules = ("hycu", "hydcu", "amdgpu")
    driver = next((v for m in modules if (v := _read(f"/sys/module/{m}/version").strip())), None)
    for tool in ("hy-smi", "/opt/hyhal/bin/hy-smi", "rocm-smi"):
        text = ask([tool, "--showclocks"])
        if text:
            kept = [line.strip() for line in text.splitlines() if re.search(r"[sm]clk", line)]
            return driver, "; ".join(kept) or None
    return driver, None
