"""Planning: measure a model and a graph here, or take a graph's counts, and rank the cuts for a cluster.

Where it sits: ``kagome plan``; the arithmetic is ``planner.meshes``'.

::

    model ──epochs on small graphs──> seconds a row and edge, bytes a row that crosses     (rates.py)
    graph ──cut, or its degrees──> rows, edges and halo of each part                       (counts.py)
    both  ──> bytes held                                                                   (forecast.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from kagome.available import available_bytes
from kagome.comm.channel import Channel
from kagome.commands import PlanCommand
from kagome.errors import PlanError
from kagome.graph.data import load_data
from kagome.graph.partition import Partition, extract
from kagome.graph.partitioners import assign
from kagome.graph.store import Meta
from kagome.model.decouple import decouple
from kagome.planner.cluster import GIB, Cluster
from kagome.planner.meshes import Load, Plans, Rates, Slices, parts, ranked, slices
from kagome.run.counts import Counts, counts_of, split_counts
from kagome.run.forecast import Rates as Held
from kagome.run.forecast import Way, rates_of
from kagome.run.rates import crossing, timed, transposes
from kagome.run.source import from_data
from kagome.threads import cores

LARGEST = 1_500_000
"""Edges of the largest graph that is timed: what is larger is made in proportion."""
GUESSED = 0.5
"""By which share a halo may be off where no graph was cut: degrees do not tell of communities."""
LOCAL = 4e9
"""Bytes a second that ranks of one host hand over in shared memory, roughly: two copies."""
COMMUNITIES = 0.6
"""Of the halo of a random cut, what METIS leaves on graphs of people, pages and papers: about the middle of
those in shared data sets."""


@dataclass(frozen=True)
class Graph:
    """What is known of a graph.

    Args:
        vertices: How many.
        edges: Entries of ``edge_index``.
        data: The graph itself, if it is there.
    """

    vertices: int
    edges: int
    data: Data | None = None

    def counts(self, number: int, seed: int) -> tuple[tuple[Counts, ...], float]:
        """Of each part of a cut, or one that stands for all; and by which share its halo may be off."""
        n, e = self.vertices, self.edges
        if self.data is not None:
            edge_index: Tensor = self.data.edge_index
            owner = torch.zeros(n, dtype=torch.long)
            if number > 1:
                owner = assign("metis", edge_index, n, number, seed)
            return split_counts(edge_index, owner, number, getattr(self.data, "train_mask", None)), 0.0
        degree = e / max(n, 1)
        # Of d neighbours of a vertex none lies in a part with probability (1 - 1/P)^d, in a random cut.
        outside = (number - 1) * (1 - (1 - 1 / number) ** degree) * COMMUNITIES
        halo = round(n * outside / number)
        cut = round(e / number * (1 - 1 / number) * COMMUNITIES)
        one = Counts(-(-n // number), halo, -(-e // number), 0, cut, halo, n // number)
        return (one,), 0.0 if number == 1 else GUESSED


def made(graph: Graph, like: Partition, seed: int) -> Callable[[float], Partition]:
    """Graphs for one rank in proportion to a graph: as many edges a vertex, drawn at random."""

    def of(share: float) -> Partition:
        generator = torch.Generator().manual_seed(seed)
        n, e = max(2, round(graph.vertices * share)), max(2, round(graph.edges * share))
        nodes = {name: value[torch.arange(n) % max(value.size(0), 1)] for name, value in like.nodes.items()}
        edge_index = torch.randint(0, n, (2, e), generator=generator)
        return extract(
            Data(edge_index=edge_index, num_nodes=n, **nodes), torch.zeros(n, dtype=torch.long), 0, 1
        )

    return of


def samples_of(graph: Graph, like: Partition, seed: int) -> list[Partition]:
    """Graphs to time a model on: the graph itself if it is small, a smaller one, one with fewer edges."""
    share = min(1.0, LARGEST / max(graph.edges, 1))
    of, sparse = made(graph, like, seed), replace(graph, edges=max(graph.edges // 4, 1))
    found = [of(share), of(share / 4), made(sparse, like, seed)(share)]
    if graph.data is not None and share == 1.0:
        found[0] = like
    return found


def here(ranks: int, rate: float) -> Cluster:
    """The machine at hand as a cluster.

    Args:
        ranks: Local ranks.
        rate: Bytes a second that one rank hands another.
    """
    free = available_bytes()
    memory = (64 * GIB if free is None else float(free)) / ranks
    return Cluster("this machine", 1, ranks, memory, 1.0, rate, rate, 1e-4)


def plans(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    part: Partition,
    graph: Graph,
    cluster: Cluster,
    *,
    allow: Sequence[str] = (),
    decoupled: nn.Module | None = None,
    seed: int = 0,
) -> Plans:
    """Rank the cuts of a graph for a cluster.

    Args:
        model: As it would be trained.
        optimizer: Over its parameters; for the memory of its state.
        part: The whole graph as one part; or a small one that looks like it, where the graph is not there.
        graph: What is known of the graph.
        cluster: Where it is to run, on all devices.
        allow: What may be inexact: ``decoupled``.
        decoupled: The model with all maps first.
        seed: Of cuts and made graphs.

    Raises:
        PlanError: If nothing fits.

    Cost:
        Five epochs on each of three graphs of up to 1.5 million edges, and a METIS cut for each number of
        parts.
    """
    size = cluster.size
    numbers_of = [number for number in range(1, size + 1) if size % number == 0]
    one = counts_of(part) if graph.data is not None else graph.counts(1, seed)[0][0]
    found, facts = (
        [],
        {"cluster": cluster.name, "ranks": size, "vertices": graph.vertices, "edges": graph.edges},
    )
    rates, held = _rates(model, optimizer, part, graph, several=size > 1, seed=seed)
    for number in numbers_of:
        counts, uncertain = graph.counts(number, seed)
        found.append(parts(number, [_load(each, held) for each in counts], rates, cluster, uncertain))
    if size > 1:
        ways = [(model, rates, held, False)]
        if decoupled is not None and "decoupled" in allow:
            own_rates, own_held = _rates(decoupled, optimizer, part, graph, several=True, seed=seed)
            ways.append((decoupled, own_rates, own_held, True))
        for each, its_rates, its_held, first in ways:
            numbers = transposes(each, part, seed)
            if numbers is not None:
                costs = Slices(numbers * graph.vertices, {size: _sliced(one, size, its_held, numbers)})
                found.append(slices(size, _load(one, its_held), its_rates, costs, cluster, decoupled=first))
    return ranked(found, cluster, facts)


def _rates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    part: Partition,
    graph: Graph,
    *,
    several: bool,
    seed: int,
) -> tuple[Rates, Held]:
    held = rates_of(model, optimizer, part, Way(several=several))
    if held.fault:
        raise PlanError("a model runs on small graphs, where it is measured", held.fault, hint="kagome check")
    (none, row, edge), _ = timed(model, samples_of(graph, part, seed))
    forward, backward = crossing(model, part, seed) if several else (0.0, 0.0)
    return Rates(none, row, edge, forward, backward, float(held.gradients)), held


def _load(counts: Counts, held: Held) -> Load:
    return Load(counts.rows, counts.edges, counts.sent, counts.halo, float(held.at(counts).total))


def _sliced(whole: Counts, size: int, held: Held, numbers: float) -> float:
    """Bytes of a rank in feature slices: its rows, all edges, and a slice of what is transposed."""
    own = Counts(-(-whole.rows // size), 0, -(-whole.edges // size), 0, 0, 0, -(-whole.train // size))
    edges = held.at(replace(own, edges=whole.edges)).total - held.at(own).total
    return float(held.at(own).total + edges + numbers * whole.rows / size)


def planned(asked: PlanCommand, build: Callable[[Partition, Meta, Channel], nn.Module]) -> Plans:
    """Answer ``kagome plan``.

    Args:
        asked: Its flags.
        build: Makes the model.

    Raises:
        PlanError: If nothing fits, or a graph is given by one of its two numbers alone.
        KagomeError: What loading the graph or building the model raises.
    """
    alone = Channel(None, "cpu")
    if (asked.vertices is None) is not (asked.edges is None):
        raise PlanError(
            "a graph that is not there is told by --vertices and --edges",
            f"--vertices {asked.vertices} --edges {asked.edges}",
        )
    seed = asked.train.seed
    if asked.vertices is not None and asked.edges is not None:
        graph = Graph(asked.vertices, asked.edges)
        data = _like(graph, asked.features, asked.classes, seed)
    else:
        data = load_data(asked.data)
        graph = Graph(int(data.num_nodes or 0), int(data.edge_index.size(1)), data)
    part, meta = from_data(data, alone, method="contiguous", seed=seed)
    torch.manual_seed(seed)
    model = build(part, meta, alone)
    optimizer = torch.optim.Adam(model.parameters(), lr=asked.train.lr)
    first = None
    if "decoupled" in asked.allow:
        sample = {"x": part.nodes["x"][:4], "edge_index": torch.tensor([[0, 1], [1, 0]])}
        first = decouple(model, sample)
    ranks = asked.devices
    cluster = here(ranks, LOCAL) if asked.cluster is None else Cluster.load(asked.cluster)
    torch.set_num_threads(max(1, len(cores()) // ranks) if asked.cluster is None else 1)
    return plans(model, optimizer, part, graph, cluster, allow=asked.allow, decoupled=first, seed=seed)


def _like(graph: Graph, features: int, classes: int, seed: int) -> Data:
    """A small graph with as many edges a vertex, features and classes."""
    generator = torch.Generator().manual_seed(seed)
    n = min(graph.vertices, 2_000)
    e = max(1, round(graph.edges * n / max(graph.vertices, 1)))
    third = torch.arange(n) % 3
    return Data(
        x=torch.randn(n, features, generator=generator),
        y=torch.arange(n) % classes,
        edge_index=torch.randint(0, n, (2, e), generator=generator),
        train_mask=third == 0,
        val_mask=third == 1,
        test_mask=third == 2,
    )
