"""Settings: what is run, and by which names its results are kept.

Where it sits: ``main`` walks over them, ``worker`` runs one, ``tables`` and ``figures`` look results up.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kagome.config import CrossChunk, Partitioner

Side = Literal["pyg", "dgl", "rebuild", "kagome"]
Kind = Literal["accuracy", "time"]
COUNTS = (1, 2, 4, 8)
"""Micro-batches."""


@dataclass(frozen=True)
class Setting:
    """One way to train the model.

    Args:
        side: PyG's plain loop, DGL's, PyG with a subgraph made anew by every micro-batch and layer (as the
            modules of Dearing and Wang do), or Kagome.
        pipe: Stages.
        chunks: Micro-batches.
        cross: What micro-batches read of each other.
        partitioner: How vertices are given to micro-batches.
    """

    side: Side
    pipe: int = 1
    chunks: int = 1
    cross: CrossChunk = "drop"
    partitioner: Partitioner = "contiguous"

    @property
    def name(self) -> str:
        """Under which its results are kept."""
        if self.side in ("pyg", "dgl"):
            return self.side
        mesh = "rebuild" if self.side == "rebuild" else f"pipe{self.pipe}"
        return mesh if self.chunks == 1 else f"{mesh}-{self.cross}{self.chunks}-{self.partitioner}"


PYG, DGL = Setting("pyg"), Setting("dgl")


def kagome(
    pipe: int, chunks: int = 1, cross: CrossChunk = "drop", partitioner: Partitioner = "contiguous"
) -> Setting:
    """A setting of Kagome."""
    return Setting("kagome", pipe, chunks, cross, partitioner)


WHOLE = (PYG, DGL, kagome(1), kagome(2), kagome(4))
"""Without micro-batches."""
LINES: tuple[tuple[CrossChunk, Partitioner], ...] = (
    ("drop", "contiguous"),
    ("drop", "metis"),
    ("history", "contiguous"),
    ("exact", "contiguous"),
)
"""Lines of accuracy over micro-batches."""


def for_accuracy() -> list[Setting]:
    """What is trained to the end: the cheapest answers first.

    How many stages the layers are cut into changes no number, so micro-batches have one, a core a run.
    """
    return [*WHOLE, *(kagome(1, chunks, *line) for line in LINES for chunks in COUNTS[1:])]


def for_time() -> list[Setting]:
    """What is timed for some epochs."""
    dropped = [kagome(pipe, chunks) for pipe in (1, 2, 4) for chunks in COUNTS[1:]]
    lossless = [kagome(2, chunks, cross) for cross in ("history", "exact") for chunks in COUNTS[1:]]
    rebuilt = [Setting("rebuild", chunks=chunks) for chunks in COUNTS[1:]]
    return [*WHOLE, *dropped, *lossless, *rebuilt]


class Store:
    """Results by key in one file, written whole after each; what is there is not run again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """All results."""
        found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found

    def put(self, key: str, value: Any) -> None:
        """Keep one result; stopped at any moment, the file is whole. Several runs may do so at a time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            kept = self.read() | {key: value}
            new = self.path.with_suffix(".tmp")
            rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
            new.write_text(f"{{\n{rows}\n}}\n")
            os.replace(new, self.path)
        finally:
            os.close(folder)


def key(kind: Kind, graph: str, name: str, number: int) -> str:
    """Of a result: ``number`` is the seed, or the turn."""
    return f"{kind}/{graph}/{name}/{number}"
