"""The entry point by which vLLM learns of the plugin: light, and without effect where nobody asks.

vLLM calls `register` in each of its processes, configured or not. So it imports nothing; it waits until
vLLM itself imports the two modules concerned, and adds to each a look at the configuration. `vllm_plugin`,
and with it Triton, is imported by the first layer of a service that is configured for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

KEY = "fusion_evidence"
"""Under which the configuration stands in vLLM's ``additional_config``."""

GROUP = "vllm.general_plugins"
"""Entry points that vLLM calls in each of its processes; all of them, unless VLLM_PLUGINS names some."""

PINNED = {
    "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE": "0",
    "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING": "0",
    "TORCHINDUCTOR_SHAPE_PADDING": "0",  # it times every matrix product with and without
}
"""Environment in which Inductor does not ask a clock which kernel to make of a graph for one size."""

_PLUGIN = "fusion_evidence.lib.service.vllm_plugin"
_PATCHED = "fusion_patched"


def declare(folder: Path) -> Path:
    """Make ``folder`` tell vLLM of this plugin where it is on ``PYTHONPATH``, and return it.

    For a Python that can import the project and has it not installed: vLLM finds plugins by what is
    installed. Beside an installed one it does no harm.
    """
    record = folder / "fusion_evidence_vllm-0.dist-info"
    record.mkdir(parents=True, exist_ok=True)
    (record / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fusion-evidence-vllm\nVersion: 0\n"
    )
    (record / "entry_points.txt").write_text(
        f"[{GROUP}]\n{KEY} = {register.__module__}:{register.__name__}\n"
    )
    return folder


def register() -> None:
    """Patch vLLM's modules when they are imported, or now where they have been."""
    if not any(isinstance(finder, _Patcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Patcher())
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])


class _Patcher(importlib.abc.MetaPathFinder):
    """Calls the patch of a module of `_PATCHES` when it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _PATCHES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_layer(module: ModuleType) -> None:
    """Every new attention layer looks whether the service is configured for the plugin."""
    original = module.Qwen3NextAttention.__init__
    if getattr(original, _PATCHED, False):
        return

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        if isinstance(config.additional_config, dict) and KEY in config.additional_config:
            from fusion_evidence.lib.service.vllm_plugin import attach

            attach(self, config)

    setattr(__init__, _PATCHED, True)
    module.Qwen3NextAttention.__init__ = __init__


def _patch_compiler(module: ModuleType) -> None:
    """A graph with marked regions gets, for every range of sizes, what that range shall have."""
    original = module.CompilerManager.compile
    if getattr(original, _PATCHED, False):
        return

    @functools.wraps(original)
    def compile(self: Any, graph: Any, *arguments: Any, **named: Any) -> Any:
        if plugin := sys.modules.get(_PLUGIN):
            sizes = named.get("compile_range") or next(a for a in arguments if hasattr(a, "start"))
            return plugin.compiled(
                graph,
                named.get("graph_index", 0),
                sizes.start,
                sizes.end,
                lambda chosen: original(self, chosen, *arguments, **named),
            )
        return original(self, graph, *arguments, **named)

    setattr(compile, _PATCHED, True)
    module.CompilerManager.compile = compile


def _patch_inputs(module: Any) -> None:
    """A graph for one size is compiled for inputs with the strides that they have, see `vllm_strides`."""
    original = module.create_concrete_args
    if getattr(original, _PATCHED, False):
        return

    @functools.wraps(original)
    def create_concrete_args(graph: Any, size: int) -> Any:
        if plugin := sys.modules.get(_PLUGIN):
            return plugin.inputs_of(original, graph, size)
        return original(graph, size)

    setattr(create_concrete_args, _PATCHED, True)
    module.create_concrete_args = create_concrete_args


def _patch_cpu(module: ModuleType) -> None:
    """Where the service asks, the CPU keeps vLLM's own compilation, which its platform takes away."""
    original = module.CpuPlatform.check_and_update_config
    if getattr(original, _PATCHED, False):
        return

    @functools.wraps(original)
    def check_and_update_config(cls: Any, config: Any) -> None:
        compilation, asked = config.compilation_config, config.additional_config
        given = asked.get(KEY, {}) if isinstance(asked, dict) else {}
        before = compilation.mode
        original(config)
        if isinstance(given, dict) and given.get("by_range") is True:
            compilation.mode = before
            compilation.backend = "inductor"
            compilation.ir_enable_torch_wrap = True

    setattr(check_and_update_config, _PATCHED, True)
    module.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "vllm.model_executor.models.qwen3_next": _patch_layer,
    "vllm.compilation.backends": _patch_compiler,
    "vllm.compilation.piecewise_backend": _patch_inputs,
    "vllm.platforms.cpu": _patch_cpu,
}
