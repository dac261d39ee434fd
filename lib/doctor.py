"""What this machine can run, what not and why: ``fusion-evidence doctor [--quick]``.

The checks go from what everything needs to what one part needs. Each really does the thing, most of
them in a process of their own with a time limit, so that a compiler that hangs or crashes is a line
in the table. A failed check that makes the rest pointless (a blocker) ends the run and names the
remedy. This module imports without torch, pydantic or papermill.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 10)
#: Free disk below which a run is likely to break: Inductor's caches and executed notebooks, GB.
DISK_GB = 2.0

Status = Literal["ok", "no", "not here"]


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    blocker: bool = False
    seconds: float = 0.0


@dataclass
class Findings:
    """What the checks have established so far; later checks read it."""

    checks: list[Check] = field(default_factory=list)
    device: str = "cpu"
    hip: bool = False

    def passed(self, name: str) -> bool:
        return any(check.name == name and check.status == "ok" for check in self.checks)


def doctor(quick: bool = False) -> int:
    """Print the table and what it means for a run here.

    ``quick`` leaves the Inductor compile out on a CPU, where the first one takes minutes.
    Returns 0, or 1 when a blocker was found.
    """
    found = Findings()
    for check in _run_checks(found, quick):
        mark = {"ok": "ok      ", "no": "NO      ", "not here": "not here"}[check.status]
        print(f"{check.name:<14} {mark} {check.seconds:6.1f} s  {check.detail}", flush=True)
        if check.remedy:
            print(f"{'':<14} remedy: {check.remedy}", flush=True)
    blockers = [check for check in found.checks if check.blocker]
    print()
    if blockers:
        print(f"Stopped at: {blockers[0].name}. Nothing after it could work.")
        return 1
    for line in consequences(found):
        print(line)
    return 0


def _run_checks(found: Findings, quick: bool) -> Iterator[Check]:
    steps: list[tuple[str, Callable[[Findings, bool], Check]]] = [
        ("python", _python),
        ("disk", _disk),
        ("packages", _packages),
        ("torch", _torch),
        ("device", _device),
        ("hip", _hip),
        ("clocks", _clocks),
        ("bf16", _bf16),
        ("triton", _triton),
        ("inductor", _inductor),
        ("graph capture", _graph),
        ("notebook", _notebook),
    ]
    for name, step in steps:
        started = time.monotonic()
        try:
            check = step(found, quick)
        except Exception as problem:  # one broken check is a line in the table, not a traceback
            check = Check(name, "no", f"{type(problem).__name__}: {problem}")
        check = Check(
            name,
            check.status,
            check.detail,
            check.remedy,
            check.blocker,
            time.monotonic() - started,
        )
        found.checks.append(check)
        yield check
        if check.blocker:
            return


def consequences(found: Findings) -> list[str]:
    """Which profile runs here, and what of the collection will be NOT_RUN, in sentences."""
    profile = "dcu" if found.hip else found.device
    lines = [f"Profile here: {profile} (fusion-evidence run --profile {profile})."]
    missing = []
    if profile == "cpu":
        missing.append(
            "01, 06: device times, speedup and saving (the kernel runs in Triton's interpreter, "
            "for its bits alone)"
        )
        missing.append("04, 07: the effect on TTFT and TPOT of a device kernel")
    if profile != "dcu":
        missing.append("everything labelled gfx936")
    if not found.passed("triton"):
        missing.append("01, 03-07: every arm with the fused kernel")
    inductor = next((check for check in found.checks if check.name == "inductor"), None)
    if inductor is not None and inductor.status == "no":
        missing.append("01-06: every compiled baseline and arm")
    if profile != "cpu" and not found.passed("graph capture"):
        missing.append("01, 03, 06: times by graph replay, markers under replay")
    if not found.passed("notebook"):
        missing.append("all notebooks: no kernel starts")
    if not _importable("vllm"):
        missing.append("07: the real service (vLLM is not installed); 01: vLLM as a peer")
    lines += ["NOT_RUN here:"] + [f"  {item}" for item in missing]
    return lines


# --- checks -------------------------------------------------------------------------------------


def _python(found: Findings, quick: bool) -> Check:
    version = sys.version.split()[0]
    detail = f"{version} at {sys.executable}"
    if sys.version_info[:2] < MINIMUM:
        remedy = "make PYTHON=/path/to/python3.11 (3.10 or newer)"
        return Check("python", "no", detail, remedy, blocker=True)
    return Check("python", "ok", detail)


def _disk(found: Findings, quick: bool) -> Check:
    free = {}
    for label, place in (("here", ROOT), ("temporary files", Path(tempfile.gettempdir()))):
        free[label] = shutil.disk_usage(place).free / 1e9
    detail = ", ".join(f"{size:.1f} GB free ({label})" for label, size in free.items())
    if min(free.values()) < DISK_GB:
        remedy = f"free {DISK_GB:.0f} GB, or set TMPDIR and TORCHINDUCTOR_CACHE_DIR elsewhere"
        return Check("disk", "no", detail, remedy, blocker=True)
    return Check("disk", "ok", detail)


def _packages(found: Findings, quick: bool) -> Check:
    needed = "click pydantic yaml numpy pandas matplotlib papermill nbclient ipykernel".split()
    needed += ["fusion_evidence.kernels", "fusion_evidence.lib"]
    missing = [name for name in needed if not _importable(name)]
    if missing:
        remedy = "make run makes .venv with all of them; or: pip install -e ."
        return Check("packages", "no", "missing: " + ", ".join(missing), remedy, blocker=True)
    return Check("packages", "ok", f"{len(needed)} found")


def _torch(found: Findings, quick: bool) -> Check:
    if not _importable("torch"):
        remedy = "make run installs it; on a vendor image use that image's python: make PYTHON=..."
        return Check("torch", "no", "not installed", remedy, blocker=True)
    ok, text = _python_process("import torch; print(torch.__version__)", limit=300)
    if not ok:
        remedy = "on a DCU image load the toolkit first: source /opt/dtk/env.sh"
        return Check("torch", "no", f"does not import: {text}", remedy, blocker=True)
    return Check("torch", "ok", text)


def _device(found: Findings, quick: bool) -> Check:
    import torch

    from fusion_evidence.lib.measure.machine import detect

    found.hip = bool(getattr(torch.version, "hip", None))
    built = bool(found.hip or getattr(torch.version, "cuda", None))
    machine = detect()
    found.device = machine.device
    if machine.device == "cpu":
        why = "torch sees no device" if built else "this torch is a CPU build"
        remedy = ""
        if built and shutil.which("nvidia-smi"):
            remedy = "nvidia-smi is there: check the driver's version against torch's CUDA"
        return Check("device", "ok", f"{machine.device_name}, CPU only ({why})", remedy)
    memory = (machine.memory_bytes or 0) / 2**30
    detail = (
        f"{machine.device_name}, {machine.arch}, {memory:.0f} GiB, "
        f"{machine.wavefront} lanes, result folder {machine.name}"
    )
    return Check("device", "ok", detail)


def _hip(found: Findings, quick: bool) -> Check:
    return hip_check(found.hip, found.device == "cuda", os.environ, lambda p: Path(p).exists())


def hip_check(
    hip: bool, device_seen: bool, environ: os._Environ | dict, exists: Callable[[str], bool]
) -> Check:
    """ROCm and DCU specifics: the device nodes and folders a container must be given.

    Missing ones are a blocker only when torch is a HIP build and sees no device.
    """
    if not hip:
        return Check("hip", "not here", "torch is not a HIP build")
    visible = environ.get("HIP_VISIBLE_DEVICES")
    shown = "unset" if visible is None else repr(visible)
    places = ("/dev/kfd", "/dev/dri", "/opt/hyhal")
    missing = [place for place in places if not exists(place)]
    detail = f"HIP_VISIBLE_DEVICES {shown}; " + (
        f"missing {', '.join(missing)}" if missing else f"{', '.join(places)} present"
    )
    if device_seen:
        return Check("hip", "ok", detail)
    if visible is not None and visible.strip() in {"", "-1"}:
        remedy = "unset HIP_VISIBLE_DEVICES"
    else:
        remedy = (
            "start the container with --device=/dev/kfd --device=/dev/mkfd --device=/dev/dri "
            "-v /opt/hyhal:/opt/hyhal --group-add video"
        )
    return Check("hip", "no", detail + "; torch sees no device", remedy, blocker=True)


def _clocks(found: Findings, quick: bool) -> Check:
    from fusion_evidence.lib.measure.machine import detect

    if found.device == "cpu":
        return Check("clocks", "not here", "no device")
    machine = detect()
    if machine.clocks is None:
        return Check("clocks", "no", "no vendor tool answered; times stand without clocks")
    return Check("clocks", "ok", f"driver {machine.driver}; {machine.clocks}")


def _bf16(found: Findings, quick: bool) -> Check:
    code = f"""
import torch
a = torch.full((8,), 1.0, dtype=torch.bfloat16, device={found.device!r})
b = a + 2**-8                       # half a step above 1: to nearest even, it stays 1
assert b.dtype == torch.bfloat16 and bool((b.float() == 1.0).all()), b
assert bool(((a + 2**-7).float() == 1 + 2**-7).all())
print("add works and rounds to nearest even")
"""
    return _from_process("bf16", code, limit=300)


_TRITON = """
import sys, torch, triton
import triton.language as tl

@triton.jit
def double(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n) * 2, mask=at < n)

device = sys.argv[1]
source = torch.arange(100, dtype=torch.float32, device=device)
target = torch.zeros_like(source)
double[(2,)](source, target, 100, BLOCK=64)
assert torch.equal(target, source * 2), target
how = "interpreter" if device == "cpu" else "compiled"
print(f"{triton.__version__}, a kernel ran ({how})")
"""


def _triton(found: Findings, quick: bool) -> Check:
    if not _importable("triton"):
        remedy = "make run installs it; on a vendor image install the vendor's triton"
        return Check("triton", "no", "not installed", remedy)
    extra = {"TRITON_INTERPRET": "1"} if found.device == "cpu" else {"TRITON_INTERPRET": "0"}
    return _from_process("triton", _TRITON, limit=300, arguments=[found.device], extra=extra)


_INDUCTOR = """
import sys, torch

@torch.compile(fullgraph=True)
def three(x, y):
    z = x * 2 + y
    z = torch.nn.functional.silu(z)
    return z.sum(-1)

x = torch.linspace(-1, 1, 256, device=sys.argv[1]).reshape(4, 64)
y = torch.ones(4, 64, device=sys.argv[1])
expected = torch.nn.functional.silu(x * 2 + y).sum(-1)
assert torch.allclose(three(x, y), expected, rtol=1e-4), "wrong values"
print("a three-line function compiled and ran")
"""


def _inductor(found: Findings, quick: bool) -> Check:
    if found.device == "cpu":
        if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
            remedy = "install a C++ compiler (apt-get install g++)"
            return Check("inductor", "no", "no C++ compiler found", remedy)
        if quick:
            detail = "left out by --quick: the first C++ compile takes minutes on a CPU"
            return Check("inductor", "not here", detail)
    return _from_process("inductor", _INDUCTOR, limit=600, arguments=[found.device])


_GRAPH = """
import torch
x = torch.ones(64, device="cuda")
y = torch.empty_like(x)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    torch.add(x, 1, out=y)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.add(x, 1, out=y)
x.fill_(5)
y.zero_()
graph.replay()
torch.cuda.synchronize()
assert bool((y == 6).all()), y
print("captured, and the replay read the new input")
"""


def _graph(found: Findings, quick: bool) -> Check:
    if found.device == "cpu":
        return Check("graph capture", "not here", "needs a device")
    return _from_process("graph capture", _GRAPH, limit=300)


def _notebook(found: Findings, quick: bool) -> Check:
    """papermill really executes a two-cell notebook with this Python as its kernel."""
    code = """
import sys, tempfile
from pathlib import Path
import nbformat, papermill
from jupyter_client import kernelspec
from nbclient import NotebookClient
from nbformat import v4
with tempfile.TemporaryDirectory() as folder:
    code = "import sys; print(n + 41, sys.executable)"
    cells = [v4.new_code_cell("n = 1"), v4.new_code_cell(code)]
    cells[0].metadata["tags"] = ["parameters"]
    page = v4.new_notebook(cells=cells)
    page.metadata["kernelspec"] = {"name": "python3", "display_name": "p", "language": "python"}
    source, target = Path(folder, "in.ipynb"), Path(folder, "out.ipynb")
    nbformat.write(page, source)
    papermill.execute_notebook(str(source), str(target), parameters={"n": 1}, progress_bar=False,
                               kernel_name="python3", start_timeout=120, execution_timeout=120)
    said = [o["text"] for c in nbformat.read(target, 4).cells for o in c.get("outputs", [])]
    assert said and said[0].startswith("42 "), said
    print(f"papermill {papermill.__version__}, a kernel ran ({said[0].split()[1]})")
"""
    check = _from_process("notebook", code, limit=300)
    if check.status == "no":
        remedy = "pip install ipykernel papermill in this environment"
        return Check("notebook", "no", check.detail, remedy, blocker=True)
    return check


# --- helpers ------------------------------------------------------------------------------------


def _importable(name: str) -> bool:
    import importlib.util

    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


def _from_process(
    name: str,
    code: str,
    limit: float,
    arguments: list[str] | None = None,
    extra: dict[str, str] | None = None,
) -> Check:
    ok, text = _python_process(code, limit, arguments, extra)
    return Check(name, "ok" if ok else "no", text)


def _python_process(
    code: str,
    limit: float,
    arguments: list[str] | None = None,
    extra: dict[str, str] | None = None,
) -> tuple[bool, str]:
    """Run ``code`` as a file in a fresh Python (Triton reads its kernels' source from a file).

    Returns (exit status is 0, last line it printed, or of its error); never raises for what the
    code does. ``limit`` in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "check.py")
        script.write_text(code)
        command = [sys.executable, str(script), *(arguments or [])]
        environ = {**os.environ, **(extra or {})}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, env=environ, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return False, f"no answer within {limit:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode < 0:
        return False, f"the process died of signal {-done.returncode}"
    return done.returncode == 0, lines[-1] if lines else f"exit status {done.returncode}"


if __name__ == "__main__":
    raise SystemExit(doctor(quick="--quick" in sys.argv[1:]))
