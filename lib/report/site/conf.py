"""Sphinx's configuration; `fusion_evidence.lib.report.site.build` runs it. Nothing is executed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # read by Sphinx alone, and not needed to check or to package the project
    from sphinx.application import Sphinx

project = "Fusion Evidence"
extensions = ["myst_nb", "sphinx.ext.githubpages"]
language = "en"
suppress_warnings = ["misc.highlighting_failure"]  # a result may hold code that is none
exclude_patterns = ["_linked/**"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/latex", None)]
myst_enable_extensions: list[str] = []
myst_heading_anchors = 4

html_theme = "furo"
html_title = "Fusion Evidence"
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_extra_path: list[str] = []  # set by the caller: files as they are, at their own places
html_copy_source = (
    False  # pages are made for the site; what they were made from is in the repository
)
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
highlight_language = "text"  # for blocks that name none; cells of notebooks do
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


def _language_of_page(
    _app: Sphinx, page: str, _template: str, context: dict[str, Any], _tree: Any
) -> None:
    """A Chinese page says so, for fonts, hyphenation and readers that speak."""
    if page.endswith("zh-CN"):
        context["language"] = "zh-CN"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("html-page-context", _language_of_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
