"""Graphs: what the benchmarks train on, prepared once and kept as tensors that a process reads at once.

Where it sits: ``sides`` loads a graph here before it measures its memory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import torch
from torch_geometric.data import Data

from kagome import config

FEATURES: Final = 128
KEYS: Final = ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask")
MADE: Final = f"sbm:vertices=100000,degree=21,features={FEATURES}"
TINY: Final = "sbm:vertices=300,degree=6,features=16,classes=4"

GRAPHS: Final = {
    "ego-twitter": config.Data(name="npz:{data}/snap/ego-twitter.npz", undirected=True),
    "Cornell5": config.Data(name="cornell5", root="{data}", project=FEATURES),
    "made": config.Data(name=MADE),
    "tiny": config.Data(name=TINY),
}
"""ego-twitter has topology alone: 128 features and 16 classes are made. ``made`` has power-law degrees."""


def load(name: str, data: Path | None, kept: Path) -> Data:
    """A graph by its name, prepared and kept in a file the first time.

    Args:
        name: A name of :data:`GRAPHS` or of ``webs.WEBS``, or ``sbm:...``.
        data: Folder of raw data sets, for those that are not made.
        kept: Folder of prepared graphs.

    Raises:
        SystemExit: If the graph needs ``data`` and it is not given.
    """
    file = kept / (re.sub(r"[^\w.-]+", "-", name) + ".pt")
    if not file.exists():
        kept.mkdir(parents=True, exist_ok=True)
        graph = _prepared(name, data)
        part = file.with_suffix(".part")
        torch.save({key: graph[key].contiguous() for key in KEYS}, part)
        part.replace(file)
    return Data(**torch.load(file, weights_only=True))


def _prepared(name: str, data: Path | None) -> Data:
    # Imported here, so that a process with an older Kagome can read what is prepared.
    import webs

    from kagome.graph.datasets.load import load_data

    if name in webs.WEBS:
        return webs.graph(webs.WEBS[name])

    settings = GRAPHS[name] if name in GRAPHS else config.Data(name=name)
    if "{data}" in settings.name + settings.root and data is None:
        raise SystemExit(f"the graph {name} needs --data FOLDER, with the raw files of the data sets")
    folder = str(data.resolve()) if data else ""
    filled = config.Data(
        name=settings.name.format(data=folder),
        root=settings.root.format(data=folder),
        undirected=settings.undirected,
        project=settings.project,
    )
    return load_data(filled)
