"""``fusion-evidence sweep grid.yaml``: a grid of notebooks, here or in a Slurm array."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("sweep")
@click.argument("grid", type=click.Path(path_type=Path))
@click.option("--gather", is_flag=True, help="Only gather what there is.")
def sweep_command(grid: Path, gather: bool) -> None:
    """Run the points of GRID that are not verified yet, then gather all in one table and plots.

    GRID is a YAML file as data/parameters/sweep-example.yaml is; results go to
    runs/sweeps/<its name>. Exit status: 0 every point is verified, 1 one is not, 2 the grid cannot
    be run.
    """
    from fusion_evidence.lib.sweep import sweep

    raise SystemExit(sweep(grid, gather_only=gather, report=click.echo))
