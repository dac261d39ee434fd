"""The command ``fusion-evidence``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from fusion_evidence.lib import paths
from fusion_evidence.lib.archive_cli import import_command, pack_command, verify_command
from fusion_evidence.lib.card_cli import card_command
from fusion_evidence.lib.check_kernel_cli import check_kernel_command
from fusion_evidence.lib.graph.finder_cli import find_command
from fusion_evidence.lib.publish_cli import publish_command
from fusion_evidence.lib.sweep_cli import sweep_command
from fusion_evidence.lib.vllm_cpu_cli import vllm_cpu_command


class _Group(click.Group):
    """Shows a BatchError as one line."""

    def invoke(self, context: click.Context) -> Any:
        from fusion_evidence.lib.batch import BatchError

        try:
            return super().invoke(context)
        except BatchError as error:
            click.echo(f"error: {error}", err=True)
            context.exit(2)


_ONLY = click.option(
    "--only", multiple=True, metavar="NAME", help="Notebook, or the start of its name; repeatable."
)


@click.group(cls=_Group)
@click.version_option(package_name="fusion-evidence")
def main() -> None:
    """Does a fused kernel survive the whole model, and if not, which bit changed first?"""


@main.command()
@click.option(
    "--profile",
    type=click.Choice(["cpu", "cuda", "dcu"]),
    help="What to run with; default: what this machine has.",
)
@_ONLY
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Parameter of every selected notebook that has it, or 01.NAME=VALUE; repeatable.",
)
@click.option("--resume", is_flag=True, help="Keep verified results, run only the others.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Results folder; default: runs/<machine>."
)
@click.option("--commit", help="Commit to record where there is no .git.")
@click.option("--dirty/--clean", default=None, help="With --commit: were there local changes?")
def run(
    profile: str | None,
    only: tuple[str, ...],
    settings: tuple[str, ...],
    resume: bool,
    out: Path | None,
    commit: str | None,
    dirty: bool | None,
) -> None:
    """Execute the notebooks and verify what they leave."""
    if profile == "cpu":  # before torch looks for devices
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    if commit:
        os.environ["FUSION_EVIDENCE_COMMIT"] = commit
        os.environ["FUSION_EVIDENCE_DIRTY"] = "" if dirty is None else str(int(dirty))
    elif dirty is not None:
        raise click.UsageError("--dirty and --clean need --commit")

    from fusion_evidence.lib import batch
    from fusion_evidence.lib.measure import machine as machine_module

    notebooks = batch.select_notebooks(paths.NOTEBOOKS, only)
    machine = machine_module.detect()
    chosen = batch.check_profile(profile, machine)
    results = out or paths.RUNS / machine.name
    click.echo(f"{machine.device_name}, profile {chosen}: {len(notebooks)} notebooks -> {results}")
    status = batch.run(
        notebooks,
        results,
        profile_file=paths.PARAMETERS / f"{chosen}.yaml",
        settings=settings,
        resume=resume,
        report=click.echo,
    )
    raise SystemExit(status)


@main.command()
@_ONLY
@click.option("--machine", help="Machine whose results to accept; default: this one.")
@click.option("--from", "results", type=click.Path(path_type=Path), help="Default: runs/<machine>.")
def accept(only: tuple[str, ...], machine: str | None, results: Path | None) -> None:
    """Copy verified results to data/runs/<machine>."""
    from fusion_evidence.lib import batch
    from fusion_evidence.lib.measure import machine as machine_module

    name = machine or machine_module.detect().name
    notebooks = batch.select_notebooks(paths.NOTEBOOKS, only)
    raise SystemExit(
        batch.accept(notebooks, results or paths.RUNS / name, paths.ACCEPTED, report=click.echo)
    )


@main.command()
@click.option("--quick", is_flag=True, help="The short examination: minutes.")
def doctor(quick: bool) -> None:
    """Say what this machine can run, what not, and why."""
    from fusion_evidence.lib.doctor import doctor as examine

    raise SystemExit(examine(quick))


main.add_command(card_command)
main.add_command(check_kernel_command)
main.add_command(find_command)
main.add_command(import_command)
main.add_command(pack_command)
main.add_command(publish_command)
main.add_command(sweep_command)
main.add_command(verify_command)
main.add_command(vllm_cpu_command)

if __name__ == "__main__":
    main()
