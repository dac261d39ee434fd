"""One metric of a sweep over the parameters that were swept."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from numbers import Real

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusion_evidence.lib.report import style

#: As many series as a reader can tell apart.
MOST_SERIES = 6
#: As many values as are named one by one on an axis of numbers.
MOST_TICKS = 8
_MARKERS = "osD^vP"


def over_parameters(frame: pd.DataFrame, swept: Sequence[str], *, title: str) -> Figure | None:
    """A panel for each swept parameter, a series for each set of labels; None: nothing to draw.

    ``frame``: one row per measurement of one metric, with the columns value, unit, labels and
    not_comparable and a column for each of ``swept``. Every value is a mark, of points that agree
    in the panel's parameter too; the line goes through their medians. Values that must not be
    compared are crosses that no line joins. Drawn are numbers, where they change at all; of many
    series those that change most, and the title says of how many.
    """
    numbers = frame[[_is_number(value) for value in frame["value"]]]
    if not len(numbers) or not swept or numbers["value"].nunique() < 2:
        return None
    numbers = numbers.assign(value=numbers["value"].astype(float))
    spread = numbers.groupby("labels")["value"].agg(lambda values: values.max() - values.min())
    order = list(spread.sort_values(ascending=False, kind="stable").index)
    kept = [labels for labels in numbers["labels"].unique() if labels in order[:MOST_SERIES]]
    if len(order) > len(kept):
        title += f" ({len(kept)} of {len(order)} series)"
    units = numbers["unit"].dropna().unique()
    with style.figure(0.9 + 2.6 * len(swept), rows=len(swept)) as (fig, panels):
        for axes, parameter in zip(panels, swept, strict=True):
            _panel(axes, numbers, parameter, kept)
            axes.set_ylabel(", ".join(map(str, units)))
        panels[0].set_title(title)
        if any(kept) or numbers["not_comparable"].notna().any():
            fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left")
    return fig


def _panel(axes: Axes, numbers: pd.DataFrame, parameter: str, kept: Sequence[str]) -> None:
    here = numbers.dropna(subset=[parameter])
    values = sorted(here[parameter].unique(), key=lambda v: (isinstance(v, str), v))
    scaled = all(_is_number(value) for value in values)
    places = {value: value if scaled else number for number, value in enumerate(values)}
    for number, labels in enumerate(kept):
        series = here[here["labels"] == labels]
        colour, marker = style.COLOURS[number], _MARKERS[number]
        good = series[series["not_comparable"].isna()]
        medians = good.groupby(parameter)["value"].median()
        axes.plot(
            [places[value] for value in medians.index],
            medians,
            color=colour,
            marker=marker,
            linestyle="-" if scaled else "",
            linewidth=4 - 0.5 * number,  # of series that coincide, each shows below the next
            markersize=10 - 1.2 * number,
            label=labels or "value",
        )
        for part, mark in ((good, marker), (series.drop(good.index), "x")):
            where = [places[value] for value in part[parameter]]
            axes.scatter(where, part["value"], color=colour, marker=mark, s=16, alpha=0.6)
    if here["not_comparable"].notna().any():
        axes.scatter([], [], color=style.FAINT, marker="x", label="must not be compared")
    if scaled and min(values) > 0 and max(values) >= 32 * min(values):
        axes.set_xscale("log", base=2)
    if not scaled or len(values) <= MOST_TICKS:
        ticks = [textwrap.shorten(str(value), 24, placeholder="…") for value in places]
        axes.set_xticks(list(places.values()), ticks, minor=False)
    axes.set_xlabel(parameter)
    axes.grid(axis="y")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == value
