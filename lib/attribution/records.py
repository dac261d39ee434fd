"""What the attention op was given, step by step and layer by layer, and how two runs of it differ.

Attention is opaque to the compiler already, so looking at its arguments changes no graph: a recorded run
computes what an unrecorded one does. Fed the same tokens (teacher forcing), two runs that differ anywhere
can be followed back to the first record that does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fusion_evidence.kernels import op
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.measure.compare import compare, pair_ulps
from fusion_evidence.lib.service.model import observe_attention

TENSORS = ("q", "k", "v")
"""Of a record, in the order in which the prologue makes them."""


class Tape:
    """Records of every forward call made inside ``with tape``, under the place that `at` named.

    A record is one layer of one call: ``q [T, Hq, D]`` and the T newest rows of the request's K and V
    ``[T, Hk, D]``, read back from the paged cache, so that a row written to the wrong place shows. It
    leaves the device in one copy. A call that is repeated at the same place replaces its records; calls
    before the first `at` (a warm-up) and those that a CUDA graph captures are not recorded.

    Args:
        shape: of the model's attention; stored with the records.
        hashes: keep the SHA-256 of each tensor's bytes in place of the tensor: enough to count what
            differs, 32 bytes however large.
        inputs: keep what went into each prologue too, ``qkv [T, W]`` and ``positions``, and once per
            layer the norm weights and the rotary table. Seen where the prologue is the opaque operator;
            one inside a graph has no such moment.

    missing: request -> its last step, if nothing was recorded of that: its call failed, or did not come.
    """

    def __init__(
        self, shape: AttentionShape, *, hashes: bool = False, inputs: bool = False
    ) -> None:
        if hashes and inputs:
            raise ValueError("inputs: expected whole tensors, not hashes, to be of use")
        self.shape, self.hashes, self.inputs = shape, hashes, inputs
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._device = "cpu"
        self._place: tuple[str, int, int | None] | None = None
        self.missing: dict[str, int] = {}
        self._arguments: tuple[Tensor, ...] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Tape:
        self._stack.enter_context(observe_attention(self._attention))
        if self.inputs:
            self._stack.enter_context(_observe_prologue(self._prologue))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._place = None

    def at(self, request: str, step: int, tokens: int | None = None) -> None:
        """The next forward call is ``step`` of ``request``: 0 the prefill, s the decode of token s - 1.

        RuntimeError: nothing was recorded of the request's step before, as when a captured graph replays.
        """
        if self.missing.get(request, step) != step:
            raise RuntimeError(
                f"nothing was recorded of {request} at step {self.missing[request]}: the attention op's "
                "Python did not run. It does not when a CUDA graph replays; record with graphs off"
            )
        self._place = (request, step, tokens)
        self.missing[request] = step

    def save(self, path: Path) -> None:
        """Write a safetensors file: keys ``request/step/layer/{q,k,v}`` and, with ``inputs``, also
        ``.../{qkv,positions}``, ``layer/{q_weight,k_weight}`` and ``cos_sin``; hashes, shape and
        kind of device are metadata."""
        metadata = {"shape": json.dumps(asdict(self.shape)), "device": self._device}
        if self.hashes:
            metadata["sha256"] = json.dumps(self._digests)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self._tensors, path, metadata)

    def __len__(self) -> int:
        """Records so far."""
        return sum(key.endswith("/q") for key in (*self._tensors, *self._digests))

    def _prologue(self, *arguments: Tensor) -> None:
        self._arguments = arguments

    @torch.no_grad()
    def _attention(
        self,
        layer: int,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        seq_len: Tensor,
    ) -> None:
        arguments, self._arguments = self._arguments, None
        if self._place is None or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        request, step, tokens = self._place
        if tokens not in (None, q.shape[0]):
            raise RuntimeError(
                f"{request}, step {step}: expected {tokens} tokens, got {q.shape[0]}"
            )
        self._device = q.device.type
        self.missing.pop(request, None)
        at = seq_len - q.shape[0] + torch.arange(q.shape[0], device=q.device)
        size = key_cache.shape[1]
        rows = (block_table[at // size], at % size)
        record = {"q": q, "k": key_cache[rows], "v": value_cache[rows]}
        if arguments:
            record["qkv"] = arguments[0]
        place = f"{request}/{step}/{layer}/"
        for name, tensor in _to_host(record).items():
            if self.hashes:
                digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
                self._digests[place + name] = f"{digest} {tensor.numel()}"
            else:
                self._tensors[place + name] = tensor
        if arguments:
            _, q_weight, k_weight, cos_sin, positions, *_ = arguments
            self._tensors[place + "positions"] = positions.to("cpu", copy=True)
            constants = {f"{layer}/q_weight": q_weight, f"{layer}/k_weight": k_weight}
            for name, tensor in (constants | {"cos_sin": cos_sin}).items():
                if name not in self._tensors:
                    self._tensors[name] = tensor.detach().to("cpu", copy=True)


@contextmanager
def _observe_prologue(observer: Callable[..., None]) -> Iterator[None]:
    """Call ``observer`` with the tensors of every opaque prologue that runs.

    Its body checks its arguments before anything else, through a name that no graph holds.
    """
    check = op.check_arguments

    def checked(*arguments: Any) -> None:
        check(*arguments)
        observer(*arguments[:8])

    with mock.patch.object(op, "check_arguments", checked):
        yield


def _to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, each with memory of its own, of tensors of one dtype; one transfer for all."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {
        name: part.clone().view(tensor.shape)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


class LogitTape:
    """Logits by request and step; the engine's ``on_logits`` is `at`."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def at(self, request: str, step: int, logits: Tensor) -> None:
        """Keep a CPU copy of ``logits [vocab]`` (or ``[1, vocab]``)."""
        self._tensors[f"{request}/{step}"] = logits.detach().reshape(-1).to("cpu", copy=True)

    def save(self, path: Path) -> None:
        """Write a safetensors file with keys ``request/step``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self._tensors, path)


@dataclass(frozen=True)
class Place:
    """Of one tensor of one record."""

    request: str
    step: int
    layer: int
    tensor: str

    @property
    def key(self) -> str:
        return f"{self.request}/{self.step}/{self.layer}/{self.tensor}"


class RecordFile:
    """A file that `Tape.save` wrote, read a tensor at a time.

    shape: the model's. device: kind of device it ran on, ``cpu`` or ``cuda``.
    digests: key -> hash and element count where the tape kept hashes.

    Raises:
        ValueError: the file is not one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = safe_open(path, framework="pt")
        metadata = self._file.metadata() or {}
        if "shape" not in metadata:
            raise ValueError(f"{path} holds no records: its metadata names no shape")
        raw = json.loads(metadata["shape"])
        self.shape = AttentionShape(**raw | {"mrope_section": tuple(raw["mrope_section"])})
        self.device = metadata["device"]
        self.digests: dict[str, str] = json.loads(metadata.get("sha256", "{}"))

    def places(self, *tensors: str) -> list[Place]:
        """Where there are ``tensors`` (``q``, ``k``, ``v``, ``qkv``, ...), by request, step and layer."""
        found = []
        for key in (*self._file.keys(), *self.digests):
            *where, name = key.rsplit("/", 3)
            if len(where) == 3 and name in tensors:
                found.append(Place(where[0], int(where[1]), int(where[2]), name))
        return sorted(found, key=lambda p: (p.request, p.step, p.layer, tensors.index(p.tensor)))

    def calls(self) -> set[tuple[str, int]]:
        """Request and step of every forward call that was recorded."""
        return {(place.request, place.step) for place in self.places("q")}

    def get(self, key: str) -> Tensor:
        """The tensor, on the CPU."""
        return self._file.get_tensor(key)


Within = Mapping[str, int]
"""Request -> how many of its first steps to compare; the prefill is one. Others are left out."""


def _inside(within: Within | None, request: str, step: int) -> bool:
    return within is None or step < within.get(request, 0)


def compare_records(a: Path, b: Path, within: Within | None = None) -> pd.DataFrame:
    """Two runs, tensor by tensor: one row for each of q, k and v of each record.

    Columns: request, step, layer, tensor, elements; differs; mismatches, max_ulp and first_index as in
    `lib.measure.compare`; unrotated, the mismatches beyond the rotary elements, where no rounding of the
    rotation reaches and only the norm does; pair_ulps, the largest distance in ULP of the rotated pair
    (`lib.measure.compare.pair_ulps`; of V, of the element); relative, the largest error of a
    token's heads as a share of their norm, or of the usual token's where that is larger (the values of
    some tokens nearly vanish). Of hashes only ``differs`` is known, the rest is missing.

    Raises:
        ValueError: the files hold other records (``within``, if given), none at all, another shape, or
            one of them hashes.
    """
    one, other = RecordFile(a), RecordFile(b)
    if one.shape != other.shape:
        raise ValueError(f"{a} is of shape {one.shape}, {b} of {other.shape}")
    if bool(one.digests) != bool(other.digests):
        raise ValueError(f"one of {a} and {b} holds hashes and the other tensors")
    places, others = (
        [place for place in file.places(*TENSORS) if _inside(within, place.request, place.step)]
        for file in (one, other)
    )
    if not places:
        raise ValueError(f"{a} holds no records" + (f" of {dict(within)}" if within else ""))
    if apart := set(others).symmetric_difference(places):
        names = ", ".join(sorted(place.key for place in apart)[:5])
        raise ValueError(f"{a} and {b} differ in {len(apart)} records: one alone has {names}")
    rows = []
    for place in places:
        row: dict[str, Any] = asdict(place)
        if one.digests:
            elements = one.digests[place.key].split()[1]
            row |= {
                "elements": int(elements),
                "differs": one.digests[place.key] != other.digests[place.key],
            }
        else:
            rotary = 0 if place.tensor == "v" else one.shape.rotary_dim
            row |= _difference(one.get(place.key), other.get(place.key), rotary)
        rows.append(row)
    frame = pd.DataFrame(rows, columns=_COLUMNS)
    whole = ["mismatches", "max_ulp", "unrotated"]
    return frame.astype(dict.fromkeys(whole, "Int64") | {"differs": bool})


_COLUMNS = [
    "request", "step", "layer", "tensor", "elements", "differs", "mismatches", "max_ulp",
    "first_index", "unrotated", "pair_ulps", "relative",
]  # fmt: skip


def _difference(a: Tensor, b: Tensor, rotary: int) -> dict[str, Any]:
    if a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return {
            "elements": a.numel(),
            "differs": False,
            "mismatches": 0,
            "max_ulp": 0,
            "first_index": None,
            "unrotated": 0,
            "pair_ulps": 0.0,
            "relative": 0.0,
        }
    found = compare(b, a)
    wide, error = a.double().flatten(1), (b.double() - a.double()).flatten(1)
    size = wide.norm(dim=1)
    usual = float(size.square().mean().sqrt().nan_to_num()) or torch.finfo(torch.float64).tiny
    relative = error.norm(dim=1) / size.clamp_min(usual)
    return {
        "elements": found.elements,
        "differs": True,
        "mismatches": found.mismatches,
        "max_ulp": found.max_ulp,
        "first_index": found.first_index,
        "unrotated": int((_bits(a) != _bits(b))[..., rotary:].sum()) if rotary else 0,
        "pair_ulps": pair_ulps(b, a, rotary),
        "relative": float(relative.nan_to_num(nan=float("inf"), posinf=float("inf")).max()),
    }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def records(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per record: request, step, layer and ``differs``, whether any of its tensors does."""
    keys = ["request", "step", "layer"]
    return frame.groupby(keys, sort=False)["differs"].any().reset_index()


def differing(frame: pd.DataFrame) -> int:
    """How many records differ."""
    return int(records(frame)["differs"].sum())


@dataclass(frozen=True)
class Divergence:
    """The first difference: of all tensors that differ, the one with the least (step, layer).

    index, ulp, pair_ulps: of the first differing element, and the largest distance in that tensor, also
    in ULP of the rotated pair; with mismatches None of hashes. tensors: which of q, k and v of that
    record differ.
    """

    request: str
    step: int
    layer: int
    tensor: str
    index: tuple[int, ...] | None
    ulp: int | None
    pair_ulps: float | None
    mismatches: int | None
    elements: int
    tensors: tuple[str, ...]

    @property
    def same_projection(self) -> bool:
        """V, a bare copy of part of the projection, is equal: what differs arose in the prologue."""
        return "v" not in self.tensors

    @property
    def place(self) -> str:
        """Where it is, without what it is."""
        call = "the prefill" if self.step == 0 else f"decode step {self.step}"
        return f"{self.tensor.upper()} of layer {self.layer} in {call} of {self.request}"

    def __str__(self) -> str:
        text = self.place
        if self.mismatches is not None:
            text += f": {self.mismatches:,} of {self.elements:,} elements differ"
            text += f", the first at {self.index}, by at most {self.ulp:,} ULP"
            if self.tensor != "v":  # near zero an element's own ULP says little
                text += f" ({self.pair_ulps:.1f} of the rotated pair)"
        if self.same_projection:
            return text + "; V is equal, so the projection is and the prologue is not"
        if self.tensor == "q":
            return text + "; V differs too: it began before this prologue, or is in its cache write"
        return text + "; Q is equal, so what differs is the write to the cache"


def first_divergence(frame: pd.DataFrame) -> Divergence | None:
    """The earliest difference of any request, or None; within a record q, k, v in this order."""
    found = frame[frame["differs"]]
    if found.empty:
        return None
    rank = found["tensor"].map({name: i for i, name in enumerate(TENSORS)})
    first = found.assign(rank=rank).sort_values(["step", "layer", "rank"], kind="stable").iloc[0]
    same = (found[["request", "step", "layer"]] == first[["request", "step", "layer"]]).all(axis=1)
    known = not pd.isna(first["mismatches"])
    return Divergence(
        request=first["request"],
        step=int(first["step"]),
        layer=int(first["layer"]),
        tensor=first["tensor"],
        index=first["first_index"] if known else None,
        ulp=int(first["max_ulp"]) if known else None,
        pair_ulps=float(first["pair_ulps"]) if known else None,
        mismatches=int(first["mismatches"]) if known else None,
        elements=int(first["elements"]),
        tensors=tuple(found[same]["tensor"]),
    )


def counts(frame: pd.DataFrame) -> pd.DataFrame:
    """By step and layer, over all requests: ``value`` elements that differ of ``n``; of hashes, tensors."""
    known = not frame["mismatches"].isna().any()
    value, n = (frame["mismatches"], frame["elements"]) if known else (frame["differs"], 1)
    cells = frame[["step", "layer"]].assign(value=value.astype(int), n=n)
    return cells.groupby(["step", "layer"]).sum().reset_index()


def compare_logits(a: Path, b: Path, within: Within | None = None) -> pd.DataFrame:
    """Two runs' logits: one row per request and step.

    Columns: request, step, elements, mismatches; kl, KL(a || b) in nats; top1_a, top1_b, the most likely
    tokens; margin_a, how far a's first logit is above its second; perturbation_at_top, the largest
    change of these two; noise, the root mean square change of all logits about their mean change, which
    moves no probability; noise_share, that as a share of the logits' own standard deviation.

    ValueError: the files hold logits of other requests or steps (``within``, if given).
    """
    one, other = safe_open(a, framework="pt"), safe_open(b, framework="pt")
    places, others = (
        {key for key in file.keys() if _inside(within, *_call(key))}  # noqa: SIM118 - a file
        for file in (one, other)
    )
    if apart := places ^ others:
        names = ", ".join(sorted(apart)[:5])
        raise ValueError(f"{a} and {b} differ in {len(apart)} places: one alone has {names}")
    rows = []
    for key in places:
        request, step = _call(key)
        row = _logit_difference(one.get_tensor(key), other.get_tensor(key))
        rows.append({"request": request, "step": step} | row)
    frame = pd.DataFrame(rows, columns=["request", "step", *_LOGIT_COLUMNS])
    return frame.sort_values(["request", "step"], ignore_index=True)


def logit_calls(path: Path) -> set[tuple[str, int]]:
    """Request and step of every call whose logits a file of `LogitTape.save` holds."""
    with safe_open(path, framework="pt") as file:
        return {_call(key) for key in file.keys()}  # noqa: SIM118 - a file


def _call(key: str) -> tuple[str, int]:
    """Request and step of a key of `LogitTape.save`."""
    request, step = key.rsplit("/", 1)
    return request, int(step)


_LOGIT_COLUMNS = [
    "elements", "mismatches", "kl", "top1_a", "top1_b", "margin_a", "perturbation_at_top", "noise",
    "noise_share",
]  # fmt: skip


def _logit_difference(a: Tensor, b: Tensor) -> dict[str, Any]:
    found = compare(b, a)
    x, y = a.double(), b.double()
    log_p, log_q = x.log_softmax(0), y.log_softmax(0)
    # The token with the lower number first among equals, as argmax does in the engine.
    top = [int(x.argmax())]
    top.append(int(x.index_fill(0, torch.tensor(top), -torch.inf).argmax()))
    change = y - x
    noise = float((change - change.mean()).square().mean().sqrt())
    return {
        "elements": found.elements,
        "mismatches": found.mismatches,
        "kl": max(0.0, float((log_p.exp() * (log_p - log_q)).sum())),
        "top1_a": top[0],
        "top1_b": int(y.argmax()),
        "margin_a": float(x[top[0]] - x[top[1]]),
        "perturbation_at_top": float(change[top].abs().max()),
        "noise": noise,
        "noise_share": noise / max(float(x.std()), torch.finfo(torch.float64).tiny),
    }


NEAR, SMALL = 4, 0.1
"""Of a coin toss: at most so many times the noise is the margin, and under such a share of the logits' own
standard deviation the noise."""


def flips(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `compare_logits` whose most likely token changed, and what kind of change each is.

    ``coin_toss``: the two tokens were so near that the noise all logits of that step got exchanges them
    (the margin is within `NEAR` of its root mean square: three standard deviations of the difference of
    two), and that noise is `SMALL`. Anything else is a real change.
    """
    changed = frame[frame["top1_a"] != frame["top1_b"]]
    near = changed["margin_a"] <= NEAR * changed["noise"]
    return changed.assign(coin_toss=near & (changed["noise_share"] < SMALL)).reset_index(drop=True)
