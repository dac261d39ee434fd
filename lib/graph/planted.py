"""Three ways to get an opaque operator wrong, planted, so that a check can be seen to notice.

Two are in an operator's registration: `planted` gives the real operator's body a wrong one, which
``torch.library.opcheck`` must refuse. The third is in the compiler: under Inductor's first
functionalization, layers whose caches are views of one allocation are handed copies, made beyond the
bounds of smaller ones. `layers` is that case. What runs is undefined, wrong contents on a CPU and an
illegal access on a GPU, so `run_layers` lets it happen in a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.op import Configuration, OpaquePrologue
from fusion_evidence.kernels.shapes import AttentionShape, preset
from fusion_evidence.lib.graph.generated_code import capture, kernels_touching
from fusion_evidence.lib.measure.compare import compare
from fusion_evidence.lib.measure.inputs import prologue_inputs

Mistake = Literal["undeclared_mutation", "wrong_fake_stride"]

_planted: dict[str, Any] = {}
_library = torch.library.Library("fusion_evidence_planted", "FRAGMENT")


def planted(mistake: Mistake) -> Any:
    """An operator with the real one's signature and body, and this mistake in its registration.

    ``undeclared_mutation``: the schema says that caches and marker are only read, so a compiler may
    go on with their old values. ``wrong_fake_stride``: the fake describes V as the view of the input
    that it would be without a copy.
    """
    if mistake not in get_args(Mistake):
        raise ValueError(f"mistake: expected one of {get_args(Mistake)}, got {mistake!r}")
    if mistake not in _planted:
        real = torch.ops.fusion_evidence.qkv_prologue.default
        schema = str(real._schema).partition("::qkv_prologue")[2]
        fake: Callable[..., Any] = real
        if mistake == "undeclared_mutation":
            schema = re.sub(r"\(\w+!\)", "", schema)
        else:
            fake = _strided_like_the_input
        _library.define(mistake + schema)
        name = f"fusion_evidence_planted::{mistake}"
        torch.library.impl(name, "default", real, lib=_library)
        torch.library.register_fake(name, fake, lib=_library)
        _planted[mistake] = getattr(torch.ops.fusion_evidence_planted, mistake).default
    return _planted[mistake]


def _strided_like_the_input(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, gate = torch.ops.fusion_evidence.qkv_prologue(qkv, *rest)
    return q, k, v.new_empty_strided(v.shape, (qkv.stride(0), v.shape[2], 1)), gate


def opcheck(operator: Any, arguments: tuple[Any, ...]) -> dict[str, str]:
    """``torch.library.opcheck``: each of its tests and what it says, `SUCCESS` or the first line.

    And one of our own, ``strides``, at every T: torch 2.4 does not compare strides, later ones not
    those of a dimension of size 1.
    """
    said = torch.library.opcheck(operator, arguments, raise_exception=False)
    told = {
        test: "SUCCESS" if result == "SUCCESS" else str(result).strip().partition("\n")[0]
        for test, result in said.items()
    }
    return told | {"strides": _compare_strides(operator, arguments)}


def _compare_strides(operator: Any, arguments: tuple[Any, ...]) -> str:
    real = operator(*(a.clone() if isinstance(a, Tensor) else a for a in arguments))
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    for index, (described, returned) in enumerate(zip(fake, real, strict=True)):
        if described.stride() != returned.stride():
            return (
                f"output {index}: the fake has strides {described.stride()}, "
                f"the operator {returned.stride()}"
            )
    return "SUCCESS"


def layers(
    prologue: Callable[..., Any], shape: AttentionShape, numerics: Numerics
) -> Callable[..., list[Tensor]]:
    """One call of the prologue per layer, the layers' caches being views of one allocation.

    The function takes the prologue's tensors up to ``slot_mapping``, then ``kv_cache[layers, 2, N, B,
    Hk, D]``, and returns each layer's q.
    """

    def forward(*arguments: Tensor) -> list[Tensor]:
        *inputs, kv_cache = arguments
        return [
            prologue(*inputs, kv_cache[layer, 0], kv_cache[layer, 1], shape, numerics)[0]
            for layer in range(kv_cache.shape[0])
        ]

    return forward


@dataclass(frozen=True)
class LayersRun:
    """What a run of `layers` came to.

    copies: whatever in the generated code is at least as large as one layer's cache.
    differ: elements of the allocation that differ from those of eager calls; None if it broke.
    error: how it broke, or nothing.
    """

    copies: tuple[str, ...]
    differ: int | None
    error: str = ""


def run_layers(
    shape: str, device: str, *, old_functionalization: bool = False, timeout: float = 300.0
) -> LayersRun:
    """Compile and run `layers`, two of them and three tokens, beside eager calls of the same.

    shape: name of a preset. In a process of its own: with the mistake, which is also all that torch
    below 2.5 has, memory beyond a buffer's end is used.
    """
    command = [sys.executable, "-m", __name__, shape, device, str(int(old_functionalization))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    last = done.stderr.strip().rpartition("\n")[2]
    ended = f"the process ended with {done.returncode}: {last}"
    try:
        seen = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return LayersRun((), None, ended)
    copies = tuple(seen["copies"])
    return (
        LayersRun(copies, None, ended)
        if done.returncode
        else LayersRun(**seen | {"copies": copies})
    )


def _run_layers_here(
    shape: AttentionShape, device: str, old_functionalization: bool, blocks: int = 512
) -> LayersRun:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    numerics = Numerics(reduction=Reduction(32, shape.head_dim // 32))
    function = layers(OpaquePrologue(Configuration(shape, numerics), device), shape, numerics)
    inputs = prologue_inputs(shape, 3, device=device).args()[:6]
    size = (2, 2, blocks, 16, shape.kv_heads, shape.head_dim)
    expected, kv = (torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    function(*inputs, expected)
    known = hasattr(config, "enable_auto_functionalized_v2")
    settings = {"enable_auto_functionalized_v2": not old_functionalization} if known else {}
    copies: tuple[str, ...] = ()

    def read_first(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        """Inductor; the code is read and reported before it runs, which may end the process."""
        nonlocal copies
        with capture() as codes:
            compiled: Any = compile_fx(graph, examples)
        copies = tuple(i for code in codes for i in kernels_touching(code, kv[0, 0].numel()))
        _report(LayersRun(copies, None))
        return compiled

    with config.patch(settings):
        torch.compile(function, fullgraph=True, backend=read_first)(*inputs, kv)
    try:
        return LayersRun(copies, compare(kv, expected).mismatches)
    except RuntimeError as error:  # a device reports what went wrong when it is next waited for
        return LayersRun(copies, None, str(error).partition("\n")[0])


def _report(result: LayersRun) -> None:
    print(json.dumps(vars(result)), flush=True)


if __name__ == "__main__":
    _report(_run_layers_here(preset(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"))
