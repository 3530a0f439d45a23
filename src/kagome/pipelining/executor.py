"""Executor: performs a rank's program action by action, and points at the action that fails.

Where it sits: ``chunk_passes`` runs the chunks of a graph with it, ``dag.sample_pass`` the samples of a
batch. These modules compute, and their transfers send and receive.

::

    program     0RECV_F2              0F2                 0SEND_F2
                transfers.receive     compute             transfers.send     each is timed by its name
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kagome.model.operators.pieces import Piece
from kagome.model.split.stages import Stage
from kagome.schedule.actions import Action, ActionKind, Program, pointed


class Transfers(Protocol):
    """The transfers of one rank in one pass."""

    def send(self, action: Action) -> None:
        """Start to send the values of a SEND."""

    def receive(self, action: Action) -> None:
        """Wait for the values of a RECV, and hand them to their stage run."""

    def end(self) -> None:
        """Wait until all sends have completed."""


@dataclass(frozen=True)
class Executor:
    """Performs the programs of one rank.

    Args:
        rank: The rank, for errors.
        doing: Called with a description of each action before it, for the errors of peers that wait.
        phase: Returns the context that times an action, given its text and the epoch or update.
    """

    rank: int
    doing: Callable[[str], None]
    phase: Callable[[str, int | None], AbstractContextManager[Any]]

    def run(
        self,
        program: Program,
        compute: Callable[[Action], None],
        transfers: Transfers,
        *,
        turn: str,
        epoch: int | None,
    ) -> None:
        """Perform the actions of a program in order.

        Args:
            program: The actions in order.
            compute: Performs an F, B, I or W.
            transfers: Performs a SEND or a RECV.
            turn: The epoch or update in words.
            epoch: Its number, for the times; None where there is no epoch.

        Raises:
            BaseException: Any exception of an action; the program with an arrow at it is written to stderr.
        """
        done = 0
        try:
            for action in program:
                # Peers that wait in vain report this text as what the rank was doing.
                self.doing(f"{turn}: {action}")
                with self.phase(str(action), epoch):
                    if action.kind.computes:
                        compute(action)
                    elif action.kind.sends:
                        transfers.send(action)
                    else:
                        transfers.receive(action)
                done += 1
            transfers.end()
        except BaseException:
            where = pointed(program, min(done, len(program) - 1))
            print(f"kagome: rank {self.rank} stopped here in {turn}:\n{where}", file=sys.stderr)
            raise


def names_of(action: Action, stage: Stage | Piece, values: Mapping[str, Any]) -> list[str]:
    """Return the names of the values of a SEND or RECV; backward has only those with a gradient.

    Args:
        action: The action.
        stage: Its stage.
        values: What is known of each value, such as whether it has a gradient (``grad``).
    """
    # SEND_F and RECV_B are about values that this stage gives, RECV_F and SEND_B about values that it takes.
    given = stage.gives if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else stage.takes
    return [name for name in given.get(action.other, ()) if action.kind.forward or values[name].grad]


def needed(
    program: Iterable[Action], stages: Sequence[Stage | Piece], values: Mapping[str, Any]
) -> Iterator[Action]:
    """Yield the actions of a program without messages that would carry no value."""
    return (a for a in program if a.kind.computes or names_of(a, stages[a.stage], values))
