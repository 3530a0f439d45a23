"""Check: a user's model on a small sample of the user's graph, split against whole, every output and gradient.

Where it sits: ``trainer`` runs it before the first training of a model, ``kagome check`` and ``kagome.check``
on demand. The ranks of the split are threads of this process (``comm.local``), so it takes a second and
needs no peers.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data

from kagome.comm.local import LocalChannel, LocalGroup
from kagome.errors import CheckError, KagomeError, ModelError
from kagome.graph.partition import Partition, split_all
from kagome.model.exact import HANDLERS
from kagome.model.rules import apply_rules
from kagome.neighbors.intercept import Interception, forget, install
from kagome.run.engine import Call

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Largest difference, relative to the largest entry, that is rounding."""

_DRAWS = frozenset(
    [
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "rand_like",
        "randn_like",
        "bernoulli",
    ]
)


@dataclass(frozen=True)
class Row:
    """One compared tensor.

    Args:
        name: A module's path (and which call of it), or a parameter's name.
        kind: ``output`` or ``gradient``.
        error: Largest difference over the largest entry.
    """

    name: str
    kind: str
    error: float


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Args:
        first: The first thing that differs, in the order of the forward pass, then of gradients; else None.
        rows: All that was compared.
        parts: Parts of the split.
        vertices: Vertices of the sample.
        edges: Edges of the sample.
        dtype: The number type it ran in.
        seconds: How long it took.
    """

    first: Row | None
    rows: tuple[Row, ...] = field(repr=False)
    parts: int
    vertices: int
    edges: int
    dtype: str
    seconds: float

    @property
    def worst(self) -> float:
        """The largest of all differences."""
        return max((row.error for row in self.rows), default=0.0)

    def text(self) -> str:
        """One line for a person."""
        verdict = "equal" if self.first is None else f"differ first at {self.first.name} ({self.first.kind})"
        return (
            f"split over {self.parts} and whole {verdict}: {len(self.rows)} tensors, largest difference "
            f"{self.worst:.1e} of the largest entry ({self.dtype}; {self.vertices} vertices, {self.edges} edges; "
            f"{self.seconds:.1f} s)"
        )

    def raise_if_different(self) -> None:
        """Refuse to go on where split and whole differ.

        Raises:
            CheckError: Naming the first layer that differs.
        """
        if self.first is not None:
            raise CheckError(
                f"the model gives the same on {self.parts} parts as on the whole graph",
                f"the {self.first.kind} of {self.first.name} differs by {self.first.error:.1e} of its largest entry",
                where="a sample of your graph",
                hint="a layer there mixes vertices other than through edges; kagome check shows all rows, "
                "--train.no-check goes on all the same",
            )


def check(
    model: nn.Module, data: Data | Partition, *, parts: int = 3, vertices: int = 200, seed: int = 0
) -> CheckResult:
    """Run a model on a sample of a graph, whole and split, and compare everything.

    Args:
        model: The user's module; a copy is run.
        data: A validated graph, or a rank's part (its own vertices and the edges among them are sampled).
        parts: Parts of the split.
        vertices: Vertices of the sample.
        seed: Of the sample, the split and the weights of the sum that is differentiated.

    Returns:
        What was found; see :meth:`CheckResult.raise_if_different`.

    Raises:
        ModelError: If the model fails on the whole sample, or on a part.
    """
    begun = time.perf_counter()
    sample = take_sample(data, vertices, seed)
    generator = torch.Generator().manual_seed(seed)
    count = int(sample.num_nodes or 0)
    owner = torch.randint(0, parts, (count,), generator=generator)
    twin = _twin(model)
    for dtype in (torch.float64, torch.float32):
        try:
            rows = _compare(twin.to(dtype), _cast(sample, dtype), owner, parts, dtype, seed)
        except _WholeFailed as failure:
            if dtype == torch.float64:
                continue  # a layer that insists on float32 gets it
            raise ModelError(
                f"the model runs on {count} vertices of your graph in one process",
                f"it raised {type(failure.cause).__name__}: {failure.cause}",
                where=failure.where,
                hint="run it once in plain PyTorch Geometric",
            ) from failure.cause
        break
    first = next((row for row in rows if not row.error <= TOLERANCE[dtype]), None)
    return CheckResult(
        first=first,
        rows=tuple(rows),
        parts=parts,
        vertices=count,
        edges=sample.edge_index.size(1),
        dtype=str(dtype).removeprefix("torch."),
        seconds=time.perf_counter() - begun,
    )


# The sample --------------------------------------------------------------------------------------


def take_sample(data: Data | Partition, vertices: int, seed: int) -> Data:
    """A connected piece of a graph where it has one: breadth first from random vertices.

    Shapes:
        At most ``vertices`` rows; all edges among them.
    """
    if isinstance(data, Partition):
        inside = data.edge_index[0] < data.own.numel()
        edge_index = data.edge_index[:, inside]
        nodes, edges = data.nodes, {name: value[inside] for name, value in data.edges.items()}
        count = data.own.numel()
    else:
        count, edge_index = int(data.num_nodes or 0), data.edge_index
        nodes = {k: v for k, v in data.items() if isinstance(v, Tensor) and data.is_node_attr(k)}
        edges = {
            k: v
            for k, v in data.items()
            if isinstance(v, Tensor) and data.is_edge_attr(k) and k != "edge_index"
        }
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(count, dtype=torch.bool)
    if count <= vertices:
        chosen[:] = True
    while (missing := vertices - int(chosen.sum())) > 0 and count > vertices:
        # A random vertex and the sources of its in-edges; then those of theirs.
        front = torch.randint(0, count, (max(missing // 16, 1),), generator=generator)
        for _ in range(3):
            new = torch.zeros(count, dtype=torch.bool)
            new[front] = True
            fresh = (new & ~chosen).nonzero().view(-1)
            room = vertices - int(chosen.sum())
            chosen[fresh[torch.randperm(fresh.numel(), generator=generator)[:room]]] = True
            front = edge_index[0][new[edge_index[1]]]
            if not front.numel():
                break
    kept = chosen.nonzero().view(-1)
    place = torch.full((count,), -1)
    place[kept] = torch.arange(kept.numel())
    inside = chosen[edge_index[0]] & chosen[edge_index[1]]
    sample = Data(edge_index=place[edge_index[:, inside]], num_nodes=kept.numel())
    for name, value in nodes.items():
        sample[name] = value[kept]
    for name, value in edges.items():
        sample[name] = value[inside]
    return sample


def _cast(sample: Data, dtype: torch.dtype) -> Data:
    out = Data(num_nodes=sample.num_nodes)
    for name, value in sample.items():
        floats = isinstance(value, Tensor) and value.is_floating_point()
        out[name] = value.to(dtype) if floats else value
    return out


def _twin(model: nn.Module) -> nn.Module:
    try:
        twin = copy.deepcopy(model).cpu()
    except Exception as error:
        raise ModelError(
            "the check runs a copy of the model",
            f"it cannot be copied: {type(error).__name__}: {error}",
            hint="let copy.deepcopy(model) work, or leave the check out (--train.no-check)",
        ) from error
    for module in twin.modules():
        forget(module)
    return twin


# Running -----------------------------------------------------------------------------------------


@dataclass
class _Trace:
    """What one run left: outputs by module in the order they were finished, and gradients by parameter."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    rows: Tensor | None = None


class _WholeFailed(Exception):  # noqa: N818 - caught and turned into a ModelError
    def __init__(self, cause: Exception, where: str) -> None:
        super().__init__(str(cause))
        self.cause, self.where = cause, where


class _NoDraws(TorchFunctionMode):
    """Plain PyG with every draw switched off: what split and whole can share number by number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _DRAWS:
            return _no_draw(None, func.__name__, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _no_draw(scope: Any, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x: Tensor = args[0] if args else kwargs["input"]
    if "rand" in name or name == "bernoulli":
        out = torch.full_like(x, 0.5 if name != "bernoulli" else 1.0)
        return out if scope is None else scope.like(out, x)
    return x


def _compare(
    model: nn.Module, sample: Data, owner: Tensor, parts: int, dtype: torch.dtype, seed: int
) -> list[Row]:
    with _default(dtype):
        whole_data = split_all(sample, torch.zeros_like(owner), 1)[0]
        pieces = split_all(sample, owner, parts)
        rows: list[Row] = []
        quiet = {**HANDLERS, **dict.fromkeys(_DRAWS, _no_draw)}
        whole = _whole(copy.deepcopy(model), whole_data, seed)
        split = _split(model, pieces, quiet, seed)
        rows += _differences(whole, split, pieces, sample, "")
        # Once more with dropout on, against Kagome on one rank: draws must not know the mesh.
        one = _split(model, [whole_data], dict(HANDLERS), seed)
        many = _split(model, pieces, dict(HANDLERS), seed)
        rows += _differences(one[0], many, pieces, sample, " with dropout")
        return rows


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _watch(model: nn.Module, trace: _Trace) -> Callable[[], None]:
    calls: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, out: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            label = name if calls[name] == 1 else f"{name} (call {calls[name]})"
            value = next(
                (v for v in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(v, Tensor)), None
            )
            if value is not None and value.is_floating_point():
                trace.outputs[label] = value.detach()

        return keep

    handles = [
        m.register_forward_hook(hook(name or f"the model ({type(model).__name__})"))
        for name, m in model.named_modules()
    ]

    def unwatch() -> None:
        for handle in handles:
            handle.remove()

    return unwatch


def _backward(
    out: Any, ids: Tensor, token: Tensor | None, model: nn.Module, trace: _Trace, seed: int
) -> None:
    value = out if isinstance(out, Tensor) else next(v for v in out if isinstance(v, Tensor))
    # Weights by original id: the same sum however the rows are spread.
    weight = torch.sin(ids.to(value.dtype) * 12.9898 + seed) + 1.5
    loss = (value * weight.view(-1, *[1] * (value.dim() - 1))).sum()
    loss = loss if token is None else loss + token
    if loss.requires_grad:
        loss.backward()
    trace.grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def _note_failure(name: str, failed: list[str]) -> Callable[..., None]:
    def note(_module: nn.Module, _args: Any, out: Any) -> None:
        if out is None:
            failed.append(name)  # called after an error too, innermost first

    return note


def _whole(model: nn.Module, part: Partition, seed: int) -> _Trace:
    trace = _Trace(rows=part.own)
    inputs = {"edge_index": part.edge_index, **part.nodes, **part.edges}
    unwatch = _watch(model, trace)
    failed: list[str] = []
    handles = [
        module.register_forward_hook(_note_failure(name or type(model).__name__, failed), always_call=True)
        for name, module in model.named_modules()
    ]
    try:
        model.train()
        with _NoDraws():
            out = Call(model, set(inputs))(model, inputs)
        _backward(out, part.own, None, model, trace, seed)
    except KagomeError:
        raise
    except Exception as error:
        raise _WholeFailed(error, failed[0] if failed else type(model).__name__) from error
    finally:
        unwatch()
        for handle in handles:
            handle.remove()
    return trace


def _split(model: nn.Module, pieces: list[Partition], handlers: dict[str, Any], seed: int) -> list[_Trace]:
    copies = [copy.deepcopy(model) for _ in pieces]

    def work(channel: LocalChannel) -> _Trace:
        part, mine = pieces[channel.rank], copies[channel.rank]
        scope = Interception(part, channel, seed=seed, handlers=handlers)
        uninstall = install(mine, scope)
        unrule = apply_rules(mine, scope)
        trace = _Trace(rows=part.own)
        unwatch = _watch(mine, trace)
        mine.train()
        try:
            call = Call(mine, set(scope.inputs))
            with scope.running(1, training=True, checked=True):
                out = call(mine, scope.inputs)
            _backward(out, part.own, scope.turn.token, mine, trace, seed)
        except KagomeError:
            raise
        except Exception as error:
            raise _part_failed(error, scope, channel.rank) from error
        finally:
            unwatch()
            unrule()
            uninstall()
        return trace

    return LocalGroup(len(pieces)).run(work)


def _part_failed(error: Exception, scope: Interception, rank: int) -> ModelError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/kagome/" not in f.filename]
    line = next(
        (f"{f.name}, line {f.lineno}: {f.line}" for f in reversed(frames) if "/torch/" not in f.filename), ""
    )
    return ModelError(
        "the model runs on a part of the graph as it runs on the whole",
        f"on a part of {scope.own} vertices it raised {type(error).__name__}: {str(error).splitlines()[0]}",
        where=f"{scope.fault or 'forward'}{'; ' + line if line else ''}",
        hint="let sizes come from the input (x.size(0)), and reach other vertices through edges only",
    )


# Comparing ---------------------------------------------------------------------------------------


def _differences(
    whole: _Trace, split: list[_Trace], pieces: list[Partition], sample: Data, note: str
) -> list[Row]:
    rows: list[Row] = []
    count = int(sample.num_nodes or 0)
    for name, value in whole.outputs.items():
        found = [trace.outputs.get(name) for trace in split]
        if any(f is None for f in found):
            continue
        axis = _row_axis(value, [f for f in found if f is not None], pieces, count)
        if axis is None:
            continue
        joined = torch.zeros_like(value)
        for piece, part in zip(pieces, found, strict=True):
            assert part is not None
            joined.index_copy_(axis, piece.own, part.to(joined.dtype))
        rows.append(Row(name + note, "output", _error(joined, value, None)))
    scale = max(
        (float(g.abs().max()) for g in whole.grads.values() if g is not None and g.numel()), default=0.0
    )
    for name, grad in reversed(whole.grads.items()):
        shares = [trace.grads.get(name) for trace in split]
        if grad is None and all(s is None for s in shares):
            continue
        total = sum(
            (s for s in shares if s is not None),
            start=torch.zeros_like(next(g for g in (grad, *shares) if g is not None)),
        )
        rows.append(
            Row(
                name + note,
                "gradient",
                _error(total, torch.zeros_like(total) if grad is None else grad, scale),
            )
        )
    return rows


def _row_axis(value: Tensor, found: list[Tensor], pieces: list[Partition], count: int) -> int | None:
    for axis, size in enumerate(value.shape):
        rest = [s for a, s in enumerate(value.shape) if a != axis]
        fits = all(
            f.dim() == value.dim()
            and f.size(axis) == piece.own.numel()
            and [s for a, s in enumerate(f.shape) if a != axis] == rest
            for f, piece in zip(found, pieces, strict=True)
        )
        if size == count and fits:
            return axis
    return None


def _error(a: Tensor, b: Tensor, scale: float | None) -> float:
    if not a.numel():
        return 0.0
    both = torch.isnan(a) & torch.isnan(b) | (a == b)
    gap = torch.where(both, torch.zeros_like(a), (a - b).abs())
    largest = float(b[torch.isfinite(b)].abs().max()) if torch.isfinite(b).any() else 0.0
    base = max(largest, scale or 0.0, 1e-30)
    worst = float(gap.max()) / base
    return worst if worst == worst else float("inf")
