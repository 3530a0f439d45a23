"""Own loops and pipelines of a DAG on fake devices: the CPU's losses, outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from bed import without_gpus
from runs import data, model

import kagome
from dags import plan_of, sgd, task
from kagome.planner.stages.plan import StagePlan

ONE, TWO = "towers.0 towers.1 towers.1.0#2 towers.1.1#2", "towers.2 towers.2.0#2 towers.2.1#2"
TOP = "join act layers.0 act#2 layers.1 act#3 out"
PLANS: dict[str, tuple[str, int, StagePlan | str | None]] = {
    "towers": (
        "multimodal",
        4,
        plan_of(
            8,
            ("reads.0 towers.0", 1, 2),
            ("reads.1 towers.1", 1, 4, 2),
            ("reads.2 towers.2", 1, 1, 2),
            ("joint norm head", 1, 2),
        ),
    ),
    "replicas": ("uno", 4, plan_of(8, (ONE, 1, 2), (TWO, 1, 4), (TOP, 2, 8))),
    "chain": ("uno", 2, None),
    "searched": ("uno", 2, "auto"),
}


def on_the_cpu_too(work: Any, *args: Any) -> tuple[Any, Any]:
    there = work(*args)
    with without_gpus():
        return there, work(*args)


def own_loop(name: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Some updates of a loop of one's own, with a loss over rows and one over pairs of vertices."""
    graph, net_of = data(name), model(name)
    cut = kagome.Parallel(reuse=False, partitioner="contiguous", **parallel)
    optimizer = torch.optim.SGD(net_of.parameters(), lr=0.1)
    losses = []
    with kagome.shard(net_of, graph, parallel=cut, timeout=30) as net:
        y = net.place(graph.x.mean(dim=1, keepdim=True))
        pairs = torch.arange(40).view(2, 20)[:, net.rank :: net.ranks]
        for _ in range(3):
            out = net(graph.x, graph.edge_index)
            a, b = net.pairs(out, pairs)
            loss = net.mean((out[:, :1] - y) ** 2) - net.mean(torch.sigmoid((a * b).sum(1)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        scores = net.gather(out)
        rated = kagome.metrics.r2(net, out[:, :1], y)
        return {
            "losses": losses,
            "scores": None if scores is None else scores.detach().cpu(),
            "r2": float(rated),
            "device": str(out.device),
        }


@pytest.mark.parametrize(("name", "world", "parallel"), [("GCN", 1, {}), ("GAT", 2, {}), ("SAGE", 4, {})])
def test_a_loop_of_ones_own(devices, name, world, parallel):
    for rank, (there, here) in enumerate(devices.run(world, on_the_cpu_too, own_loop, name, parallel)):
        assert (there.pop("device"), here.pop("device")) == (f"cuda:{rank}", "cpu")
        torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-10)


def own_check() -> str:
    graph = data("GCN")
    torch.manual_seed(0)
    net_of = pyg.GCN(graph.num_features, 8, num_layers=2, out_channels=1).double()

    def loss(net: Any, out: torch.Tensor) -> torch.Tensor:
        return net.mean(out**2)

    with kagome.shard(net_of, graph, timeout=30) as net:
        return kagome.check(net, graph.x, graph.edge_index, loss=loss).text()


def test_the_check_of_a_loop(devices):
    there = devices.run(2, own_check)
    assert there[0] == there[1]
    assert "split over 2 and whole equal" in there[0]


def dag(name: str, plan: StagePlan | str | None, updates: int = 2) -> dict[str, Any]:
    """Some updates of a pipeline of a DAG."""
    torch.set_default_dtype(torch.float64)
    try:
        net_of, inputs, target, loss = task(name, 8)
        with kagome.pipeline(net_of, inputs, loss=loss, optimizer=sgd, plan=plan) as pipe:
            losses = [pipe.step(inputs, target) for _ in range(updates)]
            gradients = {key: None if g is None else g.cpu() for key, g in pipe.gradients().items()}
            scores = pipe.predict(inputs)
            return {
                "losses": losses,
                "gradients": gradients,
                "scores": None if scores is None else scores.cpu(),
                "score": pipe.evaluate(inputs, target),
            }
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", PLANS)
def test_a_pipeline_of_a_dag(devices, case):
    name, world, plan = PLANS[case]
    found = devices.run(world, on_the_cpu_too, dag, name, plan)
    # Which rank has which weights may depend on what was measured.
    there, here = (
        {k: g for side in sides for k, g in side.pop("gradients").items()}
        for sides in zip(*found, strict=True)
    )
    torch.testing.assert_close(there, here, rtol=0, atol=1e-10)
    for there, here in found:
        torch.testing.assert_close(there, here, rtol=0, atol=1e-10)
