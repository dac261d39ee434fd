"""Declared numerics: which bits an implementation of the prologue produces.

Two implementations of one formula agree bit for bit only when they round at the same points, add in
the same order and contract the same products into fused multiply-adds. `Numerics` names all three, so
that a kernel's bits are a parameter of the call and not an effect of its launch configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Rounding = Literal["per_op", "storage", "fp32_through"]
Order = Literal["sequential", "pairwise", "strided"]
Contraction = Literal["none", "cos", "sin"]

MAX_ELEMENTS = 32


@dataclass(frozen=True)
class Reduction:
    """The tree that sums ``head_dim`` squares.

    A row is viewed as ``[warps, lanes, elements]``. First each lane adds its ``elements`` neighbours,
    ``sequential`` as in ``((x0 + x1) + x2) + ...`` or ``pairwise`` as in ``(x0 + x1) + (x2 + x3)``;
    ``strided`` views the row as ``[warps, elements, lanes]`` instead, so that a lane adds, in sequence,
    elements that lie ``lanes`` apart (a vector accumulator on a CPU). Then lanes are added by halves,
    lane ``i`` with lane ``i + lanes/2``, down to one; then warps likewise. The names are those of the
    hardware the tree was first seen on; on another wavefront width the same tree gives the same bits.

    Raises:
        ValueError: a size is not a power of two, or out of range.
    """

    lanes: int
    elements: int
    warps: int = 1
    order: Order = "sequential"

    def __post_init__(self) -> None:
        for name in ("lanes", "elements", "warps"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1 or size & (size - 1):
                raise ValueError(f"Reduction.{name} must be a power of two, got {size!r}")
        if self.elements > MAX_ELEMENTS:
            raise ValueError(f"Reduction.elements must be <= {MAX_ELEMENTS}, got {self.elements}")
        if self.order not in get_args(Order):
            raise ValueError(
                f"Reduction.order must be one of {get_args(Order)}, got {self.order!r}"
            )

    @property
    def size(self) -> int:
        """How many values the tree sums."""
        return self.lanes * self.elements * self.warps

    def __str__(self) -> str:
        return f"{self.warps}x{self.lanes}x{self.elements} {self.order}"

    @classmethod
    def parse(cls, text: str) -> Reduction:
        """Inverse of ``str``: ``"1x32x8 sequential"``. Raises ValueError on anything else."""
        try:
            sizes, order = text.split()
            warps, lanes, elements = (int(size) for size in sizes.split("x"))
        except ValueError:
            raise ValueError(
                f"reduction must read like '1x32x8 sequential' (warps x lanes x elements), got {text!r}"
            ) from None
        return cls(lanes, elements, warps, order)  # type: ignore[arg-type]

    @classmethod
    def candidates(cls, size: int) -> list[Reduction]:
        """Every tree over ``size`` values that a compiler for a CPU or a GPU may choose."""
        trees = []
        for warps in (1, 2, 4, 8, 16):
            for lanes in (8, 16, 32, 64):
                elements = size // (warps * lanes)
                if not 1 <= elements <= MAX_ELEMENTS:
                    continue
                for order in get_args(Order) if elements > 1 else ("sequential",):
                    # Two elements add in one way; two strided ones are the last halving of more lanes.
                    if (
                        elements > 2
                        or order == "sequential"
                        or (order == "strided" and lanes == 64)
                    ):
                        trees.append(cls(lanes, elements, warps, order))
        return trees


@dataclass(frozen=True)
class Numerics:
    """Rounding points, reduction tree and contraction of one implementation.

    rounding:
        ``per_op``: to the storage dtype after the norm, after each rotation product and after their
        sum (eager PyTorch). ``storage``: after the norm and after the rotation (vLLM's and SGLang's
        Triton kernels). ``fp32_through``: once, at the end (Inductor, when norm and rotation share a
        kernel).
    k_reduction:
        The tree of K where it is not Q's: a compiler makes two kernels of them and may give each its own.
    contraction:
        Which rotation product enters the sum unrounded, through a fused multiply-add: the one with
        ``cos``, the one with ``sin``, or ``none``. ``per_op`` rounds both and takes ``none`` only.

    Raises:
        ValueError: an unknown policy, or a contraction that the rounding rules out.
    """

    rounding: Rounding = "fp32_through"
    reduction: Reduction = field(default_factory=lambda: Reduction(32, 8))
    contraction: Contraction = "none"
    k_reduction: Reduction | None = None

    def __post_init__(self) -> None:
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding must be one of {get_args(Rounding)}, got {self.rounding!r}")
        if self.contraction not in get_args(Contraction):
            raise ValueError(
                f"contraction must be one of {get_args(Contraction)}, got {self.contraction!r}"
            )
        if self.rounding == "per_op" and self.contraction != "none":
            raise ValueError("rounding 'per_op' rounds both products: contraction must be 'none'")

    @property
    def reductions(self) -> tuple[Reduction, Reduction]:
        """The trees of Q and of K."""
        return self.reduction, self.k_reduction or self.reduction

    def __str__(self) -> str:
        q, k = self.reductions
        trees = str(q) if q == k else f"Q {q}, K {k}"
        return f"{self.rounding}, {trees}, contraction {self.contraction}"
