"""Make the virtual environment: ``python lib/environment.py .venv``.

Standard library only, because it runs before anything is installed. Two cases:

* The running Python already has torch (a vendor's DCU image, a GPU machine): the environment sees
  that Python's packages, every one of them is frozen at its version, and torch and triton are not
  requested at all. A vendor's build is never replaced.
* Otherwise: a plain environment with the versions in ``constraints.txt``.

``WHEELHOUSE=dir`` in the process environment installs from that folder alone, without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
FROZEN = "frozen.txt"
MINIMUM = (3, 10)

_PROBE = """
import json, site, sys
from importlib import metadata
import torch
found = {}
for item in metadata.distributions():
    name = item.metadata["Name"]
    if name:
        found.setdefault(name, item.version)  # the first on sys.path is the one that imports
try:
    import triton
    kernel_compiler = triton.__version__
except ImportError:
    kernel_compiler = None
print("PROBE" + json.dumps({
    "torch": torch.__version__, "torch_file": torch.__file__, "triton": kernel_compiler,
    "packages": found, "path": [p for p in sys.path if p.endswith("-packages")],
}))
"""


class EnvironmentProblem(RuntimeError):
    """The environment cannot be made; the message names the remedy."""


def has_torch(python: str) -> bool:
    """Whether ``python`` has a torch at all, without the cost of importing it."""
    code = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torch') else 3)"
    return _quiet(python, code).returncode == 0


def probe(python: str) -> dict:
    """What ``python`` imports: torch's version and file, triton's version, all distributions.

    Raises EnvironmentProblem when torch is there and does not import: falling back to another
    torch would replace the vendor's silently.
    """
    done = _quiet(python, _PROBE)
    for line in done.stdout.splitlines():
        if line.startswith("PROBE"):
            return json.loads(line[len("PROBE") :])
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise EnvironmentProblem(
        f"{python} has torch, but importing it failed: {last}\n"
        "Load the vendor's environment first (on a DCU image: source /opt/dtk/env.sh), or choose "
        "a Python without torch: make PYTHON=/path/to/python3"
    )


def frozen_constraints(packages: dict[str, str]) -> str:
    """Constraint lines that hold every installed distribution at its version."""
    # The installer's tools may differ, and this project is what is being installed.
    skip = {"pip", "setuptools", "wheel", "fusion-evidence", "fusion_evidence"}
    lines = [f"{name}=={version}" for name, version in packages.items() if name not in skip]
    return "\n".join(sorted(lines, key=str.lower)) + "\n"


def create(target: Path, wheelhouse: str | None = None, extras: str = "dev") -> str:
    """Make or update ``target`` from the running Python and install this project there, editable.

    Returns one line saying what stands there. Raises EnvironmentProblem with the remedy.
    """
    python = sys.executable
    if sys.version_info[:2] < MINIMUM:
        raise EnvironmentProblem(
            f"{python} is Python {sys.version.split()[0]}; {MINIMUM[0]}.{MINIMUM[1]} or newer is "
            "needed: make PYTHON=/path/to/python3.11"
        )
    target = target.absolute()  # not resolve(): bin/python is a link out of the environment
    inner = str(target / "bin" / "python")
    frozen = target / FROZEN
    if Path(sys.prefix).resolve() == target.resolve():
        # Called from inside the environment itself (it is activated): nothing to make, only to
        # bring up to date, and what it saw outside when it was made still holds.
        shared = frozen.exists()
        _install(inner, frozen if shared else CONSTRAINTS, _request(extras, shared), wheelhouse)
        return "updated from inside"
    outer = probe(python) if has_torch(python) else None
    if not _reusable(target, outer is not None):
        if target.exists():
            shutil.rmtree(target)
        command = [python, "-m", "venv", str(target)]
        if outer:
            command.append("--system-site-packages")
            if "pip" in outer["packages"]:
                # A second pip would come with a second, older setuptools that hides the installed.
                command.append("--without-pip")
        _run(command)
    if not outer:
        _install(inner, CONSTRAINTS, _request(extras, shared=False), wheelhouse)
        return "plain environment with the versions of constraints.txt"
    _expose(target, outer["path"])
    frozen.write_text(frozen_constraints(outer["packages"]))
    _install(inner, frozen, _request(extras, shared=True), wheelhouse)
    _unchanged(outer, probe(inner))
    return (
        f"uses the installed torch {outer['torch']} and triton {outer['triton'] or 'none'}; "
        f"{len(outer['packages'])} packages held at their versions"
    )


def _request(extras: str, shared: bool) -> str:
    """What pip is asked for; the torch extra only where no torch is installed."""
    names = [name for name in ("" if shared else "torch", *extras.split(",")) if name]
    return f".[{','.join(names)}]" if names else "."


def _reusable(target: Path, shared: bool) -> bool:
    """Whether ``target`` works, has this Python's version, and is of the wanted case."""
    try:
        settings = (target / "pyvenv.cfg").read_text()
        done = _quiet(
            str(target / "bin" / "python"), "import pip, sys; print(sys.version_info[:2])"
        )
    except OSError:
        return False
    wanted = f"include-system-site-packages = {str(shared).lower()}"
    return wanted in settings and done.stdout.strip() == str(tuple(sys.version_info[:2]))


def _expose(target: Path, path: list[str]) -> None:
    """Let ``target`` see ``path`` where --system-site-packages does not reach.

    An environment made from another environment sees the base installation only, so the outer
    one's folders are added, with what their own .pth files name (develop-mode installs).
    """
    if sys.prefix == sys.base_prefix:
        return
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = target / "lib" / version / "site-packages"
    lines = [f"import site; site.addsitedir({folder!r})" for folder in path]
    (site / "_outer_environment.pth").write_text("\n".join(lines) + "\n")


def _install(python: str, constraints: Path, what: str, wheelhouse: str | None) -> None:
    command = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["-c", str(constraints)]
    if wheelhouse:
        command += ["--no-index", "--find-links", wheelhouse]
        # Offline there is no index to build an isolated environment from, so the tools must be
        # here: setuptools that makes wheels itself, or an older one with wheel.
        tools = "import setuptools.command.bdist_wheel"
        if (
            _quiet(python, tools).returncode
            and _quiet(python, "import setuptools, wheel").returncode
        ):
            _run([*command, "setuptools>=70.1"])
        command.append("--no-build-isolation")
    _run([*command, "-e", what])


def _unchanged(outer: dict, inner: dict) -> None:
    for key in ("torch", "torch_file", "triton"):
        if outer[key] != inner[key]:
            raise EnvironmentProblem(
                f"the new environment would replace {key}: {outer[key]} -> {inner[key]}"
            )


def _run(command: list[str]) -> None:
    print("+", " ".join(command), flush=True)
    if subprocess.run(command, cwd=ROOT).returncode:
        raise EnvironmentProblem(f"failed: {' '.join(command)}")


def _quiet(python: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="folder of the environment, made anew")
    parser.add_argument(
        "--extras", default="dev", help="extras besides torch, by commas (default: dev)"
    )
    options = parser.parse_args(argv)
    try:
        made = create(options.target, os.environ.get("WHEELHOUSE"), options.extras)
    except EnvironmentProblem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(f"environment: {options.target}: {made}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
