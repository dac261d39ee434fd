"""Numerics found again from a model's records: of the reference, where they are known, and of Inductor.

The models are fp16 where a tree has to be found: with more mantissa a wrong one shows in fewer elements.
"""

from __future__ import annotations

import pytest
import torch
from forced_runs import FUSED, forced, model

from fusion_evidence.kernels import eager, op, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.attribution.fingerprint import Fingerprint, fingerprint
from fusion_evidence.lib.measure.compare import upper_bound
from fusion_evidence.lib.service.model import rotary_table

COMPACT = preset("compact")
NEIGHBOURS, STRIDED = Reduction(16, 4), Reduction(16, 4, order="strided")
LONG = {"image": (1400, True), "text": (200, False)}
SHORT = {"image": (71, True)}


pytestmark = pytest.mark.usefixtures("one_thread")


def opaque(path, requests=SHORT, layers=1, **options):
    """Records with inputs: the operator with eager's body, whose numerics are the framework's."""
    configuration = op.Configuration(COMPACT, FUSED, force_fallback=True)
    one = model(layers, prologue=op.OpaquePrologue(configuration), **options)
    return forced(one, path, requests=requests, inputs=True)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    return opaque(tmp_path_factory.mktemp("half") / "inputs", LONG, layers=2, dtype=torch.float16)


@pytest.mark.parametrize(
    "numerics",
    [Numerics("fp32_through", STRIDED, "cos"), Numerics("per_op", NEIGHBOURS)],
    ids=str,
)
def test_known_numerics_are_found(half, tmp_path, numerics):
    observed = forced(model(2, numerics, dtype=torch.float16), tmp_path / "observed", requests=LONG)
    found = fingerprint(half, observed, "prefill")
    assert found.numerics == found.closest
    assert found.closest.rounding == numerics.rounding
    assert numerics in (found.numerics, *found.alike)
    assert (found.table, found.mismatches) == ("float16", 0)
    # Beyond the first layer the two models have drifted apart: only there is the input the same.
    assert found.layers == (0,)
    assert found.elements == 1600 * (COMPACT.q_size + COMPACT.kv_size)
    # There the projection knows the token alone, not yet its place.
    assert 500 * 512 < found.distinct < 1000 * 512
    assert found.bound == upper_bound(found.distinct)
    assert len(found.rejected) > len(found.alike)
    assert min(one.mismatches for one in found.rejected) > 0
    policies = found.rejected[-2:]
    assert len({numerics.rounding, *(one.numerics.rounding for one in policies)}) == 3
    assert all(one.elements == found.elements < 1000 * one.mismatches for one in policies)
    assert f"prefill computes {found.fits}, cos/sin in float16" in str(found)
    assert str(numerics.reduction) in found.fits


def test_decode_is_fitted_apart(half, tmp_path):
    """Prefill rounds one way, decode the other."""
    ways = {True: Numerics("per_op", NEIGHBOURS), False: Numerics("storage", NEIGHBOURS)}

    def prologue(qkv, *rest):
        return reference.qkv_prologue(qkv, *rest[:-1], ways[qkv.shape[0] == 1])

    one = model(2, prologue=prologue, dtype=torch.float16)
    observed = forced(one, tmp_path / "observed", requests=LONG)
    decode = fingerprint(half, observed, "decode", reductions=[NEIGHBOURS])
    assert decode.numerics == ways[True]
    assert decode.elements == 6 * (COMPACT.q_size + COMPACT.kv_size)
    prefill = fingerprint(half, observed, "prefill", reductions=[NEIGHBOURS])
    assert prefill.numerics.rounding == "storage"
    assert decode.distinct == decode.elements
    assert prefill.distinct > 100 * decode.distinct
    assert prefill.bound < decode.bound / 100


def test_a_rotary_table_in_fp32_is_told_from_one_in_the_models_dtype(half, tmp_path):
    one = model(2, Numerics("fp32_through", NEIGHBOURS), dtype=torch.float16)
    one.cos_sin = rotary_table(COMPACT, 4096)
    observed = forced(one, tmp_path / "observed", requests=LONG)
    found = fingerprint(half, observed, "prefill", reductions=[NEIGHBOURS, STRIDED])
    assert (found.table, found.numerics) == ("float32", one.numerics)


def test_numerics_that_nobody_declared_are_none_of_them(half, tmp_path):
    """One element in a thousand or so is moved by one unit in the last place."""

    def prologue(*arguments):
        q, *others = reference.qkv_prologue(*arguments)
        bits = q.view(torch.int16)
        bits ^= (torch.arange(bits.numel()) % 997 == 0).view(bits.shape).to(torch.int16)
        return q, *others

    numerics = Numerics("fp32_through", NEIGHBOURS)
    one = model(2, numerics, prologue, dtype=torch.float16)
    observed = forced(one, tmp_path / "observed", requests=LONG)
    found = fingerprint(half, observed, "prefill", reductions=[NEIGHBOURS, STRIDED])
    assert found.numerics is None
    assert found.closest == numerics
    moved = sum(-(-tokens * COMPACT.q_size // 997) for tokens, _ in LONG.values())
    assert found.mismatches == moved
    assert found.bound > moved / found.distinct
    text = str(found)
    assert text.startswith("none of the declared numerics is what prefill computes: the closest, ")
    assert f"leaves {moved:,} of {found.elements:,} elements" in text


def test_too_few_elements_leave_candidates_alike(tmp_path):
    given = opaque(tmp_path / "given")
    observed = forced(model(1), tmp_path / "observed", requests=SHORT)
    found = fingerprint(given, observed, "decode")
    assert found.mismatches == 0
    assert len(found.alike) > 3
    assert FUSED in (found.numerics, *found.alike)
    assert f"decode computes {found.fits}, cos/sin" in str(found)
    assert found.fits.endswith(" (undecided)")


TREE = [Reduction.parse(f"{warps}x8x{8 // warps} strided") for warps in (1, 2, 4, 8)]


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        ([Numerics("per_op", TREE[0])], "per_op, 1x8x8 strided, contraction none"),
        (
            [Numerics("storage", TREE[1], "cos"), Numerics("storage", TREE[0], "cos")],
            "storage, 1x8x8 strided or 2x8x4 strided (undecided), contraction cos",
        ),
        (
            [Numerics("per_op", tree) for tree in (*TREE, NEIGHBOURS, STRIDED)],
            "per_op, 1x16x4 sequential, 1x16x4 strided, 1x8x8 strided, 2x8x4 strided or 2 others "
            "(undecided), contraction none",
        ),
        (
            [Numerics("per_op", tree) for tree in (*TREE, STRIDED)],
            "per_op, 1x16x4 strided, 1x8x8 strided, 2x8x4 strided, 4x8x2 strided or 1 other "
            "(undecided), contraction none",
        ),
        (
            [Numerics("storage", TREE[1]), Numerics("per_op", TREE[0], k_reduction=TREE[1])],
            "per_op, Q 1x8x8 strided, K 2x8x4 strided, contraction none or "
            "storage, 2x8x4 strided, contraction none (undecided)",
        ),
    ],
    ids=["one", "two trees", "many trees", "one more", "no part alone"],
)
def test_every_candidate_that_fits_is_named_whatever_their_order(candidates, said):
    for closest, *alike in (candidates, candidates[::-1]):
        found = Fingerprint("decode", closest, "bfloat16", 0, 9, 9, (0,), tuple(alike), ())
        assert found.fits == said
        assert f"decode computes {said}, cos/sin in bfloat16: all 9 elements" in str(found)


def test_what_says_nothing_is_refused(half, tmp_path):
    given = opaque(tmp_path / "given")
    other = forced(model(1, seed=1), tmp_path / "other", requests=SHORT)
    with pytest.raises(ValueError, match="in no layer is V of prefill the same"):
        fingerprint(given, other, "prefill")
    with pytest.raises(ValueError, match="no inputs of prefill"):
        fingerprint(other, given, "prefill")
    with pytest.raises(ValueError, match="graph: expected one of"):
        fingerprint(given, given, "both")
    hashed = forced(model(1), tmp_path / "hashed", requests=SHORT, hashes=True)
    with pytest.raises(ValueError, match="hashes"):
        fingerprint(given, hashed, "prefill")


@pytest.mark.usefixtures("compile_cache")
@torch.no_grad()
def test_inductor_in_the_whole_model_rounds_once(tmp_path):
    """The compiled model's own prologue, against the inputs of an opaque one in the same model."""
    torch._dynamo.reset()
    given = opaque(tmp_path / "given")
    one = model(1, prologue=eager.qkv_prologue)
    compiled = torch.compile(one, fullgraph=True)

    def prefill_only(ids, *rest):
        return compiled(ids, *rest) if ids.shape[0] > 1 else one(ids, *rest)

    observed = forced(one, tmp_path / "observed", forward=prefill_only, requests=SHORT)
    found = fingerprint(given, observed, "prefill")
    assert found.numerics is not None
    assert (found.numerics.rounding, found.table) == ("fp32_through", "bfloat16")
    assert [fit.numerics.rounding for fit in found.rejected[-2:]] == ["per_op", "storage"]
    # In the decode steps that were left to eager PyTorch, the prologue is that of the operator.
    assert fingerprint(given, observed, "decode").closest.rounding == "per_op"
