"""The opaque operator: dispatch, padding, registration, and what compilers make of a call of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fusion_evidence.kernels import eager, fused, op, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.graph.generated_code import capture, kernels_touching, unknown_sizes
from fusion_evidence.lib.graph.planted import (
    LayersRun,
    opcheck,
    planted,
    run_layers,
)
from fusion_evidence.lib.measure.compare import compare
from fusion_evidence.lib.measure.markers import Markers
from fusion_evidence.lib.service.model import ModelConfig, greedy, random_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = preset("compact")
NUMERICS = Numerics(reduction=Reduction(32, 2))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, BLOCK = 4, 16
TABLE = 64


def configuration(**options) -> op.Configuration:
    return op.Configuration(SHAPE, NUMERICS, **options)


def arguments(tokens: int, slots: list[int] | None = None, blocks: int = BLOCKS, seed: int = 0):
    """The eight tensors of a call; slots are distinct ones unless given."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=draw).bfloat16().to(DEVICE)

    slot_mapping = torch.randperm(blocks * BLOCK, generator=draw)[:tokens]
    if slots is not None:
        slot_mapping = torch.tensor(slots, dtype=torch.int64)
    cache = (blocks, BLOCK, SHAPE.kv_heads, SHAPE.head_dim)
    return [
        normal(tokens, SHAPE.qkv_width),
        normal(SHAPE.head_dim) * 0.1,
        normal(SHAPE.head_dim) * 0.1,
        reference.cos_sin_table(SHAPE, TABLE, torch.bfloat16, DEVICE),
        torch.randint(TABLE, (3, tokens), generator=draw).to(DEVICE),
        slot_mapping.to(DEVICE),
        normal(*cache),
        normal(*cache),
    ]


def call(prologue, tensors):
    """The prologue's four results and the two caches it wrote into."""
    return [*prologue(*tensors, SHAPE, NUMERICS), *tensors[6:]]


def assert_same_bits(actual, expected):
    for name, a, b in zip(
        ("q", "k", "v", "gate", "key_cache", "value_cache"), actual, expected, strict=True
    ):
        assert compare(a, b).equal, f"{name}: {compare(a, b)}"


def runs(prologue: op.OpaquePrologue) -> list[int]:
    """Decode and prefill runs on the device."""
    return prologue.marker.tolist()[:2]


# Dispatch


@pytest.mark.parametrize(
    ("options", "tokens", "path"),
    [
        ({}, 1, "decode"),
        ({}, 2, "prefill"),
        ({"decode": (1, 4)}, 4, "decode"),
        ({"decode": (2, 4)}, 1, "prefill"),
        ({"force_fallback": True}, 1, "prefill"),
    ],
)
def test_takes_the_body_of_its_range(options, tokens, path):
    prologue = op.OpaquePrologue(configuration(**options), DEVICE)
    body = fused.qkv_prologue if path == "decode" else eager.qkv_prologue
    assert_same_bits(call(prologue, arguments(tokens)), call(body, arguments(tokens)))
    assert runs(prologue) == ([1, 0] if path == "decode" else [0, 1])


@pytest.mark.parametrize("rounding", ["per_op", "fp32_through"])
def test_reference_fallback_has_the_declared_bits(monkeypatch, rounding):
    """At every T, in a marker of its own, with padding; and never in a captured graph."""
    numerics = Numerics(rounding, NUMERICS.reduction)
    chosen = op.Configuration(SHAPE, numerics, fallback="reference", force_fallback=True)
    prologue = op.OpaquePrologue(chosen, DEVICE)
    for slots in ([7], [3, -1, 63, -1, 9]):
        actual, expected = arguments(len(slots), slots), arguments(len(slots), slots)
        results = prologue(*actual, SHAPE, numerics)
        oracle = reference.qkv_prologue(*expected, SHAPE, numerics)
        assert_same_bits([*results, *actual[6:]], [*oracle, *expected[6:]])
    assert runs(prologue) == [0, 2]
    monkeypatch.setattr(op, "_capturing", lambda tensor: True)
    with pytest.raises(RuntimeError, match="reference fallback waits for the device"):
        prologue(*arguments(1), SHAPE, numerics)


def test_no_tokens_is_a_fallback_of_nothing():
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    actual, untouched = call(prologue, arguments(0)), arguments(0)[6:]
    assert [list(a.shape) for a in actual[:4]] == [[0, 6, 64], [0, 2, 64], [0, 2, 64], [0, 384]]
    assert torch.equal(actual[4], untouched[0])
    assert torch.equal(actual[5], untouched[1])


def test_results_are_new_contiguous_tensors_at_one_token():
    """Of one token, the eager body's V is a view of its input; an operator must not return that."""
    prologue = op.OpaquePrologue(configuration(force_fallback=True), DEVICE)
    tensors = arguments(1)
    for result in prologue(*tensors, SHAPE, NUMERICS):
        assert result.is_contiguous()
        assert result.untyped_storage().data_ptr() != tensors[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("last", [BLOCKS * BLOCK - 1, 7], ids=["last_slot_owned", "last_slot_free"])
@pytest.mark.parametrize("fallback", ["eager", "compiled"])
def test_padding_writes_nothing(fallback, last):
    """Rows of padding are computed like others; the caches change where a real token says, only."""
    prologue = op.OpaquePrologue(configuration(fallback=fallback), DEVICE)
    slots = [3, -1, last, -1, -100]
    expected = arguments(5)
    real = [*expected]
    for index, dim in ((0, 0), (4, 1), (5, 0)):
        real[index] = expected[index].index_select(dim, torch.tensor([0, 2], device=DEVICE))
    real[5] = torch.tensor([3, last], device=DEVICE)
    body = eager.qkv_prologue if fallback == "eager" else op.full_graph(prologue.configuration)
    without_padding = body(
        *real, *((SHAPE, NUMERICS) if fallback == "eager" else ())
    )  # writes expected's caches
    actual = call(prologue, arguments(5, slots))
    kept = [0, 2]
    assert_same_bits([t[kept] for t in actual[:4]] + actual[4:], [*without_padding, *expected[6:]])
    assert runs(prologue) == [0, 1]


@pytest.mark.parametrize("fallback", ["eager", "compiled"])
def test_only_padding_leaves_the_caches_alone(fallback):
    prologue = op.OpaquePrologue(configuration(fallback=fallback), DEVICE)
    tensors = arguments(3, [-1, -1, -1])
    before = [cache.clone() for cache in tensors[6:]]
    prologue(*tensors, SHAPE, NUMERICS)
    assert all(torch.equal(a, b) for a, b in zip(tensors[6:], before, strict=True))


def test_int32_slots_and_one_position_row():
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    tensors, expected = arguments(3), arguments(3)
    for given in (tensors, expected):
        given[4] = given[4][0].contiguous()
        given[5] = given[5].int()
    assert_same_bits(call(prologue, tensors), call(eager.qkv_prologue, expected))


@pytest.mark.parametrize("tokens", [1, 2, 5, 65])
def test_compiled_fallback_has_the_bits_of_the_standalone_graph(tokens):
    chosen = configuration(fallback="compiled", force_fallback=True)
    prologue, standalone = op.OpaquePrologue(chosen, DEVICE), op.full_graph(chosen)
    if tokens > 1:  # the same first size, which is what Inductor tunes for
        for first in (prologue, lambda *given: standalone(*given[:8])):
            first(*arguments(2, blocks=8), SHAPE, NUMERICS)
    expected = arguments(tokens, blocks=8)
    results = standalone(*expected)
    assert_same_bits(call(prologue, arguments(tokens, blocks=8)), [*results, *expected[6:]])


def test_compiled_fallback_is_made_at_the_size_asked_for(monkeypatch):
    """Before its first call with more than one token, and without a trace in the caches."""
    met = []

    def compile_nothing(function, **options):
        return lambda *given: met.append(given[0].shape[0]) or function(*given)

    monkeypatch.setattr(torch, "compile", compile_nothing)
    graph = op.full_graph(configuration(fallback="compiled", first_traced=9))
    for tokens in (1, 5, 3):
        actual, expected = arguments(tokens), arguments(tokens)
        results = eager.qkv_prologue(*expected, SHAPE, NUMERICS)
        assert_same_bits([*graph(*actual), *actual[6:]], [*results, *expected[6:]])
    assert met == [1, 9, 5, 3]


def compiled_prologue() -> op.OpaquePrologue:
    """Its configuration has an epsilon of its own, so no other test has compiled its graph."""
    compiled_prologue.made += 1
    shape = replace(SHAPE, eps=SHAPE.eps + 1e-9 * compiled_prologue.made)
    chosen = op.Configuration(shape, NUMERICS, fallback="compiled", force_fallback=True)
    return op.OpaquePrologue(chosen, DEVICE)


compiled_prologue.made = 0


def test_a_capture_never_compiles(monkeypatch):
    """Whatever the new graph would be for: a first one, other positions, dtypes, caches, strides."""
    prologue = compiled_prologue()
    shape = prologue.configuration.shape
    capturing = [True]
    monkeypatch.setattr(op, "_capturing", lambda tensor: capturing[0])
    says = "no graph for T=3 and arguments like these yet"
    with pytest.raises(RuntimeError, match=says):
        prologue(*arguments(3), shape, NUMERICS)
    capturing[0] = False
    prologue(*arguments(3), shape, NUMERICS)
    capturing[0] = True
    prologue(*arguments(3), shape, NUMERICS)
    prologue(*arguments(5), shape, NUMERICS)  # the same graph, dynamic in T
    for index, change in (
        (4, lambda t: t[0].contiguous()),
        (4, lambda t: t.int()),
        (3, lambda t: t.float()),
        (5, lambda t: t.int()),
        (6, lambda t: torch.stack((t, t), dim=1)[:, 0]),
    ):
        other = arguments(3)
        other[index] = change(other[index])
        if index == 6:
            other[7] = change(other[7])
        with pytest.raises(RuntimeError, match=says):
            prologue(*other, shape, NUMERICS)
    with pytest.raises(RuntimeError, match=says):
        prologue(*arguments(3, blocks=5), shape, NUMERICS)


def test_more_kinds_of_arguments_than_dynamo_keeps():
    if not hasattr(torch._dynamo.config, "recompile_limit"):
        pytest.skip("an older torch runs uncompiled past its limit")
    prologue = compiled_prologue()
    shape = prologue.configuration.shape
    with torch._dynamo.config.patch(recompile_limit=1):
        prologue(*arguments(3), shape, NUMERICS)
        says = r"more dtypes, cache sizes or strides .*T=3, cache \[5,"
        with pytest.raises(RuntimeError, match=says):
            prologue(*arguments(3, blocks=5), shape, NUMERICS)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("index", "bad", "says"),
    [
        (4, TABLE, "positions: a value outside"),
        (4, -1, "positions: a value outside"),
        (5, BLOCKS * BLOCK, "slot_mapping: a slot beyond"),
    ],
)
def test_debug_flags_what_must_not_be_followed(tokens, index, bad, says):
    prologue = op.OpaquePrologue(configuration(debug=True), DEVICE)
    markers = Markers(prologue)
    prologue(*arguments(tokens), SHAPE, NUMERICS)
    assert sum(markers.read()["device"].values()) == 1
    tensors = arguments(tokens)
    tensors[index][..., -1] = bad
    before = [cache.clone() for cache in tensors[6:]]
    prologue(*tensors, SHAPE, NUMERICS)
    with pytest.raises(ValueError, match=says):
        markers.read()
    if index == 5 and tokens == 1:
        assert all(torch.equal(a, b) for a, b in zip(tensors[6:], before, strict=True))
    markers.reset()
    assert sum(markers.read()["device"].values()) == 0


def test_debug_changes_no_bits_of_good_arguments():
    for tokens in (1, 3):
        prologue = op.OpaquePrologue(configuration(debug=True), DEVICE)
        plain = op.OpaquePrologue(configuration(), DEVICE)
        slots = [5, -1, 60][:tokens]
        actual, expected = (call(p, arguments(tokens, slots)) for p in (prologue, plain))
        assert_same_bits(actual, expected)


# What it refuses


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("qkv", lambda t: t.float(), TypeError, "qkv: expected dtype .*bfloat16.*got torch.float32"),
        ("qkv", lambda t: t[:, :-1], ValueError, r"qkv: expected shape \[\*, 1024\], got \[3, 1023\]"),
        ("k_weight", lambda t: t.half(), TypeError, "k_weight: expected dtype torch.bfloat16"),
        ("positions", lambda t: t[:2], ValueError, r"positions: expected shape \[3, 3\], got \[2, 3\]"),
        ("slot_mapping", lambda t: t.short(), TypeError, "slot_mapping: expected dtype"),
        ("key_cache", lambda t: t.to("meta"), ValueError, "key_cache: expected device .*got meta"),
        ("value_cache", lambda t: t[:2], ValueError, "value_cache: expected the key_cache's shape"),
        ("marker", lambda t: t.int(), TypeError, "marker: expected dtype torch.int64, got torch.int32"),
        ("marker", lambda t: t[:1], ValueError, r"marker: expected shape \[4\], got \[1\]"),
        ("marker", lambda t: t.to("meta"), ValueError, "marker: expected device .*got meta"),
        ("configuration", lambda t: "other", ValueError, "configuration: expected the handle"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named_before_anything_runs(name, change, error, says):
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    names = (
        "qkv q_weight k_weight cos_sin positions slot_mapping key_cache value_cache marker "
        "configuration"
    ).split()
    given = dict(zip(names, [*arguments(3), prologue.marker, prologue.handle], strict=True))
    before = given["key_cache"].clone()
    with pytest.raises(error, match=says):
        op.qkv_prologue(**{**given, name: change(given[name])})
    assert torch.equal(given["key_cache"], before)
    assert runs(prologue) == [0, 0]


def test_another_models_shape_or_numerics_is_refused():
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    with pytest.raises(ValueError, match=r"numerics: expected fp32_through, .*got per_op"):
        prologue(*arguments(1), SHAPE, Numerics("per_op", NUMERICS.reduction))
    with pytest.raises(ValueError, match=r"shape: expected .*compact.*got .*qwen3.5-27b"):
        prologue(*arguments(1), preset("qwen3.5-27b"), NUMERICS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decode": (0, 1)}, r"decode: expected 1 <= first <= last, got \(0, 1\)"),
        ({"decode": (3, 2)}, "decode"),
        ({"fallback": "fast"}, "fallback: expected one of .*got 'fast'"),
        ({"fallback": "compiled", "first_traced": 1}, "first_traced: expected at least 2"),
        ({"first_traced": 4}, "first_traced: .*got 4 of 'eager'"),
    ],
)
def test_impossible_configurations_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        configuration(**options)


def test_handles_differ_where_configurations_do():
    options = [
        {},
        {"debug": True},
        {"decode": (1, 2)},
        {"fallback": "compiled"},
        {"force_fallback": True},
        {"fallback": "compiled", "first_traced": 4},
    ]
    assert len({configuration(**o).handle for o in options}) == len(options)
    assert configuration().handle == configuration().handle
    assert op.register(configuration()) is op.register(configuration())


# Registration


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fallback": "compiled", "force_fallback": True},
        {"fallback": "reference", "force_fallback": True},
    ],
)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_opcheck(options, tokens):
    prologue = op.OpaquePrologue(configuration(**options), DEVICE)
    slots = [-1, 5, -1][:tokens]
    prologue(*arguments(tokens, slots), SHAPE, NUMERICS)  # torch 2.4 cannot compile inside opcheck
    torch.library.opcheck(
        op.qkv_prologue, (*arguments(tokens, slots), prologue.marker, prologue.handle)
    )


@pytest.mark.parametrize(
    ("mistake", "test", "says"),
    [
        ("undeclared_mutation", "test_schema", "key_cache is not defined as mutable"),
        ("wrong_fake_stride", "strides", r"output 2: the fake has strides \(1024, 64, 1\)"),
    ],
)
def test_planted_registrations_are_caught(mistake, test, says):
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    given = (*arguments(3), prologue.marker, prologue.handle)
    assert set(opcheck(op.qkv_prologue, given).values()) == {"SUCCESS"}
    said = opcheck(planted(mistake), given)
    assert re.search(says, said[test])


def test_unknown_mistake():
    with pytest.raises(ValueError, match="mistake: expected one of"):
        planted("no_mistake")


# In compiled models


def test_compiled_model_keeps_the_choice_at_run_time():
    """One dynamic graph, first traced at a prefill, with no guard left to trace it again."""
    config = ModelConfig.compact(layers=2)
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    model = random_model(config, prologue, NUMERICS, device=DEVICE)
    torch._dynamo.reset()
    drop = getattr(torch.compiler, "skip_all_guards_unsafe", None)
    options = {"guard_filter_fn": drop} if drop else None
    compiled = torch.compile(
        model, backend="aot_eager", fullgraph=True, dynamic=None, options=options
    )

    def forward(*given):
        for tensor, dim in ((given[0], 0), (given[1], 1), (given[2], 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        return compiled(*given)

    expected = greedy(model, [5, 3, 8, 13], 4)
    prologue.marker.zero_()
    assert greedy(model, [5, 3, 8, 13], 4, forward=forward) == expected
    assert runs(prologue) == [2 * 3, 2 * 1]


def test_inductor_model_copies_no_cache():
    config = ModelConfig.compact(layers=1)
    prologue = op.OpaquePrologue(configuration(), DEVICE)
    model = random_model(config, prologue, NUMERICS, device=DEVICE)
    torch._dynamo.reset()
    blocks = 512  # a cache of more elements than any activation or weight
    with capture() as codes, torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        caches = model.new_caches(blocks, BLOCK)
        greedy_step = torch.tensor([7], device=DEVICE)
        positions = greedy_step.repeat(3, 1)
        table, seq_len = torch.arange(2, device=DEVICE), greedy_step + 1
        compiled(greedy_step, positions, greedy_step, table, seq_len, caches)
    assert runs(prologue) == [1, 0]
    (code,) = codes
    assert "qkv_prologue" in code
    assert kernels_touching(code, caches[0][0].numel()) == []
    assert unknown_sizes(code, caches[0][0].numel()) == []


def test_views_of_one_allocation_are_written_in_place():
    from torch._inductor import config  # at the top it would import Triton before the kernels do

    if not hasattr(config, "enable_auto_functionalized_v2"):
        pytest.skip("this torch has the old functionalization only")
    assert run_layers("compact", DEVICE) == LayersRun(copies=(), differ=0)


def test_planted_views_under_the_old_functionalization_are_caught():
    """What comes back is undefined, at times even right: the generated code is what tells."""
    assert run_layers("compact", DEVICE, old_functionalization=True).copies


def test_a_run_that_ends_early_says_how():
    broken = run_layers("no-such-shape", DEVICE)
    assert broken.differ is None
    assert "no-such-shape" in broken.error
