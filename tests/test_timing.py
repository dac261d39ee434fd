"""Timing: statistics on streams with known answers, real calls on the host, graphs on a device."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from fusion_evidence.lib.measure.timing import (
    median_ranks,
    ratio,
    rotation,
    sets_needed,
    summarize,
    time_graphs,
    time_host,
)

needs_device = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="captures CUDA/HIP graphs: no such device here"
)


def test_summary_of_known_samples():
    samples = [float(v) for v in range(20, 0, -1)]
    timing = summarize(samples, "by hand", footprint_bytes=12, sets=3)
    assert (timing.median_us, timing.low_us, timing.high_us) == (10.5, 6.0, 15.0)
    assert (timing.n, timing.method, timing.footprint_bytes, timing.sets) == (20, "by hand", 12, 3)
    assert timing.samples_us == tuple(samples)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_summary_refuses(samples):
    with pytest.raises(ValueError, match="sample"):
        summarize(samples, "by hand")


def test_median_ranks_from_the_tables():
    # sign-test tables, 95 %: 1st to 6th of 6, 2nd to 9th of 10, 6th to 15th of 20, 40th to 61st
    expected = {1: (0, 0), 5: (0, 4), 6: (0, 5), 10: (1, 8), 20: (5, 14), 100: (39, 60)}
    assert {n: median_ranks(n) for n in expected} == expected
    low, high = median_ranks(4000)
    assert low + high == 3999
    assert 1900 < low < 1950


@pytest.mark.parametrize("n", [15, 31])
def test_median_interval_covers(n):
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):  # skewed, as times are; its median is exp(0) = 1
        timing = summarize(generator.lognormal(0.0, 0.3, n).tolist(), "simulated")
        hits += timing.low_us <= 1.0 <= timing.high_us
    assert hits >= 940


def streams(generator, n, a, b, drift=0.0):
    slow = 1 + drift * np.linspace(0, 1, n)
    x, y = (m * slow * generator.lognormal(0.0, 0.05, n) for m in (a, b))
    return summarize(x.tolist(), "simulated"), summarize(y.tolist(), "simulated")


def test_ratio_covers_and_is_reproducible():
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        a, b = streams(generator, 31, 12.0, 3.0)
        _, low, high = ratio(a, b, resamples=500)
        hits += low <= 4.0 <= high
    assert hits >= 180
    assert ratio(a, b) == ratio(a, b)
    assert ratio(a, b) != ratio(a, b, seed=1)
    assert ratio(a, b)[0] == a.median_us / b.median_us


def test_ratio_of_an_arm_with_itself_is_one():
    a, _ = streams(np.random.default_rng(3), 31, 5.0, 5.0, drift=0.5)
    assert ratio(a, a) == (1.0, 1.0, 1.0)


def test_ratio_of_unequal_lengths():
    a, _ = streams(np.random.default_rng(4), 40, 8.0, 1.0)
    _, b = streams(np.random.default_rng(5), 21, 1.0, 2.0)
    middle, low, high = ratio(a, b)
    assert low < middle < high
    assert 3.5 < low < 4.5


def test_rotation_is_fair():
    names = ["a", "b", "c"]
    orders = list(rotation(names, 6))
    assert all(sorted(order) == names for order in orders)
    assert Counter(order[0] for order in orders) == {"a": 2, "b": 2, "c": 2}
    after = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(after.values()) == {2}
    assert len(after) == 6  # every ordered pair


def test_sets_needed():
    l2 = 60 * 2**20
    for bytes_per_call in (1, 60_000, l2, 2 * l2, 5 * l2):
        sets = sets_needed(bytes_per_call, l2)
        assert sets * bytes_per_call > 2 * l2 >= (sets - 1) * bytes_per_call
    assert sets_needed(60_000, l2) > 2000
    with pytest.raises(ValueError, match="positive"):
        sets_needed(0, l2)


def test_host_timing_of_real_calls():
    sources = [torch.randn(64, 64) for _ in range(3)]
    seen = []

    def call(i):
        seen.append(i)
        return sources[i] @ sources[i]

    calls = [lambda i=i: call(i) for i in range(3)]
    result = time_host(
        {"product": calls, "again": calls, "nothing": [lambda: None]},
        {"product": 3 * 64 * 64 * 4},
        samples=7,
        sample_us=50.0,
    )
    assert list(result) == ["product", "again", "nothing"]
    product = result["product"]
    assert (product.n, product.sets, product.footprint_bytes) == (7, 3, 49152)
    assert result["nothing"].footprint_bytes is None
    assert "host clock" in product.method
    assert all(t.low_us <= t.median_us <= t.high_us for t in result.values())
    assert all(s > 0 for t in result.values() for s in t.samples_us)
    assert seen[:6] == [0, 1, 2, 0, 1, 2]  # in order, round after round
    counts = Counter(seen)
    assert counts[0] == counts[1] == counts[2] >= 2 * (1 + 1 + 7)


def test_host_timing_passes_a_failing_call_on():
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        time_host({"broken": [broken]}, samples=1)


@pytest.mark.parametrize("timer", [time_host, time_graphs])
@pytest.mark.parametrize(("arms", "samples"), [({}, 3), ({"a": []}, 3), ({"a": [lambda: None]}, 0)])
def test_nothing_to_time(timer, arms, samples):
    with pytest.raises(ValueError, match=r"nothing to time|no calls"):
        timer(arms, samples=samples)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_graphs_without_a_device_say_so():
    with pytest.raises(RuntimeError, match="time_host"):
        time_graphs({"a": [lambda: None]})


@needs_device
def test_graphs_replay_every_call_and_free_their_memory():
    sets = 2000
    counts = torch.zeros(sets, dtype=torch.int64, device="cuda")
    rows = torch.randn(sets, 1024, device="cuda")

    def call(i):
        counts[i] += 1
        return rows[i] * 2

    calls = [lambda i=i: call(i) for i in range(sets)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    result = time_graphs({"a": calls, "same": calls}, {"a": 8192 * sets}, samples=5, replays=2)
    # captured, not merely run once; every set equally often
    assert counts.min() == counts.max()
    assert int(counts[0]) > 2 * 5 * (1 + 2)
    assert result["a"].n == 5
    assert result["a"].sets == sets
    assert "graph replay" in result["a"].method
    assert 0 < result["a"].low_us <= result["a"].median_us <= result["a"].high_us
    assert torch.cuda.memory_reserved() <= before + 2**22


@needs_device
def test_a_call_that_cannot_be_captured_is_named():
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="arm 'reads back'"):
        time_graphs({"reads back": [lambda: x.sum().item()]}, samples=1)
    torch.cuda.synchronize()
    assert time_graphs({"fine": [lambda: x + 1]}, samples=2)["fine"].n == 2
