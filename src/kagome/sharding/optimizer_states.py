"""Optimizer states: an optimizer's state with all rows of cut tables, for checkpoints of any number of ranks.

Where it sits: :meth:`kagome.sharding.module.ShardedModel.optimizer_state_dict` and its counterpart.

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
from kagome.sharding.cut_tables import CutTables, Table


def whole(tables: CutTables, optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
    """Return an optimizer's state dict, with all rows where it has a table's own rows. All ranks call it.

    Args:
        tables: The cut parameters.
        optimizer: The optimizer of the model's parameters.
        rank0_only: Whether rank 0 alone gets it; others get an empty dict.
    """
    first = tables.channel.rank == 0
    found = optimizer.state_dict()
    dst = 0 if rank0_only else None
    state = dict(found["state"])
    for place, table in _cut_among(tables, optimizer).items():
        if place not in state:
            continue
        state[place] = {
            name: tables.whole(table, value, f"optimizer state: {name} of {table.names[0]}", dst=dst)
            if _has_rows(value, table.parameter.shape)
            else value
            for name, value in state[place].items()
        }
    return {**found, "state": state} if first or not rank0_only else {}


def load(tables: CutTables, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
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
