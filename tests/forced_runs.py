"""Teacher-forced runs of the compact model, recorded: what the tests of attribution compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.lib.attribution.records import LogitTape, Tape
from fusion_evidence.lib.service.model import CompactModel, ModelConfig, random_model, step

STEPS, VOCABULARY = 3, 1024
REQUESTS = {"text": (40, False), "image": (71, True)}
"""id -> prompt tokens, and whether the three position rows differ."""
BLOCK = 16


def table(tokens: int) -> list[int]:
    """Blocks for so many tokens and one more, out of order, others' between them."""
    return list(range(1, 2 * (tokens // BLOCK + 2), 2))[::-1]


TABLE = table(71 + STEPS)
FUSED = Numerics("fp32_through", Reduction(32, 2))
PER_OP = Numerics("per_op", Reduction(32, 2))


def model(layers: int = 3, numerics: Numerics = FUSED, prologue=reference.qkv_prologue, **options):
    return random_model(ModelConfig.compact(layers, VOCABULARY), prologue, numerics, **options)


def image_positions(tokens: int) -> torch.Tensor:
    """Rows as of an image of 5 columns."""
    at = torch.arange(tokens)
    return torch.stack((at // 40, at // 5, at % 5))


@torch.no_grad()
def forced(
    one: CompactModel,
    path: Path,
    *,
    forward: Callable | None = None,
    requests: dict[str, tuple[int, bool]] = REQUESTS,
    logits: Path | None = None,
    **tape: bool,
) -> Path:
    """Feed every request its own fixed tokens, a prefill and `STEPS` of one; record it to ``path``."""
    forward = one if forward is None else forward
    kept = LogitTape()
    blocks = table(max(tokens for tokens, _ in requests.values()) + STEPS)
    with Tape(one.config.shape, **tape) as recorder:
        for name, (tokens, image) in requests.items():
            generator = torch.Generator().manual_seed(tokens)
            ids = torch.randint(VOCABULARY, (tokens + STEPS,), generator=generator).tolist()
            caches = one.new_caches(2 * len(blocks), BLOCK)
            for at in range(STEPS + 1):
                start, end = (0, tokens) if at == 0 else (tokens + at - 1, tokens + at)
                positions = image_positions(tokens) if image and at == 0 else None
                arguments = step(ids[start:end], start, blocks, BLOCK, positions=positions)
                recorder.at(name, at, end - start)
                kept.at(name, at, one.logits(forward(*arguments, caches)[-1]))
    recorder.save(path)
    if logits:
        kept.save(logits)
    return path
