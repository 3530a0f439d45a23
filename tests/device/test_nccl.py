"""The process groups of the bed keep NCCL's rules: what would hang or write beyond there, raises here."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fake_gpu.nccl import FakeNCCLError

SHORT, LONG = timedelta(seconds=3), timedelta(seconds=60)


def joined(eager: bool = True, device: int | None = None, limit: timedelta = LONG) -> int:
    """Make the default group; its limit counts once all ranks are there. Return this rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["KAGOME_STORE"], world)
    torch.cuda.set_device(rank if device is None else device)
    bound = torch.device("cuda", torch.cuda.current_device()) if eager else None
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=LONG, device_id=bound)
    # Ranks may start seconds apart on a busy machine, which the limit of a hang does not count.
    dist.group.WORLD.gloo.barrier().wait()
    dist.group.WORLD.limit, dist.group.WORLD.gloo_limit = limit, 2 * limit
    return rank


def sums() -> list[float]:
    rank = joined()
    x = torch.full((3,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    y = torch.full((2,), float(rank), device="cuda")
    dist.broadcast(y, 1)
    return [*x.tolist(), *y.tolist(), float(dist.get_backend() == "nccl")]


def test_collectives_compute_what_they_say(devices):
    assert devices.run(3, sums) == [[6.0, 6.0, 6.0, 1.0, 1.0, 1.0]] * 3


def refused() -> list[str]:
    """What is said of tensors and messages that NCCL does not take."""
    rank = joined()
    group, x, found = dist.group.WORLD, torch.zeros(4, device="cuda"), []
    for wrong in (
        lambda: group.allreduce([torch.zeros(2)]),
        lambda: group.allreduce([torch.zeros(2, device=f"cuda:{rank + 2}")]),
        lambda: group.allreduce([torch.zeros(4, 2, device="cuda").T]),
        lambda: group.allreduce([torch.zeros(2, dtype=torch.int16, device="cuda")]),
        lambda: group.alltoall([x], [x]),
        lambda: group.send([x], 1 - rank, 3),
    ):
        try:
            wrong()
        except FakeNCCLError as error:
            found.append(str(error))
    return found


def test_tensors_that_nccl_does_not_take_are_refused(devices):
    for rank, found in enumerate(devices.run(2, refused)):
        for text, said in zip(
            found,
            [
                "device type cpu",
                f"a tensor on cuda:{rank + 2} in a group on cuda:{rank}",
                "must be contiguous",
                "Unconvertible NCCL type torch.int16",
                "all-to-all of 1 and 1 tensors on 2 ranks",
                "NCCL has no tags, and got 3",
            ],
            strict=True,
        ):
            assert said in text


def fault(kind: str) -> None:
    hangs = kind in ("both send first", "split by one")
    rank = joined(device=0 if kind == "one device" else None, limit=SHORT if hangs else LONG)
    group, x = dist.group.WORLD, torch.zeros(4, device="cuda")
    if kind == "other collective":
        (group.allreduce([x]) if rank else group.broadcast([x], 0)).wait()
    elif kind == "sizes":
        group.alltoall([torch.zeros(2 + rank, device="cuda") for _ in range(2)], [x, x]).wait()
    elif kind == "size of a message":
        (group.send([x], 1) if rank == 0 else group.recv([torch.zeros(3, device="cuda")], 0)).wait()
    elif kind == "both send first":
        group.send([x], 1 - rank).wait()
    elif kind == "split by one":
        if rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        group.allreduce([x]).wait()


@pytest.mark.parametrize(
    ("kind", "said"),
    {
        "one device": "Duplicate GPU detected",
        "other collective": "rank 0 does 'broadcast|rank 1 does 'all-reduce",
        "sizes": "sends 16 bytes, rank . expects",
        "size of a message": "rank 1 expects 12 bytes",
        "both send first": "NCCL would hang",
        "split by one": "rank . does '(split|all-reduce)",
    }.items(),
)
def test_what_nccl_would_hang_at_raises(devices, kind, said):
    with pytest.raises(FakeNCCLError, match=said):
        devices.run(2, fault, kind)


def exchanged(way: str) -> float:
    rank = joined(eager=way != "a stream a pair", limit=SHORT if "stream" in way else LONG)
    got, mine = torch.empty(5, device="cuda"), torch.full((5,), float(rank), device="cuda")
    if way == "in a batch":
        steps = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        for work in dist.batch_isend_irecv(steps):
            work.wait()
    elif way == "a group each way":
        ways = [dist.new_group([0, 1], timeout=LONG) for _ in range(2)]
        works = [ways[rank].send([mine], 1 - rank), ways[1 - rank].recv([got], 1 - rank)]
        for work in works:
            work.wait()
    else:  # a rank sends first, the other receives first
        works = [dist.isend(mine, 1 - rank), dist.irecv(got, 1 - rank)]
        for work in works[:: 1 if rank == 0 else -1]:
            work.wait()
    return got.sum().item()


@pytest.mark.parametrize("way", ["in a batch", "a group each way"])
def test_two_ranks_send_to_each_other_at_once(devices, way):
    assert devices.run(2, exchanged, way) == [5.0, 0.0]


@pytest.mark.parametrize("way", ["a stream a group", "a stream a pair"])
def test_on_one_stream_they_wait_for_each_other_for_ever(devices, way):
    with pytest.raises(FakeNCCLError, match="NCCL would hang"):
        devices.run(2, exchanged, way)


def test_a_kernel_on_another_device_than_the_current_one_is_refused(devices):
    with pytest.raises(
        RuntimeError, match="a kernel on cuda:1 in thread MainThread, where cuda:0 is current"
    ):
        devices.run(1, kernel_elsewhere)


def kernel_elsewhere() -> None:
    from kagome.kernels import ops
    from kagome.kernels.base.csr import Structure

    ids, x = torch.arange(3, device="cuda:1"), torch.ones(3, 2, device="cuda:1")
    ops.sum_rows(Structure(ids, ids, 3, 3).by_target, x)
