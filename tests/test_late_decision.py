"""A graph traced once, and what each range of sizes gets of it."""

import pytest
import torch

from fusion_evidence.lib.service.late_decision import (
    Undecided,
    region_begin,
    region_end,
    regions,
    with_operator,
    without_marks,
)

WIDTH = 4


def own(qkv, positions, weight):
    """A little like a prologue: split, scale, rotate by position; v is a view of its input."""
    q, k, v, gate = qkv.split(WIDTH, dim=-1)
    return q * weight * positions[:, None], k * weight, v, gate.reshape(gate.shape)


def model(marked, layers=2):
    def forward(x, positions, weight):
        for i in range(layers):
            qkv = torch.cat((x, x + 1, x * 2, x - 1), dim=-1)
            if marked:
                qkv = region_begin(qkv, f"layer {i}")
            q, k, v, gate = own(qkv, positions, weight)
            if marked:
                q, k, v, gate = region_end(q, k, v, gate, positions, f"layer {i}")
            x = torch.tanh(q + k) * torch.sigmoid(gate) + v
        return x

    return forward


calls = []


@torch.library.custom_op(
    "fusion_evidence_test::fast",
    mutates_args=(),
    schema="(Tensor qkv, Tensor positions, str layer) -> (Tensor, Tensor, Tensor, Tensor)",
)
def fast(qkv, positions, layer):
    calls.append((layer, qkv.shape[0]))
    q, k, v, gate = (part.clone() for part in qkv.split(WIDTH, dim=-1))
    return q * 3 * positions[:, None], k * 3, v, gate


@fast.register_fake
def _(qkv, positions, layer):
    return tuple(qkv.new_empty(qkv.shape[0], WIDTH) for _ in range(4))


FAST = torch.ops.fusion_evidence_test.fast.default


def arguments(tokens):
    return torch.randn(tokens, WIDTH), torch.arange(tokens) + 1.0, torch.tensor(3.0)


def traced(forward, decide=lambda module: module):
    """Compiled with a backend that takes ``decide(graph)``, and the graphs it got and ran."""
    seen = []

    def backend(module, inputs):
        seen.append((module, decide(module)))
        return seen[-1][1].forward

    return torch.compile(forward, backend=backend, dynamic=True), seen


def listing(module):
    return [(node.op, str(node.target), str(node.args), node.name) for node in module.graph.nodes]


def test_without_its_marks_it_is_the_graph_that_never_had_any():
    x = arguments(5)
    plain, plain_seen = traced(model(marked=False))
    marked, seen = traced(model(marked=True), without_marks)
    assert torch.equal(plain(*x), marked(*x))
    assert regions(seen[0][0]) == ["layer 0", "layer 1"]
    assert regions(seen[0][1]) == []

    def shapes(module):
        return [
            (node.op, str(node.target), node.meta["example_value"].stride())
            for node in module.graph.nodes
            if isinstance(node.meta.get("example_value"), torch.Tensor)
        ]

    assert shapes(seen[0][1]) == shapes(plain_seen[0][0])
    assert seen[0][1].graph.python_code("self").src.count("region_") == 0


def test_with_the_operator_the_own_code_is_gone_and_the_values_are_equal():
    x = arguments(3)
    calls.clear()
    decided, seen = traced(model(marked=True), lambda module: with_operator(module, FAST))
    assert torch.equal(decided(*x), model(marked=False)(*x))
    assert calls == [("layer 0", 3), ("layer 1", 3)]
    assert "split" not in seen[0][1].graph.python_code("self").src


def test_deciding_leaves_the_traced_graph_alone():
    _, seen = compiled = traced(model(marked=True), lambda module: with_operator(module, FAST))
    compiled[0](*arguments(2))
    before = listing(seen[0][0])
    without_marks(seen[0][0])
    with_operator(seen[0][0], FAST)
    assert listing(seen[0][0]) == before
    assert len(regions(seen[0][0])) == 2


def test_one_graph_two_ranges_through_inductor():
    """As a service does it: one trace, a compilation for one token and one for more."""
    from torch._inductor import standalone_compile

    calls.clear()
    made = []

    def backend(module, inputs):
        sizes = [i for i in inputs if not isinstance(i, torch.Tensor)]
        assert sizes, "traced for all sizes"
        one, many = (
            standalone_compile(graph, inputs, dynamic_shapes="from_graph")
            for graph in (with_operator(module, FAST), without_marks(module))
        )
        # Inputs in the order in which the graph meets them: x, the weight, the positions.
        made.append(lambda x, positions, weight: one(1, x, weight, positions)[0])
        return many

    compiled = torch.compile(model(marked=True, layers=1), backend=backend)
    reference = model(marked=False, layers=1)
    x = arguments(6)
    for tensor in x[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    torch.testing.assert_close(compiled(*x), reference(*x))
    assert (calls, len(made)) == ([], 1)
    one = x[0][:1].clone(), x[1][:1].clone(), x[2]
    torch.testing.assert_close(made[0](*one), reference(*one))
    assert calls == [("layer 0", 1)]


def test_a_marked_region_that_runs_says_so():
    with pytest.raises(Undecided, match="layer 0: its graph was not compiled by range"):
        model(marked=True)(*arguments(2))


def test_a_region_cut_in_two_is_refused():
    def begins(x, positions):
        return region_begin(x, "a") + 1

    def ends(x, positions):
        return region_end(x, x + 1, x + 2, x + 3, positions, "b")[0]

    def both(x, positions):
        return begins(x, positions) + ends(x, positions)

    for forward, says in ((ends, "b: its region ends in"), (both, "b: its region ends in")):
        compiled, seen = traced(forward)
        with pytest.raises(Undecided):
            compiled(*arguments(2)[:2])
        with pytest.raises(ValueError, match=says):
            without_marks(seen[0][0])
    compiled, seen = traced(begins)
    with pytest.raises(Undecided):
        compiled(*arguments(2)[:2])
    with pytest.raises(ValueError, match="a: its region begins in"):
        without_marks(seen[0][0])


def test_a_graph_without_marks_is_returned_as_it_is():
    plain, seen = traced(model(marked=False))
    plain(*arguments(2))
    assert without_marks(seen[0][0]) is seen[0][0]
    assert with_operator(seen[0][0], FAST) is seen[0][0]
