"""The vLLM plugin without vLLM: its entry point, its configuration, and what each range gets.

What a real vLLM does with it is in test_vllm_real.py.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fusion_evidence.lib.service import vllm_plugin
from fusion_evidence.lib.service.late_decision import region_begin, region_end, regions
from fusion_evidence.lib.service.vllm_hook import PINNED, declare
from fusion_evidence.lib.service.vllm_plugin import PluginError, Settings

NUMERICS = "fp32_through, 1x32x8 sequential, contraction cos"


def read(**given):
    return Settings.read({"fusion_evidence": given})


# --- configuration


def test_nothing_configured_is_off():
    assert Settings.read({}).mode == "off"
    assert Settings.read(object()).mode == "off"
    assert not Settings().takes_kernel(1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mod": "off"}, "unknown 'mod'; known: mode, numerics, decode"),
        ({"mode": "opaque"}, "mode: expected off | native"),
        ({"mode": "integrated"}, "numerics: mode integrated runs the kernel"),
        ({"mode": "native", "decode": [2, 1]}, "decode: expected 1 <= first <= last"),
        ({"mode": "native", "decode": [1]}, "decode: expected"),
        ({"mode": "native", "decode": [True, 2]}, "decode: expected"),
        ({"mode": "opaque_eager", "numerics": "none"}, "numerics must read like"),
        ({"mode": "native", "candidate": "no_such_module:f"}, "there is no module"),
        ({"mode": "native", "records": -1}, "records: expected 0 or more rows, got -1"),
        ({"mode": "native", "records": True}, "records: expected 0 or more rows, got True"),
        ({"mode": "native", "graphs": 3}, "graphs: expected a folder, got 3"),
        ({"mode": "native", "configurations": "best"}, "configurations: expected timed | first"),
        ({"mode": "native", "by_range": 1}, "by_range: expected true or false, got 1"),
        (
            {"mode": "native", "true_strides": "no"},
            "true_strides: expected true or false, got 'no'",
        ),
        (
            {"mode": "native", "numerics": {"0": NUMERICS}},
            r"numerics: expected 1, 2, \.\.\. or \*, got 0",
        ),
        (
            {"mode": "native", "numerics": {"x": NUMERICS}},
            r"numerics: expected 1, 2, \.\.\. or \*, got x",
        ),
        ({"mode": "native", "numerics": 7}, "numerics: expected text or an object of texts, got 7"),
        ({"mode": "native", "numerics": {"1": 7}}, "numerics: expected text or an object"),
        (
            {"mode": "opaque_fused", "numerics": {"1": NUMERICS}},
            r"takes any T, and needs them for \*",
        ),
    ],
)
def test_a_wrong_configuration_is_named(given, says):
    with pytest.raises(PluginError, match=says) as caught:
        read(**given)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_is_no_object():
    with pytest.raises(PluginError, match="unknown 3"):
        Settings.read({"fusion_evidence": 3})


def test_which_tokens_take_the_kernel():
    def takes(mode, decode=(1, 1)):
        one = read(mode=mode, numerics=NUMERICS, decode=list(decode))
        return [T for T in (1, 2, 4, 5, 1000) if one.takes_kernel(T)]

    assert takes("opaque_eager") == [1]
    assert takes("opaque_eager", (1, 4)) == [1, 2, 4]
    assert takes("opaque_fused") == [1, 2, 4, 5, 1000]
    assert takes("fallback_only") == takes("native") == takes("off") == []


def test_numerics_may_go_by_the_number_of_tokens():
    other = "storage, 1x32x8 sequential, contraction none"
    one = read(mode="integrated", decode=[1, 16], numerics={"1": NUMERICS, "16": other})
    assert [T for T in range(1, 20) if one.takes_kernel(T)] == [1, 16]
    assert (str(one.numerics_at(1)), str(one.numerics_at(16))) == (NUMERICS, other)
    assert one.numerics_at(2) is None
    every = read(mode="opaque_fused", numerics={"1": NUMERICS, "*": other})
    assert every.takes_kernel(999)
    assert (str(every.numerics_at(1)), str(every.numerics_at(999))) == (NUMERICS, other)
    assert str(read(mode="opaque_fused", numerics=NUMERICS).numerics_at(7)) == NUMERICS


class Config:
    """As much of vLLM's as `_watch` and `_check_ranges` look at."""

    def __init__(self, **compilation):
        self.compilation_config = type(
            "Compilation", (), {"inductor_compile_config": {}, **compilation}
        )
        self.parallel_config = type("Parallel", (), {"rank": 1})


def test_the_pin_asks_for_the_environment_that_it_needs(monkeypatch):
    for name in PINNED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PluginError, match="first needs VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE=0 VLLM"):
        vllm_plugin._watch(read(mode="native", configurations="first"), Config())


def test_the_pin_holds_for_the_rest_of_the_process(monkeypatch):
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(vllm_plugin, "_pins", [])
    before, config = CachingAutotuner.benchmark_all_configs, Config()
    vllm_plugin._watch(read(mode="native", configurations="first"), config)
    try:
        assert config.compilation_config.inductor_compile_config == {
            "benchmark_combo_kernel": False
        }
        assert CachingAutotuner.benchmark_all_configs is not before
        vllm_plugin._watch(read(mode="native", configurations="first"), config)
        assert len(vllm_plugin._pins) == 1
    finally:
        vllm_plugin._pins[0].__exit__(None, None, None)
    assert CachingAutotuner.benchmark_all_configs is before


# --- ranges


def graph(layer):
    def forward(qkv, positions):
        marked = region_begin(qkv, layer)
        q, k, v, gate = (part * 2 for part in marked.chunk(4, dim=-1))
        q, k, v, gate = region_end(q, k, v, gate, positions, layer)
        return q + k + v + gate

    seen = []

    def backend(module, inputs):
        seen.append(module)
        return lambda *args: (torch.zeros(3, 2),)

    torch.compile(forward, backend=backend)(torch.ones(3, 8), torch.arange(3))
    return seen[0]


@pytest.fixture
def attached(monkeypatch):
    """A layer known to the plugin, with a kernel for one to four tokens."""

    class Known:
        settings = read(mode="integrated", numerics=NUMERICS, decode=[1, 4])

    monkeypatch.setitem(vllm_plugin._layers, "a.attn", Known())
    return "a.attn"


def calls(module):
    return [str(n.target) for n in module.graph.nodes if "fusion_evidence" in str(n.target)]


@pytest.mark.parametrize(("first", "last", "kernel"), [
    (1, 1, True), (1, 4, False), (4, 4, True), (1, 5, False), (5, 5, False), (1, 4096, False),
])  # fmt: skip
def test_only_a_size_inside_decode_gets_the_kernel(attached, first, last, kernel):
    made = vllm_plugin.decided(graph(attached), first, last)
    assert regions(made) == []
    assert calls(made) == (["fusion_evidence.vllm_prologue.default"] if kernel else [])


def test_a_marked_layer_that_nobody_knows_keeps_its_own_code():
    made = vllm_plugin.decided(graph("another.attn"), 1, 1)
    assert (regions(made), calls(made)) == ([], [])


# --- the entry point

FAKE = {
    "vllm/__init__.py": "__version__ = '0.25.1'",
    "vllm/config.py": """
        class Config:
            additional_config = {}
        current = Config()
        def get_current_vllm_config():
            return current
        """,
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/models/__init__.py": "",
    "vllm/model_executor/models/qwen3_next.py": """
        class Qwen3NextAttention:
            def __init__(self, size, prefix=""):
                self.size = size
        """,
    "vllm/compilation/__init__.py": "",
    "vllm/compilation/backends.py": """
        import functools
        def instrument(call):
            @functools.wraps(call)
            def inner(*a, **k):
                return call(*a, **k)
            return inner
        class CompilerManager:
            @instrument
            def compile(self, graph, inputs, compile_range):
                return graph
        """,
    "vllm/compilation/piecewise_backend.py": """
        def create_concrete_args(graph, size):
            return [graph, size]
        """,
    "vllm/platforms/__init__.py": "",
    "vllm/platforms/cpu.py": """
        class CpuPlatform:
            @classmethod
            def check_and_update_config(cls, config):
                config.compilation_config.mode = "once"
        """,
}

SCRIPT = """
import importlib.metadata, sys
from fusion_evidence.lib.service.vllm_hook import register
register(); register()
assert "vllm" not in sys.modules and "torch" not in sys.modules and "triton" not in sys.modules
import vllm.config
from vllm.compilation.backends import CompilerManager
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
layer = Qwen3NextAttention(3, prefix="a")
assert layer.size == 3 and "torch" not in sys.modules
class Range: start, end = 1, 1
assert CompilerManager().compile("graph", [], compile_range=Range) == "graph"
register()
vllm.config.current.additional_config = {"fusion_evidence": {"mode": "wrong"}}
try:
    Qwen3NextAttention(3)
except Exception as error:
    print(type(error).__name__, error)
seen = []
import fusion_evidence.lib.service.vllm_plugin as plugin
plugin.decided = lambda *a: seen.append(a) or "decided"
print(CompilerManager().compile("graph", [], compile_range=Range), seen)
print(CompilerManager().compile("graph", [], Range), len(seen))
from vllm.compilation.piecewise_backend import create_concrete_args
assert create_concrete_args("graph", 1) == ["graph", 1]
plugin._strides.add(True)
plugin.true_inputs = lambda original, *a: ["true", *original(*a)]
print(create_concrete_args("graph", 1))
from types import SimpleNamespace
from vllm.platforms.cpu import CpuPlatform
for given in ({}, {"fusion_evidence": {"by_range": True}}):
    compilation = SimpleNamespace(mode="by range", backend="", ir_enable_torch_wrap=False)
    CpuPlatform.check_and_update_config(
        SimpleNamespace(compilation_config=compilation, additional_config=given)
    )
    print(*vars(compilation).values())
"""


def test_the_entry_point_imports_nothing_and_patches_once(tmp_path):
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path, env={**__import__("os").environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    refused, first, second, inputs, taken, kept = run.stdout.splitlines()
    assert refused.startswith("PluginError fusion_evidence.mode: expected off | native")
    assert first == "decided [('graph', 1, 1)]"
    assert second == "decided 2"
    assert inputs == "['true', 'graph', 1]"
    assert (taken, kept) == ("once  False", "by range inductor True")


def test_a_project_that_is_not_installed_can_be_found(tmp_path):
    """By a Python that has it on its path alone."""
    code = (
        "from importlib.metadata import entry_points as e;"
        "found = e(group='vllm.general_plugins');"
        "print([(one.name, one.load().__name__) for one in found if 'vllm_hook' in one.value])"
    )
    package = tmp_path / "path" / "fusion_evidence"
    package.mkdir(parents=True)
    (package / "lib").symlink_to(Path(vllm_plugin.__file__).parents[1])
    folders = tmp_path / "path", declare(declare(tmp_path / "declared"))
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path, env={"PYTHONPATH": ":".join(map(str, folders))},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.stdout == "[('fusion_evidence', 'register')]\n", run.stderr


def test_the_entry_point_is_declared():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="fusion_evidence")
    assert found.value == "fusion_evidence.lib.service.vllm_hook:register"
