"""What becomes of the branch under every tracing mode, on the torch where it was tabulated."""

from __future__ import annotations

import warnings

import pytest
import torch

from fusion_evidence.lib.graph import tracing
from fusion_evidence.lib.graph.tracing import COUNTS, MODES, trace

DECODE, PREFILL = "traced_decode", "traced_prefill"
TWO_OR_MORE = "2 <= L['x'].size()[0]"

only_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="outcomes are tabulated for torch 2.13"
)

# mode -> outcome, graphs, marker fired at T=1, branch calls of the first graph
TABLE = {
    "mark_dynamic": ("recompiled", 2, True, (PREFILL,)),
    "dynamic_true": ("recompiled", 2, True, (PREFILL,)),
    "automatic_dynamic": ("recompiled", 3, True, (PREFILL,)),
    "mark_dynamic_first_2": ("recompiled", 2, True, (PREFILL,)),
    "mark_dynamic_first_1": ("recompiled", 2, True, (DECODE,)),
    "automatic_dynamic_first_1": ("recompiled", 2, True, (DECODE,)),
    "skip_all_guards": ("folded", 1, False, (PREFILL,)),
    "skip_all_guards_first_2": ("folded", 1, False, (PREFILL,)),
    "skip_all_guards_first_1": ("folded", 1, True, (DECODE,)),
    "keep_tensor_guards": ("folded", 1, False, (PREFILL,)),
    "keep_portable_guards": ("recompiled", 2, True, (PREFILL,)),
    "mark_unbacked": ("error", 0, False, None),
    "mark_unbacked_strict": ("recompiled", 2, True, (PREFILL,)),
    "size_oblivious": ("recompiled", 2, True, (PREFILL,)),
    "size_oblivious_skip_all_guards": ("folded", 1, False, (PREFILL,)),
    "guard_or_false": ("recompiled", 2, True, (PREFILL,)),
    "guard_or_false_unbacked": ("folded", 1, False, (PREFILL,)),
    "guard_or_false_size_oblivious": ("folded", 1, False, (PREFILL,)),
    "check": ("error", 1, False, (PREFILL,)),
    "check_skip_all_guards": ("error", 1, False, (PREFILL,)),
    "cond": ("kept", 2, True, (DECODE, PREFILL)),
    "cond_skip_all_guards": ("kept", 1, True, (DECODE, PREFILL)),
    "aot_compile": ("error", 1, False, (PREFILL,)),
    "aot_compile_skip_all_guards": ("folded", 1, False, (PREFILL,)),
    "aot_compile_keep_portable_guards": ("error", 1, False, (PREFILL,)),
    "export_dynamic": ("folded", 1, False, (PREFILL,)),
    "export_dynamic_size_oblivious": ("error", 1, False, (PREFILL,)),
    "export_auto": ("folded", 1, False, (PREFILL,)),
    "export_auto_size_oblivious": ("error", 1, False, (PREFILL,)),
    "export_dim": ("folded", 1, False, (PREFILL,)),
    "export_dim_size_oblivious": ("error", 0, False, None),
    "export_dim_min_1": ("folded", 1, False, (PREFILL,)),
    "export_dim_min_1_size_oblivious": ("error", 0, False, None),
    "export_cond": ("kept", 1, True, (DECODE, PREFILL)),
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@only_2_13
@pytest.mark.parametrize("mode", MODES)
def test_outcome(mode):
    expected, graphs, fired, first = TABLE[mode]
    outcome = trace(mode)
    assert (outcome.outcome, outcome.graphs) == (expected, graphs), outcome.message
    assert outcome.marker_fired_at_T1 == fired
    assert (outcome.branch_calls[0] if first else None) == first
    assert outcome.right_at_every_T == (expected in ("kept", "recompiled"))
    assert bool(outcome.message) == (expected == "error")


@only_2_13
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("mark_unbacked", "Eq(u0, 1)"),
        ("check_skip_all_guards", "T=1: RuntimeError: Runtime assertion failed"),
        ("aot_compile", "T=1: RuntimeError: GuardManager check failed"),
        ("export_auto_size_oblivious", "T=1: AssertionError: Guard failed"),
        ("export_dim_size_oblivious", "Constraints violated"),
    ],
)
def test_error_says_at_which_size_and_why(mode, words):
    assert words in trace(mode).message


@only_2_13
def test_no_guard_names_the_branch():
    """Recompilation rests on the assumed range alone; size-oblivious tracing guards the branch."""
    outcome = trace("mark_dynamic")
    assert outcome.guards == ("size=[None, 8]", TWO_OR_MORE, "size=[1, 8]")
    assert outcome.ranges[0].endswith("[2, int_oo]")
    assert "L['x'].size()[0] != 1" in trace("size_oblivious").guards


@only_2_13
def test_dropped_guards_are_gone():
    assert trace("skip_all_guards").guards == ()
    assert trace("keep_tensor_guards").guards == ("size=[None, 8]",)


@only_2_13
def test_export_claims_a_range_it_does_not_serve():
    assert trace("export_dim_min_1").ranges[0].endswith("[1, int_oo]")


def test_order_does_not_matter():
    first = trace("skip_all_guards")
    trace("mark_dynamic")
    trace("automatic_dynamic_first_1")
    assert trace("skip_all_guards") == first


def test_eager_counts_exactly():
    module, before = tracing.PythonBranch(), COUNTS.copy()
    for size in (1, 5, 1, 1):
        module(torch.zeros(size, 2))
    assert COUNTS - before == {DECODE: 3, PREFILL: 1}


@pytest.mark.parametrize(
    ("owner", "attribute", "mode"),
    [
        (torch.compiler, "keep_tensor_guards_unsafe", "keep_tensor_guards"),
        (torch._dynamo.decorators, "mark_unbacked", "mark_unbacked"),
        (torch.fx.experimental.symbolic_shapes, "guard_or_false", "guard_or_false"),
        (torch.export.Dim, "AUTO", "export_auto"),
    ],
)
def test_missing_api_is_not_run(monkeypatch, owner, attribute, mode):
    """As on the older torch that vendors ship."""
    monkeypatch.delattr(owner, attribute, raising=False)
    outcome = trace(mode)
    assert outcome.outcome == "not_run"
    assert f"torch {torch.__version__} has no " in outcome.message
    assert attribute in outcome.message
    assert outcome.graphs == 0


def test_a_torch_without_the_ready_made_filter(monkeypatch):
    """As torch 2.8 and 2.9, where vLLM drops guards all the same."""
    monkeypatch.delattr(torch.compiler, "skip_all_guards_unsafe", raising=False)
    outcome = trace("skip_all_guards")
    assert (outcome.outcome, outcome.guards) == ("folded", ())


def test_a_torch_that_keeps_its_guards(keeps_its_guards):
    with pytest.raises(tracing.Unavailable, match="has no guard_filter_fn"):
        tracing.drop_guards()
    outcome = trace("skip_all_guards")
    assert (outcome.outcome, outcome.graphs) == ("not_run", 0)


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "enable_aot_compile"), reason="no switch for it here"
)
def test_ahead_of_time_where_it_is_off_by_default():
    """As up to torch 2.11: vLLM turns it on, and so does the mode."""
    with torch._dynamo.config.patch(enable_aot_compile=False):
        assert trace("aot_compile_skip_all_guards").outcome == "folded"


def test_unknown_mode():
    with pytest.raises(ValueError, match=r"unknown mode 'fast'; known: mark_dynamic, "):
        trace("fast")


@pytest.mark.parametrize("op", [tracing.traced_decode, tracing.traced_prefill])
def test_marker_ops_are_well_formed(op):
    torch.library.opcheck(op, (torch.randn(3, 8),))
