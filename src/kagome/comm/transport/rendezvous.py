"""Joined: the process group that a mesh makes, and that later meshes of the same process share.

Where it sits: ``comm.mesh`` joins it first and leaves it last. torch has one default group a process. A mesh
that ended it while another one uses it would end that one too: so the last to leave ends it.
"""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from kagome.comm.transport.timeout import within
from kagome.errors import CommError
from kagome.launch.environment import Ranks


class JoinedGroup(PrefixStore):
    """The store of a process group that a mesh has made: which group it is, and how many meshes use it.

    torch hands the default group's store to whoever asks, so that a later mesh finds it there.

    Args:
        number: Of the group; the same on all ranks.
        store: That all ranks share.
    """

    def __init__(self, number: int, store: Store) -> None:
        super().__init__(f"kagome-{number}", store)
        self.number, self.users = number, 1

    def leave(self) -> None:
        """End the group with the last mesh that uses it; gloo aborts the process at its exit otherwise."""
        self.users -= 1
        if self.users == 0 and current() is self:
            dist.destroy_process_group()


def current() -> JoinedGroup | None:
    """The default group's store, where a mesh has made that group."""
    store = given_store() if dist.is_initialized() else None
    while isinstance(store, PrefixStore) and not isinstance(store, JoinedGroup):
        store = store.underlying_store
    return store if isinstance(store, JoinedGroup) else None


def given_store() -> Store | None:
    """The default group's store, whoever has made it."""
    # torch keeps it to itself; without it waits are limited all the same, but nobody can say what a late
    # peer was doing.
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def join(ranks: Ranks, device: torch.device, timeout: float) -> JoinedGroup:
    """Meet the other ranks in a process group: a new one, or the one that an open mesh has made on all ranks.

    Args:
        ranks: Which rank this is, and where they meet.
        device: Where its tensors live.
        timeout: Seconds after which a wait is given up.

    Raises:
        CommError: If the ranks do not meet.
    """
    if current() is not None:
        gc.collect()  # a mesh that nobody holds any more is closed here, on all ranks at the same point
    until = time.monotonic() + timeout
    try:
        while True:
            left = max(until - time.monotonic(), 1.0)
            # A host that is there and says nothing would be waited for without an end.
            ask = partial(_store, ranks, timedelta(seconds=left))
            try:
                store = within(left + 1, ask, "the ranks' store")
                return _in_group(ranks, device, timedelta(seconds=timeout), store)
            except dist.DistNetworkError:
                # That store was of a group which rank 0 is ending, or has ended: it opens the next one there.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
    except RuntimeError as error:
        where = f"the file {ranks.store}" if ranks.store else f"{ranks.host}:{ranks.port}"
        raise CommError(
            f"rank {ranks.rank} was to meet {ranks.size - 1} other ranks at "
            f"{where if ranks.size > 1 else 'this process'}",
            f"that failed: {str(error).splitlines()[0]}",
            where=f"ranks set by {ranks.source}",
            hint="see that all ranks were started, and that the host and port can be reached from each host",
        ) from error


def _store(ranks: Ranks, limit: timedelta) -> Store:
    """A store that all ranks share."""
    if ranks.size == 1:
        return HashStore()  # nobody else comes: RANK and MASTER_PORT need not be set
    if ranks.store:
        file = FileStore(ranks.store, -1)
        file.set_timeout(limit)
        return file
    url = f"tcp://{ranks.host}:{ranks.port}?rank={ranks.rank}&world_size={ranks.size}"
    found: Store = next(iter(rendezvous(url, timeout=limit)))[0]
    return found


def _in_group(ranks: Ranks, device: torch.device, limit: timedelta, store: Store) -> JoinedGroup:
    """Make the group, or find that all ranks still have one."""
    # torchrun's store outlives a group: what the ranks of an earlier one left there would be believed.
    number, mine = store.add(f"kagome-opened/{ranks.rank}", 1), current()
    store.set(f"kagome-group/{number}/{ranks.rank}", str(0 if mine is None else mine.number))
    # All ranks are here before torch begins a group: one that failed would shift the names of later ones.
    keys = [f"kagome-group/{number}/{rank}" for rank in range(ranks.size)]
    store.wait(keys, limit)
    if mine is not None:
        if all(int(store.get(key)) == mine.number for key in keys):
            mine.users += 1
            return mine
        dist.destroy_process_group()  # another rank has left it: nobody can use it any more
    joined = JoinedGroup(number, store)
    backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(
        backend, store=joined, rank=ranks.rank, world_size=ranks.size, timeout=limit, device_id=own
    )
    return joined
