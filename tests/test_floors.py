"""Floors: the copies copy every byte, at any size, and write nothing else."""

import re
import subprocess
import sys

import pytest
import torch

from fusion_evidence.kernels import fused
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.measure.floors import accesses, copy_candidates, empty_kernel
from fusion_evidence.lib.measure.inputs import OUTPUTS, POISON, prologue_inputs, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 64


def poisoned(size, offset, value):
    """A uint8 tensor of `size`, `offset` bytes after an aligned address, between guards."""
    whole = torch.full((GUARD + offset + size + GUARD,), value, dtype=torch.uint8, device=DEVICE)
    return whole, whole[GUARD + offset : GUARD + offset + size]


SIZES = [
    (16, 16),
    (1, 1),
    (7, 23),  # more than three times round, no vector fits
    (4096, 4096),
    (4099, 4099),  # odd
    (4104, 8216),  # multiples of 8, not of 16; twice round and a bit
    (28800, 34832),  # about one token: more is written than read
    (20000, 60000),
    (1022, 3070),
]


@pytest.mark.parametrize(("read", "write"), SIZES)
@pytest.mark.parametrize("poison", [0xFF, 0x7F])  # NaN in every float format, and a number
def test_every_candidate_copies_every_byte(read, write, poison):
    source = torch.randint(0, 256, (read,), dtype=torch.uint8, device=DEVICE)
    before = source.clone()
    expected = source.repeat(write // read + 1)[:write]
    whole, target = poisoned(write, 0, poison)
    candidates = copy_candidates(source, target)
    assert len(candidates) >= 5
    for name, call in candidates.items():
        whole.fill_(poison)
        call()
        assert torch.equal(target, expected), name
        assert (whole[:GUARD] == poison).all(), name
        assert (whole[-GUARD:] == poison).all(), name
        assert torch.equal(source, before), name


@pytest.mark.parametrize("offset", [8, 4, 2, 1])
def test_unaligned_targets(offset):
    source = torch.randint(0, 256, (4096,), dtype=torch.uint8, device=DEVICE)
    whole, target = poisoned(8192, offset, 0xFF)
    for name, call in copy_candidates(source, target).items():
        whole.fill_(0xFF)
        call()
        assert torch.equal(target, source.repeat(2)), name
        assert (whole[: GUARD + offset] == 0xFF).all(), name


def test_candidates_differ_in_what_they_try():
    source = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)
    names = list(copy_candidates(source, source.clone()))
    assert names[0] == "memcpy"
    assert sum(name.endswith("persistent") for name in names) >= 2
    assert {part for name in names for part in name.split("-")} >= {"int64", "int32"}
    assert len(names) == len(set(names)) >= 8


def test_empty_kernel_launches():
    for programs in (1, 5):
        empty_kernel(programs)()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def u8(n, **kwargs):
    return torch.zeros(n, dtype=torch.uint8, **kwargs)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (u8(8), u8(4), "8 and 4"),
        (u8(0), u8(4), "0 and 4"),
        (torch.zeros(8), u8(8), "source must be.*float32"),
        (u8(8), u8(16)[::2], "target must be.*strides"),
        (u8(8), u8(8).view(2, 4), "target must be"),
        (u8(8), u8(8, device="meta"), "cpu.*meta"),
    ],
)
def test_bad_tensors(source, target, words):
    with pytest.raises(ValueError, match=words):
        copy_candidates(source, target)


def test_without_triton_it_imports_and_says_what_is_missing():
    # a fresh interpreter in which `import triton` fails, as where it is not installed
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusion_evidence.lib.measure import floors\n"
        "copy = lambda: floors.copy_candidates(torch.zeros(1), torch.zeros(1))\n"
        "for call in (floors.empty_kernel, copy):\n"
        "    try:\n"
        "        call()\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.count("install triton") == 2, done.stderr


COMPILE = """
import os
os.environ["TRITON_INTERPRET"] = "0"
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fusion_evidence.lib.measure import floors

sizes = ["source_vectors", "target_vectors", "blocks"]
targets = {GPUTarget("cuda", 90, 32): "ptx", GPUTarget("hip", "gfx942", 64): "amdgcn"}
for target, text in targets.items():
    for bits, persistent in ((64, False), (32, True)):
        signature = {"source": f"*i{bits}", "target": f"*i{bits}", **dict.fromkeys(sizes, "i32")}
        constants = {"PER_VECTOR": 128 // bits, "BLOCK": 32768 // bits, "PERSISTENT": persistent}
        source = ASTSource(
            fn=floors._copy,
            signature={**signature, **dict.fromkeys(constants, "constexpr")},
            constexprs=constants,
            attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
        )
        print(triton.compile(source, target=target, options={"num_warps": 4}).asm[text])
        print("=====")
"""


def test_compiled_copies_move_16_bytes_at_a_time():
    # Sizes that are multiples of nothing but the vector; widths of 32 and of 64.
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    if "ROCm linker" in done.stderr:
        pytest.skip("this Triton links with ROCm's ld.lld, which is not here")
    assert done.returncode == 0, done.stderr
    *texts, _ = done.stdout.split("=====")
    assert len(texts) == 4
    for text, wide in zip(texts, ["v2.b64", "v4.b32", "dwordx4", "dwordx4"], strict=True):
        moves = re.findall(r"(?:ld|st)\.global\S*|(?:global|buffer)_(?:load|store)_\S+", text)
        assert moves
        assert all(wide in move for move in moves), moves


@pytest.mark.parametrize("heads", [1, 2])
def test_accesses_touch_what_the_op_touches(monkeypatch, heads):
    shape = preset("compact")
    assert shape.q_heads % heads == shape.kv_heads % heads == 0
    monkeypatch.setattr(fused, "choose_launch", lambda tokens, shape: fused.Launch(heads))
    inputs = prologue_inputs(shape, 3, padding=1, device=DEVICE)
    new_empty = torch.Tensor.new_empty

    def poisoned_empty(tensor, *size, **options):
        made = new_empty(tensor, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_empty)
    found = run(accesses, inputs, shape, None)
    for name in OUTPUTS[:4]:
        assert not found[name].isnan().any(), name
    rows = inputs.qkv[:, : 2 * shape.q_size].unflatten(-1, (shape.q_heads, 2, shape.head_dim))
    assert torch.equal(found["gate"], rows[:, :, 1].flatten(1))
    assert torch.equal(found["v"].flatten(1), inputs.qkv[:, -shape.kv_size :])
    # Beyond the rotary columns a weight is all that is added; the interpreter truncates to bf16.
    plain = slice(shape.rotary_dim, None)
    added = inputs.q_weight[plain].float() + rows[:, :, 0, plain].float()
    assert torch.allclose(found["q"][..., plain].float(), added, rtol=2**-7, atol=0)
    for cache, rows in (("key_cache", found["k"]), ("value_cache", found["v"])):
        flat = found[cache].flatten(0, 1)
        for token, slot in enumerate(inputs.slot_mapping.tolist()):
            assert slot < 0 or torch.equal(flat[slot], rows[token]), cache
        written = (flat.view(torch.int16) != POISON).any(-1).any(-1).sum().item()
        assert written == 2, cache  # the padding token writes nothing


def test_accesses_refuse_what_they_do_not_cover():
    shape = preset("compact")
    one_dimensional = prologue_inputs(shape, 2, position_dims=1, device=DEVICE)
    with pytest.raises(ValueError, match="positions"):
        accesses(*one_dimensional.args(), shape)
