"""Kept: what was measured here, in the user's cache folder while nothing that decides it changes.

Where it sits: ``autoplan.plan`` opens one; ``autoplan.workload`` asks it before it measures. A value is a
file that appears by one rename, so any number of runs may keep the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
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

#: A machine has fast hours and slow ones, and other users: measured again after so long.
FRESH_SECONDS: Final = 86_400


@dataclass(frozen=True, eq=False)
class MeasurementCache:
    """Measured values by what decides them.

    Args:
        folder: Where they lie; None to keep them for as long as this object lives.
        reused: What was found there.
        doubtful: By which share two measurements of a kind differed that was not kept for that.
    """

    folder: Path | None = None
    reused: set[str] = field(default_factory=set)
    doubtful: dict[str, float] = field(default_factory=dict)
    _here: dict[str, Any] = field(default_factory=dict)

    def value(
        self,
        what: str,
        facts: object,
        measure: Callable[[], Any],
        spread: Callable[[Any], float] = lambda found: 0.0,
    ) -> Any:
        """What was measured under these facts; else it is measured now, and kept if it agrees with itself.

        Args:
            what: Its kind.
            facts: All that decides it but the machine, its threads and the code that runs, as JSON has it.
            measure: Finds it, as JSON has it: lists, not tuples.
            spread: By which share two measurements of what was found differed.

        Raises:
            KagomeError: What ``measure`` raises.
        """
        text = json.dumps([what, facts, _machine() if self.folder else torch.get_num_threads()])
        key = f"{what}-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        if key not in self._here:
            found = self._read(key)
            if found is None:
                found = measure()
                if (apart := spread(found)) > AGREE:
                    self.doubtful[what] = max(apart, self.doubtful.get(what, 0.0))
                else:
                    self._write(key, found)
            else:
                self.reused.add(what)
            self._here[key] = found
        return self._here[key]

    def _read(self, key: str) -> Any:
        """A value in the folder; None where there is none, or an old or damaged one."""
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
        """Keep a value, and throw away what is old; nothing where the folder cannot be written."""
        if self.folder is None:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh = self.folder / f".{key}-{os.getpid()}"
            fresh.write_text(json.dumps(value))
            fresh.rename(self.folder / f"{key}.json")
            for file in self.folder.iterdir():
                with suppress(OSError):
                    if time.time() - file.stat().st_mtime > FRESH_SECONDS:
                        file.unlink()


def opened(reuse: bool) -> MeasurementCache:
    """The user's measurements, if they are to be used."""
    return MeasurementCache(cache_folder() / "measured" if reuse else None)


def _machine() -> list[object]:
    """The machine, and the code that runs on it."""
    return [*_fixed(), len(cores()), torch.get_num_threads()]


@cache
def _fixed() -> tuple[object, ...]:
    """What stays while this process runs; all of Kagome's files are read for it."""
    return (platform.machine(), _processor(), *makers(Path(__file__).parents[1]))


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
