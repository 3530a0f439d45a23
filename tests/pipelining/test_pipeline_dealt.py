"""Several stages a rank, dealt round: the same numbers as with one, by programs that fill sooner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from history_reference import reference
from kagome import Parallel
from kagome.comm.channel import Channel
from kagome.errors import ConfigError
from kagome.graph.partition.chunks import order_of
from kagome.model.split.stages import stage_bytes
from kagome.pipelining import staging
from kagome.schedule.actions import parse
from kagome.schedule.schedules import Shape, fill_drain
from pipelines import MODELS, SEED, data, model, rotated, same, told, trained, trained_plainly
from training import CLASSES, FEATURES

EXACT = {"cross_chunk": "exact"}
HISTORY = {"cross_chunk": "history", "guard": False}
DEEP = [name for name in MODELS if name != "normed"]


def dealt(graph: int = 1, chunks: int = 1, pipe: int = 2, **rest: Any) -> dict[str, Any]:
    return {"pipe": pipe, "stages_per_rank": 2, "graph": graph, "chunks": chunks, **rest}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "parallel"),
    rotated(
        MODELS, [dealt(), dealt(chunks=3, **EXACT), dealt(2, 2, **EXACT), dealt(2), dealt(1, 5, **EXACT)]
    ),
)
def test_what_is_exact_gives_one_rank_s_numbers(ranks, name, parallel):
    found = ranks(2 * parallel["graph"], trained, name, parallel)
    same(found, ranks(1, trained, name, {})[0])


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "graph", "stale"), rotated(DEEP, [(1, False), (2, False), (1, True)]))
def test_history_reads_what_plain_pyg_would_read(ranks, name, graph, stale):
    parallel = dealt(graph, 5, history_epochs=2, stale_gradients=stale, **HISTORY)
    found = ranks(2 * graph, trained_plainly, name, parallel, 4)
    plain = model(name)
    chunks = [rank["chunks"] for rank in found[:graph]]
    expected = reference(plain, data(), chunks, 4, seed=SEED, history_epochs=2, stale=stale)
    for rank in found:
        torch.testing.assert_close(rank["losses"], expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(rank["weights"], dict(plain.state_dict()), rtol=0, atol=1e-9)


@pytest.mark.some(1)
@pytest.mark.parametrize(("pipe", "chunks"), [(2, 5), (3, 4)])
def test_the_program_is_the_schedule_s(ranks, pipe, chunks):
    """GCNII has eight steps that can be stages of their own, and gives its first rows to all of them."""
    for rank in ranks(pipe, trained, "gcnii", dealt(1, chunks, pipe, **HISTORY), 3):
        for epoch in (2, 3):
            order = order_of(chunks, seed=SEED, epoch=epoch, part=0)
            shape = Shape(2 * pipe, order, rank["links"], pipe)
            assert [parse(name) for name in rank["actions"][epoch]] == list(fill_drain(shape)[rank["stage"]])


def test_edges_that_are_dropped_are_the_same(ranks):
    drop = {"cross_chunk": "drop"}
    one = ranks(2, trained, "gat", {"pipe": 2, "chunks": 4, **drop})[0]
    other = ranks(2, trained, "gat", dealt(1, 4, **drop))[0]
    torch.testing.assert_close(other["losses"], one["losses"], rtol=0, atol=1e-9)


class Tied(nn.Module):
    """One layer called four times: by both stages of a rank, and by both ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Linear(FEATURES, 8), pyg.GCNConv(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for _ in range(4):
            x = self.conv(x, edge_index).tanh()
        return self.last(x)


def tied(channel: Channel, parallel: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return told(Tied().double(), data(), 4, parallel)


@pytest.mark.parametrize("parallel", [dealt(), dealt(1, 3, **EXACT), dealt(2, 2, **EXACT)])
def test_a_layer_that_several_stages_call_has_one_gradient(ranks, parallel):
    same(ranks(2 * parallel["graph"], tied, parallel), ranks(1, tied, {})[0])


def test_a_layer_that_one_rank_calls_in_two_stages_has_two_histories(ranks):
    """As in a pipeline of one rank, where all calls are one stage's."""
    found = ranks(2, tied, dealt(1, 3, **HISTORY))
    alone = ranks(1, tied, {"chunks": 3, **HISTORY})[0]
    torch.testing.assert_close(found[0]["losses"], alone["losses"], rtol=0, atol=1e-9)
    torch.testing.assert_close(found[0]["weights"], alone["weights"], rtol=0, atol=1e-9)


def counted(channel: Channel, name: str, parallel: dict[str, Any]) -> Any:
    seen: list[Any] = []
    real = staging.cut

    def cut(graph: Any, survey: Any, stages: int, *_: Any, ranks: int, **__: Any) -> Any:
        seconds = {step.name: float(step.layer) for step in graph.steps}
        seen.append((real(graph, survey, stages, seconds, ranks=ranks), survey))
        return seen[-1][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "cut", cut)
        found = trained(channel, name, parallel, 2)
    stages, survey = seen[0]
    found["expected"] = stage_bytes(stages, survey, 120, 0)
    found["given"] = {
        (stage.number, taker): names for stage in stages for taker, names in stage.gives.items()
    }
    return found


def test_a_value_that_a_rank_has_is_not_sent_to_it_again(ranks):
    """GCNII's first rows go from rank 0 to rank 1 once; its stages 2 and 3 find them at home."""
    for rank in ranks(2, counted, "gcnii", dealt(1, 4, **HISTORY)):
        first = next(name for name in rank["given"][0, 2] if name in rank["given"][0, 1])
        assert sorted(pair for pair, names in rank["given"].items() if first in names) == [
            (0, 1),
            (0, 2),
            (1, 3),
        ]
        # Three boundaries with the last layer's rows, and the first rows over one of them.
        assert rank["expected"] == 2 * 120 * 8 * 8 * (3 + 1)
        assert [epoch["stage"] for epoch in rank["bytes"]] == [rank["expected"]] * 2


@pytest.mark.some(1)
@pytest.mark.parametrize("one", [dealt(1, 3, **EXACT), {}])
def test_checkpoints_do_not_know_how_stages_are_dealt(ranks, one, tmp_path):
    other = {} if one else dealt(1, 3, **EXACT)

    def size(parallel: dict[str, Any]) -> int:
        return parallel.get("pipe", 1)

    whole = ranks(1, resumable, {}, 6, None, None)[0]
    ranks(size(one), resumable, one, 3, str(tmp_path / "run"), None)
    found = ranks(size(other), resumable, other, 6, str(tmp_path / "run"), str(tmp_path / "run"))
    for rank in found:
        torch.testing.assert_close(rank["losses"], whole["losses"], rtol=0, atol=1e-8)
        torch.testing.assert_close(rank["weights"], whole["weights"], rtol=0, atol=1e-7)


def resumable(
    channel: Channel, parallel: dict[str, Any], epochs: int, out: str | None, resume: str | None
) -> Any:
    mine = model("gcnii", 0.4, seed=1 if resume is None else 99)
    return told(mine, data(validated=True), epochs, parallel, out=out, resume=resume, train={"lr": 0.05})


def test_more_stages_than_layers_are_refused(ranks):
    for rank in ranks(2, trained, "gcn", {"pipe": 2, "stages_per_rank": 3, "chunks": 2, **HISTORY}):
        assert rank.startswith("ModelError")
        assert "6 stages" in rank


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"stages_per_rank": 2}, "a pipeline for stages_per_rank=2"),
        ({"stages_per_rank": 0, "pipe": 2}, "to be 1 or more"),
        ({"stages_per_rank": 2, "pipe": 2, "schedule": "1f1b", "cross_chunk": "drop"}, "one stage a rank"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, word):
    with pytest.raises(ConfigError, match=word):
        Parallel(**given)
