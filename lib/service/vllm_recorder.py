"""What vLLM's attention is given, row by row, kept on the device while the service runs.

The attention call is opaque to the compiler, so looking at its arguments changes no graph. All that is done
here is done by operations on the device, at addresses that stay: a CUDA graph that was captured with them
does them again at every replay. Rows that only pad a batch are left out, by their slot; so is all that a
service runs before its first request, which writes to no slot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fusion_evidence.kernels.shapes import AttentionShape

TENSORS = ("q", "k", "v")


class Recorder:
    """Room for ``rows`` tokens of every layer; what comes after them is counted, and lost.

    Args:
        tokens: the most that one step can have.

    The first layer that is added has to be the first that runs: it gives every row of a step its place.
    """

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self._layers: dict[str, dict[str, Tensor]] = {}
        self._constants: dict[str, Tensor] = {}
        self._shape: AttentionShape | None = None
        self._staged: Tensor | None = None
        self._tokens = tokens
        self._count = self._whole(1)
        # One place more than there are rows: whatever shall not be kept goes there.
        self._places = self._whole(tokens)
        self._steps = {"tokens": self._whole(rows + 1), "positions": self._whole(rows + 1)}

    def _whole(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=self.device)

    def add(
        self,
        layer: str,
        shape: AttentionShape,
        dtype: torch.dtype,
        constants: Mapping[str, Tensor],
        *,
        inputs: bool,
    ) -> None:
        """Make room for one more layer.

        constants: what its prologue has besides the projection, by name; saved with the rows.
        inputs: its projections will be given to `stage`.
        """
        widths = {"q": shape.q_size, "k": shape.kv_size, "v": shape.kv_size}
        if inputs:
            widths["qkv"] = shape.qkv_width
            if self._staged is None:
                size = self._tokens, shape.qkv_width
                self._staged = torch.zeros(size, dtype=dtype, device=self.device)
        self._layers[layer] = {
            name: torch.zeros(self.rows + 1, width, dtype=dtype, device=self.device)
            for name, width in widths.items()
        }
        self._constants |= {f"{layer}.{name}": value for name, value in constants.items()}
        self._shape = shape

    def stage(self, qkv: Tensor) -> None:
        """Keep the projection ``[T, W]`` until the same layer's `write`."""
        if self._staged is not None:
            self._staged[: qkv.shape[0]].copy_(qkv)

    def write(self, layer: str, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> None:
        """One layer's call: ``q [T, ...]``, ``k`` and ``v`` as they enter the attention.

        metadata: of vLLM's attention, with ``slot_mapping [T]``, ``query_start_loc [requests + 1]`` and
            ``seq_lens [requests]``; None, as in vLLM's first run for memory, records nothing.
        """
        if metadata is None:
            return
        tokens = q.shape[0]
        if layer == next(iter(self._layers)):
            self._begin(tokens, metadata)
        given = {"q": q, "k": k, "v": v}
        if self._staged is not None:
            given["qkv"] = self._staged[:tokens]
        for name, buffer in self._layers[layer].items():
            buffer.index_copy_(0, self._places[:tokens], given[name].reshape(tokens, -1))

    def _begin(self, tokens: int, metadata: Any) -> None:
        """A place for every row of this step, after those of the steps before."""
        real = torch.zeros(tokens, dtype=torch.bool, device=self.device)
        slots = metadata.slot_mapping[:tokens]
        real[: slots.shape[0]] = slots >= 0
        places = (self._count + real.cumsum(0) - 1).masked_fill(~real, self.rows)
        places = places.clamp(max=self.rows)
        self._places[:tokens].copy_(places)
        self._count.add_(real.sum())
        # A row's place in its request: as many before the end of it as rows of the request follow.
        row = torch.arange(tokens, device=self.device)
        ends, lengths = metadata.query_start_loc[1:], metadata.seq_lens
        request = torch.searchsorted(ends.long().contiguous(), row, right=True)
        request = request.clamp(max=lengths.shape[0] - 1)
        positions = lengths.long()[request] - (ends.long()[request] - row)
        self._steps["positions"].index_copy_(0, places, positions)
        self._steps["tokens"].index_fill_(0, places, tokens)

    def reset(self) -> None:
        """What comes next is written from the first row on."""
        self._count.zero_()

    def save(self, path: Path) -> dict[str, int]:
        """Write the rows so far as safetensors; returns how many there are, and how many were lost.

        Keys: ``<layer>.q``, ``.k``, ``.v``, and ``.qkv`` where it was staged, each ``[rows, width]``;
        ``tokens`` (T of the row's step) and ``positions`` (in its request), int64 ``[rows]``; and the
        constants. Metadata: ``shape``, ``layers`` in their order and the kind of ``device``, as JSON.
        """
        seen = int(self._count)
        rows = min(seen, self.rows)
        tensors = {name: steps[:rows] for name, steps in self._steps.items()}
        for layer, buffers in self._layers.items():
            tensors |= {f"{layer}.{name}": buffer[:rows] for name, buffer in buffers.items()}
        tensors |= self._constants
        metadata = {
            "shape": json.dumps(asdict(self._shape)) if self._shape else "",
            "layers": json.dumps(list(self._layers)),
            "device": self.device.type,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            name: value.detach().to("cpu", copy=True).contiguous()
            for name, value in tensors.items()
        }
        save_file(kept, path, metadata)
        return {"rows": rows, "lost": seen - rows}
