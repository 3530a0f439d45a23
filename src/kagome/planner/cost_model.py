"""Cost model: a model's measured costs per row and edge, and the load that a part puts on its rank.

Where it sits: ``candidates`` and ``pipe_candidates`` predict with it; ``autoplan.workload`` measures its
rates. It loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ONE_ROUND = 2**18
"""Bytes over all ranks up to which an all-reduce takes one round; see ``comm.all_reduce``."""


@dataclass(frozen=True)
class Load:
    """The load that one part puts on its rank.

    Args:
        rows: The number of own rows.
        edges: The number of in-edges.
        sent: The number of rows sent to peers in forward.
        halo: The number of rows read from peers, whose gradients are sent back.
        memory: Bytes held by the rank.
        whole: The bytes of these that each stage of a pipeline holds in full: data, tables, weights.
        activations: The bytes of these that autograd saves for backward, halo rows among them.
        inner: The bytes of these that the largest layer takes while it runs again; None if no layer does.
        saved: The numbers by which partial sums make ``sent`` and ``halo`` smaller, on the mean of all reads.
    """

    rows: float
    edges: float
    sent: float
    halo: float
    memory: float
    whole: float = 0.0
    activations: float = 0.0
    inner: float | None = None
    saved: tuple[float, float] = (0.0, 0.0)

    @property
    def crossing(self) -> tuple[float, float]:
        """The rows and sums that are sent to peers and read from them."""
        return self.sent - self.saved[0], self.halo - self.saved[1]


@dataclass(frozen=True)
class Timed:
    """The measured seconds of a rank's epoch, without the transfer of its messages; no value is below 0.

    Args:
        seconds: Seconds of an epoch without rows and edges.
        row: Seconds per row.
        edge: Seconds per edge.
        exchanged: Seconds per row that is sent to a peer or read from one.
        meanwhile: The share of its seconds in which rows are in flight that the rank does not wait for yet.
        uneven: The sum over the intervals between exchanges of the slowest rank's seconds, relative to the
            seconds of the rank that is slowest overall.
        meetings: The number of exchanges and sums of all ranks.
        spread: The relative difference of two measurements.
    """

    seconds: float
    row: float
    edge: float
    exchanged: float
    meanwhile: float
    uneven: float
    meetings: int
    spread: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class CostRates(Timed):
    """The measured costs of a model per row and edge: its seconds, and the bytes it exchanges.

    Args:
        forward: Bytes per row sent, in forward.
        backward: Bytes per halo row, in backward.
        weights: Bytes of each message of gradients.
        coded: ``forward`` and ``backward`` at one bit per number.
        coding: Seconds to encode and decode a byte of them.
        alone: The speed of a single rank that has all cores of this machine, relative to these rates.
        summed: The share of halo bytes whose rows partial sums can replace.
    """

    forward: float
    backward: float
    weights: tuple[float, ...]
    coded: tuple[float, float] = (0.0, 0.0)
    coding: float = 0.0
    alone: float = 1.0
    summed: float = 0.0


@dataclass(frozen=True)
class Sliced:
    """The costs of feature slices within each part.

    Args:
        count: The number of slices.
        two: With two slices, the seconds of a rank's epoch: fixed, per row and per edge of the whole part.
        four: The same seconds with four slices.
        meetings: The number of exchanges and sums of all ranks, without those of gradients.
        sent: Bytes of all transposes of an epoch, over all ranks.
    """

    count: int
    two: tuple[float, float, float]
    four: tuple[float, float, float]
    meetings: int
    sent: float

    def computing(self, load: Load) -> float:
        """Return the seconds of an epoch of one slice: ``a + b / T``, where ``a`` has no columns to cut."""
        units = (1.0, load.rows, load.edges)
        two, four = (
            sum(rate * unit for rate, unit in zip(rates, units, strict=True))
            for rates in (self.two, self.four)
        )
        # Seconds with T slices are a + b / T, so a = 2 four - two and b = 4
        # (four - a). Noise must make neither negative.
        alike = min(max(0.0, 2 * four - two), four)
        return alike + 4 * (four - alike) / self.count


def summed(ranks: int, messages: Sequence[float], stages: int = 1) -> float:
    """Return the bytes that each rank sends to sum messages; small ones take one round, others two.

    Args:
        ranks: The number of ranks that sum.
        messages: The bytes of each message.
        stages: The number of stages that share the messages.
    """
    # Bytes that a rank sends to sum a message of m bytes over r ranks:
    #    one round   each rank sends all of it to each other one     (r - 1) m
    #    two rounds  reduce-scatter, then all-gather                 2 (r - 1) / r m
    # Both are m for two ranks, so one round, which has half the latency, is always right there.
    total = 0.0
    for message in messages:
        size = message / stages
        one_round = ranks == 2 or ranks * size <= ONE_ROUND
        total += (ranks - 1) * size if one_round else 2 * (ranks - 1) / ranks * size
    return total


def halos(rates: CostRates, loads: Sequence[Load], parts: int) -> tuple[float, float]:
    """Return the halo bytes of the busiest link, which all ranks wait for, and those of all ranks together.

    At each exchange all ranks wait for the busiest link, in or out, in forward and in backward. A single load
    stands for all parts if they are alike.
    """
    # Rows that are sent in forward are those whose gradients are received in backward, and the other way
    # round. The busier direction of a link decides, and it is the same number of rows in both passes.
    most = (rates.forward + rates.backward) * max(max(load.crossing) for load in loads)
    each = [rates.forward * sent + rates.backward * halo for sent, halo in (load.crossing for load in loads)]
    return most, sum(each) if len(each) == parts else each[0] * parts


def passes(*, late: bool = False, share: float = 1.0) -> float:
    """Return how often rows pass through memory on their way to a rank of the same host.

    Between ranks of one host nothing travels while they compute: the ranks themselves pack rows into memory
    that both see, and read them there. So late and sampled rows hide nothing, and pass through memory more
    often.

    Args:
        late: Whether rows are read one epoch after they are packed.
        share: The share of rows that is sampled.
    """
    # Exact rows are packed and read. By the next epoch late ones have left the caches: that is a pass more.
    #
    #     exact      pack, read                                                            2
    #     late       pack, leave the caches, read                                          3
    #     sampled    zeros for all rows, read; of a share: encode, lay down, fetch,
    #                decode, scatter into the zeros                                        2 + 5 share
    return 2.0 + late + (5.0 * share if share < 1 else 0.0)


def computing(rates: CostRates, rows: float, edges: float, exchanged: float = 0.0) -> float:
    """Return the seconds of an epoch on the measured machine for numbers of rows, edges, exchanged rows."""
    return rates.seconds + rates.row * rows + rates.edge * edges + rates.exchanged * exchanged
