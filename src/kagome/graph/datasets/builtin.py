"""Built-in data sets that need no download: scikit-learn's digits as a graph, and planted communities.

Where it sits: ``load`` calls these for the names ``digits`` and ``sbm:...``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from kagome.errors import DataError
from kagome.graph.structure import edges, splits
from kagome.graph.structure.topology import distinct

NEIGHBOURS = 8
#: Edges or rows that are drawn at a time.
BLOCK: Final = 2**20


def digits() -> Data:
    """Return scikit-learn's 1,797 hand-written digits, each linked with the 8 images most like it.

    Returns:
        A graph with 1,797 vertices, 64 features from 0 to 1, 10 classes, no self-loops, every edge in both
        directions, and a seeded 60/20/20 split.
    """
    from sklearn.datasets import load_digits

    images = load_digits()
    # Pixels are whole numbers from 0 to 16: float64 distances are exact and the same on every machine.
    pixels = torch.from_numpy(images.data).double()
    square = (pixels * pixels).sum(dim=1)
    # |a - b|^2 = |a|^2 + |b|^2 - 2 a b, [1797, 1797]
    distance = square[:, None] + square[None, :] - 2 * pixels @ pixels.T
    distance.fill_diagonal_(torch.inf)
    near = distance.argsort(dim=1, stable=True)[:, :NEIGHBOURS]
    count = pixels.size(0)
    source = torch.arange(count).repeat_interleave(NEIGHBOURS)
    edge_index = _both_ways(near.reshape(-1).numpy(), source.numpy(), count)
    return Data(
        x=(pixels / 16).float(),
        edge_index=torch.from_numpy(edge_index),
        y=torch.from_numpy(images.target).long(),
        **splits.draw(count, seed=0),
    )


@dataclass(frozen=True, kw_only=True)
class Sbm:
    """Planted communities with power-law degrees: the settings of ``sbm:key=value,...``."""

    vertices: int = 100_000
    degree: float = 20.0
    """Mean number of neighbours of a vertex."""
    communities: int = 16
    features: int = 128
    classes: int = 16
    """Number of classes: a vertex's label is its community's number modulo this."""
    seed: int = 0
    power: float = 2.5
    """Exponent of the power law of the degrees."""
    mixing: float = 0.2
    """Share of edges drawn without regard to communities."""
    noise: float = 1.0
    """Standard deviation of the features around their class's centroid; the centroid's entries have 1."""

    def __post_init__(self) -> None:
        ranges = {
            "vertices": (1, 2**31 - 1),
            "degree": (0, max(0, self.vertices - 1)),
            "communities": (1, max(1, self.vertices)),
            "features": (1, 2**31 - 1),
            "classes": (1, 2**31 - 1),
            "seed": (0, 2**63 - 1),
            "power": (1.01, 1e6),
            "mixing": (0, 1),
            "noise": (0, 1e6),
        }
        for key, (low, high) in ranges.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise DataError(
                    f"sbm's {key} to be a number from {low} to {high}",
                    f"{value}",
                    hint=f"sbm:...,{key}={min(max(value, low), high)}",
                )


def parse_sbm(spec: str) -> Sbm:
    """Read ``sbm:vertices=1000,degree=8,...``; the name before the colon may be left out.

    Raises:
        DataError: If a key is unknown, or a value is not a number in its range.
    """
    kinds = {f.name: type(f.default) for f in dataclasses.fields(Sbm)}
    values: dict[str, float] = {}
    for item in filter(None, spec.removeprefix("sbm").removeprefix(":").split(",")):
        key, _, text = (part.strip() for part in item.partition("="))
        if key not in kinds:
            raise DataError(f"a key of sbm ({', '.join(kinds)})", f"{item!r}", where=spec)
        try:
            values[key] = int(text.replace("_", "")) if kinds[key] is int else float(text)
        except ValueError:
            kind = "a whole number" if kinds[key] is int else "a number"
            raise DataError(
                f"sbm's {key} to be {kind} (keys: {', '.join(kinds)})", f"{text!r}", where=spec
            ) from None
    return Sbm(**values)  # type: ignore[arg-type]


def sbm(spec: str = "") -> Data:
    """Return a degree-corrected stochastic block model: undirected, no self-loops, no duplicates.

    Args:
        spec: ``sbm:key=value,...``, each key of :class:`Sbm`.

    Returns:
        The graph with features (class centroid and noise), labels and a seeded 60/20/20 split. Vertex ids are
        in random order, so that consecutive ids do not form a community.

    Raises:
        DataError: If the spec names an unknown key or a bad number.

    Cost: 100,000 vertices with 2 M directed edges take about half a second, 2 million with 40 M about 10 s;
    at the peak 24 bytes a directed edge, of which 16 are the result, and the features.
    """
    sbm = parse_sbm(spec)
    draw = np.random.default_rng(sbm.seed)
    # Communities of equal size, with their vertices spread over all ids.
    community = draw.permutation(sbm.vertices) % sbm.communities
    edge_index = _edges(sbm, community, draw)
    label = community % sbm.classes
    centroid = draw.standard_normal((sbm.classes, sbm.features), np.float32)
    x = draw.standard_normal((sbm.vertices, sbm.features), np.float32)
    x *= np.float32(sbm.noise)
    # In blocks: the centroids of all vertices at once would take as much memory as x.
    for block in _blocks(sbm.vertices):
        x[block] += centroid[label[block]]
    return Data(
        x=torch.from_numpy(x),
        edge_index=torch.from_numpy(edge_index),
        y=torch.from_numpy(label),
        **splits.draw(sbm.vertices, sbm.seed),
    )


def _edges(sbm: Sbm, community: NDArray[np.int64], draw: np.random.Generator) -> NDArray[np.int64]:
    """Draw enough edges by vertex weight; most second ends are in the first one's community."""
    n, wanted = sbm.vertices, round(sbm.vertices * sbm.degree / 2)
    # In this order a community's vertices are contiguous, so a draw from it is a draw from one interval.
    order = np.argsort(community, kind="stable")
    # Pareto by inversion: u uniform, w = (1 - u)^(-1 / (power - 1)), so P(w > t) = t^(1 - power).
    weight = (1 - draw.random(n)) ** (-1 / (sbm.power - 1))
    # The heaviest vertex must not need more neighbours than there are vertices.
    weight = np.minimum(weight, weight.mean() * max(1.0, n / (4 * max(sbm.degree, 1.0))))
    # Vertex order[k] has the interval from reach[k] to reach[k + 1], as long as its weight. A number uniform
    # over all intervals draws a vertex by weight; border[c] is where the intervals of community c begin.
    reach = np.concatenate([[0.0], np.cumsum(weight[order])])
    border = reach[np.searchsorted(community[order], np.arange(sbm.communities + 1))]

    steps = edges.guide(reach)

    def pick(at: NDArray[np.float64]) -> NDArray[np.int64]:
        return order[edges.interval(reach, steps, at)]

    keys = np.empty(0, np.int64)
    # Loops and duplicates are dropped, and later rounds draw what is missing. A dense graph may stay short.
    for _ in range(40):
        missing = wanted - keys.size
        if missing <= 0:
            break
        count = int(missing * 1.2) + 16
        fresh, filled = np.empty(count, np.int64), 0
        for one, two, three, four in _draws(draw, count):
            first = pick(one * reach[-1])
            home = community[first]
            inside = border[home] + two * (border[home + 1] - border[home])
            second = pick(np.where(four < sbm.mixing, three * reach[-1], inside))
            low, high = np.minimum(first, second), np.maximum(first, second)
            found = (low * n + high)[low != high]
            fresh[filled : filled + found.size] = found
            filled += found.size
        fresh = distinct(fresh[:filled])
        # Edges of earlier rounds, by a search in their sorted keys.
        if keys.size:
            place = np.minimum(np.searchsorted(keys, fresh), keys.size - 1)
            fresh = fresh[keys[place] != fresh]
        # Sorted keys cut to size would favour edges of low ids.
        draw.shuffle(fresh)
        keys = np.concatenate([keys, fresh[:missing]])
        del fresh
        keys.sort()
    return edges.both_ways(keys, n)


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))


def _draws(draw: np.random.Generator, count: int) -> Iterator[tuple[NDArray[np.float64], ...]]:
    """Yield the results of four calls of ``draw.random(count)`` side by side, in blocks."""
    # Each column starts where a call of its own would: block by block they give the numbers of four calls.
    columns = [copy.deepcopy(draw) for _ in range(4)]
    for number, column in enumerate(columns):
        _skip(column, number * count)
    for block in _blocks(count):
        yield tuple(column.random(block.stop - block.start) for column in columns)
    _skip(draw, 4 * count)


def _skip(draw: np.random.Generator, count: int) -> None:
    """Advance the generator as if ``count`` numbers had been drawn."""
    bits: Any = draw.bit_generator
    half = {name: bits.state[name] for name in ("has_uint32", "uinteger")}
    bits.advance(count)
    # Advancing would discard the half number that the last permutation left over.
    bits.state = {**bits.state, **half}


def _both_ways(source: NDArray[np.int64], target: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return every edge once in both directions, sorted by source, then target."""
    return edges.both_ways(distinct(np.minimum(source, target) * n + np.maximum(source, target)), n)
