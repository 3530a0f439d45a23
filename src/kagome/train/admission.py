"""Admission: compare the memory each rank will need with what is free, before the first epoch.

Where it sits: ``trainer`` asks it before it trains, and again at the end of a run for the memory that was
used; ``kagome check`` asks it about a number of ranks that is not running.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Data

from kagome import config
from kagome.comm.channel import Channel
from kagome.components.engine import Engine
from kagome.components.model_setup import materialise
from kagome.components.parallelize import CPU, PartOptions
from kagome.errors import ModelError
from kagome.graph.partition.choice import PartitionMethod, choose
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.partitioners import assign
from kagome.graph.partition.sets_partition import Part
from kagome.launch.host_memory import available_bytes
from kagome.memory.estimate import MemoryRates, rates_of
from kagome.pipelining.chunk_engine import ChunkEngine
from kagome.pipelining.memory_estimate import StageMemory, held_by_stages, share_of
from kagome.profile.part_size import GroupSize, PartSize, counts_of, split_counts
from kagome.records.epoch import Memory
from kagome.records.memory import MemoryByKind, fullest, side_by_side
from kagome.records.units import bytes_text
from kagome.train.graph_engine import GraphEngine

MANY = 8
"""The most feature slices that are measured; memory with more of them is extrapolated from two and four."""
BEYOND = 1.5
"""A run that needs this many times the free memory is refused; a forecast is off by a tenth or two."""


class RankAccount(NamedTuple):
    """The report of one rank to the others: the size of its part, its place and the memory left there."""

    counts: PartSize
    place: str
    free: int | None
    now: int
    """Bytes that the rank holds already."""
    validates: bool
    rates: MemoryRates | None
    outside: int
    """Rows that the rank reads from ranks that do not slice features with it."""
    share: StageMemory | None = None
    """What the rank holds of its part's model, in a pipeline."""


@dataclass
class Admission:
    """The memory check of one rank.

    Args:
        engine: This rank's engine.
        optimizer: The optimizer over the model's parameters.
        settings: The run's settings.
        predicted: The memory that this rank will need; known after :meth:`foresee`.
    """

    engine: Engine
    optimizer: Optimizer
    settings: config.Run
    predicted: MemoryByKind | None = None

    def predict(self, part: Part, channel: Channel) -> tuple[str, ...]:
        """Predict the memory of all ranks. All ranks call it, with the model as the user gave it.

        Args:
            part: This rank's part.
            channel: All ranks.

        Returns:
            Notes on how much the fullest rank will hold, and on each place where ranks will need more than is
                free.

        Raises:
            ModelError: If far more is needed than is free (``train.check``).

        Cost:
            On rank 0 that of :func:`kagome.memory.estimate.rates_of`; some numbers from every rank.
        """
        if not isinstance(part, Partition):  # no sample of several vertex sets is measured
            return ("memory: not foreseen for a graph of several vertex sets",)
        train, engine = self.settings.train, self.engine
        parallel = self.settings.parallel.fit(channel.size)
        counts = counts_of(part)
        share = share_of(engine, counts, self.optimizer) if isinstance(engine, ChunkEngine) else None
        tensor, rates = parallel.tensor, None
        if channel.rank == 0:
            options = PartOptions.of(train, fast=engine.fast, recompute=engine.recompute)
            # Chunks read rows of each other, so a model in chunks has halo rows on one rank too.
            several = channel.size > 1 or (parallel.chunks or 1) > 1
            slices = () if tensor == 1 else (tensor,) if tensor <= MANY else (2, 4)
            rates = rates_of(engine.model, self.optimizer, part, options, several=several, slices=slices)
        validates = "val_mask" in part.nodes and bool(part.nodes["val_mask"].any())
        # Parts are numbered like the ranks of a stage: `tensor` consecutive ones slice features together.
        outside = sum(
            count for rank, count in enumerate(part.recv_counts) if rank // tensor != part.part // tensor
        )
        now = engine.held(self.optimizer, None).total
        offer = RankAccount(counts, *_place(channel.device), now, validates, rates, outside, share)
        # One message carries the sizes of all ranks, and the rates that rank 0 alone has measured.
        found: list[Any] = channel.gather_objects(offer, "foresee memory", [RankAccount])
        offers: list[RankAccount] = found
        rates = offers[0].rates
        assert rates is not None
        keeps_best = any(offer.validates for offer in offers)
        sums = channel.size > 1 and config.sends_sums(parallel.partial_sums_sent, part.num_edges)
        size = len(offers) // parallel.pipe  # ranks of a stage
        stages = [offers[first : first + size] for first in range(0, len(offers), size)]
        group_sizes = [group_size for stage in stages for group_size in _group_sizes(stage, tensor)]
        held = [
            rates.at(one.counts, keeps_best=keeps_best, group_size=group_size, partial_sums=sums)
            if one.share is None
            else held_by_stages(
                rates, one.counts, one.share, parallel, keeps_best=keeps_best, group_size=group_size
            )
            for one, group_size in zip(offers, group_sizes, strict=True)
        ]
        # Estimates of all ranks are computed on each rank from the same offers, so all raise or none does.
        self.predicted = held[channel.rank]
        # Offloaded activations do not stay on the device that computes them.
        stays = [replace(one, activations=0) for one in held] if engine.offload.moves else held
        wants = _too_much(stays, offers)
        far = [want for want in wants if want.need > BEYOND * want.left]
        if far and train.check:
            raise far[0].refusal(parallel, recomputes=engine.recompute or share is not None)
        notes = [want.text(recomputes=engine.recompute or share is not None) for want in wants]
        return (_memory_text(held, rates), *notes)

    def memory_report(self, best: Mapping[str, Tensor] | None, memory: Memory) -> tuple[int, dict[str, Any]]:
        """Return the measured peak, and the memory held now beside the prediction.

        The memory held now includes what the first forward pass saved.

        Args:
            best: The best epoch's weights.
            memory: The memory of this process.
        """
        engine, device = self.engine, self.engine.channel.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory.peak()
        report = side_by_side(self.predicted, engine.held(self.optimizer, best).beside(peak))
        if isinstance(engine, GraphEngine) and engine.peak_tensors is not None:
            report["peak_tensors"] = engine.peak_tensors.as_dict()
        return peak, report


def _group_sizes(offers: Sequence[RankAccount], tensor: int) -> list[GroupSize | None]:
    """Return, for each rank, the size of the group that slices features with it; None where none does."""
    if tensor == 1:
        return [None] * len(offers)
    vertices = sum(one.counts.rows for one in offers)
    group_sizes = []
    for first in range(0, len(offers), tensor):
        some = offers[first : first + tensor]
        rows, edges = sum(one.counts.rows for one in some), sum(one.counts.edges for one in some)
        # Ranks of a group may read the same row: the estimate assumes independent draws.
        rest = max(vertices - rows, 1)
        # A rank reads a given outside row with probability outside / rest. Nobody reads it with the product
        # of the complements.
        unread = math.prod(1 - one.outside / rest for one in some)
        group_sizes.append(GroupSize(rows, edges, round(rest * (1 - unread)), tensor))
    return [group_sizes[rank // tensor] for rank in range(len(offers))]


def foresee_split(model: nn.Module, part: Partition, settings: config.Run, parts: int) -> str:
    """Describe what the fullest of so many ranks would hold, given the whole graph in one part.

    Args:
        model: The user's module.
        part: The whole graph.
        settings: The run's settings.
        parts: The number of ranks.

    Returns:
        The note that :meth:`Admission.predict` would begin with.

    Cost:
        One partitioning of the graph, and that of :func:`kagome.memory.estimate.rates_of`.
    """
    materialise(model, part, CPU)
    train, model_settings = settings.train, settings.model
    options = PartOptions.of(train, fast=model_settings.fast, recompute=settings.recomputes)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learning) if learning else None
    rates = rates_of(model, optimizer, part, options, several=parts > 1)
    owner = torch.zeros(part.own.numel(), dtype=torch.int64)
    if parts > 1:
        # `choose` resolves "auto" as a run on this machine would.
        graph = Data(edge_index=part.edge_index, num_nodes=part.own.numel())
        cut = settings.parallel
        asked = str(PartitionMethod(cut.partitioner, weights=cut.part_weights))
        method, _ = choose(asked, graph.edge_index, part.own.numel(), parts, available_bytes())
        pos = part.nodes.get("pos")
        owner = assign(method, graph.edge_index, part.own.numel(), parts, train.seed, pos)
    counts = split_counts(part.edge_index, owner, parts, part.nodes.get("train_mask"))
    sums = parts > 1 and config.sends_sums(settings.parallel.partial_sums_sent, part.num_edges)
    return _memory_text([rates.at(one, partial_sums=sums) for one in counts], rates)


def _memory_text(held: Sequence[MemoryByKind], rates: MemoryRates) -> str:
    full = fullest(held)
    where = "on one rank" if len(held) == 1 else f"on the fullest of {len(held)} ranks"
    why = f"; activations are not known: {rates.fault}" if rates.fault else ""
    return f"memory: about {full.text()} {where}{why}"


def _place(device: torch.device) -> tuple[str, int | None]:
    """Return where this rank takes memory from, and how much is free there."""
    host = socket.gethostname()
    if device.type == "cuda":
        name = f"{host}, {torch.cuda.get_device_name(device)} {device.index}"
        # Memory that torch has reserved but not allocated is free, too.
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return name, torch.cuda.mem_get_info(device)[0] + spare
    return host, available_bytes()


@dataclass(frozen=True)
class _Want:
    """A place whose ranks will need more memory than is free there.

    Args:
        place: The host, or the host and its device.
        ranks: The ranks that run there.
        full: The rank that will need most.
        need: Bytes that all of them will need.
        left: Bytes that are free.
    """

    place: str
    ranks: Sequence[int]
    full: int
    need: int
    left: int

    @property
    def expected(self) -> str:
        """How much which ranks need."""
        count = len(self.ranks)
        return (
            f"at least {bytes_text(self.need)} more for {count} rank{'s' if count > 1 else ''} "
            f"on {self.place}"
        )

    def text(self, *, recomputes: bool) -> str:
        """Return a warning as one sentence."""
        return f"memory: expected {self.expected}; got {bytes_text(self.left)} left: try {_less(recomputes)}"

    def refusal(self, parallel: config.Parallel, *, recomputes: bool) -> ModelError:
        """Return the warning as an error."""
        stage = self.full // ((parallel.graph or 1) * parallel.tensor)
        return ModelError(
            f"memory of {self.expected}",
            f"{bytes_text(self.left)} left",
            where=f"the fullest is rank {self.full}" + (f", stage {stage}" if parallel.pipe > 1 else ""),
            hint=f"{_less(recomputes)}; --train.no-check tries it all the same",
        )


def _less(recomputes: bool) -> str:
    again = "" if recomputes else "--model.recompute, "
    return f"more ranks on other machines, {again}or a smaller --model.hidden"


def _too_much(held: Sequence[MemoryByKind], offers: Sequence[RankAccount]) -> list[_Want]:
    """Return each place whose ranks will need more than is free there."""
    wants = []
    for place in dict.fromkeys(offer.place for offer in offers):
        ranks = [rank for rank, offer in enumerate(offers) if offer.place == place]
        # Ranks of one place report different values, because they ask one after another: the least counts.
        left = [offer.free for offer in offers if offer.place == place and offer.free is not None]
        # Free memory excludes what ranks hold already: they need only what is missing.
        needs = {rank: max(held[rank].total - offers[rank].now, 0) for rank in ranks}
        if left and sum(needs.values()) > min(left):
            full = max(ranks, key=lambda rank: needs[rank])
            wants.append(_Want(place, ranks, full, sum(needs.values()), min(left)))
    return wants
