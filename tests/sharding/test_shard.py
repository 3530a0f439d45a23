"""A loop of the user's own over ``kagome.shard`` gives what plain PyG gives on the whole graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch_geometric.nn as pyg
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data

import kagome
from kagome.comm.channel import Channel
from kagome.graph.partition import store
from kagome.graph.partition.partition import split_all
from kagome.graph.structure.validate import validate

N, F, C = 23, 5, 3
WORLDS = (1, 2, 3, 4)


def graph(edges: int = 90) -> Data:
    generator = torch.Generator().manual_seed(3)
    return Data(
        x=torch.randn(N, F, generator=generator, dtype=torch.float64),
        edge_index=torch.randint(0, N, (2, edges), generator=generator),
        edge_attr=torch.randn(edges, 2, generator=generator, dtype=torch.float64),
        y=torch.randn(N, C, generator=generator, dtype=torch.float64),
    )


class Net(nn.Module):
    """Two layers of a kind, with a norm between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make: dict[str, Callable[[int, int], nn.Module]] = {
            "gcn": pyg.GCNConv,
            "sage": pyg.SAGEConv,
            "gat": lambda i, o: pyg.GATConv(i, o, edge_dim=2),
            "gatv2": lambda i, o: pyg.GATv2Conv(i, o, edge_dim=2),
            "gine": lambda i, o: pyg.GINEConv(nn.Linear(i, o), edge_dim=2),
            "transformer": lambda i, o: pyg.TransformerConv(i, o, edge_dim=2),
        }
        self.edges = kind not in ("gcn", "sage")
        self.one, self.norm, self.two = make[kind](F, 8), nn.BatchNorm1d(8), make[kind](8, C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        more = (edge_attr,) if self.edges else ()
        h = self.norm(self.one(x, edge_index, *more)).relu()
        return self.two(h, edge_index, *more)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return Net(kind).double()


def whole(kind: str, steps: int) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses, last gradients and last output of a plain loop on the whole graph."""
    data, model = graph(), model_of(kind)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.edge_attr)
        loss = ((out - data.y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, out.detach()


def split(channel: Channel, kind: str, steps: int) -> tuple[list[float], dict[str, Tensor], Tensor | None]:
    """The same by :func:`kagome.shard`."""
    data, model = graph(), model_of(kind)
    with kagome.shard(model, data, log=str) as net:
        optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.05), []
        y = net.place(data.y)
        for _ in range(steps):
            optimizer.zero_grad()
            out = net(data.x, data.edge_index, data.edge_attr)
            loss = net.mean((out - y) ** 2)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        gathered = net.gather(out)
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gathered


@pytest.mark.some(1, each="kind")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gine", "transformer"])
def test_own_loop_is_that_of_the_whole_graph(ranks: Any, world: int, kind: str) -> None:
    losses, grads, out = whole(kind, 3)
    for rank, (found, mine, gathered) in enumerate(ranks(world, split, kind, 3)):
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)
        assert mine.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(mine[name], grad, rtol=1e-10, atol=1e-10, msg=name)
        assert (gathered is None) == (rank > 0)
    torch.testing.assert_close(ranks(world, split, kind, 3)[0][2], out, rtol=1e-10, atol=1e-10)


def both(ranks: Any, world: int, scenario: Callable[..., Any], *args: Any) -> None:
    """Run a scenario on one rank without a split, and on ``world`` ranks; all their results are equal."""
    expected = scenario(None, *args)
    for found in ranks(world, scenario, *args):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


class Plain:
    """The reference of a scenario: what a sharded model has, of the model itself on the whole graph."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mean = lambda v, weight=None: (
            v.mean() if weight is None else (v * weight).sum() / weight.expand_as(v).sum()
        )
        self.sum, self.max = torch.sum, torch.amax
        self.place = lambda value, rows="vertices", axis=0: value
        self.gather = lambda value, rows="vertices", axis=0: value.detach()
        self.read = lambda rows, ids: rows[ids]
        self.pairs = lambda rows, index: (rows[index[0]], rows[index[1]])
        self.rank, self.ranks = 0, 1

    def negatives(self, count: int, *, seed: int = 0, step: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        return torch.randint(N, (2, count), generator=generator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def net_of(channel: Channel | None, model: nn.Module, data: Data, **settings: Any) -> Any:
    return Plain(model) if channel is None else kagome.shard(model, data, log=str, **settings)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def accumulated(channel: Channel | None) -> dict[str, Tensor]:
    """Three backward passes, the second of two passes forward, without a step between them."""
    data, model = graph(), model_of("gine")
    with net_of(channel, model, data) as net:
        y = net.place(data.y)
        found = {}
        for turn in range(3):
            out = net(data.x, data.edge_index, data.edge_attr)
            loss = net.mean((out - y).abs())
            if turn == 1:
                loss = loss + net.sum(net(data.x * 2, data.edge_index, data.edge_attr) ** 2)
            loss.backward()
            found |= {f"{name} {turn}": g for name, g in grads(model).items()}
    return found


def penalized(channel: Channel | None) -> dict[str, Tensor]:
    """A term of weights alone beside the mean over rows, a weighted mean, and a maximum."""
    data, model = graph(), model_of("gat")
    with net_of(channel, model, data) as net:
        out = net(data.x, data.edge_index, data.edge_attr)
        area = net.place(torch.linspace(0.1, 2.0, N, dtype=torch.float64)).unsqueeze(1)
        loss = net.mean(out**2, weight=area) + 0.1 * net.max(out)
        loss = loss + 0.3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
    return grads(model) | {"loss": loss.detach()}


def by_input(channel: Channel | None) -> dict[str, Tensor]:
    """Gradients of rows that enter, by ``backward`` and by ``torch.autograd.grad``, and of a shared input."""
    data = graph()
    torch.manual_seed(5)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = pyg.SAGEConv(F, 8), pyg.GCNConv(8, 1)

        def forward(self, x: Tensor, edge_index: Tensor, scale: Tensor) -> Tensor:
            return self.two(self.one(x, edge_index).tanh() * scale, edge_index)

    model = Scaled().double()
    with net_of(channel, model, data) as net:
        x = net.place(data.x).clone().requires_grad_()
        scale = torch.linspace(0.5, 1.5, 8, dtype=torch.float64).requires_grad_()
        energy = net.sum(net(net.place(x), data.edge_index, scale) ** 2)
        force = torch.autograd.grad(energy, [x, scale], retain_graph=True)
        before = grads(model)
        energy.backward()
        gathered = [net.gather(t) for t in (force[0], x.grad)]
        rank = 0 if channel is None else channel.rank
        shown = gathered if rank == 0 else [torch.zeros(N, F, dtype=torch.float64)] * 2
    found = grads(model) | {"scale": scale.grad, "force of scale": force[1]}
    assert not before
    if rank == 0:
        _SHOWN[:] = shown
    return found | {"energy": energy.detach()}


_SHOWN: list[Tensor] = []


def shown_inputs(channel: Channel | None) -> dict[str, Tensor]:
    """The rows that rank 0 gathers in :func:`by_input`, sent to all ranks."""
    by_input(channel)
    if channel is None:
        return dict(zip(("force", "x"), map(torch.Tensor.clone, _SHOWN), strict=True))
    held = _SHOWN if channel.rank == 0 else [torch.zeros(N, F, dtype=torch.float64)] * 2
    return {n: channel.broadcast(t, action="test") for n, t in zip(("force", "x"), held, strict=True)}


def batched(channel: Channel | None) -> dict[str, Tensor]:
    """Four samples over one graph along a leading axis; another batch in each step."""
    data = graph()
    torch.manual_seed(5)

    class Batch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = pyg.GCNConv(F, 8), pyg.SAGEConv(8, C)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.two(self.one(x, edge_index).relu(), edge_index)

    model = Batch().double()
    with net_of(channel, model, data) as net:
        generator = torch.Generator().manual_seed(8)
        for _ in range(2):
            x = torch.randn(4, N, F, generator=generator, dtype=torch.float64)
            y = net.place(x[..., :C] * 2, axis=1)
            out = net(x, data.edge_index)
            net.mean((out - y) ** 2).backward()
        rows = net.gather(out, axis=1)
    return grads(model) | {"rows": of_first(channel, rows, (4, N, C))}


def of_first(channel: Channel | None, rows: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if channel is None:
        assert rows is not None
        return rows
    return channel.broadcast(torch.zeros(shape, dtype=torch.float64) if rows is None else rows, action="test")


def edge_scores(channel: Channel | None) -> dict[str, Tensor]:
    """A score an edge, a loss over edges, and a state an edge that each layer updates."""
    data = graph()
    torch.manual_seed(5)

    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2 * F + 2, 6), nn.Linear(2 * 4 + 6, 1)
            self.vertex = nn.Linear(F + 6, 4)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            source, target = edge_index
            state = self.first(torch.cat([x[source], x[target], edge_attr], dim=-1)).relu()
            sums = torch.zeros(x.size(0), 6, dtype=x.dtype).index_add(0, target, state)
            h = self.vertex(torch.cat([x, sums], dim=-1)).tanh()
            return self.second(torch.cat([h[source], h[target], state], dim=-1)).squeeze(-1)

    model = Edges().double()
    with net_of(channel, model, data) as net:
        wanted = net.place(data.edge_attr[:, 0] > 0, "edges").double()
        out = net(data.x, data.edge_index, data.edge_attr)
        loss = net.mean(functional.binary_cross_entropy_with_logits(out, wanted, reduction="none"))
        loss.backward()
        scores = net.gather(out, "edges")
    count = data.edge_index.size(1)
    return grads(model) | {"scores": of_first(channel, scores, (count,)), "loss": loss.detach()}


def rolled_out(channel: Channel | None) -> dict[str, Tensor]:
    """Three steps, each on the output of the one before, and one backward through all of them."""
    data = graph()
    torch.manual_seed(5)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = pyg.GraphConv(F, 8), pyg.GraphConv(8, F)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return x + 0.1 * self.two(self.one(x, edge_index).tanh(), edge_index)

    model = Step().double()
    with net_of(channel, model, data) as net:
        x, loss = net.place(data.x).clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
        h, y = x, net.place(data.y)
        for _ in range(3):
            h = net(h, data.edge_index) * 1.1
            loss = loss + net.mean((h[:, :C] - y) ** 2)
        loss.backward()
        by_x = net.gather(x.grad)
    return grads(model) | {"x": of_first(channel, by_x, (N, F)), "loss": loss.detach()}


def with_predictor(channel: Channel | None) -> dict[str, Tensor]:
    """A predictor beside the model, on its rows; two optimizers' worth of gradients, clipped."""
    data, model = graph(), model_of("sage")
    torch.manual_seed(6)
    predictor = nn.Sequential(nn.Linear(C, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    beside = {} if channel is None else {"beside": [predictor]}
    with net_of(channel, model, data, **beside) as net:
        y = net.place(data.y[:, :1])
        loss = net.mean(functional.huber_loss(predictor(net(data.x, data.edge_index)), y, reduction="none"))
        loss.backward()
    norm = nn.utils.clip_grad_norm_([*model.parameters(), *predictor.parameters()], 1e-3)
    return grads(model) | {f"predictor {n}": g for n, g in grads(predictor).items()} | {"norm": norm}


def frozen_and_thawed(channel: Channel | None) -> dict[str, Tensor]:
    """Layers that are frozen for a step, and trained in the next."""
    data, model = graph(), model_of("gcn")
    found = {}
    with net_of(channel, model, data) as net:
        for turn, learns in enumerate((False, True)):
            model.one.requires_grad_(learns)
            model.zero_grad()
            net.mean(net(data.x, data.edge_index) ** 2).backward()
            found |= {f"{name} {turn}": g for name, g in grads(model).items()}
    return found


def of_masked_rows(channel: Channel | None) -> dict[str, Tensor]:
    """A loss of few rows, which lie on few ranks."""
    data, model = graph(), model_of("gatv2")
    mask = torch.zeros(N, dtype=torch.bool)
    mask[[2, 3]] = True
    with net_of(channel, model, data) as net:
        out, own = net(data.x, data.edge_index, data.edge_attr), net.place(mask)
        loss = net.mean((out[own] - net.place(data.y)[own]) ** 2)
        loss.backward()
    return grads(model) | {"loss": loss.detach()}


SCENARIOS = (
    rolled_out,
    with_predictor,
    frozen_and_thawed,
    of_masked_rows,
    accumulated,
    penalized,
    by_input,
    shown_inputs,
    batched,
    edge_scores,
)


@pytest.mark.some(2, each="scenario")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_are_those_of_the_whole_graph(ranks: Any, world: int, scenario: Any) -> None:
    both(ranks, world, scenario)


def unsynced(channel: Channel, sync: bool) -> dict[str, Tensor]:
    """Two backward passes, the first of them in ``no_sync``, or not."""
    data, model = graph(), model_of("sage")
    with kagome.shard(model, data, log=str) as net:
        with nullcontext() if sync else net.no_sync():
            net.mean(net(data.x, data.edge_index) ** 2).backward()
            assert sync or not grads(model)
        net.mean(net(data.x, data.edge_index).abs()).backward()
    return grads(model)


@pytest.mark.parametrize("world", WORLDS)
def test_no_sync_puts_the_sum_off(ranks: Any, world: int) -> None:
    expected = ranks(world, unsynced, True)[0]
    for found in ranks(world, unsynced, False):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def dropped(channel: Channel) -> list[float]:
    """A curve with dropout, and evaluations between its steps."""
    data = graph()
    torch.manual_seed(5)
    model = pyg.GCN(F, 8, num_layers=3, out_channels=C, dropout=0.5).double()
    with kagome.shard(model, data, log=str, seed=4) as net:
        optimizer, found, y = torch.optim.SGD(net.parameters(), lr=0.1), [], net.place(data.y)
        for _ in range(4):
            net.train()
            loss = net.mean((net(data.x, data.edge_index) - y) ** 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                found += [loss.item(), net.mean(net(data.x, data.edge_index) ** 2).item()]
    return found


@pytest.mark.every
@pytest.mark.parametrize("world", [2, 3, 4])
def test_dropout_is_the_same_on_any_number_of_ranks(ranks: Any, world: int) -> None:
    (one,) = ranks(1, dropped)
    assert len(set(one)) == len(one)
    for found in ranks(world, dropped):
        torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-10)


def sent(channel: Channel, batch: int) -> int:
    """Messages of halo rows that one step begins."""
    data = graph()
    torch.manual_seed(5)
    model = pyg.GCN(F, 8, num_layers=2, out_channels=C).double()
    x = torch.randn(batch, N, F, dtype=torch.float64)
    with kagome.shard(model, data, log=str) as net:
        net.mean(net(x, data.edge_index) ** 2).backward()  # compares headers
        begun, start = [], type(net._mesh.graph).start

        def counted(self: Channel, rows: Tensor, request: Any) -> Any:
            begun.append(request.kind)
            return start(self, rows, request)

        with patch.object(type(net._mesh.graph), "start", counted):
            net.mean(net(x + 1, data.edge_index) ** 2).backward()
    return begun.count("halo")


def test_a_batch_is_one_message(ranks: Any) -> None:
    # Two layers, forward and backward each: rows are sent behind a weight, which learns.
    assert ranks(2, sent, 1) == ranks(2, sent, 4) == [4, 4]


def from_folder(channel: Channel, folder: str) -> dict[str, Tensor]:
    with kagome.shard(model := model_of("gat"), folder, log=str) as net:
        given = net.inputs
        out = net(given["x"], given["edge_index"], given["edge_attr"])
        net.mean((out - given["y"]) ** 2).backward()
    return grads(model)


@pytest.mark.parametrize("world", [2, 3])
def test_a_saved_partition_is_given_by_its_inputs(ranks: Any, world: int, tmp_path: Path) -> None:
    data, model = graph(), model_of("gat")
    clean, _ = validate(data)
    owner = torch.arange(N) % world
    meta, _ = store.measure(clean, owner, world, fingerprint="test", method="test", seed=0)
    store.save(split_all(clean, owner, world, fingerprint="test"), tmp_path, meta)
    ((model(data.x, data.edge_index, data.edge_attr) - data.y) ** 2).mean().backward()
    expected = grads(model)
    for found in ranks(world, from_folder, str(tmp_path)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def saved(channel: Channel, folder: str) -> str:
    data, model = graph(), model_of("gat")
    with kagome.shard(model, data, log=str) as net:
        out = net(data.x, data.edge_index, data.edge_attr)
        return str(net.save(out, folder))


@pytest.mark.parametrize("world", [1, 3])
def test_files_of_all_ranks_have_all_rows(ranks: Any, world: int, tmp_path: Path) -> None:
    found = torch.full((N, C), torch.nan, dtype=torch.float64)
    for path in ranks(world, saved, str(tmp_path / "out")):
        tensors = load_file(path)
        found[tensors["ids"]] = tensors["rows"]
    data = graph()
    expected = model_of("gat")(data.x, data.edge_index, data.edge_attr)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)


# What is refused ---------------------------------------------------------------------------------


def refused(channel: Channel, case: str) -> str:
    data, model = graph(), model_of("sage")
    outside = nn.Linear(F, F).double()
    try:
        if case == "settings":
            kagome.shard(model, data, parallel=kagome.Parallel(max_age=2, skip_drift=0.1))
        with kagome.shard(model, data, log=str) as net:
            if case == "twice":
                kagome.shard(model, data, log=str)
            elif case == "trainer":
                data.y = torch.zeros(N, dtype=torch.int64)
                data.train_mask = torch.ones(N, dtype=torch.bool)
                kagome.Trainer(model, data).fit(1)
            elif case == "rows":
                net(data.x, data.edge_index)
                net(data.x[:-1], data.edge_index)
            elif case == "rows at first":
                net(data.x[:-1], data.edge_index)
            elif case == "layers":
                model.more = nn.Linear(2, 2)
                net(data.x, data.edge_index)
            elif case == "grad":
                torch.autograd.grad(net.mean(net(data.x, data.edge_index)), list(model.parameters()))
            elif case == "outside":
                net(outside(net.place(data.x)), data.edge_index)
            elif case == "some rows":
                net.run(
                    lambda x, e, y: net.model(x, e) + y.sum(), data.x, data.edge_index, data.y[: 2 + net.rank]
                )
            elif case == "own number":
                net.run(lambda x, e: torch.full((2,), float(net.rank)), data.x, data.edge_index)
            elif case == "pairs":
                net.pairs(net(data.x, data.edge_index), torch.tensor([[0, 1], [2, N]]))
            elif case == "second":
                first, _ = net.pairs(net(data.x, data.edge_index), torch.tensor([[0], [1]]))
                x = net.place(data.x).clone().requires_grad_()
                first = net.read(net(net.place(x), data.edge_index), torch.tensor([3]))
                torch.autograd.grad(net.sum(first**2), x, create_graph=True)
            elif case == "empty":
                net.mean(net(data.x, data.edge_index)[:0])
        net(data.x, data.edge_index)
    except kagome.KagomeError as error:
        return str(error)
    return "nothing"


@pytest.mark.every
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("settings", "skip_drift=0.1"),
        ("twice", "on a part of a graph already"),
        ("trainer", "on a part of a graph already"),
        ("rows", "22 in shape"),
        ("rows at first", "x of shape [22, 5] for a layer"),
        ("layers", "the layers that the model had"),
        ("grad", "loss.backward()"),
        ("outside", "beside=[module]"),
        ("second", "one derivative of rows"),
        ("some rows", "shapes [2, 3], [3, 3]"),
        ("own number", "the same on all ranks"),
        ("pairs", "ids from 0 to 23"),
        ("empty", "a mean of one entry or more"),
        ("closed", "one that is closed"),
    ],
)
def test_refused(ranks: Any, case: str, words: str) -> None:
    for message in ranks(2, refused, case, spoils=True):
        assert words in message


def given_back(channel: Channel) -> bool:
    """Whether the model is the user's own again after ``close``, and the net had its names meanwhile."""
    data, model = graph(), model_of("gcn")
    before, keys = model(data.x, data.edge_index), list(model.state_dict())
    hooks = [len(module._forward_hooks) for module in model.modules()]
    net = kagome.shard(model, data, log=str)
    assert list(net.state_dict()) == keys
    assert all(one is other for one, other in zip(net.parameters(), model.parameters(), strict=True))
    average = torch.optim.swa_utils.AveragedModel(net)
    average.update_parameters(net)
    assert type(average.module) is type(model)
    net.eval()
    assert not model.training
    net.close()
    net.close()
    model.train()
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    return torch.equal(before, model(data.x, data.edge_index))


def test_the_model_is_given_back(ranks: Any) -> None:
    assert ranks(2, given_back) == [True, True]


def means(channel: Channel) -> tuple[int, list[float], list[torch.dtype]]:
    """How many sums over ranks three means take, their values and types."""
    with kagome.shard(model_of("gcn"), graph(), log=str) as net:
        rows = torch.arange(6.0, dtype=torch.float64) + 10 * channel.rank if channel.rank else torch.zeros(0)
        given = [rows.float(), rows.double().requires_grad_(), rows.long()]
        with patch.object(channel_of := net._mesh.graph, "all_reduce", wraps=channel_of.all_reduce) as summed:
            found = [net.mean(each) for each in given]
        return summed.call_count, [each.item() for each in found], [each.dtype for each in found]


def test_a_mean_is_one_sum_over_ranks(ranks: Any) -> None:
    for calls, found, kinds in ranks(2, means):
        assert calls == 3
        assert found == [12.5, 12.5, 12.5]
        assert kinds == [torch.float32, torch.float64, torch.get_default_dtype()]
