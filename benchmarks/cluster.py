"""Cluster: several hosts emulated on one machine, each with its own link and its own share of the CPU.

Where it sits: benchmarks of ranks on several hosts start their ranks with it.

::

    namespace NAME-0      namespace NAME-switch      namespace NAME-1
    eth0 10.77.0.1 ─veth─ port0 ─ bridge ─ port1 ─veth─ eth0 10.77.0.2
    cgroups NAME/0                                      cgroups NAME/1

Both ends of each veth pair are shaped (``tbf``): the inner end is what a host sends, the outer what it gets.
Hosts share the kernel's clock, memory and page cache; ranks must be told not to use memory that both see
(``--parallel.no-shared-memory``), as who can open whose is tried and would succeed here.

Run: python benchmarks/cluster.py --hosts 4 --rate 1000    (as root: measures links and CPU shares)
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import IO

import tyro
from pipeline import probe
from pipeline.quotas import Quotas, kill

LEAST_BURST, BURST_SECONDS = 72_000, 0.002
"""What a link carries at once after a pause: one packet of the largest size, before it is cut up, with the
headers of all its pieces (68,130 bytes; where there is no room for it the kernel cuts it up, at ten times the
CPU time); and what it carries in that time, or timers that come late would cost a fast link its rate (66 kB:
550 of 1000 Mbit/s)."""
QUEUE_MS = 50
"""What a link holds back before it drops."""
PORT = 29_500
GRACE = 3.0
"""Seconds that ranks get to say what they saw once another has failed."""


class NotPermittedError(RuntimeError):
    """No emulated cluster can be made here, or not by this user."""


def default_share(hosts: int) -> float:
    """Cores of each of so many hosts: equal parts of nine tenths of all."""
    return 0.9 * len(os.sched_getaffinity(0)) / hosts


def refuse() -> None:
    """Say why no cluster can be made.

    Raises:
        NotPermittedError: Without root, or without the programs ``ip`` and ``tc``.
    """
    if os.geteuid() != 0:
        raise NotPermittedError("an emulated cluster needs root: it makes network namespaces and cgroups")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise NotPermittedError(f"an emulated cluster needs {' and '.join(missing)} (package iproute2)")


class Cluster:
    """So many hosts on this machine, from ``with`` to its end.

    Args:
        hosts: How many.
        rate_mbit: What each host's link carries each way, in Mbit/s.
        cpu_share: Cores of each host, or those of one after the other; by default :func:`default_share`.
        name: Of the namespaces and cgroups; what a crashed cluster of this name left is taken away first.

    Attributes:
        addresses: One a host.
        quota: How the CPU is shared out: ``cgroup v1``, ``cgroup v2`` or ``no CPU quota``.

    Raises:
        NotPermittedError: On entry: without root, ``ip``, ``tc``, or a kernel that has all that is needed.
    """

    def __init__(
        self,
        hosts: int,
        rate_mbit: float,
        cpu_share: float | Sequence[float] | None = None,
        *,
        name: str = "kagome",
    ) -> None:
        self.hosts, self.rate_mbit, self.name = hosts, rate_mbit, name
        self.cpu_share = default_share(hosts) if cpu_share is None else cpu_share
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._spaces = [f"{name}-{host}" for host in range(hosts)]
        self._switch = f"{name}-switch"
        self._launched = 0
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        refuse()
        with ExitStack() as stack:
            self._lock(stack)
            stack.callback(self._clear)
            self._clear()
            self._quotas = Quotas(self.name, self.hosts, self.cpu_share)
            self.quota = self._quotas.kind
            stack.callback(self._quotas.close)
            self._connect()
            self.shape(self.rate_mbit)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C shall not leave half of it behind.
        ours = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ours else None
        try:
            self.end()
            self._stack.close()
        finally:
            if ours:
                signal.signal(signal.SIGINT, before)

    def _lock(self, stack: ExitStack) -> None:
        """One cluster of a name at a time; the name is free again when its process has ended, however."""
        lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        try:
            lock.bind(f"\0kagome-cluster-{self.name}")
        except OSError:
            raise NotPermittedError(f"another emulated cluster named {self.name!r} is running") from None

    def _connect(self) -> None:
        for space in (self._switch, *self._spaces):
            tool("ip", "netns", "add", space)
        tool("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        tool("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host, space in enumerate(self._spaces):
            port = f"port{host}"
            pair = ("type", "veth", "peer", "name", "eth0", "netns", space)
            tool("ip", "-n", self._switch, "link", "add", port, *pair)
            tool("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            tool("ip", "-n", space, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                tool("ip", "-n", space, "link", "set", device, "up")

    def shape(self, rate_mbit: float) -> None:
        """Give all links another rate, each way."""
        burst = max(LEAST_BURST, round(rate_mbit * 125_000 * BURST_SECONDS))
        limits = ("rate", f"{round(rate_mbit * 1000)}kbit", "burst", str(burst))
        for host, space in enumerate(self._spaces):
            for where, device in ((space, "eth0"), (self._switch, f"port{host}")):
                place = ("qdisc", "replace", "dev", device, "root", "tbf")
                tool("tc", "-n", where, *place, *limits, "latency", f"{QUEUE_MS}ms")
        self.rate_mbit = rate_mbit

    def used(self) -> list[tuple[float, float]]:
        """Seconds of CPU that each host has used so far, its own and its kernel's; empty if not counted."""
        seconds = [self._quotas.used(host) for host in range(self.hosts)]
        return [one for one in seconds if one is not None]

    def _left(self) -> list[str]:
        """Namespaces of this name that there are."""
        names = [line.split()[0] for line in tool("ip", "netns", "list").splitlines() if line.strip()]
        ours = re.compile(rf"{re.escape(self.name)}-(\d+|switch)")
        return [name for name in names if ours.fullmatch(name)]

    def end(self) -> None:
        """End whatever runs on the hosts."""
        for space in self._left():
            for _ in range(100):
                pids = tool("ip", "netns", "pids", space).split()
                for pid in pids:
                    kill(int(pid))
                if not pids:
                    break
                time.sleep(0.02)

    def _clear(self) -> None:
        self.end()
        for space in self._left():
            tool("ip", "netns", "del", space)

    def run(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host.

        Args:
            host: Its number.
            argv: The command.
            env: Its whole environment; by default this process's.
            stdout: Where its output goes, as for ``Popen``.
            stderr: The same for its errors.
        """
        enter = ["ip", "netns", "exec", self._spaces[host], *argv]
        # Cgroups first: inside a namespace of ip's, /sys shows none. All is done by exec: one process.
        for group in self._quotas.groups[host]:
            join = 'echo 0 > "$0/cgroup.procs" && exec "$@"'
            enter = ["sh", "-c", join, str(group), *enter]
        full = dict(os.environ if env is None else env)
        return subprocess.Popen(
            enter, env=full, stdout=stdout, stderr=stderr, text=True, start_new_session=True
        )

    def launch(
        self,
        argv: Sequence[str],
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        *,
        seconds: float = 3600.0,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a command as one rank a host, as torchrun on hosts with one rank each would set it.

        Args:
            argv: The command.
            ranks: How many; by default one on each host.
            env: Variables beside this process's own.
            seconds: Time limit of all.

        Returns:
            One a rank, with all that it said. Once one has failed, the others are ended: -9.

        Raises:
            subprocess.TimeoutExpired: After the time limit; all have been ended.
        """
        ranks = self.hosts if ranks is None else ranks
        port = PORT + self._launched % 1000  # the port of the launch before may not be free yet
        self._launched += 1
        common = {
            **os.environ,
            **(env or {}),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        with ExitStack() as stack:
            files = [
                [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(ranks)
            ]
            started: list[subprocess.Popen[str]] = []
            try:
                for rank, (out, err) in enumerate(files):
                    started.append(
                        self.run(rank, argv, {**common, "RANK": str(rank)}, stdout=out, stderr=err)
                    )
                _wait(started, argv, seconds)
            finally:
                for process in started:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            said = [[_read(file) for file in pair] for pair in files]
        return [
            subprocess.CompletedProcess(list(argv), process.returncode, *texts)
            for process, texts in zip(started, said, strict=True)
        ]


def _wait(started: Sequence[subprocess.Popen[str]], argv: Sequence[str], seconds: float) -> None:
    """Wait until all have ended, or one has failed and the others had a moment to say what they saw."""
    end = time.monotonic() + seconds
    failed = False
    while None in (codes := [process.poll() for process in started]):
        if not failed and any(codes):
            failed, end = True, min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            if failed:
                return
            raise subprocess.TimeoutExpired(list(argv), seconds)
        time.sleep(0.05)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def tool(*words: str) -> str:
    """What a command of the system says.

    Raises:
        NotPermittedError: If it fails.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermittedError(f"this machine does not allow {' '.join(words)!r}: {done.stderr.strip()}")
    return done.stdout


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as an error would: what was set up is taken down."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def measure(hosts: int = 4, rate: float = 1000.0, share: float | None = None) -> None:
    """Measure the links and CPU shares of an emulated cluster.

    Args:
        hosts: How many.
        rate: Mbit/s of each link, each way.
        share: Cores of each host; by default equal parts of nine tenths of all.
    """
    with Cluster(hosts, rate, share, name="kagome-probe") as cluster:
        for line in probe.measured(cluster):
            print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Set a cluster up, measure it, take it down; exit code 2 where none can be made."""
    end_on_sigterm()
    try:
        tyro.cli(measure, args=argv, prog="cluster.py")
    except NotPermittedError as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
