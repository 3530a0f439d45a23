"""Preparation of a partition: load the graph that settings name, cut it, and write its parts one by one.

Where it sits: ``kagome partition`` calls it; ``train.data`` runs it in a process of its own, so that no rank
ever holds more than its part. That process imports little beyond ``graph``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from kagome import config
from kagome.errors import KagomeError, PartitionError
from kagome.graph.datasets.load import load_data, load_graph
from kagome.graph.partition import cache, store
from kagome.graph.partition.cache import Cache
from kagome.graph.partition.choice import PartitionMethod, choose
from kagome.graph.partition.partition import each_part, fingerprint
from kagome.graph.partition.partitioners import assign
from kagome.graph.partition.store import Meta
from kagome.graph.structure.attributes import attributes_of, tensors_of
from kagome.launch.host_memory import available_bytes
from kagome.launch.os_errors import end_with, in_words

#: Partitioners whose owners are worth caching: the others run as fast as the cache could be read.
KEPT = ("metis", "streaming")
#: The exit code for a graph of several vertex sets, which each rank loads by itself.
SEVERAL = 3


def prepare(
    settings: config.Data,
    *,
    method: str,
    seed: int,
    parts: int,
    folder: str | Path | Sequence[str | Path],
    available: int | None = None,
    reuse: bool = False,
    data: Data | None = None,
) -> Meta:
    """Load a graph, cut it, and write its parts.

    Args:
        settings: The data settings that name the graph.
        method: The partitioner's name, or ``auto``.
        seed: The partitioner's seed.
        parts: The number of parts.
        folder: Where to write; of several folders, the first that is writable.
        available: Bytes that were free before the graph was loaded; measured at the call by default.
        reuse: Whether to take the owners of vertices from the user's cache and to keep them there.
        data: The graph, if it is loaded already.

    Returns:
        The metadata of the partition.

    Raises:
        KagomeError: If loading, cutting or writing fails.

    Cost: at the peak the graph and the memory of its partitioner; later the graph and one part.
    """
    data = load_data(settings) if data is None else data
    if available is None:
        available = available_bytes()
    else:
        # The caller measured before the graph was loaded, so the graph's own bytes are taken off.
        found = attributes_of(data)
        kinds = found.nodes, found.edges, tensors_of(found.shared)
        available -= sum(value.nbytes for kind in kinds for value in kind.values())
        available -= int(data.edge_index.nbytes)
    count = int(data.num_nodes or 0)
    # A partitioner would leave parts empty, which is a mistake in the settings of a run.
    if parts > max(count, 1):
        raise PartitionError(
            f"a vertex for each of {parts:,} parts",
            f"a graph of {count:,} vertices",
            hint=f"--parts {max(1, min(count, 4))}",
        )
    method, notes = choose(method, data.edge_index, int(data.num_nodes or 0), parts, available)
    # The mark names the partitioner that was chosen, so ``auto`` shares cached owners with its choice.
    mark = fingerprint(data, method, seed, parts)
    owner, entry = owners(data, mark, method=method, seed=seed, parts=parts, kept=cache.opened(reuse))
    notes = (*notes, *([cache.reused(entry)] if entry else []))
    meta, readers = store.measure(
        data, owner, parts, fingerprint=mark, method=method, seed=seed, notes=(*data.notes, *notes)
    )
    # The parts are made anew for each folder that is tried: keeping them would take the memory of the graph.
    folders = [folder] if isinstance(folder, str | Path) else list(folder)
    for number, place in enumerate(folders):
        try:
            store.save(each_part(data, owner, parts, fingerprint=mark, readers=readers), place, meta)
            break
        except PartitionError:
            if number == len(folders) - 1:
                raise
    return meta


def owners(
    data: Data, mark: str, *, method: str, seed: int, parts: int, kept: Cache | None
) -> tuple[Tensor, Path | None]:
    """Return the part of each vertex, from the cache if it is there.

    Args:
        data: The whole graph, validated.
        mark: The fingerprint of the graph with this cut.
        method: The partitioner's name.
        seed: The partitioner's seed.
        parts: The number of parts.
        kept: The cache; None if it is not to be used.

    Returns:
        The owners, and the cache entry that they were read from, if any.

    Shapes:
        owner ``[N]``, int64.
    """
    count = int(data.num_nodes or 0)
    # Shares and weights change nothing about what a cut costs.
    kept = kept if PartitionMethod.parse(method).name in KEPT and parts > 1 else None
    key = cache.owner_key(mark)
    found = None if kept is None else kept.owner(key, count, parts)
    if kept is not None and found is not None:
        return found, kept.folder / key
    owner = assign(method, data.edge_index, count, parts, seed, data.get("pos"))
    if kept is not None:
        kept.keep_owner(key, owner)
        kept.sweep()
    return owner, None


def answer(order: str) -> tuple[int, str]:
    """Call :func:`prepare` with the arguments in a line of JSON.

    Returns:
        An exit code, :data:`SEVERAL` for a graph that is not cut here; and for an expected error its fields
        in a line of JSON, from which the caller makes it again.
    """
    asked, rest = json.loads(order)
    try:
        settings = config.Data(**asked)
        data = load_graph(settings)
        if isinstance(data, HeteroData):
            return SEVERAL, ""
        prepare(settings, **rest, data=data)
    except (KagomeError, MemoryError, OSError, RuntimeError) as raised:
        error = in_words(raised)
        if error is None:
            raise
        return 1, json.dumps([type(error).__name__, error.expected, error.got, error.where, error.hint])
    return 0, ""


def main(order: str, parent: int) -> int:
    """Print what :func:`answer` says of an order, and return its exit code.

    Args:
        order: The line of JSON with the arguments.
        parent: The process id of the caller, which waits for this process; this process ends when that one
            does.
    """
    end_with(parent)
    code, line = answer(order)
    if line:
        print(line)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
