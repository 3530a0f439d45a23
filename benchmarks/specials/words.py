"""Made graphs whose features are bags of words: of 1,000 words a vertex has 13, as Cora's have of 1,433.

Where it sits: ``main.py`` names them to ``kagome partition``, as ``python:words:graph``.
"""

from __future__ import annotations

import torch
from torch_geometric.data import Data

from kagome.graph.datasets.builtin import sbm

WORDS, EACH, OWN = 1000, 13, 0.5
"""Number of words; those of a vertex; the share of them that is drawn from its class's own words."""
CLASSES = 8


def graph() -> Data:
    """Return the graph that is timed: 2 million directed edges."""
    return _made(100_000)


def small() -> Data:
    """Return the graph of a smoke test."""
    return _made(10_000)


def _made(vertices: int) -> Data:
    """Return a made graph with bags of words in place of its features."""
    data = sbm(f"sbm:vertices={vertices},degree=20,features=1,classes={CLASSES},communities={CLASSES}")
    draw = torch.Generator().manual_seed(0)
    some = torch.randint(WORDS, (vertices, EACH), generator=draw)
    own = some % (WORDS // CLASSES) + data.y[:, None] * (WORDS // CLASSES)
    words = torch.where(torch.rand(vertices, EACH, generator=draw) < OWN, own, some)
    data.x = torch.zeros(vertices, WORDS).scatter_(1, words, 1.0)
    return data
