"""One notebook in a process of its own, started by `fusion_evidence.lib.batch`.

    python -m fusion_evidence.lib.executor JOB.json

The process writes one JSON object per line to its standard output: ``{"cell": i, "of": n,
"title": ...}`` when a code cell starts, ``{"error": ...}`` when the notebook fails. Its exit status
is 0 only when every cell ran. Whatever the way it ends, nothing it started stays behind:

* it is told when its parent dies, and the kernel is killed when it dies (Linux);
* orphans of the kernel become its children, and it kills what is left when it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from fusion_evidence.lib import nbformat_quickly  # noqa: F401  # before papermill imports it

#: Asks an executor to kill its kernel and end. Papermill and Jupyter leave this signal alone.
STOP = signal.SIGUSR1

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36

# The kernel asks to be killed with its parent before anything else runs in it.
_KERNEL = (
    "import ctypes, runpy, signal, sys\n"
    "if sys.platform == 'linux':\n"
    f"    ctypes.CDLL(None).prctl({_SET_PDEATHSIG}, signal.SIGKILL)\n"
    "runpy.run_module('ipykernel_launcher', run_name='__main__')\n"
)


def kernel_spec() -> dict[str, Any]:
    """A Jupyter kernel spec for this very Python, so that no kernel need be installed."""
    return {
        "argv": [sys.executable, "-c", _KERNEL, "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }


def kill_descendants() -> None:
    """Kill every process below this one, also those that moved to a session of their own."""
    this = psutil.Process()
    while descendants := this.children(recursive=True):
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(descendants, timeout=5)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def cell_title(cells: list[Any], index: int) -> str:
    """The first comment of a code cell, else the nearest heading above it."""
    first = cells[index].source.lstrip().splitlines()[0] if cells[index].source.strip() else ""
    if first.startswith("#"):
        return first.lstrip("# ")
    for cell in reversed(cells[:index]):
        if cell.cell_type == "markdown" and (
            heading := re.search(r"^#+\s+(.+)$", cell.source, re.MULTILINE)
        ):
            return heading[1].strip()
    return first


def main(job_file: str) -> int:
    """Execute the notebook that a job file describes; see `fusion_evidence.lib.batch`."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))

    def stop(_signal: int, _frame: Any) -> None:
        kill_descendants()
        shutil.rmtree(job["scratch"], ignore_errors=True)  # a killed runner cannot
        os._exit(1)

    signal.signal(STOP, stop)
    _prctl(_SET_PDEATHSIG, STOP)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != job["parent"]:  # it died before the two lines above
        return 1

    # The kernel inherits descriptors 1 and 2: keep the lines for the runner apart from its prints.
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def say(**line: Any) -> None:
        print(json.dumps(line), file=lines, flush=True)

    try:
        _execute(job, say)
    except BaseException as error:
        say(error=_describe(error))
        return 1
    finally:
        kill_descendants()
    return 0


def _execute(job: dict[str, Any], say: Any) -> None:
    import papermill
    from traitlets.config import Config

    source, output = Path(job["source"]), Path(job["output"])
    os.chdir(source.parent)  # as JupyterLab starts a kernel; paths are recorded relative to it
    cells: list[Any] = []

    def cell_started(cell: Any, cell_index: int) -> None:
        cells[cell_index:] = [cell]
        if cell.cell_type == "code" and cell.source.strip():
            number = sum(c.cell_type == "code" and bool(c.source.strip()) for c in cells)
            say(cell=number, title=cell_title(cells, cell_index))

    # Unix sockets: parallel runs cannot collide on ports. Their path must fit in about 100 bytes.
    sockets = {"transport": "ipc", "ip": f"{job['scratch']}/kernel"}
    use_sockets = os.name == "posix" and len(job["scratch"]) < 60
    papermill.execute_notebook(
        source.name,
        os.path.relpath(output).replace("{", "{{").replace("}", "}}"),
        parameters=job["parameters"],
        kernel_name="python3",
        progress_bar=False,
        start_timeout=300,  # a cold machine
        config=Config({"KernelManager": sockets if use_sockets else {}}),
        on_cell_start=cell_started,
    )


def _describe(error: BaseException) -> str:
    """One line: what happened, and in which cell where that is known."""
    from papermill.exceptions import PapermillExecutionError

    if isinstance(error, PapermillExecutionError):
        text = f"cell {error.exec_count} raised {error.ename}: {error.evalue}"
    else:
        text = f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0][:500]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
