"""The command line on several ranks: --nproc, torchrun, two nodes; stopped, killed, resumed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import FEW, SBM, has_all_files

from kagome.cli import app

DIES = '''
import os
from torch import nn
from torch_geometric.nn import SAGEConv


class Dies(nn.Module):
    """Works twice, then rank 1 fails."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.calls = SAGEConv(in_channels, out_channels), 0

    def forward(self, x, edge_index):
        self.calls += 1
        if self.calls > 4 and os.environ.get("RANK") == "1":
            raise ZeroDivisionError("its own bug")
        return self.conv(x, edge_index)


def build(in_channels, out_channels):
    return Dies(in_channels, out_channels)
'''


@pytest.fixture
def start(tmp_path):
    """Start ``kagome ...`` in a folder of its own, through a launcher if one is given."""
    (tmp_path / "dies.py").write_text(DIES)
    jobs: list[subprocess.Popen] = []

    def run(*args: str, through: tuple[str, ...] = ()) -> subprocess.Popen:
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "KAGOME_DATA")}
        env.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        command = [sys.executable, "-m", *through, "kagome", *args]
        pipe = subprocess.PIPE
        jobs.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=env))
        return jobs[-1]

    yield run
    for job in jobs:
        if job.poll() is None:
            job.kill()


def ended(job: subprocess.Popen, timeout: float = 180) -> tuple[int, str, str]:
    out, err = job.communicate(timeout=timeout)
    return job.returncode, out, err


@pytest.mark.slow
def test_train_on_the_parts_of_a_saved_partition(start, tmp_path, monkeypatch):
    """With no --nproc the partition says how many ranks; it was one, and then an error."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        app.main(["partition", "--data.name", SBM, "--parts", "2", "--out", "parts"])
    assert left.value.code == 0
    code, out, err = ended(start("train", "--data.partition", "parts", *FEW[2:], "--out", "run"))
    assert code == 0, err
    assert "test accuracy" in out
    has_all_files(tmp_path / "run", epochs=3, world=2)


def test_a_user_s_mistake_on_several_ranks_is_one_message(start):
    code, out, err = ended(start("train", *FEW, "--nproc", "2", "--model.name", "gatt"))
    assert code == 1
    assert err.count("--model.name gat") == 1
    assert "Traceback" not in err + out


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job_soon_with_its_own_traceback(start):
    flags = (
        "--model.name",
        "python:dies:build",
        "--nproc",
        "2",
        "--train.no-check",
        "--train.eval-every",
        "99",
    )
    job = start("train", *FEW[:2], *flags, "--train.epochs", "9999", "--report.no-progress")
    begun = time.monotonic()
    code, out, err = ended(job)
    assert time.monotonic() - begun < 80  # of 300 for which the others would wait; a machine may be busy
    assert code == 1
    assert "a failure of rank 1" in err
    assert "ZeroDivisionError: its own bug" in err
    assert 'raise ZeroDivisionError("its own bug")' in err
    assert "kagome/launch.py" not in err + out


GROWS = '''
import os
import torch
from torch import nn
from torch_geometric.nn import SAGEConv


class Grows(nn.Module):
    """Keeps 100 MB more at each call, from the seventh on; on one rank, or on all."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv, self.calls, self.kept = SAGEConv(in_channels, out_channels), 0, []

    def forward(self, x, edge_index):
        self.calls += 1
        if self.calls > 6 and os.environ["GROWS"] in ("all", os.environ.get("RANK")):
            self.kept.append(torch.ones(25_000_000))
        return self.conv(x, edge_index)


def build(in_channels, out_channels):
    return Grows(in_channels, out_channels)
'''


@pytest.mark.slow
@pytest.mark.parametrize("where", ["1", "all"])
def test_memory_that_runs_out_in_mid_run_is_one_sentence_and_keeps_the_checkpoint(
    start, tmp_path, monkeypatch, where
):
    """With the limit on all ranks nothing was said within a minute."""
    (tmp_path / "grows.py").write_text(GROWS)
    monkeypatch.setenv("GROWS", where)
    flags = ("--model.name", "python:grows:build", "--nproc", "2", "--train.no-check")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, limits[1]))
    try:
        job = start("train", *FEW, *flags, "--train.epochs", "60", "--train.save-every", "2", "--out", "run")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    code, out, err = ended(job)
    assert code == 1
    assert "memory from the system; got no more" in err
    assert err.count("kagome: error") == 1
    assert "Traceback" not in err + out
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().startswith("epoch-")


@pytest.mark.some(1)
@pytest.mark.parametrize("nproc", [1, 2])
def test_sigterm_saves_and_a_resume_on_other_ranks_goes_on(start, tmp_path, monkeypatch, nproc):
    many = ("train", *FEW[:2], "--train.epochs", "100000", "--report.no-progress", "--train.no-check")
    job = start(*many, "--nproc", str(nproc), "--out", "run")
    lines = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not lines.exists() or lines.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    code, out, err = ended(job, timeout=120)
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in err + out
    saved = int((tmp_path / "run" / "checkpoints" / "latest").read_text().strip().removeprefix("epoch-"))
    assert saved >= 3
    epochs = saved + 2
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        app.main(["train", "--resume", "run", "--train.epochs", str(epochs), "--nproc", "1"])
    assert left.value.code == 0
    has_all_files(tmp_path / "run", epochs=epochs, world=1, sent=nproc > 1)


TORCHRUN = "torch.distributed.run"


def test_torchrun_gives_the_curve_of_one_process(start, tmp_path, monkeypatch):
    through = (TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m")
    code, out, err = ended(start("train", *FEW, "--out", "two", through=through))
    assert code == 0, err
    assert out.count("test accuracy") == 1, "only rank 0 speaks"
    has_all_files(tmp_path / "two", epochs=3, world=2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        app.main(["train", *FEW, "--nproc", "1", "--out", "one"])
    assert left.value.code == 0
    curves = [
        [json.loads(line)["loss"] for line in Path(tmp_path, name, "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.slow
def test_under_torchrun_a_mistake_is_no_traceback_of_ours(start):
    through = (TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m")
    code, _, err = ended(start("train", *FEW, "--parallel.graph", "3", through=through))
    assert code == 1  # torchrun's own
    assert "3 ranks for the mesh graph=3" in err
    assert "kagome/cli.py" not in err


def test_doctor_finds_that_ranks_can_talk_here(start):
    code, out, err = ended(start("doctor"))
    assert code == 0, err
    assert "two local ranks    exchange rows and sums" in out
    assert "torch-geometric" in out
    assert "first start" in out
    assert "threads a rank     1, by OMP_NUM_THREADS" in out
    assert "MISSING" not in out


def wait_for(there: Path, job: subprocess.Popen, lines: int = 0) -> None:
    """Wait until a file is there and has so many lines."""
    deadline = time.monotonic() + 180
    while not there.exists() or there.read_text().count("\n") < lines:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)


def epochs_of(run: Path) -> list[int]:
    return [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()]


LONG = ("train", *FEW[:2], "--report.no-progress", "--train.no-check", "--train.save-every", "5")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(3, ()), (4, ("--parallel.pipe", "2"))], ids=["3-parts", "2x2"])
def test_a_plain_resume_goes_on_with_the_ranks_that_were(start, tmp_path, mesh):
    """Of 3 ranks 1 went on, of 2 x 2 stages and parts 2; the command of the first start may say --resume."""
    ranks, flags = mesh
    first = (*FEW[:2], "--train.epochs", "3", "--nproc", str(ranks), *flags, "--resume", "run")
    code, _, err = ended(start("train", *first))
    assert code == 0, err
    assert "run has no checkpoint yet: a new run begins" in err
    code, _, err = ended(start("train", "--resume", "run", "--train.epochs", "5"))
    assert code == 0, err
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["world_size"] == ranks
    assert found["parallel"]["pipe"] == (2 if flags else 1)
    assert epochs_of(tmp_path / "run") == [1, 2, 3, 4, 5]


def ranks_of(launcher: int) -> list[int]:
    """Processes below a launcher that train: those that have opened most."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(words[1])
    grand = [pid for pid, parent in parents.items() if parents.get(parent) == launcher]
    return grand or [pid for pid, parent in parents.items() if parent == launcher]


@pytest.mark.some(1)
@pytest.mark.some(1)
@pytest.mark.parametrize("through", [(), (TORCHRUN, "--standalone", "--nproc-per-node", "2")])
def test_a_killed_rank_is_started_again_from_the_last_whole_checkpoint(start, tmp_path, through):
    """With torchrun's --max-restarts it began at epoch 0 and removed the checkpoints."""
    again = ("--max-restarts", "1")
    flags = ("--train.epochs", "60", "--out", "run")
    if through:
        job = start(*LONG, *flags, through=(*through, *again, "-m"))
    else:
        job = start(*LONG, *flags, "--nproc", "2", *again)
    wait_for(tmp_path / "run" / "checkpoints" / "latest", job)
    saved = int((tmp_path / "run" / "checkpoints" / "latest").read_text().strip().removeprefix("epoch-"))
    os.kill(max(ranks_of(job.pid)), signal.SIGKILL)
    code, _, err = ended(job)
    assert code == 0, err
    assert epochs_of(tmp_path / "run") == list(range(1, 61))
    notes = json.loads((tmp_path / "run" / "summary.json").read_text())["notes"]
    (resumed,) = [note for note in notes if note.startswith("resumed after epoch")]
    assert int(resumed.split()[3].strip(",")) >= saved


def test_what_lies_in_the_current_folder_never_runs(start, tmp_path):
    """A module of a package's name in the current folder was imported in its place."""
    for name in ("numba", "tyro", "torch", "selectors", "multiprocessing", "pandas", "tqdm", "helper"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\nvalue = 3\n")
    (tmp_path / "mine.py").write_text(
        "import helper\n\ndef build(in_channels, out_channels):\n"
        "    from torch_geometric.nn import GCN\n    return GCN(in_channels, helper.value, 2, out_channels)\n"
    )
    kagome = (
        sys.executable,
        "-P",
        "-c",
        "from kagome.cli import main; main()",
    )  # as the installed script
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KAGOME_CACHE": str(tmp_path / "cache")}
    words = ("train", *FEW, "--nproc", "2", "--model.name", "python:mine:build", "--out", "run")
    done = subprocess.run([*kagome, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("ran-*")] == ["ran-helper"], (
        "the user's own model asks for it"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.some(1)
def test_the_process_that_cuts_the_graph_ends_with_its_rank(start, tmp_path, monkeypatch, number):
    monkeypatch.setenv("KAGOME_CACHE", str(tmp_path / "cache"))
    (tmp_path / "slow.py").write_text(
        "import os, time\n\ndef load():\n"
        "    open('cutting', 'w').write(f'{os.getpid()}\\n')\n    time.sleep(600)\n"
    )
    job = start("train", "--data.name", "python:slow:load", "--nproc", "2", "--out", "run")
    wait_for(tmp_path / "cutting", job, lines=1)
    cutter = int((tmp_path / "cutting").read_text())
    job.send_signal(number)
    ended(job, timeout=120)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{cutter}").exists():
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.1)
    if number == signal.SIGTERM:
        assert not list((tmp_path / "cache").rglob(".making-*")), "its files are gone too"
