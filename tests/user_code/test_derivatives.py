"""Derivatives of derivatives: forces inside forward train as in plain PyG, on one rank and on several."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradgradcheck
from torch.nn import functional
from torch_geometric.data import Data

import forces
import kagome
from convolutions import sample_graph
from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.feature_parallel.tiled_reduce import refuse_second_derivative
from kagome.halo.exchange import total
from kagome.halo.forward_pass import ForwardPass
from kagome.kernels.base.csr import Structure
from kagome.model.exact import dropout
from kagome.sparse_ops import edge_features, edge_softmax, edge_sum, linear
from kagome.sparse_ops.sparse_features import SparseFeatures
from parity import TOLERANCE, assert_equal, differences, one_rank, parity, random_owner, split, whole


def molecule() -> Data:
    """A graph whose vertices have a place in space; made anew, as a model may write to it."""
    data = sample_graph(1)
    generator = torch.Generator().manual_seed(5)
    pos = 2 * torch.rand(data.num_nodes, 3, generator=generator, dtype=torch.float64)
    return Data(x=data.x, pos=pos, edge_index=data.edge_index)


BY_EDGES = [
    "gcn",
    "graph_conv",
    "gat_edges",
    "gatv2_edges",
    "gine",
    "nnconv",
    "cfconv",
    "edge_mlp",
    "attention",
]
"""Bodies that read the lengths, taken by derivatives along edges."""


def wrong(world: int, how: str, names: list[str], ranks: Callable[..., list]) -> dict[str, Any]:
    found = {}
    for name in names:
        build = partial(forces.build, name, how)
        plain = whole(build, molecule(), epochs=2)
        if world == 1:
            mine = one_rank(build, molecule(), epochs=2)
        else:
            owner = random_owner(plain.out.size(0), world)
            mine = split(ranks, world, build, molecule(), owner, epochs=2)
        errors = {key: error for key, error in differences(mine, plain).items() if not error <= TOLERANCE}
        assert plain.grads["embed.weight"] is not None
        if errors:
            found[name] = errors
    return found


@pytest.mark.parametrize("world", [1, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 3))])
def test_energies_and_forces_train_as_in_plain_pyg(ranks, world):
    assert len(forces.BODIES) >= 40
    assert wrong(world, "clone", list(forces.BODIES), ranks) == {}


@pytest.mark.parametrize("how", ["input", "rows", "edges"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_whatever_the_derivative_is_taken_by(ranks, world, how):
    names = BY_EDGES if how == "edges" else [*BY_EDGES, "gat", "sage", "batch_norm", "graph_norm", "pna"]
    assert wrong(world, how, names, ranks) == {}


@pytest.mark.parametrize("world", [2, 3])
def test_dropout_before_the_energy_is_drawn_as_on_one_rank(ranks, world):
    for name in ("cfconv", "gat", "batch_norm"):
        build = partial(forces.build, name, "clone", 0.4)
        alone = one_rank(build, molecule(), epochs=2)
        owner = random_owner(alone.out.size(0), world)
        assert_equal(split(ranks, world, build, molecule(), owner, epochs=2), alone)


class Stress(nn.Module):
    """By what all ranks have, too: a strain of all places, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.body = nn.Parameter(torch.tensor(0.7)), forces.CFConv()
        self.embed, self.head = nn.Linear(forces.FEATURES, forces.WIDTH), nn.Linear(forces.WIDTH, 1)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        strain = torch.eye(3).requires_grad_()
        placed = pos @ (strain + strain.t()) * self.scale
        source, target = edge_index
        length = ((placed[source] - placed[target]).square().sum(-1, keepdim=True) + 0.1).sqrt()
        rows = self.head(self.body(self.embed(x).tanh(), length, edge_index).tanh())
        energy = rows.sum()
        stress, slope = torch.autograd.grad(energy.square() / 30, [strain, self.scale], create_graph=True)
        more, _ = torch.autograd.grad([energy, rows], [strain, self.scale], [None, rows], create_graph=True)
        third = torch.autograd.grad(stress.square().sum(), self.scale, create_graph=True)[0]
        given = torch.cat([stress.view(-1), more.view(-1), slope.view(1), third.view(1)])
        return torch.cat([rows, rows * given], -1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_by_what_all_ranks_have_and_three_times(ranks, world):
    plain = whole(Stress, molecule())
    owner = random_owner(plain.out.size(0), world)
    assert_equal(split(ranks, world, Stress, molecule(), owner), plain)


class Jacobian(nn.Module):
    """A derivative a column, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Linear(forces.FEATURES, forces.WIDTH), forces.CFConv()

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        pos, (source, target) = pos.detach().clone().requires_grad_(), edge_index
        length = ((pos[source] - pos[target]).square().sum(-1, keepdim=True) + 0.1).sqrt()
        h = self.body(self.embed(x).tanh(), length, edge_index)
        columns = [torch.autograd.grad(c.sum(), pos, create_graph=True)[0] for c in h.unbind(1)]
        return torch.cat(columns, -1)


@pytest.mark.parametrize("world", [1, 3])
def test_a_derivative_a_column(ranks, world):
    plain = whole(Jacobian, molecule())
    owner = random_owner(plain.out.size(0), world)
    assert_equal(split(ranks, world, Jacobian, molecule(), owner), plain)


class HalfSeen(nn.Module):
    """What is read by a kernel first, and as numbers later, differentiated as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(forces.FEATURES, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        h = self.lin(x).tanh()
        message = h[source]
        summed = h.new_zeros(h.shape).index_add_(0, target, message)
        energy = summed.square().sum() + message.pow(3).sum()
        push = torch.autograd.grad(energy, message, create_graph=True)[0]
        return h.new_zeros(h.shape).index_add_(0, target, push)


@pytest.mark.parametrize("world", [1, 2])
def test_by_messages_that_were_put_off(ranks, world):
    plain = whole(HalfSeen, sample_graph(1))
    owner = random_owner(plain.out.size(0), world)
    assert_equal(split(ranks, world, HalfSeen, sample_graph(1), owner), plain)


class Backward(nn.Module):
    def __init__(self, *, many: bool = False) -> None:
        super().__init__()
        self.lin, self.many = nn.Linear(forces.FEATURES, 2), many

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        h = self.lin(x)
        energy = x.new_zeros(h.shape).index_add_(0, edge_index[1], h[edge_index[0]]).square()
        if self.many:
            ones = torch.ones(2, *energy.shape)
            return torch.autograd.grad(energy, x, ones, create_graph=True, is_grads_batched=True)[0][0]
        energy.sum().backward(retain_graph=True)
        assert x.grad is not None
        return h * x.grad.sum(-1, keepdim=True)


def refused(channel: Channel, many: bool) -> str:
    data = sample_graph(1)
    with pytest.raises(ModelError) as error:
        parity(channel, partial(Backward, many=many), data, random_owner(data.num_nodes, 2))
    return str(error.value)


@pytest.mark.parametrize(("many", "word"), [(False, "backward()"), (True, "is_grads_batched")])
def test_what_several_ranks_cannot_sum_is_refused_by_all_and_runs_on_one(ranks, many, word):
    if not many:
        assert_equal(one_rank(Backward, sample_graph(1)), whole(Backward, sample_graph(1)))
    for text in ranks(2, refused, many):
        assert word in text
        assert "one rank" in text


# Each autograd function -------------------------------------------------------------------------


def structure(halo: int = 0) -> Structure:
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(0, 6 + halo, (14,), generator=generator)
    return Structure(source, torch.randint(0, 6, (14,), generator=generator), 6, 6 + halo)


def draw(*shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    ).requires_grad_()


def _thin(weight: Tensor, bias: Tensor) -> Tensor:
    """Of weighted sums of rows, each with two entries."""
    row, column = torch.arange(6).repeat(2), torch.arange(12) % 5
    entries, edges = Structure(column, row, 6, 6), structure()
    values = torch.linspace(-1, 1, 12, dtype=torch.float64)
    weights = torch.linspace(0, 1, edges.edges, dtype=torch.float64)
    return SparseFeatures(entries.by_target, entries.by_source, values, 5, edges, weights).linear(
        weight, bias
    )


TURNS: list[ForwardPass] = []
"""Kept alive: backward asks its turn."""


def _summed(x: Tensor) -> Tensor:
    TURNS.append(ForwardPass(1, checked=False, device=torch.device("cpu"), grad=True))
    TURNS[-1].differentiates = True
    return total(x, TURNS[-1], _Doubling(), "here")  # type: ignore[arg-type]


class _Doubling:
    """Two ranks that have the same."""

    size, rank = 2, 0

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * tensor


S, HEADED = structure(), (6, 2, 3)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]] | str] = {
    "edge_sum._Sum": (
        lambda x, w: edge_sum.neighbor_sum(x, S, weight=w, scale=torch.arange(6.0).double()),
        (draw(*HEADED), draw(14, 2)),
    ),
    "edge_sum._Gather": (lambda x: edge_sum.gather(x, S, "source"), (draw(6, 3),)),
    "edge_sum._EdgeSum": (lambda x: edge_sum.edge_sum(x, S), (draw(14, 3),)),
    "edge_sum._EdgeExtreme": (lambda x: edge_sum.edge_extreme(x, S, 1), (draw(14, 3),)),
    "edge_sum._NeighborExtreme": (lambda x: edge_sum.neighbor_extreme(x, S, -1), (draw(6, 3),)),
    "edge_features._Dots": (lambda a, x: edge_features.dots(a, x, S), (draw(*HEADED), draw(14, 3))),
    "edge_features._Sums": (lambda w, x: edge_features.sums(w, x, S), (draw(14, 2), draw(14, 3))),
    "edge_softmax._Dots": (lambda a, b: edge_softmax.dots(a, b, S), (draw(*HEADED), draw(*HEADED))),
    "edge_softmax._LeakyDots": (
        lambda a, b, c: edge_softmax.leaky_dots(a, b, c, 0.2, S),
        (draw(*HEADED), draw(*HEADED), draw(2, 3)),
    ),
    "edge_softmax._EdgeSoftmax": (lambda x: edge_softmax.edge_softmax(x, S), (draw(14, 2),)),
    "edge_softmax._JointSoftmax": (
        lambda a, b: edge_softmax.joint_softmax(a, b, 0.2, S),
        (draw(6, 2), draw(6, 2)),
    ),
    "edge_softmax._AttentionSum": (
        lambda a, b, x: edge_softmax.attention_sum(a, b, x, 0.2, S),
        (draw(6, 2), draw(6, 2), draw(6, 2, 8)),
    ),
    "edge_softmax._Join": (lambda a, b: edge_softmax.join(a, b, 0.2, S), (draw(6, 3), draw(6, 3))),
    "edge_softmax._ColumnSoftmax": (
        lambda z, m: edge_softmax.column_softmax(z, m, S),
        (draw(6, 3), draw(6, 3)),
    ),
    "sparse_features._Linear": (_thin, (draw(4, 5), draw(4))),
    "dropout._Drop": (lambda x: dropout.dropout(x, torch.arange(6), 5, 0.4), (draw(6, 3),)),
    "exchange._Collective": (lambda x: _summed(x).sin(), (draw(6, 3),)),
    # What needs peers: the tests above, on several ranks.
    "edge_sum._SumOverHalo": "on several ranks",
    "exchange._Summing": "on several ranks",
    **dict.fromkeys(("boundary._Enter", "boundary._Leave", "boundary._Total"), "in tests/sharding"),
    "row_reads._Read": "in tests/sharding",
    # Float32 alone: a test of its own.
    "linear._Linear": "by itself",
    # Torch has no second derivative of it, and says so.
    "distributions._Gamma": "refused",
    # Refused by their backward, and on several ranks before.
    "tiled_reduce._Hop": "refused",
    "tiled_columns._ByChunk": "refused",
}


def functions() -> set[str]:
    """All autograd functions of the package."""
    sources = Path(kagome.__file__).parent.rglob("*.py")
    pattern = re.compile(r"^class (\w+)\((?:torch\.autograd\.)?Function\)", re.MULTILINE)
    return {f"{path.stem}.{name}" for path in sources for name in pattern.findall(path.read_text())}


def test_every_autograd_function_is_in_the_table():
    assert functions() == set(FUNCTIONS)


@pytest.mark.parametrize("name", [name for name, how in FUNCTIONS.items() if not isinstance(how, str)])
def test_an_autograd_function_can_be_differentiated_twice(name):
    function, inputs = FUNCTIONS[name]
    assert gradgradcheck(function, inputs)  # type: ignore[arg-type]


def test_a_product_of_float32_can_be_differentiated_twice():
    x, w, b = (draw(*shape).detach().float().requires_grad_() for shape in ((80, 5), (4, 5), (4,)))
    assert linear.suits(x, w)

    def twice(product: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(product(x, w, b).pow(3).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), (x, w, b))

    for one, two in zip(twice(linear.linear), twice(functional.linear), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-3)


def test_sums_within_a_bound_say_that_they_are_differentiated_once():
    with pytest.raises(ModelError, match="memory_gib"):
        refuse_second_derivative()
    with torch.no_grad():
        refuse_second_derivative()
