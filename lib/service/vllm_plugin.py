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
- ``integrated``: the kernel in the graphs that are compiled for T in ``decode`` alone, and in no other: see
  `late_decision`. Needs ``compile_sizes`` with every T of ``decode``.

Nothing here assumes CUDA, or who provides the platform: the layer, the compiler manager and the worker are
vLLM's own classes, which platform plugins use too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fusion_evidence.kernels.candidate import Kernel, load_kernel, marked
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.service import late_decision
from fusion_evidence.lib.service.arms import parse_numerics
from fusion_evidence.lib.service.vllm_hook import KEY

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

_layers: dict[str, _Attached] = {}


class PluginError(RuntimeError):
    """The service cannot run with this configuration; in one line."""


@dataclass(frozen=True)
class Settings:
    """What stands under ``fusion_evidence`` in vLLM's ``additional_config``.

    numerics: of the kernel, as `Numerics` prints itself; needed where the kernel shall run.
    decode: first and last T for which it does.
    candidate: a kernel in its place, see `kernels.candidate`.
    force: run with a version of vLLM that is not among `KNOWN`.
    """

    mode: Mode = "off"
    numerics: str = ""
    decode: tuple[int, int] = (1, 1)
    candidate: str = ""
    force: bool = False

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
        if self.runs_kernel and not self.numerics:
            raise PluginError(f"{KEY}.numerics: mode {self.mode} runs the kernel, and needs them")
        try:
            if self.numerics:
                parse_numerics(self.numerics)
            load_kernel(self.candidate)
        except ValueError as error:
            raise PluginError(f"{KEY}: {error}") from error

    @property
    def runs_kernel(self) -> bool:
        return self.mode not in ("off", "native", "fallback_only")

    def takes_kernel(self, tokens: int) -> bool:
        """Whether ``tokens`` tokens take the kernel where the choice is made at run time."""
        if self.mode == "opaque_fused":
            return True
        return self.runs_kernel and self.decode[0] <= tokens <= self.decode[1]


# --- ranges of sizes


def decided(graph: torch.fx.GraphModule, first: int, last: int) -> torch.fx.GraphModule:
    """What the compiler gets of a traced graph for ``first`` to ``last`` tokens."""
    found = [_layers[layer].settings for layer in late_decision.regions(graph) if layer in _layers]
    if found and all(one.decode[0] <= first and last <= one.decode[1] for one in found):
        return late_decision.with_operator(graph, torch.ops.fusion_evidence.vllm_prologue.default)
    return late_decision.without_marks(graph)


# --- one layer


@dataclass(frozen=True)
class _Attached:
    """A layer, what the kernel needs beside it, and its marker (int64 ``[2]`` on the device)."""

    layer: nn.Module
    settings: Settings
    shape: AttentionShape
    numerics: Numerics | None
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
        slots = self.no_slots[: qkv.shape[0]]  # negative: the kernel writes no cache
        return self.kernel(
            *(qkv, *weights, positions, slots, *caches, self.shape, self.numerics),
            marker=self.marker.narrow(0, KERNEL, 1),
        )


def attach(layer: Any, config: Any) -> None:
    """Give one attention layer the mode that vLLM's ``config`` asks for.

    PluginError: the configuration is wrong, or the layer or the service none that the mode can serve.
    """
    settings = Settings.read(config.additional_config)
    if settings.mode == "off":
        return
    check_version(settings)
    name = layer.attn.layer_name
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
        parse_numerics(settings.numerics) if settings.numerics else None,
        marked(load_kernel(settings.candidate)),
        torch.zeros(2, dtype=torch.int64, device=device),
        torch.full((tokens,), -1, dtype=torch.int64, device=device),
        torch.zeros(1, 1, shape.kv_heads, shape.head_dim, dtype=dtype, device=device),
        fallback,
    )
    if settings.mode == "integrated":
        _check_ranges(settings, config)
    layer._project_qkv_gate = MethodType(_FORWARD.get(settings.mode, _opaque), layer)


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
    first, last = settings.decode
    lacking = [T for T in range(first, last + 1) if T not in (compilation.compile_sizes or ())]
    if lacking:
        raise PluginError(f"mode integrated needs T={lacking} in compile_sizes")


def _compiled(own: Any) -> Any:
    compiled = torch.compile(own, fullgraph=True, dynamic=False)

    def call(layer: Any, qkv: Tensor, positions: Tensor) -> Any:
        if qkv.shape[0] > 1:
            qkv, positions = qkv.detach(), positions.detach()
            torch._dynamo.mark_dynamic(qkv, 0)
            torch._dynamo.mark_dynamic(positions, positions.dim() - 1)
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
    results = one.run(qkv, positions, one.settings.takes_kernel(qkv.shape[0]))
    q, k, v, gate = (r.reshape(qkv.shape[0], -1) for r in results)
    # None may be a view of the input, as vLLM's V is.
    return q.contiguous(), k.contiguous(), v.clone(), gate.contiguous()


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
    """For ``--worker-extension-cls``: the markers of a running service, by ``collective_rpc``."""

    def fusion_markers(self) -> dict[str, list[int]]:
        return markers()

    def fusion_reset_markers(self) -> None:
        reset_markers()
