"""What torch.cuda answers on a GPU, answered by the fake device.

Where it sits: ``start`` comes before the process asks ``torch.cuda.is_available`` or runs a backward pass.
torch.accelerator, streams and events reach the device by torch's own C++ and need nothing here.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from fake_gpu.build import build

GIB = 2**30
Watch = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)


class Library:
    """The functions of ``device.cpp``."""

    def __init__(self, count: int, capacity: int) -> None:
        self._c = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
        self._c.fake_gpu_take.restype = ctypes.c_size_t
        self._c.fake_gpu_take.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._c.fake_gpu_start(ctypes.c_int(count), ctypes.c_uint64(capacity))
        self._watch: Any = None
        self.stuck = False

    def device(self) -> int:
        """The calling thread's current device."""
        return int(self._c.fake_gpu_device())

    def select(self, index: int) -> None:
        """Make a device the calling thread's current one."""
        if self._c.fake_gpu_select(index) < 0:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({index})")

    def wait(self, kind: str, name: str) -> None:
        """Count a wait of the host."""
        self._c.fake_gpu_wait(kind.encode(), name.encode())

    def watch(self, told: Callable[[str, str], None] | None) -> None:
        """Call a function with kind and name of each wait of the host, in the thread that waits."""
        kept = Watch() if told is None else Watch(lambda kind, name: told(kind.decode(), name.decode()))
        self._c.fake_gpu_watch(kept)
        self._watch = kept  # only now may the one before go

    def stick(self, block: Callable[[], object]) -> None:
        """Let no event occur that is recorded from now on, and call ``block`` in each wait of the host."""
        self._c.fake_gpu_stick()
        self.stuck = True
        self.watch(lambda kind, name: block() and None)

    def take(self) -> dict[str, int]:
        """What was counted since the last call: ``launch:...``, ``copy:...`` and ``wait:...``."""
        room = 1 << 16
        while True:
            text = ctypes.create_string_buffer(room)
            needed = self._c.fake_gpu_take(text, room)
            if needed <= room:
                lines = text.raw[:needed].decode().splitlines()
                return {what: int(times) for times, _, what in (line.partition("\t") for line in lines)}
            room = 2 * needed


class Event:
    """``torch.cuda.Event``."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        # torch compares the types of two events, and knows no subclass.
        self._event = torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        self._event.record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        self._event.wait(torch.cuda.current_stream() if stream is None else stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return float(self._event.elapsed_time(end._event))


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


def _index(which: Any = None, optional: bool = True, allow_cpu: bool = False) -> int:
    if isinstance(which, int):
        return which
    index = None if which is None else torch.device(which).index
    return torch.accelerator.current_device_index() if index is None else index


@functools.cache
def start(count: int = 4, gib: float = 80.0) -> Library:
    """Give this process fake devices; later calls return what the first one made.

    Args:
        count: Number of devices, up to 8.
        gib: Memory of each.
    """
    # Triton finds no driver. None makes an import raise, and find_spec answer that there is no such module.
    sys.modules["triton"] = None  # type: ignore[assignment]
    capacity = int(gib * GIB)
    library = Library(count, capacity)
    answers = {
        **_devices(library, count, capacity),
        **_memory(),
        **_streams(library),
        **_draws(count),
    }
    for name, answer in answers.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, answer)
    return library


def _devices(library: Library, count: int, capacity: int) -> dict[str, Any]:
    def exchange(index: int) -> int:
        before = library.device()
        if index >= 0:
            library.select(index)
        return before

    def properties(device: Any = None) -> SimpleNamespace:
        index = _index(device)
        return SimpleNamespace(
            name="Fake GPU",
            major=9,
            minor=0,
            total_memory=capacity,
            multi_processor_count=1,
            pci_domain_id=0,
            pci_bus_id=index + 1,
            pci_device_id=0,
            uuid=f"fake-{index}",
        )

    return {
        "is_available": lambda: count > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": lambda: False,
        "_get_device_index": _index,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "device_count": lambda: count,
        "current_device": library.device,
        "set_device": lambda device: library.select(_index(device)),
        "get_device_name": lambda device=None: "Fake GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
    }


def _memory() -> dict[str, Any]:
    def asked(name: str) -> Callable[[Any], int]:
        answer = getattr(torch.accelerator, name)
        return lambda device=None: answer(_index(device))

    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {
        **{name: asked(name) for name in names},
        "reset_peak_memory_stats": asked("reset_peak_memory_stats"),
        "memory_stats": asked("memory_stats"),
        "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(_index(device)),
        "empty_cache": lambda: None,
    }


def _streams(library: Library) -> dict[str, Any]:
    def current(device: Any = None) -> Stream:
        found = torch.accelerator.current_stream(_index(device))
        return Stream(
            stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type
        )

    @contextmanager
    def use(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = current(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def debug(mode: str | int) -> None:
        library.watch(_warned if mode in ("warn", 1) else None)

    return {
        "set_sync_debug_mode": debug,
        "Event": Event,
        "Stream": Stream,
        "current_stream": current,
        "stream": use,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: library.wait("synchronize", "device"),
    }


def _warned(kind: str, name: str) -> None:
    # From here to the line that waited: this function, the one that ctypes calls, that line.
    warnings.warn(f"called a synchronizing CUDA operation ({kind}, {name})", stacklevel=3)


def _draws(count: int) -> dict[str, Any]:
    generators = tuple(torch.ops.fake_gpu.generator(index) for index in range(count))

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    def set_all(states: Any) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return {
        "default_generators": generators,
        "manual_seed_all": seed_all,
        "manual_seed": lambda seed: generators[_index()].manual_seed(int(seed)),
        "get_rng_state": lambda device="cuda": generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[_index(device)].set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": set_all,
    }
