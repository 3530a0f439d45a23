"""Sums that do in one pass what took several: the bits are those of the separate passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kagome.kernels import ops
from kagome.kernels.base.csr import Structure

OWN, HALO, EDGES = 130, 70, 1900


def made(width: int, dtype: torch.dtype) -> tuple[Structure, dict[str, Tensor]]:
    """Return edges, some rows without any, and random rows and factors."""
    torch.manual_seed(width)
    source, target = torch.randint(0, OWN + HALO, (EDGES,)), torch.randint(0, OWN - 4, (EDGES,))
    sizes = {"x": (OWN + HALO, width), "g": (OWN, width), "bias": (1, width), "table": (OWN + HALO, width)}
    sizes |= {"weight": (EDGES,), "scale": (OWN,), "factor": (OWN + HALO,)}
    return Structure(source, target, OWN, OWN + HALO), {
        name: torch.randn(*size, dtype=dtype) for name, size in sizes.items()
    }


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


WIDTHS = [(128, torch.float32), (20, torch.float64), (7, torch.float32)]


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
@pytest.mark.parametrize("weighted", [False, True])
def test_factors_and_further_rows_in_the_pass_of_a_sum(width, dtype, weighted):
    s, t = made(width, dtype)
    weight = t["weight"] if weighted else None
    scaled = t["x"] * t["factor"].unsqueeze(-1)
    # ``into`` zeros takes the loop that clears no rows.
    zeros = torch.zeros(OWN, width, dtype=dtype)
    plain = ops.sum_rows(s.by_target, scaled, weight, t["scale"], into=zeros)
    assert torch.equal(ops.sum_rows(s.by_target, t["x"], weight, t["scale"], factor=t["factor"]), plain)
    for plus in (t["g"], t["bias"]):
        found = ops.sum_rows(s.by_target, scaled, weight, t["scale"], plus=plus)
        assert torch.equal(found, plain + plus)
    # The two spans one after the other, as with a halo: rows are added after the second.
    own, halo = slice(0, OWN), slice(OWN, None)
    once = ops.sum_rows(s.by_target, scaled[own], weight, t["scale"], span="own")
    twice = once.clone()
    ops.sum_rows(s.by_target, scaled[halo], weight, t["scale"], span="halo", offset=OWN, into=twice)
    joined = ops.sum_rows(
        *(s.by_target, t["x"][halo], weight, t["scale"]),
        span="halo",
        offset=OWN,
        into=once,
        factor=t["factor"][halo],
        plus=t["g"],
    )
    assert joined is once
    assert torch.equal(joined, twice + t["g"])


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
@pytest.mark.parametrize("count", [1, 2])
def test_sums_added_to_a_table(width, dtype, count, threads, monkeypatch):
    threads(count)
    # Some rows at a time, and a last, smaller lot.
    monkeypatch.setattr("kagome.kernels.cpu.edges.HELD", 11 * width * dtype.itemsize)
    s, t = made(width, dtype)
    rows, factor = slice(OWN, OWN + HALO), t["factor"][OWN:]
    which = torch.randperm(HALO)[:45].sort().values
    place = torch.randint(0, OWN + HALO, (45,))  # some twice
    mult = torch.rand(45, dtype=dtype)
    for weight in (None, t["weight"]):
        wanted, found = t["table"].clone(), t["table"].clone()
        sums = ops.sum_rows(s.by_source, t["g"], weight, factor, rows=rows)
        ops.add_rows(wanted, place, sums, which, mult)
        ops.add_sums(found, place, s.by_source, t["g"], weight, factor, None, rows, which, mult)
        assert torch.equal(found, wanted)
        wanted, found = t["table"].clone(), t["table"].clone()
        sums = ops.sum_rows(
            s.by_source, t["g"] * t["scale"].unsqueeze(-1), weight, factor, rows=rows
        )
        ops.add_rows(wanted, place, sums, which, mult)
        ops.add_sums(
            *(found, place, s.by_source, t["g"], weight, factor, t["scale"], rows, which, mult)
        )
        assert torch.equal(found, wanted)
        assert not torch.equal(found, t["table"])


def test_no_entry_at_all():
    s, t = made(8, torch.float32)
    none = Structure(s.source[:0], s.target[:0], OWN, OWN + HALO)
    weight, table = t["weight"][:0].view(0, 4), t["table"].clone()
    heads = t["x"].view(-1, 4, 2)
    assert not ops.sum_rows(none.by_target, heads, weight).any()
    assert torch.equal(ops.sum_rows(none.by_target, t["x"], plus=t["bias"]), t["bias"].expand(OWN, -1))
    few = torch.arange(0)
    ops.add_sums(
        *(table, few, none.by_source, t["g"], None, None, None, slice(OWN, OWN + HALO), few, t["scale"][:0])
    )
    assert torch.equal(table, t["table"])
