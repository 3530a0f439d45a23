"""Lockstep: runs several chunks on one rank piece by piece; no chunk passes a meeting before all reach it.

Where it sits: chunks are computed exactly with it (``cross_chunk="exact"``).
``historical.provider.ExactRows`` calls :meth:`Lockstep.meet` at each read of neighbours' rows, forward and
backward. Each chunk has a thread of its own, and one thread runs at a time.

::

    chunk 0   ──piece 0──┤ meets          ├──piece 1──┤        a piece is the work between two meetings
    chunk 1              ├──piece 0──┤ meets          ├── ...  settled once, when all chunks have come
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from kagome.errors import ModelError

Settle = Callable[[], None]
Place = tuple[str, Hashable]
"""A meeting place: its description, and a key that tells it from other places of the same description."""


class Lockstep:
    """Functions, one a chunk, that run in turns and wait for each other at meetings.

    Args:
        works: One function a chunk. Each runs in a thread of its own, and only while :meth:`advance` waits
            for it.
    """

    def __init__(self, works: Sequence[Callable[[], None]]) -> None:
        self._works = list(works)
        # One thread runs at a time, and semaphores hand the turn over and back, so no other state needs a
        # lock:
        #
        #     advance, by the caller       _go[chunk].release(), then waits in _back.acquire()
        #     meet, in a chunk's thread    _back.release(), then waits in _go[chunk].acquire()
        #
        # A thread is there only to keep the Python stack of a forward, or a backward, that stops in its
        # middle.
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
        """Run the next piece of a chunk: up to its next meeting, or to its end.

        Args:
            chunk: Index of the chunk.

        Returns:
            Whether the chunk has ended.

        Raises:
            ModelError: If one chunk ends while another waits at a meeting, or if chunks wait at different
                places.
            BaseException: Any exception raised by the chunk's function.
        """
        # The caller asks for a chunk that cannot run on by itself: the round is over, and all chunks must
        # have met.
        if self._done[chunk] or (chunk in self._waiting and chunk not in self._settled):
            self._settle()
        if self._done[chunk]:
            return True
        self._waiting.pop(chunk, None)
        self._settled.discard(chunk)
        thread = self._threads[chunk]
        if thread is None:
            # torch's modes belong to a thread: the caller's are set in the chunk's thread as well.
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
        """Settle the current meeting once no chunk can run on: all have ended, or all wait at one place."""
        for chunk, (at, settle) in list(self._waiting.items())[:1]:
            for other in range(len(self._works)):
                # A chunk that has ended waits nowhere; its place is unlike any other.
                its, _ = self._waiting.get(other, (("", None), None))
                if its != at:
                    raise unlike(f"a place of chunk {chunk} that chunk {other} does not come to", at, its)
            settle()
        self._settled = set(self._waiting)

    def meet(self, at: Place, settle: Settle) -> None:
        """Wait until all chunks have reached this place and ``settle`` has run once.

        Called from a chunk's thread.

        Args:
            at: The place, which must be the same for all chunks.
            settle: The work to do once, when all chunks have come.
        """
        chunk: int = self._local.chunk
        self._waiting[chunk] = at, settle
        self._back.release()
        self._go[chunk].acquire()
        if self._closed:
            raise _ClosedError

    def close(self) -> None:
        """End the threads of chunks that still wait at a meeting."""
        # Each thread is released as for its next piece, and ``meet`` raises in it, so that the chunk's
        # ``with`` blocks and hooks end in order.
        self._closed = True
        for chunk, thread in enumerate(self._threads):
            if thread is not None and thread.is_alive() and not self._done[chunk]:
                self._go[chunk].release()
                thread.join()

    def _body(self, chunk: int, state: tuple[Any, ...]) -> None:
        grad, threads, device, cast, dtype, place = state
        self._local.chunk = chunk
        try:
            with (
                torch.accelerator.device_index(place),  # Triton launches there, wherever the tensors lie
                torch.set_grad_enabled(grad),
                torch.autograd.set_multithreading_enabled(threads),
                torch.autocast(device, dtype, enabled=cast),
            ):
                self._works[chunk]()
        except _ClosedError:
            pass
        except BaseException as error:
            self._error = error
        # Before the turn goes back, since the caller reads it next.
        self._done[chunk] = True
        self._back.release()


def unlike(got: str, *places: Place) -> ModelError:
    """Build the error for chunks that read neighbours, or sum over all vertices, at different places.

    Args:
        got: The difference, in words.
        *places: The places concerned; the error names their layers.
    """
    return ModelError(
        "all chunks of a part to read their neighbours at the same places",
        got,
        where="; ".join(dict.fromkeys(label for label, _ in places if label)),
        hint="a forward that does the same for every piece of the graph",
    )


class _ClosedError(BaseException):
    """Raised in a chunk's thread that waits at a meeting when the lockstep closes."""


def _modes() -> tuple[Any, ...]:
    """Return torch's thread-local modes: gradients, multithreaded backward, autocast, current device."""
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    cast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    # A new thread starts on device 0, whatever the device of the thread that started it.
    place = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    return torch.is_grad_enabled(), torch._C._is_multithreading_enabled(), *cast, place
