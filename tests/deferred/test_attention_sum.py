"""Attention that only a sum reads is not stored; attention that is read elsewhere is right there too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from convolutions import double_precision, sample_graph
from kagome.components.parallelize import PartOptions, parallelize
from kagome.graph.partition.partition import extract
from kagome.kernels import ops
from parity import alone, assert_equal, one_rank, seeded, whole

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]


class One(nn.Module):
    """A layer of GAT, called in one way."""

    def __init__(self, layer: Callable[[], nn.Module], call: Forward) -> None:
        super().__init__()
        self.conv, self.call = layer(), call

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.call(self.conv, x, edge_index)


def gat(**more: object) -> nn.Module:
    settings: dict[str, object] = {"heads": 2, **more}
    return pyg.GATConv(sample_graph(1).x.size(1), 8, **settings)  # type: ignore[arg-type]


def plainly(conv: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    return conv(x, edge_index)


def with_weights(conv: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """The weights enter the result as well."""
    out, (_, alpha) = conv(x, edge_index, return_attention_weights=True)
    return out + (alpha**2).sum()


def hooked(conv: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """A hook on the weights changes the gradient of all that is computed from them."""
    out, (_, alpha) = conv(x, edge_index, return_attention_weights=True)
    if alpha.requires_grad:
        alpha.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return out + (alpha**2).sum()


def twice(conv: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    return conv(x, edge_index) + conv(2 * x, edge_index)


CASES: dict[str, tuple[Callable[[], nn.Module], Forward, int]] = {
    "heads": (gat, plainly, 0),
    "one head": (lambda: gat(heads=1), plainly, 0),
    "mean of heads": (lambda: gat(concat=False), plainly, 0),
    "no loops": (lambda: gat(add_self_loops=False), plainly, 0),
    "twice": (gat, twice, 0),
    "weights are read": (gat, with_weights, 1),
    "weights are hooked": (gat, hooked, 0),  # without fast paths
    # No loops for three heads: the kernels that store weights.
    "three heads": (lambda: gat(heads=3), plainly, 2),
    "dropout": (lambda: gat(dropout=0.5), plainly, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_stored_only_where_they_are_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, call, stored = CASES[case]
    data, calls = sample_graph(1), []
    data.edge_attr = None
    build = lambda: One(layer, call)  # noqa: E731
    if case != "dropout":
        assert_equal(one_rank(build, data, epochs=2), whole(build, data, epochs=2))
    plain = ops.softmax_sum
    monkeypatch.setattr(ops, "softmax_sum", lambda *args: calls.append(1) or plain(*args))
    part = extract(data, torch.zeros(data.num_nodes, dtype=torch.long), 0, 1)
    with double_precision(), parallelize(seeded(build, 0), part, alone(), PartOptions()) as net:
        net.forward(0, training=True, checked=True).square().sum().backward()
    assert len(calls) == stored
