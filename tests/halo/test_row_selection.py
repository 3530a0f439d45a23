"""Choosing among rows: both ends agree, sums are right on the mean, nothing too old is read, bits pay."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kagome.comm.channel import Channel
from kagome.comm.codec import BITS, Codec
from kagome.comm.exchange import ExchangeRequest, SiteExchange
from kagome.config import Parallel
from kagome.errors import CommError, ConfigError
from kagome.halo.compressed_exchange import CompressedExchange
from kagome.halo.row_selection import CHOICES, FIT_EVERY, SampledRows, Skip, shared_out

Ranks = Callable[..., list]
ROWS, WIDTH = 40, 5


def site_exchange(
    epoch: int, row_ids: torch.Tensor, direction: int = 0, reads: torch.Tensor | None = None
) -> SiteExchange:
    known = torch.empty(0, dtype=torch.long) if reads is None else reads
    return SiteExchange(("layer.x", 1), direction, epoch, True, row_ids, known)


def rows_of(rank: int, epoch: int, *, moving: float = 1.0) -> torch.Tensor:
    """Each rank's rows; they move along a line of their own."""
    generator = torch.Generator().manual_seed(rank)
    start, way = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return start + moving * epoch * way


def counts(size: int, rank: int) -> list[int]:
    return [0 if peer == rank else ROWS for peer in range(size)]


def exchanged(
    channel: Channel, parallel: Parallel, epochs: int, moving: float, direction: int = 0
) -> tuple[list[torch.Tensor], list[int]]:
    """What one rank hears in each epoch, and the bytes it sent; all rows of a rank go to each peer."""
    compressed_exchange = CompressedExchange(channel, parallel, seed=3)
    n = counts(channel.size, channel.rank)
    index = torch.arange(ROWS).repeat(channel.size - 1)
    heard, sent = [], []
    for epoch in range(1, epochs + 1):
        channel.take_traffic()
        reads = often_read(sum(n))
        site = site_exchange(epoch, index, direction, reads)
        request = ExchangeRequest(n, n, f"epoch {epoch}", index=index, site=site)
        begun = compressed_exchange.start(rows_of(channel.rank, epoch, moving=moving), request)
        heard.append(begun.wait().clone())
        sent.append(channel.take_traffic().bytes["halo"])
    for stale_rows in compressed_exchange.known.all_stale_rows.values():
        stale_rows.settle()
    return heard, sent


def often_read(count: int) -> torch.Tensor:
    """Every eighth row is read by many edges."""
    return torch.where(torch.arange(count) % 8 == 0, 200, 1)


def true_rows(size: int, rank: int, epoch: int, moving: float = 1.0) -> torch.Tensor:
    return torch.cat([rows_of(peer, epoch, moving=moving) for peer in range(size) if peer != rank])


# Bits ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=5), st.sampled_from([1, 2, 4]))
def test_bits_go_where_they_pay_most(worth: list[float], mean: int) -> None:
    bits = [BITS[name] for name in CHOICES]
    w = torch.tensor(worth, dtype=torch.float64)
    chosen = shared_out(w, mean).tolist()
    assert sum(bits[c] for c in chosen) <= mean * len(worth)

    def cost(places: tuple[int, ...] | list[int]) -> float:
        return sum(x / (2 ** bits[p] - 1) ** 2 for x, p in zip(worth, places, strict=True))

    # Steps of several bits may leave a rest of the budget, so the best is met with that much more or less.
    fair = [
        p
        for p in itertools.product(range(4), repeat=len(worth))
        if sum(bits[c] for c in p) <= mean * len(worth) - 3
    ]
    if fair:
        assert cost(chosen) <= min(map(cost, fair)) * (1 + 1e-9) + 1e-12


def test_equal_rows_of_one_bit_stay_so() -> None:
    assert shared_out(torch.ones(7), 1).tolist() == [0] * 7


def fitted(channel: Channel) -> tuple[float, float, list[int]]:
    plain = Parallel(codec="int4")
    alike, _ = exchanged(channel, plain, FIT_EVERY // 5, 0.0)
    fit, sent = exchanged(channel, Parallel(codec="int4", adaptive_bits=True), FIT_EVERY // 5, 0.0)
    true = true_rows(channel.size, channel.rank, 0, 0.0)
    reads = often_read(true.size(0)).double().unsqueeze(1)

    def lost(heard: list[torch.Tensor]) -> float:
        return sum(float(((rows - true) * reads).square().sum()) for rows in heard[3:])

    return lost(alike), lost(fit), sent


def test_shared_out_bits_lose_less_in_as_many_bytes(ranks: Ranks) -> None:
    for alike, fit, sent in ranks(3, fitted):
        assert fit < 0.1 * alike
        plain = 2 * Codec("int4").size(ROWS, WIDTH, torch.float64)
        assert sent[0] == plain
        assert sent[1] == plain + 2 * ROWS  # a byte a row says how many bits it gets
        # Groups of rows are rounded up to whole bytes a column.
        assert all(count <= plain + 2 * 4 * WIDTH for count in sent[2:])


def measured(channel: Channel) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
    compressed_exchange = CompressedExchange(channel, Parallel(codec="int4", adaptive_bits=True), seed=3)
    n, index = counts(channel.size, channel.rank), torch.arange(ROWS)
    for epoch in range(1, 12):
        given = site_exchange(epoch, index, 0, often_read(sum(n)))
        rows = rows_of(channel.rank, epoch, moving=0.0)
        heard = (
            compressed_exchange.start(rows, ExchangeRequest(n, n, "", index=index, site=given)).wait().clone()
        )
        if epoch == 10:
            compressed_exchange.take_counts()
    return compressed_exchange.take_counts().errors, heard, true_rows(2, channel.rank, 0, 0.0)


def test_errors_are_those_of_the_bits_that_each_row_has(ranks: Ranks) -> None:
    (zero, _, _), (one, heard, true) = ranks(2, measured)
    assert zero["layer.x forward"] == pytest.approx(float((heard - true).norm() / true.norm()), rel=1e-4)
    assert set(zero) == set(one) == {"layer.x forward"}


# A share of rows -------------------------------------------------------------------------------------


def sampled(channel: Channel, direction: int) -> tuple[torch.Tensor, int, list[int]]:
    heard, sent = exchanged(channel, Parallel(halo_sample=0.25), 400, 0.0, direction)
    return torch.stack(heard), channel.rank, sent


@pytest.mark.parametrize("direction", [0, 3])
def test_a_sample_is_right_on_the_mean_and_small(ranks: Ranks, direction: int) -> None:
    for heard, rank, sent in ranks(2, sampled, direction):
        true = true_rows(2, rank, 0, 0.0)
        rows = heard.abs().sum(2) > 0
        assert (rows.sum(1) == ROWS // 4).all()
        assert (heard[0][rows[0]] - 4 * true[rows[0]]).abs().max() < 1e-12
        assert not torch.equal(rows[0], rows[1])
        error = (heard.mean(0) - true).abs() / (true.abs() * (3 / 400) ** 0.5 + 1e-9)
        assert error.max() < 5
        assert set(sent) == {ROWS // 4 * WIDTH * 8}


def test_a_seed_below_zero_draws_too() -> None:
    """As it does everywhere else."""
    chosen = [SampledRows(0.5, seed, 0, Codec("none"))._piece(1, (0, 1), 40).rows for seed in (-1, -1, 1)]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


def both_ways(channel: Channel) -> tuple[torch.Tensor, torch.Tensor]:
    there, _ = exchanged(channel, Parallel(halo_sample=0.3), 1, 0.0, 0)
    back, _ = exchanged(channel, Parallel(halo_sample=0.3), 1, 0.0, 3)
    return there[0].abs().sum(1) > 0, back[0].abs().sum(1) > 0


def test_gradients_come_back_for_the_rows_that_were_sent(ranks: Ranks) -> None:
    (there0, back0), (there1, back1) = ranks(2, both_ways)
    assert torch.equal(there0, back1)
    assert torch.equal(there1, back0)


# Rows that did not move ------------------------------------------------------------------------------


def skipped(channel: Channel, moving: float) -> tuple[list[torch.Tensor], int, list[int]]:
    parallel = Parallel(max_age=5, skip_drift=0.1, guard=False)
    heard, sent = exchanged(channel, parallel, 12, moving)
    return heard, channel.rank, sent


def test_rows_that_stand_still_are_sent_each_so_many_epochs(ranks: Ranks) -> None:
    notes = -(-ROWS // 8)
    for heard, rank, sent in ranks(2, skipped, 0.0):
        whole = ROWS * WIDTH * 8 + notes
        # Sent in epoch 1 it is read until epoch 6; what is sent in epoch 6 is read from epoch 7 on.
        assert sent == [whole if epoch % 5 == 1 else notes for epoch in range(1, 13)]
        assert all(torch.equal(rows, true_rows(2, rank, 0, 0.0)) for rows in heard)


def test_rows_that_move_are_sent_and_old_ones_are_near(ranks: Ranks) -> None:
    for heard, rank, sent in ranks(2, skipped, 0.02):
        assert 0 < sum(sent[1:]) < 0.8 * sent[0] * 11
        for epoch, rows in enumerate(heard[1:], start=2):
            last = true_rows(2, rank, epoch - 1, 0.02)
            # What moved by a tenth is announced when seen, and goes in the next epoch.
            assert ((rows - last).norm(dim=1) <= 0.35 * last.norm(dim=1)).all()


def test_a_row_that_is_too_old_is_never_read() -> None:
    skip, n = Skip(0.5, 2, Codec("none")), 6
    rows = torch.ones(n, 3)

    def request(epoch: int) -> ExchangeRequest:
        return ExchangeRequest([0, n], [0, n], "rows", site=site_exchange(epoch, torch.arange(n)))

    for epoch in (1, 2):
        skip.plan(request(epoch), rows)
        skip.arrived(rows, [torch.zeros(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)], epoch)
    skip.plan(request(3), rows)
    with pytest.raises(CommError, match="at most 2 epochs old"):
        skip.arrived(rows, [torch.zeros(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)], 3)


# Settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"halo_sample": 0.0}, "parallel.halo_sample to be above 0"),
        ({"skip_drift": 0.1, "max_age": 1}, "asks for newer ones"),
        ({"halo_sample": 0.5, "adaptive_bits": True}, "to choose what crosses; got 2 of them"),
        ({"halo_sample": 0.5, "error_feedback": True}, "halo_sample, which sends other rows next"),
        (
            {"skip_drift": 0.5, "max_age": 4, "codec": "int2", "error_feedback": True},
            "skip_drift, which",
        ),
        ({"error_feedback": True}, "loses nothing"),
        ({"smoothing": 0.9}, "lets none be late"),
        ({"smoothing": 1.0, "max_age": 1}, "below 1"),
        ({"adaptive_bits": True, "codec": "bf16"}, "has none to share"),
        ({"adaptive_bits": True, "codec": "onebit"}, "has none to share"),
        ({"sync_every": 0, "max_age": 1}, "1 epoch or more, or auto"),
        ({"sync_every": -2, "max_age": 1}, "1 epoch or more, or auto"),
    ],
)
def test_settings_that_clash_are_refused(given: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Parallel(**given)


@pytest.mark.parametrize(
    ("given", "world", "words"),
    [
        ({"pipe": 2, "codec": "onebit"}, 2, "rows of other parts(.|\n)*codec_stage='onebit'"),
        ({"pipe": 2, "chunks": 1, "codec_backward": "int4"}, 2, "codec_stage='int4'"),
        ({"pipe": 2, "chunks": 1, "max_age": 1}, 2, "rows of other parts for max_age=1"),
        ({"codec_stage": "bf16"}, 2, "pipe=1, which is one stage"),
        ({"graph": 1}, 2, "start 1 ranks (.|\n)*change --parallel.graph"),
        ({"pipe": 2}, 1, "change --parallel.pipe"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused(given: dict, world: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Parallel(**given).fit(world)
