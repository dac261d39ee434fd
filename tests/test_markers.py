"""Markers: exact counts on the device and the host, and errors instead of stale ones.

Everything that needs a captured CUDA graph runs on an accelerator only.
"""

from __future__ import annotations

import pytest
import torch
from test_op import BLOCK, DEVICE, NUMERICS, SHAPE, arguments, configuration

from fusion_evidence.kernels import op
from fusion_evidence.lib.measure.markers import Markers, StaleMarker, count_kernels
from fusion_evidence.lib.service.model import ModelConfig, random_model, step

on_device = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="graph replay needs a CUDA or ROCm device"
)
REPLAYS = 1000


@pytest.fixture
def prologue():
    return op.OpaquePrologue(configuration(), DEVICE)


def both(decode: int, prefill: int) -> dict:
    counts = {"decode": decode, "prefill": prefill}
    return {"host": counts, "device": counts}


def test_alternating_calls_and_padding_count_exactly(prologue):
    markers = Markers(prologue)
    for tokens, slots in (
        (1, [3]),
        (3, None),
        (1, [-1]),
        (3, [-1, 2, -1]),
        (2, [-1, -1]),
        (1, [4]),
    ):
        prologue(*arguments(tokens, slots), SHAPE, NUMERICS)
    assert markers.read() == both(3, 3)


def test_forced_fallback_never_counts_a_decode():
    prologue = op.OpaquePrologue(configuration(force_fallback=True), DEVICE)
    markers = Markers(prologue)
    for tokens in (1, 3, 1):
        prologue(*arguments(tokens), SHAPE, NUMERICS)
    assert markers.read() == both(0, 3)


def test_reset_starts_again(prologue):
    markers = Markers(prologue)
    prologue(*arguments(1), SHAPE, NUMERICS)
    markers.reset()
    assert markers.read() == both(0, 0)
    prologue(*arguments(2), SHAPE, NUMERICS)
    assert markers.read() == both(0, 1)


def test_a_refused_call_is_not_counted(prologue):
    markers = Markers(prologue)
    with pytest.raises(TypeError):
        prologue(arguments(1)[0].float(), *arguments(1)[1:], SHAPE, NUMERICS)
    assert markers.read() == both(0, 0)


def test_a_reset_that_the_device_has_not_seen_is_an_error(prologue):
    markers = Markers(prologue)
    before = prologue.marker.clone()
    prologue(*arguments(1), SHAPE, NUMERICS)
    markers.reset()
    prologue.marker.copy_(before)
    with pytest.raises(StaleMarker, match="at reset 1, the last one made here is 2"):
        markers.read()


def test_another_readers_reset_is_an_error(prologue):
    first, second = Markers(prologue), Markers(prologue)
    assert second.read() == both(0, 0)
    with pytest.raises(StaleMarker, match="reset elsewhere"):
        first.read()


def test_counts_of_another_configuration_are_an_error(prologue):
    """The operator of one configuration is given the marker of another."""
    other = op.OpaquePrologue(configuration(decode=(1, 8)), DEVICE)
    mine, others = Markers(prologue), Markers(other)
    op.qkv_prologue(*arguments(1), prologue.marker, other.handle)
    if not op.register(prologue.configuration).in_a_graph:
        with pytest.raises(StaleMarker, match=r"decode: the device counted 1 runs.*called 0 times"):
            mine.read()
    with pytest.raises(StaleMarker, match=r"decode: the device counted 0 runs.*called 1 times"):
        others.read()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a device says")
def test_kernel_names_need_a_device():
    with pytest.raises(RuntimeError, match="needs a CUDA or ROCm device"):
        count_kernels(lambda: None)


# With graph replay


def captured(call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


@on_device
@pytest.mark.parametrize("fallback", ["eager", "compiled"])
def test_replays_count_on_the_device_alone(fallback):
    """Fused and fallback calls alternate in one graph, with padding in both."""
    prologue = op.OpaquePrologue(configuration(fallback=fallback), DEVICE)
    markers = Markers(prologue)
    calls = [arguments(t, s) for t, s in ((1, [3]), (4, [1, -1, 63, -1]), (1, [-1]), (2, [5, 6]))]
    graph = captured(lambda: [prologue(*given, SHAPE, NUMERICS) for given in calls])
    markers.reset()
    for _ in range(REPLAYS):
        graph.replay()
    assert markers.read() == {
        "host": {"decode": 0, "prefill": 0},
        "device": {"decode": 2 * REPLAYS, "prefill": 2 * REPLAYS},
    }


@on_device
def test_capture_counts_on_the_host_alone(prologue):
    markers, given = Markers(prologue), arguments(1)
    prologue(*given, SHAPE, NUMERICS)
    markers.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prologue(*given, SHAPE, NUMERICS)
    assert markers.read()["host"]["decode"] == 1
    assert markers.read()["device"]["decode"] == 0


@on_device
def test_replay_writes_what_a_call_writes():
    """The fallback's handling of padding, captured: the caches of an eager call."""
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    slots = [7, -1, 63, -5]
    expected, replayed = arguments(4, slots), arguments(4, slots)
    prologue(*expected, SHAPE, NUMERICS)
    graph = captured(lambda: prologue(*replayed, SHAPE, NUMERICS))
    for index in (6, 7):
        replayed[index].copy_(arguments(4, slots)[index])
    graph.replay()
    assert torch.equal(replayed[6], expected[6])
    assert torch.equal(replayed[7], expected[7])


@on_device
def test_compiled_model_counts_layers_times_replays():
    config, layers = ModelConfig.compact(layers=2), 2
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    model = random_model(config, prologue, NUMERICS, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    caches, decode = model.new_caches(8, BLOCK), step([3], 20, [0, 1], BLOCK, device=DEVICE)
    markers = Markers(prologue)
    with torch.no_grad():
        graph = captured(lambda: compiled(*decode, caches))
    markers.reset()
    for _ in range(REPLAYS):
        graph.replay()
    counts = markers.read()
    assert counts["device"] == {"decode": layers * REPLAYS, "prefill": 0}
    assert counts["host"] == {"decode": 0, "prefill": 0}
    markers.reset()
    assert count_kernels(lambda: [graph.replay() for _ in range(10)]) == layers * 10
    assert markers.read()["device"]["decode"] == layers * 10


@on_device
def test_reading_and_resetting_while_a_graph_captures_is_an_error(prologue):
    markers = Markers(prologue)
    prologue(*arguments(1), SHAPE, NUMERICS)
    markers.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="cannot read markers while a CUDA graph captures"):
            markers.read()
        with pytest.raises(RuntimeError, match="cannot reset markers while a CUDA graph captures"):
            markers.reset()
    assert markers.read()["device"] == {"decode": 0, "prefill": 0}


@on_device
def test_a_compiled_fallback_is_not_compiled_during_capture():
    chosen = configuration(fallback="compiled", decode=(1, 7))
    prologue, given = op.OpaquePrologue(chosen, DEVICE), arguments(9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="call the operator at this T"):
        prologue(*given, SHAPE, NUMERICS)
