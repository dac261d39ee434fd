"""Other projects' kernels for the same work, run on exactly our inputs: timing peers of notebook 01.

Nothing of theirs is copied: a peer is usable where its package, or just the few source files named
below, can be found on the import path. These files are loaded by themselves. No package's `__init__`
runs, because importing vLLM takes half a minute and patches Inductor, whose compiled baseline stands in
the same notebook, and importing aiter brings in its C++ ops and their build.

A time counts only if the work is equal: `equal_work` first, and read what it says is `missing`.

vllm (read at 0.25.1 and 0.33.0), two launches
    `fused_qk_rmsnorm_rope_gate` of ``model_executor/layers/fused_qk_norm_rope.py``: what vLLM runs for
    Qwen3.5's and Qwen3-Next's gated attention on CUDA at every T; then
    `triton_reshape_and_cache_flash` of ``v1/attention/ops/triton_reshape_and_cache_flash.py``: its
    Triton cache write (its FLASH_ATTN backend has a C++ one). V stays where it is, a view of ``qkv``.
    0.25.1 takes 1-D positions and weights that are already ``1 + w``; 0.33.0 takes (3, T) positions
    with interleaved sections too, and adds the 1 itself.
    Rounds: x fp32, ``x * rsqrt * (1 + w)`` to the storage dtype; rotation in fp32 with ``cos``/``sin``
    widened, products and sum unrounded; once at the store. This is our ``storage``. A program is one
    head row with ``head_dim / 64`` warps: at head_dim 256 Triton 3.6 for sm_90 sums 4x32x2 and
    contracts the product with ``cos`` (layout and PTX read, not measured).

aiter (read at v0.1.20.post1; the op came with v0.1.15 and PyPI's `amd-aiter` is older), one launch
    `fused_qkv_split_qk_norm_rope_cache` of ``ops/triton/rope/fused_qkv_split_qk_norm_rope_cache.py``:
    everything including contiguous K and V, for 1-D positions only. A program is one query head of a
    tile of tokens, and the first ``kv_heads`` of them do K and V as well.
    Rounds (partial rotation): the norm's result x to the storage dtype; ``x * cos`` in the promoted
    dtype of x and the table, so with a bf16 table that product is rounded as well; the partner is
    loaded and normalized a second time and stays fp32, as does its product with ``sin`` and the sum;
    once at the store. That is none of our policies. (Rotation over the whole head takes the partner
    from the rounded x instead, and adds in the promoted dtype.) Its tile grows with T, and the layout
    with the tile: Triton 3.6 for sm_90 sums 4x32x2 at one token a tile, 1x32x8 at 16, so that a token's
    bits depend on T. The product with ``sin`` is contracted (layout and PTX read, not measured).

flashinfer (read at 0.7.4) does not cover this work
    `fused_qk_rmsnorm_rope` (``norm/__init__.py``) is for video models: norm over all heads at once,
    positions of a (frame, height, width) grid, no gate and no cache. `qwen_3_5_block` is the whole
    attention layer with its GEMMs, for compute capability 10.7 alone. From parts (`gemma_rmsnorm` twice,
    `apply_rope_with_cos_sin_cache`, `append_paged_kv_cache`) it would take 1-D positions, page tables
    instead of slots, no padding, and leave the gate strided: other work, whose time would compare with
    nothing here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.checks import check_arguments
from fusion_evidence.kernels.numerics import Rounding
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.measure.compare import Comparison, compare, pair_ulps

NAMES = ("vllm", "aiter", "flashinfer")

PARTS = frozenset(
    ("split", "norm", "rope", "mrope", "gate", "key_cache", "value_cache", "k_out", "v_out")
)
"""What the op does; a peer covers a subset."""

ULP_BOUND = 3
"""Declared before any run: how far q and k may be from the reference (see `pair_ulps`); all that is
only copied must be equal bit for bit. Two rounding policies, each with two or three roundings of half
a ULP on the way, cannot differ by more."""

Outputs = dict[str, Tensor]
Call = Callable[[], Outputs]


class PeerUnavailable(RuntimeError):
    """The peer cannot be used here; the message says why."""


class NotCovered(ValueError):
    """The peer does not do this work; the message says what."""


@dataclass(frozen=True)
class Peer:
    """Another project's implementation.

    version: of its package, or ``source <digest>`` of its kernel's file where only files are there.
    launches: kernels one call launches.
    covers: the `PARTS` it does. positions: what it takes, ``[T]`` (1d), ``[3, T]`` (3d) or both.
    rounding: the nearest of our policies, which `equal_work` compares with.
    prepare: takes the arguments of `reference.qkv_prologue` and returns a call without arguments that
        does the work on them: ``q[T, Hq, D]``, ``gate[T, Hq * D]``, ``k`` and ``v`` ``[T, Hk, D]`` if
        covered, and the two caches it wrote. What a call needs besides (views, ``1 + w`` for a kernel
        that wants it so, unused scales) is made by `prepare`, so that a call is the peer's launches and
        nothing else; its outputs are allocated in the call by the peer's own host code.
        NotCovered: work it does not do. ValueError, TypeError: as `check_arguments`.
    """

    name: str
    version: str
    launches: int
    covers: frozenset[str]
    positions: Literal["1d", "3d", "both"]
    rounding: Rounding
    prepare: Callable[..., Call]

    def call(self, *arguments: Any) -> Outputs:
        """Prepare and run once."""
        return self.prepare(*arguments)()


def available(name: str) -> str | None:
    """None if the peer can be run and timed here, else why not. ValueError: an unknown name."""
    try:
        peer(name)
    except PeerUnavailable as error:
        return str(error)
    if not torch.cuda.is_available():
        return f"{name}: its host code asks a CUDA or ROCm device for its size, and there is none"
    return None


def peer(name: str) -> Peer:
    """The named peer. PeerUnavailable: it cannot be loaded. ValueError: an unknown name."""
    if name not in NAMES:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(NAMES)}")
    if name == "flashinfer":
        raise PeerUnavailable(
            "flashinfer does not cover this work: no kernel of it does norm, rotary, gate and paged "
            "cache write by slots, and a chain of its parts does other work"
        )
    return _vllm() if name == "vllm" else _aiter()


# ---- vLLM

_VLLM_KERNEL = "vllm.model_executor.layers.fused_qk_norm_rope"
_VLLM_CACHE = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"


class _VllmPlatform:
    """The questions the cache writer asks vLLM's `current_platform`, answered as it would."""

    def is_rocm(self) -> bool:
        return torch.version.hip is not None

    def is_xpu(self) -> bool:
        return False


def _never_quantized(kv_cache_dtype: str) -> bool:
    if kv_cache_dtype != "auto":
        raise AssertionError("the adapter stores the cache's own dtype only")
    return False


def _vllm_imports() -> dict[str, dict[str, object]]:
    """What the two files import from vLLM itself: the real Triton, and names of the quantized paths.

    A cache of qkv's own dtype takes none of these paths; what stands for them has no behaviour.
    """
    import triton
    import triton.language as tl

    quantized = {"KVQuantMode": object, "is_quantized_kv_cache": _never_quantized}
    return {
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.platforms": {"current_platform": _VllmPlatform()},
        "vllm.utils.torch_utils": quantized,
        "vllm.v1.kv_cache_interface": quantized,
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "FP8_DTYPE": torch.float8_e4m3fn,
            "get_fp8_min_max": lambda: (float("nan"), float("nan")),
        },
    }


@lru_cache(maxsize=1)
def _vllm() -> Peer:
    modules = _load("vllm", [_VLLM_KERNEL, _VLLM_CACHE], _vllm_imports)
    fused = _function(modules[_VLLM_KERNEL], "fused_qk_rmsnorm_rope_gate", "q_gate cos_sin_cache")
    write = _function(modules[_VLLM_CACHE], "triton_reshape_and_cache_flash", "slot_mapping")
    mrope = {"mrope_section", "norm_beta"} <= inspect.signature(fused).parameters.keys()
    return Peer(
        name="vllm",
        version=_version("vllm", modules[_VLLM_KERNEL]),
        launches=2,
        covers=PARTS - {"v_out"} - (set() if mrope else {"mrope"}),
        positions="both" if mrope else "1d",
        rounding="storage",
        prepare=partial(_prepare_vllm, fused, write, mrope),
    )


def _prepare_vllm(
    fused: Callable[..., tuple[Tensor, Tensor, Tensor]],
    write: Callable[..., None],
    mrope: bool,
    *arguments: Any,
) -> Call:
    check_arguments(*arguments)
    (
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        slot_mapping,
        key_cache,
        value_cache,
        shape,
        _,
    ) = arguments
    sections: tuple[int, int, int] | None = None
    if positions.dim() == 2:
        _covers("vllm", mrope, "this version takes positions [T] only", positions)
        _covers("vllm", shape.mrope_interleaved, "sections are interleaved, not chunked", positions)
        sections = shape.mrope_section
    elif not mrope:
        _covers("vllm", positions.stride(0) == 1, "positions are contiguous", positions)
    _covers("vllm", slot_mapping.stride(0) == 1, "slot_mapping is contiguous", slot_mapping)
    _covers(
        "vllm",
        key_cache.stride() == value_cache.stride(),
        "both caches have the strides of the first",
        value_cache,
    )
    q_gate, k, v = qkv.split((2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
    if mrope:
        extra: dict[str, object] = {"norm_beta": 1.0, "mrope_section": sections}
    else:
        extra, q_weight, k_weight = {}, q_weight.float() + 1.0, k_weight.float() + 1.0
    v = v.unflatten(-1, (shape.kv_heads, shape.head_dim))
    scale = torch.ones(1, device=qkv.device)

    def call() -> Outputs:
        q, new_k, gate = fused(
            q_gate=q_gate, k=k, q_weight=q_weight, k_weight=k_weight, cos_sin_cache=cos_sin,
            positions=positions, eps=shape.eps, num_q_heads=shape.q_heads,
            num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, rotary_dim=shape.rotary_dim, **extra,
        )  # fmt: skip
        new_k = new_k.view(v.shape)
        write(new_k, v, key_cache, value_cache, slot_mapping, "auto", scale, scale)
        q = q.view(-1, shape.q_heads, shape.head_dim)
        return dict(q=q, k=new_k, gate=gate, key_cache=key_cache, value_cache=value_cache)

    return call


# ---- aiter

_AITER_OP = "aiter.ops.triton.rope.fused_qkv_split_qk_norm_rope_cache"
_AITER_KERNEL = "aiter.ops.triton._triton_kernels.rope.fused_qkv_split_qk_norm_rope_cache"
_AITER_FILES = [
    "aiter.ops.triton.utils.logger",
    "aiter.ops.triton._triton_kernels.rope.rope",
    "aiter.ops.triton.rope.rope",
    _AITER_KERNEL,
    _AITER_OP,
]


@lru_cache(maxsize=1)
def _aiter() -> Peer:
    modules = _load("aiter", _AITER_FILES, dict)
    op = _function(
        modules[_AITER_OP],
        "fused_qkv_split_qk_norm_rope_cache",
        "attn_output_gate gated_qkv_layout kv_cache_layout",
    )
    return Peer(
        name="aiter",
        version=_version("amd-aiter", modules[_AITER_KERNEL]),
        launches=1,
        covers=PARTS - {"mrope"},
        positions="1d",
        rounding="storage",
        prepare=partial(_prepare_aiter, op),
    )


def _prepare_aiter(
    op: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], *arguments: Any
) -> Call:
    check_arguments(*arguments)
    (
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        slot_mapping,
        key_cache,
        value_cache,
        shape,
        _,
    ) = arguments
    _covers("aiter", positions.dim() == 1, "it takes positions [T] only", positions)
    _covers("aiter", slot_mapping.stride(0) == 1, "slot_mapping is contiguous", slot_mapping)
    cos, sin = cos_sin.chunk(2, dim=-1)

    def call() -> Outputs:
        q, gate, k, v = op(
            qkv, q_weight, k_weight, cos, sin, positions, key_cache, value_cache, slot_mapping,
            qh=shape.q_heads, kvh=shape.kv_heads, head_dim=shape.head_dim, is_neox=True,
            reuse_freqs_front_part=True, attn_output_gate=True, eps=shape.eps,
            gated_qkv_layout="interleaved", kv_cache_layout="NHD",
        )  # fmt: skip
        gate = gate.view(-1, shape.q_size)
        return dict(q=q, k=k, v=v, gate=gate, key_cache=key_cache, value_cache=value_cache)

    return call


def _covers(name: str, holds: bool, what: str, tensor: Tensor) -> None:
    if not holds:
        raise NotCovered(
            f"{name} does not cover this: {what}, got {list(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )


# ---- Loading single source files


def _load(
    package: str,
    names: Sequence[str],
    imports: Callable[[], Mapping[str, Mapping[str, object]]],
) -> dict[str, ModuleType]:
    """Load modules of `package` from their files, in this order, each seeing those before it.

    imports: module -> names: all else of the package that they may import; anything else is an error,
    and never runs the package. `sys.modules` is left as it was.
    """
    folders = _folders(package)
    if not folders:
        raise PeerUnavailable(f"{package} is not installed")
    files = {}
    for name in names:
        inside = Path(*name.split(".")[1:]).with_suffix(".py")
        found = [folder / inside for folder in folders if (folder / inside).is_file()]
        if not found:
            raise PeerUnavailable(f"the installed {package} has no {inside.as_posix()}")
        files[name] = found[0]
    loaded: dict[str, ModuleType] = {}
    try:
        with _standing_in(package, imports()) as modules:
            for name, file in files.items():
                spec = importlib.util.spec_from_file_location(name, file)
                assert spec is not None
                assert spec.loader is not None
                modules[name] = loaded[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(loaded[name])
    except Exception as error:  # whatever another project's file does when it is loaded
        where = name if loaded else package
        raise PeerUnavailable(
            f"{where} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return loaded


def _folders(package: str) -> list[Path]:
    """Where the package's modules are, found without running it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # something without a spec is in sys.modules under this name
        return []
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


@contextmanager
def _standing_in(
    package: str, imports: Mapping[str, Mapping[str, object]]
) -> Iterator[dict[str, ModuleType]]:
    """`sys.modules` with nothing of `package` but `imports`, restored afterwards."""

    def ours(names: Iterable[str]) -> list[str]:
        return [name for name in names if name.split(".")[0] == package]

    before = {name: sys.modules.pop(name) for name in ours(list(sys.modules))}
    try:
        sys.modules[package] = ModuleType(
            package
        )  # not a package: nothing below it can be imported
        for name, content in imports.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(content)
        yield sys.modules
    finally:
        for name in ours(list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)


def _function(module: ModuleType, name: str, parameters: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise PeerUnavailable(f"{module.__name__} has no {name}")
    lacking = set(parameters.split()) - inspect.signature(function).parameters.keys()
    if lacking:
        raise PeerUnavailable(f"{module.__name__}.{name} takes no {', '.join(sorted(lacking))}")
    return function  # type: ignore[no-any-return]


def _version(distribution: str, kernel: ModuleType) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        assert kernel.__file__ is not None
        return f"source {sha256(Path(kernel.__file__).read_bytes()).hexdigest()[:12]}"


# ---- Equal work


@dataclass(frozen=True)
class Check:
    """One output against the reference: the bits, `worst_ulp`, and how far it may go (0: no bit)."""

    bits: Comparison
    worst_ulp: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.bits.equal or (self.bound > 0 and self.worst_ulp <= self.bound)


@dataclass(frozen=True)
class Work:
    """Whether a peer did the op's work on given inputs.

    equal: every part it covers is within its bound and nothing else was changed; only then its time
        counts. why: what is wrong, empty if equal.
    missing: parts of the op, on these inputs, that the peer leaves out; to be said beside its time.
    checks: output -> `Check`.
    """

    peer: str
    version: str
    equal: bool
    why: str
    missing: frozenset[str]
    checks: Mapping[str, Check]

    def __str__(self) -> str:
        text = f"{self.peer} {self.version}: " + ("equal work" if self.equal else self.why)
        return text + (f"; leaves out {', '.join(sorted(self.missing))}" if self.missing else "")


def equal_work(peer: Peer, arguments: Sequence[Any], bound: float = ULP_BOUND) -> Work:
    """Run the peer and the reference (with the peer's nearest rounding) on the same inputs.

    arguments: those of `reference.qkv_prologue`; none is changed. Both sides get caches of the given
    strides full of NaN, and allocations are filled with NaN, so that what a peer does not write is not
    equal by accident. bound: for q, k and the key cache, in ULP as `pair_ulps` counts them.
    ValueError, TypeError: as `check_arguments`.
    """
    check_arguments(*arguments)
    qkv, *_, positions = arguments[:5]
    shape: AttentionShape = arguments[8]
    numerics = arguments[9]
    contraction = "none" if peer.rounding == "per_op" else numerics.contraction
    declared = replace(numerics, rounding=peer.rounding, contraction=contraction)
    asked = PARTS if positions.dim() == 2 else PARTS - {"mrope"}
    missing = asked - peer.covers

    def report(why: str, checks: Mapping[str, Check] | None = None) -> Work:
        return Work(peer.name, peer.version, not why, why, missing, checks or {})

    def own(numerics: object) -> list[Any]:
        return [qkv.clone(), *arguments[1:6], *map(_empty_cache, arguments[6:8]), shape, numerics]

    ours, theirs = own(declared), own(numerics)
    with nan_allocations():
        try:
            actual = dict(peer.call(*theirs))
        except NotCovered as error:
            return report(str(error))
    q, k, v, gate = reference.qkv_prologue(*ours)
    expected = dict(q=q, k=k, v=v, gate=gate, key_cache=ours[6], value_cache=ours[7])
    part_of = {"q": "norm", "k": "k_out", "v": "v_out"}
    checks: dict[str, Check] = {}
    for name, right in expected.items():
        if part_of.get(name, name) not in peer.covers:
            continue
        if name not in actual:
            return report(f"it covers {name} and returns none", checks)
        rotated = shape.rotary_dim if name in ("q", "k", "key_cache") else 0
        bits = compare(actual[name], right)
        checks[name] = Check(
            bits,
            pair_ulps(actual[name], right, rotated) if bits.mismatches else 0.0,
            bound if rotated else 0,
        )
    faults = [
        f"{name} is {check.worst_ulp:g} ULP off ({check.bits})"
        for name, check in checks.items()
        if not check.passed
    ]
    if not compare(theirs[0], qkv).equal:
        faults.append("it changes qkv, so that a replay would do other work")
    return report("; ".join(faults), checks)


def _empty_cache(cache: Tensor) -> Tensor:
    """A cache of the same shape and strides, full of NaN."""
    extent = 1 + sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True))
    return cache.new_full((extent,), float("nan")).as_strided(cache.shape, cache.stride())


@contextmanager
def nan_allocations() -> Iterator[None]:
    """Let PyTorch fill what it allocates with NaN: otherwise a skipped output could hold old results."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
