"""Is a candidate right? Every property the op's contract asks for, each with a verdict and a symptom.

    python -m fusion_evidence.lib.measure.check_kernel PACKAGE.MODULE:FUNCTION DEVICE FILE

is the child that `check_kernel` starts: somebody else's code may hang, or take its process with it. The
oracle is `kernels.reference`. A candidate need not have its bits: Q and K may be `ULP_BOUND` ULP away, as
two ways of rounding are; what is copied must be equal. Which bits they are is a line of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.candidate import Kernel, check_results, load_kernel, takes
from fusion_evidence.kernels.numerics import Numerics, Reduction, Rounding
from fusion_evidence.kernels.shapes import PRESETS, AttentionShape, preset
from fusion_evidence.lib.measure.compare import Comparison, compare
from fusion_evidence.lib.measure.inputs import OUTPUTS, Inputs, poisoned, prologue_inputs
from fusion_evidence.lib.measure.peers import ULP_BOUND, nan_allocations
from fusion_evidence.lib.measure.symptoms import differing, symptom
from fusion_evidence.lib.report.evidence import Verdict

TOKENS = (1, 2, 3, 5, 17, 65)
MIDDLE = AttentionShape("heads of 128", 8, 2, 128, 32, (6, 5, 5), 1024, 1, 1)
"""No model of the family has heads of 128; a kernel that was tuned for 256 meets them here."""

Outputs = Mapping[str, Tensor]
_ORACLE: Kernel = reference.qkv_prologue


@dataclass(frozen=True)
class Finding:
    """One line of the table. symptom: what is wrong, or what the verdict rests on."""

    check: str
    verdict: Verdict
    symptom: str


class Wrong(Exception):
    """What a check found; its text is the symptom."""


def numerics_of(shape: AttentionShape, rounding: Rounding = "fp32_through") -> Numerics:
    """The declared numerics that the oracle has here."""
    return Numerics(rounding, Reduction(32, shape.head_dim // 32))


# --- one call


@dataclass
class Checks:
    """The checks of one kernel on one device; each method that `checks` lists is one.

    seconds: a T that would take longer is left out.
    right: its values were, where nothing else was asked of it.
    """

    path: str
    kernel: Kernel
    device: str
    seconds: float = 20.0
    right: bool = True

    def call(
        self, inputs: Inputs, shape: AttentionShape, numerics: Numerics | None = None
    ) -> Outputs:
        """All six outputs of one call, of which the results were NaN before. Wrong: it raised."""
        try:
            with nan_allocations():
                arguments = (*inputs.args(), shape, numerics or numerics_of(shape))
                results = self.kernel(*arguments)
                check_results(self.path, results, inputs.qkv, shape)
                if self.device != "cpu":
                    torch.cuda.synchronize()
        except Exception as error:  # somebody else's code
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise Wrong(f"T={inputs.qkv.shape[0]}, {shape.name}: raised {said}"[:400]) from error
        return dict(zip(OUTPUTS, (*results, inputs.key_cache, inputs.value_cache), strict=True))

    def held_against_the_oracle(self, inputs: Inputs, shape: AttentionShape) -> Comparison:
        """Bits of Q and K that differ. Wrong: something is out of its bound, and what it looks like."""
        numerics, theirs = numerics_of(shape), inputs.clone()
        actual = self.call(theirs, shape, numerics)
        ours = inputs.clone()
        results = _ORACLE(*ours.args(), shape, numerics)
        expected = dict(zip(OUTPUTS, (*results, ours.key_cache, ours.value_cache), strict=True))
        if faults := differing(actual, expected, shape, ULP_BOUND):
            said = symptom(actual, expected, inputs, shape, numerics, ULP_BOUND)
            raise Wrong(f"T={inputs.qkv.shape[0]}, {shape.name}: {said or faults}")
        for name in ("key_cache", "value_cache"):
            beyond, cache = getattr(theirs, name), getattr(ours, name)
            beyond.copy_(cache)
            if not compare(_storage(beyond), _storage(cache)).equal:
                raise Wrong(
                    f"T={inputs.qkv.shape[0]}: memory between the rows of {name} was written"
                )
        return compare(actual["q"], expected["q"]) + compare(actual["k"], expected["k"])

    def make(self, shape: AttentionShape, tokens: int, **options: Any) -> Inputs:
        fixed: dict[str, Any] = dict(device=self.device, seed=tokens, table=128, random_angles=True)
        return prologue_inputs(shape, tokens, **fixed | options)

    def over_tokens(
        self, shape: AttentionShape, tokens: Sequence[int] = TOKENS, **options: Any
    ) -> tuple[Verdict, str]:
        """`held_against_the_oracle` for each T, smallest first, as long as there is time."""
        done: list[int] = []
        seen, took = Comparison(), 0.0
        for T in tokens:
            if done and took * T / done[-1] > self.seconds:
                left = ", ".join(str(one) for one in tokens if one not in done)
                said = f"T = {', '.join(map(str, done))}; too slow here for T = {left}"
                return Verdict.PASS_WITH_LIMITATIONS, said
            began = time.monotonic()
            seen += self.held_against_the_oracle(self.make(shape, T, **options), shape)
            took = time.monotonic() - began
            done.append(T)
        return Verdict.PASS, f"T = {', '.join(map(str, done))}; {seen.elements:,} of Q and K"

    # --- the checks

    def shape(self, shape: AttentionShape) -> tuple[Verdict, str]:
        return self.over_tokens(shape)

    def no_tokens(self) -> tuple[Verdict, str]:
        inputs = self.make(preset("compact"), 0)
        self.held_against_the_oracle(inputs, preset("compact"))
        return Verdict.PASS, "empty results, caches as they were"

    def dtype(self, dtype: torch.dtype, table_dtype: torch.dtype) -> tuple[Verdict, str]:
        return self.over_tokens(preset("compact"), (1, 5), dtype=dtype, table_dtype=table_dtype)

    def text_positions(self) -> tuple[Verdict, str]:
        return self.over_tokens(preset("compact"), (1, 5), position_dims=1)

    def block_size(self) -> tuple[Verdict, str]:
        return self.over_tokens(preset("compact"), (1, 17), block_size=7)

    def row_stride(self) -> tuple[Verdict, str]:
        def wide(inputs: Inputs) -> Inputs:
            tokens, width = inputs.qkv.shape
            qkv = poisoned(tokens, width + 64, dtype=inputs.qkv.dtype, device=self.device)[
                :, 32:-32
            ]
            return replace(inputs, qkv=qkv.copy_(inputs.qkv))

        return self.laid_out(wide, "rows of qkv lie width + 64 apart")

    def position_strides(self) -> tuple[Verdict, str]:
        def sliced(inputs: Inputs) -> Inputs:
            tokens = inputs.qkv.shape[0]
            positions = inputs.positions.new_zeros(3, tokens + 9)[:, 4 : 4 + tokens]
            slots = inputs.slot_mapping.new_full((tokens + 9,), -1)[4 : 4 + tokens]
            slots.copy_(inputs.slot_mapping)
            return replace(inputs, positions=positions.copy_(inputs.positions), slot_mapping=slots)

        return self.laid_out(sliced, "positions and slots are slices of larger buffers")

    def cache_holes(self) -> tuple[Verdict, str]:
        def holes(inputs: Inputs) -> Inputs:
            blocks, block, heads, dim = inputs.key_cache.shape
            both = poisoned(
                blocks, 2, block, heads, dim + 8, dtype=inputs.qkv.dtype, device=self.device
            )
            return replace(
                inputs, key_cache=both[:, 0, ..., :dim], value_cache=both[:, 1, ..., :dim]
            )

        return self.laid_out(holes, "K and V blocks in turn in one allocation, rows with holes")

    def laid_out(self, lay: Callable[[Inputs], Inputs], how: str) -> tuple[Verdict, str]:
        for tokens in (1, 5):
            inputs = lay(self.make(preset("compact"), tokens))
            try:
                self.held_against_the_oracle(inputs, preset("compact"))
            except Wrong as wrong:
                raise Wrong(f"{how}; {wrong}") from wrong
        return Verdict.PASS, f"{how}; T = 1, 5"

    def padding(self) -> tuple[Verdict, str]:
        """Caches inside larger memory: a slot -1 may be the last row, or the one before the first."""
        shape = preset("compact")
        for tokens in (1, 5, 17):
            inputs = self.make(shape, tokens, padding=(tokens + 1) // 2)
            dtype, (blocks, block, *row) = inputs.qkv.dtype, inputs.key_cache.shape
            around = [
                poisoned(blocks + 2, block, *row, dtype=dtype, device=self.device) for _ in "kv"
            ]
            views = replace(inputs, key_cache=around[0][1:-1], value_cache=around[1][1:-1])
            self.call(views, shape)
            owned = {slot for slot in inputs.slot_mapping.tolist() if slot >= 0}
            for name, memory in zip(("key", "value"), around, strict=True):
                changed = (memory.view(torch.int16) != _poison_of(memory)).any(-1).any(-1)
                rows = [int(at) - block for at in changed.flatten().nonzero()]
                if strays := [row for row in rows if row not in owned]:
                    raise Wrong(
                        f"T={tokens}: a token with slot -1 wrote: {name}_cache row {strays[0]} "
                        f"({_which(strays[0], blocks * block)}) changed, which no token owns"
                    )
            if self.right:
                self.held_against_the_oracle(inputs, shape)
        return Verdict.PASS, "half of the tokens at slot -1: no row written but those of the others"

    def batch(self) -> tuple[Verdict, str]:
        shape = preset("compact")
        inputs = self.make(shape, 17)
        whole = self.call(inputs.clone(), shape)
        for tokens in (1, 2, 3, 5):
            few = replace(
                inputs,
                qkv=inputs.qkv[:tokens],
                positions=inputs.positions[:, :tokens],
                slot_mapping=inputs.slot_mapping[:tokens],
            )
            part = self.call(few.clone(), shape)
            for name in OUTPUTS[:4]:
                found = compare(part[name], whole[name][:tokens])
                if not found.equal:
                    raise Wrong(
                        f"{name}: the first {tokens} tokens have other bits alone than among 17: {found}"
                    )
        return Verdict.PASS, "a token's bits are the same at T = 1, 2, 3, 5 and 17"

    def written(self) -> tuple[Verdict, str]:
        shape = preset("compact")
        for tokens in (1, 5):
            outputs = self.call(self.make(shape, tokens), shape)
            for name in OUTPUTS[:4]:
                if count := int(outputs[name].isnan().sum()):
                    raise Wrong(
                        f"T={tokens}: {name} holds {count} NaNs: never written, it has what memory held"
                    )
        return Verdict.PASS, "memory was full of NaN before, and no result has one"

    def inputs_kept(self) -> tuple[Verdict, str]:
        shape = preset("compact")
        for tokens in (1, 5):
            inputs = self.make(shape, tokens)
            before = inputs.clone()
            self.call(inputs, shape)
            for name in ("qkv", "q_weight", "k_weight", "cos_sin", "positions", "slot_mapping"):
                found = compare(getattr(inputs, name), getattr(before, name))
                if not found.equal:
                    raise Wrong(f"T={tokens}: its input {name} was changed: {found}")
        return Verdict.PASS, "the six tensors that are read are as they were"

    def marker(self) -> tuple[Verdict, str]:
        if not takes(self.kernel, "marker"):
            return Verdict.NOT_RUN, "it takes no marker: the operator counts after it"
        marker = torch.zeros(1, dtype=torch.int64, device=self.device)
        counting = replace(self, kernel=partial(self.kernel, marker=marker))
        for _ in range(3):
            counting.call(self.make(preset("compact"), 1), preset("compact"))
        if int(marker) != 3:
            raise Wrong(f"three calls, and its marker counted {int(marker)}")
        return Verdict.PASS, "one for each call"

    def replay(self) -> tuple[Verdict, str]:
        if self.device == "cpu":
            return Verdict.NOT_RUN, "no CUDA or ROCm device: nothing to capture"
        shape = preset("compact")
        for tokens in (1, 5):
            inputs, other = self.make(shape, tokens), self.make(shape, tokens, seed=99)
            outputs, graph = self.captured(inputs, shape)
            for captured, new in zip(inputs.args(), other.args(), strict=True):
                captured.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            expected = self.call(other, shape)
            for name in OUTPUTS:
                found = compare(outputs[name], expected[name])
                if not found.equal:
                    raise Wrong(
                        f"T={tokens}: replayed on new inputs, {name} is not theirs: {found}"
                    )
        return Verdict.PASS, "captured once, replayed on other inputs: the bits of a call on these"

    def captured(
        self, inputs: Inputs, shape: AttentionShape
    ) -> tuple[Outputs, torch.cuda.CUDAGraph]:
        arguments = (*inputs.args(), shape, numerics_of(shape))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                self.kernel(*arguments)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=stream):
                    results = self.kernel(*arguments)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise Wrong(f"a CUDA graph cannot hold it: {said}"[:400]) from error
        return dict(
            zip(OUTPUTS, (*results, inputs.key_cache, inputs.value_cache), strict=True)
        ), graph

    def bits(self) -> tuple[Verdict, str]:
        """Never FAIL: bits of its own are no fault, but 06 asks for those of the compiled model."""
        shape = preset("compact")
        inputs = self.make(shape, 17)
        roundings: tuple[Rounding, ...] = get_args(Rounding)
        asked: dict[Rounding, Comparison] = {}
        own: dict[Rounding, Comparison] = {}
        for rounding in roundings:
            numerics, ours = numerics_of(shape, rounding), inputs.clone()
            expected = _ORACLE(*ours.args(), shape, numerics)
            for said, given in ((asked, numerics), (own, numerics_of(shape))):
                actual = self.call(inputs.clone(), shape, given)
                pairs = zip(("q", "k"), expected, strict=False)
                found = sum((compare(actual[name], one) for name, one in pairs), Comparison())
                said[rounding] = found
        if all(found.equal for found in asked.values()):
            return Verdict.PASS, f"the declared bits, for each rounding: {', '.join(asked)}"
        nearest = min(own, key=lambda rounding: own[rounding].mismatches)
        return Verdict.PASS_WITH_LIMITATIONS, (
            f"bits of its own, whatever numerics it is asked for: nearest to {nearest}, "
            f"{own[nearest].mismatches:,} of {own[nearest].elements:,} elements of Q and K differ"
        )

    def all(self) -> dict[str, Callable[[], tuple[Verdict, str]]]:
        """Every check by name, in the order to run them."""
        shapes = [MIDDLE, preset("qwen3.5-0.8b")]
        if self.device != "cpu":
            shapes = [MIDDLE, *(one for one in PRESETS.values() if one.name != "compact")]
        half, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
        further: dict[str, Callable[[], tuple[Verdict, str]]] = {
            **{f"values, {_sizes(shape)}": partial(self.shape, shape) for shape in shapes},
            "T = 0": self.no_tokens,
            "fp16": partial(self.dtype, half, half),
            "fp32 table": partial(self.dtype, bf16, fp32),
            "positions [T]": self.text_positions,
            "blocks of 7": self.block_size,
            "row stride": self.row_stride,
            "slices": self.position_strides,
            "cache with holes": self.cache_holes,
            "bits": self.bits,
        }
        return {
            "inputs kept": self.inputs_kept,
            "all written": self.written,
            "values": self.values,
            "padding": self.padding,
            "batch invariance": self.batch,
            "marker": self.marker,
            "replay": self.replay,
            **{name: partial(self.if_right, check) for name, check in further.items()},
        }

    def values(self) -> tuple[Verdict, str]:
        self.right = False
        found = self.shape(preset("compact"))
        self.right = True
        return found

    def if_right(self, check: Callable[[], tuple[Verdict, str]]) -> tuple[Verdict, str]:
        if not self.right:
            return Verdict.NOT_RUN, "its values are wrong already"
        return check()


def _sizes(shape: AttentionShape) -> str:
    return f"{shape.q_heads}/{shape.kv_heads} heads of {shape.head_dim}"


def _which(row: int, slots: int) -> str:
    if row < 0:
        return f"{-row} before the first: memory of somebody else"
    if row >= slots:
        return "beyond the last: memory of somebody else"
    return "the last one" if row == slots - 1 else "the first one" if row == 0 else "inside"


def _storage(tensor: Tensor) -> Tensor:
    """All of the memory that a bf16 or fp16 tensor is a view of, flat."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _poison_of(tensor: Tensor) -> Tensor:
    return poisoned(1, dtype=tensor.dtype, device=tensor.device).view(torch.int16)


# --- in a process of its own


def check_kernel(
    path: str,
    *,
    device: str,
    seconds: float = 120.0,
    report: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Check the candidate ``path`` in a child process.

    Args:
        device: ``cpu`` or ``cuda``.
        seconds: that one check may take; then it hangs, and is killed.
        report: called with each finding as it comes.

    ValueError: it cannot be loaded, and why.
    """
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="check-kernel-") as folder:
        for finding in _findings(path, device, seconds, Path(folder)):
            found.append(finding)
            report(finding)
    return found


def _findings(path: str, device: str, seconds: float, folder: Path) -> Iterator[Finding]:
    lines, log = folder / "findings.jsonl", folder / "log.txt"
    lines.touch()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "fusion_evidence.lib.measure.check_kernel",
                path,
                device,
                str(lines),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    names: list[str] = []
    try:
        with lines.open(encoding="utf-8") as source:
            yield from _read(source, child, names, seconds, log)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _read(
    source: Any, child: subprocess.Popen[bytes], names: list[str], seconds: float, log: Path
) -> Iterator[Finding]:
    """Findings as the child writes them; then what it did not get to, and why."""
    running, since, text = "loading", time.monotonic(), ""
    while True:
        ended = child.poll() is not None
        text += source.read()
        *complete, text = text.split("\n")
        for line in complete:
            event, since = json.loads(line), time.monotonic()
            if "error" in event:
                raise ValueError(event["error"])
            names += event.get("checks", [])
            if "begins" in event:
                running = event["begins"]
            if "check" in event:
                names.remove(event["check"])
                yield Finding(event["check"], Verdict(event["verdict"]), event["symptom"])
        if ended and not names and child.returncode == 0:
            return
        if ended:
            why = f"took its process with it: {_death(child.returncode, log)}"
            break
        if time.monotonic() - since > seconds:
            why = f"hangs: nothing came back in {seconds:g} s"
            break
        time.sleep(0.05)
    yield Finding(running, Verdict.FAIL, why)
    for name in names:
        if name != running:
            yield Finding(name, Verdict.NOT_RUN, f"after {running}, which {why.split(':')[0]}")


def _death(status: int, log: Path) -> str:
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"{how}; {said[-1][:200]}" if said else how


def main(arguments: Sequence[str]) -> int:
    """The child: PATH DEVICE FILE."""
    path, device, file = arguments
    with open(file, "a", encoding="utf-8", buffering=1) as lines:

        def say(**event: Any) -> None:
            lines.write(json.dumps(event) + "\n")

        try:
            kernel = load_kernel(path)
        except ValueError as error:
            say(error=str(error))
            return 0
        checks = Checks(path, kernel, device).all()
        say(checks=list(checks))
        for name, check in checks.items():
            say(begins=name)
            try:
                verdict, symptom = check()
            except Wrong as wrong:
                verdict, symptom = Verdict.FAIL, str(wrong)
            say(**asdict(Finding(name, verdict, symptom)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
