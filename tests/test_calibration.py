"""Numerics found again from bits: of the reference, where they are known, and of Inductor's code.

The inputs are fp16: with more mantissa in the squares and in the outputs, a wrong tree shows in some of a
hundred thousand elements, where bf16 takes some of ten million.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.attribution.calibration import fit, roundings
from fusion_evidence.lib.measure.compare import compare, upper_bound
from fusion_evidence.lib.measure.inputs import prologue_inputs, run
from fusion_evidence.lib.measure.oracles import any_tree
from fusion_evidence.lib.measure.primitive import in_batches, static_compiled

pytestmark = pytest.mark.usefixtures("one_thread", "compile_cache")

COMPACT = preset("compact")
TREES = Reduction.candidates(COMPACT.head_dim)
NEIGHBOURS, STRIDED = Reduction(16, 4), Reduction(16, 4, order="strided")
TOKENS = 3000


@pytest.fixture(scope="module")
def inputs():
    return prologue_inputs(COMPACT, TOKENS, dtype=torch.float16, random_angles=True)


def observed(inputs, numerics):
    return run(reference.qkv_prologue, inputs, COMPACT, numerics)


@pytest.mark.parametrize(
    "numerics",
    [
        Numerics("per_op", NEIGHBOURS),
        Numerics("fp32_through", STRIDED),
        Numerics("fp32_through", Reduction(64, 1), "cos"),
        Numerics("fp32_through", Reduction(8, 2, warps=4), "sin"),
    ],
    ids=str,
)
def test_known_numerics_are_found_and_no_other(inputs, numerics):
    best, second, *_ = fit(lambda batch: observed(batch, numerics), [inputs], COMPACT)
    assert best.numerics == numerics
    assert best.mismatches == 0 < second.mismatches
    assert best.elements == TOKENS * (COMPACT.q_size + COMPACT.kv_size)
    assert best.bound == upper_bound(best.elements) < 3 / best.elements


@pytest.mark.parametrize("contraction", ["cos", "sin"])
def test_contraction_after_storage_rounding(contraction):
    """It shows with an fp32 table alone: products of two 16-bit factors are exact in fp32."""
    inputs = prologue_inputs(
        COMPACT, TOKENS, dtype=torch.float16, table_dtype=torch.float32, random_angles=True
    )
    numerics = Numerics("storage", STRIDED, contraction)
    best, second, *_ = fit(lambda batch: observed(batch, numerics), [inputs], COMPACT)
    assert best.numerics == numerics
    assert best.mismatches == 0 < second.mismatches


def test_different_trees_of_q_and_k_are_found_as_a_pair(inputs):
    numerics = Numerics("fp32_through", NEIGHBOURS, k_reduction=STRIDED)
    best, second, *_ = fit(lambda batch: observed(batch, numerics), [inputs], COMPACT)
    assert best.numerics == numerics
    assert best.numerics.reductions == (NEIGHBOURS, STRIDED)
    assert best.mismatches == 0 < second.mismatches  # the best single tree


@pytest.mark.parametrize("rounding", ["per_op", "storage", "fp32_through"])
def test_a_rounding_is_told_apart_by_far(rounding):
    """By one wrong tree, before any tree is known, and with elements to spare."""
    inputs = prologue_inputs(COMPACT, 200, dtype=torch.float16, random_angles=True)
    target = observed(inputs, Numerics(rounding, STRIDED))
    off = {
        other: compare(observed(inputs, Numerics(other, TREES[0]))["q"], target["q"]).rate
        for other in ("per_op", "storage", "fp32_through")
    }
    assert TREES[0] != STRIDED
    assert all(
        rate > 100 * off[rounding] + 0.01 for other, rate in off.items() if other != rounding
    )
    assert fit(lambda _: target, [inputs], COMPACT)[0].numerics.rounding == rounding


def test_a_contraction_is_told_apart(inputs):
    target = observed(inputs, Numerics("fp32_through", STRIDED, "cos"))
    ranked = fit(lambda _: target, [inputs], COMPACT, [STRIDED])
    assert ranked[0].numerics.contraction == "cos"
    wrong = [one.mismatches for one in ranked[1:]]
    assert len(wrong) == 2
    assert min(wrong) > 10


def test_a_tree_that_is_not_among_the_candidates_leaves_mismatches(inputs):
    target = observed(inputs, Numerics("fp32_through", STRIDED))
    others = [tree for tree in TREES if tree != STRIDED]
    best = fit(lambda _: target, [inputs], COMPACT, others)[0]
    assert best.mismatches > 0
    assert best.bound > best.mismatches / best.elements


def test_every_valid_combination_is_tried():
    ways = roundings()
    assert len(ways) == len(set(ways)) == 7
    for rounding, contraction in ways:
        Numerics(rounding, TREES[0], contraction)


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_compiled_region_is_calibrated_to_zero(tokens):
    """Inductor's code for this CPU, whatever tree its vectors make."""
    inputs = prologue_inputs(COMPACT, 1000, dtype=torch.float16)
    region = in_batches(static_compiled(), tokens)
    ranked = fit(lambda batch: run(region, batch, COMPACT, any_tree(COMPACT)), [inputs], COMPACT)
    best = ranked[0]
    assert best.mismatches == 0
    assert (best.numerics.rounding, best.numerics.contraction) == ("fp32_through", "none")
    assert sum(one.mismatches > 0 for one in ranked) > len(ranked) / 2  # it could tell


def test_further_batches_tell_the_last_candidates_apart():
    """One token leaves many trees at zero; more batches are drawn until one is left, and no longer."""
    numerics = Numerics("fp32_through", STRIDED, "none")
    drawn = []

    def batches(count):
        for seed in range(count):
            drawn.append(seed)
            yield prologue_inputs(COMPACT, 1 if seed == 0 else 1500, seed=100 + seed)

    def at_zero(fits):
        return sum(one.mismatches == 0 for one in fits)

    first = fit(lambda batch: observed(batch, numerics), batches(1), COMPACT)
    assert at_zero(first) > 1
    drawn.clear()
    more = fit(lambda batch: observed(batch, numerics), batches(12), COMPACT)
    assert more[0].numerics == numerics
    assert at_zero(more) < at_zero(first)
    assert more[0].elements > first[0].elements
    with pytest.raises(ValueError, match="at least one batch"):
        fit(lambda batch: observed(batch, numerics), [], COMPACT)


def test_pairs_of_trees_that_fit_as_well_are_all_named(inputs):
    """Of K every fourth element is zero, so that neighbours in sequence and in pairs add alike."""
    pairwise = Reduction(16, 4, order="pairwise")
    qkv = inputs.qkv.clone()
    qkv[:, 2 * COMPACT.q_size : -COMPACT.kv_size][:, 3::4] = 0
    some = replace(inputs, qkv=qkv)
    numerics = Numerics("fp32_through", STRIDED, "none", NEIGHBOURS)
    target = observed(some, numerics)
    ranked = fit(lambda _: target, [some], COMPACT, [pairwise, STRIDED, NEIGHBOURS])
    fitting = [one.numerics for one in ranked if one.mismatches == 0]
    assert fitting == [replace(numerics, k_reduction=pairwise), numerics]
    assert len({one.elements for one in ranked[:2]}) == 1


def test_candidates_are_rejected_by_as_many_mismatches_as_asked_for():
    numerics = Numerics("fp32_through", STRIDED, "none")
    trees = [STRIDED, NEIGHBOURS]

    def rejected(reject):
        batches = (prologue_inputs(COMPACT, 1500, seed=200 + seed) for seed in range(12))
        fits = fit(lambda one: observed(one, numerics), batches, COMPACT, trees, reject=reject)
        assert fits[0].numerics == numerics
        assert fits[0].mismatches == 0
        return {str(one.numerics): one for one in fits[1:]}

    few, many = rejected(1), rejected(20)
    assert few.keys() == many.keys()
    other = str(Numerics("fp32_through", NEIGHBOURS, "none"))
    assert 1 <= few[other].mismatches < 20 <= many[other].mismatches
    assert many[other].elements > few[other].elements
