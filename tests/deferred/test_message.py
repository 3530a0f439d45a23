"""Messages are written down, not computed: which layers never make a row an edge, and what runs as it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions, parallelize
from kagome.deferred.lazy_tensor import EscapeError, LazyTensor
from kagome.graph.partition.partition import extract

VERTICES, EDGES, WIDTH = 80, 3000, 32


def graph(*, dtype: torch.dtype = torch.float64) -> Data:
    generator = torch.Generator().manual_seed(5)
    edge_index = torch.randint(0, VERTICES, (2, EDGES), generator=generator)
    x = torch.randn(VERTICES, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.rand(EDGES, generator=generator, dtype=dtype)
    return Data(x=x, edge_index=edge_index, edge_weight=weight, y=torch.zeros(VERTICES, dtype=torch.long))


class Wide(TorchDispatchMode):
    """Notes every tensor with at least a row an edge and half the features' columns that any call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if (
                isinstance(tensor, Tensor)
                and not isinstance(tensor, LazyTensor)
                and _stored(tensor) >= EDGES * WIDTH / 2
            ):
                self.found.append((str(func), tuple(tensor.shape)))
        return out


def _stored(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1)


def once(
    module: nn.Module, call: Callable[[nn.Module, dict[str, Tensor]], Tensor], *, fast: bool
) -> tuple[Tensor, list[Tensor | None], list[tuple[str, tuple[int, ...]]]]:
    """Output, gradients and wide tensors of one forward and backward of a layer on one rank."""
    data = graph()
    part = extract(data, torch.zeros(VERTICES, dtype=torch.long), 0, 1)
    part.nodes["x"] = data.x
    with parallelize(module, part, Channel(None, "cpu"), PartOptions(fast=fast)) as net:
        wide = Wide()
        for epoch in (1, 2):  # the second finds kept what may be kept
            module.zero_grad()
            wide.found.clear()
            with wide:
                with net.running(epoch, training=True):
                    out = call(module, net.scope.inputs)
                out.square().sum().backward()
        return out.detach(), [p.grad for p in module.parameters()], wide.found


def plain(module: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return module(inputs["x"], inputs["edge_index"])


def weighted(module: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return module(inputs["x"], inputs["edge_index"], inputs["edge_weight"])


def _layers() -> dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]]:
    h, c = 4, 8
    degree = torch.bincount(torch.bincount(graph().edge_index[1], minlength=VERTICES))
    mlp = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    return {
        "GCN": (lambda: pyg.GCNConv(WIDTH, WIDTH), plain),
        "GCN, weights": (lambda: pyg.GCNConv(WIDTH, WIDTH), weighted),
        "SAGE, mean": (lambda: pyg.SAGEConv(WIDTH, WIDTH), plain),
        "SAGE, max": (lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr="max"), plain),
        "SAGE, min, projected": (lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr="min", project=True), plain),
        "SAGE, narrowing": (lambda: pyg.SAGEConv(WIDTH, 4), plain),
        "GraphConv, weights": (lambda: pyg.GraphConv(WIDTH, WIDTH), weighted),
        "GIN": (lambda: pyg.GINConv(mlp()), plain),
        "SGC": (lambda: pyg.SGConv(WIDTH, WIDTH, K=3), plain),
        "TAG": (lambda: pyg.TAGConv(WIDTH, WIDTH), plain),
        "APPNP": (lambda: pyg.APPNP(K=3, alpha=0.1), plain),
        "GAT": (lambda: pyg.GATConv(WIDTH, c, heads=h), plain),
        "GAT, mean of heads": (lambda: pyg.GATConv(WIDTH, WIDTH, heads=h, concat=False), plain),
        "GATv2": (lambda: pyg.GATv2Conv(WIDTH, c, heads=h), plain),
        "GATv2, shared": (lambda: pyg.GATv2Conv(WIDTH, c, heads=h, share_weights=True), plain),
        "Transformer": (lambda: pyg.TransformerConv(WIDTH, c, heads=h), plain),
        "SuperGAT, MX": (lambda: pyg.SuperGATConv(WIDTH, c, heads=h), plain),
        "SuperGAT, SD": (lambda: pyg.SuperGATConv(WIDTH, c, heads=h, attention_type="SD"), plain),
        "GEN, softmax": (lambda: pyg.GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True), plain),
        "PNA": (
            lambda: pyg.PNAConv(
                WIDTH, WIDTH, ["mean", "min", "max", "std"], ["identity", "amplification"], degree
            ),
            plain,
        ),
        "Cheb": (lambda: pyg.ChebConv(WIDTH, WIDTH, K=3), plain),
        "LE": (lambda: pyg.LEConv(WIDTH, WIDTH), plain),
        "ClusterGCN": (lambda: pyg.ClusterGCNConv(WIDTH, WIDTH), plain),
    }


LAYERS = _layers()


@pytest.mark.parametrize("name", LAYERS)
def test_no_row_an_edge_is_made_and_nothing_else_comes_out(name: str) -> None:
    build, call = LAYERS[name]
    torch.manual_seed(1)
    module = build().double().train()
    slow, slow_grads, made = once(module, call, fast=False)
    assert made, "as PyG runs it, there are such tensors: else this test shows nothing"
    fast, fast_grads, found = once(module, call, fast=True)
    assert found == []
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)
    for one, other in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


# What is no known form runs as it was -----------------------------------------------------------------


class ByHand(nn.Module):
    """Gathers and scatters written out, without a PyG layer."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        sums = torch.zeros_like(x).index_add_(0, target, x[source])
        largest = x.new_zeros(x.shape).scatter_reduce_(
            0, target.view(-1, 1).expand(-1, x.size(1)), x[source], "amax", include_self=False
        )
        return sums + largest


def test_gathers_and_scatters_by_hand_go_the_same_way() -> None:
    fast, _, found = once(ByHand(), plain, fast=True)
    assert found == []
    torch.testing.assert_close(fast, once(ByHand(), plain, fast=False)[0], rtol=1e-12, atol=1e-12)


class Odd(nn.Module):
    """Uses a message in ways of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        message = x[source]
        if self.how == "in place":
            message.mul_(2.0).add_(1.0)
        elif self.how == "sorted columns":
            message = message.sort(dim=1).values
        elif self.how == "used twice":
            message = message * message + torch.sin(message)
        elif self.how == "cut":
            message, target = message[:100], target[:100]
        elif self.how == "weighted by itself":
            message = message * message.sum(1, keepdim=True)
        elif self.how == "unseen weight":
            message = message * torch.linspace(0, 1, message.size(0), dtype=x.dtype).view(-1, 1)
        return torch.zeros_like(x).index_add_(0, target, message)


@pytest.mark.parametrize(
    "how", ["in place", "sorted columns", "used twice", "cut", "weighted by itself", "unseen weight"]
)
def test_an_unknown_use_gets_the_numbers(how: str) -> None:
    fast, slow = (once(Odd(how), plain, fast=fast)[0] for fast in (True, False))
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


class Late(nn.Module):
    """Writes to rows after their neighbours have gathered them."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = x * 1.0
        message = rows[edge_index[0]]
        rows += 1.0
        return torch.zeros_like(x).index_add_(0, edge_index[1], message)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Unseen(nn.Module):
    """Hands a message to a function that torch does not show."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        message = _Twice.apply(x[edge_index[0]])
        return torch.zeros_like(x).index_add_(0, edge_index[1], message)


class LateEnds(nn.Module):
    """Writes to the rows at an end of a message after it has been joined with another, or viewed."""

    def __init__(self, how: str, end: str, softmax: bool = False) -> None:
        super().__init__()
        self.how, self.end, self.softmax = how, end, softmax

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        rows, own = x * 1.0, x * 2.0
        message = rows[source] if self.end == "source" else own[target]
        match self.how:
            case "joined":
                message = rows[source] + own[target]
            case "view":
                message = message.view(-1, 4, WIDTH // 4)
            case "unsqueezed":
                message = message.unsqueeze(1)
            case "a column":
                message = message[:, 3]
            case "halved columns":
                message = message[:, : WIDTH // 2]
        with torch.no_grad():
            (rows if self.end == "source" else own).mul_(3.0)
        if self.softmax:
            message = softmax(message, target, num_nodes=x.size(0))
        return x.new_zeros(x.size(0), *message.shape[1:]).index_add_(0, target, message)


class LateMap(MessagePassing):
    """Writes to a map's rows, which a message of the layer has read, before their sum."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.lin, self.used = nn.Linear(WIDTH, 2 * WIDTH, bias=False), used

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.lin(x)
        before = -rows if self.used else x.repeat(1, 2)
        message = rows[edge_index[0]]
        with torch.no_grad():
            rows.mul_(3.0)
        return before + torch.zeros_like(before).index_add_(0, edge_index[1], message)


_HOW = ["joined", "view", "unsqueezed", "a column", "halved columns"]
_LATE = {
    "gathered": Late,
    "unseen": Unseen,
    **{f"{how}, {end}": partial(LateEnds, how, end) for how in _HOW for end in ("source", "target")},
    **{f"softmax, {end}": partial(LateEnds, "joined", end, softmax=True) for end in ("source", "target")},
    "a map's rows": partial(LateMap, used=False),
    "a map's rows, computed before": partial(LateMap, used=True),
}


@pytest.mark.parametrize("build", _LATE.values(), ids=_LATE)
def test_what_cannot_be_put_off_is_refused_not_guessed(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(EscapeError):
        once(build().double(), plain, fast=True)
    once(build().double(), plain, fast=False)
