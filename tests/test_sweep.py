"""Sweeps: real workers through submitit, on tiny notebooks."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml
from PIL import Image

from fusion_evidence.lib import batch, paths, sweep
from fusion_evidence.lib.report import plots_sweep
from fusion_evidence.lib.report.evidence import read_evidence

#: A notebook that says who runs it, waits if it is told to, and measures; no torch in it.
CELLS = [
    """
from fusion_evidence.lib.measure import machine
tiny = machine.Machine(name="cpu", profile="cpu", device="cpu", device_name="tiny",
                       arch="x86_64", cpu_cores=1, versions={})
machine.detect = lambda: tiny
from fusion_evidence.lib.report import Recorder, Verdict
book = Recorder.open("01_tiny", globals())
book.declare("counts", rule="it counts to count")
""",
    """# Count
import os, pathlib, time
book.measure("square", count**2, unit="n")
book.measure("threads", os.environ["OMP_NUM_THREADS"])
book.measure("devices", os.environ["CUDA_VISIBLE_DEVICES"])
while flag and pathlib.Path(flag).exists():
    time.sleep(0.1)
""",
    "book.conclude('counts', Verdict.PASS, why='it did')\nbook.finish()",
]
PARAMETERS = "count: int = 2\nfactor: float = 1.0\nflag: str = ''"

# The command with folders of its own.
COMMAND = """
import sys
from pathlib import Path
from fusion_evidence.lib import cli, paths, sweep
root = Path(sys.argv.pop(1))
paths.NOTEBOOKS, paths.PARAMETERS, sweep.SWEEPS = root / "notebooks", root, root / "sweeps"
sys.argv.insert(1, "sweep")
cli.main()
"""


class Place:
    """A folder with a tiny notebook, and grids to run on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines: list[str] = []

    def grid(self, **content: object) -> Path:
        defaults = {"profile": "cpu", "executor": {"kind": "local", "workers": 2, "threads": 1}}
        file = self.root / "tiny.yaml"
        file.write_text(yaml.safe_dump(defaults | content))
        return file

    def sweep(self, file: Path, **options: bool) -> int:
        self.lines.clear()
        return sweep.sweep(file, report=self.lines.append, **options)

    def start(self, file: Path, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(self.root), str(file), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # as a shell's job: a group of its own
            # Tests started in the background ignore it, and so would the command.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    @property
    def started(self) -> list[str]:
        return [line for line in self.lines if "submitted" in line]

    def table(self) -> pd.DataFrame:
        return pd.read_csv(self.root / "sweeps" / "tiny" / "table.csv")


@pytest.fixture
def place(tmp_path, monkeypatch, write_notebook) -> Place:
    write_notebook(tmp_path / "notebooks" / "01_tiny.ipynb", *CELLS, parameters=PARAMETERS)
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(paths, "PARAMETERS", tmp_path)
    monkeypatch.setattr(sweep, "SWEEPS", tmp_path / "sweeps")
    (tmp_path / "cpu.yaml").write_text("_limits: {notebook_seconds: 300}\n01_tiny: {factor: 2.0}\n")
    return Place(tmp_path)


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes that run points for a sweep, not their controllers or their kernels."""
    found = []
    for child in process.children(recursive=True):
        try:
            if "submitit.core._submit" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def executor_of(worker: psutil.Process, folder: Path) -> bool:
    """Whether the notebook process below a worker has a result folder as its own."""
    for process in worker.children(recursive=True):
        try:
            if process.environ().get("FUSION_EVIDENCE_RUN_DIR") == str(folder):
                return True
        except psutil.Error:
            continue
    return False


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"grid": {"01_tiny": {"cuont": [1]}}}, "01_tiny: unknown parameter cuont (did you mean c"),
        ({"grid": {"01_tiny": {"count": [1, "x"]}}}, "parameter count: expected int, got 'x'"),
        ({"grid": {"01_tiny": {"count": []}}}, "grid.01_tiny.count: List should have at least 1"),
        ({"grid": {"09": {}}}, "'09': no such notebook; there are 01_tiny"),
        ({"points": [{"notebook": "01", "parameters": {"x": 1}}]}, "unknown parameter x"),
        ({"points": [{"notebook": "01", "values": {}}]}, "points.0.values: unknown key"),
        ({}, "neither grid nor points"),
        ({"grdi": {}}, "grdi: unknown key"),
        ({"profile": "gpu"}, "profile: Input should be 'cpu', 'cuda' or 'dcu', got 'gpu'"),
        ({"executor": {"kind": "local", "wokers": 2}}, "executor.local.wokers: unknown key"),
        ({"executor": {"kind": "local", "workers": 0}}, "executor.local.workers: Input should be"),
        ({"executor": {"kind": "slurm", "time": "1h"}}, "executor.slurm.time: Input should be"),
        ({"executor": {"kind": "pbs"}}, "executor: Input tag 'pbs'"),
        ({"name": "../out", "grid": {"01": {}}}, "name: String should match"),
    ],
)
def test_what_a_grid_gets_wrong_is_named_before_anything_starts(place, content, message):
    with pytest.raises(batch.BatchError) as caught:
        place.sweep(place.grid(**content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (place.root / "sweeps").exists()


def test_the_command_says_it_in_one_line(place):
    done = place.start(place.grid(grid={"01_tiny": {"cuont": [1]}}))
    output, _ = done.communicate(timeout=60)
    assert done.returncode == 2
    assert output.startswith("error: tiny: 01_tiny: unknown parameter cuont")
    assert output.count("\n") == 1


@pytest.mark.parametrize("text", [None, "- a", "a: [", "\xff"])
def test_a_file_that_is_no_grid(tmp_path, text):
    file = tmp_path / "no.yaml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(batch.BatchError, match=r"no\.yaml"):
        sweep.read_grid(file)


@pytest.mark.parametrize(
    "file", sorted(paths.PARAMETERS.glob("sweep-*.yaml")), ids=lambda f: f.stem
)
def test_the_example_grids_fit_the_notebooks(file):
    assert len(sweep.plan(sweep.read_grid(file), Path("nowhere"))) >= 10


def test_points_are_products_and_listed_ones_each_once(place):
    file = place.grid(
        grid={"01": {"count": [1, 2], "factor": ["1e-3", 3]}},
        points=[{"notebook": "01_tiny", "parameters": {"count": 9}}] * 2
        + [{"notebook": "01_tiny", "parameters": {"factor": 3.0, "count": 2}}],
    )
    points = sweep.plan(sweep.read_grid(file), place.root)
    values = [(point.complete["count"], point.complete["factor"]) for point in points]
    assert values == [(1, 0.001), (1, 3.0), (2, 0.001), (2, 3.0), (9, 2.0)]  # 2.0: the profile's
    assert len({point.folder for point in points}) == 5


def test_too_few_accelerators_are_said(monkeypatch):
    import torch

    monkeypatch.setattr(batch, "check_profile", lambda *_: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    assert sweep._devices(sweep.Local(kind="local"), "cuda", 9) == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")  # what it was given, it divides
    assert sweep._devices(sweep.Local(kind="local"), "cuda", 9) == ["2", "GPU-5"]
    with pytest.raises(batch.BatchError, match="3 wanted, 2 accelerators here"):
        sweep._devices(sweep.Local(kind="local", workers=3), "cuda", 9)


# --- workers here -------------------------------------------------------------------------------


def test_only_what_changed_runs_again(place, write_notebook):
    file = place.grid(grid={"01_tiny": {"count": [1, 3]}})
    assert place.sweep(file) == 0
    assert len(place.started) == 2
    folders = sorted(path.parent for path in (place.root / "sweeps").rglob("01_tiny.json"))
    first = [read_evidence(folder / "01_tiny.json") for folder in folders]
    assert {e.value("square") for e in first} == {1, 9}
    assert {(e.value("threads"), e.value("devices")) for e in first} == {("1", "-1")}
    assert list(place.table()["status"]) == ["verified", "verified"]
    assert list(place.table()["claim counts"]) == ["PASS", "PASS"]

    assert place.sweep(file) == 0
    assert place.started == []
    assert "2 verified already" in place.lines[0]

    place.grid(grid={"01_tiny": {"count": [1, 4]}})
    assert place.sweep(file) == 0
    assert place.started == ["01_tiny count=4: submitted, 0 waiting"]  # not what all points share
    measured = pd.read_csv(place.root / "sweeps" / "tiny" / "measurements.csv")
    squares = measured[measured["metric"] == "square"]
    assert dict(zip(squares["count"], squares["value"].astype(int), strict=True)) == {1: 1, 4: 16}
    with Image.open(place.root / "sweeps" / "tiny" / "plots" / "01_tiny-square.png") as drawn:
        assert drawn.width > 600

    changed = [CELLS[0], CELLS[1] + "# changed", CELLS[2]]
    write_notebook(place.root / "notebooks" / "01_tiny.ipynb", *changed, parameters=PARAMETERS)
    assert place.sweep(file, gather_only=True) == 1
    assert place.started == []
    assert list(place.table()["status"]) == ["not run", "not run"]


@pytest.mark.slow
def test_a_point_that_fails_is_unfinished_and_the_others_go_on(place, write_notebook):
    cells = [CELLS[0], CELLS[1], "1 / (count - 2)", CELLS[2]]
    write_notebook(place.root / "notebooks" / "01_tiny.ipynb", *cells, parameters=PARAMETERS)
    assert place.sweep(place.grid(grid={"01_tiny": {"count": [2, 3]}})) == 1
    table = place.table().set_index("count")
    assert dict(table["status"]) == {2: "unfinished", 3: "verified"}
    assert "ZeroDivisionError" in table["reason"][2]
    assert any("[2/2]" in line for line in place.lines)
    measured = pd.read_csv(place.root / "sweeps" / "tiny" / "measurements.csv")
    assert set(measured["count"]) == {3}  # an unfinished point brings no figures


@pytest.mark.slow
def test_ctrl_c_ends_the_workers(place):
    flag = place.root / "flag"
    flag.touch()
    file = place.grid(grid={"01_tiny": {"count": [1, 2, 3], "flag": [str(flag)]}})
    command = place.start(file)
    running = psutil.Process(command.pid)
    try:
        wait_for(lambda: len(list((place.root / "sweeps").rglob("01_tiny.json"))) == 2)
        below = running.children(recursive=True)
        assert len(workers_of(running)) == 2
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does
        output, _ = command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT" in output
    assert "Traceback" not in output
    assert not psutil.wait_procs(below, timeout=15)[1]


@pytest.mark.slow
def test_workers_end_with_a_killed_sweep(place):
    flag = place.root / "flag"
    flag.touch()
    command = place.start(place.grid(grid={"01_tiny": {"flag": [str(flag)]}}))
    running = psutil.Process(command.pid)
    wait_for(lambda: list((place.root / "sweeps").rglob("01_tiny.json")))
    below = running.children(recursive=True)
    command.kill()
    assert not psutil.wait_procs(below, timeout=30)[1]


@pytest.mark.slow
def test_a_killed_worker_of_twelve_points_loses_nothing(place):
    flag = place.root / "flag"
    flag.touch()
    points = [{"count": count} for count in range(12)]
    points[3]["flag"] = str(flag)  # in the middle: some run before it, some beside, some after
    listed = [{"notebook": "01_tiny", "parameters": point} for point in points]
    file = place.grid(points=listed)
    command = place.start(file)

    def waiting() -> list[psutil.Process]:
        """The worker whose notebook waits, by the folder of its point."""
        for path in (place.root / "sweeps").rglob("01_tiny.json"):
            if read_evidence(path).value("square") == 9:
                every = workers_of(psutil.Process(command.pid))
                return [w for w in every if executor_of(w, path.parent)]
        return []

    try:
        wait_for(waiting)
        (victim,) = waiting()
        below = victim.children(recursive=True)
        victim.kill()
        output, _ = command.communicate(timeout=600)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 1
    assert not psutil.wait_procs(below, timeout=15)[1]
    (said,) = [line for line in output.splitlines() if "unfinished: " in line]
    assert "01_tiny count=3 " in said
    assert "its worker ended without a word" in said
    assert "11 of 12 points verified" in output
    assert len(place.table()) == 12
    before = {p: p.stat().st_mtime_ns for p in (place.root / "sweeps").rglob("01_tiny.json")}

    flag.unlink()
    assert place.sweep(file) == 0
    assert len(place.started) == 1
    assert "count=3 " in place.started[0]
    table = place.table()
    assert len(table) == 12
    assert set(table["status"]) == {"verified"}
    assert sorted(table["count"]) == list(range(12))
    after = {p: p.stat().st_mtime_ns for p in before}
    assert sum(before[p] != after[p] for p in before) == 1


# --- Slurm --------------------------------------------------------------------------------------

SLURM = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DAEMONS = ("munged", "slurmctld", "slurmd")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def slurm(monkeypatch) -> Iterator[None]:
    """A Slurm of one node, from Debian's munge, slurmctld, slurmd and slurm-client."""
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/sbin:/sbin")
    if missing := [name for name in (*DAEMONS, "sbatch") if shutil.which(name) is None]:
        pytest.skip(f"no Slurm here: {', '.join(missing)} not installed")
    if os.geteuid() != 0:
        pytest.skip("no Slurm here: slurmd runs jobs as root alone")
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())  # short: a socket
    folder.chmod(0o755)
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    text = SLURM.format(
        host=host, folder=folder, user=getpass.getuser(), ports=free_ports(2), cpus=os.cpu_count()
    )
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munge = [f"--{kind}-file={folder}/munge/{kind}" for kind in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D"],
    ]
    daemons = []
    try:
        for command in commands:
            log = open(folder / f"{command[0]}.log", "w")  # noqa: SIM115 (it lives as the daemon)
            daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(1)
        wait_for(lambda: "idle" in subprocess.getoutput("sinfo --noheader --format=%T"), 60)
        yield
    finally:
        subprocess.run(["scancel", "--user", getpass.getuser()], capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_one_slurm_array_with_a_cap(place, monkeypatch):
    """Four points, two at a time; one is cancelled, and a second call runs that one alone."""
    monkeypatch.setattr(sweep, "_LOOK", 1.0)
    monkeypatch.setenv("FUSION_EVIDENCE_NOTEBOOKS", str(place.root / "notebooks"))
    flag = place.root / "flag"
    flag.touch()
    executor = {"kind": "slurm", "array_parallelism": 2, "time": 5, "mem": "100M"}
    file = place.grid(
        grid={"01_tiny": {"count": [1, 2, 3]}},
        points=[{"notebook": "01_tiny", "parameters": {"count": 4, "flag": str(flag)}}],
        executor=executor | {"partition": "debug", "setup": ["export SET_UP=yes"]},
    )
    command = place.start(file)

    def listed(state: str) -> list[str]:
        words = ["squeue", "--noheader", "--array", "--format=%i", f"--states={state}"]
        return subprocess.check_output(words, text=True).split()

    try:
        wait_for(lambda: len(listed("RUNNING")) == 2)
        assert len(listed("PENDING")) == 2  # the cap, of an array of four
        wait_for(lambda: len(listed("RUNNING")) == 1 and not listed("PENDING"))
        (last,) = listed("RUNNING")
        assert last.endswith("_3")
        subprocess.run(["scancel", "--signal=KILL", "--full", last], check=True)
        output, _ = command.communicate(timeout=120)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 1
    assert "3 of 4 points verified" in output
    (script,) = (place.root / "sweeps" / "tiny" / "jobs").glob("*submission.sh")
    assert "--array=0-3%2" in script.read_text()
    assert "export SET_UP=yes" in script.read_text()

    flag.unlink()
    assert place.sweep(file) == 0
    assert len(place.started) == 1
    assert len(place.table()) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_what_slurm_refuses_is_said(place):
    executor = {"kind": "slurm", "time": 5, "partition": "none_such"}
    file = place.grid(grid={"01_tiny": {"count": [1, 2]}}, executor=executor)
    with pytest.raises(batch.BatchError, match=r"sbatch refused the array: .*partition"):
        place.sweep(file)


def test_no_slurm_here_is_said(place, monkeypatch):
    monkeypatch.setenv("PATH", "")
    file = place.grid(grid={"01_tiny": {}}, executor={"kind": "slurm", "time": 5})
    with pytest.raises(batch.BatchError, match="no Slurm here"):
        place.sweep(file)


# --- figures ------------------------------------------------------------------------------------


def test_a_metric_over_numbers_and_over_names():
    frame = pd.DataFrame(
        {
            "value": [1, 2, 4.0, 8, "text", True],
            "unit": "us",
            "labels": ["impl=a", "impl=a", "impl=b", "impl=b", "impl=b", "impl=b"],
            "T": [1, 4096, 1, 4096, 1, 1],
            "shape": ["x", "y", "y", "x", "x", "x"],
            "not_comparable": [None, None, None, "its text changed", None, None],
        }
    )
    figure = plots_sweep.over_parameters(frame, ["T", "shape"], title="time")
    numbers, names = figure.axes
    assert numbers.get_xscale() == "log"
    assert [line.get_ydata().tolist() for line in numbers.lines] == [[1, 2], [4]]  # b at 4096: not
    assert [label.get_text() for label in names.get_xticklabels()] == ["x", "y"]
    assert numbers.get_ylabel() == "us"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["impl=a", "impl=b", "must not be compared"]


def test_of_many_series_the_title_says_how_many():
    rows = [
        {"value": n * T, "unit": None, "labels": f"arm={n}", "T": T, "not_comparable": None}
        for n in range(10)
        for T in (1, 2)
    ]
    figure = plots_sweep.over_parameters(pd.DataFrame(rows), ["T"], title="time")
    assert figure.axes[0].get_title(loc="left") == "time (6 of 10 series)"
    assert [line.get_label() for line in figure.axes[0].lines] == [f"arm={n}" for n in range(4, 10)]


def test_nothing_to_draw():
    frame = pd.DataFrame(
        {"value": [3, 3], "unit": "", "labels": "", "T": [1, 2], "not_comparable": None}
    )
    assert plots_sweep.over_parameters(frame, ["T"], title="constant") is None
    assert plots_sweep.over_parameters(frame.assign(value=[3, 4]), [], title="not swept") is None
    assert plots_sweep.over_parameters(frame.assign(value=["a", "b"]), ["T"], title="text") is None
