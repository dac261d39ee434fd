"""Arms: what their names mean, what is pinned, and what they compile to."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import torch

from fusion_evidence.kernels import eager, op, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.lib.attribution.faults import fault
from fusion_evidence.lib.service import arms, graphs
from fusion_evidence.lib.service.arms import Arm, Built, Pins, build, parse_numerics
from fusion_evidence.lib.service.graphs import GraphReport, identical
from fusion_evidence.lib.service.model import ModelConfig, greedy, random_model, step, with_prologue

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [5, 3, 8, 13, 2]
LAYERS = 1


@pytest.fixture(scope="module")
def model():
    config = ModelConfig.compact(layers=LAYERS, vocab_size=64)
    return random_model(config, eager.qkv_prologue, device=DEVICE)


def made(model, name: str, **options) -> Built:
    torch._dynamo.reset()
    options.setdefault("backend", "eager")
    return build(model, Arm.parse(name), **options)


def hidden(built: Built, prompt=PROMPT, tokens=3) -> list[torch.Tensor]:
    """Hidden states of a prefill and of two decode steps fed with fixed tokens."""
    caches = built.model.new_caches(2, 16)
    with torch.no_grad():
        out = [built.prefill(*step(prompt, 0, [1, 0], 16, device=DEVICE), caches)]
        for i in range(tokens - 1):
            one = step([7 + i], len(prompt) + i, [1, 0], 16, device=DEVICE)
            out.append(built.decode(*one, caches))
    return out


def plain(model, prologue, numerics=None) -> Built:
    """The model as it is, with the prologue called in Python at every T."""
    other = with_prologue(model, prologue, numerics)
    return Built(Arm.parse("baseline"), other, other, other)


def assert_same_bits(actual, expected):
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True] * len(
        actual
    )


# Names


def test_every_arm_has_one_name():
    for prefill, decode in itertools.product(arms.PREFILL, arms.DECODE):
        assert Arm.parse(f"{prefill}__{decode}") == Arm(prefill, decode)
        assert str(Arm(prefill, decode)) == f"{prefill}__{decode}"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("baseline", "in_graph__in_graph"),
        ("rebuild", "in_graph__in_graph"),
        ("fallback_only", "opaque_eager__opaque_eager"),
        ("integrated", "in_graph__fused"),
    ],
)
def test_aliases(alias, name):
    assert str(Arm.parse(alias)) == name


@pytest.mark.parametrize("text", ["fused", "in_graph__opaque_fused", "eager__fused", ""])
def test_no_such_arm_lists_what_there_is(text):
    with pytest.raises(ValueError, match=r"arm: expected .*opaque_reference.*got"):
        Arm.parse(text)


@pytest.mark.parametrize(
    "numerics",
    [
        Numerics(),
        Numerics("per_op", Reduction(64, 4, 2, "pairwise")),
        Numerics("storage", Reduction(32, 8), "cos", Reduction(16, 4, 4, "strided")),
    ],
)
def test_numerics_are_read_as_they_are_written(numerics):
    assert parse_numerics(str(numerics)) == numerics


@pytest.mark.parametrize(
    "text", ["", "storage", "exact, 1x32x8 sequential, contraction none", "storage, 1x32x8, cos"]
)
def test_other_numerics_are_refused(text):
    with pytest.raises(ValueError, match=r"must read like|must be one of"):
        parse_numerics(text)


# Pins


def test_pins_hold_inside_and_only_there():
    from torch._inductor import config

    if not hasattr(config, "deterministic"):
        pytest.skip("this torch has no deterministic mode")
    pins = Pins(deterministic=True, caches_off=True, inductor={"max_fusion_size": 3})
    before = config.deterministic, config.force_disable_caches, config.max_fusion_size
    with pins.apply():
        assert config.deterministic
        assert config.force_disable_caches
        assert config.max_fusion_size == 3
        assert not getattr(torch._functorch.config, "check_custom_op_aliasing", False)
        with Pins().apply():  # an unpinned arm beside
            assert not config.deterministic
    assert before == (config.deterministic, config.force_disable_caches, config.max_fusion_size)
    assert pins.unavailable == []


def test_the_deterministic_mode_outlasts_a_compilation():
    """The option alone does not, which is why `Pins` hold it; should PyTorch mend that, this says so."""
    from torch._inductor import config

    if not hasattr(config, "deterministic"):
        pytest.skip("this torch has no deterministic mode")

    def compiled(x):
        return x + 1

    def mode_after_a_compilation():
        torch._dynamo.reset()
        torch.compile(compiled, backend="eager")(torch.zeros(3))
        return config.deterministic

    with config.patch({"deterministic": True}):
        assert not mode_after_a_compilation()
    with Pins(deterministic=True).apply():
        assert mode_after_a_compilation()
        with Pins().apply():
            assert not mode_after_a_compilation()
        assert mode_after_a_compilation()
    assert not mode_after_a_compilation()


def test_configurations_are_taken_in_order_inside_and_timed_elsewhere(monkeypatch):
    """With the autotuner's own choice from what its benchmark says: the first, whatever is faster."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    class Tuner:
        launchers = ("slow", "fast")
        benchmark_all_configs = property(lambda self: CachingAutotuner.benchmark_all_configs)

    seconds = {"slow": 2.0, "fast": 1.0}
    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", lambda tuner, **_: seconds)

    def chosen():
        timings = Tuner().benchmark_all_configs(Tuner(), cloned_args=())
        return min(timings, key=timings.get)

    pinned = Pins(configurations="first")
    assert chosen() == "fast"
    with pinned.apply():
        assert chosen() == "slow"
        with Pins().apply():  # an unpinned arm beside
            assert chosen() == "fast"
        with pinned.apply():
            assert chosen() == "slow"
        assert chosen() == "slow"
    assert chosen() == "fast"


def test_a_torch_without_the_deterministic_mode_says_so(monkeypatch):
    known = arms._known
    monkeypatch.setattr(arms, "_known", lambda c, name: name != "deterministic" and known(c, name))
    pins = Pins(deterministic=True)
    with pins.apply():
        pass
    (said,) = pins.unavailable
    assert said.startswith("deterministic: torch")


def test_what_cannot_be_pinned_is_said(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    pins = Pins(workspace=":4096:8", inductor={"no_such_option": True})
    option, workspace = pins.unavailable
    assert option.startswith("no_such_option: ")
    assert workspace.startswith("workspace: ")
    with pins.apply():
        pass
    monkeypatch.setenv(*next(iter(pins.environment.items())))
    assert pins.unavailable == [option]


@pytest.mark.parametrize("bad", [{"sdpa": "flash"}, {"first_traced": 1}, {"determinstic": True}])
def test_impossible_pins_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Pins(**bad)


# Arms


@pytest.mark.parametrize("name", ["baseline", "fallback_only", "opaque_eager__in_graph"])
def test_opaque_boundary_changes_no_bit_of_uncompiled_code(model, name):
    """Backend eager: whatever is in the graph and whatever is behind the operator is the same code."""
    built = made(model, name)
    assert_same_bits(hidden(built), hidden(plain(model, eager.qkv_prologue)))
    opaque = [side for side in (built.arm.prefill, built.arm.decode) if side != "in_graph"]
    calls = {"baseline": 0, "fallback_only": 3, "opaque_eager__in_graph": 1}[name]
    assert bool(built.opaque) == bool(opaque)
    if opaque:
        assert built.read_markers()["device"] == {"decode": 0, "prefill": LAYERS * calls}
        built.reset_markers()
        assert built.read_markers()["device"] == {"decode": 0, "prefill": 0}


@pytest.mark.parametrize("rounding", ["per_op", "fp32_through"])
def test_reference_arm_has_the_bits_of_its_numerics(model, rounding):
    numerics = Numerics(rounding, Reduction(16, 4))
    built = made(
        model,
        "opaque_reference__opaque_reference",
        prefill_numerics=numerics,
        decode_numerics=numerics,
    )
    expected = hidden(plain(model, reference.qkv_prologue, numerics))
    assert_same_bits(hidden(built), expected)
    other = hidden(plain(model, eager.qkv_prologue))
    assert torch.equal(expected[0], other[0]) == (rounding == "per_op")


def test_integrated_arm_runs_the_kernel_at_decode_only(model):
    """On a CPU Triton's interpreter runs it."""
    built = made(model, "integrated")
    prefill, *decode = hidden(built)
    assert torch.equal(prefill, hidden(plain(model, eager.qkv_prologue))[0])
    assert built.read_markers()["device"] == {"decode": LAYERS * 2, "prefill": 0}
    assert len(decode) == 2


def test_candidate_of_the_article_is_one_operator_that_chooses(model):
    built = made(model, "opaque_eager__fused")
    hidden(built, tokens=2)
    assert len(built.opaque) == 1
    assert built.read_markers()["device"] == {"decode": LAYERS, "prefill": LAYERS}
    assert len(made(model, "opaque_eager__opaque_compiled").opaque) == 2
    assert len(made(model, "opaque_reference__fused").opaque) == 2


def test_a_candidate_runs_where_the_fused_kernel_would(model):
    path = "fusion_evidence.kernels.reference:qkv_prologue"
    for name, runs in (
        ("opaque_eager__fused", {"decode": LAYERS, "prefill": LAYERS}),
        ("opaque_fused__fused", {"decode": 2 * LAYERS, "prefill": 0}),
    ):
        built = made(model, name, candidate=path)
        assert {one.configuration.candidate for one in built.opaque} == {path}
        hidden(built, tokens=2)
        assert built.read_markers()["device"] == runs
    (fallback,) = made(model, "opaque_eager__opaque_eager", candidate=path).opaque
    assert fallback.configuration.candidate == ""
    with pytest.raises(ValueError, match="candidate: 'no_such:kernel'"):
        made(model, "in_graph__fused", candidate="no_such:kernel")


def test_both_sides_may_have_numerics_of_their_own(model):
    one, other = Numerics("per_op", Reduction(16, 4)), Numerics("storage", Reduction(32, 2))
    name = "opaque_reference__opaque_reference"
    built = made(model, name, prefill_numerics=one, decode_numerics=other)
    assert [prologue.configuration.numerics for prologue in built.opaque] == [one, other]
    prefill, *_ = hidden(built)
    assert torch.equal(prefill, hidden(plain(model, reference.qkv_prologue, one))[0])


def test_fused_at_every_t_never_falls_back(model):
    built = made(model, "opaque_fused__in_graph")
    assert built.arm.needs_device
    assert not Arm.parse("opaque_reference__opaque_reference").needs_device
    (every,) = built.opaque
    assert [every.configuration.path(T) for T in (1, 2, 4096)] == ["decode"] * 3


def test_compiled_body_is_traced_first_where_asked(model):
    (operator,) = made(model, "opaque_compiled__in_graph", body_first_traced=1000).opaque
    assert operator.configuration.first_traced == 1000
    assert operator.configuration.fallback == "compiled"
    (operator,) = made(model, "fallback_only", body_first_traced=1000).opaque
    assert operator.configuration.first_traced is None


def test_one_graph_for_prefill_and_one_for_decode(model):
    built = made(model, "baseline", backend="aot_eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for prompt in (PROMPT, PROMPT * 2, PROMPT * 3):
        hidden(built, prompt)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2


def test_padded_rows_reach_the_operator(model, monkeypatch):
    strides = set()
    monkeypatch.setattr(op, "check_arguments", lambda qkv, *_: strides.add(qkv.stride()))
    width = model.config.shape.qkv_width
    actual = hidden(made(model, "fallback_only", padded=True, backend="aot_eager"))
    strides.discard((width, 1))  # of a tracer
    assert strides == {(width + 64, 1)}
    assert_same_bits(actual, hidden(plain(model, eager.qkv_prologue)))


@pytest.mark.parametrize("name", ["baseline", "fallback_only"])
def test_a_planted_fault_is_in_the_arm(model, name):
    planted = fault("forgotten_one_plus_w")
    built = made(model, name, wrap_prologue=planted.prologue, wrap_forward=planted.forward)
    good, bad = hidden(plain(model, eager.qkv_prologue)), hidden(built)
    assert all((a - b).abs().max() > 0.1 for a, b in zip(good, bad, strict=True))


def test_arms_share_the_weights(model):
    built = made(model, "fallback_only")
    assert built.model.lm_head.weight is model.lm_head.weight
    assert model.prologue is eager.qkv_prologue
    tokens = greedy(built.model, PROMPT, 2)
    assert tokens == greedy(model, PROMPT, 2)


# What was compiled


def library(folder: Path, name: str, body: str, *flags: str) -> Path:
    source = folder / f"{name}.c"
    source.write_text(f"int work(int x) {{ return {body}; }}\n")
    target = folder / f"{name}.so"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-shared", "-fPIC", *flags, source, "-o", target], check=True)
    return target


def test_machine_code_is_what_runs_and_nothing_else(tmp_path):
    one = library(tmp_path, "one", "x * 3")
    renamed = library(tmp_path, "a_longer_name", "x * 3", "-g")
    other = library(tmp_path, "other", "x * 5")
    assert one.read_bytes() != renamed.read_bytes()
    assert graphs.digest(one) == graphs.digest(renamed)
    assert graphs.digest(one) != graphs.digest(other)
    with pytest.raises(ValueError, match="no 64-bit little-endian ELF"):
        graphs.machine_code(b"GIF89a")


def test_graphs_are_compared_in_three_ways():
    warps = {"triton_a": {"XBLOCK": 1, "num_warps": 4}}
    one = {"prefill": GraphReport("prefill", "s", warps, {"triton_a": "b"})}
    other = {"prefill": GraphReport("prefill", "s", {"triton_a": {"XBLOCK": 2}}, {"triton_a": "c"})}
    cpp = {"prefill": GraphReport("prefill", "t", {}, {"cpp_a": None})}
    assert identical(one, one, "prefill") == {"source": True, "config": True, "binary": True}
    assert identical(one, other, "prefill") == {"source": True, "config": False, "binary": False}
    assert identical(cpp, cpp, "prefill") == {"source": True, "config": None, "binary": None}
    assert identical(one, one, "decode") == dict.fromkeys(("source", "config", "binary"))


class Launcher:
    def __init__(self, folder: str) -> None:
        self.cache_hash = folder
        self.config = type(
            "Config", (), {"kwargs": {"R0_BLOCK": 8}, "num_warps": 2, "num_stages": 1}
        )()


def test_triton_kernels_are_read_after_they_ran(tmp_path, monkeypatch):
    """One that never ran has no configuration; binaries are found by the launcher's cache folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "ABC").mkdir()
    (tmp_path / "ABC" / "kernel.hsaco").write_bytes(library(tmp_path, "one", "x").read_bytes())
    module = type("Module", (), {})()
    module.triton_a = type("Kernel", (), {"launchers": [Launcher("ABC")], "configs": None})()
    module.triton_b = type("Kernel", (), {"launchers": [Launcher("DEF")], "configs": None})()
    module.triton_c = type("Kernel", (), {"launchers": [], "configs": None})()
    configs, binaries = graphs._read_kernels(module)
    chosen = {"R0_BLOCK": 8, "num_stages": 1, "num_warps": 2}
    assert configs == {"triton_a": chosen, "triton_b": chosen}
    assert binaries == {"triton_a": graphs.digest(tmp_path / "one.so"), "triton_b": None}
