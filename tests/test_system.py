"""System: what the machine refuses is one sentence."""

from __future__ import annotations

import errno
import resource

import pytest

from kagome.available import available_bytes
from kagome.errors import ResourceError
from kagome.system import refused


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "it gives no more"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: x"),
            "no more",
        ),
        (RuntimeError("could not create a primitive"), "it gives no more"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "it gives no more"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "it gives no more"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "open at once"),
        (OSError(errno.ENOSPC, "No space left on device", "run/a"), "No space left on device (run/a)"),
        (OSError(errno.EFBIG, "File too large", "run/a"), "File too large, the limit is"),
    ],
)
def test_what_the_system_refuses_is_told(error, words):
    found = refused(error)
    assert isinstance(found, ResourceError)
    assert words in str(found)
    assert "\n" not in found.found
    wrapped = RuntimeError("a layer failed")
    wrapped.__cause__ = error
    assert words in str(refused(wrapped))


def test_other_faults_are_nobody_s_here():
    assert refused(ZeroDivisionError("its own bug")) is None
    assert refused(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_a_limit_of_the_address_space_counts_as_memory(monkeypatch):
    limit = 2**60
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    before = available_bytes()
    limit = 2**20
    assert available_bytes() == 0
    assert before is None or before > 0
