"""A kernel of anyone's in the fused kernel's place: ``package.module:function``.

A candidate has the signature of `reference.qkv_prologue`: eight tensors, shape, numerics. It may ignore
the numerics and have bits of its own. As keywords it may take ``marker`` and ``errors``, as
`fused.qkv_prologue` does; one that takes no ``marker`` is counted by an operation after it.

Its module must be importable in every process: installed, or in a folder on ``PYTHONPATH``, which
notebooks and the processes they start inherit. See ``kernels/BRING_YOUR_OWN.md``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from . import fused, reference
from .shapes import AttentionShape

Kernel = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

_ARGUMENTS = tuple(inspect.signature(reference.qkv_prologue).parameters)


def load_kernel(path: str) -> Kernel:
    """The candidate of that path, or the project's fused kernel where it is empty.

    Raises:
        ValueError: there is no such function, or its arguments are others; in one line.
    """
    if not path:
        return fused.qkv_prologue
    module, _, name = path.partition(":")
    parts = (*module.split("."), *name.split("."))
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"candidate: expected package.module:function, got {path!r}")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = "there is no" if _is_part(error.name, module) else "its import lacks"
        hint = "; is its folder on PYTHONPATH?" if _is_part(error.name, module) else ""
        raise ValueError(f"candidate: {path!r}: {missing} module {error.name!r}{hint}") from error
    except Exception as error:  # somebody else's code
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"candidate: {path!r}: importing {module} raised {said}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"candidate: {path!r}: {module} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"candidate: {path!r} is a {type(found).__name__}, not a function")
    _check_signature(path, found)
    return found  # type: ignore[no-any-return]


def _is_part(missing: str | None, module: str) -> bool:
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def _check_signature(path: str, kernel: Kernel) -> None:
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):  # compiled code may have none to read
        return
    try:
        signature.bind(*_ARGUMENTS)
    except TypeError as error:
        raise ValueError(
            f"candidate: {path!r} cannot be called with ({', '.join(_ARGUMENTS)}): {error}; it is "
            f"{getattr(kernel, '__name__', 'it')}{signature}"
        ) from error


def takes(kernel: Kernel, keyword: str) -> bool:
    """Whether ``kernel`` has an argument of that name."""
    try:
        return keyword in inspect.signature(kernel).parameters
    except (TypeError, ValueError):
        return False


def marked(kernel: Kernel) -> Kernel:
    """``kernel`` with the keyword ``marker``, an int64 ``[1]`` on the device that counts its runs.

    It is the kernel's own where it takes one, else an addition after it, which graphs capture too.
    """
    if takes(kernel, "marker"):
        return kernel

    @wraps(kernel)
    def counted(*arguments: Any, marker: Tensor, **options: Any) -> Any:
        results = kernel(*arguments, **options)
        marker.add_(1)
        return results

    return counted


def check_results(path: str, results: Any, qkv: Tensor, shape: AttentionShape) -> None:
    """Refuse what is not ``q, k, v, gate`` of these tokens: TypeError or ValueError naming the result.

    Only metadata is read, so that it works while a graph captures.
    """
    tokens, dim = qkv.shape[0], shape.head_dim
    expected = {
        "q": (tokens, shape.q_heads, dim),
        "k": (tokens, shape.kv_heads, dim),
        "v": (tokens, shape.kv_heads, dim),
        "gate": (tokens, shape.q_size),
    }
    if not isinstance(results, (tuple, list)) or len(results) != len(expected):
        got = f"{len(results)} results" if isinstance(results, (tuple, list)) else type(results)
        raise TypeError(f"candidate {path!r}: expected four tensors q, k, v, gate, got {got}")
    for (name, size), result in zip(expected.items(), results, strict=True):
        if not isinstance(result, Tensor):
            raise TypeError(f"candidate {path!r}: {name}: expected a tensor, got {type(result)}")
        if tuple(result.shape) != size:
            raise ValueError(
                f"candidate {path!r}: {name}: expected shape {list(size)}, got {list(result.shape)}"
            )
        if (result.dtype, result.device) != (qkv.dtype, qkv.device):
            raise TypeError(
                f"candidate {path!r}: {name}: expected {qkv.dtype} on {qkv.device}, got "
                f"{result.dtype} on {result.device}"
            )
