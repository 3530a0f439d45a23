"""Leaks: an epoch leaves nothing behind, on any number of ranks."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch

from kagome import Trainer
from kagome.comm.channel import Channel
from kagome.config import Model, Parallel
from kagome.model.zoo import build_model
from training import QUIET, graph, settings

NAMES = ["gcn", "gat", "pna", "edgecnn", "gcn2", "appnp", "resgcn+", "transformer"]

EARLY, LATE = 4, 8


def left_behind(
    channel: Channel, name: str, fast: bool, recompute: bool, parallel: dict[str, Any] | None = None
) -> dict[str, int]:
    data = graph()
    model = build_model(
        Model(name=name, layers=3, hidden=8, heads=2, dropout=0.3),
        in_channels=data.num_features,
        out_channels=int(data.y.max()) + 1,
        num_nodes=data.num_nodes,
        degree_histogram=torch.ones(12, dtype=torch.long),
    )
    found: list[Counter[str]] = []
    gc.freeze()  # what was there before is not looked through again and again

    class Counting(torch.optim.SGD):
        """Counts the tensors that are there after two of its steps."""

        steps = 0

        def step(self, closure=None):
            value = super().step(closure)
            self.steps += 1
            if self.steps in (EARLY, LATE):
                gc.collect()
                tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
                found.append(Counter(f"{tuple(o.shape)} {o.dtype}" for o in tensors))
            return value

    with Trainer(
        model,
        data,
        parallel=Parallel(**(parallel or {})),
        optimizer=lambda parameters: Counting(parameters, lr=0.01),
        train=settings(eval_every=100),
        report=QUIET,
        fast=fast,
        recompute=recompute,
    ) as trainer:
        trainer.fit(LATE)
    gc.unfreeze()
    return {key: count for key, count in (found[1] - found[0]).items() if count >= LATE - EARLY}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_of_an_epoch_outlives_it(ranks, name):
    assert ranks(2, left_behind, name, True, False) == [{}] * 2


@pytest.mark.some(5)
@pytest.mark.parametrize(("world", "fast"), [(1, True), (2, False), (3, True)])
@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_nor_on_other_ranks_or_as_pyg_runs_it(ranks, world, name, fast):
    assert ranks(world, left_behind, name, fast, False) == [{}] * world


@pytest.mark.parametrize("name", ["sage", "gat", "resgcn+"])
def test_nor_where_layers_run_again(ranks, name):
    assert ranks(2, left_behind, name, True, True) == [{}] * 2


@pytest.mark.parametrize("kind", ["history", "exact", "drop"])
def test_nor_where_chunks_go_through_stages(ranks, kind):
    parallel = {"pipe": 2, "chunks": 3, "cross_chunk": kind, "history_epochs": 2}
    assert ranks(2, left_behind, "gcn2", True, False, parallel) == [{}] * 2
