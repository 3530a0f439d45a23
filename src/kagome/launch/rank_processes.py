"""Rank processes: starts one process for each local rank, waits for them, and ends them together.

Where it sits: below ``launcher``, which decides what a failure means. Only the standard library is used:
torch takes two seconds of a core to import, and the process that starts ranks computes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Literal

CLOSE_SECONDS = 30.0
"""Seconds that other ranks have to end once one has failed."""


@dataclass(frozen=True)
class Ended:
    """How a set of ranks ended.

    Args:
        failed: The first rank that was seen to fail; None if all ranks ended with code 0.
        result: What the function returned on rank 0; None if a rank failed.
    """

    failed: int | None = None
    result: object = None


class RankProcesses:
    """The processes of local ranks.

    Args:
        method: How processes are started; with ``forkserver`` they are forked from a process that has already
            imported what they need.
    """

    def __init__(self, method: Literal["forkserver", "spawn"]) -> None:
        # Two calls, because each kind of context has a type of its own.
        forks = method == "forkserver"
        self._context = (
            multiprocessing.get_context("forkserver") if forks else multiprocessing.get_context("spawn")
        )
        self._processes: list[BaseProcess] = []
        self._result: object = None

    def start(
        self,
        function: Callable[..., object],
        args: Sequence[object],
        environments: Sequence[Mapping[str, str]],
    ) -> None:
        """Start one process for each environment.

        Args:
            function: Runs on every rank; must be importable by its module's name.
            args: Its arguments, which must be picklable.
            environments: The variables of each rank, on top of this process's environment.
        """
        # A pipe needs no semaphore, so ranks start where /dev/shm is full or missing.
        self._results, sender = self._context.Pipe(duplex=False)
        try:
            for rank, environment in enumerate(environments):
                # The launcher returns what rank 0 returns; what others return is dropped where it is.
                target = (environment, function, tuple(args), sender if rank == 0 else None)
                process = self._context.Process(target=_run, args=target)
                process.start()
                self._processes.append(process)
        finally:
            sender.close()  # rank 0 has the other copy, so that the pipe ends with it

    def wait(self, seconds: float) -> Ended | None:
        """Wait until a rank ends, at most for some seconds.

        If a rank has failed, the others are ended before this returns: see :meth:`close`.

        Returns:
            How the ranks ended; None if some still run.
        """
        running = [process.sentinel for process in self._processes if process.exitcode is None]
        # A result may be larger than what a pipe holds, so it is read while rank 0 still runs.
        wait([*running, *([] if self._results.closed else [self._results])], seconds)
        self._receive()
        codes = self.codes()
        # Any code but 0, also that of a signal, which is negative.
        failed = next((rank for rank, code in codes.items() if code), None)
        if failed is not None:
            self.close(signal.SIGTERM, CLOSE_SECONDS)
            return Ended(failed)
        if any(code is None for code in codes.values()):
            return None
        # Rank 0 may have sent its result between the first look and its end.
        self._receive()
        return Ended(result=self._result)

    def codes(self) -> dict[int, int | None]:
        """Return the exit code of each rank; None for one that still runs. For one thread at a time."""
        return {rank: process.exitcode for rank, process in enumerate(self._processes)}

    def close(self, number: int, seconds: float) -> None:
        """End the ranks that still run: by a signal, and if they do not end in time by SIGKILL.

        Args:
            number: The signal.
            seconds: How long the ranks may take after it.
        """
        # One deadline for all: ranks save at the same time.
        until = time.monotonic() + seconds
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
                # A process that waits for a broken disk or GPU cannot even be killed.
                process.join(seconds)

    def _receive(self) -> None:
        if self._results.closed or not self._results.poll():
            return
        # The pipe ends without a result if rank 0 has failed.
        with self._results, suppress(EOFError):
            self._result = pickle.loads(self._results.recv_bytes())


def _run(
    environment: Mapping[str, str],
    function: Callable[..., object],
    args: tuple[object, ...],
    results: Connection | None,
) -> None:
    """Run the function in a rank's process, and send back what it returns."""
    # A forked rank has the environment of the process that it was forked of.
    os.environ.update(environment)
    result = function(*args)
    if results is not None:
        # As bytes: the pipe's own pickler would pass tensors by shared memory, of which this process hands
        # out the descriptor as long as it lives. This waits until the launcher reads what no pipe can hold.
        results.send_bytes(pickle.dumps(result))
        results.close()
