"""``fusion-evidence pack``, ``verify`` and ``import``: a run that someone else can check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fusion_evidence.lib.report.archive_check import Verification

_ARCHIVE = click.argument("archive", type=click.Path(path_type=Path))
_STALE = click.option(
    "--stale", is_flag=True, help="Results of other sources than this checkout's too, as such."
)


@click.command("pack")
@click.argument("archive", metavar="OUT.zip", type=click.Path(path_type=Path))
@click.option("--machine", help="Machine whose results to pack; default: this one.")
@click.option(
    "--from",
    "results",
    type=click.Path(path_type=Path),
    help="Default: runs/<machine>, else data/runs/<machine>.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Notebook; repeatable.")
@_STALE
@click.option("--replace", is_flag=True, help="Overwrite the archive.")
def pack_command(
    archive: Path,
    machine: str | None,
    results: Path | None,
    only: tuple[str, ...],
    stale: bool,
    replace: bool,
) -> None:
    """Make one archive of a machine's verified run, for somebody else to check.

    On the machine that ran, it also compiles the kernel and adds its assembly, the clocks and the
    versions of what is installed.
    """
    from fusion_evidence.lib import batch, paths
    from fusion_evidence.lib.measure import machine as machine_module
    from fusion_evidence.lib.report import packing

    here = machine_module.detect()
    name = machine or here.name
    folders = [results] if results else [paths.RUNS / name, paths.ACCEPTED / name]
    notebooks = batch.select_notebooks(paths.NOTEBOOKS, only)
    having = [
        one for one in folders if any((one / f"{path.stem}.json").exists() for path in notebooks)
    ]
    if not having:
        raise batch.BatchError(f"no results in {' or '.join(map(str, folders))}")
    result = packing.pack(
        notebooks,
        having[0],
        archive,
        here=here,
        machine=machine,
        stale=stale,
        replace=replace,
        report=click.echo,
    )
    click.echo(f"{archive}: made from {having[0]}")
    _say(result, stale=stale, short=True)


@click.command("verify")
@_ARCHIVE
@_STALE
def verify_command(archive: Path, stale: bool) -> None:
    """Check somebody's archive here: no device is needed, and no code of it runs.

    Exit status: 0 when nothing is wrong, 2 otherwise. A result of other sources than this
    checkout's is wrong too, unless --stale allows it.
    """
    from fusion_evidence.lib.report import archive_check

    result = archive_check.verify(archive)
    click.echo(archive_check.NOT_PROVED)
    _say(result, stale=stale)


@click.command("import")
@_ARCHIVE
@click.option("--as", "name", metavar="NAME", help="Folder name; default: the archive's machine.")
@_STALE
@click.option("--replace", is_flag=True, help="Move results that are there already to runs/.")
def import_command(archive: Path, name: str | None, stale: bool, replace: bool) -> None:
    """Verify somebody's archive and put it into data/runs, marked as handed in."""
    from fusion_evidence.lib import paths
    from fusion_evidence.lib.report import handed_in

    result, folder = handed_in.import_archive(
        archive, paths.ACCEPTED, name=name, stale=stale, replace=replace
    )
    _say(result, stale=stale, short=True)
    click.echo(f"{folder}: {handed_in.HANDED_IN}")


def _say(result: Verification, *, stale: bool, short: bool = False) -> None:
    """Print the examinations (``short``: those that found something), and leave if it is not
    verified."""
    from fusion_evidence.lib.report.archive_check import printable

    for check in result.checks:
        if not short or check.status != "OK":
            click.echo(str(check))
    passed = result.accepted(stale)
    click.echo(
        f"{'verified' if passed else 'NOT verified'}: {len(result.checks)} examinations, "
        f"{len(result.failed)} failed, {len(result.stale)} stale"
    )
    if result.archive:
        manifest = result.archive.manifest
        dirty = ", with local changes" if manifest.dirty else ""
        of = f"{manifest.machine}: {len(manifest.notebooks)} notebooks, packed {manifest.created}"
        click.echo(printable(f"{of} at {manifest.commit}{dirty}"))
        for what, why in manifest.absent.items():
            click.echo(printable(f"  without {what}: {why}"))
        click.echo(f"sha256 {result.archive.sha256}")
    if not passed:
        raise SystemExit(2)
