"""The compact checkpoint's tokenizer, the fixed requests, and where their tokens stand.

``data/requests.jsonl`` has one request a line::

    {"id": "r01", "text": "...", "max_new_tokens": 64, "spans": [{"start": 5, "grid": [1, 4, 8]}]}

A span gives ``t * h * w`` tokens of the prompt the three different position rows that image tokens
have. Text alone has three equal rows and cannot see a fault in multimodal RoPE.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusion_evidence.lib.paths import DATA

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COMPACT: Path = DATA / "model" / "compact"
REQUESTS: Path = DATA / "requests.jsonl"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Span:
    """Prompt tokens ``start, start + 1, ...`` laid out as a (t, h, w) grid, row by row.

    Raises:
        ValueError: a negative start or an empty grid.
    """

    start: int
    grid: tuple[int, int, int]

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"start is {self.start}; must not be negative")
        if len(self.grid) != 3 or min(self.grid) < 1:
            raise ValueError(f"grid is {list(self.grid)}; must be three sizes of at least 1")

    @property
    def end(self) -> int:
        """The first token after the span."""
        t, h, w = self.grid
        return self.start + t * h * w


@dataclass(frozen=True, eq=False)
class Request:
    """One fixed request.

    positions: [3, T] int64 where the rows differ; None for text, whose rows all count 0, 1, ...
    """

    id: str
    text: str
    ids: tuple[int, ...]
    positions: Tensor | None
    max_new_tokens: int

    @property
    def next_position(self) -> int:
        """Position of the first generated token, in all three rows."""
        return len(self.ids) if self.positions is None else int(self.positions.max()) + 1


def decode_position(request: Request, index: int) -> int:
    """Position, in all three rows, of generated token ``index`` (0 is the first): Qwen's rule."""
    return request.next_position + index


def span_positions(tokens: int, spans: Iterable[Span]) -> Tensor:
    """[3, tokens] int64 rows T, H, W by Qwen's rule.

    A grid starts at the next free position p and holds ``p + (t, h, w)`` of each of its cells; what
    follows starts after the largest position so far.

    Raises:
        ValueError: spans that overlap, are out of order or reach past the prompt.
    """
    parts: list[Tensor] = []
    token = position = 0
    for span in spans:
        if span.start < token:
            raise ValueError(f"a span starts at {span.start}, before the last one ends at {token}")
        if span.end > tokens:
            raise ValueError(f"a span ends at {span.end}, past the prompt's {tokens} tokens")
        parts.append(torch.arange(position, position + span.start - token).expand(3, -1))
        position += span.start - token
        cells = torch.cartesian_prod(*(torch.arange(size) for size in span.grid))
        parts.append(position + cells.T)
        position += max(span.grid)
        token = span.end
    parts.append(torch.arange(position, position + tokens - token).expand(3, -1))
    return torch.cat(parts, dim=1)


def load_tokenizer(folder: Path = COMPACT) -> Tokenizer:
    """The tokenizer of a checkpoint's ``tokenizer.json``.

    Raises:
        FileNotFoundError: the folder has none.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    return Tokenizer.from_file(str(path))


def load_requests(path: Path = REQUESTS, tokenizer: Tokenizer | None = None) -> list[Request]:
    """The requests of a JSON-lines file, in its order.

    Args:
        tokenizer: the compact checkpoint's if left out.

    Raises:
        ValueError: naming the line and the field that is wrong.
    """
    path = Path(path)
    tokenizer = tokenizer or load_tokenizer()
    requests: dict[str, Request] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = _parse(json.loads(line), tokenizer)
            if request.id in requests:
                raise ValueError(f"id: {request.id!r} is taken by an earlier line")
        except ValueError as error:
            raise ValueError(f"{path.name} line {number}: {error}") from error
        requests[request.id] = request
    return list(requests.values())


_FIELDS = {"id": str, "text": str, "max_new_tokens": int, "spans": list, "source": str}
_OPTIONAL = frozenset({"spans", "source"})


def _parse(raw: Any, tokenizer: Tokenizer) -> Request:
    if not isinstance(raw, dict):
        raise ValueError(f"a request is an object, not {type(raw).__name__}")
    unknown = sorted(raw.keys() - _FIELDS.keys())
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown field; known: {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if name not in raw:
            if name in _OPTIONAL:
                continue
            raise ValueError(f"{name}: missing")
        if not isinstance(raw[name], kind) or isinstance(raw[name], bool):
            raise ValueError(f"{name}: {raw[name]!r} is not {kind.__name__}")
        if kind is str and not raw[name]:
            raise ValueError(f"{name}: empty")
    if raw["max_new_tokens"] < 1:
        raise ValueError(f"max_new_tokens: {raw['max_new_tokens']} is less than 1")
    ids = tuple(tokenizer.encode(raw["text"]).ids)
    positions = None
    if raw.get("spans"):
        try:
            positions = span_positions(len(ids), [_span(span) for span in raw["spans"]])
        except ValueError as error:
            raise ValueError(f"spans: {error}") from error
    return Request(raw["id"], raw["text"], ids, positions, raw["max_new_tokens"])


def _span(raw: Any) -> Span:
    if not isinstance(raw, dict) or raw.keys() != {"start", "grid"}:
        raise ValueError(f"{raw!r} is not an object with start and grid")
    grid = raw["grid"]
    numbers = [raw["start"], *grid] if isinstance(grid, list) else []
    if len(numbers) != 4 or any(type(number) is not int for number in numbers):
        raise ValueError(f"{raw!r} needs an integer start and a grid of three integers")
    return Span(raw["start"], (grid[0], grid[1], grid[2]))
