"""Interceptor: makes a user's model run on one part as if it were the whole graph.

Where it sits: ``components.parallelize`` and ``pipelining.stage_run`` enter it around each forward. It sees
every torch call (a TorchFunctionMode), records placements, supplies halo rows where ids are read, returns
sums where ids are written, and passes statistics, dropout and attention to the handlers of
``model.exact.handlers``.

A *site* is one read of neighbours' rows. Its name is the module path, the argument of ``propagate`` where
there is one, and its number in this forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kagome.comm.exchange import Exchange
from kagome.config import PartialSums, sends_sums
from kagome.deferred import rewrite_rules
from kagome.deferred.deferral import Deferral
from kagome.deferred.lazy_tensor import refuse_in_function, refuse_transform
from kagome.deferred.sliced_reduce import SlicedReads
from kagome.deferred.summed_reads import SummedReads
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.sets_partition import SetsPartition, by_type
from kagome.graph.structure.sparse_adjacency import adjacency_of
from kagome.halo.comm_recorder import RecordedRows
from kagome.halo.exchange import HaloExchange
from kagome.halo.forward_pass import ForwardPass, RunningForward, transformed
from kagome.intercept import sparse_adjacency
from kagome.intercept.batch_rows import FOLLOWED, follow
from kagome.intercept.gather_scatter import HANDLERS, Handler, by_call
from kagome.placement.axis_rules import attribute
from kagome.placement.placement import Placement, PlacementKind, Placements, tensors
from kagome.placement.symbolic_size import Shown, SymbolicSize, behind
from kagome.placement.torch_calls import Args, Kwargs
from kagome.placement.vertex_sets import VertexSet, VertexSets
from kagome.positions import edge_alignment, edge_tables, id_values, vertex_tables
from kagome.positions.kept_tensors import KeptTensors
from kagome.positions.row_copies import RowCopies
from kagome.replay.layer_calls import LayerReplay
from kagome.replay.propagate import PropagateCache
from kagome.replay.recorded_ops import CallRecorder
from kagome.scope.batches import Batches
from kagome.scope.constants import Constants
from kagome.scope.exchanges import NeighborReads, RankSums
from kagome.scope.rows import Axes, VertexIds, refuse_unlike_rows
from kagome.sparse_ops.edge_view import EdgeView, in_view, joined_view
from kagome.user_code import opaque_calls
from kagome.user_code.functional import opened


class Interceptor(TorchFunctionMode):
    """One rank's view of a user's model: it connects the objects that answer the model's torch calls.

    Args:
        part: This rank's part.
        channel: The channel to the other parts.
        device: Where the model runs.
        seed: The run's seed, for random draws.
        handlers: The torch calls that ``model.exact`` answers, by name.
        fast: Whether messages are deferred and reduced by kernels. False runs everything as PyG runs it.
        rows: The provider of halo rows, if it is not an exchange by the part's own lists.
        tensor: How many ranks split feature columns where they can (feature slices). The first ``tensor``
            ranks of the channel are one group, the next another, each with one part of the graph.
        sums_only: Whether only a sample of other parts' rows is read, which is unbiased for sums alone.
        partial_sums: When sums over neighbours are partly taken by the ranks that own the rows.
    """

    reads_of: type[NeighborReads] = NeighborReads
    """The class of its reads."""

    def __init__(
        self,
        part: Partition | SetsPartition,
        channel: Exchange,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        handlers: Mapping[str, Handler] | None = None,
        fast: bool = True,
        rows: HaloExchange | None = None,
        tensor: int = 1,
        sums_only: bool = False,
        partial_sums: PartialSums = "off",
    ) -> None:
        super().__init__()
        self.channel, self.seed = RecordedRows(channel), seed
        # With several sets, the part of the first edge set: what asks for it knows graphs of one set only.
        self.part = part if isinstance(part, Partition) else part.edges[0].part
        self.given_part = part
        self.device, self.size = torch.device(device), channel.size
        self.views, self.sets = _views_and_sets(part, self.channel, self.device, rows)
        ascending = bool((self.sets[0].ids[1:] > self.sets[0].ids[:-1]).all())
        self.own = self.sets[0].own
        """The number of own vertices of the first vertex set."""
        whole = all(each.own == each.size for each in self.sets)
        self.parted = not (ascending and whole) or self.size > 1
        """Whether a position in a tensor of own rows differs from the vertex's number in the whole graph."""
        self.runs_once = self.parted
        """Whether a result is kept where a model would recompute it in backward: see ``torch_checkpoint``."""
        self.within_once = 0
        """The number of nested functions that are running and whose results are kept in this way."""
        self.plain = False
        """Whether forward runs as plain PyG runs it, because the whole graph is local."""
        self.numbered = False
        """Whether forward has distinguished vertices by their positions."""
        sampled = sums_only and self.size > 1
        self._wire(min(tensor, self.size), fast=fast, sums_only=sampled, partial_sums=partial_sums)
        self.edge_tables: edge_tables.EdgeTables | None = None
        matrix = isinstance(part, Partition) and adjacency_of(part.edges) is not None
        self._handlers = by_call(handlers or {}, parted=self.parted, matrix=matrix)
        self.copies, self.keeping = RowCopies(), KeptTensors()
        self.propagate_cache, self.layer_replay = PropagateCache(self), LayerReplay(self)
        self.recorder: CallRecorder | None = None
        self.matrix: sparse_adjacency.Matrix | None = None
        self.inputs = self._inputs()

    def _wire(self, tensor: int, *, fast: bool, sums_only: bool, partial_sums: PartialSums) -> None:
        """Create the objects that handlers and layer rules ask, each from those before it."""
        channel, views = self.channel, self.views
        self.placements = placements = Placements(all_local=not self.parted)
        self.forward = forward = RunningForward(self.device, fast=fast)
        self.where = forward.where
        self.axes = axes = Axes(placements, self.sets, forward)
        last = self.part.last_vertex if isinstance(self.given_part, Partition) else None
        self.ids = VertexIds(self.sets, views, placements, last)
        self.constants = constants = Constants(channel, forward)
        self.batches = Batches(self.sets, views, placements, constants)
        self.ranks = RankSums(channel, forward, axes, views, slices=tensor > 1)
        self.reads = self.reads_of(
            channel, forward, views, self.ids, placements, constants, sums_only=sums_only
        )
        self.sliced = SlicedReads(tensor, channel, forward, constants, self.reads)
        # Views that are added later have as many edges as these.
        large = self.size > 1 and any(sends_sums(partial_sums, view.count) for view in views)
        summed = SummedReads(partial_sums, views, forward, constants) if large else None
        self.deferral = Deferral(views, axes, forward, constants, self.ranks, self.reads, self.sliced, summed)

    # What the model is given ---------------------------------------------------------------------

    def _inputs(self) -> dict[str, Any]:
        """Return all inputs that the model may ask for by name; those without graph rows get no placement."""
        inputs = self._inputs_of_edges()
        single = isinstance(self.given_part, Partition)
        for name, value in self.part.nodes.items() if single else ():
            moved = value.to(self.device)
            inputs[name] = self.placements.put(
                moved if moved is not value else value.view(value.shape), Placement(PlacementKind.ROWS)
            )
        for value in inputs.values():
            self.constants.add(value)
        if not isinstance(self.given_part, Partition):
            return {**inputs, **self._inputs_by_type(self.given_part, inputs)}
        self.matrix = sparse_adjacency.matrix_of(self)
        if self.matrix is not None:
            del inputs[self.matrix.adjacency.name]
            inputs["adj_t"] = self.matrix.given
        # A tensor made with this many rows has one row per vertex of this part.
        count = SymbolicSize(self.own, Placement(PlacementKind.ROWS), lambda: self.sets[0].size)
        given = self.part.shared
        shared = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in given.items()}
        return {"num_nodes": Shown.of(count) if self.parted else count, **shared, **inputs}

    def _inputs_by_type(self, part: SetsPartition, of_edges: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return attributes of several sets by their types; none if forward gets them as arguments."""
        if not part.nodes:
            return {}
        nodes: list[dict[str, Tensor]] = []
        for number, rows in enumerate(part.nodes):
            nodes.append({})
            for name, value in rows.items():
                moved = value.to(self.device)
                placed = moved if moved is not value else value.view(value.shape)
                self.placements.put(placed, Placement(PlacementKind.ROWS, vertex_set=number))
                self.constants.add(placed)
                nodes[number][name] = placed
        edges = [
            {"edge_index": of_edges[view.name], **{k: of_edges[f"{view.name}.{k}"] for k in view.attributes}}
            for view in self.views
        ]
        shared = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in part.shared.items()}
        return {**by_type(part, nodes, edges), **shared}

    def _inputs_of_edges(self) -> dict[str, Any]:
        """Return ``edge_index`` and attributes of edges; of several sets, ``NAME`` and ``NAME.edge_attr``."""
        inputs: dict[str, Any] = {}
        for number, view in enumerate(self.views):
            placement = Placement(PlacementKind.EDGES, number)
            inputs[view.name or "edge_index"] = self.placements.put(view.edge_index, placement)
            for name, value in view.attributes.items():
                placed = Placement(PlacementKind.PAIRS, number, edges=view.edge_index)
                inputs[f"{view.name}.{name}" if view.name else name] = self.placements.put(value, placed)
        return inputs

    def joined_view(self, number: int, *, targets_first: bool) -> int:
        """Return the view of an edge set whose ids count the rows of both its vertex sets, concatenated.

        Args:
            number: The number of the edge set's view.
            targets_first: Whether the rows of the target's set come first.
        """
        view = self.views[number]
        order = (view.targets, view.sources) if targets_first else (view.sources, view.targets)
        rows = self.sets.joined(order)
        known = [at for at, each in enumerate(self.views) if (each.name, each.sources) == (view.name, rows)]
        if not known:
            self.views.append(joined_view(view, self.sets[view.targets], rows, targets_first=targets_first))
            known = [len(self.views) - 1]
            edges = self.views[-1].edge_index
            self.constants.add(self.placements.put(edges, Placement(PlacementKind.EDGES, known[0])))
        return known[0]

    # Forward passes ------------------------------------------------------------------------------

    @contextmanager
    def running(
        self, epoch: int, *, training: bool, checked: bool = False, named: Counter[str] | None = None
    ) -> Iterator[ForwardPass]:
        """Run one forward pass: sites and draws are numbered from the start.

        Args:
            epoch: The epoch, for draws, headers and messages.
            training: Whether a backward will follow.
            checked: Whether to compare headers with the peers at every collective.
            named: How often each site was reached before, in earlier stages on this rank.
        """
        grad = training and torch.is_grad_enabled()
        forward_pass = ForwardPass(epoch, checked=checked, device=self.device, grad=grad, named=named)
        self.forward.begin(forward_pass)
        forward_pass.running = True
        # After an error the lines below do not run; ``begin`` of the next pass resets path, draws and layers.
        with nullcontext() if self.plain else self:
            yield forward_pass
        self.copies.end(self)
        self.keeping.end(self)
        forward_pass.end()
        self.reads.forget()

    # [Note: one torch call] The method below does, in this order:
    #
    #     [1] _for_part   Sizes that user code has seen become this part's, tables are cut to own rows, and
    #                     ids become original numbers where the call looks at their values.
    #     [2] lazy        A rewrite rule keeps the result lazy, or lazy arguments are computed.
    #     [3] _handled    A handler answers: reads and writes by id, statistics, draws.
    #     [4] func        Torch runs the call. An error may mean that a table of all vertices met own rows.
    #                     The table is then cut to own rows, and the call begins again.
    #     [5] spread      The placement of the result follows from those of the arguments.
    #
    # The mode is off inside the method, so torch calls of handlers do not come back to it. ``recorder`` notes
    # each call for layer replay, with the arguments that it was given and those that it ran with.
    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Answer one torch call, or run it; record the placement of the result."""
        if func in rewrite_rules.KNOWN:
            return func(*args)
        kwargs = kwargs or {}
        if transformed():
            refuse_transform(self)
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        asks = rewrite_rules.asks(name, func)
        if self.parted:
            args, kwargs = self._for_part(name, func, args, kwargs, asks=asks)
        recorder, given = self.recorder, (args, kwargs)
        lazy = self.forward.fast and not asks and rewrite_rules.has_lazy(args, kwargs)
        if lazy:
            refuse_in_function(args)
            gone = self.placements.lost(args, kwargs)
            result = (
                NotImplemented if gone else rewrite_rules.answer(self.placements, name, func, args, kwargs)
            )
            if result is not NotImplemented:
                if recorder is not None:
                    rule = partial(rewrite_rules.answer, self.placements, name, func)
                    recorder.answered(rule, given, given, result, asked=False)
                return result
            args = rewrite_rules.computed_for(name, args)
            if name not in rewrite_rules.WRITES:
                kwargs = {key: rewrite_rules.computed(value) for key, value in kwargs.items()}
        result, handler = self._handled(name, func, args, kwargs)
        if handler is not None:
            if recorder is not None:
                rule = partial(handler, self, name, func)
                recorder.answered(rule, given, (args, kwargs), result, asked=asks)
            return result
        if lazy:
            args, kwargs = rewrite_rules.all_computed(args, kwargs)
        if self.matrix is not None and self.parted:
            sparse_adjacency.refuse_unknown(self, name, func, args, kwargs)
        if isinstance(func, FunctionType) and func.__globals__ is vars(functional):
            with self:  # normalize, gumbel_softmax, multi_head_attention_forward: run call by call
                return opened(func)(*args, **kwargs)
        if (
            self.parted
            and any(each.own == 1 for each in self.sets)
            and (met := vertex_tables.met(self, name, args, kwargs)) is not None
        ):
            return self.__torch_function__(func, types, *met)  # torch would broadcast the only row
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            met = vertex_tables.met(self, name, args, kwargs) if self.parted else None
            met = met or (edge_tables.met(self, name, args, kwargs) if self.parted else None)
            if met is None:
                vertex_tables.refuse_unfit(self, name, args, kwargs, error)
                raise
            return self.__torch_function__(func, types, *met)
        if name != "__get__" or isinstance(result, Tensor):
            self.placements.spread(attribute(func) if name == "__get__" else name, args, kwargs, result)
        if recorder is not None:
            recorder.torch_call(func, given, (args, kwargs), result, asked=asks)
        return result

    def _for_part(
        self, name: str, func: Any, args: Any, kwargs: Any, *, asks: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Convert a call's arguments for a part: this part's rows of tables, global numbers for ids."""
        args, kwargs = behind(args), {key: behind(value) for key, value in kwargs.items()} if kwargs else {}
        if self.edge_tables is not None:
            args, kwargs = self.edge_tables.cut(self, name, func, args, kwargs)
        if asks:
            return args, kwargs  # asks about a tensor's properties, not its values
        opaque_calls.refuse_operator(self, func, args, kwargs)
        if self.sets.several:
            refuse_unlike_rows(self, name, args, kwargs)
        # Out-edges have been fetched, so rows of in-edges and of out-edges may meet in one call.
        if self.reads.turned is not None:
            args, kwargs = edge_alignment.aligned(self, name, args, kwargs)
        self.keeping.meet(self, name, func, args, kwargs)
        self.copies.meet(name, args)
        self.placements.write(name, args)
        args, kwargs = id_values.by_value(self, name, args, kwargs)
        if name in vertex_tables.BY_IDS:
            vertex_tables.refuse_lost_ids(self, name, args, kwargs)
        return args, kwargs

    def _handled(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, Handler | None]:
        """Return the answer of the first handler that gives one, and that handler."""
        if name in FOLLOWED and any(each.dtype == torch.int64 for each in tensors(args, kwargs)):
            result = follow(self, name, func, args, kwargs)
            if result is not NotImplemented:
                return result, follow
        for handler in self._handlers.get(name, ()):
            try:
                result = handler(self, name, func, args, kwargs)
            except (RuntimeError, IndexError) as error:
                vertex_tables.refuse_unfit(self, name, args, kwargs, error)
                raise
            if result is not NotImplemented:
                # ``lost.new_zeros(...)`` reads no values of the lost tensor.
                if not name.startswith("new_"):
                    self.placements.stays_lost(name, args, kwargs, result)
                return result, handler
        return None, None

    # What handlers and hooks use -----------------------------------------------------------------

    @property
    def scopes(self) -> Sequence[Interceptor]:
        """The interceptors of this rank: this one alone."""
        return (self,)

    def keeps(self, model: nn.Module) -> None:
        """Find tensors that a model keeps with one row per edge or vertex, so that a part reads its own rows.

        Raises:
            ModelError: If it is unknown which rows a kept tensor holds.
        """
        if self.parted:
            counts = [view.count for view in self.views]
            sizes = [each.size for each in self.sets]
            self.edge_tables = edge_tables.tables_of(model, counts, sizes, self.placements)
            self.keeping.look(self, model, (*sizes, *counts))

    def made(self, name: str, args: Args, kwargs: Kwargs) -> Tensor | None:
        """Return the result of ``torch.zeros`` or the like for a symbolic size; None for any other size."""
        out = HANDLERS[name](self, name, getattr(torch, name), args, kwargs)
        return None if out is NotImplemented else out

    def within(self, function: Callable[[], Any]) -> Any:
        """Run a function with its torch calls intercepted one by one."""
        with self:
            return function()

    @contextmanager
    def run_once(self) -> Iterator[None]:
        """Surround a function that plain PyG would run again in backward."""
        self.within_once += 1
        try:
            yield
        finally:
            self.within_once -= 1


def _views_and_sets(
    part: Partition | SetsPartition, channel: Exchange, device: torch.device, rows: HaloExchange | None
) -> tuple[list[EdgeView], VertexSets]:
    """Return the in-edges of a part, and its vertex sets."""
    if isinstance(part, Partition):
        view = in_view(part, channel, device, rows)
        return [view], VertexSets([VertexSet("", view.ids[: view.rows.own], part.num_nodes)])
    views = [
        in_view(each.part, channel, device, name=each.name, sources=each.source, targets=each.target)
        for each in part.edges
    ]
    given = zip(part.names, part.own, part.sizes, strict=True)
    return views, VertexSets([VertexSet(name, own.to(device), size) for name, own, size in given])
