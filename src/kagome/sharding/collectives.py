"""Collectives: reductions over all ranks, and reads of any vertices' rows, with gradient.

Where it sits: :class:`kagome.sharding.module.ShardedModel` is one. A loss in a user's own training
loop is made with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kagome.errors import ModelError
from kagome.sharding.gradients.boundary import Boundary
from kagome.sharding.gradients.gradient_sync import GradientSync
from kagome.sharding.model_face import ModelFace
from kagome.sharding.rows.row_reads import RowReads
from kagome.sharding.rows.row_sets import RowSets


class Collectives(ModelFace):
    """What all ranks that share a graph call together in a training loop."""

    _rows: RowSets
    _boundary: Boundary
    _sync: GradientSync
    _reads: dict[str, RowReads]

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

        Cost:
            An all-reduce of two numbers.

        Example:
            >>> import torch, kagome
            >>> from torch_geometric.nn import GCN
            >>> data = kagome.load("digits")
            >>> with kagome.shard(GCN(64, 16, num_layers=2, out_channels=1), data) as net:
            ...     out = net(data.x, data.edge_index)
            ...     net.mean((out - 1) ** 2).shape
            torch.Size([])
        """
        part = (values if weight is None else values * weight).sum()
        counts = torch.ones_like(values) if weight is None else weight.expand_as(values)
        kind = torch.complex128 if part.is_complex() else torch.float64
        # Sum and count in one message.
        both = torch.stack([part.to(kind), counts.detach().sum(dtype=torch.float64).to(kind)])
        total, count = self._boundary.total(both, "net.mean").unbind()
        if not count:
            raise ModelError("a mean of one entry or more", "none on any rank", where="net.mean")
        exact = part.dtype.is_floating_point or part.dtype.is_complex
        return (total / count.detach()).to(part.dtype if exact else torch.get_default_dtype())

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

    def read(self, rows: Tensor, ids: Tensor, vertices: str | None = None) -> Tensor:
        """Return the rows of any vertices, whichever ranks own them, with gradient. All ranks call it.

        Args:
            rows: Own rows, such as the model's output.
            ids: Ids of vertices in the whole graph; other ones on each rank, or none.
            vertices: The vertex set; it may be left out where there is one.

        Raises:
            ModelError: If an id is out of range.

        Shapes:
            rows ``[n, ...]``, ids ``[P]`` -> ``[P, ...]``.

        Cost:
            Each distinct row of another rank is sent once, and back in backward. The first call tells each
            rank the owners of all vertices.
        """
        named = self._rows.named(vertices, "net.read")
        if rows.dim() == 0 or rows.size(0) != named.count:
            raise ModelError(
                f"{named.count:,} own rows of {named.name}",
                f"shape {list(rows.shape)}",
                where=f"net.read, rank {self._mesh.graph.rank}",
            )
        if named.name not in self._reads:
            self._reads[named.name] = RowReads(named, self._mesh.graph, self._sync)
        return self._reads[named.name].read(rows, ids)

    def pairs(self, rows: Tensor, index: Tensor, vertices: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the rows of both ends of pairs of vertices, with gradient. All ranks call it.

        Args:
            rows: Own rows, such as the model's output.
            index: Ids of both ends; this rank's share of the pairs, ``index[:, net.rank :: net.ranks]`` of a
                list that all ranks have.
            vertices: The vertex set of both ends. For ends in two sets, :meth:`read` each.

        Shapes:
            rows ``[n, ...]``, index ``[2, P]`` -> twice ``[P, ...]``.
        """
        if index.dim() != 2 or index.size(0) != 2:
            raise ModelError("pairs of vertices, [2, P]", f"shape {list(index.shape)}", where="net.pairs")
        both = self.read(rows, index.reshape(-1), vertices)
        return both[: index.size(1)], both[index.size(1) :]

    def negatives(
        self, count: int, *, seed: int = 0, step: int = 0, sets: tuple[str, str] | None = None
    ) -> Tensor:
        """Return this rank's share of random pairs of vertices, the same pairs for any number of ranks.

        Args:
            count: The number of pairs on all ranks together.
            seed: The seed of the draws.
            step: The step of the training loop; each has other pairs.
            sets: The vertex sets of both ends; they may be left out where there is one.

        Shapes:
            ``[2, P]``, int64.
        """
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        ends = [self._rows.named(name, "net.negatives").size for name in sets or (None, None)]
        every = torch.stack([torch.randint(size, (count,), generator=generator) for size in ends])
        return every[:, self._mesh.graph.rank :: self._mesh.graph.size].to(self._mesh.device)
