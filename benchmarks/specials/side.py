"""One rank of one side: trains as ``kagome train`` does, some epochs whenever it is let.

Run by ``main.py`` with the variables of a rank. Turn N begins when ``FOLDER/go-N`` is there; what it took is
written to ``FOLDER/done-N-RANK``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from switches import Uses, prepare

from kagome.cli import main
from kagome.train.metrics_log import EpochTimer
from kagome.train.trainer import Trainer

LOOK_SECONDS = 0.001


def forget_peak() -> None:
    """Let the largest resident size begin anew: what loading took does not count."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the largest resident size since :func:`forget_peak`."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def gated(folder: Path, each: int, settled: int, uses: Uses) -> None:
    """Make turns of so many epochs wait for their files, and write down what they took."""
    epoch, end, rank, runner = Trainer._one_epoch, EpochTimer.end, os.environ["RANK"], os.getppid()
    state: dict[str, float] = {}

    def ended(timer: Any, number: int, loss: float, uncoded: Any) -> None:
        state["loss"] = loss
        end(timer, number, loss, uncoded)

    def one(trainer: Any, *args: Any, **named: Any) -> Any:
        turn, place = divmod(trainer.epoch, each)
        if place == 0:
            while not (folder / f"go-{turn}").exists():
                time.sleep(LOOK_SECONDS)
                if os.getppid() != runner:
                    sys.exit("the runner has ended")
            if turn == settled:
                forget_peak()
            state["begin"] = time.perf_counter()
        found = epoch(trainer, *args, **named)
        if place == each - 1:
            seconds = (time.perf_counter() - state["begin"]) / each
            told = {"seconds": seconds, "loss": state["loss"], "peak": peak_bytes(), "uses": uses.number}
            fresh = folder / f".done-{turn}-{rank}"
            fresh.write_text(json.dumps(told))
            fresh.rename(folder / f"done-{turn}-{rank}")
        return found

    EpochTimer.end = ended  # type: ignore[method-assign]
    Trainer._one_epoch = one  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--special", required=True)
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--each", type=int, required=True)
    parser.add_argument("--settled", type=int, required=True)
    end = sys.argv.index("--")  # the flags of ``kagome train`` follow
    options = parser.parse_args(sys.argv[1:end])
    gated(options.folder, options.each, options.settled, prepare(options.special, off=options.off))
    main(["train", *sys.argv[end + 1 :]])
