"""Makes many Trainers in one process, and prints how many files and threads are left after each kind."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import torch

from kagome import Trainer
from kagome.run_dir.claim import Claim
from training import QUIET, Gcn, graph, settings

COUNT = int(sys.argv[1])


class Holds:
    """A callback that keeps the trainer: a cycle, and on rank 0 alone."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self.trainer = trainer


def left(kind: str) -> None:
    files = len(os.listdir("/proc/self/fd"))
    print(kind, files, threading.active_count(), torch.distributed.is_initialized(), flush=True)


def made(**given) -> Trainer:
    return Trainer(Gcn(), graph(), train=settings(), report=QUIET, **given)


trainer = made()
trainer.fit(1)
trainer.close()
left("first")
for _ in range(COUNT):
    with made() as trainer:
        trainer.fit(1)
left("closed")
for _ in range(COUNT):
    trainer = made()  # the last one is let go of when this one is there
    trainer.fit(1)
del trainer
left("dropped")
kept = []
for _ in range(3):
    kept.append(Holds())
    trainer = made(callbacks=[kept[-1]])  # rank 0 keeps what the others drop
    trainer.fit(1)
del trainer
kept.clear()
gc.collect()
left("cycles")
for _ in range(2):
    one, other = made(), made()
    one.fit(1)
    one.close()
    other.fit(1)
    third = made()
    other.close()
    third.fit(1)
    third.close()
del one, other, third
left("side by side")

gc.collect()
gc.disable()
trainer = made(out="run")
trainer.fit(1)
trainer.myself = trainer
del trainer
collecting = threading.Thread(target=gc.collect)
collecting.start()
collecting.join()
gc.enable()
# That thread has left no ranks, and has closed the run's files.
assert torch.distributed.is_initialized() == (int(os.environ.get("WORLD_SIZE", "1")) > 1)
if os.environ.get("RANK", "0") == "0":
    Claim(Path("run")).close()
trainer = made()
trainer.fit(1)
trainer.close()
left("in a thread")
