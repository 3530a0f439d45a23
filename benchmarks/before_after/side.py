"""One rank of one side: trains as ``kagome train`` does, an epoch whenever it is let.

Run by ``main.py`` as ``python side.py FOLDER flags...`` with a checkout's ``src`` on the path and the
variables of a rank. Epoch N begins when ``FOLDER/go-N`` is there; its seconds are written to
``FOLDER/done-N-RANK``.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kagome.cli import main

OLDER = find_spec("kagome.train") is None
"""Whether the checkout is from before the folders were what they are."""
Trainer = import_module("kagome.run.trainer" if OLDER else "kagome.train.trainer").Trainer
LOOK_SECONDS = 0.001


def gated(folder: Path) -> None:
    """Make every epoch wait for its file."""
    epoch, rank = Trainer._one_epoch, os.environ["RANK"]

    def one(trainer: Any, *args: Any, **named: Any) -> Any:
        number = trainer.epoch
        while not (folder / f"go-{number}").exists():
            time.sleep(LOOK_SECONDS)
        begin = time.perf_counter()
        found = epoch(trainer, *args, **named)
        seconds = time.perf_counter() - begin
        fresh = folder / f".done-{number}-{rank}"
        fresh.write_text(repr(seconds))
        fresh.rename(folder / f"done-{number}-{rank}")
        return found

    Trainer._one_epoch = one


if __name__ == "__main__":
    gated(Path(sys.argv[1]))
    main(["train", *sys.argv[2:]])
