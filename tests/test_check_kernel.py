"""`check-kernel`: a right kernel passes, and each wrong one is told what it does, by name."""

from __future__ import annotations

import json
import os

import pytest
import torch
from click.testing import CliRunner

from fusion_evidence.kernels import eager, reference
from fusion_evidence.kernels.examples import forgets_one, plain, rotates_tail, writes_padding
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.check_kernel_cli import check_kernel_command
from fusion_evidence.lib.measure import check_kernel as ck
from fusion_evidence.lib.measure.check_kernel import Checks, Wrong, check_kernel
from fusion_evidence.lib.report.evidence import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = preset("compact")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEW = (1, 3)


def right(*arguments):
    return reference.qkv_prologue(*arguments)


def checks(kernel=right) -> Checks:
    return Checks("mine:kernel", kernel, DEVICE)


def few_tokens(kernel) -> str:
    """The symptom at small T, or nothing."""
    try:
        checks(kernel).over_tokens(SHAPE, FEW)
    except Wrong as wrong:
        return str(wrong)
    return ""


# --- the examples


@pytest.mark.parametrize("kernel", [right, plain.qkv_prologue], ids=["definition", "plain"])
def test_a_right_kernel_passes_everything(kernel, monkeypatch):
    monkeypatch.setattr(ck, "TOKENS", FEW)
    of = checks(kernel)
    found = {name: check() for name, check in of.all().items()}
    failed = {name: said for name, (verdict, said) in found.items() if verdict is Verdict.FAIL}
    assert not failed
    not_run = {name for name, (verdict, _) in found.items() if verdict is Verdict.NOT_RUN}
    assert not_run == ({"marker", "replay"} if DEVICE == "cpu" else {"marker"})
    exact = kernel is right
    assert (found["bits"][0] is Verdict.PASS) == exact
    assert ("bits of its own" in found["bits"][1]) != exact


def test_each_wrong_example_has_its_own_symptom():
    said = {
        one.__name__.rpartition(".")[2]: few_tokens(one.qkv_prologue)
        for one in (forgets_one, rotates_tail, writes_padding)
    }
    assert "the norm multiplies by w where it must by 1 + w" in said["forgets_one"]
    assert "columns 16 to 63 differ" in said["rotates_tail"]
    assert "the tail is rotated" in said["rotates_tail"]
    assert said["writes_padding"] == ""  # right, but for padding


def test_a_written_padding_slot_is_named():
    with pytest.raises(Wrong, match=r"slot -1 wrote: key_cache row 47 \(the last one\) changed"):
        checks(writes_padding.qkv_prologue).padding()


def test_padding_in_the_row_before_the_cache_is_seen():
    """What indexing in C makes of slot -1."""

    def before(*arguments):
        results = right(*arguments)
        slots, cache = arguments[5], arguments[6]
        if bool((slots < 0).any()):
            row = cache.shape[2] * cache.shape[3]
            flat = torch.empty(0, dtype=cache.dtype, device=cache.device)
            flat.set_(cache.untyped_storage())[cache.storage_offset() - row :][:row] = 1.0
        return results

    with pytest.raises(Wrong, match=r"row -1 .* before the first: memory of somebody else"):
        checks(before).padding()


# --- other mistakes, made on purpose


def test_named_mistakes_are_told_apart():
    def text_rows(*a):
        return right(*a[:4], a[4][:1].expand(3, -1), *a[5:])

    def sections(*a):
        from dataclasses import replace

        return right(*a[:8], replace(a[8], mrope_interleaved=False), a[9])

    def backwards(*a):
        half = a[8].rotary_dim // 2
        table = torch.cat((a[3][:, :half], -a[3][:, half:]), -1)
        return right(*a[:3], table, *a[4:])

    def gated(*a):
        q, k, v, gate = right(*a)
        return q, k, v, gate.sigmoid()

    def no_cache(*a):
        return right(*a[:6], a[6].clone(), a[7].clone(), *a[8:])

    expected = {
        text_rows: "the H and W rows of positions are ignored",
        sections: "take T, H and W rows in chunks",
        backwards: "the sine's sign",
        gated: "gate holds its sigmoid",
        no_cache: "k is right and key_cache is not",
    }
    for kernel, symptom in expected.items():
        assert symptom in few_tokens(kernel), kernel.__name__


def test_an_unknown_mistake_is_located():
    def one_element(*a):
        q, *others = right(*a)
        q[-1, 2, 5] += 1
        return q, *others

    assert "T=1, compact: q is" in few_tokens(one_element)
    assert "1 elements differ" in few_tokens(one_element)


def test_what_is_left_unwritten_is_seen():
    def lazy(*a):
        q, k, v, gate = right(*a)
        mine = torch.empty_like(v)
        mine[:, 0] = v[:, 0]
        return q, k, mine, gate

    with pytest.raises(Wrong, match=r"T=1: v holds 64 NaNs: never written"):
        checks(lazy).written()


def test_a_changed_input_is_seen():
    def in_place(*a):
        results = right(*a)
        a[0][:, : SHAPE.head_dim] = results[0][:, 0]
        return results

    with pytest.raises(Wrong, match="its input qkv was changed: "):
        checks(in_place).inputs_kept()


def test_bits_that_depend_on_the_batch_are_seen():
    def by_size(*a):
        q, *others = right(*a)
        return q + (2**-7 if len(q) == 3 else 0) * q, *others

    with pytest.raises(Wrong, match="q: the first 3 tokens have other bits alone than among 17"):
        checks(by_size).batch()


def test_strides_that_are_taken_for_granted_are_seen():
    def packed(*a):
        flat = torch.empty(0, dtype=a[0].dtype, device=a[0].device).set_(a[0].untyped_storage())
        return right(flat[: a[0].numel()].view_as(a[0]).nan_to_num(), *a[1:])

    assert few_tokens(packed) == ""
    with pytest.raises(Wrong, match=r"rows of qkv lie width \+ 64 apart; T=1"):
        checks(packed).row_stride()

    def holes(*a):
        results, cache = right(*a), a[6]
        torch.empty(0, dtype=cache.dtype, device=cache.device).set_(cache.untyped_storage())[-1] = 0
        return results

    with pytest.raises(Wrong, match="memory between the rows of key_cache was written"):
        checks(holes).cache_holes()


def test_a_marker_that_miscounts_is_seen():
    def twice(*a, marker=None):
        if marker is not None:
            marker.add_(2)
        return right(*a)

    with pytest.raises(Wrong, match="three calls, and its marker counted 6"):
        checks(twice).marker()


def test_slow_kernels_are_checked_as_far_as_time_allows():
    impatient = Checks("mine:kernel", right, DEVICE, seconds=0.0)
    verdict, said = impatient.over_tokens(SHAPE, (1, 2, 3))
    assert verdict is Verdict.PASS_WITH_LIMITATIONS
    assert said == "T = 1; too slow here for T = 2, 3"


def test_one_that_raises_says_so_in_one_line():
    def raises(*a):
        raise ValueError("no kernel image\nfor this device")

    said = "T=1, compact: raised ValueError: no kernel image for this device"
    assert few_tokens(raises) == said


# --- in a child process

CANDIDATES = """
import os, signal, time
import torch
from fusion_evidence.kernels import reference

def hangs(*arguments):
    if arguments[0].shape[0] == 5:
        time.sleep(600)
    return reference.qkv_prologue(*arguments)

def dies(*arguments):
    os.kill(os.getpid(), signal.SIGSEGV)

def wrong_shape(*arguments):
    q, k, v, gate = reference.qkv_prologue(*arguments)
    return q.flatten(1), k, v, gate

def mutates(*arguments):
    results = reference.qkv_prologue(*arguments)
    arguments[4].zero_()
    return results
"""


@pytest.fixture
def candidates(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(CANDIDATES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("candidates")
def test_one_that_hangs_is_stopped_and_named():
    found = check_kernel("theirs:hangs", device=DEVICE, seconds=20.0)
    first = found[0]
    assert (first.check, first.verdict) == ("inputs kept", Verdict.FAIL)
    assert first.symptom == "hangs: nothing came back in 20 s"
    assert {f.verdict for f in found[1:]} == {Verdict.NOT_RUN}
    assert {f.symptom for f in found[1:]} == {"after inputs kept, which hangs"}


@pytest.mark.usefixtures("candidates")
def test_one_that_takes_its_process_with_it_is_named():
    first, *others = check_kernel("theirs:dies", device=DEVICE)
    assert first.verdict is Verdict.FAIL
    assert first.symptom.startswith("took its process with it: SIGSEGV")
    assert others
    assert {f.verdict for f in others} == {Verdict.NOT_RUN}


@pytest.mark.usefixtures("candidates")
def test_the_command_prints_a_table_and_exits_by_the_verdicts():
    shown = CliRunner().invoke(check_kernel_command, ["theirs:wrong_shape"])
    assert shown.exit_code == 1
    assert "q: expected shape [1, 6, 64], got [1, 384]" in shown.output
    assert "NOT_RUN" in shown.output


@pytest.mark.slow
@pytest.mark.usefixtures("candidates")
def test_the_command_prints_json():
    written = CliRunner().invoke(check_kernel_command, ["theirs:mutates", "--json"])
    assert written.exit_code == 1
    found = {one["check"]: one for one in json.loads(written.output)}
    assert found["inputs kept"]["verdict"] == "FAIL"
    assert "its input positions was changed" in found["inputs kept"]["symptom"]
    assert found["values"]["verdict"] == "PASS"


def test_one_that_cannot_be_loaded_is_one_line_and_status_2():
    shown = CliRunner().invoke(check_kernel_command, ["no_such_module:kernel"])
    assert shown.exit_code == 2
    assert shown.output.startswith("error: candidate: 'no_such_module:kernel': there is no module")
    assert shown.output.count("\n") == 1


def test_the_fallback_is_no_candidate_where_there_is_padding():
    """`kernels.eager` says so: every slot must be >= 0."""
    with pytest.raises(Wrong, match="a token with slot -1 wrote"):
        checks(eager.qkv_prologue).padding()
