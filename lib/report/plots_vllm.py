"""The service's figures: which steps reach the kernel, and how much differs, server by server."""

from __future__ import annotations

from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fusion_evidence.lib.report import style


def shares(frame: pd.DataFrame) -> Figure:
    """Share of a service's steps that took the kernel: a group for each mode, a bar for each concurrency.

    Columns: mode, concurrency, share (0 to 1). ValueError: nothing to draw.
    """
    modes, levels = _names(frame, "mode"), sorted(frame["concurrency"].unique())
    height = 0.8 / len(levels)
    colours = dict(zip(levels, cycle(style.COLOURS), strict=False))
    with style.figure(1.2 + len(modes) * (0.22 + 0.24 * len(levels))) as (fig, (axes,)):
        for index, level in enumerate(levels):
            part = frame[frame["concurrency"] == level]
            rows = [modes.index(mode) - 0.4 + (index + 0.5) * height for mode in part["mode"]]
            axes.barh(rows, part["share"], height=0.9 * height, color=colours[level], label=level)
            for row, share in zip(rows, part["share"], strict=True):
                axes.annotate(
                    f"{share:.0%}" if share in (0, 1) else f"{share:.1%}",
                    (share, row),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8.5,
                )
        _rows_of(axes, modes)
        axes.set_xlim(0, 1.12)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}" if x <= 1 else ""))
        axes.set_xlabel("steps that took the kernel")
        fig.legend(loc="outside lower center", ncols=len(levels), title="requests at a time")
        return fig


def differing(frame: pd.DataFrame) -> Figure:
    """Share of the attention's inputs that differ from the baseline's, a row for each server.

    Columns: mode, value (records that differ), n. ValueError: nothing to draw.
    """
    modes = _names(frame, "mode")
    share = frame["value"] / frame["n"]
    with style.figure(1.0 + 0.42 * len(modes)) as (fig, (axes,)):
        colours = [style.VERMILLION if value else style.BLUE for value in frame["value"]]
        axes.barh(range(len(modes)), share.clip(lower=0.004), height=0.6, color=colours)
        for row, (value, n, end) in enumerate(zip(frame["value"], frame["n"], share, strict=True)):
            text = f"{value:,.0f} of {n:,.0f}"
            axes.annotate(
                text, (end, row), (6, 0), textcoords="offset points", va="center", fontsize=9
            )
        _rows_of(axes, modes)
        axes.set_xlim(0, 1.45)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
        axes.set_xlabel("records of q, k, v that differ from the baseline's")
        return fig


def _names(frame: pd.DataFrame, column: str) -> list[str]:
    if frame.empty:
        raise ValueError("nothing to draw: no rows")
    return list(dict.fromkeys(frame[column]))


def _rows_of(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
