"""Rank processes: started, waited for and ended together, by a process that never imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kagome.launch.rank_processes import Ended, RankProcesses

LARGE = 1 << 20
"""Bytes that no pipe holds."""


def returns(count: int) -> bytes:
    return os.environ["NAME"].encode() * count


def ends(folder: str, how: str) -> None:
    rank = os.environ["RANK"]
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(folder, f"ready-{rank}").touch()
    while len(list(Path(folder).glob("ready-*"))) < 2:
        time.sleep(0.01)
    if rank == "1" and how == "fails":
        raise SystemExit(7)
    time.sleep(600)


def ended(ranks: RankProcesses) -> Ended:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (found := ranks.wait(0.1)) is not None:
            return found
    raise AssertionError("they do not end")


def environments(count: int) -> list[dict[str, str]]:
    return [{"RANK": str(rank), "NAME": "ab"[rank]} for rank in range(count)]


def test_a_result_of_any_size_is_rank_zero_s():
    ranks = RankProcesses("spawn")
    ranks.start(returns, (LARGE,), environments(2))
    assert ended(ranks) == Ended(result=b"a" * LARGE)
    assert ranks.codes() == {0: 0, 1: 0}
    assert "NAME" not in os.environ


def test_a_rank_that_fails_ends_the_others(tmp_path):
    ranks = RankProcesses("spawn")
    ranks.start(ends, (str(tmp_path), "fails"), environments(2))
    assert ended(ranks) == Ended(failed=1)
    assert ranks.codes() == {0: -signal.SIGTERM, 1: 7}


def test_what_does_not_hear_a_signal_is_killed(tmp_path):
    ranks = RankProcesses("spawn")
    ranks.start(ends, (str(tmp_path), "stubborn"), environments(2))
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert ranks.wait(0.05) is None
    ranks.close(signal.SIGTERM, 0.5)
    assert ranks.codes() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}


@pytest.mark.parametrize("loaded", [(), ("kagome.launch.environment",)], ids=["spawned", "forked"])
def test_a_launcher_imports_no_torch(loaded):
    code = (
        "import os, sys\nfrom kagome.launch.launcher import start_local\n"
        f"assert start_local(2, os.getcwd, loaded={loaded!r}) == os.getcwd()\n"
        "print({'torch', 'numpy', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
