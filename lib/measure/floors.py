"""What no kernel can beat: an empty kernel, and the fastest copy of the same bytes.

A copy is a floor only if nobody has a faster one, so there are several candidates: time them all
and take the best. The kernels assume no wavefront width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusion_evidence.kernels  # noqa: F401  chooses Triton's interpreter where there is no device

try:
    import triton
    import triton.language as tl
except ImportError:  # reported when a kernel is asked for
    triton = None

_jit: Any = triton.jit if triton else lambda function: function

# Block in bytes, bytes of an element, warps of a program, programs for each multiprocessor (None:
# one program for each block). Small blocks suit one token, large and persistent ones thousands.
_CONFIGURATIONS = (
    (1024, 8, 1, None),
    (2048, 8, 2, None),
    (4096, 8, 4, None),
    (4096, 4, 4, None),
    (8192, 8, 4, None),
    (16384, 8, 8, None),
    (8192, 8, 4, 8),
    (16384, 8, 8, 4),
)
_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_VECTOR = 16  # bytes that one lane moves with one instruction, at most


@_jit
def _empty() -> None:
    pass


@_jit
def _copy(  # type: ignore[no-untyped-def]
    source,
    target,
    source_vectors,
    target_vectors,
    blocks,
    PER_VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    # Sizes arrive in vectors: multiplied here, the compiler knows that they are multiples of one.
    source_size = source_vectors * PER_VECTOR
    target_size = target_vectors * PER_VECTOR
    if PERSISTENT:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            _copy_block(source, target, source_size, target_size, block, BLOCK)
    else:
        _copy_block(source, target, source_size, target_size, tl.program_id(0), BLOCK)


@_jit
def _copy_block(  # type: ignore[no-untyped-def]
    source, target, source_size, target_size, block, BLOCK: tl.constexpr
):
    # The target is the source again and again: round by round, each of whole blocks but the last.
    round_blocks = tl.cdiv(source_size, BLOCK)
    start = (block // round_blocks).to(tl.int64) * source_size
    inside = (block % round_blocks) * BLOCK + tl.arange(0, BLOCK)
    here = (inside < source_size) & (start + inside < target_size)
    values = tl.load(source + inside, mask=here)
    tl.store(target + start + inside, values, mask=here)


@_jit
def _chain(  # type: ignore[no-untyped-def]
    positions, position_row, table, out, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0) // PROGRAMS
    lane = tl.arange(0, WIDTH)
    position = tl.load(positions + (lane % 3) * position_row + token)
    entry = table + position * (2 * WIDTH) + lane
    total = tl.load(entry).to(tl.float32) + tl.load(entry + WIDTH).to(tl.float32)
    tl.store(out + tl.program_id(0) * WIDTH + lane, total)


def chain_kernel(positions: Tensor, table: Tensor, programs_each: int) -> Callable[[], object]:
    """The longest chain of dependent memory accesses in the op, and nothing else.

    Each of ``programs_each`` programs a token reads its position (rows T, H, W in turn), the cos/sin row
    there, and writes one row of sums: no kernel that looks its rotation up can be faster than that.
    With a table of more than twice the L2 cache the row comes from memory, the position from L2.

    positions: int64 [3, T], unit last stride; table: [P, R], R / 2 a power of two.
    ValueError: tensors that are not as said. RuntimeError: Triton is not installed.
    """
    _needs_triton()
    width = table.shape[1] // 2
    if (
        positions.dim() != 2
        or positions.stride(1) != 1
        or not table.is_contiguous()
        or width & (width - 1)
    ):
        raise ValueError(
            "chain_kernel needs positions [3, T] and a contiguous table [P, R], R/2 a power of two"
        )
    programs = positions.shape[1] * programs_each
    out = table.new_empty(programs * width, dtype=torch.float32)
    return partial(
        _chain[(programs,)],
        positions,
        positions.stride(0),
        table,
        out,
        programs_each,
        width,
        num_warps=1,
    )


def empty_kernel(programs: int = 1, num_warps: int = 1) -> Callable[[], object]:
    """A launch of `programs` programs of `num_warps` warps that do nothing: the launch floor.

    It grows with the number of programs: give it the grid of the kernel to compare with.
    RuntimeError: Triton is not installed.
    """
    _needs_triton()
    return partial(_empty[(programs,)], num_warps=num_warps)


def copy_candidates(source: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    """Several ways to fill `target` with `source`: read and written bytes are their sizes.

    source, target: uint8 [bytes], contiguous, on one device, target at least as long as source;
    where it is longer the source starts again (what is read twice comes from a cache). Sizes and
    addresses that are multiples of 16 bytes allow the widest accesses: round up to them.
    Name -> a call that does it. The first, `memcpy`, is the runtime's own copy; the others
    are Triton kernels, `triton-<block bytes>-int<bits>-<warps>w`, `-persistent` if its programs
    stride over the blocks.
    ValueError: tensors that are not as said. RuntimeError: Triton is not installed.
    """
    _needs_triton()
    for name, tensor in (("source", source), ("target", target)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous 1-D uint8 tensor: got {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if source.device != target.device:
        raise ValueError(f"source is on {source.device}, target on {target.device}")
    if not 0 < source.numel() <= target.numel() < 1 << 31:
        raise ValueError(
            "0 < source bytes <= target bytes < 2 GiB needed: "
            f"got {source.numel()} and {target.numel()}"
        )
    candidates: dict[str, Callable[[], object]] = {"memcpy": partial(_memcpy, source, target)}
    for configuration in _CONFIGURATIONS:
        name, call = _triton_copy(source, target, *configuration)
        candidates[name] = call  # narrow elements may make two configurations one
    return candidates


def _memcpy(source: Tensor, target: Tensor) -> None:
    size = source.numel()
    for start in range(0, target.numel(), size):
        part = target[start : start + size]
        part.copy_(source[: part.numel()])


def _triton_copy(
    source: Tensor,
    target: Tensor,
    block_bytes: int,
    width: int,
    num_warps: int,
    programs_each: int | None,
) -> tuple[str, Callable[[], object]]:
    places = (source.numel(), target.numel(), source.data_ptr(), target.data_ptr())
    vector = next(v for v in (_VECTOR, 8, 4, 2, 1) if all(p % v == 0 for p in places))
    width = min(width, vector)
    block, per_vector = block_bytes // width, vector // width
    rounds, rest = divmod(target.numel(), source.numel())
    blocks = rounds * triton.cdiv(source.numel(), block_bytes) + triton.cdiv(rest, block_bytes)
    programs = blocks
    if programs_each is not None:
        programs = min(blocks, programs_each * _multiprocessors(source.device))
    call = partial(
        _copy[(programs,)],
        source.view(_ELEMENTS[width]),
        target.view(_ELEMENTS[width]),
        source.numel() // vector,
        target.numel() // vector,
        blocks,
        PER_VECTOR=per_vector,
        BLOCK=block,
        PERSISTENT=programs_each is not None,
        num_warps=num_warps,
    )
    suffix = "" if programs_each is None else "-persistent"
    return f"triton-{block_bytes}-int{8 * width}-{num_warps}w{suffix}", call


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # in the interpreter: enough for its programs to go round
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _needs_triton() -> None:
    if triton is None:
        raise RuntimeError("the launch and copy floors are Triton kernels: install triton")
