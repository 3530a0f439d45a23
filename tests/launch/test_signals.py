"""Signals that end a run: the epoch is finished and saved, on one rank or many, if one alone hears too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR

from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.config import Parallel
from kagome.launch import signals
from kagome.launch.signals import asked_to_stop
from kagome.launch.threads import LAUNCHED
from training import QUIET, Gcn, graph, settings

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def stopped(
    channel: Channel, number: int, rank: int, folder: str, parallel: dict[str, Any]
) -> tuple[str, object, int]:
    # As in a rank that ``kagome train --nproc`` has started; by itself a process hears of Ctrl-C.
    os.environ[LAUNCHED] = "1"

    def rate(epoch: int) -> float:
        if epoch == 3 and channel.rank == rank:
            os.kill(os.getpid(), number)
        return 1.0

    before = signal.signal(signal.SIGINT, signal.SIG_IGN if channel.size > 1 else signal.default_int_handler)
    found: tuple[str, object] = "nothing", None
    try:
        with Trainer(
            Gcn(),
            graph(),
            parallel=Parallel(**parallel),
            train=settings(epochs=50),
            report=QUIET,
            out=folder,
            scheduler=lambda optimizer: LambdaLR(optimizer, rate),
        ) as trainer:
            try:
                trainer.fit()
            except (KeyboardInterrupt, SystemExit) as error:
                found = type(error).__name__, getattr(error, "code", None)
            handlers = [signal.getsignal(number) for number in SIGNALS]
            assert signals.asked_to_stop.__name__ not in str(handlers)
            return *found, trainer.epoch
    finally:
        signal.signal(signal.SIGINT, before)
        del os.environ[LAUNCHED]


@pytest.mark.some(4)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("world", "rank", "parallel"),
    [(1, 0, {}), (2, 1, {}), (2, 0, {"pipe": 2, "chunks": 2, "cross_chunk": "exact"})],
)
def test_a_signal_to_one_rank_saves_and_ends_all(ranks, tmp_path, number, world, rank, parallel):
    """One process did not save at Ctrl-C or SIGHUP, and a rank alone ignored Ctrl-C."""
    found = ranks(world, stopped, number, rank, str(tmp_path), parallel)
    kind, code, epoch = found[0]
    assert found == [found[0]] * world
    by_hand = number == signal.SIGINT and world == 1
    assert (kind, code) == (("KeyboardInterrupt", None) if by_hand else ("SystemExit", 128 + number))
    assert epoch == (3 if world == 1 else 4)  # the others learn of it with the next epoch's gradients
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"epoch-{epoch:06d}"
    with Trainer(Gcn(), graph(), train=settings(epochs=epoch + 1), report=QUIET) as trainer:
        trainer.fit(resume=Path(tmp_path))
        assert trainer.epoch == epoch + 1


def test_a_second_ctrl_c_does_not_wait_for_the_epoch(monkeypatch):
    monkeypatch.setattr(signals, "AT_ONCE", 0.0)
    with asked_to_stop(True) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked == [signal.SIGINT]
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_was_ignored_stays_ignored():
    """As under nohup, and in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with asked_to_stop(True) as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert asked == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_a_folder_signals_do_what_they_did():
    before = signal.getsignal(signal.SIGTERM)
    with asked_to_stop(False):
        assert signal.getsignal(signal.SIGTERM) is before
