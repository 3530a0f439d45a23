"""Epoch records: one record per epoch, the file that holds them, and the peak memory of a process.

Where it sits: ``train`` fills them; ``report.summary`` and ``report.page.page`` read the records back.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kagome.config.fields import shown
from kagome.errors import ConfigError
from kagome.storage.atomic import plain, write_text
from kagome.storage.text_files import json_text

KINDS = ("halo", "stage", "transpose", "weights", "statistics", "other")


@dataclass(frozen=True)
class EpochRecord:
    """The results and costs of one epoch."""

    epoch: int
    """The number of the epoch."""
    loss: float | None
    """Mean loss over all training vertices; in a record read from a file, None if it was not finite."""
    train_metric: float | None
    """The metric on the training vertices, or None if not evaluated."""
    val_metric: float | None
    """The metric on the validation vertices, or None if not evaluated."""
    seconds: float
    """Seconds of training without evaluation."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that all ranks sent in training, as transported, by kind of :data:`KINDS`."""
    waited: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a rank waited for messages, mean over the ranks, by kind; only kinds that occur."""
    under_way: Mapping[str, float] = field(default_factory=dict)
    """Seconds from the begin of each exchange to the end of its wait, mean over the ranks, by kind."""
    uncoded: Mapping[str, int] = field(default_factory=dict)
    """Bytes of all ranks as they would be without codecs and without the traffic of probes, by kind. Holds
    only kinds that may be coded, and only if anything is coded or stale.
    """
    best_epoch: int | None = None
    """The best epoch so far by the run's metric; None if this epoch was not evaluated."""

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a line of ``metrics.jsonl``, with all kinds of bytes and their total.

        ``waited`` and ``under_way`` are included if anything was exchanged, ``uncoded`` if it was coded, and
        ``best_epoch`` if there was an evaluation.
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
    """Return bytes by kind and their ``total``; unknown kinds count as ``other``."""
    # A `total` in the counts, as files have it, is not counted again.
    full: dict[str, Any] = dict.fromkeys(KINDS, 0)
    for kind, count in counts.items():
        if kind != "total":
            full[kind if kind in KINDS else "other"] += count
    full["total"] = sum(full.values())
    return full


def hidden_shares(records: Sequence[EpochRecord]) -> dict[str, float]:
    """Return the share of each kind's exchange time that computation hid.

    Args:
        records: The epochs to add up.

    Returns:
        0 for a kind that was waited for from the start, 1 for one that was never waited for; only kinds that
        occur.
    """
    shares = {}
    for kind in KINDS:
        # Sums over epochs first, then the quotient: an epoch with little
        # traffic must not count as much as others.
        under_way = sum(record.under_way.get(kind, 0.0) for record in records)
        waited = sum(record.waited.get(kind, 0.0) for record in records)
        if (share := hidden_share(under_way, waited)) is not None:
            shares[kind] = share
    return shares


def hidden_share(under_way: float, waited: float) -> float | None:
    """Return the share of exchanges' seconds that computation hid; None if there was no exchange."""
    # Both are means over ranks of measured times, so their quotient may be slightly out of range.
    return min(max(1.0 - waited / under_way, 0.0), 1.0) if under_way > 0 else None


def read_records(path: str | Path) -> list[EpochRecord]:
    """Read the records in ``metrics.jsonl``.

    A last line without a line end is left out if it is no record: the process died while it wrote the line.

    Args:
        path: The file.

    Returns:
        The records in the order of the file.

    Raises:
        ConfigError: If the file cannot be read, or another line is not a record.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError("the records of a run", f"{path}, which cannot be read: {error}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(json_text(line)))
        except (ValueError, TypeError, RecursionError) as error:
            # The process died while it wrote this line; split("\n")
            # leaves an empty last line after a whole one.
            if number == len(lines):
                break
            raise ConfigError(
                f"a record of an epoch on each line of {path}",
                f"no such record: {error}",
                where=f"line {number}",
            ) from None
    return records


def _record(values: Any) -> EpochRecord:
    """Return the record that a parsed line holds.

    Raises:
        ValueError: If the line is not a record.
        TypeError: If a value is missing or unknown.
    """
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    # Unknown or missing names are a TypeError; "total" within bytes is an ordinary key.
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
    # Any comparison with NaN is false, so it is refused too.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e21


class JsonLines:
    """Writer of ``metrics.jsonl``: one line per epoch, each on disk before the next epoch starts.

    Args:
        path: The file.
        before: Records of the epochs already done; any other content of the file is dropped.
    """

    def __init__(self, path: str | Path, *, before: Sequence[EpochRecord] = ()) -> None:
        self.path = Path(path)
        # Written in one step before the first new line, so that dying here loses nothing.
        write_text(self.path, "".join(map(_line, before)))
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, record: EpochRecord) -> None:
        """Append one record and flush it."""
        self._file.write(_line(record))
        # To the system, not to the disk: it survives a crash of the process, which is what happens.
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._file.close()


def _line(record: EpochRecord) -> str:
    return json.dumps(plain(record.as_dict()), allow_nan=False) + "\n"


class Memory:
    """Peak memory of this process on a CPU: the peak resident size minus the resident size at the start.

    Create it after the imports and before any data is loaded. The difference is what the run itself needed
    (graph, features, activations, buffers, libraries loaded later), without the 200-400 MB that importing
    PyTorch takes. Resident size counts pages. It includes memory that the allocator has not returned and
    pages shared with other processes, but no memory that was swapped out.

    The kernel's high-water mark (``VmHWM``) is reset here if that is permitted. If it is not, a higher peak
    *during* the imports would count as well, and ``exact`` is False. Without ``/proc`` the peak is
    ``ru_maxrss``, which in a child process may also start at the size of the process that started it.

    A rank may be forked from a process that has done the imports and created this object. Pages of libraries
    count for the rank only once it touches them again. The pages that it has not touched are added, so that
    forked and spawned ranks report the same.

    Attributes:
        exact: Whether the peak counts only from here on.
        start: Resident bytes at the start.
        files: The part of these bytes in pages of files, which are libraries.
    """

    def __init__(self) -> None:
        self.exact = False
        try:
            # Writing 5 resets VmHWM to the present resident size (man 5 proc).
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
        """Return the highest resident size so far minus that at the start, in bytes."""
        # Library pages of the process before the fork that this rank has not touched.
        untouched = max(self.files - (_status("RssFile") or self.files), 0)
        return max((_status("VmHWM") or _max_resident()) + untouched - self.start, 0)


def _status(key: str) -> int | None:
    """Return a size in bytes from ``/proc/self/status``, or None if it is not there.

    psutil has neither the peak nor the pages of files without those of shared memory.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(f"{key}:"):
                    # The line is "VmRSS:     12345 kB".
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _max_resident() -> int:
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux kilobytes.
    return size if sys.platform == "darwin" else size * 1024
