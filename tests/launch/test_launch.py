"""Launch: ranks are found in any environment; a failed one ends the job soon, with its own words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kagome.comm.mesh import open_mesh
from kagome.components.rank_zero import by_all
from kagome.errors import DataError, LaunchError
from kagome.launch import launcher
from kagome.launch.environment import first_host
from kagome.launch.launcher import Ranks, environment, start_local

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x2),3",
    "SLURM_JOB_NODELIST": "gpu[007-009],login1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}

LOADED = ("kagome.train.trainer",)
"""What ranks are forked of, as in ``kagome train``."""


def test_no_launcher_means_one_rank():
    assert environment({}) == Ranks(0, 1, 0, 1, "", 0, "single")


def test_torchrun():
    assert environment(TORCHRUN) == Ranks(5, 8, 1, 4, "10.0.0.1", 1234, "torchrun")
    assert environment({**SLURM, **TORCHRUN}).source == "torchrun"


def test_slurm():
    assert environment(SLURM) == Ranks(5, 7, 1, 3, "gpu007", 20000 + 123456 % 20000, "slurm")
    chosen = environment({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "4321"})
    assert (chosen.host, chosen.port) == ("head", 4321)
    step = environment({**SLURM, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "cpu3"})
    assert (step.size, step.host) == (6, "cpu3")


def test_a_batch_script_of_slurm_without_srun_is_one_process():
    """It was taken for rank 0 of all tasks, and waited for the others."""
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert environment({**batch, "SLURM_PROCID": "0"}) == Ranks()
    old = {**batch, "SLURM_STEPID": "0"}
    assert environment(old) == environment(SLURM)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-009,12],login", "gpu007"),
        ("gpu[3]", "gpu3"),
        ("a[1,5-7]b,c", "a1b"),
        ("r1-n[02-04]-ib", "r1-n02-ib"),
        ("host-3.site.org", "host-3.site.org"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK to be a number; got 'x'"),
        ({**TORCHRUN, "RANK": "8"}, "from 0 to 7; got 8"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no MASTER_ADDR"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "many"}, "got 'many'"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT to be a port from 0 to 65535; got 99999"),
        ({**TORCHRUN, "MASTER_PORT": "-1"}, "got -1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "to be 1 or more; got 0"),
    ],
)
def test_environments_without_sense_are_refused(env, message):
    with pytest.raises(LaunchError, match=message):
        environment(env)


def threads_and_sum(number: int) -> tuple[str, str, str, int]:
    names = ("RANK", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
    return *[os.environ[name] for name in names], number


def test_local_ranks_return_rank_0_s_result_and_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "7")
    before = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)]
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert start_local(2, threads_and_sum, 11) == ("0", share, "7", 11)
    assert dict(os.environ) == before
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)]


def test_no_ranks_are_refused():
    with pytest.raises(LaunchError, match="to be a number from 1 up; got 0"):
        start_local(0, threads_and_sum, 1)


def listening() -> set[str]:
    """Addresses, as the system writes them, at which this process waits for connections."""
    own = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists()}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in own and (words[3] == "0A" or table.startswith("udp")):
                found.add(words[1].partition(":")[0])
    return found


def listen_and_meet() -> list[object]:
    with open_mesh(timeout=60) as mesh:
        return mesh.world.gather_objects(sorted(listening()), "listen")


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_local_ranks_can_be_reached_from_this_host_alone(monkeypatch):
    """They meet by a file, so that no store listens; what gloo opens is on the loopback interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = listening()
    ranks = start_local(2, listen_and_meet)
    assert isinstance(ranks, list)
    assert all(ranks), "gloo listens, so the test sees what it is to see"
    assert {address for found in ranks for address in found} <= LOOPBACK
    assert listening() <= before


def dies_at_first(folder: str, how: str) -> int:
    count = environment().restarts
    Path(folder, f"start-{count}-{os.environ['RANK']}").touch()
    with open_mesh(timeout=60) as mesh:
        mesh.world.barrier("start")
        if mesh.rank == 1 and how == "mistake":
            raise DataError("features to be numbers", "nan in row 3")
        if mesh.rank == 1 and count < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.world.barrier("end")
    return count


def test_ranks_are_started_again_as_often_as_was_asked(tmp_path, capfd):
    assert start_local(2, dies_at_first, str(tmp_path), "killed", loaded=LOADED, restarts=2) == 2
    assert len(list(tmp_path.glob("start-*"))) == 6
    said = capfd.readouterr().err
    assert "killed by SIGKILL" in said
    assert "started again (2 of 2)" in said


def test_a_mistake_is_not_tried_again(tmp_path):
    with pytest.raises(LaunchError, match="nan in row 3"):
        start_local(2, dies_at_first, str(tmp_path), "mistake", loaded=LOADED, restarts=2)
    assert len(list(tmp_path.glob("start-*"))) == 2


def told_alone(number: int) -> None:
    from kagome.launch.signals import asked_to_stop, ended_by

    signal.signal(number, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
    with open_mesh(timeout=60) as mesh, asked_to_stop(can_save=True) as asked:
        mesh.world.barrier("start")
        if mesh.rank == 1:
            os.kill(os.getpid(), number)
        found = [told for told in mesh.world.gather_objects(list(asked), "stop") if told]
        raise ended_by(found[0][0], mesh.size)


@pytest.mark.some(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_rank_ends_the_job_as_one_to_all_does(number):
    """The launcher took it for a failure, and left with 1; a restart would have gone against the signal."""
    with pytest.raises((KeyboardInterrupt, SystemExit)) as left:
        start_local(2, told_alone, int(number), loaded=LOADED, restarts=2)
    assert isinstance(left.value, KeyboardInterrupt) or left.value.code == 128 + number
    assert isinstance(left.value, KeyboardInterrupt) is (number == signal.SIGINT)


def test_a_rank_that_failed_is_told_of_though_another_left_for_a_signal(tmp_path):
    guard = launcher._Guard(2, tmp_path)
    assert guard.signalled() is None
    (tmp_path / "signalled-0").write_text("15")
    assert guard.signalled() == 15
    guard.codes[1] = -signal.SIGKILL
    assert guard.signalled() is None
    guard.codes[1] = -signal.SIGTERM
    assert guard.signalled() == 15
    (tmp_path / "failed-1").write_text(json.dumps([1, 5.0, "a bug"]))
    assert guard.signalled() is None


def test_more_ranks_than_the_memory_holds_are_refused():
    with pytest.raises(LaunchError, match=r"GiB of free memory for 1,000,000 local ranks .* got .* GiB"):
        start_local(1_000_000, threads_and_sum, 1)


def waits_stopped(folder: str) -> None:
    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    while not Path(folder, "end").exists():
        time.sleep(0.05)


@pytest.mark.slow
def test_a_stopped_rank_is_told_of(tmp_path):
    job = script(tmp_path, "waits_stopped", str(tmp_path))
    deadline = time.monotonic() + 180
    while not (tmp_path / "pid-1").exists() or not (tmp_path / "pid-1").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = int((tmp_path / "pid-1").read_text())
    os.kill(pid, signal.SIGSTOP)
    time.sleep(launcher.STOPPED_SECONDS + 3)
    os.kill(pid, signal.SIGCONT)
    (tmp_path / "end").touch()
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 0
    assert out.count(f"rank 1 is stopped, and the others wait for it: kill -CONT {pid}") == 1


def test_what_keeps_ranks_from_starting_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(LaunchError, match="the folder for temporary files; got none that can be made"):
        start_local(2, threads_and_sum, 1)


def fails(how: str) -> None:
    with open_mesh(timeout=60) as mesh:
        mesh.graph.barrier("start")
        if mesh.rank == 1:
            if how == "bug":
                raise ZeroDivisionError("its own bug")
            if how == "user":
                raise DataError("features to be numbers", "nan in row 3", hint="clean the data")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(7)
        if how == "bug" and mesh.rank == 2:
            # Hears nothing from the others and takes no SIGTERM.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(100)
        mesh.graph.all_reduce(torch.ones(3), action="epoch 1: weights")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("how", "words", "no_words"),
    [
        (
            "bug",
            ["a failure of rank 1", "Traceback", "ZeroDivisionError: its own bug", "in fails"],
            ["CommError"],
        ),
        (
            "user",
            ["a failure of rank 1: expected features to be numbers; got nan in row 3", "Try: clean the data"],
            ["Traceback"],
        ),
        ("killed", ["a failure of rank 1", "SIGKILL", "memory"], ["Traceback", "CommError"]),
        ("exit", ["a failure of rank 1", "code 7"], ["Traceback"]),
    ],
)
def test_a_failed_rank_ends_the_job_soon_with_its_own_words(how, words, no_words):
    begun = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        start_local(3, fails, how, loaded=LOADED if how in ("bug", "killed") else ())
    assert time.monotonic() - begun < 60  # of the 100 for which a rank sleeps; a machine may be busy
    for word in words:
        assert word in str(caught.value)
    for word in no_words:
        assert word not in str(caught.value)


@pytest.mark.parametrize(("hint", "after"), [("", ""), ("--parallel.pipe 2", "\n  Try: --parallel.pipe 2")])
def test_the_failed_ranks_sentence_ends_once_and_its_advice_stays_advice(tmp_path, hint, after):
    fault = DataError("two", "1", where="row 3", hint=hint)
    (tmp_path / "failed-1").write_text(json.dumps([1, 5.0, str(fault)]))
    told = launcher._Guard(3, tmp_path).blame(1, 1)
    assert told.hint == hint
    said = "expected 3 ranks to finish; got a failure of rank 1: expected two; got 1 (row 3)."
    assert str(told) == said + after


def save_at_sigterm(folder: str) -> None:
    rank = os.environ["RANK"]
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    Path(folder, f"ready-{rank}").touch()
    while not asked:
        time.sleep(0.02)
    time.sleep(1.0)  # a checkpoint takes its time
    Path(folder, f"saved-{rank}").write_text(str(len(asked)))


SCRIPT = """
import sys
sys.path[:0] = {here!r}
from kagome.launch.launcher import start_local
from test_launch import {function}
if __name__ == "__main__":
    start_local(2, {function}, {argument!r}, loaded={loaded!r})
"""


def script(folder: Path, function: str, argument: str, loaded: tuple[str, ...] = LOADED) -> subprocess.Popen:
    path = folder / "script.py"
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    path.write_text(SCRIPT.format(here=here, function=function, argument=argument, loaded=loaded))
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ready(folder: Path) -> None:
    """Wait until both ranks are there."""
    deadline = time.monotonic() + 180
    while len(list(folder.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.some(1)
@pytest.mark.parametrize("loaded", [LOADED, ()], ids=["forked", "spawned"])
def test_ranks_outlive_no_launcher(tmp_path, loaded):
    """Killed, it tells nobody; the system tells the ranks, through the process they were forked of."""
    job = script(tmp_path, "save_at_sigterm", str(tmp_path), loaded)
    ready(tmp_path)
    job.kill()
    job.communicate(timeout=120)  # the ranks have the other end of its output: they have ended
    assert len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.some(1)
@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_a_stop_reaches_the_ranks_once_and_lets_them_save(tmp_path, how):
    job = script(tmp_path, "save_at_sigterm", str(tmp_path))
    ready(tmp_path)
    if how == "Ctrl-C":
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: launcher and ranks
    else:
        os.kill(job.pid, signal.SIGTERM)
    begun = time.monotonic()
    job.communicate(timeout=120)
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert time.monotonic() - begun < launcher.SAVE_SECONDS  # nobody was waited for after it had saved
    assert job.returncode not in (0, None)


def test_output_of_the_ranks_goes_through_and_failure_is_a_code(tmp_path):
    job = script(tmp_path, "speaks_then_fails", "hello")
    out, _ = job.communicate(timeout=180)
    assert "hello from 0" in out
    assert "hello from 1" in out
    assert "a failure of rank 0" in out
    assert "ValueError: on purpose" in out
    assert job.returncode == 1


def speaks_then_fails(word: str) -> None:
    rank = os.environ["RANK"]
    print(f"{word} from {rank}", flush=True)
    time.sleep(1.0)
    if rank == "0":
        raise ValueError("on purpose")
    time.sleep(600)


NOTES: dict[str, tuple[DataError, DataError, str]] = {
    "told to the others": (
        DataError("two", "1", where="rank 0, row 3"),
        DataError("two", "1", where="rank 0, row 3"),
        "the same failure of each: expected two; got 1 (rank 0, row 3).",
    ),
    "each its own": (
        DataError("two", "1", where="rank 0"),
        DataError("two", "7", where="rank 1"),
        "a failure of rank 1: expected two; got 7.",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_an_error_names_its_rank_once(tmp_path, name):
    """Rank 1 is seen first, whoever has found the fault."""
    one, other, said = NOTES[name]
    for rank, fault in enumerate((one, other)):
        note = [1, 5.0 - rank, str(fault), True, fault.where]
        (tmp_path / f"failed-{rank}").write_text(json.dumps(note))
    assert str(launcher._Guard(2, tmp_path).blame(1, 1)) == f"expected 2 ranks to finish; got {said}"


def test_the_rank_that_an_error_names_has_failed_where_the_others_have_not_noted_it(tmp_path):
    fault = DataError("two", "1", where="rank 0, row 3")
    (tmp_path / "failed-1").write_text(json.dumps([1, 5.0, str(fault), True, fault.where]))
    told = str(launcher._Guard(2, tmp_path).blame(1, 1))
    assert told == "expected 2 ranks to finish; got a failure of rank 0: expected two; got 1 (row 3)."


def refuses(alone: bool) -> None:
    with open_mesh(timeout=60) as mesh:

        def check() -> None:
            if mesh.rank == 1 or not alone:
                raise DataError("two", "1", where="row 3")

        by_all(mesh.graph, check, "count")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("alone", "place"), [(True, "rank 1, row 3"), (False, "row 3")], ids=["one rank", "all ranks"]
)
def test_what_all_ranks_refuse_is_said_once(alone, place):
    with pytest.raises(LaunchError) as caught:
        start_local(2, refuses, alone, loaded=LOADED)
    said = f"expected 2 ranks to finish; got the same failure of each: expected two; got 1 ({place})."
    assert str(caught.value) == said


def quits(launcher: int) -> None:
    os.kill(launcher, signal.SIGQUIT)
    time.sleep(60)


def test_sigquit_ends_the_launcher_with_its_code():
    with pytest.raises(SystemExit) as left:
        start_local(1, quits, os.getpid())
    assert left.value.code == 128 + signal.SIGQUIT
