"""Fixtures shared by the tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusion_evidence.lib.nbformat_quickly import nbformat

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def write_notebook() -> Callable[..., Path]:
    """``write_notebook(path, *code_cells, parameters="")`` writes a notebook and returns its path.

    The notebook has a title, the parameters cell, if any, and the given code cells.
    """
    return _write_notebook


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Inductor's cache, shared by the tests that ask for it and by the kernels they start."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Many small operations: with more threads they wait for one another where cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def keeps_its_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a torch before 2.8, whose Dynamo knows no filter of guards."""
    import torch

    older = type("Hooks", (), {"__dataclass_fields__": {}})
    monkeypatch.setattr(torch._dynamo.hooks, "Hooks", older)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium; where none starts, the test fails and says what to install."""
    from playwright.sync_api import Error, sync_playwright

    known = ("chromium", "chromium-browser", "google-chrome")
    installed = next(filter(None, map(shutil.which, known)), None)
    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=installed)
        except Error as error:
            pytest.fail(
                "no Chromium starts here, so no page was looked at: apt-get install chromium, "
                f"or .venv/bin/playwright install --with-deps chromium\n{error}"
            )
        yield chromium
        chromium.close()


def _write_notebook(path: Path, *cells: str, parameters: str = "") -> Path:
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    document = nbformat.v4.new_notebook(metadata=metadata)
    document.cells.append(nbformat.v4.new_markdown_cell(f"# {path.stem}"))
    if parameters:
        tagged = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
        document.cells.append(tagged)
    document.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(document, path)
    return path
