"""Host parts: one host's parts of a graph named by settings, found in the cache or made by a process.

Where it sits: ``data.from_settings`` has one on the first rank of each host.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kagome import config, errors
from kagome.errors import KagomeError, PartitionError
from kagome.graph.datasets.load import raw_files
from kagome.graph.partition import cache
from kagome.graph.partition.cache import Cache
from kagome.graph.partition.choice import SHARE, is_auto, metis_bytes
from kagome.graph.partition.store import PAGE, Meta, load_meta
from kagome.graph.prepare import SEVERAL
from kagome.graph.prepare_process import Standby, prepared_by
from kagome.launch.host_memory import available_bytes
from kagome.storage import temporary


class Look(NamedTuple):
    """Free memory of a host before parts are made, and the partitioner of its cached parts."""

    available: int | None
    method: str | None


class SeveralSets(Exception):  # noqa: N818 - an answer, not a fault
    """Exception for a graph of several vertex sets, which each rank loads by itself."""


class Offer(NamedTuple):
    """Where a host's parts are and what to report about them, or the error that making them raised."""

    folder: str
    notes: tuple[str, ...]
    error: KagomeError | None


@dataclass
class HostParts:
    """The parts of one host.

    Args:
        settings: The graph.
        method: The partitioner's name, or ``auto``.
        seed: The partitioner's seed.
        count: The number of parts.
        kept: The user's cache, if it is to be used.
        standby: The process that makes the parts; None starts one.
    """

    settings: config.Data
    method: str
    seed: int
    count: int
    kept: Cache | None
    standby: Standby | None = None
    _key: str | None = None
    _found: tuple[Path, Meta] | None = None

    def look(self) -> Look:
        """Look for parts in the cache."""
        available = available_bytes()
        if self.kept is not None:
            try:
                files = raw_files(self.settings)
            except KagomeError:
                files = None  # loading reports the fault
            self._key = cache.parts_key(
                self.settings, files, method=self.method, seed=self.seed, parts=self.count
            )
            self._found = None if self._key is None else self.kept.parts(self._key)
            # A streamed partition cuts more edges than METIS. It is made anew once there is memory for METIS.
            if self._found is not None and self._outgrown(self._found[1], available):
                self.kept.drop(self._found[0])
                self._found = None
        return Look(available, None if self._found is None else self._found[1].method)

    def _outgrown(self, meta: Meta, available: int | None) -> bool:
        """Return whether these parts were streamed for lack of memory that is free now."""
        if not is_auto(self.method) or not meta.method.startswith("streaming"):
            return False
        # Bytes of the loaded graph: two int64 ids per edge, float32 features.
        loaded = 16 * meta.num_edges + 4 * meta.features * meta.num_nodes
        need = metis_bytes(meta.num_nodes, meta.num_edges, 2 * meta.num_edges)
        return available is None or need <= SHARE * (available - loaded)

    def make(self, stack: ExitStack, seen: Sequence[Look]) -> Offer:
        """Make the parts, unless they were found.

        Args:
            stack: Removes at its end what is not stored in the cache.
            seen: The look of every host; the same list on each.

        Returns:
            Where they are; no folder for a graph of several vertex sets.
        """
        try:
            return self._made(stack, seen)
        except SeveralSets:
            return Offer("", (), None)

    def _made(self, stack: ExitStack, seen: Sequence[Look]) -> Offer:
        # All hosts must cut the graph alike. The first host with cached parts decides the partitioner;
        # without any, each host chooses by the least free memory of all hosts.
        methods = [look.method for look in seen if look.method is not None]
        method = methods[0] if methods else self.method
        if self._found is not None and self._found[1].method == method:
            return Offer(str(self._found[0]), (cache.reused(self._found[0]),), None)
        amounts = [look.available for look in seen if look.available is not None]
        temporary.clear(Path(tempfile.gettempdir()), "kagome-parts-*")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kagome-parts-")), "parts")
        stack.enter_context(temporary.held(folder.parent))
        if self.kept is None or self._key is None:
            error = self._run([folder], method, min(amounts, default=None))
            return Offer(str(folder), (), error)
        # The process writes to the cache if it can, else to the temporary folder (a full or read-only cache).
        fresh = stack.enter_context(self.kept.making())
        inside = [] if fresh is None else [fresh / "parts"]
        error = self._run([*inside, folder], method, min(amounts, default=None))
        if error is not None or not inside or not (inside[0] / PAGE).exists():
            return Offer(str(folder), (), error)
        # Another run may have stored parts under this key in the meantime; `keep` then returns those.
        mark = load_meta(inside[0]).fingerprint
        entry = self.kept.keep(self._key, inside[0])
        if entry is None or load_meta(entry).fingerprint != mark:  # these parts are by another method
            return Offer(str(inside[0]), (), None)
        size = cache.size(entry)
        kept = (
            f"The partition, {size / 2**30:.1f} GiB, is kept in {cache.shown(entry)} (--parallel.no-reuse)."
        )
        return Offer(str(entry), (kept,) if size >= cache.LARGE_BYTES else (), None)

    def forget(self, offer: Offer) -> bool:
        """Remove damaged parts from the cache; return False if they did not come from it."""
        if self.kept is None or self._found is None or offer.folder != str(self._found[0]):
            return False
        self.kept.drop(self._found[0])
        return True

    def end(self) -> None:
        """Keep the cache within its limits once all ranks have opened their parts."""
        if self.kept is not None and self._found is None:
            self.kept.sweep()

    def _run(self, folders: list[Path], method: str, available: int | None) -> KagomeError | None:
        """Load and partition the graph in a process of its own; return its error, or None."""
        asked = {
            "method": method,
            "seed": self.seed,
            "parts": self.count,
            "folder": [str(folder) for folder in folders],
            "available": available,
            "reuse": self.kept is not None and self._key is None,
        }
        order = json.dumps([dataclasses.asdict(self.settings), asked])
        code, line = prepared_by(self.standby, order)
        if code == 0:
            return None
        if code == SEVERAL:
            raise SeveralSets
        try:
            # An error of Kagome is told as JSON.
            leaf, expected, got, where, hint = json.loads(line)
            kind: type[KagomeError] = getattr(errors, leaf)
            return kind(expected, got, where=where, hint=hint)
        except ValueError:
            return PartitionError(
                "the process that loads and cuts the graph to end with code 0",
                f"code {code}",
                hint="see its message above; with too little memory, kagome partition on a larger machine",
            )
