"""Rank zero: share what rank 0 finds, result or error, with every rank; share an error of any rank.

Where it sits: ``pipelining.staging`` and ``verify.check`` run a model on rank 0 alone; the others wait for
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from kagome.comm.channel import Channel
from kagome.errors import KagomeError, ModelError, ResourceError
from kagome.launch.os_errors import in_words

Found = TypeVar("Found")


def by_all(channel: Channel, check: Callable[[], None], action: str) -> None:
    """Run a check on each rank's own rows; a failure on any rank raises on all. All ranks call it.

    Args:
        channel: All ranks that check.
        check: Raises what it finds.
        action: The description of this step for a rank that waits.

    Raises:
        KagomeError: The error of the first rank that refuses, on every rank. It names that rank, unless all
            refuse the same thing. On several ranks any other error is raised as a :class:`ModelError`, or as
            a :class:`ResourceError` if memory ran out.
    """
    if channel.size == 1:
        check()
        return
    mine: KagomeError | None = None
    cause: BaseException | None = None
    try:
        check()
    except KagomeError as error:
        mine, cause = error, error.__cause__
    except Exception as error:
        mine = in_words(error) or ModelError(f"{action} to succeed on all ranks", _in_a_line(error))
        cause = error
    told = channel.gather_objects(mine, action)
    found = {rank: each for rank, each in enumerate(told) if isinstance(each, KagomeError)}
    if found:
        rank, first = next(iter(found.items()))
        if len({str(each) for each in told}) > 1 and not first.where.startswith("rank "):
            where = ", ".join(filter(None, (f"rank {rank}", first.where)))
            first = type(first)(first.expected, first.got, where=where, hint=first.hint)
        # The gathered error is a copy without its cause. Only the rank that raised it has the original.
        raise first from cause


def by_first(channel: Channel, find: Callable[[], Found], action: str, kinds: Sequence[type] = ()) -> Found:
    """Return what rank 0 finds, on every rank. All ranks call it.

    Args:
        channel: All ranks that get the result.
        find: Called on rank 0.
        action: The description of this step for a rank that waits.
        kinds: The record classes that ``find`` may return.

    Raises:
        KagomeError: Rank 0's error, on every rank. Any other error is raised as a :class:`ModelError`, or
            as a :class:`ResourceError` if memory ran out.
    """
    found: object = None
    cause: BaseException | None = None
    if channel.rank == 0:
        try:
            found = find()
        except Exception as error:
            # Errors travel as plain data, which is possible for Kagome's classes only.
            found, cause = in_words(error), error.__cause__ if isinstance(error, KagomeError) else error
            if isinstance(found, ResourceError):
                found = ResourceError(found.expected, found.got, where=f"rank 0, {action}", hint=found.hint)
            elif found is None:
                found = ModelError(
                    "the model to run on a small sample",
                    f"{_in_a_line(error)} on rank 0, which runs it for all",
                    where=action,
                )
    found = channel.gather_objects(found, action, kinds)[0]
    if isinstance(found, KagomeError):
        raise found from cause
    return cast("Found", found)


def _in_a_line(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, str(error).strip())))
