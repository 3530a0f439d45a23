"""Saved tensors: the bytes that autograd saves at each step of a model, and the width of its halo reads.

Where it sits: ``pipelining.staging`` asks before it cuts a model. The memory of a stage is estimated from
what its steps save and read. All else that a rank holds is measured in ``memory.estimate``, on whole steps of
training: an optimizer or a table belongs to no step of the model.

Steps share memory: the result of a ReLU is saved by the ReLU itself and by the layer that reads it. If a cut
lies between them, each stage has a copy, else there is one for both. The same holds for reads of the same
rows::

    first ── relu ── last        pieces: {first}, {relu, last}
                │                a rank holds the pieces that any step of its stages saves
           (a cut here)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor, nn

from kagome.comm.exchange import ExchangeRequest
from kagome.comm.in_process.thread_group import EndedWork, ThreadChannel, ThreadGroup
from kagome.components.model_setup import model_copy
from kagome.components.parallelize import CPU, ParallelModel, PartOptions, parallelize
from kagome.components.task import undisturbed
from kagome.deferred.lazy_tensor import EscapeError
from kagome.graph.partition.partition import Partition, partition
from kagome.memory.tensor_bytes import ledger_of
from kagome.model.copies import copied
from kagome.model.saved_tensor_hook import SavedTensors
from kagome.model.trace.graph import LayerGraph
from kagome.profile.part_size import UNITS, PartSize, counts_of, fitted
from kagome.profile.step_shapes import SAMPLE, one_pass
from kagome.profile.step_times import step_by_step
from kagome.profile.subgraph import take_sample
from kagome.profile.synthetic_parts import fit, made_pieces

Pieces = Mapping[frozenset[str], int]
"""Bytes that autograd saves, or bytes of rows that are read, by the set of steps that share them."""
Pair = tuple[float, float]
"""Bytes forward and backward."""


@dataclass(frozen=True)
class ActivationProfile:
    """Bytes that each step of a model saves and reads, by the names of the steps.

    Args:
        pieces: The steps that save some memory -> its bytes for each of ``part_size.UNITS``; empty if
            unknown.
        reads: The steps that read some halo rows -> bytes of such a row and of its gradient; None if unknown.
    """

    pieces: Mapping[frozenset[str], tuple[float, ...]]
    reads: Mapping[frozenset[str], Pair] | None

    def whole(self, counts: PartSize) -> float | None:
        """Return the bytes that autograd saves for the whole model; None if unknown.

        Args:
            counts: The size of the part that the model runs on.
        """
        return sum(self._sizes(counts).values()) if self.pieces else None

    def share(self, steps: Collection[str], counts: PartSize) -> float:
        """Return the share of the bytes saved for the whole model that some steps save.

        Args:
            steps: The names of the steps in all stages of a rank.
            counts: The size of the part that the model runs on.

        Returns:
            A share of at most 1; 1 if nothing is known.
        """
        names, every = set(steps), self._sizes(counts)
        whole = sum(every.values())
        return sum(size for keepers, size in every.items() if keepers & names) / whole if whole else 1.0

    def _sizes(self, counts: PartSize) -> dict[frozenset[str], float]:
        return {
            keepers: max(sum(rate * unit for rate, unit in zip(rates, counts.units, strict=True)), 0.0)
            for keepers, rates in self.pieces.items()
        }

    def read(self, steps: Collection[str]) -> Pair | None:
        """Return the bytes per row over all reads of neighbours by some steps, forward and backward.

        Args:
            steps: The names of the steps in all stages of a rank.

        Returns:
            Bytes of a row and of its gradient; None if unknown.
        """
        if self.reads is None:
            return None
        names = set(steps)
        mine = [pair for readers, pair in self.reads.items() if readers & names]
        return sum(there for there, _ in mine), sum(back for _, back in mine)


def keeping(model: nn.Module, graph: LayerGraph, part: Partition, options: PartOptions) -> ActivationProfile:
    """Profile a copy of a model step by step on small synthetic graphs, or on samples if it fails on those.

    Args:
        model: The user's module; it stays unchanged, and so do all random number generators.
        graph: The steps of the model.
        part: The part that attributes are drawn from.
        options: How the model runs; here on the CPU.

    Returns:
        The profile of all steps; an empty one if a copy on the CPU fails on both kinds of graphs.

    Raises:
        EscapeError: If a message reaches code that fast paths do not see.

    Cost:
        Seven forwards and backwards on 261 rows altogether, in threads of this process; two more on samples
        if these fail. A copy of the model, and in each thread the gradients of one step.
    """
    # The two samples are graphs by themselves and exchange no rows, so fewer units can be told apart.
    for groups, among in ((_synthetic, UNITS), (_sampled, ("rows", "edges"))):
        try:
            with undisturbed():
                pieces, own_copy = groups(part, options.seed), model_copy(model)
                ran = [one for group in pieces for one in _of_group(own_copy, graph, part, group, options)]
            return _fitted_profile([piece for group in pieces for piece in group], ran, among)
        except EscapeError:
            raise
        except Exception:  # an estimate must never end a run
            continue
    return ActivationProfile({}, None)


def _synthetic(part: Partition, seed: int) -> list[list[Partition]]:
    return [made_pieces(part, several=True, loops=False, seed=seed)]


def _sampled(part: Partition, seed: int) -> list[list[Partition]]:
    sizes = SAMPLE, SAMPLE // 2
    return [partition(take_sample(part, size, seed), parts=1, method="contiguous") for size in sizes]


@dataclass(frozen=True)
class _Ran:
    pieces: Pieces
    there: Pieces
    """Bytes of halo rows sent forward, by the steps that read the same rows."""
    back: Mapping[str, float]
    """Step -> bytes of halo gradients that it sent backward."""


def _fitted_profile(
    pieces: Sequence[Partition], ran: Sequence[_Ran], among: Collection[str]
) -> ActivationProfile:
    counts = [counts_of(piece) for piece in pieces]
    kept = fitted(counts, [one.pieces for one in ran], among)
    # Forward, an owner sends a row once to each reading part (`sent`). Backward, a reader returns one
    # gradient per halo row (`halo`). So bytes per row have different denominators.
    sent, read = (sum(getattr(one, unit) for one in counts) for unit in ("sent", "halo"))
    if not sent or not read:
        return ActivationProfile(kept, None)
    reads: dict[frozenset[str], Pair] = {}
    for readers in dict.fromkeys(chain.from_iterable(one.there for one in ran)):
        reads[readers] = sum(one.there.get(readers, 0) for one in ran) / sent, 0.0
    for name in ran[0].back:
        there, _ = reads.get(frozenset([name]), (0.0, 0.0))
        reads[frozenset([name])] = there, sum(one.back[name] for one in ran) / read
    return ActivationProfile(kept, reads)


class _Noting(ThreadChannel):
    """A channel that records the rows of each message and the bytes sent."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.gone: list[tuple[Tensor, int]] = []

    @property
    def halo(self) -> int:
        """Bytes of halo rows sent so far."""
        return self.bytes["halo"]

    def start(self, rows: Tensor, request: ExchangeRequest) -> EndedWork:
        """Start an exchange as :meth:`ThreadChannel.start` does, and record its rows and bytes."""
        before = self.halo
        # Only bytes of kind `halo`: 0 for sums over all vertices. Gradients that return to owners count too.
        come = super().start(rows, request)
        self.gone.append((rows.detach(), self.halo - before))
        return come


def _of_group(
    own_copy: nn.Module, graph: LayerGraph, part: Partition, pieces: Sequence[Partition], options: PartOptions
) -> list[_Ran]:
    models = [_sharing(own_copy) for _ in pieces]
    for model, piece in zip(models, pieces, strict=True):
        fit(model, part, piece)
    group, options = ThreadGroup(len(pieces)), replace(options, device=CPU)

    def work(rank: int) -> _Ran:
        channel = _Noting(group, rank)
        return _run(graph, parallelize(models[rank], pieces[rank], channel, options), channel)

    return [work(0)] if len(pieces) == 1 else group.run(lambda channel: work(channel.rank))


def _sharing(own_copy: nn.Module) -> nn.Module:
    """Return a copy that shares the weights but has its own gradients."""
    # A detached parameter shares memory but not `.grad`, to which the threads would add at the same time.
    weights = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in own_copy.parameters()}
    return copied(own_copy, weights)


def _run(graph: LayerGraph, net: ParallelModel, channel: _Noting) -> _Ran:
    model, scope = net.model, net.scope
    saved = SavedTensors(keeps=True)
    kept: list[tuple[str, list[Tensor]]] = []
    read: list[tuple[str, int, int]] = []
    back: dict[str, float] = {}
    with one_pass(net), saved.recording():
        for step, (forward, backward) in step_by_step(model, graph, scope, lambda: float(channel.halo)):
            kept.append((step.name, saved.take()))
            back[step.name] = backward
            for rows, size in channel.gone:
                if size and forward > 0:  # messages of the forward come first
                    # Rows that change are exchanged by each layer. Constant rows are exchanged once and kept,
                    # so layers that read them share one address.
                    place = rows.data_ptr() if scope.constants.is_constant(rows) else -len(read) - 1
                    read.append((step.name, place, size))
                    forward -= size
            channel.gone = []
            scope.constants.forget()  # a stage that starts with the next step would read and compute it anew
        ledger = ledger_of(scope, model)
        # `apart` leaves out what the rank holds anyway (weights, features, edges, tables).
        held = [(name, *place) for name, some in kept for place in ledger.apart(some).items()]
    return _Ran(_shared(held), _shared(read), back)


def _shared(found: Iterable[tuple[str, int, int]]) -> Pieces:
    """Group bytes by the set of steps that share them, given each step's addresses and sizes."""
    names: dict[int, set[str]] = defaultdict(set)
    sizes: dict[int, int] = {}
    for name, place, size in found:
        names[place].add(name)
        # Several steps report the same memory, each with its own view of it.
        sizes[place] = max(size, sizes.get(place, 0))
    pieces: dict[frozenset[str], int] = defaultdict(int)
    for place, some in names.items():
        pieces[frozenset(some)] += sizes[place]
    return pieces
