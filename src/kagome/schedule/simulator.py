"""Simulator: run programs on imaginary devices to find time, bubble, memory and deadlocks.

Where it sits: ``planner`` tries schedules with it; the report draws its spans beside the measured ones.

A rank performs its actions one after another. A SEND takes no time on its rank: the message waits until the
link to the other rank is free, then occupies it. Between two stages of one rank a message takes no time. A
RECV waits until its message has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kagome.errors import ScheduleError
from kagome.schedule.actions import Action, ActionKind, Program, pairs, pointed

Seconds = Callable[[Action], float]


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """An action with its begin and end, in seconds."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Args:
        spans: Each rank's F, B, I, W and RECV, in order; the span of a RECV is the wait.
        transfers: Each message on its link.
        held: The most that each rank held at once, in the unit of ``size``.
    """

    spans: tuple[tuple[SimulatedSpan, ...], ...]
    transfers: tuple[SimulatedSpan, ...]
    held: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The time at which the last rank ends, in seconds."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the seconds that a rank computes."""
        return sum(span.end - span.begin for span in self.spans[rank] if span.action.kind.computes)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time, from the first begin to the last end, that is not spent computing."""
        whole = self.seconds * len(self.spans)
        return 1 - sum(map(self.busy, range(len(self.spans)))) / whole if whole else 0.0

    @property
    def imbalance(self) -> float:
        """The busiest rank's computing time over the mean, minus 1."""
        each = [self.busy(rank) for rank in range(len(self.spans))]
        mean = sum(each) / len(each)
        return max(each) / mean - 1 if mean else 0.0


def simulate(
    programs: Sequence[Program],
    compute: Seconds,
    *,
    transfer: Seconds | None = None,
    size: Callable[[Action], float] | None = None,
    paired: bool = False,
) -> Simulation:
    """Run programs on imaginary devices and return the timing.

    Args:
        programs: One program per rank.
        compute: Returns the seconds of an F, B, I or W.
        transfer: Returns the seconds of a SEND on its link; 0 if None.
        size: Returns what a rank holds from a chunk's first F to its last B or W, given that F; 1 if None.
        paired: Whether each SEND is known to have its RECV; the check is a third of the work.

    Returns:
        The spans, and what was held.

    Raises:
        ScheduleError: If a SEND has no RECV, or if ranks wait for each other forever; the message shows each
            waiting rank's program with an arrow at the action that waits.

    Cost: one step an action.

    Example:
        >>> from kagome.schedule.schedules import Shape, fill_drain
        >>> run = simulate(fill_drain(Shape(stages=2, order=range(4))), lambda action: 1.0)
        >>> run.seconds, f"{run.bubble:.0%}"
        (10.0, '20%')
    """
    if not paired:
        pairs(programs)
    clocks = [0.0] * len(programs)
    places = [0] * len(programs)
    spans: list[list[SimulatedSpan]] = [[] for _ in programs]
    arrived: dict[Action, float] = {}
    transfers: list[SimulatedSpan] = []
    links: dict[tuple[int, int], float] = {}
    homes = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    moved = True
    # Each rank goes as far as its messages allow. A round in which no rank moves is the end: either all
    # programs are done, or the remaining ranks wait for each other. The times do not depend on the order of
    # the ranks, because a RECV takes the arrival time of its SEND.
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while places[rank] < len(program):
                action, now = program[places[rank]], clocks[rank]
                if action.kind.receives:
                    come = arrived.get(action.counterpart)
                    if come is None:
                        break
                    clocks[rank] = max(now, come)
                    spans[rank].append(SimulatedSpan(action, now, clocks[rank]))
                elif action.kind.sends:
                    # Messages of one direction between two ranks follow each other on their link; the sender
                    # does not wait. Two stages of one rank have no link between them.
                    link = (rank, homes[action.other])
                    takes = 0.0 if transfer is None or link[0] == link[1] else transfer(action)
                    begin = now if link[0] == link[1] else max(now, links.get(link, 0.0))
                    links[link] = arrived[action] = begin + takes
                    transfers.append(SimulatedSpan(action, begin, arrived[action]))
                else:
                    clocks[rank] = now + compute(action)
                    spans[rank].append(SimulatedSpan(action, now, clocks[rank]))
                places[rank] += 1
                moved = True
    stuck = [rank for rank, program in enumerate(programs) if places[rank] < len(program)]
    if stuck:
        shown = "\n".join(
            f"stage {programs[rank][places[rank]].stage} waits at {programs[rank][places[rank]]}:\n"
            f"{pointed(programs[rank], places[rank])}"
            for rank in stuck
        )
        raise ScheduleError(
            "every stage to come to its program's end", f"{len(stuck)} waiting for ever\n{shown}"
        )
    kept = tuple(_most(program, size) for program in programs)
    return Simulation(tuple(map(tuple, spans)), tuple(transfers), kept)


def _most(program: Program, size: Callable[[Action], float] | None) -> float:
    """Return the most that a program holds at once; a chunk counts from its first F to its last B or W."""
    first: dict[tuple[int, int], Action] = {}
    last: dict[tuple[int, int], Action] = {}
    for action in program:
        if action.kind is ActionKind.F:
            first.setdefault((action.stage, action.chunk), action)
        elif action.kind.computes:  # of I and W, the W is later
            last[action.stage, action.chunk] = action
    # With pieces, a chunk has several F and several B in a stage; a B in two halves is an I and a W. Only the
    # outermost pair counts.
    begins, ends = set(first.values()), set(last.values())
    now = most = 0.0
    for action in program:
        if action in begins:
            now += 1 if size is None else size(action)
            most = max(most, now)
        elif action in ends:
            now -= 1 if size is None else size(first[action.stage, action.chunk])
    return most
