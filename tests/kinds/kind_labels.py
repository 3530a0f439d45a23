"""Kind 4: labels and features reach loss and layers as they were given: type, shape and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from by_hand import graph
from cases import Case, PlainLoss, with_targets

N, FEATURES, WIDTH, CLASSES = 30, 6, 8, 4
NAN = float("nan")


def drawn(*shape: int, seed: int = 5) -> Tensor:
    """Numbers of one seed, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(count: int = CLASSES) -> Tensor:
    """Class ids ``[N]``, each of them there among the vertices to train on."""
    return torch.randint(0, count, (N,), generator=torch.Generator().manual_seed(1))


def given(y: Tensor | None = None, x: Tensor | None = None, **more: Tensor) -> Callable[[], Data]:
    """The sample graph with these labels, these features and more."""

    def make() -> Data:
        data = with_targets(graph())
        for name, value in {"y": y, "x": x, **more}.items():
            if value is not None:
                data[name] = value.clone()
        return data

    return make


class Net(nn.Module):
    """Two convolutions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(FEATURES, WIDTH), pyg.SAGEConv(WIDTH, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index).tanh(), edge_index)


class Flat(Net):
    """A number a vertex, without an axis of columns."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).squeeze(-1)


class Grid(Net):
    """Three steps of two numbers a vertex."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).view(-1, 3, 2)


class LogShares(Net):
    """Logarithms of shares."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).log_softmax(-1)


class Embedded(nn.Module):
    """Features that are ids, of one column or none."""

    def __init__(self, rows: int, modulo: int = 0, *, column: bool = False) -> None:
        super().__init__()
        self.emb, self.net = nn.Embedding(rows, FEATURES), Net(CLASSES)
        self.modulo, self.column = modulo, column

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x % self.modulo if self.modulo else x
        h = self.emb(x.squeeze(-1) if self.column else x)
        return self.net(h, edge_index)


class Atoms(nn.Module):
    """A sum of embeddings, one a column, as OGB's AtomEncoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embs, self.net = nn.ModuleList(nn.Embedding(9, FEATURES) for _ in range(3)), Net(CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = sum(emb(x[:, place]) for place, emb in enumerate(self.embs))
        return self.net(h, edge_index)


class Bag(nn.Module):
    """A bag of words a vertex."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.net = nn.EmbeddingBag(50, FEATURES, mode="mean"), Net(CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(self.bag(x), edge_index)


class Cast(nn.Module):
    """Features turned to the weights' type, by a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.net, self.factor = Net(CLASSES), factor

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(x.to(torch.float64) * self.factor, edge_index)


class Parity(nn.Module):
    """Reads the bits of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        bits = torch.stack([(x[:, 0] >> place) & 1 for place in range(FEATURES)], 1)
        return self.net(bits.double() - 0.5, edge_index)


class OneHot(nn.Module):
    """One-hot columns of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(F.one_hot(x, FEATURES).double(), edge_index)


class Recurrent(nn.Module):
    """``x [N, T, F]``: a GRU over time, then the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.net = nn.GRU(3, FEATURES, batch_first=True), Net(CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(self.gru(x)[0][:, -1], edge_index)


class OverTime(nn.Module):
    """``x [N, T, F]``: a convolution of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = pyg.SAGEConv(3, WIDTH, node_dim=0), nn.Linear(5 * WIDTH, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.one(x, edge_index).tanh().flatten(1))


class Images(nn.Module):
    """``x [N, 1, 5, 5]``: an image a vertex."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.net = nn.Conv2d(1, 2, 3), Net(CLASSES)
        self.lin = nn.Linear(18, FEATURES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(self.lin(self.conv(x).tanh().flatten(1)), edge_index)


class Scalar(nn.Module):
    """``x [N]``: a number a vertex."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.net = nn.Linear(1, FEATURES), Net(CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(self.lin(x.unsqueeze(-1)), edge_index)


Own = Callable[..., Any]


def by_rows(own: Own) -> PlainLoss:
    """The mean of what a loss gives of the training vertices: what plain PyTorch trains by."""

    def plain(model: nn.Module, out: Any, data: Data) -> Tensor:
        chosen = data.train_mask
        return own(out[chosen], data.y[chosen]).mean()

    return plain


def own(outputs: int, y: Tensor, loss: Own, build: type[Net] = Net) -> Case:
    """A loss of one's own that gives values a row; plain PyTorch takes their mean."""
    return Case(lambda: build(outputs), given(y), plain=by_rows(loss), loss=lambda model: loss)


def named(name: str, outputs: int, y: Tensor, plain: Own, build: type[Net] = Net, **train: Any) -> Case:
    """A built-in loss; plain PyTorch's is written out."""
    return Case(lambda: build(outputs), given(y), plain=by_rows(plain), loss=lambda model: name, train=train)


def featured(build: Callable[[], nn.Module], x: Tensor) -> Case:
    """Features of a kind, and class ids to learn."""
    return Case(build, given(ids(), x), plain=by_rows(F.cross_entropy), loss=lambda model: "cross_entropy")


def hinge(out: Tensor, y: Tensor) -> Tensor:
    return (1 - y * out.squeeze(1)).clamp(min=0)


def focal(out: Tensor, y: Tensor) -> Tensor:
    nll = F.cross_entropy(out, y, reduction="none")
    return (1 - (-nll).exp()).square() * nll


def pinball(out: Tensor, y: Tensor) -> Tensor:
    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=out.dtype)
    gap = y - out
    return torch.maximum(quantiles * gap, (quantiles - 1) * gap).sum(1)


def coral(out: Tensor, y: Tensor) -> Tensor:
    levels = (y[:, None] > torch.arange(CLASSES - 1)).to(out.dtype)
    return F.binary_cross_entropy_with_logits(out, levels, reduction="none").sum(1)


def two_tasks(out: Tensor, y: Tensor) -> Tensor:
    first = F.cross_entropy(out[:, :CLASSES], y[:, 0], reduction="none")
    return first + F.cross_entropy(out[:, CLASSES:], y[:, 1], reduction="none")


def gaussian(out: Tensor, y: Tensor) -> Tensor:
    return F.gaussian_nll_loss(out[:, :1], y, out[:, 1:].exp(), reduction="none")


def gaussian_module(out: Tensor, y: Tensor) -> Tensor:
    return nn.GaussianNLLLoss(reduction="none", full=True)(out[:, 0], y, F.softplus(out[:, 1]) + 0.1)


def divergence(out: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(out, y, reduction="none").sum(1)


def there_only(out: Tensor, y: Tensor) -> Tensor:
    there = ~y.isnan()
    return torch.where(there, out - y.nan_to_num(), 0.0).square().sum(1)


def shared_weights(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    there = ~y.isnan()
    return F.mse_loss(out, torch.where(there, y, 0.0), reduction="none"), there.to(out.dtype)


def weighted_rows(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none") * weight


def summed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def meaned(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def plain_masked(model: nn.Module, out: Tensor, data: Data) -> Tensor:
    out, y = out[data.train_mask], data.y[data.train_mask]
    there = ~y.isnan()
    return (out[there] - y[there]).square().mean()


def plain_weighted(model: nn.Module, out: Tensor, data: Data) -> Tensor:
    chosen = data.train_mask
    return (F.cross_entropy(out[chosen], data.y[chosen], reduction="none") * data.weight[chosen]).mean()


W = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
POS = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
numbers, one = drawn(N, CLASSES), drawn(N)
bits = (drawn(N, 3) > 0).long()
holes = torch.where(drawn(N, 3, seed=6) > 1, NAN, drawn(N, 3))
soft = drawn(N, CLASSES).mul(3).softmax(1)
signs = ids(2) * 2 - 1
ignored = torch.where(torch.arange(N) % 4 == 0, -1, ids())
hundred = torch.where(torch.arange(N) % 4 == 0, -100, ids())
large = 2**24 + torch.arange(N)

CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss
none: dict[str, Any] = {"reduction": "none"}

CASES: dict[str, Case] = {
    # Shapes of y
    "ids": named("cross_entropy", CLASSES, ids(), F.cross_entropy),
    "ids in a column": named(
        "cross_entropy", CLASSES, ids()[:, None], lambda o, y: F.cross_entropy(o, y[:, 0])
    ),
    "ids in a column, own": own(CLASSES, ids()[:, None], lambda o, y: CE(**none)(o, y.squeeze(1))),
    "a column of numbers, own": own(1, one[:, None], lambda o, y: F.mse_loss(o, y, reduction="none")),
    "a column of numbers, torch's": own(1, one[:, None], nn.MSELoss(**none)),
    "numbers, squeezed": own(1, one, lambda o, y: (o.squeeze(1) - y) ** 2),
    "numbers, an output without columns": own(1, one, nn.L1Loss(**none), Flat),
    "numbers, an output without columns, by name": named("mae", 1, one, F.l1_loss, Flat),
    "y 3-D": own(6, drawn(N, 3, 2), lambda o, y: F.mse_loss(o, y, reduction="none"), Grid),
    "y 3-D, a value a row": own(6, drawn(N, 3, 2), lambda o, y: (o - y).abs().sum((1, 2)), Grid),
    "y 3-D, by name": named("mse", 6, drawn(N, 3, 2), F.mse_loss, Grid),
    "every row with every other": Case(
        lambda: Net(1),
        given(one),
        plain=by_rows(nn.MSELoss(**none)),
        loss=lambda model: nn.MSELoss(**none),
        unclear=True,
    ),
    "two tasks of classes": own(CLASSES + 3, torch.stack([ids(), ids(3)], 1), two_tasks),
    # Types of y
    **{
        f"ids in {kind}": named(
            "cross_entropy", CLASSES, ids().to(kind), lambda o, y: F.cross_entropy(o, y.long())
        )
        for kind in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.float32, torch.float64)
    },
    "ids in uint8, torch's": own(CLASSES, ids().to(torch.uint8), CE(**none)),
    "ids in int8, own": own(CLASSES, ids().to(torch.int8), lambda o, y: CE(**none)(o, y.long())),
    "ids in float32, own": own(CLASSES, ids().float(), lambda o, y: CE(**none)(o, y.long())),
    **{
        f"numbers in {kind}": named(
            "mse", CLASSES, numbers.to(kind), lambda o, y: F.mse_loss(o, y.to(o.dtype))
        )
        for kind in (torch.float32, torch.bfloat16, torch.float16)
    },
    "numbers in bfloat16, own": own(
        CLASSES, numbers.bfloat16(), lambda o, y: F.mse_loss(o, y.to(o.dtype), reduction="none")
    ),
    "numbers in float32, own": own(CLASSES, numbers.float(), lambda o, y: (o - y).square()),
    "whole numbers to regress": named("mse", 1, ids(9)[:, None], lambda o, y: F.mse_loss(o, y.to(o.dtype))),
    "large numbers to regress": named(
        "huber", 1, 10**9 + ids(9)[:, None], lambda o, y: F.huber_loss(o, y.to(o.dtype))
    ),
    "truths": named(
        "auto", 1, ids(2) > 0, lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.to(o.dtype))
    ),
    "truths, own": own(1, ids(2) > 0, lambda o, y: BCE(**none)(o.squeeze(1), y.to(o.dtype))),
    "truths choose, own": own(1, ids(2) > 0, lambda o, y: torch.where(y, -o[:, 0], o[:, 0]).exp()),
    "several truths": named(
        "auto", 3, bits > 0, lambda o, y: F.binary_cross_entropy_with_logits(o, y.to(o.dtype))
    ),
    "several labels in int64": named(
        "bce", 3, bits, lambda o, y: F.binary_cross_entropy_with_logits(o, y.to(o.dtype))
    ),
    "several labels, torch's": own(3, bits.double(), BCE(**none)),
    # Values of y
    "-1 and +1, hinge": own(1, signs, hinge),
    "-1 and +1 in int8": own(1, signs.to(torch.int8), hinge),
    "-1 and +1 in float64, torch's": own(1, signs.double(), nn.SoftMarginLoss(**none), Flat),
    "-1 is none, by name": named(
        "cross_entropy", CLASSES, ignored, lambda o, y: F.cross_entropy(o[y >= 0], y[y >= 0])
    ),
    "-1 is none, own": own(CLASSES, ignored, lambda o, y: F.cross_entropy(o, y, ignore_index=-1, **none)),
    "-100 is none, torch's": own(CLASSES, hundred, CE(**none)),
    "-1 is a number": own(1, (ids() - 1)[:, None], lambda o, y: (o - y).square()),
    "numbers with NaN, by name": Case(
        lambda: Net(3), given(holes), plain=plain_masked, loss=lambda model: "mse"
    ),
    "numbers with NaN, own": own(3, holes, there_only),
    "numbers with NaN, values and weights": Case(
        lambda: Net(3), given(holes), plain=plain_masked, loss=lambda model: shared_weights
    ),
    "shares of classes": named("cross_entropy", CLASSES, soft, F.cross_entropy),
    "shares of classes, torch's": own(CLASSES, soft, CE(**none)),
    "shares of classes, KL": own(CLASSES, soft, divergence, LogShares),
    "shares of classes, KL of torch": own(CLASSES, soft, nn.KLDivLoss(**none), LogShares),
    "shares of yes": named("bce", 1, one.sigmoid()[:, None], F.binary_cross_entropy_with_logits),
    "a weight a vertex": Case(
        lambda: Net(CLASSES),
        given(ids(), weight=one.exp()),
        plain=plain_weighted,
        loss=lambda model: weighted_rows,
    ),
    # Losses
    "focal": own(CLASSES, ids(), focal),
    "pinball": own(3, one[:, None], pinball),
    "ordinal": own(CLASSES - 1, ids(), coral),
    "Gaussian": own(2, one[:, None], gaussian),
    "Gaussian of torch": own(2, one, gaussian_module),
    "Poisson of torch": own(1, ids(9)[:, None], nn.PoissonNLLLoss(**none)),
    "NLL of torch": own(CLASSES, ids(), nn.NLLLoss(**none), LogShares),
    "margin of torch": own(CLASSES, ids(), nn.MultiMarginLoss(**none)),
    "several labels, soft margin of torch": own(3, bits, nn.MultiLabelSoftMarginLoss(**none)),
    "Huber of torch": own(CLASSES, numbers, nn.HuberLoss(delta=0.3, **none)),
    "smooth L1 of torch": own(CLASSES, numbers, nn.SmoothL1Loss(beta=0.3, **none)),
    "label smoothing of torch": own(CLASSES, ids(), CE(label_smoothing=0.1, **none)),
    "class weights of torch": own(CLASSES, ids(), CE(weight=W, label_smoothing=0.1, **none)),
    "positive weights of torch": own(3, bits.double(), BCE(pos_weight=POS, **none)),
    "class weights by name": named(
        "cross_entropy",
        CLASSES,
        ids(),
        lambda o, y: F.cross_entropy(o, y, weight=W),
        class_weight=tuple(W.tolist()),
    ),
    "a sum": Case(
        lambda: Net(CLASSES), given(ids()), plain=by_rows(F.cross_entropy), loss=lambda model: summed
    ),
    "a mean": own(CLASSES, ids(), meaned),
    "a mean of torch": own(CLASSES, ids(), CE()),
    "a mean of torch, with class weights": own(CLASSES, ids(), CE(weight=W, label_smoothing=0.1)),
    "a mean of torch, of several labels": own(3, bits.double(), BCE(pos_weight=POS)),
    "a mean of torch, of numbers": own(CLASSES, numbers, nn.MSELoss()),
    "a mean of what has no NaN": own(3, holes, lambda o, y: F.mse_loss(o[~y.isnan()], y[~y.isnan()])),
    "a root of a mean": own(CLASSES, numbers, lambda o, y: F.mse_loss(o, y).sqrt()),
    "one less the correlation": own(1, one, lambda o, y: 1 - torch.corrcoef(torch.stack([o[:, 0], y]))[0, 1]),
    # Features
    "x of ids [N]": featured(lambda: Embedded(N), torch.arange(N)),
    "x of ids [N, 1]": featured(lambda: Embedded(N, column=True), torch.arange(N)[:, None]),
    "x of ids in int32": featured(lambda: Embedded(N, column=True), torch.arange(N).int()[:, None]),
    "x of ids above 2^24": featured(lambda: Embedded(16, 16, column=True), large[:, None]),
    "x of ids above 2^53": featured(lambda: Embedded(16, 16), 2**53 + torch.arange(N)),
    "x of large bits": featured(Parity, large[:, None]),
    "x of several ids": featured(Atoms, torch.arange(3 * N).view(N, 3) * 7 % 9),
    "x of bags of words": featured(Bag, torch.arange(5 * N).view(N, 5) * 7 % 50),
    "x one-hot": featured(OneHot, torch.arange(N) % FEATURES),
    "x in uint8": featured(lambda: Cast(1 / 255), torch.arange(6 * N).view(N, 6).mul(7).to(torch.uint8)),
    "x of truths": featured(Cast, drawn(N, FEATURES) > 0),
    "x in float16": featured(Cast, drawn(N, FEATURES).half()),
    "x in bfloat16": featured(Cast, drawn(N, FEATURES).bfloat16()),
    "x in float32": featured(Cast, drawn(N, FEATURES).float()),
    "x in int16": featured(lambda: Cast(0.01), torch.arange(6 * N).view(N, 6).short()),
    "x [N, T, F], a GRU": featured(Recurrent, drawn(N, 5, 3)),
    "x [N, T, F], a convolution": featured(OverTime, drawn(N, 5, 3)),
    "x [N, 1, 5, 5]": featured(Images, drawn(N, 1, 5, 5)),
    "x [N]": featured(Scalar, drawn(N)),
}
