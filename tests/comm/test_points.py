"""Messages from one rank to one: in their order, beside all else, and every fault is told."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kagome.comm.channel import Channel
from kagome.comm.exchange import ExchangeRequest
from kagome.comm.in_process.thread_group import ThreadChannel, ThreadGroup
from kagome.comm.mesh import open_mesh
from kagome.comm.watchdog import Watchdog
from kagome.config import Parallel
from kagome.errors import CommError

SHARED = pytest.mark.parametrize("shared", [True, False])


def rows_of(number: int, rank: int = 0) -> Tensor:
    return torch.arange(6.0).view(3, 2) + 10 * number + 1000 * rank


def once(channel: Channel, sends: bool, count: int, action: str) -> None:
    """A message between this rank and the other of two."""
    peer = 1 - channel.rank
    if sends:
        channel.start_send(torch.zeros(count), peer, action=action).wait()
    else:
        channel.start_receive((count,), torch.float32, peer, action=action).wait()


def prepared(channel: Channel, shared: bool) -> Channel:
    if not shared:
        channel.attach_shared_memory(None)
    else:
        assert channel.shared_memory is not None
    return channel


def ring(channel: Channel, shared: bool, count: int, lent: bool) -> dict[str, int]:
    """Each rank sends to the next, all before any is received; waits come in another order."""
    prepared(channel, shared)
    me, size = channel.rank, channel.size
    after, before = (me + 1) % size, (me - 1) % size
    sent = [channel.start_send(rows_of(k, me), after, action=f"to {k}") for k in range(count)]
    come = [channel.start_receive((3, 2), torch.float32, before, action=f"from {k}") for k in range(count)]
    for k in reversed(range(count)):
        if lent:
            with come[k].borrow() as rows:
                assert torch.equal(rows, rows_of(k, before))
        else:
            rows = come[k].wait()
            assert torch.equal(rows, rows_of(k, before))
            assert come[k].wait() is rows
    for each in sent:
        each.wait()
        each.wait()
    taken = channel.take_traffic()
    assert taken.under_way["stage"] >= taken.waited["stage"] > 0
    return taken.bytes


@SHARED
@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_messages_come_in_the_order_in_which_they_went(ranks, world, shared, lent):
    for taken in ranks(world, ring, shared, 20, lent):
        assert taken["stage"] == 20 * 24
        assert sum(taken.values()) == taken["stage"]


def far_ahead(channel: Channel, shared: bool, count: int) -> int:
    """The sender is done before the receiver begins."""
    prepared(channel, shared)
    if channel.rank == 0:
        sent = [channel.start_send(rows_of(k), 1, action=f"rows {k}") for k in range(count)]
        channel.barrier("all were begun")
        for each in sent:
            each.wait()
    else:
        channel.barrier("all were begun")
        for k in range(count):
            come = channel.start_receive((3, 2), torch.float32, 0, action=f"rows {k}")
            assert torch.equal(come.wait(), rows_of(k))
    return count


@SHARED
@pytest.mark.parametrize("count", [100, 400])
def test_a_sender_may_be_far_ahead(ranks, shared, count):
    assert ranks(2, far_ahead, shared, count) == [count] * 2


def without_room(channel: Channel, count: int) -> None:
    """Tokens that say that rows come by the wire, more than there are places."""
    assert channel.shared_memory is not None
    channel.shared_memory.allowance.most = 0
    channel.shared_memory._own = []
    far_ahead(channel, True, count)


def test_a_sender_without_room_may_be_far_ahead_too(ranks):
    ranks(2, without_room, 300, spoils=True)


def both_passes(channel: Channel, shared: bool) -> bool:
    """One rank receives backward first, the other forward; sums of all ranks travel between them."""
    prepared(channel, shared)
    me, peer, beside = channel.rank, 1 - channel.rank, channel.beside()
    ones, sums, sent, come = [1, 1], [], [], {}
    for k in range(12):
        passes = (False, True) if (k + me) % 2 else (True, False)
        if k % 3 == me:
            sums.append(beside.start_all_reduce(torch.full((4,), float(len(sums))), action="sum"))
        for backward in passes:
            rows = rows_of(k, me) + 0.5 * backward
            sent.append(channel.start_send(rows, peer, action="there", backward=backward))
        if k % 4 == 0:
            got = channel.start(
                torch.full((2, 6), float(k)), ExchangeRequest(ones, ones, "all", kind="halo")
            ).wait()
            assert float(got.sum()) == 12.0 * k
            channel.barrier("in between")
        for backward in reversed(passes):
            come[k, backward] = channel.start_receive(
                (3, 2), torch.float32, peer, action="here", backward=backward
            )
    for (k, backward), each in sorted(come.items(), key=lambda item: (item[0][1] == (me == 0), -item[0][0])):
        assert torch.equal(each.wait(), rows_of(k, peer) + 0.5 * backward)
    for number, each in enumerate(sums):
        assert each.wait().tolist() == [2.0 * number] * 4
    for each in sent:
        each.wait()
    return True


@SHARED
def test_passes_and_collectives_never_meet(ranks, shared):
    assert ranks(2, both_passes, shared) == [True, True]


def odd_shapes(channel: Channel, shared: bool) -> bool:
    prepared(channel, shared)
    tensors = [
        torch.empty(0, 7),
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, dtype=torch.int64),
        torch.arange(24).view(2, 3, 4).transpose(0, 2),
        torch.tensor([True, False]),
        torch.ones(5, 0),
        torch.full((4,), 2.0, dtype=torch.bfloat16, requires_grad=True),
    ]
    if channel.rank == 0:
        channel.take_traffic()
        for each in tensors:
            channel.start_send(each, 1, action="odd").wait()
        return channel.take_traffic().bytes["stage"] == sum(each.nbytes for each in tensors)
    found = [channel.start_receive(each.shape, each.dtype, 0, action="odd").wait() for each in tensors]
    return all(
        torch.equal(one, other) and one.shape == other.shape and one.dtype == other.dtype
        for one, other in zip(found, tensors, strict=True)
    )


@SHARED
def test_any_shape_and_type_goes_and_what_is_empty_too(ranks, shared):
    assert ranks(2, odd_shapes, shared) == [True, True]


def lonely_empty(channel: Channel) -> None:
    if channel.rank == 0:
        channel.start_send(torch.empty(0, 3), 1, action="nothing").wait()
        assert channel.start_receive((0, 3), torch.float32, 1, action="nothing").wait().shape == (0, 3)


def test_what_is_empty_needs_no_peer(ranks):
    ranks(2, lonely_empty, spoils=True)


def wrong_size(channel: Channel, shared: bool) -> str:
    prepared(channel, shared).timeout = 1.0
    try:
        once(channel, channel.rank == 0, 3 + channel.rank, "rows of stage 0")
    except CommError as error:
        return str(error)
    return ""


@SHARED
def test_sizes_that_differ_kill_nobody(ranks, shared):
    _, text = ranks(2, wrong_size, shared, spoils=True)
    assert text.startswith("expected rank 1 to be answered in 'rows of stage 0' by rank 0")


def late(channel: Channel, shared: bool, sends: bool) -> str:
    prepared(channel, shared)
    store = dist.distributed_c10d._get_default_store()
    channel.watch = Watchdog(store, channel.rank, channel.size, log=lambda line: None, every=0.1)
    channel.timeout = 1.0
    try:
        if channel.rank == 1:
            channel.watch.doing("epoch 2: optimizer")
            time.sleep(2.0)
            return ""
        with pytest.raises(CommError) as caught:
            once(channel, sends, 4, "epoch 3: chunk 2")
        return str(caught.value)
    finally:
        channel.watch.close()


@pytest.mark.parametrize(("shared", "sends"), [(True, False), (False, False), (False, True)])
def test_a_late_peer_is_named_with_what_it_did(ranks, shared, sends):
    text = ranks(2, late, shared, sends, spoils=True)[0]
    assert text.startswith("expected rank 0 to be answered in 'epoch 3: chunk 2' by rank 1, ")
    assert "rank 1, which was last seen in 'epoch 2" in text
    assert "nothing within 1 s" in text


def dies(channel: Channel, shared: bool, sends: bool) -> str:
    prepared(channel, shared)
    if channel.rank == 1:
        # The process lives on for the pool, but its connections are closed as if it had died.
        shared_memory = channel.shared_memory
        channel.close()
        if shared_memory is not None:
            shared_memory.close()
        dist.destroy_process_group()
        return ""
    try:
        for k in range(200):
            once(channel, sends, 4, f"chunk {k}")
    except CommError as error:
        return str(error)
    return ""


@SHARED
@pytest.mark.parametrize("sends", [True, False])
def test_a_lost_peer_is_named(ranks, shared, sends):
    text = ranks(2, dies, shared, sends, spoils=True)[0]
    assert text.startswith("expected rank 0 to be answered in 'chunk ")
    assert "by rank 1; got a closed connection" in text


def test_who_is_no_peer_is_refused(ranks):
    with pytest.raises(ValueError, match="rank 0 of 1 has no peer 0"):
        Channel(None, "cpu").start_send(torch.zeros(1), 0, action="a")
    ranks(2, misused)


def misused(channel: Channel) -> None:
    with pytest.raises(ValueError, match="has no peer 2"):
        channel.start_receive((1,), torch.float32, 2, action="a")
    with pytest.raises(ValueError, match="has no peer"):
        channel.start_send(torch.zeros(1), channel.rank, action="a")
    with pytest.raises(ValueError, match="not by the one beside it"):
        channel.beside().start_send(torch.zeros(1), 1 - channel.rank, action="a")


def piped(channel: Channel, pipe: int, shared: bool, chunks: int) -> float:
    """Fill and drain: rows go up the stages chunk by chunk, and what they brought comes down again."""
    with open_mesh(Parallel(pipe=pipe, shared_memory=shared), timeout=20) as mesh:
        line, stage, last = mesh.pipe, mesh.stage, mesh.axes["pipe"] - 1
        sent, total, shape, ones = [], 0.0, (50, 8), [1] * mesh.graph.size
        for k in range(chunks):
            rows = torch.full(shape, float(k + 100 * mesh.part))
            if stage > 0:
                rows = line.start_receive(shape, rows.dtype, stage - 1, action=f"forward {k}").wait()
            if stage < last:
                sent.append(line.start_send(rows + 1, stage + 1, action=f"forward {k}"))
            halo = torch.full((mesh.graph.size, 1), float(stage))
            assert (
                float(mesh.graph.start(halo, ExchangeRequest(ones, ones, f"halo {k}")).wait().mean()) == stage
            )
        for k in reversed(range(chunks)):
            back = torch.full(shape, float(k))
            if stage < last:
                come = line.start_receive(shape, back.dtype, stage + 1, action=f"backward {k}", backward=True)
                with come.borrow() as rows:
                    back = rows.clone()
            total += float(back.mean())
            if stage > 0:
                sent.append(line.start_send(back + 1, stage - 1, action=f"backward {k}", backward=True))
        for each in sent:
            each.wait()
        return total


@SHARED
@pytest.mark.parametrize(("size", "pipe"), [(2, 2), (3, 3), (4, 2), (4, 4)])
def test_a_pipe_fills_and_drains(ranks, size, pipe, shared):
    found = ranks(size, piped, pipe, shared, 30)
    graph = size // pipe
    for rank, total in enumerate(found):
        assert total == sum(range(30)) + 30.0 * (pipe - 1 - rank // graph)


@SHARED
def test_a_pipe_of_very_many_chunks(ranks, shared):
    ranks(4, piped, 2, shared, 300)


# Threads -----------------------------------------------------------------------------------------


def test_threads_send_to_each_other_too():
    def work(channel: ThreadChannel) -> bool:
        me, size = channel.rank, channel.size
        after, before = (me + 1) % size, (me - 1) % size
        for backward in (True, False):
            for k in range(5):
                channel.start_send(rows_of(k, me) + backward, after, action="to", backward=backward).wait()
        channel.start_send(torch.empty(0, 2), after, action="to").wait()
        come = {
            (k, backward): channel.start_receive(
                (3, 2), torch.float32, before, action="from", backward=backward
            )
            for k in range(5)
            for backward in (False, True)
        }
        assert channel.start_receive((0, 2), torch.float32, before, action="from").wait().shape == (0, 2)
        for (k, backward), each in reversed(come.items()):
            with each.borrow() as rows:
                assert torch.equal(rows, rows_of(k, before) + backward)
            assert each.wait() is rows
        return True

    assert ThreadGroup(3).run(work) == [True] * 3


def test_threads_tell_what_did_not_come():
    def work(channel: ThreadChannel) -> None:
        if channel.rank == 0:
            channel.start_receive((4,), torch.float32, 1, action="chunk 3").wait()
        else:
            channel.start_send(torch.zeros(5), 0, action="chunk 3")

    with pytest.raises(CommError, match=r"\[4\].* in 'chunk 3'"):
        ThreadGroup(2).run(work)

    def silent(channel: ThreadChannel) -> None:
        if channel.rank == 0:
            channel.start_receive((4,), torch.float32, 1, action="chunk 3").wait()

    with pytest.raises(CommError, match=r"rank 0 to be answered in 'chunk 3' by rank 1.*within 0.2 s"):
        ThreadGroup(2, timeout=0.2).run(silent)

    begun = threading.Event()

    def stops(channel: ThreadChannel) -> None:
        if channel.rank == 0:
            begun.set()
            channel.start_receive((4,), torch.float32, 1, action="chunk 3").wait()
        begun.wait(5)
        raise KeyError("its own fault")

    with pytest.raises(KeyError, match="its own fault"):
        ThreadGroup(2).run(stops)

    with pytest.raises(ValueError, match="rank 0 of 2 has no peer 2"):
        ThreadChannel(ThreadGroup(2), 0).start_send(torch.zeros(1), 2, action="a")
