"""What vLLM compiled for each range of sizes, written to a folder, and whether two servers' is the same.

vLLM hands every piece of the model to its compiler once for each range of sizes. Kept of each time: the
graph that was handed over, and what `graphs` reports of the code that Inductor made of it (source,
configurations, machine code). A piece that is like one before it gets that one's code, which vLLM does not
make again: of such a piece only the graph is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import tokenize
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
from torch import fx

from fusion_evidence.lib.graph import generated_code
from fusion_evidence.lib.service.graphs import GraphReport, Traced, identical

INDEX = "ranges.json"


@dataclass
class _Compiled:
    piece: int
    first: int
    last: int
    graph: str
    code: Traced


class Evidence:
    """Of one process, in order of compilation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._compiled: list[_Compiled] = []

    def watch(
        self, graph: fx.GraphModule, piece: int, first: int, last: int, compile: Callable[[], Any]
    ) -> Any:
        """The result of ``compile()``, which compiles ``graph`` for ``first`` to ``last`` tokens."""
        one = _Compiled(piece, first, last, listing(graph), Traced("", compile))
        self._compiled.append(one)
        return one.code()

    def save(self) -> int:
        """Write what there is, best when every range has run and its kernels are tuned."""
        self.folder.mkdir(parents=True, exist_ok=True)
        index = []
        for one in self._compiled:
            name = f"{one.piece:03}_{one.first}-{one.last}"
            (self.folder / f"{name}.graph.txt").write_text(one.graph)
            reports = one.code.reports()
            for number, (_, source) in enumerate(reports):
                (self.folder / f"{name}.{number}.py").write_text(source)
            index.append(
                {
                    "piece": one.piece,
                    "first": one.first,
                    "last": one.last,
                    "graph_sha256": hashlib.sha256(one.graph.encode()).hexdigest(),
                    "code": [asdict(report) for report, _ in reports],
                }
            )
        (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        return len(index)


def listing(graph: fx.GraphModule) -> str:
    """The graph's nodes in order, by number: names, which depend on what was erased, are left out."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        arguments = fx.map_arg((node.args, node.kwargs), lambda one: _Name(numbers[one]))
        target = getattr(node.target, "__qualname__", None) if callable(node.target) else None
        shown = target or ("" if node.op in ("placeholder", "output") else str(node.target))
        value = node.meta.get("example_value")
        size = f" {tuple(value.shape)} {value.dtype}" if hasattr(value, "dtype") else ""
        lines.append(f"{numbers[node]} = {node.op} {shown}{arguments}{size}")
    return "\n".join(lines) + "\n"


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


def prefill_identical(a: Path, b: Path) -> pd.DataFrame:
    """Whether two servers compiled the same, range by range, from the folders of their `Evidence`.

    Returns a row for each range and ``what`` (``graph``, ``source``, ``config``, ``binary``): ``first``,
    ``last``, ``pieces`` compared, ``identical`` (nullable: nothing there to compare).

    ValueError: a folder without evidence, or another number of pieces in a range.
    """
    left, right = _read(a), _read(b)
    if alone := left.keys() ^ right.keys():
        raise ValueError(f"{a} and {b} have other pieces or ranges: {sorted(alone)}")
    answers: dict[tuple[int, int, str], list[bool | None]] = {}
    for (piece, first, last), one in left.items():
        other = right[piece, first, last]
        found: dict[str, list[bool | None]] = {
            "graph": [one["graph_sha256"] == other["graph_sha256"]]
        }
        made = [[GraphReport(**code) for code in side["code"]] for side in (one, other)]
        for mine, theirs in zip_longest(*made):
            for what, same in _same(mine, theirs).items():
                found.setdefault(what, []).append(same)
        for what, of_pieces in found.items():
            answers.setdefault((first, last, what), []).extend(of_pieces)
    rows = [
        {"first": first, "last": last, "what": what, "pieces": len(same), "identical": _all(same)}
        for (first, last, what), same in answers.items()
    ]
    return pd.DataFrame(rows).astype({"identical": "boolean"})


def launches(folder: Path, piece: int, tokens: int) -> int | None:
    """Generated kernels that one piece's graph for ``tokens`` alone launches; None where that has no code.

    ValueError: a folder without evidence.
    """
    _read(folder)
    files = sorted(folder.glob(f"{piece:03}_{tokens}-{tokens}.*.py"))
    return sum(generated_code.launches(file.read_text()) for file in files) if files else None


_OF_THE_SEARCH = {"configs_hash", "found_by_coordesc", "triton_cache_hash"}
"""What stands in a ``best_config`` beside the configuration, with times (``time_taken_ms``)."""


def in_cache(folder: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """What Inductor left in its cache: SHA-256 of every graph's code as `generated_code.normalized` has it,
    sorted, each once; and of every kernel that was tuned, by a hash of its source, the configuration that
    the clock chose.

    For servers that nothing of this project is loaded into. A file that cannot be read is left out.
    """
    code, chosen = set(), {}
    for file in folder.glob("*/*.py"):
        try:
            text = file.read_text(encoding="utf-8").replace(str(folder), "cache")
            # A kernel that was only tried for its time has a `call` as well, and waits for nothing.
            if "async_compile.wait(" in text and re.search(r"^\s*def call\(", text, re.MULTILINE):
                code.add(hashlib.sha256(generated_code.normalized(text).encode()).hexdigest())
        except (OSError, ValueError, SyntaxError, tokenize.TokenError):
            continue
    for file in folder.glob("*/*.best_config"):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            chosen[file.stem] = {
                key: value
                for key, value in sorted(found.items())
                if key not in _OF_THE_SEARCH and not key.startswith("time_taken")
            }
    return sorted(code), dict(sorted(chosen.items()))


def _same(one: GraphReport | None, other: GraphReport | None) -> dict[str, bool | None]:
    """As `graphs.identical`; code that one of them has alone is other code."""
    if one is None or other is None:
        return dict.fromkeys(("source", "config", "binary"), False)
    return identical({"": one}, {"": other}, "")


def _all(answers: list[bool | None]) -> bool | None:
    known = [one for one in answers if one is not None]
    return all(known) if known else None


def _read(folder: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    try:
        entries = json.loads((folder / INDEX).read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no evidence of what was compiled") from error
    return {(one["piece"], one["first"], one["last"]): one for one in entries}
