"""Where the repository keeps its notebooks, its data and its results."""

from __future__ import annotations

import os
from pathlib import Path


def _find_root() -> Path:
    """The repository: where this package was checked out, else the working folder or one above.

    The second case is an installed copy used from inside a clone.
    """
    candidates = [Path(__file__).resolve().parents[1], Path.cwd(), *Path.cwd().parents]
    for folder in candidates:
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    return candidates[0]


ROOT: Path = _find_root()
#: Source notebooks. The runner names another folder to its kernels through the environment.
NOTEBOOKS: Path = Path(os.environ.get("FUSION_EVIDENCE_NOTEBOOKS") or ROOT / "notebooks")
DATA: Path = ROOT / "data"
PARAMETERS: Path = DATA / "parameters"
#: Results of the last runs, ignored by git: ``RUNS/<machine>/<notebook>.{json,ipynb}``.
RUNS: Path = ROOT / "runs"
#: Accepted results, tracked, in the same layout.
ACCEPTED: Path = DATA / "runs"
