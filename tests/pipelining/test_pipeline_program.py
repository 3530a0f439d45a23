"""What ran is the schedule's program, and what crossed is what the cut says, byte by byte."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from kagome.comm.channel import Channel
from kagome.graph.partition.chunks import order_of
from kagome.model.split.stages import stage_bytes
from kagome.pipelining import staging
from kagome.schedule.actions import Action, parse
from kagome.schedule.schedules import Shape, fill_drain, k_forward_k_backward
from pipelines import HIDDEN, SEED, data, model, rotated, told, trained

VERTICES, ITEM = 120, 8
DROP = {"cross_chunk": "drop"}
HISTORY = {"cross_chunk": "history", "guard": False}


def ran(found: dict[str, Any], epoch: int) -> list[Action]:
    return [parse(name) for name in found["actions"][epoch]]


def order(found: dict[str, Any], chunks: int, epoch: int) -> tuple[int, ...]:
    return order_of(chunks, seed=SEED, epoch=epoch, part=found["part"])


# Programs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pipe", "graph", "chunks"), rotated(["gcn", "jumping"], [(2, 1, 4), (3, 1, 2), (2, 2, 3)])
)
def test_history_fills_and_drains_in_the_epoch_s_order(ranks, name, pipe, graph, chunks):
    parallel = {"pipe": pipe, "graph": graph, "chunks": chunks, **HISTORY}
    for rank in ranks(pipe * graph, trained, name, parallel, 3):
        for epoch in (2, 3):
            shape = Shape(pipe, order(rank, chunks, epoch), rank["links"])
            assert ran(rank, epoch) == list(fill_drain(shape)[rank["stage"]])


@pytest.mark.parametrize(("schedule", "k"), [("auto", 1), ("1f1b", 1), ("kfkb", 2), ("fill-drain", None)])
def test_independent_chunks_run_by_the_schedule_that_was_asked_for(ranks, schedule, k):
    parallel = {"pipe": 2, "chunks": 5, "schedule": schedule, **DROP}
    for rank in ranks(2, trained, "gcn", parallel, 2):
        for epoch in (1, 2):
            shape = Shape(2, order(rank, 5, epoch), rank["links"])
            programs = fill_drain(shape) if k is None else k_forward_k_backward(shape, k)
            assert ran(rank, epoch) == list(programs[rank["stage"]])


@pytest.mark.parametrize(("pipe", "chunks"), [(1, 3), (2, 4)])
def test_exact_chunks_run_at_once(ranks, pipe, chunks):
    parallel = {"pipe": pipe, "chunks": chunks, "cross_chunk": "exact"}
    for rank in ranks(pipe, trained, "gcnii", parallel, 2):
        program = fill_drain(Shape(pipe, (0,), rank["links"]))[rank["stage"]]
        for epoch in (1, 2):
            assert ran(rank, epoch) == list(program)


@pytest.mark.some(1)
@pytest.mark.parametrize("graph", [1, 2])
def test_what_is_dropped_does_not_depend_on_the_schedule(ranks, graph):
    found = [
        ranks(2 * graph, trained, "gat", {"pipe": 2, "graph": graph, "chunks": 4, "schedule": kind, **DROP})
        for kind in ("fill-drain", "1f1b", "kfkb")
    ]
    for other in found[1:]:
        torch.testing.assert_close(other[0]["losses"], found[0][0]["losses"], rtol=0, atol=1e-9)
        torch.testing.assert_close(other[0]["weights"], found[0][0]["weights"], rtol=0, atol=1e-8)


def without_edges(channel: Channel, name: str, chunks: list[torch.Tensor]) -> Any:
    """Plain training of the graph without the edges between chunks."""
    given, of = data(), torch.empty(VERTICES, dtype=torch.int64)
    for number, ids in enumerate(chunks):
        of[ids] = number
    given.edge_index = given.edge_index[:, of[given.edge_index[0]] == of[given.edge_index[1]]]
    return told(model(name, 0.4), given, 4, {})


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "pipe", "graph"), rotated(["gat", "gcnii"], [(2, 1), (2, 2), (1, 1)]))
def test_dropping_is_training_without_the_edges_between_chunks(ranks, name, pipe, graph):
    """Draws too: they go by vertices and edges, whatever chunk they are in."""
    found = ranks(pipe * graph, trained, name, {"pipe": pipe, "graph": graph, "chunks": 3, **DROP})
    chunks = [ids for rank in found[:graph] for ids in rank["chunks"]]
    alone = ranks(1, without_edges, name, chunks)[0]
    for rank in found:
        torch.testing.assert_close(rank["losses"], alone["losses"], rtol=0, atol=1e-9)
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-8)


# Bytes ---------------------------------------------------------------------------------------------


def counted(channel: Channel, name: str, parallel: dict[str, Any]) -> Any:
    """Train with every layer as slow as any other, so that cuts are the same in each run."""
    seen: list[Any] = []
    real = staging.cut

    def cut(graph: Any, survey: Any, stages: int, *_: Any, **__: Any) -> Any:
        seconds = {step.name: float(step.layer) for step in graph.steps}
        seen.append((real(graph, survey, stages, seconds), survey))
        return seen[-1][0]

    with mock.patch.object(staging, "cut", cut):
        found = trained(channel, name, parallel, 3)
    stages, survey = seen[0]
    found["expected"] = stage_bytes(stages, survey, VERTICES, 0)
    found["widths"] = [
        [survey.values[value].shape for values in stage.gives.values() for value in values]
        for stage in stages
    ]
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("mesh", "name", "shared"),
    rotated(
        [
            {"pipe": 2, "chunks": 1},
            {"pipe": 3, "chunks": 4, "cross_chunk": "exact"},
            {"pipe": 2, "chunks": 5, **HISTORY},
            {"pipe": 2, "chunks": 5, **DROP},
            {"pipe": 2, "graph": 2, "chunks": 3, **HISTORY},
        ],
        [("gcn", 0), ("gcnii", 1), ("sage", 0), ("gat", 0), ("gcnii", 1)],
    ),
)
def test_each_boundary_carries_each_row_there_and_back(ranks, name, shared, mesh):
    """GNNPipe's 2 (S - 1) V H (1 + n_shared), whatever the chunks and parts."""
    pipe = mesh["pipe"]
    for rank in ranks(pipe * mesh.get("graph", 1), counted, name, mesh):
        assert [len(widths) for widths in rank["widths"]] == [1 + shared] * (pipe - 1) + [0]
        expected = 2 * (pipe - 1) * VERTICES * HIDDEN * ITEM * (1 + shared)
        assert rank["expected"] == expected
        assert [epoch["stage"] for epoch in rank["bytes"]] == [expected] * 3
        assert rank["bytes_per_epoch"]["stage"] == expected


@pytest.mark.parametrize("name", ["jumping", "normed"])
def test_bytes_are_the_sum_over_the_links_widths(ranks, name):
    for rank in ranks(3, counted, name, {"pipe": 3, "chunks": 4, **HISTORY}):
        wide = sum(shape[0] for widths in rank["widths"] for shape in widths)
        assert rank["expected"] == 2 * VERTICES * ITEM * wide
        assert [epoch["stage"] for epoch in rank["bytes"]] == [rank["expected"]] * 3


def test_one_stage_sends_nothing_to_another(ranks):
    for rank in ranks(2, counted, "gcn", {"pipe": 1, "graph": 2, "chunks": 3, **HISTORY}):
        assert {epoch.get("stage", 0) for epoch in rank["bytes"]} == {0}
