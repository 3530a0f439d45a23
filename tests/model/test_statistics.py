"""Statistics over all vertices, written by hand inside a forward: those of the whole graph on every part."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

import kagome
from kagome.errors import ModelError
from kagome.verify.check import check

EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0, True),
    "sum of all": lambda x: x / x.sum(),
    "std": lambda x: x / x.std(dim=0, keepdim=True),
    "var, biased, by place": lambda x: x / x.var(0, False),
    "var of all, biased, by place": lambda x: x / (x.var(False) + 1),
    "var and mean": lambda x: (x - torch.var_mean(x, 0)[1]) / torch.var_mean(x, 0)[0],
    "max": lambda x: x - x.max(0).values,
    "min": lambda x: x - x.min(0)[0],
    "max of all": lambda x: x - x.max(),
    "max with many equals": lambda x: x + x.relu().max(0, keepdim=True)[0],
    "amax with many equals": lambda x: x + x.relu().amax(0),
    "global max pool": lambda x: x + pyg.global_max_pool(x, None),
    "global mean pool of a batch of one": lambda x: (
        x + pyg.global_mean_pool(x, torch.zeros(x.size(0), dtype=torch.long))
    ),
    "normalize over vertices": lambda x: F.normalize(x, dim=0),
    "norm of all": lambda x: x / torch.linalg.norm(x),
    "vector norm": lambda x: x / torch.linalg.vector_norm(x, dim=0),
    "softmax over vertices": lambda x: x + x.softmax(0),
    "log softmax over vertices": lambda x: x + x.log_softmax(0),
    "softmin over vertices": lambda x: F.softmin(x, 0),
    "logsumexp": lambda x: x - x.logsumexp(0),
    "gram matrix": lambda x: x @ (x.t() @ x),
    "matrix by vector": lambda x: x + x.t().mv(x[:, 0]),
    "dot": lambda x: x * torch.dot(x[:, 0], x[:, 1]),
    "einsum": lambda x: torch.einsum("nf,fg->ng", x, torch.einsum("nf,ng->fg", x, x)),
    "sum over the number of rows": lambda x: x - x.sum(0) / x.size(0),
    "one over the number of rows": lambda x: x * (1 / x.size(0)),
    "root of the number of rows": lambda x: x * x.shape[0] ** -0.5,
    "math of the number of rows": lambda x: x * math.sqrt(x.size(0)),
    "any of numbers, none above 0": lambda x: x + (-x.relu()).any(0),
    "all of numbers, one of them 0": lambda x: x + (-x.relu()).all(0),
    "any and all of no rows": lambda x: x + x[x[:, 0] != x[:, 0]].any() + x[x[:, 0] != x[:, 0]].all(),
    "a branch by any of numbers": lambda x: x * 2 if (-x.relu()).any() else x,
    "count over both axes": lambda x: x / x.relu().count_nonzero(0, 1),
    "amax of what a mask has left": lambda x: x + masked(x).amax(0),
    "max of what a mask has left": lambda x: x + masked(x).max(0).values,
    "logsumexp of what a mask has left": lambda x: x + masked(x).logsumexp(0),
    "logsumexp of nothing": lambda x: x + x.masked_fill(x == x, -math.inf).logsumexp(0).clamp(min=-1),
    "amin of small integers": lambda x: x * kinds(x).amin(0),
    "norms of columns of 0": lambda x: x / (1 + one_column(x).norm(dim=0)),
    "deviation of columns of 0": lambda x: x / (1 + one_column(x).std(0)),
    "normalize columns of 0": lambda x: x + F.normalize(one_column(x), dim=0),
    "renorm of rows": lambda x: x.renorm(2, 0, 0.5),
    "special softmax over vertices": lambda x: x + torch.special.softmax(x, 0),
    "special log softmax over vertices": lambda x: x + torch.special.log_softmax(x, 0),
    "max pool of what a mask has left": lambda x: (
        x + pyg.global_max_pool(masked(x), torch.zeros(x.size(0), dtype=torch.long))
    ),
    "a linear layer of columns": lambda x: x @ F.linear(x.t(), x.t()),
    "rms norm of rows": lambda x: torch.rms_norm(x, (8,)),
}


def masked(x: Tensor) -> Tensor:
    """Rows of which a third are kept, and the others are infinite."""
    return x.masked_fill(torch.arange(x.size(0))[:, None] % 3 > 0, -math.inf)


def kinds(x: Tensor) -> Tensor:
    """The least number of a byte, in one row."""
    return torch.where(torch.arange(x.size(0))[:, None] == 7, -128, 3).to(torch.int8)


def one_column(x: Tensor) -> Tensor:
    """The first column, and 0 in the others."""
    return x * torch.eye(8)[0]


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "median": lambda x: x - x.median(0).values,
    "top k": lambda x: x - x.topk(2, dim=0).values.sum(0),
    "sort": lambda x: x.sort(0).values,
    "reading by position": lambda x: x + x[x.max(0).indices[0]],
    "cumulative sum": lambda x: x.cumsum(0),
    "differences": lambda x: x + torch.gradient(x, dim=0)[0],
    "the other way round": lambda x: x + torch.Tensor.__reversed__(x),
    "renorm of columns": lambda x: x.renorm(2, 1, 0.5),
    "rms norm over vertices": lambda x: torch.rms_norm(x.t(), (x.size(0),)).t(),
    "largest singular value": lambda x: x / torch.linalg.norm(x, 2),
    "largest column sum": lambda x: x / torch.linalg.norm(x, 1),
    "a linear layer of rows": lambda x: F.linear(x, x) @ x,
    "products of all pairs": lambda x: torch.inner(x, x) @ x,
    "no diagonal": lambda x: x + x.clone().fill_diagonal_(0),
    "what is lost, by a number a vertex": lambda x: x + x.quantile(0.5, dim=0)[x.argmax(1)][:, None],
    "an embedding of vertices": lambda x: x + F.embedding(x.argmax(1), x),
    "an embedding of what is lost": lambda x: x + F.embedding(x.argmax(1), torch.cdist(x, x)).sum(1, True),
}


class Between(nn.Module):
    """Two layers with a function of all rows between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(4, 8), pyg.SAGEConv(8, 3)
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.function(self.first(x, edge_index)), edge_index)


@pytest.fixture(scope="module")
def data():
    return kagome.load("sbm:vertices=60,degree=5,features=4,classes=3,communities=3")


@pytest.mark.some(24)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_statistic_is_the_whole_graphs(data, name, parts):
    torch.manual_seed(3)
    result = check(Between(EXACT[name]), data, parts=parts, vertices=60)
    assert result.worst < 1e-10, result.text()


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_over_all_vertices_is_refused(data, name):
    with pytest.raises(ModelError, match=r"Between|over all vertices|rows|test_statistics.py"):
        check(Between(REFUSED[name]), data, vertices=60)
