"""The client at a real vLLM server on the CPU: `make test-vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate

import pytest

from fusion_evidence.kernels import eager
from fusion_evidence.lib.service import model as m
from fusion_evidence.lib.service.endpoint import Endpoint, serve
from fusion_evidence.lib.service.engine import Engine, Settings
from fusion_evidence.lib.service.metrics import Reply, summarize
from fusion_evidence.lib.service.prompts import COMPACT, Request, load_requests, load_tokenizer
from fusion_evidence.lib.service.vllm_checkpoint import export
from fusion_evidence.lib.service.vllm_server import agreement, as_text, running

pytestmark = pytest.mark.vllm

REQUESTS = as_text(load_requests(), 8)
#: Two right computations in bfloat16 may order two tokens differently that are this close.
ROUNDING_STEPS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return export(tmp_path_factory.mktemp("vllm") / "checkpoint")


@pytest.fixture(scope="module")
def server(checkpoint):
    with running(checkpoint, checkpoint.parent / "server.log") as ready:
        serve(Endpoint(ready.base_url), REQUESTS[:1])
        yield ready


@pytest.fixture(scope="module")
def engine():
    model = m.load(COMPACT, eager.qkv_prologue)
    return Engine(model, model, model, Settings())


def test_it_says_that_it_is_ready(server):
    assert "Application startup complete" in server.line
    assert 1 < server.seconds < 900


def test_it_serves_the_model_that_was_exported(server):
    assert Endpoint(server.base_url).chosen_model() == "compact"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_its_tokens_are_this_projects_up_to_rounding(server, engine, concurrency):
    ended = []
    replies = serve(
        Endpoint(server.base_url), REQUESTS, concurrency=concurrency, on_reply=ended.append
    )
    tokenizer = load_tokenizer()
    assert (
        sorted(one.id for one in ended)
        == [one.id for one in replies]
        == [f"r{n:02}" for n in range(1, 11)]
    )
    for reply in replies:
        assert (reply.finish_reason, reply.error) == ("length", "")
        assert len(reply.tokens) == len(reply.token_times_s) == 8
        assert reply.token_times_s == sorted(reply.token_times_s)
        assert reply.text == tokenizer.decode(reply.tokens)
    frame = agreement(engine, REQUESTS, replies)
    assert len(frame) == 10
    assert (frame.gap_steps.dropna() <= ROUNDING_STEPS).all(), frame.to_string()
    assert frame.differing.sum() <= 8, frame.to_string()


def test_four_at_a_time_are_batched(server):
    """In turn, the second could not get a token before the first has its last."""
    same = [replace(REQUESTS[0], id=f"same{n}", max_new_tokens=32) for n in range(4)]
    replies = serve(Endpoint(server.base_url), same, concurrency=4)
    assert all(reply.completed for reply in replies)
    # All were sent at one time, so their clocks have the same zero, up to the sending.
    assert max(reply.ttft_s for reply in replies) < min(reply.e2e_s for reply in replies)


def test_a_prompt_too_long_fails_alone_and_says_why(server):
    long = Request("long", "", REQUESTS[-1].ids * 2, None, 8)
    bad, good = serve(Endpoint(server.base_url), [long, REQUESTS[0]], concurrency=2)
    assert (bad.finish_reason, bad.tokens, bad.completed) == ("error", [], False)
    assert "HTTP 400" in bad.error
    assert "maximum context length is 2048" in bad.error
    assert good.completed
    assert set(summarize([bad, good]).query("metric == 'ttft'").n) == {1}


def test_a_stop_token_ends_a_reply_and_is_kept(server):
    """Any token may be the one to stop at; the server's own second one is."""
    (free,) = serve(Endpoint(server.base_url), REQUESTS[:1])
    extra = {"stop_token_ids": [free.tokens[1]]}
    (reply,) = serve(Endpoint(server.base_url), REQUESTS[:1], extra=extra)
    assert (reply.finish_reason, reply.tokens) == ("stop", free.tokens[:2])
    assert len(reply.token_times_s) == 2


# --- vLLM's own client

#: It sends texts. transformers splits those of this kind of model by a rule of its own, another than the
#: checkpoint's tokenizer.json: of the last four requests the server would see other tokens.
TEXTS = REQUESTS[:6]


@pytest.fixture(scope="module")
def bench(server, checkpoint):
    """What ``vllm bench serve`` says of the same requests, one at a time, with its details."""
    folder = checkpoint.parent
    dataset = folder / "requests.jsonl"
    lines = [{"prompt": one.text, "output_tokens": one.max_new_tokens} for one in TEXTS]
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {
        "base-url": server.base_url,
        "model": "compact",
        "tokenizer": str(checkpoint),
        "dataset-name": "custom",
        "dataset-path": str(dataset),
        "custom-output-len": "-1",
        "num-prompts": str(len(TEXTS)),
        "max-concurrency": "1",
        "temperature": "0",
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,90,99",
        "result-dir": str(folder),
        "result-filename": "bench.json",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += [word for key, value in options.items() for word in (f"--{key}", value)]
    command += ["--disable-shuffle", "--no-oversample", "--skip-chat-template", "--save-result"]
    done = subprocess.run(
        [*command, "--save-detailed"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "bench.json").read_text())


def replies_of(bench: dict, every_token: bool = True) -> list[Reply]:
    """Each of its requests as this project's client would have recorded it.

    A chunk may bring two tokens, on a busy machine. Then its gaps are fewer than its tokens; every_token:
    as many times as tokens all the same, the last one repeated.
    """
    replies = []
    for index, one in enumerate(TEXTS):
        times = list(accumulate([bench["ttfts"][index], *bench["itls"][index]]))
        together = bench["output_lens"][index] - len(times) if every_token else 0
        replies.append(
            Reply(
                id=one.id,
                prompt_tokens=bench["input_lens"][index],
                tokens=[],
                text=bench["generated_texts"][index],
                token_times_s=times + times[-1:] * together,
            )
        )
    return replies


def test_its_figures_follow_from_its_details_by_our_definitions(bench):
    for metric, theirs in {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}.items():
        replies = replies_of(bench, every_token=metric != "itl")
        frame = summarize(replies, resamples=10).set_index(["metric", "stat"]).value
        for stat in ("mean", "p50", "p90", "p99"):
            said = bench[f"{stat}_{theirs}_ms"]
            assert frame[metric, stat] == pytest.approx(said, rel=1e-6), (metric, stat)


def test_both_clients_get_the_same_from_one_server(bench, server):
    ours = serve(Endpoint(server.base_url), TEXTS)
    theirs = replies_of(bench)
    assert bench["completed"] == sum(reply.completed for reply in ours) == len(TEXTS)
    assert bench["total_input_tokens"] == sum(reply.prompt_tokens for reply in ours)
    assert bench["output_lens"] == [len(reply.tokens) for reply in ours]
    assert [reply.text for reply in theirs] == [reply.text for reply in ours]
    # Times of two runs: only a different meaning would put them this far apart.
    one, other = (
        summarize(replies, resamples=10).set_index(["metric", "stat"]).value
        for replies in (ours, theirs)
    )
    for metric in ("ttft", "tpot", "itl", "e2e"):
        assert 1 / 5 < one[metric, "p50"] / other[metric, "p50"] < 5, metric
