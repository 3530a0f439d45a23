"""Cluster: devices, their memory, and the links between them, declared in a file or measured.

Where it sits: the planner's knowledge of machines; ``run`` measures the one at hand.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, Final

from kagome.errors import PlanError


@dataclass(frozen=True)
class Cluster:
    """Equal hosts of equal devices.

    Args:
        name: For people.
        hosts: How many.
        devices: On each host.
        memory: Bytes of a device.
        speed: How many times as fast a device computes as the machine that layers are measured on: both are
            bound by memory, so a ratio of memory bandwidths.
        inside: Bytes a second of one device to those of its host.
        between: Bytes a second of one device to those of other hosts.
        latency: Seconds of a message, however small; a rank sends one after another.
        crowded: How fast a device computes while the others do too, as a share of how fast it does alone.
        cores: That the devices share by turns, where they are ranks of one machine.
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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "latency") and not value > 0:
                raise PlanError(f"a cluster's {field.name} is above 0", f"it is {value}", where=self.name)

    @property
    def size(self) -> int:
        """All devices."""
        return self.hosts * self.devices

    def pace(self, ranks: int) -> float:
        """How many times as fast a device computes as the machine that was measured, with so many at work."""
        return self.speed if ranks == 1 else self.speed * self.crowded * min(1.0, self.cores / ranks)

    def bandwidth(self, ranks: int) -> float:
        """Bytes a second of one of so many ranks that follow each other: within a host, or across hosts."""
        return self.inside if ranks <= self.devices else self.between

    @staticmethod
    def load(file: Path | str) -> Cluster:
        """A ready cluster by its name, or one from a TOML file.

        Raises:
            PlanError: If there is none, or a value is missing or of another kind.
        """
        if str(file) in READY:
            return READY[str(file)]
        path = Path(file)
        if not path.is_file():
            raise PlanError(
                f"--cluster takes a TOML file or one of {', '.join(READY)}",
                f"there is no file {file}",
                hint="name, hosts, devices, memory, speed, inside, between; latency, crowded, cores",
            )
        try:
            return _made(tomllib.loads(path.read_text()))
        except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                "a cluster's file has name, hosts, devices, memory, speed, inside, between",
                str(error),
                where=str(file),
            ) from None


def _made(record: Mapping[str, Any]) -> Cluster:
    kinds = {"name": str, "hosts": int, "devices": int}
    return Cluster(**{name: kinds.get(name, float)(value) for name, value in record.items()})


GIB: Final = 2.0**30
GB: Final = 1e9
CORE: Final = 15 * GB
"""Bytes a second of memory that one core of a server reads: what ``speed`` is told against."""
READY: Final[Mapping[str, Cluster]] = {
    "h100x8": Cluster("8 H100 in one node", 1, 8, 80 * GIB, 3_350 * GB / CORE, 450 * GB, 50 * GB),
    "h100x64": Cluster("8 nodes of 8 H100", 8, 8, 80 * GIB, 3_350 * GB / CORE, 450 * GB, 50 * GB),
    "a5000x16": Cluster("4 nodes of 4 A5000", 4, 4, 24 * GIB, 768 * GB / CORE, 25 * GB, 1.25 * GB),
}
"""Data sheets' figures: memory bandwidth, NVLink or PCIe in a node, InfiniBand or 10 Gbit/s between nodes."""
