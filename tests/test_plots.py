"""Figures: numbers come from the table, text is readable, the notebook keeps the alt text."""

import base64
import itertools
import re

import nbformat
import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from nbclient import NotebookClient

from fusion_evidence.lib.report import plots, style

TOKENS = (1, 4, 65, 1024, 1680, 4096)


def times():
    rows = []
    bases = {"eager": 67, "compiled": 12, "fused": 2.1, "mine": 3, "copy": 1.2, "empty": 0.7}
    for (impl, base), t, cache in itertools.product(bases.items(), TOKENS, ("hot", "cold")):
        value = base * (1 + 0.01 * t) * (1.2 if cache == "cold" else 1.0)
        rows.append({"metric": "time", "impl": impl, "T": t, "cache": cache, "value": value})
        rows[-1] |= {"low": 0.9 * value, "high": 1.1 * value, "n": 31, "unit": "us"}
    return pd.DataFrame(rows)


def mismatches():
    rows = []
    outputs = ("value_cache", "q", "k", "v", "gate", "key_cache")
    for oracle, output, t in itertools.product(("reference", "vllm"), outputs, TOKENS):
        value = 7 if (oracle, output, t) == ("reference", "q", 65) else 0
        if oracle == "vllm" and output in ("q", "key_cache"):
            value = 400 * t
        row = {"metric": "mismatch", "oracle": oracle, "output": output, "T": t}
        rows.append({**row, "value": value, "n": 6144 * t, "unit": "elements"})
    return pd.DataFrame(rows)


def roundings():
    pairs = {("per_op", "storage"): 26_000, ("storage", "fp32_through"): 0}
    pairs |= {("per_op", "fp32_through"): 1, ("eager", "per_op"): 399_360}
    rows = [{"rounding": a, "against": b, "value": v} for (a, b), v in pairs.items()]
    return pd.DataFrame(rows).assign(n=399_360, metric="rounding")


def savings():
    measured = {"source": "h200, measured", "n": 31}
    published = {"source": "published, gfx936"}
    layer, token = {"metric": "saving", "per": "layer"}, {"metric": "saving", "per": "token"}
    return pd.DataFrame(
        [
            {**layer, **measured, "value": 9.5, "low": 9.1, "high": 9.9, "unit": "us"},
            {**token, **measured, "value": 152.0, "low": 146.0, "high": 158.0, "unit": "us"},
            {"metric": "saving_share", **measured, "value": 0.0034},
            {**layer, **published, "value": 44.96, "unit": "us"},
            {"metric": "saving_share", **published, "value": "not stated"},
        ]
    )


def saved():
    rows = [("predicted", 152.0, 146.0, 158.0), ("realised", 168.0, 160.0, 176.0)]
    rows += [("control", -2.9, -8.0, 3.0), ("resolution of this run", 0.0, -12.0, 12.0)]
    names = ["effect", "value", "low", "high"]
    return pd.DataFrame(rows, columns=names).assign(metric="tpot_saving", unit="us")


def costs():
    rows = [("sdpa,\nin turn", -51.0, 6.0, None), ("workspace,\nown process", 14.0, 12.5, "A/A")]
    rows += [("none (A/A),\nown process", 1.0, 12.5, None), ("no pair", 3.0, None, "none")]
    frame = pd.DataFrame(rows, columns=["effect", "value", "floor", "not_comparable"])
    return frame.assign(low=frame.value - 2, high=frame.value + 2, unit="%")


def arms():
    prefills = ("in_graph", "opaque_eager", "opaque_compiled")
    rows = []
    for prefill, decode in itertools.product(prefills, (*prefills, "fused")):
        wrong = 11_520 if "eager" in prefill + decode else 0
        rows.append({"prefill": prefill, "decode": decode, "value": wrong, "n": 11_520})
    return pd.DataFrame(rows)


def divergence():
    rows = [
        {"step": step, "layer": layer, "value": 0 if layer < 2 else step, "n": 6144}
        for step, layer in itertools.product(range(60), range(4))
    ]
    return pd.DataFrame(rows)


def flipped():
    rng = np.random.default_rng(0)
    margin = rng.exponential(0.05, 20)
    return pd.DataFrame({"value": margin, "perturbation": rng.exponential(0.05, 20)})


FIGURES = {
    plots.effects: saved,
    plots.factorial: arms,
    plots.divergence_map: divergence,
    plots.margins: flipped,
    plots.time_by_T: times,
    plots.mismatch_by_output_and_T: mismatches,
    plots.rounding_matrix: roundings,
    plots.saving_ladder: savings,
}


def texts(fig):
    """All visible, non-empty texts of a figure with their boxes, after layout."""
    fig.draw_without_rendering()
    found = [t for t in fig.findobj(lambda a: hasattr(a, "get_fontsize")) if t.get_visible()]
    boxes = [(t, t.get_window_extent()) for t in found if t.get_text().strip()]
    inside = fig.bbox.padded(1)
    # tick labels outside the limits exist, but are not drawn
    return [(t, box) for t, box in boxes if inside.overlaps(box) and box.width > 0]


def words(fig):
    return [text.get_text() for text, _ in texts(fig)]


@pytest.mark.parametrize("draw", FIGURES)
def test_text_is_large_enough_and_never_overlaps(draw):
    fig = draw(FIGURES[draw]())
    found = texts(fig)
    assert len(found) > 5
    assert fig.get_figwidth() == style.WIDTH
    assert min(text.get_fontsize() for text, _ in found) >= 9
    for (a, one), (b, other) in itertools.combinations(found, 2):
        if a.get_text() == b.get_text() and np.allclose(one.bounds, other.bounds):
            continue
        assert not one.padded(-1).overlaps(other.padded(-1)), (a.get_text(), b.get_text())
    for text, box in found:
        assert box.x0 >= 0, text.get_text()
        assert box.x1 <= fig.bbox.x1, text.get_text()


@pytest.mark.parametrize("draw", FIGURES)
def test_files_stay_small(draw):
    data = style.png(draw(FIGURES[draw]()))
    assert data.startswith(b"\x89PNG")
    assert len(data) < 60_000


def test_time_lines_are_the_table():
    frame = times()
    axes = plots.time_by_T(frame).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_ylabel() == "time per call (µs)"
    drawn = {tuple(np.round(np.asarray(line.get_ydata(), dtype=float), 9)) for line in axes.lines}
    for (impl, cache), part in frame.groupby(["impl", "cache"]):
        line = tuple(np.round(part.sort_values("T")["value"], 9))
        assert line in drawn, (impl, cache)
    colours = {}
    for container, ((impl, cache), _) in zip(
        axes.containers, frame.groupby(["impl", "cache"]), strict=True
    ):
        line = container[0]
        assert (line.get_linestyle() == "--") == (cache == "hot")
        assert colours.setdefault(impl, line.get_color()) == line.get_color()
        segments = container[2][0].get_segments()  # the interval bars
        assert len(segments) == len(TOKENS)
    assert len(set(colours.values())) == len(colours)


def test_time_without_cache_label_or_interval():
    frame = times().query("cache == 'cold'").drop(columns=["cache", "low", "high"])
    fig = plots.time_by_T(frame)
    assert "L2 cold" not in words(fig)
    assert "copy (floor)" in words(fig)


def test_times_that_are_not_comparable_are_left_out():
    frame = times().astype({"value": object})
    frame.loc[frame["impl"] == "eager", "value"] = "not_comparable"
    assert "eager" not in words(plots.time_by_T(frame))


def test_mismatch_cells_are_the_table():
    fig = plots.mismatch_by_output_and_T(mismatches())
    reference, other = fig.axes
    assert reference.get_title(loc="left") == "mismatching elements against reference"
    rows = [label.get_text() for label in reference.get_yticklabels()]
    assert rows == ["q", "k", "v", "gate", "key cache", "value cache"]
    cells = {t.get_position(): t.get_text() for t in reference.texts}
    assert cells.pop((2, 0)) == "7"
    assert set(cells.values()) == {"0"}
    cells = {t.get_position(): t.get_text() for t in other.texts}
    assert [cells[x, 0] for x in range(6)] == ["400", "1,600", "26 k", "410 k", "672 k", "1.64 M"]
    # a planted mismatch does not look like none
    shades = [patch.get_facecolor() for patch in reference.patches]
    assert shades.count(shades[2]) == 1
    assert len(set(shades)) == 2


def test_mismatch_says_what_was_not_measured():
    frame = mismatches()
    frame = frame[(frame["oracle"] == "reference") | (frame["T"] != 65)]
    cells = [t.get_text() for t in plots.mismatch_by_output_and_T(frame).axes[1].texts]
    assert cells.count("–") == 6


def test_rounding_matrix_is_symmetric_and_complete():
    axes = plots.rounding_matrix(roundings()).axes[0]
    cells = {t.get_position(): t.get_text() for t in axes.texts}
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["per op", "storage", "fp32\nthrough", "eager"]
    assert cells[0, 1] == cells[1, 0] == "6.5 %"
    assert cells[2, 0] == "2.5 ppm"
    assert cells[1, 2] == "0"
    assert cells[3, 0] == "100 %"
    assert cells[0, 0] == cells[3, 2] == "–"


def test_saving_ladder_prints_numbers_and_gaps():
    found = words(plots.saving_ladder(savings()))
    for text in ("9.5 µs", "44.96 µs", "152 µs", "0.34 %", "not stated", "no figure"):
        assert text in found
    frame = savings().assign(value=lambda f: f["value"].replace(9.5, -3.0))
    assert "-3 µs" in words(plots.saving_ladder(frame.drop(columns=["low", "high"])))


@pytest.mark.parametrize("draw", FIGURES)
def test_tables_that_cannot_be_drawn(draw):
    frame = FIGURES[draw]()
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(frame.iloc[:0])
    with pytest.raises(ValueError, match="no column value"):
        draw(frame.drop(columns="value"))


def test_an_effect_lies_in_the_band_of_its_own_row():
    fig = plots.effects(costs())
    assert all(box.x1 <= fig.bbox.x1 for _, box in texts(fig))
    (axes,) = fig.axes
    bands = {band.get_y() + 0.5: band for band in axes.patches}
    assert {row: (band.get_x(), band.get_width()) for row, band in bands.items()} == {
        0: (-6, 12),
        1: (-12.5, 25),
        2: (-12.5, 25),
    }
    assert {band.get_height() for band in bands.values()} == {1}
    assert [text.get_text() for text in axes.texts] == [
        "-51 %",
        "not comparable",
        "1 %",
        "not comparable",
    ]
    marks = [one[0] for one in axes.containers if isinstance(one, ErrorbarContainer)]
    assert [(list(mark.get_ydata()), mark.get_color()) for mark in marks] == [
        ([0], style.VERMILLION),
        ([2], style.FAINT),
    ]


def test_exact_ties_are_said_to_be_ties():
    frame = flipped()
    assert not any("ties" in word for word in words(plots.margins(frame)))
    frame.loc[:2, "value"] = 0.0
    assert "exact ties, 3 of 20" in words(plots.margins(frame))


def test_text_on_cells_has_contrast():
    shades = [style.RATES(x) for x in np.linspace(0, 1, 50)]
    assert style.luminance("#808080") == pytest.approx(0.2159, abs=1e-4)
    for shade in [*shades, style.NOTHING, style.MISSING]:
        pair = sorted((style.luminance(shade), style.luminance(style.ink_on(shade))))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5


CELL = """
import pandas as pd
from fusion_evidence.lib.report import plots, style
frame = pd.DataFrame({"impl": "fused", "T": [1, 5], "value": [2.1, 2.4], "unit": "us"})
style.show(plots.time_by_T(frame), caption="Time <by> T", alt='from 2.1 to "2.4" µs')
"""


def test_the_notebook_keeps_caption_and_alt():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    markup = output["data"]["text/html"]
    assert 'alt="from 2.1 to &quot;2.4&quot; µs"' in markup
    assert "<figcaption" in markup
    assert "Time &lt;by&gt; T" in markup
    image = re.search(r"base64,([^\"]+)", markup)[1]
    assert base64.b64decode(image).startswith(b"\x89PNG")
    assert "2.4" in output["data"]["text/plain"]
    assert "image/png" not in output["data"]


@pytest.mark.parametrize(("caption", "alt"), [("", "text"), ("text", " ")])
def test_no_figure_without_words(caption, alt):
    with pytest.raises(ValueError, match="caption"):
        style.show(plots.saving_ladder(savings()), caption=caption, alt=alt)


def test_figure_says_what_was_counted_of_what_ran():
    rows = [
        {"run": "replay", "path": "decode", "where": where, "value": value, "of": 4000}
        for where, value in (("device", 4000), ("host", 0))
    ]
    axes = plots.marker_counts(pd.DataFrame(rows)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["4,000 of 4,000", "0 of 4,000"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["replay, decode"]
