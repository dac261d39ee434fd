"""An author who never saw our code: Hugging Face's own Qwen3.5 attention, up to its attention call.

It shares no line and no table with `kernels`: the angles come from the model's rotary module, which reads
the shape's ``rope_theta``, and ``cos_sin`` gives only its dtype.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape

PAIR_ULP_BOUND = 5.0
"""Bound on `compare.pair_ulps` between Hugging Face and any rounding policy with a right formula.

In ULP of the pair, rounding after the norm costs each rotated element at most 0.71, after each product
0.5 twice, after the sum 0.5: 2.21 on a side that rounds everywhere, 4.42 between two of them.
"""


def huggingface(
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
    """The prologue through transformers' ``Qwen3_5RMSNorm``, rotary embedding and its application.

    Arguments and results are those of `kernels.reference.qkv_prologue`; ``numerics`` is ignored, the bits
    are the library's. The cache write, which Hugging Face does not have, is plain indexing.

    Raises:
        ImportError: no transformers, or one without Qwen3.5.
        ValueError: chunked MRoPE sections, which Qwen3.5 does not have.
    """
    model = _modeling()
    tokens, dim = qkv.shape[0], shape.head_dim
    # As in Qwen3_5Attention.forward, with a batch of one.
    projected_q, projected_k, projected_v = qkv[None].split(
        (2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1
    )
    query, gate = torch.chunk(projected_q.view(1, tokens, -1, dim * 2), 2, dim=-1)
    gate = gate.reshape(1, tokens, -1)
    query = _norm(model, q_weight, shape)(query.view(1, tokens, -1, dim)).transpose(1, 2)
    key = _norm(model, k_weight, shape)(projected_k.view(1, tokens, -1, dim)).transpose(1, 2)
    cos, sin = rotary_embedding(positions, shape, cos_sin.dtype)
    query, key = model.apply_rotary_pos_emb(query, key, cos.to(qkv.device), sin.to(qkv.device))

    q = query[0].transpose(0, 1).to(qkv.dtype).contiguous()
    k = key[0].transpose(0, 1).to(qkv.dtype).contiguous()
    v = projected_v.reshape(tokens, shape.kv_heads, dim)
    written = slot_mapping >= 0
    slots, block_size = slot_mapping[written].long(), key_cache.shape[1]
    key_cache[slots // block_size, slots % block_size] = k[written]
    value_cache[slots // block_size, slots % block_size] = v[written]
    return q, k, v, gate[0]


def rotary_embedding(
    positions: Tensor, shape: AttentionShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Hugging Face's ``cos`` and ``sin``, each ``[1, T, rotary_dim]`` (both halves alike), on the CPU.

    There the project's table is computed too: the cosine of an accelerator may differ in its last bit,
    which is no fault of a kernel. Errors are those of `huggingface`.
    """
    rows = positions.cpu().long()[..., None, :]  # [3, 1, T], or [1, T] for three equal rows
    return _rotary(shape)(torch.empty(0, dtype=dtype), rows)


def _modeling() -> Any:
    try:
        # Its progress bars ask for ipywidgets, which no page here needs.
        warnings.filterwarnings("ignore", message="IProgress not found")
        from transformers.models.qwen3_5 import modeling_qwen3_5
    except ImportError as error:
        raise ImportError(
            f"the independent oracle needs transformers with Qwen3.5 (models.qwen3_5): {error}"
        ) from error
    return modeling_qwen3_5


def _norm(model: Any, weight: Tensor, shape: AttentionShape) -> Any:
    norm = model.Qwen3_5RMSNorm(shape.head_dim, eps=shape.eps)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


@cache
def _rotary(shape: AttentionShape) -> Any:
    if not shape.mrope_interleaved:
        raise ValueError(
            f"huggingface: Qwen3.5 interleaves its MRoPE sections, shape {shape.name!r} has chunks"
        )
    model = _modeling()
    config = model.Qwen3_5TextConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        head_dim=shape.head_dim,
        rms_norm_eps=shape.eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
            "mrope_section": list(shape.mrope_section),
            "mrope_interleaved": True,
        },
    )
    return model.Qwen3_5TextRotaryEmbedding(config)
