"""Publish: accepted, fresh results as a static site that needs no network. Nothing is executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fusion_evidence.lib import paths
from fusion_evidence.lib.batch import BatchError
from fusion_evidence.lib.report.site.build import (
    build,
    check_target,
    check_tools,
    replace,
    workspace,
)
from fusion_evidence.lib.report.site.collect import MachineResults, collect


def publish(
    out: Path,
    accepted: Path,
    *,
    notebooks: Path = paths.NOTEBOOKS,
    root: Path = paths.ROOT,
    only: Sequence[str] = (),
    skip_stale: bool = False,
    report: Callable[[str], None] = print,
) -> list[MachineResults]:
    """Build the site of the results under ``accepted`` and put it at ``out``, whole or not at all.

    ``only`` limits it to machines. ``skip_stale`` leaves out what `accept` would refuse today, and
    the summary says so. ``root`` is the repository that README and guides are taken from.

    Raises BatchError, and leaves an earlier site as it was, when a result is stale, unverified or
    corrupt (with what to run again), when ``out`` is no site, when Sphinx is not installed or warns,
    and when the disk is full.
    """
    check_tools()
    check_target(out)
    machines = collect(accepted, notebooks, only=only, skip_stale=skip_stale)
    from fusion_evidence.lib.report.site.sources import Sources  # its libraries are an extra

    try:
        with workspace(out) as folder:
            sources = Sources(root, machines, folder)
            sources.write()
            build(sources.tree, sources.extra, folder / "site")
            replace(folder / "site", out)
    except OSError as error:
        where = error.filename or out
        raise BatchError(
            f"cannot write {where}: {error.strerror or error}; nothing changed"
        ) from error
    for machine in machines:
        shown = ", ".join(page.notebook[:2] for page in machine.pages) or "nothing"
        left = f"; left out: {', '.join(machine.left_out)}" if machine.left_out else ""
        report(f"{machine.name}: {shown}{left}")
    report(f"site: {out / 'index.html'}")
    return machines
