"""Probe: what the links and CPU shares of an emulated cluster really are, by plain sockets and busy loops.

Where it sits: ``python benchmarks/cluster.py`` prints it; the same file is what it runs in hosts.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster import Cluster

SIZE = 16_000_000
PORT = 28_700
TURNS = 50
SPIN = 2.0
"""Seconds of a busy loop."""


def measured(cluster: Cluster) -> Iterator[str]:
    """One line a figure."""
    yield f"{cluster.hosts} hosts, {cluster.rate_mbit:g} Mbit/s each way, {cluster.cpu_share:.3f} cores each"
    yield f"CPU: {cluster.quota}"
    if cluster.hosts > 1:
        found = link(cluster, 0, 1)
        yield f"round trip of a byte: {1e3 * found['round_trip']:.3f} ms"
        for name, seconds in found["seconds"].items():
            yield f"{SIZE / 1e6:.0f} MB {name}: {seconds:.3f} s, {rate(seconds):.0f} Mbit/s"
    yield from shares(cluster)


def rate(seconds: float) -> float:
    """Mbit/s of a message of :data:`SIZE` bytes."""
    return SIZE * 8e-6 / seconds


def link(cluster: Cluster, one: int, other: int) -> dict[str, Any]:
    """Seconds of a byte there and back, and of :data:`SIZE` bytes there, back, and both ways at once."""
    server = start(cluster, other, "serve")
    client = start(cluster, one, "call", cluster.addresses[other])
    found = dict(result(client))
    result(server)
    return found


def shares(cluster: Cluster) -> Iterator[str]:
    """What a busy loop gets: in one host alone, in two at once, in all at once."""
    alone = spin(cluster, 1)[0]
    yield f"busy loop in 1 host: {alone['cores']:.3f} cores"
    for hosts in sorted({min(2, cluster.hosts), cluster.hosts} - {1}):
        found = spin(cluster, hosts)
        cores = ", ".join(f"{one['cores']:.3f}" for one in found)
        done = ", ".join(f"{one['turns'] / alone['turns']:.2f}" for one in found)
        yield f"busy loops in {hosts} hosts at once: {cores} cores; turns of the one alone: {done}"


def spin(cluster: Cluster, hosts: int) -> list[dict[str, float]]:
    """Busy loops in the first so many hosts at once."""
    return [result(one) for one in [start(cluster, host, "spin") for host in range(hosts)]]


def start(cluster: Cluster, host: int, *words: str) -> subprocess.Popen[str]:
    return cluster.run(
        host, [sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result(process: subprocess.Popen[str]) -> Any:
    """What a probe in a host found.

    Raises:
        RuntimeError: If it failed.
    """
    out, err = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"a probe failed with {process.returncode}: {err}")
    return json.loads(out)


# In a host -------------------------------------------------------------------------------------------


def serve() -> None:
    """The other end of :func:`call`."""
    with socket.create_server(("", PORT)) as listening:
        end, _ = listening.accept()
    with end:
        for _ in range(TURNS):
            end.sendall(end.recv(1))
        for sent, got in ((0, SIZE), (SIZE, 0), (SIZE, SIZE)):
            exchange(end, sent, got)
    print("{}")


def call(address: str) -> None:
    """Print the seconds of each exchange."""
    with reached(address) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(TURNS):
            begun = time.perf_counter()
            end.sendall(b"?")
            end.recv(1)
            trips.append(time.perf_counter() - begun)
        ways = {"there": (SIZE, 0), "back": (0, SIZE), "both ways at once": (SIZE, SIZE)}
        seconds = {name: exchange(end, sent, got) for name, (sent, got) in ways.items()}
    print(json.dumps({"round_trip": statistics.median(trips), "seconds": seconds}))


def reached(address: str) -> socket.socket:
    """A connection to :func:`serve`, which may not have begun."""
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=120)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def exchange(end: socket.socket, sent: int, got: int) -> float:
    """Seconds until all is sent and received, and the other end has said so."""
    begun = time.perf_counter()
    sender = threading.Thread(target=end.sendall, args=(bytes(sent),))
    sender.start()
    take(end, got)
    sender.join()
    end.sendall(b".")
    take(end, 1)
    return time.perf_counter() - begun


def take(end: socket.socket, count: int) -> None:
    while count:
        count -= len(end.recv(min(count, 1 << 20))) or sys.exit("the other end is gone")


def busy() -> None:
    """Print the cores that a busy loop got, and its turns."""
    begun, used, turns = time.perf_counter(), time.process_time(), 0
    while (wall := time.perf_counter() - begun) < SPIN:
        turns += 1
    print(json.dumps({"cores": (time.process_time() - used) / wall, "turns": turns}))


def main(words: Sequence[str]) -> None:
    """Run one end of a measurement."""
    actions: dict[str, Any] = {"serve": serve, "call": call, "spin": busy}
    actions[words[0]](*words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
