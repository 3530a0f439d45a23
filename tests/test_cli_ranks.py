"""The command line on several ranks: --nproc, torchrun, two nodes; stopped, killed, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kagome import cli
from test_cli import FEW, SBM, has_all_files

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
        command = [sys.executable, "-m", *through, "kagome.cli", *args]
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
        cli.main(["partition", "--data.name", SBM, "--parts", "2", "--out", "parts"])
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
    assert "rank 1 failed" in err
    assert "ZeroDivisionError: its own bug" in err
    assert 'raise ZeroDivisionError("its own bug")' in err
    assert "kagome/launch.py" not in err + out


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
        cli.main(["train", "--resume", "run", "--train.epochs", str(epochs), "--nproc", "1"])
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
        cli.main(["train", *FEW, "--nproc", "1", "--out", "one"])
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
    assert "graph=3 needs 3 ranks" in err
    assert "kagome/cli.py" not in err


def test_doctor_finds_that_ranks_can_talk_here(start):
    code, out, err = ended(start("doctor"))
    assert code == 0, err
    assert "two local ranks    exchange rows and sums" in out
    assert "torch-geometric" in out
    assert "threads a rank     1, by OMP_NUM_THREADS" in out
    assert "MISSING" not in out
