"""Interception: a user's model runs on one part as if it were the whole graph.

Where it sits: ``run.engine`` enters it around each forward. It sees every torch call (a TorchFunctionMode),
keeps their marks, supplies halo rows where ids are read, returns sums where ids are written, and hands
statistics, dropout and attention to the handlers of ``model.exact``.

A *site* is one read of neighbours' rows: its name is the module path, the argument of ``propagate`` where
there is one, and its number in this forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn import MessagePassing

from kagome.errors import ModelError
from kagome.graph.partition import Partition
from kagome.neighbors.marks import ALIGNED, IDS, Kind, Mark, Marks
from kagome.neighbors.rows import Carrier, NeighborRows, Turn, agree, all_rows, total
from kagome.neighbors.view import View, in_view, out_view, pair_ids

Handler = Callable[["Interception", str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""A handler answers a torch call itself, or returns NotImplemented to let it run as it is."""


class Interception(TorchFunctionMode):
    """One rank's view of a user's model: sites, marks and the turn that is running.

    Args:
        part: This rank's part.
        channel: The way to the other parts.
        device: Where the model runs.
        seed: The run's seed, for draws.
        handlers: Torch calls by name that ``model.exact`` answers.
    """

    def __init__(
        self,
        part: Partition,
        channel: Carrier,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        super().__init__()
        self.part, self.channel, self.seed = part, channel, seed
        self.device = torch.device(device)
        self.marks = Marks()
        self.views: list[View] = [in_view(part, channel, self.device)]
        self.turn = Turn(0, checked=False, device=self.device, grad=False)
        self.path: list[str] = []
        self.arguments: list[dict[str, Any]] = []
        self.draws = 0
        self.training = False
        self.fault = ""
        self._handlers: dict[str, list[Handler]] = {}
        for table in (_HANDLERS, handlers or {}):
            for name, handler in table.items():
                self._handlers.setdefault(name, []).append(handler)
        self._constants: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._edge_keys: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._everyone: NeighborRows | None = None
        self.inputs = self._inputs()

    # What the model is given ---------------------------------------------------------------------

    def _inputs(self) -> dict[str, Tensor]:
        view = self.views[0]
        inputs = {"edge_index": self.marks.put(view.edge_index, Mark(Kind.EDGES, 0))}
        for name, value in view.attributes.items():
            inputs[name] = self.marks.put(value, Mark(Kind.PAIRS, 0, edges=view.edge_index))
        for name, value in self.part.nodes.items():
            moved = value.to(self.device)
            inputs[name] = self.marks.put(
                moved if moved is not value else value.view(value.shape), Mark(Kind.ROWS)
            )
        return inputs

    def out_edges(self) -> View:
        """View 1, fetched from the peers at the first call. All ranks reach it at the same call."""
        if len(self.views) == 1:
            with torch._C.DisableTorchFunction():  # it is not the user's computation
                view = out_view(self.views[0], self.channel)
            self.views.append(view)
            self.marks.put(view.edge_index, Mark(Kind.EDGES, 1))
            self.marks.put(view.given, Mark(Kind.EDGES, 1, swapped=True))
            for value in view.attributes.values():
                self.marks.put(value, Mark(Kind.PAIRS, 1, edges=view.given))
        return self.views[1]

    # Turns ---------------------------------------------------------------------------------------

    @contextmanager
    def running(self, epoch: int, *, training: bool, checked: bool = False) -> Iterator[Turn]:
        """One forward: sites are numbered anew, draws too.

        Args:
            epoch: For draws, headers and messages.
            training: Whether a backward will follow.
            checked: Compare headers with the peers at every collective.
        """
        grad = training and torch.is_grad_enabled()
        self.turn = Turn(epoch, checked=checked, device=self.device, grad=grad)
        self.path, self.arguments, self.draws, self.training = [], [], 0, training
        with self:
            yield self.turn
        self.turn.over = True

    def where(self) -> str:
        """The module that is running, for names and messages."""
        return self.path[-1] if self.path else "the model's forward"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer one torch call, or run it; mark what comes out."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        for handler in self._handlers.get(name, ()):
            result = handler(self, name, func, args, kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if name != "__get__" or isinstance(result, Tensor):
            self.marks.spread(_attribute(func) if name == "__get__" else name, args, kwargs, result)
        return result

    # What handlers use (the scope of model.exact) ------------------------------------------------

    @property
    def size(self) -> int:
        """Ranks that share the graph."""
        return self.channel.size

    @property
    def own(self) -> int:
        """Own rows."""
        return self.views[0].rows.own

    @property
    def epoch(self) -> int:
        """The epoch of the running turn."""
        return self.turn.epoch

    def axis(self, tensor: Any) -> int | None:
        """The axis along which a tensor has a row a vertex or an edge; None where it has none."""
        mark = self.marks.get(tensor)
        return mark.axis if mark is not None and mark.kind in ALIGNED else None

    def of_vertices(self, tensor: Any) -> bool:
        """Whether a tensor has a row a vertex."""
        mark = self.marks.get(tensor)
        return mark is not None and mark.kind is Kind.ROWS

    def like(self, out: Tensor, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Give ``out`` the mark of ``tensor``, if need be along another axis."""
        mark = self.marks.get(tensor)
        if mark is not None and axis is not None:
            mark = Mark(mark.kind, mark.view, axis, mark.edges, mark.swapped)
        return self.marks.put(out, mark)

    def total(self, part: Tensor) -> Tensor:
        """Sum over all ranks, with gradient."""
        return total(part, self.turn, self.channel, self.where())

    def greatest(self, part: Tensor) -> Tensor:
        """Maximum over all ranks, without gradient."""
        if self.size == 1:
            return part
        site = self.turn.begin(self.where())
        agree(self.channel, site, part)
        return self.channel.all_reduce(part.detach(), "max", action=site.action("greatest"))

    def call(self) -> tuple[str, int]:
        """The running module's path and the number of this draw within the forward."""
        self.draws += 1
        return self.where(), self.draws

    def pair_words(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """(source, target, copy) of each row of an edge tensor, in original ids; None where not known."""
        mark = self.marks.get(tensor)
        edges = mark.edges if mark is not None else None
        if edges is None:
            return None
        if edges not in self._edge_keys:
            ends = self.marks.get(edges)
            assert ends is not None
            view = self.views[ends.view]
            source, target = (edges[1], edges[0]) if ends.swapped else (edges[0], edges[1])
            # A word names the graph's own edge, whichever way messages run along it.
            first, second = view.ids[source], view.ids[target]
            first, second = (second, first) if ends.view == 1 else (first, second)
            self._edge_keys[edges] = (first, second, pair_ids(first, second))
        words: tuple[Tensor, Tensor, Tensor] = self._edge_keys[edges]
        return words if words[0].numel() == tensor.size(mark.axis if mark is not None else 0) else None

    def everyone(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, own ones first, with gradient."""
        if self._everyone is None:
            with torch._C.DisableTorchFunction():
                self._everyone = all_rows(self.own, self.channel)
        return self._everyone.extend(rows, self.turn, self.where())

    def is_input(self, value: Any) -> bool:
        """Whether a tensor is one that the model was given (or the same edges turned round)."""
        given = (*self.inputs.values(), *(t for v in self.views[1:] for t in (v.edge_index, v.given)))
        return any(value is one for one in given) or any(
            value is a for v in self.views for a in v.attributes.values()
        )

    @contextmanager
    def constants(self) -> Iterator[None]:
        """What runs inside needs no gradient and is computed once."""
        turn, grad = self.turn, self.turn.grad
        turn.grad = False
        try:
            with torch.no_grad():
                yield
        finally:
            turn.grad = grad

    def as_targets(self, index: Tensor) -> Tensor:
        """Say that a tensor holds ids of own rows."""
        return self.marks.put(index, Mark(Kind.TARGET))

    def last_row(self) -> int:
        """Own vertices up to the last one of the whole graph that has an edge."""
        return int((self.row_ids() <= self.part.last_vertex).sum())

    def row_ids(self) -> Tensor:
        """Original ids of own rows."""
        return self.views[0].ids[: self.own]

    # Reading and writing by id -------------------------------------------------------------------

    def read(self, rows: Tensor, axis: int, mark: Mark) -> Tensor:
        """All rows that the ids of ``mark`` can name: own and halo rows along ``axis``.

        Rows that need no gradient and do not change are exchanged once.
        """
        plan = self.views[mark.view].rows
        if self.size == 1 or rows.dim() == 0 or rows.size(axis) != plan.own:
            return rows
        constant = not rows.requires_grad
        if constant and rows in self._constants:
            version, view, kept = self._constants[rows]
            if version == rows._version and view == mark.view:
                return kept  # type: ignore[no-any-return]
        front = rows.movedim(axis, 0)
        flat = front.reshape(front.size(0), _width(front))
        whole = plan.extend(flat, self.turn, self.site(rows))
        out = whole.reshape(whole.size(0), *front.shape[1:]).movedim(0, axis)
        if constant:
            self._constants[rows] = (rows._version, mark.view, out)
        return out

    def write(self, sums: Tensor, axis: int, mark: Mark) -> Tensor:
        """Sums on own and halo rows along ``axis`` -> sums on own rows."""
        plan = self.views[mark.view].rows
        front = sums.movedim(axis, 0)
        flat = front.reshape(front.size(0), _width(front))
        own = plan.give_back(flat, self.turn, self.site(sums))
        return own.reshape(own.size(0), *front.shape[1:]).movedim(0, axis)

    def site(self, rows: Tensor) -> str:
        """Module path and, inside propagate, the argument's name."""
        for arguments in reversed(self.arguments):
            for name, value in arguments.items():
                if value is rows or (isinstance(value, (tuple, list)) and any(v is rows for v in value)):
                    return f"{self.where()}.{name}"
        return self.where()

    def refuse(self, what: str) -> ModelError:
        """The error for ids of which it is no longer known what they name."""
        return ModelError(
            "every read of neighbours' rows goes by ids from edge_index",
            f"{what} uses ids that were computed from them (an edge list rebuilt inside forward)",
            where=self.where(),
            hint="rebuild the edges before training (data.edge_index), not inside forward",
        )


def _width(front: Tensor) -> int:
    width = 1
    for size in front.shape[1:]:
        width *= size
    return width


def _attribute(func: Any) -> str:
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", "__get__"))


# Handlers ----------------------------------------------------------------------------------------


def _gather(scope: Interception, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[row]`` and ``x.index_select(dim, row)``: by source ids they read halo rows as well."""
    base: Tensor = args[0]
    index: Any = args[1] if len(args) > 1 else None
    axis, rest = 0, ()
    if name == "__getitem__":
        if isinstance(index, tuple) and index and isinstance(index[0], Tensor):
            index, rest = index[0], index[1:]
    else:
        axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        index = kwargs.get("index", args[2] if len(args) > 2 else None)
    mark = scope.marks.get(index)
    held = scope.marks.get(base)
    if mark is None or index.dtype == torch.bool or (held is not None and held.kind in IDS):
        return NotImplemented
    axis = axis % max(base.dim(), 1)
    if mark.kind is Kind.MIXED:
        raise scope.refuse("indexing")
    if mark.kind in (Kind.SOURCE, Kind.EDGES):
        base = scope.read(base, axis, mark)
    if name == "__getitem__":
        out = func(base, (index, *rest) if rest else index, **kwargs)
    else:
        out = func(base, axis, index)
    if mark.kind in (Kind.SOURCE, Kind.TARGET):
        scope.marks.put(out, Mark(Kind.PAIRS, mark.view, axis, mark.edges))
    elif mark.kind is Kind.EDGES:
        scope.marks.put(out, Mark(Kind.PAIRS, mark.view, 1, index))
    elif mark.kind in ALIGNED and index.dim() == 1:
        scope.marks.put(out, Mark(mark.kind, mark.view, axis, mark.edges))
    return out


def _scatter(scope: Interception, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out.scatter_add_(dim, row, src)``: by source ids the sums of halo rows go to their owners."""
    base = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    value = kwargs.get("src", kwargs.get("source", args[3] if len(args) > 3 else None))
    mark = scope.marks.get(index)
    if mark is None or not isinstance(value, Tensor) or not isinstance(index, Tensor):
        return NotImplemented
    axis = dim % max(base.dim(), 1)
    if mark.kind is Kind.MIXED:
        raise scope.refuse(name)
    if mark.kind is Kind.TARGET:
        return scope.marks.put(func(*args, **kwargs), Mark(Kind.ROWS, mark.view, axis))
    if mark.kind is Kind.SOURCE and scope.size == 1:
        return scope.marks.put(func(*args, **kwargs), Mark(Kind.ROWS, 0, axis))
    if scope.size == 1 or mark.kind is Kind.LOCAL:
        return NotImplemented
    reduce = kwargs.get("reduce", args[4] if len(args) > 4 else "sum")
    adds = not name.startswith("scatter_reduce") or reduce == "sum"
    if not adds and (mark.kind is Kind.SOURCE or reduce not in ("amax", "amin") or value.requires_grad):
        raise ModelError(
            "what is written by source ids, or pooled over all vertices, must be a sum",
            f"{name} asks for {reduce!r}",
            where=scope.where(),
            hint="sum or mean, or let messages flow from source to target",
        )
    if mark.kind is Kind.SOURCE:
        plan = scope.views[mark.view].rows
        shape = list(base.shape)
        if shape[axis] != plan.own:
            return NotImplemented
        shape[axis] = plan.own + plan.halo
        sums = _plain_sum(value.new_zeros(shape), axis, index, value, name)
        return scope.marks.put(_add(base, scope.write(sums, axis, mark), name), Mark(Kind.ROWS, 0, axis))
    if adds:
        return _add(base, scope.total(_plain_sum(torch.zeros_like(base), axis, index, value, name)), name)
    sign = 1 if reduce == "amax" else -1
    low = torch.finfo(value.dtype).min if value.is_floating_point() else torch.iinfo(value.dtype).min
    best = torch.full_like(base, low).scatter_reduce(axis, index, value * sign, "amax", include_self=True)
    best = scope.greatest(best)
    return base.copy_(torch.where(best == low, base, best * sign))


def _plain_sum(base: Tensor, axis: int, index: Tensor, value: Tensor, name: str) -> Tensor:
    return (
        base.index_add(axis, index, value)
        if name.startswith("index")
        else base.scatter_add(axis, index, value)
    )


def _add(base: Tensor, sums: Tensor, name: str) -> Tensor:
    return base.add_(sums) if name.endswith("_") else base + sums


def _flip(scope: Interception, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Flipping the graph's own edges gives the out-edges of own vertices."""
    edges = args[0]
    dims = kwargs.get("dims", args[1:])
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if edges is scope.inputs.get("edge_index") and tuple(d % 2 for d in dims) == (0,):
        return scope.out_edges().edge_index
    return NotImplemented


def _greatest_id(
    scope: Interception, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``edge_index.max()`` asks how many vertices there are: the last one that has an edge, locally."""
    mark = scope.marks.get(args[0])
    if mark is None or mark.kind is not Kind.EDGES or len(args) > 1 or kwargs:
        return NotImplemented
    return torch.tensor(scope.last_row() - 1, device=scope.device)


class RowCount(int):
    """The number of own rows, as ``x.size(0)`` gave it: what is made with so many rows has a row a vertex."""


def _size(scope: Interception, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.size(0)`` and ``x.shape`` of a tensor with a row a vertex."""
    if name == "__get__" and _attribute(func) != "shape":
        return NotImplemented
    mark = scope.marks.get(args[0])
    if mark is None or mark.kind is not Kind.ROWS:
        return NotImplemented
    size = [RowCount(s) if d == mark.axis else s for d, s in enumerate(func(args[0]))]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return torch.Size(size) if dim is None else size[dim]


def _make(scope: Interception, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.zeros(x.size(0))`` has a row a vertex."""
    size = args[0] if args else kwargs.get("size")
    first = size[0] if isinstance(size, (tuple, list)) and size else size
    if not isinstance(first, RowCount):
        return NotImplemented
    out = func(*args, **kwargs)
    return scope.marks.put(out, Mark(Kind.ROWS))


_HANDLERS: dict[str, Handler] = {
    "size": _size,
    "__get__": _size,
    **dict.fromkeys(("zeros", "ones", "full", "empty"), _make),
    "__getitem__": _gather,
    "index_select": _gather,
    "scatter_add_": _scatter,
    "scatter_add": _scatter,
    "index_add_": _scatter,
    "index_add": _scatter,
    "scatter_reduce_": _scatter,
    "scatter_reduce": _scatter,
    "flip": _flip,
    "max": _greatest_id,
}


# Installing --------------------------------------------------------------------------------------


def install(model: nn.Module, scope: Interception) -> Callable[[], None]:
    """Watch a model's modules: where the forward is, and what each ``propagate`` was given.

    Returns:
        A function that takes everything off again and forgets what layers had cached of this part.
    """
    removers: list[Callable[[], None]] = []
    for path, module in model.named_modules():
        name = path or type(module).__name__

        def enter(_module: nn.Module, _args: Any, name: str = name) -> None:
            scope.path.append(name)

        def leave(_module: nn.Module, _args: Any, out: Any, name: str = name) -> None:
            # Called after an error too, innermost first: that is the layer to name.
            scope.fault = (scope.fault or name) if out is None else ""
            if scope.path:
                scope.path.pop()

        removers.append(module.register_forward_pre_hook(enter).remove)
        removers.append(module.register_forward_hook(leave, always_call=True).remove)
        forget(module)
        if isinstance(module, MessagePassing):
            removers.append(_wrap(module, "propagate", scope))
            removers.append(_wrap(module, "edge_updater", scope))
            if module.flow == "target_to_source":
                removers.append(module.register_forward_pre_hook(_turn_round(scope), with_kwargs=True).remove)

    def remove() -> None:
        for take_off in removers:
            take_off()
        for module in model.modules():
            forget(module)

    return remove


def forget(module: nn.Module) -> None:
    """Drop what a layer has cached of another graph or part (GCNConv(cached=True), SGConv, ...)."""
    for name, value in vars(module).items():
        if name.startswith("_cached_") and value is not None:
            setattr(module, name, None)


def _wrap(module: nn.Module, name: str, scope: Interception) -> Callable[[], None]:
    inner = getattr(module, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        scope.arguments.append(kwargs)
        try:
            return inner(*args, **kwargs)
        finally:
            scope.arguments.pop()

    own = vars(module).get(name)
    module.__dict__[name] = outer

    def unwrap() -> None:
        if own is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = own

    return unwrap


def _turn_round(scope: Interception) -> Callable[..., Any]:
    """A layer whose messages flow from target to source is given out-edges, with their attributes."""

    def swap(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = {id(value): name for name, value in scope.inputs.items()}
        edge_names = {"edge_index", *scope.views[0].attributes}

        def turned(value: Any) -> Any:
            name = names.get(id(value))
            if name not in edge_names:
                return value
            view = scope.out_edges()
            return view.given if name == "edge_index" else view.attributes[str(name)]

        return tuple(turned(a) for a in args), {k: turned(v) for k, v in kwargs.items()}

    return swap
