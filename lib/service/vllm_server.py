"""vLLM as a server of a checkpoint: how it is started, and what its replies are beside this project's own.

Nothing here imports vLLM: the server is a process, of this environment's Python or of another's.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
from torch import Tensor

from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.service.endpoint import (
    Endpoint,
    EndpointError,
    Started,
    free_port,
    serve,
    started,
)
from fusion_evidence.lib.service.engine import Engine
from fusion_evidence.lib.service.metrics import Reply
from fusion_evidence.lib.service.prompts import Request
from fusion_evidence.lib.service.vllm_hook import KEY

NO_POSITIONS = (
    "the completions API takes tokens alone; rows that differ come from images, which this checkpoint has "
    "no part for"
)
"""Why a request's own position rows cannot be sent to a server."""


def serve_command(
    checkpoint: Path,
    port: int,
    *,
    python: str = sys.executable,
    name: str = "compact",
    eager: bool = True,
    max_tokens: int = 2048,
    in_flight: int = 16,
    extra: Sequence[str] = (),
) -> list[str]:
    """``vllm serve`` on loopback, of a checkpoint as `vllm_checkpoint.export` writes it.

    Args:
        python: of the environment that has vLLM. name: the model's, as clients call it.
        eager: nothing is compiled and there are no CUDA graphs.
        max_tokens: of a request, prompt included. in_flight: requests served at a time.
        extra: further words; the last of a repeated option counts.
    """
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    options = {
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "max-model-len": max_tokens,
        "max-num-seqs": in_flight,
    }
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    # The same prompt twice has to be the same work twice.
    command += ["--language-model-only", "--no-enable-prefix-caching"]
    return [*command, *(["--enforce-eager"] if eager else []), *extra]


def environment(cpu: bool = True) -> dict[str, str]:
    """Of the server's process, besides what this process has: offline, and small on a CPU."""
    common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # VLLM_CPU_CI_ENV: where something is compiled, by Dynamo with the eager backend.
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
    return common | (on_cpu if cpu else {})


def plugin_words(settings: Mapping[str, Any]) -> list[str]:
    """For ``extra`` of `serve_command`: this project's plugin in the mode that ``settings`` name.

    settings: as in `vllm_plugin.Settings`.
    """
    extension = "fusion_evidence.lib.service.vllm_plugin.WorkerExtension"
    configured = json.dumps({KEY: dict(settings)})
    return ["--additional-config", configured, "--worker-extension-cls", extension]


@contextmanager
def running(
    checkpoint: Path,
    log: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    cpu: bool = True,
    around: Mapping[str, str] | None = None,
    ready_s: float = 900.0,
    extra: Sequence[str] = (),
    **options: Any,
) -> Iterator[Started]:
    """A vLLM server of a checkpoint on a free port of loopback, until the context ends.

    Args:
        settings: the plugin's, as in `vllm_plugin.Settings`, and then the server can be asked for its
            markers; None: it gets no word of it.
        cpu, around: `environment`, and what to add. ready_s: to answer in.
        extra, options: as in `serve_command`.

    EndpointError: it does not start, with the end of its log.
    """
    port = free_port()
    words = [*extra, *(plugin_words(settings) if settings is not None else [])]
    command = serve_command(checkpoint, port, extra=words, **options)
    asked = {"VLLM_SERVER_DEV_MODE": "1"} if settings is not None else {}
    variables = environment(cpu) | asked | dict(around or {})
    with started(command, port=port, log=log, environment=variables, ready_s=ready_s) as ready:
        yield ready


def ask_workers(base_url: str, method: str, *arguments: str, timeout_s: float = 300.0) -> Any:
    """What ``method`` of the server's first worker answers, see `vllm_plugin.WorkerExtension`.

    EndpointError: the server has no such method, or does not answer.
    """
    body = {"method": method, "args": list(arguments)}
    try:
        answer = httpx.post(
            f"{base_url}/collective_rpc", json=body, timeout=timeout_s, trust_env=False
        )
        answer.raise_for_status()
        return answer.json()["results"][0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise EndpointError(f"{base_url} gives no {method}: {error}") from error


def markers(base_url: str, *, reset: bool = False) -> dict[str, list[int]]:
    """Layer -> runs of the kernel and of the fallback on the server's first worker, replays included.

    reset: then start from zero. EndpointError: the server has no plugin, or does not answer.
    """
    found: dict[str, list[int]] = ask_workers(base_url, "fusion_markers")
    if reset:
        ask_workers(base_url, "fusion_reset_markers")
    return found


@dataclass(frozen=True)
class Visit:
    """What one server of its own replied, and what its layers counted meanwhile.

    ready: when it began to answer, and with which line. counted: (kernel, fallback) runs of every layer;
        None where the mode counts nothing, and where layers do not agree.
    """

    ready: Started
    replies: list[Reply]
    counted: tuple[int, int] | None


def visit(
    checkpoint: Path,
    requests: Sequence[Request],
    log: Path,
    settings: Mapping[str, Any],
    *,
    eager: bool = True,
    concurrency: int = 1,
    python: str = sys.executable,
    cpu: bool = True,
    on_reply: Callable[[Reply], None] | None = None,
) -> Visit:
    """Start a server with the plugin, serve ``requests`` after one that pays for the start, and end it.

    Args:
        settings: the plugin's, as in `vllm_plugin.Settings`. The others: as in `serve_command`,
            `environment` and `endpoint.serve`.

    EndpointError: it does not start, with the end of its log, or gives no markers.
    """
    with running(checkpoint, log, settings, eager=eager, python=python, cpu=cpu) as ready:
        endpoint = Endpoint(ready.base_url)
        serve(endpoint, requests[:1])
        markers(ready.base_url, reset=True)
        replies = serve(endpoint, requests, concurrency=concurrency, on_reply=on_reply)
        by_layer = {(kernel, other) for kernel, other in markers(ready.base_url).values()}
    return Visit(ready, replies, by_layer.pop() if len(by_layer) == 1 else None)


def tracing_story(checkpoint: Path, requests: Sequence[Request], log: Path) -> pd.DataFrame:
    """The article's first two integrations in servers on the CPU, by their markers.

    The definition computes in the kernel's place, which a CPU does not have.

    Returns a row for each server: ``mode``, ``service`` (eager, compiled), ``at_a_time``,
    ``decode_steps`` (of one token each, were the requests alone), ``kernel`` and ``fallback`` (runs of
    each layer), ``changed`` (texts that are not the first row's).
    """
    tree = Reduction.candidates(preset("compact").head_dim)[0]
    kernel = {
        "numerics": str(Numerics("per_op", tree)),
        "candidate": "fusion_evidence.kernels.reference:qkv_prologue",
    }
    servers: list[tuple[str, bool, int]] = [
        ("native", False, 1),
        ("python_branch", True, 1),
        ("python_branch", False, 1),
        ("opaque_eager", False, 1),
        ("opaque_eager", False, 4),
    ]
    rows, first = [], None
    for mode, eager, at_a_time in servers:
        settings = {"mode": mode} | (kernel if mode != "native" else {})
        seen = visit(checkpoint, requests, log, settings, eager=eager, concurrency=at_a_time)
        said = [reply.tokens for reply in seen.replies]
        first = said if first is None else first
        counted = seen.counted or (0, 0)
        rows.append(
            {
                "mode": mode,
                "service": "eager" if eager else "compiled",
                "at_a_time": at_a_time,
                "decode_steps": sum(len(tokens) - 1 for tokens in said),
                "kernel": counted[0],
                "fallback": counted[1],
                "changed": sum(a != b for a, b in zip(said, first, strict=True)),
            }
        )
    return pd.DataFrame(rows)


def as_text(requests: Sequence[Request], max_new_tokens: int | None = None) -> list[Request]:
    """The same tokens at text's positions, which is all that a server can be sent.

    max_new_tokens: of every request; None keeps theirs.
    """
    return [
        replace(
            one,
            positions=None,
            max_new_tokens=one.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )
        for one in requests
    ]


def agreement(
    engine: Engine, requests: Sequence[Request], replies: Sequence[Reply]
) -> pd.DataFrame:
    """Whether this project's engine says what a server said, token by token.

    The engine is fed the server's tokens, so that every one of its choices has the server's prefix; the
    first other choice is where texts that are free would part.

    Returns one row for each request that the server completed: ``request``, ``prompt_tokens``, ``tokens``,
    ``differing`` (tokens that the engine would not choose), ``first_changed`` (nullable), and of that
    token ``ours``, ``theirs`` and ``gap_steps``: how far the engine's logit of its own token lies above
    that of the server's, in steps of bfloat16 at that size. 0: a tie, which order alone decides; a few:
    rounding.
    """
    said = {reply.id: reply for reply in replies if reply.completed}
    wanted = [one for one in requests if one.id in said]
    differing: dict[str, list[tuple[int, int, int, float]]] = {one.id: [] for one in wanted}

    def look(name: str, at: int, logits: Tensor) -> None:
        ours, theirs = int(logits.argmax()), said[name].tokens[at]
        if ours != theirs:
            differing[name].append((at, ours, theirs, gap_steps(logits, ours, theirs)))

    forced: Mapping[str, Sequence[int]] = {name: reply.tokens for name, reply in said.items()}
    for reply in engine.serve(wanted, forced=forced, on_logits=look):
        if reply.error:
            raise ValueError(f"request {reply.id}: the engine cannot serve it: {reply.error}")
    rows = []
    for one in wanted:
        first = differing[one.id][0] if differing[one.id] else (None, None, None, math.nan)
        sizes = len(one.ids), len(said[one.id].tokens), len(differing[one.id])
        rows.append((one.id, *sizes, *first))
    columns = ["request", "prompt_tokens", "tokens", "differing"]
    columns += ["first_changed", "ours", "theirs", "gap_steps"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype(dict.fromkeys(("first_changed", "ours", "theirs"), "Int64"))


def gap_steps(logits: Tensor, one: int, other: int) -> float:
    """``logits[one] - logits[other]`` in steps of bfloat16 at the size of ``logits[one]``.

    logits: [vocab], bfloat16 or wider.
    """
    high, low = float(logits[one]), float(logits[other])
    exponent = math.frexp(high)[1] - 1 if high else -126
    return (high - low) / 2.0 ** (exponent - 7)
