"""Memory that a rank frees stays with it: a second tensor of a size costs no page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch_geometric.nn import GCN

import kagome
from kagome.launch.allocator import MERGING, TUNABLES, FreedMemory, _cuts, keep_freed_memory, merging

FAULTS = """
import resource, sys, torch
from kagome.launch.allocator import keep_freed_memory
done = keep_freed_memory({}) if sys.argv[1] == "keep" else False
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work(times):
    for _ in range(times):
        torch.ones(16_000_000).sum()
work(4)  # holes of the right size come about
before = faults()
work(8)
print(int(done), faults() - before)
"""


def faults(way: str) -> tuple[bool, int]:
    out = subprocess.run([sys.executable, "-c", FAULTS, way], capture_output=True, text=True, check=True)
    done, count = map(int, out.stdout.split())
    return bool(done), count


def test_a_tensor_finds_the_pages_of_the_last_one() -> None:
    done, kept = faults("keep")
    if platform.libc_ver()[0] != "glibc":
        assert not done
        pytest.skip("another C library than glibc: there is nothing to set")
    assert done
    # 64 MB are 15,625 pages of 4 KiB; each anew eight times without it.
    # A machine under pressure may take pages from a process in between: the least of three counts.
    kept = min([kept] + [faults("keep")[1] for _ in range(2)])
    assert faults("leave")[1] > 2 * kept


FREE_AT_THE_END = """
import resource, torch
from kagome.launch.allocator import keep_freed_memory
assert keep_freed_memory({})
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    torch.empty(600_000_000)[:16_000_000].fill_(1)  # 2.4 GB, of which 64 MB are written to
work()
before = faults()
work()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_more_than_two_gib_stay_too() -> None:
    """Above a threshold of 2 GiB, as much as mallopt's number holds, the end of the heap was given back."""
    # As ranks start: by chance a splinter at the end of one tensor has no place for the next.
    env = {k: v for k, v in os.environ.items() if k != TUNABLES} | merging({})
    words = [sys.executable, "-c", FREE_AT_THE_END]
    out = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert int(out.stdout) < 1000  # 64 MB are 15,625 pages


KEPT = """
import ctypes, sys
from kagome.launch import allocator
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
assert allocator.keep_freed_memory()
small = []
def block(size=10_000_000):  # as torch asks for it; its pages are never touched
    small.extend(libc.malloc(n) for n in (24, 40, 56, 72, 88))
    where = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(where), 64, size) == 0
    return where
for _ in range(20):
    first, second = block(), block()
    libc.free(first)
    third = block()
    libc.free(second), libc.free(third)
print(allocator.freed_bytes())
"""


@pytest.mark.skipif(not _cuts(), reason="another C library, or one that merges by itself")
def test_ranks_start_so_that_holes_are_filled_again() -> None:
    def kept(variables: dict[str, str]) -> int:
        env = {k: v for k, v in os.environ.items() if k != TUNABLES} | variables
        words = [sys.executable, "-c", KEPT]
        return int(subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout)

    assert merging({}) == {TUNABLES: MERGING}
    assert merging({TUNABLES: "glibc.malloc.check=3"}) == {}
    assert kept({}) > 3 * kept(merging({}))


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_a_user_s_own_choice_stays(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


LARGE = """
import resource, torch
from kagome.launch import allocator
from kagome.launch.allocator import FreedMemory
limits = [2**50, 0]  # what may be allocated besides, at each look
allocator.available_bytes = lambda: limits.pop(0)
freed, kept = FreedMemory(least=0, environment={}), []
assert not freed.look()  # the first pass
def gaps():
    for _ in range(4):  # a gap between two tensors that stay is too small for a tensor of its size
        kept.append(torch.ones(10_000_000))
        torch.ones(10_000_000)
    held = allocator._resident()
    kept.clear()
    return held
assert not freed.look()
before = gaps()
assert not freed.look()
assert freed.look()
assert allocator._resident() < before - 100_000_000  # what was free has been returned
assert not freed.look()  # it is done once
before = allocator._resident()
large = torch.ones(100_000_000)  # fits into no gap
assert allocator._resident() > before + 350_000_000
del large
assert allocator._resident() < before + 50_000_000
print("ok")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_a_large_process_returns_large_blocks() -> None:
    out = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert out.stdout == "ok\n", out.stderr


def test_a_user_s_allocator_is_left_alone_when_the_process_is_large() -> None:
    assert not FreedMemory(
        least=0, environment={"MALLOC_MMAP_MAX_": "0", "LOCAL_WORLD_SIZE": "1000000"}
    ).look()


def test_training_passes_alone_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[FreedMemory] = []
    monkeypatch.setattr(FreedMemory, "look", lambda freed: looks.append(freed))
    data = kagome.load("sbm:vertices=20,degree=3,features=4,classes=2,communities=2")
    with kagome.shard(GCN(4, 4, num_layers=1, out_channels=2), data, log=str) as net:
        with torch.no_grad():
            net(data.x, data.edge_index)
        assert not looks
        net(data.x, data.edge_index)
    assert len(looks) == 1
