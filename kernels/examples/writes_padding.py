"""A wrong candidate: a padding token, whose slot is -1, writes a cache row.

Indexed from the end, as PyTorch does, -1 is the cache's very last row, which may be somebody's: a text goes
wrong long after, and only where a batch was padded. (In C the same slot is the row *before* the cache.)
"""

from __future__ import annotations

from torch import Tensor

from fusion_evidence.kernels.examples.plain import Outputs, prologue


def _write(rows: Tensor, slots: Tensor, cache: Tensor) -> None:
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows  # the fault: also where slot < 0


def qkv_prologue(*arguments: object) -> Outputs:
    """As `plain.qkv_prologue`, but for padding."""
    return prologue(*arguments, write=_write)  # type: ignore[arg-type]
