"""Workload: a model and a graph, measured once, from which plans for any cluster are predicted.

Where it sits: ``plan`` makes one; ``planner.candidates`` does the arithmetic.

::

    model ──epochs on small graphs──> seconds per row and edge, bytes per row exchanged   (epoch_costs)
    graph ──cut, or its degrees──> rows, edges and halo of each part                      (part_size)
    both  ──> bytes held                                                                  (memory.estimate)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import MessagePassing

from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions
from kagome.config import Allowed, Parallel, default_chunks, sends_sums
from kagome.errors import KagomeError, PlanError
from kagome.graph.partition.partition import Partition
from kagome.memory.estimate import MemoryRates as Held, rates_of
from kagome.model.fingerprint import identity
from kagome.model.split.stages import stage_bytes
from kagome.pipelining.staging import Steps, steps_of
from kagome.planner.candidates import OFF, Candidate, Plans, parts, ranked, slices
from kagome.planner.cluster import Cluster
from kagome.planner.cost_model import CostRates, Load, Sliced, Timed
from kagome.planner.memory_knobs import eased
from kagome.planner.pipe_candidates import PipeCut, pipes
from kagome.profile.cache import MeasurementCache
from kagome.profile.epoch_costs import (
    alone,
    coded,
    coding,
    halo_bytes,
    shares_of,
    summed_share,
    timed,
    transposes,
)
from kagome.profile.part_size import GroupSize, PartSize
from kagome.profile.synthetic_graphs import GraphSize, cuts_of, samples_of

SLICED = 2_000_000
"""Edges of the largest graph on which feature slices are timed."""
MOST_SLICES = 64
"""Most slices that are planned: more run out of columns, and costs are extrapolated from two and four."""
DEALT = ((1, 4.0), (1, 2.0), (2, 2.0), (2, 1.5), (3, 1.5), (4, 1.5))
"""Stages per rank, and chunks per rank of a pipeline, that are tried where history is allowed."""
OPTIONS = PartOptions()
"""How models run by default."""


@dataclass(frozen=True)
class MeasuredWorkload:
    """The measurements of one model.

    Args:
        model: The model.
        decoupled: Whether the model is decoupled: all its maps come before propagation.
        rates: Seconds, and bytes exchanged, per row and edge.
        held: The memory rates.
        transposed: Bytes per vertex of all transposes, for columns split between ranks and for others. None
            if the model makes no transposes.
        sliced: The times of a rank in two and in four slices. None if the model makes no transposes.
    """

    model: nn.Module
    decoupled: bool
    rates: CostRates
    held: Held
    transposed: tuple[float, float] | None
    sliced: tuple[Timed, Timed] | None = None

    @property
    def spread(self) -> float:
        """The largest relative difference between two measurements of its seconds."""
        return float(max(each.spread for each in (self.rates, *(self.sliced or ()))))

    def record(self) -> list[Any]:
        """Return the measurements as JSON values."""
        return [asdict(self.rates), asdict(self.held), self.transposed, list(map(asdict, self.sliced or ()))]

    @staticmethod
    def of(model: nn.Module, decoupled: bool, record: list[Any]) -> MeasuredWorkload:
        """Restore the measurements of a model from their record."""
        rates, held, transposed, slices_of = record
        sent = None if transposed is None else (transposed[0], transposed[1])
        took = [Timed(**each) for each in slices_of]
        both = (took[0], took[1]) if took else None
        return MeasuredWorkload(model, decoupled, _rates(rates), _held(held), sent, both)


@dataclass(frozen=True, eq=False)
class Workload:
    """A graph and the measured models that may be trained on it.

    Args:
        part: The whole graph as one part; if the graph is not at hand, a small graph that resembles it.
        graph: The size of the graph.
        models: The measured models; the user's own comes first.
        options: How the models run; cuts and synthetic graphs use its seed too.
        facts: For each model, all that its measurements depend on.
        kept: The cache of measurements.
        optimizer: The optimizer of the user's model, for the memory of its state.
        most: The number of threads that a single rank would have.
    """

    part: Partition
    graph: GraphSize
    models: tuple[MeasuredWorkload, ...]
    options: PartOptions
    facts: tuple[Any, ...]
    kept: MeasurementCache
    optimizer: torch.optim.Optimizer | None
    most: int

    @staticmethod
    def of(
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        part: Partition,
        graph: GraphSize,
        *,
        decoupled: nn.Module | None = None,
        options: PartOptions = OPTIONS,
        most: int = 1,
        kept: MeasurementCache | None = None,
    ) -> Workload:
        """Measure a model, and its decoupled form if there is one, for a graph.

        Args:
            model: The model as it would be trained.
            optimizer: The optimizer of its parameters, for the memory of its state.
            part: The graph as one part; see :class:`Workload`.
            graph: The size of the graph.
            decoupled: The decoupled model, if plans may use it.
            options: How the models run.
            most: The number of threads that a single rank would have, if it has fewer now.
            kept: The cache to look up earlier measurements in.

        Raises:
            PlanError: If the model fails on a small graph.

        Cost:
            If nothing is cached, some twenty epochs of each model on a graph of up to 4 million edges, and
            METIS cuts of it into two and four parts.
        """
        models = [(model, False)] + ([] if decoupled is None else [(decoupled, True)])
        # Facts are the key of the cache: everything that a measurement depends on and nothing else, so that
        # the next plan of the same model and graph finds it.
        same, own = [identity(each) for each, _ in models], kept or MeasurementCache()
        if None in same:  # a model without an identity cannot be a cache key
            own = MeasurementCache()
        step = None if optimizer is None else [type(optimizer).__qualname__, repr(optimizer.defaults)]
        size = [part.fingerprint, graph.vertices, graph.edges, graph.data is None]
        runs = [options.seed, options.fast, options.recompute, options.amp]
        facts = tuple([*size, each, place, step, runs, most] for place, each in enumerate(same))
        found = []
        # `measure` has this turn's values as defaults; a closure would see those of the last.
        for about, (each, first) in zip(facts, models, strict=True):

            def measure(each: nn.Module = each, first: bool = first) -> list[Any]:
                again = ", with layers that run again" if options.recompute else ""
                own.tell(
                    f"the {'decoupled ' if first else ''}model is measured{again}: some twenty epochs "
                    f"on parts of a graph of {graph.edges:,} edges"
                )
                return _measured(each, first, optimizer, part, graph, options, most).record()

            found.append(MeasuredWorkload.of(each, first, own.value("model", about, measure, _spread)))
        return Workload(part, graph, tuple(found), options, facts, own, optimizer, most)

    def parts(self, number: int, weights: tuple[float, ...] = ()) -> tuple[tuple[PartSize, ...], float]:
        """Return the sizes of the parts of a cut by weights, and the relative uncertainty of their halo."""

        def measure() -> list[Any]:
            counts, uncertain = self.graph.counts(number, self.options.seed, weights)
            return [[list(astuple(each)) for each in counts], uncertain]

        # The first four facts are about the graph; a cut does not depend on the model.
        facts = [*self.facts[0][:4], self.options.seed, number, *weights]
        counts, uncertain = self.kept.value("parts", facts, measure)
        return tuple(PartSize(*each) for each in counts), uncertain

    def _loads(
        self, each: MeasuredWorkload, number: int, weights: tuple[float, ...] = ()
    ) -> tuple[list[Load], float]:
        """Return the loads of parts whose ranks read halos, and the relative uncertainty of the halo."""
        counts, uncertain = self.parts(number, weights)
        share = each.rates.summed
        sums = share > 0 and number > 1
        loads = [_load(count, each.held, partial_sums=sums) for count in counts]
        if not sums:
            return loads, uncertain

        def measure() -> list[Any]:
            return [list(pair) for pair in self.graph.saved(number, self.options.seed, weights)]

        facts = [*self.facts[0][:4], self.options.seed, number, *weights]
        # A load may stand for all parts; none of them is then known to save anything.
        saved = self.kept.value("saved rows", facts, measure)[: len(loads)]
        return [
            replace(load, saved=(share * sent, share * read))
            for load, (sent, read) in zip(loads, saved, strict=True)
        ], uncertain

    def coded(self, place: int) -> CostRates:
        """Return the rates of one model, with the cost of rows encoded at one bit per number."""
        one = self.models[place]

        def measure() -> list[Any]:
            return [list(coded(one.model, self.part, self.options)), *coding()]

        found = self.kept.value("coded", self.facts[place], measure, lambda found: float(found[2]))
        (there, back), seconds, _ = found
        return replace(one.rates, coded=(there, back), coding=seconds)

    @cached_property
    def steps(self) -> Steps | None:
        """The steps of the user's model, for cuts into stages; None if it cannot be cut."""
        return _steps(self.models[0].model, self.part, self.options)

    def stages(self, ranks: int, dealt: int, chunks: int) -> PipeCut | None:
        """Cut the user's model into stages.

        Args:
            ranks: The number of ranks of the pipeline.
            dealt: The number of stages of each rank.
            chunks: The number of chunks of each part.

        Returns:
            The cut; None if the model cannot be cut in this way.
        """

        def measure() -> list[Any]:
            parallel = Parallel(pipe=ranks, stages_per_rank=dealt, chunks=chunks)
            model = self.models[0].model
            # [] stands for a model that cannot be cut, because JSON's null would be measured again.
            cut = None if self.steps is None else _cut(model, self.steps, self.part, self.graph, parallel)
            if cut is None:
                return []
            widths = None if cut.widths is None else [list(each) for each in cut.widths]
            return [cut.stage_bytes, cut.chunks, list(cut.shares), list(cut.reads), list(cut.kept), widths]

        found = self.kept.value("cut", [self.facts[0], ranks, dealt, chunks], measure)
        if not found:
            return None
        sent, in_chunks, shares, reads, kept, widths = found
        each = None if widths is None else tuple((there, back) for there, back in widths)
        return PipeCut(tuple(shares), sent, tuple(reads), tuple(kept), each, dealt, in_chunks)

    @cached_property
    def recomputed(self) -> Workload | None:
        """The same models and graph with layers that run again in backward; None if they cannot.

        Cost: that of :meth:`of`.
        """
        decoupled = next((each.model for each in self.models if each.decoupled), None)
        try:
            return Workload.of(
                self.models[0].model,
                self.optimizer,
                self.part,
                self.graph,
                decoupled=decoupled,
                options=replace(self.options, recompute=True),
                most=self.most,
                kept=self.kept,
            )
        except KagomeError:  # a layer that cannot run again is no reason to have no plan
            return None

    def plans(self, cluster: Cluster, allow: Collection[Allowed] = (), *, eases: bool = True) -> Plans:
        """Predict and rank the plans for a cluster.

        Args:
            cluster: The cluster to run on; a plan may use some or all of its devices.
            allow: The inexact methods that plans may use; decoupling is decided when the models are measured.
            eases: Whether plans that do not fit may hold fewer activations, if that is exact.

        Raises:
            PlanError: If no plan fits.

        Cost:
            A METIS cut for each number of parts, once per workload. If a plan that would be the fastest does
            not fit, the models are measured once more, with layers that run again.
        """
        found = self._candidates(cluster, allow)
        # A user who recomputes has decided what becomes of activations.
        if eases and not self.options.recompute:
            found = eased(found, lambda: self._again(cluster, allow), cluster)
        off = max(OFF, *(each.spread for each in self.models), *self.kept.doubtful.values())
        found = [replace(one, seconds_off=off) for one in found]
        facts = {"vertices": self.graph.vertices, "edges": self.graph.edges}
        return ranked(found, cluster, {"cluster": cluster.name, "ranks": cluster.size, **facts})

    def _again(self, cluster: Cluster, allow: Collection[Allowed]) -> list[Candidate]:
        """Predict the candidates whose layers run again in backward."""
        again = self.recomputed
        return [] if again is None else again._candidates(cluster, allow)

    def _candidates(self, cluster: Cluster, allow: Collection[Allowed]) -> list[Candidate]:
        """Predict all ways to cut the training for a cluster."""
        size = cluster.size
        # Divisors of the number of devices: every axis of a mesh is one.
        numbers = [number for number in range(1, size + 1) if size % number == 0]
        found: list[Candidate] = []
        for place, each in enumerate(self.models):
            # Encoding is timed only if some plan encodes.
            rates = self.coded(place) if "onebit" in allow and size > 1 else each.rates
            for number, weights in self._cuts(numbers, cluster):
                loads, uncertain = self._loads(each, number, weights)
                for way in _ways(allow if number > 1 else ()):
                    more = {"decoupled": each.decoupled, **way}
                    found.append(parts(number, loads, rates, cluster, uncertain, weights=weights, **more))
            if each.transposed is not None:
                # All divisors but the last: `number` parts leave size /
                # number slices, which must be more than one.
                some = [number for number in numbers[:-1] if size // number <= MOST_SLICES]
                found += [self._slices(each, number, cluster) for number in some]
        # The decoupled model has no stages: all of its hops come last.
        for ranks in numbers[1:]:
            cut = self.stages(ranks, 1, default_chunks(ranks, 1))
            if cut is None:
                break  # it cannot be cut into more stages either
            found += self._pipes(cut, cluster, "history" in allow)
        return found

    @staticmethod
    def _cuts(numbers: Sequence[int], cluster: Cluster) -> list[tuple[int, tuple[float, ...]]]:
        """Return each number of parts with parts that are alike, and by speed where ranks differ."""
        # Parts that are alike stay in the list: where links or fixed costs decide, they are as fast.
        cuts = [(number, weights) for number in numbers for weights in ((), cluster.weights(number))]
        return list(dict.fromkeys(cuts))

    def _pipes(self, cut: PipeCut, cluster: Cluster, history: bool) -> list[Candidate]:
        """Predict pipelines of the user's model in which each stage has parts, or parts in feature slices."""
        own, found = self.models[0], []
        size = cluster.size // cut.ranks
        for tensor in (number for number in range(1, size + 1) if size % number == 0):
            # Slices within stages: the whole graph passes as one chunk.
            if tensor > MOST_SLICES or (tensor > 1 and own.transposed is None):
                continue
            groups = size // tensor
            counts, uncertain = self.parts(groups)
            if tensor > 1:
                sliced, loads = self._sliced(own, counts, groups, tensor)
                found.append(
                    pipes(cut, groups, loads, own.rates, cluster, uncertain, chunks=1, sliced=sliced)
                )
                continue
            # Chunks send rows that other chunks read too, so partial sums are for parts of one.
            summed = self._loads(own, groups)[0]
            found.append(pipes(cut, groups, summed, own.rates, cluster, uncertain, chunks=1))
            if history and cut.chunks:
                loads = [_load(count, own.held) for count in counts]
                dealt = [
                    pipes(each, groups, loads, own.rates, cluster, uncertain, chunks=chunks)
                    for each, chunks in self._dealt(cut.ranks)
                ]
                # They differ in time alone. The one with a stage per rank and the usual chunks is kept too.
                best = min(dealt, key=lambda one: one.epoch_seconds)
                found += dealt[:1] if best is dealt[0] else [dealt[0], best]
        return found

    def _dealt(self, ranks: int) -> list[tuple[PipeCut, int]]:
        """Return the cuts into one and into several stages per rank, each with its number of chunks."""
        # The first way is the default of a run: one stage a rank, four chunks for each.
        ways = [(dealt, ceil(chunks * ranks)) for dealt, chunks in DEALT]
        cuts = [(self.stages(ranks, dealt, chunks), chunks) for dealt, chunks in ways]
        return [(cut, chunks) for cut, chunks in cuts if cut is not None]

    def _sliced(
        self, each: MeasuredWorkload, counts: Sequence[PartSize], groups: int, size: int
    ) -> tuple[Sliced, list[Load]]:
        """Return the cost of feature slices on ``size`` ranks of each part, and the load of each part."""
        assert each.transposed is not None
        assert each.sliced is not None

        def measure() -> list[list[Any]]:
            return [list(astuple(one)) for one in self.graph.shares(groups, size, self.options.seed)]

        facts = [*self.facts[0][:4], self.options.seed, groups, size]
        ranks = [PartSize(*one) for one in self.kept.value("shares", facts, measure)]
        # Data and activations are those of the fullest rank of a part; rows, edges and halo those of the
        # whole part, since slices read all of it.
        loads = []
        for part, count in enumerate(counts):
            group_size = GroupSize(count.rows, count.edges, count.halo, size)
            # One estimated size stands for all ranks if the graph is not at hand.
            own = ranks[part * size : (part + 1) * size] if len(ranks) > 1 else ranks
            held = {one: each.held.at(one, group_size=group_size).total for one in own}
            fullest = max(held, key=lambda one: held[one])
            loads.append(_load(count, each.held, fullest, group_size))
        shared, common = each.transposed
        # a (T - 1) / T + b (T - 1) bytes a vertex, see profile.epoch_costs.transposes.
        sent = (shared / size + common) * (size - 1) * self.graph.vertices
        two, four = ((one.seconds, one.row, one.edge) for one in each.sliced)
        return Sliced(size, two, four, each.sliced[0].meetings, sent), loads

    def _slices(self, each: MeasuredWorkload, groups: int, cluster: Cluster) -> Candidate:
        """Predict a plan of ``groups`` parts in which all ranks of the cluster slice features."""
        counts, uncertain = self.parts(groups)
        sliced, loads = self._sliced(each, counts, groups, cluster.size // groups)
        return slices(sliced, loads, each.rates, cluster, uncertain, groups=groups, decoupled=each.decoupled)


def _measured(
    model: nn.Module,
    decoupled: bool,
    optimizer: torch.optim.Optimizer | None,
    part: Partition,
    graph: GraphSize,
    options: PartOptions,
    most: int,
) -> MeasuredWorkload:
    transposed = transposes(model, part, options)
    # On tiny graphs, so a model that fails is refused before the long measurements.
    held = rates_of(model, optimizer, part, options, slices=() if transposed is None else (2, 4))
    if held.fault:
        raise PlanError("a model that runs on small graphs, to be measured", held.fault, hint="kagome check")
    samples = samples_of(graph, part, options.seed)
    weights = tuple(map(float, held.gradients))
    forward, backward = halo_bytes(model, part, options)
    took = asdict(timed(model, cuts_of(graph, part, options.seed), options))
    # Measured only where a run would send partial sums.
    share = summed_share(model, part, options) if sends_sums("auto", graph.edges) else 0.0
    rates = CostRates(**took, forward=forward, backward=backward, weights=weights, summed=share)
    # Ranks were timed with their share of the threads; a single rank may have all.
    times, apart = alone(model, samples[0], rates, options, most)
    rates = replace(rates, alone=times, spread=max(rates.spread, apart))
    if transposed is None:
        return MeasuredWorkload(model, decoupled, rates, held, None)
    # Slices of all ranks are timed one after another, which takes long on a large graph.
    small = [sample for sample in samples if sample.edge_index.size(1) <= SLICED]
    two, four = (
        timed(model, [shares_of(each, count) for each in small], options, slices=count) for count in (2, 4)
    )
    return MeasuredWorkload(model, decoupled, rates, held, transposed, (two, four))


def _spread(record: list[Any]) -> float:
    """Return the largest relative difference between two measurements of a model."""
    rates, _, _, slices_of = record
    return max(float(each["spread"]) for each in (rates, *slices_of))


def _rates(record: dict[str, Any]) -> CostRates:
    known: dict[str, Any] = {k: tuple(each) if isinstance(each, list) else each for k, each in record.items()}
    return CostRates(**known)


def _held(record: dict[str, Any]) -> Held:
    known = {
        name: {kind: tuple(each) for kind, each in record[name].items()}
        for name in ("by_unit", "by_slice", "by_share")
    }
    return Held(**{**record, "gradients": tuple(record["gradients"]), **known})


def _steps(model: nn.Module, part: Partition, options: PartOptions) -> Steps | None:
    """Find a model's steps; None if it cannot be traced, or if stages cannot run in this mode."""
    if options.recompute:
        return None
    try:
        return steps_of(model, part, Channel(None, "cpu"), (), options)
    except KagomeError:
        return None


def _cut(
    model: nn.Module, steps: Steps, part: Partition, graph: GraphSize, parallel: Parallel
) -> PipeCut | None:
    """Cut a model's layers into stages; None if it cannot be cut into that many."""
    try:
        staging = steps.staging(parallel, part)
    except KagomeError:
        return None
    spent = [sum(staging.seconds.get(step.name, 0.0) for step in stage.steps) for stage in staging.stages]
    total = sum(spent) or 1.0
    # A stage's reads of neighbours, in proportion to its seconds; at least
    # one, which costs the fixed time of a chunk.
    reads = sum(isinstance(module, MessagePassing) for module in model.modules())
    # Only shares of memory are asked for, so a part without halo will do.
    whole = PartSize(graph.vertices, 0, graph.edges, 0, 0, 0, 0)
    widths = [staging.read_by(rank) for rank in range(parallel.pipe)]
    return PipeCut(
        tuple(each / total for each in spent),
        float(stage_bytes(staging.stages, staging.survey, graph.vertices, graph.edges)),
        tuple(max(1, round(reads * each / total)) for each in spent),
        tuple(staging.kept_by(rank, whole) for rank in range(parallel.pipe)),
        None if None in widths else tuple(each for each in widths if each is not None),
        parallel.stages_per_rank,
        not steps.survey.beyond,
    )


def _ways(allow: Collection[Allowed]) -> list[dict[str, bool]]:
    """List the variants of a plan: rows whole or at one bit, then gradients in bf16 or not; late or not."""
    halved = (False, True) if "onebit" in allow else ()
    # bf16 gradients go with one bit only: by themselves they save little.
    few = [{"onebit": True, "halved": each} for each in halved]
    late = (False, True) if "stale" in allow else (False,)
    return [{**bits, "late": old} for bits, old in product([{}, *few], late)]


def _load(
    counts: PartSize,
    rates: Held,
    share: PartSize | None = None,
    group_size: GroupSize | None = None,
    *,
    partial_sums: bool = False,
) -> Load:
    """Return the load of a part.

    Args:
        counts: The size of the part.
        rates: The memory rates of the model.
        share: The size of a rank's share of the part; None if a rank has the whole part.
        group_size: The size of the group that slices features; None without feature slices.
        partial_sums: Whether parts send partial sums.
    """
    held = rates.at(share or counts, group_size=group_size, partial_sums=partial_sums)
    whole = held.features + held.edges + held.tables + held.weights
    return Load(
        counts.rows,
        counts.edges,
        counts.sent,
        counts.halo,
        float(held.total),
        float(whole),
        float(rates.moved(share or counts, group_size=group_size)),
        # Without a layer that runs again this is unknown, and not 0.
        None if held.other is None else float(held.other),
    )
