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
from fusion_evidence.lib.measure.compare import Comparison, compare, upper_bound
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
    tree decides the rounding, after which every tree is tried with every contraction of that rounding,
    for Q and for K separately: a compiler may give them different trees. The ranking has one tree for
    both; a pair of trees stands at its head where it is better than any single one.

    Args:
        observed: outputs ``q`` and ``k`` of the code in question on ``inputs``.
        reductions: trees to try; by default `Reduction.candidates`.
    """
    trees = list(reductions or Reduction.candidates(shape.head_dim))
    heads = _heads(observed, inputs, shape)

    def found(rounding: Rounding, contraction: Contraction, tree: Reduction) -> list[Comparison]:
        numerics = Numerics(rounding, tree, contraction)
        return [compare(head.compute(shape, numerics, tree), head.observed) for head in heads]

    first = {way: sum(f.mismatches for f in found(*way, trees[0])) for way in roundings()}
    rounding = min(first, key=first.__getitem__)[0]
    tried = {
        (contraction, tree): found(rounding, contraction, tree)
        for tree in trees
        for kind, contraction in roundings()
        if kind == rounding
    }
    elements = sum(f.elements for f in next(iter(tried.values())))
    ranked = [
        Fit(Numerics(rounding, tree, contraction), q.mismatches + k.mismatches, elements)
        for (contraction, tree), (q, k) in tried.items()
    ]
    ranked.sort(key=lambda one: one.mismatches)
    pairs = []
    for contraction in dict.fromkeys(way[0] for way in tried):
        q_tree, k_tree = (
            min(trees, key=lambda tree: tried[contraction, tree][side].mismatches)
            for side in (0, 1)
        )
        mismatches = (
            tried[contraction, q_tree][0].mismatches + tried[contraction, k_tree][1].mismatches
        )
        pairs.append(Fit(Numerics(rounding, q_tree, contraction, k_tree), mismatches, elements))
    best = min(pairs, key=lambda one: one.mismatches)
    return [best, *ranked] if best.mismatches < ranked[0].mismatches else ranked


@dataclass(frozen=True)
class _Heads:
    """Rows of Q or of K, what is needed to compute them, and what was observed."""

    rows: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    observed: Tensor

    def compute(self, shape: AttentionShape, numerics: Numerics, tree: Reduction) -> Tensor:
        return reference.norm_rope(
            self.rows, self.weight, self.cos, self.sin, shape, numerics, tree
        )


def _heads(observed: Mapping[str, Tensor], inputs: Inputs, shape: AttentionShape) -> list[_Heads]:
    q_gate, k, _ = inputs.qkv.split((2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
    q = q_gate.unflatten(-1, (shape.q_heads, 2, shape.head_dim))[:, :, 0]
    k = k.unflatten(-1, (shape.kv_heads, shape.head_dim))
    table = reference.select_cos_sin(inputs.cos_sin, inputs.positions, shape)
    return [
        _Heads(q, inputs.q_weight, *table, observed["q"]),
        _Heads(k, inputs.k_weight, *table, observed["k"]),
    ]
