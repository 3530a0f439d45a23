"""Threads: the ranks of a host share its cores and its quota; what the user chose stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kagome.launch import threads
from kagome.launch.launcher import start_local
from kagome.launch.threads import CpuShare, chosen, local, quota, set_by_torchrun

EIGHT = tuple(range(8))


@pytest.mark.parametrize(
    ("seats", "expected"),
    [
        ([CpuShare("a", EIGHT)], [8]),
        ([CpuShare("a", EIGHT)] * 3, [2, 2, 2]),
        ([CpuShare("a", EIGHT)] * 20, [1] * 20),
        # Two hosts: each has its own cores.
        ([CpuShare("a", EIGHT)] * 2 + [CpuShare("b", (0, 1))], [4, 4, 2]),
        # Bound by a scheduler: what one rank alone may run on is its own.
        ([CpuShare("a", (0, 1, 2)), CpuShare("a", (3,))], [3, 1]),
        ([CpuShare("a", (0, 1, 2, 3)), CpuShare("a", (2, 3))], [3, 1]),
        # A quota is shared by the ranks of its group, and by no other.
        ([CpuShare("a", EIGHT, 4.0, "job")] * 2, [2, 2]),
        ([CpuShare("a", EIGHT, 2.5, "one"), CpuShare("a", EIGHT, 1.5, "other")], [2, 1]),
        ([CpuShare("a", EIGHT, 0.5, "job")], [1]),
        ([CpuShare("a", EIGHT, chosen=3), CpuShare("a", EIGHT)], [3, 4]),
    ],
)
def test_ranks_of_a_host_share_its_cores(seats, expected):
    assert list(threads.threads(seats)) == expected


@pytest.mark.parametrize(
    ("seats", "others", "expected"),
    [
        ([CpuShare("a", EIGHT)] * 2, [1], 8),
        ([CpuShare("a", EIGHT)] * 4, [2], 4),  # two parts of two stages: the other part computes too
        ([CpuShare("a", EIGHT)] * 3, [1, 2], 6),  # the shares of all, not all cores
        ([CpuShare("a", EIGHT)], [], 8),
        ([CpuShare("a", (0,)), CpuShare("a", (1,))], [1], 1),  # cores that a scheduler bound
        ([CpuShare("a", EIGHT), CpuShare("b", EIGHT)], [1], 8),  # all of its host's, and no more
        ([CpuShare("a", EIGHT)] * 2 + [CpuShare("b", EIGHT)], [2], 4),
        ([CpuShare("a", EIGHT, 4.0, "job")] * 2, [1], 4),
        ([CpuShare("a", EIGHT, 2.0, "one"), CpuShare("a", EIGHT, 2.0, "other")], [1], 2),
        ([CpuShare("a", EIGHT, chosen=3), CpuShare("a", EIGHT)], [1], 3),
        ([CpuShare("a", EIGHT), CpuShare("a", EIGHT, chosen=3)], [1], 4),
        ([CpuShare("a", (0,))] * 2, [1], 1),  # one core for both
    ],
)
def test_ranks_that_wait_lend_their_threads(seats, others, expected):
    assert threads.while_waiting(0, others, seats) == expected


def test_what_the_launcher_set_is_nobody_s_choice():
    assert chosen({threads.LAUNCHED: threads.SHARED, "OMP_NUM_THREADS": "2"}, 2, 8) is None
    assert chosen({threads.LAUNCHED: threads.SHARED, "OMP_NUM_THREADS": "2"}, 3, 8) == 3
    assert chosen({threads.LAUNCHED: "1", "OMP_NUM_THREADS": "2"}, 2, 8) == 2


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_quota_of_any_group_above_counts(tmp_path):
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text("0::/user/job/task\n")
    assert quota(groups, root) == (None, "")
    put(root / "user/job/task", cpu__max="max 100000\n")
    assert quota(groups, root) == (None, "")
    put(root / "user/job", cpu__max="250000 100000\n")
    assert quota(groups, root) == (2.5, ":user/job")
    put(root / "user", cpu__max="150000 100000\n")
    assert quota(groups, root) == (1.5, ":user")
    # Inside a container the own group is shown as the root.
    put(root, cpu__max="50000 100000\n")
    assert quota(groups, root) == (0.5, ":.")
    assert quota(tmp_path / "none", root) == (None, "")


def test_a_quota_of_version_1(tmp_path):
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text("4:memory:/m\n2:cpu,cpuacct:/job\n0::/\n")
    put(root / "cpu/job", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert quota(groups, root) == (None, "")
    put(root / "cpu", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    assert quota(groups, root) == (3.0, "cpu,cpuacct:.")


@pytest.mark.parametrize(
    ("env", "current", "expected"),
    [
        ({}, None, None),
        ({}, 8, None),  # as many as there are cores: what torch starts with
        ({}, 4, None),  # one a physical core
        ({}, 3, 3),  # torch.set_num_threads(3)
        ({"OMP_NUM_THREADS": "5"}, None, 5),
        ({"OMP_NUM_THREADS": "5"}, 5, 5),
        ({"OMP_NUM_THREADS": "5,2"}, None, 5),
        ({"MKL_NUM_THREADS": "2"}, 2, 2),
        ({"OMP_NUM_THREADS": "none"}, 8, None),
        ({"OMP_NUM_THREADS": "1"}, 1, 1),
    ],
)
def test_what_the_user_chose_is_told_from_what_torch_starts_with(monkeypatch, env, current, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert chosen(env, current, 8) == expected


RANK = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}


def test_one_thread_that_torchrun_set_is_nobody_s_choice(monkeypatch):
    script, torchrun, user = RANK, {"PATH": "/bin"}, {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    assert set_by_torchrun(RANK, [torchrun])
    assert set_by_torchrun(RANK, [script, torchrun])  # a script around the rank
    assert not set_by_torchrun(RANK, [user])
    assert not set_by_torchrun(RANK, [script, user])
    assert not set_by_torchrun(RANK, []), "who cannot know believes the user"
    assert not set_by_torchrun({**RANK, "OMP_NUM_THREADS": "2"}, [torchrun])
    assert not set_by_torchrun({**RANK, threads.LAUNCHED: "1"}, [torchrun])
    assert not set_by_torchrun({"OMP_NUM_THREADS": "1"}, [torchrun])
    monkeypatch.setattr(threads, "set_by_torchrun", lambda env: True)
    assert chosen(RANK, 1, 8) is None
    assert chosen(RANK, 3, 8) == 3, "torch.set_num_threads(3)"


def test_local_ranks_share_the_cores_of_this_process():
    count = len(os.sched_getaffinity(0))
    assert local(1) <= count
    assert local(2) == max(1, local(1) // 2)
    assert local(1000) == 1


def counted() -> tuple[tuple[int, ...], int, int, int]:
    import torch

    from kagome.comm.mesh import open_mesh

    before = torch.get_num_threads()
    with open_mesh(timeout=20) as mesh:
        inside = torch.get_num_threads()
    return mesh.threads, before, inside, torch.get_num_threads()


@pytest.mark.some(1)
@pytest.mark.parametrize("asked", [None, "1", "2"])
def test_started_ranks_compute_with_their_share(monkeypatch, asked):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    share = local(2) if asked is None else int(asked)
    assert start_local(2, counted) == ((share, share), share, share, share)


def counted_alone() -> tuple[int, int, int]:
    import torch

    from kagome.comm.mesh import open_mesh
    from kagome.config import Parallel

    with open_mesh(Parallel(pipe=2), timeout=20) as mesh:
        with mesh.alone():
            inside = torch.get_num_threads()
        after = torch.get_num_threads()
        torch.set_num_threads(after + 3)  # the user's choice since then
        with mesh.alone():
            assert torch.get_num_threads() == after + 3
        return mesh.threads_alone, inside, after


@pytest.mark.some(1)
@pytest.mark.parametrize("asked", [None, "1"])
def test_a_stage_computes_with_the_threads_of_those_that_wait(monkeypatch, asked):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    share = local(2) if asked is None else int(asked)
    alone = min(2 * share, len(threads.cores())) if asked is None else share
    assert start_local(2, counted_alone) == (alone, alone, share)


SCRIPT = """
import os, sys
import torch
from kagome.comm.mesh import open_mesh
if len(sys.argv) > 1:
    torch.set_num_threads(int(sys.argv[1]))
before = torch.get_num_threads()
with open_mesh(timeout=60) as mesh:
    now = torch.get_num_threads()
    os.write(1, f"{mesh.threads} {now} {now - before}\\n".encode())  # whole: ranks write at the same time
assert torch.get_num_threads() == before
"""


@pytest.mark.slow
def test_a_single_process_has_all_cores_unless_it_chose(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.endswith("NUM_THREADS") and k != "RANK"}

    def said(*args: str, **more: str) -> str:
        command = [sys.executable, str(tmp_path / "script.py"), *args]
        return subprocess.run(command, env={**env, **more}, capture_output=True, text=True, check=True).stdout

    assert said() == f"({local(1)},) {local(1)} 0\n"
    assert said("7") == "(7,) 7 0\n"
    assert said(OMP_NUM_THREADS="1") == "(1,) 1 0\n"


@pytest.mark.slow
def test_torchrun_s_own_one_thread_gives_way(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.endswith("NUM_THREADS") and k != "RANK"}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command.append(str(tmp_path / "script.py"))
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout
    share = local(2)
    assert sorted(out.splitlines()) == [f"({share}, {share}) {share} {share - 1}"] * 2
