"""Records against what the prologue really returned, and differences of known place and size."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch
from forced_runs import BLOCK, FUSED, PER_OP, REQUESTS, STEPS, TABLE, forced, model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fusion_evidence.kernels import eager, op, reference
from fusion_evidence.kernels.shapes import preset
from fusion_evidence.lib.attribution import records as r
from fusion_evidence.lib.service.model import step

COMPACT = preset("compact")
LAYERS = 3
TOTAL = len(REQUESTS) * (STEPS + 1) * LAYERS


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``name -> (records, logits)`` of two that round alike and one that rounds after every operation."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name, numerics in {"baseline": FUSED, "control": FUSED, "per_op": PER_OP}.items():
        files = folder / f"{name}.records", folder / f"{name}.logits"
        forced(model(LAYERS, numerics), files[0], logits=files[1])
        found[name] = files
    return found


def changed(path, target, key, index, bits):
    """A copy of a record file with some bits of one element flipped."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors[key].view(torch.int16)[index] ^= bits
    save_file(tensors, target, metadata)
    return target


def test_a_record_is_what_the_prologue_made_and_attention_got(tmp_path):
    made = []

    def prologue(*arguments):
        outputs = reference.qkv_prologue(*arguments)
        made.append([tensor.clone() for tensor in outputs[:3]])
        return outputs

    file = r.RecordFile(forced(model(LAYERS, prologue=prologue), tmp_path / "records"))
    places = file.places("q", "k", "v")
    assert len(places) == 3 * TOTAL
    order = [
        (name, at, layer) for name in REQUESTS for at in range(STEPS + 1) for layer in range(LAYERS)
    ]
    for (name, at, layer), outputs in zip(order, made, strict=True):
        for tensor, expected in zip("qkv", outputs, strict=True):
            assert torch.equal(file.get(f"{name}/{at}/{layer}/{tensor}"), expected)
    assert file.shape == COMPACT
    assert file.device == "cpu"


OPAQUE = op.Configuration(COMPACT, FUSED, fallback="reference", force_fallback=True)


@pytest.mark.parametrize("opaque", [False, True], ids=["in_graph", "opaque"])
def test_recording_compiles_nothing_anew_and_changes_no_graph(opaque):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph.code)
        return graph

    prologue = op.OpaquePrologue(OPAQUE) if opaque else eager.qkv_prologue
    one = model(1, prologue=prologue)
    arguments = step(range(20), 0, TABLE, BLOCK)

    def call(compiled):
        with torch.no_grad():
            return compiled(*arguments, one.new_caches(12, BLOCK))

    compiled = torch.compile(one, backend=backend, fullgraph=True)
    plain = call(compiled)
    with r.Tape(COMPACT, inputs=True) as tape:
        tape.at("a", 0)
        recorded = call(compiled)
        assert len(graphs) == 1
        torch._dynamo.reset()
        call(torch.compile(one, backend=backend, fullgraph=True))
    assert torch.equal(plain, recorded)
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]
    assert len(tape) == 1


def test_inputs_of_an_opaque_prologue_inside_a_compiled_model(tmp_path):
    torch._dynamo.reset()
    one = model(2, prologue=op.OpaquePrologue(OPAQUE))
    compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
    file = r.RecordFile(forced(one, tmp_path / "opaque", forward=compiled, inputs=True))
    for place in file.places("qkv"):
        where = f"{place.request}/{place.step}/{place.layer}"
        again = reference.qkv_prologue(
            file.get(place.key),
            *(file.get(f"{place.layer}/{side}_weight") for side in "qk"),
            file.get("cos_sin"),
            file.get(f"{where}/positions"),
            torch.full((file.get(place.key).shape[0],), -1),
            *torch.zeros(2, 1, 1, COMPACT.kv_heads, COMPACT.head_dim, dtype=torch.bfloat16),
            COMPACT,
            FUSED,
        )
        for name, tensor in zip("qkv", again, strict=False):
            assert torch.equal(file.get(f"{where}/{name}"), tensor)
    assert len(file.places("qkv")) == len(file.places("q")) == TOTAL // LAYERS * 2
    plain = forced(model(2), tmp_path / "plain")
    assert r.differing(r.compare_records(tmp_path / "opaque", plain)) == 0


def shares(frame):
    """Share of differing elements (of hashes: of differing tensors), step by layer."""
    cells = r.counts(frame).set_index(["step", "layer"])
    return (cells["value"] / cells["n"]).unstack("layer")


def test_equal_runs_do_not_differ(runs):
    frame = r.compare_records(runs["baseline"][0], runs["control"][0])
    assert len(frame) == 3 * len(r.records(frame)) == 3 * TOTAL
    assert r.differing(frame) == 0
    assert r.first_divergence(frame) is None
    assert shares(frame).to_numpy().max() == 0
    assert frame["elements"].sum() == sum(
        (tokens + STEPS) * LAYERS * (COMPACT.q_size + 2 * COMPACT.kv_size)
        for tokens, _ in REQUESTS.values()
    )


def test_rounding_starts_in_the_first_prologue(runs):
    frame = r.compare_records(runs["baseline"][0], runs["per_op"][0])
    assert r.differing(frame) == TOTAL
    first = r.first_divergence(frame)
    assert (first.step, first.layer, first.tensor) == (0, 0, "q")
    assert first.same_projection
    assert "V is equal" in str(first)
    assert "prefill" in str(first)
    layer0 = frame[frame["layer"] == 0].set_index("tensor")
    assert not layer0.loc["v", "differs"].any()
    assert layer0.loc[["q", "k"], "pair_ulps"].max() <= 2
    # The norm's rounding point moves nothing where there is no rotation after it.
    assert layer0.loc["q", "unrotated"].sum() == 0 < layer0.loc["q", "mismatches"].sum()
    heat = shares(frame)
    assert list(heat.index) == list(range(STEPS + 1))
    assert list(heat.columns) == list(range(LAYERS))
    counts = r.counts(frame)
    assert counts["n"].sum() == frame["elements"].sum()
    assert counts["value"].sum() == frame["mismatches"].sum()
    assert (heat[0] < 0.2).all()
    assert (heat[2] > 0.5).all()


@pytest.mark.parametrize("tensor", ["q", "k", "v"])
def test_one_flipped_bit_is_located(runs, tmp_path, tensor):
    base = runs["baseline"][0]
    frame = r.compare_records(
        base, changed(base, tmp_path / "flipped", f"text/2/1/{tensor}", (0, 1, 5), 1)
    )
    assert r.differing(frame) == 1
    first = r.first_divergence(frame)
    assert (first.request, first.step, first.layer) == ("text", 2, 1)
    assert (first.tensor, first.index, first.ulp, first.mismatches) == (tensor, (0, 1, 5), 1, 1)
    assert first.tensors == (tensor,)
    assert "(0, 1, 5)" in str(first)
    assert ("the write to the cache" in str(first)) == (tensor == "v")


def test_the_first_divergence_is_the_earliest_of_all_requests(runs, tmp_path):
    base = runs["baseline"][0]
    late = changed(base, tmp_path / "late", "image/3/0/q", (0, 0, 0), 1)
    both = changed(late, tmp_path / "both", "text/0/2/k", (0, 0, 0), 1)
    first = r.first_divergence(r.compare_records(base, both))
    assert (first.request, first.step, first.layer, first.tensor) == ("text", 0, 2, "k")


def test_a_nan_is_an_infinite_difference(runs, tmp_path):
    base = runs["baseline"][0]
    held = r.RecordFile(base).get("text/0/0/k").view(torch.int16)[3, 0, 1]
    file = changed(base, tmp_path / "nan", "text/0/0/k", (3, 0, 1), int(held) ^ 0x7FC0)
    assert r.RecordFile(file).get("text/0/0/k")[3, 0, 1].isnan()
    row = r.compare_records(base, file).query("differs").iloc[0]
    assert math.isinf(row["pair_ulps"])
    assert math.isinf(row["relative"])


def test_hashes_count_the_same_records(runs, tmp_path):
    files = [
        forced(model(LAYERS, numerics), tmp_path / name, hashes=True)
        for name, numerics in {"a": FUSED, "b": FUSED, "c": PER_OP}.items()
    ]
    assert r.differing(r.compare_records(files[0], files[1])) == 0
    hashed = r.compare_records(files[0], files[2])
    whole = r.compare_records(runs["baseline"][0], runs["per_op"][0])
    for column in ("request", "step", "layer", "tensor", "elements", "differs"):
        assert list(hashed[column]) == list(whole[column])
    assert hashed["mismatches"].isna().all()
    first = r.first_divergence(hashed)
    assert (first.step, first.layer, first.tensor, first.index) == (0, 0, "q", None)
    assert "V is equal" in str(first)
    assert shares(hashed).loc[0, 0] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="hashes"):
        r.compare_records(files[0], runs["baseline"][0])
    assert files[0].stat().st_size < runs["baseline"][0].stat().st_size / 10
    with pytest.raises(ValueError, match="inputs"):
        r.Tape(COMPACT, hashes=True, inputs=True)


def test_files_of_other_records_are_refused(runs, tmp_path):
    base = runs["baseline"][0]
    part = forced(model(LAYERS), tmp_path / "part", requests={"text": REQUESTS["text"]})
    with pytest.raises(ValueError, match="one alone has image/0/0/k"):
        r.compare_records(base, part)
    with pytest.raises(ValueError, match="no shape"):
        r.RecordFile(runs["baseline"][1])
    with safe_open(base, framework="pt") as file:
        metadata = dict(file.metadata())
    metadata["shape"] = json.dumps(json.loads(metadata["shape"]) | {"eps": 0.5})
    save_file(load_file(base), tmp_path / "other", metadata)
    with pytest.raises(ValueError, match="of shape"):
        r.compare_records(base, tmp_path / "other")


@torch.no_grad()
def test_what_a_tape_takes_and_what_it_refuses():
    one = model(1)
    caches = one.new_caches(12, BLOCK)

    def call(ids, start=0):
        one(*step(ids, start, TABLE, BLOCK), caches)

    tape = r.Tape(COMPACT)
    with tape:
        call([1, 2, 3])  # a warm-up
        assert len(tape) == 0
        tape.at("a", 0, 3)
        call([4, 5, 6])
        call([1, 2, 3])  # repeated: replaces
        tape.at("a", 1, 1)
        call([7], 3)
        assert len(tape) == 2
        tape.at("a", 2, 2)
        with pytest.raises(RuntimeError, match="expected 2 tokens, got 1"):
            call([8], 4)
        assert tape.missing == {"a": 2}
        # Its request has failed; the others go on.
        tape.at("b", 0, 2)
        call([4, 5])
        assert tape.missing == {"a": 2}
        with pytest.raises(RuntimeError, match="nothing was recorded of a at step 2"):
            tape.at("a", 3, 1)
    call([1])
    assert len(tape) == 3


def test_logits_of_two_roundings(runs):
    same = r.compare_logits(runs["baseline"][1], runs["control"][1])
    assert len(same) == len(REQUESTS) * (STEPS + 1)
    assert same[["mismatches", "kl", "perturbation_at_top", "noise"]].to_numpy().max() == 0
    assert r.flips(same).empty
    frame = r.compare_logits(runs["baseline"][1], runs["per_op"][1])
    assert (frame["mismatches"] > 0).all()
    assert frame["kl"].between(0, 0.01).all()
    assert frame["noise_share"].between(1e-4, 0.05).all()
    assert (frame["margin_a"] >= 0).all()


def test_a_flip_is_a_coin_toss_only_between_near_tokens(tmp_path):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, generator=generator).clamp(max=2.5)
    noise = 0.01 * torch.randn(200, generator=generator)

    def pair(name, a, b):
        for side, tensor in (("a", a), ("b", b)):
            tape = r.LogitTape()
            tape.at("x", 3, tensor)
            tape.save(tmp_path / f"{name}.{side}")
        return r.compare_logits(tmp_path / f"{name}.a", tmp_path / f"{name}.b")

    near, far = logits.clone(), logits.clone()
    near[7], near[9] = 4.00, 3.99
    far[7], far[9] = 4.0, 3.0
    swap = torch.zeros(200)
    swap[7], swap[9] = -0.02, 0.02
    tossed = pair("near", near, near + noise + swap)
    row = tossed.iloc[0]
    assert (row["top1_a"], row["top1_b"], row["step"]) == (7, 9, 3)
    assert row["margin_a"] == pytest.approx(0.01, abs=1e-6)
    assert r.flips(tossed)["coin_toss"].tolist() == [True]
    assert r.flips(pair("far", far, far + noise + 40 * swap))["coin_toss"].tolist() == [False]
    # As near, but everything moved: no toss, another model.
    assert r.flips(pair("all", near, near.flip(0)))["coin_toss"].tolist() == [False]
    # A shift of all logits changes no probability.
    assert pair("shift", near, near + 1)["noise"].max() == pytest.approx(0, abs=1e-6)
    assert pair("shift", near, near + 1)["kl"].max() == pytest.approx(0, abs=1e-6)


def test_equal_top_logits_have_no_margin(tmp_path):
    tape = r.LogitTape()
    tape.at("x", 0, torch.tensor([[1.0, 3.0, 3.0]]))
    tape.save(tmp_path / "a")
    row = r.compare_logits(tmp_path / "a", tmp_path / "a").iloc[0]
    assert (row["top1_a"], row["top1_b"], row["margin_a"]) == (1, 1, 0.0)
    tape.at("x", 1, torch.zeros(3))
    tape.save(tmp_path / "b")
    with pytest.raises(ValueError, match="one alone has x/1"):
        r.compare_logits(tmp_path / "a", tmp_path / "b")


def test_runs_are_compared_within_given_steps(runs):
    (records, logits), (others, their_logits) = runs["baseline"], runs["per_op"]
    within = {"image": 2}
    frame = r.compare_records(records, others, within)
    whole = r.compare_records(records, others)
    pd.testing.assert_frame_equal(
        frame.reset_index(drop=True),
        whole[(whole.request == "image") & (whole.step < 2)].reset_index(drop=True),
    )
    assert len(frame) == 2 * LAYERS * 3
    assert len(r.compare_logits(logits, their_logits, within)) == 2
    assert r.RecordFile(records).calls() == r.logit_calls(logits)
    assert len(r.logit_calls(logits)) == len(REQUESTS) * (STEPS + 1)
    with pytest.raises(ValueError, match=r"holds no records of .'none': 1"):
        r.compare_records(records, others, {"none": 1})
