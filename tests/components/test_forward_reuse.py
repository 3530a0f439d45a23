"""Ahead: evaluation shares the coming epoch's forward, and nothing else changes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.components.forward_reuse import Forward, ForwardReuse
from training import CLASSES, FEATURES, QUIET, graph, losses, settings

EPOCHS = 8


class Counts:
    steps = forwards = 0


class Plain(nn.Module):
    """Two layers, and one thing done otherwise in training."""

    def __init__(self, what: str = "nothing") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = pyg.GCNConv(FEATURES, 8), pyg.SAGEConv(8, CLASSES)
        self.norm = nn.BatchNorm1d(8) if what == "batch norm" else nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(()))
        self.what, self.counts = what, Counts()
        self.steps_taken, self.listed, self.kept = 0, [], torch.zeros(())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.counts.forwards += 1
        x = self.norm(self.first(x, edge_index)).relu()
        if self.training:
            self.counts.steps += 1  # an object of another kind: not seen from outside
            if self.what == "counter":
                self.steps_taken += 1
            if self.what == "list":
                self.listed.append(x.size(0))
            if self.what == "tensor":
                self.kept = torch.tensor(0.1 * self.counts.steps)
            if self.what == "buffer" or (self.what == "late buffer" and self.counts.steps > 4):
                self.seen += x.detach().mean() * 0 + 1
            if self.what == "dropout" or (self.what == "late dropout" and self.counts.steps > 4):
                x = F.dropout(x, 0.4)
            if self.what == "late noise" and self.counts.steps > 4:
                x = x * (1 + torch.rand(8))
        elif self.what == "mode":
            x = x * 1.0000001
        if self.what in ("list", "tensor") and self.counts.steps > 4:  # alike until then
            x = x * (1 + 0.1 * len(self.listed) + self.kept)
        return self.last(x, edge_index)


def run(channel: Channel, what: str, shares: bool, **given: Any) -> dict[str, Any]:
    train = settings(epochs=EPOCHS, **given)
    mine = Plain(what)
    with Trainer(mine, graph(), train=train, report=QUIET) as trainer:
        if not shares:
            trainer.engine.forward_reuse.allowed = False
        summary = trainer.fit()
        found = {
            "losses": losses(trainer),
            "metrics": [(record.train_metric, record.val_metric) for record in trainer.records],
            "weights": {key: value.numpy().tobytes() for key, value in mine.state_dict().items()},
            "summary": {key: summary[key] for key in ("test_metric", "val_metric", "best_epoch", "epochs")},
            "scores": trainer.predict().numpy().tobytes(),
        }
        again = trainer.fit(EPOCHS + 3)["test_metric"]
        found |= {"again": again, "all": losses(trainer)}
    return {"found": found, "forwards": mine.counts.forwards, "allowed": trainer.engine.forward_reuse.allowed}


SHARED = {"nothing"}
UNSHARED = {"batch norm", "counter", "buffer", "dropout", "mode", "list", "tensor"}
GIVEN_UP = {"late buffer", "late dropout", "late noise"}


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("world", "what"),
    [
        (world, what)
        for world in (1, 2, 3)
        for what in sorted(SHARED | GIVEN_UP | (UNSHARED if world < 3 else set()))
    ],
)
def test_it_changes_nothing_but_the_number_of_forwards(ranks, world, what):
    apart, shared = ranks(world, run, what, False), ranks(world, run, what, True)
    for one, other in zip(apart, shared, strict=True):
        assert other["found"] == one["found"]
        assert other["allowed"] is (what in SHARED)
        if what in SHARED:
            # The first evaluation of each fit compares; the last of each runs on its own.
            assert other["forwards"] == one["forwards"] - (EPOCHS - 2) - (3 - 2)
        elif what in UNSHARED:
            assert other["forwards"] == one["forwards"]
        else:
            assert other["forwards"] < one["forwards"]


def test_it_shares_where_evaluation_is_seldom_and_where_it_stops_early(ranks):
    for given in ({"eval_every": 3}, {"patience": 2, "lr": 0.5}):
        apart, shared = ranks(2, sparse, False, given), ranks(2, sparse, True, given)
        assert [one["found"] for one in shared] == [one["found"] for one in apart]
        assert shared[0]["forwards"] < apart[0]["forwards"]


def sparse(channel: Channel, shares: bool, given: dict[str, Any]) -> dict[str, Any]:
    return run(channel, "nothing", shares, **given)


def interrupted(channel: Channel, folder: str, shares: bool) -> dict[str, Any]:
    train = settings(epochs=EPOCHS, save_every=1)
    found: dict[str, Any] = {}
    for epochs, resume in ((5, None), (EPOCHS, folder)):
        mine = Plain()
        with Trainer(mine, graph(), train=train, report=QUIET, out=folder) as trainer:
            if not shares:
                trainer.engine.forward_reuse.allowed = False
            trainer.fit(epochs, resume=resume)
            found = {
                "weights": {key: value.numpy().tobytes() for key, value in mine.state_dict().items()},
                "losses": losses(trainer),
            }
    return found


def test_checkpoints_hold_the_weights_after_the_update(ranks, tmp_path: Path):
    apart = ranks(2, interrupted, str(tmp_path / "apart"), False)
    shared = ranks(2, interrupted, str(tmp_path / "shared"), True)
    whole = [one["found"]["losses"] for one in ranks(2, run, "nothing", True)]
    assert shared == apart
    assert [one["losses"] for one in shared] == whole


class Scheduler:
    """Writes to the weights, unseen by their versions."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.9)


@pytest.mark.parametrize("kind", ["own", "torch's"])
def test_only_torch_s_own_schedulers_let_it_share(kind):
    own = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)  # noqa: E731
    with Trainer(
        Plain(), graph(), train=settings(), report=QUIET, scheduler=Scheduler if kind == "own" else own
    ) as trainer:
        trainer.fit(5)
        assert trainer.engine.forward_reuse.allowed is (kind != "own")


def test_a_kept_forward_is_dropped_when_weights_change_and_when_its_epoch_does_not_come():
    mine = nn.Linear(2, 2)
    mine.register_buffer("seen", torch.zeros(()))
    ahead = ForwardReuse(mine)

    def kept() -> Forward:
        forward = Forward(3, torch.zeros(1), torch.zeros(()), True, ahead.state())
        ahead.keep(forward)
        return forward

    forward = kept()
    assert ahead.take(3) is forward
    assert ahead.take(3) is None, "taken once"
    kept()
    assert ahead.take(4) is None
    for change in (
        lambda: mine.weight.detach().add_(1),
        lambda: mine.seen.add_(1),
        lambda: mine.load_state_dict(mine.state_dict()),
        lambda: setattr(mine, "bias", nn.Parameter(torch.zeros(2))),
    ):
        kept()
        with torch.no_grad():
            change()
        assert ahead.take(3) is None
    kept()
    ahead.drop()
    assert ahead.take(3) is None


class Heated(Plain):
    """Scores over a temperature, which somebody else sets; in training alone if it is so."""

    def __init__(self, *, trained: bool = False) -> None:
        super().__init__()
        self.temperature, self.trained = 1.0, trained

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = super().forward(x, edge_index)
        return out / self.temperature if self.training or not self.trained else out


class Heats:
    """Sets it after an epoch, on all ranks."""

    all_ranks = True

    def on_fit_start(self, trainer: Trainer) -> None:
        self.model = trainer.model

    def on_epoch_end(self, record: Any) -> None:
        if record.epoch == 5:
            self.model.temperature = 3.0


def heated(*, shares: bool) -> list[float]:
    with Trainer(
        Heated(), graph(), train=settings(epochs=EPOCHS), report=QUIET, callbacks=[Heats()]
    ) as trainer:
        trainer.engine.forward_reuse.allowed = None if shares else False
        trainer.fit()
        return losses(trainer)


def test_a_number_that_a_callback_sets_is_the_next_epochs() -> None:
    assert heated(shares=True) == heated(shares=False)


def test_another_way_of_training_between_two_fits_is_found_out() -> None:
    def scores(*, shares: bool) -> list[float | None]:
        model = Heated(trained=True)
        with Trainer(model, graph(), metric="loss", train=settings(epochs=EPOCHS), report=QUIET) as trainer:
            trainer.engine.forward_reuse.allowed = None if shares else False
            trainer.fit(5, restore_best=False)
            model.temperature = 3.0
            trainer.fit(restore_best=False)
            return [record.val_metric for record in trainer.records]

    assert scores(shares=True) == scores(shares=False)
