"""The specialization finder: where did tracing decide something from a dynamic size?

A dynamic dimension is a symbol while a graph is made. Whenever Python needs a plain bool or int
of it (an ``if``, ``int(n)``, ``range(n)``), the tracer evaluates an expression over the symbol, and
the answer becomes part of the graph. All of them pass through ``ShapeEnv.evaluate_expr``, also
those answered from the assumed range ``[2, inf)``, which leave no guard. There the finder listens
while it

1. traces the module with Dynamo (``torch.compile``), whose record names the user's line, and
2. runs it on fake tensors with symbolic sizes (as non-strict ``torch.export`` does), where the
   user's own Python frames are on the stack.

Decisions a user's line makes are reported. Those that PyTorch makes inside an operator
(broadcasting, contiguity) are reported only if they narrow the dimension: then the caller's line
fixed or bounded the size. When neither says anything, the Dynamo graphs of the example size, of one
less, and of 1 are compared: a constant that follows the size, another sequence of operators, or at
size 1 a result of another shape (``squeeze``), was decided unseen.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree as pytree

TORCH = os.path.dirname(torch.__file__) + os.sep
# Frames through which a user's question about a size reaches the shape environment.
_PLUMBING = (
    os.path.join(TORCH, "__init__.py"),
    *(
        os.path.join(TORCH, "fx", "experimental", name)
        for name in ("sym_node.py", "symbolic_shapes.py", "recording.py")
    ),
)
_DYNAMO = os.path.join(TORCH, "_dynamo", "")
_HELPERS = ("contextlib.py", "functools.py")
_LAYERS = os.path.join(TORCH, "nn", "modules", "")
_LARGEST = 2**40

Dynamic = Mapping[str | int, Collection[int]]
"""Argument name, or position, -> its dynamic dimensions."""


class FinderError(ValueError):
    """The finder cannot run: a bad dynamic dimension, or a module that does not trace."""


@dataclass(frozen=True)
class Finding:
    """One decision.

    kind: ``zero_one`` (answered from the range [2, inf): no guard is left), ``branch`` (a guard is
    left), ``constant`` (the size became an int), ``bound`` (an operator narrowed the size),
    ``diverged`` (another size gives other operators or another shape, and nothing told why).
    """

    file: str
    line: int
    expression: str
    value: str
    kind: str
    note: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.expression} -> {self.value}"


def find(
    module: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], dynamic: Dynamic
) -> list[Finding]:
    """Every place where tracing decides something from a dynamic dimension, in traced order.

    Nothing of the module is run on real tensors. Dynamo's caches are reset before and after.

    Args:
        module: what is traced, as one full graph.
        example_inputs: positional arguments, or keyword arguments by name.
        dynamic: which dimensions vary; their example sizes must be at least 3, because tracing
            takes sizes 0 and 1 for constants (3, so that a smaller one can be compared). Equal
            example sizes are taken for one and the same size, as tracing does.

    Raises:
        FinderError: an argument or dimension that does not exist, an example size under 3, a module
            that does not trace.
    """
    arguments = _bind(module, example_inputs)
    dims = _resolve(arguments, dynamic)
    decisions: list[Finding] = []
    graph = _dynamo(module, arguments, dims, decisions)
    _fake_run(module, arguments, dims, decisions)
    return _merge(decisions) or _compare_graphs(module, arguments, dims, graph)


# Inputs


def _bind(module: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``forward`` by name."""
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        name = type(module).__name__
        raise FinderError(f"example inputs do not fit {name}.forward: {error}") from error
    for parameter in bound.signature.parameters.values():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variadic and parameter.name in bound.arguments:
            raise FinderError(f"forward's *{parameter.name} cannot be traced by name")
    return dict(bound.arguments)


def _resolve(arguments: dict[str, Any], dynamic: Dynamic) -> dict[str, set[int]]:
    names = list(arguments)
    dims: dict[str, set[int]] = {}
    for key, wanted in dynamic.items():
        if isinstance(key, int):
            if not 0 <= key < len(names):
                raise FinderError(f"no argument {key}: forward was given {len(names)}")
            key = names[key]
        if key not in arguments:
            raise FinderError(f"no argument {key!r}; forward was given {', '.join(names)}")
        value = arguments[key]
        if not isinstance(value, Tensor):
            raise FinderError(f"{key} is {type(value).__name__}, not a tensor: no dimensions")
        for dim in wanted:
            if not 0 <= dim < value.dim():
                shape = tuple(value.shape)
                raise FinderError(f"{key} has no dimension {dim}: its shape is {shape}")
            if value.shape[dim] < 3:
                raise FinderError(
                    f"{key}.shape[{dim}] is {value.shape[dim]} in the example: tracing takes sizes "
                    "0 and 1 for constants; give an example of size 3 or more"
                )
        dims[key] = set(wanted)
    if not any(dims.values()):
        raise FinderError("no dynamic dimension was named")
    return dims


# Listening to decisions


@contextmanager
def _listening(label: str, out: list[Finding]) -> Iterator[None]:
    """Record what ``ShapeEnv`` is asked for while the block runs."""
    env_type: Any = symbolic_shapes.ShapeEnv
    evaluate = env_type.evaluate_expr
    asked = ("_static_eval_sym_bool", "_sym_node_hint_disproves")
    originals = {
        name: getattr(symbolic_shapes, name) for name in asked if hasattr(symbolic_shapes, name)
    }

    def evaluate_and_record(env: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        before = _ranges(env)
        value = evaluate(env, expression, *args, **kwargs)
        _record(env, expression, value, before, label, out)
        return value

    def static_and_record(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(question: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(question, *args, **kwargs)
            node = getattr(question, "node", question)
            if isinstance(getattr(node, "shape_env", None), env_type) and answer is not False:
                # Unknown, or disproved by the example, reads as "not so": as silent as an answer.
                truth = bool(answer) and not kwargs and not args
                _record(node.shape_env, node.expr, truth, _ranges(node.shape_env), label, out)
            return answer

        return ask

    env_type.evaluate_expr = evaluate_and_record
    for name, original in originals.items():
        setattr(symbolic_shapes, name, static_and_record(original))
    try:
        yield
    finally:
        env_type.evaluate_expr = evaluate
        for name, original in originals.items():
            setattr(symbolic_shapes, name, original)


def _ranges(env: Any) -> dict[Any, tuple[Any, Any]]:
    return {s: (r.lower, r.upper) for s, r in env.var_to_range.items()}


def _record(
    env: Any, expression: Any, value: Any, before: dict[Any, Any], label: str, out: list[Finding]
) -> None:
    symbols = getattr(expression, "free_symbols", None)
    if not symbols or _same_for_every_size(expression):
        return
    where, asker = _locate()
    if where is None or asker == "declared":
        return
    after = _ranges(env)
    narrowed = {s: after[s] for s in symbols if s in after and after[s] != before.get(s)}
    if asker == "operator":
        if not narrowed:
            return
        text = ", ".join(_range_text(r) for r in narrowed.values())
        kind = "constant" if all(low == high for low, high in narrowed.values()) else "bound"
    else:
        text = str(value)
        is_bool = getattr(value, "is_Boolean", False) or isinstance(value, bool)
        kind = "constant" if not is_bool else "branch" if narrowed else _guard_kind(expression)
    file, line = where
    note = f"{label}: {_name_symbols(env, expression)} is {value}"
    out.append(Finding(file, line, _source_expression(file, line), text, kind, note))


def _range_text(bounds: tuple[Any, Any]) -> str:
    low, high = bounds
    if low == high:
        return str(low)
    return f"{low}..{high}" if getattr(high, "is_finite", True) else f">= {low}"


def _probe_sizes(expression: Any, least: int) -> list[int]:
    """Sizes that tell a constant from a question: small, huge, and around every number named."""
    import sympy

    named = [int(n) for n in expression.atoms(sympy.Integer) if abs(n) < _LARGEST]
    around = {n + d for n in named for d in (-1, 0, 1)}
    quotients = {q + d for a in named for b in named if b for q in (a // b,) for d in (-1, 0, 1)}
    sizes = {0, 1, 2, 3, 5, 7, 64, _LARGEST} | around | quotients
    return sorted(size for size in sizes if size >= least)


@lru_cache(maxsize=4096)
def _constant_from(expression: Any, least: int) -> bool:
    """Has the expression one value whatever its sizes are, from ``least`` on?"""
    import sympy

    symbols = sorted(expression.free_symbols, key=str)
    seen = set()
    for size in _probe_sizes(expression, least):
        for apart in (0, 1):  # all sizes equal, and all different
            sizes = {s: sympy.Integer(size + apart * i) for i, s in enumerate(symbols)}
            try:
                seen.add(expression.xreplace(sizes))
            except (ZeroDivisionError, ValueError):
                continue  # not defined there: a division by the size
    return len(seen) <= 1


def _same_for_every_size(expression: Any) -> bool:
    """``n >= 0``: no size answers otherwise, so nothing was decided."""
    return _constant_from(expression, 0)


def _guard_kind(expression: Any) -> str:
    return "zero_one" if _constant_from(expression, 2) else "branch"


def _name_symbols(env: Any, expression: Any) -> str:
    """The expression with ``x.shape[0]`` for the symbol that Dynamo took from it."""
    text = str(expression)
    sources = getattr(env, "var_to_sources", {})
    for symbol in expression.free_symbols:
        if sources.get(symbol):
            name = sources[symbol][0].name
            name = name() if callable(name) else name
            name = name.replace(".size()", ".shape")
            name = re.sub(r"L(?:\['kwargs'\])?\['(\w+)'\]", r"\1", name)
            text = re.sub(rf"\b{symbol}\b", name.replace("\\", r"\\"), text)
    return text


# Whose line


def _locate() -> tuple[tuple[str, int] | None, str]:
    """(file, line) in user code, and who asked: ``user``, ``operator``, or ``declared`` (a
    ``torch._check`` of the user's own: a stated contract, not a decision)."""
    frame: FrameType | None = sys._getframe(2)
    last = ""
    checked = False
    while frame is not None and _is_plumbing(frame.f_code.co_filename):
        checked |= frame.f_code.co_name in ("expect_true", "guard_or_defer_runtime_assert")
        last, frame = frame.f_code.co_filename, frame.f_back
    if frame is None:
        return None, "user"
    file = frame.f_code.co_filename
    in_operator = (
        # Called from C++, not through a bool() or int() of the user's own.
        last.endswith("sym_node.py")
        if not _is_torch(file)
        else frame.f_code.co_name == "run_node" or not file.startswith(_DYNAMO)
    )
    directly = not _is_torch(file) or file.startswith(_DYNAMO)
    asker = "declared" if checked and directly else "operator" if in_operator else "user"
    layer = None
    while frame is not None and _is_torch(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if file.endswith("symbolic_convert.py"):
            return _dynamo_user_line(asker)
        if layer is None and file.startswith(_LAYERS):
            layer = (file, frame.f_lineno)
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == __file__:
        return layer, asker  # the module is torch's own: its layer is the nearest there is
    return (frame.f_code.co_filename, frame.f_lineno), asker


def _dynamo_user_line(asker: str) -> tuple[tuple[str, int] | None, str]:
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return None, asker
    stack = list(TracingContext.extract_stack())
    # Dynamo inlines torch's own Python too: what that decides is an operator's decision.
    if stack and _is_torch(stack[-1].filename):
        asker = "operator"
    user = [f for f in stack if not _is_torch(f.filename)] or stack
    return ((user[-1].filename, user[-1].lineno or 0) if user else None), asker


def _is_torch(file: str) -> bool:
    return file.startswith((TORCH, "<frozen", "<eval_with", "<string")) or file.endswith(_HELPERS)


def _is_plumbing(file: str) -> bool:
    return file.startswith(_PLUMBING) or file == __file__ or file.endswith("functools.py")


def _source_expression(file: str, line: int) -> str:
    """The condition, loop source or statement on that line, as written."""
    text = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return linecache.getline(file, line).strip()
    spans: list[Any] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    asked = [getattr(node, "test", getattr(node, "iter", None)) for node in spans]
    asked = [node for node in asked if node and node.lineno <= line <= node.end_lineno]
    simple = [n for n in spans if isinstance(n, ast.stmt) and not hasattr(n, "body")]
    best = min(asked or simple, key=lambda n: n.end_lineno - n.lineno, default=None)
    segment = ast.get_source_segment(text, best) if best else linecache.getline(file, line)
    return " ".join((segment or "").split())


def _merge(decisions: list[Finding]) -> list[Finding]:
    """One finding for one place and value, whoever saw it."""
    merged: dict[tuple[str, int, str], Finding] = {}
    for found in decisions:
        key = (found.file, found.line, found.value)
        known = merged.setdefault(key, found)
        if found.note not in known.note:
            merged[key] = replace(known, note=f"{known.note}; {found.note}")
    return list(merged.values())


# The two tracers


class _Traced(Exception):
    """Raised by the compiled code in place of running it."""


def _dynamo(
    module: nn.Module,
    arguments: dict[str, Any],
    dims: dict[str, set[int]],
    out: list[Finding],
    mark: bool = True,
) -> torch.fx.Graph:
    """Trace as ``torch.compile`` does; the graph, before any backend."""
    import torch._dynamo as dynamo

    inputs = {name: _fresh(value) for name, value in arguments.items()}
    graphs: list[torch.fx.Graph] = []

    def backend(graph_module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph_module.graph)

        def stop(*args: Any) -> Any:
            raise _Traced

        return stop

    # The weak mark: a size that is specialized must be reported, not refused.
    for name, wanted in dims.items() if mark else ():
        for dim in wanted:
            dynamo.maybe_mark_dynamic(inputs[name], dim)
    dynamo.reset()
    try:
        with (
            _listening("torch.compile", out),
            dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True),
        ):
            torch.compile(module, backend=backend, fullgraph=True)(**inputs)
    except _Traced:
        pass
    except Exception as error:
        raise FinderError(
            f"{type(module).__name__} does not trace: {_first_lines(error)}"
        ) from error
    finally:
        dynamo.reset()
    if not graphs:
        raise FinderError(f"{type(module).__name__} made no graph: it calls no tensor operator")
    return graphs[0]


def _fake_run(
    module: nn.Module, arguments: dict[str, Any], dims: dict[str, set[int]], out: list[Finding]
) -> None:
    """Run the module's own Python on fake tensors with symbolic sizes."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    env = symbolic_shapes.ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    kind = symbolic_shapes.DimDynamic

    def fake(path: Any, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        wanted = dims.get(name, set())
        sizes = [kind.DUCK if d in wanted else kind.STATIC for d in range(value.dim())]
        context: Any = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(name + pytree.keystr(path))
        return mode.from_tensor(value, source=source, symbolic_context=context)

    inputs = {
        name: pytree.tree_map_with_path(lambda path, t, n=name: fake(path, t, n), value)
        for name, value in arguments.items()
    }
    # A copy with fake weights: no memory, and the caller's module keeps its attributes.
    with FakeCopyMode(mode):
        copy = deepcopy(module)
    trace = make_fx(
        lambda given: copy(**given), tracing_mode="symbolic", _allow_non_fake_inputs=True
    )
    try:
        with torch.no_grad(), _listening("non-strict export", out):
            trace(inputs)
    except Exception as error:
        # Dynamo did trace it; what was decided before Python gave up still stands.
        if not out:
            name = type(module).__name__
            raise FinderError(
                f"{name} does not run on fake tensors: {_first_lines(error)}"
            ) from error


def _fresh(value: Any) -> Any:
    """Tensors that carry no earlier dynamic marks."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach(), value)


def _first_lines(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ".join(lines[:3])


# The second opinion


def _compare_graphs(
    module: nn.Module,
    arguments: dict[str, Any],
    dims: dict[str, set[int]],
    graph: torch.fx.Graph,
) -> list[Finding]:
    smaller = _dynamo(module, _resized(arguments, dims, less=1), dims, [])
    here, there = _operators(graph), _operators(smaller)
    found = _first_difference(here, there, "a size one less") or _constants(here, there)
    if found:
        return found
    try:
        one = _dynamo(module, _resized(arguments, dims, least=True), dims, [], mark=False)
    except FinderError:
        return []  # the module is not made for size 1
    there = _operators(one)
    return _first_difference(here, there, "size 1") or _shapes(here, there)


def _resized(
    arguments: dict[str, Any], dims: dict[str, set[int]], less: int = 0, least: bool = False
) -> dict[str, Any]:
    resized = dict(arguments)
    for name, wanted in dims.items():
        for dim in wanted:
            size = 1 if least else resized[name].shape[dim] - less
            resized[name] = resized[name].narrow(dim, 0, size)
    return resized


def _operators(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Calls that make tensors; arithmetic on sizes differs between traces by nature."""
    return [
        node
        for node in graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
        and not re.search("assert|_check", _name(node))
        and not isinstance(
            node.meta.get("example_value"),
            int | float | torch.SymInt | torch.SymFloat | torch.SymBool | torch.Size,
        )
    ]


def _name(node: torch.fx.Node | None) -> str:
    return getattr(node.target, "__name__", str(node.target)) if node else "nothing"


def _first_difference(
    here: list[torch.fx.Node], there: list[torch.fx.Node], size: str
) -> list[Finding]:
    for index in range(max(len(here), len(there))):
        a = here[index] if index < len(here) else None
        b = there[index] if index < len(there) else None
        names = [_name(a), _name(b)]
        if names[0] == "cond":
            return []  # torch.cond holds both branches; a constant predicate keeps one
        if names[0] != names[1]:
            note = f"with {size} the graph calls {names[1]} here instead of {names[0]}"
            differs = here[index] if a else there[index]
            return _at_node(differs, names[0], "diverged", note)
    return []


def _constants(here: list[torch.fx.Node], there: list[torch.fx.Node]) -> list[Finding]:
    """Literals at the same place of two graphs that follow the size."""
    found: list[Finding] = []
    for a, b in zip(here, there, strict=True):
        pairs = zip(_literals(a), _literals(b), strict=False)
        for value, other in pairs:
            if value != other:
                note = f"a constant in the graph; {other} with a size one less"
                found += _at_node(a, str(value), "constant", note)
    return _merge(found)


def _shapes(here: list[torch.fx.Node], there: list[torch.fx.Node]) -> list[Finding]:
    """Results that at size 1 are not what their symbolic shape says of size 1: ``squeeze`` keeps a
    dimension that it was told is not 1. Only where it starts; what follows inherits it."""
    found: list[Finding] = []
    differing: set[torch.fx.Node] = set()
    for a, b in zip(here, there, strict=False):
        if _name(a) != _name(b) or _name(a) == "cond":
            break  # from here on the graphs are not parallel
        for mine, other in zip(_tensors(a), _tensors(b), strict=False):
            expected = [_at_one(size) for size in mine.shape]
            if len(expected) == other.dim() and all(
                size is None or size == int(real)
                for size, real in zip(expected, other.shape, strict=True)
            ):
                continue
            if not differing.intersection(a.all_input_nodes):
                sizes = tuple(_example_size(size) for size in mine.shape)
                note = f"a shape decided; with size 1 the result here is {tuple(other.shape)}"
                found += _at_node(a, str(sizes), "diverged", note)
            differing.add(a)
    return _merge(found)


def _tensors(node: torch.fx.Node) -> list[Tensor]:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _at_one(size: int | torch.SymInt) -> int | None:
    """What a result's size says of inputs of size 1; None if that depends on the data."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    ones = dict.fromkeys(expression.free_symbols, 1)
    if any(size.node.shape_env.is_unbacked_symint(symbol) for symbol in ones):
        return None
    try:
        return int(expression.subs(ones))
    except TypeError:
        return None  # not defined there: a division by what is 0 at size 1


def _example_size(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else size.node.hint if size.node.has_hint() else str(size)


def _literals(node: torch.fx.Node) -> list[int | float]:
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    parts = [p for x in leaves for p in ((x.start, x.stop) if isinstance(x, slice) else (x,))]
    return [x for x in parts if isinstance(x, int | float) and not isinstance(x, bool)]


def _at_node(node: torch.fx.Node, value: str, kind: str, note: str) -> list[Finding]:
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    user = [(file, int(line)) for file, line in frames if not _is_torch(file)]
    file, line = user[-1] if user else ("<unknown>", 0)
    return [Finding(file, line, _source_expression(file, line), value, kind, note)]
