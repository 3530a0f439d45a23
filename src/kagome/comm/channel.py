"""Channel: one rank's interface to a group of ranks; all traffic between ranks goes through it.

Where it sits: ``mesh`` makes channels. ``halo``, ``train`` and ``pipelining`` exchange rows, sums and objects
through them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kagome.comm import all_reduce as summing, serialization, streamed_exchange
from kagome.comm.all_reduce import AllReduceWork
from kagome.comm.exchange import ExchangeRequest, Op, SegmentSizes, swap_counts
from kagome.comm.peers import PeerGroup
from kagome.comm.stats import KINDS, Kind
from kagome.comm.transport.device import HOST
from kagome.comm.transport.process_group import IncomingMessage, Transport
from kagome.comm.transport.routes import Route
from kagome.comm.work import ChannelWork, SendWork
from kagome.errors import CommError, KagomeError

__all__ = ["KINDS", "AllReduceWork", "Channel", "ChannelWork", "Kind", "Op", "SendWork"]


class Channel(PeerGroup):
    """One rank's interface to a group.

    With one rank every operation is the identity and needs no process group.

    On gloo an exchange is one send and one receive for each peer, not ``all_to_all_single``. This is as fast
    there, it can name the peer that is late, and messages of different sizes never match because the tag
    holds the size; a collective would abort the process instead. On nccl an exchange is one grouped
    all-to-all on the device's stream. Waits are ordered on the stream, and nccl's own watchdog, with the
    process group's timeout, enforces the time limit.
    """

    _patient: Channel | None = None
    _control: Channel | None = None

    def beside(self) -> Channel:
        """Return a channel of the same ranks, with the same counters and tags of its own.

        The order of its messages relative to this channel's may differ between ranks, provided that
        :attr:`lanes` is True. Point-to-point messages go through this channel only, not through the returned
        one.
        """
        # Without an opener: point-to-point messages, which need routes, go by the channel itself.
        beside = Channel(
            self._group,
            self.device,
            timeout=self.timeout,
            watch=self.watch,
            lane=1,
            traffic=self.traffic,
            shared_memory=self.shared_memory,
            staged=self.send_device != self.device,
        )
        beside._control = self._control
        return beside

    @property
    def control(self) -> Channel:
        """Channel for headers, counts and objects: this one, or one that :meth:`connect` made."""
        return self if self._control is None else self._control

    @property
    def patient(self) -> Channel:
        """Channel for messages that nobody waits for soon: this one, or one that :meth:`connect` made."""
        return self if self._patient is None else self._patient

    def connect(self, purpose: Literal["control", "patient"], group: dist.ProcessGroup) -> Channel:
        """Make separate connections for messages of one purpose.

        ``control`` sends headers, counts and objects, which the host writes and reads, through the host's
        memory. Through the device each of them would be copied there and back, and the host would wait for
        all that the device has been given to do. ``patient`` sends messages that nobody waits for soon. On
        one connection every later message waits until such a message is gone, so a sum of a few numbers would
        wait for megabytes of rows. On two connections both share the link.

        Args:
            purpose: What the connections are for.
            group: A process group of the same ranks in the same order; gloo for ``control``.

        Returns:
            A channel of the same ranks and counters, whose messages must have the same order on all ranks.
        """
        same = partial(Channel, group, timeout=self.timeout, watch=self.watch, traffic=self.traffic)
        if purpose == "control":
            self._control = same(device=HOST, name=self.names[0])
            self._control._times = False  # alone they would be taken for all exchanges
            return self._control
        staged = self.send_device != self.device
        self._patient = same(device=self.device, shared_memory=self.shared_memory, staged=staged)
        self._patient._control = self._control
        return self._patient

    def start(self, rows: Tensor, request: ExchangeRequest) -> ChannelWork:
        """Begin to send each peer its rows and to receive the peers' rows: see :meth:`Exchange.start`.

        Raises:
            CommError: If a peer's header or row counts differ, or a peer was late or its connection was lost.

        Shapes: rows [sum(send_counts), ...] of any type -> [sum(recv_counts), ...].

        Cost: the bytes of the rows for other ranks; with a header, 64 bytes more for each peer.
        """
        send_counts, recv_counts, index = request.send_counts, request.recv_counts, request.index
        if len(send_counts) != self.size or len(recv_counts) != self.size:
            raise ValueError(
                f"{self.size} counts each way are needed, one a rank: {send_counts}, {recv_counts}"
            )
        count = rows.size(0) if index is None else index.numel()
        if sum(send_counts) != count or send_counts[self.rank] != recv_counts[self.rank]:
            raise ValueError(f"{count} rows cannot be sent as {send_counts} and come as {recv_counts}")
        action, kind = request.action, request.kind
        if self.size == 1:
            return ChannelWork(request.selected(rows), self, action, kind)
        with self.timed(kind):
            # The header is a message of its own and is waited for. Only then is it known that the peers' rows
            # have the sizes for which the buffers below are made.
            if request.header is not None:
                streamed_exchange.compare(self, request.header, send_counts, recv_counts, action)
            rows = rows.detach()
            rows = rows if index is None else self._selected(rows, index, send_counts)
            rows = rows.to(self.send_device).contiguous()
            return self.start_parts(list(torch.split(rows, list(send_counts))), recv_counts, action, kind)

    start_bytes = streamed_exchange.start_bytes

    def _selected(self, rows: Tensor, index: Tensor, send_counts: Sequence[int]) -> Tensor:
        """Copy the selected rows into one block for sending, in shared memory if all peers read it there."""
        buffer, size = None, rows[:1].nbytes * index.numel()
        if self._transport is not None and rows.device.type == "cpu" and size:
            # Peers of this host then read the rows where they are packed, and ``SharedMemory.write`` copies
            # nothing.
            buffer = self._transport.buffer(size, send_counts)
        if buffer is None:
            return rows.index_select(0, index)
        packed = buffer.view(rows.dtype).view(index.numel(), *rows.shape[1:])
        return torch.index_select(rows, 0, index, out=packed)

    def open_routes(self, routes: Iterable[Route]) -> None:
        """Make a communicator for each route that messages between two ranks will take.

        All ranks of the mesh call it with the same routes. gloo needs none, so nothing happens there.

        Raises:
            CommError: If a peer was late, or if no mesh made this channel.

        Cost:
            With nccl, a communicator of two ranks for each route that is not open yet, and one byte.
        """
        if self._transport is None or self.size == 1 or self.lanes:
            return
        missing = sorted(set(routes) - self._opened)
        if self._opener is None:
            raise CommError(
                "a channel of a mesh, for messages between two ranks with nccl",
                "a channel that was made by itself",
                where=f"rank {self.names[self.rank]}",
                hint="the channel of open_mesh()",
            )
        self._opened.update(missing)
        self._transport.routes.update(self._opener(missing))
        # nccl connects two ranks at their first message, and blocks the hosts of both until then. Here all
        # ranks go through the routes in one order; within a pass they could wait for each other in a circle.
        for route in missing:
            action = f"open the route {route.sender} -> {route.receiver}"
            empty, back = torch.zeros(1, dtype=torch.uint8), route.backward
            if self.rank == route.sender:
                self.start_send(empty, route.receiver, action=action, kind="other", backward=back).wait()
            elif self.rank == route.receiver:
                self.start_receive(
                    (1,), empty.dtype, route.sender, action=action, kind="other", backward=back
                ).wait()

    def start_send(
        self, rows: Tensor, peer: int, *, action: str, kind: Kind = "stage", backward: bool = False
    ) -> SendWork:
        """Begin to send rows to one rank, which calls :meth:`start_receive`. This call waits for nobody.

        Messages from one rank to another in the same pass (forward or backward) arrive in the order in which
        they were sent. They never match messages in the opposite direction, in the other pass, or to all
        ranks, whatever the order of calls on either rank.

        Args:
            rows: Rows to send, which must not change before the wait ends. Nothing is sent if they are empty.
            peer: The receiving rank of this group.
            action: Name of the operation, for error messages: ``rows of stage 1, chunk 3``.
            kind: Traffic kind that its bytes are counted under.
            backward: Whether the message belongs to the backward pass.

        Returns:
            The message in progress. Keep it and wait for it, because a message that was dropped may never
            arrive.

        Raises:
            CommError: If the connection to the peer was lost.

        Shapes: any shape and type, which the peer must know.

        Cost: the tensor's bytes.
        """
        transport = self._one_to_one(peer)
        with self.timed(kind):
            rows = rows.detach().to(self.send_device).contiguous()
            pending = ChannelWork(rows.new_empty(0), self, action, kind, kept=[rows])
            self._add(kind, rows.nbytes)
            try:
                work = transport.send(peer, _as_bytes(rows), backward=backward)
            except RuntimeError as error:
                raise self._fault(error, [peer], action, collective=False) from error.with_traceback(None)
        # None: the peer can read the bytes in shared memory, or there are none. The tensor need not be kept.
        if work is None:
            pending.kept = []
        else:
            pending.works, pending.begun = [(peer, work)], time.monotonic()
        return SendWork(pending)

    def start_receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        peer: int,
        *,
        action: str,
        kind: Kind = "stage",
        backward: bool = False,
    ) -> ChannelWork:
        """Begin to receive what a peer's :meth:`start_send` of the same pass sends.

        Args:
            shape: Shape of the tensor. If its size differs from what was sent, the message never arrives.
            dtype: Type of the tensor.
            peer: The sending rank of this group.
            action: Name of the operation, for error messages.
            kind: Traffic kind that its time is counted under.
            backward: Whether the message belongs to the backward pass.

        Returns:
            The message in progress; its ``wait`` returns the tensor.

        Raises:
            CommError: If the connection to the peer was lost.
        """
        transport = self._one_to_one(peer)
        pending = ChannelWork(
            torch.empty(tuple(shape), dtype=dtype, device=self.send_device), self, action, kind
        )
        try:
            work = transport.receive(peer, _as_bytes(pending.rows), backward=backward)
        except RuntimeError as error:
            raise self._fault(error, [peer], action, collective=False) from error.with_traceback(None)
        # None: an empty message, which the peer does not send.
        if work is not None:
            pending.works.append((peer, work))
        return pending

    def _one_to_one(self, peer: int) -> Transport:
        if self._transport is None or not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"rank {self.rank} of {self.size} has no peer {peer}")
        if self.lane:
            raise ValueError("what goes to one rank goes by the channel itself, not by the one beside it")
        return self._transport

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """Return the sum, maximum or minimum over the ranks: a new tensor with the same bits on every rank.

        ``key`` names the sum for carriers that cache results; it is unused here.

        Shapes: any -> the same.

        Cost: n - 1 times the tensor's bytes for a sum of at most ``ONE_ROUND_BYTES`` over all ranks;
        otherwise 2 (n - 1) / n times, as in a ring.
        """
        result = tensor.detach().clone().contiguous()
        if self.size == 1:
            return result
        # A maximum or minimum has the same bits in any order of ranks, so gloo's own all-reduce serves for
        # it.
        if op == "sum" and self.lanes and self.size * result.nbytes <= summing.ONE_ROUND_BYTES:
            # Through shared memory this takes 0.1 ms; gloo's own all-reduce takes 2.3 ms.
            return self.start_all_reduce(result.view(-1), action=action, kind=kind).wait().view(result.shape)
        with self.timed(kind):
            return self.begin_all_reduce(result.to(self.send_device), op, action, kind).arrived()

    def begin_all_reduce(self, values: Tensor, op: Op, action: str, kind: Kind) -> ChannelWork:
        """Begin the process group's own all-reduce in place. The values must be on its transport device."""
        assert self._group is not None
        # The bytes of a ring: n - 1 steps of reduce-scatter and n - 1 of all-gather, each with 1 / n of the
        # values.
        self._add(kind, 2 * (self.size - 1) * values.nbytes // self.size)
        reduce = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        work = self._group.allreduce([values], reduce, timedelta(seconds=self.timeout))
        return ChannelWork(values, self, action, kind, [(None, work)])

    start_all_reduce = summing.start_all_reduce

    def broadcast(self, tensor: Tensor, src: int = 0, *, action: str, kind: Kind = "other") -> Tensor:
        """Return the tensor of rank ``src`` as a new tensor.

        On other ranks only type and shape of the input matter.

        Shapes: any, the same on all ranks -> the same.

        Cost: n - 1 times the tensor's bytes, counted at ``src``.
        """
        result = tensor.detach().clone().contiguous()
        if self._group is None or self.size == 1:
            return result
        result = result.to(self.send_device)
        if self.rank == src:
            self._add(kind, (self.size - 1) * result.nbytes)
        pending = ChannelWork(result, self, action, kind)
        pending.works.append(
            (None, self._group.broadcast(_as_bytes(result), src, timedelta(seconds=self.timeout)))
        )
        return pending.arrived()

    def gather_rows(
        self, rows: Tensor, *, action: str, kind: Kind = "other", dst: int | None = None
    ) -> list[Tensor] | None:
        """Gather every rank's rows, of which each rank may have a different number.

        Args:
            rows: This rank's rows. The trailing shape and the type are the same on all ranks.
            action: Name of the operation, for error messages.
            kind: Traffic kind that its bytes are counted under.
            dst: The rank of this group that receives the rows; all ranks do if None.

        Returns:
            One tensor for each rank; None on ranks other than ``dst``.

        Shapes: rows [n, ...] -> size times [n of that rank, ...].

        Cost: the rows, n - 1 times or (with ``dst``) once, and 8 bytes for each peer for the counts.
        """
        if self.size == 1:
            return [rows]
        rows = rows.detach().to(self.send_device).contiguous()
        counts = swap_counts(self, [rows.size(0)] * self.size, f"{action} (row counts)")
        # Ranks that want no rows take part all the same, with counts of 0: an exchange is a step of every
        # rank.
        gets = [dst in (None, rank) for rank in range(self.size)]
        parts = [rows if get else rows[:0] for get in gets]
        counts = counts if gets[self.rank] else [0] * self.size
        received = self.start_parts(parts, counts, action, kind).wait()
        return list(torch.split(received, counts)) if gets[self.rank] else None

    def gather_objects(self, obj: object, action: str, kinds: Sequence[type] = ()) -> list[object]:
        """Gather every rank's object on every rank. Objects are plain data, so received bytes cannot execute.

        Args:
            obj: A value that :func:`kagome.comm.serialization.pack` accepts. With one rank the object itself
                is returned; with several, a copy with its tensors on the CPU.
            action: Name of the operation, for error messages.
            kinds: The record classes that the objects may contain, the same on all ranks.

        Raises:
            CommError: If a rank sent something that is not plain data.

        Cost:
            The object's bytes to each peer.
        """
        if self.size == 1:
            return [obj]
        parts = self.control.gather_rows(serialization.to_bytes(obj, kinds), action=action)
        assert parts is not None
        found = []
        for rank, part in enumerate(parts):
            try:
                # Not torch's ``all_gather_object``: it unpickles what a peer sends.
                found.append(serialization.from_bytes(part.cpu(), kinds))
            except serialization.ObjectError as error:
                raise CommError(
                    f"plain data for rank {self.names[self.rank]} from rank {self.names[rank]} in {action!r}",
                    f"bytes that cannot be read: {error}",
                    hint="the same version of Kagome on all ranks",
                ) from None
        return found

    def barrier(self, action: str) -> None:
        """Return when all ranks have reached this call."""
        control, zero = self.control, torch.zeros((), dtype=torch.int64)
        # item() makes the host wait for the device; all_reduce alone is only ordered on the stream.
        control.all_reduce(zero.to(control.device), action=action, kind="other").item()

    def start_parts(
        self,
        parts: list[Tensor],
        recv_counts: Sequence[int],
        action: str,
        kind: Kind,
        fill: Callable[[int, int], None] | None = None,
        segments: tuple[SegmentSizes, SegmentSizes] | None = None,
    ) -> ChannelWork:
        """Begin to send one part to each peer.

        Parts are contiguous, on the sending device, and have one trailing shape.

        ``fill``, if given, writes each part just before it is sent. ``segments``, if given, holds the byte
        counts of the segments that go to each peer and come from it; each segment is a message of its own.
        """
        # Rows of this host's ranks stay in their memory until they are waited for, late ones for an epoch.
        # Only then is a buffer made, and none where they are borrowed.
        place = torch.device("meta") if self._all_near(recv_counts) else parts[0].device
        received = parts[0].new_empty((sum(recv_counts), *parts[0].shape[1:]), device=place)
        # received   [ from rank 0 | from rank 1 | ... ]   ``slots`` are views that messages arrive in
        # parts      [ to rank 0 ], [ to rank 1 ], ...     the one for this rank is copied, not sent
        slots = torch.split(received, list(recv_counts))
        if fill is not None:
            # This rank's own part is not streamed, so one call writes all its segments.
            fill(self.rank, 0)
        if recv_counts[self.rank]:
            slots[self.rank].copy_(parts[self.rank])
        pending = ChannelWork(received, self, action, kind, kept=parts)
        sent_bytes = [part.nbytes for peer, part in enumerate(parts) if peer != self.rank]
        self._add(kind, sum(sent_bytes), sum(map(bool, sent_bytes)))
        out, into = segments or ([(part.nbytes,) for part in parts], [(slot.nbytes,) for slot in slots])
        sent, come = _cut(parts, out), _cut(slots, into)
        assert self._transport is not None
        try:
            # The transport yields a function in place of a message begun, so that an error names the right
            # peer.
            for peer, begin in self._transport.post(sent, come, fill):
                work = begin()
                if work is not None:
                    pending.works.append((peer, work))
        except KagomeError:
            pending.works.clear()  # ``fill`` could not write a part
            raise
        except RuntimeError as error:
            pending.works.clear()
            fault = self._fault(error, [] if peer is None else [peer], action, collective=peer is None)
            raise fault from error.with_traceback(None)
        pending.begun = time.monotonic()  # no computation overlaps with posting, so it does not count
        if all(isinstance(work, IncomingMessage) for _, work in pending.works):
            pending.kept = []  # all that is sent lies in shared memory
        return pending

    def _all_near(self, recv_counts: Sequence[int]) -> bool:
        """Return whether all rows to receive come from ranks whose memory this rank reads."""
        transport = self._transport
        return (
            transport is not None
            and any(recv_counts)
            and all(transport.shares_memory_with(peer) for peer, count in enumerate(recv_counts) if count)
        )


def _cut(tensors: Sequence[Tensor], segments: SegmentSizes) -> list[Sequence[Tensor]]:
    return [_as_bytes(each).split(list(sizes)) for each, sizes in zip(tensors, segments, strict=True)]


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor's memory as bytes, since gloo and nccl do not support all types."""
    return tensor.view(-1).view(torch.uint8)
