"""What no kernel can beat: an empty kernel, and the fastest copy of the same bytes.

A copy is a floor only if nobody has a faster one, so there are several candidates: time them all
and take the best. Between copy and op stands `accesses`, the op's accesses, laid out alike, without its
arithmetic. The kernels assume no wavefront width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusion_evidence.kernels  # noqa: F401  chooses Triton's interpreter where there is no device
from fusion_evidence.kernels.shapes import AttentionShape

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
def _accesses(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos_sin, positions, slots, q_out, k_out, v_out, gate_out, keys, values,
    width, table_width, position_row,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    # Laid out as the fused kernel: K heads first, HEADS of them a program, every load before the stores.
    Q_GROUPS: tl.constexpr = Q_HEADS // HEADS
    K_GROUPS: tl.constexpr = KV_HEADS // HEADS
    program = tl.program_id(0)
    after = program - tl.num_programs(0) // (Q_GROUPS + K_GROUPS) * K_GROUPS
    query = after >= 0
    token = tl.where(query, after // Q_GROUPS, program // K_GROUPS).to(tl.int64)
    head = tl.where(query, after % Q_GROUPS, program % K_GROUPS) * HEADS
    lane, column = tl.arange(0, HALF), tl.arange(0, DIM)
    position = tl.load(positions + (lane % 3) * position_row + token)
    slot = tl.load(slots + token)
    row = qkv + token * width
    if query:
        source, step, weight = row + head * (2 * DIM), 2 * DIM, q_weight
        copied = source + DIM
        place = (token * Q_HEADS + head) * DIM
        out, copied_out = q_out + place, gate_out + place
    else:
        source, step, weight = row + (2 * Q_HEADS + head) * DIM, DIM, k_weight
        copied = source + KV_HEADS * DIM
        place = (token * KV_HEADS + head) * DIM
        out, copied_out = k_out + place, v_out + place
    w = tl.load(weight + column).to(tl.float32)
    xs, firsts, copies = (), (), ()
    for i in tl.static_range(HEADS):
        xs += (tl.load(source + i * step + column),)
        firsts += (tl.load(source + i * step + lane),)
        copies += (tl.load(copied + i * step + column),)
    entry = cos_sin + position * table_width + lane
    looked_up = tl.load(entry).to(tl.float32) + tl.load(entry + HALF).to(tl.float32)
    cached = (slot * KV_HEADS + head) * DIM
    for i in tl.static_range(HEADS):
        tl.store(copied_out + i * DIM + column, copies[i])
        if (slot >= 0) & (not query):
            tl.store(values + cached + i * DIM + column, copies[i])
    for i in tl.static_range(HEADS):
        y = xs[i].to(tl.float32) + w
        turned = firsts[i].to(tl.float32) + looked_up
        tl.store(out + i * DIM + column, y, mask=column >= 2 * HALF)
        tl.store(out + i * DIM + lane, turned)
        tl.store(out + i * DIM + HALF + lane, turned)
        if (slot >= 0) & (not query):
            key = keys + cached + i * DIM
            tl.store(key + column, y, mask=column >= 2 * HALF)
            tl.store(key + lane, turned)
            tl.store(key + HALF + lane, turned)


def accesses(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    shape: AttentionShape,
    _numerics: object = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every load and store of the op, each waiting for what it needs, and no arithmetic to speak of.

    Called like the op, and laid out as it is by `fused.choose_launch`: one wavefront reads its heads' rows,
    their pair columns, weight, slot, and the table entries that its position names, and writes what the op
    writes; norm, reduction and rotation are left out, so the numbers written mean nothing (V and gate are
    copies and right). What the op takes above this is arithmetic; what this takes above a copy is the
    price of looking places up.

    ValueError: tensors that are not contiguous, positions that are not [3, T], rotary_dim / 2 that is
    no power of two. RuntimeError: Triton is not installed.
    """
    _needs_triton()
    half = shape.rotary_dim // 2
    contiguous = all(t.is_contiguous() for t in (qkv, slot_mapping, key_cache, value_cache))
    if positions.dim() != 2 or positions.stride(1) != 1 or not contiguous or half & (half - 1):
        raise ValueError(
            "accesses needs contiguous tensors, positions [3, T] and a power of two as rotary_dim / 2"
        )
    from fusion_evidence.kernels.fused import choose_launch  # it cannot be imported without Triton

    tokens = qkv.shape[0]
    q = qkv.new_empty(tokens, shape.q_heads, shape.head_dim)
    k, v = (qkv.new_empty(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
    gate = qkv.new_empty(tokens, shape.q_size)
    heads = choose_launch(tokens, shape).heads
    _accesses[(tokens * (shape.q_heads + shape.kv_heads) // heads,)](
        *(qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, q, k, v, gate),
        *(key_cache, value_cache, qkv.stride(0), cos_sin.stride(0), positions.stride(0)),
        *(shape.q_heads, shape.kv_heads, shape.head_dim, half, heads),
        num_warps=1,
    )
    return q, k, v, gate


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
