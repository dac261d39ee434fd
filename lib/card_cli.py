"""``fusion-evidence card``: a machine's evidence card as Markdown, or as files."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("card")
@click.option("--machine", required=True, metavar="NAME", help="A folder of data/runs, or of runs.")
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True)
@click.option(
    "--from",
    "results",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Results folder; default: data/runs/<machine>, else runs/<machine>.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write card-en.md, card-zh.md and card.json there; default: print the Markdown.",
)
def card_command(machine: str, lang: str, results: Path | None, out: Path | None) -> None:
    """Print what a machine's results show, the published figures beside them."""
    from fusion_evidence.lib import paths
    from fusion_evidence.lib.batch import BatchError
    from fusion_evidence.lib.report import card

    known = sorted(
        {f.parent.name for place in (paths.ACCEPTED, paths.RUNS) for f in place.glob("*/*.json")}
    )
    if results is None and machine not in known:
        raise BatchError(f"no results of {machine}; there are {', '.join(known) or 'none'}")
    where = [results] if results else None
    if out is None:
        click.echo(card.card(machine, "zh" if lang == "zh" else "en", where), nl=False)
        return
    try:
        for path in card.write(machine, out, where):
            click.echo(path)
    except OSError as error:
        raise BatchError(f"cannot write {error.filename or out}: {error.strerror}") from None
