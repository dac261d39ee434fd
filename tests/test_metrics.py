"""Service metrics on streams whose answers are known."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from pydantic import BaseModel

from fusion_evidence.lib.service.metrics import (
    METRICS,
    Reply,
    change_percent,
    detectable_percent,
    paired_tpot,
    summarize,
)


def reply(name: str, *times: float, **other) -> Reply:
    return Reply(name, 5, list(range(len(times))), token_times_s=list(times), **other)


def answer(frame, metric, stat, column="value"):
    (value,) = frame[(frame.metric == metric) & (frame.stat == stat)][column]
    return value


def test_times_of_one_reply():
    one = reply("a", 2.0, 2.5, 4.0, 5.0, queue_s=1.5, first_call_s=0.25, prefill_s=0.25)
    assert (one.ttft_s, one.e2e_s, one.tpot_s) == (2.0, 5.0, 1.0)
    assert one.itl_s == [0.5, 1.5, 1.0]
    assert one.ttft_s == one.queue_s + one.first_call_s + one.prefill_s


def test_one_token_and_none():
    one, none = reply("a", 2.0), reply("b")
    assert (one.ttft_s, one.e2e_s, one.tpot_s, one.itl_s) == (2.0, 2.0, None, [])
    assert (none.ttft_s, none.e2e_s, none.tpot_s, none.itl_s) == (None, None, None, [])
    assert (one.completed, none.completed) == (True, False)


def test_json_round_trip():
    one = reply("a", 1.0, 2.5, text="né", finish_reason="stop", queue_s=0.1)
    assert Reply(**json.loads(json.dumps(asdict(one)))) == one

    class Holder(BaseModel):
        replies: list[Reply]

    holder = Holder(replies=[one])
    assert Holder.model_validate_json(holder.model_dump_json()) == holder


def as_vllm_does(outputs: list[Reply]) -> dict[str, list[float]]:
    """The loop of vLLM's ``calculate_metrics``, over what its client would have recorded."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2e": []}
    for output in outputs:
        times, success = output.token_times_s, output.finish_reason != "error"
        if not times or not success:
            continue
        ttft, latency, output_len = times[0], times[-1], len(output.tokens)
        itl = np.diff(times).tolist()
        if output_len > 1:
            found["tpot"].append((latency - ttft) / (output_len - 1))
        found["itl"] += itl
        found["ttft"].append(ttft)
        found["e2e"].append(latency)
    return found


def test_summary_is_vllms():
    generator = np.random.default_rng(3)
    replies = [
        reply(str(n), *np.cumsum(generator.lognormal(-3, 1, n))) for n in (1, 2, 40, 7, 90, 1, 13)
    ]
    replies += [reply("empty"), reply("failed", 5.0, 500.0, finish_reason="error", error="x")]
    frame = summarize(replies)
    for metric, seconds in as_vllm_does(replies).items():
        expected = {"mean": np.mean(seconds)}
        expected |= {f"p{p}": np.percentile(seconds, p) for p in (50, 90, 99)}
        for stat, value in expected.items():
            assert answer(frame, metric, stat) == pytest.approx(value * 1000), (metric, stat)
            assert answer(frame, metric, stat, "n") == len(seconds)


def test_gaps_are_pooled_and_tpot_is_per_request():
    """A long and a short request: mean ITL weighs gaps, mean TPOT requests."""
    long = reply("a", *np.arange(1.0, 102.0))  # 100 gaps of 1 s
    frame = summarize([long, reply("b", 0.0, 3.0)])
    assert answer(frame, "tpot", "mean") == pytest.approx(2000)
    assert answer(frame, "itl", "mean") == pytest.approx(103 / 101 * 1000)
    assert (answer(frame, "itl", "p50"), answer(frame, "itl", "p99", "n")) == (1000, 101)


def test_empty_failed_and_one_token_replies_change_no_token_time():
    kept = [reply(str(i), 1.0 + i, 1.1 + i, 1.3 + i) for i in range(5)]
    extra = [reply("none"), reply("one", 3.0), reply("bad", 9.0, 99.0, finish_reason="error")]
    with_them, without = summarize(kept + extra), summarize(kept)
    for metric in ("tpot", "itl"):
        same = [
            frame[frame.metric == metric].reset_index(drop=True) for frame in (with_them, without)
        ]
        assert same[0].equals(same[1])
    assert answer(with_them, "ttft", "mean", "n") == 6
    assert answer(with_them, "ttft", "mean") == pytest.approx(answer(without, "ttft", "mean"))


def test_nothing_is_not_zero():
    frame = summarize([reply("none")])
    assert set(frame.metric) == set(METRICS)
    assert (frame.n == 0).all()
    assert frame[["value", "low", "high"]].isna().all(axis=None)
    one = summarize([reply("a", 1.0, 2.0)])
    assert one.value.notna().all()
    assert one.low.isna().all(), "one request says nothing about the spread"


def test_parts_of_the_first_token_add_up():
    replies = [
        reply(str(i), 6.0 + i, queue_s=float(i), first_call_s=4.0, prefill_s=2.0) for i in range(4)
    ]
    frame = summarize(replies)
    parts = [answer(frame, metric, "mean") for metric in ("queue", "first_call", "prefill")]
    assert parts == [1500, 4000, 2000]
    assert sum(parts) == answer(frame, "ttft", "mean")


def test_interval_of_the_mean_covers():
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        ttft = generator.lognormal(0, 0.2, 30)
        frame = summarize([reply(str(i), t) for i, t in enumerate(ttft)], resamples=400, seed=seed)
        low, high = (answer(frame, "ttft", "mean", c) / 1000 for c in ("low", "high"))
        hits += low <= np.exp(0.02) <= high
    assert 175 <= hits <= 200


def test_interval_of_gaps_is_drawn_by_request():
    """Requests that differ and gaps that do not: many gaps must not look like much evidence."""
    levels = np.linspace(1.0, 2.0, 6)
    few = [reply(str(i), *(np.arange(1, 4) * v)) for i, v in enumerate(levels)]
    many = [reply(str(i), *(np.arange(1, 301) * v)) for i, v in enumerate(levels)]

    def width(replies):
        frame = summarize(replies)
        return answer(frame, "itl", "mean", "high") - answer(frame, "itl", "mean", "low")

    assert width(many) == pytest.approx(width(few), rel=0.1)
    assert width(many) > 300


def test_pairs_by_id_and_turn():
    a = [reply("x", 0.0, 1.0), reply("y", 0.0, 2.0), reply("x", 0.0, 3.0), reply("z", 1.0)]
    b = [reply("z", 0.0, 9.0), reply("x", 0.0, 1.5), reply("x", 0.0, 3.5), reply("w", 0.0, 1.0)]
    x, y = paired_tpot(a, b)
    assert (x.tolist(), y.tolist()) == ([1000, 3000], [1500, 3500])
    assert [side.size for side in paired_tpot(a, [])] == [0, 0]


def test_change_of_paired_samples():
    """Requests of very different length, all 2 % slower: pairing shows it exactly."""
    base = np.array([10.0, 40.0, 90.0, 15.0, 60.0])
    for stat in ("mean", "p50", "p99"):
        change, low, high = change_percent(base, base * 1.02, stat)
        assert (change, low, high) == pytest.approx((2.0, 2.0, 2.0))
    noisy = base * (1 + 0.05 * np.array([1, -1, 0.5, 1, -1]))
    _, low, high = change_percent(base, noisy)
    assert low < 0 < high


def test_detectable_against_the_textbook():
    """n pairs whose relative difference has standard deviation s: (t + t) * s / sqrt(n)."""
    noise = np.array([3.0, -1.0, 0.5, -2.0, 1.5, -0.5, 2.0, -3.0, 1.0, -1.5])
    base, n = np.full(10, 100.0), 10
    error = noise.std(ddof=1) / np.sqrt(n)
    found = detectable_percent(base, base + noise, resamples=40000)
    assert found == pytest.approx((2.262 + 0.883) * error, rel=0.02)  # t tables, 9 degrees
    four = detectable_percent(np.full(4, 100.0), base[:4] + noise[:4], resamples=40000)
    assert four == pytest.approx((3.182 + 0.978) * noise[:4].std(ddof=1) / 2, rel=0.03)


def test_an_effect_of_the_detectable_size_is_found_four_times_in_five():
    generator = np.random.default_rng(5)
    n, sigma, trials, seen, wrong = 40, 1.0, 300, 0, 0
    effect = detectable_percent(np.full(n, 100.0), 100 + sigma * standard(n), resamples=20000)
    for seed in range(trials):
        noise = 100 + generator.normal(0, sigma, n)
        for shift in (effect, 0.0):
            _, low, high = change_percent(
                np.full(n, 100.0), noise + shift, resamples=500, seed=seed
            )
            excluded = not low <= 0 <= high
            seen += excluded and shift > 0
            wrong += excluded and shift == 0
    assert 0.72 <= seen / trials <= 0.9
    assert wrong / trials <= 0.1


def standard(n: int) -> np.ndarray:
    """n values of mean 0 and standard deviation 1."""
    values = np.linspace(-1, 1, n)
    return values / values.std(ddof=1)


@pytest.mark.parametrize(
    ("a", "b", "stat", "words"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0], "mean", "3 and 2 samples"),
        ([1.0], [1.0], "mean", "at least 3 pairs|two pairs"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "median", "'median'"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "p101", "'p101'"),
    ],
)
def test_refuses(a, b, stat, words):
    for function in (change_percent, detectable_percent):
        with pytest.raises(ValueError, match=words):
            function(a, b, stat)
