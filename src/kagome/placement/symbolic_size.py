"""Count: numbers of rows that know what they count.

Where it sits: ``intercept.gather_scatter`` answers with them where a forward asks how many vertices or edges
there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kagome.placement.placement import Placement, PlacementKind
from kagome.user_frame import by_user, from_library


class SymbolicSize(int):
    """The number of own rows or of edges, as ``x.size(0)`` or ``row.size(0)`` gave it.

    What is made with so many rows (``torch.zeros``, ``torch.rand``) has a row a vertex or a row an edge: it
    is this part's number there. Divided by, compared with a number, or made a float, it is the whole graph's.
    Vertices counted and added to, or divided without a rest, are the whole graph's too: ``x.size(0) // 2`` is
    a place among all vertices. Edges, and rows that a mask has chosen, are compared by the whole graph's
    number too: ranks that have none of them take the branch that the others take.
    """

    mark: Placement
    of_all: Callable[[], int]

    def __new__(cls, number: int, mark: Placement, of_all: Callable[[], int]) -> SymbolicSize:
        """An int that knows what it counts, and how to ask for the whole graph's number."""
        self = super().__new__(cls, number)
        self.mark, self.of_all = mark, of_all
        return self

    @property
    def of_vertices(self) -> bool:
        """Whether vertices are counted: their number is known without asking the other ranks."""
        return self.mark.kind is PlacementKind.ROWS and (
            self.mark.subset is None or self.mark.subset.span is not None
        )

    @property
    def _global(self) -> bool:
        """Whether a user reckons with it: PyG's own code reckons with what is here."""
        return self.of_vertices and not from_library()

    def _known(self) -> int:
        """The whole graph's number where a user reckons with it; else this part's."""
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
        if type(other) is int and other > 0 and self._global:
            mark = self.mark.merged(other)
            return SymbolicSize(int(self) * other, mark, lambda: self.of_all() * other)
        return self._known() * _known(other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if type(other) is int and other > 0 and self.mark.each % other == 0 and self._global:
            mark = self.mark.merged(self.mark.each // other, anew=True)
            return SymbolicSize(int(self) // other, mark, lambda: self.of_all() // other)
        return self._known() // _known(other)

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
        # len(x) is this part's number; 0 and 1 are what forwards branch by, and all ranks take one branch.
        same = int.__eq__(self, other) is True and other > 1
        if same and self.of_vertices:
            return True
        return self._compared() == other or same  # all ranks ask for it, or none

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
        """The whole graph's number where a user compares, in which the ranks must not differ."""
        return self.of_all() if self._global or by_user() else int(self)


__answers__ = True  # to ``user_frame``: its functions are methods of numbers


def _known(value: Any) -> Any:
    return value._known() if isinstance(value, SymbolicSize) else value


def _compared(value: Any) -> Any:
    return value._compared() if isinstance(value, SymbolicSize) else value


def as_place(value: Any) -> Any:
    """A number as a place among all vertices: a count is the whole graph's."""
    return value.of_all() if isinstance(value, SymbolicSize) else value


class Entries(SymbolicSize):
    """The number of entries of a tensor with as many in each row: ``x.numel()``. It is the whole graph's.

    Divided by the entries of a row it is the number of rows again.
    """

    rows: SymbolicSize
    each: int

    @classmethod
    def of(cls, rows: SymbolicSize, each: int, mark: Placement) -> Entries:
        """The entries of rows.

        Args:
            rows: How many there are.
            each: Entries of each.
            mark: Of a tensor with so many rows as there are entries.
        """
        made = cls(int(rows) * each, mark, lambda: rows.of_all() * each)
        assert isinstance(made, Entries)
        made.rows, made.each = rows, each
        return made

    @property
    def _global(self) -> bool:
        return by_user()

    def __floordiv__(self, other: Any) -> Any:
        if type(other) is int and other == self.each:
            return self.rows
        return self._known() // _known(other)


class Shown(SymbolicSize):
    """A count in the user's own code: to all that Python does with an int it is the whole graph's number.

    ``1.0 / x.size(0)`` and ``range(x.size(0))`` ask none of its methods. A torch call is given the count
    that lies behind it: see :func:`behind`.
    """

    count: SymbolicSize

    @classmethod
    def of(cls, count: SymbolicSize) -> Shown:
        """What the user is shown of a count."""
        made = cls(count.of_all(), count.mark, count.of_all)
        assert isinstance(made, Shown)
        made.count = count
        return made

    def __hash__(self) -> int:
        return hash(self.count)  # what a library keeps by shapes is of this part

    def __int__(self) -> int:
        return int(self.count) if from_library() else int.__int__(self)


def _shown(name: str) -> Callable[..., Any]:
    """A method of counts that gives the user what is shown of its result."""
    method = getattr(int, name)

    def call(self: Shown, *others: Any) -> Any:
        out = getattr(self.count, name)(*map(behind, others))
        return Shown.of(out) if type(out) is SymbolicSize and not from_library() else out

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
    """An argument of a torch call or of a layer with the counts that lie behind those that are shown."""
    if isinstance(value, Shown):
        return value.count
    if isinstance(value, slice):
        return slice(behind(value.start), behind(value.stop), behind(value.step))
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(map(behind, value)) if _holds(value) else value
    return value


def _holds(values: Any) -> bool:
    for value in values:  # every torch call of a part comes here
        if isinstance(value, _MAY_HOLD) and (not isinstance(value, (tuple, list)) or _holds(value)):
            return True
    return False


_MAY_HOLD: Final = (Shown, slice, tuple, list)


class NoneHere(int):
    """No edges on this rank, which does not say that there are none: to PyG's code it does not equal 0."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__
