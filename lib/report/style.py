"""How every figure of the collection looks: one place.

Figures carry their own light card, so that they read the same on a dark page and a light one; they
are as wide as a phone can show with its text still readable. Colours are Okabe and Ito's, which
colour-blind readers can tell apart, and no figure says anything by colour alone.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import matplotlib as mpl
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from PIL import Image

WIDTH = 6.4  # inches
DPI = 144
INK, FAINT, CARD = "#1f2328", "#6e7781", "#fbfaf7"
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
)
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
NOTHING, MISSING = "#d9ebf5", "#ecebe7"  # cells: no mismatch, not measured

# An implementation looks the same in every figure: colour and marker.
_LOOKS = {
    "fused": (BLUE, "o"),
    "compiled": (VERMILLION, "s"),
    "eager": (PURPLE, "D"),
    "vllm": (GREEN, "^"),
    "aiter": (ORANGE, "v"),
    "copy": ("#4d4d4d", "_"),
    "empty": ("#8c8c8c", "_"),
}
_OTHERS = ((SKY, "P"), ("#000000", "X"), (ORANGE, "*"), (GREEN, "h"))

_RC: Any = {
    "figure.facecolor": CARD,
    "axes.facecolor": CARD,
    "savefig.facecolor": CARD,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dad8d2",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
}

#: Share of mismatching elements -> colour, from rare to all; zero has its own, `NOTHING`.
RATES = LinearSegmentedColormap.from_list("rates", ["#fdeedd", "#f2a65a", VERMILLION, "#7a2d00"])


@contextmanager
def figure(height: float, rows: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """A new figure in this style, `WIDTH` by `height` inches, and its axes from the top down."""
    with mpl.rc_context(_RC):
        fig = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        fig.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr,call-arg]
        axes = fig.subplots(rows, squeeze=False)
        yield fig, list(axes.flat)


def looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Name -> (colour, marker): the known implementations keep theirs, others get one each."""
    spare = cycle(_OTHERS)
    return {name: _LOOKS.get(name) or next(spare) for name in names}


def ink_on(colour: object) -> str:
    """Black or white, whichever stands out more on a cell of this colour."""
    return "#000000" if luminance(colour) > 0.179 else "#ffffff"


def luminance(colour: object) -> float:
    """Relative luminance of a colour, 0 to 1, as WCAG defines it."""
    channels = to_rgb(colour)  # type: ignore[arg-type]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


def png(fig: Figure) -> bytes:
    """The figure as a PNG file of 64 colours: a third of the size, nothing lost to the eye."""
    drawn, small = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=DPI, facecolor=fig.get_facecolor())
    image = Image.open(drawn).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def show(fig: Figure, *, caption: str, alt: str) -> None:
    """Display a figure in a notebook, with its caption and its text for who cannot see it.

    An HTML figure with the image inside: plain image outputs lose the alternative text in most
    viewers. ValueError: caption or alt is empty.
    """
    if not caption.strip() or not alt.strip():
        raise ValueError("a figure needs a caption and an alternative text")
    data = base64.b64encode(png(fig)).decode("ascii")
    markup = (
        '<figure style="margin:0.5em 0;max-width:720px">'
        f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}" '
        'style="width:100%;height:auto;border-radius:6px">'
        f'<figcaption style="font-size:0.92em">{html.escape(caption)}</figcaption></figure>'
    )
    display({"text/html": markup, "text/plain": f"{caption} [{alt}]"}, raw=True)
