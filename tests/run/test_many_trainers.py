"""Many Trainers in one process: each that is closed, and each that nobody holds, leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import QUIET, Gcn, graph, settings

import warm
from kagome import Trainer
from kagome.errors import ConfigError

SCRIPT = Path(__file__).parent / "many.py"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trainers", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_trainers_leave_no_file_and_no_thread(tmp_path, trainers, ranks):
    """On two ranks each kept 13 files and a thread, and each that was closed kept a file.

    So many are closed, and as many dropped.
    """
    found = warm.run(SCRIPT, trainers, cwd=tmp_path, ranks=ranks, timeout=400)
    assert found.returncode == 0, found.stderr
    rows = [line.split() for line in found.stdout.splitlines()]
    assert len(rows) == 5 * ranks
    for first, *others in (rows[place : place + 5] for place in range(0, len(rows), 5)):
        for row in others:
            assert row[-3:] == first[-3:], rows


def test_a_closed_trainer_says_so():
    trainer = Trainer(Gcn(), graph(), train=settings(), report=QUIET)
    trainer.close()
    trainer.close()
    for call in (trainer.fit, trainer.evaluate, trainer.predict, trainer.last_weights):
        with pytest.raises(ConfigError, match="needs the ranks, but this Trainer is closed"):
            call()
