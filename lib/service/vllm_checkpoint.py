"""The compact checkpoint in the form that vLLM loads.

vLLM 0.25 refuses the text-only ``Qwen3_5ForCausalLM``, and later versions drop its ``mrope_section``. The
image-and-text model takes the same layers as its text part; with ``--language-model-only`` its vision part
is never built, so a tiny one stands in the configuration and no weights of it exist. Its text then has
real (3, T) positions.

Send token ids, not text: transformers gives this kind of model a tokenizer that splits text by a rule of
its own, another than the checkpoint's ``tokenizer.json`` (in version 5.19, four of the ten fixed requests
get other tokens).

Nothing is rounded: every weight has the same bits under the name that the larger model gives it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.service.model import CheckpointError, ModelConfig
from fusion_evidence.lib.service.prompts import COMPACT

ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export(folder: Path, source: Path = COMPACT) -> Path:
    """Write ``source``, a text-only ``Qwen3_5ForCausalLM``, into ``folder`` for vLLM.

    Writes ``config.json``, ``model.safetensors`` and, as far as ``source`` has them, the files of the
    tokenizer and of generation. Returns ``folder``.

    Raises:
        CheckpointError: ``source`` is no such checkpoint, its weights cannot be read, or ``folder`` is
            ``source``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    folder, source = Path(folder), Path(source)
    if folder.resolve() == source.resolve():
        raise CheckpointError(f"{folder} is the checkpoint itself; name another folder")
    config = configuration(_read_config(source), name=source.name)
    file = source / "model.safetensors"
    try:
        tensors = load_file(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} has no model.safetensors") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    renamed = {exported_name(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return folder


def stack(folder: Path, shape: AttentionShape, layers: int, intermediate: int) -> Path:
    """Write a checkpoint without weights, for vLLM's ``--load-format dummy``; returns ``folder``.

    The compact model's vocabulary and tokenizer, ``layers`` gated attention layers of ``shape``, and an MLP
    of ``intermediate``. vLLM draws such weights from a seed of its own, the same in every server.
    """
    text = _read_config(COMPACT)
    rope = text["rope_parameters"] | {
        "rope_theta": shape.rope_theta,
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "mrope_section": list(shape.mrope_section),
        "mrope_interleaved": shape.mrope_interleaved,
    }
    text |= {
        "hidden_size": shape.hidden_size,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_parameters": rope,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(configuration(text, shape.name), indent=2) + "\n"
    )
    for name in _BESIDE:
        if (COMPACT / name).is_file():
            shutil.copyfile(COMPACT / name, folder / name)
    return folder


def exported_name(name: str) -> str:
    """Of a weight: ``model.norm.weight`` is ``model.language_model.norm.weight`` there."""
    return (
        "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name
    )


def configuration(text: dict[str, Any], name: str = "checkpoint") -> dict[str, Any]:
    """The ``config.json`` of the image-and-text model whose text part ``text`` configures.

    Raises:
        CheckpointError: as `ModelConfig.from_hugging_face`, or it is an image-and-text model already.
    """
    if "text_config" in text:
        raise CheckpointError(f"{name} has a text_config: vLLM loads it as it is")
    sizes = ModelConfig.from_hugging_face(text, name)
    # Of an image's tokens, which this checkpoint has none of: no id that text can have.
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "text_config": {**inner, "dtype": "bfloat16"},
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": sizes.shape.hidden_size,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "num_position_embeddings": 16,
        },
        **{one: sizes.vocab_size + index for index, one in enumerate(special)},
    }


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no config.json") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is {type(config).__name__}, not an object")
    return config
