"""The tracked row axis is the axis along which a probe, filled with row numbers, still counts rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kagome.placement.axis_rules import attribute
from kagome.placement.placement import Placement, PlacementKind, Placements

SIZES = st.integers(1, 4)
"""Columns; the rows are 2 to 4, so that sizes often coincide."""


class Watching(TorchFunctionMode):
    """Marks and nothing else: what ``intercept`` does with a call that no handler answers."""

    def __init__(self) -> None:
        super().__init__()
        self.placements = Placements()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name != "__get__" or isinstance(result, Tensor):
            self.placements.spread(attribute(func) if name == "__get__" else name, args, kwargs or {}, result)
        return result

    def axis(self, tensor: Tensor) -> int | None:
        placement = self.placements.get(tensor)
        return (
            None
            if placement is None or placement.kind is PlacementKind.LOST or placement.each > 1
            else placement.axis
        )


def probe(shape: tuple[int, ...], axis: int) -> Tensor:
    """Row numbers along ``axis``, the same along all others; float, so that means keep them."""
    rows = torch.arange(float(shape[axis]), dtype=torch.float64)
    return rows.view([-1 if place == axis else 1 for place in range(len(shape))]).expand(shape).clone()


def counted(tensor: Tensor, rows: int) -> int | None:
    """The axis along which a probe still holds the numbers 0 .. rows - 1, each the same all over."""
    number = torch.arange(float(rows), dtype=torch.float64)
    for axis, size in enumerate(tensor.shape):
        if size == rows:
            slices = tensor.movedim(axis, 0).reshape(rows, -1)
            if slices.size(1) and torch.allclose(slices, number.unsqueeze(1)):
                return axis
    return None


@st.composite
def starts(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    rest = draw(st.lists(SIZES, min_size=0, max_size=3))
    axis = draw(st.integers(0, len(rest)))
    return (*rest[:axis], draw(st.integers(2, 4)), *rest[axis:]), axis


def _other(draw: Callable[..., Any], x: Tensor, axis: int) -> int | None:
    others = [place for place in range(x.dim()) if place != axis]
    return draw(st.sampled_from(others)) if others else None


def _regrouped(draw: Callable[..., Any], x: Tensor, axis: int) -> list[int]:
    """A shape in which the row axis stays, and what lies before and after it is split otherwise."""

    def split(count: int) -> list[int]:
        halves = [d for d in range(1, count + 1) if count % d == 0]
        first = draw(st.sampled_from(halves))
        return draw(st.sampled_from([[count], [first, count // first], [count, 1], [1, count]]))

    before, after = x.shape[:axis].numel(), x.shape[axis + 1 :].numel()
    return [*(split(before) if axis else []), x.size(axis), *(split(after) if axis < x.dim() - 1 else [])]


@st.composite
def steps(draw: st.DrawFn, x: Tensor, axis: int) -> Tensor:
    """One call on a tensor whose rows lie along ``axis``; means and extremes keep row numbers."""
    other = _other(draw, x, axis)
    calls: list[Callable[[], Tensor]] = [
        lambda: x.relu(),
        lambda: x + x,
        lambda: 2 * x,
        lambda: x.clone().contiguous(),
        lambda: x.reshape(_regrouped(draw, x, axis)),
        lambda: x.contiguous().view(_regrouped(draw, x, axis)),
        lambda: x.reshape(-1),
        lambda: x.transpose(axis, draw(st.integers(-x.dim(), x.dim() - 1))),
        lambda: x.permute(draw(st.permutations(range(x.dim())))),
        lambda: x.permute(*draw(st.permutations(range(x.dim())))),
        lambda: x.unsqueeze(draw(st.integers(-x.dim() - 1, x.dim()))),
        lambda: x.squeeze(),
        lambda: x.mean(dim=axis),
        lambda: x.sum(),
        lambda: x.sum(axis, keepdim=True),
        lambda: torch.stack([x, x], draw(st.integers(0, x.dim()))),
        lambda: torch.cat([x, x], draw(st.integers(-x.dim(), x.dim() - 1))),
        lambda: x[None],
        lambda: x[..., None],
        lambda: x.unbind(draw(st.integers(0, x.dim() - 1)))[0],
        lambda: x.flip(axis),
        lambda: x.cumsum(axis),
        lambda: torch.einsum("...->...", x),
        lambda: x.expand(2, *x.shape),
        lambda: x.movedim(axis, 0),
    ]
    if x.dim() == 2:
        eye = torch.eye(x.size(1 - axis), dtype=x.dtype)
        calls += [
            lambda: x.t(),
            lambda: x.T,
            lambda: x @ eye if axis == 0 else eye @ x,
            lambda: torch.ones(5, x.size(0), dtype=x.dtype) @ x,
            lambda: x @ torch.ones(x.size(1), dtype=x.dtype) / (x.size(1) if axis == 0 else 1),
            lambda: torch.ones(x.size(0), dtype=x.dtype) @ x / (x.size(0) if axis == 1 else 1),
        ]
    if other is not None:
        after = other - x.dim()
        calls += [
            lambda: x.mean(dim=other),
            lambda: x.mean(other, keepdim=True),
            lambda: x.mean([other]),
            lambda: x.amax(after),
            lambda: x.max(dim=after).values,
            lambda: x.mean(dim=tuple(place for place in range(x.dim()) if place != axis)),
            lambda: x.select(other, 0),
            lambda: x[(slice(None),) * other + (0,)],
            lambda: x[(slice(None),) * other + (slice(0, 1),)],
            lambda: x[..., 0],
            lambda: x.flip(after),
            lambda: x.sort(after).values,
            lambda: x.transpose(axis, other) + x.transpose(axis, other),
            lambda: x + torch.zeros(x.size(-1), dtype=x.dtype),
            lambda: torch.cat([x, torch.zeros_like(x)], other).narrow(other, 0, x.size(other)),
        ]
    return draw(st.sampled_from(calls))()


@settings(max_examples=700, deadline=None, derandomize=True)
@given(st.data(), starts())
def test_the_tracked_axis_is_where_row_numbers_lie(
    data: st.DataObject, start: tuple[tuple[int, ...], int]
) -> None:
    shape, axis = start
    x, watching = probe(*start), Watching()
    rows, place = shape[axis], axis
    watching.placements.put(x, Placement(PlacementKind.ROWS, axis=axis))
    for _ in range(data.draw(st.integers(1, 5))):
        with watching:
            x = data.draw(steps(x, place))
        true = counted(x / (x.max() / (rows - 1)) if x.max() > 0 else x, rows)
        found = watching.axis(x)
        # A mark may be lost (the check before training tells), but never lie.
        assert found in (None, true), (tuple(x.shape), found, true)
        if found is None or x.dim() > 5:
            return
        place, x = found, watching.placements.put(probe(tuple(x.shape), found), watching.placements.get(x))


KEPT: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "linear": (lambda x: torch.nn.functional.linear(x, torch.eye(4, dtype=x.dtype)), 0),
    "matrix product": (lambda x: x @ torch.eye(4, dtype=x.dtype), 0),
    "product with a vector": (lambda x: x @ torch.ones(4, dtype=x.dtype), 0),
    "product from the left": (lambda x: torch.eye(4, dtype=x.dtype) @ x.t(), 1),
    "heads": (lambda x: x.view(-1, 2, 2), 0),
    "heads and sum": (lambda x: x.view(3, 2, 2).sum(dim=-1), 0),
    "mean of heads": (lambda x: x.view(3, 2, 2).mean(1), 0),
    "one column": (lambda x: x[:, 0], 0),
    "some columns": (lambda x: x[:, [0, 2]], 0),
    "columns by tensor": (lambda x: x[:, torch.tensor([0, 2])], 0),
    "columns by dots": (lambda x: x[..., 1:], 0),
    "new first axis": (lambda x: x[None], 1),
    "transposed": (lambda x: x.transpose(0, 1), 1),
    "T": (lambda x: x.T, 1),
    "mT of rows": (lambda x: x.unsqueeze(1).mT, 0),
    "mT of columns": (lambda x: x.unsqueeze(0).mT, 2),
    "chunk": (lambda x: x.chunk(2, dim=-1)[1], 0),
    "split": (lambda x: x.split(2, dim=1)[0], 0),
    "stack": (lambda x: torch.stack([x, x], dim=-1), 0),
    "stack first": (lambda x: torch.stack([x, x]), 1),
    "cat": (lambda x: torch.cat([x, x], dim=-1), 0),
    "norm of rows": (lambda x: x.norm(p=2, dim=-1), 0),
    "softmax of rows": (lambda x: x.softmax(-1), 0),
    "best column": (lambda x: x.max(dim=-1).values, 0),
    "columns by two tensors": (
        lambda x: x.view(3, 2, 2)[:, torch.tensor([0, 1]), torch.tensor([1, 0])],
        0,
    ),
    "columns by tensors and a number": (
        lambda x: x.view(3, 2, 1, 2)[:, torch.tensor([0, 1]), 0, torch.tensor([1, 0])],
        0,
    ),
    "larger of two": (lambda x: torch.max(x, torch.zeros(4, dtype=x.dtype)), 0),
    "smaller of two, by name": (lambda x: torch.min(x, other=x + 1), 0),
    "running sums of exponents": (lambda x: x[:, :1].logcumsumexp(1), 0),
    "where": (lambda x: torch.where(x > 1, x, x), 0),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, [4]), 0),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_layers_do_to_rows_keeps_their_axis(name: str) -> None:
    call, axis = KEPT[name]
    watching, x = Watching(), probe((3, 4), 0)
    watching.placements.put(x, Placement(PlacementKind.ROWS))
    with watching:
        out = call(x)
    assert watching.axis(out) == axis
    assert out.size(axis) == 3


LOST: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean of columns": lambda x: x.mean(0),
    "gram": lambda x: x.t() @ x,
    "flat": lambda x: x.flatten(),
    "rolled": lambda x: x.roll(1, 0),
    "twice as many": lambda x: torch.cat([x, x]),
    "first row": lambda x: x[0],
    "all but one": lambda x: x[1:],
    "every other": lambda x: x[::2],
    "by mask": lambda x: x[torch.tensor([True, False, True])],
    "unbound": lambda x: x.unbind(0)[1],
    "upside down": lambda x: x.flip(0),
    "sorted": lambda x: x.sort(dim=0).values,
    "columns by tensors apart": lambda x: x.view(3, 3, 1, 1)[:, [0, 1, 2], :, [0, 0, 0]],
    "columns by tensors, a new axis between": lambda x: x.view(3, 3, 1)[:, [0, 1, 2], None, [0, 0, 0]],
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_no_row_of_a_vertex_any_more_has_no_axis(name: str) -> None:
    watching, x = Watching(), probe((3, 3), 0)
    watching.placements.put(x, Placement(PlacementKind.ROWS))
    with watching:
        out = LOST[name](x)
    assert watching.axis(out) is None


def test_squeeze_of_the_only_row_of_a_part_is_no_row_of_several_entries() -> None:
    watching = Watching()
    x = watching.placements.put(probe((1, 4), 0), Placement(PlacementKind.ROWS))
    with watching:
        out = x.squeeze()
    placement = watching.placements.get(out)
    assert placement is not None
    assert placement.kind is PlacementKind.LOST


def test_an_empty_part_keeps_its_axis() -> None:
    watching = Watching()
    x = watching.placements.put(torch.zeros(0, 4), Placement(PlacementKind.ROWS))
    with watching:
        out = torch.nn.functional.linear(x, torch.eye(4)).view(-1, 4).relu()
    assert watching.axis(out) == 0
