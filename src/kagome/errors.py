"""KagomeError and its leaves: every fault a user can cause, told in the same four sentences.

Where it sits: imported by every folder, imports none of them.
"""

from __future__ import annotations

from typing import Final

ADVICE: Final = "\n  Try: "
"""What stands before the hint in an error's text."""
LONGEST: Final = 800
"""Characters of each of the four parts in an error's text: a value that was found may have a million."""


class KagomeError(ValueError):
    """A fault that a user can cause and mend.

    Args:
        asked: What was asked for, with its number or name.
        found: What was found instead, with its number or name.
        where: Where it was found (rank, stage, chunk, layer, file), or nothing.
        hint: One thing to try.
    """

    told_by: int | None = None
    """The rank that found it, where this one has been told of it."""

    def __init__(self, asked: str, found: str, *, where: str = "", hint: str = "") -> None:
        self.asked, self.found, self.where, self.hint = asked, found, where, hint
        super().__init__(self._text())

    def _text(self) -> str:
        place = f" ({shortened(self.where)})" if self.where else ""
        advice = f"{ADVICE}{shortened(self.hint)}" if self.hint else ""
        return f"{shortened(self.asked)}, but {shortened(self.found)}{place}.{advice}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (launch, tests): keep the four parts, not only the text.
        return _rebuild, (type(self), self.asked, self.found, self.where, self.hint)


def shortened(text: str, most: int = LONGEST) -> str:
    """The text, without its middle where it is long."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} more characters) ... {text[-half:]}"


def _rebuild(leaf: type[KagomeError], asked: str, found: str, where: str, hint: str) -> KagomeError:
    return leaf(asked, found, where=where, hint=hint)


class ConfigError(KagomeError):
    """Settings that are unknown, out of range, or clash."""


class DataError(KagomeError):
    """A graph, its features, labels or masks cannot be trained on as they are."""


class PartitionError(KagomeError):
    """A partition cannot be made, read, or does not belong to this graph."""


class ModelError(KagomeError):
    """A model does something that a split would change, or cannot be built."""


class CheckError(KagomeError):
    """Split and whole differ."""


class CommError(KagomeError):
    """Ranks disagree about what crosses between them, or one waited too long."""


class ScheduleError(KagomeError):
    """A program of actions that cannot be run, or a text that is none."""


class PlanError(KagomeError):
    """A plan that cannot be read, or that does not fit its model or its devices."""


class CheckpointError(KagomeError):
    """A checkpoint cannot be written, read, or does not fit this run."""


class CallbackError(KagomeError):
    """A callback raised on another rank, or did on one rank what all ranks do together."""


class LaunchError(KagomeError):
    """Ranks could not be started, or one of them died."""


class ResourceError(KagomeError):
    """The system refused memory, disk, files or processes."""
