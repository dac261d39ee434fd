"""Peers: other projects' kernels do the same work, and `equal_work` notices when one does not.

Their files are not part of this project. The tests that run them want them on the import path:
`pip install --no-deps vllm==0.33.0`, and aiter v0.1.15 or newer from its repository; of both the few
source files named in `peers` are enough, unpacked into a folder on PYTHONPATH.
"""

import importlib
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_evidence.kernels import eager, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.measure import peers
from fusion_evidence.lib.measure.compare import compare, pair_ulps
from fusion_evidence.lib.measure.peers import PARTS, Peer, equal_work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = AttentionShape("test", 4, 2, 64, 16, (3, 3, 2), 256, 4, 4)
NUMERICS = Numerics(reduction=Reduction(16, 4))
TOKENS, TABLE, BLOCKS, BLOCK = 5, 64, 3, 7
# Triton's interpreter truncates fp32 -> bf16: an error of up to one ULP instead of half, each time.
TRUNCATED = 0 if DEVICE == "cuda" else peers.ULP_BOUND


def arguments(*, dtype=torch.float16, table=None, positions="3d", padding=True, shape=SHAPE):
    """A row stride, interleaved caches with holes, distinct position rows and, if asked, padding."""
    generator = torch.Generator().manual_seed(7)

    def normal(*size):
        return torch.randn(*size, generator=generator).to(dtype).to(DEVICE)

    qkv = normal(TOKENS, shape.qkv_width + 16)[:, : shape.qkv_width]
    rows = torch.stack([torch.randperm(TABLE, generator=generator)[:TOKENS] for _ in range(3)])
    slots = torch.randperm(BLOCKS * BLOCK, generator=generator)[:TOKENS]
    if padding:
        slots[2] = -1
    caches = normal(BLOCKS, 2, BLOCK, shape.kv_heads, shape.head_dim)
    return (
        qkv,
        normal(shape.head_dim),
        normal(shape.head_dim),
        reference.cos_sin_table(shape, TABLE, table or dtype, DEVICE),
        (rows if positions == "3d" else rows[0]).to(DEVICE),
        slots.to(DEVICE),
        caches[:, 0],
        caches[:, 1],
        shape,
        NUMERICS,
    )


# ---- Planted peers around the eager form


def planted(run, covers=PARTS):
    """A peer whose call is `run(arguments) -> outputs`."""
    return Peer("planted", "1", 1, frozenset(covers), "both", "per_op", lambda *a: lambda: run(a))


def honest(a):
    q, k, v, gate = eager.qkv_prologue(*a)
    return dict(q=q, k=k, v=v, gate=gate, key_cache=a[6], value_cache=a[7])


def with_argument(index, change):
    def run(a):
        changed = list(a)
        changed[index] = change(a[index])
        return honest(changed)

    return run


def without_gate(a):
    return honest(a) | {"gate": torch.empty(TOKENS, SHAPE.q_size, dtype=a[0].dtype, device=DEVICE)}


def without_value_cache(a):
    return with_argument(7, torch.clone)(a) | {"value_cache": a[7]}


def negative_zero(a):
    outputs = honest(a)
    outputs["gate"] = torch.where(outputs["gate"] == 0, -outputs["gate"], outputs["gate"])
    return outputs


def one_bit(name):
    def run(a):
        outputs = honest(a)
        outputs[name].view(torch.int16)[-1].flatten()[-1:] ^= 1
        return outputs

    return run


def stale_head(a):
    outputs = honest(a)
    outputs["q"][:, 3] = torch.empty_like(outputs["q"][:, 3])
    return outputs


def in_place(a):
    outputs = honest(a)
    a[0][:, :4] = outputs["q"][:, 0, :4]
    return outputs


def test_an_equal_peer_passes_in_every_part():
    a = arguments(padding=False)
    before = [t.clone() for t in a if isinstance(t, torch.Tensor)]
    work = equal_work(planted(honest), a)
    assert work.equal, work
    assert work.why == ""
    assert not work.missing
    assert set(work.checks) == {"q", "k", "v", "gate", "key_cache", "value_cache"}
    assert work.checks["q"].bits.elements == TOKENS * SHAPE.q_size
    assert work.checks["key_cache"].bits.nan_actual > 0  # what no token wrote
    after = [t for t in a if isinstance(t, torch.Tensor)]
    assert all(map(torch.equal, after, before))  # the given caches are nobody's to write


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (without_gate, "^gate"),
        (one_bit("gate"), "^gate"),
        (one_bit("v"), "^v is"),
        (without_value_cache, "^value_cache"),
        (stale_head, "^q"),
        (in_place, "changes qkv"),
        (lambda a: {k: v for k, v in honest(a).items() if k != "gate"}, "covers gate"),
        # rotated the other way; by the T row alone; by the H row where W belongs; chunked sections
        (with_argument(3, lambda table: table * _conjugate(table)), "^q.*; k.*; key_cache"),
        (with_argument(4, lambda positions: positions[0]), "^q.*; k"),
        (with_argument(4, lambda positions: positions[[0, 1, 1]]), "^q.*; k"),
        (with_argument(8, lambda shape: replace(shape, mrope_interleaved=False)), "^q.*; k"),
        # the factor w instead of 1 + w; another head's K norm; a slot too far
        (with_argument(1, lambda weight: weight - 1), "^q"),
        (with_argument(2, lambda weight: weight.flip(0)), "^k"),
        (with_argument(5, lambda slots: (slots + 1) % (BLOCKS * BLOCK)), "^key_cache.*value_cache"),
    ],
)
def test_a_planted_mistake_is_caught(run, words):
    work = equal_work(planted(run), arguments(padding=False))
    assert not work.equal
    assert re.search(words, work.why), work.why


def _conjugate(table):
    """1 for the cosines, -1 for the sines."""
    sign = torch.ones_like(table)
    sign[:, SHAPE.rotary_dim // 2 :] = -1
    return sign


def test_a_zero_with_another_sign_is_a_rounding_in_q_and_a_fault_in_a_copy():
    a = arguments(padding=False)
    plus = planted(lambda b: {n: t + 0.0 if n == "q" else t for n, t in honest(b).items()})
    a[0][0, SHAPE.head_dim - 1] = -0.0  # an element of q that is not rotated
    assert equal_work(plus, a).checks["q"].bits.mismatches == 1
    assert equal_work(plus, a).equal
    a[0][0, SHAPE.head_dim] = 0.0  # an element of the gate
    assert not equal_work(planted(negative_zero), a).equal


def test_padding_written_to_a_slot_is_caught():
    work = equal_work(
        planted(honest), arguments(padding=True)
    )  # eager indexes with -1: the last slot
    assert not work.equal
    assert "key_cache" in work.why


def test_what_is_not_covered_is_neither_compared_nor_hidden():
    covers = PARTS - {"gate", "v_out"}
    work = equal_work(planted(without_gate, covers), arguments(padding=False))
    assert work.equal, work
    assert work.missing == {"gate", "v_out"}
    assert "leaves out gate, v_out" in str(work)
    on_one_axis = arguments(padding=False, positions="1d")
    assert "mrope" not in equal_work(planted(honest, PARTS - {"mrope"}), on_one_axis).missing


def test_refusing_is_reported_and_bad_arguments_are_errors():
    def refuse(*_):
        raise peers.NotCovered("planted does not cover this")

    work = equal_work(replace(planted(honest), prepare=refuse), arguments())
    assert not work.equal
    assert "does not cover" in work.why
    with pytest.raises(TypeError, match="q_weight"):
        equal_work(planted(honest), [t.float() if i == 1 else t for i, t in enumerate(arguments())])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distance_is_measured_in_units_of_the_rotated_pair(dtype):
    eps = torch.finfo(dtype).eps
    e = torch.tensor([[1.0, 2.0**-9, 8.0, 1.5, 3.0, 2.0**-9]], dtype=dtype)
    a = e.clone()
    a[0, 1] += eps  # pair (1.5, 2**-9): a unit of 1.5 is eps
    assert pair_ulps(a, e, 4) == pytest.approx(1.0, rel=0.01)
    assert pair_ulps(a, e, 0) > 100
    a = e.clone()
    a[0, 4] += 2 * eps
    assert pair_ulps(a, e, 4) == 1.0
    a[0, 5] = float("nan")
    assert pair_ulps(a, e, 4) == float("inf")
    assert pair_ulps(a, a, 4) == 0.0
    assert pair_ulps(a[:0], a[:0], 0) == 0.0


# ---- Loading

KERNEL = "vllm/model_executor/layers/fused_qk_norm_rope.py"
CACHE = "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py"
OP = "def fused_qk_rmsnorm_rope_gate(q_gate, cos_sin_cache): pass\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(files)`: the import path holds these files and nothing else."""

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        importlib.invalidate_caches()

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    peers._vllm.cache_clear()
    peers._aiter.cache_clear()
    yield write
    peers._vllm.cache_clear()
    peers._aiter.cache_clear()


def test_absent_peers_say_so(installed):
    installed({})
    assert peers.available("vllm") == "vllm is not installed"
    assert peers.available("aiter") == "aiter is not installed"
    assert "does not cover" in peers.available("flashinfer")
    with pytest.raises(peers.PeerUnavailable, match="aiter is not installed"):
        peers.peer("aiter")


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown peer 'sglang'; known: vllm, aiter, flashinfer"):
        peers.available("sglang")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "the installed vllm has no model_executor/layers/fused_qk_norm_rope.py"),
        ({KERNEL: OP}, "the installed vllm has no v1/attention"),
        (
            {KERNEL: "import vllm.engine\n", CACHE: ""},
            "ModuleNotFoundError: No module named 'vllm.",
        ),
        ({KERNEL: "from vllm import LLM\n", CACHE: ""}, "ImportError: cannot import name 'LLM'"),
        ({KERNEL: "1 / 0\n", CACHE: ""}, "fused_qk_norm_rope cannot be loaded: ZeroDivisionError"),
        ({KERNEL: "", CACHE: ""}, "has no fused_qk_rmsnorm_rope_gate"),
        ({KERNEL: "def fused_qk_rmsnorm_rope_gate(): pass\n", CACHE: ""}, "takes no cos_sin_cache"),
    ],
)
def test_another_vllm_is_a_reason_and_its_init_never_runs(installed, files, words):
    installed({"vllm/__init__.py": "raise SystemExit('vllm/__init__ ran')\n"} | files)
    assert words in peers.available("vllm")
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]


def test_a_vllm_imported_before_stays_as_it_was(installed):
    def modules():
        return {n: m for n, m in sys.modules.items() if n.split(".")[0] == "vllm"}

    installed({"vllm/__init__.py": "", "vllm/platforms.py": "", KERNEL: OP, CACHE: ""})
    try:
        importlib.import_module("vllm.platforms")
        before = modules()
        assert "has no triton_reshape_and_cache_flash" in peers.available("vllm")
        assert modules() == before
        assert set(before) == {"vllm", "vllm.platforms"}
    finally:
        for name in modules():
            del sys.modules[name]


# ---- The real kernels


@pytest.fixture
def vllm(monkeypatch):
    if DEVICE == "cpu":  # its host code asks the device for its generation
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return _loaded("vllm")


@pytest.fixture
def aiter(monkeypatch):
    peer = _loaded("aiter")
    if DEVICE == "cpu":  # its host code takes the tile from the device's size
        names = peer.prepare.args[0].__globals__
        tile = "infer_rope_cache_triton_block_t"
        assert tile in names
        monkeypatch.setitem(names, tile, lambda tokens, device: 2)
    return peer


def _loaded(name):
    try:
        return peers.peer(name)
    except peers.PeerUnavailable as error:
        pytest.skip(f"{error} (this file's docstring says what provides it)")


DTYPES = [
    (torch.float16, None),
    (torch.float16, torch.float32),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("dtype", "table"), DTYPES)
@pytest.mark.parametrize("positions", ["1d", "3d"])
def test_vllm_does_equal_work(vllm, dtype, table, positions):
    a = arguments(dtype=dtype, table=table, positions=positions)
    if positions == "3d" and vllm.positions == "1d":
        assert "positions [T] only" in equal_work(vllm, a).why
        return
    loose = TRUNCATED if dtype == torch.bfloat16 else 0
    work = equal_work(vllm, a, peers.ULP_BOUND + loose)
    assert work.equal, work
    assert work.missing == {"v_out"}
    if dtype == torch.float16 and DEVICE == "cpu":  # the interpreter rounds fp16 right: its policy
        assert all(check.bits.equal for check in work.checks.values()), work.checks


class Operations(TorchDispatchMode):
    """Names of the PyTorch operations that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(DEVICE != "cpu", reason="launches are counted where the interpreter makes them")
@pytest.mark.parametrize("name", ["vllm", "aiter"])
def test_a_prepared_call_only_allocates_and_launches(name, request, monkeypatch):
    peer, launches = request.getfixturevalue(name), []
    call = peer.prepare(*arguments(positions="1d"))
    launch = "triton.runtime.interpreter.GridExecutor.__call__"
    monkeypatch.setattr(launch, lambda self, *_, **__: launches.append(self.fn.__name__))
    with Operations() as operations:
        call()
    assert len(launches) == peer.launches, launches
    assert operations.names == {"empty", "view"} | ({"empty_like"} if name == "vllm" else set())


def test_vllm_says_what_it_does_not_cover(vllm):
    if vllm.positions == "both":
        chunked = replace(SHAPE, mrope_interleaved=False)
        assert "interleaved" in equal_work(vllm, arguments(shape=chunked)).why
    a = list(arguments(positions="1d"))
    a[7] = a[7].contiguous()  # the second cache's strides are another
    assert "strides" in equal_work(vllm, a).why
    a = list(arguments(positions="1d"))
    a[5] = torch.stack([a[5], a[5]], dim=1)[:, 0]
    assert "slot_mapping" in equal_work(vllm, a).why


@pytest.mark.parametrize(("dtype", "table"), DTYPES)
def test_aiter_does_equal_work(aiter, dtype, table):
    if DEVICE == "cpu" and dtype == torch.bfloat16 and table is None:
        pytest.skip("Triton's interpreter cannot multiply bf16 by bf16, as this kernel does")
    loose = TRUNCATED if dtype == torch.bfloat16 else 0
    a = arguments(dtype=dtype, table=table, positions="1d")
    work = equal_work(aiter, a, peers.ULP_BOUND + loose)
    assert work.equal, work
    assert not work.missing


def test_aiter_takes_one_axis(aiter):
    work = equal_work(aiter, arguments())
    assert not work.equal
    assert "positions [T] only" in work.why
    assert work.missing == {"mrope"}


@pytest.mark.skipif(DEVICE != "cpu", reason="on a device the compiler adds contractions of its own")
@pytest.mark.parametrize("table", [torch.float16, torch.float32])
def test_aiter_rounds_where_its_description_says(aiter, table):
    a = arguments(table=table, positions="1d")
    (qkv, q_weight, _, cos_sin, positions, *_) = a
    q = (
        qkv[:, : 2 * SHAPE.q_size]
        .unflatten(-1, (SHAPE.q_heads, 2, SHAPE.head_dim))[:, :, 0]
        .float()
    )
    scale = torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + SHAPE.eps)
    y = q * scale * (1.0 + q_weight.float())
    cos, sin = (part[:, None] for part in cos_sin[positions].chunk(2, dim=-1))
    half = SHAPE.rotary_dim // 2
    y1, y2 = y[..., :half], y[..., half : 2 * half]
    # x rounds to fp16, its product with cos to the promoted dtype; the partner never rounds
    z1 = (y1.half() * cos).float() - y2 * sin.float()
    z2 = (y2.half() * cos).float() + y1 * sin.float()
    expected = torch.cat((z1, z2, y[..., 2 * half :]), dim=-1).half()
    found = compare(aiter.call(*a)["q"], expected)
    assert found.equal, found
    storage = reference.qkv_prologue(*a[:9], Numerics("storage", NUMERICS.reduction))[0]
    assert not compare(expected, storage).equal  # so that the test can tell the two apart
