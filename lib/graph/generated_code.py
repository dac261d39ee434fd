"""Reading the code that Inductor generates: what was generated, and does any of it touch the
whole KV cache?

A baseline that copies the cache on every call makes whatever is compared with it look fast, so a
baseline counts only when `kernels_touching` and `unknown_sizes` are both empty for its code.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def capture() -> Iterator[list[str]]:
    """Collect the wrapper source of every graph that Inductor compiles inside the block.

    One string a graph, in order; a graph found in Inductor's cache on disk counts too, one that
    this process compiled before does not. Unlike `torch._inductor.utils.run_and_get_code` it
    leaves Dynamo's caches alone.
    """
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    if not hasattr(GraphLowering, "save_output_code"):  # torch 2.4: read what it loads instead
        with loading(lambda module, source: codes.append(source)):
            yield codes
        return
    # A no-op static method up to torch 2.9 or so, None later; either way called on the class.
    previous = GraphLowering.__dict__["save_output_code"]
    chained = GraphLowering.save_output_code

    def save(code: str) -> None:
        codes.append(code)
        if chained is not None:
            chained(code)

    GraphLowering.save_output_code = staticmethod(save)  # type: ignore[assignment]
    try:
        yield codes
    finally:
        GraphLowering.save_output_code = previous


@contextmanager
def loading(see: Callable[[ModuleType, str], None]) -> Iterator[None]:
    """Call ``see(module, source)`` for every graph's module that Inductor loads inside.

    Both are taken as they load: a compilation without caches forgets the module and deletes the file.
    """
    from torch._inductor.codecache import PyCodeCache

    name = "load_by_key_path"
    descriptor, original = PyCodeCache.__dict__[name], getattr(PyCodeCache, name)

    def load(_: type, key: str, path: str, *rest: Any, **options: Any) -> ModuleType:
        module = original(key, path, *rest, **options)
        if hasattr(module, "call"):  # a kernel's has none
            see(module, Path(path).read_text(encoding="utf-8"))
        return module

    setattr(PyCodeCache, name, classmethod(load))
    try:
        yield
    finally:
        setattr(PyCodeCache, name, descriptor)


_KERNEL = re.compile(
    r"^(?P<name>\w+) = async_compile\.(?P<kind>\w+)\((?P<head>[^\n]*?)r?'''(?P<body>.*?)'''[^\n]*$",
    re.DOTALL | re.MULTILINE,
)
# The benchmark harness at the end: never run by the model, full of the sizes of the first trace.
_HARNESS = re.compile(r"^def (get_args|benchmark_compiled_module)\b", re.MULTILINE)
# A copy of the kernels, as a string, that tuning at compile time leaves before the code.
_TUNING = re.compile(
    r'\A\s*r?"""\s*Compile-time auto-tuning block:.*?^"""', re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class _Running:
    """Generated code without what tunes it before and benchmarks it after, taken apart.

    kernels: the definitions of generated kernels, in order. wrapper: the rest, which launches them.
    harness: the benchmark that was cut off, with the sizes of the first trace; empty if there is none.
    """

    code: str
    harness: str

    @classmethod
    def of(cls, code: str) -> _Running:
        code = _TUNING.sub("", code)
        # A kernel's own benchmark lies inside its definition and goes with it.
        outside = _KERNEL.sub(lambda kernel: " " * len(kernel[0]), code)
        harness = _HARNESS.search(outside)
        end = harness.start() if harness else len(code)
        return cls(code[:end], code[end:])

    @property
    def kernels(self) -> list[re.Match[str]]:
        return list(_KERNEL.finditer(self.code))

    @property
    def wrapper(self) -> str:
        return _KERNEL.sub("", self.code)


def normalized(code: str) -> str:
    """The part of generated code that decides what runs, comparable across caches and processes.

    Without comments, blank lines, what tunes and benchmarks it, hashes and the names of cache files.
    """

    def body(match: re.Match[str]) -> str:
        text = match["body"]
        if match["kind"] == "triton":
            stripped = _without_comments(text)
        else:
            stripped = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        return match[0].replace(text, stripped)

    code = _without_comments(_KERNEL.sub(body, _Running.of(code).code))
    code = re.sub(r'"[^"\n]*torchinductor[^"\n]*\.h"', '"prefix.h"', code)
    code = re.sub(r"'[^'\n]*torchinductor[^'\n]*'", "'cache'", code)
    code = re.sub(r"\b[0-9A-F]{64}\b", "hash", code)
    code = re.sub(r"\b[0-9a-f]{64}\b", "hash", code)
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip()) + "\n"


def _without_comments(source: str) -> str:
    lines = source.splitlines(keepends=True)
    comments = [
        token.start
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for row, column in comments:
        lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    return "".join(lines)


@dataclass(frozen=True)
class Sized:
    """Something in generated code and how many elements it goes over.

    what: `kernel`, `allocation`, `result` (of an operator Inductor does not generate) or `copy`.
    name: the kernel's or buffer's name.
    expression: its size as written, such as `1024*s77`.
    elements: its value at the sizes of the first trace, None if that cannot be told.
    symbolic: it depends on sizes that are no constants.
    """

    what: str
    name: str
    expression: str
    elements: int | None
    symbolic: bool

    def __str__(self) -> str:
        value = "unknown" if self.elements is None else f"{self.elements:,} elements"
        shown = f" ({self.expression})" if self.symbolic else ""
        return f"{self.what} {self.name}: {value}{shown}"


def launches(code: str) -> int:
    """Calls of generated kernels in the code that runs: library calls and custom operators are none."""
    running = _Running.of(code)
    kernels = {match["name"] for match in running.kernels}
    calls = (_read_call(line.strip()) for line in running.wrapper.splitlines())
    return sum(call is not None and call[0] in kernels for call in calls)


def kernels_touching(code: str, numel: int) -> list[str]:
    """Generated kernels, allocations, extern results and copies of at least `numel` elements.

    code: one string of `capture`. numel: elements of the cache. Give the cache more elements than
    the largest activation has, or those are reported too. A kernel's size is what it iterates
    over: a scatter of T rows into the cache counts T rows. Kernels written by hand (custom
    operators, user-defined Triton kernels) have no generated size and are not looked into.
    ValueError: `code` is not the Python wrapper that Inductor writes.
    """
    return [str(item) for item in _sizes(code).items if (item.elements or 0) >= numel]


def unknown_sizes(code: str, numel: int) -> list[str]:
    """What `kernels_touching` could not judge: sizes made of symbols without a trustworthy value.

    Symbolic sizes are valued at the sizes of the first trace, which the code itself records. That
    says nothing of a cache of another size: if no argument had `numel` elements then, every
    symbolic size below `numel` is reported here.
    """
    sizes = _sizes(code)
    described = numel in sizes.arguments
    return [
        str(item)
        for item in sizes.items
        if item.elements is None or (item.symbolic and not described and item.elements < numel)
    ]


@dataclass(frozen=True)
class _Sizes:
    items: list[Sized]
    arguments: set[int]  # element counts of the graph's inputs, at the sizes of the first trace


@dataclass(frozen=True)
class _Kernel:
    parameters: list[str]
    numels: list[str]  # expressions over the parameters, one for each loop nest


@dataclass(frozen=True)
class _Value:
    """An expression with its value, if it has one."""

    text: str
    value: int | None
    symbolic: bool


_LINE = {
    "asserted": re.compile(r"assert_size_stride\((\w+), (\(.*?\)), \("),
    "allocated": re.compile(r"^(\w+) = (?:\w+\.)*(?:tracked_)?empty_strided\w*\((\(.*?\)), \("),
    "viewed": re.compile(r"^(\w+) = reinterpret_tensor\(\w+, (\(.*?\)), \("),
    "renamed": re.compile(r"^(\w+) = (\w+)(?:; del \w+)?$"),
    "whole": re.compile(
        r"^(\w+) = (?:torch\.ops\.)?aten\.(clone|copy|contiguous|index_put|index_copy|index_add|"
        r"scatter|slice_scatter|select_scatter|masked_scatter|where)\b[.\w]*\((\w+)"
    ),
    "assigned": re.compile(r"^(\w+) = ([^=].*)$"),
}


def _sizes(code: str) -> _Sizes:
    if "async_compile" not in code and not re.search(r"^\s*def call\(", code, re.MULTILINE):
        raise ValueError("not the Python wrapper code of an Inductor graph: no call() in it")
    running = _Running.of(code)
    kernels = {m["name"]: _read_kernel(m["kind"], m["body"]) for m in running.kernels}
    hints = _read_hints(running.harness)

    symbols: dict[str, int | None] = {}  # s77 and the like; None if its value is not known
    numels: dict[str, str] = {}  # sizes that the wrapper works out before a launch
    shapes: dict[str, _Value] = {}  # elements of each named tensor
    asserted: dict[str, _Value] = {}
    items: list[Sized] = []
    arguments: set[int] = set()

    def add(what: str, name: str, size: _Value | None) -> None:
        size = size or _Value("?", None, True)
        items.append(Sized(what, name, size.text, size.value, size.symbolic))

    for raw in running.wrapper.splitlines():
        line = re.sub(r"\s+#.*$", "", raw).strip()
        if found := _LINE["asserted"].search(line):
            name, size = found[1], _elements(found[2], symbols)
            shapes[name] = size
            if name.startswith("buf"):  # a result that Inductor did not allocate itself
                if name not in asserted:
                    asserted[name] = size
                    add("result", name, size)
            elif size.value is not None:
                arguments.add(size.value)
        elif found := _LINE["allocated"].match(line):
            shapes[found[1]] = size = _elements(found[2], symbols)
            asserted[found[1]] = size
            add("allocation", found[1], size)
        elif found := _LINE["viewed"].match(line):
            shapes[found[1]] = _elements(found[2], symbols)
        elif re.search(r"\bcopy_[.\w]*\(", line):
            sides = _read_copy(line)
            # Both sides have one size unless the source is broadcast: the first that is known.
            known = (_operand(side, shapes, symbols) for side in sides)
            add("copy", line, next((size for size in known if size), None))
        elif found := _LINE["whole"].match(line):
            # Its size is its first operand's; the assertion that may follow is then no news.
            if found[1] not in asserted:
                asserted[found[1]] = shapes[found[1]] = size = shapes.get(
                    found[3], _Value("?", None, True)
                )
                add("result", f"{found[1]} = aten.{found[2]}({found[3]})", size)
        elif (call := _read_call(line)) and call[0] in kernels:
            name, operands = call
            kernel = kernels[name]
            bound = dict(zip(kernel.parameters, operands, strict=False))
            for numel in kernel.numels:
                written = _substituted(_substituted(numel, bound), numels)
                add("kernel", name, _valued(written, symbols))
        elif (found := _LINE["renamed"].match(line)) and found[2] in shapes:
            shapes[found[1]] = shapes[found[2]]
        elif found := _LINE["assigned"].match(line):
            name, text = found[1], found[2]
            if re.fullmatch(r"[su]\d+|zuf\d+", name):
                symbols[name] = hints.get(text, _evaluate(text, symbols))
            elif name.endswith("numel"):  # triton_poi_fused_0_xnumel = 4096*s77
                numels[name] = text
    return _Sizes(items, arguments)


def _read_kernel(kind: str, body: str) -> _Kernel:
    return _read_triton(body) if kind == "triton" else _read_cpp(body)


_PREFIX = re.compile(r"^(?P<axis>[xyz]|r\d*_?)numel(?P<part>_\d+)?$")


def _read_triton(body: str) -> _Kernel:
    """Sizes are constants in the body (`xnumel = 4096`) or, if dynamic, parameters of the kernel.

    A combo kernel has one set of them for each of its parts: parameters `xnumel_0`, `xnumel_1`,
    constants in the branch of the part.
    """
    signature = re.search(r"^def \w+\((.*?)\):", body, re.MULTILINE | re.DOTALL)
    parameters = [
        p.split(":")[0].split("=")[0].strip()
        for p in (signature[1].split(",") if signature else [])
    ]
    parts: dict[str, dict[str, str]] = {}
    for name in parameters:
        if found := _PREFIX.match(name):
            parts.setdefault(found["part"] or "", {})[found["axis"]] = name
    branches = re.split(r"^\s*(?:el)?if pid\b[^\n]*:$", body, flags=re.MULTILINE)
    for index, branch in enumerate(branches, start=-1):
        for name, value in re.findall(r"^\s+(\w+) = (\d+)$", branch, re.MULTILINE):
            if found := _PREFIX.match(name):
                part = f"_{index}" if index >= 0 else ""
                parts.setdefault(part, {})[found["axis"]] = value
    return _Kernel(
        parameters, ["*".join(f"({v})" for v in axes.values()) for axes in parts.values()]
    )


_LOOP = re.compile(
    r"for\s*\(\s*(?:int64_t|int|long|auto)\s+(\w+)\s*=\s*(.+?);\s*\w+\s*<\s*(.+?);", re.DOTALL
)


def _read_cpp(body: str) -> _Kernel:
    """Sizes are the products of nested loops' extents; the step (vector width) does not matter."""
    body = re.sub(r"//[^\n]*", "", body)
    signature = re.search(r'extern "C".*?\w+\s*\((.*?)\)\s*\{', body, re.DOTALL)
    if signature is None:
        return _Kernel([], [])
    parameters = [p.split()[-1].lstrip("*&") for p in signature[1].split(",") if p.strip()]
    numels: list[str] = []
    stack: list[tuple[int, str, str]] = []  # brace depth, loop variable, extent
    depth, pending, position = 0, None, signature.end() - 1
    token = re.compile(rf"[{{}}]|{_LOOP.pattern}", re.DOTALL)
    while found := token.search(body, position):
        position = found.end()
        if found[0] == "{":
            depth += 1
            if pending:
                stack.append((depth, *pending))
                pending = None
        elif found[0] == "}":
            if stack and stack[-1][0] == depth:
                stack.pop()
            depth -= 1
        else:
            name = re.sub(r"_(tail|inner)$", "", found[1])
            if any(name == outer for _, outer, _ in stack):
                continue  # steps within one vector of the loop outside it
            start, stop = _cpp_expression(found[2]), _cpp_expression(found[3])
            extent = stop if start in ("0", "(0)") else f"({stop})-({start})"
            pending = (name, extent)
            numels.append("*".join(f"({e})" for e in [*(e for *_, e in stack), extent]))
    # Of a nest only the innermost products matter: an outer one divides them.
    return _Kernel(
        parameters, [n for n in numels if not any(o.startswith(n + "*") for o in numels)]
    )


def _cpp_expression(text: str) -> str:
    text = re.sub(r"static_cast<[\w:]+>|c10::convert<[\w:]+>", "", text)
    text = re.sub(r"(\d+)(?:LL|L|UL|U)\b", r"\1", text)
    return text.replace("c10::div_floor_integer", "floordiv").strip()


def _read_call(line: str) -> tuple[str, list[str]] | None:
    """`kernel.run(a, b, 4096, stream=stream0)` or `kernel(a, b)` -> name, positional operands."""
    try:
        node = ast.parse(line, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "run":
        function = function.value
    if not isinstance(function, ast.Name):
        return None
    return function.id, [ast.unparse(argument) for argument in node.args]


def _read_copy(line: str) -> list[str]:
    """`a.copy_(b, False)` or `aten.copy_.default(a, b)` -> the two tensors as written."""
    try:
        node = ast.parse(line, mode="eval").body
    except SyntaxError:
        return []
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    tensors = node.args[:2]
    if node.func.attr == "copy_" and ast.unparse(node.func.value) not in ("aten", "torch.ops.aten"):
        tensors = [node.func.value, *node.args[:1]]
    return [ast.unparse(tensor) for tensor in tensors]


def _read_hints(harness: str) -> dict[str, int]:
    """Sizes of the first trace: `arg0_1 = 3` in the benchmark harness."""
    found = re.findall(r"^\s+(\w+) = (\d+)$", harness, re.MULTILINE)
    return {name: int(value) for name, value in found}


def _elements(shape: str, symbols: Mapping[str, int | None]) -> _Value:
    try:
        node = ast.parse(shape, mode="eval").body
    except SyntaxError:
        return _Value(shape, None, True)
    sizes = node.elts if isinstance(node, ast.Tuple) else [node]
    return _valued("*".join(f"({ast.unparse(size)})" for size in sizes) or "1", symbols)


def _substituted(text: str, values: Mapping[str, str]) -> str:
    """Names in an expression replaced by what they stand for, in parentheses."""
    return re.sub(r"[A-Za-z_]\w*", lambda m: f"({values[m[0]]})" if m[0] in values else m[0], text)


def _valued(text: str, symbols: Mapping[str, int | None]) -> _Value:
    return _Value(_tidy(text), _evaluate(text, symbols), bool(re.search(r"[A-Za-z_]", text)))


def _tidy(text: str) -> str:
    """`(s77)*((4 * 64))` -> `s77*4*64`."""
    try:
        return _shown(ast.parse(text, mode="eval").body)
    except SyntaxError:
        return text


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return f"{_shown(node.left)}*{_shown(node.right)}"
    return ast.unparse(node) if not isinstance(node, ast.BinOp) else f"({ast.unparse(node)})"


def _operand(
    text: str, shapes: Mapping[str, _Value], symbols: Mapping[str, int | None]
) -> _Value | None:
    """Elements of a tensor written as a name or as a view of one."""
    if text in shapes:
        return shapes[text]
    found = re.match(r"reinterpret_tensor\(\w+, (\(.*?\)), \(", text)
    return _elements(found[1], symbols) if found else None


def _evaluate(text: str, symbols: Mapping[str, int | None]) -> int | None:
    """Value of an integer expression, or None if a name in it has none."""
    try:
        return _value_of(ast.parse(text.strip(), mode="eval").body, symbols)
    except (SyntaxError, ZeroDivisionError):
        return None


def _value_of(node: ast.AST, symbols: Mapping[str, int | None]) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return symbols.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _value_of(node.operand, symbols)
        return None if operand is None else -operand
    operands: list[ast.expr]
    if isinstance(node, ast.BinOp):
        operands, operation = [node.left, node.right], type(node.op).__name__
    elif isinstance(node, ast.Call) and not node.keywords:
        operands, operation = node.args, ast.unparse(node.func)
    else:
        return None
    values = [_value_of(operand, symbols) for operand in operands]
    known = [v for v in values if v is not None]
    if len(known) != len(values) or operation not in _OPERATIONS:
        return None
    return _OPERATIONS[operation](*known)


_OPERATIONS: dict[str, Callable[..., int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mult": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "Pow": lambda a, b: a**b,
    "floordiv": lambda a, b: a // b,
    "max": max,
    "min": min,
    "math.prod": lambda *values: math.prod(values),
}
