"""The specials, how each is switched off, and the ways of training that each is for.

Where it sits: ``main.py`` runs the pairs that are listed here, and ``switches.py`` has the switches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Graph = Literal["made", "words", "Cora"]

SBM = "degree=20,classes=8,communities=8"
GRAPHS: dict[Graph, str] = {
    "made": f"sbm:vertices=100000,{SBM},features=128",
    "words": "python:words:graph",
    "Cora": "Cora",
}
"""The graphs, by ``data.name``; the first two have 2 million directed edges."""
SMALL: dict[Graph, str] = {
    "made": f"sbm:vertices=10000,{SBM},features=128",
    "words": "python:words:small",
    "Cora": "Cora",
}
"""The graphs of a smoke test."""
EACH: dict[Graph, int] = {"made": 1, "words": 1, "Cora": 10}
"""Epochs of a turn. An epoch of Cora is so short that a start of two ranks would show in it."""
COMMON = "--model.layers 3 --model.hidden 128"


@dataclass(frozen=True)
class Case:
    """A way of training.

    Args:
        ranks: Number of ranks.
        parts: Number of parts that the graph is cut into.
        flags: Flags of ``kagome train`` beside those of all cases.
        cutter: The partitioner.
    """

    ranks: int
    parts: int
    flags: str
    cutter: str = "auto"


GAT = "--model.name gat --model.heads 8"
STAGES = "--model.name gcn2 --model.layers 8 --parallel.pipe 2 --parallel.chunks 4 --parallel.no-guard"
CODED = "--model.name gcn --parallel.graph 2 --parallel.no-guard --parallel.codec"
CASES: dict[str, Case] = {
    "gcn, 1 rank": Case(1, 1, "--model.name gcn"),
    "gat, 1 rank": Case(1, 1, GAT),
    "gatv2, 1 rank": Case(1, 1, "--model.name gatv2 --model.heads 8"),
    "deepgcn, 1 rank": Case(1, 1, "--model.name deepgcn"),
    "gcn, 2 parts": Case(2, 2, "--model.name gcn --parallel.graph 2"),
    "sage, 2 parts": Case(2, 2, "--model.name sage --parallel.graph 2"),
    "gat, 2 parts": Case(2, 2, f"{GAT} --parallel.graph 2"),
    "gcn, 2 slices": Case(2, 2, "--model.name gcn --parallel.tensor 2", "contiguous"),
    "gcn2, 2 stages, history": Case(2, 1, STAGES),
    "gcn, 2 parts, one bit": Case(2, 2, f"{CODED} onebit"),
    "gcn, 2 parts, int8": Case(2, 2, f"{CODED} int8"),
    "gcn without dropout, 1 rank": Case(1, 1, "--model.name gcn --model.dropout 0"),
    "sage without dropout, 2 parts": Case(2, 2, "--model.name sage --model.dropout 0 --parallel.graph 2"),
}


@dataclass(frozen=True)
class Special:
    """One special of Kagome.

    Args:
        cases: Names of the ways of training that it is for.
        files: Its source below ``src/kagome``.
        off: Flags of the side that has it not.
        large: The graph of more than a million edges.
        judged: Whether there is a verdict.
    """

    cases: tuple[str, ...]
    files: tuple[str, ...] = ()
    off: str = ""
    large: Graph = "made"
    judged: bool = True


REPLAY = ("replay/layer_calls.py", "replay/recorded_ops.py")
SPECIALS: dict[str, Special] = {
    "control": Special(("gcn, 1 rank", "gcn, 2 parts"), judged=False),
    "replay": Special(
        ("gcn, 1 rank", "sage, 2 parts", "gcn2, 2 stages, history"),
        (*REPLAY, "replay/__init__.py", "replay/propagate.py", "replay/arguments.py"),
    ),
    "replay of layers": Special(("gcn, 1 rank", "gcn2, 2 stages, history"), REPLAY),
    "vector steps": Special(("gcn, 1 rank", "gat, 1 rank", "gatv2, 1 rank"), ("kernels/cpu/simd.py",)),
    "prefetch": Special(("gcn, 1 rank", "gat, 1 rank"), ("kernels/cpu/prefetch.py",)),
    "exponential": Special(("gat, 1 rank", "deepgcn, 1 rank"), ("kernels/cpu/exp.py",)),
    "shared memory": Special(
        ("gcn, 2 parts", "gat, 2 parts", "gcn, 2 slices", "gcn2, 2 stages, history"),
        ("comm/transport/shared_memory.py", "comm/transport/mailbox.py"),
        off="--parallel.no-shared-memory",
    ),
    "forward reuse": Special(
        ("gcn without dropout, 1 rank", "sage without dropout, 2 parts"), ("components/forward_reuse.py",)
    ),
    "thin features": Special(
        ("gcn, 1 rank", "sage, 2 parts", "gat, 1 rank"), ("sparse_ops/sparse_features.py",), large="words"
    ),
}
