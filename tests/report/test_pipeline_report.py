"""A pipeline's epoch: shares by hand, predicted beside measured, in the trace, the page and the summary."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_page import check_page, make_run

from kagome.errors import ScheduleError
from kagome.records.pipeline import measure, pipeline_summary, predict
from kagome.records.spans import Span, action_of, by_phase, phase_of
from kagome.report.charts.lanes import lanes_svg
from kagome.report.charts.timeline import gantt_svg
from kagome.report.chrome_trace import read_trace, write_trace
from kagome.report.page.page import write_page
from kagome.report.summary import headline, summary
from kagome.schedule.actions import Action, ActionKind, Program, from_text
from kagome.schedule.schedules import Shape, fill_drain
from kagome.schedule.simulator import simulate

# Two chunks through two stages: F takes 2 and 1 seconds, B 2 and 3, a message half a second.
STAGE_0 = "0F0:0-2 0SEND_F0:2-2 0F1:2-4 0SEND_F1:4-4 0RECV_B1:4-9 0B1:9-11 0RECV_B0:11-12 0B0:12-14"
STAGE_1 = "1RECV_F0:0-2.5 1F0:2.5-3.5 1RECV_F1:3.5-4.5 1F1:4.5-5.5 1B1:5.5-8.5 1SEND_B1:8.5-8.5 "
STAGE_1 += "1B0:8.5-11.5 1SEND_B0:11.5-11.5"


def spans(text: str, epoch: int, zero: float = 0.0, slower: float = 1.0) -> list[Span]:
    """``name:begin-end`` each."""
    found = []
    for word in text.split():
        name, times = word.split(":")
        begin, end = (slower * float(time) for time in times.split("-"))
        found.append(Span(name, zero + begin, end - begin, epoch))
    return found


def two_stages() -> list[list[Span]]:
    """Four epochs: a slow first one, then three, of which the last has the median length."""
    epochs = ((1, 10.0), (2, 2.0), (3, 0.5), (4, 1.0))
    return [
        [span for epoch, slower in epochs for span in spans(text, epoch, 1000.0 * epoch, slower)]
        for text in (STAGE_0, STAGE_1)
    ]


def many(stages: int = 8, chunks: int = 32, parts: int = 1) -> list[list[Span]]:
    """What a simulation gives, as if it had been measured."""
    programs = fill_drain(Shape(stages, tuple(range(chunks))))
    run = simulate(programs, lambda a: 0.01 if a.kind is ActionKind.F else 0.02)
    return [
        [
            Span(str(one.action), one.begin + epoch * 100, one.end - one.begin, epoch)
            for epoch in (1, 2)
            for one in sorted(
                (*mine, *(sent for sent in run.transfers if sent.action.stage == stage)),
                key=lambda one: (one.begin, one.end),
            )
        ]
        for stage, mine in enumerate(run.spans)
        for _ in range(parts)
    ]


def test_names_of_spans() -> None:
    assert action_of("1RECV_F2<0") == Action(1, ActionKind.RECV_F, 2)
    assert [action_of(name) for name in ("forward", "2X0", "")] == [None] * 3
    assert [phase_of(name) for name in ("2F0", "1B3", "0SEND_F2", "load")] == [
        "forward", "backward", "exchange", "load",
    ]  # fmt: skip
    assert by_phase({"forward": 1.0, "2F0": 2.0, "2F1": 4.0, "2B0": 8.0, "2RECV_F0": 16.0}) == {
        "forward": 7.0, "backward": 8.0, "exchange": 16.0,
    }  # fmt: skip


def test_shares_by_hand() -> None:
    found = measure(two_stages())
    assert found is not None
    assert (found.epoch, found.seconds, found.stages) == (4, 14.0, (0, 1))
    first, second = found.ranks
    assert (first.computing, first.waiting, first.sending, first.other) == (8 / 14, 6 / 14, 0, 0)
    assert (second.computing, second.waiting) == (8 / 14, 3.5 / 14)
    assert second.idle == pytest.approx(2.5 / 14)
    # Each rank receives two messages, half a second after they were sent.
    assert (first.exposed, second.exposed) == (1 / 14, 1 / 14)
    assert found.bubble == pytest.approx(1 - 16 / 28)
    assert found.imbalance == 0
    slow = measure(two_stages(), 2)
    assert slow is not None
    assert (slow.seconds, slow.bubble) == (28.0, found.bubble)


def test_what_is_beside_the_actions_and_inside_them() -> None:
    mine = [
        Span("forward", 0.0, 10.0, 1),  # around the actions: nothing beside them
        Span("0F0", 0.0, 4.0, 1),
        Span("exchange", 0.0, 1.0, 1),  # of the halo
        Span("exchange", 0.5, 0.25, 1),
        Span("0SEND_F0", 4.0, 1.0, 1),
        Span("exchange", 4.0, 1.0, 1),
        Span("history", 5.0, 1.0, 1),
        Span("weights", 8.0, 1.0, 1),
        Span("exchange", 8.5, 0.25, 1),
        Span("evaluate", 20.0, 5.0, 1),
        Span("0F7", 21.0, 1.0, 1),  # not training
    ]
    other = [Span("1RECV_F0", 1.0, 5.0, 1), Span("1F0", 6.0, 2.0, 1), Span("1B0", 8.0, 2.0, 1)]
    found = measure([mine, other])
    assert found is not None
    assert found.seconds == 10.0
    first, second = found.ranks
    assert (first.computing, first.sending, first.other) == (0.4, 0.1, 0.2)
    assert first.idle == pytest.approx(0.3)
    assert first.exposed == pytest.approx(0.3)
    # The message was under way from 4 to 6 only.
    assert (second.waiting, second.exposed) == (0.5, 0.2)
    assert found.imbalance == 0


def test_parts_of_a_stage_and_a_busy_one() -> None:
    texts = (
        "0F0:0-2 0SEND_F0:2-2 0B0:8-10",
        "0F0:0-4 0SEND_F0:4-4 0B0:8-10",
        "1RECV_F0:0-3 1F0:3-4",
        "1RECV_F0:0-5 1F0:5-6",
    )
    found = measure([spans(text, 1) for text in texts])
    assert found is not None
    assert found.stages == (0, 0, 1, 1)
    assert [rank.computing for rank in found.ranks] == [0.4, 0.6, 0.1, 0.1]
    assert found.imbalance == pytest.approx(0.6 / 0.3 - 1)
    # Each part's message is its own: both came a second after they were sent.
    assert [rank.exposed for rank in found.ranks] == [0, 0, 0.1, 0.1]
    run = predict(None, [spans(text, 1) for text in texts])
    assert run is not None
    assert [round(run.busy(stage), 9) for stage in (0, 1)] == [5.0, 1.0]


def test_predicted_by_hand() -> None:
    # Seconds are the mean of epochs 2, 3 and 4: 7 / 6 of the fourth's.
    run = predict(None, two_stages())
    assert run is not None
    assert run.seconds == pytest.approx(13 * 7 / 6)
    assert run.bubble == pytest.approx(1 - 16 / 26)
    assert run.imbalance == pytest.approx(0)
    given = fill_drain(Shape(2, (0, 1)))
    same = predict(given, two_stages(), transfer=lambda _: 0.5 * 7 / 6)
    assert same is not None
    assert same.seconds == pytest.approx(14 * 7 / 6)
    assert same.bubble == pytest.approx(1 - 16 / 28)


def test_an_epoch_that_passed_the_stages_twice_is_not_the_usual_one() -> None:
    """A probe of history has the median length here; nothing was predicted of such an epoch."""
    ranks = two_stages()
    for mine, text in zip(ranks, (STAGE_0, STAGE_1), strict=True):
        mine += spans(text, 4, 4020.0)
    found = measure(ranks)
    assert found is not None
    assert found.epoch == 3
    summary = pipeline_summary(ranks)
    assert summary is not None
    assert summary["predicted_bubble"] is not None


def test_what_was_never_seen_takes_its_stages_mean() -> None:
    programs: tuple[Program, ...] = from_text("0F0 0F1 0F5\n1F0 1B7\n")
    run = predict(programs, [spans("0F0:0-1 0F1:1-4", 1)])
    assert run is not None
    assert (run.busy(0), run.busy(1)) == (6.0, 0.0)


def test_the_order_is_that_of_the_epoch() -> None:
    wholes = many(3, 4)
    run = predict(None, wholes)
    assert run is not None
    given = predict(fill_drain(Shape(3, (0, 1, 2, 3))), wholes)
    assert given is not None
    assert [span.action for span in run.spans[1]] == [span.action for span in given.spans[1]]
    assert run.seconds == pytest.approx(given.seconds)


def test_no_pipeline_and_half_of_one() -> None:
    for nothing in ([], [[]], [[Span("forward", 0.0, 1.0, 1)]]):
        assert measure(nothing) is None
        assert predict(None, nothing) is None
        assert pipeline_summary(nothing) is None
    assert measure(two_stages(), 99) is None
    half = [two_stages()[0], []]
    found = measure(half)
    assert found is not None
    assert found.stages == (0, None)
    assert found.ranks[1].idle == 1
    with pytest.raises(ScheduleError):
        predict(None, half)
    values = pipeline_summary(half)
    assert values is not None
    assert values["predicted_bubble"] is None
    instant = measure([[Span("0F0", 0.0, 0.0, 1)]])
    assert instant is not None
    assert (instant.ranks[0].computing, instant.imbalance) == (0, 0)
    ElementTree.fromstring(f"<div>{lanes_svg(instant)}</div>")


def test_the_summary_has_a_key_of_it() -> None:
    values = pipeline_summary(two_stages())
    assert values == {
        "bubble": pytest.approx(1 - 16 / 28),
        "predicted_bubble": pytest.approx(1 - 16 / 26),
        "imbalance": 0,
        "waiting": pytest.approx(9.5 / 28),
        "computing": pytest.approx(16 / 28),
    }
    kept = summary(
        records=[], test_metric=None, val_metric=None, metric_name="accuracy", best_epoch=None,
        peak_memory_bytes=[], world_size=2, parallel={}, seed=0, pipeline=values,
        phases=[{"0F0": 1.0, "0F1": 1.0, "0RECV_B0": 3.0, "optimizer": 0.5}],
    )  # fmt: skip
    assert kept["pipeline"] == values
    assert kept["phases"] == [{"forward": 2.0, "exchange": 3.0, "optimizer": 0.5}]
    assert ("bubble", "43 % (predicted 38 %)") in headline(kept)


def test_the_trace_has_each_action_with_its_arguments(tmp_path: Path) -> None:
    wide = [
        [*two_stages()[0], Span("0SEND_F2>3", 5000.0, 0.0, 5)],
        [*two_stages()[1], Span("1F7", 5000.0, 1.0, 5)],
    ]
    path = write_trace(tmp_path / "trace.json", wide)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} == {"pipeline"}
    by_name = {event["name"]: event for event in events}
    assert by_name["1F7"]["args"] == {"epoch": 5, "stage": 1, "chunk": 7, "kind": "F"}
    assert by_name["0SEND_F2>3"]["args"]["peer"] == 3
    assert by_name["0B1"]["pid"] == 0
    colours = {event["args"]["kind"]: event["cname"] for event in events}
    assert len(set(colours.values())) == 4
    assert colours["RECV_F"] == colours["RECV_B"]
    found, back = measure(two_stages()), measure(read_trace(path), 4)
    assert found is not None
    assert back is not None
    assert back.bubble == pytest.approx(found.bubble)


def test_lanes_show_measured_above_predicted() -> None:
    found, run = measure(two_stages()), predict(None, two_stages())
    assert found is not None
    chart = lanes_svg(found, run)
    ElementTree.fromstring(f"<div>{chart}</div>")
    assert chart.index("measured</text>") < chart.index("predicted</text>")
    assert chart.count('<rect class="ink-blue"') == 2 * 4
    assert chart.count('<rect class="ink-teal"') == 2 * 4
    assert "rank 1, 1B0: 3.00 s" in chart
    assert "stage 0, 0RECV_B1" in chart
    assert chart.count('text-anchor="middle">1</text>') == 8
    assert "predicted</text>" not in lanes_svg(found)


def test_a_wide_pipeline_can_be_read_and_a_huge_one_stays_small() -> None:
    found, run = measure(many()), predict(None, many())
    assert found is not None
    assert run is not None
    assert found.bubble == pytest.approx(7 / 39)
    assert run.bubble == pytest.approx(7 / 39)
    chart = lanes_svg(found, run)
    assert chart.count('class="ink-blue" x') == 2 * 8 * 32
    assert chart.count('class="chunk"') >= 2 * 8 * 32  # those of B at least
    assert len(chart) < 250_000
    huge = many(4, 200, parts=16)
    found = measure(huge)
    assert found is not None
    chart = lanes_svg(found, predict(None, huge))
    assert " to 0F" in chart
    assert len(chart) < 600_000


def test_one_epoch_folds_the_actions_into_phases() -> None:
    chart = gantt_svg(many())
    legend = chart[: chart.index("</ul>")]
    assert [name for name in ("forward", "backward", "exchange") if name in legend] == [
        "forward", "backward", "exchange",
    ]  # fmt: skip
    assert legend.count("<li>") == 3
    assert "rank 3, 3F14" in chart


def test_the_page_has_the_section_only_where_there_is_a_pipeline(tmp_path: Path) -> None:
    folder = make_run(tmp_path, ranks=8)
    assert "<h2>Pipeline</h2>" not in check_page(write_page(folder))
    write_trace(folder / "trace.json", many())
    text = check_page(write_page(folder))
    assert "<h2>Pipeline</h2>" in text
    assert "<td>bubble</td><td>18 %</td><td>18 %</td>" in text
    assert "<td>rank 7</td><td>7</td><td>82 %</td>" in text
    write_trace(folder / "trace.json", [two_stages()[0], []])
    assert "nothing can be predicted" in check_page(write_page(folder))
