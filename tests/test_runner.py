"""The runner, with real papermill and real kernels on tiny notebooks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import papermill
import psutil
import pytest
from click.testing import CliRunner
from papermill.exceptions import PapermillExecutionError

from fusion_evidence.lib import batch, cli, paths
from fusion_evidence.lib.measure import machine
from fusion_evidence.lib.report.evidence import read_evidence

#: First lines of a tiny notebook: a machine, without the seconds that importing torch takes.
TINY_MACHINE = """
from fusion_evidence.lib.measure import machine
tiny = machine.Machine(name="cpu", profile="cpu", device="cpu", device_name="tiny",
                       arch="x86_64", cpu_cores=1, versions={})
machine.detect = lambda: tiny
from fusion_evidence.lib.report import Recorder, Verdict
"""
OPEN = TINY_MACHINE + (
    "book = Recorder.open('NAME', globals())\n"
    "book.declare('counts', rule='it counts to count')\n"
    "book.verdict_box()"
)
COUNT = "# Count\nfor i in range(count):\n    book.measure('count', i, T=i)"
PASS = "book.conclude('counts', Verdict.PASS, why=f'{count} counted')"
FINISH = "book.finish()"
COUNTER = "count: int = 2\nfactor: float = 1.0"

# Runs a folder of notebooks as the command does, without the seconds of importing torch.
DRIVER = """
import sys
from pathlib import Path
from fusion_evidence.lib import batch
folder, out, profile, *only = sys.argv[1:]
try:
    status = batch.run(batch.select_notebooks(Path(folder), only), Path(out),
                       profile_file=Path(profile), report=lambda line: print(line, flush=True))
except batch.BatchError as error:
    sys.exit(f"error: {error}")
sys.exit(status)
"""


@pytest.fixture(scope="session")
def write(write_notebook):
    """``write(folder, name, *cells)``: a notebook with the counter's parameters and recorder."""

    def written(folder: Path, name: str, *cells: str) -> Path:
        opening = OPEN.replace("NAME", name)
        return write_notebook(folder / f"{name}.ipynb", opening, *cells, parameters=COUNTER)

    return written


@pytest.fixture(scope="module")
def collection(tmp_path_factory, write):
    """One run over notebooks that end in every way; the tests look at what it left."""
    root = tmp_path_factory.mktemp("collection")
    folder = root / "notebooks"
    write(folder, "00_summary", FINISH)
    write(folder, "01_good", COUNT, PASS, FINISH)
    write(folder, "02_raises", COUNT, "# Divide\n1 / 0", FINISH)
    write(folder, "03_dies", COUNT, PASS, FINISH + "\nimport os\nos._exit(0)")
    write(folder, "04_slow", COUNT, "# Wait\nimport time\ntime.sleep(600)", FINISH)
    write(folder, "05_silent", COUNT, PASS)
    profile = root / "cpu.yaml"
    profile.write_text("_limits: {cell_seconds: 10}\n01_good: {count: 3, factor: 1e-3}\n")
    lines: list[str] = []
    status = batch.run(
        batch.select_notebooks(folder), root / "out", profile_file=profile, report=lines.append
    )
    return root, status, lines


def result(collection, name):
    return read_evidence(collection[0] / "out" / f"{name}.json")


def test_good_notebook_is_verified(collection):
    root, status, lines = collection
    assert status == 1  # of the others
    evidence = result(collection, "01_good")
    assert (evidence.run, evidence.parameters) == ("complete", {"count": 3, "factor": 0.001})
    assert len(evidence.select("count")) == 3
    assert (paths.ROOT / evidence.kernel).samefile(sys.executable)
    assert any(line.startswith("01_good  cell 4/6") and line.endswith("Count") for line in lines)
    table = lines[-1].splitlines()
    assert [line.split()[0] for line in table[2:]][-1] == "00_summary"  # it reads the others
    row = next(line for line in table if line.startswith("01_good"))
    assert "verified" in row
    assert "1 PASS" in row
    assert not batch.verify(root / "notebooks" / "01_good.ipynb", root / "out")


def test_verdict_box_in_the_saved_notebook_has_the_final_verdicts(collection):
    executed = nbformat.read(collection[0] / "out" / "01_good.ipynb", as_version=4)
    pages = [
        o.data["text/html"]
        for c in executed.cells
        if c.cell_type == "code"
        for o in c.outputs
        if "text/html" in o.get("data", {})
    ]
    assert len(pages) == 1
    assert "3 counted" in pages[0]
    assert "running" not in pages[0]


@pytest.mark.parametrize(
    ("name", "reason", "measured"),
    [
        ("02_raises", "cell 4 raised ZeroDivisionError: division by zero", 2),
        ("03_dies", "DeadKernelError", 2),
        ("04_slow", "cell 4/5: over the limit of 10 s per cell", 2),
        ("05_silent", "run is incomplete: not finished", 2),
    ],
)
def test_failed_notebook_keeps_what_it_had(collection, name, reason, measured):
    evidence = result(collection, name)
    assert evidence.run == "incomplete"
    assert reason in evidence.reason
    assert len(evidence.select("count")) == measured
    row = next(line for line in collection[2][-1].splitlines() if line.startswith(name))
    assert "failed" in row
    assert reason in row


def test_all_claims_not_run_is_no_failure_and_is_said(collection):
    assert result(collection, "00_summary").run == "complete"
    row = next(x for x in collection[2][-1].splitlines() if x.startswith("00_summary"))
    assert "verified" in row
    assert "nothing ran here: 1 NOT_RUN" in row


def test_resume_runs_only_what_is_not_verified(collection, tmp_path, write):
    root = tmp_path / "copy"
    shutil.copytree(collection[0], root)
    write(root / "notebooks", "02_raises", COUNT, "# Divide\n1 / 1", PASS, FINISH)
    before = result(collection, "01_good").run_id
    lines: list[str] = []

    def again(*settings: str) -> int:
        return batch.run(
            batch.select_notebooks(root / "notebooks", ["01", "02"]),
            root / "out",
            profile_file=root / "cpu.yaml",
            settings=settings,
            resume=True,
            report=lines.append,
        )

    assert again() == 0
    assert read_evidence(root / "out" / "01_good.json").run_id == before
    assert read_evidence(root / "out" / "02_raises.json").run == "complete"
    assert "kept" in lines[0]
    assert again() == 0
    assert lines[-2].endswith("verified already, kept")

    good = root / "notebooks" / "01_good.ipynb"
    values = {"count": 4, "factor": 0.001}  # what --resume --set count=4 would want
    assert batch.verify(good, root / "out", values) == ["made with other parameters: count"]


def test_stale_or_doctored_results_are_refused(collection, tmp_path, write):
    root, accepted, lines = tmp_path / "copy", tmp_path / "accepted", []
    shutil.copytree(collection[0], root)
    good = root / "notebooks" / "01_good.ipynb"
    copy = root / "out" / "01_good.ipynb"
    notebooks = batch.select_notebooks(root / "notebooks", ["00", "01", "02"])

    assert batch.accept(notebooks, root / "out", accepted, report=lines.append) == 1
    assert sorted(os.listdir(accepted / "cpu")) == [
        "00_summary.ipynb",
        "00_summary.json",
        "01_good.ipynb",
        "01_good.json",
    ]
    assert any("02_raises: refused" in x and "ZeroDivisionError" in x for x in lines)

    pristine = nbformat.read(copy, as_version=4)

    def problem(change) -> str:
        document = nbformat.from_dict(json.loads(json.dumps(pristine)))
        change([cell for cell in document.cells if cell.cell_type == "code"])
        nbformat.write(document, copy)
        return "; ".join(batch.verify(good, root / "out"))

    def grow(code):
        code[3].outputs.append(nbformat.v4.new_output("stream", text="x" * 1_000_000))

    error = nbformat.v4.new_output("error", ename="KeyError", evalue="", traceback=[])
    assert problem(lambda code: None) == ""
    assert "KeyError" in problem(lambda code: code[3].outputs.append(error))
    assert "once each" in problem(lambda code: code[3].update(execution_count=9))
    assert "did not finish" in problem(lambda code: code[-1].update(outputs=[]))
    assert "other cells" in problem(lambda code: code[3].update(source="1 + 1"))
    assert problem(grow) == ""
    assert batch.accept([good], root / "out", accepted, report=lines.append) == 1
    assert "bytes" in lines[-1]

    nbformat.write(pristine, copy)
    write(good.parent, "01_good", COUNT, PASS + "  # edited", FINISH)
    assert "stale" in "; ".join(batch.verify(good, root / "out"))
    copy.write_text("{")
    assert "not readable" in "; ".join(batch.verify(good, root / "out"))


# --- errors before a kernel starts --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "profile", "message"),
    [
        (["cuont=3"], "", "unknown parameter cuont (did you mean count?)"),
        (["count=eight"], "", "parameter count: expected int, got 'eight'"),
        (["01.count=1e3"], "", "parameter count: expected int, got '1e3'"),
        (["09.count=3"], "", "09 is not among the selected notebooks"),
        (["count"], "", "expected name=value"),
        ([], "01_a: {cuont: 3}", "unknown parameter cuont"),
        ([], "01_a: {count: eight}", "expected int, got 'eight'"),
        ([], "01_z: {count: 3}", "no such notebook: 01_z"),
        ([], "_limits: {cell_seconds: long}", "_limits"),
        ([], "a: [", "cpu.yaml"),
    ],
)
def test_bad_parameters_stop_before_a_kernel(tmp_path, settings, profile, message, write):
    path = write(tmp_path / "notebooks", "01_a", FINISH)
    (tmp_path / "cpu.yaml").write_text(profile)
    with pytest.raises(batch.BatchError) as caught:
        batch.run([path], tmp_path / "out", profile_file=tmp_path / "cpu.yaml", settings=settings)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_settings_reach_the_notebooks_they_name(tmp_path, write):
    folder = tmp_path / "notebooks"
    notebooks = [write(folder, "01_a", FINISH), write(folder, "02_b", FINISH)]
    (tmp_path / "cpu.yaml").write_text("02_b: {count: 5}\n_limits: {notebook_seconds: 60}\n")
    passed, complete, limits = batch.plan_parameters(
        notebooks, tmp_path / "cpu.yaml", ["factor=2", "01.count=7"]
    )
    assert passed == {"01_a": {"factor": 2.0, "count": 7}, "02_b": {"count": 5, "factor": 2.0}}
    assert complete == passed
    assert limits == batch.LIMITS | {"notebook_seconds": 60}


def test_unknown_notebook_names_the_known(tmp_path, write):
    write(tmp_path, "01_a", FINISH)
    with pytest.raises(batch.BatchError, match="01_a"):
        batch.select_notebooks(tmp_path, ["07"])


def test_profile_without_its_device_is_one_line(tmp_path, monkeypatch, write):
    """The command itself, with the machine as it is detected here."""
    here = machine.detect()
    other = "dcu" if here.profile == "cuda" else "cuda"
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    write(tmp_path, "01_a", FINISH)
    done = CliRunner().invoke(cli.main, ["run", "--profile", other, "--out", f"{tmp_path}/out"])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert f"error: --profile {other} needs" in done.output
    assert not (tmp_path / "out").exists()


def test_unwritable_folder_is_one_error(tmp_path, write):
    path = write(tmp_path / "notebooks", "01_a", FINISH)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(batch.BatchError, match=r"cannot write .*out: Not a directory"):
        batch.run([path], tmp_path / "file" / "out", profile_file=tmp_path / "none.yaml")


def test_two_runners_do_not_share_a_folder(tmp_path, write):
    path = write(tmp_path / "notebooks", "01_a", FINISH)
    with batch.locked(tmp_path / "out"), pytest.raises(batch.BatchError, match="another run"):
        batch.run([path], tmp_path / "out", profile_file=tmp_path / "none.yaml")


def test_full_disk_while_running_is_one_error(tmp_path, monkeypatch, write):
    path = write(tmp_path / "notebooks", "01_a", FINISH)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(batch, "write_evidence", full)
    with pytest.raises(batch.BatchError, match="No space left"):
        batch.run([path], tmp_path / "out", profile_file=tmp_path / "none.yaml")


def test_a_disk_that_fills_up(tmp_path, write):
    """A file system of 300 kB, in a mount namespace of its own."""
    folder, out = tmp_path / "notebooks", tmp_path / "disk"
    out.mkdir()
    write(
        folder,
        "01_fills",
        "open('../disk/ballast', 'wb').write(bytes(210_000))",
        "for i in range(2000):\n    book.measure('count', i, T=i, text='x' * 1000)",
        FINISH,
    )
    write(folder, "02_next", FINISH)
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=300k tmpfs "$1"; shift; exec "$@"; ',
        "sh",
        str(out),
    ]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode:
        pytest.skip("mounting is not permitted here")
    done = subprocess.run(
        [*command, sys.executable, "-c", DRIVER, str(folder), str(out), str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"error: cannot write {out}: No space left on device"
    assert "Traceback" not in done.stderr
    assert "02_next" not in done.stdout


# The command, with a folder of its own for the profiles.
COMMAND = """
import sys
from pathlib import Path
from fusion_evidence.lib import cli, paths
paths.PARAMETERS = Path(sys.argv.pop(1))
cli.main()
"""


@pytest.mark.slow
def test_the_command_runs_resumes_and_accepts(tmp_path, write_notebook):
    """As a user calls it: the machine is detected, in the runner and in the kernel."""
    opening = OPEN.replace(TINY_MACHINE, TINY_MACHINE.splitlines()[-1] + "\n")
    opening = opening.replace("NAME", "01_real")
    write_notebook(
        tmp_path / "notebooks" / "01_real.ipynb", opening, COUNT, PASS, FINISH, parameters=COUNTER
    )
    out = tmp_path / "out"
    environment = os.environ | {"FUSION_EVIDENCE_NOTEBOOKS": str(tmp_path / "notebooks")}

    def command(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", COMMAND, str(tmp_path), *arguments],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    arguments = ["run", "--out", str(out), "--only", "01", "--set", "01.count=3"]
    arguments += ["--commit", "abc", "--clean"]
    assert "1 PASS" in command(*arguments)
    evidence = read_evidence(out / "01_real.json")
    here = machine.detect()
    assert evidence.machine.model_dump(exclude={"clocks"}) == here.model_dump(exclude={"clocks"})
    assert (evidence.commit, evidence.dirty, evidence.parameters["count"]) == ("abc", False, 3)
    assert "kept" in command(*arguments, "--resume")
    assert "kept" not in command("run", "--out", str(out), "--resume")  # count is 2 again


# --- signals ------------------------------------------------------------------------------------


@pytest.fixture
def busy_runner(request, tmp_path, write):
    """A runner whose notebook 02 waits, with a child in another session; and all their ids."""
    only = getattr(request, "param", [])
    folder = tmp_path / "notebooks"
    write(folder, "01_first", PASS, FINISH)
    write(
        folder,
        "02_waits",
        COUNT,
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pids.part')!r}, 'w').write("
        "f'{os.getppid()} {os.getpid()} {child.pid}')\n"
        f"os.rename({str(tmp_path / 'pids.part')!r}, {str(tmp_path / 'pids')!r})\n"
        "time.sleep(600)",
        FINISH,
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", DRIVER, folder, tmp_path / "out", tmp_path / "none", *only],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "pids").exists():
            assert runner.poll() is None, runner.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield runner, [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    finally:
        runner.kill()
        runner.communicate()


def survivors(pids: list[int], seconds: float = 15) -> list[int]:
    """Those of the processes that still run after some seconds."""

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def test_sigterm_stops_everything_and_keeps_results(busy_runner, tmp_path):
    runner, pids = busy_runner
    runner.terminate()
    output, errors = runner.communicate(timeout=30)
    assert runner.returncode == 128 + signal.SIGTERM
    assert not survivors(pids)
    assert errors == ""
    assert "stopped by SIGTERM" in output
    assert read_evidence(tmp_path / "out" / "01_first.json").run == "complete"
    evidence = read_evidence(tmp_path / "out" / "02_waits.json")
    assert (evidence.run, evidence.reason) == ("incomplete", "stopped by SIGTERM")
    assert len(evidence.select("count")) == 2


@pytest.mark.parametrize("busy_runner", [["02"]], indirect=True)
def test_sigkill_leaves_no_kernel(busy_runner, tmp_path):
    runner, pids = busy_runner
    runner.kill()
    runner.wait()
    assert not survivors(pids)
    evidence = read_evidence(tmp_path / "out" / "02_waits.json")
    assert (evidence.run, len(evidence.select("count"))) == ("incomplete", 2)


# --- without the runner -------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path, monkeypatch, write):
    path = write(tmp_path / "notebooks", "01_alone", COUNT, PASS, FINISH)
    monkeypatch.setenv("FUSION_EVIDENCE_NOTEBOOKS", str(path.parent))
    monkeypatch.setenv("FUSION_EVIDENCE_RUN_DIR", str(tmp_path / "out"))
    return path


def test_plain_papermill_with_a_misspelled_name_is_refused(alone, tmp_path):
    with pytest.raises(PapermillExecutionError, match="did you mean count"):
        papermill.execute_notebook(
            alone, tmp_path / "copy.ipynb", parameters={"cuont": 3}, progress_bar=False
        )
    assert not (tmp_path / "out").exists()


def test_run_all_works_and_its_cells_run_again(alone, tmp_path):
    document = nbformat.read(alone, as_version=4)
    client = nbclient.NotebookClient(document, timeout=60)
    with client.setup_kernel():
        for _ in range(2):
            for index, cell in enumerate(document.cells):
                client.execute_cell(cell, index)
        first = read_evidence(tmp_path / "out" / "01_alone.json")
        client.execute_cell(document.cells[3], 3)  # one cell alone, after the last
    assert (first.run, len(first.select("count"))) == ("complete", 2)
    again = read_evidence(tmp_path / "out" / "01_alone.json")
    assert (again.run, len(again.select("count"))) == ("incomplete", 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'File "/srv/x/fusion_evidence/lib/graph/tracing.py", line 8',
            'File "lib/graph/tracing.py", line 8',
        ),
        ('"output_path": "../../../srv/out/b/02_trace.ipynb"', '"output_path": "02_trace.ipynb"'),
        ('"path": "/srv/a.b/notebooks/01_x.ipynb"', '"path": "01_x.ipynb"'),
        ("see [02](02_trace.ipynb), https://a.org/b/lib/c and /dev/kfd", None),
    ],
)
def test_accepted_results_carry_no_folders_of_the_machine(text, expected):
    assert batch.portable(text) == (text if expected is None else expected)
