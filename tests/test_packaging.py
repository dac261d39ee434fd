"""The project's files agree with one another, and it installs as it says."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROFILES = ("cpu", "cuda", "dcu")


def git(*arguments: str) -> list[str]:
    """Lines of a git command's output; skips, saying so, where this is no clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# --- what installs ------------------------------------------------------------------------------


def package_folders() -> set[str]:
    folders = set()
    for top in ("kernels", "lib"):
        for file in (ROOT / top).rglob("*.py"):
            folders.add("fusion_evidence." + ".".join(file.parent.relative_to(ROOT).parts))
    return folders


def test_every_package_folder_is_installed():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == package_folders()


def test_every_package_folder_has_an_init():
    for name in package_folders():
        folder = ROOT.joinpath(*name.split(".")[1:])
        assert (folder / "__init__.py").is_file(), folder


def test_the_installed_packages_are_these_folders(tmp_path):
    code = "from fusion_evidence import kernels, lib; print(kernels.__file__, lib.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    expected = [str(ROOT / top / "__init__.py") for top in ("kernels", "lib")]
    assert done.stdout.split() == expected


def test_no_common_top_level_name_is_installed(tmp_path):
    """Hugging Face's ``kernels`` is what transformers imports; ours must not be found there."""
    code = """
import importlib.util as u
for name in ("kernels", "lib"):
    found = u.find_spec(name)
    print(name, found.origin if found else None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert str(ROOT / "kernels") not in done.stdout
    assert str(ROOT / "lib") not in done.stdout


def test_the_wheel_holds_every_module(tmp_path):
    """Built offline with setuptools alone, as `pip install --no-build-isolation` does."""
    for part in ("kernels", "lib", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / part), str(tmp_path)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(tmp_path / "out"), str(tmp_path)]
    subprocess.run(command, check=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        "fusion_evidence/" + file.relative_to(ROOT).as_posix()
        for top in ("kernels", "lib")
        for file in (ROOT / top).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert any(name.endswith("LICENSE") for name in names)


def test_the_console_command_exists():
    module, function = PROJECT["project"]["scripts"]["fusion-evidence"].split(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert callable(getattr(__import__(module, fromlist=[function]), function))


# --- requirements -------------------------------------------------------------------------------


def requirements() -> list[Requirement]:
    lists = [PROJECT["project"]["dependencies"]]
    lists += PROJECT["project"]["optional-dependencies"].values()
    return [Requirement(text) for items in lists for text in items]


def test_every_requirement_has_a_lower_bound_and_no_pin():
    for requirement in requirements():
        operators = {part.operator for part in requirement.specifier}
        assert operators == {">="}, requirement


def test_the_constraints_pin_only_the_torch_extra():
    lines = [
        line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    pins = {item.name: item for item in map(Requirement, filter(None, lines))}
    extra = PROJECT["project"]["optional-dependencies"]["torch"]
    assert pins.keys() == {Requirement(text).name for text in extra}
    assert pins["torch"].specifier == SpecifierSet("==2.13.0")
    # Both outcomes: the CUDA build's own demand, and the pair checked on CPU.
    assert all(pins["triton"].specifier.contains(version) for version in ("3.7.1", "3.9.0"))
    assert not pins["triton"].specifier.contains("3.10.0")
    for text in extra:
        bound = Requirement(text)
        for part in pins[bound.name].specifier:
            assert bound.specifier.contains(part.version)


def test_environment_yml_is_in_step():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    plain = [item for item in environment["dependencies"] if isinstance(item, str)]
    python = next(item for item in plain if item.startswith("python"))
    assert python == "python" + PROJECT["project"]["requires-python"]
    assert "pip" in plain
    (pip,) = (item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pip[0] == "-c constraints.txt"
    extras = re.fullmatch(r"-e \.\[(.*)\]", pip[1])
    assert extras is not None
    assert set(extras[1].split(",")) == set(PROJECT["project"]["optional-dependencies"])
    assert len(pip) == 2, "what is needed is named in pyproject.toml, once"
    assert environment["name"] == PROJECT["project"]["name"]


def test_the_version_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == "Apache-2.0"
    assert "Copyright 2026 The Fusion Evidence authors" in (ROOT / "LICENSE").read_text()
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


# --- what is tracked ----------------------------------------------------------------------------


def test_no_tracked_path_is_ignored():
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_ignored_patterns_are_anchored():
    """`lib/` alone, as a common ignore file has it, would hide this project's own folder."""
    probes = [
        "lib/new/module.py",
        "data/runs/cpu/01.json",
        "kernels/build/x.cu",
        "notebooks/a.ipynb",
    ]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *probes], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")


# Written so that this line is no match of itself. Evidence of a run tells where that run was.
MACHINE_PATH = re.compile(r"(?<![\w./$}~-])/(?:work|root|home|Users|tmp)/")


def machine_paths(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if MACHINE_PATH.search(line)]


def test_the_finder_of_machine_paths_finds_them():
    for place in ("work", "root", "home", "Users", "tmp"):
        assert machine_paths(f"open('/{place}/x')") == [f"open('/{place}/x')"]
        assert machine_paths(f"runs/{place}/x  $OUT/{place}/x") == []
    assert machine_paths("/opt/dtk/env.sh  /dev/kfd  and/or") == []


def test_no_machine_path_is_tracked():
    found = {}
    for name in git("ls-files"):
        if name.startswith("data/runs/"):
            continue
        try:
            lines = machine_paths((ROOT / name).read_text())
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # binary, or deleted and not committed yet
        if lines:
            found[name] = lines
    assert found == {}


def test_data_readme_names_every_file():
    text = (ROOT / "data" / "README.md").read_text()
    for name in git("ls-files", "data"):
        parts = name.split("/")[1:]
        if parts == ["README.md"]:
            continue
        known = parts[-1] in text or any(f"`{'/'.join(parts[:n])}/" in text for n in (1, 2))
        assert known, f"{name} has no line in data/README.md"


# --- the article --------------------------------------------------------------------------------


def test_article_figures_are_labelled_and_consistent():
    article = json.loads((ROOT / "data" / "article.json").read_text())
    figures = {item["name"]: item for item in article["figures"]}
    assert len(figures) == len(article["figures"]), "a name appears twice"
    for item in figures.values():
        assert item["label"] == article["labels"][item["status"]], item
        assert (item["value"] is None) == (item["status"] == "not stated"), item
        assert item["where"], item
    value = {name: item["value"] for name, item in figures.items()}
    baseline, fused = value["primitive_time_baseline"], value["primitive_time_candidate"]
    assert round(baseline / fused, 6) == value["primitive_speedup"] == value["derived_speedup"]
    assert round((baseline - fused) * 1e3, 3) == value["primitive_saving_per_layer"]
    token = value["primitive_saving_per_layer"] * value["layers"] / 1e3
    assert round(token, 5) == value["derived_saving_per_token"]
    assert round(token, 3) == value["primitive_saving_per_token"]
    assert (
        round(token / value["fallback_only_mean_tpot"], 6) == value["derived_saving_share_of_tpot"]
    )


# --- notebooks ----------------------------------------------------------------------------------


def problems(notebook: nbformat.NotebookNode) -> list[str]:
    """What is wrong with a source notebook; empty when nothing is."""
    found = []
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    if len(tagged) != 1:
        found.append(f"{len(tagged)} cells are tagged 'parameters'")
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.startswith("# "):
        found.append("the first cell is no title")
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if cell.outputs or cell.execution_count is not None:
            found.append(f"cell {number} carries outputs")
        if len(cell.source.splitlines()) > 40:
            found.append(f"cell {number} has over 40 lines")
        if machine_paths(cell.source):
            found.append(f"cell {number} names a path of one machine")
    return found


def page(*cells: nbformat.NotebookNode) -> nbformat.NotebookNode:
    v4 = nbformat.v4
    parameters = v4.new_code_cell("n: int = 1", metadata={"tags": ["parameters"]})
    return v4.new_notebook(cells=[v4.new_markdown_cell("# Is it so?"), parameters, *cells])


def test_the_notebook_check_finds_planted_faults():
    v4 = nbformat.v4
    assert problems(page(v4.new_code_cell("n + 1"))) == []
    stored = v4.new_code_cell("n", outputs=[v4.new_output("stream", text="1")])
    assert problems(page(stored)) == ["cell 3 carries outputs"]
    assert problems(page(v4.new_code_cell("n", execution_count=3))) == ["cell 3 carries outputs"]
    assert problems(page(v4.new_code_cell("n\n" * 41))) == ["cell 3 has over 40 lines"]
    assert problems(page(v4.new_code_cell("n\n" * 40))) == []
    assert len(problems(v4.new_notebook(cells=[v4.new_code_cell("1")]))) == 2
    place = "/" + "home/me/model"
    assert problems(page(v4.new_code_cell(repr(place)))) != []


def test_source_notebooks():
    assert NOTEBOOKS, "no notebook in notebooks/"
    found = {path.name: problems(nbformat.read(path, as_version=4)) for path in NOTEBOOKS}
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_notebook_has_parameters_on_every_profile(profile):
    content = yaml.safe_load((ROOT / "data" / "parameters" / f"{profile}.yaml").read_text())
    limits = content.pop("_limits")
    assert 0 < limits["cell_seconds"] <= limits["notebook_seconds"]
    assert content.keys() == {path.stem for path in NOTEBOOKS}


def test_readme_names_every_notebook():
    text = (ROOT / "README.md").read_text()
    for path in NOTEBOOKS:
        assert path.stem.split("_")[0] in text, path.name
    for folder in ("notebooks/", "kernels/", "lib/", "data/", "tests/"):
        assert folder in text


# --- continuous integration ---------------------------------------------------------------------


def test_ci_is_an_executable_strict_bash_script():
    script = ROOT / ".ci" / "run"
    text = script.read_text()
    assert script.stat().st_mode & 0o111
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    for order in ("make test", "make run"):
        assert order in text
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_hooks_run_installed_programs_and_strip_only_sources():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks.values()} == {"system"}
    strip = re.compile(hooks["nbstripout"]["files"])
    assert strip.search("notebooks/01_primitive_benchmark.ipynb")
    assert not strip.search("data/runs/h200/01_primitive_benchmark.ipynb")
    assert {"ruff", "ruff-format", "nbstripout", "types"} == hooks.keys()
