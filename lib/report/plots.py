"""The figures, each from a table of measurements (`Recorder.frame`, `Evidence.frame`).

Every table has the columns `value`, `low`, `high`, `n` and `unit` beside its label columns. Values
that are no numbers (`not stated`, `not_comparable`) are shown as what they are, or left out of a
line. ValueError: a table without rows or without a column that the figure needs.
"""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from fusion_evidence.lib.report import style

_OUTPUTS = ("q", "k", "v", "gate", "key_cache", "value_cache")
_FLOORS = ("copy", "accesses", "empty")
_STYLES: dict[object, Any] = {"cold": "-", "hot": (0, (2, 1.6))}


def time_by_T(frame: pd.DataFrame) -> Figure:
    """Time per call over T, both logarithmic: one colour an implementation, floors in grey.

    Labels: impl, T and, if there, cache (hot or cold: the line's dashes). Bars are intervals.
    """
    data = _numbers(frame, "impl", "T")
    if "cache" not in data:
        data["cache"] = None
    implementations: list[str] = sorted(
        data["impl"].unique(),
        key=lambda name: (name in _FLOORS, -float(data["value"][data.impl == name].max())),
    )
    looks = style.looks(implementations)
    with style.figure(4.4) as (fig, (axes,)):
        for (impl, cache), line in data.groupby(["impl", "cache"], dropna=False):
            line = line.sort_values("T")
            colour, marker = looks[str(impl)]
            floor = impl in _FLOORS
            axes.errorbar(
                line["T"],
                line["value"],
                yerr=_whiskers(line),
                color=colour,
                marker=marker,
                linestyle=_STYLES.get(cache, "-"),
                linewidth=1.1 if floor else 1.3 if cache == "hot" else 1.9,
                markerfacecolor=style.CARD if cache == "hot" else colour,
                capsize=2.5,
                elinewidth=1,
                zorder=2 if floor else 4 if impl == "fused" else 3,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens in the call, T")
        axes.set_ylabel(f"time per call ({_unit(data)})")
        _ticks_at(axes, sorted(data["T"].unique()))
        _plain_log_axis(axes)
        axes.grid(True, which="major")
        handles = [
            Line2D([], [], color=looks[i][0], marker=looks[i][1], label=_floor_name(i))
            for i in implementations
        ]
        caches = [c for c in _STYLES if c in set(data["cache"])]
        if len(caches) > 1:
            handles += [
                Line2D([], [], color=style.INK, linestyle=_STYLES[c], label=f"L2 {c}")
                for c in caches
            ]
        fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
        return fig


def mismatch_by_output_and_T(frame: pd.DataFrame) -> Figure:
    """Mismatching elements of each output at each T, one panel an oracle, counts in the cells.

    Labels: oracle, output, T. `n`, elements compared, gives the shade (the share of mismatches).
    """
    data = _numbers(frame, "oracle", "output", "T", "n")
    oracles = list(dict.fromkeys(data["oracle"]))
    outputs = _ordered(data["output"].unique(), _OUTPUTS)
    tokens = sorted(data["T"].unique())
    height = 0.75 + len(oracles) * (0.55 + 0.32 * len(outputs))
    with style.figure(height, rows=len(oracles)) as (fig, panels):
        for oracle, axes in zip(oracles, panels, strict=True):
            part = data[data["oracle"] == oracle].groupby(["output", "T"])[["value", "n"]].sum()
            cells = [[_cell(part, (output, t)) for t in tokens] for output in outputs]
            _heatmap(axes, cells, [_count(value) for row in cells for value, _ in row])
            axes.set_title(f"mismatching elements against {oracle}")
            axes.set_yticks(range(len(outputs)), [str(o).replace("_", " ") for o in outputs])
            axes.set_xticks(range(len(tokens)), [f"{t:g}" for t in tokens])
        panels[-1].set_xlabel("tokens in the call, T")
        return fig


def rounding_matrix(frame: pd.DataFrame) -> Figure:
    """Rounding policies against one another: share of elements that differ, in every pair.

    Labels: rounding, against. A pair that is given one way round is shown both ways; several rows
    of a pair (outputs, T) are added up. `value`: mismatches, `n`: elements compared.
    """
    data = _numbers(frame, "rounding", "against", "n")
    names = _ordered(
        pd.unique(data[["rounding", "against"]].to_numpy().ravel()),
        ("per_op", "storage", "fp32_through"),
    )
    part = data.groupby(["rounding", "against"])[["value", "n"]].sum()

    def pair(a: str, b: str) -> tuple[float, float]:
        cell = _cell(part, (a, b))
        return cell if not math.isnan(cell[0]) else _cell(part, (b, a))

    cells = [[pair(a, b) for b in names] for a in names]
    labels = [_spaced(name) for name in names]
    with style.figure(1.1 + 0.62 * len(names)) as (fig, (axes,)):
        _heatmap(axes, cells, [_share(v / n if n else v) for row in cells for v, n in row])
        axes.set_xticks(range(len(names)), labels)
        axes.set_yticks(range(len(names)), labels)
        axes.xaxis.tick_top()
        axes.set_xlabel("share of elements whose bits differ")
        axes.xaxis.set_label_position("bottom")
        return fig


def saving_ladder(frame: pd.DataFrame) -> Figure:
    """What a saving is worth: per layer, per token, as a share of a token; each source beside.

    Labels: metric (`saving`, `saving_share`), per (`layer` or `token`, for `saving`), source (such
    as a machine's name, or `published, gfx936`). A step or a source without a number says so.
    """
    data = _rows(frame, "metric", "source")
    per = data["per"] if "per" in data else pd.Series(None, index=data.index)
    share = data["metric"] == "saving_share"
    data["step"] = np.where(share, "share of a token", "per " + per.astype(str))
    steps = [s for s in ("per layer", "per token", "share of a token") if s in set(data["step"])]
    if not steps:
        raise ValueError("no saving per layer or token and no saving_share in the table")
    sources = list(dict.fromkeys(data["source"]))
    colours = dict(zip(sources, cycle(style.COLOURS), strict=False))
    with style.figure(0.5 + len(steps) * (0.5 + 0.3 * len(sources)), rows=len(steps)) as (
        fig,
        panels,
    ):
        for step, axes in zip(steps, panels, strict=True):
            rows = [data[(data["step"] == step) & (data["source"] == s)] for s in sources]
            numbers = [_number(row["value"].iloc[0]) if len(row) else math.nan for row in rows]
            longest = max((abs(x) for x in numbers if not math.isnan(x)), default=1.0) or 1.0
            for i, (source, row, number) in enumerate(zip(sources, rows, numbers, strict=True)):
                if math.isnan(number):
                    text = str(row["value"].iloc[0]) if len(row) else "no figure"
                    text, end = text if text not in ("nan", "None") else "no figure", 0.0
                else:
                    text, end = _with_unit(number, row["unit"].iloc[0]), max(number, 0.0)
                    axes.barh(i, number, height=0.62, color=colours[source])
                    low, high = (_number(row[side].iloc[0]) for side in ("low", "high"))
                    if not math.isnan(low + high):
                        axes.plot([low, high], [i, i], color=style.INK, linewidth=1.2)
                        end, longest = max(end, high), max(longest, high)
                axes.annotate(text, (end, i), (5, 0), textcoords="offset points", va="center")
            axes.set_title(step if step.startswith("share") else f"saving {step}")
            axes.set_yticks(range(len(sources)), sources)
            axes.set_ylim(len(sources) - 0.4, -0.6)
            axes.set_xlim(min(0.0, *(x for x in numbers if not math.isnan(x)), 0.0), longest * 1.3)
            axes.xaxis.set_major_locator(NullLocator())
            axes.spines["bottom"].set_visible(False)
            axes.axvline(0, color=style.FAINT, linewidth=0.8)
        return fig


def marker_counts(frame: pd.DataFrame) -> Figure:
    """What device and host counted in each run, against how often the path really ran.

    Labels: run, path, where (`device` or `host`). `value`: runs counted, `of`: runs made.
    """
    data = _numbers(frame, "run", "path", "where", "of")
    data["name"] = data["run"].astype(str) + ", " + data["path"].astype(str)
    names = list(dict.fromkeys(data["name"]))
    looks = {"device": (style.BLUE, -0.18), "host": (style.ORANGE, 0.18)}
    shortest, longest = 0.35, max(data["value"].max(), data["of"].max(), 1.0)
    with style.figure(1.2 + 0.5 * len(names)) as (fig, (axes,)):
        for where, (colour, shift) in looks.items():
            part = data[data["where"] == where]
            rows = [names.index(name) + shift for name in part["name"]]
            lengths = part["value"].clip(lower=shortest)
            axes.barh(rows, lengths, height=0.32, color=colour, label=f"counted on the {where}")
            for row, length, ran, of in zip(rows, lengths, part["value"], part["of"], strict=True):
                text = f"{ran:,.0f} of {of:,.0f}"
                at = (length, row)
                axes.annotate(text, at, (5, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_xscale("log")
        axes.set_xlim(0.3, longest * 12)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel("runs counted, of the runs made")
        fig.legend(loc="outside lower center", ncols=2)
        return fig


def effects(frame: pd.DataFrame) -> Figure:
    """Effects with their intervals on one axis with zero: saved or lost, resolved or not.

    Labels: effect (its name); all in one unit. A row whose value is 0 and whose interval is symmetric is
    a resolution, drawn as a band: an effect inside it cannot be told from none. If there, floor gives a row
    a band of its own, of this half width, and a row that is not_comparable has these words for a mark.
    Green is saved, red is lost, grey lies inside the row's band.
    """
    data = _numbers(frame, "effect")
    for column in ("floor", "not_comparable"):
        data[column] = data.get(column)
    names, unit = list(data["effect"]), _unit(data)
    with style.figure(1.2 + 0.5 * len(names)) as (fig, (axes,)):
        axes.axvline(0, color=style.FAINT, linewidth=1)
        for row, (_, effect) in enumerate(data.iterrows()):
            text, at = _effect(axes, row, effect, unit)
            axes.annotate(
                text, (at, row), (6, 0), textcoords="offset points", va="center", fontsize=9
            )
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.use_sticky_edges = False  # of the bands
        axes.margins(x=0.22)
        axes.set_xlabel(f"saved ({unit})")
        axes.grid(True, axis="x")
        return fig


def _effect(axes: Axes, row: int, effect: pd.Series, unit: str) -> tuple[str, float]:
    """Draw one; its text, and where on the axis it begins."""
    value, low, high = (float(effect[column]) for column in ("value", "low", "high"))
    floor = 0.0 if pd.isna(effect["floor"]) else float(effect["floor"])
    if floor:
        axes.barh(row, 2 * floor, height=1, left=-floor, color=style.NOTHING, zorder=0)
    if pd.notna(effect["not_comparable"]):
        return "not comparable", floor
    if value == 0 and low == -high:
        axes.axvspan(low, high, color=style.NOTHING, zorder=0)
        return f"± {_with_unit(high, unit)}", high
    known = not (math.isnan(low) or math.isnan(high))
    ends = [[max(value - low, 0.0)], [max(high - value, 0.0)]] if known else None
    colour = style.GREEN if value > 0 else style.VERMILLION
    colour = style.FAINT if abs(value) <= floor else colour
    axes.errorbar([value], [row], xerr=ends, fmt="o", color=colour, capsize=3)
    return _with_unit(value, unit), high if known else value


def factorial(frame: pd.DataFrame) -> Figure:
    """Records that differ from the baseline, prefill against decode, counts in the cells.

    Labels: prefill, decode. `value`: records that differ, `n`: records compared.
    """
    data = _numbers(frame, "prefill", "decode", "n")
    prefills, decodes = (list(dict.fromkeys(data[side])) for side in ("prefill", "decode"))
    part = data.groupby(["prefill", "decode"])[["value", "n"]].sum()
    cells = [[_cell(part, (a, b)) for b in decodes] for a in prefills]
    texts = [
        "\u2013" if math.isnan(v) else f"{v:,.0f}\nof {n:,.0f}" for row in cells for v, n in row
    ]
    with style.figure(1.2 + 0.6 * len(prefills)) as (fig, (axes,)):
        _heatmap(axes, cells, texts)
        axes.set_yticks(range(len(prefills)), [_lines(name) for name in prefills])
        axes.set_xticks(range(len(decodes)), [_lines(name) for name in decodes])
        axes.set_ylabel("prefill")
        axes.set_xlabel("decode")
        return fig


def divergence_map(frame: pd.DataFrame) -> Figure:
    """Where two runs differ: layers upwards, steps to the right, shaded by the share of elements.

    Labels: step, layer. `value`: elements that differ, `n`: elements compared. The step of the prefill
    is 0.
    """
    data = _numbers(frame, "step", "layer", "n")
    part = data.groupby(["layer", "step"])[["value", "n"]].sum()
    share = (part["value"] / part["n"]).unstack("step")
    with style.figure(1.5 + 0.24 * len(share)) as (fig, (axes,)):
        shades = share.map(lambda rate: to_rgb(_shade(rate, 1.0)))  # type: ignore[arg-type]
        image = np.array([[shades.loc[y, x] for x in share.columns] for y in share.index])
        axes.imshow(image, aspect="auto", origin="lower", interpolation="nearest")
        axes.set_yticks(range(len(share)), [f"{layer:g}" for layer in share.index])
        every = max(1, len(share.columns) // 8)
        shown = range(0, len(share.columns), every)
        axes.set_xticks(list(shown), [f"{share.columns[i]:g}" for i in shown])
        axes.set_xlabel("step (0: prefill)")
        axes.set_ylabel("layer")
        rates = [(0.0, "0"), (1e-6, "1 ppm"), (1e-4, "0.01 %"), (1e-2, "1 %"), (1.0, "all")]
        handles = [
            Rectangle((0, 0), 1, 1, facecolor=_shade(rate, 1.0), label=text)  # type: ignore[arg-type]
            for rate, text in rates
        ]
        fig.legend(
            handles=handles, loc="outside lower center", ncols=5, title="elements that differ"
        )
        return fig


def margins(frame: pd.DataFrame) -> Figure:
    """Changed tokens: the margin they were chosen by against the perturbation that met it.

    `value`: top-1 minus top-2 logit in the baseline. Label: perturbation, the largest change of the two.
    Below the line that change was larger than the margin. Exact ties are marked as such, by rings.
    """
    data = _rows(
        frame.assign(value=frame["margin"]) if "margin" in frame else frame, "perturbation"
    )
    least = 1e-4  # where an exact tie is drawn, on a logarithmic axis
    x = data["perturbation"].astype(float).clip(lower=least)
    y = data["value"].astype(float).clip(lower=least)
    ties = data["value"] == 0
    # Whole decades, so that there are ticks however close together the points are.
    first = math.floor(math.log10(0.5 * min(x.min(), y.min())))
    last = math.ceil(math.log10(2 * max(x.max(), y.max())))
    low, high = 10.0**first, 10.0**last
    with style.figure(3.6) as (fig, (axes,)):
        axes.plot([low, high], [low, high], color=style.FAINT, linewidth=1, linestyle="--")
        axes.annotate("margin = perturbation", (low, low), (14, 2), textcoords="offset points")
        axes.scatter(x[~ties], y[~ties], color=style.BLUE, s=26, zorder=3)
        if ties.any():
            axes.scatter(
                x[ties], y[ties], facecolor=style.CARD, edgecolor=style.BLUE, s=26, zorder=3
            )
            room = x[ties].min() > math.sqrt(low * high)  # on the left of them
            at, shift, side = (x[ties].min(), -8, "right") if room else (x[ties].max(), 8, "left")
            axes.annotate(
                f"exact ties, {ties.sum()} of {len(ties)}",
                (at, least),
                (shift, 0),
                textcoords="offset points",
                ha=side,
                va="center",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        decades = 10.0 ** np.arange(first, last + 1)
        for place in (axes.set_xticks, axes.set_yticks):
            place(decades, [f"{x:g}" for x in decades])
            place([], minor=True)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel("perturbation of the two logits")
        axes.set_ylabel("margin in the baseline")
        axes.grid(True)
        return fig


def _rows(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    missing = [c for c in ("value", *columns) if c not in frame]
    if missing or frame.empty:
        raise ValueError(
            f"nothing to draw: no column {', '.join(missing)}" if missing else "nothing to draw"
        )
    data = frame.copy()
    for column in ("low", "high", "n", "unit"):
        if column not in data:
            data[column] = math.nan
    return data.reset_index(drop=True)


def _numbers(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The rows whose value is a number."""
    data = _rows(frame, *columns)
    for column in ("value", "low", "high", "n"):
        data[column] = pd.to_numeric(data[column], errors="coerce").astype(float)
    data = data[data["value"].notna()].reset_index(drop=True)
    if data.empty:
        raise ValueError("nothing to draw: no value is a number")
    return data


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float | np.number) else math.nan


def _unit(data: pd.DataFrame) -> str:
    units = [str(u) for u in data["unit"].dropna().unique()]
    return "/".join(units).replace("us", "µs") or "no unit"


def _floor_name(impl: str) -> str:
    return f"{impl} (floor)" if impl in _FLOORS else impl


def _whiskers(line: pd.DataFrame) -> np.ndarray | None:
    if line[["low", "high"]].isna().any(axis=None):
        return None
    ends = np.stack([line["value"] - line["low"], line["high"] - line["value"]])
    return np.maximum(ends, 0.0)


def _ticks_at(axes: Axes, tokens: list[float]) -> None:
    """A tick at every T, a label where there is room for one."""
    room = 0.075 * max(math.log2(tokens[-1] / tokens[0]), 1e-9)
    labelled = [tokens[-1]]
    for t in tokens[:-1]:
        beside = [other for other in labelled if abs(math.log2(other / t)) < room]
        if not beside:
            labelled.append(t)
    axes.set_xticks(tokens, [f"{t:g}" if t in labelled else "" for t in tokens])
    axes.xaxis.set_minor_locator(NullLocator())


def _plain_log_axis(axes: Axes) -> None:
    low, high = axes.get_ylim()
    if math.log10(high / low) < 2.5:
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _ordered(names: object, first: tuple[str, ...]) -> list[str]:
    found = list(dict.fromkeys(names))  # type: ignore[call-overload]
    return [n for n in first if n in found] + [n for n in found if n not in first]


def _lines(name: str) -> str:
    return str(name).replace("_", "\n", 1)


def _spaced(name: str) -> str:
    return str(name).replace("_", " ").replace("fp32 through", "fp32\nthrough")


def _cell(part: pd.DataFrame, key: tuple) -> tuple[float, float]:
    """(mismatches, elements), NaN where nothing was measured."""
    if key not in part.index:
        return math.nan, math.nan
    row = part.loc[key]
    return float(row["value"]), float(row["n"])


def _heatmap(axes: Axes, cells: list[list[tuple[float, float]]], texts: list[str]) -> None:
    """Cells of (mismatches, elements), shaded by their share on a logarithmic scale."""
    colours = [[_shade(value, n) for value, n in row] for row in cells]
    columns = len(cells[0])
    for i, text in enumerate(texts):
        y, x = divmod(i, columns)
        colour = colours[y][x]
        corner = (x - 0.5, y - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor=style.CARD, lw=1.5))
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=style.ink_on(colour))
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _shade(value: float, n: float) -> object:
    if math.isnan(value):
        return style.MISSING
    if value == 0:
        return style.NOTHING
    decades = 7.0  # one in ten million is the palest
    return style.RATES(max(0.0, 1 + math.log10(value / n) / decades) if n > 0 else 1.0)


def _count(value: float) -> str:
    if math.isnan(value):
        return "–"
    if value < 10_000:
        return f"{value:,.0f}"
    # 999,500 and more would round to 1000 k
    return f"{value / 1e3:.3g} k" if value < 999_500 else f"{value / 1e6:.3g} M"


def _share(rate: float) -> str:
    if math.isnan(rate):
        return "–"
    if rate == 0:
        return "0"
    if rate < 1e-4:
        return f"{1e6 * rate:.2g} ppm"
    return f"{100 * rate:.3g} %" if rate >= 0.1 else f"{100 * rate:.2g} %"


def _with_unit(value: float, unit: object) -> str:
    if unit in ("us", "µs"):
        return f"{value:,.0f} µs" if abs(value) >= 1000 else f"{value:.4g} µs"
    if unit in ("%", "percent"):
        return f"{value:.2g} %"
    if unit is None or (isinstance(unit, float) and math.isnan(unit)) or unit in ("", "1", "ratio"):
        return f"{100 * value:.2g} %"
    return f"{value:.3g} {unit}"
