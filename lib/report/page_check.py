"""Does an executed notebook show what its evidence says, and nothing that acts?

Its text alone is read: no cell of it runs.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fusion_evidence.lib import batch, paths
from fusion_evidence.lib.notebook import read_cells
from fusion_evidence.lib.parameters import read_parameters
from fusion_evidence.lib.report.box import claim_title
from fusion_evidence.lib.report.evidence import Evidence, Verdict
from fusion_evidence.lib.report.recorder import SENTINEL

#: What reading a document from a stranger, whose parts may be anything, can raise.
_UNREADABLE = (
    AttributeError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
_HARMLESS = ("text/", "image/png", "image/jpeg", SENTINEL)
_ACTIVE_TAGS = "script iframe frame object embed applet base meta link form".split()


def examine(evidence: Evidence, executed: Mapping[str, Any], source: Path) -> dict[str, list[str]]:
    """Every examination of an executed notebook: what was examined -> what is wrong with it.

    executed: its document. source: this checkout's notebook of that name, which may be missing.
    """
    found = {}
    for what, examination in EXAMINATIONS.items():
        try:
            found[what] = list(examination(evidence, executed, source))
        except _UNREADABLE as error:
            found[what] = [f"cannot be read: {type(error).__name__}: {error}"]
    return found


def _outputs(executed: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for cell in executed["cells"]:
        yield from cell.get("outputs", ())


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


def _words(text: str) -> str:
    return " ".join(text.split())


def _verdict_box(evidence: Evidence, executed: Mapping[str, Any], source: Path) -> Iterator[str]:
    """Each box shows the claims with the verdicts and reasons of the evidence."""
    lines = [f"{c.verdict.value}: {claim_title(c)}: {c.why}" for c in evidence.claims]
    begins = tuple(f"{verdict.value}: " for verdict in Verdict)
    data = [output.get("data", {}) for output in _outputs(executed)]
    boxes = [one for one in data if _text(one.get("text/plain", "")).startswith(begins)]
    if evidence.claims and not boxes:
        yield "there is no verdict box"
    for box in boxes:
        if _text(box["text/plain"]) != "\n".join(lines):
            yield "as text it has other verdicts or reasons than the evidence"
        rest = _words(html.unescape(re.sub(r"<[^<>]*>", "", _text(box["text/html"]))))
        for line, claim in zip(lines, evidence.claims, strict=True):
            _, found, rest = rest.partition(_words(line.replace(": ", " ", 1)))
            if not found:
                yield f"it does not show {claim.verdict.value} for {claim_title(claim)}"
                break
    last = f"{evidence.notebook} finished: {evidence.tally()}"
    if not any(_text(o.get("data", {}).get("text/plain", "")) == last for o in _outputs(executed)):
        yield f"its last line is not {last!r}"


def _parameters(evidence: Evidence, executed: Mapping[str, Any], source: Path) -> Iterator[str]:
    """Those of the evidence are what was injected, else the defaults, or, by hand, the profile's."""
    injected = _injected(executed["cells"])
    changed = {name for name in injected if evidence.parameters.get(name) != injected[name]}
    defaults = (
        {name: p.default for name, p in read_parameters(source).items()} if source.is_file() else {}
    )
    if evidence.parameters.keys() == defaults.keys():  # else it is stale, which is said elsewhere
        profile = evidence.machine.profile if evidence.machine else ""
        by_notebook, _ = batch.read_profile(paths.PARAMETERS / f"{profile}.yaml")
        by_hand = defaults | by_notebook.get(evidence.notebook, {})
        for name in defaults.keys() - injected.keys():
            if evidence.parameters[name] not in (defaults[name], by_hand[name]):
                changed.add(name)
    if changed:
        yield f"the notebook ran with other values of {', '.join(sorted(changed))}"


def _injected(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What papermill's cell sets, which no hash of the cells covers: it may do nothing else.

    Raises ValueError for anything but one code cell of literals after the parameters.
    """
    tags = [cell.get("metadata", {}).get("tags", ()) for cell in cells]
    places = [number for number, own in enumerate(tags) if "injected-parameters" in own]
    if not places:
        return {}
    place, text = places[0], _text(cells[places[0]]["source"])
    after = place and "parameters" in tags[place - 1]
    if len(places) > 1 or not after or cells[place]["cell_type"] != "code" or len(text) > 1 << 16:
        raise ValueError("injected cells that papermill does not make")
    values: dict[str, Any] = {}
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Assign):
            raise ValueError("injected code")
        for target in statement.targets:
            values[ast.unparse(target)] = ast.literal_eval(statement.value)
    return values


class _Active(HTMLParser):
    """Finds tags and attributes by which a browser would run, load or send something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _ACTIVE_TAGS:
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            address = "".join((value or "").split()).lower()
            loads = name in ("src", "srcset", "poster", "background") and address[:5] != "data:"
            runs = address.startswith(("javascript:", "vbscript:", "data:text/html"))
            if name.startswith("on") or loads or runs or (name == "style" and "url(" in address):
                self.found.append(f"<{tag} {name}=...>")


def _inert(_: Evidence, executed: Mapping[str, Any], source: Path) -> Iterator[str]:
    """No output is more than text, tables and pictures. A tripwire: publishing cleans them too."""
    own = {cell.source for cell in read_cells(source)} if source.is_file() else set()
    for number, cell in enumerate(executed["cells"], 1):
        text = _text(cell["source"])
        shown = [] if text in own or cell["cell_type"] == "code" else [text]
        if cell.get("attachments"):
            yield f"cell {number} has attachments"
        for output in cell.get("outputs", ()):
            for kind, value in output.get("data", {}).items():
                if not kind.startswith(_HARMLESS):
                    yield f"cell {number} has an output of kind {str(kind)[:80]}"
                if kind in ("text/html", "text/markdown", "image/svg+xml"):
                    shown.append(_text(value))
        parser = _Active()
        for one in shown:
            parser.feed(one)
        if parser.found:
            yield f"cell {number} holds what a browser would run or load: {parser.found[0][:80]}"


EXAMINATIONS: dict[str, Callable[[Evidence, Mapping[str, Any], Path], Iterator[str]]] = {
    "the page shows the verdicts of the evidence": _verdict_box,
    "it ran with the parameters it says": _parameters,
    "its outputs run nothing": _inert,
}
