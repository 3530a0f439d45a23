"""What late and sampled rows hold between epochs, counted by the bytes of all storages of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from crossing_cases import compressed_exchange, site_exchange
from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.transport.shared_memory import SharedMemory
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.memory.live_tensors import LiveTensors

ROWS, WIDTH, SITES, EPOCHS = 1000, 32, 4, 5
UNIT = ROWS * WIDTH * 4
"""Bytes of one exchange's rows to one peer."""
EXCHANGES = 2 * SITES
"""Of an epoch: rows and gradients of each site."""


def an_epoch(channel: Channel, way: CompressedExchange, epoch: int, lends: bool) -> Tensor:
    """Each site's rows, then each site's gradients, as a model exchanges them; a sum of all that was read.

    Ranks go side by side. One that is ahead packs rows before others have read those of the epoch before,
    which may take as much memory again.
    """
    me, size = way.rank, way.size
    counts = [0 if peer == me else ROWS for peer in range(size)]
    ids, found = torch.arange(ROWS).repeat(size - 1), torch.zeros(WIDTH, dtype=torch.float64)
    for direction in (0, 3):
        for number in range(SITES):
            generator = torch.Generator().manual_seed(1000 * epoch + 100 * direction + 10 * number + me)
            index = ids if direction == 0 else None
            count = ROWS if direction == 0 else ROWS * (size - 1)
            rows = torch.rand(count, WIDTH, generator=generator)
            site = site_exchange(epoch, ids, direction, ("conv.x", number + 1))
            work = way.start(rows, ExchangeRequest(counts, counts, "halo", index=index, site=site))
            del rows
            if lends:
                with work.borrow() as read:
                    found += read.double().sum(0)
            else:
                found += work.wait().double().sum(0)
            del work
            channel.barrier("side by side")
    return found


def bytes_of(lives: list[Any], memory: SharedMemory | None) -> float:
    """Bytes of a rank's storages, and of the shared memory that it has made, in rows of one exchange."""
    segments = [] if memory is None else [*memory._own, *memory._theirs.values()]
    shared = {segment.bytes.untyped_storage().data_ptr() for segment in segments}
    own = 0 if memory is None else sum(segment.size for segment in memory._own)
    return (own + sum(each.bytes for each in lives if each.place not in shared)) / UNIT


def held(
    channel: Channel, settings: dict[str, Any], lends: bool, shared: bool | Literal["full"]
) -> tuple[float, float, float, list[Tensor]]:
    """Bytes after the last epoch, after an evaluation's settling, and at the peak, in rows to one peer."""
    memory = channel.shared_memory
    if not shared:
        channel.attach_shared_memory(None)
    else:
        assert memory is not None
        # Segments of other tests' sizes: with those of the peer, as new ones are counted from 0 again.
        memory._own, memory._theirs = [], {}
        memory.allowance.most *= shared != "full"
    way = compressed_exchange(channel, **settings)
    with LiveTensors(torch.device("cpu"), lambda: "") as live:
        found = [an_epoch(channel, way, epoch, lends) for epoch in range(1, EPOCHS + 1)]
        memory = channel.shared_memory
        after = bytes_of([each for each, _ in live._live.values()], memory)
        way.settle()
        settled = bytes_of([each for each, _ in live._live.values()], memory)
        peak = bytes_of(live.at_peak(), memory)
    way.keep()
    return after, settled, peak, found


@pytest.fixture
def holding(ranks: Callable[..., list]) -> Callable[..., list]:
    def run(world: int, settings: dict[str, Any], lends: bool = True, shared: Any = True) -> list:
        return ranks(world, held, settings, lends, shared, spoils=True)

    return run


LATE = {"max_age": 1}
ROUND = 1.125
"""Segments may be an eighth larger than rows."""
SLACK = 0.5
"""Segments of a page for messages of a few numbers, samples for drift, and sums."""


@pytest.mark.parametrize("lends", [True, False])
def test_on_one_host_late_rows_are_where_they_were_packed_and_nowhere_else(holding: Any, lends: bool) -> None:
    """They took four times as much: packed, where they arrive, the epoch before, the gradients themselves."""
    for after, settled, peak, _ in holding(2, LATE, lends):
        assert after <= ROUND * (EXCHANGES + 2) + SLACK
        assert settled <= after + SLACK, "an evaluation copies nothing"
        assert peak <= after + 4 + SLACK, "what a caller packs, and reads as doubles"


def test_of_three_ranks_each_copies_what_it_reads_and_drops_it(holding: Any) -> None:
    """All is twice as much: rows for two peers."""
    for after, settled, peak, _ in holding(3, LATE):
        assert after <= 2 * ROUND * (EXCHANGES + 2) + SLACK
        assert after + 2 * (EXCHANGES - 1) <= settled <= after + 2 * EXCHANGES + SLACK, "one copy"
        assert peak <= max(after + 2 * 4, settled) + SLACK


def test_by_sockets_rows_in_transit_have_one_buffer_at_each_end(holding: Any) -> None:
    """Those of the epoch before were there as well."""
    for after, settled, peak, _ in holding(2, LATE, shared=False):
        assert after <= 2 * EXCHANGES + SLACK
        assert settled <= EXCHANGES + SLACK, "what has been sent is freed"
        assert peak <= 2 * EXCHANGES + 4 + SLACK


def test_coded_late_rows_travel_as_bytes_alone(holding: Any) -> None:
    """With bf16, half of what exact ones take, and no buffer of decoded rows before they are read."""
    for after, settled, peak, _ in holding(2, {**LATE, "codec": "bf16"}):
        assert after <= 0.5 * ROUND * (EXCHANGES + 2) + SLACK
        assert settled <= after + 0.5 * EXCHANGES + SLACK, "an evaluation decodes nothing"
        # Rows as a caller has them, cast, and in the message; bytes that arrive, decoded, read as doubles.
        assert peak <= max(after + 1 + 0.5 + 0.5 + 0.5 + 1 + 2, settled) + SLACK


def test_sampled_rows_keep_nothing_and_are_not_copied_whole_to_be_sent(holding: Any) -> None:
    for after, settled, peak, _ in holding(2, {"halo_sample": 0.1}):
        assert after <= SLACK  # segments for a tenth of the rows
        assert settled == after
        # The table itself; the rows that arrive, zeros but for the sample; twice as much for sums of doubles.
        assert peak <= 1 + 1 + 2 + SLACK


@pytest.mark.parametrize("settings", [LATE, {**LATE, "smoothing": 0.3}, {**LATE, "codec": "int8"}])
def test_where_rows_are_kept_changes_no_bit(holding: Any, settings: dict[str, Any]) -> None:
    """Lent in the sender's memory, copied, by sockets, or by them because no memory is left."""
    kinds = ((True, True), (False, True), (True, False), (True, "full"))
    ways = [holding(2, settings, lends, shared) for lends, shared in kinds]
    for rank in range(2):
        first, *others = ([row.tolist() for row in way[rank][3]] for way in ways)
        assert all(other == first for other in others)
