"""A wrong candidate: the norm's factor is ``w`` where it must be ``1 + w``.

Llama's RMSNorm multiplies by ``w``, Gemma's and Qwen3.5's by ``1 + w``. A kernel written for the one and
given the weights of the other is fast, and computes another model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_evidence.kernels.examples.plain import Outputs, prologue


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (values * weight.float()).to(x.dtype)  # the fault


def qkv_prologue(*arguments: object) -> Outputs:
    """As `plain.qkv_prologue`, but for the factor."""
    return prologue(*arguments, norm=_norm)  # type: ignore[arg-type]
