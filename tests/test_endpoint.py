"""The endpoint client against a server that behaves as it is told, over real HTTP."""

import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fusion_evidence.lib.service.endpoint import Endpoint, EndpointError, free_port, serve, started
from fusion_evidence.lib.service.metrics import summarize
from fusion_evidence.lib.service.prompts import Request


def event(**choice):
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


def tokens(*ids):
    return [event(text=f"<{i}>", token_ids=[i]) for i in ids]


END = [event(text="", finish_reason="length"), b"data: [DONE]\n\n"]

#: What the server does with a prompt that starts with this token.
SCRIPTS = {
    1: [*tokens(11, 12, 13), *END],
    2: [event(delta={"role": "assistant"}), event(text=""), *tokens(21, 22), *END],
    3: [event(text="", finish_reason="stop"), b"data: [DONE]\n\n"],
    4: tokens(41, 42),  # cut in half
    5: [*tokens(51), b'data: {"error": {"message": "out of memory"}}\n\n'],
    6: [*tokens(61), b"data: {not json\n\n"],
    7: [event(text="ab", token_ids=[71, 72]), *END],
    8: [*tokens(81, 82), "hang"],
    9: [b": a comment\n\n", event(text="x"), event(text="y", finish_reason="stop")],
    10: [*tokens(101), b"data: 5\n\n"],
}


class Scripted(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        data = {"data": [{"id": name} for name in self.server.models]}
        self.answer(200, json.dumps(data).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            self.reply(body["prompt"][0])
        finally:
            with self.server.lock:
                self.server.now -= 1

    def reply(self, code):
        if code >= 400:
            said = {"error": {"message": f"no:\n{code}"}} if code < 500 else None
            return self.answer(code, json.dumps(said).encode() if said else b"<html>sorry</html>")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in SCRIPTS[code]:
            time.sleep(0.01)
            if piece == "hang":
                self.server.release.wait(20)
                return None
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        if code == 4:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(b"0\r\n\r\n")
        return None


@pytest.fixture
def server():
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    httpd.models, httpd.seen, httpd.lock = ["compact"], [], threading.Lock()
    httpd.now = httpd.most = 0
    httpd.release = threading.Event()
    httpd.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield httpd
    httpd.release.set()
    httpd.shutdown()
    httpd.server_close()


def request(code, tokens=4):
    return Request(f"r{code}", "text", (code, 9), None, tokens)


def test_what_came_back_token_by_token(server):
    (reply,) = serve(Endpoint(server.url), [request(1)])
    assert (reply.id, reply.tokens, reply.text) == ("r1", [11, 12, 13], "<11><12><13>")
    assert (reply.finish_reason, reply.error, reply.prompt_tokens) == ("length", "", 2)
    assert len(reply.token_times_s) == 3
    assert 0 < reply.token_times_s[0] < reply.token_times_s[1] < reply.token_times_s[2]
    assert reply.prefill_s == reply.ttft_s
    sent = server.seen[0]
    assert (sent["prompt"], sent["max_tokens"], sent["temperature"]) == ([1, 9], 4, 0.0)
    assert sent["stream"] is True
    assert sent["model"] == "compact"


def test_further_fields_are_sent(server):
    serve(Endpoint(server.url + "/v1/"), [request(1)], extra={"ignore_eos": True})
    assert server.seen[0]["ignore_eos"] is True


def test_chunks_without_a_token_are_no_arrival(server):
    (reply,) = serve(Endpoint(server.url), [request(2)])
    assert (reply.tokens, len(reply.token_times_s)) == ([21, 22], 2)


def test_a_chunk_of_two_tokens_is_one_arrival_of_both(server):
    (reply,) = serve(Endpoint(server.url), [request(7)])
    assert reply.tokens == [71, 72]
    assert reply.token_times_s[0] == reply.token_times_s[1]


def test_a_server_that_gives_no_token_ids(server):
    (reply,) = serve(Endpoint(server.url), [request(9)])
    assert (reply.tokens, reply.text, reply.finish_reason) == ([], "xy", "stop")
    assert reply.completed
    assert len(reply.itl_s) == 1


def test_an_empty_reply_is_not_completed_and_no_error(server):
    (reply,) = serve(Endpoint(server.url), [request(3)])
    assert (reply.finish_reason, reply.error, reply.completed) == ("stop", "", False)


@pytest.mark.parametrize(
    ("code", "received", "reason"),
    [
        (4, [41, 42], "RemoteProtocolError"),
        (5, [51], "the server says: out of memory"),
        (6, [61], "JSONDecodeError"),
        (10, [101], "a chunk is int"),
        (404, [], "HTTP 404: no: 404"),
        (503, [], "HTTP 503: <html>sorry</html>"),
    ],
)
def test_a_failure_is_named_and_keeps_what_came(server, code, received, reason):
    (reply,) = serve(Endpoint(server.url), [request(code)])
    assert reply.finish_reason == "error"
    assert reason in reply.error
    assert "\n" not in reply.error
    assert (reply.tokens, reply.completed) == (received, False)


def test_a_server_that_falls_silent(server):
    (reply,) = serve(Endpoint(server.url, silent_s=0.3), [request(8)])
    assert "ReadTimeout" in reply.error
    assert reply.tokens == [81, 82]


def test_the_others_go_on_and_failures_are_in_no_percentile(server):
    kept = []
    codes = (1, 4, 500, 2, 3)
    asked = [request(code) for code in codes]
    replies = serve(Endpoint(server.url), asked, concurrency=2, on_reply=kept.append)
    assert [reply.id for reply in replies] == [f"r{code}" for code in codes]
    assert sorted(reply.id for reply in kept) == sorted(reply.id for reply in replies)
    table = summarize(replies).set_index(["metric", "stat"])
    assert table.loc[("ttft", "p50"), "n"] == 2


def test_as_many_at_a_time_as_asked_for(server):
    serve(Endpoint(server.url), [request(1)] * 8, concurrency=3)
    assert 2 <= server.most <= 3
    server.most = 0
    serve(Endpoint(server.url), [request(1)] * 3)
    assert server.most == 1


def test_what_the_caller_raises_ends_it_and_nothing_is_left_running(server):
    def stop(reply):
        raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        serve(Endpoint(server.url), [request(1), request(8)], concurrency=2, on_reply=stop)
    assert time.monotonic() - begun < 15


def test_the_model_has_to_be_named_where_there_are_several(server):
    server.models = ["a", "b"]
    with pytest.raises(EndpointError, match="serves a, b: name one"):
        serve(Endpoint(server.url), [request(1)])
    with pytest.raises(EndpointError, match="none is 'c'"):
        serve(Endpoint(server.url, model="c"), [request(1)])
    serve(Endpoint(server.url, model="b"), [request(1)])
    assert server.seen[-1]["model"] == "b"


def test_nobody_there():
    with pytest.raises(EndpointError, match="ConnectError"):
        serve(Endpoint(f"http://127.0.0.1:{free_port()}"), [request(1)])


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="base_url: expected http"):
        Endpoint("127.0.0.1:8000")
    with pytest.raises(ValueError, match="silent_s: expected more than 0"):
        Endpoint("http://x", silent_s=0)
    with pytest.raises(ValueError, match="concurrency: expected at least 1"):
        serve(Endpoint("http://x"), [], concurrency=0)


# --- a server of our own

SMALL = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("Application startup complete.", flush=True)
server.serve_forever()
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_is_started_and_ends_with_its_children(tmp_path):
    port, log = free_port(), tmp_path / "log"
    with started([sys.executable, "-c", SMALL, str(port)], port=port, log=log) as ready:
        assert ready.base_url == f"http://127.0.0.1:{port}"
        assert ready.line == "Application startup complete."
        assert ready.seconds > 0
        child = int(log.read_text().split()[1])
        assert alive(child)
    until = time.monotonic() + 10
    while alive(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(child)


def test_a_server_that_ends_by_itself_is_named_with_its_log(tmp_path):
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with (
        pytest.raises(EndpointError, match=r"ended with status 3(.|\n)*no such model"),
        started(command, port=free_port(), log=tmp_path / "log"),
    ):
        pass


def test_a_server_that_never_answers_is_ended(tmp_path):
    command = [
        sys.executable,
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(60)",
    ]
    with (
        pytest.raises(EndpointError, match="did not answer in time"),
        started(command, port=free_port(), log=tmp_path / "log", ready_s=2),
    ):
        pass
    pid = int((tmp_path / "log").read_text())
    assert not alive(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_no_such_command(tmp_path):
    with (
        pytest.raises(EndpointError, match="cannot be started"),
        started(["/no/such/server"], port=1, log=tmp_path / "log"),
    ):
        pass
