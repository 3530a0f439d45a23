"""Measurement cache: values measured on this machine, kept in the user's cache folder while they are valid.

Where it sits: ``autoplan.plan`` opens one; ``autoplan.workload`` asks it before it measures. A value is a
file that appears by one rename, so any number of runs may store the same value at once. Partitions have
``graph.partition.cache``: they hold for every machine and for good, and are bounded by bytes, not by age.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from kagome.graph.partition.cache import cache_folder, makers
from kagome.launch.threads import cores
from kagome.profile.steady_times import AGREE
from kagome.storage.atomic import write_text

#: Values are measured again after this time, because a machine's load changes over a day.
FRESH_SECONDS: Final = 86_400


@dataclass(frozen=True, eq=False)
class MeasurementCache:
    """Measured values, keyed by all that they depend on.

    Args:
        folder: The folder that holds them; None to keep them in this object alone.
        reused: The kinds of values that were found in the folder.
        doubtful: For each kind that was not stored because two measurements disagreed, their relative
            difference.
        tell: Called with a sentence before a measurement that may take minutes.
    """

    folder: Path | None = None
    reused: set[str] = field(default_factory=set)
    doubtful: dict[str, float] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda sentence: None
    _here: dict[str, Any] = field(default_factory=dict)

    def value(
        self,
        what: str,
        facts: object,
        measure: Callable[[], Any],
        spread: Callable[[Any], float] = lambda found: 0.0,
    ) -> Any:
        """Return the value stored under these facts; measure it if there is none.

        A new value is stored only if its measurements agree.

        Args:
            what: The kind of value.
            facts: All that it depends on except the machine, its threads and the code, as JSON values.
            measure: Measures the value, as JSON values: lists, not tuples.
            spread: Returns the relative difference of two measurements of the value.

        Raises:
            KagomeError: Any error that ``measure`` raises.
        """
        # Values in memory are valid for this process alone, so only the number of threads can change. On disk
        # they depend on the machine and on Kagome's code too: an edit of Kagome measures again.
        text = json.dumps([what, facts, _machine() if self.folder else torch.get_num_threads()])
        key = f"{what}-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        if key not in self._here:
            found = self._read(key)
            if found is None:
                found = measure()
                # A doubtful value serves this plan alone, which says so in a note.
                if (apart := spread(found)) > AGREE:
                    self.doubtful[what] = max(apart, self.doubtful.get(what, 0.0))
                else:
                    self._write(key, found)
            else:
                self.reused.add(what)
            self._here[key] = found
        return self._here[key]

    def _read(self, key: str) -> Any:
        """Return a value from the folder; None if it is missing, old or damaged."""
        if self.folder is None:
            return None
        try:
            file = self.folder / f"{key}.json"
            if time.time() - file.stat().st_mtime > FRESH_SECONDS:
                return None
            return json.loads(file.read_text())
        except (OSError, ValueError):
            return None

    def _write(self, key: str, value: Any) -> None:
        """Store a value and delete old ones; do nothing if the folder cannot be written."""
        if self.folder is None:
            return
        with suppress(OSError):
            write_text(self.folder / f"{key}.json", json.dumps(value))
            # The folder has no owner that could clean it, so each write removes what is too old to be read.
            for file in self.folder.iterdir():
                with suppress(OSError):
                    if time.time() - file.stat().st_mtime > FRESH_SECONDS:
                        file.unlink()


def opened(reuse: bool) -> MeasurementCache:
    """Open the user's measurement cache, which prints what it measures; an empty one without ``reuse``."""
    return MeasurementCache(cache_folder() / "measured" if reuse else None, tell=_print)


def _print(sentence: str) -> None:
    print(f"kagome: {sentence}", file=sys.stderr, flush=True)


def _machine() -> list[object]:
    """Describe the machine, its threads and the code that runs on it."""
    return [*_fixed(), len(cores()), torch.get_num_threads()]


@cache
def _fixed() -> tuple[object, ...]:
    """Describe what stays fixed while this process runs; this reads all of Kagome's files."""
    return (platform.machine(), _processor(), *makers(Path(__file__).parents[1]))


def _processor() -> str:
    with suppress(OSError):
        # platform.processor() is empty or just "x86_64" on Linux.
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
