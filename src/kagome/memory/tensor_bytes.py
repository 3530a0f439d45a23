"""Tensor bytes: the memory behind a rank's tensors, by kind, with each storage counted once.

Where it sits: ``train.graph_engine`` puts a :class:`SavedMemory` around the first forward in training.
``train.admission`` and ``estimate`` count with a :class:`TensorMemory`. The result is a record of
``records.memory``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kagome.graph.partition.partition import Partition
from kagome.graph.structure import attributes
from kagome.halo.comm_recorder import tensors_of
from kagome.intercept.interceptor import Interceptor
from kagome.model.saved_tensor_hook import SavedTensors
from kagome.records.memory import MemoryByKind


class Held(NamedTuple):
    """Memory that was counted: its kind and bytes, and the first tensor that was found there."""

    kind: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str


class TensorMemory:
    """Counts bytes by kind; a storage counts for the first kind that it is added to.

    Args:
        own: The number of own rows, n.
        halo: The number of halo rows, H.
        device: Tensors on other devices do not count.
    """

    def __init__(self, own: int, halo: int, device: torch.device) -> None:
        self.own, self.halo, self.device = own, halo, device
        self.bytes: dict[str, int] = defaultdict(int)
        self.held: dict[int, Held] = {}
        """What was counted, by its address in memory."""

    @property
    def total(self) -> int:
        """The bytes of all that was counted."""
        return sum(each.bytes for each in self.held.values())

    def add(self, kind: str, tensors: Iterable[Tensor], *, rows: bool = False) -> None:
        """Count the bytes of tensors under a kind.

        Args:
            kind: The kind that they count for.
            tensors: Any tensors; memory that was counted before is left out.
            rows: Whether the share of halo rows in them counts as ``halo``.
        """
        for tensor in tensors:
            place, size = self._lies(tensor)
            if not size or place in self.held:
                continue
            self.held[place] = Held(kind, size, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            away = self._away(tensor, size) if rows else 0
            self.bytes["halo"] += away
            self.bytes[kind] += size - away

    def apart(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return the memory of those tensors that have not been counted, without counting it.

        Args:
            tensors: Any tensors.

        Returns:
            Address in memory -> bytes of the storage there.
        """
        return {place: size for place, size in map(self._lies, tensors) if size and place not in self.held}

    def _lies(self, tensor: Tensor) -> tuple[int, int]:
        """Return the address of a tensor's storage and its bytes; zeros if the tensor does not count."""
        if tensor.device.type != self.device.type or not _dense(tensor):
            return 0, 0
        # The whole storage counts, also for a view: it stays in memory as long as any view of it does.
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def _away(self, tensor: Tensor, size: int) -> int:
        """Return the bytes of halo rows in a tensor of own and halo rows, or of halo rows alone."""
        # Plain tensors carry no mark, so sizes decide: n means own rows, H halo rows, n + H both in one
        # tensor. If n is among the sizes, the tensor counts as own rows, also where H equals another of its
        # sizes.
        if not self.halo or self.own in tensor.shape:
            return 0
        if self.halo in tensor.shape:
            return size
        whole = self.own + self.halo
        return size // whole * self.halo if whole in tensor.shape and size % whole == 0 else 0


def _dense(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers of its own in memory; those of forward-mode derivatives may not."""
    stored = tensor.layout == torch.strided and torch._C._has_storage(tensor)
    return stored and not tensor._is_zerotensor()


def ledger_of(scope: Interceptor, model: nn.Module, copies: Iterable[Tensor] = ()) -> TensorMemory:
    """Count what a rank keeps from one forward to the next, without gradients and the optimizer's state.

    Args:
        scope: The rank's interceptor.
        model: The user's module.
        copies: Further copies of weights, such as those of the best epoch.
    """
    plan = scope.views[0].rows
    # Of several vertex sets, sizes do not say whose halo rows a tensor has: they count for its own kind.
    halo = 0 if scope.sets.several else plan.halo
    ledger = TensorMemory(plan.own, halo, scope.device)
    ledger.add("weights", (*model.parameters(), *model.buffers(), *copies))
    add_scope(ledger, scope)
    # Tensors that layers keep as plain attributes, such as those of GCNConv(cached=True).
    ledger.add("tables", (t for module in model.modules() for t in tensors_in(vars(module).values())))
    return ledger


def add_scope(ledger: TensorMemory, scope: Interceptor) -> None:
    """Count the tensors that an interceptor keeps from one forward to the next."""
    for kind, tensor in _held_by(scope):
        ledger.add("tables" if kind == "kept" else kind, [tensor], rows=kind == "kept")


def optimizer_tensors(optimizer: Optimizer) -> Iterable[Tensor]:
    """Yield the tensors of an optimizer's state."""
    return (tensor for state in optimizer.state.values() for tensor in tensors_in(state.values()))


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """Yield the tensors among some values, and those in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (item for item in value if isinstance(item, Tensor))


class SavedMemory:
    """A context around one forward in training that measures what autograd saves until backward.

    Memory that a rank holds in any case (weights, features, edges, tables) does not count again. Where layers
    are recomputed in backward, the recorded rows that they received from peers count too.

    Args:
        scope: The rank's interceptor.
        model: The user's module.
    """

    def __init__(self, scope: Interceptor, model: nn.Module) -> None:
        self.scope, self.model = scope, model
        self.bytes: Mapping[str, int] | None = None
        self.places: frozenset[int] = frozenset()
        """The addresses of what autograd saves."""

    def __enter__(self) -> SavedMemory:
        self._saved = SavedTensors()
        self._recording = self._saved.recording()
        self._recording.__enter__()
        # Layers that are recomputed keep a record of the rows they received; each is added to this list too.
        self.scope.channel.records = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recording.__exit__(kind, error, trace)
        records, self.scope.channel.records = self.scope.channel.records or [], None
        if error is None:
            ledger = ledger_of(self.scope, self.model)
            # The ledger keeps the addresses and forgets the counts, so that memory held anyway is not counted
            # again.
            ledger.bytes.clear()
            kept = self._saved.take()
            self.places = frozenset(tensor.untyped_storage().data_ptr() for tensor in kept if _dense(tensor))
            ledger.add("activations", kept, rows=True)
            for record in records:
                ledger.add("activations", tensors_of(record), rows=True)
            self.bytes = {kind: ledger.bytes[kind] for kind in ("activations", "halo")}


def account(
    ledger: TensorMemory, model: nn.Module, optimizer: Optimizer, saved: Mapping[str, int] | None
) -> MemoryByKind:
    """Count gradients and the optimizer's state too, and return the memory by kind of a rank.

    Args:
        ledger: The count of all else that the rank holds.
        model: The user's module.
        optimizer: The optimizer of the rank's parameters.
        saved: The bytes of ``activations`` and of ``halo`` rows that autograd saves; None if not measured.
    """
    ledger.add("gradients", (p.grad for p in model.parameters() if p.grad is not None))
    ledger.add("optimizer", optimizer_tensors(optimizer))
    found = ledger.bytes
    return MemoryByKind(
        weights=found["weights"],
        gradients=found["gradients"],
        optimizer=found["optimizer"],
        features=found["features"],
        edges=found["edges"],
        tables=found["tables"] + found["send"],
        activations=None if saved is None else saved["activations"],
        halo=found["halo"] + (0 if saved is None else saved.get("halo", 0)),
    )


# What an interceptor keeps -------------------------------------------------------------------------


def _held_by(scope: Interceptor) -> Iterator[tuple[str, Tensor]]:
    """Yield each kept tensor with its kind: ``features``, ``edges``, ``send``, ``tables`` or ``kept``.

    Tensors of kind ``kept`` were computed once from the others; rows of other ranks are among them. Tensors
    may share memory and appear more than once; the first kind counts. No module outside this one has to know
    what the interceptor and its parts keep.
    """
    given, first = scope.given_part, scope.views[0]
    parts = [given] if isinstance(given, Partition) else [each.part for each in given.edges]
    # Before the inputs of forward, which mix attributes of vertices and of edges.
    for part in parts:
        for value in (part.edge_index, part.edge_ids, *part.edges.values()):
            yield "edges", value
    for view in scope.views:
        for value in (view.edge_index, view.given, view.edge_ids, *view.attributes.values()):
            yield "edges", value
        # The first view is of in-edges and has the part's own send list. A view of out-edges has another.
        yield ("send" if view is first else "tables"), view.rows.send
        yield "tables", view.ids
    for part in parts:
        yield "send", part.send
        for value in (part.own, part.halo):
            yield "tables", value
    nodes = [given.nodes] if isinstance(given, Partition) else given.nodes
    for rows in (scope.inputs, *nodes, *(v for v in scope.inputs.values() if isinstance(v, dict))):
        for value in attributes.tensors_of(rows).values():
            yield "features", value
    for structure in scope.deferral.structures():
        yield from (("tables", end) for end in (structure.source, structure.target))
        yield from (("tables", value) for value in structure.kept())
    if scope.deferral.summed is not None:
        yield from (("tables", value) for value in scope.deferral.summed.held_lists())
    for value in (*scope.constants.held(), *scope.ids.held(), *scope.reads.held_lists()):
        yield "kept", value
