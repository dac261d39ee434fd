"""Fixed requests and their positions; the training forward; the corpus reader."""

from __future__ import annotations

import importlib.util
import json
import lzma
import math
import sys
from types import ModuleType

import pytest
import torch

from fusion_evidence.kernels import eager
from fusion_evidence.lib.paths import DATA
from fusion_evidence.lib.service import model as m
from fusion_evidence.lib.service import prompts
from fusion_evidence.lib.service.prompts import Span, span_positions


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DATA / "model" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return _script("train_compact")


@pytest.fixture(scope="module")
def tokenizer():
    return prompts.load_tokenizer()


# Positions


def test_text_positions_have_equal_rows():
    assert span_positions(7, []).tolist() == [list(range(7))] * 3


def test_span_positions_follow_the_rule_of_the_family():
    """Two text tokens, a 1 x 2 x 3 image, two text tokens: worked out by hand."""
    assert span_positions(10, [Span(2, (1, 2, 3))]).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_span_positions_equal_hugging_face():
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_torch_available():
        pytest.skip(f"this transformers has no models for torch {torch.__version__}")
    module = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    if not hasattr(module.Qwen3_5Model, "get_vision_position_ids"):
        pytest.skip(f"transformers {transformers.__version__} has no get_vision_position_ids")
    theirs = module.Qwen3_5Model.get_vision_position_ids(
        None, 11, torch.tensor([1, 4, 6]), temp_merge_size=1, spatial_merge_size=1
    )
    assert torch.equal(span_positions(35, [Span(11, (1, 4, 6))])[:, 11:], theirs.view(3, -1))


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([Span(2, (1, 2, 3)), Span(7, (1, 1, 1))], "starts at 7, before the last one ends at 8"),
        ([Span(5, (1, 2, 3))], "ends at 11, past the prompt's 10 tokens"),
    ],
)
def test_span_positions_reject(spans, words):
    with pytest.raises(ValueError, match=words):
        span_positions(10, spans)


# The fixed requests


def test_fixed_requests():
    requests = prompts.load_requests()
    lengths = [len(request.ids) for request in requests]
    distinct = [request for request in requests if request.positions is not None]
    assert len(requests) == len({request.id for request in requests}) == 10
    assert {65, 1024, 1680} <= set(lengths)
    assert (min(lengths), max(lengths)) == (65, 1680)
    assert len(distinct) >= 3
    for request in distinct:
        t, h, w = request.positions
        assert request.positions.shape == (3, len(request.ids))
        assert not torch.equal(t, h)
        assert not torch.equal(t, w)
        assert not torch.equal(h, w)


def test_requests_are_held_out_text(training):
    for line in prompts.REQUESTS.read_text().splitlines():
        assert training.part(json.loads(line)["source"]) == "test"


def test_decode_positions(tokenizer, tmp_path):
    path = tmp_path / "requests.jsonl"
    text = "the index of a table is used when the server reads"
    spans = [{"start": 1, "grid": [1, 2, 3]}]
    path.write_text(
        json.dumps({"id": "plain", "text": text, "max_new_tokens": 4})
        + "\n\n"
        + json.dumps({"id": "image", "text": text, "max_new_tokens": 4, "spans": spans})
    )
    plain, image = prompts.load_requests(path, tokenizer)
    count = len(plain.ids)
    assert tokenizer.decode(plain.ids) == text
    assert [prompts.decode_position(plain, i) for i in range(3)] == [count, count + 1, count + 2]
    # Six tokens of the image advance the position by three.
    assert [prompts.decode_position(image, i) for i in range(2)] == [count - 3, count - 2]


GOOD = {"id": "a", "text": "one table", "max_new_tokens": 4}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ("[]", "an object, not list"),
        (json.dumps(GOOD), "id: 'a' is taken"),
        (json.dumps({**GOOD, "id": "b", "text": ""}), "text: empty"),
        (json.dumps({"id": "b", "text": "x"}), "max_new_tokens: missing"),
        (json.dumps({**GOOD, "id": "b", "max_new_tokens": "9"}), "max_new_tokens: '9' is not int"),
        (json.dumps({**GOOD, "id": "b", "max_new_tokens": True}), "max_new_tokens: True is not"),
        (json.dumps({**GOOD, "id": "b", "max_new_tokens": 0}), "max_new_tokens: 0 is less than 1"),
        (json.dumps({**GOOD, "id": "b", "tokens": 1}), "tokens: unknown field"),
        (json.dumps({**GOOD, "id": "b", "spans": [{"start": 0}]}), "spans: .*start and grid"),
        (
            json.dumps({**GOOD, "id": "b", "spans": [{"start": 0, "grid": [1, "2", 1]}]}),
            "spans: .*three integers",
        ),
        (
            json.dumps({**GOOD, "id": "b", "spans": [{"start": 0, "grid": [1, 0, 1]}]}),
            "spans: grid is",
        ),
        (
            json.dumps({**GOOD, "id": "b", "spans": [{"start": 0, "grid": [1, 99, 1]}]}),
            "spans: .*past the prompt",
        ),
    ],
)
def test_bad_requests_are_named(tokenizer, tmp_path, line, words):
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"requests.jsonl line 2: .*{words}|line 2"):
        prompts.load_requests(path, tokenizer)
    with pytest.raises(ValueError, match=words):
        prompts.load_requests(path, tokenizer)


def test_no_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        prompts.load_tokenizer(tmp_path)


# Training


def _positions(context: int) -> torch.Tensor:
    """[3, 2, context]: one sequence of text, one with an image."""
    return torch.stack(
        (span_positions(context, []), span_positions(context, [Span(5, (1, 3, 4))])), 1
    )


def test_training_forward_is_the_served_one(training, monkeypatch):
    monkeypatch.setattr(eager, "check_arguments", lambda *arguments: None)  # it refuses fp32
    config = m.ModelConfig.compact(layers=2, vocab_size=128)
    model = m.random_model(config, eager.qkv_prologue, dtype=torch.float32)
    ids = torch.randint(0, 128, (2, 37), generator=torch.Generator().manual_seed(1))
    positions = _positions(37)
    with torch.no_grad():
        trained = training.training_logits(model, ids, positions)
        for row in range(2):
            step = m.step(ids[row].tolist(), 0, range(3), 16, positions=positions[:, row])
            served = model.logits(model(*step, model.new_caches(3, 16)))
            torch.testing.assert_close(trained[row], served, atol=2e-5, rtol=0)


def test_training_lowers_the_loss_in_bf16(training, monkeypatch):
    """Every weight gets a gradient, and a few steps on one repeated text learn it."""
    config = m.ModelConfig.compact(layers=1, vocab_size=64)
    monkeypatch.setattr(training, "CONFIG", config)
    model = training.initial_model(0, "cpu")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    tokens = torch.arange(11).repeat(20)
    windows = training.fixed_windows(tokens, 32, 2)
    curve = training.train(
        model,
        tokens,
        windows,
        training.Budget(0, 20),
        batch=2,
        context=32,
        peak=1e-2,
        seed=0,
    )
    losses = [row["loss"] for row in curve.validation]
    assert curve.steps == 20
    assert losses[-1] < 0.5 * losses[0]
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    moved = [n for n, w in model.named_parameters() if not torch.equal(w, before[n].bfloat16())]
    assert moved == list(before)
    assert training.held_out_loss(model, windows, 1) == pytest.approx(min(losses), rel=1e-2)


def test_position_layouts_hold_images(training):
    layouts = training.position_layouts(256, 8, torch.Generator().manual_seed(0))
    assert layouts.shape == (3, 8, 256)
    distinct = [bool((layouts[0, i] != layouts[1, i]).any()) for i in range(8)]
    assert distinct == [True, False, False, False, True, False, False, False]


def test_corpus_parts(training, tokenizer, tmp_path):
    names = [f"package/{i}.html" for i in range(300)]
    text = "".join(f"=== {name}\nThe text of {name}.\nAnd more.\n" for name in names)
    path = tmp_path / "corpus.txt.xz"
    path.write_bytes(lzma.compress(text.encode()))
    splits = training.read_corpus(path, tokenizer)
    assert sorted(name for split in splits.values() for name in split.names) == sorted(names)
    assert len(splits["train"].names) > 250
    for split in splits.values():
        read = tokenizer.decode(split.tokens.tolist(), skip_special_tokens=False)
        wanted = [f"The text of {name}.\nAnd more." for name in split.names]
        assert read.split(prompts.END_OF_TEXT)[:-1] == wanted


def test_prose_of_a_page():
    prose = "This paragraph is long enough to be kept, and its <code>code</code> is kept as well."
    page = (
        f"<p>Too short.</p><pre><p>{prose}</p></pre><p>{prose}\n</p><table><tr><p>{prose}</table>"
    )
    assert _script("prepare_corpus").paragraphs(page) == [
        "This paragraph is long enough to be kept, and its code is kept as well."
    ]


# The checkpoint


@pytest.mark.skipif(
    not (prompts.COMPACT / "training.json").is_file(), reason="no trained checkpoint here"
)
def test_checkpoint_fits_and_predicts_its_language(training):
    files = [path for path in prompts.COMPACT.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    model = m.load(prompts.COMPACT, eager.qkv_prologue)
    report = json.loads((prompts.COMPACT / "training.json").read_text())
    ids = prompts.load_requests()[0].ids
    loss = training.held_out_loss(model, torch.tensor(ids)[None], 1)
    assert loss == pytest.approx(report["test_loss"], abs=1.5)
    assert loss < 0.6 * math.log(model.config.vocab_size)
