"""The compact model against Hugging Face's own Qwen3.5, and its checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_evidence.kernels import eager
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.lib.service import model as m

CONFIG = m.ModelConfig.compact(layers=2, vocab_size=128)
UNTIED = replace(CONFIG, tie_word_embeddings=False)
# fp32 through two layers and different summation orders; logits are of order 1.
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def allow_fp32(monkeypatch):
    """The op takes bf16 and fp16; in fp32 the oracle's tolerance is tight. No bit is claimed."""
    monkeypatch.setattr(eager, "check_arguments", lambda *arguments: None)


def make(config: m.ModelConfig = CONFIG, **options) -> m.CompactModel:
    options.setdefault("dtype", torch.float32)
    return m.random_model(config, eager.qkv_prologue, **options)


def image_positions(tokens: int) -> torch.Tensor:
    """[3, tokens] with three different rows, as image tokens have."""
    at = torch.arange(tokens)
    return torch.stack((at // 4, at % 4 + 3, 2 * at + 1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    m.save(make(UNTIED), folder)
    return folder


@pytest.mark.parametrize("distinct", [False, True], ids=["text", "image"])
def test_logits_equal_hugging_face(checkpoint, distinct):
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_torch_available():
        pytest.skip(f"this transformers has no models for torch {torch.__version__}")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ours = m.load(checkpoint, eager.qkv_prologue, dtype=torch.float32)
    ids = torch.randint(0, 128, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    positions = image_positions(23) if distinct else torch.arange(23).repeat(3, 1)
    step = m.step(ids, 0, [3, 0], 16, positions=positions)
    with torch.no_grad():
        actual = ours.logits(ours(*step, ours.new_caches(4, 16)))
        expected = theirs(torch.tensor([ids]), position_ids=positions[:, None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_distinct_position_rows_matter():
    """Otherwise the comparison above could not see an MRoPE fault."""
    model, ids = make(), list(range(12))
    text = model(*m.step(ids, 0, [0], 16), model.new_caches(1, 16))
    image = model(*m.step(ids, 0, [0], 16, positions=image_positions(12)), model.new_caches(1, 16))
    assert (text - image).abs().max() > 100 * TOLERANCE


def test_decoding_through_the_paged_cache_equals_one_prefill():
    """Tokens one at a time, in blocks out of order with others' rows between them."""
    model, ids, table, size = make(), list(range(20, 41)), [5, 2, 7], 8
    whole = model(*m.step(ids, 0, table, size), model.new_caches(8, size))
    caches = model.new_caches(8, size)
    for key_cache, value_cache in caches:
        key_cache.fill_(float("nan"))
        value_cache.fill_(float("nan"))
        for cache in (key_cache, value_cache):
            cache[table] = 7.0  # stale rows of an earlier request
    rows = [model(*m.step(ids[:9], 0, table, size), caches)]
    rows += [model(*m.step(ids[i : i + 1], i, table, size), caches) for i in range(9, 21)]
    torch.testing.assert_close(torch.cat(rows), whole, atol=TOLERANCE, rtol=0)
    assert torch.isnan(caches[0][0][[0, 1, 3, 4, 6]]).all(), "other blocks are not written"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_greedy_continues_the_full_forward(compiled):
    model, prompt = make(), [5, 9, 2, 77]
    forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else None
    out = m.greedy(model, prompt, 6, forward=forward)
    hidden = model(*m.step(prompt + out[:-1], 0, [0], 16), model.new_caches(1, 16))
    assert out == model.logits(hidden[3:]).argmax(-1).tolist()


def test_two_models_of_the_same_weights():
    """Neither the weights are copied, nor does one model's prologue become the other's."""
    model, prompt, calls = make(), [5, 9, 2, 77], []

    def counting(*given):
        calls.append(given[-1])
        return eager.qkv_prologue(*given)

    numerics = Numerics("per_op", model.numerics.reduction)
    other = m.with_prologue(model, counting, numerics)
    theirs = dict(other.named_parameters())
    assert all(theirs[name] is weight for name, weight in model.named_parameters())
    assert m.greedy(model, prompt, 2) == m.greedy(other, prompt, 2)
    assert calls == [numerics] * 2 * CONFIG.layers
    assert model.prologue is eager.qkv_prologue
    assert m.with_prologue(model, counting).numerics == model.numerics


def test_a_pinned_attention_backend_computes_every_call(monkeypatch):
    given = make(), m.step([3, 4], 0, [0], 16)
    asked = []
    real = torch.nn.attention.sdpa_kernel
    monkeypatch.setattr(
        torch.nn.attention, "sdpa_kernel", lambda backend: asked.append(backend) or real(backend)
    )
    model, step = given
    with m.pin_attention("math"):
        pinned = model(*step, model.new_caches(1, 16))
    assert asked == [torch.nn.attention.SDPBackend.MATH] * CONFIG.layers
    torch.testing.assert_close(model(*step, model.new_caches(1, 16)), pinned, rtol=0, atol=1e-5)
    assert len(asked) == CONFIG.layers
    with pytest.raises(ValueError, match=r"backend: expected one of .*got 'flash'"):
        m.pin_attention("flash").__enter__()


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_checkpoint_round_trip(tmp_path, config):
    model = make(config)
    m.save(model, tmp_path)
    again = m.load(tmp_path, eager.qkv_prologue, dtype=torch.float32)
    assert (again.config.shape.q_heads, again.config.layers) == (6, 2)
    assert replace(again.config, shape=config.shape) == config
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert torch.equal(model.cos_sin, again.cos_sin)


def test_image_and_text_checkpoint_loads(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    nested = {n.replace("model.", "model.language_model."): t for n, t in tensors.items()}
    nested["model.visual.patch_embed.weight"] = torch.zeros(2)
    save_file(nested, tmp_path / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    wrapped = {"text_config": config, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    model = m.load(tmp_path, eager.qkv_prologue, dtype=torch.float32)
    assert torch.equal(model.norm.weight, make(UNTIED).norm.weight)


def damage(folder: Path, source: Path, config=None, drop=(), reshape=()) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if name not in drop}
    tensors |= {name: tensors[name][:-1].contiguous() for name in reshape}
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((source / "config.json").read_text()) | (config or {})
    text = {key: value for key, value in text.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(text))


K_PROJ, Q_NORM = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": (K_PROJ, Q_NORM)}, ("lacks 2 weights", K_PROJ, Q_NORM)),
        ({"reshape": (K_PROJ,)}, (K_PROJ, "(127, 256)", "(128, 256)")),
        ({"config": {"head_dim": None, "rope_parameters": None}}, ("head_dim", "rope_theta")),
        ({"config": {"layer_types": ["linear_attention"] * 2}}, ("linear_attention",)),
        ({"config": {"num_key_value_heads": 4}}, ("q_heads=6", "kv_heads=4")),
        ({"config": {"attention_bias": True}}, ("attention_bias",)),
    ],
    ids=["missing", "shape", "config", "linear", "heads", "bias"],
)
def test_broken_checkpoint_says_what_is_wrong(checkpoint, tmp_path, change, words):
    damage(tmp_path, checkpoint, **change)
    with pytest.raises(m.CheckpointError) as error:
        m.load(tmp_path, eager.qkv_prologue)
    assert all(word in str(error.value) for word in words)


def test_absent_or_unreadable_files(checkpoint, tmp_path):
    with pytest.raises(m.CheckpointError, match=r"has no config\.json"):
        m.load(tmp_path, eager.qkv_prologue)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(m.CheckpointError, match="not JSON"):
        m.load(tmp_path, eager.qkv_prologue)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(m.CheckpointError, match=r"no \*\.safetensors"):
        m.load(tmp_path, eager.qkv_prologue)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(m.CheckpointError, match="not a readable safetensors"):
        m.load(tmp_path, eager.qkv_prologue)


def test_step_outside_its_blocks():
    with pytest.raises(ValueError, match="17 tokens do not fit in 1 blocks of 16"):
        m.step([1], 16, [0], 16)


def test_observer_sees_each_layer_and_changes_nothing():
    model, ids, seen = make(), [1, 2, 3], []
    plain = model(*m.step(ids, 0, [0], 16), model.new_caches(1, 16))
    with m.observe_attention(lambda layer, q, *_: seen.append((layer, tuple(q.shape)))):
        observed = model(*m.step(ids, 0, [0], 16), model.new_caches(1, 16))
    model(*m.step(ids, 0, [0], 16), model.new_caches(1, 16))
    assert seen == [(0, (3, 6, 64)), (1, (3, 6, 64))]
    assert torch.equal(plain, observed)


def test_python_branch_chooses_in_eager():
    calls = []

    def path(name):
        def prologue(*arguments):
            calls.append(name)
            return eager.qkv_prologue(*arguments)

        return prologue

    branch = m.python_branch(decode=path("decode"), prefill=path("prefill"))
    model = m.random_model(CONFIG, branch, dtype=torch.float32)
    m.greedy(model, [1, 2, 3], 4)
    assert calls == ["prefill"] * 2 + ["decode"] * 2 * 3


def test_attention_op_is_well_formed():
    q = torch.randn(3, 6, 64)
    key, value = torch.randn(4, 8, 2, 64), torch.randn(4, 8, 2, 64)
    arguments = (q, key, value, torch.tensor([2, 0]), torch.tensor([11]), 0)
    torch.library.opcheck(m.paged_attention, arguments)


def test_same_seed_same_weights():
    first, again, other = make(seed=3), make(seed=3), make(seed=4)
    assert torch.equal(first.embed_tokens.weight, again.embed_tokens.weight)
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)


def test_article_layer_shape():
    config = m.ModelConfig.article()
    with torch.device("meta"):
        model = m.CompactModel(config, eager.qkv_prologue)
    assert len(model.layers) == 16
    assert tuple(model.layers[0].qkv_proj.weight.shape) == (14336, 5120)
