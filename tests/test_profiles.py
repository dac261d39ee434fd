"""Every profile that is shipped fits every notebook: names, types, and values the notebook accepts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fusion_evidence.lib import batch, paths

PROFILES = ("cpu", "cuda", "dcu")
OPENED = """
import json, sys
from pathlib import Path
from fusion_evidence.lib import batch, paths
from fusion_evidence.lib.notebook import read_cells
from fusion_evidence.lib.parameters import ParameterError

def opened(notebook, values):
    '''Run the parameters cell, then the one that checks them, as the runner would.'''
    namespace, asked = {"__name__": "__main__"}, False
    for cell in read_cells(notebook):
        if cell.kind != "code":
            continue
        exec(cell.source, namespace)
        if "parameters" in cell.tags:
            namespace.update(values)
        if "check_values(" in cell.source:
            return "accepted"
    return "no cell checks the values"

notebooks = batch.select_notebooks(paths.NOTEBOOKS)
for profile in sys.argv[1:]:
    passed, _, _ = batch.plan_parameters(notebooks, Path(profile), [])
    for notebook in notebooks:
        try:
            said = opened(notebook, passed[notebook.stem])
        except ParameterError as error:
            said = str(error)
        print("SAID", Path(profile).stem, notebook.stem, said)
"""


def profile_file(profile: str):
    return paths.PARAMETERS / f"{profile}.yaml"


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    """What each notebook says to each profile's values; a process of its own, as they are opened."""
    wrong = tmp_path_factory.mktemp("profiles") / "wrong.yaml"
    wrong.write_text(
        "01_primitive_benchmark: {peers: [flashinfre]}\n05_drift_attribution: {parallel: 0}\n"
    )
    files = [*map(profile_file, PROFILES), wrong]
    folder = tmp_path_factory.mktemp("opened")
    done = subprocess.run(
        [sys.executable, "-c", OPENED, *map(str, files)],
        capture_output=True,
        text=True,
        env={**os.environ, "FUSION_EVIDENCE_RUN_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 3)[1:] for line in done.stdout.splitlines() if line[:5] == "SAID "]
    return {(profile, notebook): said for profile, notebook, said in lines}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_notebook_accepts_the_values(accepted, profile):
    said = {notebook: what for (of, notebook), what in accepted.items() if of == profile}
    assert len(said) == len(batch.select_notebooks(paths.NOTEBOOKS))
    assert set(said.values()) == {"accepted"}, said


def test_a_value_no_notebook_takes_is_noticed(accepted):
    assert "flashinfre" in accepted["wrong", "01_primitive_benchmark"]
    assert "parallel: expected at least 1" in accepted["wrong", "05_drift_attribution"]
    assert accepted["wrong", "02_trace_specialization"] == "accepted"
