"""Sample: a small connected piece of a graph, or of a rank's part, to check a model on.

Where it sits: ``check`` takes one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from kagome.graph.partition import Partition


def take_sample(data: Data | Partition, vertices: int, seed: int) -> Data:
    """A connected piece of a graph where it has one: breadth first from random vertices.

    Shapes:
        At most ``vertices`` rows; all edges among them.
    """
    if isinstance(data, Partition):
        inside = data.edge_index[0] < data.own.numel()
        edge_index = data.edge_index[:, inside]
        nodes, edges = data.nodes, {name: value[inside] for name, value in data.edges.items()}
        count = data.own.numel()
    else:
        count, edge_index = int(data.num_nodes or 0), data.edge_index
        nodes = {k: v for k, v in data.items() if isinstance(v, Tensor) and data.is_node_attr(k)}
        edges = {
            k: v
            for k, v in data.items()
            if isinstance(v, Tensor) and data.is_edge_attr(k) and k != "edge_index"
        }
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(count, dtype=torch.bool)
    if count <= vertices:
        chosen[:] = True
    while (missing := vertices - int(chosen.sum())) > 0 and count > vertices:
        # A random vertex and the sources of its in-edges; then those of theirs.
        front = torch.randint(0, count, (max(missing // 16, 1),), generator=generator)
        for _ in range(3):
            new = torch.zeros(count, dtype=torch.bool)
            new[front] = True
            fresh = (new & ~chosen).nonzero().view(-1)
            room = vertices - int(chosen.sum())
            chosen[fresh[torch.randperm(fresh.numel(), generator=generator)[:room]]] = True
            front = edge_index[0][new[edge_index[1]]]
            if not front.numel():
                break
    kept = chosen.nonzero().view(-1)
    place = torch.full((count,), -1)
    place[kept] = torch.arange(kept.numel())
    inside = chosen[edge_index[0]] & chosen[edge_index[1]]
    sample = Data(edge_index=place[edge_index[:, inside]], num_nodes=kept.numel())
    for name, value in nodes.items():
        sample[name] = value[kept]
    for name, value in edges.items():
        sample[name] = value[inside]
    return sample


def cast(sample: Data, dtype: torch.dtype) -> Data:
    """The sample with its floating point attributes in another type."""
    out = Data(num_nodes=sample.num_nodes)
    for name, value in sample.items():
        floats = isinstance(value, Tensor) and value.is_floating_point()
        out[name] = value.to(dtype) if floats else value
    return out
