"""Staging: traces a user's model, surveys and times its steps on a small sample, and cuts it into stages.

Where it sits: ``chunk_engine`` asks for it once. Rank 0 surveys and times; all ranks cut in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.components.parallelize import PartOptions
from kagome.components.rank_zero import by_first
from kagome.config import Parallel
from kagome.deferred.lazy_tensor import EscapeError
from kagome.errors import KagomeError, ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.structure.sparse_adjacency import adjacency_of
from kagome.memory.saved_tensors import ActivationProfile, Pair, keeping
from kagome.model.split.stages import Stage, cut
from kagome.model.trace.builder import chain
from kagome.model.trace.graph import LayerGraph
from kagome.model.trace.shapes import Survey, trace
from kagome.profile.part_size import PartSize
from kagome.profile.step_shapes import survey_on_sample
from kagome.profile.step_times import Seconds, timed

Looked = tuple[Survey, Mapping[str, Seconds], Mapping[str, Seconds], ActivationProfile, str]
"""The fields of :class:`Steps` after the graph."""


@dataclass(frozen=True)
class Staging:
    """A model cut into stages.

    Args:
        graph: The steps of the model.
        survey: Shape, dtype and kind of each step's value.
        stages: The stages, in order.
        seconds: Seconds of each step over all chunks of a part, forward and backward, estimated from samples.
        keeping: The bytes that autograd saves at each step, and the width of the halo rows that it reads.
        escape: Why the model cannot run with fast paths; empty where it can.
    """

    graph: LayerGraph
    survey: Survey
    stages: tuple[Stage, ...]
    seconds: Mapping[str, float]
    keeping: ActivationProfile
    escape: str

    def kept_by(self, rank: int, counts: PartSize) -> float:
        """Return the share of the bytes saved by autograd in a forward that falls to a rank's stages.

        The shares of all ranks sum to more than 1: a value sent between two ranks is held by both.

        Args:
            rank: The rank within the pipeline.
            counts: The size of the part.
        """
        return self.keeping.share(self._names(rank), counts)

    def read_by(self, rank: int) -> Pair | None:
        """Return the bytes per row over all reads of neighbours by a rank's stages, forward and backward.

        Args:
            rank: The rank within the pipeline.

        Returns:
            Bytes of a row and of its gradient; None if unknown.
        """
        return self.keeping.read(self._names(rank))

    def _names(self, rank: int) -> list[str]:
        return [step.name for stage in self.stages if stage.rank == rank for step in stage.steps]


def needed(stages: Sequence[Stage], part: Partition, uses: Collection[str]) -> Partition:
    """Reduce a part to the attributes that some stages and the loss read, so that others are not held."""
    names = {name for stage in stages for name in stage.inputs} | set(uses)
    # The masks say on which rows the loss and the metric are computed.
    names |= {name for name in part.nodes if name.endswith("_mask")}
    matrix = adjacency_of(part.edges)
    # A sparse adjacency travels as an edge attribute whose name encodes the matrix's layout.
    names |= {matrix.name} if matrix is not None and "adj_t" in names else set()
    nodes = {name: value for name, value in part.nodes.items() if name in names}
    edges = {name: value for name, value in part.edges.items() if name in names}
    return replace(part, nodes=nodes, edges=edges)


@dataclass(frozen=True)
class Steps:
    """The steps of a model, surveyed and timed.

    Args:
        graph: The steps of the model.
        survey: Shape, dtype and kind of each step's value.
        calls: The fixed seconds of a call of each step, forward and backward.
        rows: The additional seconds for each row of a step.
        keeping: The bytes that autograd saves at each step, and the width of the halo rows that it reads.
        escape: Why the steps cannot run with fast paths; empty where they can.
    """

    graph: LayerGraph
    survey: Survey
    calls: Mapping[str, Seconds]
    rows: Mapping[str, Seconds]
    keeping: ActivationProfile
    escape: str

    def staging(self, parallel: Parallel, part: Partition) -> Staging:
        """Cut the steps into stages; the result is the same for every part of the graph.

        Args:
            parallel: The numbers of stages, ranks and chunks.
            part: Any part of the graph; the mean numbers of rows and edges of a part count, not its own.

        Raises:
            ModelError: If the model cannot be cut into that many stages.
        """
        chunks = parallel.chunks or 1
        # Parts differ by some rows, yet all pipelines of a mesh must be cut between the same steps.
        rows, edges = (max(1, round(each / part.num_parts)) for each in (part.num_nodes, part.num_edges))
        forward, backward = (
            # Seconds of all chunks: a fixed cost per call and chunk, and a cost per row.
            {name: chunks * call[way] + rows * self.rows[name][way] for name, call in self.calls.items()}
            for way in (0, 1)
        )
        seconds = {name: forward[name] + backward[name] for name in forward}
        # In 1F1B a chunk's forward waits for another's backward; fill-drain runs all forwards first.
        two_rounds = parallel.pattern == "fill-drain"
        stages = cut(
            self.graph,
            self.survey,
            parallel.pipe * parallel.stages_per_rank,
            forward if two_rounds else seconds,
            backward=backward if two_rounds else None,
            vertices=rows,
            edges=edges,
            ranks=parallel.pipe,
        )
        return Staging(self.graph, self.survey, stages, seconds, self.keeping, self.escape)


_INEXACT = ("codec", "codec_backward", "max_age", "halo_sample", "skip_drift", "adaptive_bits")
"""Settings that change the rows exchanged between parts unless they have their defaults."""


def stage_model(
    model: nn.Module,
    part: Partition,
    world: Channel,
    parallel: Parallel,
    options: PartOptions,
) -> Staging:
    """Trace, survey and time a model, and cut it into stages. All ranks call it.

    Args:
        model: The user's module, as it was given.
        part: This rank's part.
        world: The channel between all ranks.
        parallel: The numbers of stages and chunks, and the names of layers if the user gave them.
        options: How the model runs on a sample.

    Raises:
        ModelError: If the model cannot be traced or cut into that many stages, or if a layer cannot run in
            chunks.

    Cost:
        The cost of :func:`steps_of`.
    """
    parted = (parallel.chunks or 1) > 1 or part.num_parts > 1
    exact = (parallel.chunks or 1) == 1 and all(
        getattr(parallel, name) == getattr(Parallel(), name) for name in _INEXACT
    )
    steps = steps_of(model, part, world, parallel.layers, options, parted=parted, exact=exact)
    if steps.survey.beyond and (parallel.chunks or 1) > 1:  # with drop too: evaluation drops no edge
        raise ModelError(
            f"chunks={parallel.chunks} to read their neighbours' rows by the edges into them",
            "a layer that reads along edges the other way, or all vertices",
            where=steps.survey.beyond,
            hint="--parallel.chunks 1, or another layer",
        )
    if steps.survey.named and (parallel.chunks or 1) > 1 and parallel.cross_chunk == "drop":
        raise ModelError(
            f"each of the {parallel.chunks} chunks to know its own rows alone with cross_chunk='drop'",
            "a forward that reads rows of vertices by number, which lie in one of them",
            where=steps.survey.named,
            hint="--parallel.cross-chunk exact, or --parallel.chunks 1",
        )
    return steps.staging(parallel, part)


def steps_of(
    model: nn.Module,
    part: Partition,
    world: Channel,
    layers: Sequence[str],
    options: PartOptions,
    *,
    parted: bool = False,
    exact: bool = True,
) -> Steps:
    """Trace, survey and time the steps of a model. All ranks call it.

    Args:
        model: The user's module, as it was given.
        part: This rank's part.
        world: The channel between all ranks.
        layers: The names of layers that follow each other, if the user gave them.
        options: How the model runs on a sample.
        parted: Whether stages run on parts of the graph; else the survey tries the whole graph, and parts if
            the model fails on it.
        exact: Whether rows of other parts are exchanged unchanged and in the same epoch.

    Raises:
        ModelError: On every rank, if the model cannot be traced or fails on a sample.

    Cost:
        On rank 0 some forwards and backwards of a sample of at most ``step_times.TIMED`` vertices, and those
        of :func:`keeping`.
    """
    names = part.names
    plain = {name: value for name, value in part.shared.items() if not isinstance(value, Tensor)}
    graph = chain(model, layers, names) if layers else trace(model, names, plain)

    def look(parted: bool) -> Looked:
        seen = survey_on_sample(model, graph, part, options, named=bool(layers), parted=parted, exact=exact)
        # Steps are timed as they will run: with fast paths, or without them if the model cannot have them.
        try:
            return _measured(model, graph, seen, part, options, parted=parted)
        except EscapeError as error:
            slow = replace(options, fast=False)
            return _measured(model, graph, seen, part, slow, escape=error.got, parted=parted)

    def looked() -> Looked:
        try:
            return look(parted)
        except ModelError as error:
            if parted:
                raise
            # A model with the sizes of the whole graph built in can run on a sample treated as a part.
            with suppress(KagomeError):
                return look(True)
            raise error

    # Rank 0 alone measures: stages cut by different timings would not fit together.
    found = by_first(world, looked, "look at the model's steps", [Survey, ActivationProfile])
    return Steps(found[0].told(graph), *found)


def _measured(
    model: nn.Module,
    graph: LayerGraph,
    seen: Survey,
    part: Partition,
    options: PartOptions,
    *,
    parted: bool,
    escape: str = "",
) -> Looked:
    """Time the steps of a model, and measure what autograd saves at each."""
    graph = seen.told(graph)
    calls, rows = timed(model, graph, seen, part, options, parted=parted)
    return seen, calls, rows, keeping(model, graph, part, options), escape
