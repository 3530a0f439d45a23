"""Model state: the weights of a sharded model and the state of its optimizer, with all rows of cut tables.

Where it sits: :class:`kagome.sharding.module.ShardedModel` is one. A checkpoint made so is read by any number
of ranks.

::

    Adam of 4 ranks   exp_avg [n, d] a rank  ──whole──>  [N, d] in the graph's order  ──owned──>  2 ranks
                      step []                ─────────>  as it is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from kagome.errors import CheckpointError
from kagome.sharding.gradients.gradient_norm import clip
from kagome.sharding.rows.cut_tables import CutTables, Shown, Table
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
        if isinstance(self, FSDPModule):
            self.reshard()  # FSDP's hooks do so for layers, not for parameters of the model itself
        # The model's own hook gathers the rows: see ``CutTables.watch``.
        if not rank0_only:
            return self.model.state_dict(*args, **kwargs)
        with self._tables.showing(partial(self._tables.whole, dst=0)):
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
        how = partial(self._tables.whole, dst=0 if rank0_only else None)
        found = whole_state(self._tables, optimizer, how)
        return {} if self.rank and rank0_only else found

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what :meth:`optimizer_state_dict` returned, on any number of ranks.

        Args:
            optimizer: The optimizer of this model's parameters, in the same order.
            state: The whole state, the same on all ranks.

        Raises:
            CheckpointError: If a state has rows of another graph.
        """
        load_whole_state(self._tables, optimizer, state)

    def stateful(self, optimizer: Optimizer | None = None) -> ShardedState:
        """Return what ``torch.distributed.checkpoint`` saves and loads: weights, step, an optimizer's state.

        Cut tables are written a block of rows a rank, in the graph's order. A checkpoint is read by any
        number of ranks, and by the plain model in one process.

        Args:
            optimizer: The optimizer of this model's parameters; to load, in the same order as it was saved.

        Cost:
            Saving and loading send each own row of a cut table, and of its moments, once.

        Example:
            >>> import kagome, tempfile, torch
            >>> import torch.distributed.checkpoint as dcp
            >>> from torch_geometric.nn import GCN
            >>> data, model = kagome.load("digits"), GCN(64, 16, num_layers=2, out_channels=1)
            >>> optimizer = torch.optim.Adam(model.parameters())
            >>> with kagome.shard(model, data) as net, tempfile.TemporaryDirectory() as folder:
            ...     net.mean(net(data.x, data.edge_index) ** 2).backward()
            ...     optimizer.step()
            ...     _ = dcp.save({"training": net.stateful(optimizer)}, checkpoint_id=folder)
            ...     net.step = 0
            ...     dcp.load({"training": net.stateful(optimizer)}, checkpoint_id=folder)
            ...     net.step
            1
        """
        return ShardedState(self, optimizer)

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


class ShardedState:
    """The weights of a sharded model and the state of its optimizer, as a ``Stateful`` of torch.

    Args:
        net: The sharded model.
        optimizer: The optimizer of its parameters; None for none.
    """

    def __init__(self, net: ModelState, optimizer: Optimizer | None) -> None:
        self._net, self._optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return weights and state, with DTensors in place of cut tables. All ranks call it."""
        net, tables = self._net, self._net._tables
        with tables.showing(tables.blocks):
            found = {"model": dict(net.state_dict()), "step": net.step}
        if self._optimizer is not None:
            with _begun(self._optimizer):
                whole = whole_state(tables, self._optimizer, tables.blocks)
            # Text, because torch names entries by the path to them, and looks a path up again to load.
            found["optimizer"] = {
                **whole,
                "state": {str(key): value for key, value in whole["state"].items()},
            }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, and a checkpoint was read into. All ranks call it."""
        self._net.load_state_dict(state_dict["model"])
        self._net.step = state_dict["step"]
        if self._optimizer is not None:
            whole = state_dict["optimizer"]
            state = {int(key): value for key, value in whole["state"].items()}
            load_whole_state(self._net._tables, self._optimizer, {**whole, "state": state})


@contextmanager
def _begun(optimizer: Optimizer) -> Iterator[None]:
    """Within a block, give an optimizer that has made no step the state that its first step would make.

    A checkpoint is read into tensors that are there. Their entries are zeros, as before a first step.
    """
    if optimizer.state:
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        for group in optimizer.param_groups:  # no weight changes at this rate
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for each in optimizer.state.values():
            for value in each.values():
                if isinstance(value, Tensor):
                    value.zero_()
        yield
    finally:
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


def whole_state(tables: CutTables, optimizer: Optimizer, how: Shown) -> dict[str, Any]:
    """Return an optimizer's state dict, with all rows where it has a table's own rows. All ranks call it.

    Args:
        tables: The cut parameters.
        optimizer: The optimizer of the model's parameters.
        how: What it has in place of own rows.
    """
    found = optimizer.state_dict()
    # The optimizer's own state stays as it is: only this copy of its dicts has all rows.
    state = dict(found["state"])
    for place, table in _cut_among(tables, optimizer).items():
        # Without a step yet there is no state.
        if place not in state:
            continue
        state[place] = {
            name: how(table, value, f"optimizer state: {name} of {table.names[0]}")
            if _has_rows(value, table.parameter.shape)
            else value
            for name, value in state[place].items()
        }
    return {**found, "state": state}


def load_whole_state(tables: CutTables, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
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
        state[key] = {name: _own_rows(tables, table, name, value) for name, value in state[key].items()}
    optimizer.load_state_dict({**given, "state": state})


def _own_rows(tables: CutTables, table: Table, name: str, value: Any) -> Any:
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
    return tables.owned(table, value)


def _has_rows(value: Any, shape: torch.Size) -> bool:
    """Return whether a value of the state has a number for each entry of the parameter, as Adam's moments."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape


def _cut_among(tables: CutTables, optimizer: Optimizer) -> dict[int, Table]:
    """Return the tables among an optimizer's parameters, by their number in its state dict."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    found = {place: tables.table_of(p) for place, p in enumerate(every)}
    return {place: table for place, table in found.items() if table is not None}
