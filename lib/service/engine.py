"""A small service around the compact model: paged cache, prefill and decode, CUDA graphs, clocks.

It does what decides times and bits in a real one and no more: requests queue; each is prefilled in one
call and decoded token by token, greedily; decode replays a CUDA graph on static buffers; every token is
waited for on the host, as a service that streams must. Prefill and decode are two callables, chosen
here, outside compiled code.

Every call has the same length of block table and decode always the same buffers, so nothing that
attention or any kernel sees depends on which other requests there are.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fusion_evidence.lib.measure.timing import Timing, time_graphs, time_host
from fusion_evidence.lib.service.metrics import Finish, Reply
from fusion_evidence.lib.service.model import CompactModel, Step, step
from fusion_evidence.lib.service.prompts import Request, decode_position

Forward = Callable[..., Tensor]
"""``(ids, positions, slot_mapping, block_table, seq_len, caches) -> hidden [T, hidden]``: a
``CompactModel`` or a compiled form of one; the first five are those of `model.Step`."""

OnStep = Callable[[str, int, int], None]
OnLogits = Callable[[str, int, Tensor], None]


class Decoder(Protocol):
    """Turns tokens into text, as ``tokenizers.Tokenizer`` does."""

    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True)
class Settings:
    """How the service runs.

    max_tokens: room of one request in the cache, rounded up to whole blocks; the block table always
        spans it. block_size: tokens in a block. in_flight: requests served at a time, their decode
        steps in turn; the others wait. cuda_graph: decode replays a CUDA (or HIP) graph.
        stop_token: ends a reply when it is generated.

    ValueError: a number that is not positive.
    """

    max_tokens: int = 2048
    block_size: int = 16
    in_flight: int = 1
    cuda_graph: bool = False
    stop_token: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "block_size", "in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def blocks(self) -> int:
        """Blocks of one request."""
        return -(-self.max_tokens // self.block_size)


class _Clock:
    """Seconds since it was made, without those while it was stopped."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - before


@dataclass
class _Run:
    """A request that is being served. fed: what it is fed in place of its own tokens, if forced."""

    request: Request
    lane: int
    wanted: int
    fed: Sequence[int] | None
    first_position: int = 0
    queue_s: float = 0.0
    first_call_s: float = 0.0
    prefill_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What is raised in here ends this request alone."""
        try:
            yield
        except Exception as error:
            self.finish, self.error = "error", f"{type(error).__name__}: {error}"


class Engine:
    """One service.

    Args:
        model: gives the caches, the logits and the sizes, and lies on the device to use.
        prefill, decode: the model, or compiled forms of models with the same weights. Prefill is
            called with any T, its T dimensions marked dynamic; decode with T = 1 and always the same
            tensors.
        tokenizer: without one, replies have no text.

    calls: forward calls that ran, ``prefill`` and ``decode``: replays, warm-up and repeated calls
        included, captures and timing not. What markers of layers are compared with.

    ValueError: CUDA graphs asked for on another device.
    """

    def __init__(
        self,
        model: CompactModel,
        prefill: Forward,
        decode: Forward,
        settings: Settings,
        tokenizer: Decoder | None = None,
    ) -> None:
        self.model, self.prefill, self.decode = model, prefill, decode
        self.settings, self.tokenizer = settings, tokenizer
        self.device = model.lm_head.weight.device
        on_device = self.device.type == "cuda"
        if settings.cuda_graph and not on_device:
            raise ValueError(f"cuda_graph: there are none on {self.device}, where the model is")
        self.calls: Counter[str] = Counter()
        # A lane of consecutive blocks for each request in flight, and one that warm-up writes into.
        blocks, lanes = settings.blocks, settings.in_flight + 1
        self._scratch = settings.in_flight
        self._rows = blocks * settings.block_size
        self.caches = model.new_caches(lanes * blocks, settings.block_size)
        # A decode step's numbers: id, three positions, slot, length, block table. Written on the host,
        # a row for each lane, and sent in one copy.
        self._host = torch.zeros(lanes, 6 + blocks, dtype=torch.int64, pin_memory=on_device)
        self._host[:, 6:] = torch.arange(lanes * blocks).view(lanes, blocks)
        self._numbers = self._host.numpy()
        self._sent = torch.zeros(6 + blocks, dtype=torch.int64, device=self.device)
        ids, positions, slot, length, table = self._sent.split((1, 3, 1, 1, blocks))
        self._parts = [ids, positions.view(3, 1), slot, table, length]
        # What decode is called with: no views, since a compiler would see their offsets.
        self._inputs = Step(*(torch.zeros_like(part) for part in self._parts))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, Tensor] | None = None
        self._decode_ready = False

    @torch.no_grad()
    def warm_up(self, first_traced: int | None) -> dict[str, float]:
        """Run, and so compile, everything; then capture decode.

        first_traced: T of the prefill call, the first that a compiler sees. It writes into blocks of
            its own, round and round if it is longer than a request's room. None leaves prefill alone:
            the first request traces it and pays for it.

        Returns seconds: ``prefill_first``, ``prefill`` (the same again), ``decode_first``, ``decode``
        (again) and ``capture``, as far as they apply.

        ValueError: more tokens than the model has positions. RuntimeError: decode cannot be captured.
        """
        seconds: dict[str, float] = {}

        def timed(name: str, call: Callable[[], object]) -> None:
            start = time.perf_counter()
            call()
            seconds[name] = time.perf_counter() - start

        if first_traced is not None:
            dummy = self._dummy(first_traced)
            for name in ("prefill_first", "prefill"):
                timed(name, lambda: self._run_prefill(dummy, self._scratch))
        self._place(self._scratch, token=0, position=0, index=0)
        for name in ("decode_first", "decode"):
            timed(name, self._run_decode)
        if self.settings.cuda_graph and self._graph is None:
            timed("capture", self._capture)
        self._decode_ready = True
        return seconds

    @torch.no_grad()
    def serve(
        self,
        requests: Sequence[Request],
        *,
        forced: Mapping[str, Sequence[int]] | None = None,
        on_step: OnStep | None = None,
        on_logits: OnLogits | None = None,
    ) -> list[Reply]:
        """Serve all requests, submitted together at time 0; replies in the order of the requests.

        Step 0 of a request is its prefill and gives token 0; step s is the decode call that is fed token
        s - 1. A prefill call in which something was compiled is repeated at once, with the clock
        stopped, to tell compiling from prefill; it writes the same rows again. Decode was compiled by
        warm-up; should it be compiled again, that is in the token's time.

        Args:
            forced: by request id, the tokens to feed whatever the logits say; as many are generated.
                The reply's ``tokens`` are what the logits said, and a stop token does not end it.
            on_step: called with (id, step, T) before every forward call, also before a repeated one.
            on_logits: called with (id, step, logits [vocab]), a copy, after every token. Time spent in
                either is the next token's. What they raise is raised.

        A request that fails, or cannot be served, is a reply with finish_reason ``error`` and what it had
        until then; the others go on.
        """
        if not self._decode_ready:
            self.warm_up(None)
        forced = forced or {}
        waiting = deque(
            _Run(one, -1, len(forced.get(one.id, range(one.max_new_tokens))), forced.get(one.id))
            for one in requests
        )
        runs, active = list(waiting), deque[_Run]()
        free = list(range(self.settings.in_flight))
        with _no_collection(), _compilations() as compilations:
            clock = _Clock()
            while waiting or active:
                if waiting and free:  # a waiting request goes before further tokens of the others
                    run = waiting.popleft()
                    run.lane, run.queue_s = free.pop(), clock.now()
                    with run.failing():
                        self._begin(run)
                else:
                    run = active.popleft()
                if run.finish is None:
                    self._advance(run, clock, compilations, on_step, on_logits)
                if run.finish is None:
                    active.append(run)
                else:
                    free.append(run.lane)
        return [self._reply(run) for run in runs]

    def _begin(self, run: _Run) -> None:
        self._check(run.request, run.wanted, run.fed or ())
        run.first_position = decode_position(run.request, 0)
        if run.wanted == 0:
            run.finish = "length"

    def _advance(
        self,
        run: _Run,
        clock: _Clock,
        compilations: Callable[[], int],
        on_step: OnStep | None,
        on_logits: OnLogits | None,
    ) -> None:
        """One forward call and its token."""
        request, at, prompt = run.request, len(run.tokens), len(run.request.ids)

        def forward() -> tuple[int, Tensor] | None:
            if on_step is not None:
                on_step(request.id, at, 1 if at else prompt)
            with run.failing():
                if at == 0:
                    return self._run_prefill(request, run.lane)
                token = run.tokens[at - 1] if run.fed is None else run.fed[at - 1]
                position, index = run.first_position + at - 1, prompt + at - 1
                self._place(run.lane, token=token, position=position, index=index)
                return self._run_decode()
            return None

        before = compilations()
        result = forward()
        arrived = clock.now()
        if at == 0:
            run.prefill_s = arrived - run.queue_s
            if result is not None and compilations() != before:
                with clock.stopped():
                    start = time.perf_counter()
                    result = forward()
                    again = time.perf_counter() - start
                run.first_call_s = max(0.0, run.prefill_s - again)
                run.prefill_s -= run.first_call_s
        if result is None:
            return
        token, logits = result
        run.tokens.append(token)
        run.times.append(arrived)
        if run.fed is None and token == self.settings.stop_token:
            run.finish = "stop"
        elif len(run.tokens) == run.wanted:
            run.finish = "length"
        if on_logits is not None:
            on_logits(request.id, at, logits.clone())

    def _reply(self, run: _Run) -> Reply:
        finish = run.finish or "error"
        text = run.tokens[:-1] if finish == "stop" else run.tokens
        return Reply(
            id=run.request.id,
            prompt_tokens=len(run.request.ids),
            tokens=run.tokens,
            text=self.tokenizer.decode(text) if self.tokenizer is not None else "",
            finish_reason=finish,
            error=run.error,
            queue_s=run.queue_s,
            first_call_s=run.first_call_s,
            prefill_s=run.prefill_s,
            token_times_s=run.times,
        )

    def _check(self, request: Request, wanted: int, fed: Sequence[int] = ()) -> None:
        """Whatever a device would answer with a fault that ends the process.

        ValueError: an empty prompt, a token outside the vocabulary, or no room for ``wanted`` tokens.
        """
        prompt, config = len(request.ids), self.model.config
        if prompt == 0:
            raise ValueError("the prompt is empty")
        vocabulary = config.vocab_size
        if not all(0 <= token < vocabulary for token in (*request.ids, *fed)):
            raise ValueError(f"a token is outside the vocabulary of {vocabulary}")
        rows = prompt + max(0, wanted - 1)  # the last token is not fed
        if rows > self._rows:
            raise ValueError(
                f"{prompt} prompt tokens and {wanted} new ones need room for {rows}; a request has "
                f"{self._rows}"
            )
        last = decode_position(request, max(0, wanted - 1)) - 1
        if last >= config.max_positions:
            raise ValueError(f"position {last} is beyond the model's {config.max_positions}")

    def _dummy(self, tokens: int) -> Request:
        limit = self.model.config.max_positions
        if not 1 <= tokens <= limit:
            raise ValueError(f"expected 1 to {limit} tokens, got {tokens}")
        ids = tuple(i % self.model.config.vocab_size for i in range(tokens))
        return Request(id="", text="", ids=ids, positions=None, max_new_tokens=0)

    def _run_prefill(self, request: Request, lane: int) -> tuple[int, Tensor]:
        """First token and its logits [vocab]. Done when it returns."""
        inputs = self._prefill_step(request, lane)
        logits = self.model.logits(self.prefill(*inputs, self.caches)[-1])
        self.calls["prefill"] += 1
        return int(logits.argmax()), logits

    def _prefill_step(self, request: Request, lane: int) -> Step:
        tokens, blocks = len(request.ids), self.settings.blocks
        table = range(lane * blocks, (lane + 1) * blocks)
        # Of warm-up alone may there be more than fit: it goes round its blocks.
        rounds = -(-tokens // self._rows)
        positions = request.positions
        if positions is not None:
            # Always of the same strides, and another object: marks below stay on a tensor.
            positions = positions.clone(memory_format=torch.contiguous_format)
        made = step(
            request.ids,
            0,
            [*table] * rounds,
            self.settings.block_size,
            device=str(self.device),
            positions=positions,
        )
        if rounds > 1:
            made = replace(made, block_table=made.block_table[:blocks].clone())
        if tokens > 1:  # a dimension of 1 cannot be marked
            for tensor, dim in ((made.ids, 0), (made.positions, 1), (made.slot_mapping, 0)):
                torch._dynamo.mark_dynamic(tensor, dim)
        return made

    def _place(self, lane: int, *, token: int, position: int, index: int) -> None:
        """Send a decode step's numbers: ``token`` is the request's ``index``-th, from 0."""
        slot = lane * self._rows + index
        self._numbers[lane, :6] = (token, position, position, position, slot, index + 1)
        self._sent.copy_(self._host[lane], non_blocking=True)

    def _decode_step(self) -> tuple[Tensor, Tensor]:
        """(token [], logits [vocab]) of the step in `_sent`. What is captured: nothing waits in here."""
        torch._foreach_copy_(list(self._inputs), self._parts)
        logits = self.model.logits(self.decode(*self._inputs, self.caches)[-1])
        return logits.argmax(), logits

    def _run_decode(self) -> tuple[int, Tensor]:
        """Token and logits [vocab], overwritten by the next replay. Done when it returns."""
        if self._graph is not None:
            self._graph.replay()
            assert self._outputs is not None
            token, logits = self._outputs
        else:
            token, logits = self._decode_step()
        self.calls["decode"] += 1
        return int(token), logits

    def _capture(self) -> None:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # the libraries' workspaces on this stream
                self._decode_step()
                self.calls["decode"] += 1
        torch.cuda.current_stream().wait_stream(stream)
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = self._decode_step()
        except RuntimeError as error:
            raise RuntimeError(f"decode cannot be captured in a graph: {error}") from error
        self._graph, self._outputs = graph, outputs


@torch.no_grad()
def time_prefill(
    engines: Mapping[str, Engine], tokens: int, *, samples: int = 31
) -> dict[str, Timing]:
    """Time of one prefill call of ``tokens`` dummy tokens on an idle server, engines interleaved.

    From ids on the host to the first token on the host, as in `Engine.serve`, by the host's clock. Two
    calls before the first sample pay for compilation. Attention goes over the whole block table whatever
    T is; tokens beyond a request's room go round its blocks, so give it room for the largest T.

    ValueError: more tokens than a model has positions, no engines, samples < 1.
    """

    def calls(engine: Engine) -> list[Callable[[], object]]:
        dummy = engine._dummy(tokens)
        return [lambda: engine._run_prefill(dummy, engine._scratch)]

    arms = {name: calls(engine) for name, engine in engines.items()}
    return time_host(arms, samples=samples, sample_us=0.0)


@torch.no_grad()
def time_decode(
    engines: Mapping[str, Engine], request: Request, *, steps: int = 16, samples: int = 31
) -> dict[str, Timing]:
    """Time of one decode call, engines interleaved in one process.

    Each engine prefills ``request``; then the call that is fed its first token runs again and again (it
    writes the same row). Where the models are on a device, from CUDA-graph replays between two events,
    ``steps`` a sample, so that nothing waits for the host; elsewhere ``steps`` plain calls a sample, by
    the host's clock. One engine under two names is an A/A pair.

    ValueError: no engines, engines on several kinds of device, samples < 1, or a request that an engine
    cannot serve.
    """
    kinds = {engine.device.type for engine in engines.values()}
    if len(kinds) > 1:
        raise ValueError(f"engines on several kinds of device: {sorted(kinds)}")
    for engine in engines.values():
        engine._check(request, 2)
        token, _ = engine._run_prefill(request, engine._scratch)
        position, index = decode_position(request, 0), len(request.ids)
        engine._place(engine._scratch, token=token, position=position, index=index)
        engine._run_decode()
    if kinds == {"cuda"}:
        arms = {name: [engine._decode_step] for name, engine in engines.items()}
        return time_graphs(arms, samples=samples, replays=steps, graph_us=0.0)
    arms = {name: [engine._decode_step] * steps for name, engine in engines.items()}
    timings = time_host(arms, samples=samples, sample_us=0.0)
    return {name: replace(timing, sets=1) for name, timing in timings.items()}


@contextmanager
def _no_collection() -> Iterator[None]:
    """What exists by now is not gone through by Python's collector, as in services: with a model and a
    compiler loaded that takes as long as many tokens, at a moment that has nothing to do with an arm."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _compilations() -> Iterator[Callable[[], int]]:
    """A count that moves whenever Dynamo makes a graph or Triton compiles a kernel by itself."""
    from torch._dynamo.utils import counters  # imports Triton: not before the kernels have

    kernels = 0
    hooks: list[tuple[Any, str]] = []
    try:
        from triton import knobs  # since 3.4

        hooks = [(knobs.runtime, "jit_cache_hook")]
    except ImportError:
        try:
            from triton.runtime.jit import JITFunction

            hooks = [(JITFunction, "cache_hook")]
        except ImportError:
            pass  # no Triton, no kernels
    previous = [getattr(holder, name) for holder, name in hooks]

    def compiling(*arguments: Any, **named: Any) -> bool:
        nonlocal kernels
        kernels += 1
        return any(bool(hook(*arguments, **named)) for hook in previous if hook is not None)

    for holder, name in hooks:
        setattr(holder, name, compiling)
    try:
        yield lambda: counters["stats"]["unique_graphs"] + kernels
    finally:
        for (holder, name), hook in zip(hooks, previous, strict=True):
            setattr(holder, name, hook)
