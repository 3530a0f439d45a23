"""Sums into new rows, into given ones and into a table give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kagome.halo.exchange import HaloSums
from kagome.kernels import ops
from kagome.kernels.base.csr import Structure

OWN, HALO, EDGES = 130, 70, 1900


def made(width: int, dtype: torch.dtype) -> tuple[Structure, dict[str, Tensor]]:
    """Return edges, some rows without any, and random rows and factors."""
    torch.manual_seed(width)
    source, target = torch.randint(0, OWN + HALO, (EDGES,)), torch.randint(0, OWN - 4, (EDGES,))
    sizes = {"x": (OWN + HALO, width), "g": (OWN, width), "table": (OWN + HALO, width)}
    sizes |= {"weight": (EDGES,), "scale": (OWN,), "factor": (HALO,)}
    return Structure(source, target, OWN, OWN + HALO), {
        name: torch.randn(*size, dtype=dtype) for name, size in sizes.items()
    }


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


WIDTHS = [(128, torch.float32), (68, torch.float64), (7, torch.float32)]


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
def test_new_rows_begin_at_zero(width, dtype):
    s, t = made(width, dtype)
    heads = t["x"].view(-1, 1, width).expand(-1, 2, -1).contiguous()
    for x, weight in ((t["x"], None), (t["x"], t["weight"]), (heads, torch.randn(EDGES, 2, dtype=dtype))):
        zeros = torch.zeros(OWN, *x.shape[1:], dtype=dtype)
        wanted = ops.sum_rows(s.by_target, x, weight, t["scale"], into=zeros)
        torch.full_like(wanted, torch.nan)  # freed memory that is not zero is likely to be taken again
        assert torch.equal(ops.sum_rows(s.by_target, x, weight, t["scale"]), wanted)
        # A strided ``into``.
        wide = torch.zeros(2 * OWN, *x.shape[1:], dtype=dtype)[::2]
        assert ops.sum_rows(s.by_target, x, weight, t["scale"], into=wide) is wide
        assert torch.equal(wide, wanted)


@pytest.mark.parametrize(("width", "dtype"), [*WIDTHS, (8, torch.bfloat16)])
@pytest.mark.parametrize("count", [1, 2])
def test_some_sums_at_halo_rows_are_added_to_a_table(width, dtype, count, threads, monkeypatch):
    threads(count)
    monkeypatch.setattr("kagome.kernels.base.thread_pool.PIECE", 64)  # so that two threads share them
    s, t = made(width, dtype)
    which = torch.randperm(HALO)[:45].sort().values
    place = torch.randint(0, OWN + HALO, (45,))  # some twice
    times = torch.rand(45, dtype=dtype)
    for weight in (None, t["weight"]):
        sums = HaloSums(s, t["g"], weight, t["factor"])
        wanted, found = t["table"].clone(), t["table"].clone()
        ops.add_rows(wanted, place, sums.rows(), which, times)
        sums.add_to(found, place, which, times)
        assert torch.equal(found, wanted)
        assert not torch.equal(found, t["table"])


def test_sums_with_heads_at_halo_rows():
    s, t = made(12, torch.float64)
    which, times = torch.tensor([3, 4, 69]), torch.ones(3, dtype=torch.float64)
    sums = HaloSums(s, t["g"].view(OWN, 3, 4), torch.randn(EDGES, 3, dtype=torch.float64), None)
    table = torch.zeros(9, 12, dtype=torch.float64)
    sums.add_to(table, torch.tensor([8, 0, 1]), which, times)
    assert torch.equal(table[[8, 0, 1]], sums.rows()[which])


def test_no_entry_at_all():
    s, t = made(8, torch.float32)
    none = Structure(s.source[:0], s.target[:0], OWN, OWN + HALO)
    heads = t["x"].view(-1, 4, 2)
    assert not ops.sum_rows(none.by_target, heads, t["weight"][:0].view(0, 4)).any()
    assert not ops.sum_rows(none.by_target, t["x"]).any()
    few, table = torch.arange(0), t["table"].clone()
    for edges in (none, s):
        HaloSums(edges, t["g"], None, None).add_to(table, few, few, t["scale"][:0])
    assert torch.equal(table, t["table"])
