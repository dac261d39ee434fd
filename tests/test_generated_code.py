"""Whole-cache copies in generated code: real C++ on the CPU, Triton as Inductor prints it."""

import inspect
import json
import subprocess
import sys

import pytest
import torch

from fusion_evidence.lib.graph.generated_code import (
    capture,
    kernels_touching,
    launches,
    normalized,
    unknown_sizes,
)

BLOCKS, BLOCK, HEADS, DIM = 32, 16, 4, 64
CACHE = BLOCKS * BLOCK * HEADS * DIM


def write_in_place(cache, slots, rows):
    cache[slots // BLOCK, slots % BLOCK] = rows * 2


def write_by_copying(cache, slots, rows):
    """Padding handled over the whole cache instead of over the rows: a copy of it and back."""
    flat = cache.view(-1, HEADS, DIM)
    written = flat.index_copy(0, slots.clamp(min=0), rows * 2)
    flat.copy_(torch.where((slots >= 0).any(), written, flat))


@pytest.fixture(scope="module")
def codes():
    """Function name -> its generated code (from Inductor's cache on disk, if it is there)."""
    return {
        "write_in_place": generated(write_in_place),
        "write_by_copying": generated(write_by_copying),
        "dynamic": generated(write_in_place, dynamic_rows=True),
    }


def generated(function, dynamic_rows=False):
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, DIM, dtype=torch.bfloat16)
    slots, rows = torch.tensor([3, 70, 500]), torch.randn(3, HEADS, DIM).bfloat16()
    torch._dynamo.reset()
    if dynamic_rows:
        for tensor in (slots, rows):
            torch._dynamo.mark_dynamic(tensor, 0)
    with capture() as codes:
        torch.compile(function, fullgraph=True, dynamic=None if dynamic_rows else False)(
            cache, slots, rows
        )
    assert torch.equal(cache.view(-1, HEADS, DIM)[slots], rows * 2)
    (code,) = codes
    return code


def test_in_place_write_passes(codes):
    code = codes["write_in_place"]
    assert kernels_touching(code, CACHE) == [] == unknown_sizes(code, CACHE)
    # and the reader did see its one kernel, of three rows
    (seen,) = kernels_touching(code, 1)
    assert seen.startswith("kernel cpp_fused")
    assert seen.endswith(f": {3 * HEADS * DIM} elements")


def test_planted_whole_cache_copy_is_caught(codes):
    found = kernels_touching(codes["write_by_copying"], CACHE)
    assert any(entry.startswith("allocation buf") for entry in found)
    assert sum(entry.startswith("kernel cpp_fused") for entry in found) >= 2  # there and back
    assert kernels_touching(codes["write_by_copying"], CACHE + 1) == []


def test_dynamic_rows_are_valued_at_the_first_trace(codes):
    code = codes["dynamic"]
    assert kernels_touching(code, CACHE) == [] == unknown_sizes(code, CACHE)
    (seen,) = kernels_touching(code, 1)
    assert "768 elements (" in seen  # valued, with the symbols shown
    # asked about a cache that the code was not traced with, it does not vouch for the symbol
    assert len(unknown_sizes(code, 2 * CACHE)) == 1


def test_capture_sees_graphs_from_the_cache_on_disk(codes):
    assert normalized(generated(write_in_place)) == normalized(codes["write_in_place"])


def test_captures_nest_and_end(codes):
    with capture() as outer:
        with capture() as inner:
            generated(write_in_place)
        generated(write_by_copying)
    generated(write_in_place)
    assert [normalized(code) for code in inner] == [normalized(codes["write_in_place"])]
    assert [normalized(code) for code in outer] == [
        normalized(codes[name]) for name in ("write_in_place", "write_by_copying")
    ]


def test_normalized_drops_what_does_not_run(codes):
    code = codes["write_in_place"]
    plain = normalized(code)
    assert "cpp_fused" in plain
    assert "#include" in plain
    assert "#pragma" in plain
    for gone in ("# Topologically", "kernel path", "rand_strided", "# AOT ID"):
        assert gone not in plain
    noisy = code.replace("async_compile.wait", "# another comment\n\nasync_compile.wait")
    assert normalized(noisy) == plain
    changed = code.replace("256L", "128L")  # a stride, as torch 2.4 and later ones write it
    assert changed != code
    assert normalized(changed) != plain
    assert normalized(codes["dynamic"]) != plain


HEADER = """
# AOT ID: ['0_inference']
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()
"""

POINTWISE = """
# kernel path: /cache/torchinductor/ab/cabc.py
# Topologically Sorted Source Nodes: [mul], Original ATen: [aten.mul]
{name} = async_compile.triton('{name}', '''
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.pointwise(
    size_hints={{'x': {hint}}}, \n    filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*bf16', 'out_ptr0': '*bf16', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32), 'constants': {{}}}},
    inductor_meta={{'grid_type': 'Grid1D', 'kernel_name': '{name}', 'mutated_arg_names': ['out_ptr0'], 'backend_hash': '{hash}'}},
    min_elem_per_thread=0
)
@triton.jit
def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
{static}    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xmask).to(tl.float32)
    tl.store(out_ptr0 + (x0), tmp0, xmask)
''', device_str='cuda')
"""  # noqa: E501

REDUCTION = """
triton_per_fused_mean_1 = async_compile.triton('triton_per_fused_mean_1', '''
import triton
import triton.language as tl

@triton_heuristics.persistent_reduction(
    size_hints={'x': 32, 'r0_': 256},
    reduction_hint=ReductionHint.INNER,
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr1': '*bf16', 'xnumel': 'i32', 'r0_numel': 'i32', 'XBLOCK': 'constexpr'}},
    inductor_meta={'grid_type': 'Grid1D', 'kernel_name': 'triton_per_fused_mean_1'}
)
@triton.jit
def triton_per_fused_mean_1(in_ptr0, out_ptr1, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 24
    r0_numel = 256
    R0_BLOCK: tl.constexpr = 256
    rnumel = r0_numel
    xoffset = tl.program_id(0) * XBLOCK
''', device_str='cuda')
"""  # noqa: E501

TAIL = """
async_compile.wait(globals())
del async_compile

class Runner:
    def call(self, args):
        {names} = args
        args.clear()
{lines}
        return ()

runner = Runner(partitions=[])
call = runner.call


def get_args():
    from torch._dynamo.testing import rand_strided
{hints}
"""


def triton_code(kernels, lines, names="arg0_1, arg1_1", hints=()):
    def indent(text, by):
        return "\n".join(" " * by + line for line in text)

    tail = TAIL.format(names=names, lines=indent(lines, 8), hints=indent(hints or ["pass"], 4))
    return HEADER + "".join(kernels) + tail


def pointwise(name, numel=None, hint=1024, digest="0" * 64):
    static = "" if numel is None else f"    xnumel = {numel}\n"
    return POINTWISE.format(name=name, hint=hint, static=static, hash=digest)


CLONE = triton_code(
    [pointwise("triton_poi_fused_clone_0", CACHE), REDUCTION, pointwise("triton_poi_put_2", 768)],
    [
        "assert_size_stride(arg0_1, (32, 16, 4, 64), (4096, 256, 64, 1), 'input')",
        "assert_size_stride(arg1_1, (3, 4, 64), (256, 64, 1), 'input')",
        "with torch.cuda._DeviceGuard(0):",
        "    torch.cuda.set_device(0)",
        "    buf0 = empty_strided_cuda((512, 4, 64), (256, 64, 1), torch.bfloat16)",
        "    # Topologically Sorted Source Nodes: [index_copy_], Original ATen: [aten.index_copy]",
        "    stream0 = get_raw_stream(0)",
        "    triton_poi_fused_clone_0.run(arg0_1, buf0, 131072, stream=stream0)",
        "    triton_poi_put_2.run(arg1_1, buf0, 768, stream=stream0)",
        "    triton_per_fused_mean_1.run(arg1_1, arg0_1, 24, 256, stream=stream0)",
        "    triton_poi_fused_clone_0.run(buf0, arg0_1, 131072, stream=stream0)",
        "    del buf0",
    ],
)


def test_triton_clone_is_caught_in_its_kernels_and_its_buffer():
    assert kernels_touching(CLONE, CACHE) == [
        "allocation buf0: 131,072 elements",
        "kernel triton_poi_fused_clone_0: 131,072 elements",
        "kernel triton_poi_fused_clone_0: 131,072 elements",
    ]
    assert unknown_sizes(CLONE, CACHE) == []


def test_triton_reductions_count_both_axes():
    assert "kernel triton_per_fused_mean_1: 6,144 elements" in kernels_touching(CLONE, 6144)
    assert "kernel triton_per_fused_mean_1: 6,144 elements" not in kernels_touching(CLONE, 6145)


def test_triton_in_place_write_passes():
    code = triton_code(
        [pointwise("triton_poi_put_0", 768)],
        [
            "assert_size_stride(arg0_1, (32, 16, 4, 64), (4096, 256, 64, 1), 'input')",
            "buf0 = reinterpret_tensor(arg0_1, (512, 4, 64), (256, 64, 1), 0); del arg0_1  # alias",
            "triton_poi_put_0.run(arg1_1, arg0_1, 768, stream=stream0)",
            "aten.index_put_(arg0_1, [arg1_1], buf1, False)",
        ],
    )
    assert kernels_touching(code, CACHE) == [] == unknown_sizes(code, CACHE)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("arg0_1.copy_(buf7, False)", "copy"),
        ("reinterpret_tensor(arg0_1, (512, 4, 64), (256, 64, 1), 0).copy_(buf7, True)", "copy"),
        ("aten.copy_(arg0_1, buf7)", "copy"),
        ("buf3 = torch.ops.aten.index_put.default(arg0_1, [arg1_1], buf7)", "result"),
        ("buf3 = aten.clone(arg0_1)", "result"),
        ("buf3 = arg0_1; del arg0_1  # reuse", None),
        ("extern_kernels.mm(arg1_1, buf7, out=buf4)", None),
        ("torch.ops.vllm.unified_kv_cache_update.default(arg1_1, arg0_1)", None),
    ],
)
def test_copies_and_extern_results(line, found):
    shape = "assert_size_stride(arg0_1, (32, 16, 4, 64), (4096, 256, 64, 1), 'input')"
    entries = kernels_touching(triton_code([], [shape, line]), CACHE)
    assert [entry.split()[0] for entry in entries] == ([found] if found else [])


def test_extern_result_is_sized_by_its_assertion():
    lines = [
        "buf3 = torch.ops.mine.rebuild.default(arg0_1)",
        "assert_size_stride(buf3, (32, 16, 4, 64), (4096, 256, 64, 1), 'torch.ops.mine.rebuild')",
    ]
    code = triton_code([], lines)
    assert kernels_touching(code, CACHE) == ["result buf3: 131,072 elements"]


DYNAMIC = {
    "names": "arg0_1, arg1_1, arg2_1, arg3_1",
    "lines": [
        "s12 = arg0_1",
        "s77 = arg2_1",
        "assert_size_stride(arg1_1, (s12, 16, 4, 64), (4096, 256, 64, 1), 'input')",
        "assert_size_stride(arg3_1, (s77, 4, 64), (256, 64, 1), 'input')",
        "buf0 = empty_strided_cuda((16*s12, 4, 64), (256, 64, 1), torch.bfloat16)",
        "triton_poi_fused_clone_0_xnumel = 4096*s12",
        "triton_poi_fused_clone_0.run(arg1_1, buf0, triton_poi_fused_clone_0_xnumel, stream=s)",
        "triton_poi_put_1_xnumel = 256*s77",
        "triton_poi_put_1.run(arg3_1, buf0, triton_poi_put_1_xnumel, stream=stream0)",
    ],
}
DYNAMIC_KERNELS = [pointwise("triton_poi_fused_clone_0"), pointwise("triton_poi_put_1")]


def test_triton_symbols_are_valued_by_the_harness():
    hints = ["arg0_1 = 32", "arg2_1 = 3", "arg3_1 = rand_strided((3, 4, 64), (256, 64, 1))"]
    code = triton_code(DYNAMIC_KERNELS, hints=hints, **DYNAMIC)
    assert kernels_touching(code, CACHE) == [
        "allocation buf0: 131,072 elements (16*s12*4*64)",
        "kernel triton_poi_fused_clone_0: 131,072 elements (4096*s12)",
    ]
    assert unknown_sizes(code, CACHE) == []


def test_triton_symbols_without_a_value_are_unknown():
    code = triton_code(DYNAMIC_KERNELS, **DYNAMIC)
    assert kernels_touching(code, CACHE) == []
    assert unknown_sizes(code, CACHE) == [
        "allocation buf0: unknown (16*s12*4*64)",
        "kernel triton_poi_fused_clone_0: unknown (4096*s12)",
        "kernel triton_poi_put_1: unknown (256*s77)",
    ]


def test_symbols_traced_with_a_smaller_cache_are_not_trusted():
    code = triton_code(DYNAMIC_KERNELS, hints=["arg0_1 = 2", "arg2_1 = 3"], **DYNAMIC)
    assert kernels_touching(code, CACHE) == []
    assert "kernel triton_poi_fused_clone_0: 8,192 elements (4096*s12)" in unknown_sizes(
        code, CACHE
    )


def test_combo_kernel_parts_are_sized_one_by_one():
    combo = """
triton_for_fused_0 = async_compile.triton('triton_for_fused_0', '''
@triton.jit
def triton_for_fused_0(in_ptr0, out_ptr0, in_ptr1, out_ptr1, xnumel_1, XBLOCK : tl.constexpr):
    pid = tl.program_id(0)
    num_xblocks_0 = tl.cdiv(768, XBLOCK)
    num_xblocks_1 = num_xblocks_0 + tl.cdiv(xnumel_1, XBLOCK)
    if pid < num_xblocks_0:
        pid_offset = pid
        xnumel = 768
        r0_numel = 1
    elif pid < num_xblocks_1:
        pid_offset = pid - num_xblocks_0
        r0_numel = 16
''', device_str='cuda')
"""
    lines = [
        "s12 = arg0_1",
        "triton_for_fused_0.run(arg1_1, buf0, arg2_1, buf1, 256*s12, stream=s)",
    ]
    code = triton_code([combo], lines, names="arg0_1, arg1_1, arg2_1", hints=["arg0_1 = 32"])
    assert sorted(kernels_touching(code, 1)) == [
        "kernel triton_for_fused_0: 131,072 elements (256*s12*16)",
        "kernel triton_for_fused_0: 768 elements",
    ]


def test_normalized_triton_ignores_hashes_and_comments_inside_kernels():
    one = triton_code([pointwise("triton_poi_put_0", 768, digest="a" * 64)], [])
    other = triton_code([pointwise("triton_poi_put_0", 768, digest="b" * 64)], [])
    commented = one.replace("    x0 = xindex\n", "    x0 = xindex  # the row\n    # and more\n")
    assert normalized(one) == normalized(other) == normalized(commented)
    assert normalized(one) != normalized(triton_code([pointwise("triton_poi_put_0", 769)], []))
    # another first trace is another configuration of the kernel: kept
    assert normalized(one) != normalized(triton_code([pointwise("triton_poi_put_0", 768, 64)], []))


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="Inductor"):
        kernels_touching("print('hello')", 10)


REAL_TRITON = """
import json, os, sys
os.environ.pop("TRITON_INTERPRET", None)
import torch
from torch._inductor import config
from fusion_evidence.lib.graph.generated_code import capture

BLOCKS, BLOCK, HEADS, DIM = {sizes}
{source}
# Inductor prints Triton code for the CPU too, with no GPU about; only compiling it needs a backend.
torch.utils._triton.triton_hash_with_backend = lambda: "A" * 64
config.cpu_backend, config.force_disable_caches, config.compile_threads = "triton", True, 1
found = {{}}
for name in ("write_in_place", "write_by_copying", "dynamic"):
    torch._dynamo.reset()
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, DIM, dtype=torch.bfloat16)
    slots, rows = torch.tensor([3, 70, 500]), torch.randn(3, HEADS, DIM).bfloat16()
    dynamic = False
    if name == "dynamic":
        dynamic = None
        for tensor in (slots, rows):
            torch._dynamo.mark_dynamic(tensor, 0)
    function = write_by_copying if name == "write_by_copying" else write_in_place
    with capture() as codes:
        try:
            torch.compile(function, fullgraph=True, dynamic=dynamic)(cache, slots, rows)
        except Exception as error:
            print(error, file=sys.stderr)
    (found[name],) = codes
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def triton_codes():
    """As `codes`, in Triton: in a process of its own, because Triton is not interpreted there."""
    from torch._inductor.graph import GraphLowering

    if not hasattr(GraphLowering, "save_output_code"):
        pytest.skip("torch 2.4 shows only code that loads, which Triton's does not without a GPU")
    script = REAL_TRITON.format(
        sizes=(BLOCKS, BLOCK, HEADS, DIM),
        source=inspect.getsource(write_in_place) + inspect.getsource(write_by_copying),
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all("@triton.jit" in code for code in found.values())
    return found


def test_real_triton_copy_is_caught(triton_codes):
    code = triton_codes["write_by_copying"]
    found = kernels_touching(code, CACHE)
    assert sum(entry.startswith("kernel triton_") for entry in found) >= 2
    assert any(entry.startswith("allocation buf") for entry in found)
    assert "triton_heuristics" in normalized(code)


@pytest.mark.parametrize("name", ["write_in_place", "dynamic"])
def test_real_triton_in_place_write_passes(triton_codes, name):
    code = triton_codes[name]
    assert kernels_touching(code, CACHE) == [] == unknown_sizes(code, CACHE)
    (seen,) = kernels_touching(code, 1)
    assert "768 elements" in seen


def test_the_copy_of_the_kernels_for_tuning_does_not_run(codes):
    code = codes["write_in_place"]
    tuning = """r\"\"\"
Compile-time auto-tuning block:
# kernel path: /somebody/s/cache/k.py
k = async_compile.triton('k', '''...''')
k.run(a)
\"\"\"
"""
    assert normalized(tuning + code) == normalized(code)
    assert launches(tuning + code) == launches(code) >= 1
    assert launches(normalized(code)) == launches(code)


def test_what_tunes_and_benchmarks_is_left_out_everywhere():
    """The copy for tuning launches nothing, and a kernel's own benchmark does not end the code."""
    tuning = f'r"""\nCompile-time auto-tuning block:\n{CLONE}\n"""\n'
    own = CLONE.replace("''', device_str", "\n\ndef get_args():\n    return ()\n''', device_str", 1)
    assert own != CLONE
    for code in (tuning + CLONE, own):
        assert kernels_touching(code, CACHE) == kernels_touching(CLONE, CACHE)
        assert unknown_sizes(code, CACHE) == []
        assert launches(code) == launches(CLONE) == 4
    assert "runner = Runner" in normalized(own)
    assert normalized(tuning + CLONE) == normalized(CLONE)
