"""What a notebook leaves behind: one JSON file of measurements and claims.

Everything the collection publishes is read from these files. A notebook reads an earlier one
through `load_evidence`, which answers with NOT_RUN, not with an error, when there is none.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fusion_evidence.lib import paths
from fusion_evidence.lib.measure import machine as machine_module
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.notebook import read_cells

Scalar = bool | int | float | str | None


class Verdict(str, Enum):
    """The outcome of a claim; PASS means that the claim as stated holds."""

    PASS = "PASS"
    PASS_WITH_LIMITATIONS = "PASS_WITH_LIMITATIONS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_RUN = "NOT_RUN"

    @property
    def passed(self) -> bool:
        """PASS, with or without limitations."""
        return self in (Verdict.PASS, Verdict.PASS_WITH_LIMITATIONS)


class Measurement(BaseModel):
    """One value. ``metric`` and ``labels`` together identify it."""

    model_config = ConfigDict(extra="forbid")

    metric: str
    labels: dict[str, Scalar] = {}
    value: Scalar
    unit: str | None = None
    n: int | None = None  #: samples or elements behind the value
    low: float | None = None  #: interval, as ``method`` defines it
    high: float | None = None
    method: str | None = None
    note: str | None = None
    #: Why the value must not be compared with others; None when it may be.
    not_comparable: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_finite(cls, fields: Any) -> Any:
        """JSON has no NaN and no infinity: store None and say so in the note."""
        if not isinstance(fields, dict):
            return fields
        fields = dict(fields)
        for name in ("value", "low", "high"):
            number = fields.get(name)
            if isinstance(number, float) and not math.isfinite(number):
                fields[name] = None
                note = fields.get("note")
                fields["note"] = f"{note}; {name} was {number}" if note else f"{name} was {number}"
        labels = fields.get("labels")
        if isinstance(labels, dict):  # else it is refused as what it is
            fields["labels"] = {
                key: str(label) if isinstance(label, float) and not math.isfinite(label) else label
                for key, label in labels.items()
            }
        return fields


class Claim(BaseModel):
    """A statement with its rule, fixed before the run, and its verdict."""

    model_config = ConfigDict(extra="forbid")

    claim: str
    arm: str | None = None
    rule: str
    verdict: Verdict = Verdict.NOT_RUN
    why: str = "not reached"


class Evidence(BaseModel):
    """The result file of one notebook."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    notebook: str
    run: Literal["complete", "incomplete", "not_run"]
    reason: str | None = None  #: why the run is not complete
    run_id: str | None = None  #: also in the last cell's output of the executed notebook
    started: str | None = None  #: ISO 8601, UTC
    finished: str | None = None
    machine: Machine | None = None
    kernel: str | None = None  #: the Python that ran the notebook
    commit: str | None = None
    dirty: bool | None = None  #: uncommitted changes in what determines a result
    seed: int | None = None
    parameters: dict[str, Any] = {}
    #: What the result depends on: see `freshness_hash`.
    fingerprint: str | None = None
    measurements: list[Measurement] = Field(default_factory=list)
    claims: list[Claim] = Field(default_factory=list)

    def claim(self, name: str, arm: str | None = None) -> Claim:
        """The claim of that name and arm; a NOT_RUN one when the file has none."""
        for claim in self.claims:
            if (claim.claim, claim.arm) == (name, arm):
                return claim
        why = self.reason or "not declared"
        return Claim(claim=name, arm=arm, rule="", verdict=Verdict.NOT_RUN, why=why)

    def select(self, metric: str | None = None, **labels: Scalar) -> list[Measurement]:
        """The measurements of a metric that carry all of these labels."""
        return [
            m
            for m in self.measurements
            if metric in (None, m.metric)
            and all(key in m.labels and m.labels[key] == value for key, value in labels.items())
        ]

    def value(self, metric: str, **labels: Scalar) -> Scalar:
        """The one value with these labels; None when there is none.

        Raises ValueError when several measurements match.
        """
        found = self.select(metric, **labels)
        if len(found) > 1:
            raise ValueError(f"{len(found)} measurements of {metric} match {labels}")
        return found[0].value if found else None

    def frame(self, metric: str | None = None, **labels: Scalar) -> pd.DataFrame:
        """`select` as a table: one row per measurement, one column per label."""
        rows = [
            {"metric": m.metric, **m.labels, **m.model_dump(exclude={"metric", "labels"})}
            for m in self.select(metric, **labels)
        ]
        return pd.DataFrame(rows)

    def tally(self) -> str:
        """The claims counted by verdict, for example ``3 PASS, 1 FAIL``."""
        verdicts = [claim.verdict for claim in self.claims]
        counts = [f"{verdicts.count(v)} {v.value}" for v in Verdict if v in verdicts]
        return ", ".join(counts) or "no claims"


def evidence_path(folder: Path, notebook: str) -> Path:
    """The result file of a notebook in ``folder``."""
    return folder / f"{notebook}.json"


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8, with the line ends that ``text`` has."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: a reader, or a full disk, never leaves half of it.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def write_evidence(path: Path, evidence: Evidence) -> None:
    """Write a result file atomically; always valid JSON."""
    document = evidence.model_dump(mode="json")
    write_text(path, json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_evidence(path: Path) -> Evidence:
    """Read one result file. A missing or damaged one gives ``run="not_run"`` with the reason."""
    try:
        return Evidence.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = f"no result on this machine ({path.parent.name})"
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        detail = str(error).splitlines()[0]
        reason = f"{path.parent.name}/{path.name} is not readable: {detail}"
    return Evidence(notebook=path.stem, run="not_run", reason=reason)


def results_folder(machine: str) -> Path:
    """Where results are being written: the running batch's folder, else ``runs/<machine>``."""
    return Path(os.environ.get("FUSION_EVIDENCE_RUN_DIR") or paths.RUNS / machine)


def load_evidence(notebook: str, machine: str | None = None) -> Evidence:
    """The result of a notebook on a machine (default: this one), from the runs, else the accepted.

    A complete and fresh result is preferred; a stale or incomplete one is returned when there is
    nothing better (ask `is_fresh`), and ``run="not_run"`` with the reason when there is nothing.
    """
    name = machine or machine_module.detect().name
    current = results_folder(name) if machine is None else paths.RUNS / name
    found = [read_evidence(evidence_path(f, notebook)) for f in (current, paths.ACCEPTED / name)]
    for evidence in found:
        if evidence.run == "complete" and is_fresh(evidence):
            return evidence
    return next((evidence for evidence in found if evidence.run != "not_run"), found[0])


# --- freshness ----------------------------------------------------------------------------------

#: Modules of `lib` whose text cannot change a result.
_NO_EFFECT = re.compile(
    r"lib\.(report\.(plots\w*|box|card|publish)|publish|cli|batch|executor|doctor)\b"
)
_FOLDERS = {
    "lib": Path(__file__).resolve().parents[1],
    "kernels": Path(__file__).resolve().parents[2] / "kernels",
}
_PACKAGE = "fusion_evidence"


def source_hashes(notebook: Path) -> dict[str, str]:
    """SHA-256, by name, of each source that a result of this notebook depends on.

    That is ``notebook``, the text of its cells, and the ``kernels`` and ``lib`` modules it imports
    (transitively; a module named in a string, as one started by ``python -m``, counts too) except
    those that only draw, publish or run.
    """
    code = [cell.source for cell in read_cells(notebook) if cell.kind == "code"]
    modules = _imported_sources(code).items()
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in modules}
    return {"notebook": cells_hash(notebook)} | hashes


def cells_hash(notebook: Path) -> str:
    """SHA-256 of the text of a notebook's cells, without the one that papermill injects."""
    cells = [(cell.kind, cell.source) for cell in read_cells(notebook)]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def fingerprint(sources: Mapping[str, str], parameters: Mapping[str, Any]) -> str:
    """Hash of all that a result depends on: its sources, by their hashes, and its parameters."""
    document = json.dumps([dict(sources), dict(parameters)], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def freshness_hash(notebook: Path, parameters: dict[str, Any]) -> str:
    """`fingerprint` of a result that this notebook would give now."""
    return fingerprint(source_hashes(notebook), parameters)


def is_fresh(evidence: Evidence, notebooks: Path | None = None) -> bool:
    """Whether the notebook and the modules are still those that gave this result."""
    source = (notebooks or paths.NOTEBOOKS) / f"{evidence.notebook}.ipynb"
    if evidence.fingerprint is None or not source.is_file():
        return False
    return evidence.fingerprint == freshness_hash(source, evidence.parameters)


def _imported_sources(code: Iterable[str]) -> dict[str, str]:
    """Module name -> text of every module of this package reached from pieces of code."""
    found: dict[str, str] = {}
    pending = [name for source in code for name in _named_modules(_without_magics(source), "")]
    while pending:
        name = pending.pop()
        if name in found or _NO_EFFECT.match(name):
            continue
        file = _module_file(name)
        if file is None:
            continue
        found[name] = file.read_text(encoding="utf-8")
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        pending += _named_modules(found[name], package)
        pending += [name.rpartition(".")[0]] if "." in name else []
    return found


def _without_magics(source: str) -> str:
    """A cell's source without IPython's ``%`` and ``!`` lines, which are not Python."""
    return "\n".join("" if re.match(r"\s*[%!?]", line) else line for line in source.splitlines())


@functools.cache  # a sweep or a site asks for the same modules many times
def _named_modules(source: str, package: str) -> tuple[str, ...]:
    """Names below this package that a piece of code imports or spells, for example ``lib.paths``.

    ``package`` resolves relative imports. A name may turn out to be no module (``lib.paths.ROOT``).
    """
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = f"{_PACKAGE}.{package}".split(".")
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, *([base] if base else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(rf"\b{_PACKAGE}(?:\.\w+)+", node.value)
    return tuple(n.removeprefix(f"{_PACKAGE}.") for n in names if n.startswith(f"{_PACKAGE}."))


def _module_file(name: str) -> Path | None:
    top, *rest = name.split(".")
    if top not in _FOLDERS:
        return None
    base = _FOLDERS[top].joinpath(*rest)
    candidates = (base / "__init__.py", base.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


# --- revision -----------------------------------------------------------------------------------


def revision() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the repository; (None, None) where there is no git.

    ``FUSION_EVIDENCE_COMMIT`` and ``FUSION_EVIDENCE_DIRTY`` (0 or 1) name them on a machine that
    has the files without their history. Dirty looks only at what determines a result.
    """
    if commit := os.environ.get("FUSION_EVIDENCE_COMMIT"):
        dirty = os.environ.get("FUSION_EVIDENCE_DIRTY")
        return commit, None if dirty in (None, "") else dirty == "1"
    try:
        commit = _git("rev-parse", "HEAD")
        return commit, bool(
            _git("status", "--porcelain", "--", "kernels", "lib", "notebooks", "data/parameters")
        )
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(paths.ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
