"""N local ranks under torch's own elastic agent, watched so that none outlives another's death for long.

Where it sits: ``cli`` starts local ranks here; ``ranks`` tells each of them which one it is.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

from kagome.errors import ADVICE, CommError, KagomeError, LaunchError
from kagome.ranks import Ranks, environment
from kagome.threads import LAUNCHED, chosen, local

__all__ = ["Ranks", "environment", "start_local"]

SAVE_SECONDS = 30
"""What ranks get to save a checkpoint after Ctrl-C or SIGTERM."""
FAIL_SECONDS = 8.0
"""What the other ranks get once one has died: it cannot be waited for, so there is little to do."""


def start_local(
    nproc: int, function: Callable[..., object], *args: object, loaded: Sequence[str] = ()
) -> object:
    """Run a function on N ranks of this host and give back what rank 0 returns.

    Ctrl-C, SIGTERM and SIGHUP reach every rank as one SIGTERM (a terminal's Ctrl-C, which reaches the ranks
    too, is ignored there); they get 30 s to save, then are killed. Ranks share the host's cores, and a
    cgroup's quota, unless OMP_NUM_THREADS or NUMBA_NUM_THREADS is set.

    Args:
        nproc: Ranks to start.
        function: A function that can be imported by its module's name; its rank is in the environment.
        args: Its arguments, which must pickle.
        loaded: Modules that are imported once, by a process of which the ranks are then forked: torch and
            PyG take seconds to load, on as many cores as there are ranks. For a process that starts ranks
            once, as what the modules made of the environment stays.

    Returns:
        What ``function`` returned on rank 0.

    Raises:
        LaunchError: If a rank failed or died: with the error of the rank that failed first.
        KeyboardInterrupt: After Ctrl-C, when the ranks have ended.
        SystemExit: After SIGTERM or SIGHUP, with 128 + the signal.
    """
    if nproc < 1:
        raise LaunchError("--nproc takes a number from 1 up", f"it is {nproc}")
    with _shared_cores(nproc):
        method = _begin_loading(loaded)  # goes on while this process loads torch too
        return _launched(nproc, function, args, method)


def _launched(nproc: int, function: Callable[..., object], args: tuple[object, ...], method: str) -> object:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="kagome-ranks-") as name:
        folder = Path(name)
        guard = _Guard(nproc, folder)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method=method,
            signals_to_handle="SIGQUIT",  # not ours: it would replace our handlers
            shutdown_timeout=SAVE_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
        )
        with _quiet_agent(), _signals(folder) as caught, guard:
            try:
                results = elastic_launch(config, _rank_main)(function, args, name, os.getpid())
            except ChildFailedError as error:
                rank, failure = min(error.failures.items())
                raise guard.blame(rank, failure.exitcode) from None
            except SignalException as error:
                number = caught[0] if caught else int(error.sigval)
                if number == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise SystemExit(128 + number) from None
        return results[0]


def _begin_loading(modules: Sequence[str]) -> str:
    """Start the process that ranks are forked of, if there is something to load; how ranks are to start."""
    if not modules or sys.platform != "linux":
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    forkserver.ensure_running()
    return "forkserver"


def _rank_main(function: Callable[..., object], args: tuple[object, ...], name: str, launcher: int) -> object:
    """What each rank runs: the function, and a note of how it ended for the launcher."""
    folder, rank = Path(name), int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(launcher)
    _write(folder / f"pid-{rank}", os.getpid())
    while not (folder / "known").exists() and not _ended(launcher):
        time.sleep(0.01)  # one that died before would leave no exit code: a peer would be blamed
    try:
        result = function(*args)
    except SystemExit as error:
        if error.code not in (None, 0):
            _write(folder / f"failed-{rank}", [3, time.time(), f"it left with {error.code!r}"])
        raise
    except BaseException as error:
        # A peer's fault shows here as a CommError: it is told only if nothing else explains it.
        text = str(error) if isinstance(error, KagomeError) else _trace(error)
        _write(folder / f"failed-{rank}", [2 if isinstance(error, CommError) else 1, time.time(), text])
        raise SystemExit(1) from None
    if (folder / "stopping").exists() or _ended(launcher):
        raise SystemExit(128 + signal.SIGTERM)  # no agent takes a result any more: end now, not when killed
    _write(folder / f"done-{rank}", 0)
    return result if rank == 0 else None


@dataclass
class _Guard:
    """Ends what outlives a failed rank for too long, and says who failed first."""

    nproc: int
    folder: Path
    killed: set[int] = field(default_factory=set)
    codes: dict[int, Callable[[], int | None]] = field(default_factory=dict)

    def __enter__(self) -> _Guard:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kagome-ranks", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._kill()  # after a second Ctrl-C the agent leaves them

    def blame(self, rank: int, code: int) -> LaunchError:
        """The error that says which rank failed first; ``rank`` and ``code`` are what the agent saw."""
        failures = [(*_read(path), int(path.name[7:])) for path in self.folder.glob("failed-*")]
        noted = {failure[3] for failure in failures}
        exits = {who: code_of() for who, code_of in self.codes.items()} | {rank: code}
        for who, ended in exits.items():
            silent = ended not in (None, 0, -signal.SIGTERM) and who not in noted | self.killed
            if silent:
                failures.append((0, 0.0, _ending(ended or 0), who))
        if not failures:
            failures = [(0, 0.0, _ending(code), rank)]
        _, _, text, who = min(failures)
        said, _, hint = text.rpartition(ADVICE) if ADVICE in text else (text, "", "")
        found = (
            f"rank {who} failed: {said.removesuffix('.')}"  # its full stop comes with the text of the whole
        )
        return LaunchError(f"{self.nproc} ranks were to finish", found, hint=hint)

    def _pids(self) -> dict[int, int]:
        return {int(path.name[4:]): _read(path) for path in self.folder.glob("pid-*")}

    def _run(self) -> None:
        failed_at: float | None = None
        known = False
        while not self._stop.wait(0.25 if known else 0.02):
            pids = self._pids()
            if len(pids) == self.nproc and not known:
                self._remember(pids)
                (self.folder / "known").touch()
                known = True
            if (self.folder / "stopping").exists():
                continue
            died = [
                r for r, pid in pids.items() if not _alive(pid) and not (self.folder / f"done-{r}").exists()
            ]
            if failed_at is None and (died or any(self.folder.glob("failed-*"))):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > FAIL_SECONDS:
                self._kill()

    def _remember(self, pids: dict[int, int]) -> None:
        # Only once and while all live: it collects exit codes, which is the agent's business later.
        children = {child.pid: child for child in multiprocessing.active_children()}
        self.codes = {rank: _code(children[pid]) for rank, pid in pids.items() if pid in children}

    def _kill(self) -> None:
        for rank, pid in self._pids().items():
            if _alive(pid):
                self.killed.add(rank)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _trace(error: BaseException) -> str:
    own = error.__traceback__
    lines = traceback.format_exception(type(error), error, own and own.tb_next)  # without the frame of ours
    return "".join(lines).rstrip()


def _code(child: object) -> Callable[[], int | None]:
    return lambda: getattr(child, "exitcode", None)


def _ending(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}; if it said why, then in the output above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = "; the system does that when memory is short" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{cause}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _write(path: Path, content: object) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(content))
    beside.replace(path)  # whole or not at all: the launcher may read at any moment


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _die_with(launcher: int) -> None:
    """See to a SIGTERM when the launcher is killed; torch asked for SIGINT, which is ignored here.

    The parent of a forked rank is the process that it was forked of, which lives as long as its ranks.
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
    """Whether a process has ended, though its parent may not have asked how."""
    if sys.platform != "linux":
        return not _alive(pid)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], None if wait else 0.0)[0])
    finally:
        os.close(handle)


@contextmanager
def _signals(folder: Path) -> Iterator[list[int]]:
    """Turn Ctrl-C, SIGHUP and SIGTERM into one SIGTERM for the ranks; restore the handlers afterwards."""
    from torch.distributed.elastic.multiprocessing import SignalException

    caught: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        (folder / "stopping").touch()
        raise SignalException(f"the launcher got signal {number}", sigval=signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers; the caller's hold
        return
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    quit_before = signal.getsignal(signal.SIGQUIT)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        signal.signal(signal.SIGQUIT, quit_before)


@contextmanager
def _shared_cores(nproc: int) -> Iterator[None]:
    """Give each rank its share of the cores; torch and numba would each take them all."""
    before = dict(os.environ)
    given = chosen(os.environ)
    share = str(local(nproc) if given is None else given)
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, share)
    os.environ[LAUNCHED] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent: it would print a rank's traceback that the LaunchError tells better."""
    names = [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))
    ]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, state in zip(loggers, before, strict=True):
            logger.disabled = state
