"""A right candidate, to start from: PyTorch for the arithmetic, one small Triton kernel for the caches.

It ignores the numerics it is asked for and has bits of its own, those of eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from fusion_evidence.kernels import eager
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _write(
    rows, slots, cache, row_stride, slot_stride, block_stride, place_stride, head_stride, block_size,
    DIM: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, DIM)
        row = tl.load(rows + token * row_stride + head * DIM + column)
        place = slot // block_size * block_stride + slot % block_size * place_stride
        tl.store(cache + place + head * head_stride + column, row)


def write(rows: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Write ``rows[T, H, D]`` to their slots; nothing for a negative one, and waiting for nothing."""
    tokens, heads, dim = rows.shape
    if tokens:
        rows = rows.contiguous()
        _write[(tokens, heads)](
            rows, slots, cache, rows.stride(0), slots.stride(0), *cache.stride()[:3], cache.shape[1],
            DIM=dim,
        )  # fmt: skip


def prologue(
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
    norm: Callable[[Tensor, Tensor, float], Tensor] = eager.rms_norm,
    rotate: Callable[[Tensor, Tensor, Tensor, int], Tensor] = eager.rotate,
    write: Callable[[Tensor, Tensor, Tensor], None] = write,
) -> Outputs:
    """The op out of three parts that can be exchanged."""
    q_gate, k, v = qkv.split((2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
    q, gate = q_gate.unflatten(-1, (shape.q_heads, 2, shape.head_dim)).unbind(2)
    k, v = (part.unflatten(-1, (shape.kv_heads, shape.head_dim)) for part in (k, v))
    cos, sin = eager.mrope_cos_sin(cos_sin, positions, shape)
    q = rotate(norm(q, q_weight, shape.eps), cos, sin, shape.rotary_dim)
    k = rotate(norm(k, k_weight, shape.eps), cos, sin, shape.rotary_dim)
    write(k, slot_mapping, key_cache)
    write(v, slot_mapping, value_cache)
    return q, k, v.contiguous(), gate.reshape(qkv.shape[0], shape.q_size)


def qkv_prologue(*arguments: object) -> Outputs:
    """Same contract as `reference.qkv_prologue`, but for the bits."""
    return prologue(*arguments)  # type: ignore[arg-type]
