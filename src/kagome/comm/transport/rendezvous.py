"""Rendezvous: the process group that a mesh creates, and that later meshes of the same process share.

Where it sits: ``comm.mesh`` joins it first and leaves it last. torch has one default group per process. If a
mesh ended the group while another one uses it, it would end it for both, so the last mesh to leave ends it.
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

from kagome.comm.transport.device import Agreement, agree
from kagome.comm.transport.timeout import within
from kagome.errors import CommError
from kagome.launch.environment import Ranks


class JoinedGroup(PrefixStore):
    """The store of a process group that a mesh created: which group it is, and how many meshes use it.

    torch returns the default group's store on request, so a later mesh finds it there.

    Args:
        number: Number of the group, the same on all ranks.
        store: A store that all ranks share.
        agreement: What the ranks agreed on about their devices.
    """

    def __init__(self, number: int, store: Store, agreement: Agreement) -> None:
        super().__init__(f"kagome-{number}", store)
        self.number, self.users, self.agreement = number, 1, agreement

    def leave(self) -> None:
        """Leave the group; the last mesh that uses it ends it.

        Otherwise gloo would abort the process at exit.
        """
        self.users -= 1
        if self.users == 0 and current() is self:
            dist.destroy_process_group()


def current() -> JoinedGroup | None:
    """Return the default group's store if a mesh created that group; else None."""
    store = given_store() if dist.is_initialized() else None
    # torch wraps the store that it is given in prefixes of its own.
    while isinstance(store, PrefixStore) and not isinstance(store, JoinedGroup):
        store = store.underlying_store
    return store if isinstance(store, JoinedGroup) else None


def given_store() -> Store | None:
    """Return the default group's store, whoever created the group."""
    # This function is private to torch. Without the store, waits still have a time limit, but their errors
    # cannot say what a late peer was doing.
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def join(ranks: Ranks, device: torch.device, timeout: float) -> JoinedGroup:
    """Meet the other ranks in a process group: a new one, or one that an open mesh has on all ranks.

    Args:
        ranks: This rank's number, and where the ranks meet.
        device: Device of this rank's tensors.
        timeout: Seconds after which a wait fails.

    Raises:
        CommError: If the ranks do not meet.
        LaunchError: If some ranks have a GPU and some have none.
    """
    if current() is not None:
        gc.collect()  # closes a mesh without references here, on all ranks at the same point
    until = time.monotonic() + timeout
    try:
        while True:
            left = max(until - time.monotonic(), 1.0)
            # Without this limit, a host that accepts the connection but never answers would block for ever.
            ask = partial(_store, ranks, timedelta(seconds=left))
            try:
                store = within(left + 1, ask, "the ranks' store")
                return _in_group(ranks, device, timedelta(seconds=timeout), store)
            except dist.DistNetworkError:
                # The store belonged to a group that rank 0 is ending; it then opens the next one there.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
    except RuntimeError as error:
        where = f"the file {ranks.store}" if ranks.store else f"{ranks.host}:{ranks.port}"
        raise CommError(
            f"rank {ranks.rank} to meet {ranks.size - 1} other ranks at "
            f"{where if ranks.size > 1 else 'this process'}",
            str(error).splitlines()[0],
            where=f"ranks set by {ranks.source}",
            hint="see that all ranks were started, and that the host and port can be reached from each host",
        ) from error


def _store(ranks: Ranks, limit: timedelta) -> Store:
    """Return a store that all ranks share."""
    if ranks.size == 1:
        return HashStore()  # a single rank needs no address: RANK and MASTER_PORT need not be set
    if ranks.store:
        file = FileStore(ranks.store, -1)
        file.set_timeout(limit)
        return file
    url = f"tcp://{ranks.host}:{ranks.port}?rank={ranks.rank}&world_size={ranks.size}"
    found: Store = next(iter(rendezvous(url, timeout=limit)))[0]
    return found


def _in_group(ranks: Ranks, device: torch.device, limit: timedelta, store: Store) -> JoinedGroup:
    """Create the group, or return the existing one if all ranks still have it."""
    # torchrun's store outlives a group: without a number, keys of an earlier group would be taken for ours.
    number, mine = store.add(f"kagome-opened/{ranks.rank}", 1), current()
    store.set(f"kagome-group/{number}/{ranks.rank}", str(0 if mine is None else mine.number))
    # All ranks wait here before torch creates a group: a failed attempt would shift later groups' names.
    keys = [f"kagome-group/{number}/{rank}" for rank in range(ranks.size)]
    store.wait(keys, limit)
    if mine is not None:
        if all(int(store.get(key)) == mine.number for key in keys):
            mine.users += 1
            return mine
        dist.destroy_process_group()  # another rank has left it, so it is unusable
    joined = JoinedGroup(number, store, agree(store, f"kagome-devices/{number}", ranks, device))
    backend = joined.agreement.backend
    dist.init_process_group(
        backend,
        store=joined,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=limit,
        device_id=None if backend == "gloo" else device,
    )
    return joined
