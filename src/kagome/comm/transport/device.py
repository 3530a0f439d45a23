"""Devices: which device each rank computes on, and which backend carries what the ranks exchange.

Where it sits: ``comm.mesh`` asks for a rank's device before the ranks meet. ``agree`` compares the devices of
all ranks in their store, before torch makes a process group.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from kagome.errors import LaunchError
from kagome.launch.environment import Ranks

HOST = torch.device("cpu")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Agreement:
    """The devices and settings that all ranks of a process group have agreed on.

    Args:
        backend: Name of torch's backend for their tensors.
        staged: Whether tensors of a GPU travel through the host's memory.
        notes: Texts that tell the user about it, the same on all ranks.
    """

    backend: str = "gloo"
    staged: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankDevice:
    """The facts that one rank tells the others about its device.

    Args:
        host: Name of its host.
        device: Name of the device, such as ``cuda:0``.
        visible: Number of GPUs that the rank sees.
        ranks: Number of ranks on its host.
        key: Address of the GPU, equal for two ranks on one GPU and for no others; empty on the CPU.
    """

    host: str
    device: str
    visible: int
    ranks: int
    key: str = ""


def visible() -> tuple[str, int]:
    """Return the type of the devices that ranks can compute on, and how many this process sees.

    An accelerator that torch has no backend for, as Apple's, counts as none: ranks could not exchange.
    """
    if not torch.accelerator.is_available():
        return "cpu", 0
    found = torch.accelerator.current_accelerator()
    kind = "cpu" if found is None else found.type
    # torch answers "gloo" for a type without a backend of its own, and gloo sends host memory alone.
    if dist.get_default_backend_for_device(kind) == "gloo":
        return "cpu", 0
    count = torch.accelerator.device_count()
    return (kind, count) if count else ("cpu", 0)


def own_device(ranks: Ranks, bound: int | None = None) -> torch.device:
    """Choose this rank's device and make it the current one.

    It is the GPU with the number of the rank on its host. A rank that sees fewer GPUs than its host has ranks
    was given its own ones (``--gpus-per-task``), or shares one: :func:`agree` finds out which.

    Args:
        ranks: This rank's number.
        bound: Index of the GPU that the script chose itself.
    """
    kind, count = visible()
    if not count:
        return HOST
    index = ranks.local_rank % count if bound is None else bound
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def agree(store: Store, name: str, ranks: Ranks, device: torch.device) -> Agreement:
    """Compare the devices of all ranks, and choose the backend that suits them.

    Args:
        store: The store of all ranks.
        name: Prefix of the keys, a different one for each call.
        ranks: This rank's number.
        device: This rank's device.

    Raises:
        LaunchError: If some ranks have a GPU and some have none.

    Cost:
        A hundred bytes for each rank, read by each rank.
    """
    mine = RankDevice(socket.gethostname(), str(device), visible()[1], ranks.local_size, _identity(device))
    store.set(f"{name}/{ranks.rank}", json.dumps(asdict(mine)))
    keys = [f"{name}/{rank}" for rank in range(ranks.size)]
    store.wait(keys)
    return agreed([RankDevice(**json.loads(each)) for each in store.multi_get(keys)])


def agreed(found: Sequence[RankDevice]) -> Agreement:
    """Choose the backend for ranks with these devices: see :func:`agree`."""
    # Reversed, so that the first rank of each type remains and the error names it.
    kinds = {each.device.partition(":")[0]: (rank, each) for rank, each in reversed(list(enumerate(found)))}
    if len(kinds) > 1:
        (one, here), (other, there) = sorted(kinds.values(), key=lambda pair: pair[0])[:2]
        raise LaunchError(
            "all ranks on devices of one type",
            f"{_gpus(here)} on {here.host} (rank {one}), {_gpus(there)} on {there.host} (rank {other})",
            hint="start ranks only where there are GPUs, or set CUDA_VISIBLE_DEVICES= on all hosts to use "
            "their CPUs",
        )
    (kind,) = kinds
    own = dist.get_default_backend_for_device(kind)
    if kind == HOST.type:
        return Agreement(own)
    # nccl refuses two ranks on one GPU ("duplicate GPU detected"), so such ranks exchange by gloo.
    shared = {key: count for key, count in Counter(each.key for each in found).items() if count > 1}
    if not shared and dist.is_backend_available(own):
        return Agreement(own)
    first = next((each for each in found if each.key in shared), found[0])
    why = (
        f"{shared[first.key]} ranks share {first.device} of {first.host}, which has {first.ranks} ranks and "
        f"{_gpus(first)} in sight of each"
        if shared
        else f"this build of torch has no {own}"
    )
    return Agreement(
        "gloo", True, (f"{why}: all ranks exchange through the host's memory (gloo in place of {own})",)
    )


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the backend that carries tensors of a device's type in a group, None for the default one.

    A group that was made without a backend has one for each type: ``cpu:gloo,cuda:nccl``. It is empty if the
    group has none for the type.
    """
    config = dist.get_backend_config(group)
    return dict(each.split(":", 1) for each in config.split(",")).get(device.type, "")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device. The host goes on before the device has come to the copy."""
    if device.type == HOST.type or tensor.device.type != HOST.type:
        return tensor.to(device)
    # Only from pinned memory is the copy asynchronous. torch keeps that memory until the copy has ended.
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class HostCopy:
    """A copy in the host's memory that may still be on its way.

    Args:
        copy: The copy.
        event: Occurs when the device has made it; None if it is there already.
    """

    copy: Tensor
    event: torch.Event | None = None

    def wait(self) -> Tensor:
        """Wait for the copy, and for nothing that the device was told after it."""
        if self.event is not None:
            self.event.synchronize()
        return self.copy


def to_host(tensor: Tensor) -> HostCopy:
    """Begin to copy a tensor to the host, which goes on until it waits for the copy.

    A tensor of the host is not copied.
    """
    if tensor.device.type == HOST.type:
        return HostCopy(tensor)
    # Into pinned memory, without which the host would wait here.
    copy = torch.empty_like(tensor, device=HOST, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return HostCopy(copy, event)


def _identity(device: torch.device) -> str:
    """Return the address of a GPU, by which nccl also recognises two ranks on one GPU."""
    if device.type == HOST.type:
        return ""
    # The boot id is one for all containers of a machine, whose host names may differ or be equal by chance.
    machine = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    found = torch.get_device_module(device).get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    address = [getattr(found, name, None) for name in names]
    # Devices of other vendors may lack a PCI address.
    if None in address:
        address = [getattr(found, "uuid", device)]
    return "/".join(map(str, (machine, *address)))


def _gpus(each: RankDevice) -> str:
    return "1 GPU" if each.visible == 1 else f"{each.visible or 'no'} GPUs"
