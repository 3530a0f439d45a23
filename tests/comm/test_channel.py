"""Channel: what is sent arrives, is counted, and every fault is told with rank, peer and action."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kagome.comm.all_reduce import ONE_ROUND_BYTES
from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.watchdog import Watchdog
from kagome.errors import CommError
from pool import Pool

WORLDS = [1, 2, 3, 4]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def counts_between(size: int, pattern: str) -> list[list[int]]:
    """counts[a][b]: rows from a to b."""
    if pattern == "empty":
        return [[0] * size for _ in range(size)]
    if pattern == "one way":  # rank 0 gives, nobody else does
        return [[3 if a == 0 and b != 0 else 0 for b in range(size)] for a in range(size)]
    return [[(a * 5 + b * 3 + 1) % 4 for b in range(size)] for a in range(size)]


def row(a: int, b: int, i: int, width: int) -> torch.Tensor:
    return torch.arange(width) + 100 * a + 10 * b + i


def crossing(channel: Channel, pattern: str, width: int, dtype: torch.dtype) -> bool:
    counts = counts_between(channel.size, pattern)
    me = channel.rank
    sends, comes = counts[me], [counts[peer][me] for peer in range(channel.size)]
    mine = [row(me, b, i, width) for b in range(channel.size) for i in range(sends[b])]
    rows = torch.stack(mine).to(dtype) if mine else torch.empty(0, width, dtype=dtype)
    theirs = [row(a, me, i, width) for a in range(channel.size) for i in range(comes[a])]
    expected = torch.stack(theirs).to(dtype) if theirs else torch.empty(0, width, dtype=dtype)
    channel.take_traffic()
    got = channel.start(rows, ExchangeRequest(sends, comes, "halo forward of conv1.x, epoch 3")).wait()
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    sent = channel.take_traffic().bytes
    away = sum(count for peer, count in enumerate(sends) if peer != me)
    assert sent["halo"] == away * width * rows.element_size()
    assert sum(sent.values()) == sent["halo"]
    return True


@pytest.mark.some(16)
@pytest.mark.parametrize(
    ("world", "pattern"),
    [(world, each) for world in WORLDS for each in ("uneven", "empty", "one way")[: 3 if world > 1 else 2]],
)
@pytest.mark.parametrize("width", [0, 1, 7])
def test_exchange_brings_exactly_the_rows_needed(ranks, world, pattern, width):
    assert all(ranks(world, crossing, pattern, width, torch.float32))


def every_type(channel: Channel) -> None:
    for dtype in DTYPES:
        crossing(channel, "uneven", 5, dtype)


@pytest.mark.parametrize("world", WORLDS)
def test_exchange_takes_every_type(ranks, world):
    ranks(world, every_type)


def many_shapes(channel: Channel) -> list[tuple[int, ...]]:
    ones = [1] * channel.size
    flat = channel.start(torch.arange(channel.size), ExchangeRequest(ones, ones, "flat")).wait()
    cube = torch.zeros(channel.size, 3, 2).transpose(1, 2)
    return [
        tuple(flat.tolist()),
        tuple(channel.start(cube, ExchangeRequest(ones, ones, "cube")).wait().shape),
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_exchange_takes_any_trailing_shape(ranks, world):
    for rank, (flat, cube) in enumerate(ranks(world, many_shapes)):
        assert flat == (rank,) * world
        assert cube == (world, 2, 3)


def several_at_once(channel: Channel) -> list[int]:
    ones = [1] * channel.size
    pendings = [
        channel.start(
            torch.full((channel.size, 2), k * 10 + channel.rank), ExchangeRequest(ones, ones, f"number {k}")
        )
        for k in range(5)
    ]
    return [int(pending.wait()[-1, 0]) for pending in reversed(pendings)] + [int(pendings[0].wait()[0, 0])]


@pytest.mark.parametrize("world", WORLDS)
def test_exchanges_may_be_waited_for_later_and_in_any_order(ranks, world):
    last = world - 1
    assert ranks(world, several_at_once) == [[40 + last, 30 + last, 20 + last, 10 + last, last, 0]] * world


def held_up(channel: Channel) -> bool:
    ones, mine = [1] * channel.size, torch.full((channel.size, 4000), float(channel.rank))
    true = torch.arange(channel.size).float().unsqueeze(1).expand(-1, 4000)
    held = [channel.start(mine + k, ExchangeRequest(ones, ones, f"held {k}")) for k in range(3)]
    for k in range(300):
        if not torch.equal(
            channel.start(mine + k, ExchangeRequest(ones, ones, f"meanwhile {k}")).wait(), true + k
        ):
            return False
    return all(torch.equal(begun.wait(), true + k) for k, begun in enumerate(held))


@pytest.mark.parametrize("world", [2, 3])
def test_what_nobody_waits_for_holds_up_no_later_exchange(ranks, world):
    assert all(ranks(world, held_up))


def with_header(channel: Channel) -> dict[str, int]:
    ones = [1] * channel.size
    channel.start(
        torch.zeros(channel.size, 4), ExchangeRequest(ones, ones, "a", header=(0, 3, 2, 4, 1))
    ).wait()
    return channel.take_traffic().bytes


@pytest.mark.parametrize("world", WORLDS)
def test_a_header_that_agrees_costs_64_bytes_a_peer(ranks, world):
    for sent in ranks(world, with_header):
        assert sent["halo"] == 16 * (world - 1)
        assert sent["other"] == 64 * (world - 1)


def disagree(channel: Channel, what: str) -> str:
    last = channel.rank == channel.size - 1
    ones = [1] * channel.size
    sends, comes, site, width = ones, ones, 2, 4
    if last and what == "site":
        site = 5
    if last and what == "width":
        width = 6
    if last and what == "rows":
        sends = [2, *ones[1:]]
    try:
        channel.start(
            torch.zeros(sum(sends), width),
            ExchangeRequest(sends, comes, "halo forward", header=(0, 3, site, width, 1)),
        ).wait()
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("what", "number"), [("site", (2, 5)), ("width", (4, 6))])
def test_a_header_that_differs_is_an_error_on_every_rank_and_nobody_dies(ranks, world, what, number):
    texts = ranks(world, disagree, what, spoils=True)
    last = world - 1
    for rank, text in enumerate(texts[:-1]):
        assert f"rank {rank} and its peers" in text
        assert f"with rank {last}: {what} is {number[0]} here, {number[1]} there" in text
    assert "'halo forward'" in texts[last]
    for peer in range(last):
        assert f"with rank {peer}: {what} is {number[1]} here, {number[0]} there" in texts[last]


def test_row_counts_that_differ_are_an_error_on_both_sides(ranks):
    first, second = ranks(2, disagree, "rows", spoils=True)
    assert "with rank 1: rows from the peer is 1 here, 2 there" in first
    assert "with rank 0: rows to the peer is 2 here, 1 there" in second


def mismatch_without_header(channel: Channel) -> str:
    channel.timeout = 1.0
    width = 4 + channel.rank
    with pytest.raises(CommError) as caught:
        channel.start(torch.zeros(2, width), ExchangeRequest([1, 1], [1, 1], "unchecked")).wait()
    return str(caught.value)


def test_sizes_that_differ_kill_nobody_even_without_a_header(ranks):
    assert all("'unchecked'" in text for text in ranks(2, mismatch_without_header, spoils=True))


def test_counts_that_cannot_be_are_refused():
    channel = Channel(None, "cpu")
    with pytest.raises(ValueError, match="1 counts each way"):
        channel.start(torch.zeros(2, 1), ExchangeRequest([1, 1], [1, 1], "a")).wait()
    with pytest.raises(ValueError, match="2 rows cannot"):
        channel.start(torch.zeros(2, 1), ExchangeRequest([1], [1], "a")).wait()


def too_long_header(channel: Channel) -> None:
    channel.start(torch.zeros(2, 1), ExchangeRequest([1, 1], [1, 1], "a", header=(0,) * 6)).wait()


def test_a_header_has_up_to_five_numbers(ranks):
    with pytest.raises(ValueError, match="up to 5"):
        ranks(2, too_long_header)


def reduced(channel: Channel, count: int) -> tuple[bytes, dict[str, int], bool]:
    generator = torch.Generator().manual_seed(channel.rank)
    mine = torch.randn(count, generator=generator)
    before = mine.clone()
    total = channel.all_reduce(mine, action="sum")
    most = channel.all_reduce(mine, "max", action="max", kind="other")
    least = channel.all_reduce(mine, "min", action="min", kind="other")
    assert torch.equal(mine, before)
    assert bool((least <= mine).all())
    assert bool((mine <= most).all())
    assert channel.all_reduce(torch.ones(()), action="scalar", kind="other").item() == channel.size
    everyone = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(channel.size)]
    torch.testing.assert_close(total, torch.stack(everyone).sum(0))
    return total.numpy().tobytes(), channel.take_traffic().bytes


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("count", [1, 12_345, 100_000])
def test_all_reduce_gives_the_same_bits_everywhere(ranks, world, count):
    results = ranks(world, reduced, count)
    assert len({bits for bits, _ in results}) == 1
    one_round = world * 4 * count <= ONE_ROUND_BYTES
    expected = (world - 1) * 4 * count if one_round else 2 * (world - 1) * 4 * count // world
    for _, sent in results:
        assert sent["statistics"] == expected


def spread(channel: Channel, src: int) -> dict[str, int]:
    mine = torch.full((3, 2), channel.rank, dtype=torch.int16)
    got = channel.broadcast(mine, src, action="weights", kind="weights")
    assert torch.equal(got, torch.full((3, 2), src, dtype=torch.int16))
    assert torch.equal(mine, torch.full((3, 2), channel.rank, dtype=torch.int16))
    return channel.take_traffic().bytes


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_counts_at_its_source(ranks, world):
    src = world - 1
    sent = [taken["weights"] for taken in ranks(world, spread, src)]
    assert sent == [12 * (world - 1) if rank == src else 0 for rank in range(world)]


def gathered(channel: Channel, dst: int | None) -> tuple[list[list[int]] | None, dict[str, int]]:
    mine = torch.full((channel.rank, 1), channel.rank)
    parts = channel.gather_rows(mine, action="predictions", dst=dst)
    return None if parts is None else [part.view(-1).tolist() for part in parts], channel.take_traffic().bytes


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dst", [None, 0, -1])
def test_gather_rows_brings_uneven_parts(ranks, world, dst):
    dst = world - 1 if dst == -1 else dst
    for rank, (parts, sent) in enumerate(ranks(world, gathered, dst)):
        assert parts == ([[r] * r for r in range(world)] if dst in (None, rank) else None)
        receivers = world - 1 if dst is None else int(rank != dst)
        assert sent["other"] == 8 * rank * receivers + 8 * (world - 1)


def objects(channel: Channel) -> list[object]:
    channel.barrier("before the objects")
    return channel.gather_objects({"rank": channel.rank, "text": "x" * channel.rank}, "names")


@pytest.mark.parametrize("world", WORLDS)
def test_gather_objects_and_barrier(ranks, world):
    assert ranks(world, objects) == [[{"rank": r, "text": "x" * r} for r in range(world)]] * world


def waits(channel: Channel) -> float:
    ones = [1] * channel.size
    if channel.rank == 0:
        time.sleep(0.4)
    channel.start(torch.zeros(channel.size, 1), ExchangeRequest(ones, ones, "late")).wait()
    channel.barrier("end")
    waited = channel.take_traffic().waited
    assert sum(channel.take_traffic().waited.values()) == 0
    return waited["halo"]


def test_waits_are_counted_where_they_happen(ranks):
    first, second = ranks(2, waits)
    assert first < 0.3 < second


def meet(channel: Channel, how: str, action: str) -> None:
    ones = [1] * channel.size
    if how == "exchange":
        channel.start(torch.zeros(channel.size, 1), ExchangeRequest(ones, ones, action)).wait()
    else:
        channel.all_reduce(torch.zeros(9), action=action)


def too_late(channel: Channel, how: str) -> tuple[str, float]:
    # The store of the workers' process group serves the watch, as in a run.
    store = torch.distributed.distributed_c10d._get_default_store()
    channel.watch = Watchdog(store, channel.rank, channel.size, log=lambda line: None, every=0.1)
    channel.timeout = 1.0
    begun = time.monotonic()
    try:
        if channel.rank == 1:
            channel.watch.doing("epoch 2: optimizer")
            time.sleep(2.0)
            return "", 0.0
        with pytest.raises(CommError) as caught:
            meet(channel, how, "halo of conv1.x, epoch 3")
        return str(caught.value), time.monotonic() - begun
    finally:
        channel.watch.close()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["exchange", "all_reduce"])
def test_a_late_peer_is_named_with_what_it_did(ranks, world, how):
    answers = ranks(world, too_late, how, spoils=True)
    texts = [text for text, _ in answers if text]
    assert all("'halo of conv1.x, epoch 3'" in text for text in texts)
    assert all(seconds < 20 for _, seconds in answers)
    # With several ranks the first to give up closes its connections; the others may see that instead.
    late = [text for text in texts if "nothing within 1 s" in text]
    assert late
    for text in late:
        assert "by rank 1, which was last seen in 'epoch 2: optimizer'" in text
        assert "train.timeout" in text


def dies(channel: Channel, how: str) -> str:
    if channel.rank == channel.size - 1:
        # The process lives on for the pool, but its connections are closed as if it had died.
        channel.close()
        torch.distributed.destroy_process_group()
        return ""
    with pytest.raises(CommError) as caught:
        meet(channel, how, "epoch 3")
    # As at the end of open_mesh, with the error still on its way: now the peers' waits end too.
    channel.close()
    torch.distributed.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("how", ["exchange", "all_reduce"])
def test_a_lost_peer_is_named(ranks, how):
    first, _ = ranks(2, dies, how, spoils=True)
    assert first.startswith("expected rank 0 to be answered in 'epoch 3' by rank 1; got a closed connection")
    first, _, _ = ranks(3, dies, how, spoils=True)
    assert "got a closed connection" in first


def stop_now(channel: Channel) -> None:
    if channel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    channel.barrier("never")


def raise_on_one(channel: Channel) -> None:
    if channel.rank == 1:
        raise KeyError("its own fault")
    channel.barrier("never")


def sleep_long(channel: Channel) -> None:
    time.sleep(60)


def size_of(channel: Channel) -> int:
    return channel.size


@pytest.fixture
def own_pool():
    pool = Pool()  # killed workers would take the coverage of all tests before with them
    yield pool.run
    pool.close()


def test_the_pool_survives_workers_that_raise_hang_or_die(own_pool):
    with pytest.raises(KeyError, match="its own fault"):
        own_pool(3, raise_on_one)
    assert own_pool(3, size_of) == [3, 3, 3]
    with pytest.raises(
        AssertionError, match=r"test_channel.sleep_long on 1 ranks: no answer from ranks \[0\]"
    ):
        own_pool(1, sleep_long, timeout=1)
    with pytest.raises((AssertionError, CommError)):
        own_pool(2, stop_now)
    assert own_pool(4, size_of) == [4] * 4


def apart(channel: Channel) -> tuple[list[Tensor], float, bool, int]:
    """Messages over connections of their own, read after others that were begun later."""
    group = dist.new_group(list(range(channel.size)))
    assert channel.patient is channel
    other = channel.connect("patient", group)
    mine = torch.full((channel.size, 3), float(channel.rank))
    ones = [1] * channel.size
    before = channel.traffic.bytes["halo"]
    held = [other.start(mine + 10 * k, ExchangeRequest(ones, ones, f"late {k}")) for k in range(3)]
    total = float(channel.all_reduce(torch.ones(1), action="meanwhile"))
    found = [one.wait() for one in held]
    sent = channel.traffic.bytes["halo"] - before
    same = channel.patient is other
    channel.barrier("all is read")
    channel._patient = other._transport = other._group = None  # its shared memory is the channel's own
    dist.destroy_process_group(group)
    return found, total, same, sent


@pytest.mark.parametrize("world", [2, 3])
def test_what_nobody_waits_for_has_connections_of_its_own(ranks, world):
    for found, total, same, sent in ranks(world, apart):
        assert total == world
        assert same
        assert sent == 3 * (world - 1) * 3 * 4, "counted with all else"
        for k, rows in enumerate(found):
            assert rows[:, 0].tolist() == [peer + 10 * k for peer in range(world)]
