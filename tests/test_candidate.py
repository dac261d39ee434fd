"""A candidate in the fused kernel's place: found or refused, counted, and what it returns looked at."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusion_evidence.kernels import eager, fused, op, reference
from fusion_evidence.kernels.candidate import load_kernel, marked, takes
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.measure import peers
from fusion_evidence.lib.measure.candidates import candidate
from fusion_evidence.lib.measure.compare import compare
from fusion_evidence.lib.measure.inputs import OUTPUTS, prologue_inputs
from fusion_evidence.lib.measure.markers import Markers

SHAPE = preset("compact")
NUMERICS = Numerics(reduction=Reduction(32, 2))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

plain = reference.qkv_prologue


def counting(*arguments, marker: Tensor | None = None):
    """Counts by itself, as a kernel does; each run as ten, to tell who counted."""
    if marker is not None:
        marker.add_(10)
    return plain(*arguments)


def checking(*arguments, marker: Tensor | None = None, errors: Tensor | None = None):
    """Does its own check of values, and follows nothing that is wrong."""
    if errors is not None:
        errors.fill_(fused.BAD_SLOT)
    if marker is not None:
        marker.add_(1)
    return plain(*arguments[:5], arguments[5].clamp(max=-1), *arguments[6:])


def views(*arguments):
    """Results that share the input's memory, or whose rows lie apart."""
    q, k, _, gate = plain(*arguments)
    v = arguments[0].unflatten(-1, (-1, SHAPE.head_dim))[:, -SHAPE.kv_heads :]
    return q.transpose(0, 1).contiguous().transpose(0, 1), k, v, gate


def three(*arguments):
    return plain(*arguments)[:3]


def flat(*arguments):
    q, *others = plain(*arguments)
    return q.flatten(1), *others


def wide(*arguments):
    q, k, *others = plain(*arguments)
    return q, k.float(), *others


def raises(*arguments):
    raise RuntimeError("out of shared memory")


def of_nine(
    qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, key_cache, value_cache, shape
):
    raise AssertionError("is never called")


def keyword_only(*tensors, shape, numerics):
    raise AssertionError("is never called")


NOT_A_FUNCTION = {}


def own(name: str) -> str:
    return f"{__name__}:{name}"


# --- the loader


def test_an_empty_path_is_the_projects_kernel():
    assert load_kernel("") is fused.qkv_prologue


def test_a_function_is_found():
    assert load_kernel("fusion_evidence.kernels.eager:qkv_prologue") is eager.qkv_prologue


def test_compiled_code_without_a_signature_is_taken():
    assert load_kernel("operator:itemgetter") is not None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:kernel", "no module 'no_such_module'; is its folder on PYTHONPATH?"),
        ("fusion_evidence.no_such:kernel", "no module 'fusion_evidence.no_such'"),
        ("fusion_evidence.kernels.eager:absent", "kernels.eager has no 'absent'"),
        ("fusion_evidence.kernels.eager", "expected package.module:function"),
        ("my_kernel.py:kernel", "no module 'my_kernel'"),
        ("./my_kernel.py:kernel", "expected package.module:function"),
        (":kernel", "expected package.module:function"),
        ("fusion_evidence.kernels.eager:", "expected package.module:function"),
        (own("NOT_A_FUNCTION"), "is a dict, not a function"),
        (own("of_nine"), "too many positional arguments; it is of_nine(qkv, "),
        (own("keyword_only"), "it is keyword_only(*tensors, shape, numerics)"),
    ],
)
def test_one_line_says_what_is_wrong(path, message):
    with pytest.raises(ValueError, match=r"^candidate: ") as caught:
        load_kernel(path)
    assert repr(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library", "its import lacks module 'no_such_library'"),
        ("def broken(:", "importing its_source raised SyntaxError: "),
        ("raise RuntimeError('needs\\n  a licence')", "raised RuntimeError: needs a licence"),
    ],
)
def test_a_module_that_cannot_be_imported_says_so(tmp_path, monkeypatch, source, message):
    (tmp_path / "its_source.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_kernel("its_source:kernel")
    assert "\n" not in str(caught.value)


# --- counting


def test_a_kernel_is_counted_by_itself_or_by_an_addition_after_it():
    assert not takes(plain, "marker")
    assert marked(fused.qkv_prologue) is fused.qkv_prologue
    marker = torch.zeros(1, dtype=torch.int64)
    inputs = prologue_inputs(SHAPE, 2)
    for kernel, count in ((counting, 10), (plain, 11)):
        marked(kernel)(*inputs.clone().args(), SHAPE, NUMERICS, marker=marker)
        assert marker.tolist() == [count]


# --- in the operator


def operator(name: str, **options) -> op.OpaquePrologue:
    return op.OpaquePrologue(
        op.Configuration(SHAPE, NUMERICS, candidate=own(name), **options), DEVICE
    )


def run(prologue, inputs):
    results = prologue(*inputs.args(), SHAPE, NUMERICS)
    return dict(zip(OUTPUTS, (*results, inputs.key_cache, inputs.value_cache), strict=True))


@pytest.mark.parametrize(("name", "counts"), [("plain", 1), ("counting", 10)])
def test_it_runs_in_the_kernels_range_and_is_counted(name, counts):
    prologue = operator(name, decode=(1, 3))
    inputs = prologue_inputs(SHAPE, 3, padding=1, device=DEVICE)
    actual, expected = run(prologue, inputs.clone()), run(plain, inputs.clone())
    assert all(compare(actual[output], expected[output]).equal for output in OUTPUTS)
    run(prologue, prologue_inputs(SHAPE, 4, device=DEVICE))  # the fallback's
    assert prologue.marker.tolist() == [counts, 1, 0, 0]


def test_markers_read_what_a_candidate_did():
    prologue = operator("plain")
    markers = Markers(prologue)
    for _ in range(3):
        run(prologue, prologue_inputs(SHAPE, 1, device=DEVICE))
    assert markers.read()["device"] == {"decode": 3, "prefill": 0}


def test_a_compiled_model_counts_it_too():
    prologue = operator("plain")
    inputs = prologue_inputs(SHAPE, 1, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(prologue, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(*inputs.args(), SHAPE, NUMERICS)
    assert prologue.marker.tolist() == [2, 0, 0, 0]


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA or ROCm device: nothing to capture")
def test_replays_count_a_candidate_that_does_not_count():
    prologue = op.OpaquePrologue(
        op.Configuration(SHAPE, NUMERICS, candidate="fusion_evidence.kernels.eager:qkv_prologue"),
        DEVICE,
    )
    inputs, graph = prologue_inputs(SHAPE, 1, device=DEVICE), torch.cuda.CUDAGraph()
    run(prologue, inputs)
    with torch.cuda.graph(graph):
        run(prologue, inputs)
    for _ in range(5):
        graph.replay()
    assert prologue.marker.tolist() == [6, 0, 0, 0]


def test_results_are_made_new_and_contiguous():
    inputs = prologue_inputs(SHAPE, 3, device=DEVICE)
    actual, expected = run(operator("views", decode=(1, 4)), inputs), run(plain, inputs.clone())
    for output in OUTPUTS:
        assert compare(actual[output], expected[output]).equal
        assert actual[output].is_contiguous()
    shared = inputs.qkv.untyped_storage().data_ptr()
    assert actual["v"].untyped_storage().data_ptr() != shared


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("three", TypeError, "expected four tensors q, k, v, gate, got 3 results"),
        ("flat", ValueError, "q: expected shape [1, 6, 64], got [1, 384]"),
        ("wide", TypeError, "k: expected torch.bfloat16 on"),
        ("raises", RuntimeError, "out of shared memory"),
    ],
)
def test_what_it_returns_is_looked_at(name, error, message):
    with pytest.raises(error, match=re.escape(message)):
        run(operator(name), prologue_inputs(SHAPE, 1, device=DEVICE))


@pytest.mark.parametrize("name", ["plain", "checking"])
def test_debug_flags_a_bad_slot_whoever_checks(name):
    prologue = operator(name, debug=True)
    inputs = prologue_inputs(SHAPE, 1, device=DEVICE)
    beyond = torch.full_like(inputs.slot_mapping, 10**6)
    before = inputs.key_cache.clone()
    run(prologue, replace(inputs, slot_mapping=beyond))
    assert prologue.marker.tolist() == [1, 0, 0, fused.BAD_SLOT]
    assert compare(inputs.key_cache, before).equal


def test_an_unknown_candidate_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="candidate: 'no_such:kernel'"):
        op.OpaquePrologue(op.Configuration(SHAPE, NUMERICS, candidate="no_such:kernel"), DEVICE)


def test_a_handle_names_its_kernel():
    handles = [
        op.Configuration(SHAPE, NUMERICS, candidate=candidate).handle
        for candidate in ("", own("plain"), own("counting"))
    ]
    assert len(set(handles)) == 3
    assert "fused at 1..1" in handles[0]
    assert f"{own('plain')} at 1..1" in handles[1]


# --- other projects' kernels


@pytest.mark.parametrize("name", ["vllm", "aiter"])
def test_a_peer_that_cannot_run_here_is_no_candidate(monkeypatch, name):
    monkeypatch.setattr(peers, "available", lambda peer: f"{peer} is not installed")
    monkeypatch.delitem(
        sys.modules, f"fusion_evidence.lib.measure.candidates.{name}", raising=False
    )
    with pytest.raises(ValueError, match=f"raised ImportError: {name} is not installed"):
        load_kernel(f"fusion_evidence.lib.measure.candidates.{name}:qkv_prologue")


def test_a_peer_has_the_candidates_signature_and_brings_v_itself(monkeypatch):
    def prepare(*arguments):
        def call():
            q, k, _, gate = plain(*arguments)
            return dict(q=q, k=k, gate=gate, key_cache=arguments[6], value_cache=arguments[7])

        return call

    like_vllm = peers.Peer("vllm", "0", 2, peers.PARTS - {"v_out"}, "both", "storage", prepare)
    monkeypatch.setattr(peers, "available", lambda name: None)
    monkeypatch.setattr(peers, "peer", lambda name: like_vllm)
    inputs = prologue_inputs(SHAPE, 3, padding=1)
    theirs, ours = inputs.clone(), inputs.clone()
    actual, expected = run(candidate("vllm"), theirs), run(plain, ours)
    assert all(compare(actual[output], expected[output]).equal for output in OUTPUTS)
