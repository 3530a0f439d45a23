"""Callbacks, and which weights the model holds between two calls of fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.config import Parallel
from kagome.errors import CallbackError, ConfigError, ModelError
from training import QUIET, Gcn, graph, model, settings

MESHES = [(1, {}), (2, {}), (2, {"pipe": 2, "chunks": 2, "cross_chunk": "exact"})]


def made(mine: nn.Module | None = None, parallel: dict[str, Any] | None = None, **given: Any) -> Trainer:
    train = given.pop("train", settings(lr=2.0))
    mine = Gcn() if mine is None else mine
    return Trainer(
        mine,
        graph(next(mine.parameters()).dtype),
        parallel=Parallel(**(parallel or {})),
        train=train,
        report=QUIET,
        **given,
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Weights -----------------------------------------------------------------------------------------


def between_epochs(channel: Channel, parallel: dict[str, Any]) -> list[bool]:
    """An exponential average over a loop of fits, beside the weights of one fit seen by a callback."""

    class Seen:
        all_ranks = True

        def __init__(self) -> None:
            self.weights: list[dict[str, Tensor]] = []
            self.read: list[bool] = []

        def on_fit_start(self, trainer: Trainer) -> None:
            self.trainer = trainer

        def on_epoch_end(self, record: Any) -> None:
            read = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
            self.weights.append(self.trainer.last_weights())
            self.read.append(same(read, self.weights[-1]))

    seen, found = Seen(), []
    with made(model("gcn", 0.3), parallel, callbacks=[seen]) as whole:
        best = whole.fit(8)["best_epoch"]
        assert 0 < best < 8, "the test needs a best epoch before the last"
        found += seen.read
        found += [same(dict(whole.model.state_dict()), seen.weights[best - 1])]
        found += [
            same(whole.best_weights(), seen.weights[best - 1]),
            same(whole.last_weights(), seen.weights[7]),
        ]
    with made(model("gcn", 0.3), parallel) as trainer:
        for weights in seen.weights:
            values = trainer.fit(trainer.epoch + 1, restore_best=False)
            found += [values["weights_epoch"] == trainer.epoch]
            found += [same(dict(trainer.model.state_dict()), weights), same(trainer.last_weights(), weights)]
        found += [same(trainer.best_weights(), seen.weights[best - 1])]
    return found


@pytest.mark.parametrize(("world", "parallel"), MESHES)
def test_the_weights_of_each_epoch_can_be_had(ranks, world, parallel):
    assert all(all(found) for found in ranks(world, between_epochs, parallel))


def test_metrics_are_of_the_weights_that_are_left():
    data = graph()
    with made(model("gcn")) as trainer:
        for restore in (True, False):
            values = trainer.fit(8, restore_best=restore)
            right = (trainer.predict().argmax(1) == data.y)[data.test_mask].float().mean()
            assert values["test_metric"] == pytest.approx(float(right))
            assert values["weights_epoch"] == (values["best_epoch"] if restore else 8)
        assert "none is left" in " ".join(values["notes"])


def test_training_goes_on_with_weights_that_were_changed_in_between():
    """They were overwritten by those of the last epoch, where the best was another one."""
    with made(model("gcn"), train=settings(lr=0.0)) as trainer:
        trainer.fit(2)
        trainer._last = trainer.last_weights()  # as if the best epoch had been another one
        trainer._best.weights = trainer.best_weights()
        with torch.no_grad():
            trainer.model.last.lin.weight.fill_(0.25)
        values = trainer.fit(3, restore_best=False)
        assert bool((trainer.model.last.lin.weight == 0.25).all())
        assert "weights were changed since the last fit" in " ".join(values["notes"])


def change_on_one_rank(channel: Channel) -> str:
    with made(model("gcn")) as trainer:
        trainer.fit(2)
        if channel.rank == 1:
            trainer.model.last.bias.data.add_(1.0)
        with pytest.raises(ModelError) as caught:
            trainer.fit(3)
    return str(caught.value)


def test_weights_that_one_rank_alone_has_changed_are_refused(ranks):
    for said in ranks(2, change_on_one_rank):
        assert "last.bias on rank 1 with other values than on rank 0" in said


# Callbacks ---------------------------------------------------------------------------------------


class Notes:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.told.append(("start", trainer.epoch))

    def on_epoch_end(self, record: Any) -> None:
        self.told.append(("epoch", record.epoch))

    def on_checkpoint(self, path: Any) -> None:
        self.told.append(("checkpoint", path.name if (path / "place.json").exists() else None))

    def on_fit_end(self, summary: dict[str, Any]) -> None:
        self.told.append(("end", summary["epochs"]))


class NotesEverywhere(Notes):
    all_ranks = True


def heard(channel: Channel, folder: str, parallel: dict[str, Any]) -> tuple[list, list]:
    one, everywhere = Notes(), NotesEverywhere()
    train = settings(save_every=2)
    with made(callbacks=[one, everywhere], train=train, out=folder, parallel=parallel) as trainer:
        trainer.fit(3)
        trainer.fit(4)
    return one.told, everywhere.told


@pytest.mark.parametrize(("world", "parallel"), [*MESHES, (2, {"max_age": 1})])
def test_callbacks_are_told_in_order_on_rank_0_or_on_all(ranks, tmp_path, world, parallel):
    saved = [("checkpoint", f"epoch-{epoch:06d}") for epoch in range(5)]
    epochs = [("epoch", epoch) for epoch in range(5)]
    first = [("start", 0), epochs[1], epochs[2], saved[2], epochs[3], saved[3], ("end", 3)]
    told = [*first, ("start", 3), epochs[4], saved[4], ("end", 4)]
    found = ranks(world, heard, str(tmp_path), parallel)
    assert found == [(told, told), *[([], told)] * (world - 1)]


class Fails:
    def __init__(self, event: str, everywhere: bool, rank: int) -> None:
        self.all_ranks = everywhere

        def fail(argument: Any) -> None:
            if torch.distributed.get_rank() == rank:
                raise ZeroDivisionError("no divisor")

        setattr(self, event, fail)


def fail(channel: Channel, event: str, everywhere: bool, rank: int, folder: str) -> tuple[str, str]:
    with (
        pytest.raises(Exception) as caught,  # noqa: PT011
        made(callbacks=[Fails(event, everywhere, rank)], out=folder, train=settings(save_every=1)) as trainer,
    ):
        trainer.fit(3)
    return type(caught.value).__name__, f"{caught.value} {getattr(caught.value, '__notes__', '')}"


@pytest.mark.parametrize(
    ("event", "everywhere", "rank"),
    [
        ("on_fit_start", False, 0),
        ("on_epoch_end", False, 0),
        ("on_checkpoint", True, 1),
        ("on_fit_end", True, 1),
    ],
)
def test_what_a_callback_raises_ends_all_ranks_with_its_name(ranks, tmp_path, event, everywhere, rank):
    found = ranks(2, fail, event, everywhere, rank, str(tmp_path))
    for place, (kind, text) in enumerate(found):
        assert kind == ("ZeroDivisionError" if place == rank else "CallbackError")
        assert f"Fails.{event}" in text
        assert "no divisor" in text


class Spoils:
    """Changes weights on rank 0 alone, in a way that torch does not count."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self.model = trainer.model

    def on_epoch_end(self, record: Any) -> None:
        self.model.last.bias.data.add_(1.0)


class Asks:
    """Asks one rank alone for what all do together."""

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.evaluate("val")


def refused(channel: Channel, kind: type) -> str:
    with pytest.raises(CallbackError) as caught, made(callbacks=[kind()]) as trainer:
        trainer.fit(3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            Spoils,
            "callback Spoils.on_epoch_end to leave the run as it is; got a change of the model,",
        ),
        (Asks, "callback Asks"),
    ],
)
def test_what_rank_0_alone_cannot_do_is_refused_on_all(ranks, kind, said):
    for found in ranks(2, refused, kind):
        assert said in found


class Clamps:
    """Changes weights on all ranks after each epoch, in a way that torch does not count."""

    all_ranks = True

    def on_fit_start(self, trainer: Trainer) -> None:
        self.model = trainer.model

    def on_epoch_end(self, record: Any) -> None:
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class Plain(nn.Module):
    """Nothing but a layer: its evaluations are the next epoch's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = pyg.GCNConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(x, edge_index)


def clamped(channel: Channel) -> list[float | None]:
    torch.manual_seed(3)
    with made(Plain().double(), callbacks=[Clamps()]) as trainer:
        trainer.fit(6)
        return [record.loss for record in trainer.records]


def test_weights_changed_by_a_callback_are_those_of_the_next_epoch(ranks):
    torch.manual_seed(3)
    mine, data = Plain().double(), graph()
    optimizer = torch.optim.Adam(mine.parameters(), lr=2.0, weight_decay=5e-4)
    expected = []
    for _ in range(6):
        optimizer.zero_grad()
        out = mine(data.x.double(), data.edge_index)
        loss = nn.functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
        for parameter in mine.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    for world in (1, 2):
        for found in ranks(world, clamped):
            assert found == pytest.approx(expected, rel=1e-10)


class Typo(Notes):
    def on_epoch_ended(self, record: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([object()], "a callback with some of on_fit_start, .*; got none of them"),
        ([Typo()], "got on_epoch_ended"),
        ([Notes], "objects in callbacks=.*; got the class Notes"),
        (Notes(), "callbacks=.* to be a list of objects; got Notes"),
    ],
)
def test_what_is_no_callback_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        made(callbacks=given)


# All ranks train by one rule ---------------------------------------------------------------------


class Turns:
    """Changes what the optimizer does, on rank 0 alone."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_fit_start(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_epoch_end(self, record: Any) -> None:
        optimizer = self.trainer.optimizer
        if self.way == "rate":
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        elif self.way == "cleared":
            optimizer.state.clear()
        elif self.way == "written":
            next(iter(optimizer.state.values()))["exp_avg"].data.zero_()
        elif self.way == "scheduler":
            self.trainer.scheduler.gamma = 0.25
        else:  # what only looks leaves all as it is
            optimizer.zero_grad()
            assert optimizer.state_dict()["state"]


class TurnsByRank(Turns):
    all_ranks = True

    def on_epoch_end(self, record: Any) -> None:
        self.trainer.optimizer.param_groups[0]["lr"] = 0.1 * (1 + torch.distributed.get_rank())


def turned(channel: Channel, ways: list[Turns]) -> list[str]:
    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    said = []
    for way in ways:
        try:
            with made(Plain(), callbacks=[way], scheduler=halving) as trainer:
                trainer.fit(2)
            said.append("")
        except (CallbackError, ConfigError) as error:
            said.append(str(error))
    return said


def test_a_callback_of_rank_0_may_not_turn_the_optimizer_of_that_rank_alone(ranks):
    """Ranks drifted apart in silence: it halved the rate of rank 0."""
    ways = [Turns(way) for way in ("rate", "cleared", "written", "scheduler", "looks")]
    for found in ranks(2, turned, [*ways, TurnsByRank("rate")]):
        assert ["a change of the optimizer, which all ranks share" in text for text in found[:3]] == [
            True
        ] * 3
        assert "a change of the scheduler, which all ranks share" in found[3]
        assert found[4] == ""
        assert "param_groups[0]['lr']: 0.1 on rank 0 and 0.2 on rank 1" in found[5]


class Own:
    """A loss and a metric, by rank."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y, reduction="none") * self.factor


def unlike(channel: Channel) -> list[str]:
    rank, said = channel.rank, []
    optim, rates = torch.optim, torch.optim.lr_scheduler

    def drifts(optimizer: torch.optim.Optimizer) -> Any:
        return rates.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + rank * epoch))

    given: list[dict[str, Any]] = [
        {"optimizer": lambda params: optim.SGD(params, lr=0.1 * (1 + rank))},
        {"optimizer": lambda params: (optim.SGD, optim.Adam)[rank](params, lr=0.1)},
        {"scheduler": None if rank else lambda optimizer: rates.ExponentialLR(optimizer, 0.5)},
        {"scheduler": lambda optimizer: rates.StepLR(optimizer, 5 + rank)},
        {"scheduler": drifts},
        {"loss": Own(1.0 + rank)},
        {"loss": (lambda out, y: out.sum(1), lambda out, y: out.sum(1) * 2)[rank]},
        {"loss": ("mse", Own(1.0))[rank]},
        {"metric": (lambda out, y: y == 1, lambda out, y: y == 2)[rank]},
    ]
    for values in given:
        try:
            with made(Plain(), **values) as trainer:
                trainer.fit(2)
            said.append("")
        except (ConfigError, ModelError) as error:
            said.append(str(error))
    with made(Plain()) as trainer:
        trainer.fit(1)
        trainer.optimizer.param_groups[0]["lr"] = 0.1 + rank
        with pytest.raises(ConfigError) as caught:
            trainer.fit(2)
    return [*said, str(caught.value)]


def test_ranks_that_would_train_by_different_rules_are_refused(ranks):
    """Nobody noticed, and the weights of ranks went apart."""
    words = [
        "param_groups[0]['lr']: 0.1 on rank 0 and 0.2 on rank 1",
        "the optimizer: SGD on rank 0 and Adam on rank 1",
        "the scheduler: ExponentialLR on rank 0 and none on rank 1",
        "the scheduler's step_size: 5 on rank 0 and 6 on rank 1",
        "on rank 0 and 0.",  # the rate, once both have stepped
        "the loss of made-up rows: ",
        "the loss: python:",
        "the loss: 'mse' on rank 0 and python:",
        "the metric: python:",
        "param_groups[0]['lr']: 0.1 on rank 0 and 1.1 on rank 1",
    ]
    for found in ranks(2, unlike):
        assert [word in text for word, text in zip(words, found, strict=True)] == [True] * 10, found
