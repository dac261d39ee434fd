"""Links of the repository's Markdown, turned to where the site has their targets."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from functools import partial

from markdown_it import MarkdownIt
from markdown_it.token import Token

_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NODE = re.compile(r'\["(.+?)"\]')


def links(markdown: str) -> list[str]:
    """Targets of the links and images of a text in their order, each once; none from code."""
    found: dict[str, None] = {}
    pending: list[Token] = MarkdownIt("commonmark").enable("table").parse(markdown)
    while pending:
        token = pending.pop(0)
        for name in ("href", "src"):
            if target := token.attrGet(name):
                found[str(target)] = None
        pending[:0] = token.children or []
    return list(found)


def is_local(target: str) -> bool:
    """Whether a link names a file of the repository: no other site, no place on its own page."""
    return not re.match(r"[a-z][a-z0-9+.-]*:|//|#", target, re.IGNORECASE)


def rewrite(markdown: str, resolve: Callable[[str], str | None]) -> str:
    """A text whose local links are what ``resolve`` makes of them; None leaves the words alone."""
    for target in filter(is_local, links(markdown)):
        address = resolve(target)
        inline = re.compile(rf"(!?\[{_WORDS}\])\({re.escape(target)}(\s+\"[^\"]*\")?\)")
        markdown = inline.sub(partial(_relink, address), markdown)
    return markdown


_WORDS = r"(?:[^\[\]]|\[[^\[\]]*\])*"  # brackets in a link's words, one level deep


def _relink(address: str | None, link: re.Match[str]) -> str:
    if address is None:
        return link[1].lstrip("!")[1:-1]
    return f"{link[1]}({address}{link[2] or ''})"


def below(document: str, target: str) -> tuple[str, str]:
    """(path from the repository's root, ``#fragment`` or nothing) of a link in ``document``."""
    path, hash_sign, fragment = target.partition("#")
    joined = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
    return joined, hash_sign + fragment


def from_page(document: str, path: str) -> str:
    """The link from ``document`` to ``path``, both from the repository's root."""
    return posixpath.relpath(path, posixpath.dirname(document) or ".")


def pictures_as_lists(markdown: str) -> str:
    """Mermaid flow charts as lists of their boxes: drawing one would need a script from elsewhere."""

    def as_list(match: re.Match[str]) -> str:
        boxes = [re.sub(r"</?b>", "**", box).split("<br/>") for box in _NODE.findall(match[1])]
        return "\n".join(f"- {': '.join(parts)}" for parts in boxes)

    return _MERMAID.sub(as_list, markdown)
