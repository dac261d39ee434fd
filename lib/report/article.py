"""The article's figures, as ``data/article.json`` states them: published, gfx936, never measured here."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pandas as pd

from fusion_evidence.lib import paths

NOT_STATED = "not stated"


@cache
def _figures() -> dict[str, dict[str, Any]]:
    content = json.loads((paths.DATA / "article.json").read_text(encoding="utf-8"))
    return {figure["name"]: figure for figure in content["figures"]}


def figure(name: str) -> Any:
    """The value of a published figure; "not stated" for one the article does not give.

    Raises KeyError with the known names.
    """
    if name not in _figures():
        raise KeyError(f"no figure {name!r} in article.json; known: {', '.join(_figures())}")
    value = _figures()[name]["value"]
    return NOT_STATED if value is None else value


def unit(name: str) -> str | None:
    """The unit of a published figure, such as "ms" or "us/layer"; None where it has none."""
    found = _figures()[name]["unit"]
    return None if found is None else str(found)


def label(name: str) -> str:
    """How the figure is to be labelled wherever it is shown, such as "published, gfx936"."""
    return str(_figures()[name]["label"])


def savings() -> pd.DataFrame:
    """The published saving, in the form `plots.saving_ladder` takes."""
    rows = (
        ("saving", "layer", "primitive_saving_per_layer", 1.0, "us"),
        ("saving", "token", "primitive_saving_per_token", 1000.0, "us"),
        ("saving_share", None, "derived_saving_share_of_tpot", 100.0, "%"),
    )
    return pd.DataFrame(
        dict(
            metric=metric,
            per=per,
            source=label("primitive_saving_per_layer"),
            value=figure(name) * scale,
            unit=unit,
        )
        for metric, per, name, scale, unit in rows
    )
