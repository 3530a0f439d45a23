"""ByHand: a user's lines between a linear layer and a convolution, so that what goes wrong there spreads.

Where it sits: ``intercept/test_models_by_hand.py`` and ``test_aggregations_and_norms.py`` list them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from convolutions import double_precision, sample_graph
from kagome.verify.check import CheckResult, check

HIDDEN, GROUPS = 8, 5


@dataclass(frozen=True)
class Given:
    """What else the data has."""

    weight: Tensor
    attr: Tensor
    kind: Tensor
    node_type: Tensor
    pos: Tensor
    mask: Tensor
    group: Tensor


Body = Callable[[nn.Module, Tensor, Tensor, Given], Tensor]


class ByHand(nn.Module):
    """``body(m, x, e, d)``: m has the modules, x eight columns, e is edge_index, d all the rest."""

    def __init__(self, body: Body, **modules: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, HIDDEN), pyg.SAGEConv(HIDDEN, 4)
        self.body = body
        for name, build in modules.items():
            setattr(self, name, build())

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor,
        edge_attr: Tensor,
        edge_type: Tensor,
        node_type: Tensor,
        pos: Tensor,
        mask: Tensor,
        group: Tensor,
    ) -> Tensor:
        given = Given(edge_weight, edge_attr, edge_type, node_type, pos, mask, group)
        x = self.body(self, self.first(x), edge_index, given)
        return self.last(x.tanh(), edge_index)


def mean_of_bytes(x: Tensor) -> Tensor:
    """The mean of rows, read from memory: nothing of torch that a mark could follow."""
    return torch.from_numpy(in_memory(x).mean(0))


def in_memory(x: Tensor) -> np.ndarray:
    """A tensor's numbers, read where they lie: nothing of torch that a mark could follow."""
    rows = x.detach().clone(memory_format=torch.contiguous_format)
    kind = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}[rows.dtype]
    entries = rows.untyped_storage().nbytes() // ctypes.sizeof(kind)
    numbers = (kind * entries).from_address(rows.data_ptr())
    return np.ctypeslib.as_array(numbers).reshape(-1, *rows.shape[1:]).copy()


def graph() -> Data:
    """The sample graph, with a mask and a group for each vertex."""
    data = sample_graph(1)
    data.mask = torch.arange(30) % 3 == 0
    data.group = torch.arange(30) * 7 % GROUPS
    return data


def compared(build: Callable[[], nn.Module]) -> CheckResult:
    """A model on three parts against the whole, and with draws against one part."""
    with double_precision():
        torch.manual_seed(0)
        return check(build(), graph())
