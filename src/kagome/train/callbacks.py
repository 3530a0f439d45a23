"""Callbacks: a user's objects, called at each epoch, each checkpoint, and the start and end of training.

Where it sits: ``trainer`` calls them; an error that one of them raises ends all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from kagome.comm.channel import Channel
from kagome.errors import CallbackError, ConfigError
from kagome.train.rank_agreement import ModelMarks, refuse_unlike

EVENTS: Final = ("on_fit_start", "on_epoch_end", "on_checkpoint", "on_fit_end")
"""The methods that a callback may have."""


class Callbacks:
    """The callbacks of a run.

    A callback runs on rank 0 alone, unless its attribute ``all_ranks`` is true. All ranks learn of an error
    that it raised before they go on. If any callback has ``on_epoch_end``, a pipeline gives every rank the
    weights of all stages first, so that the callback reads the current model.

    Args:
        given: Objects with some of the methods in :data:`EVENTS`.
        world: All ranks.
        marks: Marks of the model, the optimizer and the scheduler.

    Raises:
        ConfigError: If one has no such method, or a method of another name that begins with ``on_``.
    """

    def __init__(self, given: Sequence[object], world: Channel, marks: ModelMarks) -> None:
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ConfigError("callbacks=... to be a list of objects", type(given).__name__)
        for callback in given:
            _refuse_other(callback)
        self._world, self._marks = world, marks
        self._mine = [each for each in given if world.rank == 0 or _everywhere(each)]
        found: Any = world.gather_objects([_events(each) for each in self._mine], "callbacks")
        self._heard = {event for events in found for names in events for event in names}
        # The last rank has a callback only if it is for all ranks.
        self._shared = world.size > 1 and len(found[-1]) > 0  # some run on every rank
        self._running: object | None = None

    def listens_to(self, event: str) -> bool:
        """Return whether a callback on any rank has a method for an event."""
        return event in self._heard

    def call(self, event: str, argument: object) -> bool:
        """Call one method of all callbacks, in order. All ranks call it.

        Args:
            event: One of :data:`EVENTS`.
            argument: The argument that the method is called with.

        Returns:
            Whether one of them changed the model, either its weights or numbers that its modules keep.

        Raises:
            Exception: What a callback raised, on its own rank.
            CallbackError: On the other ranks; on all ranks if one changed the model, the optimizer or the
                scheduler on rank 0 alone.
            ConfigError: If one changed the optimizer or the scheduler differently on different ranks.

        Cost:
            A few bytes from each rank; nothing if no callback has the method.
        """
        if not self.listens_to(event):
            return False
        raised, fault, changed, rules = None, None, False, None
        for callback in self._mine:
            method = getattr(callback, event, None)
            if method is None:
                continue
            alone = self._world.size > 1 and not _everywhere(callback)
            # Marks before and after show a change. A change on rank 0 alone would let the ranks' models
            # diverge without any error.
            before, name = self._marks.now(alone=alone), f"{type(callback).__name__}.{event}"
            try:
                with self._runs(callback):
                    method(argument)
            except Exception as error:  # on any error the other ranks must not wait for this one
                error.add_note(f"raised in callback {name} on rank {self._world.rank}")
                raised, fault = error, (name, f"{type(error).__name__}: {error}", "")
                break
            after = self._marks.now(alone=alone)
            moved = [thing for thing, marked in after.items() if marked != before[thing]]
            changed |= "model" in moved
            if moved and alone:
                hint = f"all_ranks = True in {type(callback).__name__}, so that every rank runs it"
                fault = name, f"a change of the {moved[0]}, which all ranks share", hint
                break
        if self._shared:
            rules = self._marks.facts()
        # Also after an error: the other ranks wait here and must learn of it.
        faults: Any = self._world.gather_objects((fault, changed, rules), f"callbacks: {event}")
        if raised is not None:
            raise raised
        for rank, (found, *_) in enumerate(faults):
            if found is not None:
                what, text, hint = found
                raise CallbackError(
                    f"callback {what} to leave the run as it is",
                    f"{text}",
                    where=f"rank {rank}",
                    hint=hint,
                )
        # Callbacks on all ranks may change the learning rate and the like, but on each rank in the same way.
        if self._shared:
            refuse_unlike([theirs for *_, theirs in faults])
        return any(moved for _, moved, _ in faults)

    def refuse_alone(self, what: str) -> None:
        """Raise an error if a callback on one rank makes a call that all ranks must make.

        Raises:
            CallbackError: If such a callback runs now.
        """
        if self._running is None or self._world.size == 1 or _everywhere(self._running):
            return
        raise CallbackError(
            f"all ranks to call {what} together",
            f"a call by callback {type(self._running).__name__} on rank 0 alone",
            hint=f"all_ranks = True in {type(self._running).__name__}",
        )

    @contextmanager
    def _runs(self, callback: object) -> Iterator[None]:
        self._running = callback
        try:
            yield
        finally:
            self._running = None


def _everywhere(callback: object) -> bool:
    return bool(getattr(callback, "all_ranks", False))


def _events(callback: object) -> list[str]:
    return [event for event in EVENTS if callable(getattr(callback, event, None))]


def _refuse_other(callback: object) -> None:
    name, known = type(callback).__name__, ", ".join(EVENTS)
    if isinstance(callback, type):
        raise ConfigError(
            "objects in callbacks=[...]",
            f"the class {callback.__name__}",
            hint=f"{callback.__name__}()",
        )
    others = sorted(n for n in dir(callback) if n.startswith("on_") and n not in EVENTS)
    if others or not _events(callback):
        got = others[0] if others else "none of them"
        raise ConfigError(f"a callback with some of {known}", got, where=f"callback {name}")
