"""Models that look at the values of ids, write by place, or count and order what edges hold.

Where it sits: ``positions/test_id_values`` runs each of them in plain PyG and on parts, ``kinds/kind_places``
trains each of them. N vertices, of which the first ``FIRST`` are of one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.fft import fftshift
from torch_geometric import utils

from by_hand import Body
from place_models import TWO, Mods, N, parameter

FIRST = 20
C: Mods = {"c": lambda: pyg.SAGEConv(8, 8)}
CS: Mods = {"c": lambda: nn.ModuleList([pyg.SAGEConv(8, 8) for _ in range(8)])}
GRAPH: Mods = {"c": lambda: pyg.GraphConv(8, 8)}
NORM: Mods = {"n": lambda: nn.BatchNorm1d(8)}
FULL = slice(None)
THREE: Mods = {"t": lambda: nn.Embedding(3, 8)}


def into(x: Tensor, e: Tensor, value: Tensor) -> Tensor:
    """Sums of a value an edge."""
    return torch.zeros_like(x).index_add(0, e[1], value)


def weighed(x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
    """Sums of neighbours' rows, each times a number an edge."""
    return into(x, e, x[e[0]] * weight.to(x.dtype).view(-1, 1))


def changed(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """A copy of the rows after a change in place."""
    x = x.clone()
    change(x)
    return x


def filled(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.size(0), 8)
    h[:FIRST] += m.u(x[:FIRST])
    h[FIRST:] += m.i(x[FIRST:])
    return h


def masked(m: Any, x: Tensor) -> Tensor:
    mask, h = torch.zeros(N, dtype=torch.bool), torch.zeros_like(x)
    mask[:FIRST] = True
    h[mask], h[~mask] = m.u(x[mask]), m.i(x[~mask])
    return h


def by_kind(m: Any, x: Tensor, e: Tensor, kind: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for each in kind.unique():
        out = out + m.c[int(each)](x, e[:, kind == each])
    return out


def doubled_after(h: Tensor) -> None:
    h[::2] *= 2


def late(h: Tensor) -> None:
    rows = h[::2]
    rows *= 2


EXACT: dict[str, tuple[Body, Mods]] = {
    # Ids compared and reckoned with.
    "sources before a constant": (lambda m, x, e, d: weighed(x, e, e[0] < FIRST), {}),
    "edges between kinds": (lambda m, x, e, d: weighed(x, e, (e[0] < FIRST) & (e[1] >= FIRST)), {}),
    "edges of one kind": (lambda m, x, e, d: m.c(x, e[:, (e < FIRST).all(0)]), C),
    "the upper triangle": (lambda m, x, e, d: m.c(x, e[:, e[0] < e[1]]), C),
    "no loops": (lambda m, x, e, d: m.c(x, e[:, e[0] != e[1]]), C),
    "one vertex's edges": (lambda m, x, e, d: weighed(x, e, e[0] == 5), {}),
    "in columns": (lambda m, x, e, d: weighed(x, e, e.t()[:, 0].lt(FIRST)), {}),
    "ids as floats": (lambda m, x, e, d: weighed(x, e, e[0].to(x.dtype) / N), {}),
    "the sine of ids": (lambda m, x, e, d: weighed(x, e, torch.sin(e[1] * 0.1)), {}),
    "the distance of ids": (lambda m, x, e, d: weighed(x, e, 1 / (1 + (e[0] - e[1]).abs())), {}),
    "the sign of a difference": (lambda m, x, e, d: weighed(x, e, torch.sign(e[0] - e[1])), {}),
    "a hash of both ends": (lambda m, x, e, d: weighed(x, e, (e[0] * N + e[1]) % 7), {}),
    "ids modulo": (lambda m, x, e, d: into(x, e, m.t(e[0] % 3)), THREE),
    "ids divided": (lambda m, x, e, d: into(x, e, m.t(e[0] // 10)), THREE),
    "ids clamped": (lambda m, x, e, d: into(x, e, m.t(e[0].clamp(max=2))), THREE),
    "kinds of both ends": (
        lambda m, x, e, d: into(x, e, m.t((e[0] >= FIRST).long() + (e[1] >= FIRST).long())),
        THREE,
    ),
    "ids in buckets": (
        lambda m, x, e, d: into(x, e, m.t(torch.bucketize(e[0], torch.tensor([9, 19])))),
        THREE,
    ),
    "ids searched": (
        lambda m, x, e, d: into(x, e, m.t(torch.searchsorted(torch.tensor([9, 19]), e[0]))),
        THREE,
    ),
    "rows searched": (
        lambda m, x, e, d: x * torch.searchsorted(torch.tensor([-0.1, 0.1], dtype=x.dtype), x.detach()),
        {},
    ),
    "a parameter made of rows": (lambda m, x, e, d: x - nn.Parameter(x.detach()).mean(0), {}),
    "bytes of rows": (lambda m, x, e, d: x / x.nbytes, {}),
    "rows by nonzero's first column": (lambda m, x, e, d: x + x[d.mask.nonzero()[:, 0]].mean(0), {}),
    "ids among some": (lambda m, x, e, d: weighed(x, e, torch.isin(e[0], torch.tensor([1, 2, 3]))), {}),
    "one hot ids": (lambda m, x, e, d: into(x, e, F.one_hot(e[0], N).to(x.dtype)[:, :8]), {}),
    "weights by kind": (lambda m, x, e, d: weighed(x, e, torch.where(e[0] < FIRST, 0.5, 2.0)), {}),
    "a table of kinds by sources": (lambda m, x, e, d: weighed(x, e, (torch.arange(N) >= FIRST)[e[0]]), {}),
    "the last id": (lambda m, x, e, d: x * (e.max() + 1), {}),
    "the sum of ids": (lambda m, x, e, d: x * e[0].sum(), {}),
    "vertices with an out-edge": (lambda m, x, e, d: x + x[torch.unique(e[0])].mean(0), {}),
    "any edge from a vertex": (lambda m, x, e, d: x * 2 if (e[0] == 5).any() else x, {}),
    "PyG's subgraph of a constant mask": (
        lambda m, x, e, d: m.c(x, utils.subgraph(torch.arange(N) < FIRST, e)[0]),
        C,
    ),
    # Counts.
    "in-degrees by bincount": (
        lambda m, x, e, d: x * torch.bincount(e[1], minlength=x.size(0))[:, None],
        {},
    ),
    "out-degrees by bincount": (lambda m, x, e, d: x * torch.bincount(e[0], minlength=N)[:, None], {}),
    "sizes of groups": (
        lambda m, x, e, d: x / torch.bincount(d.group, minlength=5).to(x.dtype)[d.group][:, None],
        {},
    ),
    "weights by bincount": (lambda m, x, e, d: x * torch.bincount(d.kind, weights=d.weight)[0], {}),
    "as many as are large": (lambda m, x, e, d: x * torch.count_nonzero(d.weight > 1), {}),
    "how many kinds": (lambda m, x, e, d: x * d.kind.unique().numel(), {}),
    "a layer a kind of edge": (lambda m, x, e, d: by_kind(m, x, e, d.kind), CS),
    "groups by their number": (
        lambda m, x, e, d: x + m.t(torch.unique(d.group, return_inverse=True)[1]),
        {"t": lambda: nn.Embedding(30, 8)},
    ),
    "a softmax of all edges": (lambda m, x, e, d: weighed(x, e, d.weight.softmax(0)), {}),
    "edges above the mean": (lambda m, x, e, d: m.c(x, e[:, d.weight > d.weight.mean()]), C),
    "edges sorted by kind": (lambda m, x, e, d: m.c(x, e[:, d.kind.argsort()]), C),
    "edges by nonzero": (lambda m, x, e, d: m.c(x, e[:, (d.weight > 1).nonzero().view(-1)]), C),
    # Rows written and read by place.
    "zeros filled by kind": (lambda m, x, e, d: filled(m, x), TWO),
    "a constant mask": (lambda m, x, e, d: masked(m, x), TWO),
    "one more for the first": (lambda m, x, e, d: changed(x, lambda h: h[:FIRST].add_(1.0)), {}),
    "every other doubled": (lambda m, x, e, d: changed(x, doubled_after), {}),
    "index_fill": (lambda m, x, e, d: x.index_fill(0, torch.tensor([0, 1]), 0.0), {}),
    "index_copy": (lambda m, x, e, d: x.index_copy(0, torch.tensor([0, 1]), x.new_zeros(2, 8)), {}),
    "index_put": (lambda m, x, e, d: x.index_put((torch.tensor([3, 4]),), x.new_ones(2, 8)), {}),
    "a slice behind a new axis": (lambda m, x, e, d: x + x[None, :FIRST].mean(1), {}),
    "a slice before a new axis": (lambda m, x, e, d: x + x[:FIRST, None].mean(0), {}),
    "some columns of a slice": (lambda m, x, e, d: x + x[:FIRST, :4].mean(), {}),
    "vstack": (lambda m, x, e, d: torch.vstack([m.u(x[:FIRST]), m.i(x[FIRST:])]), TWO),
    "a short table by clamped sources": (
        lambda m, x, e, d: into(x, e, m.p.w[e[0].clamp(max=9)]),
        {"p": parameter(10, 8)},
    ),
    "numbers of a user's generator": (
        lambda m, x, e, d: (
            x * torch.rand(x.size(0), 1, generator=torch.Generator().manual_seed(1)).to(x.dtype)
        ),
        {},
    ),
    "a list of all vertices": (
        lambda m, x, e, d: x * torch.tensor([i % 2.0 for i in range(x.size(0))], dtype=x.dtype)[:, None],
        {},
    ),
}

REFUSED: dict[str, tuple[Body, Mods, str]] = {
    "rows by what edges hold": (lambda m, x, e, d: x + x[d.kind].mean(), {}, "numbers that each edge holds"),
    "rows by computed ids": (lambda m, x, e, d: into(x, e, x[e[0] // 2]), {}, "numbers that each edge holds"),
    "ids as a list": (lambda m, x, e, d: x * sum(e[0].tolist()), {}, "out of torch"),
    "the largest edges": (lambda m, x, e, d: m.c(x, e[:, d.weight.topk(20).indices]), C, "topk"),
    "edges by rank": (lambda m, x, e, d: m.c(x, e[:, d.weight.argsort().argsort() < 20]), C, "argsort"),
    "edges above the median": (lambda m, x, e, d: m.c(x, e[:, d.weight > d.weight.median()]), C, "median"),
    "edges above a quantile": (
        lambda m, x, e, d: m.c(x, e[:, d.weight > d.weight.quantile(0.5)]),
        C,
        "quantile",
    ),
    "the first of an order": (
        lambda m, x, e, d: m.c(x, e[:, d.kind.argsort()[:20]]),
        C,
        "an order of a part",
    ),
    "the product of weights": (lambda m, x, e, d: x * d.weight.prod(), {}, "prod"),
    "a bincount of any length": (
        lambda m, x, e, d: x * torch.bincount(e[1]).max(),
        {},
        "minlength",
    ),
    "every other changed by a method": (
        lambda m, x, e, d: changed(x, lambda h: h[::2].mul_(2)),
        {},
        "writes in place",
    ),
    "every other changed by a name": (lambda m, x, e, d: changed(x, late), {}, "writes in place"),
    "one row changed by a method": (
        lambda m, x, e, d: changed(x, lambda h: h[4].zero_()),
        {},
        "writes in place",
    ),
    # Flags that went by the places of rows, and what is made of lost rows.
    **{
        f"flags through {name}": (body, {}, name)
        for name, body in {
            "diagonal": lambda m, x, e, d: x * (x > 0).diagonal().sum(),
            "unbind": lambda m, x, e, d: x * d.mask.unbind(0)[2],
            "tril": lambda m, x, e, d: x * (x > 0).tril(),
            "fftshift": lambda m, x, e, d: x * fftshift(d.mask)[:, None],
            "masked_select": lambda m, x, e, d: x * torch.masked_select(x > 0, d.mask[:, None]).sum(),
            "eq": lambda m, x, e, d: x * (d.group[:, None] == d.group[None]).sum(1, keepdim=True),
        }.items()
    },
    "flags of edges shifted": (lambda m, x, e, d: weighed(x, e, fftshift(d.weight > 1)), {}, "fftshift"),
    "a layer's weights shifted": (lambda m, x, e, d: m.c(x, e, fftshift(d.weight)), GRAPH, "fftshift"),
    "rows by flags shifted": (lambda m, x, e, d: x + x[fftshift(d.mask)].mean(0), {}, "fftshift"),
    "a branch by flags shifted": (lambda m, x, e, d: x * 2 if fftshift(d.mask)[0] else x, {}, "fftshift"),
    "einsum of lost rows": (lambda m, x, e, d: torch.einsum("nd,nd->nd", x, x.tril()), {}, "tril"),
    "batch norm of lost rows": (lambda m, x, e, d: x + m.n(x.tril()), NORM, "tril"),
    "a parameter of lost rows": (lambda m, x, e, d: x * nn.Parameter(x.tril().detach()), {}, "tril"),
    "a parameter of some columns": (
        lambda m, x, e, d: x - nn.Parameter(x[:, :1].detach()).mean(0),
        {},
        "nn.Parameter",
    ),
    "attention to lost rows": (
        lambda m, x, e, d: x + m.a(x[None], x.tril()[None], x[None])[0][0],
        {"a": lambda: nn.MultiheadAttention(8, 2, batch_first=True)},
        "tril",
    ),
    "columns written with lost rows": (
        lambda m, x, e, d: changed(x, lambda h: h[:, :4].copy_(x.tril()[:, :4])),
        {},
        "tril",
    ),
    "the diagonal written": (lambda m, x, e, d: changed(x, lambda h: h.diagonal().zero_()), {}, "diagonal"),
    # Places among a part's own edges or rows.
    "places as floats": (
        lambda m, x, e, d: weighed(x, e, d.kind.argsort().double()),
        {},
        "an order of a part",
    ),
    "places of another type": (
        lambda m, x, e, d: weighed(x, e, d.kind.argsort().type(torch.float64)),
        {},
        "an order of a part",
    ),
    "places of rows by a type's name": (
        lambda m, x, e, d: x * d.group.argsort().type(torch.DoubleTensor)[:, None].to(x.dtype),
        {},
        "went through type",
    ),
    "the sum of places": (lambda m, x, e, d: x * d.mask.nonzero().sum(), {}, "an order of a part"),
    "a table by places": (
        lambda m, x, e, d: x + m.t(d.group.argsort()),
        {"t": lambda: nn.Embedding(N, 8)},
        "an order of a part",
    ),
    "places written": (
        lambda m, x, e, d: weighed(x, e, changed(d.weight, lambda w: w.__setitem__(FULL, d.kind.argsort()))),
        {},
        "__setitem__",
    ),
    # Numbers looked up among rows.
    "buckets between rows": (
        lambda m, x, e, d: x * torch.bucketize(x.detach(), d.pos[:, 0]),
        {},
        "bucketize",
    ),
    "searched among rows": (
        lambda m, x, e, d: x * torch.searchsorted(d.pos[:, 0], x.detach()),
        {},
        "searchsorted",
    ),
    "among groups of some": (
        lambda m, x, e, d: x * torch.isin(d.group, d.group[d.mask])[:, None],
        {},
        "isin",
    ),
}
