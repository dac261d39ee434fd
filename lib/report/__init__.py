"""Evidence: what a notebook measured and concluded, and how it is read back."""

from fusion_evidence.lib.report.evidence import (
    Claim,
    Evidence,
    Measurement,
    Verdict,
    is_fresh,
    load_evidence,
)
from fusion_evidence.lib.report.recorder import Recorder

__all__ = [
    "Claim",
    "Evidence",
    "Measurement",
    "Recorder",
    "Verdict",
    "is_fresh",
    "load_evidence",
]
