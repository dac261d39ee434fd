"""The engine: right tokens, honest clocks, fixed shapes, and requests that fail alone."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from fusion_evidence.kernels import eager, op
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.lib.measure.markers import Markers
from fusion_evidence.lib.service import engine as engine_module
from fusion_evidence.lib.service import model as m
from fusion_evidence.lib.service.engine import (
    Engine,
    Settings,
    _compilations,
    time_decode,
    time_prefill,
)
from fusion_evidence.lib.service.metrics import Reply
from fusion_evidence.lib.service.prompts import Request, decode_position

CONFIG = m.ModelConfig.compact(layers=2, vocab_size=128)
SETTINGS = Settings(max_tokens=64, block_size=8)
needs_device = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="captures CUDA/HIP graphs: no such device here"
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def request(name: str, tokens: int, new: int = 6, positions=None) -> Request:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, CONFIG.vocab_size, (tokens,), generator=generator).tolist()
    return Request(id=name, text="", ids=tuple(ids), positions=positions, max_new_tokens=new)


REQUESTS = [request("a", 5), request("b", 17, 9), request("c", 8, 1), request("d", 40, 24)]


def make(config: m.ModelConfig = CONFIG, **options) -> m.CompactModel:
    return m.random_model(config, eager.qkv_prologue, **options)


def plain(model: m.CompactModel | None = None, settings: Settings = SETTINGS, **options) -> Engine:
    model = make() if model is None else model
    return Engine(model, model, model, settings, **options)


def compiled(model: m.CompactModel, settings: Settings = SETTINGS, backend="eager") -> Engine:
    # Two functions, so that neither is offered the other's graphs.
    prefill, decode = (lambda *a, model=model: model(*a) for _ in range(2))
    prefill.__code__ = prefill.__code__.replace(co_name="prefill")
    forwards = (torch.compile(f, backend=backend, fullgraph=True) for f in (prefill, decode))
    return Engine(model, *forwards, settings)


def tokens(replies: list[Reply]) -> dict[str, list[int]]:
    return {reply.id: reply.tokens for reply in replies}


def all_logits(engine: Engine, requests=REQUESTS, **options):
    """(id, step) -> logits, and the replies."""
    seen: dict[tuple[str, int], torch.Tensor] = {}
    replies = engine.serve(
        requests, on_logits=lambda name, at, row: seen.__setitem__((name, at), row), **options
    )
    return seen, replies


def one_forward(model: m.CompactModel, ids, positions=None) -> torch.Tensor:
    """Logits [T, vocab] of all tokens in one call: no cache to get wrong."""
    made = m.step(ids, 0, range(8), 8, positions=positions)
    with torch.no_grad():
        return model.logits(model(*made, model.new_caches(8, 8)))


@pytest.fixture
def fp32(monkeypatch) -> m.CompactModel:
    """fp32, for tight tolerances; the op takes bf16 and fp16. No bit is claimed with it."""
    monkeypatch.setattr(eager, "check_arguments", lambda *arguments: None)
    return make(dtype=torch.float32)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_tokens_are_those_of_one_forward_call(fp32, in_flight):
    replies = plain(fp32, replace(SETTINGS, in_flight=in_flight)).serve(REQUESTS)
    for asked, reply in zip(REQUESTS, replies, strict=True):
        assert (reply.id, reply.prompt_tokens) == (asked.id, len(asked.ids))
        assert (reply.finish_reason, len(reply.tokens)) == ("length", asked.max_new_tokens)
        rows = one_forward(fp32, [*asked.ids, *reply.tokens[:-1]])[len(asked.ids) - 1 :]
        assert rows.argmax(-1).tolist() == reply.tokens


def test_forced_tokens_are_fed_whatever_the_logits_say(fp32):
    forced = {"b": [3, 1, 4, 1, 5, 9, 2]}
    seen, replies = all_logits(plain(fp32), forced=forced)
    by_id = tokens(replies)
    asked = REQUESTS[1]
    rows = one_forward(fp32, [*asked.ids, *forced["b"][:-1]])[len(asked.ids) - 1 :]
    assert by_id["b"] == rows.argmax(-1).tolist() != forced["b"]
    torch.testing.assert_close(
        torch.stack([seen["b", s] for s in range(7)]), rows, atol=2e-5, rtol=0
    )
    assert by_id["a"] == tokens(plain(fp32).serve(REQUESTS))["a"], "the others run freely"


def test_distinct_positions_and_what_follows_them(fp32):
    at = torch.arange(17)
    # Not contiguous, as slices of a larger table are.
    positions = torch.stack((at // 4, at % 4 + 3, 2 * at + 1), dim=-1).T
    asked = request("image", 17, 5, positions)
    (reply,) = plain(fp32).serve([asked])
    after = torch.tensor([decode_position(asked, i) for i in range(4)]).repeat(3, 1)
    assert after[0].tolist() == [34, 35, 36, 37]
    rows = one_forward(fp32, [*asked.ids, *reply.tokens[:-1]], torch.cat((positions, after), dim=1))
    assert rows[16:].argmax(-1).tolist() == reply.tokens
    text = plain(fp32).serve([replace(asked, positions=None)])
    assert text[0].tokens != reply.tokens


def test_neither_order_nor_company_changes_a_bit():
    model = make()
    alone = {}
    for asked in REQUESTS:
        alone |= all_logits(plain(model), [asked])[0]
    for in_flight, order in (
        (1, REQUESTS),
        (1, REQUESTS[::-1]),
        (3, REQUESTS),
        (4, REQUESTS[::-1]),
    ):
        engine = plain(model, replace(SETTINGS, in_flight=in_flight))
        for _ in range(2):  # the second time over the first one's rows
            seen, _ = all_logits(engine, order)
            assert seen.keys() == alone.keys()
            assert all(torch.equal(seen[key], alone[key]) for key in alone)


def test_shapes_and_decode_buffers_never_change():
    model, attention, decode = make(), Counter(), set()

    def watched(*arguments):
        decode.add(tuple(t.data_ptr() for t in arguments[:5]))
        assert not any(t._is_view() for t in arguments[:5])
        return model(*arguments)

    engine = Engine(model, model, watched, replace(SETTINGS, in_flight=2))

    def observe(layer, q, key_cache, value_cache, block_table, seq_len):
        attention[tuple(q.shape), tuple(block_table.shape)] += 1

    with m.observe_attention(observe):
        engine.serve(REQUESTS)
    assert len(decode) == 1
    assert {table for _, table in attention} == {(8,)}
    assert {shape[0] for shape, _ in attention} == {1, 5, 8, 17, 40}


def test_warm_up_compiles_all_there_is_to_compile():
    engine = compiled(make())
    seconds = engine.warm_up(33)
    assert list(seconds) == ["prefill_first", "prefill", "decode_first", "decode"]
    assert engine.calls == {"prefill": 2, "decode": 2}
    with _compilations() as made:
        before = made()
        replies = engine.serve(REQUESTS)
        assert made() == before
    assert [reply.first_call_s for reply in replies] == [0.0] * 4
    expected = {"prefill": 2 + 4, "decode": 2 + sum(r.max_new_tokens - 1 for r in REQUESTS)}
    assert engine.calls == expected
    assert tokens(replies) == tokens(plain(make()).serve(REQUESTS))


def test_warm_up_writes_into_blocks_of_its_own():
    engine = plain(settings=replace(SETTINGS, in_flight=2))
    engine.warm_up(5 * 64 + 3)
    for caches in engine.caches:
        for cache in caches:
            assert not cache[: 2 * 8].any()
            assert cache[2 * 8 :].any()


def test_marker_counts_every_call():
    """With repeated calls and warm-up: layers x calls, as notebooks check."""
    shape = CONFIG.shape
    numerics = Numerics(reduction=Reduction(32, 2))
    prologue = op.OpaquePrologue(op.Configuration(shape, numerics, force_fallback=True))
    model = m.random_model(CONFIG, prologue, numerics)
    markers = Markers(prologue)
    markers.reset()
    engine = compiled(model)
    engine.serve(REQUESTS)
    assert engine.calls["prefill"] == len(REQUESTS) + 1, "the one that compiled, twice"
    assert markers.read()["device"]["prefill"] == 2 * sum(engine.calls.values())


class Watch:
    """The engine's clock, which only what a test says makes go on: its figures are then exact."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def watch(monkeypatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(engine_module, "time", watch)
    return watch


class Slow:
    """A forward call that takes its time, and a backend that takes its time to compile it."""

    def __init__(self, model, wait, *, compiling=0.0, prefill=0.0, decode=0.0):
        self.model, self.wait = model, wait
        self.seconds = {"prefill": prefill, "decode": decode}

        def backend(graph, inputs):
            wait(compiling)
            return graph.forward

        self.compiled = torch.compile(lambda *a: model(*a), backend=backend, fullgraph=True)

    def __call__(self, ids, *rest):
        self.wait(self.seconds["prefill" if len(ids) > 1 else "decode"])
        return self.compiled(ids, *rest)


def test_clocks(watch):
    slow = Slow(make(), watch.pass_by, compiling=7.0, prefill=2.0, decode=0.5)
    engine = Engine(slow.model, slow, slow, SETTINGS)
    assert engine.warm_up(None) == {"decode_first": 7.5, "decode": 0.5}
    began, steps = watch.now, []
    first, second = engine.serve(REQUESTS[:2], on_step=lambda *step: steps.append(step))
    assert (first.queue_s, first.first_call_s, first.prefill_s) == (0.0, 7.0, 2.0)
    assert first.token_times_s == [9.0, 9.5, 10.0, 10.5, 11.0, 11.5]
    # The repeated call is nobody's time.
    assert (second.queue_s, second.first_call_s, second.prefill_s) == (11.5, 0.0, 2.0)
    assert (second.ttft_s, second.tpot_s, second.e2e_s) == (13.5, 0.5, 17.5)
    assert watch.now - began == second.e2e_s + 2.0
    assert steps[:3] == [("a", 0, 5), ("a", 0, 5), ("a", 1, 1)]
    assert steps[7:] == [("b", 0, 17), *(("b", s, 1) for s in range(1, 9))]


def test_all_wait_from_the_same_moment(watch):
    slow = Slow(make(), watch.pass_by, prefill=2.0, decode=0.5)
    engine = Engine(slow.model, slow, slow, replace(SETTINGS, in_flight=2))
    engine.warm_up(4)
    a, b, c = engine.serve([request("a", 5, 4), request("b", 6, 8), request("c", 7, 2)])
    assert a.token_times_s == [2.0, 4.5, 5.5, 6.5], "a new request goes first, then in turn"
    assert (b.queue_s, b.ttft_s) == (2.0, 4.0)
    assert (c.queue_s, c.ttft_s) == (6.5, 8.5), "in the lane that a leaves"
    assert b.token_times_s == [4.0, 5.0, 6.0, 9.0, 10.0, 10.5, 11.0, 11.5]


def test_failing_requests_fail_alone():
    model = make()

    def prefill(ids, *rest):
        if len(ids) == 17:
            raise RuntimeError("no prefill today")
        return model(ids, *rest)

    def decode(ids, positions, slots, table, length, caches):
        if int(length) == 43:  # d's third decode step
            raise ValueError("no more")
        return model(ids, positions, slots, table, length, caches)

    bad = [
        request("empty", 0),
        request("long", 60),
        replace(request("word", 4), ids=(1, 128)),
        replace(request("far", 2), positions=torch.full((3, 2), 4091)),
    ]
    replies = Engine(model, prefill, decode, SETTINGS).serve(
        [*bad, *REQUESTS, request("none", 4, 0)]
    )
    got = {reply.id: reply for reply in replies}
    assert list(got) == ["empty", "long", "word", "far", "a", "b", "c", "d", "none"]
    words = {
        "empty": "the prompt is empty",
        "long": "60 prompt tokens and 6 new ones need room for 65; a request has 64",
        "word": "outside the vocabulary of 128",
        "far": "position 4096 is beyond the model's 4096",
        "b": "RuntimeError: no prefill today",
        "d": "ValueError: no more",
    }
    for name, text in words.items():
        assert got[name].finish_reason == "error"
        assert text in got[name].error
    expected = tokens(plain(model).serve(REQUESTS))
    assert got["a"].tokens == expected["a"]
    assert got["c"].tokens == expected["c"]
    assert got["d"].tokens == expected["d"][:3], "what it had is kept"
    assert (got["none"].finish_reason, got["none"].tokens) == ("length", [])
    assert [got[name].completed for name in ("a", "b", "d", "none")] == [True, False, False, False]


def test_room_is_used_to_the_last_row():
    asked = request("long", 60, 5)
    (reply,) = plain().serve([asked])
    assert (reply.finish_reason, len(reply.tokens)) == ("length", 5)
    assert decode_position(asked, 4) - 1 == 63


def test_stop_token_and_text():
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    model = make()
    (free,) = plain(model, tokenizer=tokenizer).serve([REQUESTS[3]])
    assert free.text == " ".join(f"w{token}" for token in free.tokens)
    stop = next(token for token in free.tokens if token != free.tokens[0])
    at = free.tokens.index(stop)
    engine = plain(model, replace(SETTINGS, stop_token=stop), tokenizer=tokenizer)
    (stopped,) = engine.serve([REQUESTS[3]])
    assert (stopped.finish_reason, stopped.tokens) == ("stop", free.tokens[: at + 1])
    assert stopped.text == " ".join(f"w{token}" for token in free.tokens[:at])
    (forced,) = engine.serve([REQUESTS[3]], forced={"d": free.tokens})
    assert (forced.finish_reason, forced.tokens) == ("length", free.tokens)


def test_what_a_callback_raises_is_raised():
    def broken(*_):
        raise KeyError("recorder")

    engine = plain()
    for name in ("on_step", "on_logits"):
        with pytest.raises(KeyError, match="recorder"):
            engine.serve(REQUESTS, **{name: broken})
    assert engine.serve(REQUESTS)[0].finish_reason == "length", "and the engine can go on"


def test_settings_and_devices():
    with pytest.raises(ValueError, match="in_flight: expected at least 1, got 0"):
        Settings(in_flight=0)
    with pytest.raises(ValueError, match="cuda_graph: there are none on cpu"):
        plain(settings=replace(SETTINGS, cuda_graph=True))
    with pytest.raises(ValueError, match="1 to 4096 tokens, got 4097"):
        plain().warm_up(4097)
    assert Settings(max_tokens=65).blocks == 5


def test_timing_tells_a_slow_engine_from_others():
    model, wait = make(), 0.1
    slow = Slow(model, time.sleep, prefill=wait, decode=wait)
    engines = {"a": plain(model), "b": plain(model), "slow": Engine(model, slow, slow, SETTINGS)}
    for times in (
        time_decode(engines, REQUESTS[1], steps=2, samples=3),
        time_prefill(engines, 100, samples=3),
    ):
        assert [(len(timing.samples_us), timing.sets) for timing in times.values()] == [(3, 1)] * 3
        assert min(times["slow"].samples_us) > wait * 1e6
        for name in ("a", "b"):  # not the slow one's: its sleep is in no other's samples
            assert min(times[name].samples_us) < min(times["slow"].samples_us)
    with pytest.raises(ValueError, match="need room for 65"):
        time_decode(engines, request("long", 64), samples=1)
    with pytest.raises(ValueError, match="0 arms"):
        time_decode({}, REQUESTS[0])


@pytest.mark.slow
def test_inductor(compile_cache):
    """One graph for prefill and one for decode, and the plain model's tokens."""
    model = make(m.ModelConfig.compact(layers=1, vocab_size=128), seed=2)
    engine = compiled(model, backend="inductor")
    engine.warm_up(33)
    with _compilations() as made:
        before = made()
        seen, replies = all_logits(engine)
        assert made() == before
    expected, _ = all_logits(plain(model), forced=tokens(replies))
    for key, row in seen.items():
        torch.testing.assert_close(row, expected[key], atol=0.1, rtol=0)


@needs_device
@pytest.mark.parametrize("in_flight", [1, 3])
def test_replay_is_the_plain_call(in_flight):
    model = make(device="cuda")
    settings = replace(SETTINGS, in_flight=in_flight)
    expected, _ = all_logits(plain(model, settings))
    engine = plain(model, replace(settings, cuda_graph=True))
    assert "capture" in engine.warm_up(9)
    before = engine.calls["decode"]
    seen, replies = all_logits(engine)
    assert engine.calls["decode"] - before == sum(len(reply.tokens) - 1 for reply in replies)
    assert all(torch.equal(seen[key], expected[key]) for key in expected)
    times = time_decode({"a": engine, "again": engine}, REQUESTS[1], steps=4, samples=11)
    assert 0.9 < times["a"].median_us / times["again"].median_us < 1.1
    seen, _ = all_logits(engine)
    assert all(torch.equal(seen[key], expected[key]) for key in expected), "after timing too"


@needs_device
def test_decode_that_cannot_be_captured():
    model = make(device="cuda")

    def refuses(*arguments):  # as the opaque operator does without a graph for its fallback
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a capture")
        return model(*arguments)

    engine = Engine(model, model, refuses, replace(SETTINGS, cuda_graph=True))
    with pytest.raises(
        RuntimeError, match="decode cannot be captured in a graph: not in a capture"
    ):
        engine.warm_up(None)


@needs_device
def test_a_kernel_that_triton_compiles_counts():
    from fusion_evidence.kernels import fused
    from fusion_evidence.lib.measure.inputs import prologue_inputs

    numerics = Numerics("per_op", Reduction(2, 32))  # compiled by no other test
    with _compilations() as made:
        seen = [made()]
        for T in (33, 35, 48):  # 48 is a multiple of 16: another kernel
            inputs = prologue_inputs(CONFIG.shape, T, device="cuda")
            fused.qkv_prologue(*inputs.args(), CONFIG.shape, numerics)
            seen.append(made())
    assert seen[0] < seen[1] == seen[2] < seen[3]
