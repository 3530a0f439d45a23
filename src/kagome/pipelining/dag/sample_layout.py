"""Sample layout: which rank computes which samples of a batch, and which samples two ranks exchange.

Where it sits: ``pipeline`` makes it from a plan; ``sample_pass`` and ``transfers`` use it. The order of the
micro-batches comes from a ``schedule.schedules.Shape``, which has neither ranks nor a short last micro-batch.

::

    batch        0   1   2   3   4   5   6   7
    stage 0    [ r0    | r1    ][ r0    | r1    ]     micro-batches of 4 on 2 ranks
    stage 1    [ r2    ][ r2   ][ r2    ][ r2   ]     micro-batches of 2 on 1 rank
    messages     u0      u1      u2       u3          u0 from r0 alone, u1 from r1 alone
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kagome.comm.transport.routes import Route, both_passes
from kagome.model.operators.pieces import Piece
from kagome.planner.stages.plan import StagePlan
from kagome.schedule.actions import Action


@dataclass(frozen=True)
class SampleLayout:
    """The samples of each stage, micro-batch and replica.

    Args:
        batch: The number of samples; the last micro-batch may be shorter.
        sizes: The size of each stage's micro-batch, over all its replicas.
        devices: The number of replicas of each stage; ranks are assigned in the order of stages.
    """

    batch: int
    sizes: tuple[int, ...]
    devices: tuple[int, ...]

    @staticmethod
    def of(plan: StagePlan) -> SampleLayout:
        """Return the layout of a plan's batch."""
        stages = plan.stages
        return SampleLayout(
            plan.batch, tuple(s.micro_batch for s in stages), tuple(s.devices for s in stages)
        )

    def even(self, batch: int) -> SampleLayout:
        """Return a layout of any number of samples over the same ranks, with one micro-batch size for all."""
        # One size for all stages: any number of samples can then be divided, the last micro-batch being
        # shorter.
        return SampleLayout(batch, (max(self.sizes),) * len(self.sizes), self.devices)

    def chunks(self, stage: int) -> int:
        """Return the number of micro-batches of a stage."""
        # Rounded up.
        return -(-self.batch // self.sizes[stage])

    def ranks(self, stage: int) -> range:
        """Return the ranks of a stage."""
        first = sum(self.devices[:stage])
        return range(first, first + self.devices[stage])

    def seat(self, rank: int) -> tuple[int, int]:
        """Return the stage and the replica of a rank."""
        stage = next(s for s in range(len(self.devices)) if rank in self.ranks(s))
        return stage, rank - self.ranks(stage).start

    def samples(self, stage: int, chunk: int, replica: int) -> range:
        """Return the samples of a micro-batch that one replica computes."""
        size, devices = self.sizes[stage], self.devices[stage]
        first = chunk * size
        count = min(first + size, self.batch) - first
        # Shares differ by one sample at most. With fewer samples than replicas some ranges are empty.
        return range(first + count * replica // devices, first + count * (replica + 1) // devices)

    def chunk(self, stage: int, action: Action) -> int:
        """Return the micro-batch of a stage that one of its actions is done to."""
        if action.kind.computes:
            return action.chunk
        return self.chunk_of(stage, action.other, action.chunk)

    def chunk_of(self, stage: int, other: int, unit: int) -> int:
        """Return the micro-batch of a stage that contains the samples of a message to or from another."""
        # A message covers min(both sizes) samples, so its first sample is unit * min(...). Micro-batches of 4
        # and 2: messages 2 and 3 belong to micro-batch 1 of the larger stage, and to 2 and 3 of the smaller
        # one.
        return unit * min(self.sizes[stage], self.sizes[other]) // self.sizes[stage]

    def routes(self, pieces: Sequence[Piece]) -> set[Route]:
        """Return the routes of the messages between the ranks of pieces that give and take values."""
        return both_passes(
            (giver, taker)
            for piece in pieces
            for other in piece.gives
            for giver in self.ranks(piece.number)
            for taker in self.ranks(other)
        )

    def shared(self, rank: int, other: int, unit: int) -> Iterator[tuple[int, range]]:
        """Yield the ranks of another stage that share samples of a message with a rank, and these samples.

        Args:
            rank: The rank on this side.
            other: The stage on the other side.
            unit: The number of the message.
        """
        stage, replica = self.seat(rank)
        size = min(self.sizes[stage], self.sizes[other])
        mine = self.samples(stage, self.chunk_of(stage, other, unit), replica)
        its = self.chunk_of(other, stage, unit)
        for place, peer in enumerate(self.ranks(other)):
            theirs = self.samples(other, its, place)
            # The samples of the message that both ranks compute; empty where their shares do not overlap.
            first = max(unit * size, mine.start, theirs.start)
            last = min((unit + 1) * size, mine.stop, theirs.stop)
            if first < last:
                yield peer, range(first, last)
