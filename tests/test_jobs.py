"""Jobs: fresh processes, what they leave behind, and how they fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from fusion_evidence.lib.attribution.records import compare_records
from fusion_evidence.lib.service import jobs as j
from fusion_evidence.lib.service.arms import Pins
from fusion_evidence.lib.service.jobs import Beside, Job, JobResult, identical, run_job, run_jobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = dict(
    model="compact-random",
    layers=1,
    vocab=64,
    lengths=[9, 4],
    new_tokens=3,
    max_tokens=32,
    backend="eager",
)
PINS = Pins(first_traced=6)


def job(name: str, **options) -> Job:
    return Job(name=name, **SMALL | {"pins": PINS} | options)


def process_of(name: str) -> psutil.Process | None:
    for process in psutil.Process().children():
        if any(part.endswith(f"{name}/job.json") for part in process.cmdline()):
            return process
    return None


def once(found: Callable[[], object], act: Callable[[], object]) -> None:
    """Wait in a thread until something is there, then act."""

    def wait() -> None:
        while not found():
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()


def hanging(folder: Path) -> dict[str, object]:
    """Options of a job that waits for ever for its requests."""
    os.mkfifo(folder / "never")
    return dict(requests=str(folder / "never"), lengths=[])


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, JobResult]:
    """Two arms, one that cannot start, and one that is killed, side by side."""
    folder = tmp_path_factory.mktemp("jobs")
    kept = dict(record="tensors", logits=True)
    forced = dict(passes=["forced"], forced={"T9": [1, 2, 3], "T4": [4, 5, 6]})
    arm = "opaque_eager__opaque_eager"
    timed = dict(pins=PINS.model_copy(update={"configurations": "first"}), decode_samples=3)
    all_of_them = [
        job("baseline", passes=["free", "forced"], **timed, **kept),
        job("opaque", arm=arm, record_inputs=True, **forced, **kept),
        job("no_checkpoint", model=str(folder / "nothing"), layers=None, vocab=None),
        job("killed", **hanging(folder)),
    ]
    once(
        lambda: (folder / "killed" / "result.json").exists(),
        lambda: os.kill(process_of("killed").pid, signal.SIGKILL),
    )
    return run_jobs(all_of_them, folder, parallel=2, timeout=300, report=lambda line: None)


def test_each_job_is_a_result_whatever_became_of_it(ran):
    assert list(ran) == ["baseline", "opaque", "no_checkpoint", "killed"]
    assert [name for name, result in ran.items() if result.ok] == ["baseline", "opaque"]
    assert "has no config.json" in ran["no_checkpoint"].error
    assert "CheckpointError" in ran["no_checkpoint"].log_tail
    assert ran["killed"].error == "ended during start (killed by SIGKILL)"


def test_a_job_that_hangs_is_ended(tmp_path):
    result = run_jobs([job("hangs", **hanging(tmp_path))], tmp_path, timeout=2)["hangs"]
    assert result.error.endswith("(over the limit of 2 s)")
    assert process_of("hangs") is None


def test_a_result_that_cannot_be_read_is_one(tmp_path, monkeypatch):
    started = j._Running(job("x"), tmp_path, 0, 1, None, timeout=60)
    started.stop()
    (tmp_path / "result.json").write_text('{"job": {"name": "x", "colour": "red"}}')
    assert "result.json cannot be read" in started.result().error


def test_a_process_that_cannot_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(j.sys, "executable", "/bin/false")
    result = run_jobs([job("none")], tmp_path)["none"]
    assert result.error == "not started (status 1)"


def test_results_are_read_back_from_the_folder(ran):
    for name, result in ran.items():
        assert JobResult.load(result.folder) == result, name
        assert (result.folder / "log.txt").stat().st_size


def test_times_are_taken_after_the_others_have_ended(ran):
    baseline, *others = ran.values()
    assert list(baseline.decode_times) == ["baseline"]
    began = (baseline.folder / "go").stat().st_mtime_ns
    assert all(began >= (one.folder / "result.json").stat().st_mtime_ns for one in others)


def test_replies_and_markers(ran):
    baseline, opaque = ran["baseline"], ran["opaque"]
    assert [reply.prompt_tokens for reply in baseline.replies("free")] == [9, 4]
    assert baseline.tokens == {reply.id: reply.tokens for reply in baseline.replies("forced")}
    assert all(len(tokens) == 3 for tokens in baseline.tokens.values())
    assert baseline.markers == {}
    assert opaque.calls == {"prefill": 4, "decode": 8}  # one pass and the recording
    assert opaque.markers["device"] == opaque.expected == {"decode": 0, "prefill": 12}
    with pytest.raises(ValueError, match="job opaque has no free pass"):
        opaque.replies("free")
    assert opaque.warm_up.keys() >= {"prefill_first", "decode_first"}
    assert opaque.versions["torch"] == torch.__version__


def test_records_of_two_processes(ran, tmp_path):
    """Uncompiled, the operator's body is the same code: equal where they were fed the same."""
    baseline, opaque = ran["baseline"], ran["opaque"]
    frame = compare_records(baseline.path("records"), opaque.path("records"))
    prefill = frame[frame.step == 0]
    assert len(prefill) == 2 * 3
    assert not prefill.differs.any()
    assert frame[frame.step > 0].differs.any()
    with pytest.raises(ValueError, match="job opaque has no 'code/prefill', only records, logits"):
        opaque.path("code/prefill")


def test_a_job_in_this_process(tmp_path):
    torch._dynamo.reset()
    chosen = job(
        "timed",
        record="hashes",
        record_ids=["T4"],
        record_tokens=2,
        recordings=["again", "recompiled"],
        prefill_times=[5],
        prefill_samples=2,
        decode_samples=2,
        decode_steps=1,
        beside=[Beside(name="again"), Beside(name="other", arm="fallback_only", pins=Pins())],
    )
    result = run_job(chosen, tmp_path)
    assert result.ok
    assert list(result.decode_times) == ["timed", "again", "other"]
    assert [timing.n for timing in result.decode_times.values()] == [2, 2, 2]
    assert list(result.prefill_times) == ["timed", "again", "other"]
    assert [list(by_T) for by_T in result.prefill_times.values()] == [[5]] * 3
    assert {by_T[5].n for by_T in result.prefill_times.values()} == {2}
    for other in ("records.2", "records.3"):
        frame = compare_records(result.path("records"), result.path(other))
        assert set(zip(frame.request, frame.step, strict=True)) == {("T4", 0), ("T4", 1)}
        assert not frame.differs.any()
    assert JobResult.load(tmp_path) == result


def test_a_part_that_fails_keeps_what_was_before(tmp_path):
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="expected 1 to 4096 tokens, got 8193"):
        run_job(job("late", prefill_times=[8193]), tmp_path)
    result = JobResult.load(tmp_path)
    assert result.error.startswith("time: ValueError: ")
    assert len(result.replies("free")) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arm": "fused"}, "arm: expected"),
        ({"decode_numerics": "exact"}, "numerics must read like"),
        ({"passes": ["forced", "free"]}, "passes: a forced pass needs tokens"),
        ({"record": "hashes", "record_inputs": True}, "record_inputs: expected record 'tensors'"),
        ({"model": "compact"}, "layers, vocab: model 'compact' is a checkpoint"),
        ({"beside": [Beside(name="x"), Beside(name="x")]}, "beside: a name twice"),
        ({"warmup": 3}, "warmup"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_impossible_jobs_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        job(**{"name": "x"} | options)


def test_forced_tokens_are_for_every_request(tmp_path):
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="forced: no tokens for T4"):
        run_job(job("x", passes=["forced"], forced={"T9": [1]}), tmp_path)


@pytest.mark.slow
def test_times_are_taken_while_no_other_job_works(tmp_path):
    """Two that are timed beside one that is not, and one that waits for a slot."""
    pins = PINS.model_copy(update={"configurations": "first"})  # else it waits before it compiles
    timed = dict(pins=pins, decode_samples=3, beside=[Beside(name="again")])
    some = [job("first", **timed), job("second", **timed), job("untimed"), job("later")]
    done = run_jobs(some, tmp_path, parallel=3, timeout=300, report=lambda line: None)
    assert [one.error for one in done.values()] == [""] * 4
    assert {name for name, one in done.items() if one.decode_times} == {"first", "second"}

    def when(name: str, file: str) -> int:
        return (tmp_path / name / file).stat().st_mtime_ns

    went = sorted(("first", "second"), key=lambda name: when(name, "go"))
    assert when(went[0], "go") >= max(when(n, "result.json") for n in ("untimed", "later"))
    assert when(went[1], "go") >= when(went[0], "result.json")
    assert when(went[1], "ready") < when(went[0], "result.json"), "prepared beside the others"


def test_names_and_slots_are_checked(tmp_path):
    with pytest.raises(ValueError, match="distinct names and parallel >= 1"):
        run_jobs([job("x"), job("x")], tmp_path)
    with pytest.raises(ValueError, match="distinct names and parallel >= 1"):
        run_jobs([job("x")], tmp_path, parallel=0)


def test_jobs_are_json():
    chosen = job("x", beside=[Beside(name="y", pins=PINS)], forced={"T9": [1]})
    assert Job.model_validate_json(chosen.model_dump_json()) == chosen


@pytest.mark.skipif(DEVICE != "cpu", reason="a device has fresh caches anyway")
@pytest.mark.parametrize(
    ("options", "fresh"),
    [({}, False), ({"arm": "rebuild"}, True), ({"cache": "fresh"}, True)],
)
def test_caches(options, fresh, tmp_path):
    assert j._fresh_cache(job("x", **options)) == fresh


def test_environment_of_a_process(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    chosen = job("x", pins=Pins(workspace=":4096:8"))
    made = j._environment(chosen, tmp_path / "cache", 10**6, 3)
    assert made["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert made["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert made["CUDA_VISIBLE_DEVICES"] == "3"
    assert Path(made["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)
    assert Path(made["TRITON_CACHE_DIR"]).is_relative_to(tmp_path)
    assert made.keys() >= os.environ.keys()
    plain = j._environment(chosen, None, 1, None)
    assert plain.get("TORCHINDUCTOR_CACHE_DIR") == os.environ.get("TORCHINDUCTOR_CACHE_DIR")


def test_a_new_cache_is_as_long_as_the_shared_one(tmp_path, monkeypatch):
    shared = tmp_path / "torchinductor_someone"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    one, other = j._new_cache(), j._new_cache()
    assert len({one, other, shared}) == 3
    assert len(str(one)) == len(str(other)) == len(str(shared))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(j.tempfile, "gettempdir", lambda: str(tmp_path))
    assert j._new_cache().parent == tmp_path


@pytest.mark.slow
def test_inductor_graphs_of_two_processes(tmp_path, monkeypatch):
    """Another decode leaves prefill's source and machine code as they were; another prefill does not."""
    cache = tmp_path / "caches" / "torchinductor_shared"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    options = dict(backend="inductor", record="tensors", lengths=[9], cache="shared")
    compiled, checked = (
        "opaque_compiled__opaque_compiled",
        PINS.model_copy(update={"first_run_check": True, "caches_off": True}),
    )
    results = run_jobs(
        [
            job("baseline", **options),
            job("rebuild", arm="rebuild", **options | {"cache": "fresh"}),
            job("decode", arm="in_graph__opaque_reference", **options),
            job("both", arm=compiled, **options),
            job("checked", arm=compiled, **options | {"pins": checked}),
        ],
        tmp_path / "jobs",
    )
    assert [result.error for result in results.values()] == [""] * 5
    baseline, rebuild, decode, both, twice = results.values()
    assert set(baseline.graphs) == {"prefill", "decode"}
    assert set(both.graphs) == {"prefill", "prefill.body", "decode", "decode.body"}
    from torch._functorch import config

    if hasattr(config, "check_custom_op_aliasing"):
        assert set(twice.graphs) == {*both.graphs, "prefill.body.2", "decode.body.2"}
    same = {"source": True, "config": None, "binary": True}
    assert identical(baseline, rebuild) == identical(baseline, rebuild, "decode") == same
    assert identical(baseline, decode) == same
    assert not identical(baseline, decode, "decode")["source"]
    assert not identical(baseline, both)["source"]
    assert not compare_records(baseline.path("records"), rebuild.path("records")).differs.any()
    assert "qkv_prologue" in decode.path("code/decode").read_text()
    assert set(cache.parent.iterdir()) == {cache}  # the fresh one is gone
    assert asdict(baseline.graphs["prefill"])["binaries"]
