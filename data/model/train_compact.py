#!/usr/bin/env python3
"""Train the compact checkpoint from a corpus made by ``prepare_corpus.py``::

    python3 data/model/train_compact.py --corpus corpus.txt.xz --out data/model/compact --minutes 2.5

The model that is trained is the model that is served: ``CompactModel`` in bf16 with the eager
prologue. The optimizer keeps fp32 masters and rounds them into it after every step, so that the
loss reported is that of the saved weights. Writes the checkpoint, ``training.json`` and the model
card ``README.md``. A run with a time budget is seeded but ends at another step on another machine;
``--steps`` fixes the number.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_evidence.kernels.eager import qkv_prologue
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.service.model import (
    CompactModel,
    DecoderLayer,
    ModelConfig,
    greedy,
    random_model,
    save,
    step,
)
from fusion_evidence.lib.service.prompts import (
    END_OF_TEXT,
    Span,
    load_tokenizer,
    span_positions,
)

CONFIG = ModelConfig(
    preset("compact"), 4, vocab_size=2048, intermediate_size=576, max_positions=4096
)
MAX_BYTES = 8_000_000
MARK = "=== "  # a document starts with a line of this and its name


@dataclass(frozen=True)
class Budget:
    """How long to train: ``steps`` if given, else ``minutes``."""

    minutes: float
    steps: int | None

    def progress(self, step: int, started: float) -> float:
        """0 at the start, 1 or more when spent."""
        if self.steps is not None:
            return step / self.steps
        return (time.perf_counter() - started) / (60 * self.minutes)


@dataclass(frozen=True)
class Split:
    """The documents of one part of the corpus: names, texts, and all tokens in one row."""

    names: list[str]
    texts: list[str]
    tokens: Tensor

    @property
    def bytes_per_token(self) -> float:
        return sum(len(text.encode()) for text in self.texts) / len(self.tokens)


def part(name: str) -> str:
    """Which part a document belongs to, by a checksum of its name: 2 % each is held out."""
    return {0: "test", 1: "validation"}.get(zlib.crc32(name.encode()) % 50, "train")


def read_corpus(path: Path, tokenizer: Any) -> dict[str, Split]:
    """The three parts of the corpus, tokenized; every document ends with the end-of-text token.

    Raises:
        ValueError: the file has no document, or a part would be empty.
    """
    documents: dict[str, list[tuple[str, str]]] = {"train": [], "validation": [], "test": []}
    for block in ("\n" + lzma.decompress(path.read_bytes()).decode()).split("\n" + MARK)[1:]:
        name, _, text = block.partition("\n")
        documents[part(name)].append((name, text.strip()))
    splits = {}
    for key, found in documents.items():
        if not found:
            raise ValueError(f"{path} has no {key} document")
        names, texts = [name for name, _ in found], [text for _, text in found]
        end = tokenizer.token_to_id(END_OF_TEXT)
        ids = [token for coded in tokenizer.encode_batch(texts) for token in (*coded.ids, end)]
        splits[key] = Split(names, texts, torch.tensor(ids))
    return splits


def training_logits(model: CompactModel, ids: Tensor, positions: Tensor) -> Tensor:
    """What the served model computes, for a batch and with gradients.

    ``CompactModel.forward`` serves one request from a paged cache, through an attention op without
    a backward. Here the same modules and the same prologue run, and attention is plain and causal.

    Args:
        ids: [B, S] int64.
        positions: [3, B, S] int64.

    Returns:
        [B, S, vocab] of the model's dtype.
    """
    shape = model.config.shape
    batch, context = ids.shape
    x = model.embed_tokens(ids)
    slots = torch.arange(batch * context, device=ids.device)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        qkv = layer.qkv_proj(layer.input_layernorm(x)).flatten(0, 1)
        scratch = qkv.new_empty(2, 1, batch * context, shape.kv_heads, shape.head_dim)
        q, k, v, gate = qkv_prologue(
            qkv,
            layer.q_norm,
            layer.k_norm,
            model.cos_sin,
            positions.flatten(1),
            slots,
            scratch[0].detach(),
            scratch[1].detach(),
            shape,
            model.numerics,
        )
        q, k, v = (
            rows.view(batch, context, -1, shape.head_dim).transpose(1, 2) for rows in (q, k, v)
        )
        k, v = (rows.repeat_interleave(shape.q_heads // shape.kv_heads, 1) for rows in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).flatten(2)
        x = x + layer.o_proj(attended * torch.sigmoid(gate.view_as(attended)))
        mlp_gate, up = layer.gate_up_proj(layer.post_attention_layernorm(x)).chunk(2, dim=-1)
        x = x + layer.down_proj(F.silu(mlp_gate) * up)
    return model.logits(model.norm(x))


def loss_of(model: CompactModel, windows: Tensor, positions: Tensor) -> Tensor:
    """Mean next-token loss in nats. windows: [B, S + 1] int64; positions: [3, B, S]."""
    logits = training_logits(model, windows[:, :-1], positions)
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def position_layouts(context: int, count: int, generator: torch.Generator) -> Tensor:
    """[3, count, context]: a quarter of the rows have one or two image-like spans, the others none.

    They keep requests with three different position rows within what the model has seen.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    layouts = []
    for index in range(count):
        spans: list[Span] = []
        token = 0
        for _ in range(draw(1, 3) if index % 4 == 0 else 0):
            span = Span(token + draw(0, context // 3), (draw(1, 3), draw(2, 17), draw(2, 17)))
            if span.end <= context:
                spans.append(span)
                token = span.end
        layouts.append(span_positions(context, spans))
    return torch.stack(layouts, dim=1)


def initial_model(seed: int, device: str) -> CompactModel:
    """fp32 weights to start from: unit-variance layers, norms of 1, small residual branches."""
    model = random_model(CONFIG, qkv_prologue, seed=seed, device=device, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.zero_()
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_((2 * CONFIG.layers) ** -0.5)
    return model


def learning_rate(progress: float, peak: float) -> float:
    """Linear over the first 3 %, then a cosine down to 5 % of the peak."""
    if progress < 0.03:
        return peak * max(progress / 0.03, 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * min((progress - 0.03) / 0.97, 1.0)))
    return peak * (0.05 + 0.95 * cosine)


def fixed_windows(tokens: Tensor, context: int, limit: int) -> Tensor:
    """[<= limit, context + 1]: consecutive windows that share no target.

    Raises:
        ValueError: fewer tokens than one window.
    """
    if len(tokens) <= context:
        raise ValueError(f"{len(tokens)} held-out tokens are less than one window of {context + 1}")
    return tokens.unfold(0, context + 1, context)[:limit]


@torch.no_grad()
def held_out_loss(model: CompactModel, windows: Tensor, batch: int) -> float:
    """Mean loss in nats over windows [N, S + 1], text positions."""
    total = 0.0
    for rows in windows.split(batch):
        at = torch.arange(rows.shape[1] - 1, device=rows.device).expand(3, len(rows), -1)
        total += float(loss_of(model, rows, at)) * len(rows)
    return total / len(windows)


@dataclass(frozen=True)
class Curve:
    """What training recorded: one row per log point, and the held-out losses."""

    train: list[dict[str, float]]
    validation: list[dict[str, float]]
    steps: int
    seconds: float
    best_step: int


def train(
    model: CompactModel,
    tokens: Tensor,
    validation: Tensor,
    budget: Budget,
    *,
    batch: int,
    context: int,
    peak: float,
    seed: int,
) -> Curve:
    """Train ``model`` (fp32 in, bf16 out, on its device); it ends with its best validation weights.

    Args:
        tokens: [N] int64; windows start anywhere in it.
        validation: [M, context + 1] int64 on the device.
    """
    device = model.cos_sin.device
    masters = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    model.to(torch.bfloat16).requires_grad_(True)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters if m.dim() > 1], "weight_decay": 0.1},
            {"params": [m for m in masters if m.dim() == 1], "weight_decay": 0.0},
        ],
        lr=peak,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    layouts = position_layouts(context, 256, torch.Generator().manual_seed(seed)).to(device)
    generator = torch.Generator(device).manual_seed(seed)  # on the device: no step waits for a copy
    tokens, offsets = tokens.to(device), torch.arange(context + 1, device=device)

    def draw(high: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(high, size, generator=generator, device=device)

    def update(rate: float) -> Tensor:
        start = draw(len(tokens) - context, (batch, 1))
        rows = draw(layouts.shape[1], (batch,))
        loss = loss_of(model, tokens[start + offsets], layouts[:, rows])
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        return loss.detach()

    update(0.0)  # libraries load and kernels compile before the clock starts
    losses, trained, checked = [], list[dict[str, float]](), list[dict[str, float]]()
    best, best_step, best_weights = math.inf, 0, [weight.detach().clone() for weight in weights]
    count, started, next_check = 0, time.perf_counter(), 0.1
    while True:
        progress = budget.progress(count, started)
        if progress >= next_check or progress >= 1:
            next_check += 0.1
            loss = held_out_loss(model, validation, batch)
            checked.append({"step": count, "seconds": time.perf_counter() - started, "loss": loss})
            print(f"step {count}  validation {loss:.4f}  progress {progress:.0%}", flush=True)
            if loss < best:
                best, best_step = loss, count
                best_weights = [weight.detach().clone() for weight in weights]
        if progress >= 1:
            break
        losses.append(update(learning_rate(progress, peak)))
        count += 1
        # A look at the loss waits for the device, which also keeps the clock honest.
        if count % 20 == 0 or count <= 5:
            mean = float(torch.stack(losses).mean())
            losses.clear()
            seconds = time.perf_counter() - started
            trained.append({"step": count, "seconds": seconds, "loss": mean})
            if count % 200 == 0 or count <= 5:
                speed = count * batch * context / seconds
                print(f"step {count}  loss {mean:.4f}  {speed:,.0f} tokens/s", flush=True)
            if not math.isfinite(mean):
                print("the loss is not finite: training stops at its best weights", flush=True)
                break
    seconds = time.perf_counter() - started
    with torch.no_grad():
        for weight, kept in zip(weights, best_weights, strict=True):
            weight.copy_(kept)
    model.requires_grad_(False)
    return Curve(trained, checked, count, seconds, best_step)


@torch.no_grad()
def margins(model: CompactModel, windows: Tensor, batch: int) -> dict[str, float]:
    """Quantiles of top-1 minus top-2 logit over windows [N, S + 1], and the share of exact ties."""
    found = []
    for rows in windows.split(batch):
        at = torch.arange(rows.shape[1] - 1, device=rows.device).expand(3, len(rows), -1)
        first, second = training_logits(model, rows[:, :-1], at).float().topk(2).values.unbind(-1)
        found.append((first - second).flatten().cpu())
    gaps = torch.cat(found).sort().values
    quantiles = {
        f"p{percent}": float(gaps[int(percent / 100 * (len(gaps) - 1))])
        for percent in (1, 5, 10, 25, 50, 75, 90)
    }
    return quantiles | {"ties": float((gaps == 0).float().mean()), "tokens": float(len(gaps))}


@torch.no_grad()
def served_difference(model: CompactModel, ids: Sequence[int]) -> float:
    """Largest absolute difference of the served and the training forward's logits, same weights."""
    device = str(model.lm_head.weight.device)
    blocks = -(-len(ids) // 16)
    call = step(ids, 0, range(blocks), 16, device=device)
    served = model.logits(model(*call, model.new_caches(blocks, 16)))
    trained = training_logits(model, call.ids[None], call.positions[:, None])[0]
    return float((served.float() - trained.float()).abs().max())


def continuations(
    model: CompactModel, split: Split, tokenizer: Any, count: int, new_tokens: int
) -> Iterator[dict[str, str]]:
    """Greedy continuations, by the served model, of the first 48 tokens of held-out documents."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stride = max(1, len(split.texts) // count)
    for name, text in list(zip(split.names, split.texts, strict=True))[::stride][:count]:
        prompt = tokenizer.encode(text).ids[:48]
        reply = greedy(model, prompt, new_tokens)
        if end in reply:
            reply = reply[: reply.index(end)]
        yield {
            "document": name,
            "prompt": tokenizer.decode(prompt),
            "continuation": tokenizer.decode(reply),
        }


def write_card(folder: Path, report: dict[str, Any], sources: dict[str, Any]) -> None:
    """The model card, from the report and from what ``prepare_corpus.py`` recorded."""
    checks, curve = report["validation"], report["train"]

    def near(point: int) -> float:
        return min(curve, key=lambda row: abs(row["step"] - point))["loss"]

    losses = "\n".join(
        f"| {row['step']:,} | {row['seconds']:.0f} | {near(row['step']):.3f} | {row['loss']:.3f} |"
        for row in checks
    )
    packages = "\n".join(
        f"| `{row['package']}` | {row['version']} | {row['licence']} | {row['documents']:,} "
        f"| {row['characters'] / 1e6:.1f} |"
        for row in sources["packages"]
    )
    samples = "\n".join(
        f"**`{row['document']}`**\n\n> {_quoted(row['prompt'])} **→** {_quoted(row['continuation'])}\n"
        for row in report["samples"]
    )
    gaps = report["margins"]
    quantiles = [key for key in gaps if key.startswith("p")]
    config = CONFIG
    (folder / "README.md").write_text(
        f"""---
library_name: transformers
language: en
license: apache-2.0
---
# Compact: a small Qwen3.5-style language model

{report["parameters"]:,} parameters in bf16, {report["bytes"] / 1e6:.2f} MB with its tokenizer. It is
here so that a change of bits has text to change: it writes English of the kind found in software
manuals, and what it says is not to be relied on.

Every layer is a gated full-attention layer ({config.layers} layers, hidden {config.shape.hidden_size},
{config.shape.q_heads} query and {config.shape.kv_heads} key/value heads of {config.shape.head_dim},
MLP {config.intermediate_size}, vocabulary {config.vocab_size}, tied embeddings, multimodal RoPE on
{config.shape.rotary_dim} elements in sections {list(config.shape.mrope_section)}). The linear-attention
layers of the real family are left out. The files load in this project's engine and as a
`Qwen3_5ForCausalLM`.

## Training

{report["steps"]:,} steps of {report["batch"]} x {report["context"]} tokens
({report["tokens"] / 1e6:.1f} million, {report["epochs"]:.1f} times the training text) in
{report["seconds"]:.0f} s on {report["device"]}, {report["tokens_per_second"]:,.0f} tokens/s;
torch {report["torch"]}. AdamW, peak rate {report["peak"]:g}, cosine, seed {report["seed"]}; bf16
weights rounded from fp32 masters after each step. A quarter of the sequences have image-like spans
with three different position rows. The weights are those of step {report["best_step"]:,}, the best
on the validation documents.

| step | s | training loss | validation loss |
|---:|---:|---:|---:|
{losses}

Losses are nats per token; [`training.json`](training.json) has the whole curve.

**Held out** (test documents, {report["test_tokens"]:,} tokens, chosen before training by a checksum of
their names): loss {report["test_loss"]:.3f} nats per token, {report["bits_per_byte"]:.3f} bits per
byte. The tokenizer alone has seen them.

**Top-1 minus top-2 logit** on them, {int(gaps["tokens"]):,} positions; exact ties
{gaps["ties"]:.2%} (bf16 logits):

| {" | ".join(quantiles)} |
|{"---:|" * len(quantiles)}
| {" | ".join(f"{gaps[key]:.3f}" for key in quantiles)} |

## Greedy continuations of held-out documents

{samples}
## Text it was trained with

Prose paragraphs of these Debian packages; no code blocks, no tables, no repeated paragraphs.

| package | version | licence | documents | million characters |
|---|---|---|---:|---:|
{packages}

SHA-256 of the text: `{sources["sha256"]}`. The text itself is not in the repository. The weights and
the tokenizer are under the project's licence, Apache-2.0.

## Made with

```
mkdir debs && (cd debs && apt-get download {" ".join(row["package"] for row in sources["packages"])})
python3 data/model/prepare_corpus.py debs --corpus corpus.txt.xz --out data/model/compact
python3 data/model/train_compact.py --corpus corpus.txt.xz --out data/model/compact {report["arguments"]}
```
"""
    )


def _quoted(text: str) -> str:
    return text.replace("\n", "\n> ").replace("*", "\\*").replace("_", "\\_")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.txt.xz")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=Path(__file__).parent / "compact",
        help="folder of tokenizer.json and sources.json",
    )
    parser.add_argument("--minutes", type=float, default=2.5)
    parser.add_argument("--steps", type=int, help="instead of --minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--peak", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--held-out-windows", type=int, default=64, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.tokenizer)
    sources = json.loads((args.tokenizer / "sources.json").read_text())
    started = time.perf_counter()
    splits = read_corpus(args.corpus, tokenizer)
    sizes = {key: f"{len(split.tokens):,}" for key, split in splits.items()}
    print(f"tokens: {sizes}, read in {time.perf_counter() - started:.0f} s", flush=True)
    validation, test = (
        fixed_windows(splits[key].tokens, args.context, args.held_out_windows).to(args.device)
        for key in ("validation", "test")
    )
    model = initial_model(args.seed, args.device)
    curve = train(
        model,
        splits["train"].tokens,
        validation,
        Budget(args.minutes, args.steps),
        batch=args.batch,
        context=args.context,
        peak=args.peak,
        seed=args.seed,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    save(model, args.out)  # first of all, so that nothing after it can lose the weights
    end = tokenizer.token_to_id(END_OF_TEXT)
    generation = {"do_sample": False, "eos_token_id": end}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "sources.json"):
        if args.out.resolve() != args.tokenizer.resolve():
            shutil.copyfile(args.tokenizer / name, args.out / name)

    loss = held_out_loss(model, test, args.batch)
    seen = curve.steps * args.batch * args.context
    on_gpu = args.device.startswith("cuda")
    limit = f"--steps {args.steps}" if args.steps else f"--minutes {args.minutes:g}"
    shape = (args.batch, args.context)
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "arguments": limit
        if shape == (16, 2048)
        else f"{limit} --batch {shape[0]} --context {shape[1]}",
        "seed": args.seed,
        "batch": args.batch,
        "context": args.context,
        "peak": args.peak,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "bytes": sum(
            (args.out / name).stat().st_size for name in ("model.safetensors", "tokenizer.json")
        ),
        "steps": curve.steps,
        "best_step": curve.best_step,
        "seconds": curve.seconds,
        "tokens": seen,
        "tokens_per_second": seen / curve.seconds,
        "epochs": seen / len(splits["train"].tokens),
        "corpus_tokens": {key: len(split.tokens) for key, split in splits.items()},
        "test_tokens": test.shape[0] * args.context,
        "test_loss": loss,
        "bits_per_byte": loss / math.log(2) / splits["test"].bytes_per_token,
        "served_logits_difference": served_difference(model, test[0, : args.context].tolist()),
        "margins": margins(model, test, args.batch),
        "samples": list(continuations(model, splits["test"], tokenizer, 5, 96)),
        "validation": curve.validation,
        "train": curve.train,
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    write_card(args.out, report, sources)
    size = sum(path.stat().st_size for path in args.out.iterdir() if path.suffix != ".py")
    print(f"held-out loss {loss:.4f}, {report['bits_per_byte']:.3f} bits per byte; {size:,} bytes")
    for row in report["samples"]:
        print(f"- {row['prompt']} -> {row['continuation']}")
    if size > MAX_BYTES:
        raise SystemExit(f"error: the checkpoint has {size:,} bytes, more than {MAX_BYTES:,}")


if __name__ == "__main__":
    main()
