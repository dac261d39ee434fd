"""Records of vLLM's attention, read: how two servers' differ, and which numerics a server's own are.

`vllm_recorder` makes them inside vLLM. Two servers that are given the same tokens (`forced`) have the same
rows in them, in whatever order they came: a row is found again by the number of tokens in its step, its
place in its request, and the bits of V in the first layer. V is a copy of part of the projection, and
before the first layer's projection nothing runs that the servers could differ in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import safe_open
from torch import Tensor

from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.attribution.fingerprint import Fingerprint, Graph, Rows, identify
from fusion_evidence.lib.measure.inputs import Inputs
from fusion_evidence.lib.service.vllm_recorder import TENSORS

FORCED_TOKENS = "fusion_evidence.lib.service.vllm_forced:ForcedTokens"
"""For ``vllm serve --logits-processors``."""


def forced(name: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Fields of a completions request that make it say ``tokens``, whatever it would say.

    name: by which ``fusion_choices`` gives back what it would have said.
    """
    said = ",".join(map(str, tokens))
    return {
        "vllm_xargs": {"fusion_forced": said, "fusion_request": name},
        "max_tokens": len(tokens),
        "ignore_eos": True,
    }


class VllmRecords:
    """A file of `vllm_recorder.Recorder.save`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            self.names = set(file.keys())
        self.shape = AttentionShape(**_shape(json.loads(metadata["shape"])))
        self.layers: list[str] = json.loads(metadata["layers"])
        self.device: str = metadata["device"]

    def get(self, name: str) -> Tensor:
        """One tensor of the file."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    @cached_property
    def index(self) -> pd.DataFrame:
        """A row for each: ``tokens``, ``positions``, ``v`` (the first layer's, as bytes), ``again``.

        again: how many rows before it are the same in all three.
        """
        bits = self.get(f"{self.layers[0]}.v").view(torch.int16).numpy()
        frame = pd.DataFrame(
            {
                "tokens": self.get("tokens").numpy(),
                "positions": self.get("positions").numpy(),
                "v": [row.tobytes() for row in bits],
            }
        )
        return frame.assign(again=frame.groupby(["tokens", "positions", "v"]).cumcount())


def _shape(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "mrope_section": tuple(fields["mrope_section"])}


def opened(a: Path, b: Path) -> tuple[VllmRecords, VllmRecords]:
    """Two servers' records, of the same layers. OSError, ValueError: they are not, or are no records."""
    one, other = VllmRecords(a), VllmRecords(b)
    if (one.shape, one.layers) != (other.shape, other.layers):
        raise ValueError(f"{a} and {b} are records of different layers")
    return one, other


def matched(one: VllmRecords, other: VllmRecords) -> pd.DataFrame:
    """Rows that are in both: ``tokens``, ``positions``, and where they stand, ``one`` and ``other``."""
    keys = ["tokens", "positions", "v", "again"]
    left = one.index.assign(one=range(len(one.index)))
    right = other.index.assign(other=range(len(other.index)))
    return left.merge(right, on=keys)[["tokens", "positions", "one", "other"]]


def compare(a: Path, b: Path) -> pd.DataFrame:
    """How two servers' records of the same tokens differ, over the rows that both have.

    Returns a row for each layer, tensor and number of tokens in a step: ``layer``, ``tensor``, ``tokens``,
    ``records`` (rows compared), ``differing`` (rows with any other bit), ``elements``, ``mismatches``,
    ``first_position`` (in its request, of the first row that differs; nullable).

    ValueError: they are not of the same layers and shape, or have no row in common.
    """
    one, other = opened(a, b)
    rows = matched(one, other)
    if rows.empty:
        raise ValueError(f"{a} and {b} have no row in common: were they given the same tokens?")
    return compared(one, other, rows)


def compared(
    one: VllmRecords, other: VllmRecords, rows: pd.DataFrame, layers: Sequence[str] | None = None
) -> pd.DataFrame:
    """As `compare`, of the ``rows`` that `matched` found, one or more. layers: by default all."""
    found = []
    for layer in one.layers if layers is None else layers:
        for tensor in TENSORS:
            left = _bits(one, layer, tensor, rows.one)
            differs = (left != _bits(other, layer, tensor, rows.other)).sum(-1)
            counted = rows.assign(mismatches=differs.numpy(), width=left.shape[1])
            for tokens, part in counted.groupby("tokens"):
                wrong = part[part.mismatches > 0]
                found.append(
                    {
                        "layer": layer,
                        "tensor": tensor,
                        "tokens": tokens,
                        "records": len(part),
                        "differing": len(wrong),
                        "elements": int(part.width.sum()),
                        "mismatches": int(part.mismatches.sum()),
                        "first_position": None if wrong.empty else int(wrong.positions.iloc[0]),
                    }
                )
    return pd.DataFrame(found).astype({"first_position": "Int64"})


def _bits(file: VllmRecords, layer: str, tensor: str, rows: pd.Series[int]) -> Tensor:
    """Chosen rows of one tensor, as integers, which compare as bits do."""
    return file.get(f"{layer}.{tensor}")[torch.tensor(rows.tolist())].view(torch.int16)


@dataclass(frozen=True)
class Calibrated:
    """What a server's graph for steps of ``tokens`` tokens computes in its prologues.

    rows: on which it was found. fingerprint: with the candidates that were rejected.
    """

    tokens: int
    rows: int
    fingerprint: Fingerprint

    @property
    def numerics(self) -> Numerics | None:
        """What reproduces every element, or None."""
        return self.fingerprint.numerics


def calibrate(
    native: Path,
    operator: Path,
    shape: AttentionShape | None = None,
    *,
    tokens: Sequence[int] | None = None,
    every_layer: bool = False,
    device: str | None = None,
) -> dict[int, Calibrated]:
    """Numerics of ``native``'s graphs, from the projections that ``operator`` saw of the same tokens.

    Args:
        shape: of the layers on one rank; by default what the records say.
        tokens: sizes of steps to calibrate; by default all that both have.
        every_layer: take rows of every layer, as far as V is the same in both; else of the first, where
            both are given the same for certain.
        device: where to compute; by default where the records were made. Another kind of device has
            another ``rsqrt``, and may reproduce nothing.

    ValueError: ``operator`` holds no projections, or there is no row in common.
    """
    given, seen = VllmRecords(operator), VllmRecords(native)
    chosen = given.layers if every_layer else given.layers[:1]
    if lacking := [layer for layer in chosen if f"{layer}.qkv" not in given.names]:
        raise ValueError(f"{operator} holds no projections of {', '.join(lacking)}")
    rows = matched(given, seen)
    sizes = sorted(set(rows.tokens) & set(tokens if tokens is not None else rows.tokens))
    if not sizes:
        raise ValueError(f"{operator} and {native} have no row in common")
    found = {}
    for size in map(int, sizes):
        part = rows[rows.tokens == size]
        captured = {
            index: _rows(given, seen, layer, part, device or given.device)
            for index, layer in enumerate(chosen)
        }
        graph: Graph = "decode" if size == 1 else "prefill"
        fingerprint = identify(captured, graph, shape or given.shape)
        found[size] = Calibrated(size, len(part), fingerprint)
    return found


def _rows(
    given: VllmRecords, seen: VllmRecords, layer: str, rows: pd.DataFrame, device: str
) -> Rows:
    shape = given.shape
    same = _bits(given, layer, "v", rows.one) == _bits(seen, layer, "v", rows.other)
    left, right = (torch.tensor(rows[side].tolist())[same.all(-1)] for side in ("one", "other"))
    if not len(left):
        raise ValueError(f"{layer}: no row of {given.path} and {seen.path} has the same V")

    def of(name: str) -> Tensor:
        return seen.get(f"{layer}.{name}")[right].to(device).unflatten(-1, (-1, shape.head_dim))

    qkv = given.get(f"{layer}.qkv")[left].to(device)
    cache = qkv.new_zeros(1, 1, shape.kv_heads, shape.head_dim)
    inputs = Inputs(
        qkv=qkv,
        q_weight=given.get(f"{layer}.q_weight").to(device),
        k_weight=given.get(f"{layer}.k_weight").to(device),
        cos_sin=given.get(f"{layer}.cos_sin").to(device),
        positions=given.get("positions")[left].to(device),
        slot_mapping=torch.full((qkv.shape[0],), -1, device=device),
        key_cache=cache,
        value_cache=cache.clone(),
    )
    return inputs, {"q": of("q"), "k": of("k")}
