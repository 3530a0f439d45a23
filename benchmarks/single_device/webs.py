"""Webs: made graphs with the size and the shape of a crawl of web pages and of a network of trust.

Where it sits: ``graphs`` prepares them under the names of :data:`WEBS`.

Both have long tails. In a crawl the pages of a host have consecutive ids, and most links stay in the host,
many of them near by: neighbours lie close in memory. In the social network ids say nothing about neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from kagome.graph.datasets import edits
from kagome.graph.structure import splits
from kagome.graph.structure.topology import distinct

Ids = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Web:
    """A directed graph with power laws, without loops and duplicates.

    Args:
        vertices: Number of vertices, with ids in the order of hosts.
        edges: Number of directed edges, exactly.
        most_in: In-degree that the most popular vertex is drawn for; duplicates take some of it.
        most_out: The same of out-degrees.
        in_power: Exponent of the power law of in-degrees.
        out_power: The same of out-degrees.
        least_host: Pages of the smallest host; 0 for one host of all, without locality.
        host_power: Exponent of the power law of the hosts' sizes.
        near: Share of the links that go to a page at a distance of about ``reach`` ids, in the same host.
        inside: Share of the links that go to the same host by popularity. The rest goes anywhere.
        reach: Mean distance of near links.
        returned: Share of the drawn edges to which the reverse is added.
        seed: Seed of all draws.
    """

    vertices: int
    edges: int
    most_in: int
    most_out: int
    in_power: float
    out_power: float
    least_host: int = 0
    host_power: float = 1.8
    near: float = 0.0
    inside: float = 0.0
    reach: float = 30.0
    returned: float = 0.0
    seed: int = 0


_CRAWL: Final = {
    "in_power": 1.9,
    "out_power": 2.6,
    "least_host": 20,
    "near": 0.5,
    "inside": 0.4,
}
_TRUST: Final = {"in_power": 1.9, "out_power": 1.9, "returned": 0.25}

WEBS: Final = {
    "cnr-2000-like": Web(vertices=325_557, edges=3_216_152, most_in=48_000, most_out=7_000, **_CRAWL),
    "soc-Epinions-like": Web(vertices=75_879, edges=508_837, most_in=6_000, most_out=3_400, **_TRUST),
    "tiny-web": Web(vertices=2_000, edges=16_000, most_in=400, most_out=200, **_CRAWL),
    "tiny-social": Web(vertices=2_000, edges=12_000, most_in=300, most_out=200, **_TRUST),
}
"""Vertices and edges are those of cnr-2000 and soc-Epinions1; tiny ones are for a try."""


def graph(web: Web) -> Data:
    """Make the graph; features, labels and the split are made as for a file with edges alone."""
    made = Data(edge_index=torch.from_numpy(edges(web)), num_nodes=web.vertices)
    edits.make_up(made, labels=True)
    made.update(splits.draw(web.vertices, web.seed))
    return made


def edges(web: Web) -> Ids:
    """Draw the edges, sorted by source, then target.

    Shapes:
        ``[2, E]``, source and target.
    """
    draw, n = np.random.default_rng(web.seed), web.vertices
    host = hosts(web, draw)
    mean = web.edges / n
    popular = np.cumsum(weights(draw.random(n), web.in_power, web.most_in / mean))
    active = np.cumsum(weights(draw.random(n), web.out_power, web.most_out / mean))
    keys = np.empty(0, np.int64)
    # Loops and duplicates are dropped, and later rounds draw what is missing.
    while keys.size < web.edges:
        # No more than are missing: a cut would part edges from their reverses.
        count = int((web.edges - keys.size) / (1 + web.returned)) + 16
        source = picked(active, draw.random(count))
        target = targets(web, source, host, popular, draw)
        back = draw.random(count) < web.returned
        drawn = np.concatenate([source * n + target, (target * n + source)[back]])
        drawn = drawn[drawn // n != drawn % n]
        fresh = distinct(drawn)
        if keys.size:
            place = np.minimum(np.searchsorted(keys, fresh), keys.size - 1)
            fresh = fresh[keys[place] != fresh]
        # Sorted keys cut to size would favour edges of low ids.
        draw.shuffle(fresh)
        keys = np.concatenate([keys, fresh[: web.edges - keys.size]])
        keys.sort()
    return np.stack([keys // n, keys % n])


def hosts(web: Web, draw: np.random.Generator) -> Ids:
    """Return where the host of each vertex begins and ends.

    Shapes:
        ``[2, N]``.
    """
    if not web.least_host:
        return np.stack([np.zeros(web.vertices, np.int64), np.full(web.vertices, web.vertices)])
    sizes = web.least_host * weights(draw.random(web.vertices // web.least_host + 1), web.host_power, np.inf)
    # No host has more than a tenth of all pages.
    sizes = np.minimum(sizes, max(web.least_host, web.vertices // 10))
    ends = np.minimum(np.cumsum(sizes.astype(np.int64)), web.vertices)
    mine = np.searchsorted(ends, np.arange(web.vertices), side="right")
    return np.stack([np.concatenate([[0], ends])[mine], ends[mine]])


def weights(uniform: Reals, power: float, most: float) -> Reals:
    """Return numbers with P(w > t) = t^(1 - power) from 1 to about ``most`` times their mean."""
    # Pareto by inversion. Below a power of 2 only the cut law has a mean: the cut is sought step by step.
    plain = (1 - uniform) ** (-1 / (power - 1))
    found = plain
    for _ in range(20):
        found = np.minimum(plain, most * found.mean())
    return found


def picked(reach: Reals, at: Reals) -> Ids:
    """Return the vertices whose intervals hold these shares of the whole length."""
    return np.minimum(np.searchsorted(reach, at * reach[-1], side="right"), reach.size - 1)


def targets(web: Web, source: Ids, host: Ids, popular: Reals, draw: np.random.Generator) -> Ids:
    """Draw where links from these sources go: near by, into the host by popularity, or anywhere by it."""
    kind = draw.random(source.size)
    begins, ends = host[:, source]
    low = np.concatenate([[0.0], popular])[begins]
    high = popular[ends - 1]
    anywhere = kind >= web.near + web.inside
    low[anywhere], high[anywhere] = 0.0, popular[-1]
    target = picked(popular, (low + draw.random(source.size) * (high - low)) / popular[-1])
    step = draw.geometric(1 / web.reach, source.size) * np.where(draw.random(source.size) < 0.5, -1, 1)
    # A step past the end of the host stops there.
    beside = np.clip(source + step, begins, ends - 1)
    return np.where(kind < web.near, beside, target)
