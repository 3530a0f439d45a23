"""``net.train_step``: one loop for a graph axis and for a pipe axis, compared with plain PyG."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import C, F, N, grads, graph
from torch import Tensor, nn
from torch_geometric.data import Data

import kagome
from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.sharding.train_step import values_of

LAYOUTS = {
    "graph": (2, {}),
    "pipe": (2, {"pipe": 2, "chunks": 2}),
    "chunks": (2, {"graph": 2, "chunks": 3}),
    "hybrid": (4, {"pipe": 2, "graph": 2, "chunks": 2}),
    "dealt": (2, {"pipe": 2, "stages_per_rank": 2, "chunks": 2}),
}


class Deep(nn.Module):
    """Four layers, of which the first and the last share a weight; stages are cut between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(F, 8)
        self.layers = nn.ModuleList([pyg.GCNConv(8, 8), pyg.SAGEConv(8, 8), pyg.GATConv(8, 8)])
        self.tied = nn.Linear(8, 8)
        self.last = nn.Linear(8, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.tied(self.first(x)).tanh()
        for layer in self.layers:
            h = h + layer(h, edge_index).tanh()
        return self.last(self.tied(h))


def deep() -> nn.Module:
    torch.manual_seed(5)
    return Deep().double()


def error(out: Tensor, y: Tensor, area: Tensor) -> tuple[Tensor, Tensor]:
    return (out - y) ** 2, area


def plain(steps: int) -> dict[str, Tensor]:
    """A plain loop on the whole graph: the weighted mean of squares, two backwards before each update."""
    data, model = graph(), deep()
    area = torch.linspace(0.0, 2.0, N, dtype=torch.float64)
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.05), {}
    for step in range(steps):
        for scale in (1.0, 0.5):
            values = (model(data.x, data.edge_index) - scale * data.y) ** 2
            loss = (values * area[:, None]).sum() / area.sum() / C
            loss.backward()
        found |= {f"{name} {step}": g for name, g in grads(model).items()} | {f"loss {step}": loss.detach()}
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return (
        found
        | {f"weight {n}": v.clone() for n, v in model.state_dict().items()}
        | {"scores": model(data.x, data.edge_index).detach()}
    )


def stepped(channel: Channel, settings: dict[str, Any], steps: int) -> tuple[dict[str, Any], bool]:
    """The same by ``train_step``; whether the model has all weights after ``close``."""
    data, model = graph(), deep()
    area = torch.linspace(0.0, 2.0, N, dtype=torch.float64)
    cut = kagome.Parallel(**settings, **({"cross_chunk": "exact"} if settings else {}))
    with kagome.shard(model, data, parallel=cut, log=str) as net:
        optimizer, found = torch.optim.Adam(net.parameters(), lr=0.05), {}
        for step in range(steps):
            for scale in (1.0, 0.5):
                y = net.place(scale * data.y)
                x = data.x if step else data.x.clone()  # by its values
                loss = net.train_step(x, data.edge_index, target=(y, area), loss=error)
            found |= {f"{name} {step}": g for name, g in grads(model).items()} | {f"loss {step}": loss}
            found[f"norm {step}"] = net.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        found |= {f"weight {n}": v.clone() for n, v in net.state_dict().items()}
        scores = net.gather(net.eval_step(data.x, data.edge_index))
    whole = all(torch.equal(found[f"weight {n}"], v) for n, v in model.state_dict().items())
    return found | ({} if scores is None else {"scores": scores}), whole


@pytest.mark.every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_those_of_the_whole_graph(ranks: Any, layout: str) -> None:
    """Each gradient is on the ranks of its stages, and equal there; losses and weights are on all."""
    world, settings = LAYOUTS[layout]
    expected, told = plain(2), ranks(world, stepped, settings, 2)
    everywhere = {name for name in expected if name.startswith(("loss", "norm", "weight"))}
    for rank, (found, whole) in enumerate(told):
        assert whole
        assert everywhere <= found.keys()
        assert ("scores" in found) == (rank == 0)
        for name, value in found.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert expected.keys() == set().union(*(found for found, _ in told))
    if settings.get("pipe", 1) > 1:
        first, last = ({n for n in found if n.startswith("first")} for found, _ in (told[0], told[-1]))
        assert first
        assert not last  # a rank has gradients of its own stages alone


class Normed(nn.Module):
    """A norm between two layers, and a forward that takes the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = pyg.GCNConv(F, 8), nn.BatchNorm1d(8), pyg.SAGEConv(8, C)

    def forward(self, data: Data) -> Tensor:
        return self.two(self.norm(self.one(data.x, data.edge_index)).relu(), data.edge_index)


def of_several_losses(channel: Channel | None) -> dict[str, Tensor]:
    """Another loss and other targets in each step, one with a mask, and buffers of a norm."""
    data = graph()
    torch.manual_seed(1)
    model = Normed().double()
    mask = torch.arange(N) % 3 > 0
    given: list[tuple[Any, Any]] = [
        (data.y, lambda out, y: (out - y) ** 2),
        ((data.y, mask), lambda out, y, some: ((out - y).abs(), some)),
        ((), lambda out: out.sum(1)),
    ]
    if channel is None:
        found = []
        for target, loss in given:
            values = loss(model(data), *((target,) if isinstance(target, Tensor) else target))
            if isinstance(values, tuple):
                values = values[0][values[1]]
            found.append(values.mean())
            found[-1].backward()
        state = model.state_dict()
    else:
        cut = kagome.Parallel(pipe=2, chunks=2, cross_chunk="exact")
        with kagome.shard(model, data, parallel=cut, log=str) as net:
            found = [net.train_step(data, target=target, loss=loss) for target, loss in given]
            state = net.state_dict()
    by_weight = {f"gradient of {name}": gradient for name, gradient in grads(model).items()}
    return {f"loss {n}": each.detach() for n, each in enumerate(found)} | state | by_weight


def test_other_losses_and_buffers(ranks: Any) -> None:
    expected = of_several_losses(None)
    told = ranks(2, of_several_losses)
    for found in told:
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=name)
    assert expected.keys() == set().union(*told)


def with_history(channel: Channel) -> list[float]:
    """Losses of GCN2 in two stages, whose chunks read rows of the steps before."""
    data = kagome.load("digits")
    torch.manual_seed(3)

    class Gcn2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
            self.layers = nn.ModuleList(pyg.GCN2Conv(16, 0.1, 0.5, n + 1) for n in range(4))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            h = start = self.first(x).relu()
            for layer in self.layers:
                h = layer(h, start, edge_index).relu()
            return self.last(h)

    model, losses = Gcn2(), []
    loss = nn.CrossEntropyLoss(reduction="none")
    with kagome.shard(model, data, parallel=kagome.Parallel(pipe=2, chunks=3), log=str) as net:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(25):
            losses.append(net.train_step(data.x, data.edge_index, target=data.y, loss=loss).item())
            optimizer.step()
            optimizer.zero_grad()
        right = (net.eval_step(data.x, data.edge_index).argmax(1) == net.place(data.y)).double().mean()
    return [*losses, float(right)]


def test_history_learns(ranks: Any) -> None:
    first, second = ranks(2, with_history)
    assert first == second
    *losses, right = first
    assert losses[-1] < 0.5 * losses[0]
    assert right > 0.8


STAGED = {"pipe": 2, "chunks": 2, "guard": False}


def losses_by_trainer(channel: Channel, settings: dict[str, Any]) -> list[float]:
    """The losses of epochs of a Trainer that probes nothing."""
    data, model = graph(), deep()
    data.train_mask = torch.ones(N, dtype=torch.bool)
    train = kagome.Train(epochs=5, lr=0.05, weight_decay=0.0, check=False, loss="mse")
    cut, report = kagome.Parallel(**STAGED, **settings), kagome.Report(progress=False)
    with kagome.Trainer(model, data, parallel=cut, train=train, report=report) as trainer:
        trainer.fit()
        return [record.loss for record in trainer.records]


def losses_by_loop(channel: Channel, settings: dict[str, Any]) -> list[float]:
    """The same of a loop of one's own."""
    data, model, losses = graph(), deep(), []
    with kagome.shard(model, data, parallel=kagome.Parallel(**STAGED, **settings), log=str) as net:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        for _ in range(5):
            by_row = nn.MSELoss(reduction="none")
            losses.append(net.train_step(data.x, data.edge_index, target=data.y, loss=by_row).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "settings",
    [{}, {"cross_chunk": "drop"}, {"codec_stage": "int8"}],
    ids=lambda settings: "-".join(settings),
)
def test_a_step_is_an_epoch_of_the_trainer(ranks: Any, settings: dict[str, Any]) -> None:
    trained = ranks(2, losses_by_trainer, settings)[0]
    for found in ranks(2, losses_by_loop, settings):
        torch.testing.assert_close(found, trained, rtol=1e-10, atol=1e-10)


def refusals(channel: Channel) -> dict[str, str]:
    """What a net in stages refuses before anything is sent, by what was tried."""
    data, by_row = graph(), nn.MSELoss(reduction="none")
    cut = kagome.Parallel(pipe=2, chunks=2, cross_chunk="exact")
    found = {}

    def tried(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except kagome.KagomeError as error:
            found[name] = str(error)

    tried("beside", lambda: kagome.shard(deep(), data, parallel=cut, beside=[nn.Linear(2, 2)]))
    tried("recompute", lambda: kagome.shard(deep(), data, parallel=cut, recompute=True))
    with kagome.shard(deep(), data, parallel=cut, log=str) as net:

        def step(x: Tensor, y: Tensor) -> Tensor:
            return net.train_step(x, data.edge_index, target=y, loss=by_row)

        tried("call", lambda: net(data.x, data.edge_index))
        tried("input", lambda: step(data.x * 2, data.y))
        tried("rows", lambda: step(data.x, data.y[:3]))
        tried("no_sync", net.no_sync)
        tried("copy", lambda: copy.deepcopy(net))
        # Each stage had rank 0 of its own part, so every stage wrote the checkpoint.
        assert (net.rank, net.ranks) == (channel.rank, 2)
        tried("check", lambda: kagome.check(net, data.x, data.edge_index))
        step(data.x, data.y)  # none of them did harm
        data.x.mul_(2)
        tried("changed", lambda: step(data.x, data.y))
    tried("closed", lambda: step(data.x, data.y))
    return found


def test_what_a_net_in_stages_refuses(ranks: Any) -> None:
    words = {
        "beside": "beside=[...]",
        "recompute": "recompute=True",
        "call": "use net.train_step",
        "input": "another value for 'x'",
        "rows": "shape [3, 3]",
        "no_sync": "several net.train_step",
        "copy": "net.state_dict()",
        "check": "a net of kagome.shard with graph= alone",
        "changed": "changed in place",
        "closed": "one that is closed",
    }
    for found in ranks(2, refusals):
        assert {name: words[name] in message for name, message in found.items()} == dict.fromkeys(words, True)


def averaged(channel: Channel, settings: dict[str, Any], columns: bool) -> str:
    data = graph()
    loss = (lambda out, y: ((out - y) ** 2).mean(0)) if columns else nn.MSELoss()
    try:
        with kagome.shard(deep(), data, parallel=kagome.Parallel(**settings), log=str) as net:
            net.train_step(data.x, data.edge_index, target=data.y, loss=loss)
    except kagome.KagomeError as error:
        return str(error)
    return "nothing"


@pytest.mark.every
@pytest.mark.parametrize(("columns", "words"), [(False, "one number"), (True, "one for each column")])
@pytest.mark.parametrize("settings", [{}, {"pipe": 2, "chunks": 2}], ids=["graph", "pipe"])
def test_a_loss_that_averages_by_itself_is_refused(
    ranks: Any, settings: dict[str, Any], columns: bool, words: str
) -> None:
    said = ranks(2, averaged, settings, columns, spoils=True)
    assert any(words in message for message in said)
    assert "nothing" not in said


@pytest.mark.parametrize(
    ("loss", "fits"),
    [
        (lambda out, y: ((out - y) ** 2).mean(1), True),
        (lambda out, y: ((out - y) ** 2).mean(0), False),
        (lambda out, y: ((out - y) ** 2).sum(0) / 3, False),
        (lambda out, y: ((out - y) ** 2)[0:1].mean(1).expand(4), True),
    ],
)
def test_as_many_columns_as_rows_are_told_apart(loss: Any, fits: bool) -> None:
    out = torch.randn(4, 4, requires_grad=True)
    with nullcontext() if fits else pytest.raises(ModelError, match="one for each column, of 4 rows"):
        values_of(loss, out, [torch.zeros(4, 4)])
