"""On import, PyG writes the ``propagate`` of each layer that it can fuse while the layer is fusable.

PyG writes one ``propagate`` a class and process, and takes the class's first layer for it: after a first
``SAGEConv(aggr="lstm")``, any ``SAGEConv`` refuses a sparse matrix. Which test comes first in a worker is
chance, so that ``pool`` imports this before any.
"""

from __future__ import annotations

import torch_geometric.nn as pyg
from torch import nn

LAYERS = (
    pyg.SAGEConv(1, 1),
    pyg.GraphConv(1, 1),
    pyg.GINConv(nn.Linear(1, 1)),
    pyg.GCNConv(1, 1),
    pyg.ClusterGCNConv(1, 1),
    pyg.LEConv(1, 1),
)
