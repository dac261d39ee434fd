"""The inputs for which vLLM compiles a graph of one size, with the strides that they have at run time.

vLLM 0.25.1 and 0.32.0 put the size in place of *every* symbol of the traced graph. Where a stride is a
symbol of its own, that is wrong, and the compiled graph reads other memory than it is given: positions of
M-RoPE are rows of a buffer that is longer than they are, ``[3, T]`` with the buffer's stride, of which the
graph for T = 1 makes the stride 1. It then takes the second and third row's position from what the last
prefill left of the first row's. Nothing is said: the checks of sizes are off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import SymInt, Tensor, fx


def true_inputs(
    original: Callable[[fx.GraphModule, int], list[Any]], graph: fx.GraphModule, size: int
) -> list[Any]:
    """What ``original`` makes for ``size``, with strides that depend on no size as they were traced."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    traced = [node.meta["example_value"] for node in nodes]
    sizes = {symbol for value in _shapes(traced) for symbol in value.node.expr.free_symbols}
    known = {
        value.node.expr: value.node.hint
        for value in _values(traced)
        if value.node.expr.is_Symbol and value.node.expr not in sizes
    }
    if not known:
        return original(graph, size)
    values = {**dict.fromkeys(sizes, size), **known}

    def concrete(value: Any) -> int:
        return int(value.node.expr.subs(values)) if _symbolic(value) else int(value)

    return [
        _true(given, seen, concrete)
        for given, seen in zip(original(graph, size), traced, strict=True)
    ]


def _true(given: Any, traced: Any, concrete: Callable[[Any], int]) -> Any:
    if isinstance(traced, SymInt):
        return concrete(traced)
    if not isinstance(traced, Tensor) or not any(map(_symbolic, traced.stride())):
        return given
    shape, strides = ([concrete(one) for one in of] for of in (traced.shape, traced.stride()))
    with given.fake_mode:
        return torch.empty_strided(shape, strides, dtype=given.dtype, device=given.device)


def _symbolic(value: Any) -> bool:
    return isinstance(value, SymInt) and bool(value.node.expr.free_symbols)


def _shapes(traced: list[Any]) -> Iterator[SymInt]:
    for tensor in traced:
        if isinstance(tensor, Tensor):
            yield from filter(_symbolic, tensor.shape)


def _values(traced: list[Any]) -> Iterator[SymInt]:
    for value in traced:
        inside = value.stride() if isinstance(value, Tensor) else [value]
        yield from filter(_symbolic, inside)
