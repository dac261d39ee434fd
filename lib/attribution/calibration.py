"""Numerics calibration: which declared numerics reproduce the bits of code that declares none.

A compiler chooses rounding points, reduction order and contraction, and says none of them. Every candidate
`Numerics` is computed with the reference on the same inputs; the one without a mismatch is what the
compiler chose, as far as the number of elements can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
    observe: Callable[[Inputs], Mapping[str, Tensor]],
    batches: Iterable[Inputs],
    shape: AttentionShape,
    reductions: Sequence[Reduction] | None = None,
    reject: int = 1,
) -> list[Fit]:
    """Candidates ranked by mismatches, the best first.

    A wrong rounding shows in one element of ten to a thousand, a wrong tree in a few of a million. So one
    tree decides the rounding on the first batch, and every tree is then tried with every contraction of
    that rounding, for Q and for K separately: a compiler may give them different trees, and K, with few
    heads, needs many tokens to tell its trees apart. Further batches are taken, and only candidates with
    fewer than ``reject`` mismatches tried on them, until each side has one left or there is no batch. The
    ranking has one tree for both sides; a pair of trees stands at its head where it is better than any
    single one, and with it every other pair without a mismatch.

    Args:
        observe: outputs ``q`` and ``k`` of the code in question.
        batches: inputs to observe it on, the first taken whole, the others as needed.
        reductions: trees to try; by default `Reduction.candidates`.
        reject: how many mismatches it takes to reject a candidate. One is enough to know; more show that
            it was no accident.
    """
    trees = list(reductions or Reduction.candidates(shape.head_dim))
    sides: dict[int, dict[tuple[Contraction, Reduction], Comparison]] = {0: {}, 1: {}}
    rounding: Rounding | None = None
    for inputs in batches:
        heads = _heads(observe(inputs), inputs, shape)
        rounding = rounding or _rounding(heads, shape, trees[0])
        contractions = [c for kind, c in roundings() if kind == rounding]
        for side, head in enumerate(heads):
            found = sides[side]
            candidates = list(found) or [(c, tree) for tree in trees for c in contractions]
            for candidate in candidates:
                so_far = found.get(candidate, Comparison())
                if so_far.mismatches < reject:
                    contraction, tree = candidate
                    actual = head.compute(shape, Numerics(rounding, tree, contraction), tree)
                    found[candidate] = so_far + compare(actual, head.observed)
        if all(
            sum(one.mismatches < reject for one in found.values()) <= 1 for found in sides.values()
        ):
            break
    if rounding is None:
        raise ValueError("fit needs at least one batch of inputs")
    return _ranked(rounding, sides[0], sides[1])


def _rounding(heads: Sequence[_Heads], shape: AttentionShape, tree: Reduction) -> Rounding:
    """The policy that is nearest to what was observed, whatever the tree."""

    def mismatches(way: tuple[Rounding, Contraction]) -> int:
        numerics = Numerics(way[0], tree, way[1])
        pairs = ((head.compute(shape, numerics, tree), head.observed) for head in heads)
        return sum(compare(actual, observed).mismatches for actual, observed in pairs)

    return min(roundings(), key=mismatches)[0]


def _ranked(
    rounding: Rounding,
    q: Mapping[tuple[Contraction, Reduction], Comparison],
    k: Mapping[tuple[Contraction, Reduction], Comparison],
) -> list[Fit]:
    def joined(one: Comparison, other: Comparison) -> tuple[int, int]:
        return one.mismatches + other.mismatches, one.elements + other.elements

    ranked = [
        Fit(
            Numerics(rounding, tree, contraction),
            *joined(q[contraction, tree], k[contraction, tree]),
        )
        for contraction, tree in q
    ]
    ranked.sort(key=lambda one: one.mismatches)
    pairs = []
    for contraction in dict.fromkeys(way[0] for way in q):
        q_trees, k_trees = (_nearest_trees(side, contraction) for side in (q, k))
        for q_tree, k_tree in product(q_trees, k_trees):
            both = joined(q[contraction, q_tree], k[contraction, k_tree])
            pairs.append(Fit(Numerics(rounding, q_tree, contraction, k_tree), *both))
    best = min(pairs, key=lambda one: one.mismatches)
    if best.mismatches >= ranked[0].mismatches:
        return ranked
    fitting = [one for one in pairs if one.mismatches == 0]
    return [*(fitting or [best]), *ranked]


def _nearest_trees(
    side: Mapping[tuple[Contraction, Reduction], Comparison], contraction: Contraction
) -> list[Reduction]:
    """The tree with the fewest mismatches under this contraction, or all that have as few."""
    found = {tree: one.mismatches for (way, tree), one in side.items() if way == contraction}
    return [tree for tree, mismatches in found.items() if mismatches == min(found.values())]


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
