"""The recorder: how a notebook writes down what it measured and what it concludes.

    book = Recorder.open("01_primitive_benchmark", globals())
    book.declare("bits/reference", rule="0 mismatching elements in all six outputs at every T")
    book.verdict_box()
    book.measure("time", 2.11, unit="us", n=200, method="CUDA-graph replay", impl="fused", T=1)
    book.conclude("bits/reference", Verdict.PASS, why="0 of 25,165,824 elements differ")
    book.gated("speedup", 4.8, requires="bits/reference", over="compiled", T=1)
    book.finish()

Every record is on disk when its call returns, so that a killed notebook keeps what it had.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, MutableMapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from fusion_evidence.lib import paths
from fusion_evidence.lib.measure import machine as machine_module
from fusion_evidence.lib.parameters import (
    Parameter,
    check_namespace,
    read_parameters,
    take_profile,
)
from fusion_evidence.lib.report.box import box_html, claim_title
from fusion_evidence.lib.report.evidence import (
    Claim,
    Evidence,
    Measurement,
    Scalar,
    Verdict,
    evidence_path,
    freshness_hash,
    results_folder,
    revision,
    write_evidence,
)

#: The last cell shows this MIME type with the run's id: the sign that it was reached.
SENTINEL = "application/vnd.fusion-evidence.finished+json"

_NOT_FINISHED = "not finished"


class Recorder:
    """Evidence under way; made by `Recorder.open`."""

    def __init__(self, evidence: Evidence, path: Path, namespace: Mapping[str, Any]) -> None:
        self.evidence = evidence
        self.path = path
        self._namespace = namespace
        self._box_id = f"verdicts-{evidence.run_id}"
        self._box_shown = False
        self._recorded_in: dict[tuple[Any, ...], int] = {}
        self._save()

    @classmethod
    def open(cls, notebook: str, namespace: MutableMapping[str, Any]) -> Recorder:
        """Check the notebook's parameters and start its evidence anew.

        ``notebook`` is the file's name without ``.ipynb``; ``namespace`` its ``globals()``. Opened
        by hand, a notebook gets this machine's profile, as under the runner, and says so. Raises
        ParameterError for a value that does not fit its annotation and for a name that papermill
        passed but the notebook does not have; FileNotFoundError when there is no such notebook.
        """
        source = paths.NOTEBOOKS / f"{notebook}.ipynb"
        if not source.is_file():
            raise FileNotFoundError(f"no notebook {source.name} in {source.parent}")
        machine, declared = machine_module.detect(), read_parameters(source)
        if not os.environ.get("FUSION_EVIDENCE_RUN_DIR"):  # which the runner has done
            _take_profile(machine.profile, notebook, declared, namespace)
        parameters = check_namespace(declared, namespace)
        commit, dirty = revision()
        evidence = Evidence(
            notebook=notebook,
            run="incomplete",
            reason=_NOT_FINISHED,
            run_id=uuid.uuid4().hex,
            started=_now(),
            machine=machine,
            kernel=_kernel(),
            commit=commit,
            dirty=dirty,
            seed=parameters.get("seed"),
            parameters=parameters,
            fingerprint=freshness_hash(source, parameters),
        )
        return cls(evidence, evidence_path(results_folder(machine.name), notebook), namespace)

    def declare(self, claim: str, arm: str | None = None, *, rule: str) -> None:
        """State a claim and the rule that decides it, before anything is measured.

        Declared again with another rule, the claim loses its verdict.
        """
        declared = Claim(claim=claim, arm=arm, rule=rule)
        for index, known in enumerate(self.evidence.claims):
            if (known.claim, known.arm) == (claim, arm):
                if known.rule != rule:
                    self.evidence.claims[index] = declared
                break
        else:
            self.evidence.claims.append(declared)
        self._changed()
        self._show_box(update=True)

    def measure(
        self,
        metric: str,
        value: Any,
        *,
        unit: str | None = None,
        n: int | None = None,
        low: float | None = None,
        high: float | None = None,
        method: str | None = None,
        note: str | None = None,
        not_comparable: str | None = None,
        **labels: Any,
    ) -> None:
        """Record one value: a number, a text or None, also as a NumPy or torch scalar.

        A cell that runs again replaces what it recorded; the same metric and labels twice in one
        run of a cell raise ValueError, because one of the two would be lost. ``speedup`` and
        ``saving`` raise ValueError: they go through `gated`.
        """
        if _needs_gate(metric):
            raise ValueError(f"{metric} needs a passed claim: use gated(..., requires=...)")
        self._record(
            Measurement(
                metric=metric,
                labels={key: _plain(key, label) for key, label in labels.items()},
                value=_plain(metric, value),
                unit=unit,
                n=_plain("n", n),
                low=_plain("low", low),
                high=_plain("high", high),
                method=method,
                note=note,
                not_comparable=not_comparable,
            )
        )

    def gated(
        self,
        metric: str,
        value: Any,
        *,
        requires: str | tuple[str, str],
        unit: str | None = None,
        n: int | None = None,
        low: float | None = None,
        high: float | None = None,
        method: str | None = None,
        note: str | None = None,
        **labels: Any,
    ) -> bool:
        """Record a speedup or a saving, if the claim it rests on has passed.

        ``requires`` is a claim, or (claim, arm). Otherwise the value is left out, the reason
        recorded as ``not_comparable``, and False returned. Raises ValueError for an undeclared
        claim.
        """
        claim = self._declared(*((requires, None) if isinstance(requires, str) else requires))
        passed = claim.verdict.passed
        self._record(
            Measurement(
                metric=metric,
                labels={key: _plain(key, label) for key, label in labels.items()},
                value=_plain(metric, value) if passed else None,
                unit=unit,
                n=_plain("n", n),
                low=_plain("low", low) if passed else None,
                high=_plain("high", high) if passed else None,
                method=method,
                note=note,
                not_comparable=None
                if passed
                else f"{claim.claim} is {claim.verdict.value}: {claim.why}",
            )
        )
        return passed

    def conclude(
        self, claim: str, verdict: Verdict | str, why: str, *, arm: str | None = None
    ) -> None:
        """Give a declared claim its verdict, with the figures that decide it.

        Raises ValueError for a claim that was not declared.
        """
        declared = self._declared(claim, arm)
        declared.verdict = Verdict(verdict)
        declared.why = why
        self._changed()
        self._show_box(update=True)

    def verdict_box(self) -> None:
        """Show the claims here, and keep the display up to date until `finish`."""
        self._box_shown = True
        self._show_box(update=False)

    def finish(self) -> None:
        """Close the evidence; belongs in the last cell. Claims without a verdict are NOT_RUN."""
        self.evidence.run = "complete"
        self.evidence.reason = None
        self.evidence.finished = _now()
        self._save()
        self._show_box(update=True)
        _show(
            {
                SENTINEL: {"notebook": self.evidence.notebook, "run_id": self.evidence.run_id},
                "text/plain": f"{self.evidence.notebook} finished: {self.evidence.tally()}",
            }
        )

    def frame(self, metric: str | None = None, **labels: Scalar) -> pd.DataFrame:
        """What was measured so far, as a table; see `Evidence.frame`."""
        return self.evidence.frame(metric, **labels)

    def _declared(self, name: str, arm: str | None) -> Claim:
        for claim in self.evidence.claims:
            if (claim.claim, claim.arm) == (name, arm):
                return claim
        declared = ", ".join(claim_title(claim) for claim in self.evidence.claims) or "none"
        asked = claim_title(Claim(claim=name, arm=arm, rule=""))
        raise ValueError(f"claim {asked} was not declared; declared: {declared}")

    def _record(self, measurement: Measurement) -> None:
        key = (measurement.metric, *sorted(measurement.labels.items()))
        cell = len(self._namespace.get("In", ()))
        if self._recorded_in.get(key) == cell:
            raise ValueError(
                f"{measurement.metric} {measurement.labels} is recorded twice: "
                "its labels must tell it apart"
            )
        measurements = self.evidence.measurements
        if key in self._recorded_in:
            same = (measurement.metric, measurement.labels)
            index = [(m.metric, m.labels) for m in measurements].index(same)
            measurements[index] = measurement
        else:
            measurements.append(measurement)
        self._recorded_in[key] = cell
        self._changed()

    def _changed(self) -> None:
        # Also after finish(), when somebody runs a cell again: only finish() completes a run.
        self.evidence.run = "incomplete"
        self.evidence.reason = _NOT_FINISHED
        self._save()

    def _save(self) -> None:
        write_evidence(self.path, self.evidence)

    def _show_box(self, *, update: bool) -> None:
        if self._box_shown:
            plain = "\n".join(
                f"{claim.verdict.value}: {claim_title(claim)}: {claim.why}"
                for claim in self.evidence.claims
            )
            bundle = {"text/html": box_html(self.evidence), "text/plain": plain or "no claims yet"}
            _show(bundle, display_id=self._box_id, update=update)


def _show(bundle: dict[str, Any], **options: Any) -> None:
    if InteractiveShell.initialized():
        display(bundle, raw=True, **options)


def _needs_gate(metric: str) -> bool:
    return metric.split("_")[0] in ("speedup", "saving")


def _plain(name: str, value: Any) -> Any:
    """A NumPy or torch scalar as Python's own."""
    if hasattr(value, "item"):
        value = value.item()
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"{name}: expected a number, a text or None, got {type(value).__name__}")
    return value


def _kernel() -> str:
    """The Python that runs this notebook, relative to the repository when it lies inside."""
    executable = Path(sys.executable)
    if executable.is_relative_to(paths.ROOT):
        return executable.relative_to(paths.ROOT).as_posix()
    return executable.as_posix()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _take_profile(
    profile: str,
    notebook: str,
    declared: Mapping[str, Parameter],
    namespace: MutableMapping[str, Any],
) -> None:
    file = paths.PARAMETERS / f"{profile}.yaml"
    values = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if put := take_profile(declared, namespace, values.get(notebook) or {}):
        given = ", ".join(f"{name} = {value!r}" for name, value in put.items())
        print(f"From {file.name}, for what the parameters cell leaves at its default: {given}")
