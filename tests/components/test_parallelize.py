"""A model is put on a part and taken off again: nested blocks, refusals, order, fast paths given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from convolutions import double_precision, sample_graph
from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.components.parallelize import ParallelModel, PartOptions, interceptor_of, parallelize
from kagome.config import Parallel, Train
from kagome.errors import ModelError
from kagome.graph.partition.partition import extract
from kagome.intercept.active import ActiveInterceptor
from kagome.model.exact import layer_rules
from parity import alone, random_owner

CPU = torch.device("cpu")


def on_part(model: nn.Module, options: PartOptions, *, ranks: int = 1, **given: Any) -> ParallelModel:
    channel: Channel = alone() if ranks == 1 else ThreadChannel(ThreadGroup(ranks), 0)
    part = extract(sample_graph(1), random_owner(30, ranks), 0, ranks)
    return parallelize(model, part, channel, options, **given)


SET_BY_PYG = "_use_segment_matmul_heuristic_output"
"""What a layer of PyG sets on itself when it first runs."""


def state(model: nn.Module) -> dict[str, object]:
    """Everything that hangs on each module, by identity."""
    return {
        f"{path}.{name}": dict(value) if isinstance(value, dict) else id(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != SET_BY_PYG
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([pyg.SAGEConv(6, 6), pyg.ChebConv(6, 4, 2)])
        self.norm = nn.BatchNorm1d(6)
        own = self.convs[0].forward
        self.convs[0].__dict__["forward"] = own  # a user's own: recomputation, hooks and rules restore it

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.norm(self.convs[0](x, edge_index)), edge_index)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_is_taken_off_as_it_was(recompute: bool) -> None:
    model = Net().double()
    before = state(model)
    net = on_part(model, PartOptions(recompute=recompute))
    assert state(model) == before
    for _ in range(2):
        with net, net:
            out = net.forward(1, training=True)
            out.sum().backward()
            with net:
                pass
            assert state(model) != before  # an inner block that ends takes nothing off
        model.zero_grad(set_to_none=True)
        assert state(model) == before
    assert net.scope.layer_replay.on


def test_an_error_takes_the_model_off_and_is_told_once_a_block() -> None:
    model, told = Net().double(), list[BaseException]()
    before, net = state(model), on_part(model, PartOptions(), tell=told.append)
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"), net, net:
        raise error
    assert told == [error, error]
    assert state(model) == before


def broken(module: Any, scope: Any) -> list[Any]:
    raise RuntimeError("a rule that fails")


def test_a_refusal_leaves_the_model_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = nn.ModuleList([Net(), pyg.WLConv()])
    before, net = state(refused), on_part(refused, PartOptions(), ranks=2)
    with pytest.raises(ModelError, match="WLConv"):
        net.__enter__()
    assert state(refused) == before
    model = Net()
    before, net = state(model), on_part(model, PartOptions(), ranks=2)
    monkeypatch.setattr(type(net.scope), "keeps", lambda *_: broken(None, None))
    with pytest.raises(RuntimeError, match="a rule that fails"):  # in hooks, after all rules
        net.__enter__()
    assert state(model) == before
    monkeypatch.undo()
    monkeypatch.setattr(layer_rules, "RULES", (*layer_rules.RULES, (nn.BatchNorm1d, broken)))
    with pytest.raises(RuntimeError, match="a rule that fails"):  # in rules, after some
        net.__enter__()
    assert state(model) == before
    monkeypatch.undo()
    with net:
        assert state(model) != before
    assert state(model) == before


# Fast paths ------------------------------------------------------------------------------------------


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class Hidden(nn.Module):
    """Gives a message to a function of its own, after a norm that has moved its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        message = _Twice.apply(self.norm(x)[edge_index[0]])
        return torch.zeros_like(x).index_add_(0, edge_index[1], message)


def test_what_fast_paths_cannot_follow_runs_again_without_them() -> None:
    with double_precision():
        model, plain, data = Hidden(), Hidden(), sample_graph(1)
        with on_part(model, PartOptions()) as net:
            out = net.forward(1, training=True)
        expected = plain(data.x, data.edge_index)
    assert "autograd function" in net.escape
    assert not net.scope.forward.fast
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, rtol=0, atol=1e-12)
    assert model.norm.num_batches_tracked == 1
    with on_part(Hidden().double(), PartOptions(fast=False)) as slow:
        slow.forward(1, training=True)
    assert not slow.escape


def test_errors_of_a_users_forward_are_explained_by_the_caller() -> None:
    class Wrong(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            raise KeyError("mine")

    with on_part(Wrong(), PartOptions()) as net:
        with pytest.raises(KeyError, match="mine"):
            net.forward(1, training=True)
        with pytest.raises(ModelError, match="explained") as caught:
            net.forward(1, training=True, explain=lambda error: ModelError("it is explained", str(error)))
        assert isinstance(caught.value.__cause__, KeyError)


# Options ---------------------------------------------------------------------------------------------


def test_options_of_a_runs_settings() -> None:
    train, parallel = Train(seed=3, amp="bf16"), Parallel(tensor=2, memory_gib=0.5)
    found = PartOptions.of(train, CPU, parallel, fast=False, recompute=True)
    kept = {"memory": 2**29, "recompute": True, "amp": True, "partial_sums": "off"}  # slices send rows
    assert found == PartOptions(CPU, 3, False, 2, **kept)
    assert PartOptions.of(Train(), fast=True) == PartOptions(seed=Train().seed)
    assert PartOptions.of(Train(), CPU, Parallel(graph=2, halo_sample=0.5), fast=True).sums_only
    bound = interceptor_of(extract(sample_graph(1), random_owner(30, 1), 0, 1), alone(), found).sliced.bound
    assert bound is not None
    assert bound.bytes == 2**29


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_a_layer_caches_is_kept_for_one_chunk_alone(chunks: int) -> None:
    part = extract(sample_graph(1), random_owner(30, 1), 0, 1)
    scopes = [interceptor_of(part, alone(), PartOptions()) for _ in range(chunks)]
    current = ActiveInterceptor([*scopes, *scopes])
    conv = pyg.GCNConv(6, 4, cached=True).double()
    model = nn.Sequential(conv)
    with ParallelModel(model, current.scope, PartOptions()), scopes[0].running(1, training=False):
        conv(scopes[0].inputs["x"], scopes[0].inputs["edge_index"])
        assert (conv._cached_edge_index is not None) == (chunks == 1)
    assert conv._cached_edge_index is None
