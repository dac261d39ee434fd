"""The three oracles of the primitive, and the faults that prove they can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusion_evidence.kernels import eager, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.attribution.calibration import Fit, fit
from fusion_evidence.lib.measure.compare import Comparison, compare, pair_ulps
from fusion_evidence.lib.measure.independent import huggingface
from fusion_evidence.lib.measure.inputs import OUTPUTS, Inputs, prologue_inputs, run
from fusion_evidence.lib.measure.primitive import (
    Implementation,
    Outputs,
    batches_for,
    head,
    in_batches,
    static_compiled,
)

ROUNDINGS = ("per_op", "storage", "fp32_through")


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


def any_tree(shape: AttentionShape) -> Numerics:
    """Valid numerics for a call whose implementation ignores them."""
    return Numerics("per_op", Reduction.candidates(shape.head_dim)[0])


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
    """Calibrate the static compile at ``tokens`` a call, then run kernel and oracles on the same inputs.

    Args:
        elements: computed elements (Q and K) to reach, through as many calls as it takes.
        kernel_tokens: at most so many tokens go through the kernel; 0 is no limit.
    """
    count = tokens * batches_for(elements, tokens, shape)
    inputs = prologue_inputs(shape, count, device=device, seed=seed)
    region = in_batches(static_compiled(), tokens)
    fits = fit(run(region, inputs, shape, any_tree(shape)), inputs, shape)
    few = head(inputs, min(count, kernel_tokens or count))
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
    first, *rest = found.values()
    for one in rest:
        first = first + one
    return first


def against_reference(
    kernel: Implementation, shape: AttentionShape, one: Study, rounding: str
) -> Comparison:
    """Kernel against reference under another rounding policy, the six outputs as one comparison."""
    numerics = Numerics(rounding, one.numerics.reduction)  # type: ignore[arg-type]
    actual = run(in_batches(kernel, one.tokens), one.inputs, shape, numerics)
    return total(compare_outputs(actual, run(reference.qkv_prologue, one.inputs, shape, numerics)))


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
    kernel: Implementation, shape: AttentionShape, one: Study
) -> dict[str, Comparison]:
    """What the reference oracle finds when the kernel is wrong: fault -> comparison.

    One flipped bit, one head left as it came, a fault at this T only, and another reduction tree, the
    last at the fp32 sum, the only place where few rows are enough to see it.
    """

    def with_fault(fault: Callable[[Outputs, Tensor], Outputs]) -> Comparison:
        def wrong(*args: Tensor) -> Outputs:
            return fault(kernel(*args), args[0])

        actual = run(wrong, one.inputs, shape, one.numerics)
        return total(compare_outputs(actual, one.outputs["reference"]))

    def one_bit(outputs: Outputs, qkv: Tensor) -> Outputs:
        outputs[0].view(torch.int16)[-1, -1, -1] ^= 1
        return outputs

    def one_head(outputs: Outputs, qkv: Tensor) -> Outputs:
        outputs[1][:, 0] = qkv[:, 2 * shape.q_size :][:, : shape.head_dim]
        return outputs

    def one_size(outputs: Outputs, qkv: Tensor) -> Outputs:
        return (-outputs[0], *outputs[1:]) if qkv.shape[0] == one.inputs.qkv.shape[0] else outputs

    tree = one.numerics.reduction
    other = replace(tree, order="strided" if tree.order != "strided" else "sequential")
    squares = one.inputs.qkv.unflatten(-1, (-1, shape.head_dim)).float().square()
    return {
        "one bit": with_fault(one_bit),
        "one head": with_fault(one_head),
        f"T={one.inputs.qkv.shape[0]} only": with_fault(one_size),
        f"tree {other}": compare(
            reference.tree_sum(squares, other), reference.tree_sum(squares, tree)
        ),
    }
