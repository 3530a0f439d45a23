"""What of Kagome's source a run walks through. Run as ``python tests/walk.py``.

Where it sits: ``test_walk`` keeps each figure from growing past what ``golden/walk.json`` says. A reader who
follows an epoch, a halo row on its way to the channel, or a plan opens as many files.

It imports public names alone, so that it measures other checkouts too: ``PYTHONPATH=OTHER/src``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import warm

BOUNDS = Path(__file__).parent / "golden" / "walk.json"
STARTS = ("start", "start_exchange")
"""Names of the channel's method that begins to send rows, the second of older checkouts."""
RUN = "--epoch"


class Walk:
    """The files, functions and frames of Kagome that are entered while this is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, int]] = set()
        self.frames = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Look at each call of this thread."""
        self.start()
        try:
            yield
        finally:
            sys.setprofile(None)

    def start(self) -> None:
        """Look at each call of this thread until ``sys.setprofile(None)``."""
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or "/kagome/" not in code.co_filename or code.co_name.startswith("<"):
            return
        self.files.add(code.co_filename)
        self.functions.add((code.co_filename, code.co_firstlineno))
        if code.co_name in STARTS and code.co_filename.endswith("comm/channel.py"):
            self.frames = max(self.frames, _depth(frame))


def _depth(frame: FrameType | None) -> int:
    """Count Kagome's frames from this one up to ``fit``; 0 if ``fit`` is not among them."""
    depth = 0
    while frame is not None:
        code = frame.f_code
        depth += "/kagome/" in code.co_filename and not code.co_name.startswith("<")
        if code.co_name == "fit":
            return depth
        frame = frame.f_back
    return 0


def epoch() -> None:
    """Run three epochs of GraphSAGE on two ranks; rank 0 prints what the second walks through."""
    import torch
    from torch_geometric.nn import GraphSAGE

    import kagome

    class Second(torch.optim.lr_scheduler.LambdaLR):
        """Looks from the first epoch's step to the second's. Its first step is part of its making."""

        def step(self, epoch: int | None = None) -> None:
            sys.setprofile(None)
            super().step()
            if self.last_epoch == 1:
                walk.start()

    walk = Walk()
    torch.manual_seed(0)
    data = kagome.load("digits")
    model = GraphSAGE(int(data.num_features), 16, 2, 10)
    trainer = kagome.Trainer(
        model,
        data,
        parallel=kagome.Parallel(graph=2),
        train=kagome.Train(epochs=3),
        scheduler=lambda optimizer: Second(optimizer, lambda _: 1.0),
    )
    trainer.fit()
    if os.environ["RANK"] == "0":
        found = {"epoch_files": len(walk.files), "epoch_functions": len(walk.functions)}
        print(json.dumps({**found, "frames_to_channel": walk.frames}))


def plan() -> int:
    """Count the files that ``kagome.plan`` enters for a GCN of 3 layers on two devices."""
    import torch
    from torch_geometric.nn import GCN

    import kagome

    torch.manual_seed(0)
    data = kagome.load("digits")
    model, walk = GCN(int(data.num_features), 16, 3, 10), Walk()
    with walk.on():
        kagome.plan(model, data, devices=2, reuse=False)
    return len(walk.files)


def measured() -> dict[str, int]:
    """Every figure by its name."""
    with tempfile.TemporaryDirectory() as folder:
        done = warm.run(__file__, RUN, cwd=folder, ranks=2)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(next(line for line in done.stdout.splitlines() if line[:1] == "{"))
    return {**found, "plan_files": plan()}


if __name__ == "__main__":
    if RUN in sys.argv:
        epoch()
    else:
        for name, value in measured().items():
            print(f"{name:28} {value:,}")
