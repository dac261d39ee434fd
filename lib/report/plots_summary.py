"""The summary's figures: every claim on every machine, and published figures beside measured ones."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from fusion_evidence.lib.report import style

#: Verdict -> (sign, word, colour): told apart by each of the three.
VERDICTS: dict[str, tuple[str, str, str]] = {
    "PASS": ("\u2714", "pass", style.BLUE),
    "PASS_WITH_LIMITATIONS": ("\u2714", "limited", style.SKY),
    "FAIL": ("\u2718", "fail", style.VERMILLION),
    "INCONCLUSIVE": ("?", "inconclusive", style.ORANGE),
    "NOT_RUN": ("\u2013", "not run", style.MISSING),
}
_ROW, _HEAD = 0.3, 0.75  # inches
_SIZE = 10.5  # points: large enough for a phone


def verdicts(frame: pd.DataFrame) -> Figure:
    """Claims (rows) on machines (columns): a sign, a word and a colour for each verdict.

    Columns: claim, arm, machine, verdict and, if there, state: a verdict of a result that is not
    ``fresh`` does not count, and is drawn hatched and pale, with that word. An empty cell: the claim
    is not made there. ValueError: there is nothing to draw.
    """
    if frame.empty:
        raise ValueError("nothing to draw: no claims")
    rows = [row | {"name": _name(row["claim"], row["arm"])} for row in frame.to_dict("records")]
    names = list(dict.fromkeys(row["name"] for row in rows))
    machines = sorted({row["machine"] for row in rows})
    with style.figure(_HEAD + _ROW * len(names)) as (fig, (axes,)):
        for row in rows:
            cell = (machines.index(row["machine"]), names.index(row["name"]))
            _verdict(axes, *cell, row["verdict"], row.get("state", "fresh"))
        axes.set_xlim(-0.5, len(machines) - 0.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xticks(range(len(machines)), machines, fontweight="bold", fontsize=_SIZE)
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(names)), names, fontsize=_SIZE)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return fig


def _name(claim: object, arm: object) -> str:
    text = str(claim).replace("_", " ")
    return f"{text} [{arm}]" if arm else text


def _verdict(axes: Axes, x: int, y: int, verdict: str, state: str) -> None:
    sign, text, colour = VERDICTS[verdict]
    shade, said, box = colour, f"{sign} {text}", None
    frame: dict[str, Any] = dict(edgecolor=style.CARD, lw=1.5)
    if state != "fresh":
        shade, said = style.CARD, f"{said}, {state}"
        edge = style.FAINT if verdict == "NOT_RUN" else colour
        frame = dict(edgecolor=edge, lw=0.8, hatch="////", alpha=0.6)
        box = dict(facecolor=style.CARD, edgecolor="none", pad=1.0)
    axes.add_patch(Rectangle((x - 0.48, y - 0.44), 0.96, 0.88, facecolor=shade, **frame))
    colour = style.ink_on(shade)
    axes.text(x, y, said, ha="center", va="center", fontsize=_SIZE, color=colour, bbox=box)


def beside_published(frame: pd.DataFrame) -> Figure:
    """Each figure's published value and what every machine measured, one panel a figure.

    Columns: figure (the panel's title), source, value, low, high, text (what is written at the bar's
    end) and counts. A source without a number says in its text why. ValueError: nothing to draw.
    """
    if frame.empty:
        raise ValueError("nothing to draw: no figures")
    panels = list(dict.fromkeys(frame.figure))
    sources = list(dict.fromkeys(frame.source))
    colours = dict(zip(sources, ("#4d4d4d", *style.COLOURS), strict=False))
    colours |= dict(zip(sources[7:], cycle(style.COLOURS), strict=False))
    rows = {panel: frame[frame.figure == panel].to_dict("records") for panel in panels}
    height = sum(0.42 + 0.27 * len(part) for part in rows.values())
    with style.figure(height, rows=len(panels)) as (fig, axes):
        for panel, ax in zip(panels, axes, strict=True):
            _bars(ax, rows[panel], colours)
            ax.set_title(panel)
        fig.align_ylabels(axes)
        return fig


def _bars(axes: Axes, rows: list[dict[Any, Any]], colours: dict[Any, str]) -> None:
    ends = [x for row in rows for x in (row["value"], row["high"]) if not math.isnan(x)]
    for i, row in enumerate(rows):
        value, low, high = row["value"], row["low"], row["high"]
        end = 0.0
        if not math.isnan(value):
            shown: dict[str, Any] = dict(color=colours[row["source"]])
            if not row["counts"]:
                shown = dict(facecolor=style.CARD, edgecolor=colours[row["source"]], hatch="////")
            axes.barh(i, value, height=0.6, **shown)
            end = max(value, 0.0)
            if not math.isnan(low + high):
                axes.plot([low, high], [i, i], color=style.INK, linewidth=1.2)
                end = max(end, high)
        at: dict[str, Any] = dict(
            xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
        )
        axes.annotate(row["text"], (end, i), **at)
    axes.set_yticks(range(len(rows)), [row["source"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(min([0.0, *ends]), (max([0.0, *ends]) or 1.0) * 1.9)
    axes.xaxis.set_major_locator(NullLocator())
    axes.spines["bottom"].set_visible(False)
    axes.axvline(0, color=style.FAINT, linewidth=0.8)
