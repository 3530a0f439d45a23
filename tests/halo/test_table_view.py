"""Rows that lie in a table are summed where they lie: the same as gathered first, without a copy of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kagome.halo.exchange import HaloSums
from kagome.halo.forward_pass import ForwardPass
from kagome.halo.table_view import TableIndex, TableView
from kagome.kernels import ops
from kagome.kernels.base.csr import Structure
from kagome.placement.weak_map import WeakTensorMap
from kagome.sparse_ops.edge_sum import neighbor_sum

OWN, HALO, TABLE, EDGES = 7, 11, 40, 90


class LocalHaloWork:
    """A way on which a chunk's halo lies in a table."""

    def __init__(self, work: Any, edges: Structure) -> None:
        self.work, self.edges = work, edges
        self.site = type("Site", (), {"grad": True})
        self.back: list[Tensor] = []

    def start_gather(self, rows: Tensor) -> Any:
        return self.work

    def start_reduce(self, away: HaloSums) -> Any:
        self.back.append(away.rows())
        return type("Gone", (), {"borrow": lambda _: torch.no_grad()})()

    def add(self, received: Any, own: Tensor) -> Tensor:
        return own


def given(width: int, dtype: torch.dtype) -> tuple[Structure, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    source = torch.randint(0, OWN + HALO, (EDGES,), generator=generator)
    target = torch.randint(0, OWN, (EDGES,), generator=generator)
    table = torch.randn(TABLE, width, generator=generator, dtype=dtype)
    places = torch.randint(0, TABLE, (HALO,), generator=generator)
    return Structure(source, target, OWN, OWN + HALO), table, places, torch.rand(EDGES, dtype=dtype)


@pytest.mark.parametrize("width", [1, 6, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["sum", "mean", "weights", "factors"])
def test_the_sum_is_that_of_gathered_rows(width: int, dtype: torch.dtype, how: str) -> None:
    edges, table, places, weight = given(width, dtype)
    factor = torch.rand(OWN + HALO, dtype=dtype)
    more: dict[str, Tensor] = {
        "sum": {},
        "mean": {"scale": edges.degree.clamp(min=1).to(dtype).reciprocal()},
        "weights": {"weight": weight},
        "factors": {"factor": factor, "scale": factor[:OWN]},
    }[how]
    rows = torch.randn(OWN, width, dtype=dtype).requires_grad_()
    plain = rows.detach().requires_grad_()
    lying = TableView(lambda: table, TableIndex(places), WeakTensorMap())
    halo_work = LocalHaloWork(lying, edges)
    forward_pass = ForwardPass(1, checked=False, device=torch.device("cpu"), grad=True)
    found = neighbor_sum(rows, edges, halo_work=halo_work, forward_pass=forward_pass, **more)  # type: ignore[arg-type]
    expected = neighbor_sum(torch.cat([plain, table[places]]), edges, **more)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(rows.grad, plain.grad)
    assert halo_work.back[0].shape == (HALO, width)


def test_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    edges, table, places, _ = given(4, torch.float64)
    lying = TableView(lambda: table, TableIndex(places), WeakTensorMap())
    monkeypatch.setattr(TableView, "wait", lambda _: pytest.fail("the halo was copied"))
    forward_pass = ForwardPass(1, checked=False, device=torch.device("cpu"), grad=True)
    rows = torch.randn(OWN, 4, dtype=torch.float64)
    neighbor_sum(rows, edges, halo_work=LocalHaloWork(lying, edges), forward_pass=forward_pass)  # type: ignore[arg-type]


def test_rows_are_gathered_for_all_else_and_the_table_is_asked_for_once() -> None:
    _, table, places, _ = given(4, torch.float64)
    asked: list[int] = []

    def settle() -> Tensor:
        asked.append(1)
        return table

    lying = TableView(settle, TableIndex(places), WeakTensorMap())
    assert torch.equal(lying.wait(), table[places])
    with lying.borrow() as received:
        assert torch.equal(received, table[places])
    assert lying.table() is table
    assert asked == [1]


def test_places_and_factors_of_edges_are_worked_out_once() -> None:
    edges, table, places, _ = given(4, torch.float64)
    where, by_entry = TableIndex(places), WeakTensorMap[tuple[Tensor, Tensor]]()
    halo = edges.by_target.halo
    assert where.layout(edges) is where.layout(edges)
    assert torch.equal(where.layout(edges).column.long(), places[halo.column.long() - OWN])
    factor = torch.rand(OWN + HALO)
    layout, weights = TableView(lambda: table, where, by_entry).weighted(factor, edges)
    again = TableView(lambda: table, where, by_entry).weighted(factor, edges)
    assert again[0] is layout
    assert again[1] is weights
    # One factor an entry, in the order in which entries are walked.
    assert torch.equal(weights[layout.edge.long()], factor[halo.column.long()])
    assert torch.equal(layout.edge.long(), torch.arange(halo.edges))
    assert ops.backend_of(table) == "numba"
