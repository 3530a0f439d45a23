"""GAT: Dearing and Wang's model as modules that follow each other, for PyG (and so Kagome) and for DGL.

Where it sits: ``worker`` trains it. The projection of each layer is a module beside its attention, as 8 heads
of 8 are the same either way: so a pipeline of up to four stages can be cut out of two layers.

::

    drop -> project -> attend -> ELU -> drop -> project -> attend -> log-softmax
            stage 0    stage 1                  stage 2    stage 3
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GATConv, Linear

sys.path.append(str(Path(__file__).parents[1] / "single_device"))

from rivals import import_dgl

HEADS, WIDTH, DROPOUT = 8, 8, 0.6


class Gat(nn.Module):
    """Two layers of attention: 8 heads of 8, then one head a class.

    Shapes:
        x ``[N, F]``, edge_index ``[2, E]`` -> log-probabilities ``[N, C]``.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.drop_first, self.drop_second = nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)
        self.project_first = Linear(features, HEADS * WIDTH, bias=False, weight_initializer="glorot")
        self.attend_first = attention(HEADS, WIDTH)
        self.elu = nn.ELU()
        self.project_second = Linear(HEADS * WIDTH, classes, bias=False, weight_initializer="glorot")
        self.attend_second = attention(1, classes)
        self.log_softmax = nn.LogSoftmax(dim=-1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        return self.second(x, edge_index)

    def first(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The first layer."""
        out: Tensor = self.elu(self.attend_first(self.project_first(self.drop_first(x)), edge_index))
        return out

    def second(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The second layer."""
        out: Tensor = self.attend_second(self.project_second(self.drop_second(x)), edge_index)
        scores: Tensor = self.log_softmax(out)
        return scores


def attention(heads: int, width: int) -> GATConv:
    """PyG's layer on rows that are projected already."""
    layer = GATConv(heads * width, width, heads=heads, dropout=DROPOUT)
    layer.lin = nn.Identity()
    return layer


class DglGat(nn.Module):
    """The same model of DGL's layers.

    Args:
        features: Columns of x.
        classes: Columns of the scores.
        edge_index: All edges; DGL's layer adds no self-loops, so they are added here.
        vertices: Rows of x.

    Raises:
        ImportError: If there is no DGL.
    """

    def __init__(self, features: int, classes: int, edge_index: Tensor, vertices: int) -> None:
        super().__init__()
        dgl, note = import_dgl()
        if dgl is None:
            raise ImportError(note)
        from importlib import import_module

        layer: Any = import_module("dgl.nn.pytorch").GATConv
        self.graph: Any = dgl.add_self_loop(
            dgl.remove_self_loop(dgl.graph((edge_index[0], edge_index[1]), num_nodes=vertices))
        )
        self.attend_first = layer(features, WIDTH, HEADS, feat_drop=DROPOUT, attn_drop=DROPOUT)
        self.elu = nn.ELU()
        self.attend_second = layer(HEADS * WIDTH, classes, 1, feat_drop=DROPOUT, attn_drop=DROPOUT)
        self.log_softmax = nn.LogSoftmax(dim=-1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.elu(self.attend_first(self.graph, x).flatten(1))
        scores: Tensor = self.log_softmax(self.attend_second(self.graph, x).flatten(1))
        return scores
