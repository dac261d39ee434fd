"""A real vLLM server that is killed while it streams: `make test-vllm`."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest

from fusion_evidence.lib.service.endpoint import Endpoint, serve
from fusion_evidence.lib.service.metrics import Reply, summarize
from fusion_evidence.lib.service.prompts import load_requests
from fusion_evidence.lib.service.vllm_checkpoint import export
from fusion_evidence.lib.service.vllm_server import running

pytestmark = pytest.mark.vllm

REQUESTS = load_requests()


@pytest.mark.parametrize("part", ["server", "engine"])
def test_a_server_killed_in_the_middle_leaves_what_had_come(tmp_path, part):
    def kill(reply: Reply) -> None:
        if reply.id != "short":
            return
        children = psutil.Process().children()
        (parent,) = (one for one in children if str(tmp_path) in " ".join(one.cmdline()))
        below = parent.children(recursive=True)
        for process in [parent, *below] if part == "server" else below:
            process.kill()

    short = replace(REQUESTS[0], id="short", max_new_tokens=24)
    long = replace(REQUESTS[1], id="long", max_new_tokens=1900)
    checkpoint = export(tmp_path / "checkpoint")
    with running(checkpoint, tmp_path / "server.log") as ready:
        endpoint = Endpoint(ready.base_url, silent_s=60)
        extra = {"ignore_eos": True}
        whole, cut = serve(endpoint, [short, long], concurrency=2, extra=extra, on_reply=kill)
    assert (whole.finish_reason, len(whole.tokens)) == ("length", 24)
    assert cut.finish_reason == "error"
    assert cut.error
    print(f"{part} killed: {len(cut.tokens)} tokens, {cut.error}")
    assert 0 < len(cut.tokens) == len(cut.token_times_s) < 1900
    assert cut.text
    assert set(summarize([whole, cut], resamples=10).query("metric == 'e2e'").n) == {1}
