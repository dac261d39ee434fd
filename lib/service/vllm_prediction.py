"""What the kernel saves a layer of a vLLM service, measured alone: the same work as there on both sides.

Notebook 01 times the whole prologue against PyTorch's static compile. A vLLM differs from that twice: it
writes the KV cache itself, whichever prologue ran, and it has Inductor put independent kernels into one
(``combo_kernels``), which leaves less to save. So a service's prediction is measured again, without the
cache write and with that option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_evidence.kernels import eager
from fusion_evidence.kernels.candidate import Kernel, marked
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.attribution.integration import Effect
from fusion_evidence.lib.graph import generated_code
from fusion_evidence.lib.measure.inputs import Inputs
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.measure.primitive import Arm, time_arms
from fusion_evidence.lib.measure.timing import Timing
from fusion_evidence.lib.service.arms import choosing_configurations


@dataclass(frozen=True)
class Alone:
    """Both prologues on the bench, hot: in a service the projection has just been written.

    times: by arm: ``compiled``; ``fused``, the kernel; ``control``, it once more; and the floors of
    `time_arms`. launches: generated kernels that ``compiled`` consists of.
    """

    times: dict[str, Timing]
    launches: int

    def saving(self, layers: int) -> Effect:
        """Microseconds a step of ``layers`` layers, by the worst ends of both intervals."""
        slow, fast = self.times["compiled"], self.times["fused"]
        return Effect(
            layers * (slow.median_us - fast.median_us),
            layers * (slow.low_us - fast.high_us),
            layers * (slow.high_us - fast.low_us),
            slow.n,
        )

    def __str__(self) -> str:
        slow, fast = self.times["compiled"], self.times["fused"]
        return (
            f"alone {slow.median_us:.2f} us in {self.launches} generated kernels, ours "
            f"{fast.median_us:.2f} us"
        )


def measure_alone(
    kernel: Kernel,
    shape: AttentionShape,
    numerics: Numerics,
    machine: Machine,
    *,
    configurations: Literal["timed", "first"],
    tokens: int = 1,
    samples: int = 31,
    seed: int = 0,
) -> Alone:
    """Time vLLM's compiled prologue and ``kernel`` as the plugin calls it, in turn, for ``tokens`` tokens.

    configurations: of generated kernels, as the servers choose them. The kernel counts its runs, as there.
    RuntimeError: as `time_graphs`. Resets Dynamo.
    """
    arms = {
        "fused": _without_cache(marked(kernel), shape, numerics, machine.device),
        "compiled": compiled(shape, configurations, machine),
    }
    with choosing_configurations(configurations), generated_code.capture() as codes:
        times = time_arms(arms, shape, tokens, machine, cold=False, seed=seed, samples=samples)
    launches = sum(map(generated_code.launches, codes))
    return Alone(times, launches)


def compiled(
    shape: AttentionShape, configurations: Literal["timed", "first"], machine: Machine
) -> Arm:
    """PyTorch's own prologue without the cache write, compiled for one size with vLLM's options."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"enable_auto_functionalized_v2": False}
    combining = machine.device != "cpu" and hasattr(torch._inductor.config, "combo_kernels")
    if combining:  # vLLM's default, but on CPUs
        options |= {
            "combo_kernels": True,
            "benchmark_combo_kernel": configurations == "timed",
            "shape_padding": configurations == "timed",
        }

    def region(
        qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, gate = eager.outputs(qkv, q_weight, k_weight, cos_sin, positions, shape)
        return q, k, v, gate.reshape(qkv.shape[0], shape.q_size)

    made = torch.compile(region, dynamic=False, fullgraph=True, options=options)
    return lambda one: partial(made, *one.args()[:5])


def _without_cache(kernel: Kernel, shape: AttentionShape, numerics: Numerics, device: str) -> Arm:
    marker = torch.zeros(1, dtype=torch.int64, device=device)

    def arm(one: Inputs) -> Callable[[], Any]:
        nowhere = replace(one, slot_mapping=torch.full_like(one.slot_mapping, -1))
        return partial(kernel, *nowhere.args(), shape, numerics, marker=marker)

    return arm
