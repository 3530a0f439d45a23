"""System: what the machine refuses is one sentence."""

from __future__ import annotations

import errno
import resource

import pytest

from kagome.comm.channel import Channel
from kagome.components.rank_zero import by_first
from kagome.errors import CheckpointError, DataError, ModelError, ResourceError
from kagome.launch import fork, launcher
from kagome.launch.host_memory import available_bytes
from kagome.launch.os_errors import STARVED, in_words, refused


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "got no more"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: x"),
            "no more",
        ),
        (RuntimeError("could not create a primitive"), "got no more"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "got no more"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "got no more"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "open at once"),
        (OSError(errno.ENOSPC, "No space left on device", "run/a"), "No space left on device (run/a)"),
        (OSError(errno.EFBIG, "File too large", "run/a"), "File too large, the limit is"),
    ],
)
def test_what_the_system_refuses_is_told(error, words):
    found = refused(error)
    assert isinstance(found, ResourceError)
    assert words in str(found)
    assert "\n" not in found.got
    wrapped = RuntimeError("a layer failed")
    wrapped.__cause__ = error
    assert words in str(refused(wrapped))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EEXIST, "File exists", "run"), "File exists: run"),
        (OSError(errno.EISDIR, "Is a directory", ".page.tmp", None, "page"), "Is a directory: page"),
    ],
)
def test_what_is_no_file_or_no_folder_is_told(error, words):
    found = in_words(error)
    assert isinstance(found, ResourceError)
    assert words in str(found)


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


def caused(error, cause):
    error.__cause__ = cause
    return error


def test_memory_that_runs_out_in_a_model_is_no_fault_of_the_model():
    told = caused(ModelError("the model runs on a sample", "it raised MemoryError"), MemoryError())
    assert isinstance(in_words(told), ResourceError)
    threads = caused(ModelError("it runs", "it raised"), RuntimeError("can't start new thread"))
    assert "can't start new thread" in str(in_words(threads))
    for other in (
        caused(DataError("labels", "none"), ValueError("a")),
        caused(CheckpointError("a checkpoint", "the disk is full"), OSError(errno.ENOSPC, "No space", "run")),
        DataError("it must fit", "it does not"),
    ):
        assert in_words(other) is other
    assert in_words(ZeroDivisionError("its own bug")) is None
    assert isinstance(in_words(MemoryError()), ResourceError)


def test_what_one_rank_runs_for_all_says_that_memory_ran_out():
    def find():
        raise RuntimeError("can't start new thread")

    with pytest.raises(ResourceError, match=r"can't start new thread.*\(rank 0, check of the model\)"):
        by_first(Channel(None, "cpu"), find, "check of the model")


def test_a_process_that_cannot_even_start_leaves_with_a_code_that_has_words(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(fork.os, "_exit", codes.append)
    fork._starved(MemoryError, MemoryError(), None)
    assert codes == [STARVED]
    monkeypatch.setattr(fork, "available_bytes", lambda: 2**40)
    fork._starved(ValueError, ValueError("a bug"), None)
    assert codes == [STARVED]
    assert "ValueError: a bug" in capsys.readouterr().err
    monkeypatch.setattr(fork, "available_bytes", lambda: 2**20)  # Python's own words are none then
    fork._starved(SystemError, SystemError("returned NULL"), None)
    assert codes == [STARVED] * 2
    assert "no memory to start its process" in launcher._ending(STARVED)
    assert "is memory short" in launcher._ending(launcher.LOST)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "no more files"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory for them"),
    ],
)
def test_what_keeps_ranks_from_being_started_is_named(error, words):
    assert words in str(launcher._unstarted(2, error))
