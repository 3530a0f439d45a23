"""Operating system errors: refusals of the system in plain words, and processes that end with their parent.

Where it sits: ``cli.app``, ``launcher`` and the process that partitions a graph ask it about unexpected
errors.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Final

from kagome.errors import KagomeError, ResourceError, shortened
from kagome.launch.host_memory import available_bytes

NO_MEMORY: Final = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "std::bad_alloc",
    "could not create a primitive",
    "could not create a memory",
    "failed to map segment",
    "unable to mmap",
    "can't start new thread",
    "resource temporarily unavailable",
)
"""Messages of libraries when memory runs out, including those of oneDNN and of threads."""
DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STARVED: Final = 76
"""Exit code of a process that ran out of memory before it could report it."""
FILES: Final = (errno.EMFILE, errno.ENFILE)
PATHS: Final = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EISDIR,
    errno.ELOOP,
)


def refused(error: BaseException) -> ResourceError | None:
    """Return an error that names the refused resource, if an error or one of its causes is about a resource.

    Args:
        error: The error, of any class.

    Returns:
        A readable error; None for any other fault.
    """
    for each in _led_to(error):
        number = each.errno if isinstance(each, OSError) else None
        # The first error of the chain that is about a resource counts: libraries wrap system errors.
        if number in DISK:
            return _disk(each, number)
        if number in FILES or "too many open files" in str(each).lower():
            return ResourceError(
                "files and connections to be opened",
                f"a limit of {_limit(resource.RLIMIT_NOFILE)} open at once in this process",
                hint="ulimit -n 1024 before the command",
            )
        if _lacks_memory(each):
            return _memory(each)
    return None


def in_words(error: BaseException) -> KagomeError | None:
    """Return an error as users are shown it; None for an unexpected one.

    Memory that ran out inside a user's model, loss or metric is reported as such, not as a fault of that
    code.
    """
    if not isinstance(error, KagomeError):
        return refused(error) or _path(error)
    # Kagome's own error may only be the last in a chain that began with a lack of memory.
    cause = error.__cause__
    while cause is not None and not _lacks_memory(cause):
        cause = cause.__cause__
    return error if cause is None or isinstance(error, ResourceError) else _memory(cause)


def end_with(parent: int, how: int = signal.SIGKILL) -> None:
    """Have the system end this process when the one that started it ends, however that happens.

    Args:
        parent: The process that started this one. If it has ended already, this process ends now.
        how: The signal to end with.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, how)
        # The parent may have ended between the start of this process and prctl; no signal would come then.
        if os.getppid() != parent:
            os.kill(os.getpid(), how)


def _led_to(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the errors that it was raised from."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        # `seen` guards against a chain that leads back to itself.
        found = found.__cause__ or found.__context__


def _lacks_memory(error: BaseException) -> bool:
    number = error.errno if isinstance(error, OSError) else None
    # EAGAIN is the system's answer if it cannot start another thread or process.
    return number in (errno.ENOMEM, errno.EAGAIN) or isinstance(error, MemoryError) or _says_memory(error)


def _says_memory(error: BaseException) -> bool:
    # torch.OutOfMemoryError is a RuntimeError; a failed import of a library is an ImportError.
    text = str(error).lower()
    kinds = (RuntimeError, ImportError, OSError)
    return isinstance(error, kinds) and any(words in text for words in NO_MEMORY)


def _memory(error: BaseException) -> ResourceError:
    message = str(error).strip().splitlines()
    first = f": {shortened(message[0], 200)}" if message else ""
    return ResourceError(
        "memory from the system",
        f"no more{first}{memory_left()}",
        hint="more ranks (--nproc), --model.recompute or a smaller --model.hidden; kagome plan foretells it",
    )


def memory_left() -> str:
    """Describe the memory left to this process, as the end of a sentence."""
    limit, free = _limit(resource.RLIMIT_AS), available_bytes()
    amount = "" if free is None else f", {free / 2**30:.1f} GiB are free"
    return amount + ("" if limit == "any number" else f", ulimit -v is {int(limit) / 2**30:.1f} GiB")


def _disk(error: BaseException, number: int | None) -> ResourceError:
    name = getattr(error, "filename", None)
    got = os.strerror(number or errno.ENOSPC)
    if number == errno.EFBIG:
        got += f", the limit is {_limit(resource.RLIMIT_FSIZE)} bytes (ulimit -f)"
    return ResourceError(
        "a file to be written", got, where=str(name or ""), hint="free some disk, or another --out"
    )


def _path(error: BaseException) -> ResourceError | None:
    """Return a readable error for a path that the system does not open; None for other errors."""
    # Errors without a file name are not about a path of the user's.
    if not isinstance(error, OSError) or error.errno not in PATHS or error.filename is None:
        return None
    return ResourceError(
        "a file or folder to be read or written",
        f"{error.strerror}: {shortened(str(error.filename2 or error.filename), 200)}",
        hint="another path",
    )


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "any number" if soft == resource.RLIM_INFINITY else str(soft)
