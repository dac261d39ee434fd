"""Numerics calibration: which declared numerics reproduce the bits of code that declares none.

A compiler chooses rounding points, reduction order and contraction, and says none of them. Every candidate
`Numerics` is computed with the reference on the same inputs; the one without a mismatch is what the
compiler chose, as far as the number of elements can tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Contraction, Numerics, Reduction, Rounding
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.measure.compare import compare, upper_bound
from fusion_evidence.lib.measure.inputs import Inputs


@dataclass(frozen=True)
class Fit:
    """How far one candidate is from the observed outputs.

    mismatches, elements: differing and compared elements of Q and K, the two outputs that are computed.
    """

    numerics: Numerics
    mismatches: int
    elements: int

    @property
    def bound(self) -> float:
        """Upper bound of the true mismatch rate, 95 % (Clopper-Pearson)."""
        return upper_bound(self.elements, self.mismatches)


def roundings() -> list[tuple[Rounding, Contraction]]:
    """Every combination of rounding and contraction that `Numerics` admits."""
    return [
        (rounding, contraction)
        for rounding in get_args(Rounding)
        for contraction in (("none",) if rounding == "per_op" else get_args(Contraction))
    ]


def fit(
    observed: Mapping[str, Tensor],
    inputs: Inputs,
    shape: AttentionShape,
    reductions: Sequence[Reduction] | None = None,
) -> list[Fit]:
    """Candidates ranked by mismatches, the best first.

    A wrong rounding shows in one element of ten to a thousand, a wrong tree in a few of a million. So one
    tree decides the rounding, after which every tree is tried with every contraction of that rounding.

    Args:
        observed: outputs ``q`` and ``k`` of the code in question on ``inputs``.
        reductions: trees to try; by default `Reduction.candidates`.
    """
    trees = list(reductions or Reduction.candidates(shape.head_dim))
    first = [
        _fit(observed, inputs, shape, Numerics(rounding, trees[0], contraction))
        for rounding, contraction in roundings()
    ]
    rounding = min(first, key=lambda found: found.mismatches).numerics.rounding
    rest = [
        _fit(observed, inputs, shape, Numerics(rounding, tree, contraction))
        for tree in trees[1:]
        for kind, contraction in roundings()
        if kind == rounding
    ]
    return sorted(first + rest, key=lambda found: found.mismatches)


def _fit(
    observed: Mapping[str, Tensor], inputs: Inputs, shape: AttentionShape, numerics: Numerics
) -> Fit:
    q_gate, k, _ = inputs.qkv.split((2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
    q = q_gate.unflatten(-1, (shape.q_heads, 2, shape.head_dim))[:, :, 0]
    k = k.unflatten(-1, (shape.kv_heads, shape.head_dim))
    cos, sin = reference.select_cos_sin(inputs.cos_sin, inputs.positions, shape)
    found = compare(
        reference.norm_rope(q, inputs.q_weight, cos, sin, shape, numerics), observed["q"]
    ) + compare(reference.norm_rope(k, inputs.k_weight, cos, sin, shape, numerics), observed["k"])
    return Fit(numerics, found.mismatches, found.elements)
