"""Stages are cut by what steps take: alike ones alike, rows and calls told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions
from kagome.config import Parallel
from kagome.errors import DataError
from kagome.graph.partition.partition import partition, split_all
from kagome.pipelining import staging
from kagome.profile import step_shapes, step_times
from kagome.verify import check
from pipelines import data, model, told

WIDTH = 6


class Deep(nn.Module):
    """Eight layers that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


def made(vertices: int) -> Data:
    generator = torch.Generator().manual_seed(2)
    return Data(
        x=torch.randn(vertices, WIDTH, generator=generator),
        edge_index=torch.randint(0, vertices, (2, 5 * vertices), generator=generator),
        y=torch.zeros(vertices, dtype=torch.long),
    )


def staged(vertices: int, chunks: int) -> staging.Staging:
    part = partition(made(vertices), parts=1, method="contiguous")[0]
    given = Parallel(pipe=4, chunks=chunks)
    return staging.stage_model(Deep(), part, Channel(None, "cpu"), given, PartOptions())


def timed(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
    """Steps run as they do; they take what is said of name and rows, a third of it forward."""
    one = step_times._one

    def told(step: Any, model: Any, values: Any, scope: Any, **rest: Any) -> tuple[float, float]:
        one(step, model, values, scope, **rest)
        each = float(seconds(step.name, scope.own))
        return each / 3, each * 2 / 3

    monkeypatch.setattr(step_times, "_one", told)


def test_a_layer_that_the_machine_held_up_is_no_slower_than_its_like(monkeypatch):
    timed(monkeypatch, lambda name, _: 50.0 if name == "convs_5" else 1.0 if "convs" in name else 0.0)
    found = staged(200, 4)
    layers = [sum("convs" in step.name for step in stage.steps) for stage in found.stages]
    assert layers == [2, 2, 2, 2]


def test_parts_of_unlike_sizes_are_cut_between_the_same_steps():
    """One vertex more made a stage of a hybrid's other part begin a layer sooner, and ranks wait for ever."""
    data, model = made(90), Deep()
    given = Parallel(pipe=2, graph=2, chunks=1)
    owner = (torch.arange(90) >= 80).long()
    parts = split_all(data, owner, 2)
    steps = staging.steps_of(model, parts[0], Channel(None, "cpu"), (), PartOptions())
    calls = dict.fromkeys(steps.calls, (0.0, 0.0))
    rows = dict(calls)
    # Over 80 rows a layer weighs 80, over 10 it weighs 10; the last one weighs 180 in both.
    for place in range(8):
        rows[f"convs_{place}"] = (1.0, 1.0) if place < 7 else (0.0, 0.0)
        calls[f"convs_{place}"] = (180.0, 180.0) if place == 7 else (0.0, 0.0)
    found = [replace(steps, calls=calls, rows=rows).staging(given, part).stages for part in parts]
    names = [[[step.name for step in stage.steps] for stage in each] for each in found]
    assert names[0] == names[1]


@pytest.mark.parametrize(("vertices", "chunks"), [(200, 1), (200, 8), (20_500, 4)])
def test_rows_count_once_and_calls_once_a_chunk(monkeypatch, vertices, chunks):
    timed(monkeypatch, lambda _, rows: 3.0 + 0.01 * rows)
    found = staged(vertices, chunks)
    few = step_shapes.SAMPLE
    expected = chunks * (3.0 + 0.01 * few) + 0.01 * vertices
    assert found.seconds["convs_3"] == pytest.approx(expected)


def test_timing_holds_what_is_still_to_be_read(monkeypatch):
    """A deep model's rows, all of them on one rank, are what a pipeline is there to avoid."""
    one, held = step_times._one, []

    def counted(step: Any, model: Any, values: Any, scope: Any, **rest: Any) -> tuple[float, float]:
        held.append(sum(isinstance(value, Tensor) and value.is_floating_point() for value in values.values()))
        return one(step, model, values, scope, **rest)

    monkeypatch.setattr(step_times, "_one", counted)
    staged(200, 4)
    assert len(held) > 16
    assert max(held) <= 2


FAULTS: dict[str, tuple[Any, str, Exception, str]] = {
    "looking": (staging, "survey_on_sample", ValueError("too odd"), "ModelError"),
    "timing": (staging, "timed", DataError("rows", "there are none"), "DataError"),
    "a step": (step_times, "_one", ZeroDivisionError("by none"), "ModelError"),
    "what is kept": (staging, "keeping", RuntimeError("out of it"), "ModelError"),
    "the check": (check, "check", RuntimeError("out of it"), "ModelError"),
}


def faulty(channel: Channel, name: str) -> Any:
    """What each rank hears where rank 0 alone fails."""
    place, called, fault, _ = FAULTS[name]
    train = {"check": name == "the check", "timeout": 10.0}
    with mock.patch.object(place, called, side_effect=fault):
        return told(model("gcn"), data(), 1, {"pipe": 2, "chunks": 1}, train=train)


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_rank_0_raises_reaches_every_rank(ranks, name):
    *_, fault, leaf = FAULTS[name]
    for found in ranks(2, faulty, name):
        assert isinstance(found, str)
        assert found.startswith(f"{leaf}: ")
        assert str(fault) in found
        assert leaf == "DataError" or f"{type(fault).__name__}: {fault}" in found


def test_a_graph_of_a_few_vertices_is_timed_by_calls(monkeypatch):
    times = iter(range(10_000, 0, -1))  # the larger sample, timed first, seems slower
    timed(monkeypatch, lambda *_: next(times))
    assert max(staged(30, 2).seconds.values()) < 2 * 10_000
