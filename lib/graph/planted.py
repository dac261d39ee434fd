"""Three ways to get an opaque operator wrong, planted, so that a check can be seen to notice.

Two are in an operator's registration: `planted` gives the real operator's body a wrong one, which
``torch.library.opcheck`` must refuse. The third is in the compiler: under Inductor's first
functionalization, layers whose caches are views of one allocation are handed copies, and what comes
back is not what was written. `layers` is that case; its generated code and its cache show it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape

Mistake = Literal["undeclared_mutation", "wrong_fake_stride"]

_planted: dict[str, Any] = {}
_library = torch.library.Library("fusion_evidence_planted", "FRAGMENT")


def planted(mistake: Mistake) -> Any:
    """An operator with the real one's signature and body, and this mistake in its registration.

    ``undeclared_mutation``: the schema says that caches and marker are only read, so a compiler may
    go on with their old values. ``wrong_fake_stride``: the fake describes V as the view of the input
    that it would be without a copy.
    """
    if mistake not in get_args(Mistake):
        raise ValueError(f"mistake: expected one of {get_args(Mistake)}, got {mistake!r}")
    if mistake not in _planted:
        real = torch.ops.fusion_evidence.qkv_prologue.default
        schema = str(real._schema).partition("::qkv_prologue")[2]
        fake: Callable[..., Any] = real
        if mistake == "undeclared_mutation":
            schema = re.sub(r"\(\w+!\)", "", schema)
        else:
            fake = _strided_like_the_input
        _library.define(mistake + schema)
        name = f"fusion_evidence_planted::{mistake}"
        torch.library.impl(name, "default", real, lib=_library)
        torch.library.register_fake(name, fake, lib=_library)
        _planted[mistake] = getattr(torch.ops.fusion_evidence_planted, mistake).default
    return _planted[mistake]


def _strided_like_the_input(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, gate = torch.ops.fusion_evidence.qkv_prologue(qkv, *rest)
    return q, k, v.new_empty_strided(v.shape, (qkv.stride(0), v.shape[2], 1)), gate


def opcheck(operator: Any, arguments: tuple[Any, ...]) -> dict[str, str]:
    """``torch.library.opcheck``: each of its tests and what it says, `SUCCESS` or the first line."""
    said = torch.library.opcheck(operator, arguments, raise_exception=False)
    return {
        test: "SUCCESS" if result == "SUCCESS" else str(result).strip().partition("\n")[0]
        for test, result in said.items()
    }


def layers(
    prologue: Callable[..., Any], shape: AttentionShape, numerics: Numerics
) -> Callable[..., list[Tensor]]:
    """One call of the prologue per layer, the layers' caches being views of one allocation.

    The function takes the prologue's tensors up to ``slot_mapping``, then ``kv_cache[layers, 2, N, B,
    Hk, D]``, and returns each layer's q.
    """

    def forward(*arguments: Tensor) -> list[Tensor]:
        *inputs, kv_cache = arguments
        return [
            prologue(*inputs, kv_cache[layer, 0], kv_cache[layer, 1], shape, numerics)[0]
            for layer in range(kv_cache.shape[0])
        ]

    return forward
