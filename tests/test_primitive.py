"""Implementations under one signature, the proof of the baseline, and the arms that are timed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from fusion_evidence.kernels import eager, fused, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import PRESETS, preset
from fusion_evidence.lib.measure import peers, primitive, timing
from fusion_evidence.lib.measure.compare import compare
from fusion_evidence.lib.measure.inputs import OUTPUTS, POISON, prologue_inputs, run
from fusion_evidence.lib.measure.machine import Machine

pytestmark = pytest.mark.usefixtures("one_thread", "compile_cache")

COMPACT = preset("compact")
NUMERICS = Numerics(reduction=Reduction(32, 2))
CPU = Machine(
    name="cpu",
    profile="cpu",
    device="cpu",
    device_name="cpu",
    arch="x86_64",
    cpu_cores=2,
    l2_bytes=1 << 16,
    versions={},
)


def differences(got, expected) -> list[str]:
    return [name for name in OUTPUTS if not compare(got[name], expected[name]).equal]


# --- what is shown, and with which numerics


def test_the_source_shown_is_the_kernels_own():
    assert "def _prologue(" in primitive.source(fused.qkv_prologue)
    assert primitive.source(eager.qkv_prologue).startswith("def qkv_prologue(")
    assert "no Python source" in primitive.source(torch.add)


def test_numerics_are_fitted_to_another_head_size():
    numerics = Numerics("storage", Reduction(64, 4), "cos", Reduction(32, 8))
    assert primitive.fitting(numerics, preset("qwen3.5-9b")) == numerics
    few = primitive.fitting(numerics, preset("compact"))
    assert few == Numerics("storage", Reduction(32, 2), "cos")


# --- equal work


@pytest.mark.parametrize("size", [1, 3, 10, 64])
@pytest.mark.parametrize("position_dims", [1, 2])
def test_batches_give_the_bits_of_one_call(size, position_dims):
    inputs = prologue_inputs(COMPACT, 10, position_dims=position_dims, padding=2)
    sizes = []

    def counted(*args):
        sizes.append(args[0].shape[0])
        return reference.qkv_prologue(*args)

    batched = run(primitive.in_batches(counted, size), inputs, COMPACT, NUMERICS)
    assert differences(batched, run(reference.qkv_prologue, inputs, COMPACT, NUMERICS)) == []
    assert sizes == [min(size, 10 - start) for start in range(0, 10, size)]


@pytest.mark.parametrize("elements", [0, 1, 512, 513, 10_000_000])
@pytest.mark.parametrize("size", [1, 65])
def test_batches_for_holds_the_elements_and_no_batch_more(elements, size):
    each = sum(output.numel() for output in computed(size))
    batches = primitive.batches_for(elements, size, COMPACT)
    assert batches >= 1
    assert batches * each >= elements
    assert batches == 1 or (batches - 1) * each < elements


def computed(tokens: int) -> tuple[torch.Tensor, ...]:
    """Q and K as an implementation returns them."""
    inputs = prologue_inputs(COMPACT, tokens)
    return reference.qkv_prologue(*inputs.args(), COMPACT, NUMERICS)[:2]


def test_nearest_is_the_largest_studied_size_not_above():
    studied = [1024, 1, 65]
    asked = {1: 1, 64: 1, 65: 65, 1023: 65, 1024: 1024, 16384: 1024}
    assert {T: primitive.nearest(studied, T) for T in asked} == asked
    assert primitive.nearest([65, 1024], 4) == 65


@pytest.mark.parametrize("name", PRESETS)
def test_bytes_moved_are_those_of_the_tensors(name):
    shape, tokens = preset(name), 3
    inputs = prologue_inputs(shape, tokens)
    numerics = Numerics(reduction=Reduction.candidates(shape.head_dim)[0])
    outputs = reference.qkv_prologue(*inputs.args(), shape, numerics)
    caches = (inputs.key_cache, inputs.value_cache)
    cached = sum(int((cache.view(torch.int16) != POISON).sum()) for cache in caches)
    written = sum(t.numel() * t.element_size() for t in outputs)
    written += cached * inputs.key_cache.element_size()
    read = inputs.qkv.numel() * inputs.qkv.element_size()
    assert primitive.bytes_moved(shape, tokens) == (read, written)


def test_head_has_caches_of_its_own():
    inputs = prologue_inputs(COMPACT, 4)
    few = primitive.head(inputs, 2)
    reference.qkv_prologue(*few.args(), COMPACT, NUMERICS)
    assert (inputs.key_cache.view(torch.int16) == POISON).all()
    assert torch.equal(few.qkv, inputs.qkv[:2])
    assert torch.equal(few.positions, inputs.positions[:, :2])
    assert torch.equal(few.slot_mapping, inputs.slot_mapping[:2])


def test_buffer_sets_share_nothing_that_a_call_writes_or_streams():
    sets = primitive.buffer_sets(COMPACT, 3, 5, device="cpu", seed=0, table=64)
    for name in ("qkv", "positions", "slot_mapping", "key_cache", "value_cache"):
        assert len({getattr(one, name).untyped_storage().data_ptr() for one in sets}) == 5
    assert len({one.cos_sin.data_ptr() for one in sets}) == 1
    for one in sets:
        reference.qkv_prologue(*one.args(), COMPACT, NUMERICS)
        assert one.slot_mapping.unique().numel() == 3
    assert not torch.equal(sets[0].qkv, sets[1].qkv)
    again = primitive.buffer_sets(COMPACT, 3, 5, device="cpu", seed=0, table=64)
    assert torch.equal(again[4].slot_mapping, sets[4].slot_mapping)


# --- the baseline is honest


def cloning(*args):
    """`kernels.eager`, with padding handled over the whole key cache: a copy of it and back."""
    slots, cache = args[5], args[6]
    spare = torch.empty_like(cache)
    q, k, v, gate = eager.qkv_prologue(*args[:6], spare, *args[7:])
    flat = cache.view(-1, *cache.shape[2:])
    written = flat.index_copy(0, slots.clamp(min=0), k)
    flat.copy_(torch.where((slots >= 0).any(), written, flat))
    return q, k, v, gate


@pytest.mark.parametrize(("tokens", "slot"), [(1, 0), (800, 1600)])
def test_the_static_baseline_writes_in_place(tokens, slot):
    """Also at a slot near the end of a cache for 800 tokens, of which one is left."""
    inputs = primitive.head(prologue_inputs(COMPACT, tokens), 1)
    inputs = replace(inputs, slot_mapping=torch.tensor([slot]))
    assert primitive.cache_sized_work(primitive.static_compiled(), COMPACT, inputs) == []


def test_a_planted_clone_of_the_cache_is_caught_though_its_bits_are_right():
    inputs = prologue_inputs(COMPACT, 1)
    planted = torch.compile(cloning, dynamic=False, fullgraph=True)
    expected = run(eager.qkv_prologue, inputs, COMPACT, NUMERICS)
    assert differences(run(cloning, inputs, COMPACT, NUMERICS), expected) == []
    torch._dynamo.reset()
    found = primitive.cache_sized_work(planted, COMPACT, inputs)
    assert any(entry.startswith("allocation buf") for entry in found)
    assert any(entry.startswith("kernel ") for entry in found)


@pytest.mark.parametrize("implementation", [eager.qkv_prologue, reference.qkv_prologue])
def test_nothing_compiled_proves_nothing(implementation):
    with pytest.raises(ValueError, match="not compiled here"):
        primitive.cache_sized_work(implementation, COMPACT, prologue_inputs(COMPACT, 1))


# --- arms


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("positions", ["1d", "3d"])
def test_arms_are_timed_beside_a_control(cold, positions):
    tokens, dims = 4, set()

    def noted(*args):
        dims.add(args[4].dim())
        return eager.qkv_prologue(*args)

    arms = {
        "eager": primitive.arm(eager.qkv_prologue, COMPACT, NUMERICS),
        "again": primitive.arm(noted, COMPACT, NUMERICS),
    }
    options = dict(cold=cold, seed=0, samples=3, positions=positions)
    times = primitive.time_arms(arms, COMPACT, tokens, CPU, **options)
    assert times.keys() == {"eager", "again", "control"}
    moved = sum(primitive.bytes_moved(COMPACT, tokens))
    for time in times.values():
        assert 0 < time.low_us <= time.median_us <= time.high_us
        assert time.n == 3
        assert time.footprint_bytes == moved * time.sets
        assert (time.footprint_bytes > 2 * CPU.l2_bytes) if cold else (time.sets == 1)
    assert dims == {1 if positions == "1d" else 2}


def test_which_arms_a_machine_has():
    hopper = CPU.model_copy(update=dict(profile="cuda", device="cuda", arch="sm_90"))
    older = hopper.model_copy(update=dict(arch="sm_80"))
    dcu = hopper.model_copy(update=dict(profile="dcu", arch="gfx936"))

    def names(machine, kernel=fused.qkv_prologue, **options):
        return list(primitive.own_arms(kernel, COMPACT, NUMERICS, machine, **options))

    assert names(CPU) == ["compiled", "eager"]  # no kernel to time, and no early launch
    assert names(CPU, with_eager=False) == ["compiled"]
    assert names(hopper) == ["fused", "compiled", "eager", "overlap"]
    assert names(hopper, eager.qkv_prologue) == ["fused", "compiled", "eager"]
    assert names(older) == names(dcu) == ["fused", "compiled", "eager"]


def test_peers_that_are_not_there_give_a_reason():
    absent = [name for name in peers.NAMES if importlib.util.find_spec(name) is None]
    example = prologue_inputs(COMPACT, 1)
    arms, words = primitive.peer_arms(absent, COMPACT, NUMERICS, example)
    assert arms == {}
    assert words.keys() == set(absent)
    assert all(("not installed" in word) or ("does not cover" in word) for word in words.values())


def test_only_a_peer_with_equal_work_is_timed(monkeypatch):
    def planted(name: str) -> peers.Peer:
        def prepare(*args):
            def call():
                q, k, v, gate = reference.qkv_prologue(
                    *args[:9], replace(args[9], rounding="storage")
                )
                if name == "broken":
                    raise OSError("no driver")
                if name == "wrong":
                    gate = gate.neg()
                return dict(q=q, k=k, v=v, gate=gate, key_cache=args[6], value_cache=args[7])

            return call

        covers = peers.PARTS - ({"mrope"} if name == "text" else set())
        return peers.Peer(name, "1", 1, covers, "both", "storage", prepare)

    monkeypatch.setattr(peers, "available", lambda name: None)
    monkeypatch.setattr(peers, "peer", planted)
    example = prologue_inputs(COMPACT, 2)
    names = ["right", "broken", "wrong", "text"]
    arms, words = primitive.peer_arms(names, COMPACT, NUMERICS, example)
    assert list(arms) == ["right"]
    assert words["right"] == "right 1: equal work"
    assert "gate is" in words["wrong"]
    assert words["broken"] == "broken failed: OSError('no driver')"
    assert words["text"].endswith("leaves out mrope")
    assert arms["right"](example)()["q"].shape == (2, COMPACT.q_heads, COMPACT.head_dim)
    text = primitive.one_dimensional(example)
    assert list(primitive.peer_arms(names, COMPACT, NUMERICS, text)[0]) == ["right", "text"]


# --- verdicts on times


def timed(fused: float = 10.0, control: float = 10.1, spread: float = 0.0, **medians: float):
    """Times of which every sample is the median, or lies so far from it on either side."""
    arms = {"fused": fused, "control": control, "accesses": 1.0} | medians
    signs = (-1, 1) * 5 + (0,)
    return {
        name: timing.summarize([us * (1 + spread * sign) for sign in signs], "given")
        for name, us in arms.items()
    }


BOTH = {(1, "3d"): timed(vllm=20.0), (1, "1d"): timed(aiter=20.0)}


@pytest.mark.parametrize(
    ("timings", "verdict"),
    [
        ({}, "NOT_RUN"),
        ({(1, "3d"): timed()}, "NOT_RUN"),
        ({(64, "1d"): timed(aiter=5.0)}, "NOT_RUN"),  # nothing is asked at that size
        ({(1, "1d"): timed(vllm=5.0)}, "NOT_RUN"),  # nor of vLLM with text positions
        (BOTH, "PASS"),
        ({(1, "3d"): timed(vllm=20.0)}, "PASS_WITH_LIMITATIONS"),  # aiter is missing
        (BOTH | {(1, "3d"): timed(vllm=16.7)}, "PASS"),
        (BOTH | {(1, "3d"): timed(vllm=16.6)}, "PASS_WITH_LIMITATIONS"),  # within A/A
        (BOTH | {(1, "3d"): timed(vllm=16.0)}, "FAIL"),
        (BOTH | {(1, "1d"): timed(aiter=11.0)}, "PASS_WITH_LIMITATIONS"),
        (BOTH | {(1, "1d"): timed(aiter=10.5)}, "FAIL"),
        (BOTH | {(1024, "1d"): timed(aiter=10.2)}, "PASS"),
        (BOTH | {(1024, "1d"): timed(aiter=10.05)}, "PASS_WITH_LIMITATIONS"),  # level
        (BOTH | {(1024, "1d"): timed(aiter=9.95)}, "PASS_WITH_LIMITATIONS"),
        (BOTH | {(4096, "1d"): timed(aiter=9.5)}, "FAIL"),
        (BOTH | {(1, "3d"): timed(control=10.5, vllm=20.0)}, "INCONCLUSIVE"),
        (BOTH | {(1024, "1d"): timed(control=11.0, aiter=10.5)}, "INCONCLUSIVE"),
    ],
)
def test_the_verdict_on_peers(timings, verdict):
    found, why = primitive.ahead_of_peers(timings)
    assert found == verdict
    assert (" at T=" in why) == (verdict != "NOT_RUN")
    assert ("aiter not timed" in why) == (len(timings) == 1 and verdict != "NOT_RUN")
    level = verdict == "PASS_WITH_LIMITATIONS" and (1024, "1d") in timings
    assert why.startswith("level with aiter at T=1024; 0.") == level


LIMITS = {1: 1.5, 1024: 1.08}


@pytest.mark.parametrize(
    ("timings", "verdict"),
    [
        ({1: timed(copy=6.7), 1024: timed(copy=9.3)}, "PASS"),
        ({1: timed(copy=6.6), 1024: timed(copy=9.3)}, "FAIL"),
        ({1: timed(copy=6.7), 1024: timed(copy=9.2)}, "FAIL"),
        ({1: timed(copy=6.7), 1024: timed(copy=9.3), 64: timed(copy=1.0)}, "PASS"),
        ({1: timed(copy=6.7, accesses=11.0), 1024: timed(copy=9.3)}, "PASS"),
        ({1: timed(copy=6.7)}, "INCONCLUSIVE"),
        ({}, "INCONCLUSIVE"),
    ],
)
def test_the_verdict_on_the_floor(timings, verdict):
    ratios = {T: timing.ratio(times["fused"], times["copy"]) for T, times in timings.items()}
    found, why = primitive.near_the_floor(ratios, timings, LIMITS)
    assert found == verdict
    assert ("not timed: T=" in why) == (verdict == "INCONCLUSIVE")
    assert ("T=1: 1.4" in why or "T=1: 1.5" in why) == bool(timings)
    assert ("(no floor at T = 1)" in why) == any(
        times["accesses"].median_us > times["fused"].median_us for times in timings.values()
    )


def test_a_floor_that_is_missed_is_named_first():
    timings = {1: timed(copy=6.7), 1024: timed(copy=9.2)}
    ratios = {T: timing.ratio(times["fused"], times["copy"]) for T, times in timings.items()}
    why = primitive.near_the_floor(ratios, timings, LIMITS)[1]
    assert why.startswith("FAIL at T = 1024 only: 1.087, at most 1.08 wanted; times the best copy")
    ratios[1] = (1.6, 1.6, 1.6)
    why = primitive.near_the_floor(ratios, timings, LIMITS)[1]
    assert why.startswith("FAIL at T = 1, 1024: 1.600, at most 1.5 wanted, 1.087, at most 1.08")
