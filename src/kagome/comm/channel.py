"""Channel: one rank's end of a group of ranks; every byte that crosses between ranks crosses here.

Where it sits: made by ``mesh``; ``neighbors`` and ``run`` exchange rows, sums and objects through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kagome.comm import all_reduce as summing, serialization, streamed_exchange
from kagome.comm.all_reduce import AllReduceWork
from kagome.comm.exchange import Trip
from kagome.comm.peers import PeerGroup
from kagome.comm.stats import KINDS, Kind
from kagome.comm.transport.process_group import Transport
from kagome.comm.work import SendWork, Sheets, Work
from kagome.errors import CommError, KagomeError

__all__ = ["KINDS", "AllReduceWork", "Channel", "Kind", "Op", "SendWork", "Work"]

Op = Literal["sum", "max", "min"]


class Channel(PeerGroup):
    """One rank's end of a group; with one rank everything is the identity and needs no process group.

    On gloo an exchange is one send and one receive a peer, not ``all_to_all_single``: as fast there, it names
    the peer that is late, and sizes that differ never meet (the tag holds them), where a collective would
    kill the process. On nccl it is one grouped all-to-all on the device's stream: waits are ordered on the
    stream, and nccl's own watchdog (the process group's timeout) holds the limit.
    """

    _patient: Channel | None = None

    def beside(self) -> Channel:
        """A channel of the same ranks and counters, on a lane of its own.

        What it sends may come in another order among this one's messages on one rank than on another, where
        :attr:`lanes` says so. Messages from one rank to one go by this channel, not by that.
        """
        return Channel(
            self._group,
            self.device,
            timeout=self.timeout,
            watch=self.watch,
            lane=1,
            traffic=self.traffic,
            shelf=self.shelf,
        )

    @property
    def patient(self) -> Channel:
        """The channel for what nobody waits for soon: this one, unless :meth:`set_apart` made another."""
        return self if self._patient is None else self._patient

    def set_apart(self, group: dist.ProcessGroup) -> Channel:
        """Give what nobody waits for soon connections of its own.

        On this channel's own all that comes after would wait until it is gone: a sum of a few numbers for
        megabytes. On others both share the link.

        Args:
            group: Of the same ranks in the same order.

        Returns:
            The channel: of the same ranks and counters, and in the same order of messages.
        """
        self._patient = Channel(
            group,
            self.device,
            timeout=self.timeout,
            watch=self.watch,
            traffic=self.traffic,
            shelf=self.shelf,
        )
        return self._patient

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Send each peer its rows and receive theirs; :meth:`start_exchange` and its wait."""
        return self.start_exchange(
            rows, send_counts, recv_counts, action=action, kind=kind, header=header
        ).wait()

    def start_exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        action: str,
        kind: Kind = "halo",
        header: tuple[int, ...] | None = None,
        pick: Tensor | None = None,
        trip: Trip | None = None,
    ) -> Work:
        """Begin to send each peer its rows and to receive theirs. Not differentiable.

        Args:
            rows: Rows for rank 0, then for rank 1, and so on; not to be changed before the wait ends.
            send_counts: Rows for each rank, this one too.
            recv_counts: Rows from each rank.
            action: What this is, for errors: ``halo forward of conv1.x, epoch 3``.
            kind: What its bytes count as.
            header: Up to five numbers (direction, epoch, site, width, gradient) that must be the same on both
                sides; they and the row counts are compared before any row is sent. All ranks or none give it.
            pick: Send these of the rows, in this order; all if None.
            trip: What it is, for carriers that code rows or bring them late; nothing is done with it here.

        Returns:
            The exchange under way.

        Raises:
            CommError: If a peer's header or row counts differ, or a peer was late or lost.

        Shapes: rows [sum(send_counts), ...] of any type -> [sum(recv_counts), ...].

        Cost: the rows for other ranks; with a header, 64 bytes a peer more.
        """
        if len(send_counts) != self.size or len(recv_counts) != self.size:
            raise ValueError(
                f"{self.size} counts each way are needed, one a rank: {send_counts}, {recv_counts}"
            )
        count = rows.size(0) if pick is None else pick.numel()
        if sum(send_counts) != count or send_counts[self.rank] != recv_counts[self.rank]:
            raise ValueError(f"{count} rows cannot be sent as {send_counts} and come as {recv_counts}")
        if self.size == 1:
            return Work(rows if pick is None else rows.index_select(0, pick), self, action, kind)
        with self.timed(kind):
            if header is not None:
                streamed_exchange.compare(self, header, send_counts, recv_counts, action)
            rows = rows.detach()
            rows = rows if pick is None else self._picked(rows, pick, send_counts)
            rows = rows.to(self.wire).contiguous()
            return self.start_parts(list(torch.split(rows, list(send_counts))), recv_counts, action, kind)

    start_bytes = streamed_exchange.start_bytes

    def _picked(self, rows: Tensor, pick: Tensor, send_counts: Sequence[int]) -> Tensor:
        """Rows packed for sending: into memory that peers read, where there is some."""
        room, size = None, rows[:1].nbytes * pick.numel()
        if self._wire is not None and rows.device.type == "cpu" and size:
            room = self._wire.room(size, send_counts)
        if room is None:
            return rows.index_select(0, pick)
        packed = room.view(rows.dtype).view(pick.numel(), *rows.shape[1:])
        return torch.index_select(rows, 0, pick, out=packed)

    def start_send(
        self, rows: Tensor, peer: int, *, action: str, kind: Kind = "stage", backward: bool = False
    ) -> SendWork:
        """Begin to send rows to one rank, which calls :meth:`start_receive`; nobody is waited for here.

        What goes from one rank to one in one pass arrives in the order in which it was sent. It never meets
        what goes the other way, in the other pass, or to all ranks, whatever comes first on either rank.

        Args:
            rows: What to send; not to be changed before the wait ends. Nothing is sent if it is empty.
            peer: The rank of this group that gets it.
            action: What this is, for errors: ``rows of stage 1, chunk 3``.
            kind: What its bytes count as.
            backward: Whether it belongs to the backward pass.

        Returns:
            The message under way, to be kept and waited for: what is dropped before may never arrive.

        Raises:
            CommError: If the peer was lost.

        Shapes: any of any type, which the peer must know.

        Cost: the tensor's bytes.
        """
        wire = self._one_to_one(peer)
        with self.timed(kind):
            rows = rows.detach().to(self.wire).contiguous()
            pending = Work(rows.new_empty(0), self, action, kind, kept=[rows])
            self._add(kind, rows.nbytes)
            try:
                work = wire.send(peer, _as_bytes(rows), backward=backward)
            except RuntimeError as error:
                raise self._fault(error, [peer], action, collective=False) from error.with_traceback(None)
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
    ) -> Work:
        """Begin to receive what a rank's :meth:`start_send` of the same pass sends.

        Args:
            shape: Of what comes. One of another size than was sent never arrives.
            dtype: Its type.
            peer: The rank of this group that sends it.
            action: What this is, for errors.
            kind: What its time counts as.
            backward: Whether it belongs to the backward pass.

        Returns:
            The message under way; its ``wait`` gives the tensor.

        Raises:
            CommError: If the peer was lost.
        """
        wire = self._one_to_one(peer)
        pending = Work(torch.empty(tuple(shape), dtype=dtype, device=self.wire), self, action, kind)
        try:
            work = wire.receive(peer, _as_bytes(pending.rows), backward=backward)
        except RuntimeError as error:
            raise self._fault(error, [peer], action, collective=False) from error.with_traceback(None)
        if work is not None:
            pending.works.append((peer, work))
        return pending

    def _one_to_one(self, peer: int) -> Transport:
        if self._wire is None or not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"rank {self.rank} of {self.size} has no peer {peer}")
        if self.lane:
            raise ValueError("what goes to one rank goes by the channel itself, not by the one beside it")
        return self._wire

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        action: str,
        kind: Kind = "statistics",
        key: Hashable = None,
    ) -> Tensor:
        """Sum, maximum or minimum over the ranks: a new tensor, the same bits on every rank.

        ``key`` names the sum for carriers that keep what came; nothing is kept here.

        Shapes: any -> the same.

        Cost: n - 1 times the tensor's bytes for a sum of up to ``ONE_ROUND_BYTES`` of all ranks; else
        2 (n - 1) / n of them (a ring's).
        """
        result = tensor.detach().clone().contiguous()
        if self.size == 1:
            return result
        if op == "sum" and self.lanes and self.size * result.nbytes <= summing.ONE_ROUND_BYTES:
            # By memory that ranks of a host share, a twentieth of what gloo's own takes: 0.1 ms, not 2.3.
            return self.start_all_reduce(result.view(-1), action=action, kind=kind).wait().view(result.shape)
        with self.timed(kind):
            return self.begin_all_reduce(result.to(self.wire), op, action, kind).arrived()

    def begin_all_reduce(self, values: Tensor, op: Op, action: str, kind: Kind) -> Work:
        """Begin the group's own all-reduce, in place, of values on the wire's device."""
        assert self._group is not None
        self._add(kind, 2 * (self.size - 1) * values.nbytes // self.size)
        reduce = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        work = self._group.allreduce([values], reduce, timedelta(seconds=self.timeout))
        return Work(values, self, action, kind, [(None, work)])

    start_all_reduce = summing.start_all_reduce

    def broadcast(self, tensor: Tensor, src: int = 0, *, action: str, kind: Kind = "other") -> Tensor:
        """The tensor of rank ``src`` of this group, as a new tensor; elsewhere only type and shape count.

        Shapes: any, the same on all ranks -> the same.

        Cost: n - 1 times the tensor's bytes, counted at ``src``.
        """
        result = tensor.detach().clone().contiguous()
        if self._group is None or self.size == 1:
            return result
        result = result.to(self.wire)
        if self.rank == src:
            self._add(kind, (self.size - 1) * result.nbytes)
        pending = Work(result, self, action, kind)
        pending.works.append(
            (None, self._group.broadcast(_as_bytes(result), src, timedelta(seconds=self.timeout)))
        )
        return pending.arrived()

    def gather_rows(
        self, rows: Tensor, *, action: str, kind: Kind = "other", dst: int | None = None
    ) -> list[Tensor] | None:
        """Every rank's rows, however many each has.

        Args:
            rows: This rank's rows; the trailing shape and the type are the same on all ranks.
            action: What this is, for errors.
            kind: What its bytes count as.
            dst: The rank of this group that gets them; all do if None.

        Returns:
            One tensor a rank; None on ranks other than ``dst``.

        Shapes: rows [n, ...] -> size times [n of that rank, ...].

        Cost: the rows, n - 1 times or (with ``dst``) once, and 8 bytes a peer for the counts.
        """
        if self.size == 1:
            return [rows]
        rows = rows.detach().to(self.wire).contiguous()
        ones = [1] * self.size
        mine = torch.full((self.size,), rows.size(0), dtype=torch.int64, device=self.wire)
        counts = self.exchange(mine, ones, ones, action=f"{action} (row counts)", kind="other").tolist()
        gets = [dst in (None, rank) for rank in range(self.size)]
        parts = [rows if get else rows[:0] for get in gets]
        counts = counts if gets[self.rank] else [0] * self.size
        received = self.start_parts(parts, counts, action, kind).wait()
        return list(torch.split(received, counts)) if gets[self.rank] else None

    def gather_objects(self, obj: object, action: str, kinds: Sequence[type] = ()) -> list[object]:
        """Every rank's object, on every rank. Objects are plain data: what comes cannot run.

        Args:
            obj: What :func:`kagome.comm.serialization.pack` takes. It comes back itself on one rank, and as
                a copy on several, with its tensors on the CPU.
            action: What this is, for errors.
            kinds: The record classes that may come, the same on all ranks.

        Raises:
            CommError: If a rank sent something else.

        Cost:
            The object's bytes to each peer.
        """
        if self.size == 1:
            return [obj]
        parts = self.gather_rows(serialization.to_bytes(obj, kinds), action=action)
        assert parts is not None
        found = []
        for rank, part in enumerate(parts):
            try:
                found.append(serialization.from_bytes(part.cpu(), kinds))
            except serialization.ObjectError as error:
                raise CommError(
                    f"rank {self.names[self.rank]} expects plain data from rank {self.names[rank]}"
                    f" in {action!r}",
                    f"what came cannot be read: {error}",
                    hint="the same version of Kagome on all ranks",
                ) from None
        return found

    def barrier(self, action: str) -> None:
        """Return when all ranks have come here."""
        # item() waits for the device too, where all_reduce alone would wait on its stream only.
        self.all_reduce(
            torch.zeros((), dtype=torch.int64, device=self.device), action=action, kind="other"
        ).item()

    def start_parts(
        self,
        parts: list[Tensor],
        recv_counts: Sequence[int],
        action: str,
        kind: Kind,
        fill: Callable[[int, int], None] | None = None,
        sheets: tuple[Sheets, Sheets] | None = None,
    ) -> Work:
        """Post one part a peer; parts are contiguous, on the wire's device, and alike in trailing shape.

        With ``fill`` each is written only before it goes. With ``sheets`` those that go to a peer, and those
        that come from it, are messages of so many bytes.
        """
        received = parts[0].new_empty((sum(recv_counts), *parts[0].shape[1:]))
        slots = torch.split(received, list(recv_counts))
        if fill is not None:
            fill(self.rank, 0)
        slots[self.rank].copy_(parts[self.rank])
        pending = Work(received, self, action, kind, kept=parts)
        self._add(kind, sum(part.nbytes for peer, part in enumerate(parts) if peer != self.rank))
        out, into = sheets or ([(part.nbytes,) for part in parts], [(slot.nbytes,) for slot in slots])
        sent, come = _cut(parts, out), _cut(slots, into)
        assert self._wire is not None
        try:
            for peer, begin in self._wire.post(sent, come, fill):
                work = begin()
                if work is not None:
                    pending.works.append((peer, work))
        except KagomeError:
            pending.works.clear()  # what was to go cannot be written
            raise
        except RuntimeError as error:
            pending.works.clear()
            fault = self._fault(error, [] if peer is None else [peer], action, collective=peer is None)
            raise fault from error.with_traceback(None)
        pending.begun = time.monotonic()  # posting hid nothing
        return pending


def _cut(tensors: Sequence[Tensor], sheets: Sheets) -> list[Sequence[Tensor]]:
    return [_as_bytes(each).split(list(sizes)) for each, sizes in zip(tensors, sheets, strict=True)]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo and nccl lack some types, and every row is only bytes to them."""
    return tensor.view(-1).view(torch.uint8)
