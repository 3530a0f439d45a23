"""Metrics of all ranks are scikit-learn's of the whole; a loss that averages over its rows is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import nn

from kagome.comm.channel import Channel
from kagome.errors import ConfigError
from kagome.run import task

N, C = 101, 5
CUTS = {1: [N], 2: [90, 11], 3: [0, 1, 100], 4: [40, 0, 60, 1]}
"""Rows of each rank: unequal, some none at all."""


def made(kind: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    out = torch.randn(N, 2 if kind == "two" else 1 if kind == "one" else C, generator=generator)
    if kind == "multilabel":
        y = (torch.rand(N, C, generator=generator) < 0.3).long()
        y[:, 4] = 0  # a label that nobody has: roc_auc leaves it out
    else:
        y = torch.randint(0, C if kind == "multiclass" else 2, (N,), generator=generator)
    draw = torch.rand(N, generator=generator)
    masks = {
        "train": draw < 0.3,
        "val": (draw >= 0.3) & (draw < 0.9),
        "test": torch.zeros(N, dtype=torch.bool),
    }
    return out, y, masks


def expected(name: str, out, y) -> float:
    if name == "roc_auc":
        score = out[:, 1] - out[:, 0] if out.size(1) == 2 else out[:, 0] if out.size(1) == 1 else out
        if y.dim() == 1:
            return float(roc_auc_score(y, score))
        return float(roc_auc_score(y[:, :4], score[:, :4], average="macro"))
    if y.dim() == 2:
        return float(f1_score(y, out > 0, average="micro", zero_division=0))
    guess = (out[:, 0] > 0).long() if out.size(1) == 1 else out.argmax(1)
    return float(accuracy_score(y, guess) if name == "accuracy" else f1_score(y, guess, average="micro"))


def scored(channel: Channel, name: str, kind: str) -> dict[str, float | None]:
    out, y, masks = made(kind)
    sizes = CUTS[channel.size]
    own = torch.split(torch.arange(N), sizes)[channel.rank]
    return task.scores(
        name, out[own], y[own], {key: mask[own] for key, mask in masks.items()}, channel, "scores"
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_metrics_are_those_of_scikit_learn_however_rows_are_spread(ranks, world):
    cases = [
        ("accuracy", "multiclass"),
        ("f1_micro", "multiclass"),
        ("accuracy", "one"),
        ("f1_micro", "multilabel"),
        ("roc_auc", "multilabel"),
        ("roc_auc", "two"),
        ("roc_auc", "one"),
    ]
    for name, kind in cases:
        out, y, masks = made(kind)
        found = ranks(world, scored, name, kind)
        for split in ("train", "val"):
            mask = masks[split]
            assert found[0][split] == pytest.approx(expected(name, out[mask], y[mask]), abs=1e-9), (
                name,
                kind,
            )
        assert found[0]["test"] is None
        assert all(other == found[0] for other in found), "every rank stops at the same epoch only if so"


def test_roc_auc_of_one_class_is_none():
    out, y, _ = made("two")
    mask = {"val": y == 1}
    assert task.scores("roc_auc", out, y, mask, Channel(None, "cpu"), "scores") == {"val": None}


def test_the_metric_suits_the_labels():
    assert task.metric_name("auto", "multilabel", 3) == "f1_micro"
    assert task.metric_name("auto", "multiclass", 3) == "accuracy"
    assert task.metric_name("roc_auc", "multiclass", 2) == "roc_auc"
    with pytest.raises(ConfigError, match="there are 3 classes"):
        task.metric_name("roc_auc", "multiclass", 3)
    with pytest.raises(ConfigError, match="f1_micro"):
        task.metric_name("accuracy", "multilabel", 3)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="none"),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none", weight=torch.arange(1.0, C + 1)),
        lambda out, y: F.cross_entropy(out, y, reduction="none", label_smoothing=0.1),
        lambda out, y: F.mse_loss(out, F.one_hot(y, C).float(), reduction="none"),
    ],
)
def test_losses_that_add_up_are_taken(loss):
    out, y, _ = made("multiclass")
    whole = task.row_sum(task.checked_loss(loss, out, y)(out, y))
    parts = task.row_sum(loss(out[:30], y[:30])) + task.row_sum(loss(out[30:], y[30:]))
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.arange(1.0, C + 1)),
        lambda out, y: F.cross_entropy(out, y, reduction="sum") ** 2,
    ],
)
def test_a_loss_that_averages_over_its_rows_is_refused_with_the_fix(loss):
    out, y, _ = made("multiclass")
    with pytest.raises(ConfigError, match=r'averages over the rows(.|\n)*reduction="none"'):
        task.checked_loss(loss, out, y)


def test_a_loss_with_another_number_of_rows_is_refused():
    out, y, _ = made("multiclass")
    with pytest.raises(ConfigError, match="a value a row: 101, but it gave 5"):
        task.checked_loss(
            lambda out, y: F.mse_loss(out, F.one_hot(y, C).float(), reduction="none").mean(0), out, y
        )


def test_default_losses():
    out, y, _ = made("multiclass")
    torch.testing.assert_close(
        task.default_loss("multiclass", C)(out, y).mean(), F.cross_entropy(out, y), rtol=1e-6, atol=1e-6
    )
    out, y, _ = made("multilabel")
    torch.testing.assert_close(
        task.default_loss("multilabel", C)(out, y).mean(), F.binary_cross_entropy_with_logits(out, y.float())
    )
    out, y, _ = made("one")
    torch.testing.assert_close(
        task.default_loss("multiclass", 2)(out, y).mean(),
        F.binary_cross_entropy_with_logits(out[:, 0], y.float()),
    )
