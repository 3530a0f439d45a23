"""How many rows do exact volume cuts save? Counts alone: no rank is started, nothing is timed.

Run: python benchmarks/volume/main.py --data ../shared/data
     python benchmarks/volume/main.py --smoke

Between two parts the edges from one to the other are a bipartite graph of senders and receivers. A halo
sends one row for each sender. Partial sums send one row for each receiver. A vertex cover of that graph names
senders whose rows are sent and receivers whose partial sums are sent, so that every edge is served by one of
both. The smallest cover has as many vertices as the largest matching has edges (König), and no exact
exchange of rows and partial sums sends fewer.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import tyro

from kagome import config
from kagome.graph.datasets.load import load_data
from kagome.graph.partition.covers import cover_counts
from kagome.graph.partition.partitioners import assign
from kagome.graph.structure import edges

HERE: Final = Path(__file__).parent
GRAPHS: Final = {
    "squirrel": config.Data(name="squirrel", root="{data}"),
    "flickr": config.Data(name="flickr-attributed", root="{data}"),
    "tolokers": config.Data(name="tolokers", root="{data}"),
    "cornell5": config.Data(name="cornell5", root="{data}"),
    "slashdot": config.Data(name="npz:{data}/snap/soc-slashdot0902.npz"),
    "cit-hepph": config.Data(name="npz:{data}/snap/cit-hepph.npz"),
    "ego-twitter": config.Data(name="npz:{data}/snap/ego-twitter.npz", undirected=True),
    "made": config.Data(name="sbm:vertices=100000,degree=21,features=1"),
}
"""``made`` has power-law degrees in 16 communities, and a fifth of its edges regardless of them."""
WAYS: Final = ("rows", "sums", "cover")
Row = dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Count the rows that parts send each other: halo rows, partial sums where fewer, smallest cover."""

    data: Path = HERE.parents[2] / "shared" / "data"
    """Folder of raw data sets."""
    graphs: tuple[str, ...] = tuple(GRAPHS)
    """Names of the graphs."""
    parts: tuple[int, ...] = (2, 4, 8)
    """Numbers of parts."""
    partitioner: str = "metis"
    """The partitioner."""
    out: Path = HERE
    """Folder of the results."""
    smoke: bool = False
    """One small made graph."""


def main() -> None:
    """Count all; write ``results.json`` and ``results.md``."""
    options = tyro.cli(Options, description=__doc__)
    rows: list[Row] = []
    for name in ("sbm:vertices=300,degree=8,features=1",) if options.smoke else options.graphs:
        edge_index, vertices = topology(name, options.data)
        for parts in (2,) if options.smoke else options.parts:
            owner = assign(options.partitioner, edge_index, vertices, parts)
            row: Row = {"graph": name, "parts": parts, "vertices": vertices, "edges": edge_index.size(1)}
            row |= counted(edge_index, owner, parts)
            rows.append(row)
            print(line(row), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "results.md").write_text(text(rows))


def topology(name: str, data: Path) -> tuple[torch.Tensor, int]:
    """The edges of a graph, and the number of its vertices."""
    settings = GRAPHS.get(name, config.Data(name=name))
    graph = load_data(
        config.Data(
            name=settings.name.format(data=data),
            root=settings.root.format(data=data),
            undirected=settings.undirected,
        )
    )
    return graph.edge_index, int(graph.num_nodes)


def counted(edge_index: torch.Tensor, owner: torch.Tensor, parts: int) -> Row:
    """Rows that each part sends to each other one, in each way, summed and as the largest of one rank."""
    sent = {way: np.zeros((parts, parts), np.int64) for way in WAYS}
    source, target = edge_index.numpy()
    places = owner.numpy()
    of, to = places[source], places[target]
    for p in range(parts):
        for q in range(parts):
            between = (of == p) & (to == q)
            if p != q and between.any():
                senders, receivers = (np.unique(ends[between]).size for ends in (source, target))
                sent["sums"][p, q] = min(senders, receivers)
    # Kagome's tables, by reader and sender.
    sent["rows"], sent["cover"] = (found.T for found in cover_counts(source, target, places, parts))
    readers = edges.read_by(source, target, places.astype(np.int32), parts)[0]
    assert sent["rows"].sum() == edges.halo_counts(readers, parts).sum()  # the halo of Kagome's own tables
    return {
        "cut": int((of != to).sum()),
        **{way: int(table.sum()) for way, table in sent.items()},
        # Forward sends along the rows of the table and backward along its columns.
        **{f"{way}_largest": int(max(table.sum(1).max(), table.sum(0).max())) for way, table in sent.items()},
    }


def less(fewer: int, rows: int) -> str:
    """A number of rows, and how many fewer it is than the halo's."""
    return f"{fewer:,} ({(fewer - rows) / max(rows, 1):+.1%})"


def line(row: Row) -> str:
    """One line of the table."""
    count = {key: value for key, value in row.items() if isinstance(value, int)}
    cells = [str(row["graph"]), str(count["parts"]), f"{count['cut'] / count['edges']:.0%}"]
    cells += [f"{count['rows']:,}", *(less(count[way], count["rows"]) for way in WAYS[1:])]
    cells += [f"{count['rows_largest']:,}", less(count["cover_largest"], count["rows_largest"])]
    return f"| {' | '.join(cells)} |"


def text(rows: list[Row]) -> str:
    """The table."""
    head = ["graph", "parts", "edges cut", "halo rows", "partial sums where fewer", "smallest cover"]
    head += ["largest of a rank: halo rows", "smallest cover"]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *map(line, rows), ""])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
