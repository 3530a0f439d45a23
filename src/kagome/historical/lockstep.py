"""Lockstep: several chunks run at once on one rank, piece by piece, none past a meeting before all have come.

Where it sits: ``run`` computes chunks exactly with it; ``history.Exact`` calls :meth:`Lockstep.meet` at each
read of neighbours' rows, forward and backward. Every chunk has a thread, and one of them runs at a time.

::

    chunk 0   ──piece 0──┤ meets          ├──piece 1──┤        a piece is what lies between two meetings
    chunk 1              ├──piece 0──┤ meets          ├── ...  the last one to come settles it for all
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from kagome.errors import ModelError

Settle = Callable[[], None]
Place = tuple[str, Hashable]
"""Where chunks meet: in words, and what tells it from another place of the same words."""


class Lockstep:
    """Works that meet.

    Args:
        works: One a chunk; each runs in a thread of its own, only while :meth:`advance` waits for it.
    """

    def __init__(self, works: Sequence[Callable[[], None]]) -> None:
        self._works = list(works)
        self._go = [threading.Semaphore(0) for _ in works]
        self._back = threading.Semaphore(0)
        self._threads: list[threading.Thread | None] = [None] * len(works)
        self._done = [False] * len(works)
        self._error: BaseException | None = None
        self._waiting: dict[int, tuple[Place, Settle]] = {}
        self._settled: set[int] = set()
        self._closed = False
        self._local = threading.local()

    def advance(self, chunk: int) -> bool:
        """Run a chunk's next piece.

        Returns:
            Whether that was its last.

        Raises:
            ModelError: If a chunk ends where another one meets, or they meet at unlike places.
            BaseException: What the chunk's work raised.
        """
        if self._done[chunk] or (chunk in self._waiting and chunk not in self._settled):
            self._settle()
        if self._done[chunk]:
            return True
        self._waiting.pop(chunk, None)
        self._settled.discard(chunk)
        thread = self._threads[chunk]
        if thread is None:
            state = _modes()
            thread = threading.Thread(target=self._body, args=(chunk, state), daemon=True)
            self._threads[chunk] = thread
            thread.start()
        else:
            self._go[chunk].release()
        self._back.acquire()
        if self._error is not None:
            error = self._error
            self.close()
            raise error
        if self._done[chunk]:
            thread.join()
        return self._done[chunk]

    def _settle(self) -> None:
        """No work can go on by itself: all have ended, or all wait at one place, which is settled."""
        for chunk, (at, settle) in list(self._waiting.items())[:1]:
            for other in range(len(self._works)):
                its, _ = self._waiting.get(other, (("", None), None))
                if its != at:
                    raise unlike(f"chunk {chunk} does, and chunk {other} does not", at, its)
            settle()
        self._settled = set(self._waiting)

    def meet(self, at: Place, settle: Settle) -> None:
        """Called by a chunk's work: return once all chunks have come here and ``settle`` was run, once.

        Args:
            at: The place; the same for all chunks.
            settle: What is to be done there.
        """
        chunk: int = self._local.chunk
        self._waiting[chunk] = at, settle
        self._back.release()
        self._go[chunk].acquire()
        if self._closed:
            raise _ClosedError

    def close(self) -> None:
        """End works that still wait."""
        self._closed = True
        for chunk, thread in enumerate(self._threads):
            if thread is not None and thread.is_alive() and not self._done[chunk]:
                self._go[chunk].release()
                thread.join()

    def _body(self, chunk: int, state: tuple[Any, ...]) -> None:
        grad, threads, device, cast, dtype = state
        self._local.chunk = chunk
        try:
            with (
                torch.set_grad_enabled(grad),
                torch.autograd.set_multithreading_enabled(threads),
                torch.autocast(device, dtype, enabled=cast),
            ):
                self._works[chunk]()
        except _ClosedError:
            pass
        except BaseException as error:
            self._error = error
        self._done[chunk] = True
        self._back.release()


def unlike(found: str, *places: Place) -> ModelError:
    """The error of chunks that read their neighbours, or sum over all vertices, at unlike places."""
    return ModelError(
        "all chunks of a part read their neighbours at the same places",
        found,
        where="; ".join(dict.fromkeys(words for words, _ in places if words)),
        hint="a forward that does the same for every piece of the graph",
    )


class _ClosedError(BaseException):
    """What ends a work that nobody will resume."""


def _modes() -> tuple[Any, ...]:
    """What torch keeps a thread: gradients, the threads of backward, mixed precision."""
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    cast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.is_grad_enabled(), torch._C._is_multithreading_enabled(), *cast
