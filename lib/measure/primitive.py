"""The primitive alone: implementations under one signature, equal work, and buffers to rotate over.

An *implementation* is any callable with the signature of `kernels.reference.qkv_prologue`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion_evidence.kernels import eager, fused
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.older_triton import CAN_OVERLAP
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.graph import generated_code
from fusion_evidence.lib.measure import floors, peers, timing
from fusion_evidence.lib.measure.inputs import Inputs, poisoned, prologue_inputs
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.measure.timing import Timing
from fusion_evidence.lib.report.recorder import Recorder

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
Implementation = Callable[..., Outputs]
Arm = Callable[[Inputs], Callable[[], Any]]


def any_tree(shape: AttentionShape) -> Numerics:
    """Valid numerics for a call whose implementation ignores them."""
    return Numerics("per_op", Reduction.candidates(shape.head_dim)[0])


def fitting(numerics: Numerics, shape: AttentionShape) -> Numerics:
    """``numerics``, or where its trees are of another head size, the same with one warp's tree."""
    if numerics.reduction.size == shape.head_dim:
        return numerics
    return replace(numerics, reduction=Reduction(32, shape.head_dim // 32), k_reduction=None)


def source(implementation: Implementation) -> str:
    """The source a reader wants to see: the Triton kernel of the project's own, else the function's."""
    shown = fused._prologue.fn if implementation is fused.qkv_prologue else implementation
    try:
        return inspect.getsource(inspect.unwrap(shown))
    except (OSError, TypeError):  # compiled, or an object that is called
        return f"# {shown!r} has no Python source\n"


def in_batches(implementation: Implementation, size: int) -> Implementation:
    """The same work in calls of ``size`` tokens each, outputs put together again.

    A T=1 kernel produces a few thousand elements a call, too few for a zero to mean anything; this makes
    many calls count as one comparison.
    """

    def call(
        qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, positions: Tensor,
        slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: object,
    ) -> Outputs:  # fmt: skip
        results = []
        for start in range(0, qkv.shape[0], size):
            # Copies: a slice at an odd address would be a case of its own for a compiler.
            part = slice(start, start + size)
            tensors = qkv[part].clone(), q_weight, k_weight, cos_sin, positions[..., part].clone()
            written = slot_mapping[part].clone(), key_cache, value_cache
            results.append(implementation(*tensors, *written, *rest))
        q, k, v, gate = (torch.cat(parts) for parts in zip(*results, strict=True))
        return q, k, v, gate

    return call


def batches_for(elements: int, size: int, shape: AttentionShape) -> int:
    """How many batches of ``size`` tokens hold ``elements`` computed elements (Q and K), at least one."""
    return max(1, -(-elements // (size * (shape.q_size + shape.kv_size))))


def static_compiled() -> Implementation:
    """`kernels.eager` compiled for the first shape it is called with: the baseline users have.

    It ignores ``numerics``, as the eager form does. Resets Dynamo, so the one made before is not to be
    called again: a region of one shape at a time is what a static compile means.
    """
    torch._dynamo.reset()

    def region(*args: object) -> Outputs:
        return eager.qkv_prologue(*args)  # type: ignore[arg-type]

    return torch.compile(region, dynamic=False, fullgraph=True)


def cache_sized_work(
    implementation: Implementation, shape: AttentionShape, inputs: Inputs
) -> list[str]:
    """What Inductor generated for ``implementation`` that is as large as the whole KV cache.

    Compiles it on ``inputs`` with a cache larger than every activation, so that size tells them apart.
    An empty list is the proof that the baseline writes in place. ValueError when nothing was compiled:
    then nothing is proved.
    """
    blocks = inputs.qkv.numel() // (shape.kv_size * inputs.key_cache.shape[1]) + 9
    blocks = max(blocks, inputs.key_cache.shape[0])  # every slot of the inputs' own cache
    size = (blocks, *inputs.key_cache.shape[1:])
    cache = [poisoned(*size, dtype=inputs.qkv.dtype, device=inputs.qkv.device) for _ in range(2)]
    with generated_code.capture() as codes:
        implementation(
            *replace(inputs, key_cache=cache[0], value_cache=cache[1]).args(),
            shape,
            any_tree(shape),
        )
    if not codes:
        raise ValueError(
            "no generated code was captured: this implementation was not compiled here"
        )
    found = []
    for code in codes:
        found += generated_code.kernels_touching(code, cache[0].numel())
        found += generated_code.unknown_sizes(code, cache[0].numel())
    return found


def head(inputs: Inputs, tokens: int) -> Inputs:
    """The first ``tokens`` tokens of ``inputs``, with caches of their own."""
    few = replace(
        inputs,
        qkv=inputs.qkv[:tokens],
        positions=inputs.positions[..., :tokens],
        slot_mapping=inputs.slot_mapping[:tokens],
    )
    return few.clone()


def bytes_moved(shape: AttentionShape, tokens: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes that ``tokens`` tokens must read and write: each ``qkv`` row in, six outputs out.

    Positions, slots, weights and table rows are left out, some 1 % of it.
    """
    read = shape.qkv_width
    written = 2 * shape.q_size + 4 * shape.kv_size
    return read * tokens * itemsize, written * tokens * itemsize


def buffer_sets(
    shape: AttentionShape, tokens: int, sets: int, *, device: str, seed: int, table: int = 32768
) -> list[Inputs]:
    """``sets`` inputs of ``tokens`` tokens with memory of their own; weights and table are shared.

    Each position is used once or nearly so: the table rows a call reads are as cold as its activations.
    """
    whole = prologue_inputs(shape, tokens * sets, device=device, seed=seed, table=table)
    blocks = -(-tokens // whole.key_cache.shape[1]) + 1
    size = (blocks, *whole.key_cache.shape[1:])
    dtype = whole.qkv.dtype
    generator = torch.Generator(device).manual_seed(seed)
    return [
        replace(
            whole,
            qkv=whole.qkv[i * tokens : (i + 1) * tokens].clone(),
            positions=whole.positions[:, i * tokens : (i + 1) * tokens].clone(),
            slot_mapping=torch.randperm(blocks * size[1], generator=generator, device=device)[
                :tokens
            ],
            key_cache=poisoned(*size, dtype=dtype, device=device),
            value_cache=poisoned(*size, dtype=dtype, device=device),
        )
        for i in range(sets)
    ]


def arm(
    implementation: Implementation, shape: AttentionShape, numerics: Numerics, **options: object
) -> Arm:
    """An implementation as what `time_arms` takes."""
    return lambda one: partial(implementation, *one.args(), shape, numerics, **options)


def own_arms(
    kernel: Implementation,
    shape: AttentionShape,
    numerics: Numerics,
    machine: Machine,
    *,
    with_eager: bool = True,
) -> dict[str, Arm]:
    """The kernel and its baselines, as far as this machine can time them, the kernel first.

    ``overlap`` is the project's kernel under programmatic dependent launch, where the machine has it.
    On a CPU there is no kernel to time: Triton's interpreter says nothing about one.
    """
    baselines = {"compiled": arm(static_compiled(), shape, numerics)}
    if with_eager:
        baselines["eager"] = arm(eager.qkv_prologue, shape, numerics)
    if machine.device == "cpu":
        return baselines
    arms = {"fused": arm(kernel, shape, numerics)} | baselines
    if (
        machine.profile == "cuda"
        and int(machine.arch.removeprefix("sm_")) >= 90
        and kernel is fused.qkv_prologue
        and CAN_OVERLAP
    ):
        arms["overlap"] = arm(overlapping, shape, numerics)
    return arms


def overlapping(*args: object) -> Outputs:
    """`fused.qkv_prologue` under programmatic dependent launch.

    See `fused.Launch` for when that is right. Back to back its launches overlap one another, so that its
    time is one of throughput, beside floors and arms that wait for their predecessor.
    """
    tokens, shape = args[0].shape[0], args[8]  # type: ignore[attr-defined]
    launch = replace(fused.choose_launch(tokens, shape), overlap=True)  # type: ignore[arg-type]
    return fused.qkv_prologue(*args, launch=launch)  # type: ignore[arg-type]


def peer_arms(
    names: Sequence[str], shape: AttentionShape, numerics: Numerics, example: Inputs
) -> tuple[dict[str, Arm], dict[str, str]]:
    """Other projects' kernels that do equal work on ``example``, and a word on each: what it leaves out,
    or why it is not among the arms."""
    arms: dict[str, Arm] = {}
    words: dict[str, str] = {}
    for name in names:
        try:
            reason = peers.available(name)
            if reason is None:
                one = peers.peer(name)
                work = peers.equal_work(one, (*example.args(), shape, numerics))
                reason = str(work)
                if work.equal and not work.missing & {"mrope"}:
                    arms[name] = _peer_arm(one, shape, numerics)
        except Exception as error:  # somebody else's code: whatever it does, the rest goes on
            reason = f"{name} failed: {error!r}"[:300]
        words[name] = reason
    return arms, words


def _peer_arm(one: peers.Peer, shape: AttentionShape, numerics: Numerics) -> Arm:
    return lambda inputs: one.prepare(*inputs.args(), shape, numerics)


def one_dimensional(inputs: Inputs) -> Inputs:
    """The same inputs with text positions ``[T]`` in place of three rows."""
    return replace(inputs, positions=inputs.positions[0].clone())


def time_arms(
    arms: Mapping[str, Arm],
    shape: AttentionShape,
    tokens: int,
    machine: Machine,
    *,
    cold: bool,
    seed: int,
    samples: int,
    positions: str = "3d",
) -> dict[str, Timing]:
    """Time implementations against their floors, all arms interleaved, in one process.

    Adds ``control``, the first arm once more (A/A), and on an accelerator the floors: ``empty``, a kernel
    that does nothing in one program; ``copy``, the fastest of several kernels that read and write the
    same bytes; ``accesses``, the op's own loads and stores without its arithmetic. Cold: buffers rotate
    over more than twice the L2 cache; hot: one buffer set.

    Args:
        arms: name -> what makes a call out of one buffer set. Outputs are allocated as each arm does it.
        positions: "3d" (MRoPE rows) or "1d" (text).

    Returns:
        Timing by name. On a CPU host times, where a Triton kernel must not be among the arms.
    """
    read, written = bytes_moved(shape, tokens)
    l2_bytes = machine.l2_bytes or 32 << 20
    sets = timing.sets_needed(read + written, l2_bytes) if cold else 1
    inputs = buffer_sets(shape, tokens, sets, device=machine.device, seed=seed)
    if positions == "1d":
        inputs = [one_dimensional(one) for one in inputs]
    work = {name: [make(one) for one in inputs] for name, make in arms.items()}
    work["control"] = work[next(iter(work))]
    footprints = dict.fromkeys(work, (read + written) * sets)
    if machine.device == "cpu":
        return timing.time_host(work, footprints, samples=samples)
    candidates = _copies(read, written, sets, machine.device)
    work |= candidates | {"empty": [floors.empty_kernel()]}
    if positions == "3d":
        work["accesses"] = [arm(floors.accesses, shape, any_tree(shape))(one) for one in inputs]
    footprints |= dict.fromkeys(candidates, (read + written) * sets)
    times = timing.time_graphs(work, footprints, samples=samples)
    best = min(candidates, key=lambda name: times[name].median_us)
    copy = replace(times[best], method=f"{times[best].method}; {best}, best of {len(candidates)}")
    return {name: time for name, time in times.items() if name not in candidates} | {"copy": copy}


def _copies(
    read: int, written: int, sets: int, device: str
) -> dict[str, list[Callable[[], object]]]:
    arms: dict[str, list[Callable[[], object]]] = {}
    for _ in range(sets):
        source = torch.randint(256, (read,), dtype=torch.uint8, device=device)
        target = torch.empty(written, dtype=torch.uint8, device=device)
        for name, call in floors.copy_candidates(source, target).items():
            arms.setdefault(name, []).append(call)
    return arms


def record(book: Recorder, times: Mapping[str, Timing], **labels: Any) -> None:
    """Write down every arm's time, with its interval, and the footprint of its buffers."""
    for impl, one in times.items():
        book.measure(
            "time",
            one.median_us,
            unit="us",
            low=one.low_us,
            high=one.high_us,
            n=one.n,
            method=one.method,
            impl=impl,
            **labels,
        )
        if one.footprint_bytes is not None:  # the floors but the copy have no buffers to speak of
            book.measure("footprint", one.footprint_bytes, unit="B", impl=impl, **labels)


def nearest(studied: Sequence[int], tokens: int) -> int:
    """Which studied T stands for ``tokens``: the largest one not above it, else the smallest."""
    return max((T for T in studied if tokens >= T), default=min(studied))


def near_the_floor(
    ratios: Mapping[int, tuple[float, float, float]],
    timings: Mapping[int, Mapping[str, Timing]],
    limits: Mapping[int, float],
) -> tuple[str, str]:
    """Verdict and figures of the kernel's time over the best copy's, T by T, against ``limits``.

    ``ratios`` holds that ratio with its interval, ``timings`` the times it was formed of.
    INCONCLUSIVE where a T of ``limits`` was not timed.
    """
    ratios = {T: r for T, r in sorted(ratios.items()) if T in limits}
    why = ", ".join(f"T={T}: {r[0]:.3f} [{r[1]:.3f}, {r[2]:.3f}]" for T, r in ratios.items())
    pairs = {T: (timings[T]["accesses"].median_us, timings[T]["fused"].median_us) for T in ratios}
    why = f"times the best copy {why}; the op's accesses without its arithmetic: " + ", ".join(
        f"{accesses:.2f} of {fused:.2f} us at T={T}" for T, (accesses, fused) in pairs.items()
    )
    if slower := [str(T) for T, (accesses, fused) in pairs.items() if accesses > fused]:
        why += f" (no floor at T = {', '.join(slower)})"
    if missing := sorted(set(limits) - set(ratios)):
        return "INCONCLUSIVE", f"not timed: T={missing}; {why}"
    failed = {T: r[0] for T, r in ratios.items() if r[0] > limits[T]}
    if not failed:
        return "PASS", why
    only = " only" * (len(failed) < len(ratios))
    over = ", ".join(f"{value:.3f}, at most {limits[T]} wanted" for T, value in failed.items())
    return "FAIL", f"FAIL at T = {', '.join(map(str, failed))}{only}: {over}; {why}"


LEVEL = 0.01
"""Two kernels nearer than this are level: where tensors lie is worth as much (``kernels/NOTES.md``)."""


def ahead_of_peers(
    timings: Mapping[tuple[int, str], Mapping[str, Timing]], noise: float = 0.03
) -> tuple[str, str]:
    """Verdict and figures of the kernel's cold time over its peers', by (T, positions).

    At T=1 at most 0.6 of vLLM's two launches (three position rows) and 0.9 of aiter (1-D positions, all
    it takes); from T=1024 ahead of aiter, by `LEVEL` at least. The verdict is limited where they are level,
    where the interval of the ratio includes the limit, where the ratio lies above it by less than the same
    kernel's two arms differ, and if a peer was not timed. INCONCLUSIVE if the two arms differ by more than
    ``noise``; NOT_RUN without peers.
    """
    found, level, verdicts = [], [], {"vllm": "not timed", "aiter": "not timed"}
    for (tokens, positions), times in sorted(timings.items()):
        asked = [("vllm", 0.6, 0.0)] if (tokens, positions) == (1, "3d") else []
        if positions == "1d" and (tokens == 1 or tokens >= 1024):
            asked.append(("aiter", 0.9, 0.0) if tokens == 1 else ("aiter", 1.0, LEVEL))
        for peer, limit, margin in asked:
            if peer not in times:
                continue
            value, low, high = timing.ratio(times["fused"], times[peer])
            twice = abs(timing.ratio(times["control"], times["fused"])[0] - 1)
            found.append(
                f"{value:.3f} [{low:.3f}, {high:.3f}] of {peer} at T={tokens}, A/A {twice:.3f}"
            )
            behind = low - max(twice, margin) > limit
            this = "ok" if high <= limit - margin else "fail" if behind else "near"
            this = "noisy" if twice > noise else this
            if this == "near" and margin:
                level.append(f"level with {peer} at T={tokens}")
            worst = ("not timed", "ok", "near", "noisy", "fail")
            verdicts[peer] = max(verdicts[peer], this, key=worst.index)
    if not found:
        return "NOT_RUN", "no peer was timed on this machine"
    values = set(verdicts.values())
    verdict = "PASS_WITH_LIMITATIONS" if values & {"near", "not timed"} else "PASS"
    verdict = "FAIL" if "fail" in values else "INCONCLUSIVE" if "noisy" in values else verdict
    untimed = [f"{peer} not timed" for peer, one in verdicts.items() if one == "not timed"]
    return verdict, "; ".join([*level, *found, *untimed])
