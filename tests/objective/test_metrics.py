"""Metrics of all ranks are scikit-learn's of the whole; one's own; what does not suit the labels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sk
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.config import Train
from kagome.errors import ConfigError, ModelError
from kagome.graph.structure.labels import labels_of
from kagome.objective.losses import objective_of
from kagome.objective.metrics import Metric, metric_of

N, C = 101, 5
CUTS = {1: [N], 2: [90, 11], 3: [0, 1, 100], 4: [40, 0, 60, 1]}
"""Rows of each rank: unequal, some none at all."""
NAN = float("nan")


def made(kind: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    widths = {"two": 2, "one": 1, "both": 1, "numbers": 3, "holes": 3, "far": 1, "flat": 0}
    width = widths.get(kind, C)
    out = torch.randn(N, width, generator=generator) if width else torch.randn(N, generator=generator)
    if kind in ("multilabel", "holed"):
        y = (torch.rand(N, C, generator=generator) < 0.3).long()
        y[:, 4] = 0  # a label that nobody has: curves leave it out
        if kind == "holed":
            y = torch.where(torch.rand(N, C, generator=generator) < 0.2, NAN, y.double())
    elif kind in ("numbers", "holes"):
        y = out.double() * 0.7 + torch.randn(N, 3, generator=generator).double() + torch.arange(3) * 10
        out = out + torch.arange(3) * 10
        if kind == "holes":
            y = torch.where(torch.rand(N, 3, generator=generator) < 0.3, NAN, y)
    elif kind == "far":  # squares of these have no digit left for their spread
        y = 1e9 + torch.randn(N, generator=generator).double()
        out = y[:, None] + 0.5 * torch.randn(N, 1, generator=generator)
    elif kind == "flat":
        y = torch.randint(0, 9, (N, 1), generator=generator)
    else:
        y = torch.randint(0, C if kind == "multiclass" else 2, (N,), generator=generator)
        y = 2 * y - 1 if kind == "both" else y
    draw = torch.rand(N, generator=generator)
    masks = {
        "train": draw < 0.3,
        "val": (draw >= 0.3) & (draw < 0.9),
        "test": torch.zeros(N, dtype=torch.bool),
    }
    return out, y, masks


def soft_margin(out: Tensor, y: Tensor) -> Tensor:
    return F.soft_margin_loss(out.squeeze(1), y.to(out.dtype), reduction="none")


LOSSES = {"numbers": "mse", "holes": "mse", "far": "mse", "flat": "mae", "holed": "bce", "both": soft_margin}


def metric(name, kind: str, y: Tensor, **train) -> Metric:
    settings = Train(**train)
    objective = objective_of(LOSSES.get(kind), labels_of(y), settings, N)
    return metric_of(name, objective, settings)


def expected(name: str, kind: str, out: Tensor, y: Tensor) -> float:
    if name in ("mse", "mae", "rmse", "r2"):
        out, y = out.reshape(len(out), -1).double().numpy(), y.reshape(len(y), -1).double().numpy()
        function = {
            "mse": sk.mean_squared_error,
            "mae": sk.mean_absolute_error,
            "rmse": sk.root_mean_squared_error,
            "r2": sk.r2_score,
        }[name]
        kept = [(y[:, c], out[:, c], y[:, c] == y[:, c]) for c in range(y.shape[1])]
        return float(np.mean([function(true[there], guess[there]) for true, guess, there in kept]))
    y = (y + 1) // 2 if kind == "both" else y
    if name in ("roc_auc", "average_precision"):
        function = sk.roc_auc_score if name == "roc_auc" else sk.average_precision_score
        score = out[:, 1] - out[:, 0] if out.size(1) == 2 else out[:, 0] if out.size(1) == 1 else out
        if y.dim() == 1:
            return float(function(y, score))
        found = [(y[:, c], score[:, c], ~y[:, c].isnan()) for c in range(4)]
        return float(np.mean([function(true[there], guess[there]) for true, guess, there in found]))
    average = name.removeprefix("f1_")
    if y.dim() == 2:
        return float(sk.f1_score(y, out > 0, average=average, zero_division=0))
    guess = (out[:, 0] > 0).long() if out.size(1) == 1 else out.argmax(1)
    if name == "accuracy":
        return float(sk.accuracy_score(y, guess))
    return float(sk.f1_score(y, guess, average=average, zero_division=0))


def scored(channel: Channel, name, kind: str) -> dict[str, float | None]:
    out, y, masks = made(kind)
    own = torch.split(torch.arange(N), CUTS[channel.size])[channel.rank]
    how = metric(name, kind, y)
    target = how.objective.target({"y": y[own]}, slice(None))
    return how.scores(out[own], target, {key: mask[own] for key, mask in masks.items()}, channel, "scores")


CASES = [
    ("accuracy", "multiclass"),
    ("f1_micro", "multiclass"),
    ("f1_macro", "multiclass"),
    ("accuracy", "one"),
    ("accuracy", "both"),
    ("f1_micro", "multilabel"),
    ("f1_macro", "multilabel"),
    ("roc_auc", "multilabel"),
    ("average_precision", "multilabel"),
    ("roc_auc", "holed"),
    ("average_precision", "holed"),
    ("roc_auc", "two"),
    ("roc_auc", "one"),
    ("average_precision", "one"),
    ("mse", "numbers"),
    ("mae", "numbers"),
    ("rmse", "numbers"),
    ("r2", "numbers"),
    ("mse", "holes"),
    ("rmse", "holes"),
    ("r2", "holes"),
    ("r2", "far"),
    ("mae", "flat"),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_metrics_are_those_of_scikit_learn_however_rows_are_spread(ranks, world):
    for name, kind in CASES:
        out, y, masks = made(kind)
        found = ranks(world, scored, name, kind)
        for split in ("train", "val"):
            mask = masks[split]
            assert found[0][split] == pytest.approx(expected(name, kind, out[mask], y[mask]), abs=1e-9), (
                name,
                kind,
            )
        assert found[0]["test"] is None
        assert all(other == found[0] for other in found), "every rank stops at the same epoch only if so"


def row_error(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).abs().sum(1)


class Slope:
    """The slope of a line through all points: no mean of values a row, and a state that adds up."""

    higher_is_better = False

    def __call__(self, out: Tensor, y: Tensor) -> dict[str, Tensor]:
        x, y = out[:, 0].double(), y[:, 0]
        return {
            "n": torch.tensor(len(x)),
            "sums": torch.stack([x.sum(), y.sum(), (x * y).sum(), (x * x).sum()]),
        }

    def compute(self, state: dict[str, Tensor]) -> float | None:
        n, (x, y, xy, xx) = state["n"], state["sums"]
        return float((n * xy - x * y) / (n * xx - x * x)) if n else None


@pytest.mark.parametrize("world", [1, 3])
def test_a_metric_of_one_s_own(ranks, world):
    out, y, masks = made("numbers")
    found = ranks(world, scored, row_error, "numbers")
    for split in ("train", "val"):
        mask = masks[split]
        assert found[0][split] == pytest.approx(float(row_error(out, y)[mask].mean()))
    found = ranks(world, scored, Slope(), "numbers")
    mask = masks["val"]
    assert found[0]["val"] == pytest.approx(np.polyfit(out[mask][:, 0].double(), y[mask][:, 0], 1)[0])
    assert found[0]["test"] is None
    assert not metric(Slope(), "numbers", y).higher
    assert metric(row_error, "numbers", y).name == "row_error"


ALONE = Channel(None, "cpu")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (lambda out, y: (out - y).abs(), r"a value a row: 101; got the shape \[101, 3\]"),
        (lambda out, y: (out - y).abs().mean(), r"got the shape \[\]"),
        (lambda out, y: out @ y, "got RuntimeError"),
    ],
)
def test_a_metric_of_one_s_own_that_is_none(own, words):
    out, y, _ = made("numbers")
    how = metric(own, "numbers", y)
    with pytest.raises(ConfigError, match=words):
        how.scores(out, how.objective.target({"y": y}, slice(None)), {"val": torch.ones(N) > 0}, ALONE, "")


def test_a_metric_that_is_nan_chooses_no_epoch():
    out, y, _ = made("numbers")
    how = metric(lambda out, y: (out - y).sum(1) * NAN, "numbers", y)
    with pytest.raises(ModelError, match="val vertices to be a number; got nan"):
        how.scores(out, how.objective.target({"y": y}, slice(None)), {"val": torch.ones(N) > 0}, ALONE, "")


@pytest.mark.parametrize("name", ["roc_auc", "average_precision"])
def test_a_curve_of_one_class_is_none(name):
    out, y, _ = made("two")
    how = metric(name, "two", y)
    target = how.objective.target({"y": y}, slice(None))
    assert how.scores(out, target, {"val": y == 1}, ALONE, "scores") == {"val": None}


def test_r2_of_labels_that_are_all_the_same_is_scikit_learn_s():
    y = torch.full((N,), 3.5)
    for out in (y.clone(), torch.linspace(0, 1, N)):
        how = metric("r2", "numbers", y)
        found = how.scores(out, how.objective.target({"y": y}, slice(None)), {"val": y > 0}, ALONE, "scores")
        assert found["val"] == sk.r2_score(y, out)


def guessed(loss, y: Tensor) -> str:
    settings = Train()
    return metric_of(None, objective_of(loss, labels_of(y), settings, N), settings).name


def test_the_metric_where_none_is_named():
    own = nn.MSELoss(reduction="none")
    numbers, ids, bits = made("numbers")[1], made("multiclass")[1], made("multilabel")[1]
    for loss, y, name in (
        (None, ids, "accuracy"),
        (None, bits, "f1_micro"),
        ("mse", numbers, "rmse"),
        ("huber", numbers, "rmse"),
        ("mae", ids, "mae"),
        ("bce", bits.double(), "f1_micro"),
        ("cross_entropy", numbers.softmax(1), "accuracy"),
        (nn.CrossEntropyLoss(reduction="none"), ids, "accuracy"),
        (own, numbers, "loss"),
        (lambda out, y: own(out.squeeze(1), y), ids.float(), "loss"),
    ):
        assert guessed(loss, y) == name


@pytest.mark.parametrize(
    ("name", "loss", "y", "words"),
    [
        ("roc_auc", None, made("multiclass")[1], "got 5 classes"),
        ("average_precision", None, made("multiclass")[1], "got 5 classes"),
        ("accuracy", None, made("multilabel")[1], "f1_micro"),
        ("accuracy", "mse", made("numbers")[1], "rmse, mae or r2"),
        ("f1_macro", "mse", made("numbers")[1], "rmse, mae or r2"),
        ("nothing", None, made("one")[1], "'nothing'"),
    ],
)
def test_a_metric_that_does_not_suit_the_labels(name, loss, y, words):
    with pytest.raises(ConfigError, match=words):
        metric_of(name, objective_of(loss, labels_of(y), Train(), N), Train())


def own_loss(out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of the first columns, and something else of the others."""
    return F.cross_entropy(out[:, :C], y, reduction="none") + out[:, C:].square().sum(1)


@pytest.mark.parametrize("extra", [1, 3])
def test_columns_beyond_the_classes_are_never_scored_unasked(extra):
    _, y, masks = made("multiclass")
    out = torch.cat([torch.randn(N, C), 100 + torch.randn(N, extra)], 1)
    settings = Train()
    objective = objective_of(own_loss, labels_of(y), settings, N)
    with pytest.raises(ModelError, match=rf"5 columns for(.|\n)*got {C + extra} from(.|\n)*metric-columns"):
        metric_of("accuracy", objective, settings).check(out)
    guess = metric_of(None, objective, settings)
    guess.check(out)
    assert (guess.name, guess.fitted(out[:, :C]).name) == ("accuracy", "accuracy")
    assert (guess.fitted(out).name, guess.fitted(out).higher) == ("loss", False)
    assert guess.fitted((out, out)).name == "loss"
    assert guess.fitted(out).labels(out) is None, "an argmax over all columns would be no class"
    told = metric_of(None, objective, Train(metric_columns=tuple(range(C))))
    told.check(out)
    target = objective.target({"y": y}, slice(None))
    found = told.scores(out, target, masks, ALONE, "scores")
    mask = masks["val"]
    assert found["val"] == pytest.approx(float((out[mask, :C].argmax(1) == y[mask]).float().mean()))
    with pytest.raises(ModelError, match="to name columns of the output"):
        metric_of(None, objective, Train(metric_columns=(9,))).check(out)
    with pytest.raises(ModelError, match="one tensor from the model"):
        metric_of("accuracy", objective, settings).check((out, out))


def test_a_loss_that_takes_all_columns_as_classes_says_what_they_are():
    _, y, _ = made("multiclass")
    out = torch.randn(N, C + 2)
    for loss in (None, nn.CrossEntropyLoss(reduction="none"), nn.NLLLoss(reduction="none")):
        metric_of(None, objective_of(loss, labels_of(y), Train(), N), Train()).check(out)


@pytest.mark.parametrize("name", ["mse", "mae", "rmse", "r2"])
def test_a_metric_of_numbers_is_not_one_of_class_scores(name):
    """Scores of 5 classes minus a class id: a number without sense, or with r2 a RuntimeError of torch."""
    _, y, _ = made("multiclass")
    for loss in (None, nn.CrossEntropyLoss(reduction="none")):
        scored = metric_of(name, objective_of(loss, labels_of(y), Train(), N), Train())
        with pytest.raises(ModelError, match=rf"1 column for the metric {name}, (.|\n)* got {C}"):
            scored.check(torch.randn(N, C))


def test_labels_that_scores_stand_for():
    for kind in ("multiclass", "both", "multilabel", "numbers"):
        out, y, _ = made(kind)
        found = metric(None, kind, y).labels(out)
        if kind == "numbers":
            assert found is None
        else:
            assert found.shape == y.shape
            assert set(found.unique().tolist()) <= set(range(-1, C))
            assert (0 in found) == (kind != "both")


@pytest.mark.parametrize("name", ["roc_auc", "average_precision", "r2", "rmse"])
def test_a_score_that_is_no_number_is_refused_and_no_traceback(name):
    numbers = name in ("r2", "rmse")
    y = torch.linspace(0, 1, N) if numbers else torch.arange(N) % 2
    out = torch.linspace(-1, 1, N)[:, None].clone()
    out[3] = math.nan
    settings = Train(loss="mse" if numbers else "auto")
    how = metric_of(name, objective_of(None, labels_of(y), settings, N), settings)
    with pytest.raises(ModelError, match=f"{name} of the val vertices to be a number; got nan"):
        how.scores(out, how.objective.target({"y": y}, slice(None)), {"val": y == y}, ALONE, "scores")


class Ratio:
    """Of what a split has none of."""

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.tensor([float((out.argmax(1) == y).sum()), float(len(y))])

    def compute(self, state: Tensor) -> float:
        return float(state[0]) / float(state[1] - 1)


def test_an_own_metric_of_no_vertices_is_none_and_one_that_fails_is_said():
    out, y = torch.eye(3)[torch.arange(N) % 3], torch.arange(N) % 3
    how = metric_of(Ratio(), objective_of(None, labels_of(y), Train(), N), Train())
    target = how.objective.target({"y": y}, slice(None))
    found = how.scores(out, target, {"val": y >= 0, "test": y < 0}, ALONE, "scores")
    assert found == {"val": N / (N - 1), "test": None}
    one = torch.arange(N) == 4
    with pytest.raises(ConfigError, match="got ZeroDivisionError"):
        how.scores(out, target, {"val": one}, ALONE, "scores")


def test_a_loss_of_probabilities_is_not_scored_as_one_of_scores():
    out, y = torch.full((N, 1), 0.4), torch.arange(N) % 2
    for loss, name in (
        (lambda out, y: nn.functional.binary_cross_entropy(out[:, 0], y.float(), reduction="none"), "loss"),
        (nn.BCEWithLogitsLoss(reduction="none"), "accuracy"),
    ):
        how = metric_of(None, objective_of(loss, labels_of(y), Train(), N), Train())
        assert how.fitted(out).name == name
