"""Interceptor: makes a user's model run on one part as if it were the whole graph.

Where it sits: ``train.graph_engine`` enters it around each forward. It sees every torch call (a
TorchFunctionMode), records placements, supplies halo rows where ids are read, returns sums where ids are
written, and passes statistics, dropout and attention to the handlers of ``model.exact.handlers``.

A *site* is one read of neighbours' rows. Its name is the module path, the argument of ``propagate`` where
there is one, and its number in this forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kagome.comm.exchange import Exchange, ExchangeRequest
from kagome.deferred import rewrite_rules
from kagome.deferred.lazy_tensor import refuse_in_function, refuse_transform
from kagome.errors import ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.structure.sparse_adjacency import adjacency_of
from kagome.halo.comm_recorder import RecordedRows
from kagome.halo.exchange import HaloExchange, agree, all_rows, summing, total
from kagome.halo.forward_pass import ForwardPass, transformed
from kagome.intercept import sparse_adjacency
from kagome.intercept.deferral import Deferral
from kagome.intercept.gather_scatter import HANDLERS, Handler, by_call
from kagome.placement.axis_rules import attribute
from kagome.placement.placement import ALIGNED, VERTICES, Placement, PlacementKind, Placements
from kagome.placement.symbolic_size import Shown, SymbolicSize, behind
from kagome.placement.weak_map import WeakTensorMap
from kagome.positions import edge_alignment, edge_tables, id_values, vertex_tables
from kagome.positions.kept_tensors import KeptTensors
from kagome.positions.refusals import length, refused
from kagome.positions.row_copies import RowCopies
from kagome.replay.layer_calls import LayerReplay
from kagome.replay.propagate import PropagateCache
from kagome.replay.recorded_ops import CallRecorder
from kagome.sparse_ops.edge_view import EdgeView, in_view, out_view, pair_ids
from kagome.user_code import opaque_calls
from kagome.user_code.functional import opened
from kagome.user_frame import user_line


class Interceptor(Deferral, TorchFunctionMode):
    """One rank's view of a user's model: sites, placements and the running forward pass.

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
    """

    def __init__(
        self,
        part: Partition,
        channel: Exchange,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        handlers: Mapping[str, Handler] | None = None,
        fast: bool = True,
        rows: HaloExchange | None = None,
        tensor: int = 1,
        sums_only: bool = False,
    ) -> None:
        TorchFunctionMode.__init__(self)
        Deferral.__init__(self, fast, min(tensor, channel.size), sums_only=sums_only and channel.size > 1)
        self.part, self.channel, self.seed = part, RecordedRows(channel), seed
        self.device = torch.device(device)
        self.vertices = part.num_nodes
        self.ascending = bool((part.own[1:] > part.own[:-1]).all())
        self.parted = not self.ascending or part.own.numel() < part.num_nodes or channel.size > 1
        """Whether a position in a tensor of own rows differs from the vertex's number in the whole graph."""
        self.runs_once = self.parted
        """Whether a result is kept where a model would recompute it in backward: see ``torch_checkpoint``."""
        self.within_once = 0
        """How many nested functions are running whose results are kept so."""
        self.aside = False
        """Whether forward runs as plain PyG runs it, because the whole graph is local."""
        self.numbered = False
        """Whether forward has told vertices apart by their positions."""
        self.edge_tables: edge_tables.EdgeTables | None = None
        self.marks = Placements(whole=not self.parted)
        self.views: list[EdgeView] = [in_view(part, self.channel, self.device, rows)]
        self.turn = ForwardPass(0, checked=False, device=self.device, grad=False)
        self.path: list[str] = []
        self.arguments: list[dict[str, Any]] = []
        self.draws = 0
        self.training = False
        self.fault = ""
        matrix = adjacency_of(part.edges) is not None
        self._handlers = by_call(handlers or {}, parted=self.parted, matrix=matrix)
        self._constants: WeakTensorMap[Any] = WeakTensorMap()
        self._edge_keys: WeakTensorMap[Any] = WeakTensorMap()
        self._everyone: HaloExchange | None = None
        self._order = torch.empty(0, dtype=torch.int64)
        self._wholes: WeakTensorMap[Any] = WeakTensorMap()
        self.copies, self.keeping = RowCopies(), KeptTensors()
        self.again, self.calls = PropagateCache(self), LayerReplay(self)
        self.notes: CallRecorder | None = None
        self.matrix: sparse_adjacency.Matrix | None = None
        self.inputs = self._inputs()

    # What the model is given ---------------------------------------------------------------------

    def _inputs(self) -> dict[str, Any]:
        """Return all inputs that the model may ask for by name; those without graph rows get no placement."""
        view = self.views[0]
        given = self.part.shared
        shared = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in given.items()}
        inputs = {"edge_index": self.marks.put(view.edge_index, Placement(PlacementKind.EDGES, 0))}
        for name, value in view.attributes.items():
            inputs[name] = self.marks.put(value, Placement(PlacementKind.PAIRS, 0, edges=view.edge_index))
        for name, value in self.part.nodes.items():
            moved = value.to(self.device)
            inputs[name] = self.marks.put(
                moved if moved is not value else value.view(value.shape), Placement(PlacementKind.ROWS)
            )
        for value in inputs.values():
            self.constants.add(value)
        self.matrix = sparse_adjacency.matrix_of(self)
        if self.matrix is not None:
            del inputs[self.matrix.told.name]
            inputs["adj_t"] = self.matrix.given
        # A tensor made with this many rows has one row per vertex of this part.
        count = SymbolicSize(self.own, Placement(PlacementKind.ROWS), lambda: self.vertices)
        return {"num_nodes": Shown.of(count) if self.parted else count, **shared, **inputs}

    def out_edges(self) -> EdgeView:
        """Return view 1, fetched from the peers at the first call. All ranks make that call together."""
        if len(self.views) == 1:
            with self.turn.asking(self.channel, self.where()):
                view = out_view(self.views[0], self.channel)
            self.views.append(view)
            self.marks.put(view.edge_index, Placement(PlacementKind.EDGES, 1))
            self.marks.put(view.given, Placement(PlacementKind.EDGES, 1, swapped=True))
            for value in view.attributes.values():
                self.marks.put(value, Placement(PlacementKind.PAIRS, 1, edges=view.given))
            for value in (view.edge_index, view.given, *view.attributes.values()):
                self.constants.add(value)
        return self.views[1]

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
        self.turn = ForwardPass(epoch, checked=checked, device=self.device, grad=grad, named=named)
        self.path, self.arguments, self.draws, self.training, self.layers = [], [], 0, training, 0
        self.turn.running = True
        with nullcontext() if self.aside else self:
            yield self.turn
        self.copies.end(self)
        self.keeping.end(self)
        self.turn.end()
        self.forget_reads()

    def where(self) -> str:
        """Return the path of the running module, for names and messages."""
        return self.path[-1] if self.path else "the model's forward"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        notes, given = self.notes, (args, kwargs)
        lazy = self.fast and not asks and rewrite_rules.has_lazy(args, kwargs)
        if lazy:
            refuse_in_function(args)
            gone = self.marks.lost(args, kwargs)
            result = NotImplemented if gone else rewrite_rules.answer(self.marks, name, func, args, kwargs)
            if result is not NotImplemented:
                if notes is not None:
                    rule = partial(rewrite_rules.answer, self.marks, name, func)
                    notes.answered(rule, given, given, result, asked=False)
                return result
            args = rewrite_rules.computed_for(name, args)
            if name not in rewrite_rules.WRITES:
                kwargs = {key: rewrite_rules.computed(value) for key, value in kwargs.items()}
        result, handler = self._handled(name, func, args, kwargs)
        if handler is not None:
            if notes is not None:
                rule = partial(handler, self, name, func)
                notes.answered(rule, given, (args, kwargs), result, asked=asks)
            return result
        if lazy:
            args, kwargs = rewrite_rules.all_computed(args, kwargs)
        if self.matrix is not None and self.parted:
            sparse_adjacency.refuse_unknown(self, name, func, args, kwargs)
        if isinstance(func, FunctionType) and func.__globals__ is vars(functional):
            with self:  # normalize, gumbel_softmax, multi_head_attention_forward: run call by call
                return opened(func)(*args, **kwargs)
        if self.parted and self.own == 1 and (met := vertex_tables.met(self, name, args, kwargs)) is not None:
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
            self.marks.spread(attribute(func) if name == "__get__" else name, args, kwargs, result)
        if notes is not None:
            notes.torch_call(func, given, (args, kwargs), result, asked=asks)
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
        if len(self.views) > 1:
            args, kwargs = edge_alignment.aligned(self, name, args, kwargs)
        self.keeping.meet(self, name, func, args, kwargs)
        self.copies.meet(name, args)
        self.marks.write(name, args)
        args, kwargs = id_values.by_value(self, name, args, kwargs)
        if name in vertex_tables.BY_IDS:
            vertex_tables.refuse_lost_ids(self, name, args, kwargs)
        return args, kwargs

    def _handled(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, Handler | None]:
        """Return the answer of the first handler that gives one, and that handler."""
        for handler in self._handlers.get(name, ()):
            try:
                result = handler(self, name, func, args, kwargs)
            except (RuntimeError, IndexError) as error:
                vertex_tables.refuse_unfit(self, name, args, kwargs, error)
                raise
            if result is not NotImplemented:
                if not name.startswith("new_"):
                    self.marks.stays_lost(name, args, kwargs, result)
                return result, handler
        return None, None

    # What handlers use (the scope of model.exact) ------------------------------------------------

    @property
    def size(self) -> int:
        """Number of ranks that share the graph."""
        return self.channel.size

    @property
    def own(self) -> int:
        """Number of vertices that this rank owns."""
        return self.views[0].rows.own

    @property
    def edges(self) -> int:
        """Number of edges of the whole graph."""
        return self.part.num_edges

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
            self.edge_tables = edge_tables.tables_of(model, self.edges, self.vertices)
            self.keeping.look(self, model, (self.vertices, self.edges))

    @property
    def checked(self) -> bool:
        """Whether this forward compares headers between ranks."""
        return self.turn.checked

    @property
    def epoch(self) -> int:
        """The epoch of the running forward pass."""
        return self.turn.epoch

    def axis(self, tensor: Any) -> int | None:
        """Return the axis along which a tensor has one row per vertex or edge; None if it has none."""
        mark = self.marks.get(tensor)
        return mark.axis if mark is not None and mark.kind in ALIGNED else None

    def counts(self, value: Any) -> bool:
        """Return True if a value has one row per vertex or edge, or is a count of such rows."""
        return isinstance(value, SymbolicSize) or self.axis(value) is not None

    def of_vertices(self, tensor: Any) -> bool:
        """Return True if a tensor has one row per vertex."""
        mark = self.marks.get(tensor)
        return mark is not None and mark.kind in VERTICES

    def of_each_vertex(self, tensor: Any) -> bool:
        """Return True if a tensor has one row for each own vertex."""
        mark = self.marks.get(tensor)
        return mark is not None and mark.kind in VERTICES and mark.whole

    def vertices_counted(self, value: Any) -> int | None:
        """Return the whole graph's vertex count if a value is the count of own vertices; else None."""
        counted = (
            isinstance(value, SymbolicSize) and value.mark.kind is PlacementKind.ROWS and value.mark.whole
        )
        return self.vertices if counted else None

    def like(self, out: Tensor, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Give ``out`` the placement of ``tensor``, along another axis if one is given."""
        mark = self.marks.get(tensor)
        if mark is not None and axis is not None:
            mark = mark.along(axis)
        if mark is not None and mark.kind is PlacementKind.NUMBERS:
            mark = replace(mark, kind=PlacementKind.ROWS)
        return self.marks.put(out, mark)

    def total(self, part: Tensor, what: str = "total") -> Tensor:
        """Return the sum over all ranks, with gradient."""
        return total(part, self.turn, self.channel, self.where(), what)

    def summing(
        self,
        there: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        back: Callable[..., tuple[Tensor | None, ...]],
        inputs: tuple[Tensor | None, ...],
        what: str,
    ) -> Tensor:
        """Call a function that sums over ranks, forward and backward: see ``halo.exchange.summing``."""
        return summing(there, back, inputs, self.turn, self.channel, f"{self.where()}.{what}")

    def loose(self) -> str:
        """Return why rows are not exchanged exactly in this epoch; an empty string if they are."""
        if self.slices:
            return "feature slices"
        if self.channel.runs:
            return "layers that run again in backward"
        return "" if self.channel.exact else "chunks, codecs, or rows that are late or drawn"

    def greatest(self, part: Tensor) -> Tensor:
        """Return the maximum over all ranks, without gradient."""
        if self.size == 1:
            return part
        site = self.turn.begin(self.where())
        agree(self.channel, site, part)
        action, key = site.action("greatest"), (site.key, "greatest")
        return self.channel.all_reduce(part.detach(), "max", action=action, key=key)

    def knows_number(self, mark: Placement) -> bool:
        """Return True if the total number of rows of a placement is known without asking the other ranks."""
        if mark.kind in VERTICES:
            return length(self, mark) >= 0
        return mark.kind is PlacementKind.PAIRS and mark.edges is self.views[0].edge_index

    def number_of(self, mark: Placement, count: int) -> int:
        """Return how many rows all ranks have together, ``count`` of them on this rank."""
        if self.knows_number(mark):
            return length(self, mark) if mark.kind in VERTICES else self.edges
        if self.size == 1:
            return count
        return int(self.total(torch.tensor(count, device=self.device)))

    def unknown_ids(self, ids: Tensor) -> Tensor:
        """Mark ids as meaningless on a part, so that reads by them are refused."""
        return self.marks.put(ids, Placement(PlacementKind.MIXED))

    def made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return what ``torch.zeros`` or the like gives for a counted number of rows; else None."""
        out = HANDLERS[name](self, name, getattr(torch, name), args, kwargs)
        return None if out is NotImplemented else out

    def call(self) -> tuple[str, int]:
        """Return the running module's path and the number of this draw within the forward."""
        self.turn.refuse_again(self.where())
        self.draws += 1
        return self.where(), self.draws

    def pair_words(self, tensor: Tensor, word: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor | None:
        """Return ``word(source, target, copy)`` per row of an edge tensor, by original ids, if known."""
        mark = self.marks.get(tensor)
        edges = mark.edges if mark is not None else None
        if edges is None:
            return None
        if edges not in self._edge_keys:
            ends = self.marks.get(edges)
            assert ends is not None
            view = self.views[ends.view]
            source, target = (edges[1], edges[0]) if ends.swapped else (edges[0], edges[1])
            # A word names the graph's own edge, whichever direction messages run along it.
            first, second = view.ids[source], view.ids[target]
            first, second = (second, first) if ends.view == 1 else (first, second)
            with torch._C.DisableTorchFunction():
                self._edge_keys[edges] = word(first, second, pair_ids(first, second))
        words: Tensor = self._edge_keys[edges]
        return words if words.numel() == tensor.size(mark.axis if mark is not None else 0) else None

    def everyone(self, rows: Tensor, *, ordered: bool = True) -> Tensor:
        """Return the rows of all ranks, with gradient: in the graph's order, or own rows first."""
        self.needs_all("attention over all vertices")
        whole = self.knows_everyone().extend(rows, self.turn, self.where())
        return whole.index_select(0, self._order) if ordered else whole

    def knows_everyone(self) -> HaloExchange:
        """Return the lists by which every rank reads all others' rows. All ranks first call it together."""
        if self._everyone is None:
            with self.turn.asking(self.channel, self.where()):
                self._everyone = all_rows(self.row_ids(), self.channel)
                assert self._everyone.ids is not None
                self._order = self._everyone.ids.argsort()
        return self._everyone

    def goes_beyond(self, what: str) -> None:
        """Report, where all rows are local, a read that goes beyond a vertex's in-edges."""
        none = torch.empty(0, 1, device=self.device)
        self.channel.start(none, ExchangeRequest([0], [0], what, "other"))  # observers of the channel see it

    @contextmanager
    def run_once(self) -> Iterator[None]:
        """Surround a function that plain PyG would run again in backward."""
        self.within_once += 1
        try:
            yield
        finally:
            self.within_once -= 1

    def within(self, function: Callable[[], Any]) -> Any:
        """Run a function with its torch calls intercepted one by one."""
        with self:
            return function()

    def lost(self, tensor: Tensor, origin: str) -> Tensor:
        """Mark a tensor as lost: no part has it. Anything made from it is refused where it leaves forward."""
        return self.marks.put(
            tensor, Placement(PlacementKind.LOST, origin=f"{origin} ({user_line() or 'a library'})")
        )

    def as_targets(self, index: Tensor) -> Tensor:
        """Record that a tensor holds ids of own rows."""
        return self.marks.put(index, Placement(PlacementKind.TARGET))

    @property
    def last_vertex(self) -> int:
        """Number of the last vertex of the whole graph that has an edge."""
        return self.part.last_vertex

    def last_row(self) -> int:
        """Count own vertices up to the last one of the whole graph that has an edge."""
        return int((self.row_ids() <= self.part.last_vertex).sum())

    def row_ids(self) -> Tensor:
        """Return the original ids of own rows."""
        return self.views[0].ids[: self.own]

    def ids_in(self, mark: Placement) -> Tensor:
        """Return the original ids of own and halo rows, in the order of the part's ids."""
        return self.views[mark.view].ids

    def ids_of(self, mark: Placement) -> Tensor:
        """Return the original ids of the vertices that a tensor has rows for, one each."""
        with torch._C.DisableTorchFunction():
            ids = self.row_ids()
            return ids if mark.subset is None else ids[mark.subset.places()]

    def words_of(self, tensor: Tensor) -> Tensor:
        """Return one number per entry along the row axis, equal on any ranks: vertex and its entry.

        Shapes:
            ``[k]``.
        """
        mark = self.marks.get(tensor)
        assert mark is not None
        ids = self.ids_of(mark)
        if mark.each == 1:
            return ids
        with torch._C.DisableTorchFunction():
            return (ids[:, None] * mark.each + torch.arange(mark.each, device=ids.device)).view(-1)

    def local_of(self, ids: Tensor) -> Tensor:
        """Return the local positions of own vertices. Shapes: any, kept."""
        with torch._C.DisableTorchFunction():
            own = self.row_ids()
            if self.ascending:
                return torch.searchsorted(own, ids.contiguous())
            order = own.argsort()
            return order[torch.searchsorted(own[order], ids.contiguous())]

    # Reading and writing by id -------------------------------------------------------------------

    def read(self, rows: Tensor, axis: int, mark: Placement, site: str = "") -> Tensor:
        """Return own and halo rows along ``axis``: all rows that ids of this placement can name.

        Rows that need no gradient and do not change are exchanged once. Others are exchanged once per layer.
        """
        plan = self.views[mark.view].rows
        if plan.closed or rows.dim() == 0 or rows.size(axis) != plan.own:
            return rows
        if axis == 0 and (held := self.held(rows, mark)) is not None:
            return held
        constant = not rows.requires_grad
        known = self._constants.get(rows) if constant else None
        there = known is not None and known[:2] == (rows._version, mark.view)
        if constant and self.channel.same("rows that do not change", there):
            return known[2]  # type: ignore[index, no-any-return]
        front = rows.movedim(axis, 0)
        flat = front.reshape(front.size(0), front.shape[1:].numel())
        # Rows made anew in each forward (dropped features) are exchanged again, though they need no gradient.
        with self.turn.apart() if constant and self.lasting(rows) else nullcontext():
            whole = plan.extend(flat, self.turn, site or self.site(rows))
        out = whole.reshape(whole.size(0), *front.shape[1:]).movedim(0, axis)
        if constant:
            self._constants[rows] = (rows._version, mark.view, known[2] if known and there else out)
        elif self.fast and axis == 0:
            self._wholes[rows] = (rows._version, mark.view, torch.is_grad_enabled(), out)
        return out

    def held(self, rows: Tensor, mark: Placement) -> Tensor | None:
        """Return own and halo rows if this layer has read them before; else None."""
        version, view, grad, out = self._wholes.get(rows, (None, None, None, None))
        same = version == rows._version and view == mark.view and grad == torch.is_grad_enabled()
        return out if same else None

    def forget_reads(self) -> None:
        """Drop the rows that the layer has read, because the layer has ended."""
        self._wholes.clear()
        self._parts.clear()

    def forget_kept(self) -> None:
        """Drop everything computed or read from constant tensors."""
        self.remembered.clear()
        self._constants.clear()

    def mark(self, tensor: Tensor, mark: Placement) -> Tensor:
        """Record the placement of a tensor."""
        return self.marks.put(tensor, mark)

    def write(self, sums: Tensor, axis: int, mark: Placement) -> Tensor:
        """Reduce sums on own and halo rows along ``axis`` to sums on own rows."""
        plan = self.views[mark.view].rows
        front = sums.movedim(axis, 0)
        flat = front.reshape(front.size(0), front.shape[1:].numel())
        own = plan.give_back(flat, self.turn, self.site(sums))
        return own.reshape(own.size(0), *front.shape[1:]).movedim(0, axis)

    def site(self, rows: Tensor) -> str:
        """Return the site name of a read: module path and, inside propagate, the argument's name."""
        for arguments in reversed(self.arguments):
            for name, value in arguments.items():
                if value is rows or (isinstance(value, (tuple, list)) and any(v is rows for v in value)):
                    return f"{self.where()}.{name}"
        return self.where()

    def refuse_draw(self, name: str, why: str) -> ModelError:
        """Return the error for a draw of rows that would differ between ranks."""
        return refused(
            self,
            f"{name} draws random numbers that are not made exact: {why}",
            hint="draw a row a vertex or a row an edge (torch.rand(x.size(0), k), torch.rand_like(x))",
            asked="what a model draws for vertices and edges is the same on any ranks",
        )
