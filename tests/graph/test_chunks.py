"""Properties of chunks on random graphs: nothing lost, nothing twice, and both ends of a message agree."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch_geometric.data import Data

from graphs import multigraphs
from kagome.graph.partition.chunks import Chunks, ChunkStep, alone, cut_part, order_of, plan_steps
from kagome.graph.partition.merged_chunks import at_once, together
from kagome.graph.partition.partition import Partition, partition

METHODS = ("metis", "contiguous", "random")


@dataclass
class Case:
    """A graph in parts in chunks, and what an epoch's steps are."""

    data: Data
    parts: list[Partition]
    chunks: list[Chunks]
    orders: list[tuple[int, ...]]
    scale: float

    @property
    def count(self) -> int:
        return len(self.chunks[0].pieces)

    def planned(self, *, refresh: bool) -> list[tuple[ChunkStep, ...]]:
        """The steps of each part, with what ``Tables`` asks the peers for."""
        return [
            plan_steps(
                chunks,
                self.orders[number],
                self.orders,
                self.halo_chunk(number),
                self.sent_read_by(number),
                scale=self.scale,
                refresh=refresh,
            )
            for number, chunks in enumerate(self.chunks)
        ]

    def ids(self, part: int) -> Tensor:
        """The original id at each place of a part's table."""
        mine = self.parts[part]
        return torch.cat([mine.own[self.chunks[part].rows], mine.halo])

    def owner(self, vertex: int) -> tuple[int, int]:
        """Part and chunk of a vertex."""
        return next(
            (number, piece.number)
            for number, chunks in enumerate(self.chunks)
            for piece in chunks.pieces
            if vertex in piece.part.own.tolist()
        )

    def step(self, vertex: int) -> int:
        part, chunk = self.owner(vertex)
        return self.orders[part].index(chunk)

    def halo_chunk(self, part: int) -> Tensor:
        return torch.tensor([self.owner(v)[1] for v in self.parts[part].halo.tolist()], dtype=torch.int64)

    def sent_read_by(self, part: int) -> Tensor:
        ids, rows, at = self.ids(part), [], 0
        for reader, many in enumerate(self.chunks[part].send_counts):
            for vertex in ids[self.chunks[part].send[at : at + many]].tolist():
                place = self.parts[reader].halo.tolist().index(vertex)
                rows.append(self.chunks[reader].read_by[place])
            at += many
        return torch.stack(rows) if rows else torch.empty(0, self.count, dtype=torch.bool)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data = draw(multigraphs())
    parts = partition(data, parts=draw(st.integers(1, 3)), method=draw(st.sampled_from(METHODS)))
    count = draw(st.integers(1, 6))
    method = draw(st.sampled_from(METHODS))
    chunks = [cut_part(part, count, method=method, seed=1) for part in parts]
    orders = [tuple(draw(st.permutations(range(count)))) for _ in parts]
    return Case(data, parts, chunks, orders, draw(st.sampled_from([1.0, 2.0, 3.5])))


@given(case=cases())
@settings(deadline=None)
def test_every_row_is_in_one_chunk_with_all_edges_that_end_in_it(case):
    for part, chunks in zip(case.parts, case.chunks, strict=True):
        assert chunks.table == part.own.numel() + part.halo.numel()
        own = torch.cat([piece.part.own for piece in chunks.pieces])
        assert torch.equal(own, part.own[chunks.rows])
        assert torch.equal(own.sort().values, part.own)
        edges = torch.cat([piece.part.edge_ids for piece in chunks.pieces])
        assert torch.equal(edges.sort().values, part.edge_ids.sort().values)
        for piece in chunks.pieces:
            mine = piece.part
            assert torch.equal(mine.own, mine.own.sort().values)  # as a part has them
            ids = torch.cat([mine.own, mine.halo])
            named = torch.stack([ids[mine.edge_index[0]], mine.own[mine.edge_index[1]]])
            assert torch.equal(named, case.data.edge_index[:, mine.edge_ids])
            assert not len(set(mine.halo.tolist()) & set(mine.own.tolist()))
            assert len(set(mine.halo.tolist())) == mine.halo.numel()


@given(case=cases())
@settings(deadline=None)
def test_edges_keep_the_order_of_the_graph_and_attributes_go_along(case):
    for part, chunks in zip(case.parts, case.chunks, strict=True):
        for piece in chunks.pieces:
            mine = piece.part
            assert (mine.edge_ids.diff() > 0).all()
            for row, vertex in enumerate(mine.own.tolist()):
                there = part.edge_ids[part.edge_index[1] == part.own.tolist().index(vertex)]
                assert torch.equal(mine.edge_ids[mine.edge_index[1] == row], there)
            assert torch.equal(mine.nodes["x"], case.data.x[mine.own])
            for name in ("edge_weight", "edge_attr"):
                assert torch.equal(mine.edges[name], case.data[name][mine.edge_ids])


@given(case=cases())
@settings(deadline=None)
def test_places_of_the_table_name_the_rows_that_they_hold(case):
    for number, (part, chunks) in enumerate(zip(case.parts, case.chunks, strict=True)):
        ids = case.ids(number)
        assert torch.equal(ids[chunks.send], part.own[part.send])
        assert chunks.chunk_of.tolist() == [case.owner(v)[1] for v in ids[: chunks.own].tolist()]
        for piece in chunks.pieces:
            assert torch.equal(ids[piece.first : piece.first + piece.own], piece.part.own)
            assert torch.equal(ids[piece.reads], piece.part.halo)
            reads = [place - chunks.own for place in piece.reads.tolist() if place >= chunks.own]
            assert chunks.read_by[:, piece.number].nonzero().view(-1).tolist() == reads


@given(case=cases())
@settings(deadline=None)
def test_a_chunk_alone_has_the_edges_inside_it(case):
    for chunks in case.chunks:
        for piece in chunks.pieces:
            inner = alone(piece)
            assert inner.halo.numel() == 0
            assert torch.equal(inner.own, piece.part.own)
            source, target = case.data.edge_index
            mine = torch.isin(source, inner.own) & torch.isin(target, inner.own)
            assert sorted(inner.edge_ids.tolist()) == mine.nonzero().view(-1).tolist()
            named = torch.stack([inner.own[inner.edge_index[0]], inner.own[inner.edge_index[1]]])
            assert torch.equal(named, case.data.edge_index[:, inner.edge_ids])
            assert torch.equal(inner.edges["edge_attr"], case.data.edge_attr[inner.edge_ids])


# Steps -------------------------------------------------------------------------------------------


@given(case=cases(), refresh=st.booleans())
@settings(deadline=None)
def test_fresh_is_what_an_earlier_step_wrote_or_a_peer_in_the_same_step(case, refresh):
    for number, steps in enumerate(case.planned(refresh=refresh)):
        chunks = case.chunks[number]
        assert [step.chunk for step in steps] == list(case.orders[number])
        for at, step in enumerate(steps):
            piece = chunks.pieces[step.chunk]
            assert step.source.numel() == piece.reads.numel()
            fresh = dict(zip(step.fresh.tolist(), step.scale.tolist(), strict=True))
            for place, vertex in enumerate(piece.part.halo.tolist()):
                read, written = int(piece.reads[place]), case.step(vertex)
                is_own = case.owner(vertex)[0] == number
                if written < at or (written == at and not is_own):
                    assert int(step.source[place]) == read
                    assert fresh.pop(place) == (case.scale if written < at else 1.0)
                else:
                    assert int(step.source[place]) == read + chunks.table
            assert not fresh


@given(case=cases(), refresh=st.booleans())
@settings(deadline=None)
def test_what_leaves_a_part_is_what_comes_to_the_others_in_the_same_order(case, refresh):
    planned = case.planned(refresh=refresh)
    for at in range(case.count):
        sent, come = {}, {}
        for number, steps in enumerate(planned):
            step, ids = steps[at], case.ids(number)
            assert len(step.send_counts) == len(step.recv_counts) == len(case.parts)
            leaves, comes = ids[step.send].split(step.send_counts), ids[step.recv].split(step.recv_counts)
            for peer in range(len(case.parts)):
                sent[number, peer], come[peer, number] = leaves[peer].tolist(), comes[peer].tolist()
            assert sent[number, number] == []
            chunk = case.chunks[number].pieces[step.chunk]
            assert set(ids[step.send].tolist()) <= set(chunk.part.own.tolist())
        assert sent == come


@given(case=cases(), refresh=st.booleans())
@settings(deadline=None)
def test_a_fresh_halo_row_has_come_when_it_is_read_and_comes_once(case, refresh):
    for number, steps in enumerate(case.planned(refresh=refresh)):
        chunks, there = case.chunks[number], set()
        for step in steps:
            come = step.recv.tolist()
            assert not there & set(come)
            assert len(set(come)) == len(come)
            there |= set(come)
            fresh = chunks.pieces[step.chunk].reads[step.fresh]
            assert set(fresh[fresh >= chunks.own].tolist()) <= there
        halo = set(range(chunks.own, chunks.table))
        assert there == halo if refresh else there <= halo


@given(case=cases())
@settings(deadline=None)
def test_only_rows_that_are_read_in_time_travel_between_refreshes(case):
    """All of what was kept may be historical; a row goes where some chunk reads it then or later."""
    for number, steps in enumerate(case.planned(refresh=False)):
        ids = case.ids(number)
        come = {vertex for step in steps for vertex in ids[step.recv].tolist()}
        read = {
            int(vertex)
            for step in steps
            for place, vertex in enumerate(case.chunks[number].pieces[step.chunk].part.halo)
            if place in step.fresh.tolist() and case.owner(int(vertex))[0] != number
        }
        assert come == read


@given(case=cases(), refresh=st.booleans())
@settings(deadline=None)
def test_with_one_chunk_all_is_fresh_and_as_the_part_has_it(case, refresh):
    chunks = [cut_part(part, 1) for part in case.parts]
    case = replace(case, chunks=chunks, orders=[(0,)] * len(chunks))
    for part, whole, (step,) in zip(case.parts, chunks, case.planned(refresh=refresh), strict=True):
        assert torch.equal(step.send, part.send)
        assert (step.send_counts, step.recv_counts) == (part.send_counts, part.recv_counts)
        assert step.fresh.numel() == part.halo.numel()
        assert step.scale.tolist() == [1.0] * part.halo.numel()
        assert torch.equal(whole.pieces[0].part.edge_index, part.edge_index)


# Orders ------------------------------------------------------------------------------------------


@given(count=st.integers(1, 40), seed=st.integers(0, 2**31), epoch=st.integers(0, 10_000))
def test_an_order_is_a_permutation_that_every_rank_finds(count, seed, epoch):
    for part in range(3):
        order = order_of(count, seed=seed, epoch=epoch, part=part)
        assert sorted(order) == list(range(count))
        assert order == order_of(count, seed=seed, epoch=epoch, part=part)
        unshuffled = order_of(count, seed=seed, epoch=epoch, part=part, shuffle=False)
        assert unshuffled == tuple(range(count))


def test_orders_differ_between_epochs_parts_and_seeds():
    keys = itertools.product(range(3), range(1, 20), range(4))
    found = {order_of(12, seed=seed, epoch=epoch, part=part) for seed, epoch, part in keys}
    assert len(found) == 3 * 19 * 4


def test_an_order_leaves_torch_s_generator_alone():
    before = torch.random.get_rng_state()
    order_of(8, seed=1, epoch=2, part=0)
    assert torch.equal(torch.random.get_rng_state(), before)


@given(case=cases(), refresh=st.booleans())
@settings(deadline=None, max_examples=40)
def test_all_chunks_together_are_what_they_are_apart(case, refresh):
    """The same edges, in the graph's order, each reading the same place of the table, fresh or historical."""
    for number, steps in enumerate(case.planned(refresh=refresh)):
        chunks = case.chunks[number]
        part = case.parts[number]
        whole, step = together(part, chunks), at_once(steps)
        source, target = whole.part.edge_index
        assert torch.equal(whole.part.own, part.own)
        assert torch.equal(target, part.edge_index[1])
        assert torch.equal(chunks.rows[whole.places], torch.arange(chunks.own))
        reads = torch.cat([whole.places, step.source])
        apart, edges, scales = [], [], []
        for each in sorted(steps, key=lambda each: each.chunk):
            piece = chunks.pieces[each.chunk]
            places = torch.cat([torch.arange(piece.first, piece.first + piece.own), each.source])
            apart.append(places[piece.part.edge_index[0]])
            edges.append(piece.part.edge_ids)
            scales.append(torch.zeros(each.source.numel()).index_copy(0, each.fresh, each.scale))
        ids, order = torch.cat(edges).sort()
        assert torch.equal(reads[source], torch.cat(apart)[order])
        assert torch.equal(whole.part.edge_ids, ids)
        found = torch.zeros(step.source.numel()).index_copy(0, step.fresh, step.scale)
        assert torch.equal(found, torch.cat(scales))
        assert torch.equal(whole.part.halo, case.ids(number)[whole.reads])


@given(case=cases(), refresh=st.booleans())
@settings(deadline=None, max_examples=40)
def test_all_steps_at_once_send_what_the_peers_expect(case, refresh):
    steps = [at_once(steps) for steps in case.planned(refresh=refresh)]
    for one, other in itertools.permutations(range(len(steps)), 2):
        sent = steps[one].send.split(steps[one].send_counts)[other]
        come = steps[other].recv.split(steps[other].recv_counts)[one]
        assert torch.equal(case.ids(one)[sent], case.ids(other)[come])
