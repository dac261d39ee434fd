"""A client of any OpenAI-compatible server: what came back, token by token, and what went wrong.

It speaks ``/v1/completions`` with streaming, prompts as token ids, temperature 0. What is counted is what
``vllm bench serve`` counts (see `metrics`): a chunk counts once it has a choice with text or token ids; one
that only names a role or is empty does not. A chunk of several tokens is one arrival of all of them.

A server gives no TTFT parts: ``queue_s`` and ``first_call_s`` of its replies are 0.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
from anyio.from_thread import start_blocking_portal

from fusion_evidence.lib.service.metrics import Finish, Reply
from fusion_evidence.lib.service.prompts import Request


class EndpointError(RuntimeError):
    """The server cannot be used at all; in one line."""


@dataclass(frozen=True)
class Endpoint:
    """A server and how long to wait for it.

    base_url: with or without ``/v1``. model: as the server names it; None: the only one it has.
    api_key: sent as a bearer token. connect_s: to accept a connection. silent_s: longest time without a
    byte; after it the request counts as failed.
    """

    base_url: str
    model: str | None = None
    api_key: str = ""
    connect_s: float = 10.0
    silent_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url: expected http://host:port, got {self.base_url!r}")
        for name in ("connect_s", "silent_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")

    def url(self, path: str) -> str:
        """Of a path under ``/v1``."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    def options(self) -> dict[str, Any]:
        """Of an HTTP client that goes to the server directly, whatever proxy the environment names."""
        return {
            "headers": {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            "timeout": httpx.Timeout(self.silent_s, connect=self.connect_s),
            "limits": httpx.Limits(max_connections=None),
            "trust_env": False,
        }

    def chosen_model(self) -> str:
        """``model``, checked against what the server lists.

        EndpointError: no answer, no such model, or several and none named.
        """
        try:
            with httpx.Client(**self.options()) as client:
                answer = client.get(self.url("models"))
            answer.raise_for_status()
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EndpointError(f"{self.base_url}: no list of models: {_named(error)}") from error
        if self.model is None and len(names) == 1:
            return names[0]
        if self.model not in names:
            wanted = "name one" if self.model is None else f"none is {self.model!r}"
            raise EndpointError(f"{self.base_url} serves {', '.join(names) or 'nothing'}: {wanted}")
        return self.model


@dataclass
class _Stream:
    """What one request got so far."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    finish: Finish | None = None
    done: bool = False

    def take(self, data: str, now: float) -> None:
        """One event of the stream. ValueError: it is none, or it says that the server failed."""
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"a chunk is {type(chunk).__name__}, not an object")
        if error := chunk.get("error"):
            said = error.get("message", error) if isinstance(error, dict) else error
            raise ValueError(f"the server says: {said}")
        for choice in chunk.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ids = choice.get("token_ids") or []
            self.text += text
            self.tokens += ids
            self.times += [now] * (len(ids) or bool(text))
            if reason := choice.get("finish_reason"):
                self.finish = "length" if reason == "length" else "stop"


def serve(
    endpoint: Endpoint,
    requests: Sequence[Request],
    *,
    concurrency: int = 1,
    extra: Mapping[str, Any] | Callable[[Request], Mapping[str, Any]] | None = None,
    on_reply: Callable[[Reply], None] | None = None,
) -> list[Reply]:
    """Send all requests, ``concurrency`` at a time; replies in the order of the requests.

    A request that fails is a reply with ``finish_reason`` ``error``, the reason, and what had come until
    then; the others go on. Times count from the moment each request is sent.

    Args:
        extra: further fields of every request, such as ``{"ignore_eos": True}``, or a function that gives
            each its own; ``return_token_ids`` is asked for unless it is given, and a server without it
            gives replies without tokens.
        on_reply: called with each reply as it ends, one at a time: what came is kept if the caller is
            stopped.

    Raises:
        ValueError: fewer than one at a time. EndpointError: the server is not there, or not of this kind.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency: expected at least 1, got {concurrency}")
    model = endpoint.chosen_model()
    url, places = endpoint.url("completions"), anyio.Semaphore(concurrency)

    async def ask(client: httpx.AsyncClient, request: Request) -> Reply:
        async with places:
            fields = extra(request) if callable(extra) else extra or {}
            return await _ask(client, url, model, request, fields)

    # An event loop in a thread of its own: a notebook has one in this thread already.
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(httpx.AsyncClient(**endpoint.options())) as client,
    ):
        sent = [portal.start_task_soon(ask, client, one) for one in requests]
        try:
            for ended in as_completed(sent):
                if on_reply is not None:
                    on_reply(ended.result())
        except BaseException:
            for one in sent:
                one.cancel()
            raise
        return [one.result() for one in sent]


async def _ask(
    client: httpx.AsyncClient, url: str, model: str, request: Request, extra: Mapping[str, Any]
) -> Reply:
    body = {
        "model": model,
        "prompt": list(request.ids),
        "max_tokens": request.max_new_tokens,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
        **extra,
    }
    got, error = _Stream(), ""
    start = time.perf_counter()
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise ValueError(f"HTTP {response.status_code}: {_message(response)}")
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    got.take(line.removeprefix("data:").strip(), time.perf_counter() - start)
        error = "" if got.finish else _cut(got)
    except (httpx.HTTPError, httpx.StreamError, ValueError, TypeError, AttributeError) as failure:
        error = _named(failure)
    finish = "error" if error else got.finish or "error"
    return Reply(
        id=request.id,
        prompt_tokens=len(request.ids),
        tokens=got.tokens,
        text=got.text,
        finish_reason=finish,
        error=error,
        prefill_s=got.times[0] if got.times else 0.0,
        token_times_s=got.times,
    )


def _cut(got: _Stream) -> str:
    how = "ended" if got.done else "was cut off"
    return f"the stream {how} without a finish reason, after {len(got.times)} tokens"


def _message(response: httpx.Response) -> str:
    """What the server says is wrong, in one line of at most 300 characters."""
    try:
        said = response.json()
        said = said.get("error", said)
        text = str(said.get("message", said) if isinstance(said, dict) else said)
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(text.split())[:300] or response.reason_phrase


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


# --- a server of our own


@dataclass(frozen=True)
class Started:
    """A server that answers. seconds: from its start until it did. line: of its log, that says so."""

    base_url: str
    seconds: float
    line: str


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(
    command: Sequence[str],
    *,
    port: int,
    log: Path,
    environment: Mapping[str, str] | None = None,
    ready_s: float = 900.0,
    ready_line: str = "startup complete",
) -> Iterator[Started]:
    """Start a server on loopback, wait until ``/health`` answers, and end it and its children after.

    Args:
        command: with the host and ``port`` it shall listen on.
        log: gets both of its output streams. environment: added to this process's.

    Raises:
        EndpointError: it cannot be started, ends by itself, or does not answer in time; with the end
            of its log.
    """
    url = f"http://127.0.0.1:{port}"
    begun = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # its workers are its children: all end with the group
            )
        except OSError as error:
            raise EndpointError(f"{command[0]} cannot be started: {error}") from error
    try:
        _wait(process, url, begun + ready_s, log)
        seconds = time.monotonic() - begun
        lines = log.read_text(errors="replace").splitlines()
        said = next((line for line in lines if ready_line in line), "")
        yield Started(url, seconds, said.strip())
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, until: float, log: Path) -> None:
    with httpx.Client(timeout=5, trust_env=False) as client:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise EndpointError(
                    f"the server ended with status {process.returncode}{_tail(log)}"
                )
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
    raise EndpointError(f"the server did not answer in time{_tail(log)}")


def _tail(log: Path, lines: int = 20) -> str:
    text = "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return f"; the end of its log:\n{text}" if text else "; its log is empty"


def _end(process: subprocess.Popen[bytes], patience_s: float = 20.0) -> None:
    """Asks the whole group to end, then makes it."""
    for how, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, patience_s)):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
