"""``fusion-evidence check-kernel package.module:function``: is a candidate right, and if not, why?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # `fusion-evidence --help` need not wait for torch
    from fusion_evidence.lib.measure.check_kernel import Finding

WRONG, ERROR = 1, 2


@click.command("check-kernel")
@click.argument("candidate", metavar="PACKAGE.MODULE:FUNCTION")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Default: what this machine has."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="That one check may take; one that takes longer hangs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check_kernel_command(candidate: str, device: str | None, seconds: float, as_json: bool) -> None:
    """Check a kernel of your own against the op's contract, in a process of its own.

    Its folder must be on PYTHONPATH. Exit status: 0 nothing fails, 1 something does, 2 there is no such
    kernel. What the symptoms mean: kernels/BRING_YOUR_OWN.md.
    """
    from fusion_evidence.lib.measure.check_kernel import check_kernel
    from fusion_evidence.lib.measure.machine import detect
    from fusion_evidence.lib.report.evidence import Verdict

    def show(finding: Finding) -> None:
        if not as_json:
            click.echo(f"{finding.check:25} {finding.verdict.value:21} {finding.symptom}")

    have = detect().device
    if device == "cuda" and have == "cpu":
        click.echo("error: there is no CUDA or ROCm device here", err=True)
        sys.exit(ERROR)
    try:
        found = check_kernel(candidate, device=device or have, seconds=seconds, report=show)
    except ValueError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ERROR)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found], indent=1))
    sys.exit(WRONG if any(finding.verdict is Verdict.FAIL for finding in found) else 0)
