"""Epoch state: what an epoch leaves to the next besides weights: rows of other chunks and parts, controllers.

Where it sits: ``train.graph_engine`` and ``pipelining.chunk_engine`` report their state; ``checkpoint``
stores it, and returns it to a run that continues.

::

    guards     the same on all ranks          any run that continues
    entries    a site's rows, each rank's     a run of the same ranks, chunks and settings: bit by bit; others
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
"""The section of these tensors in a checkpoint."""

DECIDES: Final = (
    *("pipe", "graph", "tensor", "chunks", "shuffle_chunks"),
    *("cross_chunk", "stale_gradients", "cross_chunk_scale"),
    *("max_age", "smoothing", "error_feedback", "halo_sample", "skip_drift", "adaptive_bits"),
    *("codec", "codec_backward"),
)
"""Settings that decide which rows of an epoch are kept."""

AT: Final[Mapping[str, Callable[[Any], SiteKey]]] = {
    "table": lambda key: key,
    "statistic": lambda key: key[0][0],
    **dict.fromkeys(("line", "selection", "residual"), lambda key: key[0]),
}
"""For each kind of entry that has a site, a function from the entry's key to its site."""


@dataclass(frozen=True)
class StateLayout:
    """The facts that decide which rows a rank keeps, and in which order.

    Args:
        stage: The rank's stage, among those that hold its part.
        part: The rank's part.
        steps: The steps of the model that this rank runs.
        rest: Settings and row ids that must be equal for rows to be usable.
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
        """Return the layout of a rank's state.

        Args:
            settings: How the run is split, with no setting left open.
            fingerprint: The fingerprint of the graph and its partition.
            ids: Original ids of the rows in the order in which they are kept.
            part: The rank's part.
            stage: The rank's stage, among those that hold its part.
            steps: The steps of the model that this rank runs.
        """
        rest: dict[str, Any] = {name: getattr(settings, name) for name in DECIDES}
        # A hash: the layouts of all ranks are stored in ``rest.json``, which every rank reads.
        rows = blake2b(ids.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        return cls(stage, part, tuple(steps), {**rest, "fingerprint": fingerprint, "rows": rows})


@dataclass(frozen=True)
class EpochState:
    """The state that a rank's epoch leaves to the next one.

    Args:
        layout: The layout of its rows.
        controllers: The state of controllers: plain values, the same on all ranks.
        entries: The entries by kind and site.
    """

    layout: StateLayout
    controllers: Mapping[str, Any]
    entries: Mapping[tuple[str, Hashable], State]

    @classmethod
    def of(cls, layout: StateLayout, controllers: Mapping[str, Any], entries: Iterable[Entry]) -> EpochState:
        """Return the state made of some entries."""
        return cls(layout, controllers, {(kind, key): state for kind, key, state in entries})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that are unique among ranks."""
        return {
            self._path(place, name): value
            for place, state in enumerate(self.entries.values())
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    def plain(self, file: str) -> dict[str, Any]:
        """Return all but the tensors; for each tensor its name in a file."""
        entries = [
            (*key, {name: self._named(file, place, name, value) for name, value in state.items()})
            for place, (key, state) in enumerate(self.entries.items())
        ]
        return {**asdict(self.layout), "entries": entries}

    def _path(self, place: int, name: str) -> str:
        # `place` numbers the entries: keys of sites are no valid names in a file.
        return f"{SECTION}.{self.layout.part}/{self.layout.stage}/{place}/{name}"

    def _named(self, file: str, place: int, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # By its name: a run that has computed on the CPU may go on with a GPU.
        accelerated = value.device.type != "cpu" or name not in epoch_state_checks.ON_HOST
        return Named(file, self._path(place, name), tuple(value.shape), str(value.dtype), accelerated)


@dataclass(frozen=True)
class Named:
    """Where a checkpoint stores a tensor.

    Args:
        file: The file that holds it.
        path: Its name in the file.
        shape: The shape of the tensor.
        dtype: The number type of the tensor.
        accelerated: Whether it is on the accelerator in a run that has one.
    """

    file: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    accelerated: bool


@dataclass(frozen=True)
class RestoredRows:
    """The entries of a checkpoint for one rank, read site by site when they are asked for.

    Args:
        folder: The checkpoint.
        epoch: The epoch that may read it.
        device: The device that runs the model.
        entries: The entries by kind and site.
    """

    folder: Path
    epoch: int
    device: torch.device
    entries: Mapping[tuple[str, Hashable], State] = field(repr=False)

    def take(self, kind: str, key: Hashable, epoch: int) -> State | None:
        """Return an entry in the epoch that may read it or an evaluation before it; None if there is none.

        Raises:
            CheckpointError: If its rows cannot be read.
        """
        state = self.entries.get((kind, key))
        # Later epochs have newer rows in memory. The evaluation between resume and the first epoch counts as
        # epoch - 1.
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
                f"rows of epoch {self.epoch - 1} in {self.folder}",
                f"rows that cannot be read: {error}",
                where=f"{kind} {key}",
                hint="an earlier checkpoint of the run",
            ) from None
        for each in named.values():
            if each.accelerated:
                rows[each.path] = rows[each.path].to(self.device)
        return {**state, **{name: rows[each.path] for name, each in named.items()}}


@dataclass(frozen=True)
class RestoredState:
    """The epoch state that a checkpoint holds, of all ranks.

    Args:
        folder: The checkpoint.
        epoch: The epoch after which it was written.
        controllers: The state of controllers.
        ranks: What each rank kept, without the tensors.
    """

    folder: Path
    epoch: int
    controllers: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]

    def resume_rows(self, layout: StateLayout, world: Channel, device: torch.device) -> RestoredRows | None:
        """Return the entries that this rank may read, if all ranks may read theirs. All ranks call it.

        Args:
            layout: The layout of this rank's rows.
            world: All ranks.
            device: The device that runs the model.
        """
        entries = self.entries(layout)
        whole = len(self.ranks) == world.size
        # A rank that resumes rows exchanges in another way than one that does not, so all do or none does.
        if not all(world.gather_objects(whole and entries is not None, "rows of the last epoch")):
            return None
        assert entries is not None
        return RestoredRows(self.folder, self.epoch + 1, device, entries)

    def entries(self, layout: StateLayout) -> dict[tuple[str, Hashable], State] | None:
        """Return the entries of this rank's part; None where they do not fit.

        Stages are divided by the measured times of steps, so a run may have its steps on other ranks than the
        run before it. In that case sites are found by name, if each name belongs to one site only.
        """
        ranks = [rank for rank in self.ranks if rank["part"] == layout.part]
        if not ranks or any(rank["rest"] != layout.rest for rank in ranks):
            return None
        # The same steps on the same stage: its own entries. Otherwise the entries of all stages of this part.
        same = [rank for rank in ranks if (rank["stage"], rank["steps"]) == (layout.stage, layout.steps)]
        found = [(kind, key, state) for rank in same or ranks for kind, key, state in rank["entries"]]
        if not same and _ambiguous(found):
            return None
        return {(kind, key): state for kind, key, state in found}


def checked(rank: Any, files: Collection[str]) -> dict[str, Any]:
    """Check the state that a rank left, in the form that :meth:`EpochState.plain` returns.

    Args:
        rank: The state, as it was read.
        files: The files of the checkpoint: rows may be in no other.

    Raises:
        ValueError: If it has another form.
    """
    if not isinstance(rank, dict) or set(rank) != {*(each.name for each in fields(StateLayout)), "entries"}:
        raise ValueError("a rank's rows lack their layout")
    if not isinstance(rank["rest"], dict) or not isinstance(rank["steps"], tuple):
        raise ValueError("a rank's layout is none")
    for entry in rank["entries"]:
        kind, key, state = entry
        # Raises a TypeError for a key that no entry could be looked up by.
        hash(key)
        if not isinstance(kind, str) or not isinstance(state, dict):
            raise ValueError(f"a rank's rows hold {str(kind)[:40]!r}")
        for each in state.values():
            if isinstance(each, Named) and not (each.file in files and isinstance(each.path, str)):
                raise ValueError(f"a rank's rows lie in {str(each.file)[:40]!r}, no file of the checkpoint")
        if why := epoch_state_checks.fault(kind, state):
            raise ValueError(f"what a rank hands on for {kind} {str(key)[:60]} does not fit: {why}")
    return rank


def said_of(resumed_rows: ResumedRows | None, *, late: bool, history: bool = False) -> str:
    """Describe how a run continues with late rows or with history."""
    if not (late or history):
        return ""
    if resumed_rows is not None:
        return "; rows of its last epoch are read again"
    begins = "computes all rows" if history else "waits for its rows"
    return f"; it has no rows of its last epoch for these ranks, chunks and settings: the next one {begins}"


def _ambiguous(entries: Sequence[tuple[str, Any, State]]) -> bool:
    """Return whether sites share a name, so that their order depends on where a rank's stages begin."""
    keys = [(kind, key) for kind, key, _ in entries if kind in AT]
    # A site key is (name, how often the name has come). A second one of a name may be first on another rank.
    return len(set(keys)) < len(keys) or any(AT[kind](key)[1] > 1 for kind, key in keys)
