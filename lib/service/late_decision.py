"""One traced graph, two bodies: which of them is in it is decided when a range of sizes is compiled.

A tracer that sees a graph once, for all sizes, folds a branch on the size. So both bodies have to stand
in that one graph: the model's own code, between two marks, and beside it what is needed to replace it. A
service that compiles the graph anew for each range of sizes then has it *without the marks* where the own
code shall stay, which is node for node the graph that was never marked, and with one operator in place of
the region where that shall run.

The marks are operators, so that nothing moves across them while tracing. They compute nothing, and raise
where a graph reaches execution with them in it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

Results = tuple[Tensor, Tensor, Tensor, Tensor]


class Undecided(RuntimeError):
    """A marked region was executed: whoever compiled its graph knew nothing of the marks."""


@torch.library.custom_op(
    "fusion_evidence::region_begin",
    mutates_args=(),
    schema="(Tensor qkv, str layer) -> Tensor",
)
def region_begin(qkv: Tensor, layer: str) -> Tensor:
    """Marks where a prologue's own code begins, on what it begins with."""
    raise Undecided(f"{layer}: its graph was not compiled by range")


@region_begin.register_fake
def _(qkv: Tensor, layer: str) -> Tensor:
    return _like(qkv)


@torch.library.custom_op(
    "fusion_evidence::region_end",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor positions, str layer) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def region_end(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, positions: Tensor, layer: str
) -> Results:
    """Marks where it ends, on what it leaves.

    It also holds the positions, which the code before it has read: so no input of the graph is met
    earlier than without marks, and all keep their order.
    """
    raise Undecided(f"{layer}: its graph was not compiled by range")


@region_end.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, positions: Tensor, layer: str) -> Results:
    return _like(q), _like(k), _like(v), _like(gate)


def _like(tensor: Tensor) -> Tensor:
    """With the strides, too: what follows is traced as it would be without the mark."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride())


def without_marks(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with every region's own code and no mark: the graph that a model without marks gives.

    The module itself where it has no mark.
    """
    return _rewritten(module, None)


def with_operator(module: fx.GraphModule, call: Callable[..., Any]) -> fx.GraphModule:
    """A copy with ``call(qkv, positions, layer) -> (q, k, v, gate)`` in place of every region.

    The module itself where it has no mark. ValueError: a mark without its other one.
    """
    return _rewritten(module, call)


def regions(module: fx.GraphModule) -> list[str]:
    """The layers whose regions are marked in this graph, in its order."""
    return [str(node.args[-1]) for node in module.graph.nodes if _is(node, region_end)]


def _rewritten(module: fx.GraphModule, call: Callable[..., Any] | None) -> fx.GraphModule:
    if not any(_is(node, region_begin) or _is(node, region_end) for node in module.graph.nodes):
        return module
    module = copy.copy(module)
    module.graph = _copied(module.graph)
    graph = module.graph
    begins = {str(node.args[-1]): node for node in graph.nodes if _is(node, region_begin)}
    for end in [node for node in graph.nodes if _is(node, region_end)]:
        layer = str(end.args[-1])
        if layer not in begins:
            raise ValueError(f"{layer}: its region ends in a graph that it does not begin in")
        begin = begins.pop(layer)
        own = list(end.args[:4])
        if call is not None:
            with graph.inserting_before(end):
                made = graph.call_function(call, (begin.args[0], end.args[4], layer))
                made.meta = dict(end.meta)
                own = [graph.call_function(operator.getitem, (made, i)) for i in range(4)]
        for user in list(end.users):
            value = own[user.args[1]]
            if call is not None:
                value.meta = dict(user.meta)
            user.replace_all_uses_with(value)
            graph.erase_node(user)
        graph.erase_node(end)
        begin.replace_all_uses_with(begin.args[0])
        graph.erase_node(begin)
    if begins:
        raise ValueError(
            f"{', '.join(begins)}: its region begins in a graph that it does not end in"
        )
    if call is not None:
        graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def _copied(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    made.output(made.graph_copy(graph, values))
    return made


def _is(node: fx.Node, mark: Any) -> bool:
    if node.op != "call_function":
        return False
    return getattr(node.target, "_qualified_op_name", None) == mark._qualname or (
        isinstance(node.target, torch._ops.OpOverload)
        and f"{node.target.namespace}::{node.target._opname}" == mark._qualname
    )
