"""Reductions: sums, means and maxima over the entries of all ranks, with gradient.

Where it sits: :class:`kagome.sharding.module.ShardedModel` is one. Losses in a user's own training loop
are made with them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kagome.comm.mesh import Mesh
from kagome.errors import ModelError
from kagome.sharding.boundary import Boundary


class Reductions(nn.Module):
    """Reductions over the ranks that share a graph. All ranks call each of them, and get the same number."""

    _mesh: Mesh
    _boundary: Boundary

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of all entries on all ranks, with gradient. All ranks call it.

        Shapes:
            Any, also of another number of entries on each rank -> ``[]``.
        """
        return self._boundary.total(values.sum(), "net.sum")

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean of all entries on all ranks, with gradient. All ranks call it.

        Args:
            values: A loss a row, for example; a rank may have none.
            weight: The weight of each entry; the weighted mean divides by the sum of the weights.

        Shapes:
            Any -> ``[]``; weight broadcasts to ``values``.

        Raises:
            ModelError: If no rank has an entry.

        Example:
            >>> import torch, kagome
            >>> from torch_geometric.nn import GCN
            >>> data = kagome.load("digits")
            >>> with kagome.shard(GCN(64, 16, num_layers=2, out_channels=1), data) as net:
            ...     out = net(data.x, data.edge_index)
            ...     net.mean((out - 1) ** 2).shape
            torch.Size([])
        """
        part = values if weight is None else values * weight
        counts = torch.ones_like(values) if weight is None else weight.expand_as(values)
        count = self._mesh.graph.all_reduce(counts.detach().double().sum(), action="net.mean: count")
        if not count:
            raise ModelError("a mean of one entry or more", "none on any rank", where="net.mean")
        return self._boundary.total(part.sum(), "net.mean") / count.to(part.dtype)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest entry of all ranks, with gradient; equal ones share it. All ranks call it.

        Shapes:
            Any -> ``[]``.
        """
        least = float("-inf") if values.is_floating_point() else torch.iinfo(values.dtype).min
        own = values.amax() if values.numel() else values.sum() + least
        most = self._mesh.graph.all_reduce(own.detach(), "max", action="net.max")
        ties = (values == most).to(values.dtype) if values.is_floating_point() else None
        if ties is None:
            return most
        count = self._mesh.graph.all_reduce(ties.sum(), action="net.max: ties")
        tied = torch.where(ties.bool(), values, torch.zeros_like(values)).sum()
        return self._boundary.total(tied, "net.max") / count
