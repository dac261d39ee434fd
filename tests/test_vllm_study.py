"""Notebook 07's servers and what follows from them, at servers that only behave like vLLM's."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from dataclasses import asdict, replace

import fake_vllm
import numpy as np
import pandas as pd
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from fusion_evidence.kernels.numerics import Numerics, Reduction
from fusion_evidence.lib import paths
from fusion_evidence.lib.attribution.fingerprint import Fingerprint
from fusion_evidence.lib.attribution.integration import Effect, Outcome
from fusion_evidence.lib.service import vllm_findings as findings
from fusion_evidence.lib.service import vllm_study as study_module
from fusion_evidence.lib.service.metrics import Reply
from fusion_evidence.lib.service.vllm_hook import KEY
from fusion_evidence.lib.service.vllm_plugin import Settings as PluginSettings
from fusion_evidence.lib.service.vllm_records import Calibrated, VllmRecords
from fusion_evidence.lib.service.vllm_study import (
    ARMS,
    ArmResult,
    Pass,
    Plan,
    Study,
    groups,
    left_out,
)

SMALL = dict(
    python=sys.executable, version="0.25.1", on_device=False, requests=("r01", "r02"), new_tokens=5,
    concurrency=(1, 2), sizes=(1,), calibration_requests=2, calibration_tokens=4, ready_s=30.0,
)  # fmt: skip


def plan(**more) -> Plan:
    return Plan(**(SMALL | more))


@pytest.fixture(scope="module", autouse=True)
def fake(tmp_path_factory):
    """Servers get a vLLM that only behaves like one; all code is hashed elsewhere, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        folder = fake_vllm.install(tmp_path_factory.mktemp("fake"))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setattr(study_module, "code_hash", lambda: "code")
        yield


@pytest.fixture(scope="module")
def served(fake, tmp_path_factory):
    lines: list[str] = []
    study = Study(plan(), tmp_path_factory.mktemp("served"), lines.append)
    study.checkpoints()
    study.run(["native", "native_again", "opaque_eager", "python_branch", "fallback_only"])
    return study, lines


def copied(study, folder, lines=None) -> Study:
    """A study with the same results, in a folder of its own."""
    shutil.copytree(study.folder, folder, dirs_exist_ok=True)
    copy = Study(study.plan, folder, (lines if lines is not None else []).append)
    copy.results |= study.results
    return copy


# --- the servers


def test_the_version_is_the_servers_own():
    assert study_module.vllm_version(sys.executable) == ("0.25.1", "")
    version, why = study_module.vllm_version("/nowhere/python")
    assert (version, "cannot be started" in why) == ("", True)


def test_all_are_asked_the_same_and_one_that_fails_stops_nobody(served):
    study, lines = served
    results = study.results
    assert [name for name, one in results.items() if one.error] == ["python_branch"]
    assert results["python_branch"].error.startswith("PluginError: it does not start\n")
    native = results["native"]
    assert native.line.endswith("Application startup complete.")
    assert [(one.concurrency, one.turn) for one in native.passes] == [(1, 0), (1, 1), (2, 0)]
    assert all(len(reply.tokens) == 5 for one in native.passes for reply in one.replies)
    assert native.records == {
        "served": {"rows": 10, "lost": 0},
        "calibration": {"rows": 8, "lost": 0},
    }
    assert sum("ready (" in line for line in lines) == 4
    for name in results:
        assert (study.folder / name / "server.log").is_file()


def test_the_layers_counted_what_the_replies_say(served):
    study, _ = served
    counts = {(c.mode, c.concurrency): c for c in findings.counts(study.results)}
    alone = counts["opaque_eager", 1]
    assert (alone.kernel, alone.fallback) == (2 * 8, 2 * 2) == alone.expected
    assert (alone.exact, alone.share) == (True, 0.8)
    assert counts["fallback_only", 1].expected == (0, 2 * 10)
    assert counts["opaque_eager", 2].method == "vLLM's statistics of its steps"
    assert findings.marker_verdict([alone])[0] == "PASS"


def test_records_and_texts_beside_the_baselines(served):
    study, _ = served
    same = findings.outcome(study, "native_again")
    assert (same.records, same.records_total, same.texts, same.texts_total) == (0, 60, 0, 2)
    other = findings.outcome(study, "fallback_only")
    assert (other.records, other.first) == (20, "layers.0, q, T = 1")
    assert findings.changed_choices(study.results, "fallback_only") == (0, 10)
    assert findings.differs_verdict(other, same)[0] == "PASS"
    assert findings.differs_verdict(same, same)[0] == "FAIL"
    assert findings.exact_verdict(same, same)[0] == "PASS"
    assert findings.exact_verdict(other, same)[0] == "FAIL"
    assert findings.outcome(study, "python_branch").error.startswith("python_branch: ")
    frame = findings.differences(study, "fallback_only")
    assert frame[frame.differing > 0].tensor.unique().tolist() == ["q"]


def test_an_operator_at_every_size_is_compared_at_every_size(served, tmp_path):
    study = copied(served[0], tmp_path)
    same = findings.outcome(study, "native_again")
    verdict = findings.every_size_verdict(study, "opaque_eager", same, same)
    assert verdict == ("PASS", verdict[1])
    assert verdict[1].endswith("first layer, T = 1: 0 of 12 elements")
    assert findings.every_size_verdict(study, "native_again", same, same)[0] == "INCONCLUSIVE"
    differs = findings.outcome(study, "fallback_only")
    assert findings.every_size_verdict(study, "fallback_only", differs, same)[0] == "FAIL"

    def another(tensors):
        tensors["layers.0.k"][tensors["tokens"] == 1] += 1

    rewritten(study, "opaque_eager", another)
    assert findings.every_size_verdict(study, "opaque_eager", same, same)[0] == "FAIL"


def rewritten(study, name, change, what="calibration"):
    """Write an arm's records again, changed in place by ``change``."""
    file = study.file(name, what)
    tensors, records = load_file(file), VllmRecords(file)
    change(tensors)
    metadata = {"device": records.device, "layers": json.dumps(records.layers)}
    save_file(tensors, file, metadata | {"shape": json.dumps(asdict(records.shape))})


def test_rows_computed_otherwise_before_the_first_prologue_all_differ(served, tmp_path):
    study = copied(served[0], tmp_path)

    def three(tensors):
        tensors["layers.0.v"][:3] += 4096

    def every(tensors):  # so that none is left to compare
        tensors["layers.0.v"] += 4096

    rewritten(study, "fallback_only", three, "served")
    found = findings.outcome(study, "fallback_only")
    assert found.records_total == 60
    assert found.records == 3 * 2 * 3 + 7 * 2
    assert found.first.startswith("before the first prologue")
    rewritten(study, "fallback_only", every, "served")
    found = findings.outcome(study, "fallback_only")
    assert (found.records, found.records_total) == (60, 60)


def test_a_finished_arm_is_taken_over_and_another_plan_starts_it_again(served, tmp_path):
    lines: list[str] = []
    study, again = served[0], copied(served[0], tmp_path, lines)
    found = again.run(["native", "opaque_eager"])
    assert found["native"] == study.results["native"]
    assert [line.split()[2:6] for line in lines] == [
        ["native:", "taken", "over,", "of"],
        ["opaque_eager:", "taken", "over,", "of"],
    ]
    again.file("native", "served").unlink()
    assert again._kept(ARMS["native"]) is None
    assert Study(plan(new_tokens=6), tmp_path)._kept(ARMS["opaque_eager"]) is None
    again.drop_records()
    assert not list(tmp_path.glob("*/*.safetensors"))


def test_timed_arms_are_one_block_that_others_fill_up():
    names = [name for name in ARMS if ARMS[name].later]
    assert groups(names, 16) == [names]
    every = yaml.safe_load((paths.PARAMETERS / "dcu.yaml").read_text())["07_vllm_service"]
    asked, parallel = every["arms"], every["parallel"]
    assert {name for name in ARMS if ARMS[name].model == "compact"} < set(asked)
    timed = [name for name in asked if ARMS[name].timed]
    made = groups(filter(lambda name: ARMS[name].later, asked), parallel)
    assert (
        made[0]
        == timed
        == [f"article_{name}" for name in ("native", "native_again", "integrated", "range")]
    )
    assert sorted(itertools.chain(*made)) == sorted(name for name in asked if ARMS[name].later)
    assert all(len(group) <= parallel for group in made)
    article = [[ARMS[name].model for name in group].count("article") for group in made]
    assert max(article) * 13.5 < 64
    filled = groups(["native", "off", "article_native", "article_range", "per_op"], 3)
    assert filled == [["native", "article_native", "article_range"], ["off", "per_op"]]
    assert groups(["native", "off", "per_op"], 2) == [["native", "off"], ["per_op"]]


def test_more_timed_arms_than_servers_at_a_time_are_one_error_before_any_starts(tmp_path):
    lines: list[str] = []
    study = Study(plan(parallel=2), tmp_path, lines.append)
    with pytest.raises(
        ValueError, match=r"parallel: 2 .* article_native, article_off, article_range; "
    ):
        study.run(["native", "article_off", "article_native", "article_range"])
    assert (lines, study.results) == ([], {})


# --- what they are started with


def test_an_arm_without_its_calibration_does_not_start(tmp_path):
    study = Study(plan(sizes=(1, 4)), tmp_path, lambda line: None)
    found = study.run(["opaque_fused"])["opaque_fused"]
    assert found.error == "not started: no calibration for T = 1, 4, *"
    study.numerics["compact"] = {
        "1": "fp32_through, 1x16x4 sequential, contraction none",
        "4": "storage, 1x16x4 sequential, contraction none",
        "*": "fp32_through, 1x8x8 sequential, contraction none",
    }
    assert set(study.numerics_of(ARMS["opaque_fused"])) == {"1", "4", "*"}
    assert set(study.numerics_of(ARMS["integrated"])) == {"1"}
    assert set(study.numerics_of(ARMS["integrated_range"])) == {"1", "4"}
    assert study.numerics_of(ARMS["per_op"]) == {"*": "per_op, 1x16x4 sequential, contraction none"}


def test_compared_servers_have_the_same_sizes_and_timed_ones_record_nothing(tmp_path):
    study = Study(plan(on_device=True, sizes=(1, 2), attention="X", devices=("3", "5")), tmp_path)
    words = {name: study._words(arm) for name, arm in ARMS.items()}
    compiled = {name: w[w.index("--compilation-config") + 1] for name, w in words.items() if
                "--compilation-config" in w}  # fmt: skip
    assert "python_branch_eager" not in compiled
    assert {compiled[name] for name in compiled if ARMS[name].model == "compact"} == {
        '{"compile_sizes": [1, 2], "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}'
    }
    for name, arm in ARMS.items():
        assert ("--logits-processors" in words[name]) == arm.recorded
        assert words[name].count("X") == 1
        around = study._environment(arm, tmp_path)
        assert around["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert around["CUDA_VISIBLE_DEVICES"] == ("5" if arm.timed else "3")
    assert study._environment(ARMS["article_absent"], tmp_path)["VLLM_PLUGINS"] == "none"
    assert "records" not in study._settings(ARMS["article_native"], tmp_path)
    assert study._settings(ARMS["article_plain"], tmp_path) == {"mode": "off"}
    assert study._settings(ARMS["vllm_strides"], tmp_path)["true_strides"] is False
    every = Study(plan(on_device=True, sizes=(1, 16)), tmp_path)
    assert '"cudagraph_capture_sizes": [1, 16]' in every._words(ARMS["native"])[-1]
    assert study._settings(ARMS["native"], tmp_path)["records"] >= study.plan.rows("compact")


@pytest.mark.parametrize("on_device", [True, False])
def test_the_plugin_takes_what_every_arm_is_told(tmp_path, on_device):
    study = Study(plan(on_device=on_device, sizes=(1, 16)), tmp_path)
    one = "fp32_through, 1x32x2 sequential, contraction none"
    study.numerics = {model: {"1": one, "16": one, "*": one} for model in ("compact", "article")}
    for arm in ARMS.values():
        if arm.mode:
            told = json.loads(json.dumps(study._settings(arm, tmp_path)))
            settings = PluginSettings.read({KEY: told})
            assert settings.mode == arm.mode
            assert settings.runs_kernel == (arm.kernel != "none")


def test_two_devices_are_shared_out_and_one_is_left_alone(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert study_module.devices(0) == study_module.devices(1) == study_module.devices(8, 1) == ()
    assert study_module.devices(8) == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert study_module.devices(2) == ("4", "6")


def test_the_same_plan_asks_the_same(tmp_path):
    one, other = plan(), plan()
    ids = [[r.ids for r in each.drawn(3, (3, 5), 4, "x")] for each in (one, other)]
    assert ids[0] == ids[1] != [r.ids for r in one.drawn(3, (3, 5), 4, "y")]
    assert [len(tokens) for tokens in ids[0]] == [3, 5, 3]
    requests = one.fixed()
    assert one.forced(requests) == other.forced(requests)
    assert plan(seed=1).forced(requests) != one.forced(requests)
    assert all(len(r.ids) not in one.sizes for r in one.calibration("compact"))
    assert len(one.asked(16)) == 32


def test_what_a_machine_cannot_run_is_named():
    assert left_out(ARMS, "cuda") == {}
    assert set(left_out(ARMS, "dcu")) == {"article_absent", "article_absent_again"}
    on_cpu = left_out(ARMS, "cpu")
    assert "DYNAMO_TRACE_ONCE" in on_cpu["integrated"]
    assert {name for name in ARMS if ARMS[name].model == "article"} < set(on_cpu)
    assert not {"native", "python_branch", "opaque_eager", "opaque_fused"} & set(on_cpu)
    by_range = left_out(ARMS, "cpu", by_range=True)
    assert {name for name in by_range if ARMS[name].model == "compact"} == {"off"}


def test_on_a_cpu_the_compilation_by_range_is_asked_for(tmp_path):
    study = Study(plan(by_range=True, sizes=(1, 4)), tmp_path)
    native, absent = ARMS["native"], ARMS["article_absent"]
    assert study._words(native)[-1] == '{"compile_sizes": [1, 4]}'
    assert study._settings(native, tmp_path)["by_range"] is True
    assert study._settings(native, tmp_path)["graphs"] == str(tmp_path / "graphs")
    assert study._environment(native, tmp_path)["VLLM_CPU_CI_ENV"] == "0"
    assert "PYTHONPATH" not in study._environment(absent, tmp_path)
    assert "VLLM_CPU_CI_ENV" not in Study(plan(), tmp_path)._environment(native, tmp_path)


# --- verdicts


def passed(mode, kernel, fallback, *, concurrency=1, tokens=(5, 5), engine=None):
    replies = [
        Reply(id=f"r{i}", prompt_tokens=65, tokens=[1] * n, token_times_s=[0.1 * k for k in range(n)])
        for i, n in enumerate(tokens)
    ]  # fmt: skip
    one = Pass(
        concurrency=concurrency,
        replies=replies,
        counted={"a": (kernel, fallback), "b": (kernel, fallback)},
        engine=engine or {},
    )
    return findings.counts({mode: ArmResult(name=mode, passes=[one])})


def test_a_folded_branch_and_an_inexact_marker():
    eager = passed("python_branch_eager", 8, 0)
    assert findings.folded_verdict(passed("python_branch", 0, 0), eager)[0] == "PASS"
    assert findings.folded_verdict(passed("python_branch", 1, 0), eager)[0] == "FAIL"
    assert findings.folded_verdict([], eager)[0] == "INCONCLUSIVE"
    assert findings.marker_verdict(passed("integrated", 8, 0))[0] == "PASS"
    assert findings.marker_verdict(passed("integrated", 7, 0))[0] == "FAIL"
    assert findings.marker_verdict([])[0] == "INCONCLUSIVE"


def test_a_busy_service_by_the_engines_own_statistics():
    busy = {"steps": 100.0, "steps of 1": 2.0, "steps to 16": 90.0}
    alone = passed("opaque_eager", 8, 2)
    crowd = passed("opaque_eager", 2, 98, concurrency=16, engine=busy)
    assert crowd[0].exact
    assert findings.busy_verdict(alone + crowd, 16)[0] == "PASS"
    assert findings.busy_verdict(alone, 16)[0] == "INCONCLUSIVE"
    some = passed("opaque_eager", 2, 98, concurrency=4, engine=busy)
    assert findings.busy_verdict(alone + some, 4)[0] == "INCONCLUSIVE"
    (ranged,) = passed("integrated_range", 90, 0, concurrency=16, engine=busy)
    assert (ranged.exact, ranged.share) == (True, 0.9)
    (unknown,) = passed("opaque_eager", 2, 98, concurrency=16)
    assert (unknown.exact, unknown.share) == (None, None)


def test_the_floor_decides_what_a_zero_means():
    zero = Outcome("x", records_total=10, texts_total=2)
    broken = Outcome("native_again", error="it did not run")
    first = [Reply("a", 3, [1, 2], token_times_s=[0.1, 0.2])]
    other = [replace(first[0], tokens=[1, 3])]
    assert findings.fixed_verdict(first, first, zero)[0] == "PASS"
    assert findings.fixed_verdict(first, other, zero)[0] == "FAIL"
    assert findings.fixed_verdict(first, first, broken)[0] == "INCONCLUSIVE"
    assert findings.exact_verdict(zero, broken)[0] == "INCONCLUSIVE"
    assert findings.settled(None, ("NOT_RUN", "why")) == ("NOT_RUN", "why")
    assert findings.settled(("PASS", "x"), ("INCONCLUSIVE", "why")) == ("PASS", "x")


def test_graphs_are_the_same_or_named(tmp_path):
    rows = [(1, 1, "graph", 3, False), (17, 2048, "graph", 3, True), (17, 2048, "binary", 3, None)]
    frame = pd.DataFrame(rows, columns=["first", "last", "what", "pieces", "identical"])
    frame = frame.astype({"identical": "boolean"})
    assert findings.untouched_verdict(frame[1:])[0] == "PASS_WITH_LIMITATIONS"
    assert findings.untouched_verdict(frame[1:2])[0] == "PASS"
    assert findings.untouched_verdict(frame) == ("FAIL", "not the same: graph of 1 to 1")
    assert findings.untouched_verdict(frame[:0])[0] == "INCONCLUSIVE"


def turn(arm, tpots_ms):
    passes = [
        Pass(
            concurrency=1,
            turn=i,
            replies=[Reply(f"t{i}", 64, [1] * 3, token_times_s=[0.1, 0.1 + t / 1e3, 0.1 + 2 * t / 1e3])],
        )
        for i, t in enumerate(tpots_ms)
    ]  # fmt: skip
    return {arm: ArmResult(name=arm, passes=passes)}


def floor(us, pairs=3):
    return findings.Floor(us, pairs)


def test_a_saving_is_of_pairs_and_beside_its_prediction():
    drift = np.linspace(0, 1, 12)  # of the machine, the same for all in a round
    results = turn("article_native", 4 + drift) | turn("article_integrated", 3.8 + drift)
    times = findings.in_turn(results, 1)
    saved = findings.saved(times["article_native"], times["article_integrated"])
    assert saved.value == pytest.approx(200, abs=1e-3)
    assert saved.high - saved.low < 1e-3
    near, far = Effect(190, 185, 195), Effect(100, 95, 105)
    assert findings.saving_verdict(saved, near, "01", floor(5.0))[0] == "PASS"
    assert findings.saving_verdict(saved, near, "01", floor(40.0))[0] == "PASS_WITH_LIMITATIONS"
    assert (
        findings.saving_verdict(saved, Effect(170, 169, 171), "01", floor(20.0))[0]
        == "INCONCLUSIVE"
    )
    assert findings.saving_verdict(saved, far, "01", floor(5.0))[0] == "FAIL"
    assert findings.saving_verdict(saved, near, "01", floor(300.0))[0] == "INCONCLUSIVE"
    assert findings.saving_verdict(saved, None, "no 01", floor(5.0)) == ("NOT_RUN", "no 01")
    with pytest.raises(ValueError, match="three rounds"):
        findings.saved(times["article_native"][:2], times["article_integrated"][:2])


def test_a_difference_is_held_against_servers_of_the_same_kind():
    drift = np.linspace(0, 1, 12)
    tpots = dict(
        native=4, native_again=4.01, plain=3.9, plain_again=3.92, absent=3.93, absent_again=3.9, range=3.8
    )  # fmt: skip
    results = {}
    for mode, ms in tpots.items():
        results |= turn(f"article_{mode}", ms + drift)
    times = findings.in_turn(results, 1)
    assert len(findings.pairs(times)) == 7
    assert set(findings.EQUAL) < set(findings.pairs(times))
    effects = findings.savings(times)
    values = {name: round(effect.value) for name, effect in effects.items()}
    assert values == {
        "native_again": -10, "plain": 100, "plain_again": 80, "absent": 70, "absent_again": 100,
        "range": 200, "plain_again, against plain": -20, "absent_again, against absent": 30,
        "plain, against absent": 5, "range, against absent": 115,
    }  # fmt: skip
    assert findings.floor_of(effects) == (pytest.approx(30, abs=0.1), 3)
    assert findings.floor_of({"range": effects["range"]}) is None
    ratio = findings.kept(Effect(46, 43, 49), Effect(50, 50, 50), floor(11))
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.92, 0.64, 1.2))
    assert findings.net_verdict(Effect(40, 35, 45), floor(30.0))[0] == "PASS"
    assert findings.net_verdict(Effect(40, 25, 45), floor(30.0))[0] == "INCONCLUSIVE"
    assert findings.net_verdict(Effect(-20, -25, -15), floor(30.0))[0] == "INCONCLUSIVE"
    assert findings.net_verdict(Effect(-40, -45, -35), floor(30.0))[0] == "FAIL"
    one_pair = floor(30.0, pairs=1)
    assert findings.net_verdict(Effect(40, 35, 45), one_pair)[0] == "PASS_WITH_LIMITATIONS"
    assert findings.net_verdict(Effect(-40, -45, -35), one_pair)[0] == "FAIL"
    short = findings.in_turn(
        {name: one.model_copy(update={"passes": one.passes[:2]}) for name, one in results.items()},
        1,
    )
    assert findings.savings(short) == {}
    assert findings.pairs(short) == []


def bare(*code, **chosen):
    """Results of the four bare servers, with these hashes of code; the first kind's, then the other's."""
    names = ("plain", "plain_again", "absent", "absent_again")
    each = zip(names, code, strict=True)
    return {
        f"article_{name}": ArmResult(name=name, code=list(graphs), chosen=chosen.get(name, {}))
        for name, graphs in each
    }


def test_switched_off_is_the_same_code_and_no_slower_than_an_equal_server():
    small, large = Effect(-5, -6, -4), Effect(-20, -25, -15)

    def verdict(results, effect):
        return findings.off_verdict(results, effect, floor(10.0))[0]

    same = bare("ab", "ab", "ab", "ab")
    assert verdict(same, small) == "PASS"
    assert verdict(same, large) == verdict(same, Effect(-20, -50, 10)) == "INCONCLUSIVE"
    assert verdict(bare("ab", "", "", "ab"), small) == "PASS"
    assert verdict(bare("ab", "ab", "", ""), small) == "PASS_WITH_LIMITATIONS"
    assert verdict(bare("ab", "ac", "ab", "ab"), small) == "PASS_WITH_LIMITATIONS"
    assert verdict(bare("ab", "ab", "", ""), large) == "FAIL"
    assert verdict(bare("ab", "ab", "ac", "ac"), small) == "FAIL"
    why = findings.off_verdict(bare("ab", "ab", "ac", "ac"), small, floor(10.0))[1]
    assert "2 of 3 graphs are of one kind alone" in why


def test_configurations_that_the_clock_chose_are_counted_in_each_pair():
    one, other = {"k": {"XBLOCK": 1}, "l": {"XBLOCK": 1}}, {"k": {"XBLOCK": 2}, "l": {"XBLOCK": 1}}
    found = findings.configurations(
        bare("a", "a", "a", "a", plain=one, plain_again=other, absent=one | {"m": {}})
    )
    assert found == {
        ("plain", "plain_again"): (1, 2),
        ("plain", "absent"): (0, 2),
        ("plain_again", "absent"): (1, 2),
    }


def test_timed_servers_leave_their_turns_and_what_was_compiled(fake, tmp_path):
    study = Study(plan(rounds=3, turn_s=1.0, article_tokens=3), tmp_path, lambda line: None)
    study.checkpoints()
    names = [f"article_{name}" for name in ("native", "plain", "absent")]
    study.run(names)
    assert {name: one.error for name, one in study.results.items()} == dict.fromkeys(names, "")
    times = findings.in_turn(study.results, 1)
    assert {name: len(turns) for name, turns in times.items()} == dict.fromkeys(names, 3)
    native, plain, absent = (study.results[name] for name in names)
    assert (native.code, native.chosen) == ([], {})  # it writes its graphs down itself
    assert len(plain.code) == 1
    assert plain.code == absent.code
    assert plain.chosen == {"kernel": {"XBLOCK": 64, "num_warps": 4}}
    assert findings.configurations(study.results) == {("plain", "absent"): (1, 1)}


# --- the article's stack


@pytest.fixture(scope="module")
def stack(fake, tmp_path_factory):
    study = Study(plan(article_sizes=(1, 2)), tmp_path_factory.mktemp("stack"), lambda line: None)
    study.checkpoints()
    numerics = "fp32_through, 1x16x4 sequential, contraction none"
    study.numerics["article"] = {"1": numerics, "2": numerics}
    study.run(["article_observed", "article_operator", "article_checked"])
    return study


def test_the_articles_stack_is_compared_where_its_history_is_the_same(stack, tmp_path):
    study = copied(stack, tmp_path)
    assert not any(one.error for one in study.results.values())
    frame, other = (findings.of_the_stack(study, f"article_{n}") for n in ("checked", "operator"))
    by = frame.groupby("at_a_time")
    rows = len(VllmRecords(study.file("article_checked", "calibration")).index)
    assert by.records.sum()["1"] == 2 * 3 * rows // 2  # layers, tensors, half of the passes
    assert by.layer.nunique().to_dict() == {"1": 2, "any": 1}
    assert set(frame[frame.at_a_time == "any"].tokens) == {1}
    wrong = other.assign(differing=other.records)
    word, why = findings.stack_verdict(study, 1, frame, wrong)
    assert word == "PASS_WITH_LIMITATIONS"
    assert "fewer than 1 elements at T = 2; no control at T = 2" in why
    only_one = Study(plan(), tmp_path, print)
    assert findings.stack_verdict(only_one, 1, frame, wrong)[0] == "PASS"
    few = findings.stack_verdict(only_one, 10**9, frame, wrong)
    assert few[0] == "PASS_WITH_LIMITATIONS"
    assert "fewer than 1,000,000,000 elements at T = 1" in few[1]
    word, why = findings.stack_verdict(only_one, 1, frame, other)
    assert word == "PASS_WITH_LIMITATIONS"
    assert "no control at T = 1" in why
    assert findings.stack_verdict(only_one, 1, wrong, wrong)[0] == "FAIL"
    assert findings.stack_verdict(only_one, 1, frame[:0], wrong) == findings.NOTHING

    def later(tensors):  # of several at a time, in a layer that has another history
        tensors["layers.1.q"][rows // 2 :] += 1

    rewritten(study, "article_checked", later)
    assert findings.of_the_stack(study, "article_checked").differing.sum() == 0

    def alone(tensors):
        tensors["layers.1.q"][: rows // 2] += 1

    rewritten(study, "article_checked", alone)
    assert findings.of_the_stack(study, "article_checked").differing.sum() == rows // 2

    def others(tensors):
        tensors["layers.0.v"][:1] += 4096

    rewritten(study, "article_checked", others)
    with pytest.raises(ValueError, match="recorded other rows"):
        findings.of_the_stack(study, "article_checked")


def test_a_round_that_one_server_did_not_finish_counts_for_none():
    results = turn("article_native", [4, 4, 4, 4]) | turn("article_off", [3, 3, 3, 3])
    results["article_off"].passes[1].replies[0] = Reply("t1", 64, [], finish_reason="error")
    assert {len(times) for times in findings.in_turn(results, 1).values()} == {3}


def test_prompts_are_calibrated_in_every_layer_that_was_given_the_same(
    served, tmp_path, monkeypatch
):
    study, asked = copied(served[0], tmp_path), []

    def calibrate(native, operator, *, tokens, every_layer=False):
        asked.append((native.parent.name, operator.parent.name, tuple(tokens), every_layer))
        return dict.fromkeys(tokens, "found")

    monkeypatch.setattr(findings.vllm_records, "calibrate", calibrate)
    prompts = study.plan.prompts_of("compact")
    assert set(findings.calibrate(study, "compact")) == {1, *prompts}
    shutil.copytree(study.folder / "opaque_eager", study.folder / "opaque_compiled")
    findings.calibrate(study, "compact")
    findings.calibrate(study, "compact", "fallback_only")  # which has no such file
    assert asked == [
        ("native", "opaque_eager", (1,), False),
        ("native", "opaque_eager", prompts, False),
        ("native", "opaque_eager", (1,), False),
        ("native", "opaque_compiled", prompts, True),
    ]


def fit(length, *candidates, mismatches=0):
    closest, *alike = candidates
    print_ = Fingerprint("prefill", closest, "bfloat16", mismatches, 9, 9, (0,), tuple(alike), ())
    return Calibrated(length, 9, print_)


def test_one_graph_of_all_lengths_takes_what_fits_them_all(tmp_path):
    study = Study(plan(calibration_prompts=(33, 517)), tmp_path, print)
    first, second, third = (Numerics("fp32_through", Reduction(2, 8, warps)) for warps in (1, 2, 4))
    found = {1: fit(1, third), 33: fit(33, first, second, third), 517: fit(517, third, first)}
    assert findings.fitting_all(study, "compact", found) == [first, third]
    findings.take(study, "compact", found)
    assert study.numerics["compact"] == {
        "1": str(third),
        "*": str(third),
    }  # the one that decode has too
    assert findings.prompts_verdict(study, "compact", found)[0] == "PASS_WITH_LIMITATIONS"
    found[517] = fit(517, second)
    findings.take(study, "compact", found)
    assert study.numerics["compact"]["*"] == str(second)
    assert findings.prompts_verdict(study, "compact", found)[0] == "PASS"
    for spoiled in (fit(517, first, mismatches=1), None):
        found = {1: fit(1, third), 33: fit(33, first), 517: spoiled}
        found = {length: one for length, one in found.items() if one}
        findings.take(study, "compact", found)
        assert study.numerics["compact"] == {"1": str(third)}
        assert findings.prompts_verdict(study, "compact", found)[0] == "FAIL"
        study.numerics_of(ARMS["per_op"])
        with pytest.raises(ValueError, match="T = \\*"):
            study.numerics_of(ARMS["opaque_fused"])
    assert findings.prompts_verdict(study, "compact", {})[0] == "INCONCLUSIVE"
