"""A wrong candidate: it rotates every column, where those from ``rotary_dim`` on must pass.

A kernel written for full rotary embedding and given a partial table takes the same angles again for each
further ``rotary_dim`` columns: Q and K keep their length, and attention still looks like attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_evidence.kernels import eager
from fusion_evidence.kernels.examples.plain import Outputs, prologue


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    parts = x.split(rotary_dim, dim=-1)  # the fault: all of them, not the first alone
    return torch.cat([eager.rotate(part, cos, sin, rotary_dim) for part in parts], dim=-1)


def qkv_prologue(*arguments: object) -> Outputs:
    """As `plain.qkv_prologue`, but for the tail."""
    return prologue(*arguments, rotate=_rotate)  # type: ignore[arg-type]
