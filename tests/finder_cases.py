"""Small modules the finder has never seen. ``# found: value`` marks what tracing decides."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from finder_helper import is_decode, scale_for

WIDTH = 8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("table", torch.randn(128, WIDTH))
        self.enabled = True


class Article(Base):
    def forward(self, qkv: Tensor) -> Tensor:
        if self.enabled and qkv.shape[0] == 1:  # found: False
            return qkv * 2
        return qkv @ self.weight


class Alias(Base):
    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        decode = n == 1
        y = x @ self.weight
        return y * 2 if decode else y + 1  # found: False


class HelperElsewhere(Base):
    def forward(self, x: Tensor) -> Tensor:
        if is_decode(len(x)):  # found: False
            return x * 2
        return x @ self.weight


class DecidesInHelper(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x * scale_for(x.shape[0])


class Guarded(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 16 == 0:  # found: True
            return x * 2
        return x @ self.weight


class ToInt(Base):
    def forward(self, x: Tensor) -> Tensor:
        n = int(x.shape[0])  # found: 64
        return x @ self.weight * n


class SliceOfBuffer(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[0]]  # found: 2..128


class FullBuffer(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:64]  # found: 64


class Unrolled(Base):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(x.shape[0]):  # found: 64
            x = x + i
        return x


class Lookup(Base):
    def forward(self, x: Tensor) -> Tensor:
        table = {1: 2.0, 64: 3.0}
        return x * table.get(x.shape[0], 5.0)  # found: 64


class GuardOrFalse(Base):
    def forward(self, x: Tensor) -> Tensor:
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        if guard_or_false(x.shape[0] == 1):  # found: False
            return x * 2
        return x @ self.weight


class StaticallyKnown(Base):
    def forward(self, x: Tensor) -> Tensor:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        if statically_known_true(x.shape[0] == 1):  # found: False
            return x * 2
        return x @ self.weight


class Asserted(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] <= 128  # found: True
        return x @ self.weight


@torch._dynamo.assume_constant_result
def tokens_of(x: Tensor) -> int:
    return x.shape[0]


class Unseen(Base):
    """No expression over the size is ever evaluated: only comparing graphs can tell."""

    def forward(self, x: Tensor) -> Tensor:
        n = tokens_of(x)
        return F.pad(x, (0, 0, 0, 0)) * n  # found: 64


class UnseenBranch(Base):
    def forward(self, x: Tensor) -> Tensor:
        if tokens_of(x) == 1:  # found: False
            return x * 2
        return x @ self.weight


class Squeezed(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()  # found: (64, 8)


class SqueezedThenSummed(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y.squeeze(0).sum(-1)  # found: (64, 8)


class Clean(Base):
    """Ordinary uses of a size, which decide nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed = nn.LayerNorm(WIDTH), nn.Embedding(128, WIDTH)
        self.register_buffer("step", torch.zeros(1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        n, width = x.shape
        heads = self.norm(x).view(n, -1, 4).transpose(0, 1).contiguous()
        mixed = F.scaled_dot_product_attention(
            heads[None], heads[None], heads[None], is_causal=True
        )
        y = mixed[0].transpose(0, 1).reshape(x.shape[0], -1) + self.embed(ids)
        y = torch.cat((y[..., : width // 2] * 2, y[..., width // 2 :]), dim=-1)
        mask = torch.arange(n)[:, None] >= torch.arange(n)[None]
        y = mask.to(y.dtype) @ y / n + torch.zeros(n, width).scatter(0, ids[:, None], 1.0)
        self.step.add_(1)
        torch._check(n <= 4096)
        return torch.softmax(y.flatten().unflatten(0, (n, width)), -1)[-1:].expand(n, width) + y


class Cond(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] == 1, lambda t: t * 2, lambda t: t + 1, (x,))


class TwoSizes(Base):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if x.shape[0] == other.shape[0]:  # found: False
            return x + other
        return x @ self.weight


class Flattened(Base):
    """Two dynamic sizes through one reshape, whose checks divide by them."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        return F.cross_entropy(rows @ self.weight, rows.argmax(-1))


class Broken(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


def article():
    """What the command line takes: (module, example inputs, dynamic dimensions)."""
    return Article(), (torch.randn(64, WIDTH),), {"qkv": {0}}


instance = Clean()
