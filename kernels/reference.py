r"""The prologue's definition in plain PyTorch, with its numerics spelled out.

For token :math:`t`, head row :math:`x \in \mathbb{R}^D` of Q or K, norm weight :math:`w`:

.. math::
    y &= x \cdot \operatorname{rsqrt}\Big(\tfrac1D \sum_e x_e^2 + \varepsilon\Big) \cdot (1 + w) \\
    z_i &= y_i \cos_i - y_{i+R/2} \sin_i, \quad
    z_{i+R/2} = y_{i+R/2} \cos_i + y_i \sin_i \qquad (0 \le i < R/2) \\
    z_e &= y_e \qquad (e \ge R)

with :math:`\cos_i, \sin_i` read from row ``positions[row(i), t]`` of the table, where ``row(i)`` is
`AttentionShape.position_rows`. V and gate are copied; K and V also go to row ``slot_mapping[t]`` of the
paged caches, a negative slot writes nothing. The sum, the rounding points and the contraction are those
of `Numerics`; everything else is IEEE fp32, one rounding per operation (``rsqrt`` is the device's own).

This is oracle (a): slow, readable and independent of Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_arguments
from .numerics import Numerics, Reduction
from .shapes import AttentionShape


def cos_sin_table(
    shape: AttentionShape, positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """The rotary table ``[positions, rotary_dim]``: cosines, then sines, computed in fp32.

    Frequencies are ``theta ** (-2i / rotary_dim)`` (RoFormer, eq. 15), as Hugging Face and vLLM
    compute them: the power and its reciprocal in fp32, one cast at the end.
    """
    exponent = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
    frequency = 1.0 / (shape.rope_theta**exponent)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype).to(device)


def tree_sum(values: Tensor, reduction: Reduction) -> Tensor:
    """Sum the last dimension in exactly the order that ``reduction`` declares, one fp32 add a time.

    Raises ValueError when the tree's size is not the dimension's.
    """
    if values.shape[-1] != reduction.size:
        raise ValueError(
            f"reduction {reduction} sums {reduction.size} values, got {values.shape[-1]}"
        )
    x = values.unflatten(-1, (reduction.warps, reduction.lanes, reduction.elements))
    if reduction.order == "strided":
        x = values.unflatten(-1, (reduction.warps, reduction.elements, reduction.lanes)).mT
    if reduction.order == "pairwise":
        while x.shape[-1] > 1:
            x = x[..., 0::2] + x[..., 1::2]
        x = x[..., 0]
    else:
        total = x[..., 0]
        for element in range(1, reduction.elements):
            total = total + x[..., element]
        x = total
    return _halves(_halves(x))


def _halves(x: Tensor) -> Tensor:
    while (n := x.shape[-1]) > 1:
        x = x[..., : n // 2] + x[..., n // 2 :]
    return x[..., 0]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of fp32 tensors with a single rounding, on any device.

    The product is exact in fp64; the sum is rounded there *to odd*, after which rounding to fp32 gives
    the correctly rounded result (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
    2008): plain fp64 arithmetic would round twice.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.contiguous().view(torch.int64)
    outward = (error > 0) == (total > 0)
    sticky = (error != 0) & (bits & 1 == 0) & total.isfinite()
    bits = torch.where(sticky, torch.where(outward, bits + 1, bits - 1), bits)
    return bits.view(torch.float64).float()


def select_cos_sin(
    cos_sin: Tensor, positions: Tensor, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin``, each ``[T, rotary_dim/2]``, each frequency from its own position row."""
    half = shape.rotary_dim // 2
    if positions.dim() == 1:
        rows = cos_sin[positions]
        return rows[:, :half], rows[:, half:]
    which = torch.tensor(shape.position_rows(), device=positions.device)
    where = positions.long()[which].T  # [T, half]
    frequency = torch.arange(half, device=positions.device)
    return cos_sin[where, frequency], cos_sin[where, frequency + half]


def norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    shape: AttentionShape,
    numerics: Numerics,
    reduction: Reduction,
) -> Tensor:
    """RMSNorm and rotation of head rows ``x[T, heads, D]`` with ``cos``/``sin`` ``[T, rotary_dim/2]``.

    ``reduction`` is the tree of these heads, one of ``numerics.reductions``.
    """
    dtype = x.dtype

    def rounded(value: Tensor, target: torch.dtype = dtype) -> Tensor:
        return value.to(target).float()

    values = x.float()
    mean = tree_sum(values * values, reduction) * (1.0 / shape.head_dim)
    y = values * torch.rsqrt(mean + shape.eps)[..., None] * (1.0 + weight.float())
    if numerics.rounding != "fp32_through":
        y = rounded(y)
    half = shape.rotary_dim // 2
    first, second = y[..., :half], y[..., half : 2 * half]
    c, s = cos.float()[:, None], sin.float()[:, None]
    if numerics.rounding == "per_op":
        # Eager PyTorch rounds a product to the promoted dtype of its factors.
        promoted = torch.promote_types(dtype, cos.dtype)

        def rotate(a: Tensor, b: Tensor, sign: float) -> Tensor:
            return rounded(a * c, promoted) + rounded(b * (s * sign), promoted)

    elif numerics.contraction == "cos":

        def rotate(a: Tensor, b: Tensor, sign: float) -> Tensor:
            return fma(a, c, b * (s * sign))

    elif numerics.contraction == "sin":

        def rotate(a: Tensor, b: Tensor, sign: float) -> Tensor:
            return fma(b, s * sign, a * c)

    else:

        def rotate(a: Tensor, b: Tensor, sign: float) -> Tensor:
            return a * c + b * (s * sign)

    rotated = (rotate(first, second, -1.0), rotate(second, first, 1.0), y[..., 2 * half :])
    return torch.cat(rotated, dim=-1).to(dtype)


def qkv_prologue(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split, Q/K RMSNorm, MRoPE, gate and paged K/V write of ``T`` tokens.

    Args:
        qkv: ``[T, W]`` bf16 or fp16, unit last stride.
        q_weight, k_weight: ``[D]`` norm weights, dtype of ``qkv`` (the factor is ``1 + w``).
        cos_sin: ``[P, rotary_dim]``, dtype of ``qkv`` or fp32.
        positions: ``[3, T]`` (T, H, W rows) or ``[T]``, int32 or int64, values in ``[0, P)``.
        slot_mapping: ``[T]`` int32 or int64, values below ``N * B``; negative writes nothing.
        key_cache, value_cache: ``[N, B, kv_heads, D]``, dtype of ``qkv``; mutated in place.

    Returns:
        ``q[T, Hq, D]``, ``k[T, Hk, D]``, ``v[T, Hk, D]``, ``gate[T, Hq * D]``.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, stride or device is not as above.
    """
    check_arguments(
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        slot_mapping,
        key_cache,
        value_cache,
        shape,
        numerics,
    )
    tokens, dim = qkv.shape[0], shape.head_dim
    q_gate, k, v = qkv.split((2 * shape.q_size, shape.kv_size, shape.kv_size), dim=-1)
    q, gate = q_gate.unflatten(-1, (shape.q_heads, 2, dim)).unbind(2)
    k = k.unflatten(-1, (shape.kv_heads, dim))
    v = v.unflatten(-1, (shape.kv_heads, dim)).contiguous()
    cos, sin = select_cos_sin(cos_sin, positions, shape)
    q = norm_rope(q, q_weight, cos, sin, shape, numerics, numerics.reductions[0])
    k = norm_rope(k, k_weight, cos, sin, shape, numerics, numerics.reductions[1])
    block_size = key_cache.shape[1]
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    key_cache[slots // block_size, slots % block_size] = k[written]
    value_cache[slots // block_size, slots % block_size] = v[written]
    return q, k, v, gate.reshape(tokens, shape.q_size)
