"""Host memory: how much memory this process may still allocate.

Where it sits: the partitioner's choice, the memory estimate and ``comm.transport.shared_memory`` ask it.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

from kagome.launch.cgroups import ROOT, groups_above

_CGROUPS: Final = ROOT
# The limit, what is in use, and the line of ``memory.stat`` with the part of it that is file cache.
_FIRST_VERSION: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND_VERSION: Final = ("memory.max", "memory.current", "inactive_file")


def available_bytes() -> int | None:
    """Return the memory that this process may still allocate: the machine's, or less if a limit is set.

    Limits are those of its control groups, and of its address space (``ulimit -v``).

    Returns:
        The bytes; None if the system does not say.
    """
    import psutil  # here, because it would take a twentieth of the start of every command

    found = [_group()]
    with suppress(OSError, psutil.Error):  # such as: this process may open no more files
        found.append(psutil.virtual_memory().available)
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            found.append(max(0, soft - psutil.Process().memory_info().vms))
    return min((amount for amount in found if amount is not None), default=None)


def _group() -> int | None:
    """Return what the control groups above this process leave, in either version.

    File cache counts as free.
    """
    left: list[int] = []
    for kinds, base, group in groups_above("memory", root=_CGROUPS):
        left += _left(base / group, *(_FIRST_VERSION if kinds else _SECOND_VERSION))
    return min(left, default=None)


def _left(folder: Path, limit: str, used: str, cache: str) -> list[int]:
    try:
        most = int((folder / limit).read_text())  # "max" if there is no limit
        free = most - int((folder / used).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(f"{cache} "):
                free += int(line.split()[1])
    except (OSError, ValueError):
        return []
    return [max(free, 0)]
