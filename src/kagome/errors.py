"""Errors: ``KagomeError`` and its subclasses, one for each area; all messages have the same four parts.

Where it sits: imported by every folder; imports none of them.
"""

from __future__ import annotations

from typing import Final

ADVICE: Final = "\n  Try: "
"""The text before the hint in an error message."""
LONGEST: Final = 800
"""Most characters of each part of a message: a value that was found may have a million."""


class KagomeError(ValueError):
    """An error that a user can cause and correct.

    Args:
        expected: What was required, with its number or name: a noun phrase, or one with ``to``.
        got: What was there instead, with its number or name.
        where: Where it was found (rank, stage, chunk, layer, file), or ``""``.
        hint: One thing to try.

    Example:
        >>> import kagome
        >>> try:
        ...     kagome.Train(patience=0)
        ... except kagome.KagomeError as error:
        ...     print(error)
        expected train.patience to be 1 or more; got 0.
    """

    told_by: int | None = None
    """The rank that found the error, if this rank was told of it by another."""

    def __init__(self, expected: str, got: str, *, where: str = "", hint: str = "") -> None:
        self.expected, self.got, self.where, self.hint = expected, got, where, hint
        super().__init__(self._text())

    def _text(self) -> str:
        place = f" ({shortened(self.where)})" if self.where else ""
        advice = f"{ADVICE}{shortened(self.hint)}" if self.hint else ""
        return f"expected {shortened(self.expected)}; got {shortened(self.got)}{place}.{advice}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (launch, tests): keep the four parts, not only the text.
        return _rebuild, (type(self), self.expected, self.got, self.where, self.hint)


def shortened(text: str, most: int = LONGEST) -> str:
    """Return the text, with its middle cut out if it is long."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} more characters) ... {text[-half:]}"


def _rebuild(leaf: type[KagomeError], expected: str, got: str, where: str, hint: str) -> KagomeError:
    return leaf(expected, got, where=where, hint=hint)


class ConfigError(KagomeError):
    """Settings are unknown, out of range, or conflict with each other."""


class DataError(KagomeError):
    """A graph, its features, labels or masks cannot be trained on as they are."""


class PartitionError(KagomeError):
    """A partition cannot be made or read, or it does not belong to this graph."""


class ModelError(KagomeError):
    """A model cannot be built, or does something that a split would change."""


class CheckError(KagomeError):
    """The split run and the whole run differ."""


class CommError(KagomeError):
    """Ranks disagree about the messages between them, or one waited too long."""


class ScheduleError(KagomeError):
    """A program of actions cannot be run, or a text is not a program."""


class PlanError(KagomeError):
    """A plan cannot be read, or does not fit its model or its devices."""


class CheckpointError(KagomeError):
    """A checkpoint cannot be written or read, or does not fit this run."""


class CallbackError(KagomeError):
    """A callback raised on another rank, or did on one rank what all ranks must do together."""


class LaunchError(KagomeError):
    """Ranks could not be started, or one of them died."""


class ResourceError(KagomeError):
    """The system refused memory, disk, files or processes."""
