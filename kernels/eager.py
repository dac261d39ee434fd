"""The prologue as a model author writes it: PyTorch operations, rounded where PyTorch rounds.

Written after vLLM's native path (``GemmaRMSNorm``, ``MRotaryEmbedding``): what runs eagerly where no
fused kernel is taken, and what ``torch.compile`` fuses into the baseline that users have. It takes
`Numerics` like every implementation and ignores it: its bits are the framework's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_arguments
from .numerics import Numerics
from .shapes import AttentionShape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma-style RMSNorm over the last dimension: fp32 inside, factor ``1 + weight``, one cast out."""
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (values * (1.0 + weight.float())).to(x.dtype)


def mrope_cos_sin(
    cos_sin: Tensor, positions: Tensor, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin`` ``[T, rotary_dim/2]``; with ``positions[3, T]`` the three rows are merged."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    if positions.dim() == 1:
        return cos, sin
    return _merge_rows(cos, shape), _merge_rows(sin, shape)


def _merge_rows(rows: Tensor, shape: AttentionShape) -> Tensor:
    t, h, w = shape.mrope_section
    if not shape.mrope_interleaved:
        return torch.cat([part[i] for i, part in enumerate(rows.split((t, h, w), dim=-1))], dim=-1)
    merged = rows[0].clone()
    merged[..., 1 : 3 * h : 3] = rows[1, ..., 1 : 3 * h : 3]
    merged[..., 2 : 3 * w : 3] = rows[2, ..., 2 : 3 * w : 3]
    return merged


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """Partial NeoX rotation of ``x[T, heads, D]``: the first ``rotary_dim`` elements, in two halves."""
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    rotated = torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def outputs(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    shape: AttentionShape,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q ``[T, Hq, D]``, k, v ``[T, Hk, D]`` and gate ``[T, Hq, D]``, no cache written; v and gate are views
    of ``qkv``."""
    tokens, dim = qkv.shape[0], shape.head_dim
    q_gate, k, v = qkv.split((2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
    q, gate = q_gate.view(tokens, shape.q_heads, 2 * dim).chunk(2, dim=-1)
    k, v = k.view(tokens, shape.kv_heads, dim), v.view(tokens, shape.kv_heads, dim)
    cos, sin = mrope_cos_sin(cos_sin, positions, shape)
    q = rotate(rms_norm(q, q_weight, shape.eps), cos, sin, shape.rotary_dim)
    k = rotate(rms_norm(k, k_weight, shape.eps), cos, sin, shape.rotary_dim)
    return q, k, v, gate


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same contract as `reference.qkv_prologue`, except that every slot must be >= 0.

    Skipping padding in plain PyTorch needs a data-dependent shape, which neither a CUDA graph nor a
    static compile can hold; a service keeps padding out of this path or uses an opaque cache write.
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
    q, k, v, gate = outputs(qkv, q_weight, k_weight, cos_sin, positions, shape)
    block, offset = slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1]
    # Indexing the cache argument itself, never a view of it: Inductor writes this in place, and
    # copies the whole cache, there and back, for `cache.view(-1, H, D).index_copy_(...)`.
    key_cache[block, offset] = k
    value_cache[block, offset] = v
    return q, k, v.contiguous(), gate.reshape(qkv.shape[0], shape.q_size)
