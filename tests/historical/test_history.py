"""History on ranks gives what plain PyG gives where historical reads are constants, edge by edge."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from history_reference import reference
from kagome.adaptive import history
from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions
from kagome.config import Parallel
from kagome.graph.partition.partition import partition
from kagome.halo.forward_pass import Site
from kagome.historical.provider import ExactRows
from kagome.pipelining.chunking import chunked
from pipelines import MODELS, SEED, data, model, rotated, trained, trained_plainly

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2)]
HISTORY = {"cross_chunk": "history", "guard": False}


def mesh(pipe: int, graph: int, chunks: int, **rest: Any) -> dict[str, Any]:
    return {"pipe": pipe, "graph": graph, "chunks": chunks, **HISTORY, **rest}


def compare(
    ranks: Any,
    name: str,
    parallel: dict[str, Any],
    epochs: int,
    atol: float,
    train: dict[str, Any] | None = None,
    **rest: Any,
) -> None:
    parts = parallel["graph"]
    if rest.get("fast"):
        found = ranks(parallel["pipe"] * parts, trained, name, parallel, epochs, 0.0, True)
    else:
        found = ranks(parallel["pipe"] * parts, trained_plainly, name, parallel, epochs, train or {})
    for rank in found:
        assert isinstance(rank, dict), rank
    plain = model(name)
    expected = reference(plain, data(), [rank["chunks"] for rank in found[:parts]], epochs, seed=SEED, **rest)
    for rank in found:
        torch.testing.assert_close(rank["losses"], expected, rtol=0, atol=atol)
        torch.testing.assert_close(rank["weights"], dict(plain.state_dict()), rtol=0, atol=atol)
        for key, value in rank["weights"].items():
            assert torch.equal(value, found[0]["weights"][key]), f"{key} drifts apart"


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "pipe", "graph"), rotated(MODELS, reversed(MESHES)))
@pytest.mark.parametrize("chunks", [4])
def test_the_gradient_after_the_first_epoch_with_history(ranks, name, pipe, graph, chunks):
    compare(ranks, name, mesh(pipe, graph, chunks), 2, 1e-10)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "pipe", "graph"), rotated(["gcn", "sage", "gcnii", "jumping", "gat"], MESHES)
)
def test_the_same_with_fast_paths(ranks, name, pipe, graph):
    compare(ranks, name, mesh(pipe, graph, 3), 3, 1e-9, fast=True)


@pytest.mark.some(2)
@pytest.mark.parametrize(("history_epochs", "pipe", "graph"), rotated([1, 3], MESHES))
def test_rows_are_kept_each_so_many_epochs(ranks, pipe, graph, history_epochs):
    parallel = mesh(pipe, graph, 3, history_epochs=history_epochs)
    compare(ranks, "gcnii", parallel, 7, 1e-9, history_epochs=history_epochs)


@pytest.mark.parametrize(("pipe", "graph"), MESHES)
def test_chunks_in_their_own_order_and_gradients_as_they_are(ranks, pipe, graph):
    parallel = mesh(pipe, graph, 3, shuffle_chunks=False, cross_chunk_scale=1.0)
    compare(ranks, "sage", parallel, 3, 1e-9, shuffle=False, scale=1.0)


@pytest.mark.parametrize(("pipe", "graph"), MESHES)
def test_norms_go_by_the_last_epoch_s_statistics_and_note_them_once(ranks, pipe, graph):
    compare(ranks, "normed", mesh(pipe, graph, 3, history_epochs=2), 5, 1e-8, history_epochs=2)


@pytest.mark.parametrize(("eval_every", "pipe", "graph"), rotated([1, 100], MESHES))
def test_sums_are_those_of_the_last_epoch_not_of_an_evaluation_after_it(ranks, eval_every, pipe, graph):
    parallel = mesh(pipe, graph, 3, history_epochs=2)
    compare(ranks, "paired", parallel, 5, 1e-8, {"eval_every": eval_every}, history_epochs=2)


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_any_scale(ranks, scale):
    compare(ranks, "gcn", mesh(1, 2, 3, cross_chunk_scale=scale), 3, 1e-9, scale=scale)


@pytest.mark.parametrize(("history_epochs", "pipe", "graph"), rotated([20, 1, 20], MESHES))
def test_stale_gradients_are_those_of_the_epoch_before(ranks, pipe, graph, history_epochs):
    """GNNPipe without its third technique: readers that come too late in backward left theirs before."""
    parallel = mesh(pipe, graph, 3, stale_gradients=True, history_epochs=history_epochs)
    compare(ranks, "gcn", parallel, 4, 1e-9, stale=True, history_epochs=history_epochs)


@pytest.mark.parametrize(("pipe", "graph"), [(2, 1), (1, 2)])
def test_stale_gradients_with_fast_paths(ranks, pipe, graph):
    """Those of rows that the next epoch reads as old ones are summed beside those of fresh rows."""
    compare(ranks, "gcn", mesh(pipe, graph, 3, stale_gradients=True), 4, 1e-9, fast=True, stale=True)


def careful(channel: Any, parallel: dict[str, Any], epochs: int) -> Any:
    """Every probe finds history not quite right, and history goes on."""
    with mock.patch.multiple(history, HISTORY_GOOD=2.0, HISTORY_FAIR=-2.0, PAYS=1):
        return trained_plainly(channel, "gcn", parallel, epochs)


@pytest.mark.parametrize(("pipe", "graph"), MESHES)
def test_careful_epochs_take_rows_and_gradients_of_the_epoch_before(ranks, pipe, graph):
    """Epochs 1 and 2, 4, 6 are exact, of which 2, 4, 6 are probes: others take what those have left."""
    parallel = {**mesh(pipe, graph, 3), "guard": True}
    found = ranks(pipe * graph, careful, parallel, 7)
    plain = model("gcn")
    chunks = [rank["chunks"] for rank in found[:graph]]
    how: dict[str, Any] = {"stale": True, "history_epochs": 1, "exact": (1, 2, 4, 6)}
    expected = reference(plain, data(), chunks, 7, seed=SEED, **how)
    for rank in found:
        torch.testing.assert_close(rank["losses"], expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(rank["weights"], dict(plain.state_dict()), rtol=0, atol=1e-9)
        assert any("one epoch old" in note for note in rank["notes"])


def test_history_is_no_exact_training(ranks):
    """Without this a history that is never read would pass where a reference is not looked at."""
    exact = ranks(1, trained, "gcn", {"chunks": 4, "cross_chunk": "exact"}, 3, 0.0, True)[0]
    found = ranks(1, trained, "gcn", mesh(1, 1, 4), 3, 0.0, True)[0]
    assert found["losses"][0] == pytest.approx(exact["losses"][0], abs=1e-12)
    assert abs(found["losses"][2] - exact["losses"][2]) > 1e-5


def test_a_site_that_an_epoch_leaves_out_keeps_the_rows_it_had():
    """Stochastic depth: the half that was not written was taken for the last known rows."""
    part = partition(data(), parts=1, method="contiguous")[0]
    settings = Parallel(pipe=2, chunks=3, partitioner="contiguous")
    tables = chunked(part, Channel(None, "cpu"), settings, PartOptions()).tables
    assert tables is not None
    site = Site("conv", 1, 1, False, True, ("conv", 1), trains=True)
    for epoch, comes in enumerate((True, False, False, True, False), 1):
        tables.begin(epoch, ExactRows(tables, trains=True))
        if comes:
            table = tables.table(site, torch.zeros(1, 2))
            tables.current(table).fill_(epoch)
        tables.keep()
        assert tables.last(table).unique().tolist() == [1 if epoch < 4 else 4]


@pytest.mark.some(3)
@pytest.mark.parametrize("name", ["gcn", "normed", "gat"])
@pytest.mark.parametrize(("pipe", "graph"), [(1, 1), (2, 2)])
def test_evaluation_is_exact(ranks, name, pipe, graph):
    found = ranks(pipe * graph, trained, name, mesh(pipe, graph, 4), 4, 0.4)
    given = data()
    plain = model(name)
    plain.load_state_dict(found[0]["weights"])
    with torch.no_grad():
        scores = plain.eval()(given.x, given.edge_index)
    torch.testing.assert_close(found[0]["scores"], scores, rtol=0, atol=1e-10)
    right = (scores.argmax(1) == given.y)[given.test_mask].double().mean()
    for rank in found:
        assert rank["test"] == pytest.approx(float(right), abs=1e-12)
