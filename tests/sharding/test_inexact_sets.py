"""Late and sampled rows, and codecs with feedback, on several vertex sets: what a plain loop predicts.

The prediction knows one rank's messages only by their rule: which rows a rank reads of another, and what the
setting makes of them on the way there and of their gradients on the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from test_shard import F, grads, graph
from test_vertex_sets import GRID, LAYERS, Fields, Weather, hetero, net_of, weather_graph
from torch import Tensor, nn

import kagome
from kagome.comm.channel import Channel

USERS, ITEMS, STEPS = 19, 11, 4
LATE, FEEDBACK, SAMPLED = {"max_age": 1}, {"codec": "bf16", "error_feedback": True}, {"halo_sample": 0.5}
KNOWN = {"late": LATE, "codec": {"codec": "bf16"}, "feedback": FEEDBACK, "sampled": SAMPLED}


def bought() -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.stack([torch.randint(count, (60,), generator=generator) for count in (USERS, ITEMS)])


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    user, item = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (USERS, ITEMS))
    return user, item


Sum = Callable[[str, Tensor, Tensor], Tensor]


class Shop(nn.Module):
    """Sums from users to items, and of the result back to users."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.up, self.down = pyg.SimpleConv(aggr="sum"), pyg.SimpleConv(aggr="sum")

    def forward(self, user: Tensor, item: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(
            user, item, lambda _, x, y: self.up((x, y), up), lambda _, x, y: self.down((x, y), down)
        )

    def run(self, user: Tensor, item: Tensor, up: Sum, down: Sum) -> tuple[Tensor, Tensor]:
        one, two, three = self.maps
        item = item + up("up", one(user), item).tanh()
        return user + three(down("down", two(item), user)).tanh(), item


def shop() -> Shop:
    torch.manual_seed(5)
    return Shop().double()


def shop_graph() -> kagome.Graph:
    return kagome.Graph(
        user=kagome.Vertices(USERS),
        item=kagome.Vertices(ITEMS),
        up=kagome.Edges("user", "item", bought()),
        down=kagome.Edges("item", "user", bought().flip(0).contiguous()),
    )


Told = tuple[list[dict[str, Tensor]], list[Tensor], dict[str, Tensor]]


def by_ranks(channel: Channel, settings: dict[str, Any]) -> Told:
    """Gradients and losses of some steps, and the ids of own users and items."""
    model, found, losses = shop(), [], []
    cut = kagome.Parallel(guard=False, **settings)
    user, item = rows()
    with kagome.shard(model, shop_graph(), parallel=cut, log=str) as net:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            users, items = net(user, item, bought(), bought().flip(0).contiguous())
            loss = net.mean((users - 1) ** 2) + net.mean(items**2)
            loss.backward()
            optimizer.step()
            found.append(grads(model))
            losses.append(loss.detach())
        own = {name: net.own(name) for name in ("user", "item")}
    return found, losses, own


class Way(torch.autograd.Function):
    """Rows on their way to one reader, and their gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: Callable[[str, Tensor], Tensor]) -> Tensor:
        ctx.send = send
        return send("there", rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.send("back", gradients[0]), None


class Prediction:
    """What a setting makes of rows: those of the step before, those that a codec leaves, or a sample."""

    def __init__(self, settings: dict[str, Any], part: dict[str, Tensor], ranks: int) -> None:
        self.settings, self.part, self.ranks = settings, part, ranks
        self.kept: dict[Any, Tensor] = {}
        self.step = 0

    def sum(self, name: str, ends: tuple[str, str], edges: Tensor, x: Tensor, like: Tensor) -> Tensor:
        """Return sums over edges whose far ends' rows have come by a message."""
        readers, owners = self.part[ends[1]][edges[1]], self.part[ends[0]][edges[0]]
        near = readers == owners
        out = torch.zeros_like(like).index_add(0, edges[1, near], x[edges[0, near]])
        for reader in range(self.ranks):
            for owner in range(self.ranks):
                some = (readers == reader) & (owners == owner)
                if reader == owner or not some.any():
                    continue
                ids = edges[0, some].unique()
                key = (name, reader, owner)
                come = Way.apply(x[ids], lambda way, sent, key=key: self.sent(key, way, sent))  # type: ignore[no-untyped-call]
                out = out.index_add(0, edges[1, some], come[torch.searchsorted(ids, edges[0, some])])
        return out

    def sent(self, key: Any, way: str, sent: Tensor) -> Tensor:
        key = (*key, way)
        if self.settings == LATE:
            before = self.kept.get(key, sent)
            self.kept[key] = sent
            return before
        if "codec" in self.settings:
            # In backward each rank starts from its own copy of the loss, and the sums are divided at the end.
            scale = self.ranks if way == "back" else 1
            given = sent * scale + self.kept.get(key, torch.zeros_like(sent))
            come = given.bfloat16().double()
            if self.settings == FEEDBACK:
                self.kept[key] = given - come
            return come / scale
        _, reader, owner, _ = key
        share = max(len(sent) // 2, 1)
        draws = np.random.default_rng([0, self.step, owner, reader]).permutation(len(sent))[:share]
        come = torch.zeros_like(sent)
        come[draws] = sent[draws] * (len(sent) / share)
        return come


def predicted(
    settings: dict[str, Any], owns: list[dict[str, Tensor]]
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    part = {"user": torch.empty(USERS, dtype=torch.int64), "item": torch.empty(ITEMS, dtype=torch.int64)}
    for rank, own in enumerate(owns):
        for name, ids in own.items():
            part[name][ids] = rank
    model, known, found, losses = shop(), Prediction(settings, part, len(owns)), [], []
    optimizer, (user, item) = torch.optim.SGD(model.parameters(), lr=0.1), rows()
    up, down = bought(), bought().flip(0)
    for step in range(STEPS):
        known.step = step + 1
        optimizer.zero_grad()
        users, items = model.run(
            user,
            item,
            lambda name, x, like: known.sum(name, ("user", "item"), up, x, like),
            lambda name, x, like: known.sum(name, ("item", "user"), down, x, like),
        )
        loss = ((users - 1) ** 2).mean() + (items**2).mean()
        loss.backward()
        found.append(grads(model))
        losses.append(loss.detach())
        optimizer.step()
    return found, losses


@pytest.mark.some(1, each="how")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("how", KNOWN)
def test_rows_of_two_sets_are_those_that_a_plain_loop_predicts(ranks: Any, world: int, how: str) -> None:
    settings = KNOWN[how]
    told = ranks(world, by_ranks, settings)
    expected, losses = predicted(settings, [own for *_, own in told])
    for found, mine, _ in told:
        torch.testing.assert_close(mine, losses, rtol=1e-10, atol=1e-10)
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.keys() == other.keys()
            for name, value in other.items():
                torch.testing.assert_close(
                    one[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name, s=step: f"{n}, {s}: {m}"
                )
    exact = ranks(world, by_ranks, {})[0][1]
    assert (torch.stack(exact) - torch.stack(losses)).abs()[1:].min() > 1e-6  # the setting has acted
    if settings == LATE:
        assert losses[0] == pytest.approx(float(exact[0]), rel=1e-10)


def of_one_set(channel: Channel, settings: dict[str, Any], named: bool) -> list[float]:
    """Losses over a graph of one vertex set, given as it is or as a graph of sets that has one."""
    data = graph()
    torch.manual_seed(5)
    # Features are read once, exactly, where they are attributes of the graph: so a map comes first.
    model = pyg.Sequential(
        "x, edges", [(nn.Linear(F, 6), "x -> x"), (pyg.GraphSAGE(6, 6, 2, 2), "x, edges -> x")]
    ).double()
    sets: Any = {"rows": kagome.Vertices(data.num_nodes)}
    given = kagome.Graph(**sets, links=kagome.Edges("rows", "rows", data.edge_index)) if named else data
    cut = kagome.Parallel(guard=False, partitioner="contiguous", **settings)
    losses = []
    with kagome.shard(model, given, parallel=cut, log=str) as net:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = net.mean((net(data.x, data.edge_index) - 1) ** 2)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "int2", "error_feedback": True},
        {"max_age": 1, "sync_every": 2, "smoothing": 0.5, "codec": "int4"},
        {"max_age": 1, "halo_sample": 0.5},
    ],
    ids=lambda each: "-".join(each),
)
def test_a_graph_of_sets_exchanges_as_a_graph_of_one(ranks: Any, settings: dict[str, Any]) -> None:
    losses = [ranks(3, of_one_set, settings, named)[0] for named in (False, True)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    assert abs(losses[0][-1] - ranks(3, of_one_set, {}, True)[0][-1]) > 1e-6


def losses_of(net: Any, kind: str) -> Tensor:
    """The loss of a roll-out over grid and meshes, or of three vertex types with attention."""
    if kind == "roll-out":
        generator = torch.Generator().manual_seed(9)
        state = net.place(torch.randn(2, GRID, 3, generator=generator, dtype=torch.float64), "grid", axis=1)
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(3):
            state = net(state)
            total = total + net.mean(state**2)
        return total
    data = hetero()
    out = net(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    return sum((net.mean(each**2) for each in out.values()), torch.zeros((), dtype=torch.float64))


def still(channel: Channel | None, kind: str, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Losses and gradients of steps that change no weight."""
    torch.manual_seed(5)
    if kind == "roll-out":
        model: nn.Module = Weather(shifted=True).double()
    else:
        model = Fields(LAYERS[kind], {"paper": 5, "author": 6, "field": 7}).double()
    given = weather_graph() if kind == "roll-out" else hetero()
    cut = {} if channel is None else {"parallel": kagome.Parallel(guard=False, **settings)}
    found = []
    with net_of(channel, model, given, **cut) as net:
        for _ in range(3):
            loss = losses_of(net, kind)
            loss.backward()
            found.append({"loss": loss.detach()} | grads(model))
            model.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["roll-out", "gat", "hgt"])
def test_late_rows_of_weights_that_stay_are_exact(ranks: Any, kind: str) -> None:
    """Rows of the step before are those of now: each is read at the site and the call that sent it."""
    expected = still(None, kind, {})[0]
    for found in ranks(4, still, kind, LATE):
        for step in found:
            assert step.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    step[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
                )


def refused(channel: Channel) -> str:
    try:
        still(channel, "gat", SAMPLED)
    except kagome.KagomeError as error:
        return str(error)
    return "nothing"


def test_attention_over_a_sample_is_refused(ranks: Any) -> None:
    for message in ranks(2, refused, spoils=True):
        assert "a softmax over neighbours" in message
