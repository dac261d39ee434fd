"""The reference against mathematics, PyTorch's own operations and Hugging Face's Qwen3.5."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
import torch
from transformers.utils import is_torch_available

from fusion_evidence.kernels import eager, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import AttentionShape, preset
from fusion_evidence.lib.measure.compare import compare, pair_ulps
from fusion_evidence.lib.measure.independent import PAIR_ULP_BOUND, huggingface, rotary_embedding
from fusion_evidence.lib.measure.inputs import prologue_inputs, run

with_models = pytest.mark.skipif(
    not is_torch_available(),
    reason=f"this transformers has no models for torch {torch.__version__}",
)
TINY = AttentionShape("tiny", 2, 1, 64, 16, (3, 3, 2), 64, 1, 1)


def nearest_fp32(value: Fraction) -> float:
    """``value`` rounded to fp32, ties to even, in integers alone."""
    if value == 0:
        return 0.0
    sign, value = (-1.0, -value) if value < 0 else (1.0, value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    count, rest = divmod(value, step)
    if 2 * rest > step or (2 * rest == step and count % 2):
        count += 1
    result = count * step
    return sign * (math.inf if result >= Fraction(2) ** 128 else float(result))


def fma_errors(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, fma=reference.fma) -> int:
    """Elements of ``fma(a, b, c)`` that are not the exact result, rounded once."""
    got = fma(a, b, c).tolist()
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    exact = [nearest_fp32(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in rows]
    return sum(g != e for g, e in zip(got, exact, strict=True))


def double_rounding_cases(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Products just beside a tie of the sum: fp64 rounds them onto it, fp32 then to the wrong side."""
    generator = torch.Generator().manual_seed(3)
    odd = torch.randint(1 << 23, 1 << 24, (count,), generator=generator) | 1
    sign = torch.randint(2, (count,), generator=generator) * 2 - 1
    c = (odd * sign).float()  # |c| in [2^23, 2^24): its ULP is 1
    # (1 + 2^-15)(1 - 2^-15) / 2 = 1/2 - 2^-31: 2^-31 from the tie, lost beside c only past 2^-29
    a = torch.full((count,), 1 + 2.0**-15)
    b = torch.full((count,), 0.5 - 2.0**-16) * sign
    return a, b, c


def test_fma_rounds_once():
    generator = torch.Generator().manual_seed(1)

    def random(spread: int) -> torch.Tensor:
        power = torch.randint(-spread, spread + 1, (400,), generator=generator)
        return torch.randn(400, generator=generator) * 2.0**power

    assert fma_errors(random(1), random(1), random(1)) == 0
    assert fma_errors(random(30), random(30), random(30)) == 0
    a, b = random(20), random(20)
    assert fma_errors(a, b, -(a * b)) == 0  # all that is left is the product's own rounding error
    assert fma_errors(a, b, (a * b) * 2.0**24) == 0  # the product lies around half an ULP


def test_fma_where_fp64_rounds_twice():
    a, b, c = double_rounding_cases(200)
    assert fma_errors(a, b, c) == 0
    # The same cases do catch the plain fp64 formula, or they would prove nothing.
    assert fma_errors(a, b, c, lambda a, b, c: (a.double() * b + c).float()) == 200


def test_fma_of_special_values():
    inf, nan = math.inf, math.nan
    a = torch.tensor([inf, nan, inf, 1.0, -0.0, 3e38, 2.0**-100])
    b = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 10.0, 2.0**-49])
    c = torch.tensor([1.0, 1.0, 1.0, -inf, -0.0, 0.0, 0.0])
    expected = torch.tensor([inf, nan, nan, -inf, -0.0, inf, 2.0**-149])
    got = reference.fma(a, b, c)
    assert torch.equal(got.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert compare(got[keep], expected[keep]).equal


def scalar_tree(values: list[float], tree: Reduction) -> float:
    """The declared tree, one fp32 addition at a time, as its documentation reads."""

    def add(a: float, b: float) -> float:
        return nearest_fp32(Fraction(a) + Fraction(b))

    def halves(x: list[float]) -> float:
        while len(x) > 1:
            half = len(x) // 2
            x = [add(x[i], x[i + half]) for i in range(half)]
        return x[0]

    warps = []
    for warp in range(tree.warps):
        lanes = []
        for lane in range(tree.lanes):
            if tree.order == "strided":
                start = warp * tree.lanes * tree.elements
                x = values[start + lane : start + tree.lanes * tree.elements : tree.lanes]
            else:
                start = (warp * tree.lanes + lane) * tree.elements
                x = values[start : start + tree.elements]
            if tree.order == "pairwise":
                while len(x) > 1:
                    x = [add(x[i], x[i + 1]) for i in range(0, len(x), 2)]
            else:
                while len(x) > 1:
                    x = [add(x[0], x[1]), *x[2:]]
            lanes.append(x[0])
        warps.append(halves(lanes))
    return halves(warps)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_tree_sum_adds_as_declared(size):
    values = torch.randn(2000, size, generator=torch.Generator().manual_seed(size)) ** 2
    sums = set()
    trees = Reduction.candidates(size)
    for tree in trees:
        got = reference.tree_sum(values, tree)
        expected = torch.tensor([scalar_tree(row, tree) for row in values[:6].tolist()])
        assert compare(got[:6], expected).equal, tree
        sums.add(tuple(got.tolist()))
    # Two strided elements are one more halving of the lanes; every other tree is told from the rest.
    twins = [
        tree
        for tree in trees
        if tree.order == "strided"
        and tree.elements == 2
        and Reduction(2 * tree.lanes, 1, tree.warps) in trees
    ]
    assert len(sums) == len(trees) - len(twins)


def test_tree_sum_refuses_another_size():
    with pytest.raises(ValueError, match="1x32x8 sequential sums 256 values, got 64"):
        reference.tree_sum(torch.zeros(3, 64), Reduction(32, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table_dtype", [None, torch.float32])
def test_per_op_is_eager_where_the_sum_is_exact(dtype, table_dtype):
    # Squares of small integers add up exactly in any order, and the mean of 64 of them is exact too.
    inputs = prologue_inputs(TINY, 40, dtype=dtype, table_dtype=table_dtype)
    inputs.qkv.copy_(torch.randint(-9, 10, inputs.qkv.shape))
    for tree in (Reduction(32, 2), Reduction(16, 4, order="pairwise")):
        numerics = Numerics("per_op", tree)
        got = run(reference.qkv_prologue, inputs, TINY, numerics)
        expected = run(eager.qkv_prologue, inputs, TINY, numerics)
        for name in got:
            assert compare(got[name], expected[name]).equal, (name, tree)


def test_the_three_roundings_differ():
    inputs = prologue_inputs(TINY, 40)
    tree = Reduction(32, 2)
    q = {
        rounding: run(reference.qkv_prologue, inputs, TINY, Numerics(rounding, tree))["q"]
        for rounding in ("per_op", "storage", "fp32_through")
    }
    for a, b in (("per_op", "storage"), ("per_op", "fp32_through"), ("storage", "fp32_through")):
        assert not compare(q[a], q[b]).equal
        assert pair_ulps(q[a], q[b], TINY.rotary_dim) <= PAIR_ULP_BOUND


@with_models
@pytest.mark.parametrize("name", ["qwen3.5-27b", "compact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_table_is_hugging_faces(name, dtype):
    shape = preset(name)
    table = reference.cos_sin_table(shape, 4096, dtype)
    positions = prologue_inputs(shape, 300).positions
    for rows in (positions, positions[0], positions[:1].expand(3, -1)):
        cos, sin = rotary_embedding(rows, shape, dtype)
        got_cos, got_sin = reference.select_cos_sin(table, rows, shape)
        assert compare(torch.cat((got_cos, got_cos), -1), cos[0]).equal
        assert compare(torch.cat((got_sin, got_sin), -1), sin[0]).equal


def test_eager_and_reference_select_the_same_angles():
    for interleaved in (True, False):
        shape = AttentionShape(
            "other", 2, 1, 64, 64, (8, 12, 12), 64, 1, 1, mrope_interleaved=interleaved
        )
        inputs = prologue_inputs(shape, 50)
        for got, expected in zip(
            reference.select_cos_sin(inputs.cos_sin, inputs.positions, shape),
            eager.mrope_cos_sin(inputs.cos_sin, inputs.positions, shape),
            strict=True,
        ):
            assert compare(got, expected).equal


# Declared before the run: the same operations in the same order in the same framework leave no room.
EAGER_ULP_BOUND = 0


@with_models
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position_dims", [1, 2])
def test_eager_is_hugging_faces(dtype, position_dims):
    shape = preset("compact")
    inputs = prologue_inputs(shape, 65, dtype=dtype, position_dims=position_dims)
    numerics = Numerics(reduction=Reduction(32, 2))
    got = run(eager.qkv_prologue, inputs, shape, numerics)
    expected = run(huggingface, inputs, shape, numerics)
    for name in got:
        difference = compare(got[name], expected[name])
        assert difference.max_ulp <= EAGER_ULP_BOUND, (name, str(difference))
        assert difference.nan_mismatched == 0


@with_models
@pytest.mark.parametrize("rounding", ["per_op", "storage", "fp32_through"])
def test_reference_is_hugging_faces_within_the_declared_bound(rounding):
    shape = preset("qwen3.5-0.8b")
    inputs = prologue_inputs(shape, 65, padding=7)
    numerics = Numerics(rounding, Reduction(32, 8))
    got = run(reference.qkv_prologue, inputs, shape, numerics)
    expected = run(huggingface, inputs, shape, numerics)
    for name in ("q", "k", "key_cache"):
        assert pair_ulps(got[name], expected[name], shape.rotary_dim) <= PAIR_ULP_BOUND, name
    for name in ("v", "gate", "value_cache"):
        assert compare(got[name], expected[name]).equal, name


@with_models
def test_the_bound_notices_equal_position_rows_and_a_single_wrong_element():
    shape = preset("qwen3.5-0.8b")
    inputs = prologue_inputs(shape, 4)
    numerics = Numerics()
    expected = run(huggingface, inputs, shape, numerics)["q"]
    inputs.positions[1:] = inputs.positions[0]
    wrong = run(reference.qkv_prologue, inputs, shape, numerics)["q"]
    assert pair_ulps(wrong, expected, shape.rotary_dim) > 10 * PAIR_ULP_BOUND
    wrong = expected.clone()
    wrong[3, 1, 200] *= 1.25
    assert pair_ulps(wrong, expected, shape.rotary_dim) > PAIR_ULP_BOUND
    wrong[3, 1, 200] = math.nan
    assert not pair_ulps(wrong, expected, shape.rotary_dim) <= PAIR_ULP_BOUND


@with_models
def test_independent_oracle_says_what_it_needs(monkeypatch):
    inputs, numerics = prologue_inputs(TINY, 1), Numerics(reduction=Reduction(32, 2))
    chunked = AttentionShape("chunked", 2, 1, 64, 16, (3, 3, 2), 64, 1, 1, mrope_interleaved=False)
    with pytest.raises(ValueError, match="interleaves its MRoPE sections, shape 'chunked'"):
        run(huggingface, inputs, chunked, numerics)
    monkeypatch.setitem(sys.modules, "transformers.models.qwen3_5", None)
    with pytest.raises(ImportError, match=r"needs transformers with Qwen3\.5"):
        run(huggingface, inputs, TINY, numerics)
