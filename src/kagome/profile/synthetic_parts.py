"""Synthetic parts: small graphs of many sizes, with rows drawn from a real part, to measure a model on.

Where it sits: beside ``subgraph``, which takes pieces of the real graph. The memory of a model depends on the
numbers of rows, halo rows and edges, not on which ones they are. Here these numbers vary independently, so
that the cost of each can be told from the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.graph.partition.partition import Partition, extract
from kagome.graph.structure.attributes import Attributes, Sorted
from kagome.positions.edge_tables import tensors_of

ROWS: Final = (29, 41, 23, 53, 37, 31, 47)
"""Own rows of each piece; no layer is likely to have one of these sizes."""
LINKS: Final = (60, 41, 90, 75, 130, 50, 66)
"""Pairs of own vertices with an edge each way, by piece."""
AWAY: Final = (40, 12, 25, 70, 15, 90, 30)
"""Edges each way to vertices of other pieces, by piece."""
POOL: Final = (6, 50, 200, 14, 30, 25, 90)
"""Number of vertices that these edges choose from; a small pool gives many edges to few halo rows."""
ALONE: Final = 5
"""Number of pieces that is enough without a halo."""
LOOPS: Final = (3, 0, 5, 1, 2, 4, 0)
"""Edges from a vertex to itself, by piece."""


def made_pieces(part: Partition, *, several: bool, loops: bool, seed: int) -> list[Partition]:
    """Make pieces with the attributes of a part: parts of one graph for several ranks, else separate graphs.

    Args:
        part: The part whose attribute rows are drawn, with repetition; zeros if it has no rows.
        several: Whether pieces read each other's rows.
        loops: Whether there are edges from a vertex to itself.
        seed: The seed of all random choices.

    Returns:
        Seven pieces, or five if they do not read each other's rows. Every edge has its reverse.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = [sum(ROWS[:k]) for k in range(len(ROWS) + 1)]
    inside = [_links(k, starts[k], loops, generator) for k in range(len(ROWS))]
    if several:
        away = [_away(k, starts, generator) for k in range(len(ROWS))]
        # One graph of all rows, in which piece k owns ROWS[k] consecutive vertices.
        graph = Data(edge_index=torch.cat([*inside, *away], dim=1), num_nodes=starts[-1])
        owner = torch.repeat_interleave(torch.tensor(ROWS))
        pieces = [extract(graph, owner, k, len(ROWS)) for k in range(len(ROWS))]
    else:
        pieces = []
        for k, count in enumerate(ROWS[:ALONE]):
            # Each piece is a whole graph: one part of one.
            graph = Data(edge_index=inside[k] - starts[k], num_nodes=count)
            pieces.append(extract(graph, torch.zeros(count, dtype=torch.int64), 0, 1))
    return [
        replace(
            piece,
            nodes=_again(part.nodes, piece.own.numel(), generator),
            edges=_again(part.edges, piece.edge_ids.numel(), generator),
            shared=part.shared,
            refused=part.refused,
        )
        for piece in pieces
    ]


def drawn(like: Partition, vertices: int, edges: int, seed: int) -> Data:
    """Make a graph of random edges whose attribute rows repeat those of a part.

    Args:
        like: The part that attributes of vertices and edges are taken from.
        vertices: The number of vertices.
        edges: The number of edges.
        seed: The seed of the random edges.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [(like.nodes, vertices), (like.edges, edges)]
    # Row i of the new graph has the attributes of row i mod n of the part, so values have the data's
    # distribution, which sparse features and integer inputs of embeddings need.
    attributes = {
        name: value[torch.arange(count) % value.size(0)]
        if value.size(0)
        else value.new_zeros(count, *value.shape[1:])
        for values, count in rows
        for name, value in values.items()
    }
    edge_index = torch.randint(0, vertices, (2, edges), generator=generator)
    nodes, of_edges = ({name: attributes[name] for name in values} for values, _ in rows)
    return Sorted(edge_index, vertices, Attributes(nodes, of_edges, like.shared, like.refused))


def tables_of(model: nn.Module, part: Partition) -> list[Tensor]:
    """Return the tensors of a model with a row for each vertex or each edge of the whole graph."""
    # A tensor that several modules share is one table.
    sizes = {part.num_nodes, part.num_edges}
    found = {id(tensor): tensor for _, tensor in tensors_of(model) if sizes.intersection(tensor.shape)}
    return [tensor for tensor in found.values() if tensor.layout is torch.strided]


def fit(model: nn.Module, part: Partition, piece: Partition) -> None:
    """Resize the tables of a model to the vertices or edges of a synthetic graph, in place.

    Args:
        model: A copy of the user's module, with its own tables.
        part: A part of the real graph.
        piece: A part of the synthetic graph.
    """
    for table in tables_of(model, part):
        # An axis is known by its size alone, so where a graph has as many
        # edges as vertices it counts as vertices.
        for axis, size in enumerate(table.shape):
            whole = part.num_nodes if size == part.num_nodes else part.num_edges
            rows = piece.num_nodes if size == part.num_nodes else piece.num_edges
            if size == whole:
                # Through .data, so that the parameter stays the same object for modules that share it.
                table.data = table.data.index_select(axis, torch.arange(rows) % whole)


def _links(k: int, start: int, loops: bool, generator: torch.Generator) -> Tensor:
    ends = torch.randint(0, ROWS[k], (2, LINKS[k]), generator=generator)
    # A step of 1 to ROWS[k] - 1 from the first end, modulo ROWS[k].
    ends[1] = (ends[0] + 1 + ends[1] % (ROWS[k] - 1)) % ROWS[k]  # never the vertex itself
    own = torch.arange(LOOPS[k] if loops else 0).expand(2, -1)
    return start + torch.cat([ends, ends.flip(0), own], dim=1)


def _away(k: int, starts: list[int], generator: torch.Generator) -> Tensor:
    others = torch.cat([torch.arange(starts[k]), torch.arange(starts[k + 1], starts[-1])])
    pool = others[torch.randperm(others.numel(), generator=generator)[: POOL[k]]]
    # Each edge has its reverse: the other piece reads the near row as one of its halo rows.
    far = pool[torch.randint(0, pool.numel(), (AWAY[k],), generator=generator)]
    near = starts[k] + torch.randint(0, ROWS[k], (AWAY[k],), generator=generator)
    return torch.cat([torch.stack([far, near]), torch.stack([near, far])], dim=1)


def _again(values: Mapping[str, Tensor], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    out = {}
    for name, value in values.items():
        if value.size(0):
            out[name] = value[torch.randint(0, value.size(0), (count,), generator=generator)]
        else:
            out[name] = value.new_zeros(count, *value.shape[1:])
    return out
