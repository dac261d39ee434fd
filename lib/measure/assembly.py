"""What the compiler made of the kernel, for machines that are not here: registers, spills, occupancy.

Triton compiles for a target without owning one. Each target gets a process of its own, with Triton's
interpreter off and a cache that is thrown away, in which one launch is intercepted, so that what is
compiled is what `kernels.fused.qkv_prologue` would have launched.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

from fusion_evidence.kernels.fused import Launch
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape, preset
from fusion_evidence.lib.measure.machine import Machine


@dataclass(frozen=True)
class Target:
    """A machine to compile for, in Triton's words: ``hip`` or ``cuda``, ``gfx942`` or 90, its wavefront."""

    backend: str
    arch: str | int
    wavefront: int

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @classmethod
    def of(cls, machine: Machine) -> Target:
        """What Triton compiles for on this machine. ValueError: it has no accelerator."""
        if machine.device == "cpu":
            raise ValueError(f"{machine.name} has no accelerator to compile for")
        number = machine.arch.removeprefix("sm_")
        cuda = number != machine.arch
        return cls(
            "cuda" if cuda else "hip", int(number) if cuda else number, machine.wavefront or 64
        )


TARGETS = (Target("hip", "gfx90a", 64), Target("hip", "gfx942", 64), Target("cuda", 90, 32))
"""What upstream Triton compiles for."""

VENDOR_TARGETS = (Target("hip", "gfx936", 64), Target("hip", "gfx928", 64))
"""DCUs: upstream Triton refuses them, the vendor's build takes them."""

NOT_AVAILABLE = "not available: needs the vendor's compiler"


@dataclass(frozen=True)
class Resources:
    """What one program (one wavefront) of the kernel takes on one target.

    target, heads, reduction, compiler: what was compiled, and with which Triton.
    wavefront: lanes.
    registers: per lane (VGPR on HIP). scalar_registers: per wavefront (SGPR; HIP alone).
    spills: registers that went to memory (VGPR and SGPR together) on HIP, bytes stored and loaded for
        spills on CUDA. scratch_bytes: memory per lane, whatever for.
    shared_bytes: LDS or shared memory.
    occupancy: wavefronts that fit at a time on one SIMD (HIP, as the compiler states it) or on one
        multiprocessor (CUDA, derived from the compiler's figures and the architecture's limits);
        occupancy_source says which.
    instructions: of the machine, in the whole kernel; None where its assembly cannot be had.
    unavailable: why there are no figures, in the compiler's own words, else empty.
    assembly: the text all this was read from.
    """

    target: str
    heads: int
    reduction: str
    compiler: str
    wavefront: int
    registers: int | None = None
    scalar_registers: int | None = None
    spills: int | None = None
    scratch_bytes: int | None = None
    shared_bytes: int | None = None
    occupancy: int | None = None
    occupancy_source: str = ""
    instructions: int | None = None
    unavailable: str = ""
    assembly: str = field(default="", repr=False)

    def row(self) -> dict[str, Any]:
        """All but the assembly, for a table."""
        names = [entry.name for entry in fields(self) if entry.name != "assembly"]
        return {name: getattr(self, name) for name in names}


def resources(
    targets: Sequence[Target] = TARGETS + VENDOR_TARGETS,
    shape: AttentionShape | None = None,
    numerics: Numerics | Sequence[Numerics] | None = None,
    launches: Sequence[Launch] | None = None,
    *,
    tokens: int = 256,
    marker: bool = False,
) -> list[Resources]:
    """Compile the fused kernel for every target, numerics and launch, in that order of nesting.

    ``shape`` defaults to the article's (``qwen3.5-27b``), always in bf16 with three position rows;
    ``numerics`` to `Numerics`'s own default, ``launches`` to 1, 2 and 4 heads a program as far as they
    divide the shape's. ``tokens``: of the call, whose sizes the compiler specializes for; ``marker``: it
    counts its runs. Takes a few seconds a target and touches no device.
    A target that this Triton cannot compile for (a vendor's may know its own alone) is ``unavailable``.
    """
    shape = shape or preset("qwen3.5-27b")
    numerics = Numerics() if numerics is None else numerics
    policies = [numerics] if isinstance(numerics, Numerics) else list(numerics)
    if launches is None:
        common = math.gcd(shape.q_heads, shape.kv_heads)
        launches = [Launch(heads) for heads in (1, 2, 4) if common % heads == 0]
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [
            pool.submit(_of_target, t, shape, policies, launches, tokens, marker) for t in targets
        ]
        return [result for job in jobs for result in job.result()]


def read_amdgcn(text: str) -> dict[str, Any]:
    """The figures of `Resources` that AMD's assembly states in its metadata and closing comments.

    Raises:
        ValueError: a figure is missing, named.
    """

    def metadata(name: str) -> int:
        found = re.search(rf"^ *(?:- )?\.{name}: +(\d+)$", text, re.MULTILINE)
        if not found:
            raise ValueError(f"the assembly states no .{name}")
        return int(found[1])

    occupancy = re.search(r"^; Occupancy: (\d+)", text, re.MULTILINE)
    return dict(
        wavefront=metadata("wavefront_size"),
        registers=metadata("vgpr_count"),
        scalar_registers=metadata("sgpr_count"),
        spills=metadata("vgpr_spill_count") + metadata("sgpr_spill_count"),
        scratch_bytes=metadata("private_segment_fixed_size"),
        shared_bytes=metadata("group_segment_fixed_size"),
        occupancy=int(occupancy[1]) if occupancy else None,
        occupancy_source="compiler, wavefronts a SIMD" if occupancy else "",
    )


def read_ptxas(text: str) -> dict[str, Any]:
    """The figures of `Resources` that ``ptxas -v`` prints, and the occupancy they allow.

    Raises:
        ValueError: it printed something else.
    """
    used = re.search(r"Used (\d+) registers", text)
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    if not used or not frame:
        raise ValueError(f"ptxas states no registers or no spills: {text.strip()!r}")
    shared = re.search(r"(\d+) bytes smem", text)
    registers = int(used[1])
    # Compute capability 8.0 and 9.0: 64 Ki registers given out 256 at a time, 32 blocks at most, and
    # a block is one warp here.
    by_registers = 65536 // (-(-registers * 32 // 256) * 256)
    return dict(
        registers=registers,
        spills=int(frame[2]) + int(frame[3]),
        scratch_bytes=int(frame[1]),
        shared_bytes=int(shared[1]) if shared else 0,
        occupancy=min(by_registers, 32),
        occupancy_source="derived, warps a multiprocessor",
    )


def count_instructions(assembly: str) -> int:
    """Instructions in AMD's assembly or in NVIDIA's as Triton prints it: no labels, directives, padding."""
    # NVIDIA's stand behind what the scheduler is told and, some of them, a predicate.
    instruction = re.compile(
        r"^(?:\S+:\S+)?\t(?:@!?\w+ +)?(?!NOP|s_nop|s_code_end)[A-Za-z]", re.MULTILINE
    )
    return len(instruction.findall(assembly))


def _of_target(
    target: Target,
    shape: AttentionShape,
    policies: Sequence[Numerics],
    launches: Sequence[Launch],
    tokens: int,
    marker: bool,
) -> list[Resources]:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((target, shape, policies, launches, tokens, marker)),
            capture_output=True,
            env=os.environ
            | dict(TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1"),
        )
    cases = [(policy, launch) for policy in policies for launch in launches]
    message = done.stderr.decode(errors="replace")
    if done.returncode:
        # Of all that a failing compiler prints, the first error is the reason.
        first = re.search(r"error: *(.*)", message)
        reason = first[1] if first else f"exit status {done.returncode}, {message.strip()[-300:]}"
        version = _triton_version()
        words = NOT_AVAILABLE if target in VENDOR_TARGETS else "not available"
        return [
            Resources(
                target=str(target),
                heads=launch.heads,
                reduction=str(policy.reduction),
                compiler=version,
                wavefront=target.wavefront,
                unavailable=f"{words} ({version} says: {reason})",
            )
            for policy, launch in cases
        ]
    version, results = pickle.loads(done.stdout)
    found = []
    for (policy, launch), (text, machine_code, shared, report) in zip(cases, results, strict=True):
        if target.backend == "hip":
            figures = read_amdgcn(text)
        elif report.strip():
            figures = read_ptxas(report)
        else:  # triton before 3.5 keeps what ptxas prints to itself
            figures = dict(unavailable=f"not available ({version} shows no words of ptxas)")
        figures["shared_bytes"] = max(figures.get("shared_bytes", 0), shared)
        found.append(
            Resources(
                target=str(target),
                heads=launch.heads,
                reduction=str(policy.reduction),
                compiler=version,
                instructions=count_instructions(machine_code) if machine_code else None,
                assembly=text,
                **{"wavefront": target.wavefront, **figures},
            )
        )
    return found


def _triton_version() -> str:
    import triton

    return f"triton {triton.__version__}"


# --- in the process that compiles


class _Intercepted(Exception):
    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.arguments, self.options = arguments, options


class _Interceptor:
    """Stands in for the jitted kernel and keeps what it would have been launched with."""

    def __getitem__(self, grid: object) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            raise _Intercepted(arguments, options)

        return launch


def _arguments(
    shape: AttentionShape, numerics: Numerics, launch: Launch, tokens: int, marker: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and options of the launch, on tensors without memory."""
    import torch

    from fusion_evidence.kernels import fused

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    dim = shape.head_dim
    cache = empty(64, 16, shape.kv_heads, dim)
    kernel, fused._prologue = fused._prologue, _Interceptor()
    try:
        fused.qkv_prologue(
            empty(tokens, shape.qkv_width),
            empty(dim),
            empty(dim),
            empty(4096, shape.rotary_dim),
            empty(3, tokens, dtype=torch.int64),
            empty(tokens, dtype=torch.int64),
            cache,
            cache,
            shape,
            numerics,
            launch=launch,
            marker=empty(1, dtype=torch.int64) if marker else None,
        )
    except _Intercepted as intercepted:
        return intercepted.arguments, intercepted.options
    finally:
        fused._prologue = kernel
    raise RuntimeError("the fused prologue launched no kernel to intercept")


def _compile(
    target: Target,
    shape: AttentionShape,
    numerics: Numerics,
    launch: Launch,
    tokens: int,
    marker: bool,
) -> tuple[str, str, int, str]:
    """Assembly, the machine's own (CUDA's is PTX's translation), bytes of shared memory asked for at the
    launch, and what the compiler printed."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fusion_evidence.kernels import fused

    kernel = fused._prologue
    arguments, options = _arguments(shape, numerics, launch, tokens, marker)
    constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
    signature = dict.fromkeys(constants, "constexpr")
    attributes = {}
    types = {torch.bfloat16: "*bf16", torch.int64: "*i64"}
    # As Triton specializes a launch: ones are constants, multiples of 16 are known to be.
    for i, value in enumerate(arguments):
        name = kernel.arg_names[i]
        if isinstance(value, torch.Tensor):
            signature[name], aligned = types[value.dtype], True
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        elif value == 1:
            signature[name], constants[name], aligned = "constexpr", 1, False
        else:
            signature[name], aligned = (
                "i32" if -(2**31) <= value < 2**31 else "i64",
                value % 16 == 0,
            )
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        constexprs=constants,
        attrs=attributes,
    )
    gpu = GPUTarget(target.backend, target.arch, target.wavefront)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=gpu, options=options)
    text = compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]
    machine_code = text if target.backend == "hip" else _sass(compiled)
    return text, machine_code, compiled.metadata.shared, log.getvalue()


def _sass(compiled: Any) -> str:
    """NVIDIA's machine code as text; empty without the tool that prints it, which a Triton may lack."""
    try:
        return str(compiled.asm["sass"])
    except Exception:
        return ""


def _results() -> Iterator[tuple[str, str, int, str]]:
    target, shape, policies, launches, tokens, marker = pickle.load(sys.stdin.buffer)
    for policy in policies:
        for launch in launches:
            yield _compile(target, shape, policy, launch, tokens, marker)


if __name__ == "__main__":
    # The compiler may print: results leave through the stream it does not know.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        channel.write(pickle.dumps((_triton_version(), list(_results()))))
    except Exception as failure:
        sys.exit(f"error: {failure}")
    channel.close()
