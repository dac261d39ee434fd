"""Records of vLLM's attention without vLLM: what is kept, what is left out, and how two are compared."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.measure.inputs import prologue_inputs, run
from fusion_evidence.lib.service import vllm_records
from fusion_evidence.lib.service.vllm_recorder import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = preset("compact")
LAYERS = ("model.0.attn", "model.1.attn")
CPU = torch.device("cpu")


@dataclass
class Metadata:
    """As the attention of vLLM gets it: one row of slots, the requests' ends, and their lengths."""

    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


def metadata(new, lengths, padding=0):
    """Of requests with ``new`` tokens in this step, ``lengths`` with them; then rows that only pad."""
    ends = torch.tensor([0, *new]).cumsum(0).int()
    slots = torch.cat((torch.arange(sum(new)), torch.full((padding,), -1)))
    return Metadata(slots, ends, torch.tensor(lengths).int())


def recorder(rows=8, inputs=False, layers=LAYERS):
    made = Recorder(rows, 32, CPU)
    for layer in layers:
        made.add(layer, SHAPE, torch.bfloat16, {"q_weight": torch.ones(3)}, inputs=inputs)
    return made


def step(made, value, tokens, given):
    """Every layer of one step: q of layer i is ``value + i``, k half of it, v a tenth."""
    for index, layer in enumerate(LAYERS):
        q = torch.full((tokens, SHAPE.q_heads, SHAPE.head_dim), value + index).bfloat16()
        k = torch.full((tokens, SHAPE.kv_heads, SHAPE.head_dim), (value + index) / 2).bfloat16()
        made.write(layer, q, k, k / 8, given)


def saved(made, tmp_path):
    counted = made.save(tmp_path / "records.safetensors")
    return counted, load_file(tmp_path / "records.safetensors")


def test_rows_come_one_after_the_other_with_their_step_and_their_place(tmp_path):
    made = recorder()
    step(made, 1.0, 3, metadata([3], [3]))
    step(made, 2.0, 2, metadata([1, 1], [4, 9]))
    counted, kept = saved(made, tmp_path)
    assert counted == {"rows": 5, "lost": 0}
    assert kept["tokens"].tolist() == [3, 3, 3, 2, 2]
    assert kept["positions"].tolist() == [0, 1, 2, 3, 8]
    assert kept["model.1.attn.q"][:, 0].tolist() == [2, 2, 2, 3, 3]
    assert kept["model.0.attn.k"][:, -1].tolist() == [0.5, 0.5, 0.5, 1, 1]
    assert kept["model.0.attn.q"].shape == (5, SHAPE.q_size)
    assert kept["model.0.attn.q_weight"].tolist() == [1, 1, 1]
    assert "model.0.attn.qkv" not in kept


def test_rows_that_pad_a_batch_and_runs_without_requests_leave_nothing(tmp_path):
    made = recorder()
    step(made, 9.0, 4, None)
    step(made, 9.0, 4, metadata([0], [1], padding=4))
    step(made, 5.0, 4, metadata([2, 1], [2, 7], padding=1))
    counted, kept = saved(made, tmp_path)
    assert counted == {"rows": 3, "lost": 0}
    assert kept["tokens"].tolist() == [4, 4, 4]
    assert kept["positions"].tolist() == [0, 1, 6]
    assert set(kept["model.0.attn.q"].unique().tolist()) == {5.0}


def test_slots_may_end_before_the_padding_does(tmp_path):
    made = recorder()
    given = metadata([2], [2])
    step(made, 5.0, 4, given)
    assert saved(made, tmp_path)[0] == {"rows": 2, "lost": 0}


def test_what_has_no_room_is_counted(tmp_path):
    made = recorder(rows=4)
    step(made, 1.0, 3, metadata([3], [3]))
    step(made, 2.0, 3, metadata([3], [6]))
    counted, kept = saved(made, tmp_path)
    assert counted == {"rows": 4, "lost": 2}
    assert kept["positions"].tolist() == [0, 1, 2, 3]
    assert kept["model.0.attn.q"][:, 0].tolist() == [1, 1, 1, 2]
    made.reset()
    step(made, 3.0, 1, metadata([1], [9]))
    counted, kept = saved(made, tmp_path)
    assert (counted, kept["positions"].tolist()) == ({"rows": 1, "lost": 0}, [8])


def test_a_staged_projection_lies_beside_its_rows(tmp_path):
    made = recorder(inputs=True)
    made.stage(torch.full((2, SHAPE.qkv_width), 7.0).bfloat16())
    step(made, 1.0, 2, metadata([2], [2]))
    kept = saved(made, tmp_path)[1]
    assert kept["model.1.attn.qkv"].shape == (2, SHAPE.qkv_width)
    assert set(kept["model.0.attn.qkv"].unique().tolist()) == {7.0}


# --- two servers

FOUR = Numerics("fp32_through", Reduction(16, 4))
"""What the servers of the tests compute."""


def server(tmp_path, name, numerics, *, operator=False, order=None, also=0, spoil=None):
    """Records of a server that was given some tokens: 24 in one step, then one in each of six.

    order: of the rows of the first step. also: rows that only this server has.
    """
    made = recorder(rows=64, inputs=operator)
    inputs = prologue_inputs(SHAPE, 40, position_dims=1, random_angles=True, seed=3)
    inputs = replace(inputs, positions=torch.arange(40))
    results = run(reference.qkv_prologue, inputs, SHAPE, numerics)
    if spoil:
        tensor, row = spoil
        results[tensor][row, 0, 0] += 1
    steps = [(list(order or range(24)))] + [[24 + index] for index in range(6 + also)]
    v = inputs.qkv[:, -SHAPE.kv_size :]
    for rows in steps:
        given = metadata([1] * len(rows), [row + 1 for row in rows])
        for layer in LAYERS:
            made.stage(inputs.qkv[rows])
            made.write(layer, results["q"][rows], results["k"][rows], v[rows], given)
    constants = {name: getattr(inputs, name) for name in ("q_weight", "k_weight", "cos_sin")}
    path = tmp_path / f"{name}.safetensors"
    made.save(path)
    kept = load_file(path)
    for layer in LAYERS:
        kept |= {f"{layer}.{key}": value.clone() for key, value in constants.items()}
    vllm = vllm_records.VllmRecords(path)
    save_file(
        kept,
        path,
        {
            "shape": json.dumps(vars(vllm.shape)),
            "layers": json.dumps(vllm.layers),
            "device": vllm.device,
        },
    )
    return path


def test_equal_servers_differ_nowhere_whatever_the_order_of_rows(tmp_path):
    one = server(tmp_path, "one", FOUR)
    other = server(tmp_path, "other", FOUR, order=range(23, -1, -1))
    frame = vllm_records.compare(one, other)
    assert len(frame) == 2 * 3 * 2  # layers, tensors, sizes of steps
    assert frame.groupby("tokens").records.unique().map(list).to_dict() == {1: [6], 24: [24]}
    assert (frame.differing.sum(), frame.mismatches.sum()) == (0, 0)
    assert frame.first_position.isna().all()


@pytest.mark.parametrize(("tensor", "row", "tokens"), [("q", 5, 24), ("k", 27, 1)])
def test_one_element_is_found_where_it_is(tmp_path, tensor, row, tokens):
    frame = vllm_records.compare(
        server(tmp_path, "one", FOUR), server(tmp_path, "two", FOUR, spoil=(tensor, row))
    )
    wrong = frame[frame.differing > 0]
    assert set(wrong.layer) == set(LAYERS)
    assert set(wrong.tensor) == {tensor}
    assert set(wrong.tokens) == {tokens}
    assert wrong[["differing", "mismatches", "first_position"]].to_numpy().tolist() == 2 * [
        [1, 1, row]
    ]


def test_rows_that_one_has_alone_are_left_out(tmp_path):
    longer = server(tmp_path, "longer", FOUR, also=2)
    frame = vllm_records.compare(server(tmp_path, "one", FOUR), longer)
    assert frame[frame.tokens == 1].records.unique().tolist() == [6]


def test_nothing_in_common_is_refused(tmp_path):
    one, other = server(tmp_path, "one", FOUR), recorder()
    step(other, 1.0, 3, metadata([3], [3]))
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="no row in common"):
        vllm_records.compare(one, tmp_path / "other.safetensors")


def test_calibration_finds_the_numerics_by_the_size_of_the_step(tmp_path):
    native = server(tmp_path, "native", FOUR)
    operator = server(tmp_path, "operator", Numerics("per_op", Reduction(16, 4)), operator=True)
    found = vllm_records.calibrate(native, operator)
    assert {size: one.rows for size, one in found.items()} == {1: 6, 24: 24}
    for one in found.values():
        assert one.numerics is not None
        assert one.numerics.rounding == "fp32_through"
        assert one.fingerprint.mismatches == 0
    assert list(vllm_records.calibrate(native, operator, tokens=[1])) == [1]


def test_calibration_says_so_where_nothing_fits(tmp_path):
    native = server(tmp_path, "native", FOUR, spoil=("q", 26))
    operator = server(tmp_path, "operator", FOUR, operator=True)
    found = vllm_records.calibrate(native, operator)
    assert found[1].numerics is None
    assert found[1].fingerprint.mismatches == 1
    assert found[24].numerics is not None


def test_calibration_needs_projections(tmp_path):
    native = server(tmp_path, "native", FOUR)
    with pytest.raises(ValueError, match=r"holds no projections of model\.0\.attn"):
        vllm_records.calibrate(native, native)


def test_records_of_other_layers_are_refused(tmp_path):
    for name, layers in (("two", LAYERS), ("one", LAYERS[:1])):
        recorder(layers=layers).save(tmp_path / name)
    with pytest.raises(ValueError, match="of different layers"):
        vllm_records.opened(tmp_path / "two", tmp_path / "one")


# --- forced tokens


@pytest.fixture
def forced(monkeypatch):
    """`vllm_forced` over the little of vLLM that it needs."""
    moves = SimpleNamespace(SWAP="swap", UNIDIRECTIONAL="one way")
    parts = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.sample": {},
        "vllm.v1.sample.logits_processor": {
            "BatchUpdate": object,
            "LogitsProcessor": object,
            "MoveDirectionality": moves,
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    name = "fusion_evidence.lib.service.vllm_forced"
    monkeypatch.delitem(sys.modules, name, raising=False)
    import importlib

    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def update(*, added=(), removed=(), moved=()):
    return SimpleNamespace(added=added, removed=removed, moved=moved)


def parameters(name, tokens):
    return SimpleNamespace(extra_args=vllm_records.forced(name, tokens)["vllm_xargs"])


def test_a_request_says_what_it_shall_and_keeps_what_it_would(forced):
    made, said = forced.ForcedTokens(None, CPU, False), []
    made.update_state(update(added=[(1, parameters("r1", [4, 2]), None, said)]))
    for expected, best in ((4, 3), (2, 0)):
        logits = torch.zeros(3, 6)
        logits[:, best] = 1.0
        made.update_state(None)
        result = made.apply(logits)
        assert result[1].argmax() == expected
        assert result[0].argmax() == result[2].argmax() == best
        said.append(expected)
    logits = torch.eye(6)[:3]
    assert torch.equal(made.apply(logits.clone()), logits)  # it has said all of them
    assert forced.choices() == {"r1": [3, 0]}
    forced.reset_choices()
    assert forced.choices() == {}


def test_a_step_that_is_done_again_is_kept_once(forced):
    """A prompt in parts is sampled after each, and what comes of all but the last is dropped."""
    made = forced.ForcedTokens(None, CPU, False)
    made.update_state(update(added=[(0, parameters("r1", [4]), None, [])]))
    made.apply(torch.eye(6)[1:2].clone())
    made.apply(torch.eye(6)[5:6].clone())
    assert forced.choices() == {"r1": [5]}


def test_requests_keep_their_tokens_when_they_move(forced):
    made = forced.ForcedTokens(None, CPU, False)
    free = SimpleNamespace(extra_args=None)
    made.update_state(
        update(
            added=[
                (0, parameters("a", [1]), None, []),
                (1, parameters("b", [2]), None, []),
                (2, free, None, []),
            ]
        )
    )
    made.update_state(update(moved=[(0, 1, "swap")]))
    assert made.apply(torch.zeros(3, 6)).argmax(-1).tolist() == [2, 1, 0]
    made.update_state(update(removed=[0], moved=[(1, 0, "one way")]))
    assert made.apply(torch.zeros(3, 6)).argmax(-1).tolist() == [1, 0, 0]


def test_tokens_that_are_none_are_refused_before_the_request_runs(forced):
    wrong = SimpleNamespace(extra_args={"fusion_forced": "1,two"})
    with pytest.raises(ValueError, match="fusion_forced: expected tokens with commas between"):
        forced.ForcedTokens.validate_params(wrong)
    forced.ForcedTokens.validate_params(SimpleNamespace(extra_args=None))


def test_the_fields_of_a_request():
    fields = vllm_records.forced("r1", [5, 6])
    assert fields["max_tokens"] == 2
    assert fields["ignore_eos"] is True
    assert fields["vllm_xargs"] == {"fusion_forced": "5,6", "fusion_request": "r1"}
