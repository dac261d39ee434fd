"""The fused prologue: the whole op of `reference.qkv_prologue` in one Triton launch, for any T.

One program is one wavefront and takes one token and ``HEADS`` heads, either query heads with their gate
or K heads with their V, so that it always has one stream to normalize and rotate and one to copy.

The bits are those of `Numerics` and of nothing else: a head row is held as ``[warps, lanes, elements]``,
neighbours are added in registers one by one as declared, and lanes by halves. Token count and heads per
program only choose which hardware thread does the work, so a token's bits depend on neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_arguments
from .numerics import Numerics, Reduction
from .older_triton import CAN_OVERLAP, end_recursion, launch_dependents, wait
from .older_triton import INTERPRETED as _INTERPRETED
from .shapes import AttentionShape

BAD_POSITION, BAD_SLOT = 1, 2
VECTOR = 8  # elements of 16 bits in the widest load


@triton.jit
def _rounded(x, dtype: tl.constexpr, spell_out: tl.constexpr):
    """fp32 ``x`` rounded to the nearest ``dtype`` value, ties to even, still in fp32."""
    if spell_out and dtype == tl.bfloat16:  # Triton's interpreter truncates fp32 -> bf16
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def _sum_neighbours(x, count: tl.constexpr, pairwise: tl.constexpr):
    """Sum the last dimension, of size ``count``, of ``x[a, b, c, count]``, in the declared order."""
    if count == 1:
        return tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2]))
    elif count == 2:
        a, b = tl.split(x)
        return a + b
    elif pairwise:
        pairs = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], count // 2, 2))
        a, b = tl.split(pairs)
        return _sum_neighbours(a + b, count // 2, pairwise)
    else:
        zero = tl.zeros((x.shape[0], x.shape[1], x.shape[2]), tl.float32)
        return _sum_in_sequence(zero, x, count, True)


@triton.jit
def _sum_in_sequence(total, x, count: tl.constexpr, first: tl.constexpr):
    """``total`` plus the ``count`` elements of the last dimension, from left to right."""
    if count == 2:
        a, b = tl.split(x)
        if first:
            return a + b
        else:
            return (total + a) + b
    else:
        halves = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, count // 2))
        left, right = tl.split(tl.permute(halves, (0, 1, 2, 4, 3)))
        total = _sum_in_sequence(total, left, count // 2, first)
        return _sum_in_sequence(total, right, count // 2, False)


@triton.jit
def _sum_halves(x, count: tl.constexpr):
    """Sum the last dimension of ``x[n, count]`` by halves: i with i + count/2, down to one."""
    if count == 1:
        return tl.reshape(x, (x.shape[0],))
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, count // 2)), (0, 2, 1)))
        return _sum_halves(a + b, count // 2)


end_recursion([_sum_neighbours, _sum_in_sequence, _sum_halves])


@triton.jit
def _tree_sum(x, TREE: tl.constexpr, SPELL_OUT: tl.constexpr):
    """Sum of a whole row ``x[head_dim]``, ``TREE`` = (warps, lanes, elements, order, side): see
    `numerics.Reduction`.

    ``side`` of the tree's lanes lie side by side in one hardware lane, which so reads 16 bytes at a time
    whatever the tree. Lanes added by halves then meet across hardware lanes first and inside them last.
    """
    WARPS: tl.constexpr = TREE[0]
    LANES: tl.constexpr = TREE[1]
    ELEMENTS: tl.constexpr = TREE[2]
    ORDER: tl.constexpr = TREE[3]
    SIDE: tl.constexpr = TREE[4]
    if ORDER == "strided":
        x = tl.permute(tl.reshape(x, (WARPS, ELEMENTS, LANES)), (0, 2, 1))
    rows = tl.reshape(x, (WARPS, LANES // SIDE, SIDE, ELEMENTS))
    lanes = _sum_neighbours(rows, ELEMENTS, ORDER == "pairwise")
    if SPELL_OUT:  # Triton's interpreter adds in NumPy's order
        groups = tl.reshape(tl.permute(lanes, (0, 2, 1)), (WARPS * SIDE, LANES // SIDE))
        sides = tl.reshape(_sum_halves(groups, LANES // SIDE), (WARPS, SIDE))
        warps = tl.reshape(_sum_halves(sides, SIDE), (1, WARPS))
        return tl.sum(_sum_halves(warps, WARPS), axis=0)
    else:  # one value a hardware lane: Triton adds them by halves, with shuffles
        return tl.sum(_sum_halves(tl.sum(lanes, axis=1), SIDE), axis=0)


@triton.jit
def _position_row(
    frequency, MROPE: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr,
):  # fmt: skip
    """`AttentionShape.position_rows` of each frequency."""
    if MROPE == "interleaved":
        row = frequency % 3
        inside = ((row == 1) & (frequency < 3 * SECTION_H)) | (
            (row == 2) & (frequency < 3 * SECTION_W)
        )
        return tl.where(inside, row, 0)
    elif MROPE == "chunked":
        past_t = (frequency >= SECTION_T).to(tl.int32)
        return past_t + (frequency >= SECTION_T + SECTION_H).to(tl.int32)
    else:
        return frequency * 0


@triton.jit
def _rotate(
    y, partner, cos, sin, ROUND_PRODUCTS: tl.constexpr, CONTRACTION: tl.constexpr, DTYPE: tl.constexpr,
    SPELL_OUT: tl.constexpr,
):  # fmt: skip
    """``y * cos + partner * sin`` in fp32, rounded and contracted as declared."""
    if ROUND_PRODUCTS:
        return _rounded(y * cos, DTYPE, SPELL_OUT) + _rounded(partner * sin, DTYPE, SPELL_OUT)
    elif CONTRACTION == "cos":
        return tl.fma(y, cos, partner * sin)
    elif CONTRACTION == "sin":
        return tl.fma(partner, sin, y * cos)
    else:
        return y * cos + partner * sin


@triton.jit
def _normalize(
    x, scale, weight, ROUNDING: tl.constexpr, DTYPE: tl.constexpr, SPELL_OUT: tl.constexpr
):
    y = x.to(tl.float32) * scale * (1.0 + weight.to(tl.float32))
    if ROUNDING != "fp32_through":
        y = _rounded(y, DTYPE, SPELL_OUT)
    return y


@triton.jit
def _stored(z, DTYPE: tl.constexpr, SPELL_OUT: tl.constexpr):
    if SPELL_OUT:
        z = _rounded(z, DTYPE, SPELL_OUT)
    return z.to(DTYPE)


@triton.jit
def _prologue(
    qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, q_out, k_out, v_out, gate_out,
    key_cache, value_cache, marker, errors,
    qkv_stride, cos_sin_stride, position_row, position_stride, slot_stride,
    key_block, key_slot, key_head, value_block, value_slot, value_head,
    block_size, table_rows, cache_slots, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    MROPE: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    ROUNDING: tl.constexpr, CONTRACTION: tl.constexpr, ROUND_PRODUCTS: tl.constexpr,
    Q_TREE: tl.constexpr, K_TREE: tl.constexpr, ONE_TREE: tl.constexpr, HEADS: tl.constexpr,
    DTYPE: tl.constexpr, SPELL_OUT: tl.constexpr, MARK: tl.constexpr, CHECK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # K heads first: they store twice as much as query heads, and what takes longest should not start last.
    Q_GROUPS: tl.constexpr = Q_HEADS // HEADS
    K_GROUPS: tl.constexpr = KV_HEADS // HEADS
    program = tl.program_id(0)
    after = program - tl.num_programs(0) // (Q_GROUPS + K_GROUPS) * K_GROUPS
    query = after >= 0
    token = tl.where(query, after // Q_GROUPS, program // K_GROUPS).to(tl.int64)
    head = tl.where(query, after % Q_GROUPS, program % K_GROUPS) * HEADS
    if OVERLAP:
        launch_dependents()

    # Every load is issued before the first use of one, those that others wait for before all: the
    # longest chain is position -> table row -> rotation. A lane takes one frequency and its position.
    lane = tl.arange(0, triton.next_power_of_2(HALF))
    turns = lane < HALF
    axis = _position_row(lane, MROPE, SECTION_T, SECTION_H, SECTION_W)
    position = tl.load(positions + axis.to(tl.int64) * position_row + token * position_stride)
    slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)

    # A query head is normalized and its gate copied; a K head is normalized and its V copied.
    row = qkv + token * qkv_stride
    if query:
        source, step, weight = row + head * (2 * DIM), 2 * DIM, q_weight
        copied = source + DIM
        out, copied_out = (
            q_out + (token * Q_HEADS + head) * DIM,
            gate_out + (token * Q_HEADS + head) * DIM,
        )
    else:
        source, step, weight = row + (2 * Q_HEADS + head) * DIM, DIM, k_weight
        copied = source + KV_HEADS * DIM
        out, copied_out = (
            k_out + (token * KV_HEADS + head) * DIM,
            v_out + (token * KV_HEADS + head) * DIM,
        )
    column = tl.arange(0, DIM)
    passes = column >= 2 * HALF
    w = tl.load(weight + column)
    w1 = tl.load(weight + lane, mask=turns, other=0.0)
    w2 = tl.load(weight + HALF + lane, mask=turns, other=0.0)
    if OVERLAP:
        wait()
    # The rotary columns are loaded twice, the second time one pair a lane: same cache lines, no wait.
    xs, firsts, seconds, copies = (), (), (), ()
    for i in tl.static_range(HEADS):
        xs += (tl.load(source + i * step + column),)
        firsts += (tl.load(source + i * step + lane, mask=turns, other=0.0),)
        seconds += (tl.load(source + i * step + HALF + lane, mask=turns, other=0.0),)
        copies += (tl.load(copied + i * step + column),)

    if CHECK:
        outside = (position < 0) | (position >= table_rows)
        if tl.max(outside.to(tl.int32), axis=0) > 0:
            tl.atomic_or(errors, 1)
        position = tl.where(outside, 0, position)
        if slot >= cache_slots:
            tl.atomic_or(errors, 2)
            slot = slot * 0 - 1
    if MARK:
        if program == 0:
            tl.atomic_add(
                marker, 1, sem="relaxed"
            )  # nobody waits for it, as for a load and a store

    entry = cos_sin + position.to(tl.int64) * cos_sin_stride + lane
    cos = tl.load(entry, mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(entry + HALF, mask=turns, other=0.0).to(tl.float32)
    block, place = slot // block_size, slot % block_size
    key = key_cache + block * key_block + place * key_slot
    value = value_cache + block * value_block + place * value_slot
    # Copies leave first: they wait for no arithmetic.
    for i in tl.static_range(HEADS):
        tl.store(copied_out + i * DIM + column, copies[i])
        if (slot >= 0) & (not query):
            tl.store(value + (head + i) * value_head + column, copies[i])
    for i in tl.static_range(HEADS):
        x = xs[i].to(tl.float32)
        if ONE_TREE:  # noqa: SIM114 - decided when compiled, the other one on the device
            total = _tree_sum(x * x, Q_TREE, SPELL_OUT)
        elif query:
            total = _tree_sum(x * x, Q_TREE, SPELL_OUT)
        else:
            total = _tree_sum(x * x, K_TREE, SPELL_OUT)
        scale = tl.rsqrt(total * (1.0 / DIM) + eps)
        y = _stored(_normalize(x, scale, w, ROUNDING, DTYPE, SPELL_OUT), DTYPE, SPELL_OUT)
        y1 = _normalize(firsts[i], scale, w1, ROUNDING, DTYPE, SPELL_OUT)
        y2 = _normalize(seconds[i], scale, w2, ROUNDING, DTYPE, SPELL_OUT)
        z1 = _rotate(y1, y2, cos, -sin, ROUND_PRODUCTS, CONTRACTION, DTYPE, SPELL_OUT)
        z2 = _rotate(y2, y1, cos, sin, ROUND_PRODUCTS, CONTRACTION, DTYPE, SPELL_OUT)
        z1, z2 = _stored(z1, DTYPE, SPELL_OUT), _stored(z2, DTYPE, SPELL_OUT)
        tl.store(out + i * DIM + column, y, mask=passes)
        tl.store(out + i * DIM + lane, z1, mask=turns)
        tl.store(out + i * DIM + HALF + lane, z2, mask=turns)
        if (slot >= 0) & (not query):
            cached = key + (head + i) * key_head
            tl.store(cached + column, y, mask=passes)
            tl.store(cached + lane, z1, mask=turns)
            tl.store(cached + HALF + lane, z2, mask=turns)


@dataclass(frozen=True)
class Launch:
    """How a launch is laid out. It decides speed and no bit.

    heads: heads a program takes, one after the other; divides both head counts.
    overlap: programmatic dependent launch (NVIDIA, compute capability 9 and up): positions, slots, table
        and norm weights are read while the kernel before still runs, ``qkv`` after it has finished. Only
        for callers who know that no kernel since the last launch without overlap writes those four.
    """

    heads: int = 1
    overlap: bool = False


def choose_launch(tokens: int, shape: AttentionShape) -> Launch:
    """Few tokens: one head a program, so that as many multiprocessors as possible share the latency.
    Many: several heads a program, which share one token's table row and the cost of a launch.
    The thresholds were measured, see ``kernels/NOTES.md``."""
    most = 1 if tokens < 64 else 2 if tokens < 3072 else 4
    return Launch(heads=math.gcd(shape.q_heads, shape.kv_heads, most))


def qkv_prologue(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    shape: AttentionShape,
    numerics: Numerics,
    *,
    marker: Tensor | None = None,
    errors: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same contract as `reference.qkv_prologue`, in one launch, plus:

    Args:
        marker: ``[1]`` int64 on the device; the kernel itself adds one for every run, so that each
            replay of a captured graph counts. Calls that share a marker must not overlap.
        errors: ``[1]`` int32 on the device. With it, positions outside the table and slots beyond the
            cache are not followed and set `BAD_POSITION` / `BAD_SLOT`, also during replay;
            `raise_errors` reads it. Without it they are undefined behaviour, as in any kernel.
        launch: overrides `choose_launch`.
    """
    check_arguments(
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        slot_mapping,
        key_cache,
        value_cache,
        shape,
        numerics,
    )
    _check_flag("marker", marker, torch.int64, qkv)
    _check_flag("errors", errors, torch.int32, qkv)
    if qkv.device.type == "cpu" and not _INTERPRETED:
        raise RuntimeError(
            "on a CPU the kernel runs in Triton's interpreter, to be chosen before Triton is imported: "
            "import fusion_evidence.kernels before torch.compile is used, or set TRITON_INTERPRET=1"
        )
    if qkv.is_cuda and qkv.device.index != torch.cuda.current_device():
        raise ValueError(  # Triton launches on the current device
            f"qkv: expected the current device cuda:{torch.cuda.current_device()}, got {qkv.device}"
        )
    tokens, dim = qkv.shape[0], shape.head_dim
    q = qkv.new_empty(tokens, shape.q_heads, dim)
    k = qkv.new_empty(tokens, shape.kv_heads, dim)
    v = qkv.new_empty(tokens, shape.kv_heads, dim)
    gate = qkv.new_empty(tokens, shape.q_size)
    if tokens == 0:
        return q, k, v, gate
    launch = launch or choose_launch(tokens, shape)
    if shape.q_heads % launch.heads or shape.kv_heads % launch.heads:
        raise ValueError(
            f"launch.heads={launch.heads} must divide q_heads={shape.q_heads} and "
            f"kv_heads={shape.kv_heads}"
        )
    if launch.overlap and not CAN_OVERLAP:
        raise ValueError(f"launch.overlap: triton {triton.__version__} cannot; 3.5 or newer can")
    _prologue[(tokens * (shape.q_heads + shape.kv_heads) // launch.heads,)](
        qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, q, k, v, gate, key_cache, value_cache,
        qkv if marker is None else marker, qkv if errors is None else errors,
        qkv.stride(0), cos_sin.stride(0), positions.stride(0) if positions.dim() == 2 else 0,
        positions.stride(-1), slot_mapping.stride(0),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
        key_cache.shape[1], cos_sin.shape[0], key_cache.shape[0] * key_cache.shape[1], shape.eps,
        **_constants(shape, numerics, qkv.dtype, cos_sin.dtype, positions.dim()),
        HEADS=launch.heads, MARK=marker is not None, CHECK=errors is not None,
        OVERLAP=launch.overlap, num_warps=1, enable_fp_fusion=False,
        **({"launch_pdl": True} if launch.overlap else {}),
    )  # fmt: skip
    return q, k, v, gate


def raise_errors(errors: Tensor) -> None:
    """Read an ``errors`` flag (synchronizes) and raise ValueError for what the kernel met."""
    flag = int(errors)
    if flag & BAD_POSITION:
        raise ValueError("positions: a value outside the cos/sin table reached the kernel")
    if flag & BAD_SLOT:
        raise ValueError("slot_mapping: a slot beyond the cache reached the kernel")


def _check_flag(name: str, flag: Tensor | None, dtype: torch.dtype, qkv: Tensor) -> None:
    if flag is not None and (flag.dtype, flag.numel(), flag.device) != (dtype, 1, qkv.device):
        raise ValueError(
            f"{name}: expected one {dtype} element on {qkv.device}, got {flag.numel()} of {flag.dtype} "
            f"on {flag.device}"
        )


def _constants(
    shape: AttentionShape,
    numerics: Numerics,
    dtype: torch.dtype,
    table: torch.dtype,
    position_dims: int,
) -> dict[str, Any]:
    mrope = "interleaved" if shape.mrope_interleaved else "chunked"
    section_t, section_h, section_w = shape.mrope_section
    q_reduction, k_reduction = numerics.reductions
    return dict(
        Q_HEADS=shape.q_heads, KV_HEADS=shape.kv_heads, DIM=shape.head_dim, HALF=shape.rotary_dim // 2,
        MROPE="none" if position_dims == 1 else mrope,
        SECTION_T=section_t, SECTION_H=section_h, SECTION_W=section_w,
        ROUNDING=numerics.rounding, CONTRACTION=numerics.contraction,
        # Eager PyTorch rounds a product to the promoted dtype of its factors.
        ROUND_PRODUCTS=numerics.rounding == "per_op" and table == dtype,
        Q_TREE=_tree(q_reduction), K_TREE=_tree(k_reduction),
        ONE_TREE=q_reduction == k_reduction,
        DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float16,
        SPELL_OUT=_INTERPRETED,
    )  # fmt: skip


def _tree(reduction: Reduction) -> tuple[int, int, int, str, int]:
    """What `_tree_sum` takes: the tree, and how many of its lanes one hardware lane holds."""
    elements = reduction.elements
    side = 1 if reduction.order == "strided" else min(reduction.lanes, max(1, VECTOR // elements))
    return reduction.warps, reduction.lanes, elements, reduction.order, side
