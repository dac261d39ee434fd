"""What a wrong prologue's outputs look like: the mistake by name, where it has one.

Each known mistake is made on purpose, in the oracle; where a kernel's Q and K are right under that mistake
and under no other assumption, it is the one that was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.measure.compare import compare, pair_ulps
from fusion_evidence.lib.measure.inputs import OUTPUTS, Inputs

Outputs = Mapping[str, Tensor]


def differing(actual: Outputs, expected: Outputs, shape: AttentionShape, bound: float) -> str:
    """Which of the six outputs are out of their bound, and how far; empty: none.

    bound: of Q, K and the key cache, in ULP of the rotated pair. The others are copies: every bit.
    """
    said = []
    for name in OUTPUTS:
        found = compare(actual[name], expected[name])
        if name in ("q", "k", "key_cache"):
            ulps = pair_ulps(actual[name], expected[name], shape.rotary_dim)
            if ulps > bound:
                said.append(f"{name} is {ulps:.3g} ULP off ({found.mismatches:,} elements differ)")
        elif not found.equal:
            said.append(f"{name} is a copy, and {found}")
    return "; ".join(said)


def symptom(
    actual: Outputs,
    expected: Outputs,
    inputs: Inputs,
    shape: AttentionShape,
    numerics: Numerics,
    bound: float,
) -> str:
    """What was done wrong, in words; empty: nothing known looks like this."""
    if bool(torch.cat([actual[name].flatten() for name in OUTPUTS[:4]]).isnan().any()):
        return "NaNs in the results: read or left what nobody wrote"
    rotated = ("q", "k")
    if all(pair_ulps(actual[n], expected[n], shape.rotary_dim) <= bound for n in rotated):
        return _of_copies(actual, expected, shape)
    for said, mistaken in _mistakes(inputs, shape, numerics):
        if all(
            pair_ulps(actual[n], one, shape.rotary_dim) <= bound
            for n, one in zip(rotated, mistaken, strict=True)
        ):
            return said
    return _of_the_tail(actual, expected, shape, bound)


def _mistakes(
    inputs: Inputs, shape: AttentionShape, numerics: Numerics
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Each in words, with the Q and K that it makes."""
    made = partial(_q_and_k, inputs, shape, numerics)
    forgotten = "the norm multiplies by w where it must by 1 + w: the weight's offset is forgotten"
    yield forgotten, made(offset=0.0)
    yield "the norm multiplies by 2 + w: the offset of 1 is added twice", made(offset=2.0)
    if inputs.positions.dim() == 2:
        ignored = "all frequencies turn by the T row: the H and W rows of positions are ignored"
        yield ignored, made(positions=inputs.positions[0])
        sections = replace(shape, mrope_interleaved=not shape.mrope_interleaved)
        how = "chunks" if shape.mrope_interleaved else "turns"
        yield (
            f"the frequencies take T, H and W rows in {how}: other sections",
            made(sections=sections),
        )
    cos, sin = inputs.cos_sin.chunk(2, dim=-1)
    unturned = torch.cat((torch.ones_like(cos), torch.zeros_like(sin)), dim=-1)
    yield "Q and K are normalized but not rotated", made(table=unturned)
    backwards = torch.cat((cos, -sin), dim=-1)
    yield "the rotation turns the other way: the sine's sign", made(table=backwards)


def _q_and_k(
    inputs: Inputs,
    shape: AttentionShape,
    numerics: Numerics,
    *,
    offset: float = 1.0,
    positions: Tensor | None = None,
    sections: AttentionShape | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The oracle's Q and K with another factor ``offset + w``, other positions, sections or table."""
    cos, sin = reference.select_cos_sin(
        inputs.cos_sin if table is None else table,
        inputs.positions if positions is None else positions,
        sections or shape,
    )
    q_gate, k, _ = inputs.qkv.split((2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
    q = q_gate.unflatten(-1, (shape.q_heads, 2, shape.head_dim))[:, :, 0]
    k = k.unflatten(-1, (shape.kv_heads, shape.head_dim))
    weights = (weight.float() + (offset - 1.0) for weight in (inputs.q_weight, inputs.k_weight))
    q, k = (
        reference.norm_rope(x, weight, cos, sin, shape, numerics, tree)
        for x, weight, tree in zip((q, k), weights, numerics.reductions, strict=True)
    )
    return q, k


def _of_the_tail(actual: Outputs, expected: Outputs, shape: AttentionShape, bound: float) -> str:
    """Columns from ``rotary_dim`` on must pass; a rotation would keep their length."""
    R = shape.rotary_dim
    head = max(pair_ulps(actual[n][..., :R], expected[n][..., :R], R) for n in ("q", "k"))
    if head > bound or shape.head_dim == R:
        return ""
    said = f"columns {R} to {shape.head_dim - 1} differ and those before are right: the tail"
    lengths = [
        (one["q"][..., R:].float().norm(dim=-1), one["k"][..., R:].float().norm(dim=-1))
        for one in (actual, expected)
    ]
    kept = all(torch.allclose(a, b, rtol=2e-2, atol=1e-3) for a, b in zip(*lengths, strict=True))
    how = "is rotated, and must pass as it was normalized" if kept else "must pass as normalized"
    return f"{said} {how}"


def _of_copies(actual: Outputs, expected: Outputs, shape: AttentionShape) -> str:
    """Q and K are right; what was copied is not."""
    gate, wanted = actual["gate"], expected["gate"]
    if not compare(gate, wanted).equal and torch.allclose(
        gate.float(), wanted.float().sigmoid(), atol=1e-2
    ):
        return "gate holds its sigmoid: that is for the model to take, after attention"
    for name, source in (("key_cache", "k"), ("value_cache", "v")):
        same = compare(actual[name], expected[name])
        if not same.equal and compare(actual[source], expected[source]).equal:
            return f"{source} is right and {name} is not: {same}; rows at other slots, or none"
    return ""
