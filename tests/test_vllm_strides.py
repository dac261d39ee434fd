"""Inputs of a graph for one size, as vLLM makes them and as they are at run time; without vLLM."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from traced_graph import traced

from fusion_evidence.lib.service.vllm_strides import true_inputs

LONG = 33


def as_vllm(graph, size):
    """Every symbol is the size: `create_concrete_args` of vLLM 0.25.1 and 0.32.0."""

    def concrete(value):
        if not isinstance(value, torch.SymInt):
            return int(value)
        return int(value.node.expr.subs(dict.fromkeys(value.node.expr.free_symbols, size)))

    made = []
    with FakeTensorMode(shape_env=ShapeEnv()):
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta["example_value"]
            if isinstance(value, torch.SymInt):
                made.append(concrete(value))
                continue
            shape, strides = map(concrete, value.shape), map(concrete, value.stride())
            made.append(torch.empty_strided(list(shape), list(strides), dtype=value.dtype))
    return made


@pytest.fixture(scope="module")
def graph():
    """Of a model that takes tokens and the rows of a longer buffer, as positions of M-RoPE are."""
    tokens, positions = torch.ones(5, 4), torch.arange(3 * LONG).view(3, LONG)[:, :5]
    torch._dynamo.mark_dynamic(tokens, 0)
    torch._dynamo.mark_dynamic(positions, 1)
    return traced(lambda x, at, w: x * at.sum(0)[:, None] + w, tokens, positions, torch.ones(4))


def tensors(inputs):
    return {tuple(one.shape): one for one in inputs if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("size", [1, 4])
def test_the_stride_of_a_longer_buffer_stays(graph, size):
    wrong = tensors(as_vllm(graph, size))[3, size]
    right = tensors(true_inputs(as_vllm, graph, size))[3, size]
    assert wrong.stride() == (size, 1)
    assert right.stride() == (LONG, 1)
    assert (right.dtype, right.device) == (torch.int64, torch.device("cpu"))


def test_all_inputs_have_one_mode_and_the_others_are_as_they_were(graph):
    made, original = true_inputs(as_vllm, graph, 2), as_vllm(graph, 2)
    assert len({one.fake_mode for one in tensors(made).values()}) == 1
    assert tensors(made).keys() == tensors(original).keys() == {(2, 4), (3, 2), (4,)}
    assert tensors(made)[2, 4].stride() == (4, 1)
    numbers = [one for one in made if not isinstance(one, torch.Tensor)]
    assert sorted(numbers) == [2, LONG]  # the size, and the stride itself


def test_a_graph_without_such_strides_is_left_alone():
    tokens = torch.ones(5, 4)
    torch._dynamo.mark_dynamic(tokens, 0)
    plain = traced(lambda x: x * 2, tokens)
    assert true_inputs(lambda graph, size: ["made", size], plain, 3) == ["made", 3]
