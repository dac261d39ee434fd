"""What a compiled callable really is: its generated source, the configurations chosen for its kernels,
and their machine code, in forms that can be compared between processes.

Arms are compiled in processes of their own, so the claim that one left a graph untouched cannot rest on
how it was made: it rests on these three being equal.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from fusion_evidence.lib.graph.generated_code import loading, normalized

_OPAQUE = "paged_attention"  # every graph of the model calls it; the prologue's own graph does not
_BINARIES = (".cubin", ".hsaco")


@dataclass(frozen=True)
class GraphReport:
    """One graph that Inductor generated.

    name: of the callable that had it compiled, ``prefill`` or ``decode``; ``.body`` is appended for the
        opaque operator's own compiled fallback, ``.2`` and so on for further ones.
    source_sha256: of ``generated_code.normalized``, which has no comments, hashes or file names.
    configs: for each generated Triton kernel, the configuration that runs (block sizes, warps, stages).
        Empty where the kernels are C++.
    binaries: for each kernel, SHA-256 of its machine code, without debug sections and file names; None
        where no file of it could be found.
    """

    name: str
    source_sha256: str
    configs: dict[str, dict[str, Any]]
    binaries: dict[str, str | None]


class Traced:
    """A compiled callable that knows the graphs it had Inductor make.

    Calls are passed on as they are; what Inductor loads meanwhile is looked at.
    """

    def __init__(self, name: str, function: Callable[..., Tensor]) -> None:
        self.name = name
        self._function = function
        self._modules: dict[str, tuple[ModuleType, str]] = {}

    def __call__(self, *arguments: Any) -> Tensor:
        with loading(self._add):
            return self._function(*arguments)

    def _add(self, module: ModuleType, source: str) -> None:
        self._modules[str(module.__file__)] = module, source

    def reports(self) -> list[tuple[GraphReport, str]]:
        """Of each graph, with its normalized source; read after the calls, when kernels are tuned."""
        names: list[str] = []
        found = []
        for module, source in self._modules.values():
            name = self.name if _OPAQUE in source else f"{self.name}.body"
            names.append(name)
            if (number := names.count(name)) > 1:
                name = f"{name}.{number}"
            code = normalized(source)
            digest = hashlib.sha256(code.encode()).hexdigest()
            found.append((GraphReport(name, digest, *_read_kernels(module)), code))
        return found


def _read_kernels(
    module: ModuleType,
) -> tuple[dict[str, dict[str, Any]], dict[str, str | None]]:
    """Configurations and machine code of the kernels that a generated module holds."""
    configs: dict[str, dict[str, Any]] = {}
    binaries: dict[str, str | None] = {}
    for name, value in sorted(vars(module).items()):
        if hasattr(value, "launchers") and hasattr(value, "configs"):  # a Triton kernel
            if len(value.launchers) == 1:  # it has run, so one configuration is left
                configs[name] = _config(value.launchers[0].config)
                binaries[name] = _triton_binary(value.launchers[0])
        elif name.startswith("cpp_") and callable(value):
            library = getattr(getattr(value, "__self__", None), "__file__", None)
            binaries[name] = digest(Path(library)) if library and Path(library).exists() else None
    return configs, binaries


def _config(config: Any) -> dict[str, Any]:
    chosen = dict(config.kwargs)
    for name in ("num_warps", "num_stages"):
        chosen[name] = getattr(config, name, None)
    return dict(sorted(chosen.items()))


def _triton_binary(launcher: Any) -> str | None:
    folder = getattr(launcher, "cache_hash", None)
    if folder is None:
        return None
    files = [f for f in (_triton_cache() / folder).glob("*") if f.suffix in _BINARIES]
    return digest(files[0]) if len(files) == 1 else None


def _triton_cache() -> Path:
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    from torch._inductor import codecache

    return Path(codecache.cache_dir()) / "triton" / "0"


def digest(file: Path) -> str:
    """SHA-256 of the machine code in an ELF file (cubin, hsaco, shared library); see `machine_code`."""
    return hashlib.sha256(machine_code(file.read_bytes())).hexdigest()


def machine_code(binary: bytes) -> bytes:
    """The executable sections of a 64-bit little-endian ELF image, one after the other.

    All else in it may hold the names of the files it was made from. ValueError: it is no such image.
    """
    if binary[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"no 64-bit little-endian ELF image: it starts with {binary[:6]!r}")
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    code = b""
    for index in range(count):
        _, kind, flags, _, offset, length = struct.unpack_from(
            "<IIQQQQ", binary, table + index * size
        )
        executable, no_bits = flags & 4, kind == 8
        if executable and not no_bits:
            code += binary[offset : offset + length]
    return code


def identical(
    one: Mapping[str, GraphReport], other: Mapping[str, GraphReport], graph: str
) -> dict[str, bool | None]:
    """Whether two processes ran the same ``graph``: ``source``, ``config`` and ``binary``.

    None where there is nothing to compare: no such graph, no tuned kernels, no binary found.
    """
    a, b = one.get(graph), other.get(graph)
    if a is None or b is None:
        return dict.fromkeys(("source", "config", "binary"))
    known = all((*a.binaries.values(), *b.binaries.values())) and (a.binaries or b.binaries)
    return {
        "source": a.source_sha256 == b.source_sha256,
        "config": a.configs == b.configs if a.configs or b.configs else None,
        "binary": a.binaries == b.binaries if known else None,
    }
