"""Quotas: cgroups of each emulated host: one that waits lends its cores to no other, and CPU time is counted.

Where it sits: ``benchmarks/cluster.py`` puts each host's processes into one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PERIOD_US = 10_000
"""Time over which a quota is kept: short beside an exchange, or a slow host would look like a fast one that
pauses."""
NONE = "no CPU quota"


class Quotas:
    """Cgroups of each host, with a CPU quota and a count; version 1 or 2, whichever can be written.

    Args:
        name: Of the cgroup above the hosts'.
        hosts: How many.
        share: Cores of each, or those of one after the other.

    Attributes:
        kind: ``cgroup v1``, ``cgroup v2`` or ``no CPU quota``.
        groups: Of each host, those that its processes join: version 1 may count CPU time in another one.
    """

    def __init__(self, name: str, hosts: int, share: float | Sequence[float]) -> None:
        self.kind = NONE
        self.groups: list[tuple[Path, ...]] = [()] * hosts
        self._tops: list[Path] = []
        shares = [share] * hosts if isinstance(share, float) else list(share)
        version = self._add(name, "cpu", shares)
        if version:
            self.kind = f"cgroup v{version}"
        if self.used(0) is None:
            self._add(name, "cpuacct", [None] * hosts)

    def _add(self, name: str, controller: str, shares: Sequence[float | None]) -> int:
        """Give each host a group of this controller.

        Returns:
            The groups' version; 0 where none can be made.
        """
        for version, parent in parents(controller):
            top = parent / name
            self._remove(top)
            try:
                made = [self._make(version, top, host, share) for host, share in enumerate(shares)]
            except OSError:
                self._remove(top)
                continue
            self.groups = [(*groups, group) for groups, group in zip(self.groups, made, strict=True)]
            self._tops.append(top)
            return version
        return 0

    def _make(self, version: int, top: Path, host: int, share: float | None) -> Path:
        group = top / str(host)
        top.mkdir(exist_ok=True)
        if version == 2:
            for above in (top.parent, top):
                (above / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        if share is None:
            return group
        quota = max(int(share * PERIOD_US), 1000)
        if version == 2:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        return group

    def used(self, host: int) -> tuple[float, float] | None:
        """Seconds of CPU, own and the kernel's, of a host's processes so far; None where none are counted."""
        for group in self.groups[host]:
            files = [group / f"cpuacct.usage_{who}" for who in ("user", "sys")]
            if all(file.exists() for file in files):
                own, kernel = (int(file.read_text()) * 1e-9 for file in files)
                return own, kernel
            words = _words(group / "cpu.stat")
            if "user_usec" in words:
                own, kernel = (
                    int(words[words.index(f"{who}_usec") + 1]) * 1e-6 for who in ("user", "system")
                )
                return own, kernel
        return None

    def _remove(self, top: Path) -> None:
        """Take the groups away, with whatever still runs in them."""
        for group in (*top.glob("*/"), top):
            for _ in range(100):
                if not group.exists():
                    break
                with suppress(OSError):
                    for pid in map(int, (group / "cgroup.procs").read_text().split()):
                        kill(pid)
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.02)

    def close(self) -> None:
        """Take all groups away."""
        for top in self._tops:
            self._remove(top)


def parents(controller: str = "cpu") -> list[tuple[int, Path]]:
    """Folders in which cgroups of a controller might be made, with their version: own ones first."""
    found = []
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        point = Path(where.split()[4])
        if version is None or (version == 1 and controller not in options.split(" ")[-1].split(",")):
            continue
        if version == 2 and controller not in _words(point / "cgroup.controllers"):
            continue
        for _, kinds, name in own:
            if (controller in kinds.split(",")) if version == 1 else not kinds:
                folder = point / name.strip("/")
                found += [(version, one) for one in (folder, *folder.parents) if one.is_relative_to(point)]
    return found


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def kill(pid: int) -> None:
    """End a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
