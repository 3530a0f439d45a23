"""Models that tell vertices apart by their place, as users write them: what is served, what is refused.

Where it sits: ``positions/test_row_positions`` checks each of them, ``kinds/kind_places`` trains each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric import utils

from by_hand import Body

N = 30
"""Vertices of the graph."""
Mods = dict[str, Callable[[], nn.Module]]
TWO: Mods = {"u": lambda: nn.Linear(8, 8), "i": lambda: nn.Linear(8, 8)}
KINDS = torch.arange(N) % 3
EVERY_THIRD = torch.arange(0, N, 3)


def parameter(*shape: int) -> Callable[[], nn.Module]:
    """A module that holds one parameter, ``w``."""

    def build() -> nn.Module:
        held = nn.Module()
        held.w = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape))
        return held

    return build


def buffer(value: Tensor) -> Callable[[], nn.Module]:
    """A module that holds one buffer, ``b``."""

    def build() -> nn.Module:
        held = nn.Module()
        held.register_buffer("b", value.clone())
        return held

    return build


def written(x: Tensor, where: object, value: object) -> Tensor:
    x = x.clone()
    x[where] = value
    return x


def halves(m, x, n):
    return torch.cat([m.u(x[:n]), m.i(x[n:])])


def three_kinds(m, x):
    a, b, c = x.split([7, 11, 12])
    return torch.cat([m.u(a), m.i(b), m.u(c.tanh())])


def in_loop(m, x):
    out = torch.zeros_like(x)
    for kind in range(3):
        rows = kind == KINDS
        out[rows] = (m.u if kind else m.i)(x[rows])
    return out


def scaled(pieces):
    return torch.cat([piece * (k + 1) for k, piece in enumerate(pieces)])


EXACT: dict[str, tuple[Body, Mods]] = {
    # Slices.
    "two kinds by a constant": (lambda m, x, e, d: halves(m, x, 20), TWO),
    "two kinds by half of all": (lambda m, x, e, d: halves(m, x, x.size(0) // 2), TWO),
    "two kinds by all but four": (lambda m, x, e, d: halves(m, x, x.size(0) - 4), TWO),
    "two kinds by a count from the end": (lambda m, x, e, d: halves(m, x, -4), TWO),
    "three kinds by split": (lambda m, x, e, d: three_kinds(m, x), TWO),
    "chunks": (lambda m, x, e, d: torch.cat([m.u(c) * k for k, c in enumerate(x.chunk(4))]), TWO),
    "sizes by name": (
        lambda m, x, e, d: scaled(x.split_with_sizes(split_sizes=[7, 23])),
        {},
    ),
    "sections by name": (lambda m, x, e, d: scaled(torch.tensor_split(x, sections=4)), {}),
    "ends by name": (lambda m, x, e, d: scaled(torch.tensor_split(x, indices=(7, 20))), {}),
    "narrow": (lambda m, x, e, d: torch.cat([x.narrow(0, 0, 9), m.u(x.narrow(0, 9, 21))]), TWO),
    "slices of columns too": (
        lambda m, x, e, d: torch.cat([torch.cat([x[:12, :4], x[12:, :4]]), x[:, 4:]], dim=1),
        {},
    ),
    "a slice of a slice": (lambda m, x, e, d: torch.cat([x[:20][:5], m.u(x[:20][5:]), x[20:]]), TWO),
    "the mean of the first ten": (lambda m, x, e, d: x - x[:10].mean(0), {}),
    "the last four, pooled": (lambda m, x, e, d: x * x[-4:].sum(0, keepdim=True).tanh(), {}),
    "batch norm of one kind": (
        lambda m, x, e, d: torch.cat([m.n(x[:17]), x[17:]]),
        {"n": lambda: nn.BatchNorm1d(8)},
    ),
    "dropout of one kind": (lambda m, x, e, d: torch.cat([F.dropout(x[:17], 0.4), x[17:]]), {}),
    "every other, pooled": (lambda m, x, e, d: x + x[::2].mean(0) - x[1::2].mean(0), {}),
    # Single rows.
    "first and last row": (lambda m, x, e, d: x + x[0] - x[-1], {}),
    "one entry": (lambda m, x, e, d: x * x[3, 2], {}),
    "named rows": (lambda m, x, e, d: x + m.u(x[EVERY_THIRD]).mean(0), TWO),
    "attention to named rows": (
        lambda m, x, e, d: x + (x @ m.u(x[EVERY_THIRD]).t()).softmax(-1) @ x[EVERY_THIRD],
        TWO,
    ),
    "named rows by index_select": (lambda m, x, e, d: x + x.index_select(0, EVERY_THIRD).amax(0), {}),
    "a list of rows": (lambda m, x, e, d: x - x[[4, 7, 29]].sum(0), {}),
    # Numbers of vertices.
    "numbers compared": (
        lambda m, x, e, d: torch.where(torch.arange(x.size(0))[:, None] < 20, m.u(x), m.i(x)),
        TWO,
    ),
    "numbers divided": (lambda m, x, e, d: x * (torch.arange(x.size(0)) / x.size(0)).view(-1, 1), {}),
    "a ramp over all": (lambda m, x, e, d: x * torch.linspace(0.1, 1, x.size(0)).view(-1, 1), {}),
    "numbers from the end": (lambda m, x, e, d: x * torch.arange(x.size(0), 0, -1).view(-1, 1).tanh(), {}),
    "a recurrent layer of each row's steps": (
        lambda m, x, e, d: m.g(x.view(-1, 2, 4))[1][0],
        {"g": lambda: nn.GRU(4, 8, batch_first=True)},
    ),
    "a convolution along each row": (
        lambda m, x, e, d: m.k(x.unsqueeze(1)).squeeze(1),
        {"k": lambda: nn.Conv1d(1, 1, 3, padding=1)},
    ),
    "parity of numbers": (lambda m, x, e, d: x * (torch.arange(x.size(0)) % 2).unsqueeze(1), {}),
    "a position's sine": (lambda m, x, e, d: x + torch.sin(torch.arange(x.size(0)).view(-1, 1) * 0.3), {}),
    "numbers as classes": (
        lambda m, x, e, d: x + F.one_hot(torch.arange(x.size(0)) // 10, 8).to(x.dtype),
        {},
    ),
    "numbers by a constant": (lambda m, x, e, d: x * (torch.arange(N) < 20).view(-1, 1), {}),
    # Tables with a row for each vertex.
    "an embedding of numbers": (
        lambda m, x, e, d: x + m.t(torch.arange(x.size(0))),
        {"t": lambda: nn.Embedding(N, 8)},
    ),
    "a whole embedding": (lambda m, x, e, d: x + m.t.weight, {"t": lambda: nn.Embedding(N, 8)}),
    "a parameter a vertex": (lambda m, x, e, d: x * m.p.w[:, None], {"p": parameter(N)}),
    "a table beside the rows": (
        lambda m, x, e, d: m.u(torch.cat([x, m.p.w], dim=1)),
        {"p": parameter(N, 3), "u": lambda: nn.Linear(11, 8)},
    ),
    "a table cut to the rows": (lambda m, x, e, d: x + m.p.w[: x.size(0)], {"p": parameter(40, 8)}),
    "a table read by sources": (
        lambda m, x, e, d: torch.zeros_like(x).index_add(0, e[1], m.p.w[e[0]]),
        {"p": parameter(N, 8)},
    ),
    "an embedding of sources": (
        lambda m, x, e, d: torch.zeros_like(x).index_add(0, e[1], m.t(e[0])),
        {"t": lambda: nn.Embedding(N + 3, 8)},
    ),
    "an embedding of targets": (
        lambda m, x, e, d: torch.zeros_like(x).index_add(0, e[1], m.t(e[1]) * x[e[0]]),
        {"t": lambda: nn.Embedding(N, 8)},
    ),
    "a table through a convolution": (
        lambda m, x, e, d: x + m.c(m.p.w, e),
        {"p": parameter(N, 8), "c": lambda: pyg.SAGEConv(8, 8)},
    ),
    "a table through GCN": (
        lambda m, x, e, d: x + m.c(m.p.w, e),
        {"p": parameter(N, 8), "c": lambda: pyg.GCNConv(8, 8)},
    ),
    "a mask in a buffer": (lambda m, x, e, d: written(x, m.b.b, 0.0), {"b": buffer(KINDS == 1)}),
    "kinds in a buffer": (
        lambda m, x, e, d: torch.where((m.b.b == 1)[:, None], m.u(x), m.i(x)),
        {"b": buffer(KINDS), **TWO},
    ),
    "a mask in a buffer chooses": (
        lambda m, x, e, d: x - x[m.b.b].mean(0),
        {"b": buffer(KINDS == 1)},
    ),
    "kinds in a loop": (lambda m, x, e, d: in_loop(m, x), TWO),
    "zeros of a constant size": (lambda m, x, e, d: utils.scatter(x[e[0]], e[1], 0, N, "sum"), {}),
    "loops of a constant number": (
        lambda m, x, e, d: m.c(x, utils.add_self_loops(e, num_nodes=N)[0]),
        {"c": lambda: pyg.SAGEConv(8, 8)},
    ),
    "weighted loops of a constant number": (
        lambda m, x, e, d: m.c(x, *utils.add_remaining_self_loops(e, d.weight, 2.0, N)),
        {"c": lambda: pyg.GraphConv(8, 8)},
    ),
    "loops by len": (
        lambda m, x, e, d: m.c(x, utils.add_self_loops(e, num_nodes=len(x))[0]),
        {"c": lambda: pyg.SAGEConv(8, 8)},
    ),
    "loops by hand": (
        lambda m, x, e, d: m.c(x, torch.cat([e, torch.arange(len(x)).expand(2, -1)], 1)),
        {"c": lambda: pyg.SAGEConv(8, 8)},
    ),
    "half of len": (lambda m, x, e, d: halves(m, x, len(x) // 2), TWO),
    "divided by len": (lambda m, x, e, d: x / len(x) + x[len(x) - 1], {}),
    "draws for len": (lambda m, x, e, d: x * (torch.rand(len(x), 1) < 0.5), {}),
    "degrees for len": (lambda m, x, e, d: x * utils.degree(e[1], len(x)).view(-1, 1), {}),
    "softmax for a constant": (
        lambda m, x, e, d: torch.zeros_like(x).index_add(
            0, e[1], x[e[0]] * utils.softmax(x[e[0]], e[1], num_nodes=N)
        ),
        {},
    ),
    # Writes.
    "the first ten overwritten": (lambda m, x, e, d: written(x, slice(0, 10), 0.0), {}),
    "the first ten from a parameter": (
        lambda m, x, e, d: written(x, slice(0, 10), m.p.w),
        {"p": parameter(10, 8)},
    ),
    "one row overwritten": (lambda m, x, e, d: written(x, 5, m.p.w), {"p": parameter(8)}),
    "named rows overwritten": (
        lambda m, x, e, d: written(x, EVERY_THIRD, m.p.w),
        {"p": parameter(10, 8)},
    ),
    # Masks of values.
    "mean of the masked": (lambda m, x, e, d: x - x[d.mask].mean(0), {}),
    "the masked through a layer": (lambda m, x, e, d: written(x, d.mask, m.u(x[d.mask])), TWO),
    "the masked, normalised": (
        lambda m, x, e, d: written(x, d.mask, m.n(x[d.mask])),
        {"n": lambda: nn.BatchNorm1d(8)},
    ),
    # Views that keep the entries of a row together.
    "heads put behind the rows": (
        lambda m, x, e, d: m.n(x.view(x.size(0), 2, 4).reshape(-1, 4)).view(x.size(0), 8),
        {"n": lambda: nn.BatchNorm1d(4)},
    ),
    "heads counted": (lambda m, x, e, d: x.view(x.size(0) * 2, 4).tanh().view(-1, 8), {}),
    "sizes compared": (lambda m, x, e, d: x.tanh() if x.size(0) > 20 else x, {}),
}

REFUSED: dict[str, tuple[Body, Mods, str]] = {
    "blocks of vertices": (
        lambda m, x, e, d: x.view(3, 10, 8).mean(1).sum(0) + x,
        {},
        "view|reshape|vertices",
    ),
    "running sums": (lambda m, x, e, d: x.cumsum(0), {}, "cumsum"),
    "turned round": (lambda m, x, e, d: x + x.flip(0), {}, "flip"),
    "the vertex before": (lambda m, x, e, d: x + x.roll(1, 0), {}, "roll"),
    "differences": (lambda m, x, e, d: x + F.pad(x[1:] - x[:-1], (0, 0, 0, 1)), {}, "sub|add"),
    "a virtual row": (lambda m, x, e, d: torch.cat([x, x.mean(0, keepdim=True)])[:-1], {}, "cat"),
    "another order": (lambda m, x, e, d: torch.cat([x[20:], x[:20]]), {}, "cat"),
    "vertices held as data": (lambda m, x, e, d: x + x[d.group], {}, "numbers that each vertex holds"),
    "neighbours of one kind": (lambda m, x, e, d: x + 0 * x[:20][e[0] % 20].sum(), {}, "rebuild|vertices"),
    "edges put to the graph's": (
        lambda m, x, e, d: m.c(x, torch.cat([e, torch.tensor([[0, 1, 2], [3, 4, 5]])], 1)),
        {"c": lambda: pyg.SAGEConv(8, 8)},
        "edges of forward's own",
    ),
    "edges to a constant": (
        lambda m, x, e, d: m.c(x, torch.tensor([[0, 1, 2], [3, 4, 5]])),
        {"c": lambda: pyg.SAGEConv(8, 8)},
        "edge list",
    ),
    "writes by constants": (
        lambda m, x, e, d: x.index_add(0, torch.tensor([0, 1]), torch.ones(2, 8, dtype=x.dtype)),
        {},
        "index_add",
    ),
}

PIECES: dict[str, Callable[[nn.Module, Tensor, int, int], Tensor]] = {
    "split": lambda m, x, a, b: torch.cat([m.u(x[:a]), m.i(x[a:b]), x[b:]]),
    "row": lambda m, x, a, b: x + x[a] * x[b - N],
    "pooled": lambda m, x, a, b: x - x[a : b + 1].mean(0),
    "where": lambda m, x, a, b: torch.where(torch.arange(x.size(0))[:, None] < b, m.u(x), x),
    "written": lambda m, x, a, b: written(x, slice(a, b), 0.5),
    "named": lambda m, x, a, b: x + x[torch.tensor([a, b, a])].sum(0),
    "dropped": lambda m, x, a, b: torch.cat([F.dropout(x[:b], 0.3), x[b:]]),
}
"""Pieces of a forward: of a model with two linear layers, rows and two places among them."""
