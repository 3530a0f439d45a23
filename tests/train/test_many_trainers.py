"""Many Trainers in one process: each that is closed, and each that nobody holds, leaves nothing behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import warm
from kagome import Trainer
from kagome.errors import ConfigError
from kagome.launch.finalizer import Finalizer, close_waiting
from training import QUIET, Gcn, graph, settings

SCRIPT = Path(__file__).parents[1] / "support" / "many.py"


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trainers", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_trainers_leave_no_file_and_no_thread(tmp_path, trainers, ranks):
    """On two ranks each kept 13 files and a thread, and each that was closed kept a file.

    So many are closed, and as many dropped.
    """
    found = warm.run(SCRIPT, trainers, cwd=tmp_path, ranks=ranks, timeout=400)
    assert found.returncode == 0, found.stderr
    rows = [line.split() for line in found.stdout.splitlines()]
    assert len(rows) == 6 * ranks
    for first, *others in (rows[place : place + 6] for place in range(0, len(rows), 6)):
        for row in others:
            assert row[-3:] == first[-3:], rows


def test_what_is_gone_is_closed_by_the_thread_that_opened_it():
    """A collection in any other thread left the process group from there."""
    closed = []

    def note(what: str) -> Callable[[], None]:
        return lambda: closed.append((what, threading.current_thread()))

    here, there = Finalizer(note("ranks"), note("files")), []
    opened, ends = threading.Event(), threading.Event()

    def opens() -> None:
        there.append(Finalizer(note("ranks"), note("files")))
        opened.set()
        ends.wait(20)

    other = threading.Thread(target=opens)
    other.start()
    assert opened.wait(20)
    there[0]()
    close_waiting()
    assert closed == [("files", threading.current_thread())], "its thread is alive, and not this one"
    collecting = threading.Thread(target=here)
    collecting.start()
    collecting.join()
    assert closed[1:] == [("files", collecting)]
    close_waiting()
    close_waiting()
    assert closed[2:] == [("ranks", threading.current_thread())]
    ends.set()
    other.join()
    del other
    there.clear()
    gc.collect()
    assert [what for what, _ in closed[3:]] == ["ranks"], "a thread that has ended holds nothing open"


def test_a_closed_trainer_says_so():
    trainer = Trainer(Gcn(), graph(), train=settings(), report=QUIET)
    trainer.close()
    trainer.close()
    for call in (trainer.fit, trainer.evaluate, trainer.predict, trainer.last_weights):
        with pytest.raises(ConfigError, match=r"the ranks of an open Trainer for .*; got a closed one"):
            call()
