"""Step shapes: a survey of the values of each step of a model, made on small samples of a graph.

Where it sits: ``pipelining.staging`` asks before it cuts a model. ``step_times`` runs its samples under the
same context.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest, Op
from kagome.comm.work import ChannelWork
from kagome.components.parallelize import ParallelModel, PartOptions, interceptor_of
from kagome.components.task import draws_of, unmoved
from kagome.graph.partition.partition import Partition, partition
from kagome.graph.structure.attributes import tensors_of
from kagome.halo.exchange import is_named
from kagome.intercept.interceptor import Interceptor
from kagome.model.trace.equivalence import TRACED, refuse_unlike
from kagome.model.trace.graph import LayerGraph, Step
from kagome.model.trace.shapes import Survey, settled, survey
from kagome.model.trace.tracer import HINT
from kagome.placement.placement import Placement, PlacementKind
from kagome.profile.subgraph import sample_part, take_sample
from kagome.scope.exchanges import NeighborReads
from kagome.user_frame import user_line

SAMPLE: Final = 48
"""Vertices of the larger sample; a second one of half the size shows which axes grow with the vertices."""


class Asked(Channel):
    """A channel of a rank without peers, which notes the layers that read beyond a vertex's in-edges.

    Args:
        device: The device that the model runs on.
        parted: Whether it is one rank of two, of which the other has no rows and sends nothing.
        exact: Whether a run exchanges rows unchanged and in the same epoch.

    Attributes:
        layers: The layers that read along reversed edges, or read all vertices.
        named: The layers that read rows of vertices that forward names by number.
    """

    def __init__(self, device: torch.device, *, parted: bool = False, exact: bool = True) -> None:
        # No process group. NeighborReads asks for `exact`, as it asks the exchange of a run.
        super().__init__(None, device)
        self.exact = exact
        # Set to the interceptor's `where` once there is one; str() is "" until then.
        self.where: Callable[[], str] = str
        self.layers: list[str] = []
        self.named: list[str] = []
        self.size = 2 if parted else 1

    def note(self, layer: str, notes: list[str] | None = None) -> None:
        """Note a layer together with the user's line that calls it."""
        (self.layers if notes is None else notes).append("; ".join(filter(None, (layer, user_line()))))

    def start(self, rows: Tensor, request: ExchangeRequest) -> ChannelWork:
        """Return the rows that the rank sends to itself, and zeros in place of those from the other rank.

        An exchange that is no site's is that of a layer which reads beyond its in-edges, and is noted.
        """
        if request.site is None:
            self.note(self.where())
        rows = request.selected(rows)
        # send_counts and recv_counts are by peer; peer 0 is this rank. The other rank has no rows to send, so
        # what it would send is zeros of the right shape.
        own, theirs = rows[: request.send_counts[0]], sum(request.recv_counts[1:])
        come = rows.new_zeros(theirs, *rows.shape[1:])
        return ChannelWork(torch.cat([own, come]), self, request.action, request.kind)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, key: Hashable = None, **rest: Any) -> Tensor:
        """Return this rank's own share, and note the layer if it reads vertices named by number."""
        # A read of vertices by number is an all-reduce of a table in which each rank fills its own rows.
        if is_named(key):
            self.note(self.where(), self.named)
        return tensor.detach().clone()


class _NotedReads(NeighborReads):
    """The reads of a sample of a graph, on a channel of type :class:`Asked`."""

    def write(self, sums: Tensor, axis: int, placement: Placement) -> Tensor:
        """Write as the reads of a part does, and note the layer: it reads along reversed edges."""
        if isinstance(self._channel.channel, Asked):
            self._channel.channel.note(self._forward.where())
        return super().write(sums, axis, placement)


class ShapeSample(Interceptor):
    """An interceptor of a sample of a graph."""

    reads_of = _NotedReads


def on_sample(
    model: nn.Module, part: Partition, vertices: int, options: PartOptions, channel: Asked
) -> ParallelModel:
    """Make a model run on a sample of a rank's part, without peers.

    Args:
        model: The user's module.
        part: The part to take the sample from.
        vertices: The number of vertices of the sample.
        options: How the model runs on it.
        channel: The channel. Its size is 1 for a sample that is a graph by itself, and 2 for one that stands
            for a part of the graph, as chunks do.
    """
    # A sample with peers keeps the numbers of the whole graph; a sample by itself is renumbered as a graph.
    if channel.size > 1:
        piece = sample_part(part, vertices, options.seed)
    else:
        piece = partition(take_sample(part, vertices, options.seed), parts=1, method="contiguous")[0]
    return ParallelModel(model, interceptor_of(piece, channel, options, kind=ShapeSample), options)


def survey_on_sample(
    model: nn.Module,
    graph: LayerGraph,
    part: Partition,
    options: PartOptions,
    *,
    named: bool = False,
    parted: bool = False,
    exact: bool = True,
) -> Survey:
    """Survey the shape, dtype and kind of each step's value.

    A value has a row for each vertex or edge if its placement says so. Torch calls that Kagome has no rule
    for set no placement; then the size of the first axis in two samples decides.

    Args:
        model: The user's module.
        graph: The steps of the model.
        part: The part to take samples from.
        options: How the model runs on samples, which it does without fast paths here.
        named: Whether the user named the layers.
        parted: Whether stages run on parts of the graph.
        exact: Whether rows of other parts are exchanged unchanged and in the same epoch.

    Raises:
        ModelError: If a step fails, with its line, or if the steps give another output than forward.

    Cost:
        Two forwards of a sample, and two more in training and in evaluation mode each.
    """
    # Without fast paths, since a deferred message has no shape of its own until it is computed.
    asked, options = Asked(options.device, parted=parted, exact=exact), replace(options, fast=False)
    # Both samples must be smaller than the graph, else they cannot be parts of it.
    first = min(SAMPLE, max(1, part.num_nodes - 1)) if parted else SAMPLE
    nets = [on_sample(model, part, vertices, options, asked) for vertices in (first, first // 2)]
    asked.where = nets[0].scope.where
    one, other = (_survey(graph, net) for net in nets)
    _compare(graph, nets[0], named=named)
    vertices = nets[0].scope.own, nets[1].scope.own
    edges = nets[0].scope.part.edge_index.size(1), nets[1].scope.part.edge_index.size(1)
    beyond, by_number = (next(iter(notes), "") for notes in (asked.layers, asked.named))
    # A value of unknown placement with 48 rows in one sample and 24 in the other is one of vertices.
    return replace(settled(one, other, vertices, edges), beyond=beyond, named=by_number)


def _survey(graph: LayerGraph, net: ParallelModel) -> Survey:
    scope = net.scope
    # A layer may have added self-loops: rows of edges that are not the graph's cannot be cut into chunks.
    kinds = {
        PlacementKind.ROWS: ("rows", scope.own),
        PlacementKind.PAIRS: ("edges", scope.part.edge_index.size(1)),
    }

    def look(value: Any) -> str:
        if not isinstance(value, Tensor):
            return "none"
        placement = scope.placements.get(value)
        # Unknown: `settled` compares both samples. A value with a placement that no stage can send is "none".
        if placement is None:
            return "fixed"
        kind, rows = kinds.get(placement.kind, ("none", 0)) if placement.is_complete else ("none", 0)
        return kind if placement.axis == 0 and value.dim() > 0 and value.size(0) == rows else "none"

    with one_pass(net):
        return survey(graph, net.model, scope.inputs, look=look, draws=lambda: scope.forward.draws)


def _compare(graph: LayerGraph, net: ParallelModel, *, named: bool) -> None:
    """Refuse a model whose traced steps give another output than its forward: a trace can miss things."""
    model, scope = net.model, net.scope
    root = type(model).__name__

    @contextmanager
    def on(training: bool) -> Iterator[None]:
        with (
            unmoved(tensors_of(scope.inputs).values()),
            # Trace and forward must draw the same dropout masks to be compared.
            draws_of(net.options.seed, 0),  # before the forward, in which the user may set another seed
            one_pass(net, training=training),
        ):
            yield

    def before(step: Step) -> None:
        # A function's step runs outside of the module that calls it, whose path draws and errors depend on.
        scope.forward.path[:] = [step.within or root]

    hint = "what forward does between layers goes into modules, named in their places in --parallel.layers"
    refuse_unlike(
        model,
        graph,
        scope.inputs,
        on=on,
        before=before,
        where=lambda: scope.forward.fault,
        hint=hint if named else f"{TRACED}; or {HINT}",
        halved=net.options.amp,
    )


@contextmanager
def one_pass(net: ParallelModel, *, training: bool = True) -> Iterator[None]:
    """Enter one forward pass of a model, with its hooks and one mode; the model is restored afterwards.

    Args:
        net: The model on a part.
        training: Whether the model is in training mode.
    """
    # fork_rng without devices would copy the state of every CUDA device.
    generators = [net.scope.device] if net.scope.device.type == "cuda" else []
    with _restored(net.model), net, torch.random.fork_rng(devices=generators):
        net.model.train(training)
        with net.running(0, training=training):
            yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes and modes after a block, and remove what a forward sets on a module."""
    modes = [(module, module.training) for module in model.modules()]
    held = [
        (module, dict(vars(module)), dict(module._buffers))
        for module, _ in modes
        # Attributes of a scripted module live in C++, not in its __dict__.
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        with unmoved(model.buffers()):
            yield
    finally:
        for module, attributes, named in held:
            # In place, because others may hold the dict itself. A forward may replace attributes (caches,
            # counters) as well as add them.
            _refill(vars(module), attributes)
            _refill(module._buffers, named)
        for module, mode in modes:
            module.training = mode


def _refill(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)
