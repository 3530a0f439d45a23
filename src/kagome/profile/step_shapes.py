"""Looks: what each step of a model gives, seen on small samples of a graph.

Where it sits: ``pipeline.staging`` asks before it cuts; ``step_times`` runs its samples in the same
surroundings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel, Kind as Traffic, Op
from kagome.comm.exchange import Trip
from kagome.comm.work import Work
from kagome.components.task import draws_of, unmoved
from kagome.config import Train
from kagome.graph.partition.partition import Partition, partition
from kagome.graph.structure.attributes import tensors_of
from kagome.halo.exchange import is_named
from kagome.intercept.hooks import install
from kagome.intercept.interceptor import Interceptor
from kagome.model.exact.handlers import HANDLERS
from kagome.model.exact.layer_rules import apply_rules
from kagome.model.trace.equivalence import TRACED, refuse_unlike
from kagome.model.trace.graph import LayerGraph, Step
from kagome.model.trace.shapes import Survey, settled, survey
from kagome.model.trace.tracer import HINT
from kagome.placement.placement import Placement, PlacementKind
from kagome.profile.subgraph import sample_part, take_sample
from kagome.user_frame import user_line

SAMPLE: Final = 48
"""Vertices of the sample on which values are looked at; half as many tell what follows their number."""


class Asked(Channel):
    """A rank by itself, which notes the layers that read more than the edges into a vertex bring.

    Args:
        device: Where the model runs.
        parted: Whether it is one rank of two, of which the other has no row and sends nothing.
        exact: Whether rows will cross as they are, in the same epoch: else they are not differentiated.

    Attributes:
        layers: Those that read along edges the other way, or all vertices.
        named: Those that read rows of vertices that forward names.
    """

    def __init__(self, device: torch.device, *, parted: bool = False, exact: bool = True) -> None:
        super().__init__(None, device)
        self.exact = exact
        self.where: Callable[[], str] = str
        self.layers: list[str] = []
        self.named: list[str] = []
        self.size = 2 if parted else 1

    def note(self, layer: str, notes: list[str] | None = None) -> None:
        """Note a layer, and the user's line that calls it."""
        (self.layers if notes is None else notes).append("; ".join(filter(None, (layer, user_line()))))

    def exchange(self, rows: Tensor, *counts: Sequence[int], **rest: Any) -> Tensor:
        """As :meth:`Channel.exchange`: a list of readers is made, by which rows are to be read later."""
        self.note(self.where())
        return super().exchange(rows, *counts, **rest)

    def start_exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Traffic = "halo",
        header: tuple[int, ...] | None = None,
        pick: Tensor | None = None,
        trip: Trip | None = None,
    ) -> Work:
        """What the rank keeps for itself; of the other one nothing comes."""
        rows = rows if pick is None else rows.index_select(0, pick)
        kept, come = rows[: send_counts[0]], rows.new_zeros(sum(recv_counts[1:]), *rows.shape[1:])
        return Work(torch.cat([kept, come]), self, action, kind)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, key: Hashable = None, **rest: Any) -> Tensor:
        """Its own share."""
        if is_named(key):
            self.note(self.where(), self.named)
        return tensor.detach().clone()


class ShapeSample(Interceptor):
    """A sample of a graph by itself, on an :class:`Asked`."""

    def write(self, sums: Tensor, axis: int, mark: Placement) -> Tensor:
        """As :meth:`Interceptor.write`: sums on neighbours' rows go along edges the other way."""
        if isinstance(self.channel.channel, Asked):
            self.channel.channel.note(self.where())
        return super().write(sums, axis, mark)


def sample_scope(
    part: Partition,
    vertices: int,
    train: Train,
    channel: Asked,
    *,
    fast: bool = False,
) -> Interceptor:
    """An interception of a sample of a rank's part, alone.

    Args:
        part: Of the graph.
        vertices: Of the sample.
        train: Its seed.
        channel: Where the model runs; of one rank for a sample that is a graph by itself, of two for one that
            is a part of the graph, as chunks are.
        fast: Whether messages are reduced by kernels.
    """
    if channel.size > 1:
        piece = sample_part(part, vertices, train.seed)
    else:
        piece = partition(take_sample(part, vertices, train.seed), parts=1, method="contiguous")[0]
    return ShapeSample(piece, channel, device=channel.device, seed=train.seed, handlers=HANDLERS, fast=fast)


def looked_at(
    model: nn.Module,
    graph: LayerGraph,
    part: Partition,
    train: Train,
    device: torch.device,
    *,
    named: bool = False,
    parted: bool = False,
    exact: bool = True,
) -> Survey:
    """What each step gives.

    A value has a row a vertex or an edge where its mark says so, or where its first axis has as many places
    in each of two samples: torch calls that Kagome has no rule for give no mark.

    Args:
        model: The user's module.
        graph: Its steps.
        part: Of the graph.
        train: Seed and mixed precision.
        device: Where the model runs.
        named: Whether the user named the layers.
        parted: Whether each stage runs it on parts of the graph.
        exact: Whether rows of other parts cross as they are, in the same epoch.

    Raises:
        ModelError: If a step fails, with its line; or if the steps do not give what forward gives.

    Cost:
        Two forwards of a sample, and two more in each mode.
    """
    asked = Asked(device, parted=parted, exact=exact)
    first = min(SAMPLE, max(1, part.num_nodes - 1)) if parted else SAMPLE
    scopes = [sample_scope(part, vertices, train, asked) for vertices in (first, first // 2)]
    asked.where = scopes[0].where
    one, other = (_survey(model, graph, scope, train) for scope in scopes)
    _compare(model, graph, scopes[0], train, named=named)
    vertices = scopes[0].own, scopes[1].own
    edges = scopes[0].part.edge_index.size(1), scopes[1].part.edge_index.size(1)
    beyond, by_number = (next(iter(notes), "") for notes in (asked.layers, asked.named))
    return replace(settled(one, other, vertices, edges), beyond=beyond, named=by_number)


def _survey(model: nn.Module, graph: LayerGraph, scope: Interceptor, train: Train) -> Survey:
    # A layer may have added loops: rows of other edges than the graph's have no place in a chunk's.
    kinds = {
        PlacementKind.ROWS: ("rows", scope.own),
        PlacementKind.PAIRS: ("edges", scope.part.edge_index.size(1)),
    }

    def look(value: Any) -> str:
        if not isinstance(value, Tensor):
            return "none"
        mark = scope.marks.get(value)
        if mark is None:
            return "fixed"
        kind, rows = kinds.get(mark.kind, ("none", 0)) if mark.whole else ("none", 0)
        return kind if mark.axis == 0 and value.dim() > 0 and value.size(0) == rows else "none"

    with On(model, scope, train):
        return survey(graph, model, scope.inputs, look=look, draws=lambda: scope.draws)


def _compare(model: nn.Module, graph: LayerGraph, scope: Interceptor, train: Train, *, named: bool) -> None:
    """Refuse steps that do not give what forward gives: notes taken of it can miss what it does."""
    root = type(model).__name__

    @contextmanager
    def on(training: bool) -> Iterator[None]:
        with (
            unmoved(tensors_of(scope.inputs).values()),
            draws_of(train.seed, 0),  # before the forward begins: from then on a new seed is the user's
            On(model, scope, train, training=training),
        ):
            yield

    def before(step: Step) -> None:
        scope.path[:] = [step.within or root]

    hint = "what forward does between layers goes into modules, named in their places in --parallel.layers"
    refuse_unlike(
        *(model, graph, scope.inputs),
        on=on,
        before=before,
        where=lambda: scope.fault,
        hint=hint if named else f"{TRACED}; or {HINT}",
        halved=train.amp == "bf16",
    )


class On(ExitStack):
    """A model with an interception's hooks, in one mode, for a block; afterwards it is as it was.

    Args:
        model: The user's module.
        scope: The interception.
        train: Mixed precision.
        training: The mode.
    """

    def __init__(self, model: nn.Module, scope: Interceptor, train: Train, *, training: bool = True) -> None:
        super().__init__()
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        # What a forward sets on a module, a buffer's name included, goes with it.
        modes = [(module, module.training) for module in model.modules()]
        held = [
            (module, dict(vars(module)), dict(module._buffers))
            for module, _ in modes
            if not isinstance(module, torch.jit.ScriptModule)
        ]

        def restore() -> None:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for module, attributes, named in held:
                _refill(vars(module), attributes)
                _refill(module._buffers, named)
            for module, mode in modes:
                module.training = mode

        self.callback(restore)
        self.callback(apply_rules(model, scope))
        self.callback(install(model, scope))
        generators = [scope.device] if scope.device.type == "cuda" else []
        self.enter_context(torch.random.fork_rng(devices=generators))
        model.train(training)
        self.enter_context(scope.running(0, training=training))
        device = scope.device.type
        self.enter_context(torch.autocast(device, torch.bfloat16) if train.amp == "bf16" else nullcontext())


def _refill(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)
