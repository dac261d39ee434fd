"""The typed parameters of a notebook.

A notebook declares its parameters as annotated assignments in the cell tagged ``parameters``:

    tokens: list[int] = [1, 65]      # T of each measurement
    candidate: str | None = None

The annotations are read without running the notebook, so that a value from ``--set`` or from a
profile is checked before a kernel starts. Papermill itself accepts any name and any type.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from fusion_evidence.lib.notebook import read_cells

_SCALARS: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "Any": Any}
_MISSING = object()


class ParameterError(ValueError):
    """A parameter that is unknown, or whose value does not fit its annotation."""


@dataclass(frozen=True)
class Parameter:
    """One annotated assignment of the parameters cell."""

    name: str
    annotation: str  #: as written, for messages
    type: Any  #: the annotation as a typing object
    default: Any


def read_parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook by name; empty when no cell is tagged ``parameters``.

    Raises ParameterError for a parameter without an annotation, with an annotation other than
    bool, int, float, str, list[...], dict[str, ...], Literal[...] and unions of them, or with a
    default that is no literal or does not fit.
    """
    found: dict[str, Parameter] = {}
    for cell in read_cells(notebook):
        if cell.kind != "code" or "parameters" not in cell.tags:
            continue
        for statement in ast.parse(cell.source).body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                parameter = _parameter(statement, statement.target.id)
                found[parameter.name] = parameter
            elif isinstance(statement, ast.Assign):
                names = ", ".join(ast.unparse(target) for target in statement.targets)
                raise ParameterError(f"parameter {names} needs an annotation, as in `{names}: int`")
    return found


def _parameter(statement: ast.AnnAssign, name: str) -> Parameter:
    annotation = ast.unparse(statement.annotation)
    kind = _kind(statement.annotation, name)
    if statement.value is None:
        raise ParameterError(f"parameter {name} has no default")
    try:
        default = ast.literal_eval(statement.value)
    except ValueError:
        source = ast.unparse(statement.value)
        raise ParameterError(f"parameter {name}: the default {source} is no literal") from None
    parameter = Parameter(name, annotation, kind, default)
    return Parameter(name, annotation, kind, check_value(parameter, default))


def _kind(node: ast.expr, name: str) -> Any:
    """The typing object an annotation stands for."""
    match node:
        case ast.Name(id=scalar) if scalar in _SCALARS:
            return _SCALARS[scalar]
        case ast.Constant(value=None):
            return type(None)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_kind(left, name), _kind(right, name)]  # noqa: UP007 (built at run time)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return list[_kind(item, name)]  # type: ignore[misc]
        case ast.Subscript(
            value=ast.Name(id="dict"), slice=ast.Tuple(elts=[ast.Name(id="str"), item])
        ):
            return dict[str, _kind(item, name)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            values = ast.literal_eval(choices)
            return Literal[values if isinstance(values, tuple) else (values,)]  # type: ignore[valid-type]
    raise ParameterError(f"parameter {name}: annotation {ast.unparse(node)} is not supported")


def parse_value(parameter: Parameter, value: Any) -> Any:
    """A value from the command line or a profile, converted to the parameter's type.

    Text is read as the annotation asks: ``"false"`` is False for a bool and text for a str;
    ``"1e-3"`` (which YAML 1.1 reads as text) is a float. Raises ParameterError naming the
    parameter, the type expected and the value got.
    """
    return _checked(parameter, value, text=True)


def check_value(parameter: Parameter, value: Any) -> Any:
    """A value that must have the parameter's type already; raises ParameterError otherwise."""
    return _checked(parameter, value, text=False)


def _checked(parameter: Parameter, value: Any, *, text: bool) -> Any:
    converted = _convert(value, parameter.type, text)
    if converted is _MISSING:
        raise ParameterError(
            f"parameter {parameter.name}: expected {parameter.annotation}, "
            f"got {value!r} ({type(value).__name__})"
        )
    return converted


def _convert(value: Any, kind: Any, text: bool) -> Any:
    """``value`` as ``kind``, or _MISSING when it does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        # `None` first: for `str | None` the text "none" means None.
        members = sorted(arguments, key=lambda member: member is not type(None))
        results = (_convert(value, member, text) for member in members)
        return next((result for result in results if result is not _MISSING), _MISSING)
    if origin is Literal:
        same = [c for c in arguments if c == value and type(c) is type(value)]
        if text and isinstance(value, str):
            same += [choice for choice in arguments if str(choice).lower() == value.lower()]
        return same[0] if same else _MISSING
    if kind is str:
        return value if isinstance(value, str) else _MISSING
    if text and isinstance(value, str):
        value = _literal(value)
    if kind is type(None):
        return value if value is None else _MISSING
    if kind is bool:
        return value if isinstance(value, bool) else _MISSING
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _MISSING
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # A NaN or an infinity would make the executed notebook invalid JSON.
        return float(value) if number and math.isfinite(value) else _MISSING
    if text and origin is list:  # `--set tokens=1,65`, `--set peers=vllm,aiter`, `--set peers=`
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif not isinstance(value, list):  # `--set tokens=1`
            value = [value]
    if origin is list and isinstance(value, list):
        items = [_convert(item, arguments[0], text) for item in value]
        return items if all(item is not _MISSING for item in items) else _MISSING
    if origin is dict and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        pairs = {key: _convert(item, arguments[1], text) for key, item in value.items()}
        return pairs if all(item is not _MISSING for item in pairs.values()) else _MISSING
    return _MISSING


def _literal(value: str) -> Any:
    """The JSON or Python literal a text spells (``true`` and ``True`` alike), else the text."""
    lowered = value.strip().lower()
    if lowered in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(lowered)
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value)
        except (ValueError, SyntaxError):
            continue
    return value


def unknown_names(names: Iterable[str], parameters: Mapping[str, Parameter]) -> str | None:
    """What to say about names that are no parameter, with the nearest known one; else None."""
    wrong = [name for name in names if name not in parameters]
    if not wrong:
        return None
    near = difflib.get_close_matches(wrong[0], parameters, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    known = ", ".join(sorted(parameters)) or "none"
    return f"unknown parameter {', '.join(wrong)}{hint}; known: {known}"


def check_namespace(
    parameters: Mapping[str, Parameter], namespace: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameter values of a running notebook, checked.

    ``namespace`` is the notebook's ``globals()``. The names that papermill injects are checked too,
    so that a misspelled one is an error instead of a silent default. Raises ParameterError.
    """
    if problem := unknown_names(_injected(namespace), parameters):
        raise ParameterError(problem)
    if unset := [name for name in parameters if name not in namespace]:
        raise ParameterError(
            f"parameter {', '.join(unset)} has no value: run the parameters cell first"
        )
    return {name: check_value(p, namespace[name]) for name, p in parameters.items()}


def take_profile(
    parameters: Mapping[str, Parameter],
    namespace: MutableMapping[str, Any],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """Put a profile's values where a running notebook still has its defaults; returns those put.

    What was changed in the parameters cell or injected by papermill stays. Raises ParameterError.
    """
    if problem := unknown_names(values, parameters):
        raise ParameterError(problem)
    injected = _injected(namespace)
    put = {
        name: parse_value(parameters[name], value)
        for name, value in values.items()
        if name not in injected and namespace.get(name) == parameters[name].default
    }
    namespace.update(put)
    return put


def _injected(namespace: Mapping[str, Any]) -> list[str]:
    """The names that papermill gave values, in a cell of its own that begins with ``# Parameters``.

    From the kernel's input history.
    """
    names: list[str] = []
    for source in namespace.get("In", []):
        if source.lstrip().startswith("# Parameters"):
            names = [
                target.id
                for statement in ast.parse(source).body
                if isinstance(statement, ast.Assign)
                for target in statement.targets
                if isinstance(target, ast.Name)
            ]
    return names


@dataclass(frozen=True)
class Between:
    """Numbers from ``least`` to ``most``, both included."""

    least: float
    most: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"at least {self.least}" if self.most == math.inf else f"{self.least} to {self.most}"


def check_values(namespace: Mapping[str, Any], **wanted: Between | Collection[str]) -> None:
    """Refuse values that no part of a notebook can use, before anything is compiled.

    ``wanted`` says by parameter which numbers or which names are good; of a list, every item must
    be. A list of numbers must not be empty. They are checked in the order given. Raises
    ParameterError naming the parameter, what is expected and what was got (of a list: the wrong
    items).
    """
    for name, good in wanted.items():
        value = namespace[name]
        items = value if isinstance(value, list) else [value]
        wrong = [item for item in items if item not in good]
        if wrong or (isinstance(good, Between) and not items):
            expected = str(good) if isinstance(good, Between) else f"one of {', '.join(good)}"
            if isinstance(value, list):
                expected, value = f"a list of values, each {expected}", wrong
            raise ParameterError(f"parameter {name}: expected {expected}, got {value!r}")
