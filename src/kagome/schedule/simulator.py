"""Simulate: run programs on imaginary devices, and find time, bubble, memory and deadlock.

Where it sits: ``planner`` tries schedules with it; the report draws its spans beside the measured ones.

A rank does its actions one after the other. A SEND takes no time of its rank: its message waits until the
link from that rank to the other is free, then occupies it; between two stages of one rank it takes none. A
RECV waits until its message has come.
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
    """What a simulation found.

    Args:
        spans: Each rank's F, B and RECV, in order; a RECV's span is the wait.
        transfers: Each message on its link.
        held: The most that each rank held at once, in the unit of ``size``.
    """

    spans: tuple[tuple[SimulatedSpan, ...], ...]
    transfers: tuple[SimulatedSpan, ...]
    held: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """When the last rank ends."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(span.end - span.begin for span in self.spans[rank] if span.action.kind.computes)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, from the first begin to the last end, without computing."""
        whole = self.seconds * len(self.spans)
        return 1 - sum(map(self.busy, range(len(self.spans)))) / whole if whole else 0.0

    @property
    def imbalance(self) -> float:
        """The busiest rank's computing over the mean, less 1."""
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
    """Run programs on imaginary devices.

    Args:
        programs: One a rank.
        compute: Seconds of an F or a B.
        transfer: Seconds of a SEND on its link; 0 if None.
        size: What a rank holds from a chunk's first F to its last B, asked with its F; 1 if None.
        paired: That each SEND is known to have its RECV, which is a third of the work.

    Returns:
        The spans, and what was held.

    Raises:
        ScheduleError: If a SEND has no RECV, or ranks wait for each other for ever: each one's program is
            shown, with an arrow at the action that waits.

    Cost: one step an action.
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
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while places[rank] < len(program):
                action, now = program[places[rank]], clocks[rank]
                if action.kind.receives:
                    come = arrived.get(action.answer)
                    if come is None:
                        break
                    clocks[rank] = max(now, come)
                    spans[rank].append(SimulatedSpan(action, now, clocks[rank]))
                elif action.kind.sends:
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
        raise ScheduleError("every stage comes to its program's end", f"{len(stuck)} wait for ever\n{shown}")
    kept = tuple(_most(program, size) for program in programs)
    return Simulation(tuple(map(tuple, spans)), tuple(transfers), kept)


def _most(program: Program, size: Callable[[Action], float] | None) -> float:
    """The most that a program holds at once: a stage's chunk counts from its first F to its last B."""
    first: dict[tuple[int, int], Action] = {}
    last: dict[tuple[int, int], Action] = {}
    for action in program:
        if action.kind is ActionKind.F:
            first.setdefault((action.stage, action.chunk), action)
        elif action.kind is ActionKind.B:
            last[action.stage, action.chunk] = action
    begins, ends = set(first.values()), set(last.values())
    now = most = 0.0
    for action in program:
        if action in begins:
            now += 1 if size is None else size(action)
            most = max(most, now)
        elif action in ends:
            now -= 1 if size is None else size(first[action.stage, action.chunk])
    return most
