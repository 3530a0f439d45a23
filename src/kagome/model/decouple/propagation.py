"""Propagation: hops over a graph without maps between them, with one operator for each kind of layer.

Where it sits: ``decouple`` puts these operators, which are plain PyG, after a model whose layers it splits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax


class Weighted(MessagePassing):  # type: ignore[misc]
    """Hops that sum neighbours' rows by edge weights, which are the same in each hop."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def hop(self, x: Tensor, edge_index: Tensor, weight: Tensor | None, hops: int) -> Tensor:
        """Propagate rows along the edges ``hops`` times.

        Shapes:
            ``x [N, C]``, ``edge_index [2, E]``, ``weight [E]`` -> ``[N, C]``.
        """
        for _ in range(hops):
            x = self.propagate(edge_index, x=x, weight=weight)
        return x

    def message(self, x_j: Tensor, weight: Tensor | None) -> Tensor:
        """Return a neighbour's row times the edge's weight."""
        return x_j if weight is None else weight.view(-1, 1) * x_j


class Symmetric(Weighted):
    """GCN's operator, normalised at both ends of an edge.

    Args:
        normalize: Whether weights are normalised at all.
        add_loops: Whether each vertex has a self-loop.
        improved: Whether self-loops have weight 2.
    """

    def __init__(self, normalize: bool = True, add_loops: bool = True, improved: bool = False) -> None:
        super().__init__()
        self.normalize, self.add_loops, self.improved = normalize, add_loops, improved

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, hops: int) -> Tensor:
        """Propagate rows ``hops`` times by the normalised weights.

        Shapes:
            ``x [N, C]``, ``edge_index [2, E]``, ``edge_weight [E]`` -> ``[N, C]``.
        """
        weight = edge_weight
        if self.normalize:
            edge_index, weight = gcn_norm(
                edge_index, edge_weight, x.size(0), self.improved, self.add_loops, self.flow, x.dtype
            )
        return self.hop(x, edge_index, weight, hops)


class Mean(MessagePassing):  # type: ignore[misc]
    """The mean of a vertex's own row and its neighbours' rows."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, hops: int) -> Tensor:
        """Take the mean over neighbours ``hops`` times.

        Shapes:
            ``x [N, C]``, ``edge_index [2, E]`` -> ``[N, C]``.
        """
        # Each vertex has exactly one loop, so its own row counts once in the mean.
        edge_index, _ = remove_self_loops(edge_index)
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        for _ in range(hops):
            x = self.propagate(edge_index, x=x)
        return x


Ends = tuple[Tensor, Tensor]
"""Attention scores of a layer at an edge's source and at its target; ``[N, 1]`` each."""


class Attention(Weighted):
    """One attention matrix for all hops, from the attention vectors of the layers that they replace.

    An edge's logit is the mean of the scores of these layers and their heads. A single layer with one head
    has the same matrix as in the coupled model.

    Args:
        slope: Negative slope of the leaky ReLU.
        add_loops: Whether each vertex has a self-loop.
        dropout: The share of attention weights that are dropped in training; all hops drop the same ones.

    Source: NeutronTP, PVLDB 18(2), section 4.1 (generalised decoupling): one matrix, computed from the maps.
    """

    def __init__(self, slope: float = 0.2, add_loops: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.slope, self.add_loops, self.dropout = slope, add_loops, dropout

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, hops: int, ends: Sequence[Ends]
    ) -> Tensor:
        """Propagate rows ``hops`` times by the attention matrix.

        Shapes:
            ``x [N, C]``, ``edge_index [2, E]``, ``ends`` of ``[N, 1]`` -> ``[N, C]``.
        """
        if self.add_loops:
            edge_index, _ = remove_self_loops(edge_index)
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        # ``ends`` has (source, target) for each layer that the hops
        # replace: the mean over layers, [N, 1] each.
        source, target = (sum(each[1:], start=each[0]) / len(each) for each in zip(*ends, strict=True))
        weight = self.edge_updater(edge_index, alpha=(source, target))
        return self.hop(x, edge_index, weight, hops)

    def edge_update(
        self, alpha_j: Tensor, alpha_i: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None
    ) -> Tensor:
        """Return the attention weight of each edge: a softmax over the in-edges of its target."""
        # PyG gathers ``alpha``, a pair for source and target, as
        # ``alpha_j`` and ``alpha_i``: [edges, 1] each.
        logits = nn.functional.leaky_relu(alpha_j + alpha_i, self.slope)
        share: Tensor = softmax(logits, index, ptr, size_i)
        return nn.functional.dropout(share, self.dropout, self.training)


class Relations(Weighted):
    """Means over the neighbours of each edge type and the own row, in learned proportions that sum to one.

    Args:
        relations: Number of edge types.
    """

    def __init__(self, relations: int) -> None:
        super().__init__()
        self.relations = relations
        self.share = nn.Parameter(torch.zeros(relations + 1))

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, hops: int, edge_type: Tensor
    ) -> Tensor:
        """Propagate rows ``hops`` times by the learned proportions.

        Shapes:
            ``x [N, C]``, ``edge_index [2, E]``, ``edge_type [E]`` -> ``[N, C]``.
        """
        # The weight of an edge of type r into vertex i is share[r] / (edges of type r into i). The last share
        # is that of the own row. All shares sum to one, so rows stay in bounds after any number of hops.
        share = self.share.softmax(0)
        kinds = nn.functional.one_hot(edge_type, self.relations).to(x.dtype)
        count = x.new_zeros(x.size(0), self.relations).index_add(0, edge_index[1], kinds)
        each = (share[:-1] / count.clamp(min=1))[edge_index[1]]
        weight = (each * kinds).sum(1)
        for _ in range(hops):
            near: Tensor = self.propagate(edge_index, x=x, weight=weight)
            x = near + share[-1] * x
        return x
