"""On import, PyG writes the ``propagate`` of each layer that it can fuse while the layer is fusable.

PyG writes one ``propagate`` a class and process, and takes the class's first layer for it: after a first
``SAGEConv(aggr="lstm")``, any ``SAGEConv`` refuses a sparse matrix. Which test comes first in a worker is
chance, so that ``pool`` imports this before any.

PyG compiles the template of ``propagate`` anew for each class, in a tenth of a second. Here it is once.
"""

from __future__ import annotations

from functools import cache

import torch_geometric.nn as pyg
from jinja2 import Environment, FileSystemLoader
from torch import nn
from torch_geometric import template


@cache
def _of(folders: tuple[str, ...]) -> Environment:
    return Environment(loader=FileSystemLoader(folders))


template.Environment = lambda loader: _of(tuple(loader.searchpath))  # type: ignore[attr-defined]

LAYERS = (
    pyg.SAGEConv(1, 1),
    pyg.GraphConv(1, 1),
    pyg.GINConv(nn.Linear(1, 1)),
    pyg.GCNConv(1, 1),
    pyg.ClusterGCNConv(1, 1),
    pyg.LEConv(1, 1),
)
