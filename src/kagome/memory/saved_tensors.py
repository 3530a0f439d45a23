"""Keeping: what autograd keeps of each step of a model, and how wide it reads neighbours' rows.

Where it sits: ``pipeline.staging`` asks before it cuts a model; memory is foretold by what each stage keeps
and reads.

Steps share memory: what a ReLU gives it keeps itself, and so does the layer that reads it. Where a cut lies
between them each stage has a piece of its own, else there is one for both. Reads of the same rows likewise::

    first ── relu ── last        pieces: {first}, {relu, last}
                │                a rank has those that any step of its stages keeps
           (a cut here)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kagome.comm.in_process.thread_group import Come, ThreadChannel, ThreadGroup
from kagome.components.model_setup import twin_of
from kagome.components.task import undisturbed
from kagome.config import Train
from kagome.deferred.lazy_tensor import EscapeError
from kagome.graph.partition.partition import Partition, partition
from kagome.intercept.interceptor import Interceptor
from kagome.memory.tensor_bytes import HeldTensor, ledger_of, restored
from kagome.model.copies import copied
from kagome.model.exact.handlers import HANDLERS
from kagome.model.trace.graph import LayerGraph
from kagome.profile.part_size import UNITS, PartSize, counts_of, fitted
from kagome.profile.step_shapes import SAMPLE, On
from kagome.profile.step_times import step_by_step
from kagome.profile.subgraph import take_sample
from kagome.profile.synthetic_parts import fit, made_pieces

Pieces = Mapping[frozenset[str], int]
"""Bytes that autograd keeps, or rows that are read, by the steps that share them."""
Pair = tuple[float, float]
"""Forward, and backward."""


@dataclass(frozen=True)
class ActivationProfile:
    """Of a model's steps, by their names.

    Args:
        pieces: The steps that keep some memory -> its bytes for each of ``counts.UNITS``; none if not known.
        reads: The steps that read some rows of neighbours -> bytes of such a row, and of its gradient; None
            if not known.
    """

    pieces: Mapping[frozenset[str], tuple[float, ...]]
    reads: Mapping[frozenset[str], Pair] | None

    def whole(self, counts: PartSize) -> float | None:
        """Bytes that autograd keeps of the whole model; None where that is not known.

        Args:
            counts: Of what the model is run on.
        """
        return sum(self._sizes(counts).values()) if self.pieces else None

    def share(self, steps: Collection[str], counts: PartSize) -> float:
        """Of what autograd keeps of the whole model, what it keeps of some steps.

        Args:
            steps: Those of all stages of a rank.
            counts: Of what the model is run on.

        Returns:
            All of it where nothing is known.
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
        """Bytes of a row at all reads of neighbours by some steps, and of its gradients.

        Args:
            steps: Those of all stages of a rank.

        Returns:
            None where that is not known.
        """
        if self.reads is None:
            return None
        names = set(steps)
        mine = [pair for readers, pair in self.reads.items() if readers & names]
        return sum(there for there, _ in mine), sum(back for _, back in mine)


def keeping(
    model: nn.Module, graph: LayerGraph, part: Partition, train: Train, *, fast: bool
) -> ActivationProfile:
    """Run a copy of a model step by step on small made graphs, or where it fails there on samples of its own.

    Args:
        model: The user's module; it stays as it is, and so do all generators of random numbers.
        graph: Its steps.
        part: Where attributes are drawn from.
        train: Seed and mixed precision.
        fast: Whether messages are reduced by kernels.

    Returns:
        Nothing of any step where a copy on the CPU fails on both.

    Raises:
        EscapeError: If a message reaches code that fast paths do not see.

    Cost:
        Seven forwards and backwards on 261 rows altogether, in threads of this process (where they fail two
        more, on samples); a copy of the model, and in each thread gradients of one step.
    """
    # Of samples, each by itself, no row crosses; there are two.
    for groups, among in ((_made, UNITS), (_sampled, ("rows", "edges"))):
        try:
            with undisturbed():
                pieces, twin = groups(part, train.seed), twin_of(model)
                ran = [
                    one for group in pieces for one in _of_group(twin, graph, part, group, train, fast=fast)
                ]
            return _told([piece for group in pieces for piece in group], ran, among)
        except EscapeError:
            raise
        except Exception:  # a forecast never ends a run
            continue
    return ActivationProfile({}, None)


def _made(part: Partition, seed: int) -> list[list[Partition]]:
    return [made_pieces(part, several=True, loops=False, seed=seed)]


def _sampled(part: Partition, seed: int) -> list[list[Partition]]:
    sizes = SAMPLE, SAMPLE // 2
    return [partition(take_sample(part, size, seed), parts=1, method="contiguous") for size in sizes]


@dataclass(frozen=True)
class _Ran:
    pieces: Pieces
    there: Pieces
    """Bytes of halos that were sent forward, by the steps that read the same rows."""
    back: Mapping[str, float]
    """Step -> bytes of halos that it sent backward."""


def _told(pieces: Sequence[Partition], ran: Sequence[_Ran], among: Collection[str]) -> ActivationProfile:
    counts = [counts_of(piece) for piece in pieces]
    kept = fitted(counts, [one.pieces for one in ran], among)
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
    """Notes of which rows a message was, and how many bytes of it went."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.gone: list[tuple[Tensor, int]] = []

    @property
    def halo(self) -> int:
        """Bytes of halos that were sent so far."""
        return self.bytes["halo"]

    def start_exchange(self, rows: Tensor, *counts: Sequence[int], **rest: Any) -> Come:
        """See :meth:`ThreadChannel.start_exchange`."""
        before = self.halo
        come = super().start_exchange(rows, *counts, **rest)
        self.gone.append((rows.detach(), self.halo - before))
        return come


def _of_group(
    twin: nn.Module,
    graph: LayerGraph,
    part: Partition,
    pieces: Sequence[Partition],
    train: Train,
    *,
    fast: bool,
) -> list[_Ran]:
    models = [_sharing(twin) for _ in pieces]
    for model, piece in zip(models, pieces, strict=True):
        fit(model, part, piece)
    group = ThreadGroup(len(pieces))

    def work(rank: int) -> _Ran:
        channel = _Noting(group, rank)
        scope = Interceptor(pieces[rank], channel, seed=train.seed, handlers=HANDLERS, fast=fast)
        return _run(models[rank], graph, scope, channel, train)

    return [work(0)] if len(pieces) == 1 else group.run(lambda channel: work(channel.rank))


def _sharing(twin: nn.Module) -> nn.Module:
    """A copy with the same weights, and gradients of its own."""
    weights = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in twin.parameters()}
    return copied(twin, weights)


def _run(model: nn.Module, graph: LayerGraph, scope: Interceptor, channel: _Noting, train: Train) -> _Ran:
    alive: list[Tensor] = []
    kept: list[tuple[str, list[Tensor]]] = []
    read: list[tuple[str, int, int]] = []
    back: dict[str, float] = {}

    def keep(tensor: Tensor) -> HeldTensor:
        alive.append(tensor.detach())  # nothing else comes to lie there
        return HeldTensor(tensor)

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, restored)
    with On(model, scope, train), hooks:
        for step, (forward, backward) in step_by_step(model, graph, scope, lambda: float(channel.halo)):
            kept.append((step.name, alive))
            back[step.name] = backward
            for rows, size in channel.gone:
                if size and forward > 0:  # what goes forward goes first
                    # Rows that change cross for each layer; those that last are kept by who has read them.
                    place = rows.data_ptr() if scope.lasting(rows) else -len(read) - 1
                    read.append((step.name, place, size))
                    forward -= size
            alive, channel.gone = [], []
            scope.forget_kept()  # a stage that begins later reads and computes it anew
        ledger = ledger_of(scope, model)
        held = [(name, *place) for name, some in kept for place in ledger.apart(some).items()]
    return _Ran(_shared(held), _shared(read), back)


def _shared(found: Iterable[tuple[str, int, int]]) -> Pieces:
    """Bytes by the steps that share them, of steps and the places in memory that each has."""
    names: dict[int, set[str]] = defaultdict(set)
    sizes: dict[int, int] = {}
    for name, place, size in found:
        names[place].add(name)
        sizes[place] = max(size, sizes.get(place, 0))
    pieces: dict[frozenset[str], int] = defaultdict(int)
    for place, some in names.items():
        pieces[frozenset(some)] += sizes[place]
    return pieces
