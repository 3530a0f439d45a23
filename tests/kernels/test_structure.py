from __future__ import annotations

from weakref import ref

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kagome.errors import DataError
from kagome.kernels import ops
from kagome.kernels.base.csr import LARGEST, Structure, _sorted
from kernel_cases import cases


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_entries_are_sorted_and_know_their_edge(data):
    s = data.draw(cases(most=300)).structure
    ends = list(zip(s.source.tolist(), s.target.tolist(), strict=True))
    order = sorted(range(s.edges), key=lambda e: (ends[e][1], ends[e][0] >= s.own, ends[e][0], e))
    layout = s.by_target
    assert layout.edge.tolist() == order
    assert layout.column.tolist() == [ends[e][0] for e in order]
    assert layout.pointer.diff().tolist() == [sum(t == i for _, t in ends) for i in range(s.own)]
    own = [sum(t == i and u < s.own for u, t in ends) for i in range(s.own)]
    assert (layout.middle - layout.pointer[:-1]).tolist() == own
    assert torch.equal(s.degree, layout.pointer.diff())

    order = sorted(range(s.edges), key=lambda e: (*ends[e], e))
    layout = s.by_source
    assert layout.edge.tolist() == order
    assert layout.column.tolist() == [ends[e][1] for e in order]
    assert layout.pointer.diff().tolist() == [sum(u == i for u, _ in ends) for i in range(s.num_sources)]
    assert torch.equal(layout.middle, layout.pointer[1:])
    for layout in (s.by_target, s.by_source):
        assert layout.pointer.dtype == layout.middle.dtype == torch.int64
        assert layout.column.dtype == layout.edge.dtype == torch.int32


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_the_sort_of_other_devices_gives_the_same(data):
    s = data.draw(cases(most=300)).structure
    for counted, argsorted in [
        (s.by_target, _sorted(s.target, s.source, s.own, s.num_sources, s.own)),
        (s.by_source, _sorted(s.source, s.target, s.num_sources, s.own, s.own)),
    ]:
        for name in ("pointer", "middle", "column", "edge"):
            assert torch.equal(getattr(counted, name), getattr(argsorted, name))


def test_views_of_an_edge_list_are_taken():
    pairs = torch.tensor([[3, 1], [0, 0], [2, 1]])
    layout = Structure(pairs[:, 0], pairs[:, 1], 2, 4).by_target
    assert layout.column.tolist() == [0, 2, 3]


def test_bytes_of_what_is_built():
    s = Structure(torch.arange(10), torch.arange(10) // 2, 5, 10)
    assert s.nbytes == 0
    _ = s.by_target
    assert s.nbytes == 4 * 10 + 8 * 6 + 8 * 5
    assert s.by_target.rows == 5
    assert s.by_target.edges == s.edges == 10
    before = s.nbytes
    assert s.by_source.rows == 10
    # middle is a view of the pointer.
    assert s.nbytes == before + 4 * 10 + 8 * 11


@pytest.mark.parametrize("span", ["all", "own", "halo"])
def test_only_sums_with_weights_keep_the_edge_of_each_entry(span):
    """A sum without weights reads 4 bytes an edge; one with weights finds the edges then, the same ones."""
    generator = torch.Generator().manual_seed(2)
    source, target = (torch.randint(0, n, (60,), generator=generator) for n in (9, 6))
    x, weight = torch.randn(9, 5, dtype=torch.float64, generator=generator), torch.rand(60).double()
    s, known = Structure(source, target, 6, 9), Structure(source, target, 6, 9).with_edges()
    halo = {"all": 0, "own": 0, "halo": 6}[span]
    kept = []
    for edges in (None, weight):
        sums = [ops.sum_rows(each.by_target, x[halo:], edges, span=span, offset=halo) for each in (s, known)]
        assert torch.equal(*sums)
        assert torch.equal(*(ops.sum_rows(each.by_source, sums[0], edges) for each in (s, known)))
        kept.append(s.nbytes)
    of_span = {"all": 0, "own": int((source < 6).sum()), "halo": int((source >= 6).sum())}[span]
    assert kept[1] - kept[0] == 4 * (60 + 60 + of_span)
    assert s.nbytes == known.nbytes
    assert torch.equal(s.by_target.edge, known.by_target.edge)


def test_a_layout_lets_go_of_the_edge_list_once_it_knows_its_edges():
    s = Structure(torch.arange(10), torch.arange(10) // 2, 5, 10)
    layout, source = s.by_target, ref(s.source)
    del s
    assert source() is not None
    assert layout.entries().tolist() == layout.edge.tolist() == list(range(10))
    assert source() is None


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_edges_in_the_order_of_the_kernels_are_the_same_edges(data):
    s = data.draw(cases(most=300)).structure
    order, walked = s.by_target.edge.long(), s.walked
    if walked is s:
        assert 2 * int((order.diff() == 1).sum()) >= s.edges - 1
        return
    assert torch.equal(walked.source, s.source[order])
    assert torch.equal(walked.target, s.target[order])
    assert walked.walked is walked
    anew = Structure(walked.source, walked.target, s.own, s.num_sources)
    for kept, made in ((walked.by_target, anew.by_target), (walked.by_source, anew.by_source)):
        for name in ("pointer", "middle", "column", "edge"):
            assert torch.equal(getattr(kept, name), getattr(made, name))


@pytest.mark.parametrize("built", [False, True])
def test_bytes_of_edges_in_the_order_of_the_kernels(built):
    s = Structure(torch.arange(10), torch.arange(10) % 2, 5, 10)
    if built:
        _ = s.by_target
    assert s.walked is not s
    # Of the edges in the order that was given, the ends alone; of those as walked, the count of each.
    before = 4 * 10 + 8 * 6 + 8 * 5
    assert s.nbytes == before + 4 * 10
    assert s.walked.by_source.rows == 10
    assert s.nbytes == before + 4 * 10 + 8 * 10 + 8 * 11


def test_more_rows_than_int32_holds_are_refused():
    with pytest.raises(DataError, match=str(LARGEST + 1)):
        _ = Structure(torch.arange(2), torch.arange(2), 5, LARGEST + 1).by_source


@pytest.mark.parametrize("layout", ["by_target", "by_source"])
@pytest.mark.parametrize(("source", "target"), [(4, 0), (-1, 0), (0, 3), (0, -1)])
def test_an_edge_to_a_row_that_is_not_there_is_refused_before_kernels_write(layout, source, target):
    found = Structure(torch.tensor([0, source]), torch.tensor([1, target]), own=3, num_sources=4)
    with pytest.raises(IndexError, match="out of bounds"):
        getattr(found, layout)


@pytest.mark.parametrize("own", [3, 9])
def test_edges_from_one_vertex_set_to_another(own: int) -> None:
    """Own and halo rows of the sources are counted by themselves, whether there are more of them or fewer."""
    generator = torch.Generator().manual_seed(1)
    sources, halo = 6, 4
    source = torch.randint(0, sources + halo, (40,), generator=generator)
    target = torch.randint(0, own, (40,), generator=generator)
    s = Structure(source, target, own, sources + halo, sources)
    assert (s.first_halo, s.bipartite, s.walked.first_halo) == (sources, True, sources)
    layout = s.by_target
    for row in range(own):
        begin, middle, end = (int(p[row]) for p in (layout.pointer, layout.middle, layout.pointer[1:]))
        assert (layout.column[begin:middle] < sources).all()
        assert (layout.column[middle:end] >= sources).all()
    x = torch.randn(sources + halo, 5, generator=generator, dtype=torch.float64)
    wanted = torch.zeros(own, 5, dtype=torch.float64).index_add_(0, target, x[source])
    torch.testing.assert_close(ops.sum_rows(layout, x), wanted)
    apart = ops.sum_rows(layout, x[:sources], span="own")
    ops.sum_rows(layout, x[sources:], span="halo", offset=sources, into=apart)
    torch.testing.assert_close(apart, wanted)
    back = torch.zeros(sources + halo, 5, dtype=torch.float64).index_add_(0, source, wanted[target])
    torch.testing.assert_close(ops.sum_rows(s.by_source, wanted), back)
