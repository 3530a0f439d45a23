"""Symbolic size: a number of rows that knows what it counts.

Where it sits: ``intercept.gather_scatter`` returns one where a forward asks how many vertices or edges there
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kagome.placement.placement import Placement, PlacementKind
from kagome.user_frame import by_user, from_library


class SymbolicSize(int):
    """The number of own rows or of edges, as ``x.size(0)`` or ``row.size(0)`` returns it.

    A tensor made with this size (``torch.zeros``, ``torch.rand``) has one row per vertex or edge, so there it
    is this part's number. As a divisor, in a comparison or as a float it is the whole graph's number. A
    number of vertices is the whole graph's in sums and integer divisions too: ``x.size(0) // 2`` is a
    position among all vertices. Edges, and rows selected by a mask, are also compared by the whole graph's
    number, so that ranks without any of them take the same branch as the others.
    """

    placement: Placement
    of_all: Callable[[], int]
    divided: Callable[[Placement, int], Placement | None] | None = None
    """Returns the placement of one of several equal parts of the rows, if these are a batch."""

    def __new__(cls, number: int, placement: Placement, of_all: Callable[[], int]) -> SymbolicSize:
        """Make an int that knows what it counts, and how to get the whole graph's number."""
        self = super().__new__(cls, number)
        self.placement, self.of_all = placement, of_all
        return self

    @property
    def of_vertices(self) -> bool:
        """Whether it counts vertices, whose total is known without asking the other ranks."""
        return self.placement.kind is PlacementKind.ROWS and (
            self.placement.subset is None or self.placement.subset.span is not None
        )

    @property
    def _global(self) -> bool:
        """Whether user code computes with it. PyG's own code computes with this part's number."""
        return self.of_vertices and not from_library()

    def _known(self) -> int:
        """Return the whole graph's number where user code computes with it; else this part's."""
        return self.of_all() if self._global else int(self)

    def __float__(self) -> float:
        return float(self.of_all())

    def __truediv__(self, other: Any) -> Any:
        return self.of_all() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.of_all()

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return pow(self.of_all(), other, modulo)

    def __rpow__(self, other: Any, modulo: Any = None) -> Any:
        return pow(other, self.of_all(), modulo)

    def __abs__(self) -> int:
        return self._known()

    def __divmod__(self, other: Any) -> Any:
        return divmod(self._known(), _known(other))

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(_known(other), self._known())

    def __add__(self, other: Any) -> Any:
        return self._known() + _known(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._known() - _known(other)

    def __rsub__(self, other: Any) -> Any:
        return _known(other) - self._known()

    def __mul__(self, other: Any) -> Any:
        # x.size(0) * H: H entries per vertex, so a tensor of this size still belongs to the vertices.
        if type(other) is int and other > 0 and self._global:
            placement = self.placement.merged(other)
            return SymbolicSize(int(self) * other, placement, lambda: self.of_all() * other)
        return self._known() * _known(other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        # And back: N * H // H counts vertices again.
        if type(other) is int and other > 0 and self.placement.each % other == 0 and self._global:
            placement = self.placement.merged(self.placement.each // other, anew=True)
            return SymbolicSize(int(self) // other, placement, lambda: self.of_all() // other)
        if self._global and (part := self._part(other)) is not None:
            return part
        return self._known() // _known(other)

    def _part(self, other: Any) -> SymbolicSize | None:
        """Return the number of rows in one of so many parts of a batch; None if it has no such parts."""
        if type(other) is not int or self.divided is None:
            return None
        # (B * N) // B: the rows of one sample.
        placement = self.divided(self.placement, other)
        if placement is None:
            return None
        part = type(self)(int(self) // other, placement, lambda: self.of_all() // other)
        part.divided = self.divided
        return part

    def __rfloordiv__(self, other: Any) -> Any:
        return _known(other) // self._known()

    def __mod__(self, other: Any) -> Any:
        return self._known() % _known(other)

    def __rmod__(self, other: Any) -> Any:
        return _known(other) % self._known()

    def __neg__(self) -> int:
        return -self._known()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolicSize):
            return self._compared() == other._compared()
        if not isinstance(other, int):
            return False
        # len(x) is this part's number. Forwards branch on 0 and 1, and all ranks must take one branch.
        same = int.__eq__(self, other) is True and other > 1
        if same and self.of_vertices:
            return True
        return self._compared() == other or same  # either all ranks ask for it, or none

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return self._compared() != 0

    def __lt__(self, other: Any) -> bool:
        return bool(self._compared() < _compared(other))

    def __le__(self, other: Any) -> bool:
        return bool(self._compared() <= _compared(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self._compared() > _compared(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self._compared() >= _compared(other))

    def _compared(self) -> int:
        """Return the whole graph's number where user code compares: ranks must agree there."""
        # PyG's own branches go by this part's number.
        return self.of_all() if self._global or by_user() else int(self)


__answers__ = True  # for ``user_frame``: its functions are methods of numbers


def _known(value: Any) -> Any:
    return value._known() if isinstance(value, SymbolicSize) else value


def _compared(value: Any) -> Any:
    return value._compared() if isinstance(value, SymbolicSize) else value


def as_place(value: Any) -> Any:
    """Return a number as a position among all vertices: a symbolic size becomes the whole graph's number."""
    return value.of_all() if isinstance(value, SymbolicSize) else value


class Entries(SymbolicSize):
    """The number of entries of a tensor, ``x.numel()``: the whole graph's number.

    Divided by the entries of a row, it is the number of rows again.
    """

    rows: SymbolicSize
    each: int

    @classmethod
    def of(cls, rows: SymbolicSize, each: int, placement: Placement) -> Entries:
        """Make the number of entries of some rows.

        Args:
            rows: The number of rows.
            each: The number of entries in each row.
            placement: The placement of a tensor with one row per entry.
        """
        made = cls(int(rows) * each, placement, lambda: rows.of_all() * each)
        assert isinstance(made, Entries)
        made.rows, made.each = rows, each
        return made

    @property
    def _global(self) -> bool:
        return by_user()

    def __floordiv__(self, other: Any) -> Any:
        # x.numel() // x.size(1)
        if type(other) is int and other == self.each:
            return self.rows
        return self._known() // _known(other)


class Shown(SymbolicSize):
    """A size shown to user code: for everything that Python does with an int, it is the whole graph's number.

    ``1.0 / x.size(0)`` and ``range(x.size(0))`` call none of its methods. A torch call is given the symbolic
    size behind it: see :func:`behind`.
    """

    count: SymbolicSize

    @classmethod
    def of(cls, count: SymbolicSize) -> Shown:
        """Make the number that user code sees for a symbolic size."""
        # The int itself is the whole graph's number: C code such as ``range`` reads it without a method.
        made = cls(count.of_all(), count.placement, count.of_all)
        assert isinstance(made, Shown)
        made.count = count
        return made

    def __hash__(self) -> int:
        # What a library caches by shapes belongs to rows of this part: einops must not give it to a tensor
        # without rows that has as many entries.
        return hash((Shown, int(self.count)))

    def __int__(self) -> int:
        return int(self.count) if from_library() else int.__int__(self)


def _shown(name: str) -> Callable[..., Any]:
    """Return a method of sizes whose result is again one that user code may see."""
    method = getattr(int, name)

    def call(self: Shown, *others: Any) -> Any:
        out = getattr(self.count, name)(*map(behind, others))
        return Shown.of(out) if isinstance(out, SymbolicSize) and not from_library() else out

    call.__name__, call.__doc__ = name, method.__doc__
    return call


for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__rfloordiv__"),
    *("__mod__", "__rmod__", "__divmod__", "__rdivmod__", "__pow__", "__rpow__", "__truediv__"),
    *("__rtruediv__", "__neg__", "__abs__", "__float__", "__bool__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(Shown, _name, _shown(_name))


def behind(value: Any) -> Any:
    """Replace shown sizes in an argument by the symbolic sizes behind them."""
    if isinstance(value, Shown):
        # Tensors are made with this part's number of rows.
        return value.count
    if isinstance(value, slice):
        return slice(behind(value.start), behind(value.stop), behind(value.step))
    # A named tuple could not be made from one iterable.
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(map(behind, value)) if _holds(value) else value
    return value


def _holds(values: Any) -> bool:
    for value in values:  # every torch call of a part runs this
        if isinstance(value, _MAY_HOLD) and (not isinstance(value, (tuple, list)) or _holds(value)):
            return True
    return False


_MAY_HOLD: Final = (Shown, slice, tuple, list)


class NoneHere(int):
    """Zero edges on this rank, though other ranks may have some: in PyG's code it does not equal 0."""

    # PyG returns early where ``edge_index.numel() == 0``; this rank would then miss exchanges of the others.
    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class NoRowsHere(NoneHere):
    """Zero rows of vertices on this rank, though others may have some: PyG's code takes the branch of theirs.

    ``int(batch.max()) + 1 if batch.numel() > 0 else 0`` asks all ranks for the greatest number, or none.
    """

    def __gt__(self, other: object) -> bool:
        return True
