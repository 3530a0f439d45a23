"""Laws of draws: each gives its distribution, row by row, and the same on any ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions as dist, nn
from torch_geometric.data import Data

from convolutions import sample_graph
from kagome import check
from kagome.errors import ModelError
from kagome.graph.partition.partition import extract
from kagome.intercept.interceptor import Interceptor
from kagome.model.exact.distributions import LAWS
from kagome.model.exact.handlers import HANDLERS
from parity import alone, assert_equal, random_owner, split, whole

Rows = Callable[[Tensor, Tensor], Tensor]
"""Of rows of vertices and the edges."""

WIDE = 3

SAMPLED: dict[str, Callable[[Tensor], dist.Distribution]] = {
    "Normal": lambda h: dist.Normal(h, F.softplus(h) + 0.1),
    "Independent": lambda h: dist.Independent(dist.Normal(h, 1.0), 1),
    "TransformedDistribution": lambda h: dist.TransformedDistribution(
        dist.Normal(h, 1.0), [dist.TanhTransform()]
    ),
    "Uniform": lambda h: dist.Uniform(h, h + 1),
    "Laplace": lambda h: dist.Laplace(h, 1.0),
    "Gumbel": lambda h: dist.Gumbel(h, 1.0),
    "LogNormal": lambda h: dist.LogNormal(h, 1.0),
    "Exponential": lambda h: dist.Exponential(h.exp()),
    "Gamma": lambda h: dist.Gamma(h.exp(), h.exp()),
    "Beta": lambda h: dist.Beta(h.exp(), h.exp()),
    "Dirichlet": lambda h: dist.Dirichlet(h.exp()),
    "StudentT": lambda h: dist.StudentT(h.exp() + 1),
    "Bernoulli": lambda h: dist.Bernoulli(logits=h),
    "RelaxedBernoulli": lambda h: dist.RelaxedBernoulli(h.new_tensor(0.5), logits=h),
    "RelaxedOneHotCategorical": lambda h: dist.RelaxedOneHotCategorical(h.new_tensor(0.5), logits=h),
    "Categorical": lambda h: dist.Categorical(logits=h),
    "OneHotCategorical": lambda h: dist.OneHotCategorical(logits=h),
    "Poisson": lambda h: dist.Poisson(h.exp()),
    "Geometric": lambda h: dist.Geometric(logits=h),
    "Binomial": lambda h: dist.Binomial(4, logits=h),
    "MultivariateNormal": lambda h: dist.MultivariateNormal(h, torch.eye(h.size(1), dtype=h.dtype)),
    "VonMises": lambda h: dist.VonMises(h, h.exp()),
    "MixtureSameFamily": lambda h: dist.MixtureSameFamily(dist.Categorical(logits=h), dist.Normal(h, 1.0)),
}


def _distributed(make: Callable[[Tensor], dist.Distribution]) -> Rows:
    def rows(h: Tensor, e: Tensor) -> Tensor:
        law = make(h)
        out = law.rsample() if law.has_rsample else law.sample()
        return h * (out if out.dim() == 2 else out.unsqueeze(1))

    return rows


DRAWN: dict[str, Rows] = {
    **{name: _distributed(make) for name, make in SAMPLED.items()},
    "several samples": lambda h, e: dist.Normal(h, 1.0).rsample((WIDE,)).mean(0),
    "normal of tensors": lambda h, e: h * torch.normal(h, F.softplus(h)),
    "normal of a spread": lambda h, e: h * torch.normal(0.0, h.abs()),
    "normal of a size": lambda h, e: h * torch.normal(0.0, 1.0, h.shape, dtype=h.dtype),
    "rows along another axis": lambda h, e: h * torch.rand(WIDE, h.size(0), 1, dtype=h.dtype).mean(0),
    "randint": lambda h, e: h * torch.randint(2, 9, h.shape),
    "randint below": lambda h, e: h * torch.randint(9, (h.size(0), 1)),
    "randint of names": lambda h, e: h * torch.randint(low=1, high=9, size=(h.size(0), 1)),
    "randint_like": lambda h, e: h * torch.randint_like(h, 2, 9),
    "randint_like below": lambda h, e: h * torch.randint_like(h, 9),
    "rrelu": lambda h, e: F.rrelu(h, training=True),
    "rrelu in place": lambda h, e: F.rrelu(h.clone(), training=True, inplace=True),
    "alpha_dropout": lambda h, e: F.alpha_dropout(h, 0.3, True),
    "alpha_dropout in place": lambda h, e: F.alpha_dropout(h.clone(), 0.3, True, inplace=True),
    "feature_alpha_dropout": lambda h, e: F.feature_alpha_dropout(_deep(h, 1), 0.3, True).sum(2),
    "dropout1d of rows": lambda h, e: F.dropout1d(h, 0.3, True),
    "dropout1d": lambda h, e: F.dropout1d(_deep(h, 1), 0.3, True).sum(2),
    "dropout2d": lambda h, e: F.dropout2d(_deep(h, 2), 0.3, True).sum((2, 3)),
    "dropout2d in place": lambda h, e: F.dropout2d(_deep(h, 2).clone(), 0.3, True, True).sum((2, 3)),
    "dropout1d of columns": lambda h, e: F.dropout1d(h.t(), 0.3, True).t(),
    "multinomial": lambda h, e: h * torch.multinomial(h.softmax(1), 2).sum(1, keepdim=True),
    "multinomial again": lambda h, e: h * torch.multinomial(h.softmax(1), 9, True).sum(1, keepdim=True),
    "poisson": lambda h, e: h * torch.poisson(90 * h.exp()),
    "binomial": lambda h, e: h * torch.binomial(torch.full_like(h, 50.0), h.detach().sigmoid()),
    "random_": lambda h, e: h * torch.empty_like(h).random_(2, 9),
    "random_ of integers": lambda h, e: h * torch.empty_like(h, dtype=torch.long).random_(9),
    "cauchy_": lambda h, e: h * torch.empty_like(h).cauchy_().tanh(),
    "geometric_": lambda h, e: h * torch.empty_like(h).geometric_(0.3),
    "log_normal_": lambda h, e: h * torch.empty_like(h).log_normal_(),
    "new": lambda h, e: h * h.new(h.size()).normal_(),
    "trunc_normal_": lambda h, e: h * nn.init.trunc_normal_(torch.empty_like(h)),
    "edges": lambda h, e: _summed(h, e, dist.Normal(0.0, 1.0).sample((e.size(1), 1)).to(h.dtype)),
    "edges, alpha": lambda h, e: _summed(h, e, F.alpha_dropout(h[e[0]], 0.3, True)),
    "edges, by their ends": lambda h, e: _summed(
        h, e, dist.Bernoulli(torch.sigmoid((h[e[0]] * h[e[1]]).sum(1))).sample().unsqueeze(1)
    ),
    "a virtual node": lambda h, e: h + dist.Normal(h.mean(0, keepdim=True), 1.0).rsample(),
    "a virtual node, alpha": lambda h, e: h + F.alpha_dropout(h.mean(0, keepdim=True), 0.3, True),
    "a virtual node, one a row": lambda h, e: (
        h + F.dropout(h.mean(0, keepdim=True).expand(h.size(0), -1), 0.5, True)
    ),
    "an order": lambda h, e: h + h[torch.randperm(h.size(0))],
    "some of all": lambda h, e: h + h[torch.randint(0, h.size(0), (4,))].mean(0),
}


def _deep(h: Tensor, axes: int) -> Tensor:
    for _ in range(axes):
        h = h.unsqueeze(-1)
    return h.expand(*h.shape[:2], *[WIDE] * axes)


def _summed(h: Tensor, e: Tensor, weight: Tensor) -> Tensor:
    return h.new_zeros(h.size(0), h.size(1)).index_add_(0, e[1], h[e[0]] * weight)


class Drawing(nn.Module):
    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.lin, self.rows = nn.Linear(6, 5), rows

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x)
        return self.rows(h, edge_index) + _summed(h, edge_index, h.new_ones(1))


@pytest.mark.some(24)
@pytest.mark.parametrize("name", DRAWN)
def test_rows_draw_the_same_on_any_ranks(name):
    torch.manual_seed(0)
    found = check(Drawing(DRAWN[name]), sample_graph(1))
    assert found.first is None, found.text()
    assert any("with dropout" in row.name for row in found.rows)


REFUSED: dict[str, tuple[Rows, str]] = {
    "among all vertices": (lambda h, e: h * torch.multinomial(h.softmax(0)[:, 0], 4).sum(), "multinomial"),
    "an order of the edges": (lambda h, e: h + torch.randperm(e.size(1)).sum(), "randperm"),
    "a generator of your own": (
        lambda h, e: h * torch.bernoulli(h.sigmoid(), generator=torch.Generator()),
        "bernoulli",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_draws_of_rows_are_refused_as_draws(name):
    rows, call = REFUSED[name]
    with pytest.raises(
        ModelError, match=rf"{call}, whose random numbers are not made exact.*test_distributions"
    ):
        check(Drawing(rows), sample_graph(1))


@pytest.mark.parametrize("by", ["vertex", "edge"])
def test_rows_that_are_read_by_drawn_numbers_are_to_become_edges(by):
    def rows(h: Tensor, e: Tensor) -> Tensor:
        size = (h.size(0),) if by == "vertex" else (2, e.size(1))
        return h * h[torch.randint(0, h.size(0), size)].sum()

    with pytest.raises(ModelError, match=rf"(?s)by numbers that each {by} holds.*make edges of them"):
        check(Drawing(rows), sample_graph(1))


GENERATED: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "randn": lambda h, g: torch.randn(h.size(0), 5, generator=g),
    "rand": lambda h, g: torch.rand(h.shape, generator=g),
    "randint": lambda h, g: torch.randint(0, 5, h.shape, generator=g),
    "normal": lambda h, g: torch.normal(0.0, 1.0, h.shape, generator=g),
    "normal_": lambda h, g: torch.empty_like(h).normal_(1.0, 2.0, generator=g),
}


class Generated(nn.Module):
    """Draws all by a generator of its own, which begins in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h, generator = self.lin(x), torch.Generator().manual_seed(3)
        return sum(h * draw(h, generator) for draw in GENERATED.values())


@pytest.mark.parametrize("world", [1, 3])
def test_a_generator_of_the_user_s_draws_what_it_draws_in_plain_pyg(ranks, world):
    data = sample_graph(1)
    owner = random_owner(data.num_nodes, world)
    assert_equal(split(ranks, world, Generated, data, owner), whole(Generated, data))


# What they draw -----------------------------------------------------------------------------------

MANY = 20_000


KNOWN: dict[str, tuple[Callable[[Tensor], Tensor], dist.Distribution]] = {
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1, 2), dist.Uniform(-1.0, 2.0)),
    "normal": (lambda x: torch.normal(x + 3, 2.0), dist.Normal(3.0, 2.0)),
    "log_normal": (lambda x: x.clone().log_normal_(0.2, 0.5), dist.LogNormal(0.2, 0.5)),
    "exponential": (lambda x: x.clone().exponential_(2.0), dist.Exponential(2.0)),
    "bernoulli": (lambda x: torch.bernoulli(x + 0.3), dist.Bernoulli(0.3)),
    "geometric": (lambda x: x.clone().geometric_(0.3) - 1, dist.Geometric(0.3)),
    "poisson": (lambda x: torch.poisson(x + 2.5), dist.Poisson(2.5)),
    "many": (lambda x: torch.poisson(x + 200.0), dist.Poisson(200.0)),
    "binomial": (lambda x: torch.binomial(x + 7, x + 0.2), dist.Binomial(7, torch.tensor(0.2))),
    "often": (lambda x: torch.binomial(x + 100, x + 0.7), dist.Binomial(100, torch.tensor(0.7))),
    "gamma": (lambda x: torch._standard_gamma(x + 2.5), dist.Gamma(2.5, 1.0)),
    "below 1": (lambda x: torch._standard_gamma(x + 0.4), dist.Gamma(0.4, 1.0)),
    "beta": (lambda x: torch._sample_dirichlet(x + torch.tensor([2.0, 3.0]))[:, :1], dist.Beta(2.0, 3.0)),
    "integers": (lambda x: torch.randint_like(x, 2, 9), dist.Normal(5.0, 2.0)),
    "categories": (
        lambda x: torch.multinomial(x + torch.tensor([0.2, 0.0, 0.8, 0.0]), 1) / 2.0,
        dist.Bernoulli(0.8),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_law_has_the_mean_and_the_spread_of_its_distribution(name):
    draw, law = KNOWN[name]
    data = Data(x=torch.zeros(MANY, 1), edge_index=torch.zeros(2, 1, dtype=torch.long))
    scope = Interceptor(extract(data, torch.zeros(MANY, dtype=torch.long), 0, 1), alone(), handlers=HANDLERS)
    with scope.running(1, training=True):
        out = draw(scope.inputs["x"]).double()
    mean, spread = float(law.mean), float(law.stddev)
    assert float(out.mean()) == pytest.approx(mean, abs=5 * spread / MANY**0.5)
    assert float(out.std()) == pytest.approx(spread, rel=0.05)


def test_without_replacement_the_likely_ones_come_first():
    p = torch.tensor([0.6, 0.3, 0.1, 0.0]).expand(MANY, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = LAWS["multinomial"](
        lambda shape, place: torch.rand(shape, generator=generator, dtype=torch.float64),
        {"input": p, "num_samples": 3},
    )
    assert all(len(set(row)) == 3 for row in drawn[:200].tolist())
    assert 3 not in drawn
    counts = drawn[:, 0].bincount(minlength=3) / MANY
    assert torch.allclose(counts, torch.tensor([0.6, 0.3, 0.1]), atol=0.02)
    second = drawn[drawn[:, 0] == 0][:, 1].bincount(minlength=3) / (drawn[:, 0] == 0).sum()
    assert torch.allclose(second, torch.tensor([0.0, 0.75, 0.25]), atol=0.02)
