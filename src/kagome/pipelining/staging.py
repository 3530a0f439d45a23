"""Staging: a user's model traced, looked at on a small sample, timed, and cut into the stages of a mesh.

Where it sits: ``chunk_engine`` asks for it once; rank 0 looks and times, all ranks cut alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kagome.comm.channel import Channel
from kagome.components.rank_zero import by_first
from kagome.config import Parallel, Train
from kagome.deferred.lazy_tensor import EscapeError
from kagome.errors import KagomeError, ModelError
from kagome.graph.partition.partition import Partition
from kagome.graph.structure.sparse_adjacency import adjacency_of
from kagome.memory.saved_tensors import ActivationProfile, Pair, keeping
from kagome.model.split.stages import Stage, cut
from kagome.model.trace.graph import LayerGraph
from kagome.model.trace.shapes import Survey, chain, trace
from kagome.profile.part_size import PartSize
from kagome.profile.step_shapes import looked_at
from kagome.profile.step_times import Seconds, timed

Looked = tuple[Survey, Mapping[str, Seconds], Mapping[str, Seconds], ActivationProfile, str]
"""What ``Steps`` holds beside the graph."""


@dataclass(frozen=True)
class Staging:
    """A model cut into stages.

    Args:
        graph: Its steps.
        survey: What each step's value looks like.
        stages: The stages, in order.
        seconds: What each step takes for all chunks of a part, forward and backward, told from samples.
        keeping: What autograd keeps of each step, and how wide each reads neighbours' rows.
        escape: Why the model cannot run with fast paths; empty where it can.
    """

    graph: LayerGraph
    survey: Survey
    stages: tuple[Stage, ...]
    seconds: Mapping[str, float]
    keeping: ActivationProfile
    escape: str

    def kept_by(self, rank: int, counts: PartSize) -> float:
        """Of what autograd keeps of a forward, the share that the stages of a pipeline's rank keep.

        Together ranks keep more than the whole: what crosses between two lies with both.

        Args:
            rank: Of the pipeline.
            counts: Of the part.
        """
        return self.keeping.share(self._names(rank), counts)

    def read_by(self, rank: int) -> Pair | None:
        """Bytes of a row at all reads of neighbours by a rank's stages, and of its gradients.

        Args:
            rank: Of the pipeline.

        Returns:
            None where that is not known.
        """
        return self.keeping.read(self._names(rank))

    def _names(self, rank: int) -> list[str]:
        return [step.name for stage in self.stages if stage.rank == rank for step in stage.steps]


def needed(stages: Sequence[Stage], part: Partition, uses: Collection[str]) -> Partition:
    """What some stages and the loss read of a part: features lie with the stages that use them."""
    names = {name for stage in stages for name in stage.inputs} | set(uses)
    names |= {name for name in part.nodes if name.endswith("_mask")}
    matrix = adjacency_of(part.edges)
    names |= {matrix.name} if matrix is not None and "adj_t" in names else set()
    nodes = {name: value for name, value in part.nodes.items() if name in names}
    edges = {name: value for name, value in part.edges.items() if name in names}
    return replace(part, nodes=nodes, edges=edges)


@dataclass(frozen=True)
class Steps:
    """A model's steps, looked at and timed.

    Args:
        graph: The steps.
        survey: What each one's value looks like.
        calls: Seconds of a call of each, forward and backward.
        rows: Seconds of each row in it, besides.
        keeping: What autograd keeps of each, and how wide each reads neighbours' rows.
        escape: Why they cannot run with fast paths; empty where they can.
    """

    graph: LayerGraph
    survey: Survey
    calls: Mapping[str, Seconds]
    rows: Mapping[str, Seconds]
    keeping: ActivationProfile
    escape: str

    def staging(self, parallel: Parallel, part: Partition) -> Staging:
        """Cut them, in the same way whichever part asks.

        Args:
            parallel: How many stages, ranks and chunks.
            part: One of the graph's; its share of rows and edges counts, not its own number.

        Raises:
            ModelError: If there cannot be so many stages.
        """
        chunks = parallel.chunks or 1
        # Parts differ by some rows, and a hybrid's must be cut between the same steps.
        rows, edges = (max(1, round(each / part.num_parts)) for each in (part.num_nodes, part.num_edges))
        forward, backward = (
            {name: chunks * call[way] + rows * self.rows[name][way] for name, call in self.calls.items()}
            for way in (0, 1)
        )
        seconds = {name: forward[name] + backward[name] for name in forward}
        # By 1F1B a chunk's forward waits for another one's backward, else all chunks go forward first.
        apart = parallel.pattern == "fill-drain"
        stages = cut(
            self.graph,
            self.survey,
            parallel.pipe * parallel.stages_per_rank,
            forward if apart else seconds,
            backward=backward if apart else None,
            vertices=rows,
            edges=edges,
            ranks=parallel.pipe,
        )
        return Staging(self.graph, self.survey, stages, seconds, self.keeping, self.escape)


_INEXACT = ("codec", "codec_backward", "max_age", "halo_sample", "skip_drift", "adaptive_bits")
"""Settings by which rows of other parts do not cross as they are, but where they have their defaults."""


def stage_model(
    model: nn.Module,
    part: Partition,
    world: Channel,
    parallel: Parallel,
    train: Train,
    device: torch.device,
    *,
    fast: bool = True,
) -> Staging:
    """Trace, look, time, cut. All ranks call it.

    Args:
        model: The user's module, as it was given.
        part: This rank's part.
        world: All ranks.
        parallel: How many stages and chunks; the names of layers, if the user gave them.
        train: Seed and mixed precision.
        device: Where the model runs.
        fast: Whether messages are reduced by kernels, where they can be.

    Raises:
        ModelError: If the model cannot be traced, or not be cut into so many stages, or if a layer cannot run
            in chunks.

    Cost:
        As :func:`steps_of`.
    """
    parted = (parallel.chunks or 1) > 1 or part.num_parts > 1
    exact = (parallel.chunks or 1) == 1 and all(
        getattr(parallel, name) == getattr(Parallel(), name) for name in _INEXACT
    )
    steps = steps_of(
        *(model, part, world, parallel.layers, train, device), fast=fast, parted=parted, exact=exact
    )
    if steps.survey.beyond and (parallel.chunks or 1) > 1:  # evaluation drops no edge
        raise ModelError(
            f"chunks={parallel.chunks} read their neighbours' rows by the edges into them",
            "a layer reads along edges the other way, or all vertices",
            where=steps.survey.beyond,
            hint="--parallel.chunks 1, or another layer",
        )
    if steps.survey.named and (parallel.chunks or 1) > 1 and parallel.cross_chunk == "drop":
        raise ModelError(
            f"with cross_chunk='drop' each of the {parallel.chunks} chunks knows its own rows",
            "forward reads rows of vertices that it names by number, which lie in one of them",
            where=steps.survey.named,
            hint="--parallel.cross-chunk exact, or --parallel.chunks 1",
        )
    return steps.staging(parallel, part)


def steps_of(
    model: nn.Module,
    part: Partition,
    world: Channel,
    layers: Sequence[str],
    train: Train,
    device: torch.device,
    *,
    fast: bool = True,
    parted: bool = False,
    exact: bool = True,
) -> Steps:
    """Trace, look, time. All ranks call it.

    Args:
        model: The user's module, as it was given.
        part: This rank's part.
        world: All ranks.
        layers: Names of layers that follow each other, if the user gave them.
        train: Seed and mixed precision.
        device: Where the model runs.
        fast: Whether messages are reduced by kernels, where they can be.
        parted: Whether stages run on parts of the graph; else on all of it, or on parts if it fails there.
        exact: Whether rows of other parts cross as they are, in the same epoch.

    Raises:
        ModelError: If the model cannot be traced, or fails on a sample; on every rank.

    Cost:
        On rank 0 some forwards and backwards of a sample of at most ``timing.TIMED`` vertices, and those of
        :func:`keeping`.
    """
    names = part.names
    plain = {name: value for name, value in part.shared.items() if not isinstance(value, Tensor)}
    graph = chain(model, layers, names) if layers else trace(model, names, plain)

    def look(parted: bool) -> Looked:
        seen = looked_at(model, graph, part, train, device, named=bool(layers), parted=parted, exact=exact)
        try:
            return _measured(model, graph, seen, part, train, device, fast=fast, parted=parted)
        except EscapeError as error:
            return _measured(
                model, graph, seen, part, train, device, fast=False, escape=error.found, parted=parted
            )

    def looked() -> Looked:
        try:
            return look(parted)
        except ModelError as error:
            if parted:
                raise
            # What knows the sizes of the whole graph runs on a sample that is known to be a part of it.
            with suppress(KagomeError):
                return look(True)
            raise error

    found = by_first(world, looked, "look at the model's steps", [Survey, ActivationProfile])
    return Steps(found[0].told(graph), *found)


def _measured(
    model: nn.Module,
    graph: LayerGraph,
    seen: Survey,
    part: Partition,
    train: Train,
    device: torch.device,
    *,
    fast: bool,
    parted: bool,
    escape: str = "",
) -> Looked:
    """Time the steps of a model, and what they keep."""
    graph = seen.told(graph)
    calls, rows = timed(model, graph, seen, part, train, device, fast=fast, parted=parted)
    return seen, calls, rows, keeping(model, graph, part, train, fast=fast), escape
