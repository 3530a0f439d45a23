"""What a run learns by: a user's loss, optimizer and scheduler, clipping, bf16; each refusal with its fix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch_geometric.data import Data

from kagome import Trainer
from kagome.errors import ConfigError
from kagome.objective.optimizers import step_scheduler
from kagome.report.run_data import read_folder
from training import FEATURES, QUIET, VERTICES, Gcn, graph, losses, model, plain_losses, settings


def run(mine: nn.Module, data: Data | None = None, epochs: int = 3, **given) -> Trainer:
    train = given.pop("train", settings())
    with Trainer(mine, graph() if data is None else data, train=train, report=QUIET, **given) as trainer:
        trainer.summary = trainer.fit(epochs)
    return trainer


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_any_optimizer_with_a_plain_step(kind):
    found = losses(run(model("gcn"), epochs=10, optimizer=lambda params: kind(params, lr=0.01)))
    assert found[-1] < found[0]


def test_an_optimizer_over_the_user_s_own_choice_of_parameters():
    mine = model("gcn")
    first = mine.first.lin.weight.detach().clone()
    run(mine, optimizer=lambda _: torch.optim.SGD(mine.last.parameters(), lr=0.1))
    assert torch.equal(mine.first.lin.weight, first)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.LBFGS, "LBFGS, which runs the model several times within a step"),
        (
            torch.optim.SGD([torch.zeros(1)], lr=0.1),
            r"callable\(params\) -> Optimizer; got a SGD",
        ),
        (lambda params: None, "got one that gives NoneType"),
    ],
)
def test_optimizers_that_are_refused(optimizer, words):
    with pytest.raises(ConfigError, match=words):
        run(Gcn(), optimizer=optimizer)


def test_a_scheduler_steps_once_an_epoch():
    seen = []

    def make(optimizer):
        seen.append(optimizer)
        return StepLR(optimizer, step_size=1, gamma=0.5)

    run(Gcn(), epochs=3, scheduler=make)
    assert seen[0].param_groups[0]["lr"] == pytest.approx(0.01 / 8)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_scheduler_is_told_the_loss_or_the_validation_metric(mode):
    """``step()`` without a number was a TypeError."""
    told = []

    class Plateau(ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            told.append(metrics)
            super().step(metrics)

    trainer = run(
        Gcn(),
        epochs=4,
        scheduler=lambda optimizer: Plateau(optimizer, mode=mode),
        train=settings(eval_every=2),
    )
    metrics = [r.val_metric for r in trainer.records if r.val_metric is not None]
    assert told == (losses(trainer) if mode == "min" else metrics)
    assert len(metrics) == 2


class Rises(nn.Module):
    """Gives a number a vertex that training pushes up; targets are 0, so errors rise with it."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.ones(1))

    def forward(self, x, edge_index):
        return self.level.expand(x.size(0), 1)


def numbers() -> Data:
    data = graph()
    data.y = torch.zeros(VERTICES)
    return data


def rising(metric="rmse", **given) -> Trainer:
    given = {"train": settings(**given.pop("train", {}))} | given
    # An ascent: the first epoch is the best by each error, and each next one is worse.
    ascent = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1, maximize=True)}
    return run(Rises(), numbers(), epochs=5, loss="mse", metric=metric, **ascent, **given)


def distance(out, y):
    return (out.squeeze(1) - y).abs()


distance.higher_is_better = False


@pytest.mark.parametrize("metric", ["mse", "mae", "rmse", "loss", distance])
def test_of_errors_the_least_is_the_best(metric):
    trainer = rising(metric)
    found = [record.val_metric for record in trainer.records]
    assert found == sorted(found)
    assert len(set(found)) == 5
    assert trainer.summary["best_epoch"] == trainer.summary["weights_epoch"] == 1
    assert trainer.summary["val_metric"] == found[0]
    assert [record.best_epoch for record in trainer.records] == [1] * 5


def test_of_scores_the_most_is_the_best():
    assert rising(lambda out, y: distance(out, y)).summary["best_epoch"] == 5


@pytest.mark.parametrize("metric", ["mae", distance])
def test_patience_waits_for_an_error_to_fall(metric):
    assert len(rising(metric, train={"patience": 2}).records) == 3


def test_a_plateau_of_errors_is_told_the_error_and_lowers_the_rate():
    told = []

    class Plateau(ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            told.append(metrics)
            super().step(metrics)

    trainer = rising("mae", scheduler=lambda optimizer: Plateau(optimizer, mode="min", patience=1))
    assert told == [record.val_metric for record in trainer.records]
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    with pytest.raises(ConfigError, match="a metric of which less is better"):
        rising("mae", scheduler=lambda optimizer: Plateau(optimizer, mode="max"))


def test_a_plateau_without_validation_vertices_is_told_the_loss_or_refused():
    loss = torch.ones(()).item()
    for mode in ("min", "max"):
        weight = nn.Parameter(torch.ones(1))
        plateau = ReduceLROnPlateau(torch.optim.SGD([weight], 0.1), mode=mode, patience=0)
        if mode == "max":
            with pytest.raises(ConfigError, match="no vertex validates"):
                step_scheduler(plateau, loss, None, higher=True)
            continue
        step_scheduler(plateau, loss, None, higher=False, seen=False)
        assert plateau.last_epoch == 0
        for _ in range(2):
            step_scheduler(plateau, loss, None, higher=False)
        assert plateau.get_last_lr() == [pytest.approx(0.01)]


@pytest.mark.parametrize(
    ("metric", "best"), [("rmse", 1), (distance, 1), (lambda *given: distance(*given), 5)]
)
def test_a_run_without_a_summary_tells_its_best_epoch(tmp_path, metric, best):
    """It was the epoch with the largest metric, also where that is an error."""
    rising(metric, out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert read_folder(tmp_path / "run").summary["best_epoch"] == best


def test_a_scheduler_that_steps_nothing():
    with pytest.raises(ConfigError, match=r"callable\(optimizer\) that gives an object with a step\(\)"):
        run(Gcn(), scheduler=lambda optimizer: None)


def test_clipping_bounds_the_whole_gradient():
    norms = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
            return super().step(closure)

    for clip in (None, 1e-2):
        run(model("gcn"), epochs=2, optimizer=lambda p: Watched(p, lr=0.1), train=settings(clip=clip))
    assert min(norms[:2]) > 2e-2
    assert norms[2:] == pytest.approx([1e-2, 1e-2], rel=1e-3)


def test_bf16_trains_and_keeps_float32_weights():
    mine = model("gcn")
    found = losses(run(mine, epochs=20, train=settings(amp="bf16")))
    plain = plain_losses(model("gcn"), graph(), 1)[0]
    assert found[-1] < 0.8 * found[0]
    assert found[0] != plain
    assert found[0] == pytest.approx(plain, rel=0.05)
    assert {p.dtype for p in mine.parameters()} == {torch.float32}


# Losses and metrics ------------------------------------------------------------------------------


def test_a_sum_and_a_value_a_row_are_the_same():
    none = run(model("gcn"), loss=nn.CrossEntropyLoss(reduction="none"))
    added = run(model("gcn"), loss=nn.CrossEntropyLoss(reduction="sum"))
    assert losses(none) == losses(run(model("gcn")))
    assert losses(added) == pytest.approx(losses(none), rel=1e-5)


def test_a_mean_is_what_it_is_in_plain_pytorch_on_one_rank():
    mean = run(model("gcn"), loss=nn.CrossEntropyLoss())
    assert losses(mean) == pytest.approx(losses(run(model("gcn"))), rel=1e-5)


def with_a_mean(channel):
    try:
        Trainer(model("gcn"), graph(), loss=nn.CrossEntropyLoss(), train=settings(), report=QUIET)
    except ConfigError as error:
        return str(error)
    return "trained"


def test_a_mean_is_refused_before_any_training_on_several_ranks(ranks):
    for said in ranks(2, with_a_mean):
        assert "it averages over the rows" in said
        assert 'CrossEntropyLoss(reduction="none")' in said


class OneColumn(nn.Module):
    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.conv, self.flat = pyg.SAGEConv(FEATURES, 1), flat

    def forward(self, x, edge_index):
        out = self.conv(x, edge_index)
        return out.squeeze(1) if self.flat else out


def two_classes() -> Data:
    data = graph()
    data.y = data.y % 2
    return data


@pytest.mark.parametrize("flat", [True, False])
def test_two_classes_in_one_column_have_a_default_loss_and_both_metrics(flat):
    for metric in ("accuracy", "roc_auc"):
        summary = run(OneColumn(flat), two_classes(), epochs=30, train=settings(metric=metric)).summary
        assert summary["metric_name"] == metric
        assert 0.6 < summary["test_metric"] <= 1


def test_a_mean_of_the_model_s_own_shape_is_that_of_one_value_a_row():
    """Made-up rows with a column a class do not fit it."""

    def trained(reduction):
        loss = lambda out, y: F.binary_cross_entropy_with_logits(  # noqa: E731
            out.squeeze(1), y.float(), reduction=reduction
        )
        torch.manual_seed(0)
        return losses(run(OneColumn(flat=False), two_classes(), loss=loss))

    assert trained("mean") == pytest.approx(trained("none"), rel=1e-5)


def test_binary_labels_with_a_column_a_class_and_roc_auc():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(FEATURES, 2)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    summary = run(Two(), two_classes(), epochs=30, train=settings(metric="roc_auc")).summary
    assert 0.6 < summary["val_metric"] <= 1


def test_metrics_that_do_not_suit_the_labels():
    with pytest.raises(ConfigError, match="two classes or several labels for roc_auc; got 4"):
        run(Gcn(), train=settings(metric="roc_auc"))


@pytest.mark.parametrize("metric", ["auto", "roc_auc"])
@pytest.mark.parametrize("own_loss", [True, False])
def test_several_labels_a_vertex(metric, own_loss):
    data = graph()
    data.y = torch.stack([data.y % 2, data.y // 2, torch.ones(VERTICES, dtype=torch.long), data.y == 3], 1)
    loss = nn.BCEWithLogitsLoss(reduction="none") if own_loss else None
    given = {} if loss is None else {"loss": lambda out, y: loss(out, y.float())}
    trainer = run(Gcn(), data, epochs=10, train=settings(metric=metric), **given)
    # Of a function nobody knows whether it takes scores or probabilities: then no metric is guessed.
    guessed = "loss" if own_loss else "f1_micro"
    assert trainer.summary["metric_name"] == (guessed if metric == "auto" else "roc_auc")
    least = 0.0 if trainer.summary["metric_name"] == "loss" else 0.5
    assert least < trainer.summary["test_metric"] <= 1
    assert losses(trainer)[-1] < losses(trainer)[0]
    with pytest.raises(ConfigError, match="f1_micro"):
        run(Gcn(), data, train=settings(metric="accuracy"))
