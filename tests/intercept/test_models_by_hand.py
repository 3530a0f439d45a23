"""What users write by hand in forward: exact, refused by name, or found by the check; never just wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric import utils

from by_hand import Body, ByHand, compared, mean_of_bytes
from kagome.errors import CheckError, ModelError

Mods = dict[str, Callable[[], nn.Module]]
SAGE: Mods = {"c": lambda: pyg.SAGEConv(8, 8)}
GRAPH: Mods = {"c": lambda: pyg.GraphConv(8, 8)}


def into(x: Tensor, e: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, e[1], rows)


def set_rows(x: Tensor, where: Tensor, value: Tensor | float) -> Tensor:
    x = x.clone()
    x[where] = value
    return x


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Updated(pyg.MessagePassing):
    """``aggr=None``, an own ``aggregate``, an own ``update`` that reads x, edges updated first."""

    def __init__(self, flow: str = "source_to_target") -> None:
        super().__init__(aggr=None, flow=flow)
        self.mix, self.score = nn.Linear(17, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        edge = self.edge_updater(edge_index, x=x, weight=weight)
        return self.propagate(edge_index, x=(x, x.tanh()), edge=edge, size=None)

    def edge_update(self, x_i: Tensor, x_j: Tensor, weight: Tensor, index: Tensor, size_i: int) -> Tensor:
        weight = utils.softmax(weight, index, num_nodes=size_i).view(-1, 1)
        return self.mix(torch.cat([x_i, x_j, weight], -1))

    def message(self, x_j: Tensor, edge: Tensor) -> Tensor:
        return x_j * F.dropout(self.score(edge).sigmoid(), 0.3, self.training)

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        both = [utils.scatter(inputs, index, 0, dim_size, reduce) for reduce in ("max", "mean")]
        return both[0] + both[1]

    def update(self, out: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return out + x[1]


def shared(m, x, e, d):
    for _ in range(3):
        x = m.c(x, e).relu()
    return x


EXACT: dict[str, tuple[Body, Mods]] = {
    # Edges changed by PyG's utilities.
    "add_self_loops": (lambda m, x, e, d: m.c(x, utils.add_self_loops(e, num_nodes=x.size(0))[0]), SAGE),
    "remove_self_loops": (lambda m, x, e, d: m.c(x, *utils.remove_self_loops(e, d.weight)), GRAPH),
    "remaining loops": (
        lambda m, x, e, d: m.c(x, *utils.add_remaining_self_loops(e, d.weight, num_nodes=len(x))),
        GRAPH,
    ),
    "dropout_edge": (lambda m, x, e, d: m.c(x, utils.dropout_edge(e, p=0.4)[0]), SAGE),
    "dropout_node": (lambda m, x, e, d: m.c(x, utils.dropout_node(e, p=0.4, num_nodes=x.size(0))[0]), SAGE),
    "laplacian": (
        lambda m, x, e, d: m.c(x, *utils.get_laplacian(e, d.weight, "sym", num_nodes=x.size(0))),
        GRAPH,
    ),
    "edges by mask": (lambda m, x, e, d: m.c(x, e[:, d.mask[e[0]] | ~d.mask[e[1]]]), SAGE),
    "edges by score": (lambda m, x, e, d: m.c(x, e[:, (x[e[0]] * x[e[1]]).sum(-1) > 0]), SAGE),
    "flipped": (lambda m, x, e, d: m.c(x, e) + m.c(x, e.flip(0)), SAGE),
    # Reads and writes by hand.
    "unbind": (lambda m, x, e, d: into(x, e, x[e.unbind()[0]] * d.weight[:, None]), {}),
    "both ends": (lambda m, x, e, d: into(x, e, x[e][0] * x[e][1]), {}),
    "softmax": (
        lambda m, x, e, d: into(x, e, x[e[0]] * utils.softmax(x[e[0]], e[1], num_nodes=len(x))),
        {},
    ),
    "degrees": (lambda m, x, e, d: x * sum(utils.degree(i, x.size(0)) for i in e).view(-1, 1), {}),
    **{
        f"scatter {reduce}": (
            lambda m, x, e, d, reduce=reduce: utils.scatter(x[e[0]], e[1], 0, x.size(0), reduce),
            {},
        )
        for reduce in ("sum", "mean", "max", "min", "mul", "any")
    },
    "new_zeros": (lambda m, x, e, d: x.new_zeros(x.shape).index_add(0, e[1], x[e[0]]), {}),
    "labels": (lambda m, x, e, d: into(x, e, F.one_hot(d.node_type, 8).to(x.dtype)[e[0]]), {}),
    "bool rows": (lambda m, x, e, d: into(x, e, x[e[0]] * d.mask[e[0]].view(-1, 1)), {}),
    # Statistics over all vertices.
    "normalize": (lambda m, x, e, d: F.normalize(x, dim=0), {}),
    "softmin": (lambda m, x, e, d: x * F.softmin(x, dim=0), {}),
    "gram": (lambda m, x, e, d: x @ (x.t() @ x).softmax(-1), {}),
    "class means": (lambda m, x, e, d: x - utils.scatter(x, d.group, 0, 5, "mean")[d.group], {}),
    "class maxima": (lambda m, x, e, d: x - utils.scatter(x, d.group, 0, 5, "max")[d.group], {}),
    "vertices counted by new_ones": (lambda m, x, e, d: x / x.new_ones(x.size(0)).sum(), {}),
    # Places among all vertices: neighbors/test_positions.py has more.
    "first row": (lambda m, x, e, d: x + x[0], {}),
    "row numbers": (lambda m, x, e, d: x + torch.arange(x.size(0)).view(-1, 1), {}),
    # Draws.
    "rows masked": (lambda m, x, e, d: set_rows(x, torch.rand(x.size(0)) < 0.5, 0.0), {}),
    "a learned mask": (
        lambda m, x, e, d: set_rows(x, torch.rand(x.size(0)) < 0.5, m.c.bias),
        {"c": lambda: nn.Linear(2, 8)},
    ),
    "dropped weights": (lambda m, x, e, d: m.c(x, e, F.dropout(d.weight, 0.5)), GRAPH),
    "dropped channels": (lambda m, x, e, d: F.dropout1d(x.unsqueeze(-1).expand(-1, -1, 2), 0.4).sum(-1), {}),
    "dropped path": (lambda m, x, e, d: x * torch.bernoulli(x.new_full((x.size(0), 1), 0.6)), {}),
    # What hides rows from marks.
    "own function": (lambda m, x, e, d: into(x, e, F.dropout(Squared.apply(x[e[0]]), 0.4)), {}),
    "own layer": (lambda m, x, e, d: m.c(x, e, d.weight), {"c": Updated}),
    "own layer, other way": (
        lambda m, x, e, d: m.c(x, e, d.weight),
        {"c": lambda: Updated("target_to_source")},
    ),
    "shared": (shared, SAGE),
    "detached": (lambda m, x, e, d: x + m.c(x.detach(), e), SAGE),
}

REFUSED: dict[str, tuple[Body, Mods, str]] = {
    "csr": (
        lambda m, x, e, d: utils.to_torch_csr_tensor(e.flip(0), size=(len(x), len(x))) @ x,
        {},
        "sparse matrix",  # torch would write past the end of its row pointers
    ),
    "coo": (lambda m, x, e, d: torch.sparse_coo_tensor(e, d.weight, (len(x),) * 2) @ x, {}, "sparse matrix"),
    "hashed edges": (
        lambda m, x, e, d: x[(e[0] * 7 + e[1]) % x.size(0)][: x.size(0)],
        {},
        "rebuild the edges",
    ),
    "maxima by source": (
        lambda m, x, e, d: utils.scatter(x[e[1]], e[0], 0, x.size(0), "max"),
        {},
        "source ids",
    ),
    "median": (lambda m, x, e, d: x - x.median(0).values, {}, "median"),
    "sort": (lambda m, x, e, d: x + x.sort(0).values, {}, "sort"),
    "pool by score": (
        lambda m, x, e, d: x * m.c(x, e)[0].mean(),
        {"c": lambda: pyg.TopKPooling(8)},
        "sort",
    ),
    "vmap": (lambda m, x, e, d: torch.vmap(lambda row: row.tanh())(x), {}, "torch.func"),
    "edges as numpy": (
        lambda m, x, e, d: m.c(x, torch.from_numpy(e.numpy().copy())),
        SAGE,
        "out of torch",
    ),
    "order of rows": (lambda m, x, e, d: x.cumsum(0), {}, "cumsum, which goes from one vertex to the next"),
    "neighbour in memory": (lambda m, x, e, d: x + x.roll(1, 0), {}, "roll, which goes from one vertex to"),
    "recurrence over vertices": (lambda m, x, e, d: m.c(x)[0], {"c": lambda: nn.GRU(8, 8)}, "gru"),
    "all pairs": (lambda m, x, e, d: (x @ x.t()).softmax(-1) @ x, {}, "matmul"),
    "axes of all rows": (lambda m, x, e, d: torch.linalg.qr(x)[0], {}, "qr"),
    "negative samples": (
        lambda m, x, e, d: m.c(x, utils.negative_sampling(e, x.size(0), 50)),
        SAGE,
        "edge list of shape",
    ),
}
"""Refused by name, each with a word of the reason."""

FOUND: dict[str, tuple[Body, Mods]] = {
    "mean through memory": (lambda m, x, e, d: x - mean_of_bytes(x), {}),
}
"""No call betrays them; the check before training does."""


@pytest.mark.some(24)
@pytest.mark.parametrize("name", EXACT)
def test_what_users_write_is_exact(name: str) -> None:
    body, modules = EXACT[name]
    result = compared(lambda: ByHand(body, **modules))
    assert result.first is None, result.first
    assert result.worst < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_split_keeps_is_refused_by_name(name: str) -> None:
    body, modules, word = REFUSED[name]
    with pytest.raises(ModelError, match=word) as caught:
        compared(lambda: ByHand(body, **modules))
    assert caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize("name", FOUND)
def test_what_no_call_betrays_is_found_by_the_check(name: str) -> None:
    body, modules = FOUND[name]
    with pytest.raises(CheckError, match="differs"):
        compared(lambda: ByHand(body, **modules)).raise_if_different()
