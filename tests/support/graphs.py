"""Small random graphs for property tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch_geometric.data import Data


@st.composite
def multigraphs(draw: st.DrawFn, most_vertices: int = 12, most_edges: int = 40) -> Data:
    """Directed, with self-loops, duplicates and isolated vertices; attributes tell rows and edges apart."""
    count = draw(st.integers(1, most_vertices))
    vertex = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(vertex, vertex), max_size=most_edges))
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()
    return Data(
        num_nodes=count,
        x=torch.arange(count, dtype=torch.float32)[:, None] * 10,
        y=torch.arange(count) % 3,
        train_mask=torch.arange(count) % 2 == 0,
        edge_index=edge_index,
        edge_weight=torch.arange(len(pairs), dtype=torch.float64),
        edge_attr=torch.arange(2 * len(pairs)).view(-1, 2),
    )


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Data, torch.Tensor, int]:
    """A graph, an owner of every vertex, and a number of parts; parts may be empty."""
    data = draw(multigraphs())
    parts = draw(st.integers(1, 6))
    owner = draw(st.lists(st.integers(0, parts - 1), min_size=data.num_nodes, max_size=data.num_nodes))
    return data, torch.tensor(owner), parts
