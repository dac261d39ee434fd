"""The prologue as one opaque operator: which body runs is decided at run time, inside.

A compiled model holds a single call of ``fusion_evidence::qkv_prologue`` whatever the token count, so
that no tracer can decide the branch once and for all. Inside, T in the decode range takes the fused
kernel and any other T the fallback: eager, compiled on its own, or the reference. Both count on the
device, the fused kernel by itself, so that every replay of a captured graph counts; the host counts
too, to compare.

An operator's schema holds tensors, numbers and text. Shape, numerics and dispatch are none of these:
they travel as one text, the *handle* of a `Configuration` registered in this process. The handle is
made of the configuration's contents, so the same text can never mean two things, also in compiled
code that a cache keeps for another process.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from . import eager, fused, reference
from .candidate import Kernel, check_results, load_kernel, marked, takes
from .checks import check_arguments
from .numerics import Numerics
from .shapes import AttentionShape

Fallback = Literal["eager", "compiled", "reference"]
Path = Literal["decode", "prefill"]
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""``qkv`` to ``value_cache``, in the operator's order."""

DECODE, PREFILL, RESETS, ERRORS = 0, 1, 2, 3
"""What each of a marker's four int64 elements holds: decode runs, fallback runs, resets, and what a
``debug`` configuration met: `fused.BAD_POSITION` and `fused.BAD_SLOT` bits."""


@dataclass(frozen=True)
class Configuration:
    """What the operator computes and how it chooses its body.

    decode: first and last token count that take the fused kernel; all others take the fallback.
    fallback: ``eager``, or ``compiled``: the same code as one full graph of its own, with a graph for
        T = 1 and one for every other T. The first T it meets is the size Inductor tunes for. Both have
        the framework's bits. ``reference`` has those of ``numerics``, on any machine; slowly, and
        waiting for the device, so that no CUDA graph can hold it.
    first_traced: a T above 1 at which the compiled fallback is made, whatever T it meets first.
    force_fallback: the fallback at every T, the fused kernel never.
    debug: positions outside the table and slots beyond the cache are not followed, and set bits of the
        marker's `ERRORS`, also in replays; nothing waits for the device. Without it they are undefined
        behaviour. What the token computes is meaningless either way.
    candidate: of whom the kernel is that runs in the fused kernel's place, see `candidate.load_kernel`;
        empty: the project's.

    Raises:
        ValueError: no such range or fallback, or nothing to trace first.
    """

    shape: AttentionShape
    numerics: Numerics
    decode: tuple[int, int] = (1, 1)
    fallback: Fallback = "eager"
    force_fallback: bool = False
    debug: bool = False
    first_traced: int | None = None
    candidate: str = ""

    def __post_init__(self) -> None:
        first, last = self.decode
        if not 1 <= first <= last:
            raise ValueError(f"decode: expected 1 <= first <= last, got {self.decode}")
        if self.fallback not in get_args(Fallback):
            raise ValueError(
                f"fallback: expected one of {get_args(Fallback)}, got {self.fallback!r}"
            )
        if self.first_traced is not None and (self.first_traced < 2 or self.fallback != "compiled"):
            raise ValueError(
                f"first_traced: expected at least 2, of a compiled fallback, got {self.first_traced} "
                f"of {self.fallback!r}"
            )

    def path(self, tokens: int) -> Path:
        """Which body ``tokens`` tokens take."""
        first, last = self.decode
        return "decode" if not self.force_fallback and first <= tokens <= last else "prefill"

    @property
    def handle(self) -> str:
        """The text that stands for this configuration in the operator's arguments."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        decode = "never" if self.force_fallback else "{}..{}".format(*self.decode)
        kernel = self.candidate or "fused"
        return f"{self.shape.name}, {self.numerics}, {kernel} at {decode}, {self.fallback} {digest}"


@dataclass
class Registered:
    """A configuration and what the operator remembers of it in this process.

    kernel: of decode; takes a ``marker``.
    calls: how often the operator's Python ran, by path: not again when a captured graph replays.
    captured: how many of these calls ran nothing, because a CUDA graph was capturing.
    in_a_graph: a CUDA graph has captured it at some time, so that the device may run it unseen.
    """

    configuration: Configuration
    kernel: Kernel
    calls: Counter[Path] = field(default_factory=Counter)
    captured: Counter[Path] = field(default_factory=Counter)
    in_a_graph: bool = False
    _full_graph: Callable[..., Outputs] | None = None


_registry: dict[str, Registered] = {}


def register(configuration: Configuration) -> Registered:
    """Make a configuration known to the operator; again, and nothing changes.

    ValueError: there is no such candidate.
    """
    handle = configuration.handle
    if handle not in _registry:
        _registry[handle] = Registered(configuration, marked(load_kernel(configuration.candidate)))
    return _registry[handle]


def _registered(handle: str) -> Registered:
    if handle not in _registry:
        raise ValueError(
            f"configuration: expected the handle of one registered in this process "
            f"({'; '.join(_registry) or 'none is'}), got {handle!r}"
        )
    return _registry[handle]


def new_marker(device: torch.device | str) -> Tensor:
    """A zeroed marker: int64 ``[4]``, see `DECODE`, `PREFILL`, `RESETS` and `ERRORS`."""
    return torch.zeros(4, dtype=torch.int64, device=device)


@torch.library.custom_op(
    "fusion_evidence::qkv_prologue",
    mutates_args=("key_cache", "value_cache", "marker"),
    # Written out: torch 2.4 cannot read it off annotations that are strings, as they are here.
    schema=(
        "(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, Tensor positions, "
        "Tensor slot_mapping, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) marker, "
        "str configuration) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def qkv_prologue(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    marker: Tensor,
    configuration: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same contract as `reference.qkv_prologue`; results are new contiguous tensors at every T.

    Args:
        marker: int64 ``[4]`` on the device; one is added at `DECODE` or `PREFILL` for every run. Calls
            that share it must not overlap.
        configuration: handle of a registered `Configuration`.

    Raises:
        TypeError, ValueError: before anything is launched; naming argument, expected and got. Of a
            candidate, also where its results are none.
        RuntimeError: a graph captures a compiled fallback that was never called with such arguments, or
            a ``reference`` one; or the compiled fallback met more kinds of arguments than Dynamo keeps
            graphs for.
    """
    entry = _registered(configuration)
    chosen = entry.configuration
    tensors = (
        qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, key_cache, value_cache
    )  # fmt: skip
    check_arguments(*tensors, chosen.shape, chosen.numerics)
    _check_marker(marker, qkv)
    path = chosen.path(qkv.shape[0])
    if path == "decode":
        results = _decode(entry, tensors, marker)
    else:
        results = _fallback(entry, _only_valid(tensors, marker) if chosen.debug else tensors)
        marker.narrow(0, PREFILL, 1).add_(1)
    entry.calls[path] += 1
    if _capturing(qkv):
        entry.captured[path] += 1
        entry.in_a_graph = True
    return results


def _decode(entry: Registered, tensors: Tensors, marker: Tensor) -> Outputs:
    chosen, options = entry.configuration, {"marker": marker.narrow(0, DECODE, 1)}
    if chosen.debug and takes(entry.kernel, "errors"):
        # The kernel's flag is int32: the low half of the (little-endian) element.
        options["errors"] = marker.narrow(0, ERRORS, 1).view(torch.int32)[:1]
    elif chosen.debug:
        tensors = _only_valid(tensors, marker)
    results = entry.kernel(*tensors, chosen.shape, chosen.numerics, **options)
    if not chosen.candidate:
        return results
    check_results(chosen.candidate, results, tensors[0], chosen.shape)
    q, k, v, gate = (_own(result, tensors[0]) for result in results)
    return q, k, v, gate


def _only_valid(tensors: Tensors, marker: Tensor) -> Tensors:
    """Arguments that can be followed: bad positions become 0, bad slots padding, both flagged."""
    cos_sin, positions, slot_mapping, key_cache = tensors[3:7]
    bad_position = (positions < 0) | (positions >= cos_sin.shape[0])
    bad_slot = slot_mapping >= key_cache.shape[0] * key_cache.shape[1]
    met = bad_position.any() * fused.BAD_POSITION + bad_slot.any() * fused.BAD_SLOT
    marker.narrow(0, ERRORS, 1).bitwise_or_(met)
    positions = positions.masked_fill(bad_position, 0)
    slot_mapping = slot_mapping.masked_fill(bad_slot, -1)
    return (*tensors[:4], positions, slot_mapping, *tensors[6:])


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@qkv_prologue.register_fake
def _(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    marker: Tensor,
    configuration: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # No check of sizes: it would put guards on the token count into the caller's graph.
    others = dict(
        q_weight=q_weight, k_weight=k_weight, cos_sin=cos_sin, positions=positions,
        slot_mapping=slot_mapping, key_cache=key_cache, value_cache=value_cache, marker=marker,
    )  # fmt: skip
    for name, tensor in others.items():
        if tensor.device != qkv.device:
            raise ValueError(f"{name}: expected device {qkv.device} (qkv's), got {tensor.device}")
    return _new_outputs(qkv, _registered(configuration).configuration.shape)


def _new_outputs(qkv: Tensor, shape: AttentionShape) -> Outputs:
    tokens = qkv.shape[0]
    return (
        qkv.new_empty(tokens, shape.q_heads, shape.head_dim),
        qkv.new_empty(tokens, shape.kv_heads, shape.head_dim),
        qkv.new_empty(tokens, shape.kv_heads, shape.head_dim),
        qkv.new_empty(tokens, shape.q_size),
    )


def _check_marker(marker: Tensor, qkv: Tensor) -> None:
    if marker.dtype != torch.int64:
        raise TypeError(f"marker: expected dtype torch.int64, got {marker.dtype}")
    if tuple(marker.shape) != (4,):
        raise ValueError(f"marker: expected shape [4], got {list(marker.shape)}")
    if marker.device != qkv.device:
        raise ValueError(f"marker: expected device {qkv.device} (qkv's), got {marker.device}")


@torch.no_grad()
def _fallback(entry: Registered, tensors: Tensors) -> Outputs:
    configuration, qkv = entry.configuration, tensors[0]
    if qkv.shape[0] == 0:
        return _new_outputs(qkv, configuration.shape)
    if configuration.fallback == "reference":
        if _capturing(qkv):
            raise RuntimeError(
                "the reference fallback waits for the device: no graph can capture it"
            )
        results = reference.qkv_prologue(*tensors, configuration.shape, configuration.numerics)
    else:
        results = _with_padding(entry, tensors)
    # Of one token, V is a view of the input, which no operator may return.
    q, k, v, gate = (_own(result, qkv) for result in results)
    return q, k, v, gate


def _with_padding(entry: Registered, tensors: Tensors) -> Outputs:
    """The model's own code, which writes one cache row for every token, where some are padding.

    It never synchronizes, so that graphs can capture it. A padding token is sent to the cache's very
    last row, which afterwards gets what belongs there: the row of the token that owns it, or what it
    held.
    """
    configuration = entry.configuration
    slot_mapping, key_cache, value_cache = tensors[5:]
    slots = slot_mapping.clamp(min=-1)  # -1 is the last row: block -1, its last place
    held = [cache[-1, -1].clone() for cache in (key_cache, value_cache)]
    arguments = (*tensors[:5], slots, key_cache, value_cache)
    if configuration.fallback == "compiled":
        results = _run_full_graph(entry, *arguments)
    else:
        results = eager.qkv_prologue(*arguments, configuration.shape, configuration.numerics)
    owns = slots == key_cache.shape[0] * key_cache.shape[1] - 1
    owner, owned = owns.int().argmax().view(1), owns.any()
    for cache, rows, row in zip((key_cache, value_cache), results[1:3], held, strict=True):
        cache[-1, -1].copy_(torch.where(owned, rows.index_select(0, owner)[0], row))
    return results


def _own(result: Tensor, source: Tensor) -> Tensor:
    shared = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous()


def _run_full_graph(entry: Registered, *arguments: Tensor) -> Outputs:
    tokens, capturing = arguments[0].shape[0], _capturing(arguments[0])
    compiled = entry._full_graph
    if compiled is None and not capturing:
        compiled = full_graph(entry.configuration)
    try:
        if compiled is not None:
            with _no_compilation() if capturing else nullcontext():
                results = compiled(*arguments)
            entry._full_graph = compiled
            return results
    except Exception as error:
        # Dynamo's own refusals have no type in common, nor one that all its versions share.
        if "recompil" not in f"{type(error).__name__} {error}".lower():
            raise
        if not capturing:
            raise RuntimeError(
                f"the compiled fallback met more dtypes, cache sizes or strides than Dynamo keeps "
                f"graphs for (torch._dynamo.config.recompile_limit), now with T={tokens}, cache "
                f"{list(arguments[6].shape)}"
            ) from error
    raise RuntimeError(
        f"the compiled fallback has no graph for T={tokens} and arguments like these yet, and none can "
        "be made while a CUDA graph captures: call the operator with such arguments first"
    )


def _no_compilation() -> AbstractContextManager[object]:
    """Whatever a graph depends on (dtypes, sizes, strides, modes), a new one is refused in here."""
    if hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("fail_on_recompile")
    return torch._dynamo.config.patch(error_on_recompile=True)  # before torch 2.6


def full_graph(configuration: Configuration) -> Callable[..., Outputs]:
    """`eager.qkv_prologue` compiled on its own: ``(qkv, ..., value_cache) -> (q, k, v, gate)``.

    One graph for T = 1 and one, dynamic in T, for every other. Slots below zero are not handled.
    Every call of this function compiles anew.
    """

    def standalone(*tensors: Any) -> Outputs:
        arguments = *tensors, configuration.shape, configuration.numerics
        return eager.qkv_prologue(*arguments)

    # Dynamo keeps its graphs, and limits their number, by code object: one for every configuration.
    standalone.__code__ = standalone.__code__.replace()
    compiled = torch.compile(standalone, fullgraph=True, dynamic=False)
    first_traced = configuration.first_traced

    def call(*tensors: Tensor) -> Outputs:
        nonlocal first_traced
        qkv, q_weight, k_weight, cos_sin, positions, slots, key_cache, value_cache = tensors
        if qkv.shape[0] > 1 and first_traced is not None:
            tokens, first_traced = first_traced, None
            call(
                qkv.new_zeros(tokens, qkv.shape[1]),
                q_weight,
                k_weight,
                cos_sin,
                positions.new_zeros(*positions.shape[:-1], tokens),
                slots.new_zeros(tokens),
                key_cache.clone(),
                value_cache.clone(),
            )
        if qkv.shape[0] > 1:
            # Marks stay on a tensor object, and these are the caller's: mark aliases of them.
            qkv, positions, slots = (t.detach() for t in (qkv, positions, slots))
            for tensor, dim in ((qkv, 0), (positions, positions.dim() - 1), (slots, 0)):
                torch._dynamo.mark_dynamic(tensor, dim)
        return compiled(qkv, q_weight, k_weight, cos_sin, positions, slots, key_cache, value_cache)

    return call


class OpaquePrologue:
    """The operator with the prologue's common signature, counting into a marker of its own.

    marker: int64 ``[4]`` on ``device``. handle: of its configuration. Under a tracer a call is one
    node; ValueError when the model's shape or numerics are not the configuration's.
    """

    def __init__(self, configuration: Configuration, device: torch.device | str = "cpu") -> None:
        self.configuration = configuration
        self.handle = register(configuration).configuration.handle
        self.marker = new_marker(device)

    def __call__(
        self,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        shape: AttentionShape,
        numerics: Numerics,
    ) -> Outputs:
        if shape != self.configuration.shape:
            raise ValueError(f"shape: expected {self.configuration.shape}, got {shape}")
        if numerics != self.configuration.numerics:
            raise ValueError(f"numerics: expected {self.configuration.numerics}, got {numerics}")
        return qkv_prologue(
            qkv,
            q_weight,
            k_weight,
            cos_sin,
            positions,
            slot_mapping,
            key_cache,
            value_cache,
            self.marker,
            self.handle,
        )
