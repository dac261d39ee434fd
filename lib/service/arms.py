"""The arms: one model, compiled for prefill and for decode, each with its own prologue.

Which graph runs is chosen by the token count *outside* compiled code, so an arm can change one graph and
leave the other as it was. Both share the weights. What a graph contains in the prologue's place is the
arm's name, ``<prefill>__<decode>``:

- ``in_graph``: the model's own code, which the compiler fuses as it likes;
- ``opaque_eager``, ``opaque_compiled``: the opaque operator around the same code;
- ``opaque_reference``: the operator around the definition, with declared numerics; on any machine;
- ``fused`` (prefill: ``opaque_fused``): the operator around the fused kernel, or a candidate for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fusion_evidence.kernels import eager
from fusion_evidence.kernels.numerics import Contraction, Numerics, Reduction, Rounding
from fusion_evidence.kernels.op import Configuration, OpaquePrologue
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.measure.markers import Markers
from fusion_evidence.lib.service.graphs import GraphReport, Traced
from fusion_evidence.lib.service.model import (
    AttentionBackend,
    CompactModel,
    Prologue,
    pin_attention,
    with_prologue,
)

PREFILL = ("in_graph", "opaque_eager", "opaque_compiled", "opaque_reference", "opaque_fused")
DECODE = ("in_graph", "opaque_eager", "opaque_compiled", "opaque_reference", "fused")
ALIASES = {
    "baseline": "in_graph__in_graph",
    "control": "in_graph__in_graph",
    "rebuild": "in_graph__in_graph",
    "fallback_only": "opaque_eager__opaque_eager",
    "integrated": "in_graph__fused",
}
EVERY_T = (1, 2**31 - 1)


@dataclass(frozen=True)
class Arm:
    """What stands in the prologue's place at prefill and at decode.

    ValueError: there is no such arm; the message lists what there is.
    """

    prefill: str
    decode: str

    def __post_init__(self) -> None:
        for side, known in (("prefill", PREFILL), ("decode", DECODE)):
            if getattr(self, side) not in known:
                raise ValueError(
                    f"arm: expected {side} in {', '.join(known)}, got {getattr(self, side)!r}"
                )

    @classmethod
    def parse(cls, text: str) -> Arm:
        """``<prefill>__<decode>``, or one of `ALIASES`."""
        prefill, separator, decode = ALIASES.get(text, text).partition("__")
        if not separator:
            raise ValueError(
                f"arm: expected {', '.join(ALIASES)} or <prefill>__<decode> with prefill in "
                f"{', '.join(PREFILL)} and decode in {', '.join(DECODE)}, got {text!r}"
            )
        return cls(prefill, decode)

    def __str__(self) -> str:
        return f"{self.prefill}__{self.decode}"

    @property
    def needs_device(self) -> bool:
        """It runs the fused kernel, which a CPU can only interpret."""
        return "fused" in (self.decode, self.prefill.removeprefix("opaque_"))


def parse_numerics(text: str) -> Numerics:
    """Inverse of ``str(numerics)``, such as ``fp32_through, 1x32x8 sequential, contraction none``.

    Raises ValueError on anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        rounding, *trees, contraction = parts
        if len(trees) == 2:
            q, k = trees[0].removeprefix("Q "), trees[1].removeprefix("K ")
        else:
            (q,), k = trees, None
        if rounding not in get_args(Rounding) or not contraction.startswith("contraction "):
            raise ValueError(text)
    except ValueError:
        raise ValueError(
            "numerics must read like 'fp32_through, 1x32x8 sequential, contraction none' or "
            f"'storage, Q 1x32x8 sequential, K 2x32x4 sequential, contraction none', got {text!r}"
        ) from None
    chosen: Contraction = contraction.removeprefix("contraction ")  # type: ignore[assignment]
    return Numerics(
        rounding,  # type: ignore[arg-type]
        Reduction.parse(q),
        chosen,
        None if k is None else Reduction.parse(k),
    )


class Pins(BaseModel):
    """What is held fixed so that two compilations of one program give the same bits.

    deterministic: Inductor's deterministic mode, where this torch has it, for every graph. Its option alone
        is good for one: after each frame Dynamo restores PyTorch's global state, through
        ``torch.use_deterministic_algorithms``, which also sets this option. Of two compilations of one
        program in one process, the second is then another program.
    configurations: of generated Triton kernels: ``timed``, as Inductor does, or the ``first`` that Inductor
        lists for each, which no timing can change and which every torch has.
    sdpa: what computes attention. blas: the library behind matrix products. workspace: the value of
        CUBLAS_WORKSPACE_CONFIG, which must be in the environment before CUDA starts.
    caches_off: nothing is read from Inductor's caches.
    first_traced: T of the first prefill call, for which Inductor tunes the whole model's graph.
    body_first_traced: the same for the opaque operator's compiled fallback; None: what it meets first.
    first_run_check: PyTorch's check of operators in the first run of every graph. It runs them in a
        dispatch mode, and what an operator compiles there is of no use afterwards: its fallback is made
        again, tuned for whatever T comes next. Newer PyTorch does it unless told not to. A graph from a
        cache that was made without the check runs without it.
    inductor: further options of ``torch._inductor.config``, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    deterministic: bool = False
    configurations: Literal["timed", "first"] = "timed"
    sdpa: AttentionBackend = "default"
    blas: Literal["default", "cublas", "cublaslt"] = "default"
    workspace: str | None = None
    caches_off: bool = False
    first_traced: int = Field(default=65, ge=2)
    body_first_traced: int | None = Field(default=None, ge=2)
    first_run_check: bool = False
    inductor: dict[str, bool | int | float | str | None] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a process with these pins must be started with."""
        return {} if self.workspace is None else {"CUBLAS_WORKSPACE_CONFIG": self.workspace}

    @property
    def unavailable(self) -> list[str]:
        """Pins that this torch lacks or this process came too late for, each in a sentence."""
        from torch._inductor import config

        missing = [
            f"{name}: torch {torch.__version__} has no torch._inductor.config.{name}"
            for name in self.inductor
            if not _known(config, name)
        ]
        if self.deterministic and not _known(config, "deterministic"):
            missing.append(f"deterministic: torch {torch.__version__} has no such mode")
        missing += [
            f"workspace: {name} is {os.environ.get(name)!r} in this process, not {value!r}"
            for name, value in self.environment.items()
            if os.environ.get(name) != value
        ]
        if self.blas != "default" and not hasattr(torch.backends.cuda, "preferred_blas_library"):
            missing.append(f"blas: torch {torch.__version__} cannot choose")
        return missing

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Everything compiled and run inside has these pins, as far as they are available."""
        from torch._functorch import config as functorch
        from torch._inductor import config

        options: dict[str, Any] = {"deterministic": self.deterministic}
        off = "force_disable_caches" if _known(config, "force_disable_caches") else "fx_graph_cache"
        if self.caches_off:
            options[off] = off == "force_disable_caches"
        options |= self.inductor
        with ExitStack() as stack:
            stack.enter_context(
                config.patch({name: v for name, v in options.items() if _known(config, name)})
            )
            if _known(functorch, check := "check_custom_op_aliasing"):
                stack.enter_context(functorch.patch({check: self.first_run_check}))
            if _known(config, "deterministic"):
                stack.enter_context(_keeping_deterministic(self.deterministic))
            stack.enter_context(choosing_configurations(self.configurations))
            stack.enter_context(pin_attention(self.sdpa))
            if self.blas != "default" and hasattr(torch.backends.cuda, "preferred_blas_library"):
                before = torch.backends.cuda.preferred_blas_library()
                stack.callback(torch.backends.cuda.preferred_blas_library, before)
                torch.backends.cuda.preferred_blas_library(self.blas)
            yield


def _known(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


@contextmanager
def _keeping_deterministic(mode: bool) -> Iterator[None]:
    """Inductor's option stays as it is, also where Dynamo restores it with PyTorch's global state."""
    from torch._inductor import config

    original = torch.use_deterministic_algorithms

    def restore(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        config.deterministic = mode

    torch.use_deterministic_algorithms = restore
    try:
        yield
    finally:
        torch.use_deterministic_algorithms = original


@contextmanager
def choosing_configurations(how: Literal["timed", "first"]) -> Iterator[None]:
    """How Inductor chooses among the configurations of a Triton kernel that runs for the first time.

    All are compiled either way; ``first`` answers the question which is fastest without asking the clock.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    name = "benchmark_all_configs"
    before = getattr(CachingAutotuner, name)
    timed = getattr(before, "timed", before)  # this may be inside another

    def in_order(tuner: Any, *_: Any, **__: Any) -> dict[Any, float]:
        return {launcher: float(place) for place, launcher in enumerate(tuner.launchers)}

    in_order.timed = timed  # type: ignore[attr-defined]
    setattr(CachingAutotuner, name, timed if how == "timed" else in_order)
    try:
        yield
    finally:
        setattr(CachingAutotuner, name, before)


@dataclass
class Built:
    """An arm, ready to serve.

    model: gives caches and logits; its own prologue is that of prefill. prefill, decode: compiled
    steps, ``(ids, positions, slot_mapping, block_table, seq_len, caches) -> hidden``; prefill for any
    T, one graph for all above 1; decode for T = 1. opaque: the distinct opaque prologues in them.
    """

    arm: Arm
    model: CompactModel
    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]
    opaque: list[OpaquePrologue] = field(default_factory=list)
    traced: list[Traced] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.markers = [Markers(prologue) for prologue in self.opaque]

    def reset_markers(self) -> None:
        """Set all counts to zero."""
        for markers in self.markers:
            markers.reset()

    def read_markers(self) -> dict[str, dict[str, int]]:
        """Runs of the opaque operator since the last reset, by where they were counted (``device``,
        ``host``) and body: ``decode`` is the fused kernel, ``prefill`` the fallback. Empty without
        an operator. Raises as `Markers.read`."""
        total: dict[str, dict[str, int]] = {}
        for markers in self.markers:
            for where, counts in markers.read().items():
                sums = total.setdefault(where, dict.fromkeys(counts, 0))
                for path, count in counts.items():
                    sums[path] += count
        return total

    def graphs(self) -> dict[str, tuple[GraphReport, str]]:
        """Each graph that Inductor made, by name, with its normalized source."""
        return {
            report.name: (report, code)
            for traced in self.traced
            for report, code in traced.reports()
        }


def build(
    model: CompactModel,
    arm: Arm,
    *,
    prefill_numerics: Numerics | None = None,
    decode_numerics: Numerics | None = None,
    body_first_traced: int | None = None,
    padded: bool = False,
    candidate: str = "",
    wrap_prologue: Callable[[Prologue], Prologue] = lambda prologue: prologue,
    wrap_forward: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda call: call,
    backend: str = "inductor",
) -> Built:
    """Compile ``model`` as an arm; nothing is traced before the first calls.

    Args:
        model: gives weights, sizes and device; its own prologue does not matter.
        prefill_numerics, decode_numerics: of bodies that have declared ones; default: the model's.
        padded: opaque operators get their ``qkv`` as rows of a wider tensor.
        candidate: a kernel in the fused kernel's place, see `kernels.candidate`; empty: the project's.
        wrap_prologue, wrap_forward: around every prologue and every compiled step, to plant faults.
        backend: of ``torch.compile``; ``eager`` and ``aot_eager`` generate no code.
    """
    shape, device = model.config.shape, model.lm_head.weight.device
    decode_numerics = decode_numerics or model.numerics
    declared = arm.prefill in ("opaque_reference", "opaque_fused")
    # Bodies with the framework's bits ignore numerics: with decode's, one operator can serve both.
    prefill_numerics = (prefill_numerics or model.numerics) if declared else decode_numerics
    others: Any = dict(first_traced=body_first_traced, candidate=candidate)
    at_prefill = _configuration(arm.prefill, shape, prefill_numerics, **others)
    at_decode = _configuration(arm.decode, shape, decode_numerics, **others)
    if at_prefill is not None and not declared and arm.decode == "fused":
        # The article's candidate: one operator, which chooses at run time.
        at_decode = at_prefill = replace(at_prefill, force_fallback=False, candidate=candidate)
    wanted = {"prefill": at_prefill, "decode": at_decode}
    operators = {c: OpaquePrologue(c, device) for c in wanted.values() if c is not None}
    steps: dict[str, Traced] = {}
    models: dict[str, CompactModel] = {}
    for side, configuration in wanted.items():
        prologue: Prologue = eager.qkv_prologue
        numerics = decode_numerics
        if configuration is not None:
            prologue, numerics = operators[configuration], configuration.numerics
            prologue = padded_rows(prologue) if padded else prologue
        models[side] = with_prologue(model, wrap_prologue(prologue), numerics)
        steps[side] = Traced(side, _compiled(models[side], backend, dynamic=side == "prefill"))
    return Built(
        arm,
        models["prefill"],
        wrap_forward(steps["prefill"]),
        wrap_forward(steps["decode"]),
        list(operators.values()),
        list(steps.values()),
    )


def _configuration(
    body: str,
    shape: AttentionShape,
    numerics: Numerics,
    *,
    first_traced: int | None,
    candidate: str,
) -> Configuration | None:
    if body == "in_graph":
        return None
    if body == "fused":
        return Configuration(shape, numerics, candidate=candidate)
    if body == "opaque_fused":
        return Configuration(shape, numerics, decode=EVERY_T, candidate=candidate)
    fallback: Any = body.removeprefix("opaque_")
    return Configuration(
        shape,
        numerics,
        fallback=fallback,
        force_fallback=True,
        first_traced=first_traced if fallback == "compiled" else None,
    )


def padded_rows(prologue: Prologue, columns: int = 64) -> Prologue:
    """A prologue whose ``qkv`` has a row stride of ``columns`` more than its width."""

    def padded(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = F.pad(qkv, (0, columns))
        return prologue(wide[:, : qkv.shape[1]], *rest)

    return padded


def _compiled(model: CompactModel, backend: str, *, dynamic: bool) -> Callable[..., Tensor]:
    def step(
        ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_len: Tensor,
        caches: Any,
    ) -> Tensor:
        return model(ids, positions, slot_mapping, block_table, seq_len, caches)

    # Dynamo keeps graphs, and what it learnt of sizes, by code object: one for each step.
    step.__code__ = step.__code__.replace()
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)

    def call(ids: Tensor, positions: Tensor, slot_mapping: Tensor, *rest: Any) -> Tensor:
        if dynamic and ids.shape[0] > 1:
            # Marks stay on a tensor object, and these are the caller's: mark aliases of them.
            ids, positions, slot_mapping = (t.detach() for t in (ids, positions, slot_mapping))
            for tensor, dim in ((ids, 0), (positions, 1), (slot_mapping, 0)):
                torch._dynamo.mark_dynamic(tensor, dim)
        return compiled(ids, positions, slot_mapping, *rest)

    return call
