"""Sphinx builds the site in a folder of its own; only a whole one takes the old one's place."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusion_evidence.lib.batch import BatchError

#: In every site, so that no other folder is ever taken for one and replaced.
MARK = ".fusion-evidence-site"
_NEEDED = ("sphinx", "myst_nb", "furo", "nh3")


def check_tools() -> None:
    """Raises BatchError when what builds the site is not installed."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise BatchError(
            f"publish needs {', '.join(missing)}: pip install 'fusion-evidence[site]' (or make site)"
        )


def check_target(out: Path) -> None:
    """Raises BatchError when ``out`` holds anything but an earlier site, or cannot be made."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise BatchError(f"{out} is not a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
        raise BatchError(f"{out} holds something else than a site; it is left as it is")


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """A temporary folder on the disk of ``out``, gone afterwards whatever happens."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def build(tree: Path, extra: Path, site: Path) -> None:
    """Run Sphinx on ``tree``, every warning an error. Raises BatchError with what it said."""
    extra.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q"]
    command += ["-c", str(Path(__file__).parent), "-D", f"html_extra_path={extra}"]
    command += ["-d", str(site.parent / "doctrees"), str(tree), str(site)]
    # English messages; no settings of the user; the folder of the documents is not imported from.
    environment = os.environ | {"LC_ALL": "C.UTF-8", "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, errors="replace"
    )
    said = [line.replace(f"{tree}{os.sep}", "") for line in done.stderr.splitlines() if line]
    if done.returncode or said:
        raise BatchError("\n  ".join(["Sphinx did not build the site:", *said[-30:]]))
    (site / MARK).write_text("", encoding="utf-8")


def replace(site: Path, out: Path) -> None:
    """Put ``site`` in the place of ``out``; the old one is back if that fails."""
    old = site.parent / "old"
    if out.exists():
        os.replace(out, old)
    try:
        os.replace(site, out)
    except BaseException:
        if old.exists():
            os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
