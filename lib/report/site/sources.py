"""The tree of documents that Sphinx builds: it repeats the repository's folders, so links hold.

``README.md`` and the guides stand where they stand in the repository, an executed notebook at
``data/runs/<machine>/``. Its evidence lies beside it in ``extra``, which the site serves as it is;
other files that documents link to lie in ``tree/_linked``, for Sphinx to offer as downloads.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from fusion_evidence.lib.batch import ARCHIVE_RECORD, BatchError
from fusion_evidence.lib.nbformat_quickly import nbformat
from fusion_evidence.lib.report import labels
from fusion_evidence.lib.report.evidence import evidence_path
from fusion_evidence.lib.report.handed_in import HandedIn
from fusion_evidence.lib.report.labels import Lang
from fusion_evidence.lib.report.site import links
from fusion_evidence.lib.report.site.collect import MachineResults, Page
from fusion_evidence.lib.report.site.index import (
    card_name,
    card_page,
    heading_id,
    index,
    index_name,
)
from fusion_evidence.lib.report.site.inert import inert_outputs
from fusion_evidence.lib.report.site.markup import WORDS, provenance, raw

#: Documents of the repository that become pages, where they exist: caption -> paths.
DOCUMENTS = {
    "The project": ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    "Guides": (
        "kernels/NOTES.md",
        "lib/attribution/NOTES.md",
        "lib/service/NOTES.md",
        "kernels/BRING_YOUR_OWN.md",
        "data/README.md",
    ),
}
#: What may be copied for a link from a document: folders and files at the top.
_SERVED = re.compile(
    r"(kernels|lib|notebooks|data|tests|\.ci)/[^.][\w./-]*|[A-Z][\w.-]*|[\w-]+\.(toml|txt|yml)",
    re.ASCII,
)
LINKED = "_linked"  # a name that `conf.py` knows, too


class Sources:
    """Writes the documents of a site under ``tree`` and the files it serves under ``extra``."""

    def __init__(self, root: Path, machines: Sequence[MachineResults], folder: Path) -> None:
        self.root = root
        self.machines = machines
        self.tree = folder / "tree"
        self.extra = folder / "extra"
        documents = [path for paths in DOCUMENTS.values() for path in paths]
        self.documents = [path for path in documents if (root / path).is_file()]
        self.pages = {page.document: page for machine in machines for page in machine.pages}

    def write(self) -> None:
        """Write everything. BatchError names a document's link that leads nowhere."""
        for machine in self.machines:
            if machine.archive:  # the card reads it, too
                record = f"data/runs/{machine.name}/{ARCHIVE_RECORD}"
                _copy(machine.folder / ARCHIVE_RECORD, self.extra / record)
            for page in machine.pages:
                evidence = evidence_path(machine.folder, page.notebook)
                _copy(evidence, self.extra / f"{page.document}.json")
                self._put(f"{page.document}.ipynb", self._notebook(page, machine.archive))
        served = self.extra / "data" / "runs"
        for language in labels.LANGUAGES:
            text = index(self.machines, served, language)
            self._put(f"{index_name(language)}.md", text + self._contents(language))
            for machine in filter(lambda m: m.pages, self.machines):
                text = card_page(machine, served, language)
                self._put(f"{card_name(machine.name, language)}.md", text)
        for path in self.documents:
            text = links.pictures_as_lists((self.root / path).read_text(encoding="utf-8"))
            self._put(path, links.rewrite(text, partial(self._target, path)))

    def _put(self, path: str, text: str) -> None:
        file = self.tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def _linked(self, path: str) -> str:
        """Put a file of the repository where Sphinx finds it, and takes it for no document."""
        _copy(self.root / path, self.tree / LINKED / path)
        return f"{LINKED}/{path}"

    def _contents(self, language: Lang) -> str:
        """The trees of contents, which make the sidebar; the Chinese summary has its cards."""
        cards = {m.name: card_name(m.name, language) for m in self.machines if m.pages}
        if language == "zh":
            chinese = [name for name in ("README.zh-CN",) if f"{name}.md" in self.documents]
            return _tree("", [*cards.values(), *chinese])
        groups = {"Languages": [index_name("zh")]}
        groups |= {
            machine.name: [cards[machine.name], *(page.document for page in machine.pages)]
            for machine in self.machines
            if machine.pages
        }
        for caption, files in DOCUMENTS.items():
            names = [path.removesuffix(".md") for path in files if path in self.documents]
            groups[caption] = [name for name in names if not name.endswith("zh-CN")]
        return "".join(_tree(caption, names) for caption, names in groups.items() if names)

    # --- notebooks

    def _notebook(self, page: Page, archive: HandedIn | None) -> str:
        """The executed notebook as a page: its own cells, a note on its origin, inert outputs."""
        executed: Any = nbformat.read(page.copy, as_version=4)
        source = f"notebooks/{page.notebook}.ipynb"
        cells = []
        for cell in executed.cells:
            if cell.cell_type == "markdown":
                text = links.rewrite(
                    cell.source, partial(self._target, source, machine=page.machine)
                )
                cells.append(nbformat.v4.new_markdown_cell(text))
            elif cell.cell_type == "code":
                new = nbformat.v4.new_code_cell(
                    cell.source,
                    execution_count=cell.execution_count,
                    outputs=inert_outputs(cell.outputs),
                )
                cells.append(new)
        note = raw(provenance(page.evidence, archive, "en", (_files(page), _since(page))))
        opening = next(cell for cell in cells if cell.cell_type == "markdown")
        title, _, rest = opening.source.partition("\n")
        opening.source = f"{title}\n\n{note}\n{rest}"
        for number, cell in enumerate(cells):
            cell.id = f"cell-{number}"  # the same site from the same results
        language = {"name": "python", "pygments_lexer": "ipython3"}
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        metadata = {"kernelspec": kernel, "language_info": language}
        return nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata=metadata))

    # --- links

    def _target(self, document: str, target: str, machine: str | None = None) -> str | None:
        """Where a local link of a repository document leads in the site; None: it has no place."""
        path, fragment = links.below(document, target)
        place = document if machine is None else f"data/runs/{machine}/{Path(document).name}"
        link = partial(links.from_page, place)
        if path in self.documents:
            return link(path) + fragment
        if path.startswith("notebooks/") and path.endswith(".ipynb"):
            return self._page_link(Path(path).stem, machine, link)
        if path.startswith("data/runs"):
            shown = [m.name for m in self.machines if m.pages and path == f"data/runs/{m.name}"]
            return link("index.md") + "".join(f"#{heading_id(name)}" for name in shown)
        file = self.root / path
        if file.is_dir():
            return None
        if not (file.is_file() and _SERVED.fullmatch(path)):
            raise BatchError(f"{document}: the link to {target} leads nowhere")
        return f"path:{link(self._linked(path))}"

    def _page_link(
        self, notebook: str, machine: str | None, link: Callable[[str], str]
    ) -> str | None:
        names = [machine] if machine else [m.name for m in self.machines]
        for name in names:
            if f"data/runs/{name}/{notebook}" in self.pages:
                return link(f"data/runs/{name}/{notebook}.ipynb")
        return None


def _tree(caption: str, documents: Sequence[str]) -> str:
    head = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    return "\n".join(["", *head, *documents, "```", ""])


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)


def _since(page: Page) -> str:
    if not page.since:
        return ""
    return f"accepted since, and not on this page: {escape(', '.join(page.since))}"


def _files(page: Page) -> str:
    words = WORDS["en"]
    return f'<a href="{escape(page.notebook)}.json">{words["result"]}</a>'
