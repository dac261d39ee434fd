"""Every planted fault is found, alone and under the drift of other rounding; no rounding is called one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forced_runs import BLOCK, FUSED, PER_OP, TABLE, forced, model

from fusion_evidence.kernels import eager, op, reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.attribution.faults import FAULTS, Fault, diagnose, fault
from fusion_evidence.lib.attribution.records import Tape, compare_records, differing
from fusion_evidence.lib.service.model import rotary_table, step

COMPACT = preset("compact")
PLACES = {
    "dropped_mask": "layer 0, from its attention on",
    "forgotten_one_plus_w": "the norm of the prologue of layer 0",
    "wrong_section": "the rotation of the prologue of layer 0",
    "off_by_one_slot": "the cache write of layer 0",
    "stale_slot": "the cache write of layer 0",
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return forced(model(), tmp_path_factory.mktemp("baseline") / "records")


def run(path, numerics=FUSED, planted=None, prologue=reference.qkv_prologue, **more):
    """Records of the model with a fault, if any, planted."""
    if planted:
        prologue = fault(planted).prologue(prologue)
    one = model(numerics=numerics, prologue=prologue)
    return forced(one, path, forward=fault(planted).forward(one) if planted else one, **more)


IMAGE = {"image": (71, True)}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two layers, one request: two graphs to compile."""
    return forced(model(2), tmp_path_factory.mktemp("small") / "records", requests=IMAGE)


def in_graph(path, planted=None):
    """Records of the compiled model, the prologue and its fault in the graph."""
    one = fault(planted) if planted else Fault("none", "")
    torch._dynamo.reset()
    faulty = model(2, prologue=one.prologue(eager.qkv_prologue))
    compiled = one.forward(torch.compile(faulty, backend="aot_eager", fullgraph=True))
    return forced(faulty, path, forward=compiled, requests=IMAGE)


def test_every_fault_has_a_place():
    assert FAULTS.keys() == PLACES.keys()
    assert all(name == one.name and one.what for name, one in FAULTS.items())
    with pytest.raises(
        ValueError, match=r"unknown fault 'typo'; known: dropped_mask, .*stale_slot"
    ):
        fault("typo")


@pytest.mark.parametrize("numerics", [FUSED, PER_OP], ids=["alone", "under_drift"])
@pytest.mark.parametrize("planted", FAULTS)
def test_a_planted_fault_is_found(baseline, tmp_path, planted, numerics):
    found = diagnose(compare_records(baseline, run(tmp_path / "faulty", numerics, planted)))
    assert found.verdict == "fault"
    assert found.place == PLACES[planted]
    assert found.excess > 10
    assert str(found).startswith(f"fault in {found.place}: ")


@pytest.mark.parametrize("planted", FAULTS)
def test_a_fault_is_found_in_a_compiled_model(small, tmp_path, planted):
    """In the graph, eager's rounding; the baseline has the reference's, so there is drift too."""
    found = diagnose(compare_records(small, in_graph(tmp_path / "faulty", planted)))
    assert (found.verdict, found.place) == ("fault", PLACES[planted])


@pytest.mark.parametrize("planted", FAULTS)
def test_a_fault_goes_around_an_opaque_prologue(baseline, tmp_path, planted):
    configuration = op.Configuration(COMPACT, FUSED, fallback="reference", force_fallback=True)
    opaque = op.OpaquePrologue(configuration)
    right = run(tmp_path / "right", prologue=opaque)
    assert differing(compare_records(baseline, right)) == 0
    found = diagnose(compare_records(baseline, run(tmp_path / "faulty", FUSED, planted, opaque)))
    assert (found.verdict, found.place) == ("fault", PLACES[planted])


@pytest.mark.parametrize(
    "numerics",
    [
        PER_OP,
        Numerics("storage", Reduction(32, 2)),
        replace(PER_OP, reduction=Reduction(8, 8, order="strided")),
        replace(FUSED, contraction="cos"),
    ],
    ids=str,
)
def test_other_rounding_is_no_fault(baseline, tmp_path, numerics):
    found = diagnose(compare_records(baseline, run(tmp_path / "other", numerics)))
    assert found.verdict in ("rounding", "equal")
    assert (found.verdict == "rounding") == (numerics.rounding != "fp32_through")
    assert found.excess < 0.7


def test_a_compiled_model_is_no_fault(small, tmp_path):
    assert diagnose(compare_records(small, in_graph(tmp_path / "right"))).verdict == "rounding"


def test_sixteen_layers_of_drift_are_no_fault(tmp_path):
    files = [
        forced(model(16, numerics), tmp_path / name)
        for name, numerics in (("a", FUSED), ("b", PER_OP))
    ]
    found = diagnose(compare_records(*files))
    assert found.verdict == "rounding"
    assert found.excess < 0.7


@pytest.mark.parametrize("where", ["table", "neighbour"])
def test_rounding_elsewhere_is_no_fault(baseline, tmp_path, where):
    """A rotary table in fp32; or every output of a layer's MLP moved to its neighbour in bfloat16."""
    one = model()
    if where == "table":
        one.cos_sin = rotary_table(COMPACT, 4096)
    else:
        down = one.layers[0].down_proj
        down.register_forward_hook(
            lambda *call: (call[2].view(torch.int16) ^ 1).view(call[2].dtype)
        )
    found = diagnose(compare_records(baseline, forced(one, tmp_path / "other")))
    assert found.verdict == "rounding"
    assert found.excess < 0.7


def test_text_alone_cannot_see_a_wrong_section(tmp_path):
    """Its three position rows are equal: hence the requests with images."""
    only = {"text": (40, False)}
    right = run(tmp_path / "right", requests=only)
    faulty = run(tmp_path / "faulty", planted="wrong_section", requests=only)
    assert diagnose(compare_records(right, faulty)).verdict == "equal"


@torch.no_grad()
def test_the_least_visible_section_fault_is_found(tmp_path):
    """H and W one apart, in a single token."""
    one = model(1)
    for name, rows in {"right": (20, 30, 31), "faulty": (20, 31, 30)}.items():
        positions = torch.tensor(rows)[:, None]
        with Tape(COMPACT) as tape:
            tape.at("token", 0)
            one(*step([5], 0, TABLE, BLOCK, positions=positions), one.new_caches(12, BLOCK))
        tape.save(tmp_path / name)
    found = diagnose(compare_records(tmp_path / "right", tmp_path / "faulty"))
    assert (found.verdict, found.place) == ("fault", PLACES["wrong_section"])


@torch.no_grad()
def test_a_stale_slot_is_late_by_one_step_every_time():
    seen = []

    def forward(ids, positions, slots, *rest):
        seen.append(slots.tolist())
        return ids

    late = fault("stale_slot").forward(forward)
    caches = []
    for at in (0, 10, 11, 12, 13):
        late(*step([1] * (10 if at == 0 else 1), at, range(4), 16), caches)
    assert seen == [list(range(10)), [10], [10], [11], [12]]
    again = fault("stale_slot").forward(forward)
    again(*step([1], 20, range(4), 16), caches)
    assert seen[-1] == [20]  # each wrapper has a memory of its own


def test_an_off_by_one_slot_leaves_padding_alone():
    slots = torch.tensor([-1, 0, 31])
    got = []

    def prologue(*arguments):
        got.append(arguments[5].tolist())

    cache = torch.zeros(2, 16, 2, 64)
    fault("off_by_one_slot").prologue(prologue)(*[None] * 5, slots, cache, cache, COMPACT, FUSED)
    assert got == [[-1, 1, 0]]


def test_equal_runs_and_hashes(baseline, tmp_path):
    found = diagnose(compare_records(baseline, baseline))
    assert (found.verdict, found.place, found.excess) == ("equal", "", 0.0)
    hashed = run(tmp_path / "hashes", hashes=True)
    with pytest.raises(ValueError, match="whole tensors"):
        diagnose(compare_records(hashed, hashed))
