"""Within: a call that blocks is given up; a store or a host that says nothing holds nobody up."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from kagome.comm.mesh import open_mesh
from kagome.comm.transport import failures
from kagome.comm.transport.timeout import SilentError, within
from kagome.comm.watchdog import Watchdog
from kagome.errors import CommError


def test_an_answer_an_error_and_silence():
    assert within(5.0, lambda: 7, "seven") == 7
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0, "an error")
    held = threading.Event()
    try:
        with pytest.raises(SilentError, match=r"a store: no answer within 0\.05 s"):
            within(0.05, held.wait, "a store")
    finally:
        held.set()


class Mute:
    """A store of which every call blocks once its host has gone."""

    def __init__(self) -> None:
        self.gone, self.asked = threading.Event(), 0

    def _call(self) -> None:
        self.asked += 1
        if self.gone.is_set():
            threading.Event().wait()

    def set(self, key: str, value: str) -> None:
        self._call()

    def check(self, keys: list[str]) -> bool:
        self._call()
        return False


def test_a_store_whose_host_is_gone_holds_up_neither_an_error_nor_the_end(monkeypatch):
    """A link that is cut is found by the system after 930 s; each look would have waited for that."""
    monkeypatch.setattr("kagome.comm.watchdog.ANSWERS_WITHIN", 0.2)
    store = Mute()
    watch = Watchdog(store, 0, 8, log=print, every=1000.0)
    assert watch.describe(1) == "rank 1, of which nothing was seen"
    store.gone.set()
    before = store.asked
    begun = time.monotonic()
    assert watch.late("epoch 2: halo", range(1, 8)) == list(range(1, 8))
    assert "the host where ranks meet is silent" in watch.describe(3)
    watch.close()
    assert store.asked == before + 1, "nobody asks twice what does not answer"
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("answers", [True, False], ids=["connects", "drops"])
def test_a_master_port_that_never_speaks_is_given_up_after_the_time_limit(monkeypatch, answers):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(0 if answers else 1)
        if not answers:  # the queue is full: further connections are not answered
            blockers = [socket.socket() for _ in range(4)]
            for blocker in blockers:
                blocker.setblocking(False)
                blocker.connect_ex(mute.getsockname())
        port = str(mute.getsockname()[1])
        own = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in own.items():
            monkeypatch.setitem(os.environ, name, value)
        begun = time.monotonic()
        with (
            pytest.raises(CommError, match=f"to meet 1 other ranks at 127.0.0.1:{port}"),
            open_mesh(timeout=2.0),
        ):
            pass
        assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("Timed out waiting 100ms for recv operation to complete", True),
        ("Application timeout caused pair closure", True),
        ("Read error [10.0.0.2]:2345: Connection timed out", False),
        ("writev [10.0.0.2]:2345: Connection timed out", False),
        ("Connection closed by peer [10.0.0.2]:2345", False),
    ],
)
def test_a_connection_that_the_network_has_lost_is_not_late(text, late):
    assert failures.is_late(RuntimeError(text)) == late
