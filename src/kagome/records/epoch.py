"""Meters of a run: a record an epoch, its file, and the peak memory of a process.

Where it sits: ``run`` fills them while it trains; ``report.summary`` and ``report.page.page`` read the
records back.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from kagome.config.fields import shown
from kagome.errors import ConfigError
from kagome.storage.atomic import plain, write_text
from kagome.storage.text_files import json_text

KINDS = ("halo", "stage", "transpose", "weights", "statistics", "other")


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch gave and cost."""

    epoch: int
    """Its number."""
    loss: float | None
    """Mean loss over all training vertices; None, in a file read back, where it was not finite."""
    train_metric: float | None
    """The metric on the training vertices; None where not evaluated."""
    val_metric: float | None
    """The metric on the validation vertices; None where not evaluated."""
    seconds: float
    """Seconds of training, evaluation excluded."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes sent in training, all ranks, on the wire, by kind of :data:`KINDS`."""
    waited: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a rank waited for what others sent, mean over the ranks, by kind; only kinds there are."""
    under_way: Mapping[str, float] = field(default_factory=dict)
    """Seconds from the begin of each exchange to the end of its wait, mean over the ranks, by kind."""
    uncoded: Mapping[str, int] = field(default_factory=dict)
    """Bytes of all ranks without codecs, and without what probes send beside, by kind; only kinds that may be
    coded, and only where anything is coded or late."""
    best_epoch: int | None = None
    """The best epoch so far, by the run's metric; None where this one was not evaluated."""

    def as_dict(self) -> dict[str, Any]:
        """The record as a line of ``metrics.jsonl``, with all kinds of bytes and their total.

        ``waited`` and ``under_way`` are there where anything was exchanged, ``uncoded`` where it was coded,
        ``best_epoch`` where there was an evaluation.
        """
        more = {name: dict(getattr(self, name)) for name in ("waited", "under_way", "uncoded")}
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            "train_metric": self.train_metric,
            "val_metric": self.val_metric,
            "seconds": self.seconds,
            "bytes": by_kind(self.bytes),
        } | {name: values for name, values in (*more.items(), ("best_epoch", self.best_epoch)) if values}


def by_kind(counts: Mapping[str, float]) -> dict[str, Any]:
    """Bytes of every kind and their ``total``; kinds that are not known count as ``other``."""
    full: dict[str, Any] = dict.fromkeys(KINDS, 0)
    for kind, count in counts.items():
        if kind != "total":
            full[kind if kind in KINDS else "other"] += count
    full["total"] = sum(full.values())
    return full


def hidden_shares(records: Sequence[EpochRecord]) -> dict[str, float]:
    """The share of the time under way that computation hid, by kind.

    Args:
        records: Some epochs.

    Returns:
        0 for what was waited for at once, 1 for what was never waited for; only kinds there are.
    """
    shares = {}
    for kind in KINDS:
        under_way = sum(record.under_way.get(kind, 0.0) for record in records)
        if under_way > 0:
            waited = sum(record.waited.get(kind, 0.0) for record in records)
            shares[kind] = min(max(1.0 - waited / under_way, 0.0), 1.0)
    return shares


def read_records(path: str | Path) -> list[EpochRecord]:
    """Read ``metrics.jsonl``.

    A last line without its end (the process died while it wrote) is left out.

    Args:
        path: The file.

    Returns:
        The records in the order of the file.

    Raises:
        ConfigError: If the file cannot be read, or another line is no record.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError("the records of a run were asked for", f"{path} cannot be read: {error}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(json_text(line)))
        except (ValueError, TypeError, RecursionError) as error:
            if number == len(lines):
                break
            raise ConfigError(
                f"a record of an epoch on each line of {path}",
                f"there is none: {error}",
                where=f"line {number}",
            ) from None
    return records


def _record(values: Any) -> EpochRecord:
    """A record of what a line holds.

    Raises:
        ValueError: If it is none.
        TypeError: If a value is missing, or not known.
    """
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    record = EpochRecord(**values)
    for name, each in values.items():
        if name in ("epoch", "best_epoch"):
            fine = isinstance(each, int) and not isinstance(each, bool) and 0 < each < 2**53
        elif name in ("loss", "train_metric", "val_metric"):
            fine = each is None or _number(each)
        elif name == "seconds":
            fine = _number(each) and each >= 0
        else:
            fine = isinstance(each, dict) and all(_number(count) and count >= 0 for count in each.values())
        if not fine:
            raise ValueError(f"{name} is {shown(each, 80)}")
    return record


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e21


class JsonLines:
    """Writes ``metrics.jsonl``, a line an epoch, each on disk before the next epoch starts.

    Args:
        path: The file.
        before: Records of the epochs that the run has done; whatever else the file held goes.
    """

    def __init__(self, path: str | Path, *, before: Sequence[EpochRecord] = ()) -> None:
        self.path = Path(path)
        # They are written whole before the first new line: dying here loses nothing.
        write_text(self.path, "".join(map(_line, before)))
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, record: EpochRecord) -> None:
        """Append one record and flush it."""
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(record: EpochRecord) -> str:
    return json.dumps(plain(record.as_dict()), allow_nan=False) + "\n"


class Memory:
    """Peak memory of this process on a CPU: the peak resident size less the resident size at the start.

    Make it after the imports and before any data is loaded: what remains is what the run itself needed
    (graph, features, activations, buffers, libraries loaded later), without the 200-400 MB that importing
    PyTorch takes. Resident size counts pages, so it includes what the allocator has not given back and pages
    shared with other processes; it does not include what was swapped out. The kernel's high-water mark
    (``VmHWM``) is set back here where that is allowed; where it is not, a higher peak *during* the imports
    would count as well (then ``exact`` is False). Without ``/proc`` it is ``ru_maxrss``, which in a child
    process may also start at the size of the process that started it.

    A rank may be forked of a process that has done the imports and made this. Pages of libraries count for it
    only once it touches them again: those that it has not are added, so that both kinds of ranks tell alike.

    Attributes:
        exact: Whether the peak counts from here on only.
        start: Resident bytes at the start.
        files: Those of them that are pages of files: of libraries.
    """

    def __init__(self) -> None:
        self.exact = False
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.exact = True
        except OSError:
            pass
        self.start = _status("VmRSS") or _max_resident()
        self.files = _status("RssFile") or 0
        # The counters may be some pages out of step, and a sandbox may accept the write and do nothing.
        high = _status("VmHWM")
        self.exact = self.exact and high is not None and high - self.start < 4 << 20

    def peak(self) -> int:
        """Bytes: the highest resident size so far, less that at the start."""
        untouched = max(self.files - (_status("RssFile") or self.files), 0)
        return max((_status("VmHWM") or _max_resident()) + untouched - self.start, 0)


def _status(key: str) -> int | None:
    """A size in bytes of ``/proc/self/status``, or None where there is none."""
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(f"{key}:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _max_resident() -> int:
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
