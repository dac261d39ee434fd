"""Faults to plant in a model, and the diagnosis that has to tell them from rounding.

A search for the origin of a drift that calls everything rounding proves nothing. Each fault here is one
that an integration really makes; `diagnose` must find it, also under the drift of other rounding, and must
not call that drift a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.service.model import Prologue

Forward = Callable[..., Tensor]
"""``(ids, positions, slot_mapping, block_table, seq_len, caches) -> hidden``: a model's step."""


def _same(code: Callable[..., Any]) -> Callable[..., Any]:
    return code


@dataclass(frozen=True)
class Fault:
    """One fault, as wrappers of what it goes into; a wrapper that has nothing to do changes nothing.

    what: the fault in words. prologue: around a prologue, in a graph or opaque. forward: around the
    callable that runs a step, compiled or not; a captured graph keeps the fault it was captured with.
    """

    name: str
    what: str
    prologue: Callable[[Prologue], Prologue] = _same
    forward: Callable[[Forward], Forward] = _same


def fault(name: str) -> Fault:
    """The fault called ``name``. ValueError, listing those there are."""
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}; known: {', '.join(FAULTS)}")
    return FAULTS[name]


def _with_arguments(change: Callable[..., tuple[Tensor, ...]]) -> Callable[[Prologue], Prologue]:
    """A wrapper that calls the prologue with other tensors."""

    def wrap(prologue: Prologue) -> Prologue:
        def faulty(
            qkv: Tensor,
            q_weight: Tensor,
            k_weight: Tensor,
            cos_sin: Tensor,
            positions: Tensor,
            slot_mapping: Tensor,
            key_cache: Tensor,
            value_cache: Tensor,
            shape: AttentionShape,
            numerics: Numerics,
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            tensors = (
                qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, key_cache, value_cache
            )  # fmt: skip
            return prologue(*change(*tensors), shape, numerics)

        return faulty

    return wrap


def _plain_weight(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, *rest: Tensor
) -> tuple[Tensor, ...]:
    return qkv, q_weight - 1, k_weight - 1, *rest


def _exchanged_sections(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *rest: Tensor,
) -> tuple[Tensor, ...]:
    if positions.dim() == 2:
        positions = torch.stack((positions[0], positions[2], positions[1]))
    return qkv, q_weight, k_weight, cos_sin, positions, *rest


def _next_slot(*tensors: Tensor) -> tuple[Tensor, ...]:
    *before, slots, key_cache, value_cache = tensors
    following = (slots + 1) % (key_cache.shape[0] * key_cache.shape[1])
    return *before, torch.where(slots < 0, slots, following), key_cache, value_cache


def _without_mask(forward: Forward) -> Forward:
    @contextmanager
    def dropped() -> Iterator[None]:
        attention = F.scaled_dot_product_attention

        def unmasked(*tensors: Any, attn_mask: object = None, **options: Any) -> Tensor:
            return attention(*tensors, **options)

        with mock.patch.object(F, "scaled_dot_product_attention", unmasked):
            yield

    def faulty(*arguments: Any) -> Tensor:
        with dropped():
            return forward(*arguments)

    return faulty


def _stale_slots(forward: Forward) -> Forward:
    held: Tensor | None = None

    def faulty(ids: Tensor, positions: Tensor, slot_mapping: Tensor, *rest: Any) -> Tensor:
        nonlocal held
        if ids.shape[0] != 1:
            return forward(ids, positions, slot_mapping, *rest)
        if held is None:
            held = slot_mapping.clone()
        # Device work in one buffer: a captured graph is as late by one step, replay after replay.
        stale = held.clone()
        held.copy_(slot_mapping)
        return forward(ids, positions, stale, *rest)

    return faulty


FAULTS: dict[str, Fault] = {
    one.name: one
    for one in (
        Fault(
            "dropped_mask",
            "attention without its mask: tokens see what comes after them, and rows nobody wrote",
            forward=_without_mask,
        ),
        Fault(
            "forgotten_one_plus_w",
            "the Q and K norms multiply by w where the checkpoint means 1 + w",
            prologue=_with_arguments(_plain_weight),
        ),
        Fault(
            "wrong_section",
            "the MRoPE sections of H and W exchanged",
            prologue=_with_arguments(_exchanged_sections),
        ),
        Fault(
            "off_by_one_slot",
            "K and V written one row after their slot",
            prologue=_with_arguments(_next_slot),
        ),
        Fault(
            "stale_slot",
            "decode writes K and V to the slot of the step before, as a replay does whose slot buffer "
            "was not updated",
            forward=_stale_slots,
        ),
    )
}

Verdict = Literal["equal", "rounding", "fault"]

PROLOGUE_ULPS = 4.0
"""Rounding in the prologue itself, most it can do, in ULP of the rotated pair. Per-operation rounding
makes at most half a ULP after the norm (of either element of the pair), after each of two products and
after their sum, a rounded table as much again, and the other side half a ULP of its own."""

LAYER_ERROR = 10 * 2.0**-8
"""Rounding between two records, most it can do to a token's heads as a share of their norm: a layer
rounds its activations about ten times, each by at most 2**-8 in bfloat16, and the heads of the next layer
are linear in them but for the norms. Errors that add up at worst add so much for every layer more."""

_ROTATION_SHARE = 0.01
"""Elements beyond the rotary ones that may differ when the rotation is at fault: another reduction tree
moves a few of a million, a wrong norm nearly all."""


@dataclass(frozen=True)
class Diagnosis:
    """What the differences between two runs are.

    place: for a fault, the part of the model it is in. evidence: the figures, as a sentence. excess:
    the largest difference as a multiple of what rounding can do there; a fault has more than 1.
    """

    verdict: Verdict
    place: str
    evidence: str
    excess: float

    def __str__(self) -> str:
        place = f" in {self.place}" if self.place else ""
        return f"{self.verdict}{place}: {self.evidence}"


def diagnose(frame: pd.DataFrame) -> Diagnosis:
    """Fault or rounding, from `records.compare_records` of two runs fed with the same tokens.

    Where V is equal in a record, the projection is, and Q and K differ by what this prologue does: at
    most `PROLOGUE_ULPS`. Where V differs, something before differs, or the write to the cache; then the
    error of a token's heads is at most `LAYER_ERROR`, and as much again for every layer since the first
    that differs in that request. One record beyond its bound is a fault. So a model that amplifies rounding
    by more than that from layer to layer would be called faulty, and a fault as small as rounding is not
    seen.

    ValueError: the records were kept as hashes, of which no size is known.
    """
    if frame["mismatches"].isna().any():
        raise ValueError(
            "diagnose needs whole tensors: hashes tell that records differ, not by how much"
        )
    differs = frame[frame["differs"]]
    if differs.empty:
        elements = int(frame["elements"].sum())
        return Diagnosis("equal", "", f"no bit differs in {elements:,} elements", 0.0)
    judged = _judged(differs)
    beyond = judged[judged["excess"] > 1.0]
    if beyond.empty:
        worst = judged.sort_values("excess").iloc[-1]
        text = f"{len(judged)} of {len(frame)} tensors differ, none beyond rounding; most, {_size(worst)}"
        return Diagnosis("rounding", "", text, float(worst["excess"]))
    first = beyond.sort_values(["step", "layer"], kind="stable").iloc[0]
    keys = ["request", "step", "layer"]
    record = judged[(judged[keys] == first[keys]).all(axis=1)].set_index("tensor", drop=False)
    worst = record.sort_values("excess").iloc[-1]
    return Diagnosis("fault", _place(record), _size(worst), float(worst["excess"]))


def _judged(differs: pd.DataFrame) -> pd.DataFrame:
    """With ``excess``: how many times what rounding can do each difference is, in its own ``measure``."""
    record = [differs[name] for name in ("request", "step", "layer")]
    before = (differs["tensor"] == "v").groupby(record).transform("any")
    layers = differs["layer"] - differs.groupby("request")["layer"].transform("min") + 1
    excess = (differs["relative"] / (LAYER_ERROR * layers)).where(
        before, differs["pair_ulps"] / PROLOGUE_ULPS
    )
    return differs.assign(v_differs=before, excess=excess.astype(float))


def _size(row: pd.Series[Any]) -> str:
    call = "the prefill" if row["step"] == 0 else f"decode step {row['step']}"
    size = (
        f"{row['relative']:.1%} of the heads' norm"
        if row["v_differs"]
        else f"{row['pair_ulps']:.1f} ULP with V equal"
    )
    return (
        f"{row['tensor'].upper()} of layer {row['layer']} in {call} of {row['request']} is off by {size}, "
        f"{row['excess']:.2g} times what rounding can do"
    )


def _place(record: pd.DataFrame) -> str:
    """The part of the model, from which tensors of the first faulty record are off, and where."""
    off = set(record.index[record["excess"] > 1.0])
    layer = int(record["layer"].iloc[0])
    if "v" in off and "q" not in off:
        return f"the cache write of layer {layer}"
    if "v" not in record.index:
        share = (record["unrotated"] / record["elements"]).max()
        part = "rotation" if share < _ROTATION_SHARE else "norm"
        return f"the {part} of the prologue of layer {layer}"
    return f"layer {layer - 1}, from its attention on" if layer else "what comes before layer 0"
