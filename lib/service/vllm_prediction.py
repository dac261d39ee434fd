"""What the kernel saves a vLLM service, measured where the prologue stands: between its matrix products.

Notebook 01 times the prologue alone, against PyTorch's static compile. A vLLM differs from that: it writes
the KV cache itself, whichever prologue ran; it has Inductor put independent kernels into one
(``combo_kernels``), and so reads the rotary table in the kernel that gates the attention's output, two
products earlier; and between two prologues the weights of a layer have gone through the caches. So the
chain *gate, output projection, QKV projection, prologue* is built here, each layer with weights of its
own, and timed as a graph of all layers with either prologue in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion_evidence.kernels import eager
from fusion_evidence.kernels.candidate import Kernel, marked
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.attribution.integration import Effect
from fusion_evidence.lib.graph import generated_code
from fusion_evidence.lib.measure import timing
from fusion_evidence.lib.measure.inputs import Inputs, prologue_inputs
from fusion_evidence.lib.measure.machine import Machine
from fusion_evidence.lib.measure.timing import Timing
from fusion_evidence.lib.service.arms import choosing_configurations
from fusion_evidence.lib.service.vllm_findings import saved

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Outputs]
"""(attention's output [T, Hq*D], its gate, W_o [hidden, Hq*D], W_qkv) -> the next q, k, v and gate."""
Weights = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class InPlace:
    """Both prologues in the chain. times: of a step of all layers; by arm: ``compiled``, ``fused``, and
    ``control``, the latter once more. launches: generated kernels in a layer, of the first two."""

    times: Mapping[str, Timing]
    launches: Mapping[str, int]

    @property
    def saving(self) -> Effect:
        """Microseconds a step, of pairs: the arms were timed in turn."""
        return saved(self._samples("compiled"), self._samples("fused"))

    def same_work(self, native: int | None, integrated: int | None) -> bool:
        """A layer of the service lost as many generated kernels as a layer here does."""
        if native is None or integrated is None:
            return False
        return native - integrated == self.launches["compiled"] - self.launches["fused"]

    @property
    def noise(self) -> Effect:
        """The same of two equal arms."""
        return saved(self._samples("fused"), self._samples("control"))

    def _samples(self, arm: str) -> np.ndarray:
        return np.array(self.times[arm].samples_us)

    def __str__(self) -> str:
        slow, fast = (f"{self.launches[arm]} generated kernels" for arm in ("compiled", "fused"))
        return (
            f"{self.saving} in place, A/A {self.noise.value:.1f}; {slow} a layer, with ours {fast}"
        )


def measure(
    kernel: Kernel,
    shape: AttentionShape,
    numerics: Numerics,
    machine: Machine,
    *,
    tokens: int = 1,
    configurations: Literal["timed", "first"] = "first",
    samples: int = 31,
    seed: int = 0,
) -> InPlace:
    """Time vLLM's compiled prologue and ``kernel`` as the plugin calls it, in ``shape.layers`` layers.

    configurations: of generated kernels, as the servers choose them. The kernel counts its runs, as there.
    RuntimeError: as `time_graphs`. Resets Dynamo.
    """
    inputs = prologue_inputs(shape, tokens, device=machine.device, seed=seed)
    weights = drawn_weights(shape, machine.device, seed)
    launches, arms = {}, {}
    with choosing_configurations(configurations):
        for name, layer in layers(kernel, shape, numerics, machine, inputs, configurations).items():
            arms[name] = [partial(chain, layer, inputs, shape, weights)]
            with generated_code.capture() as codes:
                arms[name][0]()
            launches[name] = sum(map(generated_code.launches, codes))
        arms["control"] = arms["fused"]
        if machine.device == "cpu":
            return InPlace(timing.time_host(arms, samples=samples), launches)
        # One step in each graph, as in a service: what lies between two replays is the same for all arms.
        return InPlace(timing.time_graphs(arms, samples=samples, graph_us=1.0), launches)


def drawn_weights(shape: AttentionShape, device: str, seed: int) -> Weights:
    """Of each layer: W_o ``[hidden, Hq*D]`` and W_qkv ``[qkv_width, hidden]``, in bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        made = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        return made.mul_(columns**-0.5)

    hidden = shape.hidden_size
    return [
        (draw(hidden, shape.q_size), draw(shape.qkv_width, hidden)) for _ in range(shape.layers)
    ]


def chain(layer: Layer, inputs: Inputs, shape: AttentionShape, weights: Weights) -> list[Outputs]:
    """What every layer's prologue gave; the next takes its q for the attention's output."""
    # Contiguous, and two of them, as for every later layer: or the first would have a graph of its own.
    attended, gate = (
        inputs.qkv[:, part : part + shape.q_size].clone(memory_format=torch.contiguous_format)
        for part in (0, shape.q_size)
    )
    results = []
    for out, qkv in weights:
        q, k, v, gate = layer(attended, gate, out, qkv)
        attended = q.reshape(gate.shape)
        results.append((q, k, v, gate))
    return results


def layers(
    kernel: Kernel,
    shape: AttentionShape,
    numerics: Numerics,
    machine: Machine,
    inputs: Inputs,
    configurations: Literal["timed", "first"],
) -> dict[str, Layer]:
    """``compiled``: one graph, with PyTorch's prologue in it. ``fused``: one up to the projection, then the
    kernel, which writes no cache."""
    torch._dynamo.reset()
    constants = inputs.q_weight, inputs.k_weight, inputs.cos_sin, inputs.positions
    marker = torch.zeros(1, dtype=torch.int64, device=machine.device)
    nowhere = torch.full_like(inputs.slot_mapping, -1), inputs.key_cache, inputs.value_cache
    counted = marked(kernel)

    def projection(attended: Tensor, gate: Tensor, out: Tensor, qkv: Tensor) -> Tensor:
        return linear(linear(attended * torch.sigmoid(gate), out), qkv)

    def whole(
        attended: Tensor, gate: Tensor, out: Tensor, qkv: Tensor,
        q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, positions: Tensor,
    ) -> Outputs:  # fmt: skip
        projected = projection(attended, gate, out, qkv)
        constants = q_weight, k_weight, cos_sin, positions
        q, k, v, next_gate = eager.outputs(projected, *constants, shape)
        return q, k, v, next_gate.reshape(gate.shape)

    options = vllm_options(machine, configurations)
    compile = partial(torch.compile, dynamic=False, fullgraph=True, options=options)
    graph, front = compile(whole), compile(projection)

    def compiled(*given: Tensor) -> Outputs:
        return graph(*given, *constants)

    def fused(*given: Tensor) -> Outputs:
        return counted(front(*given), *constants, *nowhere, shape, numerics, marker=marker)

    return {"compiled": compiled, "fused": fused}


def vllm_options(machine: Machine, configurations: Literal["timed", "first"]) -> dict[str, Any]:
    """For Inductor, as vLLM has them for a graph of one size; but its tuning of it, where ``timed``."""
    options: dict[str, Any] = {"enable_auto_functionalized_v2": False}
    if machine.device != "cpu" and hasattr(torch._inductor.config, "combo_kernels"):
        timed = configurations == "timed"
        options |= {
            "combo_kernels": True,
            "benchmark_combo_kernel": timed,
            "shape_padding": timed,
        }
    return options
