"""Losses that keep state, write to their output or have no gradient: as plain PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.config import Parallel
from kagome.errors import ConfigError, KagomeError, ModelError
from kagome.objective.loss_state import unmoved
from training import QUIET, graph, settings

Own = Callable[[Tensor, Tensor], Tensor]
EPOCHS = 3
PIPE = {"pipe": 2, "chunks": 2, "cross_chunk": "exact"}
MESHES = [(1, {}), (2, {}), (2, {"pipe": 2, "chunks": 1}), (2, PIPE)]
CALLS = 0


def each(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(8, 8), pyg.SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index).tanh(), edge_index)


class Cut(Plain):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).detach()


class Counts:
    def __init__(self) -> None:
        self.n = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.n += 1
        return each(out, y) * self.n


class CountsOnClass:
    n = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        type(self).n += 1
        return each(out, y) * type(self).n


class Buffered(nn.Module):
    def __init__(self, *, within: bool) -> None:
        super().__init__()
        self.within = within
        self.register_buffer("n", torch.zeros(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        if self.within:
            self.n += 1
        else:
            self.n = self.n + 1
        return each(out, y) * self.n


class Running:
    """Divides by a running mean of what it has seen."""

    def __init__(self) -> None:
        self.mean = torch.ones(())

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        found = each(out, y) / self.mean
        self.mean = 0.5 * self.mean + 0.5 * each(out, y).detach().mean()
        return found


def of_closure() -> Own:
    kept, n = {"n": 0, "seen": [1]}, 0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal n
        n += 1
        kept["n"] += 1
        kept["seen"].append(n)
        return each(out, y) * (kept["n"] + n + len(kept["seen"]))

    return loss


def of_attribute() -> Own:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        loss.n = getattr(loss, "n", 0) + 1
        return each(out, y) * loss.n

    return loss


def of_global() -> Own:
    global CALLS
    CALLS = 0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return each(out, y) * CALLS

    return loss


def on_class() -> Own:
    CountsOnClass.n = 0
    return CountsOnClass()


def of_iterator() -> Own:
    numbers = iter(range(1, 100))
    return lambda out, y: each(out, y) * next(numbers)


def writes(out: Tensor, y: Tensor) -> Tensor:
    return out.exp_().sum(1) * 0.01


STATES: dict[str, Callable[[], Own]] = {
    "an attribute": Counts,
    "a class": on_class,
    "a buffer": lambda: Buffered(within=False),
    "a buffer in place": lambda: Buffered(within=True),
    "a closure": of_closure,
    "a function's attribute": of_attribute,
    "a global": of_global,
    "it writes to out": lambda: writes,
}


def model(kind: type[nn.Module] = Plain) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def by_hand(loss: Own) -> list[float]:
    mine, data, found = model(), graph(torch.float64), []
    optimizer = sgd(mine.parameters())
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        value = loss(mine(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask]).mean()
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


def run(loss: Any, parallel: dict[str, Any], kind: type[nn.Module] = Plain, **given: Any) -> list[Any]:
    with Trainer(
        model(kind),
        graph(torch.float64),
        loss=loss,
        optimizer=sgd,
        train=settings(),
        report=QUIET,
        parallel=Parallel(**parallel),
        **given,
    ) as trainer:
        trainer.fit(EPOCHS)
    return [record.loss for record in trainer.records]


def states(channel: Channel, parallel: dict[str, Any]) -> dict[str, Any]:
    """Of each kind of state, the losses or the error."""
    found: dict[str, Any] = {}
    for name, make in {**STATES, "a running mean": Running, "an iterator": of_iterator}.items():
        try:
            found[name] = run(make(), parallel, metric="loss")
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize(("world", "parallel"), MESHES)
def test_a_loss_that_keeps_state_is_called_as_often_as_in_plain_pytorch(ranks, world, parallel):
    """The checks before epoch 1 counted too: 5.784 was reported for 1.446."""
    expected = {name: by_hand(make()) for name, make in STATES.items()}
    for found in ranks(world, states, parallel):
        for name, values in expected.items():
            if "pipe" in parallel and name != "it writes to out":
                way = "once for each chunk" if parallel is PIPE else "on the last stage alone"
                assert f"a loss that is called {way}" in found[name], name
            else:
                assert found[name] == pytest.approx(values, rel=1e-9), name
        if world == 1 or "pipe" in parallel:
            assert "it keeps state that cannot be put back" in found["an iterator"]
        if world == 1:
            assert found["a running mean"] == pytest.approx(by_hand(Running()), rel=1e-9)
        else:
            assert "depends on the rows that it was given" in found["a running mean"]


def test_what_a_call_changes_is_put_back():
    """Generators and arrays as well."""
    draw, array = torch.Generator().manual_seed(1), torch.ones(2).numpy()

    def loss() -> Tensor:
        array[0] += 1
        return torch.rand(2, generator=draw) + torch.rand(2) + array.sum()

    before = torch.random.get_rng_state()
    with unmoved(loss) as moves:
        first = loss()
    with unmoved(loss):
        assert torch.equal(loss(), first)
    assert moves.moved
    assert array.tolist() == [1, 1]
    assert torch.equal(torch.random.get_rng_state(), before)
    with unmoved(each) as moves:
        each(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
    assert not moves.moved


def without(channel: Channel, parallel: dict[str, Any]) -> list[str]:
    """What is said of losses and models without a gradient."""
    said = []
    given: list[tuple[Any, type[nn.Module]]] = [
        (lambda out, y: each(out.detach(), y), Plain),
        (lambda out, y: out.argmax(1) != y, Plain),
        (lambda out, y: (out.argmax(1) != y).long(), Plain),
        ("cross_entropy", Cut),
        (each, Cut),
    ]
    for loss, kind in given:
        with pytest.raises((ConfigError, ModelError)) as caught:
            run(loss, parallel, kind)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


@pytest.mark.some(3)
@pytest.mark.parametrize(("world", "parallel"), MESHES)
def test_what_has_no_gradient_is_refused_before_it_trains_nothing(ranks, world, parallel):
    for said in ranks(world, without, parallel):
        for text in said[:3]:
            assert text.startswith(
                "ConfigError: expected loss(out, y) to have a gradient by the model's output; got a "
            )
        for text in said[3:]:
            assert text.startswith(
                "ModelError: expected the model's output to have a gradient by its weights; got an "
            )


def test_a_loss_of_weights_alone_trains_them():
    mine = model(Cut)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return each(out, y) + mine.first.lin_l.weight.square().sum()

    with Trainer(
        mine, graph(torch.float64), loss=loss, optimizer=sgd, train=settings(), report=QUIET
    ) as trainer:
        before = mine.first.lin_l.weight.detach().clone()
        trainer.fit(1)
    assert not torch.equal(mine.first.lin_l.weight, before)


OTHER = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"optimizer": lambda params: torch.optim.SGD(OTHER.parameters(), lr=0.1)},
            "SGD with 2, none of them the model's",
        ),
        (
            {
                "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(
                    torch.optim.SGD(OTHER.parameters(), lr=0.1), 1
                )
            },
            "StepLR of another SGD",
        ),
        ({"scheduler": lambda optimizer: optimizer}, "the optimizer itself"),
    ],
)
def test_what_would_turn_another_optimizer_is_refused(given, words):
    with pytest.raises(KagomeError, match=words):
        Trainer(Plain(), graph(), train=settings(), report=QUIET, **given)


def ignoring(channel: Channel, parallel: dict[str, Any]) -> list[tuple[list[Any], Any]]:
    found = []
    for label in (-100, 255):
        for own in (None, nn.CrossEntropyLoss(ignore_index=label, reduction="none")):
            data = graph(torch.float64)
            data.y[::5] = label
            with Trainer(
                model(),
                data,
                loss=own,
                optimizer=sgd,
                train=settings(ignore_index=label),
                report=QUIET,
                parallel=Parallel(**parallel),
            ) as trainer:
                summary = trainer.fit(EPOCHS)
            found.append(([record.loss for record in trainer.records], summary["metric_name"]))
    return found


@pytest.mark.parametrize(("world", "parallel"), [MESHES[0], MESHES[1], MESHES[3]])
def test_an_ignored_label_is_no_class(ranks, world, parallel):
    """-100 and 255 were taken for classes, and refused."""
    mine, data, expected = model(), graph(torch.float64), []
    data.y[::5] = -100
    optimizer = sgd(mine.parameters())
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = mine(data.x, data.edge_index)
        value = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    for found in ranks(world, ignoring, parallel):
        for losses, metric in found:
            assert losses == pytest.approx(expected, rel=1e-9)
            assert metric == "accuracy"
