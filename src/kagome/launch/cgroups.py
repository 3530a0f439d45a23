"""Control groups: the groups above this process that may limit its CPU time or its memory.

Where it sits: below ``threads`` and ``host_memory``, because psutil does not read control groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

LISTED: Final = Path("/proc/self/cgroup")
"""File in which the system lists this process's groups."""
ROOT: Final = Path("/sys/fs/cgroup")
"""Folder of the groups: of version 2, or of version 1 with a folder for each controller."""


def groups_above(
    controller: str, listed: Path = LISTED, root: Path = ROOT
) -> Iterator[tuple[str, Path, Path]]:
    """Yield this process's group of a controller and all groups above it, in either version.

    Args:
        controller: ``cpu`` or ``memory``.
        listed: As :data:`LISTED`.
        root: As :data:`ROOT`.

    Yields:
        The controllers of the hierarchy, empty in version 2; the folder of the hierarchy; the group's folder
        within it.
    """
    try:
        lines = listed.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        kinds, _, name = rest.partition(":")
        # "0::/name" in version 2, "4:cpu,cpuacct:/name" in version 1.
        if kinds and controller not in kinds.split(","):
            continue
        base = root / controller if kinds else root
        folder = Path(name.strip("/"))
        # Limits of the groups above apply too. In a container the name is often that of the host; then its
        # own limit is in the top folder.
        for group in (folder, *folder.parents):
            yield kinds, base, group
