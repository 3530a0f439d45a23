"""Process groups of backend "nccl" that carry bytes by gloo and keep NCCL's rules.

Where it sits: ``start`` makes torch's own path for "nccl" create :class:`FakeNCCL`, so that ``device_id``,
splits of a group and torch's names for groups work as they do there.

What it holds to. Where NCCL would hang, or write where it must not, it raises:

* tensors lie on the rank's device and are contiguous, of a type that NCCL knows;
* no two ranks of a group have one device;
* all ranks begin the same collectives in the same order, and the sizes of what is sent and expected fit;
* the operations of a communicator run one after the other, on one stream. A send ends only when its receiver
  has come to the receive: a rendezvous, as for messages beyond NCCL's buffers;
* messages between two ranks share the communicator's stream if the group was made with a device; else two
  ranks have a stream of their own. Messages of one batch have no order among themselves;
* a group that is made beside one with a device is split from it, by all ranks of that one.

``wait`` waits for the operation. NCCL's lets the host go on and makes the current stream wait, so what a rank
begins next starts at the same point on either. Where a peer has died, that makes a difference. With
``FakeNCCL.aborts`` it is as there: the host goes on until it next waits for the device, and is held there.
Events behind the operation do not occur. At the time limit NCCL's watchdog ends the process by SIGABRT, and
names no rank.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, ReduceOp, Store

from fake_gpu.cuda import Library

UNKNOWN = frozenset((torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex128))
TEXT = 160
"""Bytes of a collective's name that ranks compare."""
TAGS = 2**20
MOMENT = 2.0
"""With ``aborts``, seconds after which an operation is taken for one that never ends."""


class FakeNCCLError(RuntimeError):
    """What NCCL would refuse, or hang at."""


class Work:
    """An operation that was begun."""

    def __init__(self, what: str, group: FakeNCCL) -> None:
        self.what, self.group = what, group
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation has ended.

        Raises:
            FakeNCCLError: If it failed, or has not ended within the group's time limit.
        """
        if timeout is not None:
            self.group.library.wait("synchronize", "nccl wait with a limit")  # NCCL blocks the host then
        if self.group.aborts:
            if not self.group.library.stuck and not self.done.wait(MOMENT):
                self._stick()
            return True
        if not self.done.wait(self.group.limit.total_seconds()):
            raise FakeNCCLError(
                f"{self.what} on rank {self.group.rank()} has not ended within {self.group.limit}: "
                f"NCCL would hang until its watchdog aborts; streams: {self.group.state()}"
            )
        if self.error is not None:
            raise FakeNCCLError(f"{self.what}: {type(self.error).__name__}: {self.error}") from self.error
        return True

    def _stick(self) -> None:
        """Go on as NCCL's host does, with a stream that waits."""
        self.group.library.stick(self.done.wait)

        def abort() -> None:
            if not self.done.wait(self.group.limit.total_seconds() - MOMENT):
                limit = self.group.limit.total_seconds()
                text = f"Watchdog caught collective operation timeout: {self.what} ran for {limit:g} s"
                print(text, file=sys.stderr, flush=True)
                os.abort()

        threading.Thread(target=abort, daemon=True).start()

    def is_completed(self) -> bool:
        """Whether the operation has ended."""
        return self.done.is_set()


class _Stream:
    """Runs operations one after the other."""

    def __init__(self, name: str) -> None:
        self._todo: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self.running = ""
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def add(self, work: Work, body: Callable[[], None]) -> None:
        self._todo.put((work, body))

    def end(self) -> None:
        self._todo.put(None)

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            work, body = item
            self.running = work.what
            try:
                with torch.no_grad():
                    body()
            except BaseException as error:
                work.error = error
                if work.group.aborts:
                    return  # gloo sees that a peer is gone; on the device its kernel waits on
            self.running = ""
            work.done.set()
            del item, work, body  # what an operation keeps alive is free once it has ended


class _Send:
    """A message to one rank."""

    def __init__(self, group: FakeNCCL, tensor: Tensor, peer: int) -> None:
        self.group, self.tensor, self.peer = group, tensor, peer
        self.number = group.number(peer, sent=True)
        self.ready = torch.zeros(1, dtype=torch.int64)

    def __str__(self) -> str:
        return f"send {self.number} of {self.tensor.nbytes} bytes to rank {self.peer}"

    def post(self) -> None:
        self._asked = self.group.gloo.recv([self.ready], self.peer, 2 * self.number)

    def finish(self) -> None:
        self._asked.wait(self.group.gloo_limit)
        if int(self.ready) != self.tensor.nbytes:
            raise FakeNCCLError(f"rank {self.peer} expects {int(self.ready)} bytes of {self}")
        if self.tensor.nbytes:
            sent = self.group.gloo.send([on_host(self.tensor)], self.peer, 2 * self.number + 1)
            sent.wait(self.group.gloo_limit)


class _Receive:
    """A message from one rank."""

    def __init__(self, group: FakeNCCL, tensor: Tensor, peer: int) -> None:
        self.group, self.tensor, self.peer = group, tensor, peer
        self.number = group.number(peer, sent=False)

    def __str__(self) -> str:
        return f"receive {self.number} of {self.tensor.nbytes} bytes from rank {self.peer}"

    def post(self) -> None:
        gloo, size = self.group.gloo, torch.tensor([self.tensor.nbytes])
        self._works = [gloo.send([size], self.peer, 2 * self.number)]
        self._kept = [size]
        if self.tensor.nbytes:
            self._kept.append(on_host(self.tensor))
            self._works.append(gloo.recv([self._kept[-1]], self.peer, 2 * self.number + 1))

    def finish(self) -> None:
        for work in self._works:
            work.wait(self.group.gloo_limit)


class FakeNCCL(ProcessGroup):
    """A process group in place of torch's ``ProcessGroupNCCL``."""

    Options = SimpleNamespace
    library: Library
    aborts = False
    """Whether a peer's death ends the process as with NCCL; see above."""
    supports_splitting = True
    supports_coalescing = True

    def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self.limit = rank, size, options._timeout
        self.gloo_limit = 2 * self.limit  # ``Work.wait`` ends first, and tells a hang from a failure
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._name, self._desc = "", ""
        self._streams: dict[str, _Stream] = {}
        self._count = 0
        self._numbers: dict[tuple[int, bool], int] = {}
        self._batch: list[_Send | _Receive] | None = None
        self._refuse_one_device(store)
        parent = getattr(options, "split_from", None)
        if parent is not None:
            parent.perform_nocolor_split(self.device)
        self.gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, self.gloo_limit)

    def _refuse_one_device(self, store: Store) -> None:
        mine = f"{os.uname().nodename} {self.device}"
        store.set(f"device/{self._rank}", mine)
        for other in range(self._size):
            if other != self._rank and store.get(f"device/{other}").decode() == mine:
                raise FakeNCCLError(f"Duplicate GPU detected: ranks {self._rank} and {other} both on {mine}")

    # ---- what c10d asks of a group

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "nccl"

    def _get_backend(self, device: torch.device) -> FakeNCCL:
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in a split of this group, which all of its ranks make."""
        self._collective("split", [], lambda: None).wait()

    def shutdown(self) -> None:
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()

    abort = shutdown

    def state(self) -> dict[str, str]:
        """What each stream is at."""
        return {name: stream.running or "idle" for name, stream in self._streams.items()}

    # ---- streams

    def _begin(self, what: str, body: Callable[[], None], stream: str = "communicator") -> Work:
        work = Work(f"{what} (group {self._name}, {self._size} ranks)", self)
        if stream not in self._streams:
            self._streams[stream] = _Stream(f"fake nccl {self._name} {stream}")
        self._streams[stream].add(work, body)
        return work

    def _check(self, what: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_cuda:
                raise FakeNCCLError(f"No backend type associated with device type cpu ({what})")
            if tensor.device != self.device:
                raise FakeNCCLError(f"{what}: a tensor on {tensor.device} in a group on {self.device}")
            if not tensor.is_contiguous():
                raise FakeNCCLError(f"Tensors must be contiguous ({what})")
            if tensor.dtype in UNKNOWN:
                raise FakeNCCLError(f"Unconvertible NCCL type {tensor.dtype} ({what})")

    def _collective(
        self, what: str, tensors: Sequence[Tensor], body: Callable[[], None], sizes: Sequence[int] = ()
    ) -> Work:
        """Begin an operation of all ranks, which compare its name, and what each sends to whom."""
        self._check(what, tensors)
        self._count += 1
        name = f"{what}, collective {self._count}"
        expected = [tensor.nbytes for tensor in tensors[: len(sizes)]]

        def run() -> None:
            for rank, (theirs, to) in enumerate(self._compared(name, sizes)):
                if theirs != name[:TEXT]:
                    raise FakeNCCLError(f"rank {self._rank} does {name!r}, rank {rank} {theirs!r}")
                if sizes and to[self._rank] != expected[rank]:
                    raise FakeNCCLError(
                        f"rank {rank} sends {to[self._rank]} bytes, rank {self._rank} expects "
                        f"{expected[rank]}"
                    )
            body()

        return self._begin(name, run)

    def _compared(self, name: str, sizes: Sequence[int]) -> list[tuple[str, list[int]]]:
        text = name.encode()[:TEXT].ljust(TEXT)
        mine = torch.cat([torch.tensor(list(text)), torch.tensor(list(sizes), dtype=torch.int64)])
        found = [torch.empty_like(mine) for _ in range(self._size)]
        self.gloo.allgather([found], [mine]).wait(self.gloo_limit)
        return [(bytes(each[:TEXT].tolist()).decode().rstrip(), each[TEXT:].tolist()) for each in found]

    # ---- collectives

    def allreduce(self, tensors: Any, op: Any = ReduceOp.SUM, timeout: timedelta | None = None) -> Work:
        """Sum, or another reduction, in place."""
        (tensor,) = [tensors] if isinstance(tensors, Tensor) else tensors
        reduce = getattr(op, "reduceOp", op)

        def body() -> None:
            self.gloo.allreduce([on_host(tensor)], reduce, self.gloo_limit).wait(self.gloo_limit)

        what = f"all-reduce of {list(tensor.shape)} {tensor.dtype}"
        return self._collective(what, [tensor], body if tensor.numel() else lambda: None)

    def broadcast(self, tensors: Any, root: Any = 0, timeout: timedelta | None = None) -> Work:
        """The root's values on all ranks."""
        (tensor,) = [tensors] if isinstance(tensors, Tensor) else tensors
        source = int(getattr(root, "rootRank", root))

        def body() -> None:
            self.gloo.broadcast(on_host(tensor), source, self.gloo_limit).wait(self.gloo_limit)

        what = f"broadcast of {list(tensor.shape)} {tensor.dtype} from {source}"
        return self._collective(what, [tensor], body if tensor.numel() else lambda: None)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Work:
        """A tensor to each rank, and one from each."""
        if len(outputs) != self._size or len(inputs) != self._size:
            raise FakeNCCLError(
                f"all-to-all of {len(inputs)} and {len(outputs)} tensors on {self._size} ranks"
            )
        number = self._count + 1

        def body() -> None:
            tag, works, kept = 2 * TAGS + number % TAGS, [], []
            for peer in range(self._size):
                if outputs[peer].numel():
                    kept.append(on_host(outputs[peer]))
                    if peer == self._rank:
                        kept[-1].copy_(on_host(inputs[peer]))
                    else:
                        works.append(self.gloo.recv([kept[-1]], peer, tag))
            for peer in range(self._size):
                if inputs[peer].numel() and peer != self._rank:
                    kept.append(on_host(inputs[peer]))
                    works.append(self.gloo.send([kept[-1]], peer, tag))
            for work in works:
                work.wait(self.gloo_limit)

        sizes = [tensor.nbytes for tensor in inputs]
        return self._collective("all-to-all", [*outputs, *inputs], body, sizes)

    # ---- between two ranks

    def number(self, peer: int, *, sent: bool) -> int:
        """Count a message to a rank, or from it: NCCL matches them by their order alone."""
        self._numbers[peer, sent] = self._numbers.get((peer, sent), 0) + 1
        return self._numbers[peer, sent] % (TAGS // 2)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work | None:
        """Send to one rank."""
        return self._point(_Send, tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work | None:
        """Receive from one rank."""
        return self._point(_Receive, tensors, peer, tag)

    def _point(
        self, kind: Callable[..., _Send | _Receive], tensors: list[Tensor], peer: int, tag: int
    ) -> Work | None:
        (tensor,) = tensors
        self._check("a message to or from one rank", tensors)
        if tag:
            raise FakeNCCLError(f"NCCL has no tags, and got {tag}")
        message = kind(self, tensor, peer)
        if self._batch is not None:
            self._batch.append(message)
            return None
        stream = "communicator" if self.bound_device_id is not None else f"pair with rank {peer}"
        return self._begin(str(message), lambda: _carry([message]), stream)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        batch, self._batch = self._batch or [], None
        return self._begin(f"batch of {', '.join(map(str, batch))}", lambda: _carry(batch))


def _carry(messages: Sequence[_Send | _Receive]) -> None:
    for message in messages:
        message.post()
    for message in messages:
        message.finish()


def on_host(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor of the device, as gloo takes it. The caller keeps the tensor."""
    bytes_ = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(bytes_, dtype=tensor.dtype).view(tensor.shape)


def start(library: Library) -> None:
    """Let this process's groups of backend "nccl" be :class:`FakeNCCL`."""
    c10d: Any = dist.distributed_c10d
    FakeNCCL.library = library
    c10d._NCCL_AVAILABLE, c10d.ProcessGroupNCCL = True, FakeNCCL
    make = c10d._new_process_group_helper

    def bound(*args: Any, device_id: torch.device | None = None, **more: Any) -> Any:
        group, store = make(*args, device_id=device_id, **more)
        # torch binds the device to the group that it would have put ours into.
        if isinstance(group, FakeNCCL) and device_id is not None:
            group.bound_device_id = device_id
        return group, store

    c10d._new_process_group_helper = bound
    plain = dist.batch_isend_irecv

    def batched(steps: list[dist.P2POp]) -> list[Any]:
        group = steps[0].group or dist.group.WORLD
        if not isinstance(group, FakeNCCL):
            return plain(steps)
        # torch takes groups of its own class only for such that can batch.
        group._start_coalescing(group.device)
        for step in steps:
            begin = group.send if step.op is dist.isend else group.recv
            begin([step.tensor], step.group_peer, step.tag)
        return [group._end_coalescing(group.device)]

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batched
