"""Results for tests: small notebooks of their own, and evidence on any machine in any state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion_evidence.lib import paths
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.report.evidence import (
    Claim,
    Evidence,
    Measurement,
    evidence_path,
    freshness_hash,
    write_evidence,
)

NAMES = (
    "01_primitive_benchmark",
    "02_trace_specialization",
    "03_custom_op_fallback",
    "04_text_regression",
    "05_drift_attribution",
    "06_bit_exact_integration",
)


def machine(name: str) -> Machine:
    """A machine of that name: a CPU, or any GPU."""
    profile = "cpu" if name == "cpu" else "cuda"
    return Machine(
        name=name,
        profile=profile,
        device=profile,
        device_name=f"the {name}",
        arch="arch",
        cpu_cores=2,
        versions={"torch": "2.11.0"},
    )


def place(
    notebook: str,
    on: str,
    verdicts: dict[str, str] | None = None,
    measured: list[Measurement] | None = None,
    *,
    folder: Path | None = None,
    whys: dict[str, str] | None = None,
    **fields: Any,
) -> Evidence:
    """Write the complete, fresh result of a notebook on a machine; ``fields`` change it.

    ``verdicts``: by claim, or by ``claim/arm``; its reason is in ``whys``, else "as measured".
    """
    claims = []
    for name, verdict in (verdicts or {}).items():
        claim, _, arm = name.partition("/")
        why = (whys or {}).get(name, "as measured")
        claims.append(Claim(claim=claim, arm=arm or None, rule="a rule", verdict=verdict, why=why))
    known: dict[str, Any] = dict(
        notebook=notebook,
        run="complete",
        run_id=f"run of {notebook}",
        finished="2026-01-01T00:00:00+00:00",
        machine=machine(on),
        commit="0123456789abcdef",
        claims=claims,
        measurements=measured or [],
    )
    evidence = Evidence(**(known | fields))
    if "fingerprint" not in fields:
        source = paths.NOTEBOOKS / f"{notebook}.ipynb"
        evidence.fingerprint = freshness_hash(source, evidence.parameters)
    write_evidence(evidence_path(folder or paths.ACCEPTED / on, notebook), evidence)
    return evidence
