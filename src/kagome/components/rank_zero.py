"""First: what one rank finds out for all, whether it finds it or fails.

Where it sits: ``pipeline.staging`` and ``verify.check`` run a model on rank 0 alone; the others wait for what
came out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from kagome.comm.channel import Channel
from kagome.errors import KagomeError, ModelError, ResourceError
from kagome.launch.os_errors import in_words

Found = TypeVar("Found")


def by_all(channel: Channel, check: Callable[[], None], action: str) -> None:
    """A check that each rank makes of its own rows. All ranks call it.

    Args:
        channel: All that make it.
        check: Raises what it finds.
        action: What a rank that waits says it does.

    Raises:
        KagomeError: What the first rank that refuses raised, on every rank; it names that rank, unless all
            refuse the same thing.
    """
    mine: KagomeError | None = None
    try:
        check()
    except KagomeError as error:
        mine = error
    told = channel.gather_objects(mine, action)
    found = {rank: each for rank, each in enumerate(told) if isinstance(each, KagomeError)}
    if found:
        rank, first = next(iter(found.items()))
        if len({str(each) for each in told}) > 1 and not first.where.startswith("rank "):
            where = ", ".join(filter(None, (f"rank {rank}", first.where)))
            first = type(first)(first.asked, first.found, where=where, hint=first.hint)
        raise first from (mine.__cause__ if mine is not None else None)


def by_first(channel: Channel, find: Callable[[], Found], action: str, kinds: Sequence[type] = ()) -> Found:
    """What rank 0 finds. All ranks call it.

    Args:
        channel: All that are to hear of it.
        find: Called on rank 0.
        action: What a rank that waits says it does.
        kinds: The record classes that ``find`` may give.

    Raises:
        KagomeError: What rank 0 raised, on every rank; a :class:`ModelError` in place of any other error, but
            a :class:`ResourceError` where memory ran out.
    """
    found: object = None
    cause: BaseException | None = None
    if channel.rank == 0:
        try:
            found = find()
        except Exception as error:
            found, cause = in_words(error), error.__cause__ if isinstance(error, KagomeError) else error
            if isinstance(found, ResourceError):
                found = ResourceError(found.asked, found.found, where=f"rank 0, {action}", hint=found.hint)
            elif found is None:
                words = ": ".join(filter(None, (type(error).__name__, str(error).strip())))
                found = ModelError(
                    "the model runs on a small sample of the graph",
                    f"rank 0, which runs it for all, raised {words}",
                    where=action,
                )
    found = channel.gather_objects(found, action, kinds)[0]
    if isinstance(found, KagomeError):
        raise found from cause
    return cast("Found", found)
