"""A pool of worker processes that lives across tests: a test on several ranks costs milliseconds.

Where it sits: ``conftest`` makes one a session and hands its ``run`` to tests as the fixture ``ranks``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

import fused  # noqa: F401 - before any test makes a layer, here and in the workers
import warm
from kagome.comm.channel import Channel
from kagome.comm.groups import open_shared_memory
from kagome.errors import CommError

LARGEST = 4
CHANNEL_SECONDS = 60.0


class PoolError(AssertionError):
    """A worker died or did not answer; the pool is rebuilt for the next test."""


class Pool:
    """Four workers; a call uses the first ``world`` of them, joined in one gloo process group.

    The default process group is made anew when the world's size changes or the last call may have left
    something on the wire; otherwise it stays. Workers are started at the first call.
    """

    def __init__(self, work: Callable[[int, int, Connection], None] | None = None) -> None:
        self._work = work or _work
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._generation, self._world = 0, 0

    def run(
        self,
        world: int,
        function: Callable[..., object],
        *args: object,
        timeout: float = 150.0,
        spoils: bool = False,
    ) -> list[object]:
        """Call ``function(channel, *args)`` on ``world`` workers.

        Args:
            world: Workers to use, 1 to 4.
            function: A function at the top of a module.
            args: The same for all workers; they and the results must pickle.
            timeout: Seconds until all workers must have answered.
            spoils: Whether the function leaves the process group unusable (it catches a CommError, say).

        Returns:
            What each rank returned.

        Raises:
            Exception: What a worker raised, with its traceback as a note; one that is no CommError first.
            PoolError: If a worker died or did not answer.
        """
        if not self._workers:
            self._start()
        if world != self._world:
            self._renew(world)
        # sys.path goes along: pytest adds the folders of test files as it finds them.
        call = pickle.dumps((world, self._generation, pickle.dumps((function, args))))
        for _, connection in self._workers[:world]:
            connection.send_bytes(pickle.dumps((sys.path, call)))
        answers = self._answers(world, f"{function.__module__}.{function.__qualname__}", timeout)
        failures = [(rank, *answer[1:]) for rank, answer in enumerate(answers) if not answer[0]]
        if spoils or failures:
            self._renew(0)
        if failures:
            raise _chosen(failures)
        return [answer[1] for answer in answers]

    def close(self) -> None:
        """End the workers in order, so that they save their coverage."""
        for _, connection in self._workers:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps((None, b"")))
        for worker, _ in self._workers:
            worker.join(timeout=20)
        self._kill()

    def _renew(self, world: int) -> None:
        self._generation, self._world = self._generation + 1, world

    def _start(self) -> None:
        # The store is the parent's: it outlives any worker.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = warm.context()  # some tests kill workers
        before = dict(os.environ)
        os.environ.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            for rank in range(LARGEST):
                ours, theirs = context.Pipe()
                worker = context.Process(
                    target=self._work, args=(rank, self._store.port, theirs), daemon=True
                )
                worker.start()
                theirs.close()
                self._workers.append((worker, ours))
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._renew(0)

    def _answers(self, world: int, name: str, timeout: float) -> list[tuple]:
        open_ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world])}
        answers: dict[int, tuple] = {}
        deadline = time.monotonic() + timeout
        while open_ranks:
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(open_ranks.values())
                self._fail(f"{name} on {world} ranks: no answer from ranks {silent} in {timeout:g} s")
            for connection in ready:
                rank = open_ranks.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    worker = self._workers[rank][0]
                    worker.join(timeout=5)
                    self._fail(f"{name} on {world} ranks: rank {rank} died with exit code {worker.exitcode}")
        return [answers[rank] for rank in range(world)]

    def _fail(self, text: str) -> None:
        for worker, _ in self._workers:
            if worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, signal.SIGUSR1)  # says on stderr where it stands
        time.sleep(0.5)
        self._kill()
        raise PoolError(text)

    def _kill(self) -> None:
        for worker, connection in self._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
            connection.close()
        self._workers = []


def _chosen(failures: list[tuple]) -> BaseException:
    """One error for the test: a CommError is often only the echo of another rank's fault."""
    failures.sort(key=lambda failure: (isinstance(failure[1], CommError), failure[0]))
    error = failures[0][1]
    for rank, _, text in failures:
        error.add_note(f"--- rank {rank} ---\n{text}")
    return error


def calm() -> None:
    """Set up a worker: one thread, a word on where it stands when it is asked, and no end by Ctrl-C."""
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def calls(connection: Connection) -> Iterator[tuple[int, int, Callable[..., object]]]:
    """Yield what a worker is called for: number of ranks, generation, and the function with its arguments."""
    while True:
        try:
            path, call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return  # the parent is gone
        if path is None:
            return
        sys.path[:] = path
        world, generation, task = pickle.loads(call)
        yield world, generation, partial(_called, task)


def _called(task: bytes, *first: object) -> object:
    # Unpickled late: what the function's module raises when it is imported is an answer too.
    function, args = pickle.loads(task)
    return function(*first, *args)


def answered(call: Callable[[], object], leave: Callable[[], None]) -> bytes:
    """The answer to a call: what it returns or raises; ``leave`` runs in either case."""
    try:
        answer = pickle.dumps((True, call()))
    except BaseException as error:
        answer = _failure(error)
    leave()
    return answer


def _work(rank: int, port: int, connection: Connection) -> None:
    calm()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    joined, shared_memory = 0, None
    for world, generation, call in calls(connection):
        channel = None
        try:
            new = generation != joined
            if new:
                joined = generation
                if shared_memory is not None:
                    shared_memory.close()
                    shared_memory = None
                _join(dist.PrefixStore(f"pool-{generation}", store), rank, world)
            torch.manual_seed(0)
            random.seed()  # PyG names a Sequential's class by it: the same name again is the same class
            channel = Channel(dist.group.WORLD if world > 1 else None, "cpu", timeout=CHANNEL_SECONDS)
            if new:
                shared_memory = open_shared_memory(channel)
                channel.take_traffic()
            channel.attach_shared_memory(shared_memory)
            answer = pickle.dumps((True, call(channel)))
        except BaseException as error:
            if channel is not None:
                channel.close()
            if shared_memory is not None:
                shared_memory.close()
                shared_memory = None
            _leave()  # closes the connections: the peers' waits end at once
            answer = _failure(error)
        connection.send_bytes(answer)
    _leave()


def _join(store: dist.Store, rank: int, world: int) -> None:
    _leave()
    if world > 1:
        limit = timedelta(seconds=120)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor keeps the meshes of operators it has met, and takes an equal mesh for the same one: the next
        # generation's gradients would be gathered by groups that are gone.
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        packed = pickle.dumps((False, error, text))
        pickle.loads(packed)
    except Exception:
        packed = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), text))
    return packed
