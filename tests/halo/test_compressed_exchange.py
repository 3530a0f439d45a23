"""Crossing on real ranks: what comes is what coding by hand gives, of this epoch or of the last, no more."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from crossing_cases import SEED, Case, compressed_exchange, site_exchange
from kagome.comm.channel import Channel
from kagome.comm.codec import Codec
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.comm.work import ChannelWork
from kagome.config import CodecName, Parallel
from kagome.errors import ModelError
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.halo.epoch_rows import ExchangeMode

WORLDS = [2, 3]
CODED: list[CodecName] = ["fp32", "bf16", "fp16", "int8", "int4", "int2", "onebit"]
PLAIN = ExchangeMode(Codec("none"), Codec("none"), waits=True, chooses=False)
LATE = {"max_age": 1, "codec": "none"}


def taken(channel: Channel, begun: Any) -> tuple[Tensor, int]:
    """What came, and the bytes that this rank has sent since the last call."""
    return begun.wait().clone(), sum(channel.take_traffic().bytes.values())


# As it is ---------------------------------------------------------------------------------------------


def as_it_is(channel: Channel) -> None:
    way, size = compressed_exchange(channel), channel.size
    assert way.exact
    assert (way.rank, way.size) == (channel.rank, size)
    for pattern in ("uneven", "one way", "empty"):
        for direction in range(4):
            case = Case(size, pattern, direction=direction)
            channel.take_traffic()
            begun = case.begin(way)
            assert type(begun) is ChannelWork  # the channel's own: nothing in between
            found, sent = taken(channel, begun)
            other, also = taken(channel, case.begin(channel))
            assert torch.equal(found, other)
            assert torch.equal(found, case.plain(channel.rank))
            assert sent == also == case.bytes(channel.rank, "none")
    assert not way.known.all_stale_rows


@pytest.mark.parametrize("world", WORLDS)
def test_without_codec_and_age_it_is_the_channel(ranks, world):
    ranks(world, as_it_is)


def exact_beside(channel: Channel) -> None:
    """Evaluation, what is read once, and whole numbers cross as they are, in their epoch."""
    way, rank = compressed_exchange(channel, codec="onebit", max_age=1), channel.rank
    assert not way.exact
    for epoch in (1, 2, 3):
        channel.take_traffic()
        case = Case(channel.size, epoch=epoch)
        for given in (replace(case, training=False), replace(case, dtype=torch.int64)):
            found, sent = taken(channel, given.begin(way))
            assert torch.equal(found, given.plain(rank))
            assert sent == given.bytes(rank, "none")
        sends, comes = case.counts(rank)
        rows = case.rows(rank)[case.index(rank)]
        assert torch.equal(way.start(rows, ExchangeRequest(sends, comes, "a")).wait(), case.plain(rank))
        assert torch.equal(way.start(rows, ExchangeRequest(sends, comes, "a")).wait(), case.plain(rank))
        assert way.all_reduce(torch.ones(1), action="b") == channel.size
    assert not way.known.all_stale_rows
    assert way.take_counts().plain == 0


@pytest.mark.parametrize("world", WORLDS)
def test_what_belongs_to_no_epoch_of_training_is_exact(ranks, world):
    ranks(world, exact_beside)


def on_one_rank(channel: Channel) -> None:
    way, rows = compressed_exchange(channel, codec="onebit", max_age=1), torch.randn(4, 3)
    assert way.exact
    for epoch in (1, 2):
        begun = way.start(
            rows + epoch, ExchangeRequest([4], [4], "a", site=site_exchange(epoch, torch.arange(4)))
        )
        assert torch.equal(begun.wait(), rows + epoch)


def test_one_rank_codes_nothing(ranks):
    ranks(1, on_one_rank)


# Coded ------------------------------------------------------------------------------------------------


def coded(channel: Channel, dtype: torch.dtype, patterns: list[str]) -> None:
    rank = channel.rank
    for name in CODED:
        for pattern in patterns:
            for direction in range(4):
                # Gradients have a codec of their own.
                names = ("none", name) if direction % 2 else (name, "none")
                way = compressed_exchange(channel, codec=names[0], codec_backward=names[1])
                case = Case(channel.size, pattern, dtype, direction)
                channel.take_traffic()
                begun = case.begin(way)
                found, sent = taken(channel, begun)
                what = name, pattern, direction
                assert found.dtype == dtype
                assert torch.equal(found, case.by_hand(rank, name)), what
                assert sent == case.bytes(rank, name), what
                assert torch.equal(begun.wait(), found)
                with case.begin(way).borrow() as borrowed:
                    assert torch.equal(borrowed, found), what
                other = replace(case, direction=direction ^ 1)
                assert torch.equal(other.begin(way).wait(), other.plain(rank)), what


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float64), (3, torch.float32)])
def test_each_codec_is_coding_by_hand_to_the_bit(ranks, world, dtype):
    ranks(world, coded, dtype, ["uneven", "empty"])


def test_rows_that_go_one_way_only(ranks):
    ranks(4, coded, torch.float32, ["one way"])


def shared(channel: Channel) -> tuple[Tensor, Tensor]:
    """All send the same row of one vertex to all, then to rank 0 a gradient of it."""
    size, first, way = channel.size, channel.rank == 0, compressed_exchange(channel, codec="int2")
    rows, row_id = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([7])
    others = [int(peer != channel.rank) for peer in range(size)]
    index = torch.zeros(size - 1, dtype=torch.int64)
    there = site_exchange(2, row_id.repeat(size - 1))
    read = way.start(rows, ExchangeRequest(others, others, "a", index=index, site=there)).wait()
    to_one, away = [0] * size, rows[: int(not first)]
    to_one[0] = away.size(0)
    come = others if first else [0] * size
    back = way.start(away, ExchangeRequest(to_one, come, "b", site=site_exchange(2, row_id[: to_one[0]], 3)))
    return read, back.wait()


def test_a_vertex_is_drawn_for_alike_by_any_owner_and_its_gradients_apart(ranks):
    """The same row reads the same wherever a cut has put its vertex; errors of gradients are to cancel."""
    found = ranks(3, shared)
    read = torch.cat([rows for rows, _ in found])
    assert read.shape == (6, 64)
    assert bool((read == read[0]).all())
    one, other = found[0][1]
    assert not torch.equal(one, other)


def repeated(channel: Channel) -> list[Tensor]:
    settings = {"codec": "onebit", "max_age": 1, "error_feedback": True, "smoothing": 0.5, "sync_every": 3}
    way, found = compressed_exchange(channel, **settings), []
    for epoch in range(1, 6):
        for site, direction in (("a", 0), ("b", 0), ("a", 3)):
            case = Case(channel.size, site=(site, 1), direction=direction, epoch=epoch, width=2)
            found.append(case.begin(way).wait().clone())
    way.settle()  # the workers go on: nothing is to lie in their way
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_a_repeated_run_gives_the_same_bits(ranks, world):
    for first, second in zip(ranks(world, repeated), ranks(world, repeated), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def drawn(channel: Channel) -> None:
    def come(seed: int = SEED, **given: Any) -> Tensor:
        case = Case(channel.size, fixed=True, width=32, **given)
        return case.begin(CompressedExchange(channel, Parallel(codec="onebit"), seed)).wait()

    first = come()
    assert torch.equal(come(), first)
    for other in (come(seed=6), come(epoch=3), come(site=("conv2.x", 1)), come(site=("conv1.x", 2))):
        assert not torch.equal(other, first)


def test_draws_depend_on_seed_epoch_and_site(ranks):
    ranks(2, drawn)


def refused(channel: Channel) -> None:
    rows = torch.full((channel.size, 3), float("nan"))
    counts = [int(peer != channel.rank) for peer in range(channel.size)]
    index = torch.arange(sum(counts))
    way, given = compressed_exchange(channel, codec="int4"), site_exchange(2, index)
    with pytest.raises(ModelError, match="finite numbers") as raised:
        way.start(rows, ExchangeRequest(counts, counts, "halo of conv1.x", index=index, site=given))
    assert "halo of conv1.x" in str(raised.value)


def test_what_a_codec_cannot_write_is_refused_by_name(ranks):
    ranks(2, refused)


# What was lost comes later ------------------------------------------------------------------------------


def summed(channel: Channel, name: CodecName, feedback: bool, direction: int) -> list[float]:
    """Of the sum of what came over epochs, less that of what was sent: its length, over a row's."""
    way, rank, found = compressed_exchange(channel, codec=name, error_feedback=feedback), channel.rank, []
    total, truth = torch.zeros(()), torch.zeros(())
    for epoch in range(1, 65):
        case = Case(channel.size, dtype=torch.float64, direction=direction, epoch=epoch, width=16, fixed=True)
        total, truth = total + case.begin(way).wait(), truth + case.plain(rank)
        found.append(float((total - truth).norm() / case.plain(rank).norm()))
    return found


@pytest.mark.parametrize(("name", "direction"), [("int2", 0), ("int4", 3), ("int8", 0), ("bf16", 3)])
def test_with_error_feedback_the_sum_of_what_came_stays_by_that_of_what_was_sent(ranks, name, direction):
    for found in ranks(2, summed, name, True, direction):
        assert found[0] > 0
        assert max(found) < 3 * found[0]
    for found in ranks(2, summed, name, False, direction):
        assert max(found[32:]) > 3 * found[0]


# Late -------------------------------------------------------------------------------------------------


def late(channel: Channel, name: CodecName, direction: int) -> None:
    way, size, rank = compressed_exchange(channel, codec=name, max_age=1), channel.size, channel.rank
    assert not way.mode.waits
    came = []
    for epoch in range(1, 6):
        case = Case(size, direction=direction, epoch=epoch)
        begun = case.begin(way)
        if epoch % 2:
            with begun.borrow() as rows:
                came.append(rows.clone())
        else:
            came.append(begun.wait())
            assert begun.wait() is came[-1]
        assert way.known.oldest == min(epoch - 1, 1)
    for epoch, rows in enumerate(came, start=1):
        of = Case(size, direction=direction, epoch=max(epoch - 1, 1))
        assert torch.equal(rows, of.plain(rank) if name == "none" else of.by_hand(rank, name))
    drift = way.known.drifts
    way.settle()
    last, before = (Case(size, direction=direction, epoch=epoch) for epoch in (5, 4))
    if direction % 2:
        assert way.known.drifts[0] == 0  # gradients always move
    elif name == "none" and last.plain(rank).numel():
        new, old = last.plain(rank).mean(0), before.plain(rank).mean(0)
        assert way.known.drifts == pytest.approx((float((new - old).norm() / new.norm()), 1.0))
        assert way.known.drifts != drift


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("name", "direction"), [("none", 0), ("onebit", 0), ("int4", 3), ("none", 3)])
def test_late_rows_are_the_last_epoch_s_as_they_were_coded_then(ranks, world, name, direction):
    ranks(world, late, name, direction)


def sites_apart(channel: Channel) -> None:
    way, rank = compressed_exchange(channel, **LATE), channel.rank
    cases = [("a", 0, "uneven"), ("a", 3, "uneven"), ("b", 0, "empty"), ("c", 2, "one way")]
    for epoch in range(1, 4):
        for site, direction, pattern in cases:
            case = Case(channel.size, pattern, site=(site, 1), direction=direction, epoch=epoch)
            of = replace(case, epoch=max(epoch - 1, 1))
            assert torch.equal(case.begin(way).wait(), of.plain(rank))
    assert len(way.known.all_stale_rows) == len(cases)
    way.settle()


@pytest.mark.parametrize("world", [2, 4])
def test_each_site_and_direction_has_a_line_of_its_own(ranks, world):
    ranks(world, sites_apart)


def modes(channel: Channel) -> None:
    """Which epoch's rows come, and how they were coded, where a block says otherwise than the settings."""
    way, size, rank = (
        compressed_exchange(channel, codec="int4", max_age=2, sync_every=4),
        channel.size,
        channel.rank,
    )

    def come(epoch: int) -> Tensor:
        return Case(size, epoch=epoch).begin(way).wait().clone()

    def coded_in(epoch: int, name: CodecName = "int4") -> Tensor:
        return Case(size, epoch=epoch).by_hand(rank, name)

    assert torch.equal(come(1), coded_in(1))
    assert torch.equal(come(2), coded_in(1))
    with way.using(PLAIN):
        assert way.exact
        assert torch.equal(come(3), Case(size, epoch=3).plain(rank))
    assert not way.exact
    assert torch.equal(come(4), coded_in(4))  # sync_every
    assert torch.equal(come(5), coded_in(4))
    with suppress(ZeroDivisionError), way.using(ExchangeMode(Codec("int2"), Codec("none"), False, False)):
        assert torch.equal(come(6), coded_in(5))
        raise ZeroDivisionError
    assert torch.equal(come(7), coded_in(6, "int2"))
    with way.using(ExchangeMode(Codec("bf16"), Codec("bf16"), True, False)):
        assert torch.equal(come(8), coded_in(8, "bf16"))
    assert torch.equal(come(9), coded_in(7))  # two epochs old: the line knows nothing of epoch 8
    assert way.known.oldest == 2
    way.known.synchronous = True
    assert torch.equal(come(10), coded_in(10))
    way.known.synchronous = False
    assert torch.equal(come(11), coded_in(10))
    way.forget()
    assert torch.equal(come(3), coded_in(3))


@pytest.mark.parametrize("world", WORLDS)
def test_a_block_may_say_otherwise(ranks, world):
    ranks(world, modes)


def other_shapes(channel: Channel) -> None:
    way, rank = compressed_exchange(channel, **LATE), channel.rank
    fed = compressed_exchange(channel, codec="int8", error_feedback=True)
    for epoch, width, dtype in [(1, 4, torch.float32), (2, 5, torch.float32), (3, 5, torch.float64)]:
        case = Case(channel.size, epoch=epoch, width=width, dtype=dtype)
        assert torch.equal(case.begin(way).wait(), case.plain(rank))
        if epoch < 3:  # what was lost of other columns is lost
            assert torch.equal(case.begin(fed).wait(), case.by_hand(rank, "int8"))
    case = Case(channel.size, epoch=4, width=5, dtype=torch.float64)
    assert torch.equal(case.begin(way).wait(), replace(case, epoch=3).plain(rank))
    way.settle()


def test_rows_of_another_shape_know_nothing_of_those_before(ranks):
    ranks(2, other_shapes)


def many_messages(channel: Channel) -> None:
    """More than a rank can leave for another that takes none of them."""
    way, rank = compressed_exchange(channel, **LATE), channel.rank
    for epoch in (1, 2):
        for site in ("a", "b"):
            Case(channel.size, site=site, epoch=epoch).begin(way).wait()
    with way.using(PLAIN):
        for epoch in range(3, 150):
            case = Case(channel.size, site="a", epoch=epoch)
            assert torch.equal(case.begin(way).wait(), case.plain(rank))
    assert all(line.in_flight is None for line in way.known.all_stale_rows.values())


def test_rows_that_nobody_reads_any_more_hold_up_nothing(ranks):
    ranks(2, many_messages)


# Counts -----------------------------------------------------------------------------------------------


def counted(channel: Channel) -> None:
    way, size, rank = (
        compressed_exchange(channel, codec="onebit", codec_backward="int8"),
        channel.size,
        channel.rank,
    )
    case = Case(size, epoch=11)
    back = replace(case, direction=3)
    case.begin(way).wait()
    back.begin(way).wait()
    taken = way.take_counts()
    assert taken.plain == case.bytes(rank, "none") + back.bytes(rank, "none")
    assert way.take_counts().plain == 0
    expected = {}
    names: list[tuple[str, Case, CodecName]] = [("forward", case, "onebit"), ("backward", back, "int8")]
    for name, given, codec in names:
        exact = torch.cat([given.sent(rank, peer)[0] for peer in range(size)])
        come = torch.cat([given.restored(rank, peer, codec) for peer in range(size)])
        if exact.numel():
            expected[f"conv1.x {name}"] = float((come - exact).norm() / exact.norm())
    assert expected
    assert taken.errors == pytest.approx(expected)
    replace(case, epoch=12).begin(way).wait()
    assert not way.take_counts().errors  # measured now and then


@pytest.mark.parametrize("world", WORLDS)
def test_what_crossed_and_what_was_lost_is_counted(ranks, world):
    ranks(world, counted)


def test_a_pass_ends_with_what_a_device_has_refused():
    exchange = CompressedExchange(ThreadChannel(ThreadGroup(1), 0), Parallel(codec="int2"), 1)
    assert exchange.state.refusals is None  # outside of a pass each message is checked
    with pytest.raises(ModelError, match="got 2 rows"), exchange.using(exchange.mode):
        exchange.state.refusals.add(torch.tensor(2), lambda bad: ModelError("none", f"{bad} rows"))
    assert exchange.state.refusals is None
