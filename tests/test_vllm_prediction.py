"""What a service's kernel saves alone: both sides do the service's work, and nothing but it."""

from __future__ import annotations

import pytest
import torch

from fusion_evidence.kernels import eager, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.measure.inputs import prologue_inputs
from fusion_evidence.lib.measure.machine import detect
from fusion_evidence.lib.measure.timing import summarize
from fusion_evidence.lib.service.vllm_prediction import (
    Alone,
    _without_cache,
    compiled,
    measure_alone,
)

SHAPE = preset("compact")
NUMERICS = Numerics("per_op", Reduction(32, SHAPE.head_dim // 32))


@pytest.fixture
def cpu():
    return detect().model_copy(update={"device": "cpu", "profile": "cpu"})


def test_neither_side_writes_a_cache_and_both_give_the_prologues_outputs(cpu):
    inputs = prologue_inputs(SHAPE, 1, device="cpu", seed=3)
    expected = eager.qkv_prologue(*inputs.clone().args(), SHAPE, NUMERICS)
    before = [cache.clone() for cache in (inputs.key_cache, inputs.value_cache)]
    runs = []

    def kernel(*arguments, marker):
        runs.append(marker)
        return reference.qkv_prologue(*arguments)

    ours = _without_cache(kernel, SHAPE, NUMERICS, "cpu")(inputs)()
    theirs = compiled(SHAPE, "first", cpu)(inputs)()
    for cache, was in zip((inputs.key_cache, inputs.value_cache), before, strict=True):
        assert torch.equal(cache.view(torch.int16), was.view(torch.int16))
    assert len(runs) == 1
    for one, other, name in zip(theirs, expected, "q k v gate".split(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2, msg=name)
    assert torch.equal(ours[3], expected[3])


def test_both_are_timed_and_the_generated_kernels_counted(cpu):
    found = measure_alone(
        reference.qkv_prologue, SHAPE, NUMERICS, cpu, configurations="first", samples=2
    )
    assert {"fused", "compiled", "control"} <= set(found.times)
    assert found.launches >= 1
    assert f"in {found.launches} generated kernels" in str(found)


def test_the_saving_is_of_all_layers_by_the_worst_ends():
    times = {"compiled": summarize([5.0, 6.0, 7.0], ""), "fused": summarize([1.0, 2.0, 3.0], "")}
    saving = Alone(times, 3).saving(10)
    assert (saving.value, saving.low, saving.high) == (40, 20, 60)
