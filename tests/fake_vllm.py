"""Stands for ``vllm.entrypoints.cli.main`` in tests: a server that counts as the plugin does; no tests.

`install` writes a package ``vllm`` whose server is this file. Standard library and NumPy alone, so that it
starts at once. Its model says token ``(last + 1) % 2048``; its layers have one element.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import ClassVar


def install(folder: Path, version: str = "0.25.1") -> Path:
    """A folder for PYTHONPATH in which that version of this vLLM lies."""
    package = folder / "vllm"
    (package / "entrypoints" / "cli").mkdir(parents=True)
    for part in (package, package / "entrypoints", package / "entrypoints" / "cli"):
        (part / "__init__.py").touch()
    (package / "_version.py").write_text(f"__version__ = version = {version!r}\n")
    shutil.copyfile(__file__, package / "entrypoints" / "cli" / "main.py")
    return folder


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    settings: ClassVar[dict] = {}
    lock = threading.Lock()
    counted: ClassVar[list] = [0, 0]  # kernel, fallback
    steps: ClassVar[list] = [0, 0]  # all, of one token
    rows: ClassVar[list] = []
    choices: ClassVar[dict] = {}

    def log_message(self, *arguments):
        pass

    def answer(self, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/metrics":
            every, of_one = self.steps
            lines = [
                f'vllm:iteration_tokens_total_bucket{{engine="0",le="1.0"}} {of_one}',
                f'vllm:iteration_tokens_total_bucket{{engine="0",le="16.0"}} {of_one}',
                f'vllm:iteration_tokens_total_count{{engine="0"}} {every}',
                'vllm:request_queue_time_seconds_sum{engine="0"} 0.5',
                'vllm:request_queue_time_seconds_count{engine="0"} 2.0',
            ]
            return self.answer("\n".join(lines).encode() + b"\n", "text/plain")
        return self.answer({"data": [{"id": "compact"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            return self.answer({"results": [getattr(self, body["method"])(*body.get("args", []))]})
        return self.complete(body)

    def step(self, tokens):
        with self.lock:
            kernel = tokens == 1 and self.settings.get("mode") == "opaque_eager"
            self.counted[0 if kernel else 1] += 1
            self.steps[0] += 1
            self.steps[1] += tokens == 1

    def complete(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        extra = body.get("vllm_xargs", {})
        forced = [int(token) for token in extra.get("fusion_forced", "").split(",") if token]
        last, tokens = body["prompt"][-1], len(body["prompt"])
        for at in range(body["max_tokens"]):
            time.sleep(0.001)
            self.step(tokens)
            chosen = (last + 1) % 2048
            if forced:
                self.choices.setdefault(extra["fusion_request"], []).append(chosen)
                self.rows.append((tokens, at, last))
            last, tokens = forced[at] if forced else chosen, 1
            finish = "length" if at + 1 == body["max_tokens"] else None
            self.chunk({"choices": [{"text": "x", "token_ids": [last], "finish_reason": finish}]})
        self.piece(b"data: [DONE]\n\n")
        self.piece(b"")

    def chunk(self, content):
        self.piece(b"data: " + json.dumps(content).encode() + b"\n\n")

    def piece(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    # --- the worker extension

    def fusion_markers(self):
        if self.settings.get("mode") in ("native", "off"):
            return {}
        return {"layers.0": self.counted, "layers.1": self.counted}

    def fusion_reset_markers(self):
        self.counted[:] = [0, 0]

    def fusion_reset_records(self):
        self.rows.clear()

    def fusion_choices(self):
        return self.choices

    def fusion_records(self, path):
        import numpy as np
        from safetensors.numpy import save_file

        tokens, positions, said = np.array(self.rows, dtype=np.int64).T
        v = said.astype(np.int16)[:, None]
        other = 1 if self.settings.get("mode") == "fallback_only" else 0
        tensors = {"tokens": tokens.copy(), "positions": positions.copy()}
        for layer in ("layers.0", "layers.1"):
            tensors |= {f"{layer}.v": v, f"{layer}.q": v + other, f"{layer}.k": v.copy()}
        shape = dict(name="s", q_heads=1, kv_heads=1, head_dim=16, rotary_dim=4)
        shape |= dict(mrope_section=[1, 1, 0], hidden_size=1, layers=2, attention_layers=2)
        metadata = {"shape": json.dumps(shape), "device": "cpu"}
        save_file(tensors, path, metadata | {"layers": '["layers.0", "layers.1"]'})
        return {"rows": len(self.rows), "lost": 0}


GRAPH = """# from {cache}
kernel = async_compile.triton('kernel', '/{cache}/ab/ckernel.py')
async_compile.wait(globals())
def call(args):
    return args
"""


def compile_something(cache, block):
    """Leave in Inductor's cache a graph, its kernel, one that was only tried, and what the clock chose."""
    folder = cache / "ab"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgraph.py").write_text(GRAPH.format(cache=cache))
    (folder / "ckernel.py").write_text("def triton_(args):\n    return args\n")
    (folder / f"ctried{block}.py").write_text("def call(args):\n    return kernel.run(*args)\n")
    chosen = {"XBLOCK": block, "num_warps": 4, "found_by_coordesc": False}
    chosen |= {"configs_hash": "h", "time_taken_ms": block, "triton_cache_hash": "t"}
    (folder / "kernel.best_config").write_text(json.dumps(chosen))


def main(words):
    options = dict(pairwise(words))
    Server.settings = json.loads(options.get("--additional-config", "{}")).get(
        "fusion_evidence", {}
    )
    if Server.settings.get("mode") == "python_branch":
        sys.exit("PluginError: it does not start\n")
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        compile_something(Path(cache), 64 if Server.settings.get("mode") else 128)
    server = ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Server)
    print("INFO: Application startup complete.", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv)
