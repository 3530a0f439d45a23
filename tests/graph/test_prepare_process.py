"""The process that cuts a graph: forked where that is safe, and ended with its caller, used or not."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from kagome import config
from kagome.graph import prepare_process
from kagome.graph.partition.store import load_meta
from kagome.graph.prepare_process import Standby, prepared_by, standing_by
from kagome.launch.environment import Ranks

SBM = "sbm:vertices=60,degree=4,features=3,classes=3,communities=3"
TWO = Ranks(rank=0, size=2, local_rank=0, local_size=2)


def order(folder: Path, name: str = SBM) -> str:
    asked = {"method": "random", "seed": 0, "parts": 2, "folder": [str(folder)]}
    return json.dumps([asdict(config.Data(name=name)), asked])


@pytest.fixture
def forked(monkeypatch):
    """A fork of this process, which has had threads of libraries for long."""
    monkeypatch.setattr(threading, "active_count", lambda: 1000)
    standby = Standby.forked()
    assert standby is not None
    yield standby
    standby.close()


def test_it_cuts_what_it_is_told_to(forked, tmp_path):
    assert prepared_by(forked, order(tmp_path / "parts")) == (0, "")
    assert load_meta(tmp_path / "parts").num_parts == 2


def test_an_error_comes_back_with_its_fields(forked, tmp_path):
    code, line = prepared_by(forked, order(tmp_path / "parts", "no-such-data"))
    assert code == 1
    assert json.loads(line)[0] == "DataError"


def test_one_that_dies_gives_its_code(forked, tmp_path):
    os.kill(forked._pid, 9)
    assert prepared_by(forked, order(tmp_path / "parts")) == (-9, "")


def test_one_that_is_not_used_ends_with_the_block(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1000)
    with standing_by(TWO) as standby:
        assert standby is not None
        pid = standby._pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_others_have_none(monkeypatch):
    with standing_by(Ranks(rank=1, size=2, local_rank=1)) as standby:
        assert standby is None
    with standing_by(Ranks()) as standby:
        assert standby is None
    # Beside threads that Python has not started a fork is not safe.
    monkeypatch.setattr(prepare_process.threading, "active_count", lambda: 0)
    with standing_by(TWO) as standby:
        assert standby is None
