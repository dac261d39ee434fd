"""``fusion-evidence find module:attribute``: the specialization finder for a shell or a CI job."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # `fusion-evidence --help` need not wait for torch
    from torch import Tensor, nn

    from .finder import Finding

FOUND, ERROR = 1, 2


def load_target(target: str) -> tuple[nn.Module, Any, Any]:
    """``module:attribute`` -> (module, example inputs or None, dynamic dimensions or None).

    The attribute is an ``nn.Module``, or a callable without arguments (a class is one) that returns
    a module or ``(module, example_inputs, dynamic)``.

    Raises:
        ValueError: the path leads nowhere, or to something else.
    """
    from torch import nn

    name, colon, attribute = target.partition(":")
    if not colon or not name or not attribute:
        raise ValueError(f"{target!r} is not of the form module:attribute")
    try:
        found: Any = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"cannot import {name}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name} has no {attribute}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise ValueError(f"{target} is a {type(found).__name__}, not a module or a factory")
        found = found()
    parts = found if isinstance(found, tuple) else (found, None, None)
    if len(parts) != 3 or not isinstance(parts[0], nn.Module):
        raise ValueError(f"{target} gave neither a module nor (module, example_inputs, dynamic)")
    return parts


def parse_input(text: str) -> tuple[str, Tensor]:
    """``name=64x4096:bfloat16`` -> (name, tensor): seeded noise, or zeros for integer dtypes."""
    import torch

    match = re.fullmatch(r"(\w+)=(\d+(?:x\d+)*)(?::(\w+))?", text)
    dtype = getattr(torch, match[3] or "float32", None) if match else None
    if not match or not isinstance(dtype, torch.dtype):
        raise ValueError(f"--input {text!r} is not of the form name=64x4096:dtype")
    sizes = [int(size) for size in match[2].split("x")]
    if not dtype.is_floating_point:
        return match[1], torch.zeros(sizes, dtype=dtype)
    noise = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    return match[1], noise.to(dtype)


def parse_dynamic(texts: Sequence[str]) -> dict[str, set[int]]:
    """``name:dim`` texts -> {name: dims}."""
    dynamic: dict[str, set[int]] = {}
    for text in texts:
        name, _, dim = text.rpartition(":")
        if not name or not dim.isdigit():
            raise ValueError(f"--dynamic {text!r} is not of the form name:dim")
        dynamic.setdefault(name, set()).add(int(dim))
    return dynamic


def run(target: str, dynamic: Sequence[str], inputs: Sequence[str]) -> list[Finding]:
    """What the command does. Raises ValueError (also as FinderError) on anything it cannot use."""
    from .finder import find

    module, known_inputs, known_dynamic = load_target(target)
    example = dict(parse_input(text) for text in inputs) or known_inputs
    dims: Any = parse_dynamic(dynamic) or known_dynamic
    if example is None:
        raise ValueError(f"{target} brings no example inputs: give --input name=64x4096:dtype")
    if not dims:
        raise ValueError(f"{target} names no dynamic dimension: give --dynamic name:dim")
    return find(module, example, dims)


@click.command("find")
@click.argument("target", metavar="MODULE:ATTRIBUTE")
@click.option("--dynamic", multiple=True, metavar="NAME:DIM", help="A dimension that varies.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME=64x4096:DTYPE",
    help="An example input; its dynamic sizes must be at least 3.",
)
@click.option("--verbose", is_flag=True, help="Also say who decided, and how.")
def find_command(
    target: str, dynamic: tuple[str, ...], inputs: tuple[str, ...], verbose: bool
) -> None:
    """Print where tracing decides something from a dynamic size.

    ATTRIBUTE is an nn.Module, or a callable without arguments that returns one or returns
    (module, example_inputs, dynamic). Exit status: 0 nothing found, 1 something found, 2 an error.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        findings = run(target, dynamic, inputs)
    except Exception as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ERROR)
    for finding in findings:
        click.echo(f"{finding}  [{finding.kind}] {finding.note}" if verbose else str(finding))
    sys.exit(FOUND if findings else 0)
