"""Bit-for-bit comparison of two tensors, with the distance in units in the last place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Elements looked at in one go: bounds the int64 temporaries (8 bytes an element, a few at a time)
# to some 100 MB, whatever the size of the tensors.
_CHUNK = 1 << 22

_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def bucket(distance: int) -> str:
    """Histogram bucket of a ULP distance: `0`, `1`, `2`, `3-4`, `5-8`, `9-16`, ..."""
    return _bucket_name(0 if distance == 0 else (distance - 1).bit_length() + 1)


def _bucket_name(index: int) -> str:
    """0 -> `0`; index i >= 1 holds the distances in (2**(i-2), 2**(i-1)]."""
    if index <= 2:
        return str(index)
    if index == 3:
        return "3-4"
    return f"{(1 << (index - 2)) + 1}-{1 << (index - 1)}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` saw.

    elements: elements compared.
    mismatches: elements whose bits differ.
    first_index: index of the first of them in row-major order, or None.
    max_ulp: largest distance between two mismatching numbers (NaNs have none and are left out).
    ulp_histogram: bucket -> elements, over all elements that are numbers on both sides; only
        buckets that hold any.
    nan_actual, nan_expected: NaNs on each side.
    nan_mismatched: mismatching elements in which at least one side is NaN.
    """

    elements: int = 0
    mismatches: int = 0
    first_index: tuple[int, ...] | None = None
    max_ulp: int = 0
    ulp_histogram: Mapping[str, int] = field(default_factory=dict)
    nan_actual: int = 0
    nan_expected: int = 0
    nan_mismatched: int = 0

    @property
    def equal(self) -> bool:
        """No bit differs."""
        return self.mismatches == 0

    @property
    def rate(self) -> float:
        """Mismatching share of the elements (0.0 of none)."""
        return self.mismatches / self.elements if self.elements else 0.0

    @property
    def rate_upper_bound(self) -> float:
        """95 % upper bound of the mismatch rate that this many elements imply."""
        return upper_bound(self.elements, self.mismatches)

    def __add__(self, other: Comparison) -> Comparison:
        """Both together. `first_index` stays the left one's if it has any."""
        if not isinstance(other, Comparison):
            return NotImplemented
        histogram = dict(self.ulp_histogram)
        for name, count in other.ulp_histogram.items():
            histogram[name] = histogram.get(name, 0) + count
        return Comparison(
            elements=self.elements + other.elements,
            mismatches=self.mismatches + other.mismatches,
            first_index=self.first_index if self.first_index is not None else other.first_index,
            max_ulp=max(self.max_ulp, other.max_ulp),
            ulp_histogram={k: histogram[k] for k in sorted(histogram, key=_lower_edge)},
            nan_actual=self.nan_actual + other.nan_actual,
            nan_expected=self.nan_expected + other.nan_expected,
            nan_mismatched=self.nan_mismatched + other.nan_mismatched,
        )

    def __str__(self) -> str:
        text = f"{self.mismatches:,} of {self.elements:,} elements differ"
        if self.first_index is not None:
            text += f", first at {self.first_index}, at most {self.max_ulp:,} ULP"
        if self.nan_actual or self.nan_expected:
            text += f"; NaN: {self.nan_actual:,} actual, {self.nan_expected:,} expected"
            text += f", {self.nan_mismatched:,} mismatching"
        return text


def _lower_edge(name: str) -> int:
    return int(name.split("-")[0])


def compare(actual: Tensor, expected: Tensor) -> Comparison:
    """Compare two tensors bit for bit.

    Both have the same shape, dtype (bf16, fp16, fp32, fp64, bool or an integer) and device; any
    strides. Equal NaN bits are equal (and counted as NaN). -0.0 and +0.0 differ, by 1 ULP, so that
    the histogram's bucket `0` holds equal bits alone.

    ValueError: another shape, dtype or device. TypeError: a dtype this cannot compare.
    """
    for what, got, wanted in (
        ("shape", tuple(actual.shape), tuple(expected.shape)),
        ("dtype", actual.dtype, expected.dtype),
        ("device", actual.device, expected.device),
    ):
        if got != wanted:
            raise ValueError(f"cannot compare: actual has {what} {got}, expected has {wanted}")
    if actual.dtype not in _BITS and actual.dtype not in _INTEGERS:
        raise TypeError(f"cannot compare {actual.dtype}: not a real number this knows the bits of")

    total = Comparison()
    # A contiguous tensor is viewed; only one with holes is copied.
    a, b = actual.detach().reshape(-1), expected.detach().reshape(-1)
    for start in range(0, a.numel(), _CHUNK):
        part, first = _compare_flat(a[start : start + _CHUNK], b[start : start + _CHUNK])
        if first is not None and total.first_index is None:
            index = _unravel(start + first, tuple(actual.shape))
            part = replace(part, first_index=index)
        total = total + part
    return total


def _compare_flat(a: Tensor, b: Tensor) -> tuple[Comparison, int | None]:
    """`Comparison` of two 1-D tensors, and the position of the first mismatch."""
    bits = _BITS.get(a.dtype)
    if bits is None:
        nan_a = nan_b = torch.zeros((), dtype=torch.bool, device=a.device).expand_as(a)
        differs = a != b
    else:
        nan_a, nan_b = a.isnan(), b.isnan()
        differs = a.view(bits) != b.view(bits)
    # Only what differs is worth its ULP distance: usually next to nothing.
    where = differs.nonzero().squeeze(1)
    nan_either = nan_a | nan_b
    equal_numbers = int((~differs & ~nan_either).sum())
    numbers = where[~nan_either[where]]
    distance = ulp_distance(a[numbers], b[numbers])

    histogram = {"0": equal_numbers} if equal_numbers else {}
    max_ulp = 0
    if numbers.numel():
        max_ulp = int(distance.max())
        # distance d falls into bucket i with 2**(i-2) < d <= 2**(i-1)
        edges = torch.tensor([1 << i for i in range(62)], device=a.device)
        index = torch.bucketize(distance, edges) + 1
        for i, count in enumerate(torch.bincount(index, minlength=64).tolist()):
            if count:
                histogram[_bucket_name(i)] = count
    return Comparison(
        elements=a.numel(),
        mismatches=int(where.numel()),
        max_ulp=max_ulp,
        ulp_histogram=histogram,
        nan_actual=int(nan_a.sum()),
        nan_expected=int(nan_b.sum()),
        nan_mismatched=int(where.numel() - numbers.numel()),
    ), (int(where[0]) if where.numel() else None)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Representable steps between two tensors of one dtype, elementwise, as int64.

    The distance of their places in the order of all values, in which -0.0 comes directly before
    +0.0 (so they are 1 apart, as different bits should be). Integers: |a - b|. What it says about
    a NaN has no meaning. fp64 and int64 saturate at 2**63 - 1.
    """
    x, y = _ordered(a), _ordered(b)
    high, low = torch.maximum(x, y), torch.minimum(x, y)
    distance = high - low
    return torch.where(distance < 0, torch.iinfo(torch.int64).max, distance)


def pair_ulps(actual: Tensor, expected: Tensor, rotary_dim: int) -> float:
    """Largest distance of rotated heads ``[..., D]`` in ULP of the pair that each element belongs to.

    A rotated element may cancel to nearly nothing, and any rounding is then many of its own ULP. A
    rotation keeps the length of its pair, so the ULP at that length is a unit that means something; for
    elements beyond `rotary_dim` it is their own. Infinite where one side alone has a NaN.
    """
    a, b, half = actual.double(), expected.double(), rotary_dim // 2
    length = torch.hypot(b[..., :half], b[..., half:rotary_dim])
    size = torch.cat((length, length, b[..., rotary_dim:].abs()), dim=-1)
    info = torch.finfo(expected.dtype)
    exponent = torch.frexp(size.clamp_min(info.tiny)).exponent - 1
    distance = (a - b).abs() / torch.ldexp(torch.full_like(size, info.eps), exponent)
    distance = distance.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    distance = distance.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(distance.max()) if distance.numel() else 0.0


def _ordered(x: Tensor) -> Tensor:
    """int64 that orders like the numbers, consecutive for consecutive numbers."""
    bits = _BITS.get(x.dtype)
    if bits is None:
        return x.to(torch.int64)
    integer = x.view(bits).to(torch.int64)
    magnitude = integer & torch.iinfo(bits).max
    return torch.where(integer < 0, -magnitude - 1, magnitude)


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return tuple(reversed(index))


def upper_bound(n: int, mismatches: int = 0, confidence: float = 0.95) -> float:
    """Exact (Clopper-Pearson, one-sided) upper bound of a mismatch rate.

    The largest rate under which `mismatches` or fewer among `n` independent elements are still
    seen with probability `1 - confidence`. With none it is about 3 / n at 95 %.

    ValueError: n < 0, mismatches outside 0..n, or confidence outside (0, 1).
    """
    if n < 0 or not 0 <= mismatches <= n:
        raise ValueError(f"mismatches must lie in 0..n: got {mismatches} of {n}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1: got {confidence}")
    if mismatches == n:  # nothing seen, or nothing but mismatches: no rate is ruled out
        return 1.0
    alpha = 1.0 - confidence
    if mismatches == 0:
        return -math.expm1(math.log(alpha) / n)
    # P(X <= k | rate) = 1 - I_rate(k + 1, n - k) falls as the rate grows: bisect to the last bit.
    low, high = mismatches / n, 1.0
    while low < (middle := (low + high) / 2) < high:
        if 1.0 - _incomplete_beta(mismatches + 1, n - mismatches, middle) > alpha:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularized I_x(a, b) for 0 < x < 1, by Lentz's continued fraction."""
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges fast only on the other side
        return 1.0 - front * _beta_fraction(b, a, 1.0 - x) / b
    return front * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300

    def nonzero(value: float) -> float:
        return value if abs(value) > tiny else tiny

    c, d = 1.0, 1.0 / nonzero(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, 1_000_000):  # takes about sqrt(max(a, b)) steps
        step = 1.0
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / nonzero(1.0 + numerator * d)
            c = nonzero(1.0 + numerator / c)
            step = c * d
            fraction *= step
        if abs(step - 1.0) < 1e-15:
            return fraction
    raise ArithmeticError(f"the beta fraction did not converge for a={a}, b={b}, x={x}")
