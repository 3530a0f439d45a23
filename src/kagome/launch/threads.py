"""Thread counts: how many threads each rank computes with, so that the ranks of a host share its cores.

Where it sits: ``comm.mesh`` applies the counts, ``launcher`` starts ranks with them, ``cli.doctor`` shows
them. ``pipelining.chunk_passes`` uses the threads of stages that wait.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kagome.launch.cgroups import LISTED, ROOT, groups_above

GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which the user sets the number of torch's threads."""
LAUNCHED = "KAGOME_LAUNCHED"
"""Variable set in ranks that ``launcher`` started: their threads have been assigned. Its value is ``SHARED``
where the ranks share the cores, as the user chose no number."""
SHARED = "shared"


@dataclass(frozen=True)
class CpuShare:
    """The processors that one rank may compute on.

    Args:
        host: Name of its host.
        cores: The cores that it may run on.
        quota: CPU time that its cgroup allows, in cores; None without a limit.
        group: The cgroup that sets the limit, which its ranks share.
        chosen: Number of threads that the user chose; None to let the ranks share the cores.
    """

    host: str
    cores: tuple[int, ...]
    quota: float | None = None
    group: str = ""
    chosen: int | None = None


def seat(current: int | None = None) -> CpuShare:
    """Return the processors that this process may compute on.

    Args:
        current: Number of threads that torch has now, if it is loaded: see :func:`chosen`.
    """
    limit, group = quota()
    own = cores()
    return CpuShare(socket.gethostname(), own, limit, group, chosen(os.environ, current, len(own)))


def threads(seats: Sequence[CpuShare]) -> tuple[int, ...]:
    """Return the threads of each rank: its share of its cores and of its cgroup's quota, at least 1.

    A core that several ranks of a host may run on is shared by them. Cores that a scheduler bound to one rank
    are its own.

    Args:
        seats: The share of each rank.
    """
    return tuple(_share(own, seats) if own.chosen is None else own.chosen for own in seats)


def while_waiting(rank: int, others: Iterable[int], seats: Sequence[CpuShare]) -> int:
    """Return the threads that a rank may use while other ranks wait: its own, and theirs on the same cores.

    A number that the user chose, for this rank or a waiting one, is kept. So are cores that a scheduler bound
    to one rank, and the quota of another cgroup.

    Args:
        rank: The rank.
        others: The ranks that wait, without this one.
        seats: The share of each rank.
    """
    own, counts = seats[rank], threads(seats)
    if own.chosen is not None:
        return counts[rank]
    lent = 0
    for other in others:
        seat = seats[other]
        near = seat.host == own.host and seat.group == own.group
        lent += counts[other] if near and seat.chosen is None and set(seat.cores) <= set(own.cores) else 0
    return max(counts[rank], min(counts[rank] + lent, len(own.cores)))


def _share(own: CpuShare, seats: Sequence[CpuShare]) -> int:
    beside = [other for other in seats if other.host == own.host]
    # Example, four ranks on one host:
    #    ranks 0, 1 may use cores 0-3, ranks 2, 3 cores 4-5
    #    rank 0: 4 cores, each shared by 2 ranks = 2 threads; rank 2: 2 / 2 = 1 thread
    share = sum(1 / sum(core in other.cores for other in beside) for core in own.cores)
    # A container may see all cores of the host and be allowed the time of a few.
    if own.quota is not None:
        share = min(share, own.quota / sum(other.group == own.group for other in beside))
    # Sums of thirds are a little below a whole number.
    return max(1, int(share + 1e-6))


def cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def chosen(env: Mapping[str, str], current: int | None = None, count: int | None = None) -> int | None:
    """Return the number of threads that the user asked for, or None.

    ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` sets it, unless torchrun set the former to 1 by itself. So does
    ``torch.set_num_threads``, unless it set the number that torch starts with.

    Args:
        env: The environment.
        current: Number of threads that torch has now; None if it is not loaded.
        count: Number of cores that this process may run on.
    """
    if env.get(LAUNCHED) == SHARED:
        # The launcher has set the variables: only another number is the user's own.
        return None if current is None or str(current) == env.get(GIVEN[0]) else current
    by_torchrun = set_by_torchrun(env)
    given = [env[name] for name in GIVEN if env.get(name) and not (by_torchrun and name == GIVEN[0])]
    # OpenMP accepts one number for each level of nesting.
    numbers = [int(text.split(",")[0]) for text in given if text.split(",")[0].strip().isdigit()]
    if numbers:
        # Once torch is loaded, its own number is what counts: it has read the variable.
        return max(1, numbers[0]) if current is None else current
    # Torch starts with one thread for each logical core, or for each physical core if those have two.
    starts = {1} if by_torchrun else {count, (count or 0) // 2, (os.cpu_count() or 0)}
    return None if current is None or current in starts else current


def set_by_torchrun(env: Mapping[str, str], above: Iterable[Mapping[str, str]] | None = None) -> bool:
    """Return whether torchrun set ``OMP_NUM_THREADS=1``, which it does if the user did not set it.

    The environment that torchrun itself was started with shows it. If it cannot be read, the user is assumed
    to have set the variable.

    Args:
        env: This process's environment.
        above: Environments that the processes above this one were started with, the parent's first; by
            default read from the system.
    """
    # torchrun sets 1 for several ranks on a host, which would leave
    # most cores idle; a user's own 1 is obeyed.
    if env.get("OMP_NUM_THREADS") != "1" or "TORCHELASTIC_RUN_ID" not in env or LAUNCHED in env:
        return False
    # Torchrun may be the parent, or start a script that starts this process.
    for names in _environments_above() if above is None else above:
        if "TORCHELASTIC_RUN_ID" not in names:
            return "OMP_NUM_THREADS" not in names
    return False


def _environments_above() -> Iterator[Mapping[str, str]]:
    """Yield the environments that the processes above this one were started with, if they may be read."""
    import psutil  # here, because it would take a twentieth of the start of every command

    with suppress(OSError, psutil.Error):
        for process in psutil.Process().parents():
            yield process.environ()


def quota(groups: Path = LISTED, root: Path = ROOT) -> tuple[float | None, str]:
    """Return the CPU time in cores that this process's cgroups leave it, and the cgroup that leaves least.

    Args:
        groups: File in which the system lists this process's cgroups.
        root: Folder of the cgroups (version 2, or version 1's folder ``cpu``).
    """
    least: tuple[float | None, str] = (None, "")
    for kinds, base, group in groups_above("cpu", groups, root):
        found = _limit(base / group)
        if found is not None and (least[0] is None or found < least[0]):
            least = (found, f"{kinds}:{group}")
    return least


def _limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            # Microseconds of CPU time per period: "200000 100000" is two cores, "max 100000" no limit.
            allowed, period = (folder / "cpu.max").read_text().split()
        else:
            allowed = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if allowed in ("max", "-1") else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def local(nproc: int) -> int:
    """Return the number of threads of each of ``nproc`` ranks that this process starts on its host."""
    own = cores()
    limit, group = quota()
    return threads([CpuShare("", own, limit, group)] * nproc)[0]
