"""Checks on the GPU: kernels, draws, loss curves and PyG's convolutions give what they give on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any

import made
import torch
from hypothesis import HealthCheck, given, settings
from main import Row, Visit
from torch import Tensor, nn
from torch_geometric.data import Data

import bit_cases
import kagome
import kernel_cases
from convolutions import CASES, double_precision, sample_graph
from kagome import Train
from kagome.comm.channel import Channel
from kagome.comm.in_process.thread_group import ThreadGroup
from kagome.components.parallelize import PartOptions, parallelize
from kagome.graph.partition.partition import extract
from kagome.kernels import ops
from kagome.kernels.base import reference
from kagome.kernels.base.csr import Structure
from kagome.kernels.quantize import ops as quantize
from kagome.model.exact.dropout import dropout
from odd_models import MUST_BE_REFUSED, ODD_MODELS
from parity import Build, Result, Share, case_build, joined, odd, random_owner, seeded, weights, whole, worst

Check = Callable[[ModuleType, kernel_cases.Case], None]
LOOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def device() -> torch.device:
    """The GPU, or the CPU of a trial run."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def gpus_hidden() -> Iterator[None]:
    """Make Kagome train on the CPU inside the block, also if torch can use a GPU."""
    there = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = there


def verdict(name: str, work: Callable[[], object], **more: object) -> Row:
    """Whether a check passes, and why not."""
    try:
        work()
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return {"name": name, "ok": False, **more, "why": f"{type(error).__name__}: {first[:300]}"}
    return {"name": name, "ok": True, **more}


def kernels(visit: Visit) -> Iterator[Row]:
    """Every kernel against autograd in float64, on edge lists of all sorts, in each type."""
    on = device()
    for dtype in (torch.float32, torch.float64):
        for check in kernel_cases.CHECKS:
            work = _tried(check, dtype, on, 3 if visit.small else 25)
            way = ops._module(on.type, dtype).__name__
            yield verdict(f"{check.__name__} {str(dtype)[6:]}", work, way=way)
    yield from _halves(on)


def _tried(check: Check, dtype: torch.dtype, on: torch.device, cases: int) -> Callable[[], None]:
    """A check of a kernel on that many edge lists that hypothesis draws."""

    @settings(deadline=None, max_examples=cases, database=None, suppress_health_check=list(HealthCheck))
    @given(kernel_cases.cases(dtypes=(dtype,), most=30))
    def run(case: kernel_cases.Case) -> None:
        check(ops._module(on.type, dtype), case.on(on))

    return run


def _halves(on: torch.device) -> Iterator[Row]:
    """Half types: inputs in bf16 or fp16, sums in fp32; hubs of 5,000 edges, odd widths."""
    edge = made.edges("power", 512, 20_000)
    edge[1, :5000] = 7
    s, far = Structure(edge[0].to(on), edge[1].to(on), 512, 512), Structure(edge[0], edge[1], 512, 512)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # Without Triton, on the tests' fake device, a hub's 5,000 rows are added one after the other.
        plain = ops._module(on.type, dtype) is reference and dtype == torch.float32
        loose = LOOSE[dtype] * (4 if plain else 1)
        for shape in ((3,), (64,), (100,), (8, 16)):
            x = torch.randn(512, *shape).to(dtype)
            weight = torch.rand(20_000, 8).to(dtype) if len(shape) == 2 else torch.rand(20_000).to(dtype)
            for name, w in (("sum", None), ("weighted sum", weight)):
                found = ops.sum_rows(s.by_target, x.to(on), None if w is None else w.to(on))
                wanted = ops.sum_rows(far.by_target, x.double(), None if w is None else w.double())
                error = float((found.double().cpu() - wanted).norm() / wanted.norm())
                row = {"name": f"{name} {shape} {str(dtype)[6:]}", "ok": error < loose, "error": error}
                if not row["ok"] or shape == (8, 16):
                    yield row
        a, b = torch.randn(512, 8).to(dtype), torch.randn(512, 8).to(dtype)
        soft = ops.softmax_sum(s.by_target, a.to(on), b.to(on), 0.2).double().cpu()
        wanted = ops.softmax_sum(far.by_target, a.double(), b.double(), 0.2)
        error = float((soft - wanted).norm() / wanted.norm())
        yield {"name": f"edge softmax {str(dtype)[6:]}", "ok": error < LOOSE[dtype], "error": error}


def large(visit: Visit) -> Iterator[Row]:
    """Tensors beyond 2^31 numbers, a hub with many of the edges, and the same bits twice."""
    on, rows = device(), 2000 if visit.small else 17_500_000
    x = torch.empty(rows, 128, device=on).normal_()
    count = 4096
    source = torch.randint(rows - rows // 8, rows, (count,), device=on)
    target = torch.randint(0, 64, (count,), device=on)
    found = ops.sum_rows(Structure(source, target, 64, rows).by_target, x)
    wanted = torch.zeros(64, 128, device=on, dtype=torch.float64).index_add_(0, target, x[source].double())
    error = float((found.double() - wanted).norm() / wanted.norm())
    yield {"name": f"{rows * 128:,} numbers", "ok": error < 1e-5, "error": error}
    del x
    vertices, count = (500, 20_000) if visit.small else (200_000, 20_000_000)
    target = (torch.rand(count, device=on) ** 6 * vertices).long()
    source = torch.randint(0, vertices, (count,), device=on)
    s, x = Structure(source, target, vertices, vertices), torch.randn(vertices, 64, device=on)
    a, b = ops.sum_rows(s.by_target, x), ops.sum_rows(s.by_target, x)
    wanted = torch.zeros(vertices, 64, device=on, dtype=torch.float64).index_add_(
        0, target, x[source].double()
    )
    error = float((a.double() - wanted).norm() / wanted.norm())
    same = bool(torch.equal(a, b))
    yield {
        "name": "hub",
        "ok": same and error < 1e-4,
        "error": error,
        "same_bits": same,
        "most": int(s.degree.max()),
    }


def draws(visit: Visit) -> Iterator[Row]:
    """Dropout's draws and the few-bit codes: the bits of the CPU."""
    on, rows = device(), 99 if visit.small else 9999
    ids = torch.randint(-(2**62), 2**62, (rows,))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(rows, 70).to(dtype)
        here, there = (dropout(x.to(d), ids.to(d), 12345678901, 0.3).cpu() for d in ("cpu", on))
        yield {"name": f"dropout {str(dtype)[6:]}", "ok": bool(torch.equal(here, there))}
    x = torch.randn(rows, 100)
    for few in quantize.WIDTHS:
        found = []
        for where in (torch.device("cpu"), on):
            body = torch.zeros(quantize.groups(rows, few), 100, dtype=torch.uint8, device=where)
            low, span, _ = quantize.encode(x.to(where), None, ids.to(where), 99, few, body)
            out = torch.empty(rows, 100, device=where)
            quantize.decode(body, low, span, few, out)
            found.append([each.cpu() for each in (body, low, span, out)])
        alike = all(bit_cases.same(a, b) for a, b in zip(*found, strict=True))
        yield {"name": f"codes of {few} bits", "ok": alike}


def losses(model: nn.Module, data: Data, epochs: int = 6, **train: Any) -> list[float]:
    """The losses of a run of one rank on the device that the mesh chooses."""
    settings = Train(epochs=epochs, eval_every=10**6, check=False, **train)
    with kagome.Trainer(model, data, train=settings) as trainer:
        trainer.fit()
        return [record.loss for record in trainer.records]


def curves(visit: Visit) -> Iterator[Row]:
    """One rank: the GPU's losses beside those of plain PyG on the CPU; twice the same bits; bf16."""
    vertices, count = (256, 3000) if visit.small else (4096, 60_000)
    for name in made.NAMES:
        data = made.dataset(vertices, count, 32, 5, edge=made.reads_edges(name))

        def fresh(name: str = name) -> nn.Module:
            return made.model(name, 32, 32, 5, dropout=0.0)

        try:
            found, again = losses(fresh(), data), losses(fresh(), data)
            plain = plain_losses(fresh(), data)
            mixed = losses(fresh(), data, amp="bf16")
            plain_mixed = plain_losses(fresh(), data, amp=True)
        except Exception as error:
            yield {"name": name, "ok": False, "why": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        far = max(abs(a - b) / abs(b) for a, b in zip(found, plain, strict=True))
        in_bf16, pyg_in_bf16 = (
            max(abs(a - b) / abs(b) for a, b in zip(curve, plain, strict=True))
            for curve in (mixed, plain_mixed)
        )
        same = found == again
        row = {"far": far, "same_bits": same, "far_in_bf16": in_bf16, "pyg_in_bf16": pyg_in_bf16}
        yield {"name": name, "ok": same and far < 2e-4 and in_bf16 < 2 * pyg_in_bf16 + 0.01, **row}


def plain_losses(model: nn.Module, data: Data, epochs: int = 6, amp: bool = False) -> list[float]:
    """The losses of plain PyG on the CPU, with the optimizer of the settings' defaults."""
    default = Train()
    optimizer = torch.optim.Adam(model.parameters(), lr=default.lr, weight_decay=default.weight_decay)
    more = (data.edge_attr,) if "edge_attr" in data else ()
    found = []
    for _ in range(epochs):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(data.x, data.edge_index, *more).float()
        loss = nn.functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def convolutions(visit: Visit) -> Iterator[Row]:
    """Every convolution of PyG on the GPU, one rank and two that are threads, against plain PyG on a CPU.

    A case that fails is compared with plain PyG on the GPU too: some differ there, or do not run.
    """
    todo = []
    for case in CASES:
        if case.build is not None:
            data = sample_graph(seed=1, groups_of_four=case.needs_groups_of_four)
            todo.append((f"{case.name}-{case.variant}", case_build(case), data, case.random))
    yield from _table(todo[::20] if visit.small else todo, visit)


def odd_models(visit: Visit) -> Iterator[Row]:
    """Models as users write them, likewise; those that no split serves are left out."""
    names = [name for name in ODD_MODELS if name not in MUST_BE_REFUSED]
    todo = [(name, partial(odd, name), sample_graph(seed=1), name.endswith("dropout")) for name in names]
    yield from _table(todo[::10] if visit.small else todo, visit)


def _table(todo: list[tuple[str, Build, Data, bool]], visit: Visit) -> Iterator[Row]:
    on, right, as_pyg = device(), dict.fromkeys((1, 2), 0), 0
    for name, build, data, random in todo:
        if visit.left() < 10:
            yield {"name": "(out of time)", "at": name}
            break
        for world in right:
            row = verdict(name, partial(_alike, build, data, world, random), ranks=world)
            right[world] += row["ok"] is True
            if row["ok"] is not True:
                plain = verdict("pyg", partial(_plain_alike, build, data, on))
                there = verdict("there", partial(_as_there, build, data, world, on))
                both_raise = all("differs" not in tried.get("why", "differs") for tried in (row, plain))
                if plain["ok"] is not True and (there["ok"] is True or both_raise):
                    as_pyg += 1
                    row |= {"ok": "as PyG", "pyg": plain["why"]}
                yield row
    yield {"name": "right", "of": len(todo), **{f"ranks_{w}": n for w, n in right.items()}, "as_pyg": as_pyg}


def _plain_alike(build: Build, data: Data, on: torch.device) -> None:
    """Plain PyG on the GPU against plain PyG on the CPU."""
    error = worst(moved(build, data, on), whole(build, data, epochs=2))
    assert error <= 1e-9, f"differs by {error:.1e}"


def _as_there(build: Build, data: Data, world: int, on: torch.device) -> None:
    """Kagome on the GPU against plain PyG on the GPU; raises what plain PyG raises there."""
    expected = moved(build, data, on)
    error = worst(split(build, data, world, on), expected)
    assert error <= 1e-9, f"differs from PyG on this device by {error:.1e}"


def moved(build: Build, data: Data, on: torch.device) -> Result:
    """``parity.whole`` with the model and the graph on another device; the results come back."""
    there = data.clone().to(on)
    there.x = there.x.detach().requires_grad_(data.x.requires_grad)
    made_there = whole(lambda: build().to(on), there, epochs=2)
    back = {name: None if grad is None else grad.cpu() for name, grad in made_there.grads.items()}
    buffers = {name: value.cpu() for name, value in made_there.buffers.items()}
    x_grad = None if made_there.x_grad is None else made_there.x_grad.cpu()
    return Result(made_there.out.cpu(), back, x_grad, buffers)


def _alike(build: Build, data: Data, world: int, random: bool) -> None:
    on = device()
    with double_precision():
        data.x.requires_grad_(not list(build().parameters()))
    if random:  # what is drawn is the same on any ranks: two are compared with one
        if world == 1:
            split(build, data, 1, on)
            return
        expected = split(build, data, 1, on)
    else:
        expected = whole(build, data, epochs=2)
    error = worst(split(build, data, world, on), expected)
    assert error <= 1e-9, f"differs by {error:.1e}"


def split(build: Build, data: Data, world: int, on: torch.device) -> Result:
    """Two epochs of a model on ranks that are threads, with all tensors on one device."""
    owner = random_owner(data.num_nodes, world, seed=2)
    with double_precision():
        # Copies: a default argument of a layer, such as ``act=Sigmoid()``, is shared by its instances.
        models = [deepcopy(seeded(build, 0)).to(on) for _ in range(world)]
        if world == 1:
            channel = Channel(None, on)
            return joined([_share(models[0], channel, data, owner, on)], data.num_nodes)

        def work(channel: Any) -> Share:
            channel.device = on
            # Autograd has one thread a device. Ranks that share it would wait for each other in it.
            with torch.autograd.set_multithreading_enabled(False):
                return _share(models[channel.rank], channel, data, owner, on)

        return joined(ThreadGroup(world, 30).run(work), data.num_nodes)


def _share(model: nn.Module, channel: Any, data: Data, owner: Tensor, on: torch.device) -> Share:
    part = extract(data, owner, channel.rank, channel.size)
    x = part.nodes["x"] = part.nodes["x"].detach().clone().to(on).requires_grad_(data.x.requires_grad)
    model.train()
    with parallelize(model, part, channel, PartOptions(device=on)) as net:
        for epoch in (1, 2):
            model.zero_grad(set_to_none=True)
            x.grad = None
            out = net.forward(epoch, training=True, checked=True)
            loss = (
                out * weights(out, data.num_nodes, 0)[part.own].to(on)
            ).sum() + net.scope.forward.forward_pass.token
            if loss.requires_grad:
                loss.backward()
    back = {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}
    buffers = {name: value.detach().cpu().clone() for name, value in model.named_buffers()}
    return Share(
        part.own, out.detach().cpu(), back, None if x.grad is None else x.grad.cpu(), buffers, [0, 0]
    )
