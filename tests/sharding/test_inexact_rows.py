"""How rows are exchanged in a loop of the user's own: codecs, late rows, samples, recomputation, bytes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from test_shapes import example
from test_shard import F, N, both, grads, graph, model_of, net_of, of_first
from torch import Tensor, nn
from torch.nn import functional

import kagome
from kagome.comm.channel import Channel

STEPS, LAYERS = 5, 15


def losses_by_trainer(channel: Channel, settings: dict[str, Any]) -> list[float]:
    """The losses of epochs of a Trainer that probes nothing."""
    data, model = graph(), model_of("gcn")
    data.train_mask = torch.ones(N, dtype=torch.bool)
    train = kagome.Train(epochs=STEPS, lr=0.05, weight_decay=0.0, check=False, loss="mse")
    cut = kagome.Parallel(guard=False, **settings)
    report = kagome.Report(progress=False)
    with kagome.Trainer(model, data, parallel=cut, train=train, report=report) as trainer:
        trainer.fit()
        return [record.loss for record in trainer.records]


def losses_by_loop(channel: Channel, settings: dict[str, Any], evaluates: bool = False) -> list[float]:
    """The same of a loop, with evaluations between forward and backward if asked for."""
    data, model = graph(), model_of("gcn")
    cut = kagome.Parallel(guard=False, **settings)
    with kagome.shard(model, data, parallel=cut, log=str) as net:
        y, losses = net.place(data.y), []
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = net.mean((net(data.x, data.edge_index) - y) ** 2)
            if evaluates:
                net.eval()
                with torch.no_grad():
                    net(data.x, data.edge_index)
                net(data.x, data.edge_index)  # the mode says that it is an evaluation
                net.train()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.every
@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "int4"},
        {"codec": "int2", "error_feedback": True},
        {"max_age": 1},
        {"max_age": 1, "sync_every": 2, "smoothing": 0.5, "codec": "bf16"},
        {"halo_sample": 0.5},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_a_step_exchanges_as_an_epoch_of_the_trainer(ranks: Any, settings: dict[str, Any]) -> None:
    trained = ranks(2, losses_by_trainer, settings)[0]
    found = ranks(2, losses_by_loop, settings)
    torch.testing.assert_close(found, [trained] * 2, rtol=1e-10, atol=1e-10)
    exact = ranks(2, losses_by_loop, {})[0]
    assert abs(trained[-1] - exact[-1]) > 1e-6  # the setting has acted
    if "max_age" in settings or "error_feedback" in settings:
        # Evaluation leaves no trace. With gradient it counts as a forward pass, which has other draws.
        assert ranks(2, losses_by_loop, settings, True) == found


def exact_where_it_is_said(channel: Channel, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Evaluation by mode and without gradient, and the first step of late rows."""
    data, model = graph(), model_of("gcn")
    with net_of(channel, model, data, parallel=kagome.Parallel(guard=False, **settings)) as net:
        net.train()
        for _ in range(2):
            net.mean(net(data.x, data.edge_index) ** 2).backward()
        net.eval()
        first = net.gather(net(data.x, data.edge_index))
        with torch.no_grad():
            second = net.gather(net(data.x, data.edge_index))
        x = net.place(data.x).clone().requires_grad_()
        (by_x,) = torch.autograd.grad(net.sum(net(net.place(x), data.edge_index) ** 2), x)
        third = net.gather(by_x)
    found = {"mode": first, "no_grad": second, "by x": third}
    shapes = ((N, 3), (N, 3), (N, F))
    return {n: of_first(channel, t, shape) for (n, t), shape in zip(found.items(), shapes, strict=True)} | {
        "model": torch.cat([v.double().view(-1) for v in model.state_dict().values()])
    }


@pytest.mark.parametrize("settings", [{"codec": "int4"}, {"max_age": 1}, {"halo_sample": 0.5}])
def test_evaluation_is_exact(ranks: Any, settings: dict[str, Any]) -> None:
    for found in ranks(2, exact_where_it_is_said, settings):
        model = model_of("gcn")
        places, flat = model.state_dict(), found["model"]
        sizes = [v.numel() for v in places.values()]
        for value, piece in zip(places.values(), flat.split(sizes), strict=True):
            value.copy_(piece.view(value.shape).to(value.dtype))
        model.eval()
        data = graph()
        x = data.x.clone().requires_grad_()
        out = model(x, data.edge_index)
        (by_x,) = torch.autograd.grad((out**2).sum(), x)
        for name, expected in (("mode", out), ("no_grad", out), ("by x", by_x)):
            torch.testing.assert_close(found[name], expected.detach(), rtol=1e-10, atol=1e-10, msg=name)


class Hop(nn.Module):
    """One sum over neighbours between two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.hop, self.two = nn.Linear(F, F), pyg.SimpleConv(aggr="sum"), nn.Linear(F, F)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.two(self.hop(self.one(x), edge_index).tanh())


def rolled(channel: Channel) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Two forwards before each backward, with late rows."""
    data = graph()
    torch.manual_seed(5)
    model, found = Hop().double(), []
    with net_of(channel, model, data, parallel=kagome.Parallel(max_age=1, guard=False)) as net:
        optimizer, y = torch.optim.SGD(model.parameters(), lr=0.1), net.place(data.x)
        for _ in range(4):
            optimizer.zero_grad()
            h = net(data.x, data.edge_index)
            net.mean((net(h, data.edge_index) - y) ** 2).backward()
            optimizer.step()
            found.append(grads(model))
        own = net.own()
    return found, own


def late_by_hand(owns: list[Tensor]) -> list[dict[str, Tensor]]:
    """The same in one process: neighbours of other ranks as the same call of the step before read them."""
    data = graph()
    torch.manual_seed(5)
    model = Hop().double()
    part = torch.empty(N, dtype=torch.int64)
    for rank, own in enumerate(owns):
        part[own] = rank
    source, target = data.edge_index
    inner = part[source] == part[target]
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    before: list[tuple[Tensor, Tensor]] = []
    for step in range(4):
        optimizer.zero_grad()
        h, kept, extra = data.x, [], torch.zeros((), dtype=torch.float64)
        for call in range(2):
            rows = model.one(h)
            # Rows of other ranks: of now in the first step, else late; their gradient is late likewise.
            far = rows.detach() if step == 0 else before[call][0]
            far = far.clone().requires_grad_()
            sums = torch.zeros_like(rows).index_add(0, target[inner], rows[source[inner]])
            sums = sums.index_add(0, target[~inner], far[source[~inner]])
            kept.append((rows, far))
            h = model.two(sums.tanh())
        loss = ((h - data.x) ** 2).mean()
        if step == 0:
            # Exact: the second call's gradient at rows of others reaches the first call.
            out = data.x
            for _ in range(2):
                out = model(out, data.edge_index)
            ((out - data.x) ** 2).mean().backward()
            h, kept = data.x, []
            for _ in range(2):
                rows = model.one(h)
                far = rows[source[~inner]]
                sums = torch.zeros_like(rows).index_add(0, target[inner], rows[source[inner]])
                far.retain_grad()
                kept.append((rows, far))
                h = model.two(sums.index_add(0, target[~inner], far).tanh())
            fars = torch.autograd.grad(((h - data.x) ** 2).mean(), [far for _, far in kept])
            whole = [torch.zeros_like(data.x).index_add(0, source[~inner], g.detach()) for g in fars]
        else:
            for (rows, _), (_, gradient) in zip(kept, before, strict=True):
                extra = extra + (rows * gradient).sum()
            fars = torch.autograd.grad(loss + extra, [far for _, far in kept], retain_graph=True)
            (loss + extra).backward()
            whole = [g.detach() for g in fars]
        before = [(rows.detach(), gradient) for (rows, _), gradient in zip(kept, whole, strict=True)]
        found.append(grads(model))
        optimizer.step()
    return found


def test_each_call_of_a_step_reads_the_rows_of_the_same_call_a_step_before(ranks: Any) -> None:
    told = ranks(3, rolled)
    expected = late_by_hand([own for _, own in told])
    for found, _ in told:
        for step, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
            for name, value in wanted.items():
                torch.testing.assert_close(
                    mine[name], value, rtol=1e-10, atol=1e-10, msg=f"{name}, step {step}"
                )


def irregular(channel: Channel) -> list[float]:
    """Steps of one to four late forwards, with others that nobody differentiates, and a sum put off."""
    data, model = graph(), model_of("gcn")
    cut = kagome.Parallel(max_age=1, guard=False)
    with kagome.shard(model, data, parallel=cut, log=str) as net:
        losses = []
        for step, count in enumerate([1, 3, 1, 2, 4, 1]):
            outs = [net(data.x, data.edge_index) for _ in range(count)]
            loss = net.mean(torch.stack([out**2 for out in outs]))
            with net.no_sync() if step == 2 else nullcontext():
                loss.backward()
            if step % 2:
                net(data.x, data.edge_index)
            losses.append(loss.item())
    return losses


def test_late_rows_of_steps_unlike_each_other(ranks: Any) -> None:
    """No message stays behind. With the weights of the first step late rows are the same as exact ones."""
    for losses in ranks(3, irregular):
        torch.testing.assert_close(losses, [losses[0]] * 6, rtol=1e-10, atol=1e-10)


def refused(channel: Channel, case: str) -> str:
    data, model = graph(), model_of("gcn")
    feedback = {"codec": "int2", "error_feedback": True}
    cut = kagome.Parallel(**(feedback if case == "feedback" else {"max_age": 1}))
    try:
        with kagome.shard(model, data, parallel=cut, log=str) as net:
            if case == "order":
                first, second = (net.mean(net(data.x, data.edge_index)) for _ in range(2))
                first.backward()
                net.mean(net(data.x, data.edge_index)).backward()
                second.backward()
            elif case == "derivative":
                x = net.place(data.x).clone().requires_grad_()
                energy = net.sum(net(net.place(x), data.edge_index) ** 2)
                (by_x,) = torch.autograd.grad(energy, x, create_graph=True)
                net.mean(by_x**2).backward()
            else:
                loss = net.mean(net(data.x, data.edge_index) ** 2)
                loss.backward(retain_graph=True)
                loss.backward()
    except kagome.KagomeError as error:
        return str(error)
    return "nothing"


@pytest.mark.every
@pytest.mark.parametrize("case", ["twice", "feedback", "derivative", "order"])
def test_a_second_use_of_kept_rows_is_refused(ranks: Any, case: str) -> None:
    for message in ranks(2, refused, case, spoils=True):
        assert "one backward of each forward pass" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_age": 1, "sync_every": "auto"}, "sync_every=4"),
        ({"max_age": 2, "skip_drift": 0.1}, "halo_sample=0.5"),
        ({"codec": "int4", "adaptive_bits": True}, "error_feedback=True"),
        ({"activations": "host"}, "recompute=True"),
        ({"codec_stage": "bf16"}, "codec='bf16'"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_a_trainer_decides_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(kagome.KagomeError, match=words) as caught:
        kagome.shard(model_of("gcn"), graph(), parallel=kagome.Parallel(**settings))
    assert list(settings)[-1] in str(caught.value)


def curved(channel: Channel, settings: dict[str, Any]) -> tuple[float, float]:
    """A second derivative along two directions, by autograd and by differences of the first."""
    data = graph()
    torch.manual_seed(5)
    model = Hop().double()
    with kagome.shard(model, data, parallel=kagome.Parallel(guard=False, **settings), log=str) as net:
        along, other = (net.place(data.x.roll(shift, 0)) for shift in (1, 2))

        def first(rows: Tensor) -> tuple[Tensor, Tensor]:
            net.step = 0  # the same draws each time
            x = net.place(rows).clone().requires_grad_()
            energy = net.sum(net(net.place(x), data.edge_index).sin())
            (by_x,) = torch.autograd.grad(energy, x, create_graph=True)
            return x, net.sum(by_x * along)

        x, slope = first(net.place(data.x))
        (by_x,) = torch.autograd.grad(slope, x)
        step = 1e-5
        after, before = (first(net.place(data.x) + sign * step * other)[1].item() for sign in (1, -1))
        found = net.sum(by_x * other).item()
    return found, (after - before) / (2 * step)


def test_second_derivatives_of_sampled_rows(ranks: Any) -> None:
    exact = ranks(2, curved, {})[0]
    assert abs(exact[0] - exact[1]) < 1e-6 * abs(exact[0])
    for found, differences in ranks(2, curved, {"halo_sample": 0.5}):
        assert abs(found - differences) < 1e-6 * abs(found)
        assert abs(found - exact[0]) > 1e-3 * abs(exact[0])
    # Rounding has no derivative; it counts as if rows were sent unchanged.
    for found, _ in ranks(2, curved, {"codec": "int8"}):
        assert 1e-9 < abs(found - exact[0]) / abs(exact[0]) < 0.1


# What is sent ------------------------------------------------------------------------------------


def sent(channel: Channel, axes: tuple[int, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes and messages of the third step of shape 1, and of the fields ``[*axes, N, 2]`` that it takes."""
    simulation = example("mesh_simulation")
    torch.manual_seed(5)
    data = simulation.mesh(6)
    model = simulation.MeshNet()
    model.layers = nn.ModuleList(simulation.Processor() for _ in range(LAYERS))
    with kagome.shard(model, data, parallel=kagome.Parallel(guard=False, **settings), log=str) as net:
        for _ in range(3):
            x = torch.randn(*axes, data.num_nodes, 2)
            before = net.traffic
            net.mean(net(x, data.edge_index, data.edge_attr) ** 2).backward()
        spent = net.traffic.since(before)
        view = net._parallel.scope.views[0].rows
        counts = list(view.send_counts), list(view.recv_counts)
        weights = sum(p.numel() for p in net.parameters())
    return {
        "bytes": spent.bytes,
        "messages": spent.messages,
        "counts": counts,
        "weights": weights,
        "rank": channel.rank,
    }


@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_sends_the_halo_and_nothing_more(ranks: Any, batch: int) -> None:
    """A batch of four is one message a layer and peer, not four."""
    hidden = 32
    for found in ranks(3, sent, (batch,), {}):
        send, recv = found["counts"]
        # Each layer sends the rows of ``h`` to their readers, and in backward gradients to the owners.
        assert found["bytes"]["halo"] == LAYERS * (sum(send) + sum(recv)) * batch * hidden * 4
        assert found["messages"]["halo"] == LAYERS * (sum(map(bool, send)) + sum(map(bool, recv)))
        assert {kind for kind, count in found["bytes"].items() if count} == {"halo", "weights", "statistics"}


def test_a_codec_sends_less(ranks: Any) -> None:
    plain, coded = (
        ranks(2, sent, (1,), each)[0]["bytes"] for each in ({}, {"codec": "int8", "codec_weights": "bf16"})
    )
    assert coded["halo"] < 0.4 * plain["halo"]  # 8 bits of 32, and a scale for each row
    assert coded["weights"] < 0.6 * plain["weights"]


# Recomputation -----------------------------------------------------------------------------------


class EdgeStates(nn.Module):
    """Layers of PyG with a state an edge, which each one updates."""

    class Layer(pyg.MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="mean")
            self.edge, self.vertex = nn.Linear(3 * 6, 6), nn.Linear(12, 6)

        def forward(self, h: Tensor, state: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
            state = state + self.edge_updater(edge_index, h=h, state=state)
            return h + self.vertex(torch.cat([h, self.propagate(edge_index, state=state)], 1)).tanh(), state

        def edge_update(self, h_i: Tensor, h_j: Tensor, state: Tensor) -> Tensor:
            return self.edge(torch.cat([state, h_i, h_j], dim=-1)).tanh()

        def message(self, state: Tensor) -> Tensor:
            return state

    def __init__(self) -> None:
        super().__init__()
        self.vertices, self.edges = nn.Linear(F, 6), nn.Linear(2, 6)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        h, state = self.vertices(x), self.edges(edge_attr)
        for layer in self.layers:
            h, state = layer(h, functional.dropout(state, 0.0, self.training), edge_index)
        return h, state


def recomputed(channel: Channel | None) -> dict[str, Tensor]:
    data = graph()
    torch.manual_seed(5)
    model = EdgeStates().double()
    settings = {} if channel is None else {"recompute": True}
    with net_of(channel, model, data, **settings) as net:
        for _ in range(2):
            h, state = net(data.x, data.edge_index, data.edge_attr)
            loss = net.mean(h**2) + net.mean(state**2)
            loss.backward()
        rows = net.gather(state, "edges")
    return grads(model) | {"loss": loss.detach(), "state": of_first(channel, rows, (90, 6))}


@pytest.mark.parametrize("world", [1, 3])
def test_recomputation_with_edge_states(ranks: Any, world: int) -> None:
    both(ranks, world, recomputed)


def twice(channel: Channel | None, kind: str) -> dict[str, Tensor]:
    """A loss on a derivative, through layers that run again."""
    data, model = graph(), model_of(kind)
    settings = {} if channel is None else {"recompute": True}
    with net_of(channel, model, data, **settings) as net:
        x = net.place(data.x).clone().requires_grad_()
        energy = net.sum(net(net.place(x), data.edge_index, data.edge_attr).tanh() ** 2)
        (by_x,) = torch.autograd.grad(energy, x, create_graph=True)
        net.mean(by_x**2).backward()
        rows = net.gather(x.grad)
    return grads(model) | {"by x": of_first(channel, rows, tuple(data.x.shape))}


@pytest.mark.parametrize("kind", ["gat", "gine"])
def test_second_derivatives_with_recomputation(ranks: Any, kind: str) -> None:
    both(ranks, 2, twice, kind)
