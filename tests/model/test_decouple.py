"""Decoupled models: all maps first, all hops after; another model, with a reference of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import add_remaining_self_loops

from kagome.errors import ModelError
from kagome.model.decouple.decouple import Decoupled, decouple

V, E, WIDTH, CLASSES, RELATIONS = 30, 150, 6, 4, 3


def graph(seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(V, WIDTH, generator=generator, dtype=torch.float64),
        edge_index=torch.randint(0, V, (2, E), generator=generator),
        edge_type=torch.randint(0, RELATIONS, (E,), generator=generator),
    )


def dense(edge_index: Tensor, values: Tensor) -> Tensor:
    """A matrix that takes rows of sources to rows of targets."""
    out = torch.zeros(V, V, dtype=torch.float64)
    return out.index_put((edge_index[1], edge_index[0]), values, accumulate=True)


def gcn_matrix(edge_index: Tensor) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 by in-degrees, a loop that is there counted once."""
    edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=V)
    matrix = dense(edge_index, torch.ones(edge_index.size(1), dtype=torch.float64))
    scale = matrix.sum(1).rsqrt()
    return scale[:, None] * matrix * scale[None, :]


def rewritten(model: nn.Module) -> Decoupled:
    data = graph()
    few = {name: value[:2] for name, value in data.to_dict().items() if name != "edge_index"}
    return decouple(model.double(), {**few, "edge_index": torch.tensor([[0, 1], [1, 0]])})


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_gcn_is_its_maps_and_then_powers_of_its_matrix(layers: int) -> None:
    model = pyg.GCN(WIDTH, 7, layers, CLASSES)
    data, twin = graph(), rewritten(model)
    rows = data.x
    for place, conv in enumerate(model.convs):
        rows = conv.lin(rows) + conv.bias
        rows = rows.relu() if place < layers - 1 else rows
    expected = torch.linalg.matrix_power(gcn_matrix(data.edge_index), layers) @ rows
    torch.testing.assert_close(twin(data), expected, rtol=1e-12, atol=1e-12)


def test_sage_takes_means_with_the_own_row() -> None:
    model = pyg.GraphSAGE(WIDTH, 7, 2, CLASSES)
    data, twin = graph(), rewritten(model)
    one, two = model.convs
    rows = (one.lin_l(data.x) + one.lin_r(data.x)).relu()
    rows = two.lin_l(rows) + two.lin_r(rows)
    others = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    matrix = dense(others, torch.ones(others.size(1), dtype=torch.float64)) + torch.eye(V).double()
    matrix = matrix / matrix.sum(1, keepdim=True)
    torch.testing.assert_close(twin(data), matrix @ matrix @ rows, rtol=1e-12, atol=1e-12)


def attention_matrix(model: nn.Module, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix of a stack of GAT layers by all of their vectors, and the rows that it is applied to."""
    rows, layers = x, list(model.convs)
    ends = []
    for place, conv in enumerate(layers):
        heads = conv.lin(rows).view(V, conv.heads, conv.out_channels)
        ends.append(
            [torch.einsum("nhc,hc->n", heads, a[0]) / conv.heads for a in (conv.att_src, conv.att_dst)]
        )
        rows = (heads.flatten(1) if conv.concat else heads.mean(1)) + conv.bias
        rows = rows.relu() if place < len(layers) - 1 else rows
    source, target = (torch.stack(each).mean(0) for each in zip(*ends, strict=True))
    others = edge_index[:, edge_index[0] != edge_index[1]]
    edges = torch.cat([others, torch.arange(V).repeat(2, 1)], 1)
    logits = torch.nn.functional.leaky_relu(source[edges[0]] + target[edges[1]], 0.2)
    weights = dense(edges, logits.exp())
    return weights / weights.sum(1, keepdim=True), rows


def test_attention_is_one_matrix_by_the_vectors_of_the_models_layers() -> None:
    model = pyg.GAT(WIDTH, 6, 3, CLASSES, heads=2)
    data, twin = graph(), rewritten(model)
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}
    matrix, rows = attention_matrix(model, data.x, data.edge_index)
    expected, out = matrix @ matrix @ matrix @ rows, twin(data)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)

    goal, weights = torch.randn(V, CLASSES, dtype=torch.float64), list(model.parameters())
    wanted = torch.autograd.grad((expected * goal).sum(), weights)
    (out * goal).sum().backward()
    for (name, weight), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-9, atol=1e-12, msg=name)
        assert float(gradient.abs().max()) > 1e-6, name


def test_one_layer_of_one_head_attends_as_it_does_coupled() -> None:
    conv = pyg.GATConv(WIDTH, CLASSES)
    data, twin = graph(), rewritten(conv)
    torch.nn.init.zeros_(conv.bias)
    torch.testing.assert_close(twin(data), conv(data.x, data.edge_index), rtol=1e-12, atol=1e-12)


def test_dropout_of_attention_weights_stays() -> None:
    model, data = pyg.GATConv(WIDTH, CLASSES, dropout=0.5), graph()
    twin = rewritten(model)
    torch.nn.init.zeros_(model.bias)
    for mode in (True, False):
        model.train(mode)
        twin.train(mode)
        # A part of the graph draws other numbers; one part draws those of PyG's own layer.
        torch.manual_seed(3)
        expected = model(data.x, data.edge_index)
        torch.manual_seed(3)
        torch.testing.assert_close(twin(data), expected, rtol=1e-12, atol=1e-12)


class Relational(nn.Module):
    """Two R-GCN layers, the second by bases."""

    def __init__(self) -> None:
        super().__init__()
        self.one = pyg.RGCNConv(WIDTH, 7, RELATIONS)
        self.two = pyg.RGCNConv(7, CLASSES, RELATIONS, num_bases=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index, edge_type).relu(), edge_index, edge_type)


def test_relations_have_shares_that_are_trained() -> None:
    model = Relational()
    data, twin = graph(), rewritten(model)
    (operator,) = twin.operators
    with torch.no_grad():
        operator.share.copy_(torch.tensor([0.3, -0.2, 0.5, 1.0]))
    share = operator.share.softmax(0)
    matrix = share[-1] * torch.eye(V).double()
    for kind in range(RELATIONS):
        edges = data.edge_index[:, data.edge_type == kind]
        each = dense(edges, torch.ones(edges.size(1), dtype=torch.float64))
        matrix = matrix + share[kind] * each / each.sum(1, keepdim=True).clamp(min=1)
    rows = data.x @ (model.one.weight.mean(0) + model.one.root) + model.one.bias
    weight = torch.einsum("rb,bio->rio", model.two.comp, model.two.weight).mean(0)
    rows = rows.relu() @ (weight + model.two.root) + model.two.bias
    out = twin(data)
    torch.testing.assert_close(out, matrix @ matrix @ rows, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    assert operator.share.grad is not None
    assert float(operator.share.grad.abs().max()) > 1e-6


def test_the_model_stays_as_it_is_and_shares_its_weights() -> None:
    model = pyg.GCN(WIDTH, 7, 2, CLASSES).double()
    data = graph()
    before = model(data.x, data.edge_index)
    twin = rewritten(model)
    assert torch.equal(model(data.x, data.edge_index), before)
    assert {id(p) for p in model.parameters()} <= {id(p) for p in twin.parameters()}
    with torch.no_grad():
        next(iter(twin.model.parameters())).add_(1.0)
    assert not torch.equal(model(data.x, data.edge_index), before)


def test_a_layer_called_twice_has_two_hops() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.GCNConv(WIDTH, WIDTH)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(self.conv(x, edge_index).relu(), edge_index)

    model = Twice()
    data, twin = graph(), rewritten(model)
    rows = model.conv.lin((model.conv.lin(data.x) + model.conv.bias).relu()) + model.conv.bias
    matrix = gcn_matrix(data.edge_index)
    torch.testing.assert_close(twin(data), matrix @ matrix @ rows, rtol=1e-12, atol=1e-12)


def test_a_model_that_is_one_layer() -> None:
    conv = pyg.GCNConv(WIDTH, CLASSES)
    data, twin = graph(), rewritten(conv)
    torch.testing.assert_close(twin(data), conv(data.x, data.edge_index), rtol=1e-12, atol=1e-12)


def test_dropout_and_norms_between_maps_stay() -> None:
    model = pyg.GCN(WIDTH, 7, 2, CLASSES, dropout=0.5, norm="batch_norm")
    twin = rewritten(model)
    twin.train()
    torch.manual_seed(0)
    one = twin(graph())
    assert not torch.equal(one, twin(graph()))
    assert model.norms[0].module.num_batches_tracked == 2


class OwnMessage(pyg.GCNConv):
    """A layer that keeps PyG's forward and sends another message."""

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return x_j.relu()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gin": (partial(pyg.GIN, WIDTH, 7, 2, CLASSES), "GINConv: its sums grow"),
    "gatv2": (partial(pyg.GAT, WIDTH, 8, 2, CLASSES, v2=True), "GATv2Conv: its attention"),
    "appnp": (partial(pyg.APPNP, 3, 0.1), "APPNP: it is decoupled as it is"),
    "sgc": (partial(pyg.SGConv, WIDTH, CLASSES), "SGConv: it propagates before"),
    "sage max": (
        partial(pyg.SAGEConv, WIDTH, CLASSES, aggr="max"),
        "SAGEConv: its aggregation is 'max'",
    ),
    "rgcn sum": (
        partial(pyg.RGCNConv, WIDTH, CLASSES, RELATIONS, aggr="add"),
        "RGCNConv: its aggregation is 'add', and its hop takes a mean",
    ),
    "gcn mean": (
        partial(pyg.GCNConv, WIDTH, CLASSES, aggr="mean"),
        "GCNConv: its aggregation is 'mean', and its hop takes a sum",
    ),
    "gat max": (partial(pyg.GATConv, WIDTH, CLASSES, aggr="max"), "GATConv: its aggregation is 'max'"),
    "own message": (partial(OwnMessage, WIDTH, CLASSES), "OwnMessage: it has no rule that says"),
    "rgcn blocks": (
        partial(pyg.RGCNConv, WIDTH, CLASSES, RELATIONS, num_blocks=2),
        "RGCNConv: its weights are blocks",
    ),
    "gat edges": (
        partial(pyg.GATConv, WIDTH, CLASSES, edge_dim=2),
        "GATConv: its attention reads edge",
    ),
    "gcn reversed": (
        partial(pyg.GCNConv, WIDTH, CLASSES, flow="target_to_source"),
        "GCNConv: its messages run against the edges",
    ),
    "cheb": (partial(pyg.ChebConv, WIDTH, CLASSES, 2), "ChebConv: it has no rule that says"),
    "no layer": (partial(nn.Linear, WIDTH, CLASSES), "a Linear without one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decoupled_is_refused_by_name(name: str) -> None:
    build, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        rewritten(build())
