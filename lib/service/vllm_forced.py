"""vLLM's custom logits processor that makes a request say given tokens, and keeps what it would have said.

For ``vllm serve --logits-processors``; a request's tokens come with it, see `vllm_records.forced`. It is
imported by vLLM's processes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

FIELD, NAME = "fusion_forced", "fusion_request"
"""Of a request's ``vllm_xargs``: its tokens, commas between them, and the name to keep its choices by."""


@dataclass
class _Request:
    """name: as the client calls it. tokens: to say. said: vLLM's own list of what it has said."""

    name: str
    tokens: list[int]
    said: list[int]


_choices: dict[str, list[tuple[int, Tensor]]] = {}


def choices() -> dict[str, list[int]]:
    """Request -> the tokens that it would have said, each after the forced ones before it."""
    return {
        name: [int(token) for _, token in sorted(made, key=lambda one: one[0])]
        for name, made in _choices.items()
    }


def reset_choices() -> None:
    _choices.clear()


def read(extra: Any) -> list[int]:
    """The tokens in a request's ``extra_args``; none where it is free. ValueError: no such list."""
    given = str((extra or {}).get(FIELD, ""))
    try:
        return [int(token) for token in given.split(",")] if given else []
    except ValueError:
        raise ValueError(f"{FIELD}: expected tokens with commas between, got {given!r}") from None


class ForcedTokens(LogitsProcessor):
    """Leaves of each row of the logits only the token that is to be said."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, _Request] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        read(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._requests.pop(index, None)
        for index, parameters, _, said in batch_update.added:
            self._requests.pop(index, None)
            if tokens := read(parameters.extra_args):
                name = str(parameters.extra_args.get(NAME, ""))
                self._requests[index] = _Request(name, tokens, said)
        for one, other, direction in batch_update.moved:
            moved, met = self._requests.pop(one, None), self._requests.pop(other, None)
            if moved is not None:
                self._requests[other] = moved
            if met is not None and direction == MoveDirectionality.SWAP:
                self._requests[one] = met

    def apply(self, logits: Tensor) -> Tensor:
        for index, request in self._requests.items():
            step = len(request.said)
            if step < len(request.tokens):
                row = logits[index]
                made = _choices.setdefault(request.name, [])
                made[:] = [one for one in made if one[0] != step]
                made.append((step, row.argmax()))
                token = request.tokens[step]
                row.fill_(float("-inf"))
                row[token] = 0.0
        return logits
