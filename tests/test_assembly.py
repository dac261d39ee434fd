"""The kernel compiled for machines that are not here: what it takes, and its tree on 64 lanes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fusion_evidence.kernels import fused, older_triton
from fusion_evidence.kernels.fused import Launch
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.lib.measure.assembly import (
    NOT_AVAILABLE,
    TARGETS,
    VENDOR_TARGETS,
    Resources,
    Target,
    count_instructions,
    read_amdgcn,
    read_ptxas,
    resources,
)
from fusion_evidence.lib.measure.machine import Machine

OLDER = older_triton.VERSION < (3, 5)
HIP = [target for target in TARGETS if target.backend == "hip"]
FUSED = r"fma\.rn\.f32|v_(pk_)?(fma|fmac|mad|mac)_f32"
TREES = [Reduction(32, 8), Reduction(16, 16), Reduction(32, 4, warps=2), Reduction(64, 4)]


def compiled_for(*arguments, **options) -> list[Resources]:
    found = resources(*arguments, **options)
    if any("ROCm linker" in r.unavailable for r in found):
        pytest.skip("this Triton links with ROCm's ld.lld, which is not here")
    return found


@pytest.fixture(scope="module")
def by_launch() -> list[Resources]:
    return compiled_for(TARGETS)


@pytest.fixture(scope="module")
def by_tree() -> dict[tuple[str, Reduction], Resources]:
    found = compiled_for(
        HIP, numerics=[Numerics("storage", tree) for tree in TREES], launches=[Launch()]
    )
    return {(r.target, Reduction.parse(r.reduction)): r for r in found}


def test_what_the_kernel_takes(by_launch):
    assert [(r.target, r.heads) for r in by_launch] == [
        (target, heads) for target in ("gfx90a", "gfx942", "sm_90") for heads in (1, 2, 4)
    ]
    for r in by_launch:
        where = (r.target, r.heads)
        if OLDER and "shows no words of ptxas" in r.unavailable:
            continue
        assert r.unavailable == "", where
        assert (r.spills, r.scratch_bytes) == (0, 0), where
        # The declared tree needs registers and shuffles alone; an older Triton sums the last in memory.
        assert r.shared_bytes <= 512 * OLDER, where
        assert r.wavefront == (32 if r.target == "sm_90" else 64), where
        assert 16 <= r.registers <= 128, where
        assert (r.scalar_registers is None) == (r.target == "sm_90"), where
        # Half of what the machine can hold, or latency has nothing to hide behind.
        assert r.occupancy >= (24 if r.target == "sm_90" else 4), where
        assert r.occupancy_source.split(",")[0] == (
            "derived" if r.target == "sm_90" else "compiler"
        ), where
        assert r.compiler.startswith("triton 3."), where
        assert "assembly" not in r.row()
    for target in ("gfx90a", "gfx942", "sm_90"):
        one, two, four = (r.registers for r in by_launch if r.target == target)
        assert (OLDER and one is None) or one < two < four


def test_no_product_is_contracted_on_its_own(by_launch):
    """Numerics without contraction: a fused multiply-add in the assembly would change bits."""
    for r in by_launch:
        assert not re.search(FUSED, r.assembly), (r.target, r.heads)


def test_a_declared_contraction_is_compiled_as_one():
    for r in compiled_for(TARGETS, numerics=Numerics(contraction="cos"), launches=[Launch()]):
        assert re.search(FUSED, r.assembly), r.target


def lane_steps(assembly: str) -> list[int]:
    """Distances inside a row of 16 lanes over which AMD's assembly adds, in its order."""
    steps = {
        "row_ror:8": 8,
        "row_shr:8": 8,
        "row_half_mirror": 4,  # lane ^ 7, then a reversal of four makes it lane ^ 4
        "row_shr:4": 4,
        "quad_perm:[2,3,0,1]": 2,
        "row_shr:2": 2,
        "quad_perm:[1,0,3,2]": 1,
        "row_shr:1": 1,
    }
    pattern = "|".join(re.escape(name) for name in steps)
    return [steps[found] for found in re.findall(pattern, assembly)]


@pytest.mark.parametrize("target", HIP, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_declared_tree_on_64_lanes(by_tree, target, tree):
    """Added by halves, across a row of 16 hardware lanes at 8, 4, 2 and 1: once each, in this order."""
    r = by_tree[str(target), tree]
    assert (r.wavefront, r.spills) == (64, 0)
    if OLDER and tree.lanes == 64:
        pytest.skip("triton before 3.5 adds neighbours of 64 lanes through memory")
    assert lane_steps(r.assembly) == [8, 4, 2, 1]


@pytest.mark.parametrize("target", HIP, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_lanes_are_added_by_halves(by_tree, target, tree):
    """`row_bcast` would add whole rows of 16 lanes, and last: over 64 lanes Triton does it so."""
    assert "row_bcast" not in by_tree[str(target), tree].assembly


def test_no_width_is_written_into_the_kernel():
    """No 32 or 64 in what runs or launches; `choose_launch` alone has thresholds, of tokens."""
    tree = ast.parse(Path(fused.__file__).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert {"_tree_sum", "_prologue", "qkv_prologue", "_constants"} <= {f.name for f in functions}
    widths = [
        f"{function.name}: line {node.lineno}"
        for function in functions
        if function.name != "choose_launch"
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in (32, 64)
    ]
    assert widths == []


def test_targets_of_the_vendors_compiler():
    for r in compiled_for(VENDOR_TARGETS, launches=[Launch()]):
        if r.unavailable:
            assert r.unavailable.startswith(NOT_AVAILABLE)
            assert r.compiler in r.unavailable
            assert r.target in r.unavailable  # the compiler's own words name it
            assert r.registers is r.spills is r.occupancy is None
        else:
            assert (r.wavefront, r.spills) == (64, 0)


def test_a_target_that_no_compiler_has_says_so():
    (found,) = compiled_for([Target("hip", "gfx000", 64)], launches=[Launch()])
    assert found.unavailable.startswith(f"not available ({found.compiler} says: ")
    assert "gfx000" in found.unavailable
    assert found.registers is found.spills is found.occupancy is None


@pytest.mark.parametrize("target", [TARGETS[1], TARGETS[2]], ids=str)
def test_a_marker_is_one_atomic_more(target):
    """At T=1, where strides are constants: another kernel than that of many tokens."""
    options = dict(launches=[Launch()], tokens=1)
    plain, marked = (compiled_for([target], marker=m, **options)[0] for m in (False, True))
    (many,) = compiled_for([target], launches=[Launch()])
    atomic = r"\b(?:atom|red)\.|global_atomic_add"
    assert [len(re.findall(atomic, r.assembly)) for r in (plain, marked, many)] == [0, 1, 0]
    assert many.assembly != plain.assembly
    if plain.instructions is None:
        pytest.skip("this Triton has no tool that prints machine code")
    assert 100 < plain.instructions < marked.instructions < plain.instructions + 50
    assert "instructions" in plain.row()


def test_instructions_are_counted_without_labels_directives_and_padding():
    sass = """
Function:_prologue
--:-:-:-:1\tLDC R1, c[0x0][0x28];
01:-:-:Y:4\t@!P0 IMAD.WIDE.U32 R2, R9, 0x8, R2;
LBB6:
--:-:-:Y:0\tBRA LBB6;
--:-:-:Y:0\tNOP;
"""
    amd = """
\t.text
_prologue:                              ; @_prologue
; %bb.0:
\ts_load_dword s3, s[0:1], 0xa0
\tv_lshlrev_b32_e32 v1, 1, v0            ; 4 bytes
\ts_nop 1
.LBB0_2:
\ts_endpgm
    .name:           _prologue
"""
    assert (count_instructions(sass), count_instructions(amd), count_instructions("")) == (3, 3, 0)


def test_what_a_machine_compiles_for():
    def machine(**fields):
        return Machine(
            name="m", profile="cuda", device_name="m", cpu_cores=1, versions={}, **fields
        )

    nvidia = machine(device="cuda", arch="sm_90", wavefront=32)
    assert Target.of(nvidia) == TARGETS[-1]
    dcu = machine(device="cuda", arch="gfx936", wavefront=64)
    assert Target.of(dcu) == VENDOR_TARGETS[0]
    with pytest.raises(ValueError, match="m has no accelerator"):
        Target.of(machine(device="cpu", arch="x86_64"))


def test_readers_name_what_is_missing():
    text = "\n".join(
        f"    .{name}: {value}"
        for name, value in dict(
            wavefront_size=64, vgpr_count=70, sgpr_count=30, vgpr_spill_count=2, sgpr_spill_count=1,
            private_segment_fixed_size=12, group_segment_fixed_size=256,
        ).items()
    )  # fmt: skip
    assert read_amdgcn(text) == dict(
        wavefront=64, registers=70, scalar_registers=30, spills=3, scratch_bytes=12, shared_bytes=256,
        occupancy=None, occupancy_source="",
    )  # fmt: skip
    assert read_amdgcn(text + "\n; Occupancy: 7\n")["occupancy"] == 7
    with pytest.raises(ValueError, match=r"states no \.vgpr_spill_count"):
        read_amdgcn(text.replace("vgpr_spill_count", "other"))
    with pytest.raises(ValueError, match="ptxas states no registers or no spills: 'nothing'"):
        read_ptxas("nothing")


@pytest.mark.parametrize(("registers", "warps"), [(24, 32), (64, 32), (80, 25), (255, 8)])
def test_occupancy_derived_from_registers(registers, warps):
    report = (
        "ptxas info    : 0 bytes gmem\n"
        "    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 0 barriers, 128 bytes smem, 400 bytes cmem"
    )
    assert read_ptxas(report) == dict(
        registers=registers, spills=12, scratch_bytes=16, shared_bytes=128, occupancy=warps,
        occupancy_source="derived, warps a multiprocessor",
    )  # fmt: skip
