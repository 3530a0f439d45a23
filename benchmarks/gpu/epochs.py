"""Epochs of Kagome on one GPU beside PyG as its users write it, eager and compiled: milliseconds and GiB."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import made
import timing
import torch
from main import Row, Visit
from torch import nn
from torch_geometric.data import Data

import kagome
from kagome import Train


@dataclass(frozen=True)
class Size:
    """A graph and a width.

    Args:
        vertices: Number of vertices.
        edges: Number of edges.
        hidden: Width of the hidden layers.
        layers: Layers of a MeshGraphNet.
    """

    vertices: int
    edges: int
    hidden: int
    layers: int = 15


def ceilings(visit: Visit) -> Iterator[Row]:
    """What a copy and a gather reach."""
    numbers = 2**20 if visit.small else 2**30
    yield {"name": "copy", "gb_s": timing.copy_rate(numbers) / 1e9}
    device, rows = ("cuda" if torch.cuda.is_available() else "cpu"), numbers // 128
    x, out = torch.randn(rows, 128, device=device), torch.empty(rows, 128, device=device)
    index = torch.randint(0, rows, (rows,), device=device)
    took = timing.seconds(lambda: torch.index_select(x, 0, index, out=out))
    yield {"name": "gather of rows of 512 bytes", "gb_s": 8 * numbers / took / 1e9}
    if torch.cuda.is_available():
        host = torch.empty(numbers // 8, pin_memory=True)
        took = timing.seconds(lambda: host.copy_(x.view(-1)[: numbers // 8], non_blocking=True))
        yield {"name": "to the host, pinned", "gb_s": 4 * host.numel() / took / 1e9}


def epochs(visit: Visit) -> Iterator[Row]:
    """The made graph: 20,000 vertices and 400,000 edges, 128 columns."""
    yield from _rows(visit, _made(visit.small))


def compiled_epochs(visit: Visit) -> Iterator[Row]:
    """PyG under ``torch.compile`` on the made graph. A first call compiles for up to some minutes."""
    size = _made(visit.small)
    if torch.cuda.is_available() and not (torch.version.cuda or torch.version.hip):
        yield {"name": "(skipped)", "why": "torch.compile has no compiler for the tests' fake device"}
        return
    for name in ("GCN", "Transformer", "GAT", "MeshGraphNet"):
        if visit.left() < 60:
            yield {"name": "(out of time)", "at": name}
            return
        data = made.dataset(size.vertices, size.edges, 128, 47, edge=made.reads_edges(name))
        model = made.model(name, 128, size.hidden, 47, layers=size.layers if name == "MeshGraphNet" else 3)
        took, peak = plain_epoch(model, data, compiled=True)
        yield {"name": name, "compiled_ms": took, "compiled_gib": peak}


def _made(small: bool) -> Size:
    return Size(512, 4000, 16, 2) if small else Size(20_000, 400_000, 128)


def large_epochs(visit: Visit) -> Iterator[Row]:
    """1 million vertices, 20 million edges, 128 columns."""
    size = Size(1024, 8000, 16, 2) if visit.small else Size(2**20, 20_000_000, 128)
    yield from _rows(visit, size)


def _rows(visit: Visit, size: Size) -> Iterator[Row]:
    for name in made.NAMES:
        if visit.left() < 40:
            yield {"name": "(out of time)", "at": name}
            return
        data = made.dataset(size.vertices, size.edges, 128, 47, edge=made.reads_edges(name))
        row: Row = {"name": name}

        def fresh(name: str = name) -> nn.Module:
            return made.model(name, 128, size.hidden, 47, layers=size.layers if name == "MeshGraphNet" else 3)

        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "kagome": lambda data=data: kagome_epoch(fresh(), data),
            "pyg": lambda data=data: plain_epoch(fresh(), data, compiled=False),
        }
        for way, work in ways.items():
            try:
                row[f"{way}_ms"], row[f"{way}_gib"] = work()
            except Exception as error:
                row[way] = f"{type(error).__name__}: {str(error)[:160]}"
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        yield row


def _peak(begin: bool = False) -> float:
    if not torch.cuda.is_available():
        return float("nan")
    if begin:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() / 2**30


def kagome_epoch(model: nn.Module, data: Data) -> tuple[float, float]:
    """Milliseconds of an epoch of Kagome's, and the peak of its allocations in GiB."""
    _peak(begin=True)
    with kagome.Trainer(model, data, train=Train(epochs=3, eval_every=10**6, check=False)) as trainer:
        trainer.fit()
        with trainer.engine.net:  # as ``fit`` does for all its epochs
            took = timing.seconds(lambda: trainer.engine.train(4, trainer.optimizer), warm=2, repeats=7)
        return took * 1e3, _peak()


def plain_epoch(model: nn.Module, data: Data, *, compiled: bool) -> tuple[float, float]:
    """The same of plain PyG with Adam."""
    _peak(begin=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    here = data.to(device)
    inputs = [here.x, here.edge_index, *([here.edge_attr] if "edge_attr" in here else [])]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    forward: Callable[..., torch.Tensor] = torch.compile(model) if compiled else model

    def epoch() -> None:
        optimizer.zero_grad(set_to_none=True)
        out = forward(*inputs)
        nn.functional.cross_entropy(out[here.train_mask], here.y[here.train_mask]).backward()
        optimizer.step()

    took = timing.seconds(epoch, warm=3, repeats=5)
    found = took * 1e3, _peak()
    data.to("cpu")
    return found


def profile(visit: Visit) -> Iterator[Row]:
    """What an epoch of GCN, GAT and MeshGraphNet spends the GPU's time on."""
    if not torch.cuda.is_available():
        yield {"name": "(skipped)", "why": "there is no GPU to profile"}
        return
    size = _made(visit.small) if visit.small else Size(2**18, 5_000_000, 128)
    for name in ("GCN", "GAT", "MeshGraphNet"):
        data = made.dataset(size.vertices, size.edges, 128, 47, edge=made.reads_edges(name))
        model = made.model(name, 128, size.hidden, 47, layers=5 if name == "MeshGraphNet" else 3)
        settings = Train(epochs=3, eval_every=10**6, check=False)
        with kagome.Trainer(model, data, train=settings) as trainer:
            trainer.fit()
            with trainer.engine.net:
                took = timing.seconds(lambda t=trainer: t.engine.train(4, t.optimizer), warm=1, repeats=3)
                activities = [torch.profiler.ProfilerActivity.CPU]
                if torch.version.cuda or torch.version.hip:  # not of the tests' fake device
                    activities.append(torch.profiler.ProfilerActivity.CUDA)
                with torch.profiler.profile(activities=activities) as found:
                    trainer.engine.train(5, trainer.optimizer)
                    torch.cuda.synchronize()
        averages = found.key_averages()
        (visit.out / f"profile_{name}.txt").write_text(
            averages.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70)
        )
        busy = sum(each.self_device_time_total for each in averages if each.device_type.name == "CUDA") / 1e3
        yield {"name": name, "epoch_ms": took * 1e3, "gpu_busy_ms": busy}
        longest = [each for each in averages if each.device_type.name == "CUDA"]
        for each in sorted(longest, key=lambda e: -e.self_device_time_total)[:8]:
            share = each.self_device_time_total / 1e3
            yield {"name": f"{name}: {each.key[:80]}", "ms": share, "calls": each.count}
