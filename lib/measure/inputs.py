"""Inputs of the prologue that leave a fault nowhere to hide.

Position rows differ in every token (equal rows cannot see an MRoPE fault), slots are distinct and random,
head rows differ in magnitude, and the caches start as NaNs of one bit pattern, so that a missing, misplaced
or doubled write shows as bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.reference import cos_sin_table
from fusion_evidence.kernels.shapes import AttentionShape

POISON = 0x7FE5
"""Bits of a quiet NaN, in bf16 as in fp16, which no implementation of the op computes."""

OUTPUTS = ("q", "k", "v", "gate", "key_cache", "value_cache")


@dataclass(frozen=True)
class Inputs:
    """The op's tensors under the op's own argument names."""

    qkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos_sin: Tensor
    positions: Tensor
    slot_mapping: Tensor
    key_cache: Tensor
    value_cache: Tensor

    def args(self) -> tuple[Tensor, ...]:
        """The tensors in the op's order; ``shape`` and ``numerics`` follow them in a call."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def clone(self) -> Inputs:
        """A deep copy with the same strides, offsets and holes; memory shared with nobody."""
        return Inputs(*(_copy(tensor) for tensor in self.args()))


def prologue_inputs(
    shape: AttentionShape,
    tokens: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    table: int = 4096,
    table_dtype: torch.dtype | None = None,
    random_angles: bool = False,
    position_dims: int = 2,
    index_dtype: torch.dtype = torch.int64,
    block_size: int = 16,
    blocks: int | None = None,
    padding: int = 0,
) -> Inputs:
    """Random inputs of ``tokens`` tokens, generated on ``device``; one seed, one result per device.

    Args:
        table: rows P of the cos/sin table; ``table_dtype`` defaults to ``dtype``.
        random_angles: any angle for any frequency. In a model's own table the slow half of them is
            nearly 0 and turns nothing that bf16 can show, whichever row it comes from; only an oracle
            that has its own table needs that one.
        position_dims: 2 for ``positions[3, T]``, 1 for ``positions[T]``.
        blocks: cache blocks N; by default about twice what the tokens fill.
        padding: how many tokens, chosen at random, get slot -1 (`kernels.eager` takes none).

    Raises:
        ValueError: fewer than 3 table rows, a cache too small for the tokens, more padding than tokens,
            or ``position_dims`` other than 1 and 2.
    """
    blocks = 2 * -(-tokens // block_size) + 1 if blocks is None else blocks
    if table < 3:
        raise ValueError(f"table: three distinct position rows need at least 3 rows, got {table}")
    if blocks * block_size < tokens:
        raise ValueError(f"blocks: {blocks} x {block_size} slots cannot hold {tokens} tokens")
    if not 0 <= padding <= tokens:
        raise ValueError(f"padding: expected 0 to {tokens} tokens, got {padding}")
    if position_dims not in (1, 2):
        raise ValueError(f"position_dims: expected 1 or 2, got {position_dims}")
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    def below(limit: int, *size: int) -> Tensor:
        return torch.randint(limit, size, generator=generator, device=device)

    heads = shape.qkv_width // shape.head_dim
    rows = normal(tokens, heads, shape.head_dim) * normal(tokens, heads, 1).exp()
    first = below(table, tokens)
    middle = (table + 1) // 2
    second = first + 1 + below(middle - 1, tokens)
    third = first + middle + below(table - middle, tokens)
    positions = torch.stack((first, second % table, third % table))
    slots = torch.randperm(blocks * block_size, generator=generator, device=device)[:tokens]
    if padding:
        slots[torch.randperm(tokens, generator=generator, device=device)[:padding]] = -1
    if random_angles:
        turn = torch.rand(table, shape.rotary_dim // 2, generator=generator, device=device)
        rotary = torch.cat(((math.tau * turn).cos(), (math.tau * turn).sin()), dim=-1)
    else:
        rotary = cos_sin_table(shape, table, torch.float32, device)
    cache = (blocks, block_size, shape.kv_heads, shape.head_dim)
    return Inputs(
        qkv=rows.view(tokens, shape.qkv_width).to(dtype),
        q_weight=(0.2 * normal(shape.head_dim)).to(dtype),
        k_weight=(0.2 * normal(shape.head_dim)).to(dtype),
        cos_sin=rotary.to(table_dtype or dtype),
        positions=(positions if position_dims == 2 else first).to(index_dtype),
        slot_mapping=slots.to(index_dtype),
        key_cache=poisoned(*cache, dtype=dtype, device=device),
        value_cache=poisoned(*cache, dtype=dtype, device=device),
    )


def poisoned(*size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A bf16 or fp16 tensor whose every element is `POISON`."""
    return torch.full(size, POISON, dtype=torch.int16, device=device).view(dtype)


def run(
    implementation: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    inputs: Inputs,
    shape: AttentionShape,
    numerics: Numerics,
    **options: Any,
) -> dict[str, Tensor]:
    """All six outputs, named as in `OUTPUTS`, of one call on a copy of ``inputs``.

    ``options`` go to the implementation (``launch=...`` of `kernels.fused`, for one).
    """
    copy = inputs.clone()
    results = implementation(*copy.args(), shape, numerics, **options)
    return dict(zip(OUTPUTS, (*results, copy.key_cache, copy.value_cache), strict=True))


def _copy(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
