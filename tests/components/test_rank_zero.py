"""Rank zero: an error of any kind on one rank is raised on all."""

from __future__ import annotations

import pytest

from kagome.comm.channel import Channel
from kagome.components.rank_zero import by_all
from kagome.errors import KagomeError, ModelError, ResourceError


def checked(channel: Channel, error: Exception) -> tuple[str, str, str]:
    def check() -> None:
        if channel.rank == 1:
            raise error

    with pytest.raises(KagomeError) as caught:
        by_all(channel, check, "the first update")
    return type(caught.value).__name__, str(caught.value), repr(caught.value.__cause__)


@pytest.mark.every
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ZeroDivisionError("no step"), ModelError, "ZeroDivisionError: no step (rank 1)"),
        (MemoryError(), ResourceError, "memory from the system"),
    ],
)
def test_any_error_of_a_check_is_raised_by_all(ranks, error, kind, words):
    """Only Kagome's own errors were: with another one that rank ended alone, and the others waited for it."""
    found = ranks(2, checked, error)
    for name, text, _ in found:
        assert name == kind.__name__
        assert words in text
    assert [cause for *_, cause in found] == ["None", repr(error)]


def test_one_rank_raises_what_the_check_raised():
    def check() -> None:
        raise ZeroDivisionError("no step")

    with pytest.raises(ZeroDivisionError):
        by_all(Channel(None, "cpu"), check, "the first update")
