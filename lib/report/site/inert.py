"""Outputs of a notebook as a page may show them: they can be read, and they do nothing.

Every machine's outputs go through here, not only those handed in: a result that a pull request
brings is no more trusted than one that an archive brings. `nh3` decides what is HTML; what it may
keep is declared below. Nothing kept can run code, load anything, leave its place on the page or
carry an identifier that the page's own script or links would take for theirs.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import nbformat
import nh3
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

_TEXT = "a abbr b blockquote br code del dd dl dt em hr i ins kbd li ol p pre s samp small span"
_TAGS = frozenset(
    f"{_TEXT} strong sub sup u ul div h1 h2 h3 h4 h5 h6 details summary figure figcaption img "
    "table caption colgroup col thead tbody tfoot tr th td".split()
)
_ATTRIBUTES = {
    "*": frozenset({"class", "style", "title", "lang"}),
    "a": frozenset({"href"}),
    "img": frozenset({"src", "alt", "width", "height"}),
    "td": frozenset({"colspan", "rowspan"}),
    "th": frozenset({"colspan", "rowspan", "scope"}),
    "details": frozenset({"open"}),
}
_DROPPED_WHOLE = frozenset({"script", "style", "title", "noscript", "template", "textarea"})
#: How a thing looks, never where it lies: no position, no transform, no animation.
_STYLES = frozenset(
    "color background-color font-size font-weight font-style font-family line-height opacity "
    "text-align vertical-align white-space text-decoration width max-width min-width height "
    "margin margin-top margin-right margin-bottom margin-left padding padding-top padding-right "
    "padding-bottom padding-left border border-top border-right border-bottom border-left "
    "border-color border-style border-width border-radius border-collapse background".split()
)
# `url(` would load, a backslash can spell it otherwise, a negative or huge length covers the page.
_ACTS = re.compile(r"url|image|\\|expression|-\s*\.?\d|\d{5}", re.IGNORECASE)
_IMAGE = re.compile(r"data:image/(png|jpeg|gif);base64,[A-Za-z0-9+/=\s]+")
#: pandas' tables and the short names of Pygments' tokens; no class of the theme.
_CLASS = re.compile(r"dataframe|highlight|hll|[a-z][a-z0-9]?")
#: Images, which are what they say they are by their first bytes.
_MAGIC = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}

#: A link that lost its address.
_DEAD = re.compile(r"<a(?![^>]* href=)[^>]*>(.*?)</a>", re.DOTALL)

Resolve = Callable[[str], str | None]


def inert_html(text: str, resolve: Resolve | None = None) -> str:
    """A fragment of HTML without anything that acts.

    Links to other sites stay, but load nothing by themselves. ``resolve`` gives the address of any
    other link, or None to leave it out; without ``resolve`` all of those are left out.
    """

    def keep(tag: str, name: str, value: str) -> str | None:
        if name == "class":
            return " ".join(word for word in value.split() if _CLASS.fullmatch(word)) or None
        if name == "style":
            return None if _ACTS.search(value) else value
        if name == "src":
            return value if _IMAGE.fullmatch(value) else None
        if name == "href" and not re.match(r"https?://", value):
            return resolve(value) if resolve else None
        return value

    return _DEAD.sub(r"\1", _cleaner(keep).clean(text))


def _cleaner(keep: Callable[[str, str, str], str | None]) -> nh3.Cleaner:
    return nh3.Cleaner(
        tags=_TAGS,
        clean_content_tags=_DROPPED_WHOLE,
        attributes=_ATTRIBUTES,
        attribute_filter=keep,
        url_schemes={"http", "https", "data"},
        filter_style_properties=_STYLES,
    )


def inert_markdown(text: str, resolve: Resolve | None = None) -> str:
    """Markdown as HTML of the same kind; HTML inside it is shown as text."""
    return inert_html(_markdown().render(text), resolve)


@cache
def _markdown() -> MarkdownIt:
    options = {"html": False, "highlight": _highlighted}
    return MarkdownIt("commonmark", options).enable(["table", "strikethrough"])


def _highlighted(code: str, language: str, _attributes: str) -> str:
    lexer = get_lexer_by_name(language if language in ("python", "json", "bash") else "text")
    spans = highlight(code, lexer, HtmlFormatter(nowrap=True))
    return f'<pre class="highlight">{spans}</pre>'


def inert_outputs(outputs: Sequence[Any]) -> list[Any]:
    """A code cell's outputs: text as it is, one form of each display, no metadata."""
    shown = []
    for output in outputs:
        if output.output_type == "stream":
            name = "stderr" if output.name == "stderr" else "stdout"
            shown.append(nbformat.v4.new_output("stream", name=name, text=output.text))
        elif output.output_type in ("display_data", "execute_result"):
            kind, content = _readable(output.data)
            new = nbformat.v4.new_output(output.output_type, data={kind: content})
            if output.output_type == "execute_result":
                new.execution_count = output.execution_count
            shown.append(new)
    return shown


def _readable(data: dict[str, Any]) -> tuple[str, str]:
    """(kind, content) of the best form of a display that a page can show."""
    if "text/html" in data:
        return "text/html", inert_html(data["text/html"])
    for kind, magic in _MAGIC.items():
        if kind in data and _decoded(data[kind]).startswith(magic):
            return kind, data[kind]
    if "text/markdown" in data:
        return "text/html", inert_markdown(data["text/markdown"])
    return "text/plain", data.get("text/plain", f"[not shown: {', '.join(sorted(data))}]")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""
