"""Gradients: summed the same on every rank and in any buckets, begun while backward still runs."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kagome import Parallel, Trainer
from kagome.comm.channel import Channel
from kagome.components import gradients
from kagome.components.gradients import Gradients, buckets_of
from kagome.errors import ModelError
from training import QUIET, graph, losses, model, settings

WORLDS = [1, 2, 3, 4]
SIZES = [1, 200, None]


class Odd(nn.Module):
    """A parameter used twice, one that nobody uses, one that not all ranks use, two number types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(4, 6), nn.Linear(6, 6)
        self.wide = nn.Linear(6, 5).double()
        self.some, self.unused = nn.Linear(5, 3).double(), nn.Linear(2, 2)
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor, some: bool) -> Tensor:
        x = self.twice(self.twice(self.first(x)).relu()) * self.scale + self.none.sum()
        x = self.wide(x.double())
        return self.some(x).sum() if some else x.sum()


def odd(rank: int, step: int) -> tuple[Odd, Tensor, bool]:
    """The same model on all ranks; input and use of a part differ by rank and step."""
    torch.manual_seed(3)
    mine = Odd()
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    return mine, x, rank == 0 or step == 3


def expected(size: int, step: int) -> list[Tensor | None]:
    """The ranks' gradients, added one after the other; zeros for those that a rank has not."""
    own = []
    for rank in range(size):
        mine, x, some = odd(rank, step)
        mine(x, some).backward()
        own.append([p.grad for p in mine.parameters()])
    total: list[Tensor | None] = []
    for column in zip(*own, strict=True):
        there = [g for g in column if g is not None]
        if not there:
            total.append(None)
            continue
        added = column[0] if column[0] is not None else torch.zeros_like(there[0])
        for grad in column[1:]:
            added = added + (torch.zeros_like(added) if grad is None else grad)
        total.append(added)
    return total


def sums(channel: Channel, size: int | None) -> list[tuple[int, bytes, list[float]]]:
    mine, _, _ = odd(channel.rank, 0)
    summing = Gradients(list(mine.parameters()), channel.beside(), size=size)
    jitter, found = random.Random(channel.rank), []
    for step in range(1, 5):
        _, x, some = odd(channel.rank, step)
        notes = (torch.tensor(1.5, dtype=torch.float64, requires_grad=True), float(channel.rank == 1))
        time.sleep(jitter.random() * 0.01)
        with summing.during(notes, f"step {step}"):
            mine(x, some).backward()
            time.sleep(jitter.random() * 0.01)
        early = len(summing._under_way)
        heard = summing.finish()
        bits = b""
        for parameter, right in zip(mine.parameters(), expected(channel.size, step), strict=True):
            assert (parameter.grad is None) == (right is None)
            if right is not None:
                assert torch.equal(parameter.grad, right)
                assert parameter.grad.dtype == parameter.dtype
                bits += right.numpy().tobytes()
        found.append((early, bits, heard))
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_ranks_gradients_added_in_their_order(ranks, world, size):
    found = ranks(world, sums, size)
    for rank in found:
        assert [step[1:] for step in rank] == [step[1:] for step in found[0]]
        assert [heard for _, _, heard in rank] == [[1.5 * world, float(world > 1)]] * 4
    if world == 1:
        return
    assert [rank[0][0] for rank in found] == [0] * world, "the first sum learns"
    if size == 1:
        # Parameters that some rank had no gradient for come last, and hold nobody up.
        assert all(rank[1][0] >= 7 for rank in found)


def halves(channel: Channel, dtype: torch.dtype) -> list[float]:
    mine = nn.Linear(3, 2, dtype=dtype)
    nn.init.ones_(mine.weight)
    summing = Gradients(list(mine.parameters()), channel.beside(), size=1)
    for _ in range(2):  # without and with overlap
        with summing.during((1.0 + 2.0**-12, torch.tensor(70_000.0)), "a step"):
            (mine.weight.sum() * (channel.rank + 1)).backward()
        found = summing.finish()
    assert mine.weight.grad.dtype == dtype
    assert mine.bias.grad is None
    assert set(mine.weight.grad.flatten().tolist()) == {sum(range(1, channel.size + 1))}
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_not_rounded_to_the_type_of_the_gradients(ranks, dtype):
    """The notes had the parameters' type: a loss of bf16 had 8 bits, and one of fp16 was infinite."""
    assert ranks(2, halves, dtype) == [[2.0 + 2.0**-11, 140_000.0]] * 2


def test_buckets_take_the_last_parameter_first_and_one_number_type_each():
    parameters = list(Odd().parameters())
    late = frozenset((6, 7))
    for size in (1, 100, 10_000):
        cut = buckets_of(parameters, size, late)
        assert sorted(place for bucket in cut for place in bucket) == list(range(len(parameters)))
        for bucket in cut:
            assert len({(parameters[place].dtype, place in late) for place in bucket}) == 1
            assert list(bucket) == sorted(bucket, reverse=True)
            assert size > 1 or len(bucket) == 1 or sum(parameters[p].nbytes for p in bucket[:-1]) < size
    assert [set(bucket) for bucket in buckets_of(parameters, 10_000, late)][-1] == {6, 7}
    assert buckets_of([], 1) == []


def alone(channel: Channel) -> None:
    mine, x, some = odd(0, 1)
    summing = Gradients(list(mine.parameters()), channel.beside())
    seen: dict[int, int] = {}
    with summing.during((2.0,), "a step"):
        mine(x, some).backward()
        seen = {k: p.grad.data_ptr() for k, p in enumerate(mine.parameters()) if p.grad is not None}
    assert summing.finish() == [2.0]
    assert seen == {k: p.grad.data_ptr() for k, p in enumerate(mine.parameters()) if p.grad is not None}
    assert not any(p._post_accumulate_grad_hooks for p in mine.parameters())


def test_one_rank_copies_nothing(ranks):
    ranks(1, alone)


class Twice(nn.Module):
    """Reentrant checkpoints run one layer in two backwards of their own: its parameters are visited twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(3, 3), True

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True) if self.reentrant else self.layer(x)
        return x.square().sum()


def twice(channel: Channel, from_the_first: bool) -> Any:
    torch.manual_seed(0)
    mine = Twice()
    summing = Gradients(list(mine.parameters()), channel.beside(), size=1)
    x = torch.ones(2, 3, requires_grad=True)
    for step in range(3):
        mine.reentrant = from_the_first or step == 2
        with summing.during((), "a step"):
            mine(x).backward()
        own = [p.grad.clone() for p in mine.parameters()] if summing.overlaps is not True else []
        summing.finish()
        for grad, parameter in zip(own, mine.parameters(), strict=False):
            torch.testing.assert_close(parameter.grad, grad * channel.size)
    return summing.overlaps


def test_a_parameter_that_backward_visits_twice_is_summed_afterwards(ranks):
    assert ranks(2, twice, True) == [False, False]


def refused(channel: Channel) -> str:
    with pytest.raises(ModelError) as caught:
        twice(channel, False)
    return str(caught.value)


def test_one_that_begins_to_be_visited_twice_is_refused(ranks):
    """Its sum would be on its way with half of it."""
    for text in ranks(2, refused, spoils=True):
        assert "got twice to one of shape [3" in text
        assert "--model.recompute" in text


def trained(channel: Channel, size: int, vertices: int) -> dict[str, Any]:
    gradients.BUCKET_BYTES, before = size, gradients.BUCKET_BYTES
    try:
        data, mine = graph(torch.float32), model("gat", 0.3)
        data.train_mask = data.train_mask & (torch.arange(data.num_nodes) < vertices)
        given = {"train": settings(clip=1.0), "parallel": Parallel(partitioner="contiguous")}
        with Trainer(mine, data, report=QUIET, **given) as trainer:
            summary = trainer.fit(5)
            return {
                "weights": {k: v.numpy().tobytes() for k, v in mine.state_dict().items()},
                "losses": losses(trainer),
                "buckets": len(trainer.engine.gradients.buckets),
                "training": len(trainer.engine.train_rows),
                "hidden": summary.get("hidden_share"),
                "sent": summary["bytes_per_epoch"]["weights"],
            }
    finally:
        gradients.BUCKET_BYTES = before


@pytest.mark.some(1)
@pytest.mark.parametrize("vertices", [200, 40])
def test_training_has_the_same_bits_in_any_buckets(ranks, vertices):
    """Also where some rank has no training vertex: its gradients come late, or not at all."""
    single, many = ranks(3, trained, 2**20, vertices), ranks(3, trained, 1, vertices)
    assert (min(r["training"] for r in single) == 0) == (vertices == 40)
    assert single[0]["buckets"] <= 2
    assert many[0]["buckets"] > 8
    for found in (*single, *many):
        assert found["weights"] == single[0]["weights"]
        assert found["losses"] == single[0]["losses"]
        assert 0.0 <= found["hidden"]["weights"] <= 1.0
        assert found["sent"] > 0
    assert "weights" not in (ranks(1, trained, 1, vertices)[0]["hidden"] or {})
