"""A process group with nccl's order, on tensors of the host: what waits for ever there does so here.

Of a communicator, all operations follow each other on one stream. A message between two ranks ends only when
both ends have begun it and all before it (gloo's own sends wait for the receiver, too). The first message
between two ranks connects them, and blocks both hosts until then. Nothing has a tag, and sizes must fit.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, ReduceOp, Store

from kagome.comm.channel import Channel

NAME = "rendezvous"


class _Work:
    def __init__(self, what: str, limit: timedelta) -> None:
        self.what, self.limit, self.done = what, limit, threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.done.wait((timeout or self.limit).total_seconds()):
            raise RuntimeError(f"timed out: {self.what}")
        if self.error is not None:
            raise RuntimeError(f"{self.what}: {self.error}")


class RendezvousGroup(ProcessGroup):
    """The group; ``dist`` makes it by its name, also for ``new_group``."""

    def __init__(self, store: Store, rank: int, size: int, limit: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._limit = store, rank, size, limit
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        self._met: set[int] = set()
        self._numbers: Counter[tuple[int, bool] | None] = Counter()
        self._stream: queue.SimpleQueue[tuple[_Work, Callable[[], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()
        self._name = ""

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: NAME)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        pass

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def shutdown(self) -> None:
        self._stream.put(None)

    def _run(self) -> None:
        while (item := self._stream.get()) is not None:
            work, body = item
            try:
                body()
            except BaseException as error:
                work.error = error
            work.done.set()

    def _begin(self, what: str, body: Callable[[], None]) -> _Work:
        work = _Work(f"{what} of rank {self._rank} in group {self._name}", self._limit)
        self._stream.put((work, body))
        return work

    def _connect(self, peer: int) -> None:
        if peer not in self._met:
            self._met.add(peer)
            self._store.set(f"met/{self._rank}/{peer}", "")
            self._store.wait([f"met/{peer}/{self._rank}"], self._limit)

    def _number(self, key: tuple[int, bool] | None = None) -> int:
        self._numbers[key] += 1
        return self._numbers[key]

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        self._connect(peer)
        number = 2 * self._number((peer, True))
        return self._begin(
            f"send to {peer}", lambda: self._gloo.send(tensors, peer, number).wait(self._limit)
        )

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        self._connect(peer)
        number = 2 * self._number((peer, False))
        return self._begin(
            f"recv from {peer}", lambda: self._gloo.recv(tensors, peer, number).wait(self._limit)
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        tag = 2 * self._number() + 1

        def body() -> None:
            outputs[self._rank].copy_(inputs[self._rank])
            peers = [peer for peer in range(self._size) if peer != self._rank]
            works = [self._gloo.recv([outputs[p]], p, tag) for p in peers if outputs[p].numel()]
            works += [self._gloo.send([inputs[p]], p, tag) for p in peers if inputs[p].numel()]
            for each in works:
                each.wait(self._limit)

        return self._begin("alltoall", body)

    def allreduce(self, tensors: list[Tensor], op: Any = ReduceOp.SUM, timeout: Any = None) -> _Work:
        return self._begin(
            "allreduce", lambda: self._gloo.allreduce(tensors, op, self._limit).wait(self._limit)
        )

    def broadcast(self, tensor: Tensor, root: int = 0, timeout: Any = None) -> _Work:
        return self._begin(
            "broadcast", lambda: self._gloo.broadcast(tensor, root, self._limit).wait(self._limit)
        )


def under_rules(channel: Channel, function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> Any:
    """Call a function on the pool's ranks in such a group instead of gloo's; the call spoils the pool.

    Returns:
        What ``function(channel, *args)`` returned; the channel is closed and only has its numbers.
    """
    store, rank, size = dist.distributed_c10d._get_default_store(), channel.rank, channel.size
    channel.close()
    dist.destroy_process_group()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, RendezvousGroup, devices=["cpu"])
    limit = timedelta(seconds=seconds)
    mine = dist.PrefixStore(NAME, store)
    dist.init_process_group(NAME, store=mine, rank=rank, world_size=size, timeout=limit)
    try:
        return function(channel, *args)
    finally:
        dist.destroy_process_group()
