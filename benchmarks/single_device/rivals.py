"""Rivals: DGL, imported beside a PyTorch that it does not know, and its layers in a stack like PyG's.

Where it sits: ``aggregation`` times its sums, ``sides`` and the benchmark of memory train the stack. It is
the extra ``bench``; without it the benchmarks leave it out.
"""

from __future__ import annotations

import importlib
import os
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from trial import Trial


class _Nothing(ModuleType):
    """A module of which every name is an empty class: enough for ``from . import graphbolt``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_dgl() -> tuple[Any, str]:
    """DGL, or None and why it cannot be had.

    DGL 2.1's graphbolt loads a library built for PyTorch 2.0 to 2.2 and stops the import with any other. The
    kernels of message passing are in another library, which needs no PyTorch: so graphbolt is left out.
    """
    os.environ.setdefault("DGLBACKEND", "pytorch")
    # Also after a failed try, what is left in sys.modules must not be taken for DGL.
    sys.modules.setdefault("dgl.graphbolt", _Nothing("dgl.graphbolt"))
    try:
        dgl = importlib.import_module("dgl")
        return dgl, f"DGL {dgl.__version__}, without graphbolt"
    except Exception as error:  # an old package with a new PyTorch fails in its own ways
        for name in [n for n in sys.modules if n == "dgl" or n.startswith("dgl.")]:
            del sys.modules[name]
        return None, f"no DGL: {type(error).__name__}: {error}"


def needed() -> Any:
    """DGL.

    Raises:
        SystemExit: If it cannot be had.
    """
    dgl, fault = import_dgl()
    if dgl is None:
        raise SystemExit(fault)
    return dgl


class Stack(nn.Module):
    """GraphConv, SAGEConv or GATConv, layer upon layer, with ReLU between."""

    def __init__(self, model: str, widths: list[int], heads: int) -> None:
        super().__init__()
        dgl = needed()
        last, convs = len(widths) - 2, []
        for place, (fan_in, fan_out) in enumerate(pairwise(widths)):
            if model == "gcn":
                convs.append(dgl.nn.GraphConv(fan_in, fan_out))
            elif model == "sage":
                convs.append(dgl.nn.SAGEConv(fan_in, fan_out, "mean"))
            else:
                # As in PyG's GAT: the heads of the last layer are averaged, those of the others joined.
                convs.append(dgl.nn.GATConv(fan_in, fan_out if place == last else fan_out // heads, heads))
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Return the scores of all vertices.

        Shapes:
            x ``[N, F]`` -> ``[N, C]``.
        """
        for place, conv in enumerate(self.convs):
            last = place == len(self.convs) - 1
            x = conv(graph, x)
            if x.dim() == 3:
                x = x.mean(1) if last else x.flatten(1)
            x = x if last else torch.relu(x)
        return x


def model_of(trial: Trial, data: Data) -> nn.Module:
    """The model, with first weights of its own."""
    torch.manual_seed(0)
    widths = [data.x.size(1), *[trial.hidden] * (trial.layers - 1), int(data.y.max()) + 1]
    return Stack(trial.model, widths, trial.heads)


def graph_of(trial: Trial, data: Data) -> Any:
    """The graph with 32-bit ids, with loops where the layers of PyG add them."""
    dgl = needed()
    graph = dgl.graph((data.edge_index[0].int(), data.edge_index[1].int()), num_nodes=data.num_nodes)
    return dgl.add_self_loop(graph) if trial.model != "sage" else graph
