"""What a client of a service sees: time to the first token, time between tokens, and how sure we are.

The definitions are those of ``vllm bench serve`` (``calculate_metrics`` in vllm/benchmarks/serve.py and
``RequestFuncOutput`` in vllm/benchmarks/lib/endpoint_request_func.py, read at vLLM commit 009e6d4a):

- TTFT: arrival of the first token since the request was sent.
- E2E: arrival of the last token since the request was sent.
- TPOT: ``(E2E - TTFT) / (tokens - 1)``, one value per request with more than one token.
- ITL: every gap between two tokens of one request, all requests' gaps in one pool.
- Only completed requests count. One that failed, or never got a token, is no completed request there
  either ("Never received a valid chunk"); one with a single token has TTFT and E2E and no TPOT.
- Percentiles are NumPy's, interpolated linearly; times are in milliseconds.

One thing differs: of nothing, vLLM reports 0 ms, and this reports NaN with n = 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Finish = Literal["length", "stop", "error"]
Values = NDArray[np.float64]

METRICS = ("ttft", "queue", "first_call", "prefill", "tpot", "itl", "e2e")
"""What `summarize` reports, in its order; ttft = queue + first_call + prefill."""


@dataclass(frozen=True)
class Reply:
    """What came back for one request. Times are in seconds, from the moment it was submitted.

    tokens: every generated token, a stop token included. text: without the stop token.
    finish_reason: ``length``, ``stop`` or ``error``; with ``error``, ``error`` says what happened and
        tokens and text hold what came before it.
    queue_s: until the service began with it. first_call_s: what its prefill took longer because
        something was compiled. prefill_s: the rest, until the first token.
    token_times_s: arrival of each token.

    Its fields are JSON as they stand: ``Reply(**json.loads(json.dumps(dataclasses.asdict(reply))))``
    is an equal reply.
    """

    id: str
    prompt_tokens: int
    tokens: list[int]
    text: str = ""
    finish_reason: Finish = "length"
    error: str = ""
    queue_s: float = 0.0
    first_call_s: float = 0.0
    prefill_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)

    @property
    def completed(self) -> bool:
        """It did not fail and has a token."""
        return self.finish_reason != "error" and bool(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None without one."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token; None without one."""
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between its tokens, one fewer than it has tokens."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None under two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def summarize(
    replies: Sequence[Reply],
    *,
    percentiles: Sequence[float] = (50, 90, 99),
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Mean and percentiles of every metric over the completed requests, with intervals.

    Returns one row for each metric of `METRICS` and each stat (``mean``, ``p50``, ...): columns
    ``metric``, ``stat``, ``value``, ``low``, ``high`` (milliseconds) and ``n`` (values: gaps for
    ``itl``, else requests). ``low`` and ``high`` are the 95 % bootstrap interval, drawn by request,
    since the gaps of one request are not independent; NaN under two requests. A percentile near the
    largest of few values has an interval that cannot reach above that value: it is too narrow then.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for metric, groups in _groups([reply for reply in replies if reply.completed]).items():
        values = np.concatenate(groups) if groups else np.empty(0)
        stats = _stats(values, percentiles)
        low, high = _interval(groups, percentiles, resamples, generator)
        names = ["mean", *(f"p{p:g}" for p in percentiles)]
        rows += [
            (metric, name, *numbers, len(values))
            for name, *numbers in zip(names, stats, low, high, strict=True)
        ]
    return pd.DataFrame(rows, columns=["metric", "stat", "value", "low", "high", "n"])


def _groups(replies: Sequence[Reply]) -> dict[str, list[Values]]:
    """Metric -> its values in milliseconds, one array for each request that has any."""

    def values(reply: Reply) -> dict[str, list[float]]:
        one = {
            "ttft": reply.ttft_s,
            "queue": reply.queue_s,
            "first_call": reply.first_call_s,
            "prefill": reply.prefill_s,
            "tpot": reply.tpot_s,
            "e2e": reply.e2e_s,
        }
        seconds = {name: [] if value is None else [value] for name, value in one.items()}
        return seconds | {"itl": reply.itl_s}

    found = [values(reply) for reply in replies]
    return {
        metric: [np.array(one[metric]) * 1000 for one in found if one[metric]] for metric in METRICS
    }


def _stats(values: Values, percentiles: Sequence[float]) -> Values:
    """Mean and percentiles over the last dimension, as the first dimension of the result."""
    if values.shape[-1] == 0:
        return np.full(1 + len(percentiles), np.nan)
    mean = values.mean(axis=-1)[None]
    return np.concatenate((mean, np.percentile(values, percentiles, axis=-1)))


def _interval(
    groups: Sequence[Values],
    percentiles: Sequence[float],
    resamples: int,
    generator: np.random.Generator,
) -> tuple[Values, Values]:
    if len(groups) < 2:
        unknown = np.full(1 + len(percentiles), np.nan)
        return unknown, unknown
    drawn = generator.integers(len(groups), size=(resamples, len(groups)))
    if all(len(group) == 1 for group in groups):
        found = _stats(np.concatenate(groups)[drawn], percentiles)
    else:
        pools = (np.concatenate([groups[i] for i in row]) for row in drawn)
        found = np.stack([_stats(pool, percentiles) for pool in pools], axis=1)
    low, high = np.quantile(found, (0.025, 0.975), axis=1)
    return low, high


def paired_tpot(a: Sequence[Reply], b: Sequence[Reply]) -> tuple[Values, Values]:
    """TPOT in milliseconds of the requests that both sides completed with two tokens or more.

    Pairs by id, and by turn where an id comes several times; in the order of ``a``.
    """
    others = _tpot_by_turn(b)
    pairs = [
        (value, others[turn]) for turn, value in _tpot_by_turn(a).items() if turn in others
    ] or np.empty((0, 2))
    x, y = np.array(pairs).T * 1000
    return x, y


def _tpot_by_turn(replies: Sequence[Reply]) -> dict[tuple[str, int], float]:
    turns: Counter[str] = Counter()
    found = {}
    for reply in replies:
        if reply.completed and reply.tpot_s is not None:
            found[reply.id, turns[reply.id]] = reply.tpot_s
        turns[reply.id] += 1
    return found


def change_percent(
    a: Sequence[float] | Values,
    b: Sequence[float] | Values,
    stat: str = "mean",
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """How much ``stat`` of ``b`` is above that of ``a``, in percent: (change, low, high).

    a, b: paired samples (the same requests, see `paired_tpot`, or the same rounds), two at least.
    stat: ``mean`` or a percentile, ``p50``, ``p99``. The interval is the bootstrap's over pairs.
    ValueError: not paired, or fewer than two pairs.
    """
    change, found = _bootstrap_change(a, b, stat, resamples, seed)
    low, high = np.quantile(found, ((1 - confidence) / 2, (1 + confidence) / 2))
    return change, float(low), float(high)


def detectable_percent(
    a: Sequence[float] | Values,
    b: Sequence[float] | Values,
    stat: str = "mean",
    *,
    confidence: float = 0.95,
    power: float = 0.8,
    resamples: int = 4000,
    seed: int = 0,
) -> float:
    """The smallest change of ``stat`` that this many samples, this noisy, could have resolved.

    ``(t[(1 + confidence) / 2] + t[power]) * SE`` in percent: a change of this size is told from none,
    at ``confidence``, with probability ``power``. The t quantiles have n - 1 degrees of freedom; SE is
    the standard deviation of `change_percent` over bootstrap draws of the n pairs, times
    ``sqrt(n / (n - 1))``. What all samples of one side have in common, such as a whole process that
    runs slower, is in no resample: also look at how far two identical arms are apart.

    Arguments as in `change_percent`. ValueError: not paired, or fewer than three pairs.
    """
    n = len(a)
    if n < 3:
        raise ValueError(f"expected at least 3 pairs, got {n}")
    _, found = _bootstrap_change(a, b, stat, resamples, seed)
    error = float(np.std(found)) * math.sqrt(n / (n - 1))
    return (_t_quantile((1 + confidence) / 2, n - 1) + _t_quantile(power, n - 1)) * error


def _bootstrap_change(
    a: Sequence[float] | Values,
    b: Sequence[float] | Values,
    stat: str,
    resamples: int,
    seed: int,
) -> tuple[float, Values]:
    x, y = np.asarray(a, float), np.asarray(b, float)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise ValueError(f"expected two pairs or more, got {len(x)} and {len(y)} samples")
    measure = _measure(stat)
    rounds = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    found = 100 * (measure(y[rounds]) / measure(x[rounds]) - 1)
    return float(100 * (measure(y) / measure(x) - 1)), found


def _measure(stat: str) -> Callable[[Values], Values]:
    """``mean``, ``p50``, ``p99.9``, ... over the last dimension."""
    if stat == "mean":
        return lambda values: values.mean(axis=-1)
    try:
        percentile = float(stat.removeprefix("p"))
    except ValueError:
        percentile = math.nan
    if not (stat.startswith("p") and 0 <= percentile <= 100):
        raise ValueError(f"stat: expected 'mean' or a percentile such as 'p99', got {stat!r}")
    return lambda values: np.percentile(values, percentile, axis=-1)


def _t_quantile(probability: float, freedom: int) -> float:
    """Student's t, from the normal quantile (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**i for i, term in enumerate(terms, 1))
