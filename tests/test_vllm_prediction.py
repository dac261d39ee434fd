"""What a service's kernel saves in place: the same chain with either prologue, and nothing else differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.measure.inputs import prologue_inputs
from fusion_evidence.lib.measure.machine import detect
from fusion_evidence.lib.measure.timing import summarize
from fusion_evidence.lib.service import vllm_prediction as prediction

SHAPE = replace(preset("compact"), layers=2, attention_layers=2)
NUMERICS = Numerics("per_op", Reduction(32, SHAPE.head_dim // 32))


@pytest.fixture
def cpu():
    return detect().model_copy(update={"device": "cpu", "profile": "cpu"})


@pytest.mark.parametrize("tokens", [1, 3])
def test_both_chains_compute_the_same_and_neither_writes_a_cache(cpu, tokens):
    inputs = prologue_inputs(SHAPE, tokens, device="cpu", seed=3)
    weights = prediction.drawn_weights(SHAPE, "cpu", 0)
    before = [cache.clone() for cache in (inputs.key_cache, inputs.value_cache)]
    runs = []

    def kernel(*arguments, marker):
        runs.append(marker)
        return reference.qkv_prologue(*arguments)

    made = prediction.layers(kernel, SHAPE, NUMERICS, cpu, inputs, "first")
    compiled, fused = (prediction.chain(made[n], inputs, SHAPE, weights) for n in made)
    assert list(made) == ["compiled", "fused"]
    assert len(runs) == len(fused) == SHAPE.layers
    for cache, was in zip((inputs.key_cache, inputs.value_cache), before, strict=True):
        assert torch.equal(cache.view(torch.int16), was.view(torch.int16))
    for one, other in zip(compiled, fused, strict=True):
        for a, b, name in zip(one, other, "q k v gate".split(), strict=True):
            assert a.isfinite().all()
            assert a.std() > 0
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2, msg=name)


def test_both_are_timed_in_turn_and_their_kernels_counted(cpu):
    found = prediction.measure(reference.qkv_prologue, SHAPE, NUMERICS, cpu, samples=3)
    assert set(found.times) == {"compiled", "fused", "control"}
    assert (
        found.launches["compiled"] > found.launches["fused"] == 1
    )  # the gate's; one graph for all layers
    assert f"{found.launches['compiled']} generated kernels a layer" in str(found)


def test_the_saving_is_of_pairs():
    drift = [0.0, 1.0, 2.0, 3.0]
    times = {
        "compiled": summarize([50 + t for t in drift], ""),
        "fused": summarize([40 + t for t in drift], ""),
        "control": summarize([40.5 + t for t in drift], ""),
    }
    found = prediction.InPlace(times, {"compiled": 5, "fused": 1})
    assert (found.saving.value, found.saving.low, found.saving.high) == (10, 10, 10)
    assert found.noise.value == -0.5
    assert found.same_work(7, 3)
    assert not found.same_work(7, 4)
    assert not found.same_work(7, None)
