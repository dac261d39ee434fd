"""What this machine can run, what not and why: ``fusion-evidence doctor [--quick]``.

The checks go from what everything needs to what one part needs. Each really does the thing, most of
them in a process of their own with a time limit, so that a compiler that hangs or crashes is a line
in the table. A failed check that makes the rest pointless (a blocker) ends the run and names the
remedy. This module imports without torch, pydantic or papermill.
"""

from __future__ import annotations

import contextlib
import grp
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 10)
#: The oldest torch that has ``torch.library.custom_op``, and the oldest triton that was tried.
TORCH, TRITON = (2, 4), (3, 3)
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
    left_out: bool = False  #: by ``--quick``, so that nothing is known


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
        ("compiler", _compiler),
        ("triton", _triton),
        ("kernel", _kernel),
        ("cross-compile", _cross_compile),
        ("inductor", _inductor),
        ("guards", _guards),
        ("in place", _in_place),
        ("pins", _pins),
        ("graph capture", _graph),
        ("oracle", _oracle),
        ("peers", _peers),
        ("sockets", _sockets),
        ("notebook", _notebook),
    ]
    for name, step in steps:
        started = time.monotonic()
        try:
            check = step(found, quick)
        except Exception as problem:  # one broken check is a line in the table, not a traceback
            check = Check(name, "no", f"{type(problem).__name__}: {problem}")
        check = replace(check, name=name, seconds=time.monotonic() - started)
        found.checks.append(check)
        yield check
        if check.blocker:
            return


@dataclass(frozen=True)
class Need:
    """What is not run, of some notebooks, where a check is not ``ok``.

    ``check`` is a check's name, or ``accelerator``; ``notebooks`` their numbers.
    """

    check: str
    notebooks: str
    lost: str


NEEDS = (
    Need("notebook", "00 01 02 03 04 05 06 07", "everything: no kernel starts"),
    Need("kernel", "01 02 03 04 05 06 07", "all that runs the fused kernel"),
    Need("inductor", "01 03 04 05 06 07", "all that is compiled: baselines and arms"),
    Need("accelerator", "01", "device times, speed-up, peers (the interpreter gives bits alone)"),
    Need("accelerator", "03", "replay of captured graphs, the profiler's count, the marker's cost"),
    Need("accelerator", "04", "the fused kernel in the service (other code takes its place)"),
    Need("accelerator", "05", "the fused kernel's arms (emulated instead), what pins cost"),
    Need("accelerator", "06", "the article's stack, all times, counts of the kernel's runs"),
    Need("accelerator", "07", "the service"),
    Need("graph capture", "01 03 04 05 06 07", "what is captured and replayed, its times included"),
    Need("guards", "02", "the service that drops guards, as vLLM does"),
    Need("pins", "05", "the arm with Inductor's deterministic mode"),
    Need("cross-compile", "01", "registers and occupancy on targets that are not here"),
    Need("oracle", "01", "the comparison with transformers' own code"),
    Need("peers", "01", "times of other projects' kernels"),
    Need("vllm", "07", "the real service (vLLM is not installed)"),
)


def consequences(found: Findings) -> list[str]:
    """Which profile runs here, and what of each notebook will be NOT_RUN and why, in lines."""
    profile = "dcu" if found.hip else found.device
    lines = [
        f"Profile here: {profile} (fusion-evidence run --profile {profile}; "
        f"data/parameters/{profile}.yaml). Of the notebooks:"
    ]
    for notebook in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        lost = _lost(found, notebook.name[:2])
        lines.append(f"  {notebook.stem:<26} {'runs, but for' if lost else 'runs whole'}")
        lines += [f"    NOT_RUN: {what}" for what in lost]
    if not found.passed("in place"):
        lines.append("03 says FAIL of views of one allocation: see `in place`.")
    if profile != "dcu":
        lines.append("No figure measured here says anything of gfx936.")
    return lines


def _lost(found: Findings, number: str) -> list[str]:
    """What ``NEEDS`` says of one notebook here, the reason in brackets where a check gave one."""
    lost = []
    for need in NEEDS:
        if number not in need.notebooks.split():
            continue
        check = next((check for check in found.checks if check.name == need.check), None)
        if need.check == "accelerator":
            there = found.device != "cpu"
        elif need.check == "vllm":
            there = _importable("vllm")
        elif need.check in ("graph capture", "peers") and found.device == "cpu":
            there = True  # said already, of the accelerator
        else:
            there = check is None or check.status == "ok" or check.left_out
        if not there:
            lost.append(need.lost + (f" ({check.detail})" if check else ""))
    return lost


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
    if older(text, TORCH):
        remedy = "a newer torch; on a vendor image, a newer image"
        detail = f"{text}, which has no torch.library.custom_op: 2.4 or newer is needed"
        return Check("torch", "no", detail, remedy, blocker=True)
    return Check("torch", "ok", text)


def older(version: str, than: tuple[int, int]) -> bool:
    """Whether a version such as ``2.4.1+das.opt1.dtk25041`` is below ``than``; unreadable ones are not."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < than


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
        f"{machine.wavefront} lanes a wavefront, result folder {machine.name}"
    )
    return Check("device", "ok", detail)


def _hip(found: Findings, quick: bool) -> Check:
    return hip_check(found.hip, found.device == "cuda", os.environ, _look_at)


@dataclass(frozen=True)
class Node:
    """A device node or folder as this process finds it: may it open it, and whose group is it?"""

    allowed: bool
    group: str = ""


HIP_PLACES = ("/dev/kfd", "/dev/mkfd", "/dev/dri", "/opt/hyhal")
#: Each of these hides every device when it is empty or names none.
HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
CONTAINER = (
    "start the container with --device=/dev/kfd --device=/dev/mkfd --device=/dev/dri "
    "-v /opt/hyhal:/opt/hyhal:ro --group-add video"
)


def _look_at(place: str) -> Node | None:
    path = Path(place)
    if not path.exists():
        return None
    # Of a folder of nodes those count that programs open: without one, any that is there.
    nodes = sorted(path.glob("renderD*")) if path.is_dir() else []
    wanted = os.R_OK if path.is_dir() and not nodes else os.R_OK | os.W_OK
    opened = nodes or [path]
    try:
        group = grp.getgrgid(opened[0].stat().st_gid).gr_name
    except KeyError:  # a container need not know the host's group
        group = str(opened[0].stat().st_gid)
    return Node(any(os.access(node, wanted) for node in opened), group)


def hip_check(
    hip: bool,
    device_seen: bool,
    environ: Mapping[str, str],
    look_at: Callable[[str], Node | None],
) -> Check:
    """ROCm and DCU specifics: what a container must be given, and variables that hide devices.

    A blocker only when torch is a HIP build and sees no device.
    """
    if not hip:
        return Check("hip", "not here", "torch is not a HIP build")
    seen = {place: look_at(place) for place in HIP_PLACES}
    missing = [place for place, node in seen.items() if node is None]
    closed = {place: node.group for place, node in seen.items() if node and not node.allowed}
    said = [f"HIP_VISIBLE_DEVICES {environ.get('HIP_VISIBLE_DEVICES', 'unset')!r}"]
    if missing:
        said.append(f"missing {', '.join(missing)}")
    if closed:
        said.append(
            "not allowed to open " + ", ".join(f"{p} (group {g})" for p, g in closed.items())
        )
    if not missing and not closed:
        said.append(f"{', '.join(HIP_PLACES)} present and open")
    detail = "; ".join(said)
    if device_seen:
        return Check("hip", "ok", detail)
    hiding = [f"{name}={environ[name]!r}" for name in HIDING if hides(environ.get(name))]
    if hiding:
        remedy = f"unset {', '.join(name.split('=')[0] for name in hiding)}: devices count from 0"
        detail += f"; {', '.join(hiding)} names no device"
    elif missing:
        remedy = CONTAINER
    elif closed:
        groups = " ".join(f"--group-add {group}" for group in sorted(set(closed.values())))
        remedy = f"join the group (usermod -aG), in a container: {groups}"
    else:
        remedy = "ask hy-smi whether the driver sees the cards; a variable may name one that is not there"
    return Check("hip", "no", detail + "; torch sees no device", remedy, blocker=True)


def hides(visible: str | None) -> bool:
    """Whether a list of visible devices begins with no device: the runtime stops reading there."""
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    return not (first.isdigit() or first.startswith("GPU-"))


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


def _compiler(found: Findings, quick: bool) -> Check:
    """A C++ compiler for Inductor's CPU code, a C compiler for Triton's launcher, Python's headers."""
    wanted = {"C": ("CC", "gcc", "cc", "clang"), "C++": ("CXX", "g++", "clang++")}
    made = {}
    for language, (variable, *names) in wanted.items():
        choices = [os.environ.get(variable), *names]
        made[language] = next((c for c in choices if c and _compiles(c, language)), None)
    missing = [language for language, compiler in made.items() if compiler is None]
    header = Path(sysconfig.get_path("include"), "Python.h")
    packages = ["gcc g++"] * bool(missing) + ["python3-dev"] * (not header.exists())
    detail = "; ".join(
        f"{language}: {compiler or 'none works'}" for language, compiler in made.items()
    )
    detail += "" if header.exists() else "; no Python.h"
    if packages:
        return Check("compiler", "no", detail, f"apt-get install {' '.join(packages)}")
    return Check("compiler", "ok", detail)


def _compiles(compiler: str, language: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one.c" if language == "C" else "one.cpp")
        source.write_text("int main() { return 0; }\n")
        command = [*compiler.split(), str(source), "-o", str(Path(folder, "one"))]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    return False


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
    check = _from_process("triton", _TRITON, limit=300, arguments=[found.device], extra=extra)
    if check.status == "ok" and older(check.detail, TRITON):
        return replace(
            check, status="no", detail=f"{check.detail}; 3.3 is the oldest that was tried"
        )
    return check


_KERNEL = """
import sys, torch
from fusion_evidence.kernels import fused, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.measure.compare import compare
from fusion_evidence.lib.measure.inputs import prologue_inputs, run
shape, numerics = preset("compact"), Numerics(reduction=Reduction(32, 2))
inputs = prologue_inputs(shape, 1, device=sys.argv[1])
got, expected = (run(one.qkv_prologue, inputs, shape, numerics) for one in (fused, reference))
differ = {name: compare(got[name], expected[name]).mismatches for name in got}
assert not any(differ.values()), f"elements that differ from the reference: {differ}"
print(f"one token, {len(got)} outputs: the reference's bits")
"""


def _kernel(found: Findings, quick: bool) -> Check:
    """The fused kernel itself: an older or a vendor's Triton can run others and not this one."""
    if not _importable("triton"):
        return Check("kernel", "no", "no triton")
    check = _from_process("kernel", _KERNEL, limit=600, arguments=[found.device])
    if check.status == "no":
        return replace(check, remedy="another triton: from 3.3 on it is known to compile")
    return check


_BACKENDS = """
import triton
from triton.backends import backends
print(f"triton {triton.__version__} has back ends: {', '.join(sorted(backends))}")
"""
_CROSS = """
from fusion_evidence.kernels.fused import Launch
from fusion_evidence.lib.measure.assembly import TARGETS, VENDOR_TARGETS, resources
done = resources(TARGETS + VENDOR_TARGETS, launches=[Launch(1)])
taken = [one.target for one in done if not one.unavailable]
refused = [one.target for one in done if one.unavailable]
print(f"the kernel compiles for {', '.join(taken)}; refused: {', '.join(refused) or 'none'}")
"""


def _cross_compile(found: Findings, quick: bool) -> Check:
    """Machine code for accelerators that are not here; a vendor's compiler takes its own alone."""
    if not _importable("triton"):
        return Check("cross-compile", "no", "no triton")
    if quick:
        check = _from_process("cross-compile", _BACKENDS, limit=300)
        return replace(check, detail=f"{check.detail} (not tried: --quick)")
    return _from_process("cross-compile", _CROSS, limit=600)


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
        if not found.passed("compiler"):
            return Check("inductor", "no", "no C++ compiler that works, see `compiler`")
        if quick:
            detail = "left out by --quick: the first C++ compile takes minutes on a CPU"
            return Check("inductor", "not here", detail, left_out=True)
    return _from_process("inductor", _INDUCTOR, limit=600, arguments=[found.device])


def _guards(found: Findings, quick: bool) -> Check:
    from fusion_evidence.lib.graph.tracing import Unavailable, drop_guards

    try:
        drop_guards()
    except Unavailable as error:
        return Check("guards", "not here", f"a compiled graph cannot drop its guards: {error}")
    return Check("guards", "ok", "a compiled graph can drop its guards, as vLLM's does")


def _in_place(found: Findings, quick: bool) -> Check:
    """Whether a compiled graph hands caches that are views of one allocation to an operator as they are."""
    from torch._inductor import config

    new_way = getattr(config, "enable_auto_functionalized_v2", None)
    if new_way:
        return Check("in place", "ok", "operators write views of one allocation where they are")
    detail = "operators get a copy of caches that are views of one allocation"
    if new_way is None:
        return Check("in place", "no", f"{detail}: torch before 2.5 knows no other way")
    return Check("in place", "no", detail, "set TORCHDYNAMO_AUTO_FUNCTIONALIZED_V2=1")


def _pins(found: Findings, quick: bool) -> Check:
    """Inductor's deterministic mode is an arm of 05; what is pinned needs no torch to have it."""
    from fusion_evidence.lib.attribution.factorial import PINS
    from fusion_evidence.lib.service.arms import Pins

    missing = [one for one in Pins(deterministic=True).unavailable if one.startswith("determ")]
    pinned = f"configurations {PINS.configurations}, attention {PINS.sdpa}, "
    pinned += f"workspace {PINS.workspace}, first traced T {PINS.first_traced}"
    if not missing:
        return Check("pins", "ok", f"{pinned}; Inductor's deterministic mode is there too")
    return Check("pins", "not here", f"no deterministic mode in this Inductor; pinned: {pinned}")


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


_ORACLE = """
import sys, torch, transformers
version = f"transformers {transformers.__version__}"
if not transformers.utils.is_torch_available():
    sys.exit(f"{version} has no models for torch {torch.__version__}")
from transformers.models.qwen3_5 import modeling_qwen3_5
print(f"{version} has Qwen3.5")
"""


def _oracle(found: Findings, quick: bool) -> Check:
    """The other project whose modelling code the definition is compared with."""
    return _from_process("oracle", _ORACLE, limit=300)


def _peers(found: Findings, quick: bool) -> Check:
    from fusion_evidence.lib.measure.peers import NAMES, available

    why = {name: available(name) for name in NAMES}
    said = "; ".join(
        w.partition(":")[0] if w else f"{name} can be timed" for name, w in why.items()
    )
    return Check("peers", "ok" if None in why.values() else "not here", said)


def _sockets(found: Findings, quick: bool) -> Check:
    """Kernels are spoken to by files in a temporary folder, servers by a port of this machine."""
    with tempfile.TemporaryDirectory(prefix="fe-") as folder, socket.socket() as port:
        file = str(Path(folder, "kernel-1"))
        try:
            with socket.socket(socket.AF_UNIX) as local:
                local.bind(file)
        except OSError as error:
            remedy = "set TMPDIR to a short path on a file system that has sockets"
            return Check("sockets", "no", f"no socket at {file}: {error}", remedy)
        try:
            port.bind(("127.0.0.1", 0))
        except OSError as error:
            return Check("sockets", "no", f"no free port on 127.0.0.1: {error}")
    return Check("sockets", "ok", "a file and a port of 127.0.0.1 can be listened at")


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
