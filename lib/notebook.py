"""The cells of a notebook file.

Read without nbformat, whose import takes longer than all else that a kernel needs from `lib`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One cell of a source notebook."""

    kind: str  #: code, markdown or raw
    source: str
    tags: tuple[str, ...]


def read_cells(notebook: Path) -> list[Cell]:
    """The cells of a notebook (format 4), without the one that papermill injects.

    Raises ValueError for a file that is no notebook.
    """
    try:
        document = json.loads(notebook.read_text(encoding="utf-8"))
        cells = [
            Cell(
                kind=cell["cell_type"],
                source="".join(cell["source"]),  # a text, or a list of lines
                tags=tuple(cell.get("metadata", {}).get("tags", ())),
            )
            for cell in document["cells"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{notebook.name} is no notebook of format 4: {error!r}") from None
    return [cell for cell in cells if "injected-parameters" not in cell.tags]
