"""Shapes of gated full-attention layers: what the prologue needs to know about a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """One gated full-attention layer, and how many of them a model has.

    A packed ``qkv`` row is, in elements: for each query head ``[q(head_dim) | gate(head_dim)]``, then
    ``K(kv_heads * head_dim)``, then ``V(kv_heads * head_dim)``.

    Raises:
        ValueError: a size is not one the prologue can compute; the message names it.
    """

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    mrope_section: tuple[int, int, int]
    hidden_size: int
    layers: int
    attention_layers: int
    mrope_interleaved: bool = True
    eps: float = 1e-6
    rope_theta: float = 1e7

    def __post_init__(self) -> None:
        if self.q_heads < 1 or self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads={self.q_heads} must be a positive multiple of kv_heads={self.kv_heads}"
            )
        if self.head_dim < 16 or self.head_dim & (self.head_dim - 1):
            raise ValueError(f"head_dim={self.head_dim} must be a power of two, at least 16")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim={self.rotary_dim} must be even and between 2 and head_dim={self.head_dim}"
            )
        if len(self.mrope_section) != 3 or sum(self.mrope_section) != self.rotary_dim // 2:
            raise ValueError(
                f"mrope_section={self.mrope_section} must be three sizes that sum to "
                f"rotary_dim / 2 = {self.rotary_dim // 2}"
            )

    @property
    def qkv_width(self) -> int:
        """Elements of one packed row."""
        return (2 * self.q_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def q_size(self) -> int:
        """Elements of all query heads of one token (the gate has as many)."""
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all K (or V) heads of one token."""
        return self.kv_heads * self.head_dim

    def position_rows(self) -> tuple[int, ...]:
        """Which position row (0 = T, 1 = H, 2 = W) each of the rotary_dim/2 frequencies reads.

        Interleaved (Qwen3.5): frequency i reads H if i % 3 == 1 and i < 3 * section[1], W if
        i % 3 == 2 and i < 3 * section[2], else T. Chunked (Qwen2-VL): section[0] frequencies of T,
        then section[1] of H, then section[2] of W.
        """
        half = self.rotary_dim // 2
        t, h, w = self.mrope_section
        if not self.mrope_interleaved:
            return (0,) * t + (1,) * h + (2,) * w
        return tuple(
            i % 3 if (i % 3 == 1 and i < 3 * h) or (i % 3 == 2 and i < 3 * w) else 0
            for i in range(half)
        )


def _qwen(
    size: str, hidden: int, layers: int, attention_layers: int, q_heads: int, kv_heads: int
) -> AttentionShape:
    return AttentionShape(
        f"qwen3.5-{size}",
        q_heads,
        kv_heads,
        256,
        64,
        (11, 11, 10),
        hidden,
        layers,
        attention_layers,
    )


PRESETS: dict[str, AttentionShape] = {
    shape.name: shape
    for shape in (
        _qwen("0.8b", 1024, 24, 6, 8, 2),
        _qwen("2b", 2048, 24, 6, 8, 2),
        _qwen("4b", 2560, 32, 8, 16, 4),
        _qwen("9b", 4096, 32, 8, 16, 4),
        _qwen("27b", 5120, 64, 16, 24, 4),
        _qwen("35b-a3b", 2048, 40, 10, 16, 2),
        AttentionShape("compact", 6, 2, 64, 16, (3, 3, 2), 256, 4, 4),
    )
}


def preset(name: str) -> AttentionShape:
    """The named shape. Raises ValueError with the known names when there is none."""
    if name not in PRESETS:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
