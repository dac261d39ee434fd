"""The checkpoint for vLLM: the same bits under other names, and refusals in one line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from fusion_evidence.kernels import eager
from fusion_evidence.lib.service import model as m
from fusion_evidence.lib.service.prompts import COMPACT
from fusion_evidence.lib.service.vllm_checkpoint import ARCHITECTURE, configuration, export


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export(tmp_path_factory.mktemp("vllm") / "checkpoint")


@pytest.fixture
def small(tmp_path):
    """A checkpoint of one layer in a folder of its own."""
    config = m.ModelConfig.compact(layers=1, vocab_size=64)
    m.save(m.random_model(config, eager.qkv_prologue), tmp_path / "small")
    return tmp_path / "small"


def test_the_same_bits_under_the_new_names(exported):
    before = load_file(COMPACT / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    assert len(after) == len(before) > 40
    for name, tensor in before.items():
        other = after[name.replace("model.", "model.language_model.", 1)]
        assert other.dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(other.view(torch.int16), tensor.view(torch.int16)), name


def test_the_text_part_is_the_same_model(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURE]
    source = json.loads((COMPACT / "config.json").read_text())
    assert m.ModelConfig.from_hugging_face(config) == m.ModelConfig.from_hugging_face(source)
    assert "mrope_section" in config["text_config"]["rope_parameters"]


def test_this_project_loads_it_too(exported):
    one, other = (m.load(folder, eager.qkv_prologue) for folder in (COMPACT, exported))
    other = other.state_dict()
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other[name]), name


def test_the_tokenizer_comes_along(exported):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (exported / name).read_bytes() == (COMPACT / name).read_bytes()


def test_no_image_token_is_a_token_of_text(exported):
    config = json.loads((exported / "config.json").read_text())
    ids = [value for key, value in config.items() if key.endswith("_token_id")]
    assert len(set(ids)) == 4
    assert min(ids) >= config["text_config"]["vocab_size"]


def test_an_output_layer_of_its_own_keeps_its_name(tmp_path):
    compact = m.ModelConfig.compact(layers=1, vocab_size=64)
    config = m.ModelConfig(compact.shape, 1, 64, 96, 128, tie_word_embeddings=False)
    m.save(m.random_model(config, eager.qkv_prologue), tmp_path / "untied")
    folder = export(tmp_path / "out", tmp_path / "untied")
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert not (folder / "tokenizer.json").exists()


def test_what_is_no_checkpoint_is_refused(small, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(m.CheckpointError, match=r"^.*nowhere has no config\.json$"):
        export(out, tmp_path / "nowhere")
    with pytest.raises(m.CheckpointError, match="is the checkpoint itself"):
        export(small, small)
    (small / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(m.CheckpointError, match="not a readable safetensors file"):
        export(out, small)
    (small / "model.safetensors").unlink()
    with pytest.raises(m.CheckpointError, match=r"has no model\.safetensors"):
        export(out, small)
    for text, message in (("{", "is not JSON"), ("[]", "is list, not an object"), ("{}", "lacks")):
        (small / "config.json").write_text(text)
        with pytest.raises(m.CheckpointError, match=message):
            export(out, small)
    assert not out.exists()


def test_an_image_and_text_model_is_not_wrapped_again(exported):
    config = json.loads((exported / "config.json").read_text())
    with pytest.raises(m.CheckpointError, match="vLLM loads it as it is"):
        configuration(config)
