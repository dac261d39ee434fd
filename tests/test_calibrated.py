"""The calibration file: kept as it was found, refused elsewhere by name, and by one flipped bit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.attribution.calibrated import (
    CalibrationFile,
    GraphCalibration,
    StaleCalibration,
)
from fusion_evidence.lib.attribution.calibration import Fit, fit
from fusion_evidence.lib.measure.compare import upper_bound
from fusion_evidence.lib.measure.inputs import prologue_inputs, run
from fusion_evidence.lib.measure.machine import detect

COMPACT = preset("compact")
PINS = {"deterministic": True, "sdpa": "math", "first_traced": 1024, "body_first_traced": None}
DECODE = Numerics("fp32_through", Reduction(16, 4, order="strided"), "cos", Reduction(16, 4))
PREFILL = Numerics("storage", Reduction(32, 2))
TREES = [DECODE.reduction, Reduction(16, 4), PREFILL.reduction]
"""Few, so that these tokens tell them apart."""


pytestmark = pytest.mark.usefixtures("one_thread")


def observed(numerics):
    return lambda inputs: run(reference.qkv_prologue, inputs, COMPACT, numerics)


def batch(seed, tokens=300):
    return prologue_inputs(COMPACT, tokens, dtype=torch.float16, seed=seed)


@pytest.fixture(scope="module")
def calibration():
    graphs = {"decode": DECODE, "prefill": PREFILL}
    found = {name: fit(observed(n), [batch(0, 3000)], COMPACT, TREES) for name, n in graphs.items()}
    return CalibrationFile.of(
        detect(), COMPACT, PINS, {name: GraphCalibration.of(fits) for name, fits in found.items()}
    )


def test_a_file_is_read_as_it_was_written(calibration, tmp_path):
    path = tmp_path / "deeper" / "calibration.json"
    calibration.save(path)
    again = CalibrationFile.load(path)
    assert again == calibration
    assert again.shape == COMPACT
    decode = again.graphs["decode"]
    assert decode.numerics == DECODE
    assert decode.elements == 3000 * (COMPACT.q_size + COMPACT.kv_size)
    assert decode.bound == upper_bound(decode.elements)
    assert len(decode.rejected) > 5
    assert all(one.mismatches > 0 for one in decode.rejected)
    few = decode.rejected_by_fewer_than(20)
    assert set(few) == {one for one in decode.rejected if one.mismatches < 20}
    again.check(detect(), COMPACT, PINS)


def test_the_files_text_can_be_read(calibration, tmp_path):
    calibration.save(tmp_path / "file.json")
    raw = json.loads((tmp_path / "file.json").read_text())
    assert raw["schema_version"] == 1
    assert raw["versions"]["torch"] == torch.__version__
    assert raw["graphs"]["decode"]["numerics"]["rounding"] == "fp32_through"
    assert raw["graphs"]["decode"]["numerics"]["reduction"]["order"] == "strided"


def test_nothing_that_fits_is_no_calibration():
    fits = [Fit(DECODE, 3, 1000), Fit(PREFILL, 90, 1000)]
    with pytest.raises(ValueError, match=r"no candidate fits: .*cos, leaves 3 of 1,000 elements"):
        GraphCalibration.of(fits)
    alike = GraphCalibration.of([Fit(DECODE, 0, 10), Fit(PREFILL, 0, 10)])
    assert [one.numerics for one in alike.alike] == [PREFILL]
    assert alike.rejected == ()


@pytest.mark.parametrize(
    ("key", "machine", "shape", "pins"),
    [
        ("machine was 'cpu', is 'elsewhere'", {"name": "elsewhere"}, {}, {}),
        ("arch was .*, is 'gfx936'", {"arch": "gfx936"}, {}, {}),
        ("versions.torch was .*, is '2.4.0'", {"versions": {"torch": "2.4.0"}}, {}, {}),
        ("versions.triton was 'not set', is '9'", {"versions": {"triton": "9"}}, {}, {}),
        ("versions.python was .*, is '3.10.0'", {"versions": {"python": "3.10.0"}}, {}, {}),
        ("versions.hip was 'not set', is '6'", {"versions": {"hip": "6"}}, {}, {}),
        ("shape.head_dim was 64, is 32", {}, {"head_dim": 32}, {}),
        ("shape.eps was 1e-06, is 1e-05", {}, {"eps": 1e-5}, {}),
        ("pins.sdpa was 'math', is 'default'", {}, {}, {"sdpa": "default"}),
        ("pins.first_traced was 1024, is 65", {}, {}, {"first_traced": 65}),
        ("pins.caches_off was 'not set', is True", {}, {}, {"caches_off": True}),
    ],
)
def test_a_foreign_file_is_refused_by_the_key_that_differs(calibration, key, machine, shape, pins):
    here = detect()
    known = calibration.model_copy(
        update={"versions": {k: v for k, v in calibration.versions.items() if k != "triton"}}
    )
    versions = {k: v for k, v in here.versions.items() if k != "triton"}
    update = machine | {"versions": versions | machine.get("versions", {})}
    other = here.model_copy(update=update), replace(COMPACT, **shape), PINS | pins
    with pytest.raises(StaleCalibration, match=f"{key}; calibrate again"):
        known.check(*other)
    known.check(here.model_copy(update={"versions": versions}), COMPACT, PINS)


def test_every_difference_is_named_and_a_name_is_none(calibration):
    calibration.check(detect(), replace(COMPACT, name="checkpoint"), PINS)
    with pytest.raises(StaleCalibration) as refusal:
        calibration.check(detect(), replace(COMPACT, eps=1e-5), {"deterministic": False})
    for key in ("shape.eps", "pins.deterministic", "pins.sdpa was 'math', is 'not set'"):
        assert key in str(refusal.value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text[:-30], "file: Invalid JSON"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "schema_version"),
        (lambda text: text.replace('"lanes": 16', '"lanes": 17', 1), "power of two, got 17"),
        (lambda text: text.replace('"storage"', '"stored"'), "rounding"),
        (lambda text: text.replace('"pins"', '"pin"'), "pins: Field required"),
    ],
    ids=["cut", "version", "tree", "rounding", "key"],
)
def test_an_unreadable_file_is_refused(calibration, tmp_path, spoil, says):
    path = tmp_path / "file.json"
    calibration.save(path)
    text = path.read_text()
    assert spoil(text) != text
    path.write_text(spoil(text))
    with pytest.raises(StaleCalibration, match=says):
        CalibrationFile.load(path)


def test_no_file_is_refused(tmp_path):
    with pytest.raises(StaleCalibration, match=r"there is no calibration at .*: calibrate first"):
        CalibrationFile.load(tmp_path / "file.json")


def test_what_holds_is_confirmed_quickly(calibration):
    for graph, numerics in {"decode": DECODE, "prefill": PREFILL}.items():
        found = calibration.revalidate(graph, observed(numerics), [batch(7), batch(8)])
        assert found.elements == 600 * (COMPACT.q_size + COMPACT.kv_size)
        assert found.bound == upper_bound(found.elements)
        assert found.seconds < 2


@pytest.mark.parametrize("output", ["q", "k"])
def test_one_flipped_bit_is_noticed(calibration, output):
    def flipped(inputs):
        outputs = observed(DECODE)(inputs)
        outputs[output].view(torch.int16)[123, 1, 45] ^= 1
        return outputs

    with pytest.raises(StaleCalibration, match=r"decode.*no longer holds: 1 of .*\(123, 1, 45\)"):
        calibration.revalidate("decode", flipped, [batch(7)])


@pytest.mark.parametrize(
    "changed",
    [
        Numerics("fp32_through", DECODE.reduction, "none", DECODE.k_reduction),
        Numerics("per_op", DECODE.reduction, k_reduction=DECODE.k_reduction),
        Numerics("fp32_through", Reduction(8, 8), "cos", DECODE.k_reduction),
    ],
    ids=str,
)
def test_a_compiler_that_now_rounds_otherwise_is_noticed(calibration, changed):
    """Another contraction, another rounding; another tree takes more tokens to show."""
    batches = [batch(seed, 3000) for seed in range(7, 10)]
    with pytest.raises(StaleCalibration, match="no longer holds"):
        calibration.revalidate("decode", observed(changed), batches)


def test_a_graph_without_calibration_and_a_check_without_inputs(calibration):
    part = calibration.model_copy(update={"graphs": {"decode": calibration.graphs["decode"]}})
    with pytest.raises(StaleCalibration, match="no calibration of prefill"):
        part.revalidate("prefill", observed(PREFILL), [batch(7)])
    with pytest.raises(ValueError, match="at least one batch"):
        part.revalidate("decode", observed(DECODE), [])
