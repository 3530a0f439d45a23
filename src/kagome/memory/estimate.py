"""Memory estimate: what each rank will hold, from shapes and one training step on small synthetic graphs.

Where it sits: ``train.admission`` asks for it before the first epoch. A planner can ask for it too, for ranks
that do not exist yet. Which steps save what, for a model cut into stages, is measured in
``memory.saved_tensors``: a whole forward does not show it.

A forward keeps tensors with one row per vertex, halo row or edge. A step on pieces of many sizes therefore
shows how many bytes each of these costs, and a part's size gives its memory::

    pieces: rows, halo, edges, ... ──a step each──> bytes by kind
                        └──least squares──> bytes per row, halo row, edge, ...   (whole numbers)
    a rank's part size ───────────────────> its MemoryByKind
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.components.gradients import message_bytes
from kagome.components.model_setup import model_copy
from kagome.components.parallelize import CPU, PartOptions, parallelize
from kagome.components.task import undisturbed
from kagome.graph.partition.partition import Partition, extract
from kagome.memory.tensor_bytes import SavedMemory, ledger_of, optimizer_tensors
from kagome.model.copies import copied
from kagome.model.sparse_buffers import laid_out
from kagome.model.state import state_of
from kagome.profile.part_size import UNITS, GroupSize, PartSize, counts_of, fitted, split_counts
from kagome.profile.synthetic_parts import drawn, fit, made_pieces, tables_of
from kagome.records.memory import MemoryByKind
from kagome.sparse_ops.partial_sums import EDGE_BYTES, ROW_BYTES

FITTED: Final = ("features", "edges", "tables", "activations", "halo")
"""Kinds that grow with the graph."""
SLICED: Final = (
    (48, 150, False),
    (96, 220, True),
    (144, 500, True),
    (192, 240, False),
    (240, 960, True),
    (288, 420, False),
)
"""Synthetic graphs for feature slices: vertices, edges, and whether the first vertices have most edges."""
SLICE_UNITS: Final = (
    "one",
    "rows",
    "halo",
    "edges",
    "rows of all",
    "halo of all",
    "share of that halo",
    "edges of all",
    "share of those edges",
)
"""The units that bytes are fitted to where features are sliced: counts of a rank, and of its whole group."""
SLICE_KINDS: Final = ("tables", "activations")
# Ids are int64.
INDEX_BYTES: Final = 8
AGAIN: Final = "again "
"""Begins the kinds of the layers that run again: what autograd saves while one of them does, by its place."""
SAVED_HALO: Final = "saved halo"
"""The kind of those halo rows that autograd saves, which count as ``halo`` too."""
NOTES: Final = 3
"""Further numbers that ranks sum along with gradients."""


# [Note: the linear model] Each tensor that a forward keeps has one row per vertex, halo row or edge, or a
# fixed size. So the bytes of a kind are linear in the counts of the part:
#
#     bytes(kind)  =  a + b * rows + c * halo rows + d * edges + ...        a, b, c, d are whole numbers
#
#                  counts of the part            measured bytes
#     part 1       1   n1   H1   E1   ..   a     bytes 1
#     part 2       1   n2   H2   E2   .. x b  =  bytes 2        solved for a, b, c, d by least squares
#     part 3       1   n3   H3   E3   ..   c     bytes 3
#     ...                                  d     ...
#
# The coefficients do not depend on the part, so the model runs on a few small parts and ``at`` multiplies by
# the counts of the real one. With feature slices this fails: a rank then holds some columns of all rows of
# its group, so the counts of the group become units as well (``SLICE_UNITS``).


@dataclass(frozen=True)
class MemoryRates:
    """The bytes of what every rank holds alike, and the bytes by kind for each row, halo row and edge.

    Args:
        weights: Bytes of parameters and buffers.
        best: Bytes of a copy of them.
        gradients: Bytes of the gradients; on several ranks, of each message that sums some of them.
        optimizer: Bytes of the optimizer's state; None if unknown.
        by_unit: Kind -> bytes for each of :data:`UNITS`; unknown kinds are left out.
        by_slice: Kind -> bytes for each of :data:`SLICE_UNITS`, for the kinds that differ where features are
            sliced and there is one part.
        by_share: The same as ``by_slice`` for several parts, each in slices.
        fault: Why some kinds are unknown.
    """

    weights: int
    best: int
    gradients: tuple[int, ...]
    optimizer: int | None
    by_unit: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    by_slice: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    by_share: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    fault: str = ""

    def at(
        self,
        counts: PartSize,
        *,
        keeps_best: bool = True,
        group_size: GroupSize | None = None,
        partial_sums: bool = False,
    ) -> MemoryByKind:
        """Estimate the memory by kind of a rank with a part of this size.

        Args:
            counts: The size of the part.
            keeps_best: Whether a copy of the best epoch's weights is kept, as it is with validation.
            group_size: Size of the group that slices features with this rank; None without feature slices.
            partial_sums: Whether parts send partial sums, whose tables are counted as if a layer sent some.
        """
        known = self._known(counts, group_size)
        lists = INDEX_BYTES * (counts.sent + counts.train)
        if partial_sums:
            lists += EDGE_BYTES * counts.edges + ROW_BYTES * (counts.rows + counts.halo)
        # Layers run again one after another, so the largest one decides. Which one that is depends on the
        # counts: one layer may save edges and another one rows.
        again = [size for kind, size in known.items() if kind.startswith(AGAIN)]
        return MemoryByKind(
            weights=self.weights + (self.best if keeps_best else 0),
            gradients=sum(self.gradients),
            optimizer=self.optimizer,
            features=known.get("features", 0),
            edges=known.get("edges", 0),
            tables=known.get("tables", 0) + lists,
            activations=known.get("activations"),
            halo=known.get("halo"),
            other=max(again, default=None),
        )

    def moved(self, counts: PartSize, *, group_size: GroupSize | None = None) -> int:
        """Estimate the bytes that autograd saves, halo rows among them: what can wait in host memory.

        Args:
            counts: The size of the part.
            group_size: Size of the group that slices features with this rank; None without feature slices.
        """
        known = self._known(counts, group_size)
        return known.get("activations", 0) + known.get(SAVED_HALO, 0)

    def _known(self, counts: PartSize, group_size: GroupSize | None) -> dict[str, int]:
        """Return the bytes of each kind that was measured."""

        def bytes_of(rates: Sequence[float], units: Sequence[float]) -> int:
            return max(round(sum(rate * unit for rate, unit in zip(rates, units, strict=True))), 0)

        known = {kind: bytes_of(rates, counts.units) for kind, rates in self.by_unit.items()}
        if group_size is not None:
            units = _slice_units(counts.rows, counts.halo, counts.edges, group_size)
            kinds = self.by_share if group_size.halo else self.by_slice
            known |= {kind: bytes_of(rates, units) for kind, rates in kinds.items()}
            # With slices, rows of other parts arrive as columns of the group's rows. Measured and fitted,
            # they are part of tables and activations (see `_step`), so a separate kind would count them
            # twice.
            known |= {"halo": 0, SAVED_HALO: 0} if kinds else {}
        return known


def rates_of(
    model: nn.Module,
    optimizer: Optimizer | None,
    part: Partition,
    options: PartOptions,
    *,
    several: bool = True,
    slices: Sequence[int] = (),
) -> MemoryRates:
    """Measure the memory rates of a model by one step of a copy on small synthetic graphs, without peers.

    Args:
        model: The user's module, as it was given. Its weights, buffers and gradients stay unchanged, and so
            do all random number generators.
        optimizer: The optimizer of its parameters; None if its state is not to be estimated.
        part: The part that attributes are drawn from.
        options: How the model runs; here on the CPU.
        several: Whether there are other ranks.
        slices: The numbers of feature slices to measure; from several, other numbers can be estimated.

    Returns:
        The rates. If the model fails on a synthetic graph, only the rates of the data itself and the reason.

    Cost:
        Seven forwards, backwards and evaluations (five for one rank) on 261 rows altogether, in this process,
        and a copy of the weights. For each number of slices, six times that number of steps, once for one
        part and once for two, on 48 to 288 rows.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = _distinct(chain(model.parameters(), model.buffers()))
    state = [value for value in state_of(model).values() if isinstance(value, Tensor)]
    best = sum(piece.nbytes for value in state for piece in laid_out(value))
    # Layers such as GCNConv add a loop to each vertex without one, so pieces must have loops where the data
    # does.
    loops = bool((part.edge_index[0] == part.edge_index[1]).any())
    graded, by_unit, fault = [True] * len(parameters), _given(part), ""
    by_slice: dict[str, tuple[float, ...]] = {}
    by_share: dict[str, tuple[float, ...]] = {}
    try:
        pieces = made_pieces(part, several=several, loops=loops, seed=options.seed)
        with undisturbed():
            found = _steps(model_copy(model), part, pieces, options, several=several)
        # Parameters that forward does not use have neither a gradient nor an optimizer state.
        graded = [any(has) for has in zip(*(one.graded for one in found), strict=True)]
        by_unit = fitted([counts_of(piece) for piece in pieces], [one.bytes for one in found])
        if slices:
            with undisturbed():
                own_copy = model_copy(model)
                by_slice, by_share = (_by_slice(own_copy, part, options, slices, groups) for groups in (1, 2))
    except Exception as error:  # an estimate must never end a run
        fault = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
    learning = [p for p, has in zip(parameters, graded, strict=True) if has]
    # With several ranks gradients are views of the summed messages, which also carry a flag for each
    # gradient and the further numbers.
    gradients = message_bytes(learning, NOTES) if several else (sum(p.nbytes for p in learning),)
    state_bytes = None if optimizer is None else optimizer_bytes(optimizer, learning)
    return MemoryRates(weights, best, gradients, state_bytes, by_unit, by_slice, by_share, fault)


def _distinct(tensors: Iterator[Tensor]) -> int:
    storages = [piece.untyped_storage() for tensor in tensors for piece in laid_out(tensor.detach())]
    # Tied weights and views share a storage, which counts once.
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def optimizer_bytes(optimizer: Optimizer, learning: Sequence[Tensor]) -> int | None:
    """Return the bytes of an optimizer's state, found by a step of its class on meta tensors.

    Args:
        optimizer: The user's optimizer; it stays unchanged. If it has state already, that is measured.
        learning: The parameters that have a gradient.

    Returns:
        The bytes after the first step; None if the class cannot be made from parameter groups, or reads the
        values of tensors.
    """
    ids = {id(p) for p in learning}
    if optimizer.state:  # resumed
        return _state_bytes(optimizer)
    groups = []
    for group in optimizer.param_groups:
        copied_parameters = [
            nn.Parameter(torch.empty_like(p, device="meta")) if id(p) in ids else None
            for p in group["params"]
        ]
        groups.append(
            {**group, "params": [parameter for parameter in copied_parameters if parameter is not None]}
        )
        # The names would no longer match the parameters, some of which are left out.
        groups[-1].pop("param_names", None)
    try:
        make: Any = type(optimizer)
        probe = make([group for group in groups if group["params"]])
        # Optimizers allocate state in their first step, and only for parameters with a gradient.
        for group in groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        probe.step()
    except Exception:  # a user's class may do anything with tensors that have no values
        return None
    return _state_bytes(probe)


def _state_bytes(optimizer: Optimizer) -> int:
    return sum(tensor.nbytes for tensor in optimizer_tensors(optimizer))


def _given(part: Partition) -> dict[str, tuple[float, ...]]:
    """Return the bytes per unit of the data itself, which do not depend on the model."""

    def of_one(values: Mapping[str, Tensor]) -> int:
        return sum(value.element_size() * math.prod(value.shape[1:]) for value in values.values())

    def units(**rates: float) -> tuple[float, ...]:
        return tuple(rates.get(unit, 0.0) for unit in UNITS)

    return {
        "features": units(rows=of_one(part.nodes)),
        "edges": units(edges=3 * INDEX_BYTES + of_one(part.edges)),
        "tables": units(rows=2 * INDEX_BYTES, halo=2 * INDEX_BYTES),  # original ids, apart and in one list
    }


# Steps on synthetic graphs -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    bytes: Mapping[str, int]
    graded: tuple[bool, ...]


def _steps(
    own_copy: nn.Module,
    part: Partition,
    pieces: Sequence[Partition],
    options: PartOptions,
    *,
    several: bool = True,
) -> list[_Step]:
    models = _on(own_copy, part, pieces)
    if several:
        # Pieces are parts of one graph, so they must run at the same time to exchange their halo rows.
        return ThreadGroup(len(pieces)).run(lambda c: _step(models[c.rank], pieces[c.rank], c, options))
    alone = ThreadChannel(ThreadGroup(1), 0)
    return [_step(one, piece, alone, options) for one, piece in zip(models, pieces, strict=True)]


def _on(own_copy: nn.Module, part: Partition, pieces: Sequence[Partition]) -> list[nn.Module]:
    """Return a copy of the model for each piece, with tables of its size; all other weights are shared."""
    # A table of the model with a row per vertex (such as an embedding) must have the piece's size.
    apart = {id(table) for table in tables_of(own_copy, part)}
    shared = {id(p): p for p in own_copy.parameters() if id(p) not in apart}
    models = [copied(own_copy, shared) for _ in pieces]
    for model, piece in zip(models, pieces, strict=True):
        fit(model, part, piece)
    return models


def _step(model: nn.Module, piece: Partition, channel: ThreadChannel, options: PartOptions) -> _Step:
    """Run one training step and one evaluation as the engine does, and measure what they keep."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with parallelize(model, piece, channel, replace(options, device=CPU)) as net:
        model.train()
        with SavedMemory(net.scope, model) as saved:
            out: Any = net.forward(1, training=True, checked=True)
        # The token ties every exchange to the loss. Otherwise a piece whose outputs do not depend on an
        # exchange would skip it in backward, and its peers would wait.
        loss = out.sum().float() + net.scope.forward.forward_pass.token
        reruns: list[list[Tensor]] = []
        net.scope.channel.reruns = reruns
        # autograd.grad, because the pieces share one copy of the weights and backward() would add to it.
        grads = torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()
        del out, loss
        # An evaluation may build further tables that a rank keeps, so it runs before the count.
        model.eval()
        with torch.no_grad():
            net.forward(1, training=False, checked=True)
        ledger = ledger_of(net.scope, model)
    kept, waiting = dict(ledger.bytes), dict(saved.bytes or {})
    if options.tensor > 1:  # with slices, what is counted as halo by its number of rows are rows of all ranks
        kept["tables"] = kept.get("tables", 0) + kept.pop("halo", 0)
        waiting["activations"] = waiting.get("activations", 0) + waiting.pop("halo", 0)
    found = {kind: kept.get(kind, 0) + waiting.get(kind, 0) for kind in FITTED}
    found[SAVED_HALO] = waiting.get("halo", 0)
    found |= {f"{AGAIN}{place}": sum(ledger.apart(saved).values()) for place, saved in enumerate(reruns)}
    # `grads` is empty if the loss needs no gradient; `graded` still has an entry for each parameter.
    return _Step(found, tuple(grad is not None for grad in grads) or (False,) * len(parameters))


def _slice_units(rows: float, halo: float, edges: float, group_size: GroupSize) -> tuple[float, ...]:
    """Return the counts of each of :data:`SLICE_UNITS`; a rank's rows may be its equal share of all rows."""
    # Lists of the group's halo or edges are whole on each rank; slices of their features are a rank's share.
    # The share of the group's rows needs no unit of its own: it is `rows`.
    each = [(whole, whole / group_size.ranks) for whole in (group_size.halo, group_size.edges)]
    return (1.0, rows, halo, edges, group_size.rows, *chain.from_iterable(each))


def _by_slice(
    own_copy: nn.Module, part: Partition, options: PartOptions, numbers: Sequence[int], groups: int
) -> dict[str, tuple[float, ...]]:
    """Measure bytes by kind for each of :data:`SLICE_UNITS`, on the rank that holds most.

    The ranks of a group differ: one may have an attention head more than the others.

    Args:
        own_copy: The model.
        part: The part that attributes are drawn from.
        options: How the model runs.
        numbers: The numbers of slices to measure.
        groups: The number of parts, each of which is sliced.
    """
    units: list[tuple[float, ...]] = []
    found: list[dict[str, int]] = []
    for (vertices, edges, skewed), count in product(SLICED, numbers):
        size, data = count * groups, drawn(part, vertices, edges, options.seed)
        # Squaring moves most targets to the first vertices, so parts differ in edges and halo rows. With
        # even graphs alone, the counts would be proportional and their rates could not be told apart.
        if skewed:
            data.edge_index[1] = data.edge_index[1] ** 2 // vertices
        # Rank = part * count + slice, as in the mesh, so owner // count is the part of a vertex.
        owner = torch.arange(vertices) * size // vertices
        pieces = [extract(data, owner, rank, size) for rank in range(size)]
        steps = _steps(own_copy, part, pieces, replace(options, tensor=count))
        each = split_counts(data.edge_index, owner, size)
        for group, one in enumerate(split_counts(data.edge_index, owner // count, groups)):
            ranks = range(group * count, (group + 1) * count)
            group_size = GroupSize(one.rows, one.edges, one.halo, count)
            halo, most = (max(getattr(each[rank], unit) for rank in ranks) for unit in ("halo", "edges"))
            units.append(_slice_units(one.rows / count, halo, most, group_size))
            kinds = [kind for kind in steps[0].bytes if kind in SLICE_KINDS or kind.startswith(AGAIN)]
            found.append({kind: max(steps[rank].bytes.get(kind, 0) for rank in ranks) for kind in kinds})
    # Columns are scaled to at most 1 before the fit: rcond then drops combinations of units that are
    # dependent, and not units that are merely small.
    table = np.array(units, dtype=np.float64)
    scale = np.maximum(table.max(axis=0), 1.0)

    def solved(kind: str) -> tuple[float, ...]:
        rates = np.linalg.lstsq(table / scale, [one.get(kind, 0) for one in found], rcond=1e-9)[0] / scale
        return tuple(rates.tolist())

    return {kind: solved(kind) for kind in found[0]}
