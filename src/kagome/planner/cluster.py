"""Cluster: devices, their memory, and the links between them, declared in a file or measured.

Where it sits: it is what the planner knows of machines; ``autoplan.plan`` measures the machine at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Final

from kagome.config.fields import fits, hints_of, path_of, shown, takes
from kagome.errors import PlanError, shortened
from kagome.storage import text_files

EXTRA: Final = ("latency", "crowded", "cores")
"""Fields that a cluster's file may leave out."""
NEEDED: Final = "name, hosts, devices, memory, speed, inside, between"
DEVICES: Final = 65_536
"""Most devices of a cluster: plans are made for each number of ranks up to it."""
LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "hosts": (1, DEVICES), "devices": (1, DEVICES), "memory": (1, 1e24), "speed": (1e-9, 1e12),
    "inside": (1, 1e24), "between": (1, 1e24), "latency": (0, 1e6), "crowded": (1e-6, 1),
    "cores": (1e-3, 1e9),
}  # fmt: skip
"""The smallest and the largest allowed value of each number."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal hosts with equal devices.

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

    Example:
        >>> two = Cluster("two hosts", hosts=2, devices=4, memory=16e9, speed=1, inside=1e10, between=1e9)
        >>> two.size, two.bandwidth(4) == two.inside, two.bandwidth(8) == two.between
        (8, True, True)
    """

    name: str
    hosts: int
    devices: int
    memory: float
    speed: float
    inside: float
    between: float
    latency: float = 5e-6
    crowded: float = 1.0
    cores: float = inf

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
            # The default of `cores` is inf, which is outside LIMITS.
            if not low <= value <= high and not (name == "cores" and value == inf):
                raise PlanError(f"a cluster's {name} to be from {low:g} to {high:g}", f"{value:.17g}")
        if self.size > DEVICES:
            raise PlanError(f"a cluster of up to {DEVICES:,} devices", f"{self.size:,}")

    @property
    def size(self) -> int:
        """The number of devices of all hosts."""
        return self.hosts * self.devices

    def pace(self, ranks: int) -> float:
        """Return the speed of a device relative to the measured machine while this many ranks compute."""
        # If ranks outnumber the cores, they take turns: each has cores / ranks of a core.
        return self.speed if ranks == 1 else self.speed * self.crowded * min(1.0, self.cores / ranks)

    def bandwidth(self, ranks: int) -> float:
        """Return the bytes per second of one of several consecutive ranks: within a host, or across hosts."""
        # All ranks wait for the slowest link, so one link between hosts decides for all.
        return self.inside if ranks <= self.devices else self.between

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
CORE: Final = 15 * GB
"""Memory bandwidth of one core of a server in bytes per second, which ``speed`` is relative to."""
READY: Final[Mapping[str, Cluster]] = {
    "h100x8": Cluster("8 H100 in one node", 1, 8, 80 * GIB, 3_350 * GB / CORE, 450 * GB, 50 * GB),
    "h100x64": Cluster("8 nodes of 8 H100", 8, 8, 80 * GIB, 3_350 * GB / CORE, 450 * GB, 50 * GB),
    "a5000x16": Cluster("4 nodes of 4 A5000", 4, 4, 24 * GIB, 768 * GB / CORE, 25 * GB, 1.25 * GB),
}
"""Built-in clusters with figures from data sheets: memory bandwidth, NVLink or PCIe in a node, InfiniBand or
10 Gbit/s Ethernet between nodes."""
