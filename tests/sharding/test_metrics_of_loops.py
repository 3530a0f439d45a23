"""Metrics of an own loop are those of their plain definitions, on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import kagome
from kagome.comm.channel import Channel
from kagome.train import data as source

N, USERS, K = 41, 17, 5


def drawn() -> dict[str, Tensor]:
    """Scores with many ties, rows of users and items, pairs of them, targets."""
    g = torch.Generator().manual_seed(9)
    return {
        "edges": torch.randint(0, N, (2, 120), generator=g),
        "positive": torch.randint(0, 12, (33,), generator=g).double(),
        "negative": torch.randint(0, 12, (33, 7), generator=g).double(),
        "labels": torch.randint(0, 4, (33,), generator=g) == 0,
        "rows": torch.randint(-2, 3, (N, 3), generator=g).double(),
        "wanted": torch.stack(
            [torch.randint(0, USERS, (40,), generator=g), torch.randint(USERS, N, (40,), generator=g)]
        ),
        "known": torch.stack(
            [torch.randint(0, USERS, (60,), generator=g), torch.randint(USERS, N, (60,), generator=g)]
        ),
        "out": torch.randn(N, 2, generator=g, dtype=torch.float64),
        "y": torch.randn(N, 2, generator=g, dtype=torch.float64) + 1e6,
        "scores": torch.randn(N, 3, generator=g, dtype=torch.float64),
        "classes": torch.randint(0, 3, (N,), generator=g),
        "several": torch.randint(0, 2, (N, 3), generator=g),
    }


def recall(rows: Tensor, wanted: Tensor, known: Tensor | None, k: int) -> float:
    """By the whole matrix of scores."""
    each = []
    for user in wanted[0].unique().tolist():
        scores = {item: float(rows[user] @ rows[item]) for item in range(USERS, N)}
        if known is not None:
            for item in known[1, known[0] == user].tolist():
                scores.pop(item, None)
        best = sorted(scores, key=lambda item: (-scores[item], item))[:k]
        mine = set(wanted[1, wanted[0] == user].tolist())
        each.append(len(mine & set(best)) / len(mine))
    return sum(each) / len(each)


def expected() -> dict[str, float]:
    d = drawn()
    positive, negative = d["positive"], d["negative"]
    worst = negative.flatten().sort(descending=True).values
    better = [
        (n > p).sum().item() + (n == p).sum().item() / 2 for p, n in zip(positive, negative, strict=True)
    ]
    out, y = d["out"].numpy() + 1e6, d["y"].numpy()
    return {
        "hits": (positive > worst[19]).double().mean().item(),
        "hits of few": 1.0,
        "mrr": sum(1 / (1 + b) for b in better) / len(better),
        "ap": float(average_precision_score(d["labels"].numpy(), positive.numpy())),
        "recall": recall(d["rows"], d["wanted"], None, K),
        "recall without known": recall(d["rows"], d["wanted"], d["known"], K),
        "recall of many": recall(d["rows"], d["wanted"], d["known"], 30),
        "r2": float(r2_score(y, out)),
        "r2 of one column": float(r2_score(y[:, 0], out[:, 0])),
        "mae": float(abs(out - y).mean()),
        "rmse": float(root_mean_squared_error(y, out)),
        **by_name(d["scores"], d["classes"], d["several"]),
        "score r2": float(r2_score(y, out)),
    }


def by_name(scores: Tensor, classes: Tensor, several: Tensor) -> dict[str, float]:
    """Scores that a Trainer has, by scikit-learn; class 2 is no label in one of them."""
    ids, labelled = scores.argmax(1), classes != 2
    return {
        "score accuracy": float(accuracy_score(classes, ids)),
        "score accuracy of labelled": float(accuracy_score(classes[labelled], ids[labelled])),
        "score f1_macro": float(f1_score(classes, ids, average="macro")),
        "score f1_micro": float(f1_score(several, scores > 0, average="micro")),
        "score roc_auc": float(roc_auc_score(several, scores)),
    }


def measured(channel: Channel, uneven: bool) -> dict[str, float]:
    d, metrics = drawn(), kagome.metrics
    owner = torch.zeros(N, dtype=torch.int64)
    owner[[3, 30]] = channel.size - 1
    found = (owner, None) if uneven else (torch.arange(N) % channel.size, None)
    with (
        patch.object(source, "owners", lambda *_, **__: found),
        kagome.shard(GCN(3, 4, num_layers=1), Data(x=d["rows"], edge_index=d["edges"]), log=str) as net,
    ):
        # Of pairs, all are the last rank's, or they are dealt.
        share = (
            slice(0, None if net.rank == net.ranks - 1 else 0) if uneven else slice(net.rank, None, net.ranks)
        )
        positive, negative = d["positive"][share], d["negative"][share]
        rows, out, y = net.place(d["rows"]), net.place(d["out"]) + 1e6, net.place(d["y"])
        scores, classes, several = (net.place(d[name]) for name in ("scores", "classes", "several"))
        many = {"items": torch.arange(USERS, N), "block": 6}
        return {
            "hits": metrics.hits_at(net, positive, negative.flatten(), 20),
            "hits of few": metrics.hits_at(net, positive, negative.flatten(), 1000),
            "mrr": metrics.mean_reciprocal_rank(net, positive, negative),
            "ap": metrics.average_precision(net, positive, d["labels"][share]),
            "recall": metrics.recall_at(net, rows, d["wanted"], K, **many),
            "recall without known": metrics.recall_at(net, rows, d["wanted"], K, known=d["known"], **many),
            "recall of many": metrics.recall_at(net, rows, d["wanted"], 30, known=d["known"], **many),
            "r2": metrics.r2(net, out, y),
            "r2 of one column": metrics.r2(net, out[:, 0], y[:, 0]),
            "mae": metrics.mae(net, out, y),
            "rmse": metrics.rmse(net, out, y),
            "score accuracy": metrics.score(net, "accuracy", scores, classes),
            "score accuracy of labelled": metrics.score(
                net, "accuracy", scores, torch.where(classes == 2, -1, classes)
            ),
            "score f1_macro": metrics.score(net, "f1_macro", scores, classes),
            "score f1_micro": metrics.score(net, "f1_micro", scores, several),
            "score roc_auc": metrics.score(net, "roc_auc", scores, several),
            "score r2": metrics.score(net, "r2", out, y),
        }


@pytest.mark.every
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("uneven", [False, True])
def test_metrics_are_those_of_their_definitions(ranks: Any, world: int, uneven: bool) -> None:
    wanted = expected()
    assert 0 < wanted["hits"] < 1
    assert 0 < wanted["recall"] < 1
    for found in ranks(world, measured, uneven):
        assert found == pytest.approx(wanted, rel=1e-10, abs=1e-10)


def of_two_sets(channel: Channel) -> dict[str, float]:
    """Recall of users and items in vertex sets of their own; each has ids from 0."""
    d = drawn()
    wanted, known = ((pairs - torch.tensor([[0], [USERS]])) for pairs in (d["wanted"], d["known"]))
    graph = kagome.Graph(
        user=kagome.Vertices(USERS),
        item=kagome.Vertices(N - USERS),
        bought=kagome.Edges("user", "item", known),
    )
    with kagome.shard(nn.Linear(3, 3).double(), graph, log=str) as net:
        rows = net.place(d["rows"][:USERS], "user"), net.place(d["rows"][USERS:], "item")
        sets = {"sets": ("user", "item"), "block": 6}
        recall_at = kagome.metrics.recall_at
        some = recall_at(net, rows, wanted, K, items=torch.arange(4, N - USERS), **sets)
        every = recall_at(net, rows, wanted, K, **sets)
        assert some != every
        return {
            "recall": every,
            "recall without known": recall_at(net, rows, wanted, K, known=known, **sets),
            "recall of many": recall_at(net, rows, wanted, 30, known=known, **sets),
        }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_recall_of_two_vertex_sets(ranks: Any, world: int) -> None:
    wanted = {name: value for name, value in expected().items() if name.startswith("recall")}
    for found in ranks(world, of_two_sets):
        assert found == pytest.approx(wanted, rel=1e-10, abs=1e-10)


def refused(channel: Channel, case: str) -> str:
    d, metrics = drawn(), kagome.metrics
    empty = torch.empty(0)
    try:
        with kagome.shard(GCN(3, 4, num_layers=1), Data(x=d["rows"], edge_index=d["edges"]), log=str) as net:
            if case == "none":
                metrics.hits_at(net, empty, d["positive"], 1)
            elif case == "k":
                metrics.hits_at(net, d["positive"], d["positive"], 0)
            elif case == "nan":  # on one rank, refused on all
                metrics.average_precision(
                    net, torch.full((2,), torch.nan) if net.rank else torch.ones(2), torch.ones(2)
                )
            elif case == "unlike":
                metrics.r2(net, d["out"], d["y"][:, 0])
            elif case == "negatives":
                metrics.mean_reciprocal_rank(net, d["positive"], d["negative"][1:])
            elif case == "rows":
                metrics.recall_at(net, d["rows"], d["wanted"], K, items=torch.arange(USERS, N))
            elif case == "rows of labels":
                metrics.score(net, "accuracy", d["rows"], torch.zeros(7, dtype=torch.long))
            elif case == "metric":
                metrics.score(net, "best", d["rows"], torch.zeros(N, dtype=torch.long))
            elif case == "numbers":
                metrics.score(net, "f1_macro", d["out"], d["y"])
            elif case == "sets":
                metrics.recall_at(net, (d["rows"], d["rows"]), d["wanted"], K)
            elif case == "items":
                metrics.recall_at(net, net.place(d["rows"]), d["wanted"], K)
            elif case == "no positive":
                metrics.average_precision(net, d["positive"], torch.zeros(33))
    except kagome.KagomeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("none", "none on any rank"),
        ("sets", "two, and sets=None"),
        ("items", "the ids of all items"),
        ("k", "k of 1 or more"),
        ("nan", "2 NaN"),
        ("unlike", "[41, 2] and [41]"),
        ("negatives", "negatives of each positive pair, [33, M]"),
        ("rows", "own rows of vertices, [n, F]"),
        ("no positive", "a positive row or more"),
        ("rows of labels", "[41] and [7]"),
        ("metric", "'best'"),
        ("numbers", "mse"),
    ],
)
def test_refused(ranks: Any, case: str, words: str) -> None:
    for message in ranks(2, refused, case, spoils=True):
        assert words in message
