"""What the fused kernel needs and an older Triton lacks, from 3.3 on; of a newer one nothing changes.

Imported before a kernel is defined. The names are Triton's own where it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import triton
import triton.language as tl

INTERPRETED = not isinstance(tl.sum, triton.JITFunction)
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

if INTERPRETED:
    from triton.runtime.interpreter import InterpreterBuilder

    # Triton 3.3 names this type and cannot make it.
    if not hasattr(InterpreterBuilder, "get_int1_ty"):
        InterpreterBuilder.get_int1_ty = lambda _: tl.int1

if not hasattr(tl.constexpr, "__getitem__"):  # triton 3.3: a constant tuple without items
    tl.constexpr.__getitem__ = lambda self, at: tl.constexpr(self.value[getattr(at, "value", at)])

# Triton looks up every name in a kernel, also in a branch that is not taken. 3.3 lacks these two, and
# those of 3.4 do not compile.
CAN_OVERLAP = VERSION >= (3, 5)
if CAN_OVERLAP:
    launch_dependents, wait = tl.extra.cuda.gdc_launch_dependents, tl.extra.cuda.gdc_wait
else:

    @triton.jit
    def launch_dependents() -> None:
        pass

    wait = launch_dependents


def end_recursion(functions: Sequence[Any]) -> None:
    """Let Triton before 3.5 compile functions that call themselves and one another.

    It follows calls without end to find what a kernel's compiled code depends on; here that is the
    source of all of ``functions``, which must depend on nothing else.
    """
    compiled = [one for one in functions if isinstance(one, triton.JITFunction)]
    if VERSION < (3, 5):
        digest = sha256("".join(one.src for one in compiled).encode()).hexdigest()
        for one in compiled:
            one.hash = digest
