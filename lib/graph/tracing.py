"""What became of a branch on a dynamic size, under each way of making a graph.

One small module asks ``x.shape[0] == 1`` and calls one of two opaque ops. It is traced at a first
size, then called at 1 and at other sizes. The ops' nodes in the graph say which branch was traced,
their host counters say which one ran, and their different results say whether the answer was right.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["kept", "recompiled", "folded", "error", "not_run"]

HIDDEN = 8
SIZES_AFTER = (1, 2, 65, 4096)
"""Sizes called after the first trace, in this order."""

COUNTS: Counter[str] = Counter()
"""How often each op's implementation ran, by op name."""


# "2 <= L['x'].size()[0]", and from the tensor guard "size=[None, 8]".
_GUARD_ON_SIZE = re.compile(
    r"(?:\b\d+ [<>=!]+ )?L\['x'\]\.size\(\)\[0\](?: [<>=!]+ \d+)?"
    r"|(?<=requires_grad=False, )size=\[[^]]*\]"
)


class Unavailable(Exception):
    """This torch has no such API; the message names it."""


# Written out: torch 2.4 cannot read a schema off annotations that are strings, as they are here.
_SCHEMA = "(Tensor x) -> Tensor"


@torch.library.custom_op("fusion_evidence::traced_decode", mutates_args=(), schema=_SCHEMA)
def traced_decode(x: Tensor) -> Tensor:
    """Twice x, and a count."""
    COUNTS["traced_decode"] += 1
    return x * 2


@torch.library.custom_op("fusion_evidence::traced_prefill", mutates_args=(), schema=_SCHEMA)
def traced_prefill(x: Tensor) -> Tensor:
    """x + 1, and a count."""
    COUNTS["traced_prefill"] += 1
    return x + 1


for _op in (traced_decode, traced_prefill):
    _op.register_fake(lambda x: torch.empty_like(x))


class PythonBranch(nn.Module):
    """The article's form."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return traced_decode(x)
        return traced_prefill(x)


class GuardOrFalse(nn.Module):
    """Asks for a guard, and takes "cannot tell" for no."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.fx.experimental.symbolic_shapes.guard_or_false(x.shape[0] == 1):
            return traced_decode(x)
        return traced_prefill(x)


class Checked(nn.Module):
    """States its assumption before it branches."""

    def forward(self, x: Tensor) -> Tensor:
        torch._check(x.shape[0] > 1)
        if x.shape[0] == 1:
            return traced_decode(x)
        return traced_prefill(x)


class Cond(nn.Module):
    """Leaves the branch in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] == 1, traced_decode, traced_prefill, (x,))


@dataclass(frozen=True)
class Mode:
    """One way of making a graph.

    how: ``compile``, ``aot_compile`` or ``export``. guards: name of the filter, None keeps all.
    mark: how the size is declared dynamic. dim: the form of ``torch.export``'s Dim.
    """

    title: str
    how: Literal["compile", "aot_compile", "export"] = "compile"
    guards: str | None = None
    mark: Literal["mark_dynamic", "dynamic_true", "unbacked", "unbacked_strict"] | None = (
        "mark_dynamic"
    )
    first: int = 4096
    module: type[nn.Module] = PythonBranch
    size_oblivious: bool = False
    dim: str = ""


SKIP_ALL, KEEP_TENSOR, KEEP_PORTABLE = (
    "skip_all_guards_unsafe",
    "keep_tensor_guards_unsafe",
    "keep_portable_guards_unsafe",
)

MODES: dict[str, Mode] = {
    "mark_dynamic": Mode("guards kept, mark_dynamic"),
    "dynamic_true": Mode("guards kept, dynamic=True", mark="dynamic_true"),
    "automatic_dynamic": Mode("guards kept, automatic dynamic shapes", mark=None),
    "mark_dynamic_first_2": Mode("guards kept, mark_dynamic, first trace T=2", first=2),
    "mark_dynamic_first_1": Mode("guards kept, mark_dynamic, first trace T=1", first=1),
    "automatic_dynamic_first_1": Mode("guards kept, automatic, first T=1", mark=None, first=1),
    "skip_all_guards": Mode("guards dropped (as vLLM does)", guards=SKIP_ALL),
    "skip_all_guards_first_2": Mode("guards dropped, first trace T=2", guards=SKIP_ALL, first=2),
    "skip_all_guards_first_1": Mode(
        "guards dropped, first trace T=1", guards=SKIP_ALL, first=1, mark=None
    ),
    "keep_tensor_guards": Mode("only tensor guards kept", guards=KEEP_TENSOR),
    "keep_portable_guards": Mode("only portable guards kept", guards=KEEP_PORTABLE),
    "mark_unbacked": Mode("mark_unbacked", mark="unbacked"),
    "mark_unbacked_strict": Mode("mark_unbacked(strict=True)", mark="unbacked_strict"),
    "size_oblivious": Mode("backed_size_oblivious, guards kept", size_oblivious=True),
    "size_oblivious_skip_all_guards": Mode(
        "backed_size_oblivious, guards dropped", guards=SKIP_ALL, size_oblivious=True
    ),
    "guard_or_false": Mode("guard_or_false, backed size", module=GuardOrFalse),
    "guard_or_false_unbacked": Mode(
        "guard_or_false, mark_unbacked", module=GuardOrFalse, mark="unbacked"
    ),
    "guard_or_false_size_oblivious": Mode(
        "guard_or_false, backed_size_oblivious", module=GuardOrFalse, size_oblivious=True
    ),
    "check": Mode("torch._check(T > 1), guards kept", module=Checked),
    "check_skip_all_guards": Mode(
        "torch._check(T > 1), guards dropped", module=Checked, guards=SKIP_ALL
    ),
    "cond": Mode("torch.cond, guards kept", module=Cond),
    "cond_skip_all_guards": Mode("torch.cond, guards dropped", module=Cond, guards=SKIP_ALL),
    "aot_compile": Mode("aot_compile, all guards", how="aot_compile"),
    "aot_compile_skip_all_guards": Mode(
        "aot_compile, guards dropped", how="aot_compile", guards=SKIP_ALL
    ),
    "aot_compile_keep_portable_guards": Mode(
        "aot_compile, portable guards", how="aot_compile", guards=KEEP_PORTABLE
    ),
    **{
        f"export_{name}{suffix}": Mode(
            f"torch.export, {dim}{title}", how="export", dim=dim, size_oblivious=oblivious
        )
        for name, dim in (
            ("dynamic", "Dim.DYNAMIC"),
            ("auto", "Dim.AUTO"),
            ("dim", "Dim('T')"),
            ("dim_min_1", "Dim('T', min=1)"),
        )
        for suffix, title, oblivious in (
            ("", "", False),
            ("_size_oblivious", ", backed_size_oblivious", True),
        )
    },
    "export_cond": Mode(
        "torch.export, Dim.AUTO, torch.cond", how="export", dim="Dim.AUTO", module=Cond
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What became of the branch.

    outcome: ``kept`` (right, and the first graph holds both branches), ``recompiled`` (right, by
    further graphs), ``folded`` (no complaint, wrong at some size), ``error``, ``not_run``.
    message: of the error, or why it was not run. graphs: how many were made.
    guards: installed guards whose text mentions the size. ranges: of the size's symbol, per graph.
    branch_calls: per graph, the ops of the two branches found in it.
    """

    mode: str
    outcome: Kind
    message: str = ""
    graphs: int = 0
    guards: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    branch_calls: tuple[tuple[str, ...], ...] = ()
    marker_fired_at_T1: bool = False
    right_at_every_T: bool = False


@dataclass
class _Seen:
    graphs: list[torch.fx.GraphModule] = field(default_factory=list)
    environments: list[Any] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)

    def serializable_backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """The same for ``aot_compile``, which wants something it could save."""
        from torch._dynamo.aot_compile import SerializableCallable

        run = self.backend(graph, inputs)

        class Recorded(SerializableCallable):
            def __call__(self, *args: Any) -> Any:
                return run(*args)

            @classmethod
            def serialize_compile_artifacts(cls, compiled: Any) -> bytes:
                raise NotImplementedError("nothing is saved here")

            @classmethod
            def deserialize_compile_artifacts(cls, data: bytes) -> Any:
                raise NotImplementedError("nothing is saved here")

        return Recorded()

    def backend(self, graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        """A backend that only records, and runs the graph as it is."""
        self.graphs.append(graph)
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.fake_mode is not None:
            self.environments.append(context.fake_mode.shape_env)
        return graph.forward

    def note_ranges(self) -> None:
        for environment in self.environments:
            for symbol, bounds in environment.var_to_range.items():
                self.ranges.append(f"{symbol}: [{bounds.lower}, {bounds.upper}]")


def trace(mode: str, *, device: str = "cpu", hidden: int = HIDDEN) -> Outcome:
    """Trace the branch under a named mode (a key of ``MODES``) and call it at several sizes.

    Dynamo is reset before and after, so modes do not influence each other.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    seen, chosen = _Seen(), MODES[mode]
    torch._dynamo.reset()
    try:
        with _settings(chosen):
            return _observe(mode, chosen, seen, device, hidden)
    except Unavailable as reason:
        return Outcome(mode, "not_run", str(reason))
    finally:
        torch._dynamo.reset()


def _observe(name: str, mode: Mode, seen: _Seen, device: str, hidden: int) -> Outcome:
    eager, right, fired, message = mode.module(), True, False, ""
    reference = PythonBranch()
    call: Callable[[Tensor], Tensor] | None = None
    for size in (mode.first, *SIZES_AFTER):
        x = torch.randn(size, hidden, device=device)
        expected = reference(x)
        before = COUNTS["traced_decode"]
        try:
            if call is None:
                call = _make(eager, mode, seen, _declare(x, mode))
            # Only the first input is marked: later ones arrive as a service's do.
            actual = call(x)
        except Unavailable:
            raise
        except Exception as error:
            message = f"T={size}: {_short(error)}"
            right = False
            break
        right &= torch.equal(actual, expected)
        fired |= size == 1 and COUNTS["traced_decode"] > before
    seen.note_ranges()
    seen.guards += _installed_guards(eager)
    count = len(seen.graphs)
    calls = tuple(_branch_calls(graph) for graph in seen.graphs)
    outcome: Kind = "error" if message else "folded"
    if right:
        outcome = "kept" if len(set(calls[0])) == 2 else "recompiled"
    guards = tuple(dict.fromkeys(seen.guards))
    return Outcome(name, outcome, message, count, guards, tuple(seen.ranges), calls, fired, right)


# Making the graph


@contextlib.contextmanager
def _settings(mode: Mode) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if mode.how == "aot_compile" and hasattr(torch._dynamo.config, "enable_aot_compile"):
            # Off by default up to torch 2.11, and turned on by vLLM.
            stack.enter_context(torch._dynamo.config.patch(enable_aot_compile=True))
        if mode.size_oblivious:
            stack.enter_context(_size_oblivious())
        yield


def _size_oblivious() -> contextlib.AbstractContextManager[None]:
    from torch.fx.experimental import _config as module

    _config: Any = module
    if not hasattr(_config, "backed_size_oblivious"):
        raise Unavailable(_lacks("torch.fx.experimental._config.backed_size_oblivious"))
    return _config.patch(backed_size_oblivious=True)


def _declare(x: Tensor, mode: Mode) -> Tensor:
    """Mark the first input's size as the mode says."""
    if mode.how == "export" or mode.mark in (None, "dynamic_true"):
        return x
    if mode.mark == "mark_dynamic":
        torch._dynamo.mark_dynamic(x, 0)
        return x
    if not hasattr(torch._dynamo.decorators, "mark_unbacked"):
        raise Unavailable(_lacks("torch._dynamo.decorators.mark_unbacked"))
    options = {"strict": True} if mode.mark == "unbacked_strict" else {}
    try:
        torch._dynamo.decorators.mark_unbacked(x, 0, **options)
    except TypeError as error:
        raise Unavailable(_lacks("mark_unbacked(strict=True)")) from error
    return x


def _make(module: nn.Module, mode: Mode, seen: _Seen, x: Tensor) -> Callable[[Tensor], Tensor]:
    if mode.module is GuardOrFalse and not hasattr(
        torch.fx.experimental.symbolic_shapes, "guard_or_false"
    ):
        raise Unavailable(_lacks("guard_or_false"))
    if mode.how == "export":
        return _export(module, mode, seen, x)
    options = _filtering(mode.guards) if mode.guards else None
    dynamic = True if mode.mark == "dynamic_true" else None
    ahead = mode.how == "aot_compile"
    compiled = torch.compile(
        module.forward if ahead else module,
        backend=seen.serializable_backend if ahead else seen.backend,
        fullgraph=True,
        dynamic=dynamic,
        options=options,
    )
    if ahead:
        if not hasattr(compiled, "aot_compile"):
            raise Unavailable(_lacks("torch.compile(...).aot_compile"))
        ready = compiled.aot_compile(((x,), {}))
        return lambda given: ready(module, given)
    return compiled


def drop_guards() -> dict[str, Any]:
    """``options`` for `torch.compile` that leave a graph without guards, as vLLM's is.

    For one call: it pops the filter out of them. Unavailable: before torch 2.8.
    """
    return _filtering(SKIP_ALL)


def _filtering(name: str) -> dict[str, Any]:
    if "guard_filter_fn" not in torch._dynamo.hooks.Hooks.__dataclass_fields__:
        raise Unavailable(_lacks("guard_filter_fn for torch.compile"))
    found = getattr(torch.compiler, name, None)
    if found is None and name == SKIP_ALL:  # torch 2.8 and 2.9, where vLLM has this in its place
        found = _none_of
    if found is None:
        raise Unavailable(_lacks(f"torch.compiler.{name}"))
    return {"guard_filter_fn": found}


def _none_of(entries: Sequence[Any]) -> list[bool]:
    return [False] * len(entries)


def _export(module: nn.Module, mode: Mode, seen: _Seen, x: Tensor) -> Callable[[Tensor], Tensor]:
    Dim = torch.export.Dim
    attribute = mode.dim.partition(".")[2]
    if attribute and not hasattr(Dim, attribute):
        raise Unavailable(_lacks(f"torch.export.{mode.dim}"))
    dim = {
        "Dim.DYNAMIC": lambda: Dim.DYNAMIC,
        "Dim.AUTO": lambda: Dim.AUTO,
        "Dim('T')": lambda: Dim("T"),
        "Dim('T', min=1)": lambda: Dim("T", min=1),
    }[mode.dim]()
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: dim}})
    seen.graphs.append(program.graph_module)
    for symbol, bounds in program.range_constraints.items():
        seen.ranges.append(f"{symbol}: [{bounds.lower}, {bounds.upper}]")
    seen.guards += [str(guard) for guard in getattr(program, "_guards_code", [])]
    return program.module()


# Looking at the result


def _branch_calls(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """Branch ops in the graph and in the graphs inside it (``torch.cond``'s branches)."""
    found = []
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            found += [n for n in ("traced_decode", "traced_prefill") if n in str(node.target)]
    return tuple(found)


def _installed_guards(module: nn.Module) -> list[str]:
    """Texts of the guards on the size that Dynamo's cache holds for this module's forward."""
    from torch._dynamo import eval_frame

    entries: list[Any] = getattr(eval_frame, "_debug_get_cache_entry_list", lambda _: [])(
        type(module).forward.__code__
    )
    texts: list[str] = []
    for entry in entries:
        holder = getattr(entry, "guard_manager", None) or getattr(entry, "check_fn", None)
        whole = "\n".join([str(holder), *(getattr(holder, "code_parts", None) or [])])
        texts += _GUARD_ON_SIZE.findall(whole)
    return [" ".join(text.split()) for text in texts]


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:5])}"[:300]


def _lacks(name: str) -> str:
    return f"torch {torch.__version__} has no {name}"
