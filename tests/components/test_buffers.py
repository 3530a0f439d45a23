"""Buffers that a forward writes to or replaces: chunks have their own, probes put them back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.errors import ModelError
from kagome.model.buffers import Buffers
from kagome.pipelining.buffer_isolation import BufferIsolation
from pipelines import HIDDEN, data, told
from training import CLASSES, FEATURES


class Mean(nn.Module):
    """Takes a moving mean away."""

    mean: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            now = x.detach().mean(0)
            if self.how == "replaced":
                self.mean = 0.9 * self.mean + 0.1 * now
            elif self.how == "late":  # not in its first call, nor where it is looked at
                self.calls += 1
                if int(self.calls) > 1:
                    self.mean.mul_(0.9).add_(0.1 * now)
            elif self.how == "late, as ever":
                self.calls += 1
                self.mean.mul_(0.9).add_(0.1 * now) if int(self.calls) > 1 else self.mean.mul_(1)
            else:
                self.mean.mul_(0.9).add_(0.1 * now)
        return x * (1 + self.mean) if self.how == "kept by autograd" else x - self.mean


class Tenth(nn.Module):
    """A tenth in training, else nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * x if self.training else 0 * x


class Rooted(nn.Module):
    """A buffer of the model's own, which forward writes to behind the first layer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.layers = nn.ModuleList([pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, HIDDEN)])
        self.moves, self.out = Tenth(), pyg.SAGEConv(HIDDEN, HIDDEN)
        self.last = pyg.SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).tanh()
        self.mean.add_(self.moves(x.detach().mean(0) - self.mean))
        x = self.out(x - 0.1 * self.mean, edge_index).tanh()
        return self.last(x - self.mean.mean(), edge_index)


class Between(nn.Module):
    """Takes a mean away between two layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.mean, self.second = (
            pyg.SAGEConv(FEATURES, HIDDEN),
            Mean(how),
            pyg.SAGEConv(HIDDEN, CLASSES),
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.mean(self.first(x, edge_index)).tanh(), edge_index)


def trained(channel: Channel, how: str, parallel: dict[str, Any], epochs: int = 4) -> Any:
    torch.manual_seed(1)
    mine = Rooted() if how == "rooted" else Between(how)
    return told(mine.double(), data(), epochs, parallel, plain_steps=True)


CUTS = [{"chunks": 3, "cross_chunk": "exact"}, {"chunks": 3}, {"pipe": 2, "chunks": 3}]


@pytest.mark.parametrize(("one", "other"), [("replaced", "written to"), ("late", "late, as ever")])
@pytest.mark.parametrize("cut", CUTS, ids=["exact", "history", "stages"])
def test_how_a_buffer_is_moved_is_all_the_same(ranks, cut, one, other):
    world = cut.get("pipe", 1)
    first, second = (ranks(world, trained, how, cut)[0] for how in (one, other))
    torch.testing.assert_close(first["losses"], second["losses"], rtol=0, atol=1e-12)
    for name, value in first["weights"].items():
        torch.testing.assert_close(value, second["weights"][name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("cut", CUTS, ids=["exact", "history", "stages"])
def test_a_buffer_that_autograd_has_kept_may_move(ranks, cut):
    found = ranks(cut.get("pipe", 1), trained, "kept by autograd", cut)
    assert all(isinstance(rank, dict) for rank in found), found[0]
    assert all(rank["losses"] == found[0]["losses"] for rank in found)


def test_a_probe_moves_what_is_replaced_once(ranks):
    """A gradient is computed twice in it."""
    probed = ranks(2, trained, "replaced", {"graph": 2, "max_age": 1})
    plain = ranks(2, trained, "written to", {"graph": 2, "max_age": 1})
    assert probed[0]["losses"] == plain[0]["losses"]


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_model_s_own_buffer_has_an_owner(ranks, chunks):
    """That of the stage that writes to it, and reads it: a later one would have it as it was."""
    cut = {"chunks": chunks, "cross_chunk": "exact"}
    alone = ranks(1, trained, "rooted", cut)[0]
    for rank in ranks(2, trained, "rooted", {"pipe": 2, **cut}):
        assert isinstance(rank, dict), rank
        torch.testing.assert_close(rank["losses"], alone["losses"], rtol=0, atol=1e-10)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-10)


def test_a_buffer_of_two_stages_that_moves_late_is_refused():
    model = Mean("written to")
    isolation = BufferIsolation(Buffers(model), set(), alone=(), watches=True)
    refused = pytest.raises(ModelError, match="of 32 bytes, which first changes now")
    with refused, isolation.running(0, stays=True):
        model.mean += 1
    with BufferIsolation(Buffers(model), set(), alone=(), watches=False).running(0, stays=True):
        model.mean += 1  # an evaluation, or chunks that know nothing of each other


def test_one_buffer_in_two_places_is_one():
    model = nn.ModuleList([Mean("written to"), Mean("written to")])
    model[1].mean = model[0].mean
    buffers = Buffers(model)
    with buffers.unmoved():
        buffers.put({"0.mean": torch.ones(HIDDEN)})
        assert model[1].mean is model[0].mean
    assert model[1].mean is model[0].mean
    assert not model[0].mean.any()


def test_after_an_error_in_a_chunk_the_model_has_its_own_buffers():
    mine = Mean("written to")
    own = mine.mean
    isolation = BufferIsolation(Buffers(mine), {"mean"}, {"mean"}, watches=False)
    with pytest.raises(RuntimeError), isolation.running(1, stays=False):
        mine(torch.ones(2, HIDDEN + 1))
    assert mine.mean is own
    assert not own.any()


def test_buffers_are_put_back_after_an_error() -> None:
    norm = nn.BatchNorm1d(3)
    before, tensor = norm.running_mean.clone(), norm.running_mean

    def fails() -> None:
        with Buffers(norm).unmoved():
            norm(torch.rand(4, 3) + 5)
            norm.running_mean = torch.ones(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert norm.running_mean is tensor
    assert torch.equal(tensor, before)
