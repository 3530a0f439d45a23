"""Batches: samples over one graph, flattened into its rows, as a graph of so many copies.

Where it sits: ``placement`` asks it where a view merges an axis of samples with the rows; handlers and the
sharded model ask it for the edges of a batch. They are made once for each number of samples.

::

    x [B, N, F] ──reshape──> [B * N, F]     ROWS of the set "B of grid"     edges [2, B * E] of its own view

Views are followed by the shapes of the whole graph, the same on all ranks: a part may have one row, or none,
and its own shapes then fit several ways::

    [A * copies * N * each, B]     N rows, in copies * A samples, with each * B entries a row
      -> [A, N, C]     copies 1, each 1        x.view(batch, -1, C)
      -> [A * N, C]    copies A, each 1        x.reshape(batch * N, C): a batch flattened into rows
      -> [A, N * H, D] copies 1, each H        x.view(batch, N * H, D)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from kagome.halo.exchange import HaloExchange
from kagome.kernels.base.address import address
from kagome.placement.placement import IDS, VERTICES, Placement, PlacementKind, Placements
from kagome.placement.symbolic_size import as_place
from kagome.placement.vertex_sets import VertexSets
from kagome.placement.weak_map import WeakTensorMap
from kagome.scope.constants import Constants
from kagome.sparse_ops.edge_view import EdgeView, batched_view


class Batches:
    """The batches of one part's vertex sets and edges.

    Args:
        sets: The vertex sets.
        views: The edges.
        placements: The placements.
        constants: The constant tensors, which the edges of a batch become.

    Cost:
        ``16 * B * E`` bytes for the edges of each number B of samples, kept to the end.
    """

    def __init__(
        self, sets: VertexSets, views: list[EdgeView], placements: Placements, constants: Constants
    ) -> None:
        self._sets, self._views, self._placements, self._constants = sets, views, placements, constants
        self._turned: dict[int, Tensor] = {}
        self.stand_ins: WeakTensorMap[tuple[int, Tensor]] = WeakTensorMap()
        """What arithmetic with ids gives for the stand-in of their view: see ``intercept.batch_rows``."""
        self.following = False
        """Whether a call runs whose ids are followed already."""
        self.length: Final = 61
        """The number of edges of a stand-in."""
        self._firsts: dict[int, Tensor] = {}

    def listed(self, edges: Tensor | None) -> int | None:
        """Return the number of the view that has the edges of a list, all of them and in its order."""
        if edges is None:
            return None
        # By identity: a list that forward has made may have other edges.
        lists = [*((at, each.edge_index) for at, each in enumerate(self._views)), *self._turned.items()]
        return next((at for at, each in lists if each is edges), None)

    def serves(self, view: int) -> bool:
        """Return whether a batch can have these edges: in-edges of a part, by a plain halo exchange."""
        held = self._views[view]
        # Out-edges come with values from other ranks, and chunks keep their rows in tables.
        return held.across is None and type(held.rows) is HaloExchange

    def edges(self, view: int, copies: int, *, turned: bool = False) -> Tensor:
        """Return the edges of a batch of this many samples.

        Args:
            view: The view of one sample.
            copies: How many samples.
            turned: Whether the targets are in row 0.

        Shapes:
            ``[2, copies * E]``.
        """
        number = self._view(view, copies)
        if not turned:
            return self._views[number].edge_index
        if number not in self._turned:
            edges = self._views[number].edge_index.flip(0)
            self._placements.put(edges, Placement(PlacementKind.EDGES, number, swapped=True))
            self._constants.add(edges)
            self._turned[number] = edges
        return self._turned[number]

    def copies_in(self, view: int, one: Tensor, given: Tensor) -> int:
        """Return of how many samples a list has the edges, one sample after the other; 0 if of none.

        Args:
            view: The view of one sample.
            one: Its edges in the whole graph.
            given: The list.

        Shapes:
            one ``[2, E]``, given ``[2, copies * E]``.
        """
        # Of no edges there are any number of copies.
        copies, rest = divmod(given.size(1), max(one.size(1), 1))
        if rest or not copies or not one.size(1) or not self.serves(view):
            return 0
        held = self._views[view]
        sizes = torch.tensor([self._sets[number].size for number in (held.sources, held.targets)])
        shift = sizes[:, None, None] * torch.arange(copies)[None, :, None]
        return copies if torch.equal(given.view(2, copies, -1), one.unsqueeze(1) + shift) else 0

    def _view(self, view: int, copies: int) -> int:
        """Return the number of the view of a batch."""
        # A batch of a batch is one of as many samples as are asked for.
        single = self._views[view].single
        view = view if single is None else single
        if copies == 1:
            return view
        for at, held in enumerate(self._views):
            if (held.single, held.copies) == (view, copies):
                return at
        one = self._views[view]
        sources, targets = (self._sets.batched(number, copies) for number in (one.sources, one.targets))
        # Forward asks for it in the middle of a user's call. No rank needs another for it.
        with torch._C.DisableTorchFunction():
            made = batched_view(one, view, copies, sources, targets, self._sets)
        self._views.append(made)
        number = len(self._views) - 1
        self._placements.put(made.edge_index, Placement(PlacementKind.EDGES, number))
        self._constants.add(made.edge_index)
        return number

    @contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Within a block, calls are answered without stand-ins."""
        self.following = True
        try:
            yield
        finally:
            self.following = False

    def stand_in(self, ids: Tensor) -> tuple[int, Tensor] | None:
        """Return the view whose ids a tensor holds, and the same of the view's stand-in; None if unknown."""
        if (found := self.stand_ins.get(ids)) is not None:
            return found
        held = self._placements.get(ids)
        if held is None or held.kind not in IDS:
            return None
        edges = ids if held.kind is PlacementKind.EDGES else held.edges
        at, listed = self.listed(edges), self._placements.get(edges)
        if edges is None or at is None or listed is None or not self.serves(at):
            return None
        view = self._views[at]
        at = at if view.single is None else view.single
        # The stand-in is that of one sample, of which ids of a batch have as many copies.
        made = self._repeated(at, view.copies)
        made = made.flip(0) if listed.swapped else made
        if edges is ids:
            return at, made
        # One end, ``edges[0]``: of an order or a choice of them the stand-in says nothing.
        row = int((held.kind is PlacementKind.TARGET) is not listed.swapped)
        with torch._C.DisableTorchFunction():
            end = edges[row]
            same = (ids.shape, ids.stride(), address(ids)) == (end.shape, end.stride(), address(end))
        return (at, made[row]) if same else None

    def _repeated(self, view: int, copies: int) -> Tensor:
        """Return the stand-in of a batch: edges ``[2, copies * length]`` of one sample after the other."""
        held = self._views[view]
        sizes = [self._sets[number].size for number in (held.sources, held.targets)]
        device = held.edge_index.device
        if view not in self._firsts:
            # The same on all ranks; with the least and the greatest id.
            draw = torch.Generator().manual_seed(view)
            ends = [torch.randint(max(size, 1), (self.length,), generator=draw) for size in sizes]
            first = torch.stack(ends)
            first[:, 0], first[:, 1] = 0, torch.tensor(sizes) - 1
            self._firsts[view] = first.to(device)
        stride = torch.tensor(sizes, device=device)[:, None, None]
        shift = stride * torch.arange(copies, device=device)[None, :, None]
        return (self._firsts[view].unsqueeze(1) + shift).view(2, -1)

    def made_by(self, view: int, made: Tensor, *, once: bool) -> Tensor | None:
        """Return the edges of a batch, or one end of them, if arithmetic with a view's ids makes these.

        Args:
            view: The view of one sample.
            made: What the arithmetic makes of the view's stand-in.
            once: Whether one copy counts: the list of a batch of one sample.
        """
        with torch._C.DisableTorchFunction():
            copies, rest = divmod(made.size(-1) if made.dim() else 0, self.length)
            if rest or made.dtype != torch.int64 or copies < 1 or (copies == 1 and not once):
                return None
            ends = self._repeated(view, copies)
            if torch.equal(made, ends):
                return self.edges(view, copies)
            if torch.equal(made, ends.flip(0)):
                return self.edges(view, copies, turned=True)
            # With one vertex at both ends neither is told from the other.
            rows = [row for row in (0, 1) if made.dim() == 1 and torch.equal(made, ends[row])]
            if len(rows) != 1:
                return None
            number = self._view(view, copies)
            edges = self._views[number].edge_index
            kind = PlacementKind.TARGET if rows[0] else PlacementKind.SOURCE
            return self._placements.put(edges[rows[0]], Placement(kind, number, edges=edges))

    def divided(self, placement: Placement, parts: int) -> Placement | None:
        """Return the placement of one of so many equal parts of a batch; None if it cuts through samples."""
        if placement.kind not in (*VERTICES, PlacementKind.PAIRS) or parts < 2:
            return None
        # B * N // B is N; B * N // N is a plain number.
        copies, rest = divmod(self.copies_of(placement), parts)
        return self.with_copies(placement, copies) if copies and not rest else None

    def copies_of(self, placement: Placement) -> int:
        """Return how many samples the rows of a placement are of."""
        if placement.kind in VERTICES:
            return self._sets.of(placement).copies
        return self._views[placement.view].copies

    def with_copies(self, placement: Placement, copies: int) -> Placement | None:
        """Return the placement of as many samples of the same rows; None if no batch can have them."""
        if copies == self.copies_of(placement):
            return placement
        # A choice of rows names places in one set, and edges that forward has chosen are no whole sample.
        if placement.kind in VERTICES:
            if placement.subset is not None:
                return None
            number = self._sets.batched(placement.vertex_set, copies)
            return replace(placement, kind=PlacementKind.ROWS, vertex_set=number)
        at = self.listed(placement.edges)
        if placement.kind is not PlacementKind.PAIRS or at is None or not self.serves(at):
            return None
        number = self._view(at, copies)
        return replace(placement, view=number, edges=self._views[number].edge_index)

    def viewed(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], base: Tensor
    ) -> tuple[list[int], Placement | None] | None:
        """Return this part's shape of a view, and its placement.

        Args:
            name: The call: one of ``axis_rules.VIEWS``.
            args: Its positional arguments; sizes are those of the whole graph.
            kwargs: Its named arguments.
            base: The tensor that is viewed, which has rows.

        Returns:
            Shape and placement; the placement is None where rows of several vertices meet. None if the shapes
            of the whole graph are unknown.
        """
        held = self._placements.get(base)
        rows = None if held is None else self._rows_of(held)
        shape = self.whole(base)
        whole = None if shape is None else whole_view(name, args, kwargs, shape, self._whole_or_own)
        if held is None or rows is None or shape is None or whole is None:
            return None
        # Several entries of an edge are told apart by no placement.
        copies = self.copies_of(held)
        found = regrouped(shape, Group(held.axis, copies, held.each), rows, whole)
        if found is None or (held.kind is PlacementKind.PAIRS and found.each > 1):
            return whole, None
        # All axes but that of the rows are the same on all ranks.
        whole[found.axis] = found.copies * (base.size(held.axis) // (copies * held.each)) * found.each
        placed = self.with_copies(held, found.copies)
        return whole, None if placed is None else replace(placed, axis=found.axis, each=found.each)

    def _rows_of(self, placement: Placement) -> int | None:
        """Return the number of rows of one sample in the whole graph; None if it is unknown.

        With one row, axes of size 1 are not told from it.
        """
        if placement.kind in VERTICES and placement.subset is None:
            held = self._sets.of(placement)
            rows = held.size // held.copies
        elif placement.kind is PlacementKind.PAIRS and self.listed(placement.edges) == placement.view:
            view = self._views[placement.view]
            rows = view.count // view.copies
        else:
            return None
        return None if rows == 1 else rows

    def whole(self, tensor: Tensor) -> list[int] | None:
        """Return the shape of a tensor with rows in the whole graph; None if it is unknown."""
        held = self._placements.get(tensor)
        rows = None if held is None else self._rows_of(held)
        if held is None or rows is None:
            return None
        shape = list(tensor.shape)
        shape[held.axis] = rows * self.copies_of(held) * held.each
        return shape

    def _whole_or_own(self, tensor: Tensor) -> list[int]:
        with torch._C.DisableTorchFunction():
            return self.whole(tensor) or list(tensor.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """The rows along an axis.

    Args:
        axis: The axis.
        copies: How many samples follow one another along it.
        each: How many consecutive entries belong to a row.
    """

    axis: int
    copies: int = 1
    each: int = 1


def regrouped(shape: Sequence[int], group: Group, rows: int, out: Sequence[int]) -> Group | None:
    """Return where a view of a tensor has its rows.

    Args:
        shape: The tensor's shape in the whole graph.
        group: Its rows.
        rows: The number of rows of one sample.
        out: The view's shape in the whole graph.

    Returns:
        The view's rows; None if entries of several rows meet, or of one sample and the next.

    Example:
        >>> regrouped([4, 100, 8], Group(1), 100, [400, 8])
        Group(axis=0, copies=4, each=1)
        >>> regrouped([400, 8], Group(0, copies=4), 100, [100, 32]) is None
        True
    """
    # Entries before row 0 of a sample, and of one row: a view changes neither.
    before = prod(shape[: group.axis]) * group.copies
    within = prod(shape[group.axis + 1 :]) * group.each
    have = 1
    for axis, size in enumerate(out):
        rest = prod(out[axis + 1 :])
        if have and before % have == 0 and rest and within % rest == 0:
            found = Group(axis, before // have, within // rest)
            if found.copies and found.each and size == found.copies * rows * found.each:
                return found
        have *= size
    return None


def whole_view(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shape: Sequence[int],
    whole_of: Callable[[Tensor], list[int]],
) -> list[int] | None:
    """Return the shape that a view has in the whole graph; None if the call does not say.

    Args:
        name: The call: one of ``axis_rules.VIEWS``.
        args: Its positional arguments.
        kwargs: Its named arguments.
        shape: The shape of the tensor that is viewed, in the whole graph.
        whole_of: The shape of another tensor in the whole graph.
    """
    shape = list(shape)
    if name in ("view_as", "reshape_as"):
        other = args[1] if len(args) > 1 else kwargs.get("other")
        return whole_of(other) if isinstance(other, Tensor) else None
    if name == "flatten":
        given = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
        ends = given.get("start_dim", 0), given.get("end_dim", -1)
        first, last = (range(len(shape))[end] for end in ends)
        return [*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]]
    if name == "unflatten":
        given = dict(zip(("dim", "sizes"), args[1:], strict=False)) | kwargs
        at = range(len(shape))[given["dim"]]
        pieces = _sizes(given["sizes"], shape[at])
        return None if pieces is None else [*shape[:at], *pieces, *shape[at + 1 :]]
    sizes = kwargs.get("size", kwargs.get("shape", args[1:]))
    if isinstance(sizes, tuple | list) and len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    return _sizes(sizes, prod(shape))


def _sizes(given: Any, entries: int) -> list[int] | None:
    """Return sizes with -1 replaced; None if they do not hold this many entries."""
    if not isinstance(given, tuple | list) or not all(isinstance(each, int) for each in given):
        return None
    sizes = [int(as_place(each)) for each in given]
    if -1 in sizes:
        known = prod(each for each in sizes if each != -1)
        if not known or entries % known:
            return None
        sizes[sizes.index(-1)] = entries // known
    return sizes if prod(sizes) == entries else None
