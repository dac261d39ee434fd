"""The three oracles of the primitive, and the faults that prove they can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from fusion_evidence.kernels import eager, fused, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction, Rounding
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.attribution.calibration import Fit, fit
from fusion_evidence.lib.measure.compare import Comparison, compare, pair_ulps
from fusion_evidence.lib.measure.independent import huggingface
from fusion_evidence.lib.measure.inputs import OUTPUTS, Inputs, prologue_inputs, run
from fusion_evidence.lib.measure.primitive import (
    Implementation,
    Outputs,
    any_tree,
    arm,
    batches_for,
    buffer_sets,
    head,
    in_batches,
    overlapping,
    static_compiled,
)

CALIBRATION_BATCHES = 8
"""At most so many times the elements asked for, to tell the last candidates apart."""
ROUNDINGS = get_args(Rounding)


@dataclass(frozen=True)
class Study:
    """One T: the compiled region's calibration, and everybody's outputs on the same inputs.

    fits: candidates of the compiled region, best first, over all elements asked for.
    outputs: oracle (or ``fused``) -> the six outputs on ``inputs``.
    """

    tokens: int
    inputs: Inputs
    fits: Sequence[Fit]
    outputs: Mapping[str, Mapping[str, Tensor]]

    @property
    def numerics(self) -> Numerics:
        """What the compiled region was found to compute."""
        return self.fits[0].numerics

    def mismatches(self, oracle: str) -> dict[str, Comparison]:
        """The kernel against an oracle, by output."""
        return compare_outputs(self.outputs["fused"], self.outputs[oracle])


def study(
    kernel: Implementation,
    shape: AttentionShape,
    tokens: int,
    *,
    elements: int,
    kernel_tokens: int,
    device: str,
    seed: int,
) -> Study:
    """Calibrate the static compile at ``tokens`` a call, then run kernel and oracles on other inputs.

    What is compared was not calibrated on: the best of a hundred candidates fits the inputs it was chosen
    on a little too well.

    Args:
        elements: computed elements (Q and K) to reach in either part, through as many calls as it takes.
        kernel_tokens: at most so many tokens are compared, in whole calls, one at least; 0 is no limit.
    """
    count = tokens * batches_for(elements, tokens, shape)
    region = in_batches(static_compiled(), tokens)
    fits = fit(
        lambda inputs: run(region, inputs, shape, any_tree(shape)),
        (
            prologue_inputs(shape, count, device=device, seed=seed + 1 + batch)
            for batch in range(CALIBRATION_BATCHES)
        ),
        shape,
    )
    if kernel_tokens:
        count = min(count, max(tokens, kernel_tokens - kernel_tokens % tokens))
    few = prologue_inputs(shape, count, device=device, seed=seed)
    best = fits[0].numerics
    outputs = {
        "fused": run(in_batches(kernel, tokens), few, shape, best),
        "reference": run(reference.qkv_prologue, few, shape, best),
        "compiled": run(region, few, shape, best),
    }
    return Study(tokens, few, fits, outputs)


def compare_outputs(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    names: Iterable[str] = OUTPUTS,
) -> dict[str, Comparison]:
    """Bit comparison by name of output."""
    return {name: compare(actual[name], expected[name]) for name in names}


def total(found: Mapping[str, Comparison]) -> Comparison:
    """All outputs as one comparison."""
    return sum(found.values(), Comparison())


def computed(found: Mapping[str, Comparison]) -> Comparison:
    """Q and K, the outputs that are computed: what a bound may count. The others are copies of them."""
    return found["q"] + found["k"]


def against_reference(
    kernel: Implementation, shape: AttentionShape, one: Study, rounding: str
) -> dict[str, Comparison]:
    """Kernel against reference under another rounding policy, by output."""
    numerics = Numerics(rounding, one.numerics.reduction)  # type: ignore[arg-type]
    return _versus_reference(in_batches(kernel, one.tokens), shape, numerics, one.inputs)


def _versus_reference(
    kernel: Implementation, shape: AttentionShape, numerics: Numerics, inputs: Inputs
) -> dict[str, Comparison]:
    actual = run(kernel, inputs, shape, numerics)
    return compare_outputs(actual, run(reference.qkv_prologue, inputs, shape, numerics))


def differs(
    kernel: Implementation, shape: AttentionShape, numerics: Numerics, inputs: Inputs
) -> int:
    """How many elements of all six outputs differ from the reference on ``inputs``, in one call."""
    return total(_versus_reference(kernel, shape, numerics, inputs)).mismatches


def independent_ulps(shape: AttentionShape, one: Study) -> float:
    """Largest distance of the kernel's Q and K from Hugging Face's, in ULP of the rotated pair.

    ImportError without transformers or its Qwen3.5.
    """
    theirs = run(huggingface, one.inputs, shape, one.numerics)
    ours = one.outputs["fused"]
    return max(pair_ulps(ours[name], theirs[name], shape.rotary_dim) for name in ("q", "k"))


def rounding_policies(shape: AttentionShape, one: Study) -> dict[str, Mapping[str, Tensor]]:
    """Outputs of the three declared policies on one tree, of eager PyTorch and of the compiled region.

    The policy that was calibrated is taken with its own contraction and trees.
    """
    calibrated = one.numerics
    policies: dict[str, Mapping[str, Tensor]] = {}
    for rounding in ROUNDINGS:
        numerics = replace(calibrated, rounding=rounding, contraction="none")  # type: ignore[arg-type]
        if rounding == calibrated.rounding:
            numerics = calibrated
        policies[rounding] = run(reference.qkv_prologue, one.inputs, shape, numerics)
    policies["eager"] = run(eager.qkv_prologue, one.inputs, shape, calibrated)
    policies["compiled"] = one.outputs["compiled"]
    return policies


def changed_by_batch(
    implementation: Implementation,
    shape: AttentionShape,
    inputs: Inputs,
    numerics: Numerics,
    sizes: Sequence[int],
) -> dict[int, Comparison]:
    """For each T in ``sizes``: do the first T tokens get the bits they get among all of ``inputs``?"""
    names = ("q", "k", "v", "gate")
    whole = run(implementation, inputs, shape, numerics)
    found = {}
    for size in sizes:
        part = run(implementation, head(inputs, size), shape, numerics)
        expected = {name: whole[name][:size] for name in names}
        found[size] = total(compare_outputs(part, expected, names))
    return found


def mean_square_changed_by_batch(
    shape: AttentionShape, inputs: Inputs, sizes: Sequence[int]
) -> dict[int, Comparison]:
    """The same question to eager PyTorch's fp32 mean of squares, where every other order shows.

    bf16 outputs hide all but a few in a million of those differences.
    """

    def mean(rows: Tensor) -> Tensor:
        heads = rows.unflatten(-1, (-1, shape.head_dim))
        return heads.float().pow(2).mean(-1)

    whole = mean(inputs.qkv)
    return {size: compare(mean(inputs.qkv[:size].clone()), whole[:size]) for size in sizes}


def planted_faults(
    kernel: Implementation, shape: AttentionShape, one: Study, least: int = 10**6
) -> dict[str, Comparison]:
    """What the reference oracle finds when the kernel is wrong: fault -> comparison.

    One flipped bit; one head left as it came; a fault in calls of one T, which must show there and in no
    call of another T; and another reduction tree, which shows in a few elements of a million, so it is
    planted only from ``least`` computed elements on.
    """

    def with_fault(
        fault: Callable[[Outputs, Tensor], Outputs], size: int = one.tokens
    ) -> Comparison:
        def wrong(*args: Tensor) -> Outputs:
            return fault(kernel(*args), args[0])

        actual = run(in_batches(wrong, size), one.inputs, shape, one.numerics)
        return total(compare_outputs(actual, one.outputs["reference"]))

    def one_bit(outputs: Outputs, qkv: Tensor) -> Outputs:
        outputs[0].view(torch.int16)[-1, -1, -1] ^= 1
        return outputs

    def one_head(outputs: Outputs, qkv: Tensor) -> Outputs:
        outputs[1][:, 0] = qkv[:, 2 * shape.q_size :][:, : shape.head_dim]
        return outputs

    def one_size(outputs: Outputs, qkv: Tensor) -> Outputs:
        return (-outputs[0], *outputs[1:]) if qkv.shape[0] == one.tokens else outputs

    found = {"one bit": with_fault(one_bit), "one head": with_fault(one_head)}
    elsewhere = with_fault(one_size, one.inputs.qkv.shape[0] + 1 if one.tokens == 1 else 1)
    if elsewhere.mismatches == 0 or one.inputs.qkv.shape[0] == 1:
        found[f"T={one.tokens} only"] = with_fault(one_size)
    else:
        found[f"T={one.tokens} only"] = replace(elsewhere, mismatches=0)
    if one.outputs["fused"]["q"].numel() >= least:
        tree = one.numerics.reduction
        other = next(t for t in Reduction.candidates(shape.head_dim) if t.warps != tree.warps)
        numerics = replace(one.numerics, reduction=other, k_reduction=None)
        actual = run(in_batches(kernel, one.tokens), one.inputs, shape, numerics)
        found[f"tree {other}"] = computed(compare_outputs(actual, one.outputs["reference"]))
    return found


def overlap_differs(
    shape: AttentionShape, numerics: Numerics, *, device: str, seed: int
) -> Comparison:
    """The kernel under programmatic dependent launch against itself without, back to back on eight
    buffer sets, T=1 and T=16: a launch that reads too early would show."""
    found = Comparison()
    for tokens in (1, 16):
        sets = buffer_sets(shape, tokens, 8, device=device, seed=seed)
        plain = [arm(fused.qkv_prologue, shape, numerics)(one.clone())() for one in sets]
        overlapped = [arm(overlapping, shape, numerics)(one)() for one in sets]
        for a, b in zip(plain, overlapped, strict=True):
            found = found + compare(
                torch.cat([t.flatten() for t in b]), torch.cat([t.flatten() for t in a])
            )
    return found
