"""Where a view puts rows: what is reckoned from shapes is what the entries show."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kagome.scope.batches import Group, regrouped, whole_view

SIZES = st.integers(1, 4)


def shown(out: torch.Tensor, rows: int) -> list[Group]:
    """The axes along which entries, which show sample and row, lie as those of a group."""
    found = []
    for axis, size in enumerate(out.shape):
        lines = out.movedim(axis, 0).reshape(size, -1)
        for each in [number for number in range(1, size + 1) if size % (number * rows) == 0]:
            row = torch.arange(size) // each % rows
            if bool((lines % rows == row.unsqueeze(1)).all()) and lines.numel():
                found.append(Group(axis, size // (rows * each), each))
    return found


def cuts(draw: st.DrawFn, number: int) -> list[int]:
    """Factors of a number, some of them 1."""
    factors = []
    while number > 1:
        factor = draw(st.sampled_from([k for k in range(2, number + 1) if number % k == 0]))
        factors.append(factor)
        number //= factor
    for _ in range(draw(st.integers(0, 2))):
        factors.insert(draw(st.integers(0, len(factors))), 1)
    return factors or [1]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_view_has_its_rows_where_the_entries_show_them(data: st.DataObject) -> None:
    before, copies, each, behind = (data.draw(SIZES) for _ in range(4))
    rows = data.draw(st.integers(2, 6))
    shape = [before, copies * rows * each, behind]
    # The number of a row, and of its sample: sample * rows + row.
    along = torch.arange(copies * rows).repeat_interleave(each)
    base = (along + torch.arange(before).unsqueeze(1) * copies * rows).unsqueeze(2).expand(shape)
    out = cuts(data.draw, base.numel())
    found = regrouped(shape, Group(1, copies, each), rows, out)
    entries = shown(base.reshape(out), rows)
    if found is None:
        assert not entries
    else:
        assert found in entries
        assert base.reshape(out).size(found.axis) == found.copies * rows * found.each


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("view", (12, -1), [12, 10]),
        ("reshape", ((-1, 5),), [24, 5]),
        ("flatten", (0, 1), [12, 10]),
        ("flatten", (), [120]),
        ("unflatten", (1, (2, -1)), [3, 2, 2, 10]),
        ("view", (7, -1), None),
        ("view", (torch.int32,), None),
    ],
)
def test_the_shape_of_a_view(name: str, args: tuple[object, ...], expected: list[int] | None) -> None:
    assert whole_view(name, (None, *args), {}, [3, 4, 10], lambda other: list(other.shape)) == expected
