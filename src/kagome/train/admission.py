"""Accounts: what each rank is to hold, said before the first epoch; and what it came to hold.

Where it sits: ``trainer`` asks it before it trains and at the end of a run; ``kagome check`` asks it for a
number of ranks that are not there.
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
from kagome.errors import ModelError
from kagome.graph.partition.choice import choose
from kagome.graph.partition.partition import Partition
from kagome.graph.partition.partitioners import assign
from kagome.launch.host_memory import available_bytes
from kagome.memory.estimate import MemoryRates, rates_of
from kagome.pipelining.chunk_engine import ChunkEngine
from kagome.pipelining.memory_estimate import StageMemory, held_by_stages, share_of
from kagome.profile.part_size import GroupSize, PartSize, counts_of, split_counts
from kagome.profile.run_mode import RunMode
from kagome.records.epoch import Memory
from kagome.records.memory import MemoryByKind, fullest, side_by_side
from kagome.records.units import bytes_text

MANY = 8
"""Slices; what more of them hold is told from two and four."""
BEYOND = 1.5
"""So many times what is left is not tried: a forecast is off by a tenth or two."""


class RankAccount(NamedTuple):
    """What one rank tells the others: its counts, where it is, and what it may still take there."""

    counts: PartSize
    place: str
    free: int | None
    now: int
    """Bytes that it holds already."""
    validates: bool
    rates: MemoryRates | None
    outside: int
    """Rows that it reads of ranks that do not slice features with it."""
    share: StageMemory | None = None
    """What it has of its part's model, in a pipeline."""


@dataclass
class Admission:
    """One rank's.

    Args:
        engine: Of this rank.
        optimizer: Over the model's parameters.
        settings: Of the run.
    """

    engine: Engine
    optimizer: Optimizer
    settings: config.Run
    predicted: MemoryByKind | None = None

    def foresee(self, part: Partition, channel: Channel) -> tuple[str, ...]:
        """Predict what all ranks will hold. All ranks call it, with the model as it was given.

        Returns:
            What to say: how much the fullest rank will hold, and where that is more than there is.

        Raises:
            ModelError: If it is far more (``train.check``).

        Cost:
            On rank 0 that of :func:`kagome.memory.estimate.rates_of`; some numbers from every rank.
        """
        train, engine = self.settings.train, self.engine
        parallel = self.settings.parallel.fit(channel.size)
        counts = counts_of(part)
        share = share_of(engine, counts, self.optimizer) if isinstance(engine, ChunkEngine) else None
        tensor, rates = parallel.tensor, None
        if channel.rank == 0:
            way = RunMode(
                several=channel.size > 1 or (parallel.chunks or 1) > 1,
                fast=engine.fast,
                recompute=engine.recompute,
                amp=train.amp == "bf16",
                seed=train.seed,
            )
            slices = () if tensor == 1 else (tensor,) if tensor <= MANY else (2, 4)
            rates = rates_of(engine.model, self.optimizer, part, way, slices=slices)
        validates = "val_mask" in part.nodes and bool(part.nodes["val_mask"].any())
        outside = sum(
            count for rank, count in enumerate(part.recv_counts) if rank // tensor != part.part // tensor
        )
        now = engine.held(self.optimizer, None).total
        offer = RankAccount(counts, *_place(channel.device), now, validates, rates, outside, share)
        found: list[Any] = channel.gather_objects(offer, "foresee memory", [RankAccount])
        offers: list[RankAccount] = found
        rates = offers[0].rates
        assert rates is not None
        keeps_best = any(offer.validates for offer in offers)
        size = len(offers) // parallel.pipe  # ranks of a stage
        stages = [offers[first : first + size] for first in range(0, len(offers), size)]
        teams = [team for stage in stages for team in _teams(stage, tensor)]
        held = [
            rates.at(one.counts, keeps_best=keeps_best, team=team)
            if one.share is None
            else held_by_stages(rates, one.counts, one.share, parallel, keeps_best=keeps_best, team=team)
            for one, team in zip(offers, teams, strict=True)
        ]
        self.predicted = held[channel.rank]
        # Activations that are moved are not kept where they are made.
        stays = [replace(one, activations=0) for one in held] if engine.offload.moves else held
        wants = _too_much(stays, offers)
        far = [want for want in wants if want.need > BEYOND * want.left]
        if far and train.check:
            raise far[0].refusal(parallel, recomputes=engine.recompute or share is not None)
        told = [want.text(recomputes=engine.recompute or share is not None) for want in wants]
        return (_said(held, rates), *told)

    def told(self, best: Mapping[str, Tensor] | None, memory: Memory) -> tuple[int, dict[str, Any]]:
        """Its measured peak; what it holds now, with what the first forward kept, beside what was predicted.

        Args:
            best: The best epoch's weights.
            memory: Of this process.
        """
        engine, device = self.engine, self.engine.channel.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory.peak()
        return peak, side_by_side(self.predicted, engine.held(self.optimizer, best).beside(peak))


def _teams(offers: Sequence[RankAccount], tensor: int) -> list[GroupSize | None]:
    """For each rank those that slice features with it; None where none do."""
    if tensor == 1:
        return [None] * len(offers)
    vertices = sum(one.counts.rows for one in offers)
    teams = []
    for first in range(0, len(offers), tensor):
        some = offers[first : first + tensor]
        rows, edges = sum(one.counts.rows for one in some), sum(one.counts.edges for one in some)
        # Several may read the same row: as many do as if each drew its own from all that are not theirs.
        rest = max(vertices - rows, 1)
        unread = math.prod(1 - one.outside / rest for one in some)
        teams.append(GroupSize(rows, edges, round(rest * (1 - unread)), tensor))
    return [teams[rank // tensor] for rank in range(len(offers))]


def foresee_split(model: nn.Module, part: Partition, settings: config.Run, parts: int) -> str:
    """What the fullest of so many ranks would hold, from a whole graph in one part.

    Args:
        model: The user's module.
        part: The whole graph.
        settings: Of the run.
        parts: Ranks.

    Returns:
        A sentence.

    Cost:
        A cut of the graph, and that of :func:`kagome.memory.estimate.rates_of`.
    """
    materialise(model, part, torch.device("cpu"))
    train = settings.train
    way = RunMode(
        several=parts > 1,
        fast=settings.model.fast,
        recompute=settings.model.recompute,
        amp=train.amp == "bf16",
        seed=train.seed,
    )
    learning = [p for p in model.parameters() if p.requires_grad]
    rates = rates_of(model, torch.optim.Adam(learning) if learning else None, part, way)
    owner = torch.zeros(part.own.numel(), dtype=torch.int64)
    if parts > 1:
        graph = Data(edge_index=part.edge_index, num_nodes=part.own.numel())
        method, _ = choose(
            settings.parallel.partitioner, graph.edge_index, part.own.numel(), parts, available_bytes()
        )
        owner = assign(method, graph.edge_index, part.own.numel(), parts, train.seed)
    counts = split_counts(part.edge_index, owner, parts, part.nodes.get("train_mask"))
    return _said([rates.at(one) for one in counts], rates)


def _said(held: Sequence[MemoryByKind], rates: MemoryRates) -> str:
    full = fullest(held)
    where = "on one rank" if len(held) == 1 else f"on the fullest of {len(held)} ranks"
    why = f"; activations are not known: {rates.fault}" if rates.fault else ""
    return f"memory: about {full.text()} {where}{why}"


def _place(device: torch.device) -> tuple[str, int | None]:
    """Where this rank takes memory from, and how much is left there."""
    host = socket.gethostname()
    if device.type == "cuda":
        name = f"{host}, {torch.cuda.get_device_name(device)} {device.index}"
        # What torch has taken and not given out is left, too.
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return name, torch.cuda.mem_get_info(device)[0] + spare
    return host, available_bytes()


@dataclass(frozen=True)
class _Want:
    """A place whose ranks will want more than is left there.

    Args:
        place: Host, and device where it is none of the host's.
        ranks: Those there.
        full: The one that will want most.
        need: Bytes that all of them will want.
        left: Bytes that are left.
    """

    place: str
    ranks: Sequence[int]
    full: int
    need: int
    left: int

    @property
    def asked(self) -> str:
        """Who wants how much."""
        count = len(self.ranks)
        return (
            f"{count} rank{'s' if count > 1 else ''} on {self.place} will want at least "
            f"{bytes_text(self.need)} more"
        )

    def text(self, *, recomputes: bool) -> str:
        """A sentence."""
        return f"memory: {self.asked}, and {bytes_text(self.left)} are left: try {_less(recomputes)}"

    def refusal(self, parallel: config.Parallel, *, recomputes: bool) -> ModelError:
        """The same as an error."""
        stage = self.full // ((parallel.graph or 1) * parallel.tensor)
        return ModelError(
            self.asked,
            f"{bytes_text(self.left)} are left",
            where=f"the fullest is rank {self.full}" + (f", stage {stage}" if parallel.pipe > 1 else ""),
            hint=f"{_less(recomputes)}; --train.no-check tries it all the same",
        )


def _less(recomputes: bool) -> str:
    again = "" if recomputes else "--model.recompute, "
    return f"more ranks on other machines, {again}or a smaller --model.hidden"


def _too_much(held: Sequence[MemoryByKind], offers: Sequence[RankAccount]) -> list[_Want]:
    """Each place whose ranks will want more than is left there."""
    wants = []
    for place in dict.fromkeys(offer.place for offer in offers):
        ranks = [rank for rank, offer in enumerate(offers) if offer.place == place]
        left = [offer.free for offer in offers if offer.place == place and offer.free is not None]
        # What is there already is no part of what is left.
        needs = {rank: max(held[rank].total - offers[rank].now, 0) for rank in ranks}
        if left and sum(needs.values()) > min(left):
            full = max(ranks, key=lambda rank: needs[rank])
            wants.append(_Want(place, ranks, full, sum(needs.values()), min(left)))
    return wants
