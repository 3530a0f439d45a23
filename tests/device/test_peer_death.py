"""Under NCCL a rank that dies ends the others within the time limit, and they say which one it was."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import bed
import pytest
from fake_gpu import cuda, nccl
from runs import Run, trainer

import warm
from pool import calm

LIMIT = 16.0


def mortal(rank: int, folder: Path) -> None:
    """Train on two ranks; rank 1 dies as its third epoch begins."""
    sys.stderr = (folder / f"said-{rank}").open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    calm()
    nccl.start(cuda.start(2))
    nccl.FakeNCCL.aborts = True
    os.environ.update(bed._job(rank, 2, folder / "store"))
    with trainer(Run(2, train={"timeout": LIMIT})) as it:
        train = it.engine.train

        def dying(epoch: int, *args: Any, **more: Any) -> Any:
            if (rank, epoch) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            return train(epoch, *args, **more)

        it.engine.train = dying  # type: ignore[method-assign]
        it.fit()


@pytest.mark.slow  # it waits for a time limit
def test_a_rank_that_dies_ends_the_others_and_is_named(devices, tmp_path):
    context = warm.context()
    ranks = [context.Process(target=mortal, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=100)
    said = (tmp_path / "said-0").read_text()
    assert [process.exitcode for process in ranks] == [-signal.SIGABRT, -signal.SIGKILL], said
    assert "' for rank 1, which was last seen in '" in said.partition("rank 0 has waited")[2]
    assert "Watchdog caught collective operation timeout" in said
