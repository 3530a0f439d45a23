"""Carried: what epochs hand on besides weights - rows of other chunks and parts, what guards know.

Where it sits: ``train.graph_engine`` and ``pipeline.chunk_engine`` say what they carry; ``checkpoint`` keeps
it, and gives it back to a run that goes on.

::

    guards     the same on all ranks          any run that goes on
    entries    a site's rows, each rank's     a run of the same ranks, chunks and settings: to the bit; others
                                              compute their first epoch exactly
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kagome.checkpoint import epoch_state_checks
from kagome.comm.channel import Channel
from kagome.config import Parallel
from kagome.errors import CheckpointError
from kagome.halo.forward_pass import SiteKey
from kagome.halo.resumed_rows import Entry, ResumedRows, State
from kagome.storage import sealed_files
from kagome.storage.sealed_files import SealError

SECTION: Final = "carried"
"""Of a checkpoint."""

DECIDES: Final = (
    *("pipe", "graph", "tensor", "chunks", "shuffle_chunks"),
    *("cross_chunk", "stale_gradients", "cross_chunk_scale"),
    *("max_age", "smoothing", "error_feedback", "halo_sample", "skip_drift", "adaptive_bits"),
    *("codec", "codec_backward"),
)
"""Settings that say what rows are kept of an epoch."""

AT: Final[Mapping[str, Callable[[Any], SiteKey]]] = {
    "table": lambda key: key,
    "statistic": lambda key: key[0][0],
    **dict.fromkeys(("line", "selection", "residual"), lambda key: key[0]),
}
"""An entry's site by its key, where it has one."""


@dataclass(frozen=True)
class StateLayout:
    """What decides which rows a rank keeps, and in which order.

    Args:
        stage: Of the rank, among those that hold its part.
        part: Of the rank.
        steps: Of the model that this rank runs.
        rest: What must be alike for rows to be of use.
    """

    stage: int
    part: int
    steps: tuple[str, ...]
    rest: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        settings: Parallel,
        fingerprint: str,
        ids: Tensor,
        *,
        part: int,
        stage: int = 0,
        steps: Iterable[str] = (),
    ) -> StateLayout:
        """A rank's.

        Args:
            settings: How the run is split, with nothing left open.
            fingerprint: Of the graph and its cut.
            ids: Original ids of the rows in the order in which they are kept.
            part: Of the rank.
            stage: Of the rank, among those that hold its part.
            steps: Of the model that this rank runs.
        """
        rest: dict[str, Any] = {name: getattr(settings, name) for name in DECIDES}
        rows = blake2b(ids.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        return cls(stage, part, tuple(steps), {**rest, "fingerprint": fingerprint, "rows": rows})


@dataclass(frozen=True)
class EpochState:
    """What a rank's epochs hand on.

    Args:
        layout: Of its rows.
        guards: What guards know: plain values, the same on all ranks.
        entries: By kind and site.
    """

    layout: StateLayout
    guards: Mapping[str, Any]
    entries: Mapping[tuple[str, Hashable], State]

    @classmethod
    def of(cls, layout: StateLayout, guards: Mapping[str, Any], entries: Iterable[Entry]) -> EpochState:
        """A rank's."""
        return cls(layout, guards, {(kind, key): state for kind, key, state in entries})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that no other rank has."""
        return {
            self._path(place, name): value
            for place, state in enumerate(self.entries.values())
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    def plain(self, file: str) -> dict[str, Any]:
        """All the rest, with names in place of tensors, which lie in a file."""
        entries = [
            (*key, {name: self._named(file, place, name, value) for name, value in state.items()})
            for place, (key, state) in enumerate(self.entries.items())
        ]
        return {**asdict(self.layout), "entries": entries}

    def _path(self, place: int, name: str) -> str:
        return f"{SECTION}.{self.layout.part}/{self.layout.stage}/{place}/{name}"

    def _named(self, file: str, place: int, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        accelerated = value.device.type != "cpu"
        return Named(file, self._path(place, name), tuple(value.shape), str(value.dtype), accelerated)


@dataclass(frozen=True)
class Named:
    """Where a tensor lies in a checkpoint.

    Args:
        file: The file that holds it.
        path: Its name there.
        shape: Its shape.
        dtype: Its type.
        accelerated: Whether it lay on the accelerator.
    """

    file: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    accelerated: bool


@dataclass(frozen=True)
class Recalled:
    """What a checkpoint has for one rank: read from it site by site, when it is asked for.

    Args:
        folder: The checkpoint.
        epoch: The one that may read it.
        device: Where the model runs.
        entries: By kind and site.
    """

    folder: Path
    epoch: int
    device: torch.device
    entries: Mapping[tuple[str, Hashable], State] = field(repr=False)

    def take(self, kind: str, key: Hashable, epoch: int) -> State | None:
        """An entry, in the epoch that may read it and in evaluations before; None where there is none.

        Raises:
            CheckpointError: If its rows cannot be read.
        """
        state = self.entries.get((kind, key))
        if state is None or not self.epoch - 1 <= epoch <= self.epoch:
            return None
        named = {name: value for name, value in state.items() if isinstance(value, Named)}
        rows: dict[str, Tensor] = {}
        try:
            for each in named.values():
                rows |= sealed_files.read_tensors(self.folder / each.file, [each.path])[0]
                found = rows[each.path]
                if (tuple(found.shape), str(found.dtype)) != (each.shape, each.dtype):
                    raise SealError(f"{each.path} is {list(found.shape)} {found.dtype}")
        except SealError as error:
            raise CheckpointError(
                f"rows of epoch {self.epoch - 1} were expected in {self.folder}",
                f"they cannot be read: {error}",
                where=f"{kind} {key}",
                hint="an earlier checkpoint of the run",
            ) from None
        for each in named.values():
            if each.accelerated:
                rows[each.path] = rows[each.path].to(self.device)
        return {**state, **{name: rows[each.path] for name, each in named.items()}}


@dataclass(frozen=True)
class RestoredState:
    """What a checkpoint says of what its run's epochs handed on.

    Args:
        folder: The checkpoint.
        epoch: After which it was written.
        guards: What guards knew.
        ranks: What each rank kept, without the tensors.
    """

    folder: Path
    epoch: int
    guards: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]

    def recall(self, layout: StateLayout, world: Channel, device: torch.device) -> Recalled | None:
        """What this rank may read again, if all ranks may. All ranks call it.

        Args:
            layout: Of this rank's rows.
            world: All ranks.
            device: Where the model runs.
        """
        entries = self.entries(layout)
        whole = len(self.ranks) == world.size
        if not all(world.gather_objects(whole and entries is not None, "rows of the last epoch")):
            return None
        assert entries is not None
        return Recalled(self.folder, self.epoch + 1, device, entries)

    def entries(self, layout: StateLayout) -> dict[tuple[str, Hashable], State] | None:
        """Those of this rank's part; None where they do not fit.

        Stages are cut by what steps are timed to take, so that a run may have its steps on other ranks than
        the one before: sites go by their names then, if each name is of one site alone.
        """
        ranks = [rank for rank in self.ranks if rank["part"] == layout.part]
        if not ranks or any(rank["rest"] != layout.rest for rank in ranks):
            return None
        same = [rank for rank in ranks if (rank["stage"], rank["steps"]) == (layout.stage, layout.steps)]
        found = [(kind, key, state) for rank in same or ranks for kind, key, state in rank["entries"]]
        if not same and _ambiguous(found):
            return None
        return {(kind, key): state for kind, key, state in found}


def checked(rank: Any, files: Collection[str]) -> dict[str, Any]:
    """What a rank handed on, as :meth:`EpochState.plain` gives it.

    Args:
        rank: As it was read.
        files: Those of the checkpoint: rows lie in no other.

    Raises:
        ValueError: If it is something else.
    """
    if not isinstance(rank, dict) or set(rank) != {*(each.name for each in fields(StateLayout)), "entries"}:
        raise ValueError("a rank's rows lack their layout")
    if not isinstance(rank["rest"], dict) or not isinstance(rank["steps"], tuple):
        raise ValueError("a rank's layout is none")
    for entry in rank["entries"]:
        kind, key, state = entry
        hash(key)
        if not isinstance(kind, str) or not isinstance(state, dict):
            raise ValueError(f"a rank's rows hold {str(kind)[:40]!r}")
        for each in state.values():
            if isinstance(each, Named) and not (each.file in files and isinstance(each.path, str)):
                raise ValueError(f"a rank's rows lie in {str(each.file)[:40]!r}, no file of the checkpoint")
        if why := epoch_state_checks.fault(kind, state):
            raise ValueError(f"what a rank hands on for {kind} {str(key)[:60]} does not fit: {why}")
    return rank


def said_of(recall: ResumedRows | None, *, late: bool, history: bool = False) -> str:
    """How a run goes on, in words: with late rows, with history."""
    if not (late or history):
        return ""
    if recall is not None:
        return "; rows of its last epoch are read again"
    begins = "computes all rows" if history else "waits for its rows"
    return f"; it has no rows of its last epoch for these ranks, chunks and settings: the next one {begins}"


def _ambiguous(entries: Sequence[tuple[str, Any, State]]) -> bool:
    """Whether sites have a name in common: which is which depends on where a rank's stages begin."""
    keys = [(kind, key) for kind, key, _ in entries if kind in AT]
    return len(set(keys)) < len(keys) or any(AT[kind](key)[1] > 1 for kind, key in keys)
