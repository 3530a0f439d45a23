"""Actions: what a stage does with a chunk, with a text form; a program is a tuple of actions for each rank.

Where it sits: ``schedules`` generates programs, ``simulator`` runs them on imaginary devices, ``pipelining``
on real ones. The text is what users read and what golden files hold.

::

    2F0        stage 2 computes chunk 0 forward
    1B3        stage 1 computes chunk 3 backward
    1I3 1W3    the two halves of 1B3: gradients of the stage's inputs, then those of its weights
    0SEND_F2   stage 0 sends its output of chunk 2 on    0SEND_F2>3  to stage 3, which is not the next
    1RECV_F2   stage 1 waits for it                      3RECV_F2<0  from stage 0
    1SEND_B3   stage 1 sends the gradient of chunk 3's input back;   0RECV_B3 waits for it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kagome.errors import ScheduleError


class ActionKind(Enum):
    """The kind of an action; its value is its text form."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the letters are those of torch.distributed.pipelining
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    __hash__ = object.__hash__  # Enum hashes the name; actions are hashed by the hundred thousand

    @property
    def computes(self) -> bool:
        """Whether the action computes; if not, it sends or receives."""
        return self in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)

    @property
    def sends(self) -> bool:
        """Whether the action sends a message."""
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)

    @property
    def receives(self) -> bool:
        """Whether the action waits for a message from another stage."""
        return self in (ActionKind.RECV_F, ActionKind.RECV_B)

    @property
    def forward(self) -> bool:
        """Whether the action belongs to the forward pass."""
        return self in (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


ANSWERS: Final = {
    ActionKind.SEND_F: ActionKind.RECV_F,
    ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.SEND_B: ActionKind.RECV_B,
    ActionKind.RECV_B: ActionKind.SEND_B,
}
"""The kind of the action at the other end of a message."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one stage: a forward, a backward, a send or a receive of one chunk.

    Args:
        stage: The stage that performs it.
        kind: What the stage does.
        chunk: The chunk that it is done to.
        peer: For SEND and RECV, the other stage; None for the neighbour in the direction of the pass.
    """

    stage: int
    kind: ActionKind
    chunk: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.peer is not None and self.peer == self._next:
            object.__setattr__(self, "peer", None)  # normalised, so that each action has one form

    @property
    def other(self) -> int:
        """The stage that a SEND goes to or a RECV comes from."""
        return self._next if self.peer is None else self.peer

    @property
    def _next(self) -> int:
        # Outputs move to a higher stage and gradients to a lower one. SEND_F and RECV_B are the ends at the
        # lower stage, so their neighbour is stage + 1; the other two are the ends at the higher stage.
        return self.stage + (1 if self.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1)

    @property
    def counterpart(self) -> Action:
        """The action at the other end of a SEND or RECV."""
        return Action(self.other, ANSWERS[self.kind], self.chunk, self.stage)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.chunk}"
        if self.peer is not None:
            text += f"{'>' if self.kind.sends else '<'}{self.peer}"
        return text


Program = tuple[Action, ...]
"""The actions of one rank in order; the rank may have one stage or several."""
Programs = tuple[Program, ...]
"""The programs of all ranks, in order."""

_TEXT = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:([<>])(\d+))?")


def parse(text: str) -> Action:
    """Return the action that a text names.

    Raises:
        ScheduleError: If the text does not name an action.

    Example:
        >>> action = parse("1SEND_F0")
        >>> action.stage, action.chunk, str(action.counterpart)  # the receive at the other end
        (1, 0, '2RECV_F0')
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ScheduleError("an action written as 2F0, 1B3, 1I3, 1W3, 0SEND_F2 or 1RECV_F2", f"{text!r}")
    stage, kind, chunk, arrow, peer = found.groups()
    action = Action(int(stage), ActionKind(kind), int(chunk), None if peer is None else int(peer))
    # The arrow points to the receiver's number (1SEND_F2>3) or from the sender's (3RECV_F2<1).
    wrong_peer = arrow is not None and arrow != {True: ">", False: "<"}[action.kind.sends]
    if wrong_peer or (peer is not None and action.kind.computes):
        raise ScheduleError(">stage with SEND, <stage with RECV", f"{text!r}")
    return action


def to_text(programs: Sequence[Sequence[Action]]) -> str:
    """Return programs as text, one line per rank."""
    return "".join(" ".join(map(str, program)) + "\n" for program in programs)


def from_text(text: str) -> Programs:
    """Return the programs that a text holds.

    Raises:
        ScheduleError: If a word is not an action, or a line has an action of another rank. Stages are
            assigned to the lines in rotation.
    """
    programs = tuple(tuple(map(parse, line.split())) for line in text.splitlines())
    for rank, program in enumerate(programs):
        for action in program:
            if action.stage % len(programs) != rank:
                raise ScheduleError(
                    f"the program of stage {rank} in line {rank + 1} of {len(programs)}",
                    f"{action}",
                    where=f"stage {rank}",
                )
    return programs


def pointed(program: Sequence[Action], at: int, *, around: int = 4) -> str:
    """Return a program's actions around one of them, with an arrow under it, for errors of a failing rank."""
    first, last = max(0, at - around), min(len(program), at + around + 1)
    words = [str(action) for action in program[first:last]]
    # The text left of the action, whose length is the column of the arrow.
    before = " ".join(["...", *words[: at - first]] if first else words[: at - first])
    line = " ".join([*(["..."] if first else []), *words, *(["..."] if last < len(program) else [])])
    return f"{line}\n{' ' * (len(before) + bool(before))}^"


def pairs(programs: Mapping[int, Program] | Sequence[Program]) -> None:
    """Check that each SEND has its RECV, and each RECV its SEND.

    Raises:
        ScheduleError: If one of a pair is missing, or an action occurs twice.
    """
    each = programs.values() if isinstance(programs, Mapping) else programs
    seen: set[Action] = set()
    for program in each:
        for action in program:
            if action in seen:
                raise ScheduleError("an action to stand once in a program", f"{action} twice")
            seen.add(action)
    # Sorted, so that the same fault always gives the same message; the order of a set changes between runs.
    for action in sorted(seen, key=str):
        if not action.kind.computes and action.counterpart not in seen:
            raise ScheduleError(
                f"{action.counterpart}, which {action} needs", "no such action", where=f"stage {action.stage}"
            )
