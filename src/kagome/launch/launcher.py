"""Launcher: starts local ranks as processes, and ends them if one fails.

Where it sits: ``cli.app`` starts local ranks here; ``rank_processes`` holds their processes, ``environment``
tells each process which rank it is. The launcher never imports torch.
Ranks meet through a file in a folder that only this user can open. No port is opened for that, so no other
user can take part.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from kagome.errors import ADVICE, CommError, KagomeError, LaunchError, ResourceError
from kagome.launch.allocator import merging
from kagome.launch.environment import RESTARTS, STORE, Ranks, environment
from kagome.launch.host_memory import available_bytes
from kagome.launch.os_errors import STARVED, in_words, memory_left
from kagome.launch.rank_processes import Ended, RankProcesses
from kagome.launch.threads import LAUNCHED, SHARED, chosen, cores, local

__all__ = ["Ranks", "environment", "start_local"]

SAVE_SECONDS = 30
"""Seconds that ranks have to save a checkpoint after Ctrl-C or SIGTERM."""
FAIL_SECONDS = 8.0
"""Seconds that the other ranks have once one has died: they can no longer exchange with it, so little is left
to do."""
SIGNALLED = {128 + number: int(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
"""Exit codes of a rank that ended itself because of a signal, each with the signal."""
LOST = 255
"""Exit code that multiprocessing reports if the process from which a rank was forked is gone."""
STOPPED_SECONDS = 5.0
"""Seconds after which a stopped rank is reported."""
ALIKE_SECONDS = 0.5
"""Seconds that a rank with an error waits for the others to report the same error."""
_OF_RANK = re.compile(r"rank (\d+)\b[,;]?\s*(.*)", re.DOTALL)
"""Form of an error's location if it names a rank."""
LOOK_SECONDS = 0.1
"""Seconds between two checks of the ranks."""
RANK_BYTES = 150 * 2**20
"""Memory that a rank takes for itself, not shared with others, before it holds any data."""


def start_local(
    nproc: int,
    function: Callable[..., object],
    *args: object,
    loaded: Sequence[str] = (),
    beside: Sequence[str] = (),
    restarts: int = 0,
) -> object:
    """Run a function on N ranks of this host and return what rank 0 returns.

    Ctrl-C, SIGTERM and SIGHUP reach every rank as one SIGTERM. (A terminal's Ctrl-C, which also reaches the
    ranks directly, is ignored there.) Ranks get 30 s to save, then they are killed. Ranks share the host's
    cores, and a cgroup's quota, unless OMP_NUM_THREADS or NUMBA_NUM_THREADS is set.

    Args:
        nproc: Number of ranks to start.
        function: A function that can be imported by its module's name. It finds its rank in the environment.
        args: Arguments of the function, which must be picklable.
        loaded: Modules to import once, in a process from which the ranks are then forked: torch and PyG take
            seconds to load, on as many cores as there are ranks. Use it in a process that starts ranks only
            once, because whatever the modules read from the environment stays the same.
        beside: Modules to run as programs meanwhile, each in a process of its own that gets this process's id
            as its argument. They speed up the start and are not waited for; whatever they print is lost.
        restarts: How often all ranks are restarted after one has failed. A fault that a user must fix is not
            retried. :attr:`kagome.launch.environment.Ranks.restarts` tells the function the number of
            restarts.

    Returns:
        The value that ``function`` returned on rank 0.

    Raises:
        LaunchError: If a rank failed or died, with the error of the rank that failed first.
        KeyboardInterrupt: After Ctrl-C, when the ranks have ended. Also if only one rank received it, and all
            have ended with 130 because of it.
        SystemExit: After SIGTERM or SIGHUP, with 128 + the signal; also if only one rank received it. After
            SIGQUIT too, which ends at once the ranks that receive it themselves.
    """
    if nproc < 1:
        raise LaunchError("--nproc to be a number from 1 up", f"{nproc}")
    _refuse_too_many(nproc)
    # The environment first: the fork server takes its own when it starts.
    with _shared_cores(nproc), _running(beside):
        method = _begin_loading(loaded)
        for count in range(restarts + 1):
            try:
                return _launched(nproc, function, args, method, count)
            # A user's mistake would come back with every start; a rank that died may have been unlucky.
            except _FailedError as failed:
                if count == restarts or failed.mistake:
                    raise failed.error from None
                text = f"kagome: {failed.error.got}. All ranks are started again ({count + 1} of {restarts})."
                print(text, file=sys.stderr, flush=True)
    raise AssertionError("the last start returns or raises")


class _FailedError(Exception):
    """The error of a failed rank, and whether a user must fix it."""

    def __init__(self, error: LaunchError, *, mistake: bool) -> None:
        super().__init__(str(error))
        self.error, self.mistake = error, mistake


def _refuse_too_many(nproc: int) -> None:
    """Refuse more ranks than this machine has memory for, before any of them is started."""
    free = available_bytes()
    most = None if free is None else max(1, free // RANK_BYTES)
    if most is not None and nproc > most:
        raise LaunchError(
            f"{nproc * RANK_BYTES / 2**30:,.0f} GiB of free memory for {nproc:,} local ranks without data",
            f"{(free or 0) / 2**30:,.1f} GiB",
            hint=f"--nproc {max(1, min(most, len(cores())))}, as many as there are cores",
        )


def _launched(
    nproc: int,
    function: Callable[..., object],
    args: tuple[object, ...],
    method: Literal["forkserver", "spawn"],
    count: int,
) -> object:
    # Notes in the folder, each written by one side and read by the other:
    #    pid-R        rank R has started              known      the guard holds all processes
    #    failed-R     how rank R failed               stopping   the launcher was asked to end
    #    signalled-R  a signal ended rank R           done-R     rank R has its result
    with _room() as name:
        folder, ranks = Path(name), RankProcesses(method)
        guard = _Guard(nproc, folder)
        ended: Ended | None = None
        with _signals(folder), guard:
            try:
                ranks.start(
                    _rank_main,
                    (function, args, name, os.getpid()),
                    [_environment(rank, nproc, folder, count) for rank in range(nproc)],
                )
                while ended is None:
                    ended = ranks.wait(LOOK_SECONDS)
            except _SignalledError as error:
                # Ranks save after SIGTERM, whichever signal came.
                with suppress(_SignalledError):  # a second signal: the guard kills the ranks
                    ranks.close(signal.SIGTERM, SAVE_SECONDS)
                if error.number == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise SystemExit(128 + error.number) from None
            except (OSError, EOFError, MemoryError) as error:
                ranks.close(signal.SIGTERM, SAVE_SECONDS)  # those that have started
                raise _unstarted(nproc, error) from None
        if ended.failed is not None:
            guard.codes = ranks.codes()
            # A batch system may signal one rank only. The others then end because of it, which is no failure.
            if (heard := guard.signalled()) is not None:
                raise KeyboardInterrupt if heard == signal.SIGINT else SystemExit(128 + heard)
            raise guard.failed(ended.failed)
        return ended.result


@contextmanager
def _room() -> Iterator[str]:
    """Create a folder for notes between ranks, which only this user can open, and remove it afterwards."""
    try:
        directory = tempfile.TemporaryDirectory(prefix="kagome-ranks-")
    except OSError as error:
        raise LaunchError(
            "a new folder for ranks to meet by in the folder for temporary files",
            f"none that can be made: {error}",
            hint="TMPDIR=DIR with a folder that can be written",
        ) from None
    with directory as name:
        yield name


def _unstarted(nproc: int, error: BaseException) -> LaunchError:
    """Explain why ranks could not be started."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        got, hint = f"a process that may open no more files ({error.strerror})", "ulimit -n 1024"
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        got, hint = "no memory for them", "fewer ranks, or a larger ulimit -v"
    elif isinstance(error, EOFError):
        got, hint = (
            "the death of the process that they are forked of; is memory short?",
            "ulimit -v; kagome doctor",
        )
    else:
        got, hint = f"a refusal of the system: {error or type(error).__name__}", "kagome doctor"
    return LaunchError(f"{nproc} ranks to start", got, hint=hint)


def _environment(rank: int, nproc: int, folder: Path, count: int) -> dict[str, str]:
    """Return the variables that tell a process its rank, and where ranks meet."""
    own: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
    }
    own |= {STORE: folder / "store", RESTARTS: count}
    # Traffic between local ranks uses the loopback interface.
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # gloo picks an interface by the host's name, which may not resolve in a container.
        if names and variable not in os.environ:
            own[variable] = names[0]
    return {name: str(value) for name, value in own.items()}


def _begin_loading(modules: Sequence[str]) -> Literal["forkserver", "spawn"]:
    """Return the start method for ranks.

    If there are modules to load, start the process to fork ranks from.
    """
    # macOS's system libraries do not survive a fork.
    if not modules or sys.platform != "linux":
        return "spawn"
    # kagome.launch.fork comes first: its hook explains a server that dies while it loads the rest.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["kagome.launch.fork", *modules])
    forkserver.ensure_running()
    return "forkserver"


@contextmanager
def _running(modules: Sequence[str]) -> Iterator[None]:
    """Run modules as programs during the block, and kill those that still run after it."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for module in modules
    ]
    try:
        yield
    finally:
        # They may have work left that only a later start needs.
        for program in programs:
            program.kill()
            program.wait()


def _rank_main(function: Callable[..., object], args: tuple[object, ...], name: str, launcher: int) -> object:
    """Run the function on one rank, and leave a note for the launcher of how it ended."""
    folder, rank = Path(name), int(os.environ["RANK"])
    sys.excepthook = sys.__excepthook__  # from here on errors are reported by a note
    # Ctrl-C in a terminal reaches launcher and ranks at once. Ranks wait for the
    # launcher's SIGTERM, so that each gets one signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(launcher)
    _write(folder / f"pid-{rank}", os.getpid())
    while not (folder / "known").exists():
        if _ended(launcher):
            raise SystemExit(128 + signal.SIGTERM)
        time.sleep(0.01)  # begin together: what all ranks refuse is to be reported as one failure
    try:
        result = function(*args)
    except SystemExit as error:
        # A rank that saved after a signal ends with 128 + the signal.
        if error.code in SIGNALLED:
            _write(folder / f"signalled-{rank}", SIGNALLED[error.code])
        elif error.code not in (None, 0):
            _write(folder / f"failed-{rank}", [3, time.time(), f"it left with {error.code!r}"])
        raise
    except BaseException as error:
        found = in_words(error)
        text = _trace(error) if found is None else str(found)
        # A peer's fault appears here as a CommError, which is reported only if nothing else explains it.
        told = isinstance(found, KagomeError) and found.told_by is not None
        # `blame` takes the smallest note: order 0 is a silent death, 1 an error of the rank itself, 2 an
        # error that a peer's failure caused; then the time.
        order = 2 if isinstance(found, CommError) or told else 1
        mistake = isinstance(found, KagomeError) and not isinstance(found, CommError | ResourceError)
        where = found.where if isinstance(found, KagomeError) else ""
        _write(folder / f"failed-{rank}", [order, time.time(), text, mistake and not told, where])
        # The same mistake on all ranks is reported once, without a rank's number; see `blame`.
        if mistake:
            _wait_for_all(folder)
        raise SystemExit(1) from None
    if (folder / "stopping").exists() or _ended(launcher):
        raise SystemExit(128 + signal.SIGTERM)  # the launcher takes no result any more
    _write(folder / f"done-{rank}", 0)
    return result if rank == 0 else None


def _wait_for_all(folder: Path) -> None:
    """Wait a moment so that other ranks with the same error can note it before the launcher ends them."""
    until = time.monotonic() + ALIKE_SECONDS
    # Their errors come within milliseconds of each other, but the first exit code ends all ranks.
    while time.monotonic() < until and len(list(folder.glob("failed-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


@dataclass
class _Guard:
    """Ends ranks that run on for too long after one has failed, and reports which rank failed first."""

    nproc: int
    folder: Path
    killed: set[int] = field(default_factory=set)
    stopped: dict[int, float] = field(default_factory=dict)
    """Times since when ranks are stopped; infinite once that was reported."""
    codes: dict[int, int | None] = field(default_factory=dict)
    """Exit codes, once all ranks have ended."""

    def __enter__(self) -> _Guard:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kagome-ranks", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._kill()  # after a second Ctrl-C some may still run

    def failed(self, rank: int) -> _FailedError:
        """Return the error of the rank that failed first, and whether a user must fix it."""
        noted = [_read(path) for path in self.folder.glob("failed-*")]
        return _FailedError(
            self.blame(rank, self.codes[rank] or 0), mistake=any(note[3] for note in noted if len(note) > 3)
        )

    def signalled(self) -> int | None:
        """Return the signal that some rank received and all ended for; None if anything else ended a rank."""
        found = [_read(path) for path in self.folder.glob("signalled-*")]
        if not found or any(self.folder.glob("failed-*")):
            return None
        fine = (None, 0, -signal.SIGTERM, *SIGNALLED)  # the launcher ends remaining ranks with SIGTERM
        return min(found) if all(code in fine for code in self.codes.values()) else None

    def blame(self, rank: int, code: int) -> LaunchError:
        """Return the error that says which rank failed first.

        ``rank`` and ``code`` are what the launcher saw.

        An error that all ranks report in the same words is not the failure of a single rank. If an error
        names the rank that it comes from, that rank is blamed, since the others only passed it on.
        """
        notes = {int(path.name[7:]): _read(path) for path in self.folder.glob("failed-*")}
        # (text, mistake) of all notes: a single entry if all ranks failed alike.
        noted, alike = set(notes), {(note[2], *note[3:4]) for note in notes.values()}
        failures = [(*note[:3], who) for who, note in notes.items()]
        exits = {**self.codes, rank: code}
        for who, ended in exits.items():
            # A rank that wrote no note, and that neither the launcher (SIGTERM) nor the guard ended, died by
            # itself.
            silent = ended not in (None, 0, -signal.SIGTERM) and who not in noted | self.killed
            if silent:
                failures.append((0, 0.0, _ending(ended or 0), who))
        if not failures:
            failures = [(0, 0.0, _ending(code), rank)]
        # The first by order, then by time.
        _, _, text, who = min(failures)
        message, _, hint = text.rpartition(ADVICE) if ADVICE in text else (text, "", "")
        told = f"a failure of rank {who}"
        where = notes[who][4] if who in notes and len(notes[who]) > 4 else ""
        # Every rank has a note with the same text, which is a user's mistake.
        if len(notes) == self.nproc > 1 and alike == {(text, True)}:
            told = "the same failure of each"
        elif (named := _OF_RANK.fullmatch(where)) is not None:
            told, rest = f"a failure of rank {named[1]}", f" ({named[2]})" if named[2] else ""
            message = message.replace(f" ({where})", rest)
        got = f"{told}: {message.removesuffix('.')}"  # the error's own text adds the full stop
        return LaunchError(f"{self.nproc} ranks to finish", got, hint=hint)

    def _pids(self) -> dict[int, int]:
        return {int(path.name[4:]): _read(path) for path in self.folder.glob("pid-*")}

    def _run(self) -> None:
        failed_at: float | None = None
        known = False
        # Ranks wait for `known` before they begin, so until then the guard looks often.
        while not self._stop.wait(0.25 if known else 0.02):
            pids = self._pids()
            if len(pids) == self.nproc and not known:
                (self.folder / "known").touch()
                known = True
            # All ranks are ending: they have SAVE_SECONDS, and none of it is a failure.
            if (self.folder / "stopping").exists():
                continue
            self._tell_stopped(pids)
            died = [
                r
                for r, pid in pids.items()
                if not psutil.pid_exists(pid) and not (self.folder / f"done-{r}").exists()
            ]
            if failed_at is None and (died or any(self.folder.glob("failed-*"))):
                failed_at = time.monotonic()
            # Ranks that wait for a dead peer would do so until their own time limit, which is minutes.
            if failed_at is not None and time.monotonic() - failed_at > FAIL_SECONDS:
                self._kill()

    def _tell_stopped(self, pids: Mapping[int, int]) -> None:
        """Report each stopped rank once, because the others wait for it."""
        for rank, pid in pids.items():
            if not _stopped(pid):
                self.stopped.pop(rank, None)
            elif time.monotonic() - self.stopped.setdefault(rank, time.monotonic()) > STOPPED_SECONDS:
                self.stopped[rank] = inf
                text = f"kagome: rank {rank} is stopped, and the others wait for it: kill -CONT {pid}"
                print(text, file=sys.stderr, flush=True)

    def _kill(self) -> None:
        for rank, pid in self._pids().items():
            if psutil.pid_exists(pid):
                self.killed.add(rank)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _trace(error: BaseException) -> str:
    own = error.__traceback__
    lines = traceback.format_exception(type(error), error, own and own.tb_next)  # without our own frame
    return "".join(lines).rstrip()


def _ending(code: int) -> str:
    if code == STARVED:
        return f"there was no memory to start its process{memory_left()}"
    if code == LOST:
        return f"its process, or the one that it was forked of, died; is memory short{memory_left()}?"
    if code >= 0:
        return f"its process ended with code {code}; if it said why, then in the output above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = "; the system does that when memory is short" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{cause}"


def _stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except (OSError, psutil.Error):
        return False


def _write(path: Path, content: object) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(content))
    beside.replace(path)  # atomic, because the launcher may read at any moment


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _die_with(launcher: int) -> None:
    """Have this process receive SIGTERM if the launcher is killed.

    The parent of a forked rank is the process it was forked from, which lives as long as its ranks do.
    """
    if sys.platform != "linux":
        return
    if os.getppid() == launcher:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        return

    def watch() -> None:
        _ended(launcher, wait=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="kagome-launcher", daemon=True).start()


def _ended(pid: int, *, wait: bool = False) -> bool:
    """Return whether a process has ended, even if its parent has not collected its exit code."""
    if sys.platform != "linux":
        return not psutil.pid_exists(pid)
    try:
        # A zombie still has its pid, and a pid may be used again. A
        # pidfd becomes readable when the process ends.
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], None if wait else 0.0)[0])
    finally:
        os.close(handle)


class _SignalledError(Exception):
    """A signal that ends the launcher has arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the launcher got signal {number}")
        self.number = number


@contextmanager
def _signals(folder: Path) -> Iterator[None]:
    """Turn the signals that end a process into an exception; restore the handlers afterwards."""

    def stop(number: int, frame: FrameType | None) -> None:
        # The guard sees by the note that ranks which end now have not failed.
        (folder / "stopping").touch()
        raise _SignalledError(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, so the caller's stay
        return
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _shared_cores(nproc: int) -> Iterator[None]:
    """Give each rank its share of the cores. By default torch and numba would each use all of them.

    Processes started inside the block do not look for modules in the current folder first.
    """
    before = dict(os.environ)
    # A numba.py or torch.py in the current folder must not be imported in place of the package.
    os.environ["PYTHONSAFEPATH"] = "1"
    given = chosen(os.environ)
    share = str(local(nproc) if given is None else given)
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        # What the user set stays.
        os.environ.setdefault(name, share)
    os.environ[LAUNCHED] = SHARED if given is None else "1"
    os.environ.update(merging())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
