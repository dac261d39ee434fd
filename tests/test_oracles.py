"""The oracles and the faults they must see, on the kernel in Triton's interpreter or on the GPU here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusion_evidence.kernels import eager, fused, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.attribution.calibration import fit
from fusion_evidence.lib.measure import oracles
from fusion_evidence.lib.measure.independent import PAIR_ULP_BOUND
from fusion_evidence.lib.measure.inputs import OUTPUTS, prologue_inputs, run
from fusion_evidence.lib.measure.primitive import static_compiled

pytestmark = pytest.mark.usefixtures("one_thread", "compile_cache")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPACT = preset("compact")
SMALL = dict(elements=2000, kernel_tokens=3, device=DEVICE, seed=0)
BIG = 4000
TREES = (Reduction(8, 8), Reduction(64, 1))


def wrong_at_three(*args):
    """The kernel with one wrong bit, in one head, at T = 3 alone."""
    outputs = fused.qkv_prologue(*args)
    if args[0].shape[0] == 3:
        outputs[0].view(torch.int16)[2, 4, 5] ^= 1
    return outputs


@pytest.fixture(scope="module", params=[1, 3])
def study(request, compile_cache):
    return oracles.study(fused.qkv_prologue, COMPACT, request.param, **SMALL)


def test_the_kernel_has_the_bits_of_two_oracles(study):
    assert study.fits[0].mismatches == 0
    assert study.fits[0].elements >= 2000
    assert study.outputs["fused"].keys() == set(OUTPUTS)
    assert study.outputs["fused"]["q"].shape[0] == 3
    for oracle in ("reference", "compiled"):
        found = study.mismatches(oracle)
        assert {name: one.mismatches for name, one in found.items()} == dict.fromkeys(OUTPUTS, 0)
        assert oracles.total(found).elements == sum(
            study.outputs["fused"][name].numel() for name in OUTPUTS
        )


@pytest.mark.parametrize("rounding", oracles.ROUNDINGS)
def test_under_every_policy(study, rounding):
    found = oracles.against_reference(fused.qkv_prologue, COMPACT, study, rounding)
    assert {name: one.mismatches for name, one in found.items()} == dict.fromkeys(OUTPUTS, 0)
    computed = oracles.computed(found)
    assert computed.elements == 3 * (COMPACT.q_size + COMPACT.kv_size)


def test_a_wrong_bit_in_one_head_at_one_size_is_found():
    right = oracles.study(wrong_at_three, COMPACT, 1, **SMALL)
    assert oracles.total(right.mismatches("reference")).equal
    wrong = oracles.study(wrong_at_three, COMPACT, 3, **SMALL)
    for oracle in ("reference", "compiled"):
        found = {name: one.mismatches for name, one in wrong.mismatches(oracle).items()}
        assert found == dict.fromkeys(OUTPUTS, 0) | {"q": 1}
        assert wrong.mismatches(oracle)["q"].first_index == (2, 4, 5)
    for rounding in oracles.ROUNDINGS:
        found = oracles.against_reference(wrong_at_three, COMPACT, wrong, rounding)
        assert oracles.total(found).mismatches == oracles.computed(found).mismatches == 1
    assert oracles.differs(wrong_at_three, COMPACT, wrong.numerics, wrong.inputs) == 1
    assert oracles.differs(fused.qkv_prologue, COMPACT, wrong.numerics, wrong.inputs) == 0


@pytest.mark.parametrize(
    ("tokens", "most", "compared"), [(3, 4, 3), (3, 2, 3), (3, 7, 6), (1, 2, 2)]
)
def test_whole_calls_are_compared_on_inputs_of_their_own(tokens, most, compared):
    sizes = []

    def counted(*args):
        sizes.append(args[0].shape[0])
        return reference.qkv_prologue(*args)

    options = SMALL | dict(elements=5000, kernel_tokens=most)
    one = oracles.study(counted, COMPACT, tokens, **options)
    assert sizes == [tokens] * (compared // tokens)
    assert one.inputs.qkv.shape[0] == compared
    assert one.fits[0].elements >= 5000
    for batch in range(oracles.CALIBRATION_BATCHES):
        seed = SMALL["seed"] + 1 + batch
        calibrated = prologue_inputs(COMPACT, compared, device=DEVICE, seed=seed)
        assert not torch.equal(one.inputs.qkv, calibrated.qkv)


def test_planted_faults_are_all_found(study):
    found = oracles.planted_faults(fused.qkv_prologue, COMPACT, study)
    assert list(found) == ["one bit", "one head", f"T={study.tokens} only"]
    assert {fault for fault, one in found.items() if one.equal} == set()
    assert found["one bit"].mismatches == 3 // study.tokens  # one a call


def test_another_tree_is_planted_where_it_can_be_seen():
    inputs = prologue_inputs(COMPACT, BIG, dtype=torch.float16, device=DEVICE)
    numerics = Numerics("fp32_through", TREES[0])
    outputs = run(reference.qkv_prologue, inputs, COMPACT, numerics)
    fits = [oracles.Fit(numerics, 0, 1)]
    both = {"reference": outputs, "fused": outputs}
    one = oracles.Study(BIG, inputs, fits, both)
    found = oracles.planted_faults(reference.qkv_prologue, COMPACT, one)
    (tree,) = (fault for fault in found if fault.startswith("tree "))
    assert tree != f"tree {TREES[0]}"
    assert 0 < found[tree].rate < 1e-3
    assert found[f"T={BIG} only"].mismatches > 0.99 * outputs["q"].numel()


def test_a_fault_that_is_none_is_not_found(study):
    """The planted faults are found because they are faults: the kernel itself gives zero."""
    outputs = run(fused.qkv_prologue, study.inputs, COMPACT, study.numerics)
    assert oracles.total(oracles.compare_outputs(outputs, study.outputs["reference"])).equal


def test_an_independent_implementation_bounds_the_kernel(study):
    try:
        ulps = oracles.independent_ulps(COMPACT, study)
    except ImportError as missing:
        pytest.skip(str(missing))
    assert 0 < ulps <= PAIR_ULP_BOUND
    flipped = dict(study.outputs["fused"])
    flipped["q"] = flipped["q"].flip(1)  # heads in another order
    wrong = replace(study, outputs=dict(study.outputs) | {"fused": flipped})
    assert oracles.independent_ulps(COMPACT, wrong) > PAIR_ULP_BOUND


def test_policies_differ_and_the_compiled_region_is_one_of_them(study):
    policies = oracles.rounding_policies(COMPACT, study)
    assert list(policies) == ["per_op", "storage", "fp32_through", "eager", "compiled"]

    def rate(a, b):
        found = oracles.compare_outputs(policies[a], policies[b], ("q", "k"))
        return oracles.total(found).rate

    same = study.numerics.rounding
    assert rate("compiled", same) == 0
    for a, b in (("per_op", "storage"), ("storage", "fp32_through"), ("per_op", "fp32_through")):
        assert rate(a, b) > 0.01
    assert rate("eager", "per_op") < 0.1 * rate("eager", "storage")


# --- bits and the batch


def by_batch(*args):
    """The reference, with another tree for more than 2000 tokens."""
    tree = TREES[args[0].shape[0] > 2000]
    return reference.qkv_prologue(*args[:-1], Numerics("fp32_through", tree))


def test_a_tree_that_depends_on_the_batch_is_found():
    inputs = prologue_inputs(COMPACT, BIG, dtype=torch.float16, device=DEVICE)
    numerics, sizes = Numerics("fp32_through", TREES[1]), [1, 2000, 2001]
    found = oracles.changed_by_batch(by_batch, COMPACT, inputs, numerics, sizes)
    assert list(found) == sizes
    assert found[2000].mismatches > 0
    assert found[2001].mismatches == 0
    assert found[2000].elements == 2000 * (2 * COMPACT.q_size + 2 * COMPACT.kv_size)
    steady = oracles.changed_by_batch(reference.qkv_prologue, COMPACT, inputs, numerics, sizes)
    assert all(one.equal for one in steady.values())


def test_a_kernel_wrong_at_one_size_depends_on_the_batch():
    inputs = prologue_inputs(COMPACT, 4, device=DEVICE)
    numerics = oracles.any_tree(COMPACT)
    found = oracles.changed_by_batch(wrong_at_three, COMPACT, inputs, numerics, [1, 2, 3])
    assert {T: one.mismatches for T, one in found.items()} == {1: 0, 2: 0, 3: 1}
    assert found[3].first_index == (2, 4, 5)


def test_the_mean_of_squares_is_asked_per_head_and_size():
    inputs = prologue_inputs(COMPACT, 65, device=DEVICE)
    found = oracles.mean_square_changed_by_batch(COMPACT, inputs, [1, 64])
    heads = COMPACT.qkv_width // COMPACT.head_dim
    assert {T: one.elements for T, one in found.items()} == {1: heads, 64: 64 * heads}


# --- NaN


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_is_reported_and_the_rest_still_compared():
    inputs = prologue_inputs(COMPACT, 3, device=DEVICE)
    heads = inputs.qkv.view(3, -1, COMPACT.head_dim)
    gates, k, v = 1, 2 * COMPACT.q_heads, 2 * COMPACT.q_heads + COMPACT.kv_heads
    for token, head in ((1, 0), (1, gates), (2, k), (0, v)):
        heads[token, head, 5] = math.nan
    numerics = Numerics("fp32_through", Reduction(8, 8))
    everyone = {"fused": fused.qkv_prologue, "compiled": static_compiled()}
    outputs = {name: run(one, inputs, COMPACT, numerics) for name, one in everyone.items()}
    expected = run(reference.qkv_prologue, inputs, COMPACT, numerics)
    poisoned = inputs.key_cache.numel() - 3 * COMPACT.kv_size
    for actual in outputs.values():
        found = oracles.compare_outputs(actual, expected)
        assert {name: one.nan_actual for name, one in found.items()} == {
            "q": COMPACT.head_dim,  # one NaN spoils its row
            "k": COMPACT.head_dim,
            "v": 1,  # and is one where rows are copied
            "gate": 1,
            "key_cache": poisoned + COMPACT.head_dim,
            "value_cache": poisoned + 1,
        }
        for name, one in found.items():
            assert one.nan_expected == one.nan_actual
            # Which NaN an addition makes is its hardware's choice: counted, and no number differs.
            assert one.mismatches == one.nan_mismatched, name
        assert found["v"].equal
        assert found["gate"].equal
    wrong = {name: tensor.clone() for name, tensor in outputs["fused"].items()}
    wrong["q"].view(torch.int16)[0, 0, 0] ^= 1
    one = oracles.compare_outputs(wrong, expected)["q"]
    assert one.mismatches == one.nan_mismatched + 1  # seen among the NaNs
    assert (
        fit(lambda _: outputs["compiled"], [inputs], COMPACT)[0].mismatches <= 2 * COMPACT.head_dim
    )


def test_eager_does_not_depend_on_the_numerics_it_is_given():
    inputs = prologue_inputs(COMPACT, 2, device=DEVICE)
    first, second = (
        run(eager.qkv_prologue, inputs, COMPACT, Numerics(rounding, tree))
        for rounding, tree in (("per_op", TREES[0]), ("fp32_through", TREES[1]))
    )
    assert oracles.total(oracles.compare_outputs(first, second)).equal
