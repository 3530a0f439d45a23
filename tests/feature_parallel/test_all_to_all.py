"""Vertex slices to feature slices and back: nothing lost, nothing padded, each way the other's gradient."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.feature_parallel.all_to_all import AllToAll, SliceCut, by_head, even, everything
from kagome.halo.forward_pass import ForwardPass

COUNTS = {1: (5,), 2: (4, 3), 3: (4, 0, 3), 4: (2, 3, 1, 4)}


def running() -> ForwardPass:
    return ForwardPass(1, checked=True, device=torch.device("cpu"), grad=True)


@given(st.integers(0, 50), st.integers(1, 9))
def test_an_even_cut_takes_each_column_once(width: int, ranks: int) -> None:
    cut = even(width, ranks)
    assert (cut.begins[0], cut.ends[-1], cut.width) == (0, width, width)
    assert all(one == two for one, two in zip(cut.ends[:-1], cut.begins[1:], strict=True))
    taken = [cut.taken(rank) for rank in range(ranks)]
    assert max(taken) - min(taken) <= 1
    assert not cut.overlaps


@given(st.integers(1, 9), st.integers(0, 7), st.integers(1, 9))
def test_a_cut_by_head_leaves_no_rank_with_parts_of_two_heads(heads: int, each: int, ranks: int) -> None:
    columns, touched = by_head(heads, each, ranks)
    places = [place for rank in range(ranks) for place in range(columns.width)[columns.of(rank)]]
    assert places == list(range(heads * each))
    for rank in range(ranks):
        mine = {place // each for place in range(columns.width)[columns.of(rank)]}
        assert mine <= set(range(heads)[touched.of(rank)])
        whole = columns.taken(rank) == touched.taken(rank) * each
        assert whole or touched.taken(rank) == 1
    assert {head for rank in range(ranks) for head in range(heads)[touched.of(rank)]} == set(range(heads))


def there_and_back(
    channel: ThreadChannel | Channel, rows: Tensor, cut: SliceCut
) -> tuple[Tensor, Tensor, Tensor]:
    """The part in feature slices, what came back, and the gradient of a weighted sum of the part."""
    counts = COUNTS[channel.size]
    mine = rows.split(counts)[channel.rank].clone().requires_grad_()
    forward_pass, way = running(), AllToAll(counts, channel)
    part = way.split(mine, cut, forward_pass, "site")
    back = way.gather(part, cut, forward_pass, "site") if not cut.overlaps else mine
    weights = torch.arange(1.0, 1.0 + part.numel()).view_as(part) * (channel.rank + 1)
    ((part * weights).sum() + back.square().sum() + forward_pass.token).backward()
    assert mine.grad is not None
    return part.detach(), back.detach(), mine.grad


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [0, 1, 5, 8])
@pytest.mark.parametrize("kind", ["even", "heads", "everything"])
def test_there_and_back(size: int, width: int, kind: str) -> None:
    cut = {
        "even": even(width, size),
        "heads": by_head(1, width, size)[0],
        "everything": everything(width, size),
    }
    rows = torch.randn(sum(COUNTS[size]), width)
    chosen = cut[kind]
    found = ThreadGroup(size).run(lambda channel: there_and_back(channel, rows, chosen))
    expected = 2 * rows
    for rank, (part, _, _) in enumerate(found):
        assert torch.equal(part, rows[:, chosen.of(rank)])
        weights = torch.arange(1.0, 1.0 + part.numel()).view_as(part) * (rank + 1)
        expected[:, chosen.of(rank)] += weights
    assert torch.equal(torch.cat([back for _, back, _ in found]), rows)
    torch.testing.assert_close(torch.cat([grad for _, _, grad in found]), expected)


def bytes_of(channel: Channel, width: int) -> list[int]:
    """What this rank sends to split, to gather, and back from each."""
    counts, found = COUNTS[channel.size], []
    cut, forward_pass = even(width, channel.size), running()
    way = AllToAll(counts, channel)
    mine = torch.randn(counts[channel.rank], width, dtype=torch.float64, requires_grad=True)
    channel.take_traffic()
    part = way.split(mine, cut, forward_pass, "site")
    found.append(channel.take_traffic().bytes["transpose"])
    out = way.gather(part * 2, cut, forward_pass, "site")
    found.append(channel.take_traffic().bytes["transpose"])
    (out.sum() + forward_pass.token).backward()
    found.append(channel.take_traffic().bytes["transpose"])
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("width", [3, 8])
def test_bytes_are_those_of_the_columns_of_others(ranks: Callable[..., list], size: int, width: int) -> None:
    counts, cut = COUNTS[size], even(width, size)
    once = 8 * (sum(counts) * width - sum(n * cut.taken(rank) for rank, n in enumerate(counts)))
    found = ranks(size, bytes_of, width)
    assert [sum(each) for each in zip(*found, strict=True)] == [once, once, 2 * once]


def test_a_cut_says_which_columns() -> None:
    cut = even(7, 3)
    assert [range(7)[cut.of(rank)] for rank in range(3)] == [range(3), range(3, 5), range(5, 7)]
    assert all(later >= earlier for earlier, later in pairwise(cut.begins))
    assert everything(4, 2).overlaps
