"""Handler scope: the interface of the running interceptor that the handlers of this package may use.

Where it sits: ``intercept.interceptor.Interceptor`` implements it; this package does not import that class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Scope(Protocol):
    """The running interceptor as a handler sees it."""

    @property
    def size(self) -> int:
        """Number of ranks that share the graph."""

    @property
    def own(self) -> int:
        """Number of vertices that this rank owns."""

    @property
    def epoch(self) -> int:
        """The current epoch, for draws and messages."""

    seed: int
    parted: bool
    vertices: int
    within_once: int

    def own_seed(self) -> bool:
        """Whether forward has seeded torch's generator."""

    def axis(self, tensor: Any) -> int | None:
        """Return the row axis of a tensor with a row for each vertex or edge; else None."""

    def counts(self, value: Any) -> bool:
        """Whether a value has a row for each vertex or edge, or is their number."""

    def of_vertices(self, tensor: Any) -> bool:
        """Whether a tensor's rows are vertices."""

    def of_each_vertex(self, tensor: Any) -> bool:
        """Whether a tensor has one row for each own vertex."""

    def vertices_counted(self, value: Any) -> int | None:
        """Return the number of all vertices if a value is the number of own ones; else None."""

    def refuse_draw(self, name: str, why: str) -> Exception:
        """Return the error for a draw of rows whose result would differ between ranks."""

    def like(self, out: Tensor, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Give ``out`` the placement of ``tensor``: it has the same rows."""

    def total(self, part: Tensor) -> Tensor:
        """Sum over ranks, with gradient."""

    def summing(
        self,
        there: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        back: Callable[..., tuple[Tensor | None, ...]],
        inputs: tuple[Tensor | None, ...],
        what: str,
    ) -> Tensor:
        """Apply a function that sums over ranks inside, forward and backward."""

    def greatest(self, part: Tensor) -> Tensor:
        """Return the maximum over ranks, without gradient."""

    def everyone(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the graph, with gradient."""

    def knows_everyone(self) -> object:
        """Record, where all rows are here, that rows of all vertices are read."""

    def within(self, function: Callable[[], Any]) -> Any:
        """Run a function whose torch calls are intercepted one by one."""

    def refuse_lost(self, *values: Any) -> None:
        """Raise an error for values that were computed from the positions of rows in this part."""

    def lost(self, tensor: Tensor, origin: str) -> Tensor:
        """Mark a tensor that no part has: any result of it is refused where it leaves forward."""

    def made(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return what ``torch.zeros`` or the like makes for a counted number of rows; else None."""

    def drops_shares(self, value: Any) -> bool:
        """Whether a tensor is deferred attention, whose dropout is deferred with it."""

    def drop_shares(
        self, value: Tensor, draw: Callable[[Tensor, Tensor, int], Tensor], words: Tensor
    ) -> Tensor:
        """Return deferred attention with dropout applied."""

    def call(self) -> tuple[str, int]:
        """Return the module path and the number of this draw."""

    def unknown_ids(self, ids: Tensor) -> Tensor:
        """Mark ids that mean nothing on a part, so that reading by them is refused."""

    def where(self) -> str:
        """Return the path of the running module, as in ``named_modules``."""

    def row_ids(self) -> Tensor:
        """Return the original ids of own vertices."""

    def words_of(self, tensor: Tensor) -> Tensor:
        """Return a number for each entry along the row axis of a tensor with rows of vertices."""

    def pair_words(self, tensor: Tensor, word: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor | None:
        """Return ``word(source, target, copy)`` of each row of an edge tensor; None if not known."""


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Func = Callable[..., Any]
Handler = Callable[[Any, str, Func, Args, Kwargs], Any]
"""Answers a torch call, or returns NotImplemented where it does not apply."""


def argument(args: Args, kwargs: Kwargs, place: int, name: str, default: Any = None) -> Any:
    """Return an argument given by position or by name."""
    return kwargs.get(name, args[place] if len(args) > place else default)
