"""Two views of a part: the in-edges it holds, and the out-edges it fetches, the same edges flipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch_geometric.data import Data

from convolutions import sample_graph
from kagome.comm.channel import Channel
from kagome.graph.partition.partition import extract
from kagome.halo.forward_pass import ForwardPass
from kagome.sparse_ops.edge_view import EdgeView, in_view, out_view, pair_ids
from parity import alone, random_owner

CPU = torch.device("cpu")


def no_edges() -> Data:
    return Data(
        x=torch.zeros(5, 1), edge_index=torch.zeros(2, 0, dtype=torch.long), edge_weight=torch.zeros(0)
    )


GRAPHS: dict[str, tuple[Callable[[], Data], Callable[[int], Tensor]]] = {
    "random": (partial(sample_graph, 1), partial(random_owner, 30)),
    "one part empty": (partial(sample_graph, 1), lambda world: random_owner(30, world - 1)),
    "all in one part": (partial(sample_graph, 1), lambda world: torch.full((30,), world - 1)),
    "no edges": (no_edges, partial(random_owner, 5)),
}


def both_views(channel: Channel, data: Data, owner: Tensor) -> dict[str, object]:
    """What a rank holds, in original ids, and what its rows are after an exchange in each view."""
    part = extract(data, owner, channel.rank, channel.size)
    inward = in_view(part, channel, CPU)
    outward = out_view(inward, channel)
    named = inward.ids[: inward.rows.own].unsqueeze(1)
    forward_pass = ForwardPass(1, checked=True, device=CPU, grad=False)
    return {
        "own": part.own,
        "in": listed(inward),
        "out": listed(outward),
        "in order": [bool((view.edge_ids.diff() > 0).all()) for view in (inward, outward)],
        "given": (
            torch.equal(inward.given, inward.edge_index),
            torch.equal(outward.given, outward.edge_index.flip(0)),
        ),
        "fetched": [
            torch.equal(view.rows.gather(named, forward_pass, "ids").squeeze(1), view.ids)
            for view in (inward, outward)
        ],
        "halo": [view.ids[view.rows.own :] for view in (inward, outward)],
        "used": [
            torch.equal(view.edge_index[0].unique()[-halo:], torch.arange(view.rows.own, view.ids.numel()))
            for view in (inward, outward)
            if (halo := view.rows.halo)
        ],
    }


def listed(view: EdgeView) -> dict[str, Tensor]:
    ends = view.ids[view.edge_index]
    return {"read": ends[0], "owned": ends[1], "edge": view.edge_ids, **view.attributes}


def collected(ranks: Callable[..., list], world: int, name: str) -> tuple[Data, Tensor, list]:
    graph, owners = GRAPHS[name]
    data, owner = graph(), owners(world)
    held = [both_views(alone(), data, owner)] if world == 1 else ranks(world, both_views, data, owner)
    return data, owner, held


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_views_hold_each_edge_once_with_its_attributes(
    ranks: Callable[..., list], world: int, name: str
) -> None:
    data, owner, held = collected(ranks, world, name)
    names = [key for key in data.to_dict() if key.startswith("edge_") and key != "edge_index"]
    for way, (read, owned) in {"in": (0, 1), "out": (1, 0)}.items():
        edges = torch.cat([rank[way]["edge"] for rank in held])
        assert edges.sort().values.tolist() == list(range(data.num_edges))
        for number, rank in enumerate(held):
            got = rank[way]
            assert torch.equal(got["read"], data.edge_index[read, got["edge"]])
            assert torch.equal(got["owned"], data.edge_index[owned, got["edge"]])
            assert (owner[got["owned"]] == number).all()
            for key in names:
                assert torch.equal(got[key], data[key][got["edge"]]), key
    assert all(all(rank["in order"]) and all(rank["given"]) for rank in held)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("world", [2, 3])
def test_each_view_s_halo_is_what_it_reads_and_what_peers_send(
    ranks: Callable[..., list], world: int, name: str
) -> None:
    data, owner, held = collected(ranks, world, name)
    for number, rank in enumerate(held):
        assert all(rank["fetched"])
        assert all(rank["used"])
        for row, halo in enumerate(rank["halo"]):
            read = data.edge_index[row][owner[data.edge_index[1 - row]] == number]
            away = read[owner[read] != number].unique()
            assert halo.sort().values.tolist() == away.tolist()
            # By owner, then by id: the order in which the owners send.
            assert halo.tolist() == sorted(away.tolist(), key=lambda v: (int(owner[v]), v))


def test_one_rank_sees_the_whole_graph_both_ways_in_its_order() -> None:
    data = sample_graph(1)
    held = both_views(alone(), data, torch.zeros(30, dtype=torch.long))
    for way in ("in", "out"):
        assert held[way]["edge"].tolist() == list(range(120))
    assert torch.equal(torch.stack([held["in"]["read"], held["in"]["owned"]]), data.edge_index)
    assert [halo.numel() for halo in held["halo"]] == [0, 0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_equal_pairs_are_counted_in_their_order(pairs: list[tuple[int, int]]) -> None:
    ends = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t()
    expected = [pairs[:place].count(pair) for place, pair in enumerate(pairs)]
    assert pair_ids(ends[0], ends[1]).tolist() == expected
