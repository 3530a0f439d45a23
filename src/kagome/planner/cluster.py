"""Cluster: devices, their memory, and the links between them, declared in a file or measured.

Where it sits: it is what the planner knows of machines; ``autoplan.plan`` measures the machine at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Final

from kagome.config.fields import fits, hints_of, path_of, shown, takes
from kagome.errors import PlanError, shortened
from kagome.storage import text_files

EXTRA: Final = ("latency", "crowded", "cores", "to_host", "host_memory")
"""Fields that a cluster's file may leave out."""
NEEDED: Final = "name, hosts, devices, memory, speed, inside, between"
LOCAL: Final = 4e9
"""Rough bandwidth between ranks of one host in bytes per second: two copies through shared memory."""
DEVICES: Final = 65_536
"""Most devices of a cluster: plans are made for each number of ranks up to it."""
LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "hosts": (1, DEVICES), "devices": (1, DEVICES), "memory": (1, 1e24), "speed": (1e-9, 1e12),
    "inside": (1, 1e24), "between": (1, 1e24), "latency": (0, 1e6), "crowded": (1e-6, 1),
    "cores": (1e-3, 1e9), "to_host": (0, 1e24), "host_memory": (0, 1e24),
}  # fmt: skip
"""The smallest and the largest allowed value of each number."""


PerHost = float | tuple[float, ...]
"""One number for all hosts, or one for each."""
UNEQUAL: Final = ("memory", "speed", "inside", "between")
"""Fields that may differ from host to host."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of hosts with as many devices each; those of one host are equal.

    ``memory``, ``speed``, ``inside`` and ``between`` are one number, or a list with a number for each host. A
    plan of fewer ranks than devices takes the first hosts.

    Args:
        name: The name shown to users.
        hosts: The number of hosts.
        devices: The number of devices on each host.
        memory: Bytes of memory of a device.
        speed: The speed of a device relative to the machine that layers are measured on. Both are bound by
            memory, so it is a ratio of memory bandwidths.
        inside: Bytes per second from a device to the others of its host.
        between: Bytes per second from a device to those of other hosts.
        latency: Seconds of a message of any size; a rank sends its messages one after another.
        crowded: The speed of a device while the others compute too, relative to its speed alone.
        cores: The number of cores that the devices share, if they are ranks of one machine.
        to_host: Bytes per second between a device and the memory of its host, each way; 0 if the device is
            the host, or the rate is unknown. Activations can wait there if ``host_memory`` is known too.
        host_memory: Bytes of memory of each host that its devices may use.

    Example:
        >>> two = Cluster("two hosts", hosts=2, devices=4, memory=16e9, speed=1, inside=1e10, between=1e9)
        >>> two.size, two.bandwidth(4) == two.inside, two.bandwidth(8) == two.between
        (8, True, True)
        >>> mixed = Cluster("old and new", 2, 2, memory=(8e9, 16e9), speed=(1, 3), inside=1e10, between=1e9)
        >>> mixed.weights(4)
        (1.0, 1.0, 3.0, 3.0)
    """

    name: str
    hosts: int
    devices: int
    memory: PerHost
    speed: PerHost
    inside: PerHost
    between: PerHost
    latency: float = 5e-6
    crowded: float = 1.0
    cores: float = inf
    to_host: float = 0.0
    host_memory: float = 0.0

    def __post_init__(self) -> None:
        hints = hints_of(Cluster)
        # Values come from a user's TOML file, where a wrong type is as likely as a wrong number: types first,
        # since a comparison of a string with a number would raise a TypeError without the field's name.
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if not fits(value, hints[name]):
                raise PlanError(f"a cluster's {name} to be {takes(hints[name])}", shown(value))
            if name == "name":
                continue
            low, high = LIMITS[name]
            if isinstance(value, (tuple, list)):
                object.__setattr__(self, name, tuple(value))  # frozen, and nobody has seen it yet
                if len(value) != self.hosts:
                    raise PlanError(
                        f"a cluster's {name} to be one number, or one for each of {self.hosts} hosts",
                        f"{len(value)} numbers",
                    )
            for each in value if isinstance(value, (tuple, list)) else (value,):
                # The default of `cores` is inf, which is outside LIMITS.
                if not low <= each <= high and not (name == "cores" and each == inf):
                    raise PlanError(f"a cluster's {name} to be from {low:g} to {high:g}", f"{each:.17g}")
        if self.size > DEVICES:
            raise PlanError(f"a cluster of up to {DEVICES:,} devices", f"{self.size:,}")

    @property
    def size(self) -> int:
        """The number of devices of all hosts."""
        return self.hosts * self.devices

    def _of_hosts(self, value: PerHost, ranks: int) -> tuple[float, ...]:
        """Return a number for each host that so many ranks take."""
        # Ranks that outnumber the devices take turns on the hosts that there are.
        hosts = min(ceil(ranks / self.devices), self.hosts)
        return value[:hosts] if isinstance(value, tuple) else (value,) * hosts

    def _of_ranks(self, value: PerHost, ranks: int) -> tuple[float, ...]:
        """Return a number for each of so many ranks, which fill one host after another."""
        each = self._of_hosts(value, ranks)
        return tuple(each[min(rank // self.devices, self.hosts - 1)] for rank in range(ranks))

    def memories(self, ranks: int) -> tuple[float, ...]:
        """Return the bytes of memory of each of so many ranks."""
        return self._of_ranks(self.memory, ranks)

    def paces(self, ranks: int) -> tuple[float, ...]:
        """Return the speed of each rank relative to the measured machine while this many ranks compute."""
        # If ranks outnumber the cores, they take turns: each has cores / ranks of a core.
        shared = 1.0 if ranks == 1 else self.crowded * min(1.0, self.cores / ranks)
        return tuple(speed * shared for speed in self._of_ranks(self.speed, ranks))

    def pace(self, ranks: int) -> float:
        """Return the speed of the slowest of so many ranks, for cuts that give all of them the same work."""
        return min(self.paces(ranks))

    def weights(self, ranks: int) -> tuple[float, ...]:
        """Return the work that each rank should get, relative to the slowest; () if all are equally fast."""
        speeds = self._of_ranks(self.speed, ranks)
        slowest = min(speeds)
        # Three digits: a cut is no more exact than that, and users read them.
        found = tuple(float(f"{speed / slowest:.3g}") for speed in speeds)
        return found if max(found) > 1 else ()

    def one_host(self, ranks: int) -> bool:
        """Return whether so many consecutive ranks are on one host."""
        return ranks <= self.devices

    def bandwidth(self, ranks: int) -> float:
        """Return the bytes per second of one of several consecutive ranks: within a host, or across hosts."""
        # All ranks wait for the slowest link, so one link between hosts decides for all.
        return min(self._of_hosts(self.inside if self.one_host(ranks) else self.between, ranks))

    @staticmethod
    def load(file: Path | str) -> Cluster:
        """Return a built-in cluster by its name, or read one from a TOML file.

        Raises:
            PlanError: If the file does not exist, or a value is missing or has the wrong type.
        """
        if str(file) in READY:
            return READY[str(file)]
        where = shortened(str(file), 200)
        if not path_of(file, "--cluster").exists():
            raise PlanError(
                f"--cluster to be a TOML file or one of {', '.join(READY)}",
                f"no file {where}",
                hint=f"{NEEDED}; {', '.join(EXTRA)}",
            )
        try:
            record = text_files.toml(file)
        except text_files.UnreadableError as error:
            raise PlanError(f"a cluster's TOML with {NEEDED}", f"unreadable: {error}", where=where) from None
        known = [field.name for field in fields(Cluster)]
        for wrong, names in (("no", [name for name in known if name not in (*record, *EXTRA)]),
                             ("an unknown", [name for name in record if name not in known])):  # fmt: skip
            if names:
                raise PlanError(
                    f"a cluster's file with {NEEDED}, and {', '.join(EXTRA)} if need be",
                    f"{wrong} {names[0]!r}",
                    where=where,
                )
        try:
            # __post_init__ knows the fields but not the file, so its error gets the file's name here.
            return Cluster(**record)
        except PlanError as error:
            raise PlanError(error.expected, error.got, where=where) from None


GIB: Final = 2.0**30
GB: Final = 1e9
TB: Final = 1e12
CORE: Final = 15 * GB
"""Memory bandwidth of one core of a server in bytes per second, which ``speed`` is relative to."""
_H100: Final = Cluster(
    "8 H100 in one node", 1, 8, 80 * GIB, 3_350 * GB / CORE, 450 * GB, 50 * GB,
    to_host=64 * GB, host_memory=2 * TB,
)  # fmt: skip
READY: Final[Mapping[str, Cluster]] = {
    "h100x8": _H100,
    "h100x64": replace(_H100, name="8 nodes of 8 H100", hosts=8),
    "a5000x16": Cluster("4 nodes of 4 A5000", 4, 4, 24 * GIB, 768 * GB / CORE, 25 * GB, 1.25 * GB),
}
"""Built-in clusters with figures from data sheets: memory bandwidth, NVLink or PCIe in a node, InfiniBand or
10 Gbit/s Ethernet between nodes; host memory of a DGX H100, behind PCIe 5. That of the A5000s is unknown."""
