"""Bit comparison: planted differences, NaN, zeros, ULP distances, the bound a zero implies."""

import math

import numpy as np
import pytest
import torch

from fusion_evidence.lib.measure import compare as module
from fusion_evidence.lib.measure.compare import (
    Comparison,
    bucket,
    compare,
    ulp_distance,
    upper_bound,
)

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def from_bits(values, dtype):
    return torch.tensor(values, dtype=torch.int64).to(BITS[dtype]).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_planted_bit_is_found(dtype):
    expected = torch.randn(5, 7, 11).to(dtype)
    actual = expected.clone()
    assert compare(actual, expected) == Comparison(elements=385, ulp_histogram={"0": 385})
    actual.view(BITS[dtype])[3, 2, 9] ^= 1
    seen = compare(actual, expected)
    assert not seen.equal
    assert (seen.mismatches, seen.first_index, seen.max_ulp) == (1, (3, 2, 9), 1)
    assert seen.ulp_histogram == {"0": 384, "1": 1}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_integers(dtype):
    expected = torch.arange(24, dtype=dtype).reshape(4, 6)
    actual = expected.clone()
    actual[1, 1] += 6
    actual[3, 5] += 1
    seen = compare(actual, expected)
    assert (seen.mismatches, seen.first_index, seen.max_ulp) == (2, (1, 1), 6)
    assert seen.ulp_histogram == {"0": 22, "1": 1, "5-8": 1}
    assert seen.nan_actual == seen.nan_expected == 0


def test_booleans_and_empty_tensors():
    assert compare(torch.tensor([True, False]), torch.tensor([True, True])).first_index == (1,)
    empty = compare(torch.empty(0, 4), torch.empty(0, 4))
    assert empty == Comparison()
    assert empty.equal
    assert empty.rate == 0.0


def test_nan_bits_are_compared_and_counted():
    quiet, other, one = 0x7FC0, 0x7FC1, 0x3F80
    expected = from_bits([quiet, quiet, quiet, one, one], torch.bfloat16)
    actual = from_bits([quiet, other, one, quiet, one], torch.bfloat16)
    seen = compare(actual, expected)
    assert (seen.nan_actual, seen.nan_expected) == (3, 3)
    assert (seen.mismatches, seen.nan_mismatched, seen.first_index) == (3, 3, (1,))
    # a NaN has no distance: only the one pair of equal numbers is in the histogram
    assert (seen.max_ulp, dict(seen.ulp_histogram)) == (0, {"0": 1})


@pytest.mark.parametrize("dtype", FLOATS)
def test_signed_zeros_are_one_apart(dtype):
    seen = compare(torch.tensor([-0.0, 0.0]).to(dtype), torch.tensor([0.0, 0.0]).to(dtype))
    assert (seen.mismatches, seen.first_index, seen.max_ulp) == (1, (0,), 1)


def test_every_bf16_pattern_against_the_sorted_table():
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = patterns[~patterns.isnan()]
    # by value, -0.0 directly before +0.0: the place in this table is the definition of an ULP
    bits = numbers.view(torch.int16).tolist()
    table = sorted(zip(numbers.double().tolist(), [b >= 0 for b in bits], bits, strict=True))
    place = {entry[2]: i for i, entry in enumerate(table)}
    rank = torch.tensor([place[b] for b in bits])
    for shift in (1, 17, 4096, 40000):
        distance = ulp_distance(numbers, numbers.roll(shift))
        assert torch.equal(distance, (rank - rank.roll(shift)).abs())


@pytest.mark.parametrize("start", [1.0, 1e-40, -3.5, 3e38])
def test_fp32_against_nextafter(start):
    x, steps = np.float32(start), 9
    y = x
    for _ in range(steps):
        y = np.nextafter(y, np.float32(0), dtype=np.float32)
    seen = compare(torch.tensor([x]), torch.tensor([y]))
    assert (seen.max_ulp, dict(seen.ulp_histogram)) == (steps, {"9-16": 1})


def test_buckets():
    names = ["0", "1", "2", "3-4", "3-4", "5-8", "5-8", "5-8", "5-8", "9-16"]
    assert [bucket(d) for d in range(10)] == names
    assert bucket(1 << 20) == f"{(1 << 19) + 1}-{1 << 20}"


def test_histogram_agrees_with_bucket():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4000, generator=generator).bfloat16()
    b = (a.float() + 0.05 * torch.randn(4000, generator=generator)).bfloat16()
    counted: dict[str, int] = {}
    for d in ulp_distance(a, b).tolist():
        counted[bucket(d)] = counted.get(bucket(d), 0) + 1
    seen = compare(a, b)
    assert seen.ulp_histogram == counted
    assert list(seen.ulp_histogram) == sorted(counted, key=lambda k: int(k.split("-")[0]))


def test_the_widest_distance_saturates():
    far = compare(from_bits([0x7FEFFFFFFFFFFFFF], torch.float64), -torch.ones(1).double() * 1e308)
    assert far.max_ulp == torch.iinfo(torch.int64).max


def test_strides_and_holes():
    base = torch.randn(6, 10)
    holes, copy = base[:, ::2], base[:, ::2].clone()
    assert compare(holes, copy).equal
    copy[4, 3] += 1
    assert compare(holes, copy).first_index == (4, 3)


def test_chunks_add_up(monkeypatch):
    expected = torch.randn(17, 13).bfloat16()
    expected[2, 2] = float("nan")
    actual = expected.clone()
    for index, step in {(4, 1): 1, (11, 12): 3, (16, 0): 200}.items():
        actual.view(torch.int16)[index] += step
    whole = compare(actual, expected)
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert compare(actual, expected) == whole
    assert (whole.mismatches, whole.first_index, whole.nan_actual) == (3, (4, 1), 1)


def test_sum_merges_everything():
    one = compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    two = compare(torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, -0.0]))
    both = one + two
    assert (both.elements, both.mismatches, both.first_index) == (4, 1, (1,))
    assert both.ulp_histogram == {"0": 2, "1": 1}
    assert (both.nan_actual, both.nan_mismatched, both.rate) == (1, 0, 0.25)


@pytest.mark.parametrize(
    ("actual", "expected", "error", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), ValueError, ["shape", "(2, 3)", "(3, 2)"]),
        (torch.zeros(2), torch.zeros(2).half(), ValueError, ["float32", "float16"]),
        (torch.zeros(2), torch.zeros(2, device="meta"), ValueError, ["cpu", "meta"]),
        (torch.zeros(2).cfloat(), torch.zeros(2).cfloat(), TypeError, ["complex64"]),
    ],
)
def test_what_cannot_be_compared(actual, expected, error, words):
    with pytest.raises(error) as caught:
        compare(actual, expected)
    for word in words:
        assert word in str(caught.value)


def binomial_cdf(k, n, p):
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


@pytest.mark.parametrize(("n", "k"), [(1, 0), (10, 0), (10, 3), (50, 49), (300, 7), (900, 120)])
@pytest.mark.parametrize("confidence", [0.95, 0.5, 0.999])
def test_upper_bound_solves_the_binomial_equation(n, k, confidence):
    bound = upper_bound(n, k, confidence)
    assert 0 < bound < 1
    assert binomial_cdf(k, n, bound) == pytest.approx(1 - confidence, rel=1e-8)


def test_upper_bound_known_values():
    # tables: 0 of 10 -> 25.887 %, 1 of 10 -> 39.416 %, 5 of 100 -> 10.225 % (one-sided, 95 %)
    assert upper_bound(10, 0) == pytest.approx(0.258866, abs=1e-6)
    assert upper_bound(10, 1) == pytest.approx(0.394163, abs=1e-6)
    assert upper_bound(100, 5) == pytest.approx(0.102253, abs=1e-6)
    assert upper_bound(10_000_000) == pytest.approx(2.9957322e-7, rel=1e-6)
    # large n, by an independent sum: the Poisson limit
    n = 25_000_000
    poisson = math.fsum(
        math.exp(
            -n * upper_bound(n, 73) + i * math.log(n * upper_bound(n, 73)) - math.lgamma(i + 1)
        )
        for i in range(74)
    )
    assert poisson == pytest.approx(0.05, abs=1e-4)
    assert upper_bound(0) == upper_bound(4, 4) == 1.0


@pytest.mark.parametrize("bad", [(-1, 0, 0.95), (3, 4, 0.95), (3, -1, 0.95), (3, 0, 1.0)])
def test_upper_bound_rejects(bad):
    with pytest.raises(ValueError, match="must lie"):
        upper_bound(*bad)
