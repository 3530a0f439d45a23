"""Preparation process: loads and cuts a graph outside of the rank that waits for it, and ends with that rank.

Where it sits: ``train.host_parts`` runs ``prepare`` in one. Where it can, it is forked from the rank, which
has imported everything already: the imports of a new process take two to three seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from kagome import errors
from kagome.graph.prepare import answer
from kagome.launch.environment import Ranks
from kagome.launch.os_errors import end_with


class Standby:
    """A process that was forked from this one before it had other threads, and waits for one preparation.

    A fork copies the calling thread alone, so a lock that another thread holds would stay locked in the copy.
    Ranks start threads when they connect; so the copy is made before that.

    Args:
        pid: The process.
        pipe: The way to it.
    """

    def __init__(self, pid: int, pipe: Connection) -> None:
        self._pid, self._pipe = pid, pipe

    @staticmethod
    def forked() -> Standby | None:
        """Fork the process; return None where that is not safe: off Linux, or beside threads of libraries."""
        # Threads that the system counts and Python does not are those of libraries.
        if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > threading.active_count():
            return None
        ours, theirs = Pipe()
        parent = os.getpid()
        # Both processes would write out what is in the buffers now.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return Standby(pid, ours)
        # The rank's end has to have no other holder, or this process would never see it close.
        ours.close()
        code = 1
        try:
            end_with(parent)
            code = _serve(theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            # Whatever this process has inherited belongs to the rank and is not closed here.
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def run(self, order: str) -> tuple[int, str]:
        """Run one preparation; see :func:`kagome.graph.prepare.answer`. A process does this once."""
        try:
            self._pipe.send(order)
            found: tuple[int, str] = self._pipe.recv()
        except (EOFError, OSError):
            # It died, or it raised what `answer` does not expect and printed that.
            return self._ended(), ""
        except BaseException:
            # A signal ends the rank: nobody needs the parts any more.
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            raise
        return found

    def close(self) -> None:
        """End the process, whether it was used or not."""
        if self._pid:
            self._ended()

    def _ended(self) -> int:
        # The process ends as soon as it reads the end of the pipe.
        self._pipe.close()
        _, status = os.waitpid(self._pid, 0)
        # The system may give the number to another process now.
        self._pid = 0
        return os.waitstatus_to_exitcode(status)


@contextmanager
def standing_by(ranks: Ranks) -> Iterator[Standby | None]:
    """Fork the process that is to cut the graph for the ranks of a host, and end it with the block.

    Args:
        ranks: The rank of this process; only the first one of a host has the process, and only beside others.
    """
    # A single rank cuts nothing, and the first rank of each host does it for the others.
    standby = Standby.forked() if ranks.size > 1 and ranks.local_rank == 0 else None
    try:
        yield standby
    finally:
        if standby is not None:
            standby.close()


def _serve(pipe: Connection) -> int:
    try:
        order = pipe.recv()
    except EOFError:  # the parts were found in the cache
        return 0
    found = answer(order)
    with suppress(OSError):  # the rank has ended
        pipe.send(found)
    return 0


def prepared_by(standby: Standby | None, order: str) -> tuple[int, str]:
    """Run one preparation in the process that stands by, or in a new one.

    Args:
        standby: A forked process; None starts a new one.
        order: The arguments, as :func:`kagome.graph.prepare.answer` takes them.

    Returns:
        The exit code, and the last line of an error.
    """
    with _unwinding():
        if standby is not None:
            return standby.run(order)
        # -P: import nothing from the current folder.
        command = [sys.executable, "-P", "-m", "kagome.graph.prepare", order, str(os.getpid())]
        done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=_environment())
    # The data set's own function may have printed before.
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def _environment() -> dict[str, str]:
    """Return an environment in which another process imports the same Kagome as this one."""
    place = str(Path(errors.__file__).parents[1])
    # Because of -P the other process does not search the current folder. If Kagome was imported from there,
    # as in a checkout that is not installed, its place has to be passed on.
    spec = PathFinder.find_spec("kagome", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    if spec is not None:
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": place if not known else f"{known}{os.pathsep}{place}"}


@contextmanager
def _unwinding() -> Iterator[None]:
    """Make SIGTERM end the block in order: the other process, and files that are half written."""
    # Python only sets signal handlers in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
