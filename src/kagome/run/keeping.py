"""Keeping: what autograd keeps of each step of a model, and how wide it reads neighbours' rows.

Where it sits: ``staging`` asks before it cuts a model; memory is foretold by what each stage keeps and reads.

Steps share memory: what a ReLU gives it keeps itself, and so does the layer that reads it. Where a cut lies
between them each stage has a piece of its own, else there is one for both::

    conv ── relu ── dropout ── conv      pieces: {relu, dropout}, {dropout, conv}
              └──1──┘ └───2─────┘        a stage has those that any of its steps keeps
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kagome.comm.local import LocalChannel, LocalGroup
from kagome.config import Train
from kagome.graph.partition import Partition, partition
from kagome.model.copies import copied
from kagome.model.exact import HANDLERS
from kagome.model.steps import LayerGraph
from kagome.neighbors.intercept import Interception
from kagome.neighbors.lazy import EscapeError
from kagome.run.check import twin_of
from kagome.run.counts import UNITS, Counts, counts_of, fitted
from kagome.run.holdings import ledger_of
from kagome.run.looks import SAMPLE, On
from kagome.run.made import made_pieces
from kagome.run.sample import take_sample
from kagome.run.task import undisturbed
from kagome.run.timing import step_by_step

Pieces = Mapping[frozenset[str], int]
"""Bytes that autograd keeps, by the steps that keep them."""


@dataclass(frozen=True)
class Keeping:
    """Of a model's steps, by their names.

    Args:
        pieces: The steps that keep some memory -> its bytes for each of ``counts.UNITS``.
        reads: Step -> bytes of a row that it reads of neighbours, and of that row's gradient.
    """

    pieces: Mapping[frozenset[str], tuple[float, ...]]
    reads: Mapping[str, tuple[float, float]]

    def share(self, steps: Collection[str], counts: Counts) -> float:
        """Of what autograd keeps of the whole model, what it keeps of some steps.

        Args:
            steps: Those of a stage.
            counts: Of what the model is run on.

        Returns:
            All of it where nothing is known.
        """
        names = set(steps)
        every = {
            keepers: max(sum(rate * unit for rate, unit in zip(rates, counts.units, strict=True)), 0.0)
            for keepers, rates in self.pieces.items()
        }
        whole = sum(every.values())
        return sum(size for keepers, size in every.items() if keepers & names) / whole if whole else 1.0

    def read(self, steps: Collection[str]) -> tuple[float, float]:
        """Bytes of a row at all reads of neighbours by some steps, and of its gradients."""
        forward, backward = (sum(self.reads.get(name, (0.0, 0.0))[way] for name in steps) for way in (0, 1))
        return forward, backward


def keeping(model: nn.Module, graph: LayerGraph, part: Partition, train: Train, *, fast: bool) -> Keeping:
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
        Seven forwards and backwards on 261 rows altogether, in threads of this process; a copy of the model.
    """
    # Of samples, each by itself, no row crosses; there are two.
    for groups, among in ((_made, UNITS), (_sampled, ("rows", "edges"))):
        try:
            with undisturbed():
                pieces, twin = groups(part, train.seed), twin_of(model)
                ran = [one for group in pieces for one in _of_group(twin, graph, group, train, fast=fast)]
            return _told([piece for group in pieces for piece in group], ran, among)
        except EscapeError:
            raise
        except Exception:  # a forecast never ends a run
            continue
    return Keeping({}, {})


def _made(part: Partition, seed: int) -> list[list[Partition]]:
    return [made_pieces(part, several=True, loops=False, seed=seed)]


def _sampled(part: Partition, seed: int) -> list[list[Partition]]:
    sizes = SAMPLE, SAMPLE // 2
    return [partition(take_sample(part, size, seed), parts=1, method="contiguous") for size in sizes]


@dataclass(frozen=True)
class _Ran:
    pieces: Pieces
    sent: Mapping[str, tuple[float, float]]
    """Step -> bytes of halos that it sent forward, and backward."""


def _told(pieces: Sequence[Partition], ran: Sequence[_Ran], among: Collection[str]) -> Keeping:
    counts = [counts_of(piece) for piece in pieces]
    rows = sum(one.sent for one in counts), sum(one.halo for one in counts)
    sent = {name: [sum(one.sent[name][way] for one in ran) for way in (0, 1)] for name in ran[0].sent}
    kept = fitted(counts, [one.pieces for one in ran], among)
    return Keeping(
        kept,
        {name: (there / max(rows[0], 1), back / max(rows[1], 1)) for name, (there, back) in sent.items()},
    )


def _of_group(
    twin: nn.Module, graph: LayerGraph, pieces: Sequence[Partition], train: Train, *, fast: bool
) -> list[_Ran]:
    models = [_sharing(twin) for _ in pieces]
    group = LocalGroup(len(pieces))

    def work(channel: LocalChannel) -> _Ran:
        scope = Interception(pieces[channel.rank], channel, seed=train.seed, handlers=HANDLERS, fast=fast)
        return _run(models[channel.rank], graph, scope, channel, train)

    return [work(LocalChannel(group, 0))] if len(pieces) == 1 else group.run(work)


def _sharing(twin: nn.Module) -> nn.Module:
    """A copy with the same weights, and gradients of its own."""
    weights = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in twin.parameters()}
    return copied(twin, weights)


def _run(
    model: nn.Module, graph: LayerGraph, scope: Interception, channel: LocalChannel, train: Train
) -> _Ran:
    alive: list[Tensor] = []
    found: list[tuple[str, list[Tensor]]] = []
    sent: dict[str, tuple[float, float]] = {}

    def keep(tensor: Tensor) -> Tensor:
        alive.append(tensor.detach())  # alive, so that nothing else comes to lie there
        return tensor

    def crossed() -> float:
        return float(channel.bytes["halo"])

    with On(model, scope, train), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for step, bytes_ in step_by_step(model, graph, scope, crossed):
            sent[step.name] = bytes_
            found.append((step.name, alive))
            alive = []
        ledger = ledger_of(scope, model)
        keepers: dict[int, set[str]] = defaultdict(set)
        sizes: dict[int, int] = {}
        for name, tensors in found:
            for place, size in ledger.apart(tensors).items():
                keepers[place].add(name)
                sizes[place] = size
    pieces: dict[frozenset[str], int] = defaultdict(int)
    for place, names in keepers.items():
        pieces[frozenset(names)] += sizes[place]
    return _Ran(pieces, sent)
