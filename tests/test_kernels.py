"""The fused kernel bit for bit against the reference, in Triton's interpreter or on the GPU here.

Every output that the kernel allocates is poisoned first, so that an element left unwritten shows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusion_evidence.kernels import fused, reference
from fusion_evidence.kernels.checks import check_values
from fusion_evidence.kernels.fused import Launch, _tree, _tree_sum
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import PRESETS, AttentionShape, preset
from fusion_evidence.lib.measure.compare import compare
from fusion_evidence.lib.measure.inputs import (
    OUTPUTS,
    POISON,
    Inputs,
    poisoned,
    prologue_inputs,
    run,
)

# Not imported here: `kernels` has to choose the interpreter before triton is first imported.
triton, tl = fused.triton, fused.tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = AttentionShape("tiny", 2, 1, 64, 16, (3, 3, 2), 64, 1, 1)
PAIR = AttentionShape("pair", 4, 2, 64, 16, (3, 3, 2), 64, 1, 1)
NUMERICS = Numerics(reduction=Reduction(32, 2))
POLICIES = [
    ("per_op", "none"),
    *((rounding, c) for rounding in ("storage", "fp32_through") for c in ("none", "cos", "sin")),
]


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    original = torch.Tensor.new_empty

    def new_empty(self, *size, **options):
        if options or self.dtype not in (torch.bfloat16, torch.float16):
            return original(self, *size, **options)  # Triton's interpreter allocates too
        return poisoned(*size, dtype=self.dtype, device=self.device)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def make(shape=TINY, tokens=3, **options) -> Inputs:
    return prologue_inputs(shape, tokens, device=DEVICE, table=64, random_angles=True, **options)


def numerics_of(shape: AttentionShape, rounding="fp32_through", contraction="none") -> Numerics:
    return Numerics(rounding, Reduction(32, shape.head_dim // 32), contraction)


def differences(got, expected) -> dict[str, str]:
    """The outputs of which any bit differs."""
    pairs = {name: compare(got[name], expected[name]) for name in OUTPUTS}
    return {name: str(pair) for name, pair in pairs.items() if not pair.equal}


def check(inputs: Inputs, shape=TINY, numerics=NUMERICS, **options) -> dict[str, torch.Tensor]:
    got = run(fused.qkv_prologue, inputs, shape, numerics, **options)
    assert differences(got, run(reference.qkv_prologue, inputs, shape, numerics)) == {}
    return got


# --- bits


@pytest.mark.parametrize(("rounding", "contraction"), POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_policy(rounding, contraction, dtype):
    trees = [
        Reduction(32, 2),
        Reduction(16, 4, order="pairwise"),
        Reduction(8, 4, warps=2, order="strided"),
        Reduction(64, 1),
    ]
    inputs = make(dtype=dtype, tokens=1)
    for tree in trees:
        check(inputs, numerics=Numerics(rounding, tree, contraction))


@pytest.mark.parametrize("rounding", ["per_op", "storage", "fp32_through"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_table(rounding, dtype):
    inputs = make(dtype=dtype, table_dtype=torch.float32)
    check(inputs, numerics=numerics_of(TINY, rounding))


@triton.jit
def _fma(out, a, b, c):
    tl.store(out, tl.fma(tl.load(a), tl.load(b), tl.load(c)))


def fma_rounds_once() -> bool:
    """False in older interpreters (Triton 3.6), where contractions hold on a GPU alone."""
    a, c, out = (torch.tensor([v], device=DEVICE) for v in (1 + 2.0**-12, -1.0, math.nan))
    _fma[(1,)](out, a, a, c)
    return float(out) == 2.0**-11 + 2.0**-24


@pytest.mark.parametrize("rounding", ["storage", "fp32_through"])
def test_contraction_where_it_is_all_that_is_left(rounding):
    """With y1 = y2 and cos = sin the first half of a rotation is its own rounding error."""
    if DEVICE == "cpu" and not fma_rounds_once():
        pytest.skip(f"triton {triton.__version__} interprets a fused multiply-add as two roundings")
    inputs = make(tokens=2, table_dtype=torch.float32)
    half = TINY.rotary_dim // 2
    heads = inputs.qkv.view(2, -1, TINY.head_dim)
    heads[..., half : 2 * half] = heads[..., :half]
    for weight in (inputs.q_weight, inputs.k_weight):
        weight[half : 2 * half] = weight[:half]
    inputs.cos_sin[:, half:] = inputs.cos_sin[:, :half] = torch.rand(64, half, device=DEVICE)
    q = {}
    for contraction in ("none", "cos", "sin"):
        numerics = numerics_of(TINY, rounding, contraction)
        q[contraction] = check(inputs, numerics=numerics)["q"][..., :half]
    assert q["none"].count_nonzero() == 0
    assert q["cos"].count_nonzero() > 0.8 * q["cos"].numel()
    assert torch.equal(q["sin"], -q["cos"])


@triton.jit
def _sum_rows(rows, out, SIZE: tl.constexpr, TREE: tl.constexpr, SPELL_OUT: tl.constexpr):
    row = rows + tl.program_id(0) * SIZE
    x = tl.load(row + tl.arange(0, SIZE))
    tl.store(out + tl.program_id(0), _tree_sum(x, TREE, SPELL_OUT))


def kernel_sums(rows: torch.Tensor, tree: Reduction) -> torch.Tensor:
    out = torch.full((rows.shape[0],), math.nan, device=DEVICE)
    _sum_rows[(rows.shape[0],)](
        rows, out, tree.size, _tree(tree), fused._INTERPRETED, num_warps=1, enable_fp_fusion=False
    )
    return out


def random_squares(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(5)).square().to(DEVICE)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_every_tree_at_the_level_of_the_fp32_sum(size):
    rows = random_squares(3 if DEVICE == "cpu" else 200, size)
    for tree in Reduction.candidates(size):
        assert compare(kernel_sums(rows, tree), reference.tree_sum(rows, tree)).equal, tree


def test_a_wrong_tree_is_noticed():
    count = 50 if DEVICE == "cpu" else 200
    rows = random_squares(count, 64)
    expected = reference.tree_sum(rows, Reduction(32, 2))
    assert compare(kernel_sums(rows, Reduction(32, 2)), expected).equal
    for wrong in (Reduction(16, 4), Reduction(32, 2, order="strided"), Reduction(16, 2, warps=2)):
        assert compare(kernel_sums(rows, wrong), expected).mismatches > count // 10, wrong


# --- batch invariance


@pytest.mark.parametrize("launch", [Launch(1), Launch(2)])
def test_bits_of_a_token_depend_neither_on_t_nor_on_the_launch(launch):
    tokens = 3 if DEVICE == "cpu" else 257
    inputs = make(PAIR, tokens)
    together = check(inputs, PAIR, launch=launch)
    for t in range(0, tokens, 1 if DEVICE == "cpu" else 64):
        one = replace(
            inputs,
            qkv=inputs.qkv[t : t + 1],
            positions=inputs.positions[:, t : t + 1],
            slot_mapping=inputs.slot_mapping[t : t + 1],
        )
        alone = run(fused.qkv_prologue, one, PAIR, NUMERICS)
        for name in ("q", "k", "v", "gate"):
            assert compare(alone[name], together[name][t : t + 1]).equal, (name, t)


def test_four_heads_a_program():
    shape = AttentionShape("quad", 8, 4, 64, 16, (3, 3, 2), 64, 1, 1)
    inputs = make(shape, 1)
    four = check(inputs, shape, launch=Launch(4))
    one = run(fused.qkv_prologue, inputs, shape, NUMERICS, launch=Launch(1))
    assert differences(four, one) == {}


@pytest.mark.parametrize("heads", [3, 4])
def test_heads_that_do_not_divide_are_refused(heads):
    message = f"launch.heads={heads} must divide q_heads=4 and kv_heads=2"
    with pytest.raises(ValueError, match=message):
        run(fused.qkv_prologue, make(PAIR), PAIR, NUMERICS, launch=Launch(heads))


def test_the_chosen_launch_always_divides():
    for shape in (*PRESETS.values(), TINY, PAIR):
        for tokens in (1, 16, 63, 64, 127, 128, 4096, 16384):
            heads = fused.choose_launch(tokens, shape).heads
            assert shape.q_heads % heads == shape.kv_heads % heads == 0


# --- shapes


def test_no_tokens():
    for dims in (1, 2):
        got = check(make(tokens=0, position_dims=dims))
        assert [tuple(got[name].shape) for name in OUTPUTS[:4]] == [
            (0, 2, 64), (0, 1, 64), (0, 1, 64), (0, 128),
        ]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("position_dims", [1, 2])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_tokens_positions_and_their_type(tokens, position_dims, index_dtype):
    check(make(tokens=tokens, position_dims=position_dims, index_dtype=index_dtype))


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "sections", "interleaved"),
    [
        (64, 64, (11, 11, 10), True),
        (64, 64, (8, 12, 12), False),
        (64, 24, (4, 4, 4), True),
        (64, 24, (2, 7, 3), False),
        (64, 24, (12, 0, 0), True),
        (64, 2, (0, 0, 1), False),
        (128, 96, (24, 12, 12), True),
        (128, 128, (16, 24, 24), False),
        (256, 64, (11, 11, 10), True),
        (256, 256, (44, 42, 42), True),
    ],
)
def test_sizes_and_sections(head_dim, rotary_dim, sections, interleaved):
    shape = AttentionShape(
        "sizes", 2, 1, head_dim, rotary_dim, sections, 64, 1, 1, mrope_interleaved=interleaved
    )
    check(make(shape, 2), shape, numerics_of(shape))


@pytest.mark.parametrize("name", ["compact", "qwen3.5-27b"])
def test_presets(name):
    shape = preset(name)
    check(make(shape, 1), shape, numerics_of(shape))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["per_op", "storage", "fp32_through"])
def test_the_articles_shape_with_more_tokens(rounding):
    shape = preset("qwen3.5-27b")
    check(make(shape, 65 if DEVICE == "cuda" else 5), shape, numerics_of(shape, rounding))


# --- memory


@pytest.mark.parametrize(("block_size", "padding"), [(1, 0), (3, 2), (784, 1), (784, 4)])
def test_paged_write(block_size, padding):
    inputs = make(tokens=4, block_size=block_size, padding=padding)
    got = check(inputs)
    written = inputs.slot_mapping[inputs.slot_mapping >= 0]
    assert written.numel() == 4 - padding
    for name in ("key_cache", "value_cache"):
        cache = got[name].view(-1, TINY.kv_size)
        touched = (cache.view(torch.int16) != POISON).any(-1).nonzero().squeeze(1)
        assert sorted(touched.tolist()) == sorted(written.tolist())


@pytest.mark.parametrize(("offset", "extra"), [(0, 64), (16, 48), (1, 3)])
def test_rows_with_a_stride(offset, extra):
    inputs = make(tokens=3)
    tokens, width = inputs.qkv.shape
    wide = poisoned(tokens, width + extra, dtype=torch.bfloat16, device=DEVICE)
    rows = wide[:, offset : offset + width]
    rows.copy_(inputs.qkv)
    table = torch.full((64, TINY.rotary_dim + 5), math.nan, device=DEVICE).bfloat16()
    table[:, 2 : 2 + TINY.rotary_dim] = inputs.cos_sin
    strided = replace(inputs, qkv=rows, cos_sin=table[:, 2 : 2 + TINY.rotary_dim])
    assert differences(check(strided), check(inputs)) == {}


def test_positions_and_slots_inside_larger_buffers():
    inputs = make(tokens=3)
    buffer = torch.full((3, 40), 10**9, device=DEVICE)
    buffer[:, 7:10] = inputs.positions
    slots = torch.full((12,), 10**9, device=DEVICE)
    slots[3:12:3] = inputs.slot_mapping
    expected = check(inputs)
    for positions in (buffer[:, 7:10], inputs.positions.T.contiguous().T):
        view = replace(inputs, positions=positions, slot_mapping=slots[3:12:3])
        assert differences(check(view), expected) == {}
    line = replace(inputs, positions=inputs.positions[1].contiguous())
    view = replace(inputs, positions=inputs.positions.T.contiguous()[:, 1])
    assert view.positions.stride() == (3,)
    assert differences(check(view), check(line)) == {}
    same_rows = replace(inputs, positions=inputs.positions[1].expand(3, -1))
    assert differences(check(same_rows), check(line)) == {}


@pytest.mark.parametrize("layout", ["blocks", "heads_before_slots", "gaps"])
def test_caches_as_views_of_one_allocation(layout):
    shape, inputs = PAIR, make(PAIR, 4, block_size=3, padding=1)
    blocks, size, heads, dim = inputs.key_cache.shape

    def views(memory):
        if layout == "blocks":
            kv = memory.view(blocks, 2, size, heads, dim)
            return kv[:, 0], kv[:, 1]
        if layout == "heads_before_slots":
            kv = memory.view(2, blocks, heads, size, dim).transpose(2, 3)
            return kv[0], kv[1]
        kv = memory.view(blocks, 2, size + 1, heads + 1, dim + 5)
        return kv[:, 0, :size, 1:, 3 : 3 + dim], kv[:, 1, 1:, :heads, :dim]

    elements = 2 * blocks * size * heads * dim
    if layout == "gaps":
        elements = 2 * blocks * (size + 1) * (heads + 1) * (dim + 5)
    memory = {}
    for implementation in (fused, reference):
        memory[implementation] = poisoned(elements, dtype=torch.bfloat16, device=DEVICE)
        key, value = views(memory[implementation])
        given = replace(inputs, key_cache=key, value_cache=value)
        implementation.qkv_prologue(*given.args(), shape, NUMERICS)
    assert compare(memory[fused], memory[reference]).equal  # the gaps as well
    written = (memory[fused].view(torch.int16) != POISON).sum()
    assert written == 3 * 2 * heads * dim


def test_addresses_beyond_32_bits():
    """Rows, table rows and cache blocks 2**30 elements apart: index 2 lies past 2**31 elements."""
    step = 1 << 30
    try:  # on a CPU only what is written becomes real memory
        memory = torch.empty(2 * step + (1 << 16), dtype=torch.bfloat16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no room for 4.3 GB of addresses: {error}")
    inputs = make(tokens=3, block_size=2, blocks=3)
    # Three rows and three table rows used in all; slots in the last block and in the first.
    inputs.positions.copy_(torch.tensor([[0, 1, 2], [1, 2, 0], [2, 0, 1]]))
    inputs.slot_mapping.copy_(torch.tensor([5, 0, 4]))
    inputs = replace(inputs, cos_sin=inputs.cos_sin[:3].contiguous())
    start = 0

    def far(tensor):
        """``tensor`` with its first dimension ``step`` elements apart."""
        nonlocal start
        view = memory.as_strided(tensor.shape, (step, *tensor.stride()[1:]), start)
        start += 1 << 12
        assert tensor[0].numel() <= 1 << 12
        return view.copy_(tensor)

    spread = replace(
        inputs,
        **{name: far(getattr(inputs, name)) for name in ("qkv", "cos_sin", "key_cache")},
        value_cache=far(inputs.value_cache),
    )
    got = fused.qkv_prologue(*spread.args(), TINY, NUMERICS)
    got = dict(zip(OUTPUTS, (*got, spread.key_cache, spread.value_cache), strict=True))
    assert differences(got, run(reference.qkv_prologue, inputs, TINY, NUMERICS)) == {}


# --- NaN


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_in_inputs_is_reported_and_the_rest_still_compared():
    inputs = make(tokens=2)
    heads = inputs.qkv.view(2, -1, TINY.head_dim)
    heads[0, 0, 40] = math.nan  # a query head: all of it is lost, and nothing else
    heads[1, 5, 3] = math.nan  # V is copied
    heads[1, 2, 5] = math.inf  # a query head: rsqrt(inf) * inf
    got = run(fused.qkv_prologue, inputs, TINY, NUMERICS)
    expected = run(reference.qkv_prologue, inputs, TINY, NUMERICS)
    q = compare(got["q"], expected["q"])
    # No two machines agree on the bits of a computed NaN; where it stands, they must.
    assert torch.equal(got["q"].isnan(), expected["q"].isnan())
    assert q.nan_actual == q.nan_expected > TINY.head_dim
    assert q.mismatches == q.nan_mismatched
    assert not got["q"][0, 1].isnan().any()
    for name in ("k", "v", "gate", "key_cache", "value_cache"):
        assert compare(got[name], expected[name]).equal, name
    assert compare(got["v"], expected["v"]).nan_actual == 1


# --- marker and errors


def test_marker_counts_every_run():
    marker = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for count, (shape, tokens, launch) in enumerate(
        [(TINY, 1, None), (TINY, 3, None), (PAIR, 2, Launch(2))], start=1
    ):
        check(make(shape, tokens), shape, marker=marker, launch=launch)
        assert int(marker) == count
    check(make(tokens=0), marker=marker)
    assert int(marker) == 3  # nothing to run


@pytest.mark.parametrize("position_dims", [1, 2])
@pytest.mark.parametrize("bad", [64, -1, 2**31 - 1])
def test_a_position_outside_the_table_is_flagged_and_not_followed(bad, position_dims):
    inputs = make(tokens=3, position_dims=position_dims)
    good = run(fused.qkv_prologue, inputs, TINY, NUMERICS)
    inputs.positions[..., 1] = bad
    errors = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    got = run(fused.qkv_prologue, inputs, TINY, NUMERICS, errors=errors)
    assert int(errors) == fused.BAD_POSITION
    for name in ("q", "k", "v", "gate"):
        assert compare(got[name][[0, 2]], good[name][[0, 2]]).equal, name
    with pytest.raises(ValueError, match="positions: a value outside the cos/sin table"):
        fused.raise_errors(errors)


def test_one_bad_position_row_is_enough():
    for row in range(3):
        inputs = make(tokens=2)
        inputs.positions[row, 1] = 64
        errors = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        run(fused.qkv_prologue, inputs, TINY, NUMERICS, errors=errors)
        assert int(errors) == fused.BAD_POSITION, row


def test_a_slot_beyond_the_cache_is_flagged_and_not_followed():
    inputs = make(tokens=3)
    expected = replace(inputs, slot_mapping=inputs.slot_mapping.clone())
    slots = inputs.key_cache.shape[0] * inputs.key_cache.shape[1]
    inputs.slot_mapping[1], expected.slot_mapping[1] = slots, -1
    errors = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    got = run(fused.qkv_prologue, inputs, TINY, NUMERICS, errors=errors)
    assert int(errors) == fused.BAD_SLOT
    assert differences(got, run(reference.qkv_prologue, expected, TINY, NUMERICS)) == {}
    with pytest.raises(ValueError, match="slot_mapping: a slot beyond the cache"):
        fused.raise_errors(errors)


def test_good_values_raise_no_flag():
    errors = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    inputs = make(tokens=2, padding=1)
    inputs.positions[0, 0], inputs.positions[1, 0] = 0, 63
    check(inputs, errors=errors)
    fused.raise_errors(errors)
    assert int(errors) == 0


# --- arguments


def bad_argument_cases():
    bf16 = torch.bfloat16
    cpu = dict(device=DEVICE)
    yield "qkv", torch.zeros(3, 384, **cpu), TypeError, "bfloat16 or torch.float16, got .*float32"
    yield "qkv", torch.zeros(3, 383, dtype=bf16, **cpu), ValueError, r"\[\*, 384\], got \[3, 383\]"
    yield "qkv", torch.zeros(384, dtype=bf16, **cpu), ValueError, r"\[\*, 384\], got \[384\]"
    yield "qkv", torch.zeros(384, 3, dtype=bf16, **cpu).T, ValueError, r"unit last stride, got .*3"
    for name in ("q_weight", "k_weight"):
        yield name, torch.zeros(64, **cpu), TypeError, "bfloat16, got torch.float32"
        yield name, torch.zeros(63, dtype=bf16, **cpu), ValueError, r"\[64\], got \[63\]"
        yield name, torch.zeros(128, dtype=bf16, **cpu)[::2], ValueError, r"unit last .*\(2,\)"
        yield name, torch.zeros(64, dtype=bf16, device="meta"), ValueError, "device .*, got meta"
    yield "cos_sin", torch.zeros(9, 16, **cpu).double(), TypeError, "float32, got torch.float64"
    yield "cos_sin", torch.zeros(9, 16, **cpu).half(), TypeError, "float32, got torch.float16"
    yield "cos_sin", torch.zeros(9, 15, dtype=bf16, **cpu), ValueError, r"\[\*, 16\], got \[9, 15\]"
    yield "positions", torch.zeros(3, 3, **cpu), TypeError, "int32 or torch.int64, got .*float32"
    zeros = torch.zeros(3, 4, dtype=torch.int64, **cpu)
    yield "positions", zeros, ValueError, r"\[3, 3\], got \[3, 4\]"
    yield "positions", zeros[:2, :3], ValueError, r"\[3, 3\], got \[2, 3\]"
    yield "positions", zeros[0], ValueError, r"\[3\], got \[4\]"
    yield "positions", zeros[None, :, :3], ValueError, r"\[3, 3\], got \[1, 3, 3\]"
    yield "slot_mapping", torch.zeros(3, **cpu).short(), TypeError, "torch.int64, got torch.int16"
    yield "slot_mapping", zeros[0], ValueError, r"\[3\], got \[4\]"
    cache = torch.zeros(3, 16, 2, 64, dtype=bf16, **cpu)
    for name in ("key_cache", "value_cache"):
        yield name, cache, ValueError, r"\[\*, \*, 1, 64\], got \[3, 16, 2, 64\]"
        yield name, cache[:, :, :1].half(), TypeError, "bfloat16, got torch.float16"
        yield name, cache[:, :, 0], ValueError, r"\[\*, \*, 1, 64\], got \[3, 16, 64\]"
        strided = torch.zeros(3, 16, 1, 128, dtype=bf16, **cpu)[..., ::2]
        yield name, strided, ValueError, "unit last stride, got"
    other = torch.zeros(2, 16, 1, 64, dtype=bf16, **cpu)
    yield "value_cache", other, ValueError, r"shape \[3, 16, 1, 64\], got \[2, 16, 1, 64\]"


@pytest.mark.parametrize("implementation", [fused, reference])
def test_arguments_that_do_not_fit(implementation):
    inputs = make(tokens=3)
    for name, tensor, error, message in bad_argument_cases():
        given = replace(inputs, **{name: tensor})
        with pytest.raises(error, match=f"^{name}: expected .*{message}"):
            implementation.qkv_prologue(*given.args(), TINY, NUMERICS)
    assert (inputs.key_cache.view(torch.int16) == POISON).all()  # refused before anything ran


def test_a_tree_over_another_size_is_refused():
    with pytest.raises(ValueError, match=r"numerics\.reduction: expected a tree over head_dim=64"):
        run(fused.qkv_prologue, make(), TINY, Numerics(reduction=Reduction(32, 8)))


@pytest.mark.parametrize("name", ["marker", "errors"])
def test_flags_that_do_not_fit(name):
    right = torch.int64 if name == "marker" else torch.int32
    for flag in (
        torch.zeros(1, device=DEVICE),
        torch.zeros(2, dtype=right, device=DEVICE),
        torch.zeros(1, dtype=right, device="meta"),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected one {right} element on {DEVICE}"):
            run(fused.qkv_prologue, make(), TINY, NUMERICS, **{name: flag})


def test_check_values():
    inputs = make(tokens=3)

    def values(positions=inputs.positions, slots=inputs.slot_mapping):
        check_values(inputs.cos_sin, positions, slots, inputs.key_cache)

    values()
    values(inputs.positions[:, :0], inputs.slot_mapping[:0])
    values(slots=torch.full_like(inputs.slot_mapping, -1))
    with pytest.raises(ValueError, match=r"positions: expected values in \[0, 64\), got .* to 64"):
        values(positions=inputs.positions.clamp_min(64))
    with pytest.raises(ValueError, match=r"positions: expected .*, got -1 to -1"):
        values(positions=torch.full_like(inputs.positions, -1))
    with pytest.raises(ValueError, match=r"slot_mapping: expected values below 48 .*, got 48"):
        values(slots=torch.tensor([0, 48, -1], device=DEVICE))
    with pytest.raises(ValueError, match="slot_mapping: expected distinct slots"):
        values(slots=torch.tensor([5, 7, 5], device=DEVICE))


# --- planted faults


def one_bit(*arguments):
    q, k, v, gate = fused.qkv_prologue(*arguments)
    q.view(torch.int16)[-1, 1, 33] ^= 1
    return q, k, v, gate


def one_head(*arguments):
    q, k, v, gate = fused.qkv_prologue(*arguments)
    q[:, 1] = q[:, 0]
    return q, k, v, gate


def one_t(*arguments):
    q, k, v, gate = fused.qkv_prologue(*arguments)
    if q.shape[0] == 3:
        v.view(torch.int16)[0, 0, 0] ^= 1
    return q, k, v, gate


def test_planted_faults_are_caught_and_placed():
    for tokens in (1, 2, 3, 4):
        inputs = make(tokens=tokens)
        expected = run(reference.qkv_prologue, inputs, TINY, NUMERICS)

        bit = compare(run(one_bit, inputs, TINY, NUMERICS)["q"], expected["q"])
        assert (bit.mismatches, bit.first_index) == (1, (tokens - 1, 1, 33))
        head = run(one_head, inputs, TINY, NUMERICS)
        assert list(differences(head, expected)) == ["q"]
        assert compare(head["q"], expected["q"]).first_index[:2] == (0, 1)
        found = differences(run(one_t, inputs, TINY, NUMERICS), expected)
        assert list(found) == (["v"] if tokens == 3 else [])


@pytest.mark.parametrize(
    "wrong",
    [
        dict(MROPE="none"),
        dict(MROPE="chunked"),
        dict(SECTION_H=2),
        dict(SECTION_W=1),
        dict(HALF=7),
        dict(ROUNDING="storage"),
        dict(ROUNDING="per_op", ROUND_PRODUCTS=True),
    ],
    ids=str,
)
def test_a_kernel_compiled_wrong_is_caught(monkeypatch, wrong):
    right = fused._constants
    monkeypatch.setattr(fused, "_constants", lambda *arguments: {**right(*arguments), **wrong})
    inputs = make(tokens=4)
    got = run(fused.qkv_prologue, inputs, TINY, NUMERICS)
    expected = run(reference.qkv_prologue, inputs, TINY, NUMERICS)
    assert set(differences(got, expected)) >= {"q", "k", "key_cache"}
