"""Quotas: a cgroup for each emulated host, so that hosts which wait do not lend their cores to others.

Where it sits: ``benchmarks/cluster.py`` puts each host's processes into one.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PERIOD_US = 10_000
"""Time over which a quota is kept: short beside an exchange, or a slow host would look like a fast one that
pauses."""
NONE = "no CPU quota"


class Quotas:
    """A cgroup a host, each with a CPU quota; version 1 or 2, whichever can be written.

    Args:
        name: Of the cgroup above the hosts'.
        hosts: How many.
        share: Cores of each.

    Attributes:
        kind: ``cgroup v1``, ``cgroup v2`` or ``no CPU quota``.
    """

    def __init__(self, name: str, hosts: int, share: float) -> None:
        self.kind, self.groups = NONE, list[Path]()
        for version, parent in parents():
            top = parent / name
            self._remove(top)
            try:
                self.groups = [self._make(version, top, host, share) for host in range(hosts)]
            except OSError:
                self._remove(top)
                continue
            self.kind, self.top = f"cgroup v{version}", top
            return

    def _make(self, version: int, top: Path, host: int, share: float) -> Path:
        group = top / str(host)
        top.mkdir(exist_ok=True)
        if version == 2:
            for above in (top.parent, top):
                (above / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        quota = max(int(share * PERIOD_US), 1000)
        if version == 2:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        return group

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
        if self.groups:
            self._remove(self.top)


def parents() -> list[tuple[int, Path]]:
    """Folders in which cgroups with a CPU quota might be made, with their version: own ones first."""
    found = []
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        point = Path(where.split()[4])
        if version is None or (version == 1 and "cpu" not in options.split(" ")[-1].split(",")):
            continue
        if version == 2 and "cpu" not in _words(point / "cgroup.controllers"):
            continue
        for _, kinds, name in own:
            if ("cpu" in kinds.split(",")) if version == 1 else not kinds:
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
