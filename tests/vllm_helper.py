"""A vLLM server for the tests that need one; no tests."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from fusion_evidence.lib.service.endpoint import Started, free_port, started
from fusion_evidence.lib.service.vllm_server import environment, serve_command


def start_vllm(checkpoint: Path, log: Path) -> AbstractContextManager[Started]:
    """Of this Python's environment, on the CPU, until the context ends."""
    port = free_port()
    command = serve_command(checkpoint, port)
    return started(command, port=port, log=log, environment=environment())
