"""Model state: the weights of a sharded model and the state of its optimizer, with all rows of cut tables.

Where it sits: :class:`kagome.sharding.module.ShardedModel` is one. A checkpoint made so is read by any number
of ranks.

::

    Adam of 4 ranks   exp_avg [n, d] a rank  ──whole──>  [N, d] in the graph's order  ──owned──>  2 ranks
                      step []                ─────────>  as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kagome.errors import CheckpointError
from kagome.sharding.gradients.gradient_norm import clip
from kagome.sharding.rows.cut_tables import CutTables, Table
from kagome.sharding.train_step import GraphSteps


class ModelState(GraphSteps):
    """What a training loop takes of a sharded model's weights, gradients and optimizer as a whole."""

    _tables: CutTables

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> Any:
        """Return the model's own ``state_dict``: whole, with rows in the graph's order.

        All ranks call it if a table is cut.

        Args:
            args: What the model's ``state_dict`` takes.
            rank0_only: Whether rank 0 alone gets it; others get an empty dict.
            kwargs: The same by name.

        Cost:
            All rows of a cut table, on every rank that gets them.
        """
        # The model's own hook gathers the rows: see ``CutTables.watch``.
        if not rank0_only:
            return self.model.state_dict(*args, **kwargs)
        with self._tables.on_first_rank():
            found = self.model.state_dict(*args, **kwargs)
        return {} if self.rank else found

    def optimizer_state_dict(self, optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return an optimizer's state with all rows of cut tables, in the graph's order. All ranks call it.

        Args:
            optimizer: The optimizer of this model's parameters.
            rank0_only: Whether rank 0 alone gets it; others get an empty dict.

        Cost:
            All rows of each moment of a cut table, on every rank that gets them.

        Example:
            >>> import torch, kagome
            >>> from torch import nn
            >>> data = kagome.load("digits")
            >>> class Smoothed(nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.table = nn.Embedding(data.num_nodes, 8)
            ...     def forward(self, edge_index):
            ...         return torch.zeros_like(self.table.weight).index_add(
            ...             0, edge_index[1], self.table.weight[edge_index[0]]
            ...         )
            >>> model = Smoothed()
            >>> optimizer = torch.optim.Adam(model.parameters())
            >>> with kagome.shard(model, data, cut=("table.weight",)) as net:
            ...     net.mean(net(data.edge_index) ** 2).backward()
            ...     optimizer.step()
            ...     state = net.optimizer_state_dict(optimizer)
            ...     net.load_optimizer_state_dict(optimizer, state)
            >>> state["state"][0]["exp_avg"].shape
            torch.Size([1797, 8])
        """
        return _whole(self._tables, optimizer, rank0_only=rank0_only)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what :meth:`optimizer_state_dict` returned, on any number of ranks.

        Args:
            optimizer: The optimizer of this model's parameters, in the same order.
            state: The whole state, the same on all ranks.

        Raises:
            CheckpointError: If a state has rows of another graph.
        """
        _load(self._tables, optimizer, state)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients in place so that their norm is at most ``max_norm``. All ranks call it.

        It is ``torch.nn.utils.clip_grad_norm_`` of the whole parameters, cut tables among them. Those of
        modules ``beside`` the model count too.

        Args:
            max_norm: The largest norm.
            norm_type: Its order, such as 2 or ``float("inf")``.

        Returns:
            The norm before, the same on all ranks.

        Shapes:
            -> ``[]``.

        Cost:
            One number is summed over the ranks, if a table is cut.

        Example:
            >>> import torch, kagome
            >>> from torch_geometric.nn import GCN
            >>> data, model = kagome.load("digits"), GCN(64, 16, num_layers=2, out_channels=1)
            >>> with kagome.shard(model, data) as net:
            ...     net.mean(net(data.x, data.edge_index) ** 2).backward()
            ...     norm = net.clip_grad_norm_(1e-3)
            ...     float(net.clip_grad_norm_(1.0)) < 1.1e-3
            True
        """
        return clip(self._sync, self._mesh.graph, max_norm, norm_type)


def _whole(tables: CutTables, optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
    """Return an optimizer's state dict, with all rows where it has a table's own rows. All ranks call it.

    Args:
        tables: The cut parameters.
        optimizer: The optimizer of the model's parameters.
        rank0_only: Whether rank 0 alone gets it; others get an empty dict.
    """
    first = tables.channel.rank == 0
    found = optimizer.state_dict()
    dst = 0 if rank0_only else None
    # The optimizer's own state stays as it is: only this copy of its dicts has all rows.
    state = dict(found["state"])
    for place, table in _cut_among(tables, optimizer).items():
        # Without a step yet there is no state.
        if place not in state:
            continue
        state[place] = {
            name: tables.whole(table, value, f"optimizer state: {name} of {table.names[0]}", dst=dst)
            if _has_rows(value, table.parameter.shape)
            else value
            for name, value in state[place].items()
        }
    return {**found, "state": state} if first or not rank0_only else {}


def _load(tables: CutTables, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Load a state dict with all rows: the optimizer keeps own rows of cut tables.

    Raises:
        CheckpointError: If a state has rows of another graph.
    """
    # Torch matches the parameters of the saved groups and of its own by their order.
    saved = [place for group in given["param_groups"] for place in group["params"]]
    state = dict(given["state"])
    for place, table in _cut_among(tables, optimizer).items():
        key = saved[place] if place < len(saved) else None
        if key not in state:
            continue
        state[key] = {name: _own_rows(table, name, value) for name, value in state[key].items()}
    optimizer.load_state_dict({**given, "state": state})


def _own_rows(table: Table, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    # Moments of other shapes, such as Adafactor's of rows and columns, are no entries of the parameter.
    if value.shape != table.shape:
        raise CheckpointError(
            f"optimizer state with all rows, of shape {list(table.shape)}",
            f"{name} of shape {list(value.shape)}",
            where=table.names[0],
            hint="what net.optimizer_state_dict(optimizer) returned",
        )
    return table.owned(value)


def _has_rows(value: Any, shape: torch.Size) -> bool:
    """Return whether a value of the state has a number for each entry of the parameter, as Adam's moments."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape


def _cut_among(tables: CutTables, optimizer: Optimizer) -> dict[int, Table]:
    """Return the tables among an optimizer's parameters, by their number in its state dict."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    found = {place: tables.table_of(p) for place, p in enumerate(every)}
    return {place: table for place, table in found.items() if table is not None}
