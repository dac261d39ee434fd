"""A compact Qwen3.5-style decoder whose prologue can be exchanged.

Every layer is a gated full-attention layer; the linear-attention layers of the real family are
left out. What happens between the merged projection and attention (q/k norm, MRoPE, gate, cache
write) is one callable, the *prologue*, with the signature of the op in
``fusion_evidence.kernels``. So the same weights run with the prologue in the graph, behind a Python
branch, or as an opaque op.

Attention is an opaque op, as in vLLM, which bounds the compiled regions as a service does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import AttentionShape, preset

Prologue = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
"""``(qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, key_cache, value_cache, shape,
numerics) -> (q[T,Hq,D], k[T,Hk,D], v[T,Hk,D], gate[T,Hq*D])``; writes the caches in place."""

Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""``(layer, q, key_cache, value_cache, block_table, seq_len)``: what the attention op was given."""

_observers: list[Observer] = []

AttentionBackend = Literal["default", "math", "efficient", "cudnn"]
"""What computes attention: PyTorch's choice for the sizes at hand, or always the same. Its flash
backend takes no mask, and so cannot follow a ``seq_len`` that only the device knows."""

_backends: list[AttentionBackend] = ["default"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message says everything that is wrong with it."""


@contextmanager
def observe_attention(observer: Observer) -> Iterator[None]:
    """Call ``observer`` whenever the attention op runs. It is opaque, so no graph changes.

    The tensors are the op's own: clone what must outlive the call. Under CUDA-graph replay the op's
    Python does not run, so nothing is observed there.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def pin_attention(backend: AttentionBackend) -> Iterator[None]:
    """Let one backend compute attention. ValueError names those that exist."""
    if backend not in get_args(AttentionBackend):
        raise ValueError(f"backend: expected one of {get_args(AttentionBackend)}, got {backend!r}")
    _backends.append(backend)
    try:
        yield
    finally:
        _backends.pop()


def _pinned_backend() -> AbstractContextManager[None]:
    if _backends[-1] == "default":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "math": SDPBackend.MATH,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    return sdpa_kernel(backends[_backends[-1]])


@torch.library.custom_op(
    "fusion_evidence::paged_attention",
    mutates_args=(),
    # Written out: torch 2.4 cannot read it off annotations that are strings, as they are here.
    schema=(
        "(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_len, "
        "int layer) -> Tensor"
    ),
)
def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_len: Tensor,
    layer: int,
) -> Tensor:
    """Causal attention of one request's newest T tokens over its paged cache.

    Args:
        q: [T, Hq, D]; the last T positions of the request.
        key_cache, value_cache: [N, B, Hk, D], the T newest rows already written.
        block_table: [M] int64, the request's blocks in order; rows past ``seq_len`` are masked.
        seq_len: [1] int64 on the device, tokens in the request including these T. A tensor, so
            that neither a graph nor a captured CUDA graph freezes it.
        layer: which layer asks; only observers use it.

    Returns:
        [T, Hq, D] of q's dtype, a new contiguous tensor.
    """
    for observer in _observers:
        observer(layer, q, key_cache, value_cache, block_table, seq_len)
    tokens, q_heads, head_dim = q.shape
    kv_heads = key_cache.shape[2]
    keys, values = (
        cache[block_table].reshape(-1, kv_heads, head_dim).repeat_interleave(q_heads // kv_heads, 1)
        for cache in (key_cache, value_cache)
    )
    query_at = seq_len - tokens + torch.arange(tokens, device=q.device)
    visible = torch.arange(keys.shape[0], device=q.device) <= query_at[:, None]
    with _pinned_backend():
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=visible,
        )
    return out[0].transpose(0, 1).contiguous()


@paged_attention.register_fake
def _(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_len: Tensor,
    layer: int,
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def python_branch(decode: Prologue, prefill: Prologue) -> Prologue:
    """The article's first integration: choose by the token count, in Python.

    Right in eager mode. Under a tracer this ``if`` is evaluated once, when the graph is made.
    """

    def prologue(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if qkv.shape[0] == 1:
            return decode(qkv, *rest)
        return prefill(qkv, *rest)

    return prologue


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model. ``layers`` counts the gated full-attention layers, the only kind here."""

    shape: AttentionShape
    layers: int
    vocab_size: int
    intermediate_size: int
    max_positions: int
    tie_word_embeddings: bool = True

    @staticmethod
    def compact(layers: int | None = None, vocab_size: int = 512) -> ModelConfig:
        """The compact preset: 6/2 heads of 64, hidden 256; minutes on a CPU."""
        shape = preset("compact")
        return ModelConfig(shape, layers or shape.attention_layers, vocab_size, 768, 4096)

    @staticmethod
    def article(layers: int | None = None, vocab_size: int = 4096) -> ModelConfig:
        """The article's layer shape: 24/4 heads of 256, hidden 5120, MLP 17408, 16 layers.

        The vocabulary is small on purpose: the embedding is not what is measured.
        """
        shape = preset("qwen3.5-27b")
        return ModelConfig(shape, layers or shape.attention_layers, vocab_size, 17408, 8192)

    def to_hugging_face(self) -> dict[str, Any]:
        """The ``config.json`` of a ``Qwen3_5ForCausalLM`` with only full-attention layers."""
        s = self.shape
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": s.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention"] * self.layers,
            "num_attention_heads": s.q_heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": s.eps,
            "attention_bias": False,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": s.rope_theta,
                "partial_rotary_factor": s.rotary_dim / s.head_dim,
                "mrope_section": list(s.mrope_section),
                "mrope_interleaved": s.mrope_interleaved,
            },
        }

    @staticmethod
    def from_hugging_face(config: dict[str, Any], name: str = "checkpoint") -> ModelConfig:
        """Read a Qwen3.5 ``config.json``, text-only or with the text part under ``text_config``.

        Raises:
            CheckpointError: naming the missing keys, or what this model does not have.
        """
        text = config.get("text_config", config)
        needed = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
            *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
            *("rms_norm_eps", "rope_parameters"),
        )
        missing = [key for key in needed if key not in text]
        rope = text.get("rope_parameters") or {}
        missing += [
            f"rope_parameters.{key}" for key in ("rope_theta", "mrope_section") if key not in rope
        ]
        if missing:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}")
        layers = text["num_hidden_layers"]
        kinds = set(text.get("layer_types") or ["full_attention"])
        if kinds != {"full_attention"}:
            raise CheckpointError(
                f"config.json layer_types has {sorted(kinds)}; only full_attention"
            )
        if text.get("attention_bias"):
            raise CheckpointError("config.json attention_bias is true; this model has no biases")
        factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        try:
            shape = AttentionShape(
                name=name,
                q_heads=text["num_attention_heads"],
                kv_heads=text["num_key_value_heads"],
                head_dim=text["head_dim"],
                rotary_dim=int(text["head_dim"] * factor),
                mrope_section=tuple(rope["mrope_section"]),
                mrope_interleaved=rope.get("mrope_interleaved", True),
                hidden_size=text["hidden_size"],
                layers=layers,
                attention_layers=layers,
                eps=text["rms_norm_eps"],
                rope_theta=rope["rope_theta"],
            )
        except ValueError as error:
            raise CheckpointError(f"config.json: {error}") from error
        return ModelConfig(
            shape,
            layers,
            text["vocab_size"],
            text["intermediate_size"],
            text["max_position_embeddings"],
            config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
        )


class RMSNorm(nn.Module):
    """RMS normalisation in fp32 with weight ``1 + w``; one rounding, at the end."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


@dataclass(frozen=True)
class Step:
    """One forward call of one request: T new tokens.

    ids: [T] int64; positions: [3, T] int64 (T, H, W rows); slot_mapping: [T] int64, the flat cache
    row of each token (-1 writes nothing); block_table: [M] int64; seq_len: [1] int64, tokens in the
    request including these.
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_len: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        yield from (self.ids, self.positions, self.slot_mapping, self.block_table, self.seq_len)


Caches = list[tuple[Tensor, Tensor]]
"""Per layer (key_cache, value_cache), each [N, B, Hk, D]."""


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        shape = config.shape
        self.shape, self.index = shape, index
        hidden, inner = shape.hidden_size, config.intermediate_size
        self.input_layernorm = RMSNorm(hidden, shape.eps)
        self.qkv_proj = nn.Linear(hidden, shape.qkv_width, bias=False)
        self.q_norm = nn.Parameter(torch.zeros(shape.head_dim))
        self.k_norm = nn.Parameter(torch.zeros(shape.head_dim))
        self.o_proj = nn.Linear(shape.q_heads * shape.head_dim, hidden, bias=False)
        self.post_attention_layernorm = RMSNorm(hidden, shape.eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_len: Tensor,
        cache: tuple[Tensor, Tensor],
        prologue: Prologue,
        numerics: Numerics,
    ) -> Tensor:
        qkv = self.qkv_proj(self.input_layernorm(x))
        q, _, _, gate = prologue(
            qkv,
            self.q_norm,
            self.k_norm,
            cos_sin,
            positions,
            slot_mapping,
            *cache,
            self.shape,
            numerics,
        )
        attended = paged_attention(q, *cache, block_table, seq_len, self.index)
        x = x + self.o_proj(attended.flatten(1) * torch.sigmoid(gate))
        mlp_gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(mlp_gate) * up)


class CompactModel(nn.Module):
    """The decoder. ``forward`` is the region to compile; ``logits`` stays outside, as in vLLM.

    Args:
        config: sizes.
        prologue: what runs between the merged projection and attention, in every layer.
        numerics: passed to the prologue; the default is one whose reduction fits ``head_dim``.
    """

    cos_sin: Tensor

    def __init__(
        self, config: ModelConfig, prologue: Prologue, numerics: Numerics | None = None
    ) -> None:
        super().__init__()
        shape = config.shape
        lanes = min(32, shape.head_dim)
        self.config, self.prologue = config, prologue
        self.numerics = numerics or Numerics(reduction=Reduction(lanes, shape.head_dim // lanes))
        self.embed_tokens = nn.Embedding(config.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("cos_sin", rotary_table(shape, config.max_positions), persistent=False)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_len: Tensor,
        caches: Caches,
    ) -> Tensor:
        """Final hidden states [T, hidden] of one ``Step``; writes its rows into the caches."""
        x = self.embed_tokens(ids)
        for index, layer in enumerate(self.layers):
            x = layer(
                x,
                self.cos_sin,
                positions,
                slot_mapping,
                block_table,
                seq_len,
                caches[index],
                self.prologue,
                self.numerics,
            )
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]."""
        return self.lm_head(hidden)

    def new_caches(self, blocks: int, block_size: int) -> Caches:
        """Zeroed caches of the model's device and dtype: per layer two [N, B, Hk, D]."""
        shape, weight = self.config.shape, self.lm_head.weight
        size = (blocks, block_size, shape.kv_heads, shape.head_dim)
        return [(weight.new_zeros(size), weight.new_zeros(size)) for _ in range(self.config.layers)]


def rotary_table(shape: AttentionShape, positions: int) -> Tensor:
    """[positions, rotary_dim] fp32: cos in the first half of a row, sin in the second."""
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
    angles = torch.arange(positions, dtype=torch.float32)[:, None] / shape.rope_theta**exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def random_model(
    config: ModelConfig,
    prologue: Prologue,
    numerics: Numerics | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    draw_on: str = "cpu",
) -> CompactModel:
    """A model with seeded random weights, for timing and for tests, in evaluation mode.

    Weights are drawn in fp32. On the CPU a seed gives the same model on every device; ``draw_on`` a
    GPU, the same on every GPU of that kind, in seconds where the CPU takes minutes for billions.
    """
    with torch.device("meta"):
        model = CompactModel(config, prologue, numerics)
    generator = torch.Generator(draw_on).manual_seed(seed)
    state = {}
    for name, weight in model.state_dict().items():
        # Norm weights are offsets from 1; the others keep activations near unit variance.
        scale = 0.1 if weight.dim() == 1 else weight.shape[-1] ** -0.5
        drawn = torch.randn(weight.shape, generator=generator, device=draw_on) * scale
        state[name] = drawn.to(device, dtype)
    return _assign(model, state, device, dtype)


def with_prologue(
    model: CompactModel, prologue: Prologue, numerics: Numerics | None = None
) -> CompactModel:
    """The same model, weights shared, with another prologue (and numerics, unless None)."""
    other = copy.copy(model)
    other.prologue, other.numerics = prologue, numerics or model.numerics
    return other


def _assign(
    model: CompactModel, state: dict[str, Tensor], device: str, dtype: torch.dtype
) -> CompactModel:
    """Give a model built on the meta device its weights and its rotary table."""
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    table = rotary_table(model.config.shape, model.config.max_positions)
    model.cos_sin = table.to(device, dtype)
    return model.eval().requires_grad_(False)


def _layer_names(index: int) -> dict[str, tuple[str, ...]]:
    """Our name of each weight of a layer -> the checkpoint's weights whose rows it stacks."""
    ours, theirs = f"layers.{index}.", f"layers.{index}."
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    return {
        ours + "input_layernorm.weight": (theirs + "input_layernorm.weight",),
        ours + "qkv_proj.weight": tuple(f"{attention}{p}_proj.weight" for p in "qkv"),
        ours + "q_norm": (attention + "q_norm.weight",),
        ours + "k_norm": (attention + "k_norm.weight",),
        ours + "o_proj.weight": (attention + "o_proj.weight",),
        ours + "post_attention_layernorm.weight": (theirs + "post_attention_layernorm.weight",),
        ours + "gate_up_proj.weight": (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        ours + "down_proj.weight": (mlp + "down_proj.weight",),
    }


def _names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": ("embed_tokens.weight",),
        "norm.weight": ("norm.weight",),
    }
    for index in range(config.layers):
        names |= _layer_names(index)
    return names


def _rows(config: ModelConfig, ours: str) -> list[int]:
    """Rows of each checkpoint weight stacked in ours, in order."""
    shape = config.shape
    if ours.endswith("qkv_proj.weight"):
        return [2 * shape.q_size, shape.kv_size, shape.kv_size]
    return [config.intermediate_size] * 2


def save(model: CompactModel, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` as a ``Qwen3_5ForCausalLM`` checkpoint."""
    from safetensors.torch import save_file

    config, state = model.config, model.state_dict()
    tensors: dict[str, Tensor] = {}
    for ours, theirs in _names(config).items():
        parts = state[ours].split(_rows(config, ours)) if len(theirs) > 1 else (state[ours],)
        tensors |= {
            f"model.{name}": part.contiguous() for name, part in zip(theirs, parts, strict=True)
        }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = state["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_hugging_face(), indent=2) + "\n")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
    return tensors


def load(
    folder: Path,
    prologue: Prologue,
    numerics: Numerics | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> CompactModel:
    """Load a Qwen3.5 checkpoint (``config.json`` and ``*.safetensors``), in evaluation mode.

    Weight names may start with ``model.`` or, as in the image-and-text model,
    ``model.language_model.``; vision and multi-token-prediction weights are ignored.

    Raises:
        CheckpointError: one message that lists every missing or misshapen weight.
    """
    folder = Path(folder)
    try:
        raw = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no config.json") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{folder / 'config.json'} is not JSON: {error}") from error
    config = ModelConfig.from_hugging_face(raw, name=folder.name)
    tensors = _read_tensors(folder)
    nested = any(name.startswith("model.language_model.") for name in tensors)
    prefix = "model.language_model." if nested else "model."
    sources = {
        ours: tuple(prefix + name for name in theirs) for ours, theirs in _names(config).items()
    }
    if not config.tie_word_embeddings:
        sources["lm_head.weight"] = ("lm_head.weight",)
    missing = [name for names in sources.values() for name in names if name not in tensors]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights: {', '.join(missing)}")

    with torch.device("meta"):
        model = CompactModel(config, prologue, numerics)
    wanted = model.state_dict()
    problems = _misshapen(config, sources, tensors, wanted)
    if problems:
        raise CheckpointError(f"{folder} has weights of another shape: {'; '.join(problems)}")
    state = {
        ours: torch.cat([tensors[name] for name in names]).to(device, dtype)
        for ours, names in sources.items()
    }
    return _assign(model, state, device, dtype)


def _misshapen(
    config: ModelConfig,
    sources: dict[str, tuple[str, ...]],
    tensors: dict[str, Tensor],
    wanted: dict[str, Tensor],
) -> list[str]:
    problems = []
    for ours, names in sources.items():
        whole = tuple(wanted[ours].shape)
        rows = _rows(config, ours) if len(names) > 1 else [whole[0]]
        for name, count in zip(names, rows, strict=True):
            expected = (count, *whole[1:])
            if tuple(tensors[name].shape) != expected:
                problems.append(f"{name} is {tuple(tensors[name].shape)}, expected {expected}")
    return problems


def step(
    ids: Sequence[int],
    start: int,
    block_table: Sequence[int],
    block_size: int,
    *,
    device: str = "cpu",
    positions: Tensor | None = None,
) -> Step:
    """The inputs of one forward call: ``ids`` at token indices start, start + 1, ... of a request.

    Args:
        block_table: the request's cache blocks, in order.
        positions: [3, T] when the three rows differ (image tokens); text tokens have equal rows.

    Raises:
        ValueError: the tokens do not fit in the request's blocks.
    """
    end, room = start + len(ids), len(block_table) * block_size
    if end > room:
        raise ValueError(f"{end} tokens do not fit in {len(block_table)} blocks of {block_size}")
    where = torch.arange(start, end)
    blocks = torch.tensor(block_table)
    slots = blocks[where // block_size] * block_size + where % block_size
    return Step(
        torch.tensor(list(ids)).to(device),
        (where.repeat(3, 1) if positions is None else positions).to(device),
        slots.to(device),
        blocks.to(device),
        torch.tensor([end]).to(device),
    )


@torch.no_grad()
def greedy(
    model: CompactModel,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    forward: Callable[..., Tensor] | None = None,
    block_size: int = 16,
) -> list[int]:
    """The ``new_tokens`` most likely next tokens: one prefill call, then ``new_tokens - 1`` of T=1.

    Args:
        forward: what runs the step; the model itself, or a compiled form of it.
    """
    forward = model if forward is None else forward
    device = str(model.lm_head.weight.device)
    blocks = -(-(len(prompt) + new_tokens) // block_size)
    caches = model.new_caches(blocks, block_size)
    out: list[int] = []
    ids, start = list(prompt), 0
    while len(out) < new_tokens:
        hidden = forward(*step(ids, start, range(blocks), block_size, device=device), caches)
        out.append(int(model.logits(hidden[-1]).argmax()))
        ids, start = out[-1:], start + len(ids)
    return out
