"""The verdict box: the claims of a notebook as HTML. It draws only, so freshness ignores it."""

from __future__ import annotations

import html

from fusion_evidence.lib.report.evidence import Claim, Evidence, Verdict

#: White text reads on each of these.
COLOURS = {
    Verdict.PASS: "#1a7f37",
    Verdict.PASS_WITH_LIMITATIONS: "#7d5a00",
    Verdict.FAIL: "#b3261e",
    Verdict.INCONCLUSIVE: "#6b3fa0",
    Verdict.NOT_RUN: "#57606a",
}


def box_html(evidence: Evidence) -> str:
    """The claims as HTML. Text takes the page's colour, so it reads on dark and on light."""
    state = "" if evidence.run == "complete" else "&ensp;·&ensp;running"
    machine = html.escape(evidence.machine.device_name) if evidence.machine else ""
    rows = "".join(
        '<div style="padding:.45em 0;border-top:1px solid rgba(128,128,128,.35)">'
        f'<span style="background:{COLOURS[claim.verdict]};color:#fff;border-radius:.3em;'
        f'padding:.1em .5em;font-size:.8em;font-weight:600">{claim.verdict.value}</span> '
        f"<b>{html.escape(claim_title(claim))}</b>: {html.escape(claim.why)}"
        f'<div style="opacity:.75;font-size:.85em">Rule: {html.escape(claim.rule)}</div></div>'
        for claim in evidence.claims
    )
    return (
        '<div style="border:1px solid rgba(128,128,128,.5);border-radius:.5em;padding:.6em 1em;'
        'max-width:60em;color:inherit;background:transparent;line-height:1.45">'
        f'<div style="padding-bottom:.4em"><b>Verdicts</b>&ensp;·&ensp;{machine}{state}</div>'
        f"{rows}</div>"
    )


def claim_title(claim: Claim) -> str:
    """A claim's name, with its arm in brackets."""
    return f"{claim.claim} [{claim.arm}]" if claim.arm else claim.claim
