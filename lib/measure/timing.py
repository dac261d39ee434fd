"""Time per call, compared fairly: arms interleaved, many samples, medians with intervals.

An *arm* is a sequence of calls doing the same work on different buffers. With one buffer set its
data stay in the L2 cache (hot); with `sets_needed` of them each call finds its own evicted (cold).
Passing one sequence under two names makes an A/A pair: what their `ratio` shows is noise.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Time of one call, in microseconds.

    median_us, low_us, high_us: median of the samples and the 95 % interval of the median from
        their order statistics, which assumes no distribution.
    n: samples. method: how they were taken.
    footprint_bytes: bytes all buffer sets of the arm span together (None if not said).
    sets: buffer sets, that is, different calls that the arm rotates over.
    samples_us: the samples in the order they were taken, each a mean over many calls.
    """

    median_us: float
    low_us: float
    high_us: float
    n: int
    method: str
    footprint_bytes: int | None
    sets: int
    samples_us: tuple[float, ...]


def sets_needed(bytes_per_call: int, l2_bytes: int) -> int:
    """Buffer sets so that going round them touches more than twice the L2 cache.

    bytes_per_call: bytes one call reads and writes. ValueError: either is not positive.
    """
    if bytes_per_call <= 0 or l2_bytes <= 0:
        raise ValueError(
            f"bytes_per_call and l2_bytes must be positive: got {bytes_per_call} and {l2_bytes}"
        )
    return 2 * l2_bytes // bytes_per_call + 1


def median_ranks(n: int, confidence: float = 0.95) -> tuple[int, int]:
    """0-based ranks of the two order statistics that enclose the median of a population.

    The narrowest symmetric pair with at least `confidence`; the extremes if `n` is too small for
    that (n < 6 at 95 %).
    """
    if n < 1:
        raise ValueError("no samples")
    low, tail = 0, 0
    for k in range(n // 2):
        tail += math.comb(n, k)
        # The k-th smallest lies above the median if at most k samples lie below it.
        if 2 * tail / (1 << n) > 1 - confidence:
            break
        low = k
    return low, n - 1 - low


def summarize(
    samples_us: Sequence[float], method: str, footprint_bytes: int | None = None, sets: int = 1
) -> Timing:
    """`Timing` of samples taken by any means. ValueError: none, or one that is not finite."""
    if not all(math.isfinite(s) for s in samples_us):
        raise ValueError("a sample is not a finite number")
    low, high = median_ranks(len(samples_us))
    ordered = sorted(samples_us)
    return Timing(
        median_us=float(np.median(ordered)),
        low_us=ordered[low],
        high_us=ordered[high],
        n=len(ordered),
        method=method,
        footprint_bytes=footprint_bytes,
        sets=sets,
        samples_us=tuple(samples_us),
    )


def ratio(
    a: Timing, b: Timing, confidence: float = 0.95, resamples: int = 4000, seed: int = 0
) -> tuple[float, float, float]:
    """Median of `a` over median of `b` with its bootstrap interval: (ratio, low, high).

    Above 1, `b` is faster. Arms with equally many samples are resampled by round, so that what
    slowed a whole round does not widen the interval.
    """
    x, y = np.asarray(a.samples_us), np.asarray(b.samples_us)
    generator = np.random.default_rng(seed)
    rounds = generator.integers(len(x), size=(resamples, len(x)))
    others = rounds if len(x) == len(y) else generator.integers(len(y), size=(resamples, len(y)))
    ratios = np.median(x[rounds], axis=1) / np.median(y[others], axis=1)
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return a.median_us / b.median_us, float(low), float(high)


def rotation(names: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Order of the arms in each round: rotated, and reversed every other time round, so that no
    arm is always first and none always follows the same other one."""
    for i in range(rounds):
        turn, offset = divmod(i, len(names))
        order = tuple(names[offset:]) + tuple(names[:offset])
        yield order[::-1] if turn % 2 else order


def time_host(
    arms: Mapping[str, Calls],
    footprints: Mapping[str, int] | None = None,
    *,
    samples: int = 31,
    sample_us: float = 2000.0,
    warmup: int = 1,
) -> dict[str, Timing]:
    """Time by the host's clock: for work that is done when its call returns (on the CPU).

    arms: name -> calls, gone through in order. footprints: name -> bytes that all its buffer sets
    span. samples: samples an arm. sample_us: each goes round the calls often enough to last about
    this long. warmup: rounds before, which also pay for compilation.
    ValueError: no arms, an arm without calls, samples < 1.
    """
    _check(arms, samples)
    repeats = {}
    for name, calls in arms.items():
        for _ in range(warmup):
            _go_round(calls, 1)
        repeats[name] = _repeats(_go_round(calls, 1), sample_us)
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for order in rotation(list(arms), samples):
        for name in order:
            elapsed = _go_round(arms[name], repeats[name])
            taken[name].append(elapsed / (repeats[name] * len(arms[name])))
    return {
        name: summarize(
            taken[name],
            f"host clock, {repeats[name] * len(calls)} calls a sample, arms interleaved",
            (footprints or {}).get(name),
            len(calls),
        )
        for name, calls in arms.items()
    }


def _check(arms: Mapping[str, Calls], samples: int) -> None:
    if not arms or samples < 1:
        raise ValueError(f"nothing to time: {len(arms)} arms, {samples} samples")
    for name, calls in arms.items():
        if not calls:
            raise ValueError(f"arm {name!r} has no calls")


def _go_round(calls: Calls, times: int) -> float:
    """Microseconds for going through the calls `times` times."""
    start = time.perf_counter_ns()
    for _ in range(times):
        for call in calls:
            call()
    return (time.perf_counter_ns() - start) / 1000


def _repeats(once_us: float, wanted_us: float) -> int:
    """How often something of `once_us` is done to last about `wanted_us`; at least once."""
    return max(1, math.ceil(wanted_us / max(once_us, 1e-3)))


def time_graphs(
    arms: Mapping[str, Calls],
    footprints: Mapping[str, int] | None = None,
    *,
    samples: int = 31,
    replays: int = 3,
    graph_us: float = 1000.0,
    warmup: int = 1,
) -> dict[str, Timing]:
    """Time on the device: each arm's calls in one CUDA (or HIP) graph, replayed.

    arms: name -> calls, captured in order. The tensors that the calls of one round return are all
    kept until the round is captured, so outputs rotate with the inputs. footprints as in
    `time_host`. samples: samples an arm; each is `replays` replays in a row between two events,
    after the L2 cache was swept and one replay that is not timed, so that launching is hidden and the
    caches hold what this arm leaves there and no other does. graph_us: a graph holds the calls often
    enough to run about this long. warmup: eager rounds before capture, on the capturing stream.
    All graphs live until the end, then their memory is given back. They share one memory pool, so an
    arm's outputs overwrite another's: only times come out.

    RuntimeError: no CUDA or ROCm device, or a call that cannot be captured (named). ValueError: as
    in `time_host`.
    """
    _check(arms, samples)
    if replays < 1:
        raise ValueError(f"replays must be positive: got {replays}")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "CUDA-graph timing needs a CUDA or ROCm device and there is none: use time_host"
        )
    with _captured(arms, graph_us, warmup) as (graphs, sweep):
        taken: dict[str, list[float]] = {name: [] for name in arms}
        for order in rotation(list(arms), samples):
            events = {}
            for name in order:
                graph, _ = graphs[name]
                sweep.replay()
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()
                start.record()
                for _ in range(replays):
                    graph.replay()
                stop.record()
                events[name] = start, stop
            torch.cuda.synchronize()
            for name, (start, stop) in events.items():
                calls = graphs[name][1] * len(arms[name]) * replays
                taken[name].append(start.elapsed_time(stop) * 1000 / calls)
        rounds = {name: times for name, (_, times) in graphs.items()}
    return {
        name: summarize(
            taken[name],
            f"{'HIP' if torch.version.hip else 'CUDA'}-graph replay, "
            f"{rounds[name] * len(calls)} calls a graph, {replays} replays a sample, "
            "arms interleaved, L2 swept before each",
            (footprints or {}).get(name),
            len(calls),
        )
        for name, calls in arms.items()
    }


Graphs = dict[str, tuple[torch.cuda.CUDAGraph, int]]


@contextmanager
def _captured(
    arms: Mapping[str, Calls], graph_us: float, warmup: int
) -> Iterator[tuple[Graphs, torch.cuda.CUDAGraph]]:
    """Name -> the arm's graph and how many rounds of its calls are in it; and the graph that sweeps."""
    stream = torch.cuda.Stream()
    # One pool: every arm's outputs lie where the others' do. Where tensors lie is worth 1 % (H200).
    pool = torch.cuda.graph_pool_handle()
    sweeping = _sweep_l2()  # holds the memory that the graph goes through
    sweep = _capture([sweeping], 8, stream, pool)  # a pool ends with its last graph
    graphs: Graphs = {}
    try:
        for name, calls in arms.items():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(max(1, warmup)):  # loads kernels and library workspaces
                    for call in calls:
                        call()
            torch.cuda.current_stream().wait_stream(stream)
            try:
                graph = _capture(calls, 1, stream, pool)
                rounds = _repeats(_replay_us(graph), graph_us)
                if rounds > 1:
                    graph.reset()
                    graph = _capture(calls, rounds, stream, pool)
            except RuntimeError as error:
                raise RuntimeError(
                    f"arm {name!r} cannot be captured in a graph: {error}"
                ) from error
            graphs[name] = graph, rounds
        yield graphs, sweep
    finally:
        torch.cuda.synchronize()
        for graph in (sweep, *(graph for graph, _ in graphs.values())):
            graph.reset()
        graphs.clear()
        del sweeping
        gc.collect()
        torch.cuda.empty_cache()


def _sweep_l2() -> Callable[[], object]:
    """Reads 256 MiB and writes as many, in memory of its own: more than any L2 cache holds.

    A load that asks to be evicted last (Inductor's do) leaves lines that stay as long as they are read:
    the next arm with the same inputs finds them, 64 of its own replays later too, and is up to 6 %
    faster (H200). A GB or two through other addresses makes them leave.
    """
    source = torch.zeros(64 << 20, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.add(source, 1, out=target)


def _capture(
    calls: Calls, rounds: int, stream: torch.cuda.Stream, pool: Any
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # thread_local: what other threads (a notebook's) ask of the driver must not end the capture.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        for _ in range(rounds):
            kept = [call() for call in calls]
            del kept
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Rough time of one replay: the fastest of a few."""
    times = []
    for _ in range(4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    return min(times)
