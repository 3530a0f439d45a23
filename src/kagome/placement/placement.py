"""Placement: what each tensor inside a user's forward stands for, recorded beside the tensor.

Where it sits: ``intercept.interceptor`` sees every torch call of a model. This module says what the results
of those calls are. A read of neighbours' rows, a statistic over all vertices or a dropout is thus recognised
wherever it happens, in PyG's code or in the user's.

::

    edge_index  EDGES ──[0]──> SOURCE ──x[source]──> PAIRS   one row per edge
         │            └─[1]──> TARGET ──x[target]──> PAIRS
         x  ROWS ──linear──> ROWS                             one row per own vertex
         SOURCE * 7 + SOURCE ──> MIXED                        meaning of ids unknown: refused where read
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from kagome.placement.axis_rules import ELEMENTWISE, PREFIX, merged, place_of
from kagome.placement.row_subset import RowSubset
from kagome.placement.torch_calls import Args, Kwargs
from kagome.placement.weak_map import WeakTensorMap
from kagome.user_frame import from_library, user_line


class PlacementKind(enum.Enum):
    """The meaning of a tensor's entries, or of the rows along its axis."""

    EDGES = "edges"
    """Pairs of local vertex ids, 2 x E."""
    SOURCE = "source"
    """Local ids that may name halo rows."""
    TARGET = "target"
    """Local ids of own rows."""
    ROWS = "rows"
    """One row per own vertex."""
    PAIRS = "pairs"
    """One row per edge."""
    NUMBERS = "numbers"
    """Original numbers of own vertices, one per row: ``torch.arange(x.size(0))``."""
    LOCAL = "local"
    """Numbers made from own ids, which have no meaning on another rank."""
    MATRIX = "matrix"
    """The graph's sparse matrix, or its row pointer."""
    MIXED = "mixed"
    """Ids whose meaning is no longer known."""
    LOST = "lost"
    """Made from rows of vertices by their positions in this part, in a way not known to be right."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of one tensor: which rows it has, and along which axis.

    Args:
        kind: See :class:`PlacementKind`.
        view: Which edges it refers to: in-edges (0) or out-edges (1) of own vertices.
        axis: ROWS and PAIRS: the row axis.
        edges: PAIRS, SOURCE, TARGET: the EDGES tensor they came from, where known. LOCAL: the edges among
            which they are positions.
        swapped: EDGES: row 0 holds the targets.
        both: EDGES: either row may name halo rows, because edges of both directions are present.
        subset: ROWS: which own vertices have rows; None for all.
        each: ROWS: how many consecutive entries along the axis belong to one vertex.
        origin: LOST: the call that lost it, and the line of that call.
        vertex_set: ROWS, NUMBERS: the number of their vertex set.
    """

    kind: PlacementKind
    view: int = 0
    axis: int = 0
    edges: Tensor | None = None
    swapped: bool = False
    both: bool = False
    subset: RowSubset | None = None
    each: int = 1
    origin: str = ""
    vertex_set: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether there is one row for each own vertex or edge."""
        return self.subset is None and self.each == 1

    @property
    def fields(self) -> tuple[Any, ...]:
        """All fields but ``edges`` and ``subset``, for comparison."""
        return (
            self.kind,
            self.view,
            self.axis,
            self.swapped,
            self.both,
            self.each,
            self.origin,
            self.vertex_set,
        )

    def along(self, axis: int) -> Placement:
        """Return the placement of the same rows along another axis."""
        return self if axis == self.axis else replace(self, axis=axis)

    def merged(self, each: int, *, anew: bool = False) -> Placement:
        """Return a placement with ``each`` entries per entry of this axis, or per vertex if ``anew``."""
        return replace(self, each=each if anew else self.each * each)


IDS = (PlacementKind.EDGES, PlacementKind.SOURCE, PlacementKind.TARGET)
_NAMES = (*IDS, PlacementKind.MIXED)
_FILLS = frozenset(
    ["copy_", "fill_", "zero_", "masked_fill_", "add_", "sub_", "mul_", "index_fill_", "clamp_"]
)
ALIGNED = (PlacementKind.ROWS, PlacementKind.PAIRS, PlacementKind.NUMBERS)
VERTICES = (PlacementKind.ROWS, PlacementKind.NUMBERS)
Rule = Callable[["Placements", tuple[Any, ...], dict[str, Any], Any, Placement], Any]


class Placements:
    """The placements of all living tensors of one forward, and the rules by which they propagate.

    Args:
        all_local: Whether the whole graph is local, in its own order, so that ids mean what they mean to the
            user.
    """

    def __init__(self, *, all_local: bool = False) -> None:
        self._table: WeakTensorMap[Placement] = WeakTensorMap()
        self._weights: WeakTensorMap[bool] = WeakTensorMap()
        self._memory: WeakTensorMap[Placement] = WeakTensorMap()
        self._loses = False
        self.all_local = all_local

    def get(self, tensor: Any) -> Placement | None:
        """Return the placement of a tensor, or None; any other object has none."""
        placement = self._table.get(tensor)
        if (
            placement is None
            and type(tensor) is nn.Parameter
            and not self.all_local
            and tensor not in self._weights
        ):
            return self._of_parameter(tensor)
        return placement

    def _of_parameter(self, weight: nn.Parameter) -> Placement | None:
        """Return the placement of a parameter that forward made from rows; no torch call shows that."""
        self._weights[weight] = True
        with torch._C.DisableTorchFunction():
            memory = weight.untyped_storage()
            gone = self._memory.get(memory)
            # nn.Parameter(h) is h if it shows the same entries of one memory. Other entries are lost rows.
            alike = [held for held in self._plain() if weight.numel() and held.untyped_storage() is memory]
            same = next((held for held in alike if weight.is_set_to(held)), None)
            if same is not None:
                return self.get(self.put(weight, self._table.get(same)))
            if gone is None and alike:
                gone = Placement(PlacementKind.LOST, origin=f"nn.Parameter ({user_line() or 'a library'})")
            return self.get(self.put(weight, gone))

    def _plain(self) -> list[Tensor]:
        """Return the placed tensors that are plain and strided in memory."""
        held = [each for each in self._table.living() if type(each) in (Tensor, nn.Parameter)]
        return [each for each in held if isinstance(each, Tensor) and each.layout is torch.strided]

    def put(self, tensor: Tensor, placement: Placement | None) -> Tensor:
        """Set or remove the placement of a tensor, and return the tensor."""
        if placement is not None and not (
            self.all_local and placement.kind in (PlacementKind.MIXED, PlacementKind.LOCAL)
        ):
            self._table[tensor] = placement
            if placement.kind is PlacementKind.LOST:
                self._loses = True
                if type(tensor) is Tensor and tensor.layout is torch.strided:
                    with torch._C.DisableTorchFunction():
                        self._memory[tensor.untyped_storage()] = placement
        elif tensor in self._table:
            del self._table[tensor]
        return tensor

    def spread(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Set the placement of a torch call's result by the placements of its arguments."""
        if not isinstance(result, (Tensor, tuple, list)):
            return
        found = [placement for tensor in tensors(args, kwargs) if (placement := self.get(tensor)) is not None]
        if not found:
            return
        if self.stays_lost(name, args, kwargs, result):
            return
        # x.new_zeros(1000, 8): user code knows own rows by no plain number, so these are 1000 rows on all
        # ranks. ``intercept.row_counts`` has answered x.new_zeros(x.size(0), 8).
        if name.startswith("new_") and not from_library():
            return
        # Calls that read or write by ids (NO_IDS) give rows. Others give ids, or what is computed from ids.
        lead = next((m for m in found if m.kind in IDS), None)
        picks = name == "index_select" and self.get(args[0]) is lead
        if lead is not None and (picks or name not in NO_IDS):
            _spread_ids(self, name, args, kwargs, result, lead, found)
            return
        mixed = next((m for m in found if m.kind in (PlacementKind.MIXED, PlacementKind.LOCAL)), None)
        if mixed is not None and (name not in _GATHERS or self.get(args[0]) is mixed):
            for place, out in enumerate(_outputs(result)):
                if not out.is_floating_point() and out.dtype != torch.bool:
                    order = name == "argsort" or (name == "sort" and place)
                    self.put(out, Placement(PlacementKind.LOCAL) if order else mixed)
                elif mixed.kind is PlacementKind.LOCAL and not self.all_local:
                    lose(self, name, out)
            return
        first = self.get(args[0]) if args else None
        lead = first if first is not None and first.kind in ALIGNED else None
        lead = lead or next((m for m in found if m.kind in ALIGNED), None)
        if lead is not None:
            _spread_rows(self, name, args, kwargs, result, lead, found)

    def lost(self, args: Args, kwargs: Kwargs) -> Placement | None:
        """Return the placement of a lost tensor among a call's arguments; None if there is none."""
        if self.all_local or not self._loses:
            return None
        placements = map(self.get, tensors(args, kwargs))
        return next(
            (
                placement
                for placement in placements
                if placement is not None and placement.kind is PlacementKind.LOST
            ),
            None,
        )

    def stays_lost(self, name: str, args: Args, kwargs: Kwargs, result: Any) -> bool:
        """Mark a call's result as lost if one of its arguments is, whoever answered the call."""
        gone = self.lost(args, kwargs)
        if gone is None:
            return False
        for out in _outputs(result):
            self.put(out, gone)
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        with torch._C.DisableTorchFunction():
            base = args[0]._base if writes and args and isinstance(args[0], Tensor) else None
            if base is not None:  # the tensor that was written to is a view
                for view in [base, *(each for each in self._plain() if each._base is base)]:
                    self.put(view, gone)
        return True

    def write(self, name: str, args: Args) -> None:
        """Record, before a call that may write, that ids it writes to or stores lose their meaning."""
        first = args[0] if args else None
        held = self.get(first)
        if name == "__setitem__":
            value = self.get(args[2])
            if (held is not None and held.kind in IDS) or (value is not None and value.kind in _NAMES):
                self.put(first, Placement(PlacementKind.MIXED))  # type: ignore[arg-type]
            elif value is not None and value.kind is PlacementKind.LOCAL and isinstance(first, Tensor):
                lose(self, name, first)
        elif name in _FILLS and held is not None and held.kind in IDS and held.edges is not None:
            self.put(held.edges, Placement(PlacementKind.MIXED))  # first is a view of it


def tensors(args: Sequence[Any], kwargs: Kwargs) -> Iterator[Tensor]:
    """Yield the tensors among a call's arguments, one level deep."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            for inner in value:
                if isinstance(inner, Tensor):
                    yield inner


def _outputs(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        yield from (r for r in result if isinstance(r, Tensor))


# Ids ---------------------------------------------------------------------------------------------

_KEEP = frozenset(
    [
        *("clone", "contiguous", "to", "long", "int", "type", "type_as", "detach", "cpu", "cuda"),
        *("alias", "requires_grad_", "pin_memory", "__deepcopy__", "sort", "masked_select"),
        *("as_subclass",),
    ]
)
_RESHAPE = frozenset(
    ["view", "reshape", "unsqueeze", "expand", "expand_as", "squeeze", "flatten", "repeat", "view_as"]
)
NO_IDS = frozenset(
    ["index_select", "gather", "embedding", "scatter_add_", "scatter_add", "index_add_", "index_add"]
) | frozenset(
    [
        *("scatter_reduce_", "scatter_reduce", "scatter_", "scatter", "index_put_"),
        *("take_along_dim", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like"),
        *("ones_like", "full_like", "empty_like", "rand_like"),
    ]
)
_GATHERS = frozenset(["__getitem__", "index_select", "gather", "embedding"])


def _spread_ids(
    placements: Placements,
    name: str,
    args: Args,
    kwargs: Kwargs,
    result: Any,
    lead: Placement,
    found: list[Placement],
) -> None:
    """Propagate ids through a call: kept, split, joined, or mixed beyond recognition."""
    first = args[0] if args else None
    source = placements.get(first)
    if name == "__getitem__" and source is not None and source.kind in IDS:
        _pick(placements, args[1], result, first, source)
    elif name == "__getitem__" and isinstance(first, Tensor):
        # x[source]: the handler of gathers has placed it. x[:, source] and the like stay without placement.
        return
    elif name in ("t", "T", "mT", "transpose") and lead.kind is PlacementKind.EDGES:
        # Also on ranks that have no edge: all ranks handle a read by these ids alike.
        placements.put(result, Placement(PlacementKind.MIXED))
    elif name == "view_as" and result.shape == args[1].shape == args[0].shape:
        placements.put(result, lead)  # a module's backward hooks receive its inputs as views
    elif name in _KEEP or (name in _RESHAPE and lead.kind is not PlacementKind.EDGES):
        across = name == "sort" and kwargs.get("dim", args[1] if len(args) > 1 else -1) in (0, -2)
        for place, out in enumerate(_outputs(result)):
            if place:  # indices of a sort: positions among a part's own
                placements.put(out, Placement(PlacementKind.LOCAL))
                continue
            whole = lead.kind is not PlacementKind.EDGES or (_two_rows(out) and not across)
            placements.put(out, lead if whole else Placement(PlacementKind.MIXED))
    elif name in ("unbind", "split", "chunk", "tensor_split") and lead.kind is PlacementKind.EDGES:
        _part_edges(placements, name, args, kwargs, result, lead)
    elif name in ("cat", "concat", "concatenate", "hstack"):
        _join_ids(placements, name, args, kwargs, result, found)
    elif name in ("stack", "vstack") and len(found) == 2:
        kinds = [m.kind for m in found]
        both = sorted(kinds, key=lambda kind: kind.value) == [PlacementKind.SOURCE, PlacementKind.TARGET]
        swapped = kinds[0] is PlacementKind.TARGET
        edges = Placement(PlacementKind.EDGES, lead.view, swapped=swapped)
        placements.put(result, edges if both else Placement(PlacementKind.MIXED))
    elif name == "flip" and lead.kind is PlacementKind.EDGES:
        dims = kwargs.get("dims", args[1:])
        dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        placements.put(result, replace(lead, swapped=lead.swapped is not (0 in [d % 2 for d in dims])))
    elif name == "index_select":
        dim = kwargs.get("dim", args[1])
        keep = lead.kind is not PlacementKind.EDGES or dim in (1, -1)
        placements.put(result, replace(lead, edges=None) if keep else Placement(PlacementKind.MIXED))
    elif name == "select" and lead.kind is PlacementKind.EDGES and args[1] == 0:
        placements.put(result, _end(first, lead, int(args[2])))
    elif name == "narrow":
        keep = lead.kind is not PlacementKind.EDGES or _two_rows(result)
        placements.put(result, replace(lead, edges=None) if keep else Placement(PlacementKind.MIXED))
    else:
        _count(placements, result, lead, found, first, order=name == "argsort")


def _part_edges(
    placements: Placements,
    name: str,
    args: Args,
    kwargs: Kwargs,
    result: Any,
    lead: Placement,
) -> None:
    """Place the results of ``source, target = edge_index.unbind(0)``, and of splits of the edge list."""
    last: Any = args[-1] if len(args) > (1 if name == "unbind" else 2) else 0
    dim = kwargs.get("dim", last) % 2
    for row, out in enumerate(result):
        if dim == 0 and len(result) == 2:
            placements.put(out, _end(args[0], lead, row))
        else:
            placements.put(
                out,
                replace(lead, edges=None) if dim == 1 and _two_rows(out) else Placement(PlacementKind.MIXED),
            )


def _join_ids(
    placements: Placements,
    name: str,
    args: Args,
    kwargs: Kwargs,
    result: Any,
    found: list[Placement],
) -> None:
    """Place concatenated ids: they keep their kind if all are of one kind and one view."""
    lead, kinds = next(m for m in found if m.kind in IDS), {m.kind for m in found}
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    whole = kinds == {PlacementKind.EDGES} and (dim in (1, -1) or name == "hstack")
    same = (
        len({m.view for m in found}) == 1 and len(kinds) == 1 and (whole or PlacementKind.EDGES not in kinds)
    )
    both = any(m.both for m in found) or len({m.swapped for m in found}) > 1
    placements.put(result, replace(lead, edges=None, both=both) if same else Placement(PlacementKind.MIXED))


def _two_rows(ends: Tensor) -> bool:
    return ends.dim() == 2 and ends.size(0) == 2


def _end(edges: Any, placement: Placement, row: int) -> Placement:
    target = (row % 2 == 1) is not placement.swapped and not placement.both
    return Placement(PlacementKind.TARGET if target else PlacementKind.SOURCE, placement.view, edges=edges)


def _pick(placements: Placements, index: Any, result: Any, base: Any, placement: Placement) -> None:
    """Place ``edge_index[0]``, ``edge_index[:, mask]`` and ``row[mask]``."""
    if placement.kind is not PlacementKind.EDGES:
        placements.put(result, replace(placement, edges=None))
        return
    head, *rest = index if isinstance(index, tuple) else (index,)
    if isinstance(head, int):
        end = _end(base, placement, head)
        placements.put(result, end if not rest else replace(end, edges=None))
    elif (head == slice(None) if isinstance(head, slice) else head is Ellipsis) and _two_rows(result):
        placements.put(result, replace(placement, edges=None))
    elif isinstance(head, (list, Tensor)) and list(map(int, head)) == [1, 0] and not rest:
        placements.put(result, replace(placement, swapped=not placement.swapped, edges=None))
    else:
        placements.put(result, Placement(PlacementKind.MIXED))


def _count(
    placements: Placements,
    result: Any,
    lead: Placement,
    found: list[Placement],
    first: Any,
    *,
    order: bool = False,
) -> None:
    """Place results of arithmetic with ids: booleans and floats have a row per edge, integers are mixed."""
    own_only = all(
        m.kind not in (PlacementKind.SOURCE, PlacementKind.EDGES, PlacementKind.MIXED) for m in found
    )
    length = first.size(-1) if isinstance(first, Tensor) and first.dim() else -1
    for out in _outputs(result):
        if out.dtype == torch.bool or out.is_floating_point():
            if out.dim() == 1 and out.size(0) == length:
                placements.put(out, Placement(PlacementKind.PAIRS, lead.view, edges=lead.edges))
        elif out.numel() > 1:
            placements.put(out, Placement(PlacementKind.LOCAL if own_only or order else PlacementKind.MIXED))


_JOINS = frozenset(["cat", "concat", "concatenate", "hstack", "vstack"])
_PLACES = frozenset(["argsort", "sort", "topk", "kthvalue", "nonzero", "where", "unique"])
"""Calls that return positions among a part's own edges."""

# Rows --------------------------------------------------------------------------------------------


def _spread_rows(
    placements: Placements,
    name: str,
    args: Args,
    kwargs: Kwargs,
    result: Any,
    placement: Placement,
    found: list[Placement],
) -> None:
    """Follow the row axis through a call: most calls keep it, some move it, some lose it."""
    carrier = next(t for t in tensors(args, kwargs) if placements.get(t) is placement)
    rows, axis = carrier.size(placement.axis), placement.axis
    if placement.kind is PlacementKind.NUMBERS and name not in _SAME_NUMBERS:
        placement = replace(placement, kind=PlacementKind.ROWS)
    if name in _WRITES and placements.get(args[0]) is placement and any(m.kind in IDS for m in found):
        placements.put(result, placement)  # each row is written by the edges that end in it
        return
    with_edges = any(m.kind is PlacementKind.PAIRS for m in found)
    if not placements.all_local and (
        (name in _PRODUCTS and _outer(placements, args))
        or (name == "cdist" and len([m for m in found if m.kind in VERTICES]) > 1)
        or (name.strip("_") in ELEMENTWISE and _pairwise(placements, args, kwargs))
    ):
        lose(placements, name, result, PAIRS)
        return
    unlike = (
        not placements.all_local
        and placement.kind in VERTICES
        and _unlike(placements, placement, args, kwargs)
    )
    for out in _outputs(result):
        place = None if unlike else place_of(name, args, kwargs, carrier, axis, rows, out)
        if place is not None:
            placements.put(out, placement.along(place))
        elif (
            placement.kind is PlacementKind.PAIRS
            and name in _JOINS
            and all(
                held is not None
                and (held.kind, held.view, held.axis) == (placement.kind, placement.view, placement.axis)
                for held in map(placements.get, tensors(args, kwargs))
            )
        ):
            placements.put(out, replace(placement, edges=None))
        elif placement.kind is PlacementKind.PAIRS and name in _PLACES and out.dtype == torch.int64:
            placements.put(out, Placement(PlacementKind.LOCAL, placement.view, edges=placement.edges))
        elif (
            placement.kind in VERTICES
            and name in PREFIX - {"squeeze"}  # which merges nothing, and may remove the only own row's axis
            and (new := merged(carrier, axis, placement.each, out))
        ):
            placements.put(out, replace(placement, axis=new[0], each=new[1]))
        elif not placements.all_local and (
            placement.kind is PlacementKind.PAIRS or not with_edges
        ):  # values of edges combined with those of loops are not lost
            lose(placements, name, out)


def _unlike(placements: Placements, placement: Placement, args: Args, kwargs: Kwargs) -> bool:
    """Return True if the arguments' rows belong to different vertices."""
    others = [m for t in tensors(args, kwargs) if (m := placements.get(t)) is not None and m.kind in VERTICES]
    if placement.is_complete and all(
        other.is_complete and other.vertex_set == placement.vertex_set for other in others
    ):
        return False
    subset = placement.subset
    return any(
        other.each != placement.each
        or other.vertex_set != placement.vertex_set
        or (other.subset is not subset and not (subset is not None and subset.same(other.subset)))
        for other in others
    )


def _outer(placements: Placements, args: Args) -> bool:
    """Return True if a product has rows along both of its last axes: it covers this part's pairs only."""
    if len(args) < 2 or not all(isinstance(arg, Tensor) and arg.dim() > 1 for arg in args[:2]):
        return False
    (left, one), (right, two) = ((arg, placements.get(arg)) for arg in args[:2])
    if one is None or two is None or one.kind not in ALIGNED or two.kind not in ALIGNED:
        return False
    return bool(one.axis == left.dim() - 2 and two.axis == right.dim() - 1)


def _pairwise(placements: Placements, args: Args, kwargs: Kwargs) -> bool:
    """Return True if an element-wise call has rows of vertices along two axes: ``x[:, None] - x[None]``."""
    held = [
        (t, m) for t in tensors(args, kwargs) if (m := placements.get(t)) is not None and m.kind in VERTICES
    ]
    # Row axes from the right, as broadcasting aligns: x[:, None] - x[None] has rows along -3 and -2.
    return len({m.axis - t.dim() for t, m in held}) > 1


_PRODUCTS = frozenset(["matmul", "mm", "bmm", "__matmul__", "__rmatmul__"])


PAIRS: Final = ", which gives a value for each pair of rows"
"""Suffix of the origin of a lost tensor of pairs, of which a part has only some."""


def lose(placements: Placements, name: str, out: Tensor, does: str = "") -> None:
    """Mark the result of a call that is not known to give the same on a part."""
    counts = not (out.is_floating_point() or out.is_complex() or out.dtype == torch.bool)
    if name.startswith("new_") or (name != "nonzero" and from_library()):
        return  # handlers and rules make PyG's own layers exact; pooling returns positions of its own
    if counts and not does:
        placements.put(out, Placement(PlacementKind.LOCAL))
    else:
        placements.put(
            out, Placement(PlacementKind.LOST, origin=f"{name} ({user_line() or 'a library'}){does}")
        )


_SAME_NUMBERS = frozenset(
    [
        *("view", "reshape", "unsqueeze", "squeeze", "expand", "repeat", "clone", "to", "long"),
        *("contiguous", "detach", "flatten", "t", "T", "stack", "type_as", "alias"),
    ]
)
_WRITES = frozenset(["scatter", "scatter_", "scatter_reduce", "scatter_reduce_", "index_put_", "index_put"])
