"""Scope: what the handlers of this folder may ask of the running interception.

Where it sits: ``neighbors.intercept.Interception`` is one; this folder does not import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Scope(Protocol):
    """What a handler may ask of the running interception."""

    @property
    def size(self) -> int:
        """Ranks that share the graph."""

    @property
    def own(self) -> int:
        """The number of vertices that this rank owns."""

    @property
    def epoch(self) -> int:
        """The epoch that is running, for draws and messages."""

    seed: int
    parted: bool
    vertices: int
    within_once: int

    def own_seed(self) -> bool:
        """Whether forward has seeded torch's generator."""

    def axis(self, tensor: Any) -> int | None:
        """The row axis of a tensor with a row a vertex or an edge."""

    def counts(self, value: Any) -> bool:
        """Whether a value has a row a vertex or an edge, or is their number."""

    def of_vertices(self, tensor: Any) -> bool:
        """Whether the rows are vertices."""

    def of_each_vertex(self, tensor: Any) -> bool:
        """Whether a tensor has one row for each own vertex."""

    def vertices_counted(self, value: Any) -> int | None:
        """Vertices of the whole graph where a value is the number of own ones; else None."""

    def refuse_draw(self, name: str, why: str) -> Exception:
        """The error for a draw of rows that would be another on other ranks."""

    def like(self, out: Tensor, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Mark ``out`` as having the rows of ``tensor``."""

    def total(self, part: Tensor) -> Tensor:
        """Sum over ranks, with gradient."""

    def summing(
        self,
        there: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        back: Callable[..., tuple[Tensor | None, ...]],
        inputs: tuple[Tensor | None, ...],
        what: str,
    ) -> Tensor:
        """A function that sums over ranks inside, forward and backward."""

    def greatest(self, part: Tensor) -> Tensor:
        """Maximum over ranks, without gradient."""

    def everyone(self, rows: Tensor) -> Tensor:
        """The rows of all ranks in the order of the graph, with gradient."""

    def knows_everyone(self) -> object:
        """Say, where all rows are here, that rows of all vertices are read."""

    def within(self, function: Callable[[], Any]) -> Any:
        """Run a function whose torch calls are seen one by one."""

    def refuse_lost(self, *values: Any) -> None:
        """Refuse what was made of rows by their places in this part."""

    def lost(self, tensor: Tensor, origin: str) -> Tensor:
        """Mark a tensor that no part has: whatever is made of it is refused where it leaves forward."""

    def made(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """What ``torch.zeros`` or the like gives for a counted number of rows; None for any other size."""

    def drops_shares(self, value: Any) -> bool:
        """Whether a tensor is attention whose dropout is put off with it."""

    def drop_shares(
        self, value: Tensor, draw: Callable[[Tensor, Tensor, int], Tensor], words: Tensor
    ) -> Tensor:
        """Attention that was put off, some of it dropped."""

    def call(self) -> tuple[str, int]:
        """Module path and number of this draw."""

    def unknown_ids(self, ids: Tensor) -> Tensor:
        """Mark ids that mean nothing on a part, so that reading by them is refused."""

    def where(self) -> str:
        """The path of the module that is running, as in ``named_modules``."""

    def row_ids(self) -> Tensor:
        """Original ids of own vertices."""

    def words_of(self, tensor: Tensor) -> Tensor:
        """A number for each entry along the row axis of a tensor with rows of vertices."""

    def pair_words(self, tensor: Tensor, word: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor | None:
        """``word(source, target, copy)`` of each row of an edge tensor; None where they are not known."""


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Func = Callable[..., Any]
Handler = Callable[[Any, str, Func, Args, Kwargs], Any]
"""Answers a torch call, or returns NotImplemented where it has nothing to say."""


def argument(args: Args, kwargs: Kwargs, place: int, name: str, default: Any = None) -> Any:
    """An argument by its place or its name."""
    return kwargs.get(name, args[place] if len(args) > place else default)
