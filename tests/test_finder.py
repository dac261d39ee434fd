"""The finder on modules it has never seen: each kind of decision, and none in clean modules."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import finder_cases as cases
import finder_helper
import pytest
import torch
from click.testing import CliRunner

from fusion_evidence.kernels import eager
from fusion_evidence.lib.graph.finder import FinderError, find
from fusion_evidence.lib.graph.finder_cli import find_command
from fusion_evidence.lib.service import model as m

TOKENS = 64


def run(case: type[cases.Base], tokens: int = TOKENS):
    name = "qkv" if case is cases.Article else "x"
    return find(case(), {name: torch.randn(tokens, cases.WIDTH)}, {name: {0}})


def marked(case: type[cases.Base]) -> tuple[int, str]:
    """Line and value of the case's ``# found:`` mark."""
    first = case.forward.__code__.co_firstlineno
    for line in range(first, first + 12):
        mark = re.search(r"# found: (.+)", linecache.getline(cases.__file__, line))
        if mark:
            return line, mark[1].strip()
    raise AssertionError(f"{case.__name__} has no mark")


def newer(*values):
    """A case whose APIs Dynamo knows since guard_or_false exists (torch 2.7)."""
    has = hasattr(torch.fx.experimental.symbolic_shapes, "guard_or_false")
    return pytest.param(*values, marks=pytest.mark.skipif(not has, reason="needs torch 2.7"))


@pytest.mark.parametrize(
    ("case", "expression", "kind"),
    [
        (cases.Article, "self.enabled and qkv.shape[0] == 1", "zero_one"),
        (cases.Alias, "decode", "zero_one"),
        (cases.HelperElsewhere, "is_decode(len(x))", "zero_one"),
        (cases.Guarded, "x.shape[0] % 16 == 0", "branch"),
        (cases.ToInt, "n = int(x.shape[0])", "constant"),
        (cases.SliceOfBuffer, "return x + self.table[: x.shape[0]]", "bound"),
        (cases.FullBuffer, "return x + self.table[:64]", "constant"),
        (cases.Unrolled, "range(x.shape[0])", "constant"),
        (cases.Lookup, "return x * table.get(x.shape[0], 5.0)", "constant"),
        newer(cases.GuardOrFalse, "guard_or_false(x.shape[0] == 1)", "zero_one"),
        newer(cases.StaticallyKnown, "statically_known_true(x.shape[0] == 1)", "zero_one"),
        (cases.Asserted, "x.shape[0] <= 128", "branch"),
        newer(cases.Unseen, "return F.pad(x, (0, 0, 0, 0)) * n", "constant"),
        newer(cases.UnseenBranch, "tokens_of(x) == 1", "zero_one"),
        (cases.Squeezed, "return x.squeeze()", "diverged"),
        (cases.SqueezedThenSummed, "return y.squeeze(0).sum(-1)", "diverged"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_finds(case, expression, kind):
    found = run(case)[0]
    assert (found.file, found.line, found.value) == (cases.__file__, *marked(case))
    assert (found.expression, found.kind) == (expression, kind)


def test_names_the_helper_that_decides():
    (found,) = run(cases.DecidesInHelper)
    assert found.file == finder_helper.__file__
    assert (found.expression, found.value, found.kind) == ("tokens > 256", "False", "branch")


def test_value_follows_the_example():
    (found,) = run(cases.DecidesInHelper, tokens=300)
    assert found.value == "True"
    assert run(cases.Guarded, tokens=65)[0].value == "False"


def test_says_which_tracer_froze_it():
    """Dynamo keeps ``int(n)`` symbolic; what runs the module's own Python cannot."""
    (found,) = run(cases.ToInt)
    assert found.note == "non-strict export: x.shape[0] is 64"


def test_second_opinion_when_nothing_was_heard(monkeypatch):
    """With both listeners deaf the graphs of two sizes still give the article's branch away."""
    from fusion_evidence.lib.graph import finder

    monkeypatch.setattr(finder, "_record", lambda *arguments: None)
    (found,) = run(cases.Article)
    assert (found.kind, found.value) == ("diverged", "matmul")
    assert found.line == marked(cases.Article)[0] + 2
    (found,) = run(cases.Unrolled)
    assert found.kind == "diverged"


def test_nothing_in_clean_modules():
    inputs = (torch.randn(TOKENS, cases.WIDTH), torch.arange(TOKENS))
    assert find(cases.Clean(), inputs, {0: {0}, "ids": {0}}) == []
    assert run(cases.Cond) == []
    assert find(cases.Flattened(), (torch.randn(5, 7, cases.WIDTH),), {"x": {0, 1}}) == []
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert find(layer, (torch.randn(5, 7, 8),), {"src": {0, 1}}) == []


def test_a_shape_decided_is_reported_where_it_starts():
    """``sum`` inherits the dimension that ``squeeze`` kept: one finding."""
    (found,) = run(cases.SqueezedThenSummed)
    assert found.note == "a shape decided; with size 1 the result here is (8,)"


def test_compares_two_sizes():
    inputs = (torch.randn(TOKENS, cases.WIDTH), torch.randn(30, cases.WIDTH))
    (found,) = find(cases.TwoSizes(), inputs, {"x": {0}, "other": {0}})
    assert (found.line, found.value) == marked(cases.TwoSizes)


@pytest.mark.skipif(torch.__version__ < "2.5", reason="Dynamo calls no Sequential by keyword")
def test_operator_that_bounds_a_size_inside_torchs_own_layers():
    """No user line exists; the layer's own is named."""
    conv = torch.nn.Conv1d(4, 4, kernel_size=3)
    (found,) = find(torch.nn.Sequential(conv), (torch.randn(2, 4, 20),), {"input": {2}})
    assert (Path(found.file).name, found.value, found.kind) == ("conv.py", "3..int_oo", "bound")


def test_a_model_nobody_here_wrote():
    """Hugging Face's attention asks for one token twice, in a helper's helper."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    if not transformers.utils.is_torch_available():
        pytest.skip(f"this transformers has no models for torch {torch.__version__}")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).eval()
    inputs = {"input_ids": torch.randint(64, (2, 24)), "use_cache": False}
    found = find(model, inputs, {"input_ids": {1}})
    assert {Path(f.file).name for f in found} == {"sdpa_attention.py"}
    assert any("q_length > 1" in f.expression and f.value == "True" for f in found)
    assert all(f.kind == "zero_one" for f in found)


@pytest.mark.parametrize("branch", [False, True], ids=["in_graph", "python_branch"])
def test_compact_model(branch):
    prologue = eager.qkv_prologue
    if branch:
        prologue = m.python_branch(decode=prologue, prefill=prologue)
    model = m.random_model(m.ModelConfig.compact(layers=1, vocab_size=64), prologue)
    inputs = (*m.step(range(24), 0, [0, 1], 16), model.new_caches(2, 16))
    found = find(model, inputs, {"ids": {0}, "positions": {1}, "slot_mapping": {0}})
    seen = [(Path(f.file).name, f.expression, f.value) for f in found]
    assert seen == ([("model.py", "qkv.shape[0] == 1", "False")] if branch else [])


def test_leaves_the_module_alone():
    case = cases.Clean()
    before = {name: t.clone() for name, t in case.state_dict().items()}
    find(case, (torch.randn(TOKENS, cases.WIDTH), torch.arange(TOKENS)), {0: {0}, 1: {0}})
    assert all(torch.equal(before[n], t) and type(t) is torch.Tensor
               for n, t in case.state_dict().items())  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "dynamic", "words"),
    [
        ((torch.randn(64, 8),), {"y": {0}}, "no argument 'y'; forward was given x"),
        ((torch.randn(64, 8),), {1: {0}}, "no argument 1: forward was given 1"),
        ((torch.randn(64, 8),), {"x": {2}}, r"x has no dimension 2: its shape is \(64, 8\)"),
        ((torch.randn(1, 8),), {"x": {0}}, r"x.shape\[0\] is 1 in the example"),
        ((3,), {"x": {0}}, "x is int, not a tensor"),
        ((torch.randn(64, 8),), {}, "no dynamic dimension was named"),
        ({"z": torch.randn(64, 8)}, {"x": {0}}, "do not fit ToInt.forward"),
    ],
)
def test_bad_input(inputs, dynamic, words):
    with pytest.raises(FinderError, match=words):
        find(cases.ToInt(), inputs, dynamic)


def test_module_that_does_not_trace():
    with pytest.raises(FinderError, match=r"Broken does not trace: \w+: .*control flow"):
        run(cases.Broken)


def command(*arguments: str):
    return CliRunner().invoke(find_command, arguments)


def test_command_finds():
    result = command("finder_cases:article")
    line, value = marked(cases.Article)
    assert result.exit_code == 1
    expression = "self.enabled and qkv.shape[0] == 1"
    assert result.output == f"{cases.__file__}:{line}: {expression} -> {value}\n"


def test_command_with_inputs():
    inputs = ("--input", "x=64x8", "--input", "ids=64:int64")
    result = command("finder_cases:instance", *inputs, "--dynamic", "x:0", "--dynamic", "ids:0")
    assert (result.exit_code, result.output) == (0, "")
    result = command("finder_cases:ToInt", "--input", "x=64x8:float16", "--dynamic", "x:0")
    assert result.exit_code == 1
    assert result.output.endswith("n = int(x.shape[0]) -> 64\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("finder_cases",), "not of the form module:attribute"),
        (("no_such_module:x",), "cannot import no_such_module"),
        (("finder_cases:nothing",), "finder_cases has no nothing"),
        (("finder_cases:WIDTH",), "is a int, not a module or a factory"),
        (("finder_cases:ToInt",), "brings no example inputs"),
        (("finder_cases:ToInt", "--input", "x=64x8"), "names no dynamic dimension"),
        (("finder_cases:ToInt", "--input", "x=sixty"), "not of the form name=64x4096:dtype"),
        (("finder_cases:article", "--dynamic", "qkv:9"), "qkv has no dimension 9"),
        (("finder_cases:article", "--dynamic", "qkv"), "not of the form name:dim"),
    ],
)
def test_command_errors(arguments, words):
    result = command(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
