"""Layers that keep their inputs only and run again in backward: the same numbers, the same bytes, less kept."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.utils import degree, scatter

from convolutions import CASES, ConvCase, double_precision, sample_graph
from kagome.comm.channel import Channel
from kagome.config import Model
from kagome.errors import ModelError
from kagome.graph.partition import extract
from kagome.model.exact import HANDLERS
from kagome.model.rules import apply_rules
from kagome.model.zoo import build_model
from kagome.neighbors.install import install
from kagome.neighbors.intercept import Interception
from kagome.neighbors.recompute import layers_of, recompute
from kagome.run.engine import Call
from odd_models import MUST_BE_REFUSED, ODD_MODELS
from parity import alone, case_build, odd, random_owner

Build = Callable[[], nn.Module]
Ranks = Callable[..., list]
ROUNDING = 1e-12
FAN_IN, FAN_OUT = 6, 4


@dataclass
class Left:
    """What training left on one rank."""

    out: Tensor
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    traffic: list[dict[str, int]]
    """Bytes sent in each epoch, by kind."""
    peak: int
    """Most bytes of tensors that lived at once in the last epoch, beside weights and the graph."""


class Peak(TorchDispatchMode):
    """The most bytes that live at once of what any call has made."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self._live.setdefault(ref.cdata, (ref, storage.nbytes()))
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return out


def train(
    channel: Channel,
    build: Build,
    data: Data,
    owner: Tensor,
    again: bool,
    fast: bool = True,
    epochs: int = 2,
    blind: bool = False,
    measured: bool = False,
) -> Left:
    """Train on this rank's part, without a step: two epochs show what layers keep between them.

    Args:
        channel: The way to the other parts.
        build: Makes the model.
        data: The whole graph.
        owner: Part of each vertex.
        again: Whether layers run again.
        fast: Whether messages are put off.
        epochs: Forward and backward passes.
        blind: Part 0 has no training vertex: its loss is the token alone.
        measured: Whether the peak is measured.
    """
    with double_precision():
        torch.manual_seed(0)
        model = build().double()
        part = extract(data, owner, channel.rank, channel.size)
        x = part.nodes["x"] = part.nodes["x"].detach().clone().requires_grad_(data.x.requires_grad)
        scope = Interception(part, channel, seed=3, handlers=HANDLERS, fast=fast)
        call = Call(model, set(scope.inputs))
        undo = [apply_rules(model, scope), install(model, scope)]
        if again:
            undo.append(recompute(model, scope))
        model.train()
        traffic, peak = [], Peak()
        channel.take_bytes()
        random.seed(5)
        try:
            for epoch in range(1, epochs + 1):
                model.zero_grad(set_to_none=True)
                x.grad = None
                with Peak() if measured else torch.enable_grad() as peak:
                    with scope.running(epoch, training=True, checked=epoch == 1) as turn:
                        out = call(model, scope.inputs)
                    weights = torch.arange(data.num_nodes * math.prod(out.shape[1:])).sin()
                    weights = weights.view(data.num_nodes, *out.shape[1:])[part.own]
                    loss = turn.token if blind and channel.rank == 0 else (out * weights).sum() + turn.token
                    loss.backward()
                traffic.append(channel.take_bytes())
        finally:
            for take_off in reversed(undo):
                take_off()
        grads = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        return Left(out.detach(), grads, buffers, traffic, peak.bytes if measured else 0)


def both(ranks: Ranks, world: int, build: Build, data: Data | None = None, **given: Any) -> list[list[Left]]:
    """The ranks' results with every layer run once, and with layers that run again."""
    data = sample_graph(1) if data is None else data
    owner = given.pop("owner", None)
    owner = random_owner(data.num_nodes, world, seed=world) if owner is None else owner
    named = {"fast": True, "epochs": 2, "blind": False, "measured": False, **given}
    return [ranks(world, train, build, data, owner, again, *named.values()) for again in (False, True)]


def assert_same(once: list[Left], twice: list[Left]) -> None:
    """Output, gradients and buffers to rounding; the bytes of every kind, of every epoch."""
    for plain, found in zip(once, twice, strict=True):
        pairs = {"output": (plain.out, found.out)}
        pairs |= {name: (grad, found.grads[name]) for name, grad in plain.grads.items()}
        for name, (value, other) in pairs.items():
            assert (value is None) == (other is None), name
            if value is not None and other is not None and value.numel():
                gap = float((value - other).abs().max() / value.abs().max().clamp(min=1e-30))
                assert gap <= ROUNDING, (name, gap)
        assert all(torch.equal(value, found.buffers[name]) for name, value in plain.buffers.items())
        assert plain.traffic == found.traffic


# Every layer and model ---------------------------------------------------------------------------

BUILDABLE = [case for case in CASES if case.build is not None]


@pytest.mark.parametrize("case", BUILDABLE, ids=lambda c: f"{c.name}-{c.variant}".replace(" ", "_"))
def test_every_convolution(ranks: Ranks, case: ConvCase) -> None:
    data = sample_graph(1, groups_of_four=case.needs_groups_of_four)
    data.x.requires_grad_()
    assert_same(*both(ranks, 2, case_build(case), data))


def zoo(name: str, layers: int = 3, hidden: int = 8, heads: int = 2, dropout: float = 0.4) -> nn.Module:
    settings = Model(name=name, layers=layers, hidden=hidden, heads=heads, dropout=dropout)
    histogram = torch.tensor([2, 3, 5, 8, 6, 3, 2, 1])
    return build_model(
        settings, in_channels=FAN_IN, out_channels=FAN_OUT, num_nodes=30, degree_histogram=histogram
    )


ZOO = ("gcn", "sage", "gin", "gat", "gatv2", "pna", "edgecnn", "gcn2", "appnp", "sgc", "deepgcn", "resgcn+")


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", [*ZOO, "transformer"])
def test_every_model_of_the_zoo(ranks: Ranks, name: str, world: int, fast: bool) -> None:
    once, twice = both(ranks, world, partial(zoo, name), fast=fast)
    assert_same(once, twice)
    assert world == 1 or once[0].traffic[1]["halo"] > 0


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", sorted(set(ODD_MODELS) - MUST_BE_REFUSED))
def test_odd_models(ranks: Ranks, name: str, world: int) -> None:
    assert_same(*both(ranks, world, partial(odd, name, FAN_IN, FAN_OUT)))


@pytest.mark.parametrize("name", ["gcn", "gat", "deepgcn"])
def test_ranks_without_training_vertices_or_without_any(ranks: Ranks, name: str) -> None:
    assert_same(*both(ranks, 3, partial(zoo, name), blind=True))
    assert_same(*both(ranks, 3, partial(zoo, name), owner=random_owner(30, 2, seed=1) * 2))


# Blocks of one's own -----------------------------------------------------------------------------


class Block(nn.Module):
    """Norms with running statistics, dropout, a draw of torch's and one of Python's, a read by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = pyg.GATv2Conv(width, width // 2, heads=2, dropout=0.3)
        self.norm, self.graph_norm = nn.BatchNorm1d(width), pyg.GraphNorm(width)
        self.calls, self.scale = 0, 0.0
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        near = scatter(x[row], col, 0, x.size(0), "mean")
        self.calls += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.scale = 0.5 * self.scale + float(torch.rand(())) + random.random()
        x = F.dropout(self.norm(self.conv(x, edge_index)), 0.4, self.training) + near * self.scale
        return self.graph_norm(x * (1 + self.average)).relu() / self.calls


class Blocks(nn.Module):
    """Own blocks in a list between two layers outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(FAN_IN, 8), pyg.GCNConv(8, FAN_OUT)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        for block in self.blocks:
            x = x + block(x, edge_index)
        return self.last(x, edge_index)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_block_finds_what_it_found(ranks: Ranks, world: int) -> None:
    once, twice = both(ranks, world, Blocks, epochs=3)
    assert_same(once, twice)
    # Running statistics have moved once an epoch, not twice.
    assert int(twice[0].buffers["blocks.0.norm.num_batches_tracked"]) == 3


class InData(nn.Module):
    """A layer that takes a ``Data`` and writes its result into it."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.conv, self.norm = pyg.GINConv(nn.Linear(fan_in, fan_out)), nn.BatchNorm1d(fan_out)

    def forward(self, data: Data) -> Data:
        data.x = self.norm(self.conv(data.x, data.edge_index)).tanh()
        return data


class ThroughData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(InData(FAN_IN, 8), InData(8, 8), InData(8, FAN_OUT))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        data = Data(x=x * 2, edge_index=edge_index)
        self.layers(data)
        return data.x


class ThroughLists(nn.Module):
    """Layers that are given lists and named tensors, and give several, one of them a message."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv = pyg.GraphConv(width, width)
            self.gate = nn.Linear(width, width)

        def forward(self, rows: list[Tensor], *, edges: dict[str, Tensor], message: Tensor) -> Any:
            x = self.conv(rows[-1], edges["index"]) + scatter(message, edges["index"][1], 0, len(rows[0]))
            rows.append(x.tanh())
            return rows, self.gate(x)[edges["index"][0]]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FAN_IN, 8), pyg.GCNConv(16, FAN_OUT, cached=True)
        self.layers = nn.ModuleList(self.Layer(8) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = [self.first(x)]
        message = rows[0][edge_index[0]]
        for layer in self.layers:
            rows, message = layer(rows, edges={"index": edge_index}, message=message)
        pooled = scatter(message, edge_index[1], 0, x.size(0))
        return self.last(torch.cat([rows[-1], pooled], -1), edge_index)


class Cached(nn.Module):
    """Caches on the module, filled from weights that are computed: not known to be the same for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            pyg.GCNConv(a, b, cached=True) for a, b in ((FAN_IN, 8), (8, 8), (8, FAN_OUT))
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        size = degree(edge_index[1], x.size(0))
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight.sqrt() / (1 + size[edge_index[0]])).tanh()
        return x


class Twice(nn.Module):
    """One layer used three times, its input detached once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = pyg.TransformerConv(FAN_IN, FAN_IN), nn.Linear(FAN_IN, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        x = self.conv(x, edge_index) + self.conv(x.detach(), edge_index)
        return self.last(x)


class Normed(nn.Module):
    """Weights that a hook computes from buffers which move in each forward."""

    def __init__(self) -> None:
        super().__init__()
        spectral = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.convs = nn.ModuleList([pyg.GINConv(spectral), pyg.GINConv(nn.utils.weight_norm(nn.Linear(8, 8)))])
        self.first, self.last = nn.Linear(FAN_IN, 8), nn.Linear(8, FAN_OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return self.last(x)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("build", [ThroughData, ThroughLists, Cached, Twice, Normed])
def test_what_layers_are_given_and_keep(ranks: Ranks, build: Build, world: int) -> None:
    assert_same(*both(ranks, world, build, epochs=3))


def test_mixed_precision(ranks: Ranks) -> None:
    results = [ranks(2, cast, again) for again in (False, True)]
    for plain, found in zip(*results, strict=True):
        assert plain.keys() == found.keys()
        assert all(torch.equal(plain[name], found[name]) for name in plain)


def cast(channel: Channel, again: bool) -> dict[str, Tensor]:
    """Gradients under bf16 autocast."""
    torch.manual_seed(0)
    model, data = zoo("transformer"), sample_graph(1)
    data.x = data.x.float()
    scope = Interception(extract(data, random_owner(30, 2), channel.rank, 2), channel, handlers=HANDLERS)
    undo = [apply_rules(model, scope), install(model, scope)]
    undo += [recompute(model, scope)] if again else []
    with scope.running(1, training=True) as turn, torch.autocast("cpu", torch.bfloat16):
        out = model(scope.inputs["x"], scope.inputs["edge_index"])
    (out.float().square().sum() + turn.token).backward()
    for take_off in reversed(undo):
        take_off()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# Memory ------------------------------------------------------------------------------------------


def band() -> Data:
    """A graph whose halves share few edges."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randint(0, 400, (4000,), generator=generator)
    source = (target + torch.randint(-9, 10, (4000,), generator=generator)).clamp(0, 399)
    x = torch.rand(400, FAN_IN, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=torch.stack([source, target]))


@pytest.mark.parametrize(
    ("name", "share"), [("resgcn+", 0.55), ("deepgcn", 0.4), ("gat", 0.6), ("gcn2", 0.8), ("transformer", 0.4)]
)
def test_deep_models_keep_less(ranks: Ranks, name: str, share: float) -> None:
    build = partial(zoo, name, layers=12, hidden=32, heads=4)
    once, twice = both(ranks, 2, build, band(), owner=torch.arange(400) // 200, measured=True)
    assert_same(once, twice)
    for plain, found in zip(once, twice, strict=True):
        print(name, plain.peak, found.peak, found.peak / plain.peak)
        assert found.peak < share * plain.peak


# Which layers, and when --------------------------------------------------------------------------


def test_layers_are_what_a_list_holds() -> None:
    deep, gcn = zoo("deepgcn", layers=4), zoo("gcn", layers=3)
    assert layers_of(deep) == list(deep.blocks)
    assert layers_of(gcn) == list(gcn.convs)
    assert layers_of(nn.Sequential(gcn)) == list(gcn.convs)
    assert layers_of(nn.ModuleDict({"one": gcn, "two": deep})) == [gcn, deep]
    assert layers_of(nn.ModuleList([nn.ModuleList(gcn.convs[:1]), nn.ModuleList(gcn.convs[1:])])) == list(
        gcn.convs
    )
    mine = Blocks()
    assert layers_of(mine) == [mine.first, mine.last, *mine.blocks]
    assert layers_of(nn.Linear(2, 2)) == []
    plain = pyg.Sequential("x, e", [(pyg.GCNConv(2, 2), "x, e -> x"), nn.ReLU(), (pyg.GCNConv(2, 2), "x, e -> x")])
    assert [type(layer) for layer in layers_of(plain)] == [pyg.GCNConv] * 2
    shared = pyg.GCNConv(2, 2)
    assert layers_of(nn.ModuleList([shared, shared])) == [shared]


class Counted(nn.Module):
    """A convolution in a block that counts the block's runs."""

    runs: list[bool]

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.runs = pyg.SAGEConv(FAN_IN, FAN_IN), []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.runs.append(torch.is_grad_enabled())
        return self.conv(x.tanh(), edge_index).tanh()


def on_one_rank(model: nn.Module, data: Data | None = None) -> tuple[Interception, Callable[[], None]]:
    data = sample_graph(1) if data is None else data
    part = extract(data, torch.zeros(data.num_nodes, dtype=torch.long), 0, 1)
    scope = Interception(part, alone(), handlers=HANDLERS)
    undo = [apply_rules(model, scope), install(model, scope), recompute(model, scope)]

    def remove() -> None:
        for take_off in reversed(undo):
            take_off()

    return scope, remove


def test_a_layer_runs_again_in_training_only_and_is_left_as_it_was() -> None:
    block = Counted()
    model = nn.ModuleList([block, Counted()]).double()
    untouched = dict(vars(block))
    scope, remove = on_one_rank(model)
    x, e = scope.inputs["x"], scope.inputs["edge_index"]
    with torch.no_grad(), scope.running(1, training=False):
        expected = block(x, e)
    assert block.runs == [False]
    with scope.running(1, training=True), torch.no_grad():
        assert torch.equal(block(x, e), expected)
    assert block.runs == [False, False]
    with scope.running(1, training=True):
        out = block(x, e)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert block.runs == [False, False, True, True]
    assert (scope.path, scope.layers, scope.draws, scope.turn.over) == ([], 0, 0, True)
    remove()
    assert vars(block).keys() == untouched.keys()


def test_a_later_forward_may_come_before_the_backward() -> None:
    """The next epoch's forward is kept while an evaluation runs."""
    torch.manual_seed(0)
    model = zoo("gat").double()
    grads = []
    for between in (False, True):
        scope, remove = on_one_rank(model)
        model.zero_grad()
        with scope.running(4, training=True):
            out = model(scope.inputs["x"], scope.inputs["edge_index"])
        turn = scope.turn
        if between:
            model.eval()
            with torch.no_grad(), scope.running(9, training=False):
                model(scope.inputs["x"], scope.inputs["edge_index"])
            model.train()
            turn = scope.turn
        out.square().sum().backward()
        assert scope.turn is turn
        grads.append([p.grad for p in model.parameters()])
        remove()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# Refused -----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """The user's own checkpoint, inside a layer that runs again or around it."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = inside, reentrant
        self.conv = pyg.DeepGCNLayer(
            pyg.SAGEConv(FAN_IN, FAN_IN), nn.LayerNorm(FAN_IN), nn.ReLU(), ckpt_grad=inside and reentrant
        )
        if inside and not reentrant:
            conv = self.conv.conv
            self.conv.conv = _Inside(conv)
        self.layers = nn.ModuleList([self.conv, pyg.SAGEConv(FAN_IN, FAN_IN)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        if self.inside:
            return self.conv(x, edge_index)
        return checkpoint(self.conv, x, edge_index, use_reentrant=self.reentrant)


class _Inside(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return checkpoint(self.conv, x, edge_index, use_reentrant=False)


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_users_own_checkpoint_is_still_refused(
    ranks: Ranks, world: int, inside: bool, reentrant: bool
) -> None:
    build = partial(Checkpointed, inside, reentrant)
    data = sample_graph(1)
    with pytest.raises(ModelError, match="activation checkpointing") as caught:
        ranks(world, train, build, data, random_owner(30, world), True)
    assert "torch.utils.checkpoint" in caught.value.hint
    assert "--model.recompute" in caught.value.hint


class Overwritten(nn.Module):
    """A layer's input is written to after it has run."""

    def __init__(self, grad: bool) -> None:
        super().__init__()
        self.grad, self.conv = grad, pyg.SAGEConv(FAN_IN, FAN_IN)
        self.lin = nn.Linear(FAN_IN, FAN_IN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x) if self.grad else x * 2
        out = self.conv(x, edge_index)
        x += 1
        return out


def test_inputs_that_are_written_to_are_refused() -> None:
    for grad, kind, words in ((False, ModelError, "stays as it is"), (True, RuntimeError, "inplace operation")):
        model = Overwritten(grad).double()
        scope, remove = on_one_rank(model)
        with scope.running(1, training=True):
            out = model(scope.inputs["x"], scope.inputs["edge_index"])
        with pytest.raises(kind, match=words):
            out.square().sum().backward()
        remove()


class Moody(nn.Module):
    """Reads other rows each time it runs, by a count that no module holds."""

    count = [0]

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layers = pyg.SAGEConv(FAN_IN, FAN_IN), nn.ModuleList()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.count[0] += 1
        x = x * self.conv.lin_r.weight.sum()
        x = x - x.mean(0) if self.count[0] % 2 else x - x.amax(0)
        return self.conv(x, edge_index)


def test_a_layer_that_does_otherwise_the_second_time_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ModelError, match="the first time it came to total forward"):
        ranks(2, train, Fickle, sample_graph(1), random_owner(30, 2), True)


class Fickle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Moody(), Moody()])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        Moody.count[0] = 0
        return self.layers[0](x, edge_index)
