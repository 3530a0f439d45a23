"""Settings: what is trained, on which links, and the cuts that are run of each.

Where it sits: ``main.py`` predicts and runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline import speed

INEXACT: Final = "--parallel.no-guard"
"""A guard's probes are no part of what is predicted."""
CUTS: Final[Mapping[str, tuple[int, int, str]]] = {
    "graph=4": (4, 1, ""),
    "tensor=4": (1, 1, "--parallel.tensor 4"),
    "graph=2 tensor=2": (2, 1, "--parallel.tensor 2"),
    "graph=4 decouple=True": (4, 1, "--parallel.decouple"),
    "tensor=4 decouple=True": (1, 1, "--parallel.tensor 4 --parallel.decouple"),
    "graph=4 codec=onebit": (4, 1, f"--parallel.codec onebit {INEXACT}"),
    "graph=4 max_age=1": (4, 1, f"--parallel.max-age 1 {INEXACT}"),
    "pipe=4 chunks=1": (1, 4, "--parallel.chunks 1"),
    "pipe=4 cross_chunk=exact": (1, 4, "--parallel.cross-chunk exact"),
    "pipe=4": (1, 4, INEXACT),
    "pipe=2 graph=2": (2, 2, INEXACT),
}
"""Plans as the planner calls them: parts, stages, further flags."""
EXACT: Final = ("graph=4", "tensor=4", "graph=2 tensor=2")
DECOUPLED: Final = ("graph=4 decouple=True", "tensor=4 decouple=True")
CODED: Final = ("graph=4 codec=onebit", "graph=4 max_age=1")
STAGES: Final = ("pipe=4 chunks=1", "pipe=4 cross_chunk=exact", "pipe=4", "pipe=2 graph=2")


@dataclass(frozen=True)
class Setting:
    """A model on a graph.

    Args:
        graph: As ``pipeline.speed.GRAPHS`` has it.
        model: As ``kagome train`` knows it.
        layers: Layers.
        hidden: Width.
        cuts: That are run.
    """

    graph: str
    model: str
    layers: int
    hidden: int
    cuts: Sequence[str]

    @property
    def name(self) -> str:
        """In keys."""
        return f"{self.graph}/{self.model}/{self.layers}/{self.hidden}"

    def options(self, cut: str, data: Path, runs: Path) -> speed.Options:
        """What a run of a cut shares with others."""
        more = CUTS[cut][2]
        return speed.Options(layers=self.layers, hidden=self.hidden, more=more, data=data, runs=runs)

    def cases(self, cut: str, rates: Sequence[float]) -> list[speed.Case]:
        """A run of a cut, at each rate."""
        parts, pipe, _ = CUTS[cut]
        return [
            speed.Case(self.graph, self.model, "graph", rate, pipe, parts, f"{self.name}/{rate:g}/{cut}")
            for rate in rates
        ]

    def words(self, data: Path) -> list[str]:
        """Flags of what is trained."""
        case, options = self.cases("graph=4", [0.0])[0], self.options("graph=4", data, Path())
        return speed.command(case, options, Path("DIR"), 1)[4:]


MADE: Final = ("made-4k", "made-20k")


def settings(graphs: Sequence[str], models: Sequence[str]) -> Iterator[Setting]:
    """All that are asked for; ``sage`` is trained on made graphs."""
    small = [graph for graph in graphs if graph != "slashdot"]
    every = {
        "sage": [Setting(graph, "sage", 3, 128, EXACT) for graph in MADE],
        "gcn": [Setting(graph, "gcn", 3, 128, (*EXACT, *DECOUPLED, *CODED)) for graph in graphs],
        "gcn2": [Setting(graph, "gcn2", 16, 64, (*EXACT[:2], *STAGES)) for graph in small],
        "gat": [Setting(graph, "gat", 2, 128, (*EXACT, *DECOUPLED)) for graph in small],
    }
    for model in models:
        yield from every[model]
