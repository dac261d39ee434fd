"""``fusion-evidence publish``."""

from __future__ import annotations

from pathlib import Path

import click

from fusion_evidence.lib import paths


@click.command("publish")
@click.option("--out", type=click.Path(path_type=Path), help="Default: build/site.")
@click.option(
    "--from", "accepted", type=click.Path(path_type=Path), help="Results; default: data/runs."
)
@click.option("--only", multiple=True, metavar="MACHINE", help="Only this machine; repeatable.")
@click.option(
    "--skip-stale", is_flag=True, help="Leave out what would not be accepted today, and say so."
)
def publish_command(
    out: Path | None, accepted: Path | None, only: tuple[str, ...], skip_stale: bool
) -> None:
    """Build the static site from accepted, fresh results."""
    from fusion_evidence.lib.report.publish import publish

    publish(
        out or paths.ROOT / "build" / "site",
        accepted or paths.ACCEPTED,
        only=only,
        skip_stale=skip_stale,
        report=click.echo,
    )
