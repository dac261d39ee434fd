"""The numerics fingerprint: which declared numerics reproduce what one side of a comparison computed.

The inputs come from a run whose prologue is opaque, the outputs from any run of the same tokens. V is a
bare copy of part of the projection: in a layer whose V is equal in both all through a request, bit for bit,
both were given the same projection, and what the other run made of it can be computed again under every
candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Numerics, Reduction, Rounding
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.attribution.calibration import Fit, fit
from fusion_evidence.lib.attribution.records import Place, RecordFile
from fusion_evidence.lib.measure.compare import Comparison, compare, upper_bound
from fusion_evidence.lib.measure.inputs import Inputs, run
from fusion_evidence.lib.service.model import rotary_table

Graph = Literal["prefill", "decode"]
Rows = tuple[Inputs, Mapping[str, Tensor]]
"""Tokens that went into a prologue, and the ``q`` and ``k`` that came out."""


@dataclass(frozen=True)
class Fingerprint:
    """What one graph of one run computes in its prologues.

    numerics: what reproduces every element, or None. closest: the best candidate, the same where there
        is one. table: dtype of the rotary table it was computed with.
    mismatches, elements: of Q and K under ``closest``. distinct: elements of different projections; in
        the first layer nothing knows the position yet, so that equal tokens have equal ones there.
    layers: those whose inputs were the same, in one request at least.
    alike: other candidates without a mismatch, which these elements cannot tell from it.
    rejected: the candidates with one: other trees and contractions, the nearest first, counted as far as
        it took to reject them; then the other rounding policies, counted over all elements.
    """

    graph: Graph
    closest: Numerics
    table: str
    mismatches: int
    elements: int
    distinct: int
    layers: tuple[int, ...]
    alike: tuple[Numerics, ...]
    rejected: tuple[Fit, ...]

    @property
    def numerics(self) -> Numerics | None:
        return None if self.mismatches else self.closest

    @property
    def bound(self) -> float:
        """Upper bound of the true mismatch rate, 95 %, from the distinct elements alone."""
        return upper_bound(self.distinct, min(self.mismatches, self.distinct))

    @property
    def fits(self) -> str:
        """``closest``, or where others reproduce every element too all of them, by name and undecided."""
        return _undecided([self.closest, *self.alike]) if self.alike else str(self.closest)

    def __str__(self) -> str:
        where = f"layer{'s' if len(self.layers) > 1 else ''} {', '.join(map(str, self.layers))}"
        fits = f"{self.fits}, cos/sin in {self.table}"
        if self.mismatches:
            return (
                f"none of the declared numerics is what {self.graph} computes: the closest, {fits}, "
                f"leaves {self.mismatches:,} of {self.elements:,} elements ({where})"
            )
        return (
            f"{self.graph} computes {fits}: all {self.elements:,} elements ({where}; "
            f"{self.distinct:,} of them distinct) are reproduced, a rate of mismatches above "
            f"{self.bound:.1e} is ruled out"
        )


_NAMED = 4
"""How many candidates that fit are named; of more, how many others there are."""


def _undecided(candidates: Sequence[Numerics]) -> str:
    """Candidates that nothing tells apart, in the order of their names: those that differ in one part alone
    as one, with what that part may be."""

    def either(names: Sequence[str]) -> str:
        more = len(names) - _NAMED
        rest = [f"{more} other{'s' if more > 1 else ''}"] if more > 0 else []
        *first, last = sorted(names)[:_NAMED] + rest
        return f"{', '.join(first)} or {last} (undecided)"

    # Rounding, tree or trees, contraction.
    parts = [
        (rounding, ", ".join(trees), contraction)
        for rounding, *trees, contraction in (str(one).split(", ") for one in candidates)
    ]
    ways = [set(part) for part in zip(*parts, strict=True)]
    if sum(len(way) > 1 for way in ways) > 1:
        return either([str(one) for one in candidates])
    return ", ".join(either(list(way)) if len(way) > 1 else way.pop() for way in ways)


def fingerprint(
    inputs: Path,
    observed: Path,
    graph: Graph,
    *,
    reductions: Sequence[Reduction] | None = None,
    batch: int = 1024,
    device: str | None = None,
    reject: int = 1,
) -> Fingerprint:
    """Fit the numerics of ``observed`` to the inputs that another run of the same tokens recorded.

    Args:
        inputs: file of a `records.Tape` with ``inputs``; its prologue was opaque in ``graph``.
        observed: file of the run in question, of whatever prologue.
        graph: the prefill calls, or those of one token that follow.
        reductions: trees to try; by default `Reduction.candidates`.
        batch: tokens on which all candidates are tried; the rest only on those that are left.
        device: where to compute; by default where the records were made. Another kind of device has
            another ``rsqrt``, and may reproduce nothing.
        reject: how many mismatches it takes to reject a tree, see `calibration.fit`.

    Raises:
        ValueError: not such files, or no layer has the same V in both.
    """
    captured = capture(inputs, observed, graph, device)
    shape = RecordFile(inputs).shape
    return identify(captured, graph, shape, reductions=reductions, batch=batch, reject=reject)


def identify(
    captured: Mapping[int, Rows],
    graph: Graph,
    shape: AttentionShape,
    *,
    reductions: Sequence[Reduction] | None = None,
    batch: int = 1024,
    reject: int = 1,
) -> Fingerprint:
    """`fingerprint` of what `capture` has read."""
    layers, rows = tuple(captured), list(captured.values())
    tables = _tables(rows[0][0], shape)
    fits = {
        name: _fit(rows, shape, cos_sin, reductions, batch, reject)
        for name, cos_sin in tables.items()
    }
    name = min(fits, key=lambda one: fits[one][0].mismatches / fits[one][0].elements)
    closest = fits[name][0].numerics
    ways = [closest, *_other_roundings(closest)]
    found = dict.fromkeys(ways, Comparison())
    for one, outputs in _batches(rows, tables[name], batch):
        for way in ways:
            made = run(reference.qkv_prologue, one, shape, way)
            for side in ("q", "k"):
                found[way] = found[way] + compare(made[side], outputs[side])
    others = [*fits[name][1:], *(Fit(w, found[w].mismatches, found[w].elements) for w in ways[1:])]
    return Fingerprint(
        graph=graph,
        closest=closest,
        table=name,
        mismatches=found[closest].mismatches,
        elements=found[closest].elements,
        distinct=sum(map(_distinct_tokens, rows)) * (shape.q_size + shape.kv_size),
        layers=layers,
        alike=tuple(one.numerics for one in others if one.mismatches == 0),
        rejected=tuple(one for one in others if one.mismatches),
    )


def capture(
    inputs: Path, observed: Path, graph: Graph, device: str | None = None
) -> dict[int, Rows]:
    """By layer, the tokens whose projection is the same in both runs, and what ``observed`` made of them.

    All tokens of a request count, or none. Arguments and errors as of `fingerprint`.
    """
    if graph not in get_args(Graph):
        raise ValueError(f"graph: expected one of {get_args(Graph)}, got {graph!r}")
    given, seen = RecordFile(inputs), RecordFile(observed)
    if given.shape != seen.shape:
        raise ValueError(f"{inputs} is of shape {given.shape}, {observed} of {seen.shape}")
    if seen.digests:
        raise ValueError(f"{observed} holds hashes; a fingerprint needs whole tensors")
    places = [place for place in given.places("qkv") if (place.step == 0) == (graph == "prefill")]
    if not places:
        raise ValueError(f"{inputs} holds no inputs of {graph}: was its prologue opaque there?")
    groups: dict[tuple[int, str], list[Place]] = {}
    for place in places:
        groups.setdefault((place.layer, place.request), []).append(place)
    same: dict[int, list[Place]] = {}
    for (layer, _), group in sorted(groups.items()):
        if _same_projection(given, seen, group):
            same.setdefault(layer, []).extend(group)
    if not same:
        raise ValueError(
            f"in no layer is V of {graph} the same in {inputs} and {observed}: nothing says that the two "
            "prologues were given the same projection"
        )
    device = device or given.device
    return {layer: _gather(given, seen, layer, group, device) for layer, group in same.items()}


def _other_roundings(numerics: Numerics) -> list[Numerics]:
    """The same trees under each other rounding policy."""
    return [
        replace(numerics, rounding=rounding, contraction="none")
        for rounding in get_args(Rounding)
        if rounding != numerics.rounding
    ]


def _distinct_tokens(rows: Rows) -> int:
    projections = rows[0].qkv.cpu().view(torch.int16).numpy()
    return len({row.tobytes() for row in projections})


def _same_projection(given: RecordFile, seen: RecordFile, places: Sequence[Place]) -> bool:
    """V is equal in all of them."""
    kv_heads, size = given.shape.kv_heads, given.shape.kv_size
    return all(
        torch.equal(
            given.get(place.key)[:, -size:]
            .unflatten(-1, (kv_heads, -1))
            .contiguous()
            .view(torch.int16),
            seen.get(replace(place, tensor="v").key).view(torch.int16),
        )
        for place in places
    )


def _tables(inputs: Inputs, shape: AttentionShape) -> dict[str, Tensor]:
    """Rotary tables by dtype: the one that was given, and the model's in fp32 and in ``qkv``'s."""
    given = inputs.cos_sin
    wide = rotary_table(shape, given.shape[0]).to(given.device)
    tables = (wide, wide.to(inputs.qkv.dtype), given)
    return {str(table.dtype).removeprefix("torch."): table for table in tables}


def _gather(
    given: RecordFile, seen: RecordFile, layer: int, places: Sequence[Place], device: str
) -> Rows:
    """All tokens of one layer, shuffled, so that a part of them is a sample of all."""
    shape = given.shape

    def all_of(file: RecordFile, tensor: str, dim: int = 0) -> Tensor:
        parts = [file.get(replace(place, tensor=tensor).key) for place in places]
        joined = torch.cat(parts, dim)
        order = torch.randperm(joined.shape[dim], generator=torch.Generator().manual_seed(layer))
        return joined.index_select(dim, order).to(device)

    qkv = all_of(given, "qkv")
    cache = qkv.new_zeros(1, 1, shape.kv_heads, shape.head_dim)
    inputs = Inputs(
        qkv=qkv,
        q_weight=given.get(f"{layer}/q_weight").to(device),
        k_weight=given.get(f"{layer}/k_weight").to(device),
        cos_sin=given.get("cos_sin").to(device),
        positions=all_of(given, "positions", dim=-1),
        slot_mapping=torch.full((qkv.shape[0],), -1, device=device),
        key_cache=cache,
        value_cache=cache.clone(),
    )
    return inputs, {"q": all_of(seen, "q"), "k": all_of(seen, "k")}


def _batches(rows: Sequence[Rows], cos_sin: Tensor, size: int) -> Iterator[Rows]:
    for inputs, outputs in rows:
        for start in range(0, inputs.qkv.shape[0], size):
            part = slice(start, start + size)
            taken = replace(
                inputs,
                qkv=inputs.qkv[part],
                cos_sin=cos_sin,
                positions=inputs.positions[..., part],
                slot_mapping=inputs.slot_mapping[part],
            )
            yield taken, {name: tensor[part] for name, tensor in outputs.items()}


def _fit(
    rows: Sequence[Rows],
    shape: AttentionShape,
    cos_sin: Tensor,
    reductions: Sequence[Reduction] | None,
    batch: int,
    reject: int,
) -> list[Fit]:
    outputs: Mapping[str, Tensor] = {}

    def batches() -> Iterator[Inputs]:
        nonlocal outputs
        for inputs, outputs in _batches(rows, cos_sin, batch):  # noqa: B007 - read by `observe`
            yield inputs

    return fit(lambda _: outputs, batches(), shape, reductions, reject)
