"""Other projects' kernels as candidates: a module each, importable where that kernel can be run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusion_evidence.kernels.candidate import Kernel
from fusion_evidence.lib.measure import peers


def candidate(name: str) -> Kernel:
    """The peer of that name under the candidate's signature.

    Its bits are its own: it ignores numerics. What it leaves out is refused in a call (`NotCovered`).
    ImportError: it cannot be run here, and why.
    """
    if reason := peers.available(name):
        raise ImportError(reason)
    one = peers.peer(name)

    def qkv_prologue(
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        shape: Any,
        numerics: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tensors = qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, key_cache, value_cache
        found = one.call(*tensors, shape, numerics)
        v = found.get("v")
        if v is None:  # vLLM's has no V of its own: attention reads the cache
            v = qkv[:, -shape.kv_size :].reshape(-1, shape.kv_heads, shape.head_dim)
        return found["q"], found["k"], v, found["gate"]

    return qkv_prologue
