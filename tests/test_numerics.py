"""Declared numerics: what can be said, how it reads, and what is refused."""

from __future__ import annotations

import pytest

from fusion_evidence.kernels.numerics import MAX_ELEMENTS, Numerics, Reduction


@pytest.mark.parametrize("size", [64, 128, 256])
def test_candidates_cover_the_row_once_each(size):
    trees = Reduction.candidates(size)
    assert len(set(trees)) == len(trees)
    assert {tree.size for tree in trees} == {size}
    assert {tree.lanes for tree in trees} >= {32, 64}
    assert Reduction(32, size // 32) in trees
    assert all(tree.elements <= MAX_ELEMENTS for tree in trees)


def test_text_of_a_reduction_reads_back():
    for tree in Reduction.candidates(256):
        assert Reduction.parse(str(tree)) == tree
    assert Reduction.parse("4x16x2 pairwise") == Reduction(16, 2, 4, "pairwise")


@pytest.mark.parametrize("text", ["", "32x8", "1x32x8", "1x32 sequential", "axbxc sequential"])
def test_parse_refuses_what_is_no_reduction(text):
    with pytest.raises(ValueError, match="must read like '1x32x8 sequential'"):
        Reduction.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lanes=24, elements=8), "lanes must be a power of two, got 24"),
        (dict(lanes=32, elements=0), "elements must be a power of two, got 0"),
        (dict(lanes=32, elements=8, warps=-2), "warps must be a power of two, got -2"),
        (dict(lanes=32.0, elements=8), r"lanes must be a power of two, got 32\.0"),
        (dict(lanes=4, elements=2 * MAX_ELEMENTS), f"elements must be <= {MAX_ELEMENTS}"),
        (dict(lanes=32, elements=8, order="random"), "order must be one of .*, got 'random'"),
    ],
)
def test_reduction_refuses_what_is_no_tree(arguments, message):
    with pytest.raises(ValueError, match=message):
        Reduction(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rounding="never"), "rounding must be one of .*, got 'never'"),
        (dict(contraction="both"), "contraction must be one of .*, got 'both'"),
        (dict(rounding="per_op", contraction="cos"), "'per_op' rounds both products"),
    ],
)
def test_numerics_refuses_what_no_implementation_does(arguments, message):
    with pytest.raises(ValueError, match=message):
        Numerics(**arguments)


def test_numerics_reads_as_one_line_and_is_a_key():
    numerics = Numerics("storage", Reduction(64, 4), "sin")
    assert str(numerics) == "storage, 1x64x4 sequential, contraction sin"
    assert {numerics: 1}[Numerics("storage", Reduction(64, 4), "sin")] == 1
