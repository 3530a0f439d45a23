"""Kind 9: further columns, auxiliary losses, several outputs; and the metric that chooses the best epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from sklearn import metrics as sk
from torch import Tensor, nn
from torch_geometric.data import Data

from by_hand import graph
from cases import Case, PlainMetric, with_targets

N, FEATURES, WIDTH, CLASSES = 30, 6, 8, 4


def drawn(*shape: int, seed: int = 7) -> Tensor:
    """Numbers of one seed, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(count: int = CLASSES) -> Tensor:
    """Class ids ``[N]``."""
    return torch.randint(0, count, (N,), generator=torch.Generator().manual_seed(2))


def given(y: Tensor) -> Callable[[], Data]:
    """The sample graph with these labels: a third to train on, a third each to validate and to test on."""

    def make() -> Data:
        data = with_targets(graph())
        data.y, third = y.clone(), torch.arange(N) % 3
        data.train_mask, data.val_mask, data.test_mask = (third == each for each in range(3))
        return data

    return make


class Net(nn.Module):
    """Two convolutions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(FEATURES, WIDTH), pyg.SAGEConv(WIDTH, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.two(self.one(x, edge_index).tanh(), edge_index)


class Rebuilding(nn.Module):
    """Classes, and the features again, side by side: an autoencoder beside a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = pyg.SAGEConv(FEATURES, WIDTH), pyg.SAGEConv(WIDTH, CLASSES)
        self.again = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.one(x, edge_index).tanh()
        return torch.cat([self.head(h, edge_index), (self.again(h) - x).square()], 1)


class Sparing(nn.Module):
    """Classes and a column with the size of the hidden row: a penalty on activity."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.GCNConv(FEATURES, WIDTH), pyg.GCNConv(WIDTH, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.one(x, edge_index).tanh()
        return torch.cat([self.two(h, edge_index), h.abs().sum(1, keepdim=True)], 1)


class Deep(nn.Module):
    """Scores after each layer: deep supervision."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([pyg.SAGEConv(FEATURES, WIDTH), pyg.SAGEConv(WIDTH, WIDTH)])
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = []
        for conv, head in zip(self.convs, self.heads, strict=True):
            x = conv(x, edge_index).tanh()
            found.append(head(x))
        return torch.cat(found[::-1], 1)


class Stacked(Deep):
    """Scores after each layer, with an axis of their own."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).view(-1, 2, CLASSES)


class Pair(nn.Module):
    """Scores and hidden rows, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(FEATURES, WIDTH), pyg.SAGEConv(WIDTH, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.one(x, edge_index).tanh()
        return self.two(h, edge_index), h


class Beside(Pair):
    """Scores, and what ``beside`` makes of hidden rows."""

    def __init__(self, beside: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        out, h = super().forward(x, edge_index)
        return out, self.beside(h, edge_index)


class Named(Pair):
    """Scores and hidden rows, by name."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        out, h = super().forward(x, edge_index)
        return {"scores": out, "hidden": h}


class Two(nn.Module):
    """Two heads of a shared body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = pyg.SAGEConv(FEATURES, WIDTH)
        self.classes, self.number = pyg.SAGEConv(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.body(x, edge_index).tanh()
        return self.classes(h, edge_index), self.number(h)


class Weighing(nn.Module):
    """Scores of experts and a gate, beside the mixed scores, for a loss that balances the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = pyg.SAGEConv(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.body(x, edge_index).tanh()
        gate = self.gate(h).softmax(1)
        mixed = sum(gate[:, k : k + 1] * expert(h) for k, expert in enumerate(self.experts))
        return torch.cat([mixed, gate], 1)


Own = Callable[[Any, Tensor], Tensor]


def of(out: Any, rows: Tensor) -> Any:
    """Rows of each tensor of an output that has a row a vertex."""
    if isinstance(out, Tensor):
        return out[rows] if out.dim() and out.size(0) == N else out
    if out is None or isinstance(out, str):
        return out
    if isinstance(out, dict):
        return {name: of(each, rows) for name, each in out.items()}
    return tuple(of(each, rows) for each in out)


def case(build: Callable[[], nn.Module], y: Tensor, loss: Own, score: Own | None, **more: Any) -> Case:
    """A loss of one's own, and the number that the metric must be of the validation vertices."""

    def plain(model: nn.Module, out: Any, data: Data) -> Tensor:
        return loss(of(out, data.train_mask), data.y[data.train_mask]).mean()

    metric: PlainMetric | None = None
    if score is not None:

        def metric(out: Any, data: Data, mask: Tensor) -> float:
            return float(score(of(out, mask), data.y[mask]))

    return Case(build, given(y), plain=plain, loss=lambda model: loss, metric=metric, **more)


def named(loss: str, plain: Own, y: Tensor, metric: str, score: Own, outputs: int, **more: Any) -> Case:
    """A built-in loss and a metric by its name."""
    made = case(lambda: Net(outputs), y, plain, score, **more)
    return Case(
        made.build,
        made.data,
        made.plain,
        lambda model: loss,
        given={"metric": metric},
        metric=made.metric,
        lower=made.lower,
    )


# Losses ------------------------------------------------------------------------------------------


def classes(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out[:, :CLASSES], y, reduction="none")


def and_the_rest(out: Tensor, y: Tensor) -> Tensor:
    return classes(out, y) + 0.1 * out[:, CLASSES:].square().mean(1)


def rebuilding(out: Tensor, y: Tensor) -> Tensor:
    return classes(out, y) + 0.1 * out[:, CLASSES:].mean(1)


def sparing(out: Tensor, y: Tensor) -> Tensor:
    return classes(out, y) + 0.01 * out[:, CLASSES]


def deep(out: Tensor, y: Tensor) -> Tensor:
    return classes(out, y) + 0.5 * F.cross_entropy(out[:, CLASSES:], y, reduction="none")


def stacked(out: Tensor, y: Tensor) -> Tensor:
    return sum(F.cross_entropy(out[:, k], y, reduction="none") for k in range(2))


def balanced(out: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(out[:, :CLASSES].log_softmax(1), y, reduction="none") + 0.1 * out[
        :, CLASSES:
    ].square().sum(1)


def rejecting(out: Tensor, y: Tensor) -> Tensor:
    """The last column is the share of rows that are given up."""
    share = out.softmax(1)
    return -(share.gather(1, y[:, None]).squeeze(1) + 0.5 * share[:, CLASSES]).log()


def gaussian(out: Tensor, y: Tensor) -> Tensor:
    return F.gaussian_nll_loss(out[:, :1], y, out[:, 1:].exp(), reduction="none").squeeze(1)


def evidential(out: Tensor, y: Tensor) -> Tensor:
    mean, nu, alpha, beta = out[:, :1], *F.softplus(out[:, 1:]).split(1, 1)
    return ((y - mean).square() * nu / (2 * beta + 1) + (1 + alpha).log()).squeeze(1)


def quantiles(out: Tensor, y: Tensor) -> Tensor:
    at = torch.tensor([0.1, 0.5, 0.9], dtype=out.dtype)
    return torch.maximum(at * (y - out), (at - 1) * (y - out)).sum(1)


def pair(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y, reduction="none") + 0.1 * out[1].square().mean(1)


def further(out: Any, y: Tensor) -> Tensor:
    """A further loss of the whole graph, which forward returns beside the scores."""
    return F.cross_entropy(out[0], y, reduction="none") + 0.1 * out[1]


def scores_alone(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y, reduction="none")


def pulled(out: Any, y: Tensor) -> Tensor:
    return scores_alone(out, y) + 0.1 * out[1].square().mean()


def by_name(out: Any, y: Tensor) -> Tensor:
    return pair((out["scores"], out["hidden"]), y)


def two_heads(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y, reduction="none") + (out[1][:, 0] - y).square()


def multi(out: Tensor, y: Tensor) -> Tensor:
    return (
        F.binary_cross_entropy_with_logits(out[:, :3], y, reduction="none").mean(1) + 0.1 * out[:, 3].square()
    )


# Metrics, by scikit-learn or by hand -------------------------------------------------------------


def accuracy(out: Tensor, y: Tensor) -> Any:
    return sk.accuracy_score(y, out[:, :CLASSES].argmax(1))


def macro(out: Tensor, y: Tensor) -> Any:
    return sk.f1_score(y, out[:, :CLASSES].argmax(1), average="macro", zero_division=0)


def micro_of_labels(out: Tensor, y: Tensor) -> Any:
    return sk.f1_score(y, out[:, :3] > 0, average="micro", zero_division=0)


def macro_of_labels(out: Tensor, y: Tensor) -> Any:
    return sk.f1_score(y, out[:, :3] > 0, average="macro", zero_division=0)


def auc_of_labels(out: Tensor, y: Tensor) -> Any:
    return sk.roc_auc_score(y, out[:, :3])


def precision_of_labels(out: Tensor, y: Tensor) -> Any:
    return sk.average_precision_score(y, out[:, :3])


def first_column(score: Callable[..., Any]) -> Own:
    return lambda out, y: score(y, out[:, :1])


def hits(out: Any, y: Tensor) -> Tensor:
    """What a user's own metric is: a value a row."""
    return (out[0].argmax(1) == y).double()


def hits_by_name(out: Any, y: Tensor) -> Tensor:
    return hits((out["scores"],), y)


def half_way(out: Tensor, y: Tensor) -> Tensor:
    return ((out[:, :1] - y).abs() < 2 * out[:, 1:].exp().sqrt()).double().squeeze(1)


def mean_of(own: Own) -> Own:
    return lambda out, y: own(out, y).mean()


def told(*columns: int) -> dict[str, Any]:
    """The columns that the metric scores."""
    return {"train": {"metric_columns": columns}}


FOUR: Sequence[int] = range(CLASSES)
numbers, one = drawn(N, 3), drawn(N, 1)
bits = (drawn(N, 3, seed=9) > 0).double()
yes = ids(2)
bce = F.binary_cross_entropy_with_logits

CASES: dict[str, Case] = {
    # Classes and further columns
    "classes and more, told": case(lambda: Net(CLASSES + 2), ids(), and_the_rest, accuracy, **told(*FOUR)),
    "classes and more, untold": case(
        lambda: Net(CLASSES + 2), ids(), and_the_rest, mean_of(and_the_rest), lower=True
    ),
    "classes and more, a name, untold": case(
        lambda: Net(CLASSES + 2), ids(), and_the_rest, accuracy, given={"metric": "accuracy"}, unclear=True
    ),
    "classes and more, macro F1": case(
        lambda: Net(CLASSES + 2), ids(), and_the_rest, macro, given={"metric": "f1_macro"}, **told(*FOUR)
    ),
    "classes and more, the loss": case(
        lambda: Net(CLASSES + 2),
        ids(),
        and_the_rest,
        mean_of(and_the_rest),
        given={"metric": "loss"},
        lower=True,
    ),
    "classes alone, an own loss": case(lambda: Net(CLASSES), ids(), classes, accuracy),
    "classes of the last columns, told": case(
        lambda: Net(CLASSES + 2),
        ids(),
        lambda o, y: F.cross_entropy(o[:, 2:], y, reduction="none") + o[:, 0].square(),
        lambda o, y: accuracy(o[:, 2:], y),
        **told(2, 3, 4, 5),
    ),
    "features rebuilt, told": case(Rebuilding, ids(), rebuilding, accuracy, **told(*FOUR)),
    "features rebuilt, untold": case(Rebuilding, ids(), rebuilding, mean_of(rebuilding), lower=True),
    "activity, told": case(Sparing, ids(), sparing, accuracy, **told(*FOUR)),
    "activity, an own metric": case(
        Sparing,
        ids(),
        sparing,
        accuracy,
        given={"metric": lambda o, y: (o[:, :CLASSES].argmax(1) == y).double()},
    ),
    "deep supervision, told": case(Deep, ids(), deep, accuracy, **told(*FOUR)),
    "deep supervision, untold": case(Deep, ids(), deep, mean_of(deep), lower=True),
    "deep supervision, an axis of its own": case(Stacked, ids(), stacked, mean_of(stacked), lower=True),
    "a gate beside, told": case(Weighing, ids(), balanced, accuracy, **told(*FOUR)),
    "a column of rejection, torch's loss": case(
        lambda: Net(CLASSES + 1),
        ids(),
        nn.CrossEntropyLoss(reduction="none"),
        lambda o, y: sk.accuracy_score(y, o.argmax(1)),
    ),
    "a column of rejection, told": case(lambda: Net(CLASSES + 1), ids(), rejecting, accuracy, **told(*FOUR)),
    # Several tensors
    "a tuple, untold": case(Pair, ids(), pair, mean_of(pair), lower=True),
    "a tuple, an own metric": case(Pair, ids(), pair, mean_of(hits), given={"metric": hits}),
    "a number beside": case(
        lambda: Beside(lambda h, e: h.square().mean()), ids(), further, mean_of(hits), given={"metric": hits}
    ),
    "a balance beside": case(
        lambda: Beside(lambda h, e: h.softmax(1).mean(0).square().sum()),
        ids(),
        further,
        mean_of(further),
        lower=True,
    ),
    "None beside": case(
        lambda: Beside(lambda h, e: None), ids(), scores_alone, mean_of(hits), given={"metric": hits}
    ),
    "a row of the graph beside": case(
        lambda: Beside(lambda h, e: h.mean(0, keepdim=True)),
        ids(),
        pulled,
        mean_of(hits),
        given={"metric": hits},
    ),
    "a row an edge beside": case(
        lambda: Beside(lambda h, e: (h[e[0]] * h[e[1]]).sum(1)),
        ids(),
        pulled,
        mean_of(hits),
        given={"metric": hits},
    ),
    "a dict, untold": case(Named, ids(), by_name, mean_of(by_name), lower=True),
    "a dict, an own metric": case(
        Named, ids(), by_name, mean_of(hits_by_name), given={"metric": hits_by_name}
    ),
    "two heads, an own metric": case(Two, ids(), two_heads, mean_of(hits), given={"metric": hits}),
    # Numbers and further columns
    "a mean and a variance, told": case(
        lambda: Net(2),
        one,
        gaussian,
        first_column(sk.root_mean_squared_error),
        given={"metric": "rmse"},
        lower=True,
        **told(0),
    ),
    "a mean and a variance, R2": case(
        lambda: Net(2), one, gaussian, first_column(sk.r2_score), given={"metric": "r2"}, **told(0)
    ),
    "a mean and a variance, untold": case(lambda: Net(2), one, gaussian, mean_of(gaussian), lower=True),
    "a mean and a variance, an own metric": case(
        lambda: Net(2), one, gaussian, mean_of(half_way), given={"metric": half_way}
    ),
    "evidence, told": case(
        lambda: Net(4),
        one,
        evidential,
        first_column(sk.mean_absolute_error),
        given={"metric": "mae"},
        lower=True,
        **told(0),
    ),
    "quantiles, the middle one": case(
        lambda: Net(3),
        one,
        quantiles,
        lambda o, y: sk.mean_absolute_error(y, o[:, 1:2]),
        given={"metric": "mae"},
        lower=True,
        **told(1),
    ),
    # Several labels and further columns
    "labels and more, told": case(
        lambda: Net(4), bits, multi, micro_of_labels, given={"metric": "f1_micro"}, **told(0, 1, 2)
    ),
    "labels and more, ROC AUC": case(
        lambda: Net(4), bits, multi, auc_of_labels, given={"metric": "roc_auc"}, **told(0, 1, 2)
    ),
    # Metrics by name
    "accuracy": named("cross_entropy", F.cross_entropy, ids(), "accuracy", accuracy, CLASSES),
    "macro F1": named("cross_entropy", F.cross_entropy, ids(), "f1_macro", macro, CLASSES),
    "micro F1": named("cross_entropy", F.cross_entropy, ids(), "f1_micro", accuracy, CLASSES),
    "micro F1 of labels": named("bce", bce, bits, "f1_micro", micro_of_labels, 3),
    "macro F1 of labels": named("bce", bce, bits, "f1_macro", macro_of_labels, 3),
    "ROC AUC of labels": named("bce", bce, bits, "roc_auc", auc_of_labels, 3),
    "average precision of labels": named("bce", bce, bits, "average_precision", precision_of_labels, 3),
    "ROC AUC of two classes": named(
        "cross_entropy",
        F.cross_entropy,
        yes,
        "roc_auc",
        lambda o, y: sk.roc_auc_score(y, o[:, 1] - o[:, 0]),
        2,
    ),
    "average precision of one column": named(
        "cross_entropy",
        lambda o, y: bce(o[:, 0], y.to(o.dtype)),
        yes,
        "average_precision",
        lambda o, y: sk.average_precision_score(y, o[:, 0]),
        1,
    ),
    "MSE": named("mse", F.mse_loss, numbers, "mse", lambda o, y: sk.mean_squared_error(y, o), 3, lower=True),
    "MAE": named("mae", F.l1_loss, numbers, "mae", lambda o, y: sk.mean_absolute_error(y, o), 3, lower=True),
    "RMSE": named(
        "huber", F.huber_loss, numbers, "rmse", lambda o, y: sk.root_mean_squared_error(y, o), 3, lower=True
    ),
    "R2": named("mse", F.mse_loss, numbers, "r2", lambda o, y: sk.r2_score(y, o), 3),
    "the loss": named("mse", F.mse_loss, numbers, "loss", F.mse_loss, 3, lower=True),
}
