"""A table by identity holds what is known of living tensors, and of no others."""

from __future__ import annotations

import gc

import pytest
import torch

from kagome.placement.weak_map import WeakTensorMap


def test_equal_tensors_are_told_apart():
    table: WeakTensorMap[str] = WeakTensorMap()
    one, other = torch.ones(3), torch.ones(3)
    table[one] = "one"
    assert table.get(one) == "one"
    assert one in table
    assert other not in table
    assert table.get(other, "none") == "none"
    with pytest.raises(KeyError):
        table[other]


def test_an_entry_goes_with_its_tensor_and_the_next_at_its_place_has_none():
    table: WeakTensorMap[int] = WeakTensorMap()
    places = set()
    for number in range(1000):
        tensor = torch.empty(1)
        assert tensor not in table
        table[tensor] = number
        places.add(id(tensor))
        del tensor
    assert len(places) < 1000, "no place was used twice, so nothing was shown"
    gc.collect()
    assert len(table) == 0


def test_a_tensor_that_autograd_alone_holds_keeps_its_entry():
    """Its Python object sleeps, and is the same one when autograd gives it back."""
    table: WeakTensorMap[str] = WeakTensorMap()
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf * 2
    out = inner.exp()
    table[out] = "out"
    node = out.grad_fn
    holder = out * out  # saves out
    place = id(out)
    del out
    gc.collect()
    saved = holder.grad_fn._saved_self
    assert node is not None
    if id(saved) == place:
        assert table.get(saved) == "out"
    else:
        assert saved not in table
    holder.sum().backward()


def test_taking_away_setting_anew_and_forgetting_all():
    table: WeakTensorMap[int] = WeakTensorMap()
    tensor = torch.zeros(1)
    table[tensor] = 1
    table[tensor] = 2
    assert table[tensor] == 2
    assert table.values() == [2]
    del table[tensor]
    assert tensor not in table
    assert table.setdefault(tensor, 5) == 5
    assert table.setdefault(tensor, 6) == 5
    table.clear()
    assert len(table) == 0
