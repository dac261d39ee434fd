"""Argument checks shared by every implementation of the prologue, made before anything is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import Numerics
from .shapes import AttentionShape

STORAGE_DTYPES = (torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def _expect_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        expected = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name}: expected dtype {expected}, got {tensor.dtype}")


def _expect_shape(name: str, tensor: Tensor, expected: tuple[int | None, ...]) -> None:
    fits = tensor.dim() == len(expected) and all(
        want is None or want == got for want, got in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        text = ", ".join("*" if want is None else str(want) for want in expected)
        raise ValueError(f"{name}: expected shape [{text}], got {list(tensor.shape)}")


def check_arguments(
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
) -> None:
    """Refuse what no implementation can compute: TypeError or ValueError naming the argument.

    Only metadata is read, never a value, so the check costs no synchronization and works while a graph
    captures. `check_values` looks at the values.
    """
    for reduction in numerics.reductions:
        if reduction.size != shape.head_dim:
            raise ValueError(
                f"numerics.reduction: expected a tree over head_dim={shape.head_dim} values, got "
                f"{reduction} over {reduction.size}"
            )
    _expect_dtype("qkv", qkv, STORAGE_DTYPES)
    _expect_shape("qkv", qkv, (None, shape.qkv_width))
    tokens = qkv.shape[0]
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        _expect_dtype(name, weight, (qkv.dtype,))
        _expect_shape(name, weight, (shape.head_dim,))
    _expect_dtype("cos_sin", cos_sin, tuple(dict.fromkeys((qkv.dtype, torch.float32))))
    _expect_shape("cos_sin", cos_sin, (None, shape.rotary_dim))
    _expect_dtype("positions", positions, INDEX_DTYPES)
    _expect_shape("positions", positions, (tokens,) if positions.dim() == 1 else (3, tokens))
    _expect_dtype("slot_mapping", slot_mapping, INDEX_DTYPES)
    _expect_shape("slot_mapping", slot_mapping, (tokens,))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        _expect_dtype(name, cache, (qkv.dtype,))
        _expect_shape(name, cache, (None, None, shape.kv_heads, shape.head_dim))
    if key_cache.shape != value_cache.shape:
        raise ValueError(
            f"value_cache: expected the key_cache's shape {list(key_cache.shape)}, "
            f"got {list(value_cache.shape)}"
        )
    if key_cache.shape[1] == 0:
        raise ValueError(
            f"key_cache: expected a block size of at least 1, got shape {list(key_cache.shape)}"
        )
    tensors = dict(
        qkv=qkv, q_weight=q_weight, k_weight=k_weight, cos_sin=cos_sin, positions=positions,
        slot_mapping=slot_mapping, key_cache=key_cache, value_cache=value_cache,
    )  # fmt: skip
    for name, tensor in tensors.items():
        if tensor.device != qkv.device:
            raise ValueError(f"{name}: expected device {qkv.device} (qkv's), got {tensor.device}")
        if (
            name not in ("positions", "slot_mapping")
            and tensor.shape[-1] > 1
            and tensor.stride(-1) != 1
        ):
            raise ValueError(f"{name}: expected unit last stride, got strides {tensor.stride()}")


def check_values(
    cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor, key_cache: Tensor
) -> None:
    """Refuse positions outside the table and slots outside the cache (ValueError); synchronizes.

    A slot below zero is padding and legal. Two tokens that write one slot are refused as well: which
    of them stays would depend on scheduling.
    """
    if positions.numel() == 0:
        return
    low, high, table = int(positions.min()), int(positions.max()), cos_sin.shape[0]
    if low < 0 or high >= table:
        raise ValueError(f"positions: expected values in [0, {table}), got {low} to {high}")
    slots = key_cache.shape[0] * key_cache.shape[1]
    if (top := int(slot_mapping.max())) >= slots:
        raise ValueError(
            f"slot_mapping: expected values below {slots} (blocks x block_size), got {top}"
        )
    written = slot_mapping[slot_mapping >= 0]
    if written.unique().numel() != written.numel():
        raise ValueError("slot_mapping: expected distinct slots, got one slot for several tokens")
