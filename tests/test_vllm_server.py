"""What a vLLM server is started with, and its replies beside this project's engine; without vLLM."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import pytest
import torch
from click.testing import CliRunner

from fusion_evidence.kernels import eager
from fusion_evidence.lib.cli import main
from fusion_evidence.lib.service import model as m
from fusion_evidence.lib.service.engine import Engine, Settings
from fusion_evidence.lib.service.prompts import Request, load_requests
from fusion_evidence.lib.service.vllm_server import agreement, as_text, gap_steps, serve_command

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine():
    model = m.random_model(m.ModelConfig.compact(layers=1, vocab_size=64), eager.qkv_prologue)
    return Engine(model, model, model, Settings(max_tokens=64))


REQUESTS = [Request(name, "", ids, None, 6) for name, ids in (("a", (5, 6, 7)), ("b", (9,)))]


def test_the_server_listens_on_loopback_alone(tmp_path):
    command = serve_command(tmp_path, 81, python="python9", max_tokens=99, extra=["--seed", "3"])
    assert command[:4] == ["python9", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "81"
    assert command[command.index("--max-model-len") + 1] == "99"
    assert command[-2:] == ["--seed", "3"]
    assert "--enforce-eager" in command
    assert "--enforce-eager" not in serve_command(tmp_path, 81, eager=False)


def test_as_text_keeps_the_tokens_and_drops_the_positions():
    fixed = load_requests()
    assert sum(one.positions is not None for one in fixed) >= 3
    text = as_text(fixed, 7)
    assert [one.ids for one in text] == [one.ids for one in fixed]
    assert all(one.positions is None and one.max_new_tokens == 7 for one in text)
    assert [one.max_new_tokens for one in as_text(fixed)] == [one.max_new_tokens for one in fixed]


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [(1.0, 1.0, 0), (1.0078125, 1.0, 1), (-1.0, -1.0078125, 1), (4.0625, 4.0, 2), (0.5, 0.25, 64)],
)
def test_the_gap_counts_steps_of_bfloat16(one, other, steps):
    assert gap_steps(torch.tensor([one, other], dtype=torch.bfloat16), 0, 1) == steps


def test_the_engine_agrees_with_itself(engine):
    frame = agreement(engine, REQUESTS, engine.serve(REQUESTS))
    assert frame.request.tolist() == ["a", "b"]
    assert frame.tokens.tolist() == [6, 6]
    assert frame.differing.tolist() == [0, 0]
    assert frame.first_changed.isna().all()


def test_another_token_is_found_where_it_stands_and_measured(engine):
    own = engine.serve(REQUESTS)
    tokens = list(own[0].tokens)
    tokens[2] = (tokens[2] + 1) % 64
    replies = [replace(own[0], tokens=tokens), replace(own[1], finish_reason="error", error="cut")]
    logits = {}
    engine.serve(
        REQUESTS[:1],
        forced={"a": tokens},
        on_logits=lambda name, at, row: logits.__setitem__(at, row),
    )
    (row,) = agreement(engine, REQUESTS, replies).itertuples()
    assert (row.request, row.first_changed) == ("a", 2)
    assert (row.ours, row.theirs) == (own[0].tokens[2], tokens[2])
    assert row.gap_steps == gap_steps(logits[2], row.ours, row.theirs) >= 0


def test_what_the_engine_cannot_serve_is_said(engine):
    (reply,) = engine.serve(REQUESTS[:1])
    outside = replace(reply, tokens=[64] * 6)
    with pytest.raises(ValueError, match=r"request a: .*outside the vocabulary"):
        agreement(engine, REQUESTS[:1], [outside])


def test_the_command_without_vllm_names_the_remedy(monkeypatch, tmp_path):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    done = CliRunner().invoke(main, ["vllm-cpu", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert done.output == "error: this environment has no vLLM: make vllm-cpu makes one that has\n"
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_no_tokens(tmp_path):
    done = CliRunner().invoke(main, ["vllm-cpu", "--tokens", "0", "--out", str(tmp_path / "out")])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "expected at least 1" in done.output
