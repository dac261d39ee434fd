"""JupyterLab as `make lab` starts it, in a real browser, on a copy of the repository."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fusion_evidence.lib import paths
from fusion_evidence.lib.report.evidence import read_evidence

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

TOKEN = "only-for-this-test"
KEPT_AWAY = (".git", ".venv", "runs", "build", "__pycache__", ".*_cache", ".ipynb_checkpoints")


@dataclass
class Lab:
    root: Path  #: of the copy
    address: str

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"token {TOKEN}"}
        request = urllib.request.Request(self.address + path, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


def copy_of_the_repository(root: Path) -> dict[str, str]:
    """A copy in which Lab may save and run; returns the environment that makes it the project."""
    shutil.copytree(paths.ROOT, root, ignore=shutil.ignore_patterns(*KEPT_AWAY))
    shutil.copytree(paths.ACCEPTED, root / "data" / "runs", dirs_exist_ok=True)
    layout = root.parent / "layout" / "fusion_evidence"
    layout.mkdir(parents=True)
    for name in ("kernels", "lib"):
        (layout / name).symlink_to(root / name)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FUSION_EVIDENCE_")}
    home = root.parent / "home"  # no settings of whoever runs the test
    home.mkdir()
    environment |= {"PYTHONPATH": str(layout.parent), "HOME": str(home), "JUPYTER_NO_CONFIG": "1"}
    return environment | {"JUPYTER_RUNTIME_DIR": str(home), "IPYTHONDIR": str(home)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """`make lab` called from another folder."""
    base = tmp_path_factory.mktemp("lab")
    root = base / "copy"
    environment = copy_of_the_repository(root)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--no-browser", "--allow-root", f"--ServerApp.port={port}"]
    words += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    binaries = Path(sys.executable).parent
    command = ["make", "-C", str(root), "-o", ".venv/.ready", "lab"]
    with open(base / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, f"BIN={binaries}", f"ARGS={' '.join(words)}"],
            cwd=base,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        server = Lab(root, f"http://127.0.0.1:{port}")
        try:
            deadline = time.monotonic() + 180
            while True:
                try:
                    server.get("/api/status")
                    break
                except (urllib.error.URLError, OSError):
                    assert process.poll() is None, log.seek(0) or log.read()
                    assert time.monotonic() < deadline, log.seek(0) or log.read()
                    time.sleep(0.5)
            yield server
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def look(page: Page, name: str) -> None:
    """Leave a picture of the page in the folder SCREENSHOTS, if one is named, to be looked at."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.wait_for_timeout(3000)
        page.screenshot(path=f"{folder}/lab-{name}.png")


def test_every_notebook_is_listed(lab):
    listed = {entry["name"] for entry in lab.get("/api/contents")["content"]}
    assert {path.name for path in paths.NOTEBOOKS.glob("*.ipynb")} <= listed


def test_the_kernel_is_this_python(lab):
    specs = lab.get("/api/kernelspecs")
    name = json.loads((paths.NOTEBOOKS / "00_summary.ipynb").read_text())["metadata"]["kernelspec"]
    assert specs["default"] == name["name"] == "python3"


def test_it_opens_on_the_summary_and_runs_it(lab, browser):
    """The address that `make lab` prints, Run All Cells from the menu, the evidence it leaves."""
    with browser.new_context(viewport={"width": 1400, "height": 1000}) as context:
        page = context.new_page()
        page.goto(f"{lab.address}/?token={TOKEN}", timeout=120_000)
        page.wait_for_url("**/lab/tree/00_summary.ipynb*", timeout=120_000)
        page.get_by_role("heading", name="What is proved?").wait_for(timeout=120_000)
        look(page, "opened")
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        result = lab.root / "runs" / "cpu" / "00_summary.json"
        deadline = time.monotonic() + 300
        while (evidence := read_evidence(result)).run != "complete":
            assert time.monotonic() < deadline, evidence.reason
            page.wait_for_timeout(500)  # lets the page work meanwhile
        look(page, "run")
    kernel = Path(evidence.kernel)
    assert kernel.is_absolute()  # the copy has none of its own
    assert kernel.samefile(sys.executable)
