"""vLLM's Qwen3.5 / Qwen3-Next gated attention with this project's prologue in it, in several modes.

vLLM knows of it through `vllm_hook`. Nothing changes unless the service is configured::

    vllm serve MODEL --additional-config '{"fusion_evidence": {"mode": "opaque_eager"}}'

vLLM's ``additional_config`` is part of its compile-cache key, so no warm cache can bring the graph of
another mode. The kernel computes q, k, v and the gate; vLLM goes on writing the KV cache itself.

Modes:

- ``off``: the layer as vLLM has it, upstream's own fused kernel included where it uses that.
- ``native``: without upstream's fused kernel: PyTorch code, for Inductor to fuse. The baseline.
- ``python_branch``: ``if qkv.shape[0] == 1`` in the traced code, as in the article.
- ``opaque_eager``, ``opaque_compiled``: an opaque operator chooses at run time; its fallback is vLLM's own
  code, eager or compiled on its own. ``fallback_only``: the same with the eager fallback at every T.
- ``opaque_fused``: the operator runs the kernel at every T.
- ``integrated``: the kernel in the graphs that are compiled for one T of ``decode`` alone, and in no other:
  see `late_decision`. Those T are the ``compile_sizes`` in ``decode``. vLLM pads small steps to the sizes
  of its CUDA graphs; a size that is compiled and is none of them never runs.

Besides, in any mode: ``records`` of what enters the attention (`vllm_recorder`), evidence of what was
compiled for each range (`vllm_evidence`), and a pin of the configurations of generated kernels.

Nothing here assumes CUDA, or who provides the platform: the layer, the compiler manager and the worker are
vLLM's own classes, which platform plugins use too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fusion_evidence.kernels.candidate import Kernel, load_kernel, marked
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.service import late_decision
from fusion_evidence.lib.service.arms import choosing_configurations, parse_numerics
from fusion_evidence.lib.service.vllm_evidence import Evidence
from fusion_evidence.lib.service.vllm_hook import KEY, PINNED
from fusion_evidence.lib.service.vllm_recorder import Recorder
from fusion_evidence.lib.service.vllm_strides import true_inputs

Mode = Literal[
    "off",
    "native",
    "python_branch",
    "opaque_eager",
    "opaque_compiled",
    "fallback_only",
    "opaque_fused",
    "integrated",
]
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]

KNOWN = ("0.25.1", "0.32.0")
"""Versions of vLLM that this was run with; `Settings.force` takes another."""
KERNEL, FALLBACK = 0, 1
"""What each of a layer's two marker elements counts: runs of the kernel, and of the fallback."""

OTHER = "*"
"""In `Settings.numerics`, where they go by T: those of every T that is not named."""

_layers: dict[str, _Attached] = {}
_recorders: list[Recorder] = []
_evidence: list[Evidence] = []
_strides: set[bool] = set()
_pins: list[AbstractContextManager[None]] = []


class PluginError(RuntimeError):
    """The service cannot run with this configuration; in one line."""


@dataclass(frozen=True)
class Settings:
    """What stands under ``fusion_evidence`` in vLLM's ``additional_config``.

    numerics: of the kernel, as `Numerics` prints itself; needed where the kernel shall run. Or by T, as a
        mapping of ``"1"``, ``"16"`` and the like, with ``"*"`` for every other.
    decode: first and last T for which it does.
    candidate: a kernel in its place, see `kernels.candidate`.
    force: run with a version of vLLM that is not among `KNOWN`.
    records: rows to keep of what enters each layer's attention; 0: none. Where the mode is an operator at
        every T, what enters the prologue is kept too.
    graphs: folder for what is compiled for each range of sizes; one for each rank, by its number, beneath
        it. Empty: nothing is kept.
    configurations: of generated kernels, ``timed`` or the ``first`` that is listed, which no timing moves;
        with the latter the process needs `vllm_hook.PINNED` in its environment, and kernels that Inductor
        may make one of (``combo_kernels``) are made one without asking whether that is faster.
    true_strides: of the inputs of a graph for one size, see `vllm_strides`; False leaves vLLM's own, with
        which such a graph reads wrong positions where no kernel replaces the code that reads them.
    by_range: on a CPU, keep the compilation by range, through Inductor, that vLLM's CPU platform takes
        away: what an accelerator's server does, without its CUDA graphs.
    """

    mode: Mode = "off"
    numerics: str | Mapping[str, str] = ""
    decode: tuple[int, int] = (1, 1)
    candidate: str = ""
    force: bool = False
    records: int = 0
    graphs: str = ""
    configurations: Literal["timed", "first"] = "timed"
    true_strides: bool = True
    by_range: bool = False

    @classmethod
    def read(cls, additional_config: Any) -> Settings:
        """PluginError: naming the field that is unknown or wrong."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
        names = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or (
            unknown := [name for name in given if name not in names]
        ):
            wrong = unknown[0] if isinstance(given, dict) else given
            raise PluginError(f"{KEY}: unknown {wrong!r}; known: {', '.join(names)}")
        settings = cls(**{**given, "decode": tuple(given.get("decode", (1, 1)))})
        settings.check()
        return settings

    def check(self) -> None:
        if self.mode not in get_args(Mode):
            raise PluginError(
                f"{KEY}.mode: expected {' | '.join(get_args(Mode))}, got {self.mode!r}"
            )
        whole = [value for value in self.decode if type(value) is int]
        if len(whole) != 2 or not 1 <= whole[0] <= whole[1]:
            raise PluginError(f"{KEY}.decode: expected 1 <= first <= last, got {list(self.decode)}")
        if type(self.records) is not int or self.records < 0:
            raise PluginError(f"{KEY}.records: expected 0 or more rows, got {self.records!r}")
        if not isinstance(self.graphs, str):
            raise PluginError(f"{KEY}.graphs: expected a folder, got {self.graphs!r}")
        if self.configurations not in ("timed", "first"):
            raise PluginError(
                f"{KEY}.configurations: expected timed | first, got {self.configurations!r}"
            )
        for name in ("true_strides", "by_range", "force"):
            if type(value := getattr(self, name)) is not bool:
                raise PluginError(f"{KEY}.{name}: expected true or false, got {value!r}")
        given = self.numerics.values() if isinstance(self.numerics, Mapping) else [self.numerics]
        if not all(isinstance(text, str) for text in given):
            raise PluginError(
                f"{KEY}.numerics: expected text or an object of texts, got {self.numerics!r}"
            )
        if self.runs_kernel and not self.numerics:
            raise PluginError(f"{KEY}.numerics: mode {self.mode} runs the kernel, and needs them")
        try:
            self._check_sizes()
            load_kernel(self.candidate)
        except ValueError as error:
            raise PluginError(f"{KEY}: {error}") from error

    def _check_sizes(self) -> None:
        """ValueError: numerics of what is no T, or none of a T that may take the kernel."""
        sizes = list(self.numerics_by_size)
        wrong = [size for size in sizes if size != OTHER and not (size.isdecimal() and int(size))]
        if wrong:
            raise ValueError(f"numerics: expected 1, 2, ... or {OTHER}, got {', '.join(wrong)}")
        if not sizes or OTHER in sizes:
            return
        if self.mode == "opaque_fused":
            raise ValueError(f"numerics: mode opaque_fused takes any T, and needs them for {OTHER}")

    @cached_property
    def numerics_by_size(self) -> dict[str, Numerics]:
        """Of each T that is named, and `OTHER`. ValueError: cannot be read."""
        given = {OTHER: self.numerics} if isinstance(self.numerics, str) else self.numerics
        return {size: parse_numerics(text) for size, text in given.items() if text}

    def numerics_at(self, tokens: int) -> Numerics | None:
        """Of the kernel for ``tokens`` tokens; None where there are none."""
        found = self.numerics_by_size
        return found.get(str(tokens), found.get(OTHER))

    @property
    def runs_kernel(self) -> bool:
        return self.mode not in ("off", "native", "fallback_only")

    def takes_kernel(self, tokens: int) -> bool:
        """Whether ``tokens`` tokens take the kernel where the choice is made at run time."""
        if self.mode == "opaque_fused":
            return True
        inside = self.decode[0] <= tokens <= self.decode[1]
        return self.runs_kernel and inside and self.numerics_at(tokens) is not None


# --- ranges of sizes


def compiled(
    graph: torch.fx.GraphModule,
    piece: int,
    first: int,
    last: int,
    compile: Callable[[torch.fx.GraphModule], Any],
) -> Any:
    """What vLLM's ``compile`` makes of the graph that ``first`` to ``last`` tokens shall have."""
    chosen = decided(graph, first, last)
    if not _evidence:
        return compile(chosen)
    return _evidence[0].watch(chosen, piece, first, last, lambda: compile(chosen))


def inputs_of(
    original: Callable[..., list[Any]], graph: torch.fx.GraphModule, size: int
) -> list[Any]:
    """For which vLLM compiles the graph of one size."""
    return true_inputs(original, graph, size) if _strides else original(graph, size)


def decided(graph: torch.fx.GraphModule, first: int, last: int) -> torch.fx.GraphModule:
    """What the compiler gets of a traced graph for ``first`` to ``last`` tokens."""
    found = [_layers[layer].settings for layer in late_decision.regions(graph) if layer in _layers]
    if found and first == last and all(one.takes_kernel(first) for one in found):
        return late_decision.with_operator(graph, torch.ops.fusion_evidence.vllm_prologue.default)
    return late_decision.without_marks(graph)


# --- one layer


@dataclass(frozen=True)
class _Attached:
    """A layer, what the kernel needs beside it, and its marker (int64 ``[2]`` on the device)."""

    layer: nn.Module
    settings: Settings
    shape: AttentionShape
    kernel: Kernel
    marker: Tensor
    no_slots: Tensor
    no_cache: Tensor
    fallback: Any

    def run(self, qkv: Tensor, positions: Tensor, kernel: bool) -> Outputs:
        if not kernel:
            results = self.fallback(self.layer, qkv, positions)
            self.marker.narrow(0, FALLBACK, 1).add_(1)
            return results
        layer: Any = self.layer
        weights = layer.q_norm.weight, layer.k_norm.weight, layer.rotary_emb.cos_sin_cache
        caches = self.no_cache, self.no_cache
        numerics = self.settings.numerics_at(qkv.shape[0])
        slots = self.no_slots[: qkv.shape[0]]  # negative: the kernel writes no cache
        return self.kernel(
            *(qkv, *weights, positions, slots, *caches, self.shape, numerics),
            marker=self.marker.narrow(0, KERNEL, 1),
        )


def attach(layer: Any, config: Any) -> None:
    """Give one attention layer the mode that vLLM's ``config`` asks for.

    PluginError: the configuration is wrong, or the layer or the service none that the mode can serve.
    """
    settings = Settings.read(config.additional_config)
    if settings == Settings():
        return
    check_version(settings)
    _watch(settings, config)
    name = layer.attn.layer_name
    if settings.records:
        _record(layer, name, settings, config)
    if settings.mode == "off":
        return
    layer.use_fused_qk_norm_rope_gate = False
    if settings.mode == "native":
        return
    own = type(layer)._project_qkv_gate
    tokens = config.scheduler_config.max_num_batched_tokens
    shape = shape_of(layer, name)
    dtype, device = layer.q_norm.weight.dtype, layer.q_norm.weight.device
    fallback = _compiled(own) if settings.mode == "opaque_compiled" else own
    _layers[name] = _Attached(
        layer,
        settings,
        shape,
        marked(load_kernel(settings.candidate)),
        torch.zeros(2, dtype=torch.int64, device=device),
        torch.full((tokens,), -1, dtype=torch.int64, device=device),
        torch.zeros(1, 1, shape.kv_heads, shape.head_dim, dtype=dtype, device=device),
        fallback,
    )
    if settings.mode == "integrated":
        _check_ranges(settings, config)
    layer._project_qkv_gate = MethodType(_FORWARD.get(settings.mode, _opaque), layer)


def _watch(settings: Settings, config: Any) -> None:
    """Before the first layer: the pin, and evidence of what will be compiled."""
    if settings.configurations == "first":
        lacking = {name: value for name, value in PINNED.items() if os.environ.get(name) != value}
        if lacking:
            needed = " ".join(f"{name}={value}" for name, value in lacking.items())
            raise PluginError(f"{KEY}.configurations: first needs {needed} in the environment")
        # vLLM's default is to time whether kernels are faster as one; without timing they always are one.
        config.compilation_config.inductor_compile_config["benchmark_combo_kernel"] = False
        if not _pins:
            _pins.append(choosing_configurations("first"))
            _pins[0].__enter__()
    if settings.true_strides:
        _strides.add(True)
    if settings.graphs and not _evidence:
        _evidence.append(Evidence(Path(settings.graphs) / str(config.parallel_config.rank)))


def _record(layer: Any, name: str, settings: Settings, config: Any) -> None:
    """Every call of the layer's attention is recorded before it is made."""
    dtype, device = layer.q_norm.weight.dtype, layer.q_norm.weight.device
    if not _recorders:
        tokens = config.scheduler_config.max_num_batched_tokens
        _recorders.append(Recorder(settings.records, tokens, device))
    recorder, own = _recorders[0], layer.attn.impl.forward
    constants = {
        "q_weight": layer.q_norm.weight,
        "k_weight": layer.k_norm.weight,
        "cos_sin": layer.rotary_emb.cos_sin_cache,
    }
    at_every_size = settings.mode.startswith(("opaque", "fallback"))
    recorder.add(name, shape_of(layer, name), dtype, constants, inputs=at_every_size)

    def forward(
        self: Any, q: Tensor, k: Tensor, v: Tensor, cache: Any, metadata: Any, **more: Any
    ) -> Any:
        recorder.write(name, q, k, v, metadata)
        return own(self, q, k, v, cache, metadata, **more)

    layer.attn.impl.forward = forward


def check_version(settings: Settings) -> None:
    """PluginError: this vLLM is none that the plugin was run with, and it is not forced."""
    import vllm

    if vllm.__version__.split("+")[0] not in KNOWN and not settings.force:
        raise PluginError(
            f"the plugin was run with vLLM {' and '.join(KNOWN)}, this is {vllm.__version__}: set "
            f"{KEY}.force to use it all the same"
        )


def shape_of(layer: Any, name: str) -> AttentionShape:
    """The layer's heads on this rank. PluginError: not a gated layer with NeoX-style rotation."""
    rotary = layer.rotary_emb
    if not (layer.attn_output_gate and getattr(rotary, "is_neox_style", False)):
        raise PluginError(f"{name}: expected an output gate and NeoX-style rotary embedding")
    half = rotary.rotary_dim // 2
    section = tuple(getattr(rotary, "mrope_section", None) or (half, 0, 0))
    return AttentionShape(
        name=name,
        q_heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        rotary_dim=rotary.rotary_dim,
        mrope_section=section,
        mrope_interleaved=bool(getattr(rotary, "mrope_interleaved", False)),
        hidden_size=layer.hidden_size,
        layers=1,
        attention_layers=1,
        eps=layer.q_norm.variance_epsilon,
    )


def _check_ranges(settings: Settings, config: Any) -> None:
    from vllm.config import CompilationMode

    compilation = config.compilation_config
    if compilation.mode == CompilationMode.NONE:
        return  # not traced: the layer chooses in Python
    if compilation.mode != CompilationMode.VLLM_COMPILE:
        raise PluginError(
            f"mode integrated needs vLLM's own compilation by range, this service has "
            f"{compilation.mode.name}"
        )
    sizes = compilation.compile_sizes or ()
    if not any(settings.takes_kernel(size) for size in sizes):
        first, last = settings.decode
        raise PluginError(
            f"mode integrated needs a T from {first} to {last} in compile_sizes, of which it has "
            f"{list(sizes)}, and numerics for it"
        )


def _compiled(own: Any) -> Any:
    from vllm import ir

    # Every layer, and one token apart from more, may be a compilation of its own.
    torch._dynamo.config.cache_size_limit = max(256, torch._dynamo.config.cache_size_limit)
    compiled = torch.compile(own, fullgraph=True, dynamic=False)

    def call(layer: Any, qkv: Tensor, positions: Tensor) -> Any:
        if qkv.shape[0] > 1:
            qkv, positions = qkv.detach(), positions.detach()
            torch._dynamo.mark_dynamic(qkv, 0)
            torch._dynamo.mark_dynamic(positions, positions.dim() - 1)
        # vLLM's own operators, which its compiler would replace, are traced through instead.
        with ir.enable_torch_wrap(False):
            return compiled(layer, qkv, positions)

    return call


# --- what stands in the traced code


@torch.library.custom_op(
    "fusion_evidence::vllm_prologue",
    # The marker is no argument: with it, graphs of equal layers would differ from the model's own.
    mutates_args=(),
    schema="(Tensor qkv, Tensor positions, str layer) -> (Tensor, Tensor, Tensor, Tensor)",
)
def vllm_prologue(qkv: Tensor, positions: Tensor, layer: str) -> Outputs:
    """q ``[T, Hq*D]``, k, v ``[T, Hk*D]`` and gate ``[T, Hq*D]`` of one layer, by the body of its mode."""
    one = _layers[layer]
    for recorder in _recorders:
        recorder.stage(qkv)
    results = one.run(qkv, positions, one.settings.takes_kernel(qkv.shape[0]))
    q, k, v, gate = (_owned(r.reshape(qkv.shape[0], -1), qkv) for r in results)
    return q, k, v, gate


def _owned(result: Tensor, qkv: Tensor) -> Tensor:
    """With memory of its own, as an operator's result has to be; vLLM's V is a view of the input."""
    shared = result.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    return result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous()


@vllm_prologue.register_fake
def _(qkv: Tensor, positions: Tensor, layer: str) -> Outputs:
    shape, tokens = _layers[layer].shape, qkv.shape[0]
    kv_size = shape.kv_heads * shape.head_dim
    return tuple(  # type: ignore[return-value]
        qkv.new_empty(tokens, size) for size in (shape.q_size, kv_size, kv_size, shape.q_size)
    )


def _opaque(self: Any, qkv: Tensor, positions: Tensor) -> Outputs:
    return torch.ops.fusion_evidence.vllm_prologue(qkv, positions, self.attn.layer_name)


def _python_branch(self: Any, qkv: Tensor, positions: Tensor) -> Outputs:
    if qkv.shape[0] == 1:
        return torch.ops.fusion_evidence.vllm_prologue(qkv, positions, self.attn.layer_name)
    return type(self)._project_qkv_gate(self, qkv, positions)


def _by_range(self: Any, qkv: Tensor, positions: Tensor) -> Outputs:
    if not torch.compiler.is_compiling():
        return _opaque(self, qkv, positions)
    name = self.attn.layer_name
    marked_qkv = torch.ops.fusion_evidence.region_begin(qkv, name)
    results = type(self)._project_qkv_gate(self, marked_qkv, positions)
    return torch.ops.fusion_evidence.region_end(*results, positions, name)


_FORWARD = {"python_branch": _python_branch, "integrated": _by_range}


# --- what came of it


def markers() -> dict[str, list[int]]:
    """Layer -> how often its kernel and its fallback ran in this process, replays included."""
    return {name: one.marker.tolist() for name, one in _layers.items()}


def reset_markers() -> None:
    for one in _layers.values():
        one.marker.zero_()


class WorkerExtension:
    """For ``--worker-extension-cls``: what a running service has counted and kept, by ``collective_rpc``.

    Paths are of files and folders on the server's machine; a rank but the first adds its number to them.
    """

    def fusion_markers(self) -> dict[str, list[int]]:
        return markers()

    def fusion_reset_markers(self) -> None:
        reset_markers()

    def fusion_records(self, path: str) -> dict[str, int]:
        """Write the records, see `Recorder.save`; ``rows`` and ``lost``, both 0 where none are kept."""
        file, rank = Path(path), int(getattr(self, "rank", 0))
        if rank:
            file = file.with_name(f"{file.stem}.{rank}{file.suffix}")
        return _recorders[0].save(file) if _recorders else {"rows": 0, "lost": 0}

    def fusion_reset_records(self) -> None:
        for recorder in _recorders:
            recorder.reset()

    def fusion_choices(self) -> dict[str, list[int]]:
        """What forced requests would have said, see `vllm_forced`."""
        from fusion_evidence.lib.service import vllm_forced

        return vllm_forced.choices()

    def fusion_reset_choices(self) -> None:
        from fusion_evidence.lib.service import vllm_forced

        vllm_forced.reset_choices()

    def fusion_graphs(self) -> dict[str, int]:
        """Write what was compiled for each range of sizes; how many ``graphs``."""
        return {"graphs": sum(evidence.save() for evidence in _evidence)}
