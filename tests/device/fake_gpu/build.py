"""Compile the fake device with g++, once for each source and build of torch; it takes about a minute."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
BUILT = Path(__file__).parents[3] / "build" / "fake_gpu"
OPTIONS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w")


class CannotBuildError(Exception):
    """The machine, or this build of torch, cannot have a fake device; the text says why."""


def compiler() -> str:
    """The C++ compiler.

    Raises:
        CannotBuildError: If there is none, or torch has a CUDA of its own.
    """
    if platform.system() != "Linux":
        raise CannotBuildError(f"the fake device is built on Linux only, not on {platform.system()}")
    if torch.version.cuda or torch.version.hip:
        raise CannotBuildError("this build of torch has its own cuda devices")
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise CannotBuildError("no g++: the fake device is compiled from C++")
    return found


def build() -> Path:
    """Return the shared library, compiled if it is not there yet. Several processes may call this at once.

    Raises:
        CannotBuildError: If there is no compiler.
        subprocess.CalledProcessError: If it does not compile.
    """
    cxx, text = compiler(), SOURCE.read_bytes()
    key = hashlib.sha256(text + "\n".join([torch.__version__, cxx, *OPTIONS]).encode()).hexdigest()[:16]
    path = BUILT / f"device-{key}.so"
    if not path.is_file():
        BUILT.mkdir(parents=True, exist_ok=True)
        with _alone(BUILT / "lock"):
            if not path.is_file():  # another process may have built it in the meantime
                _compile(cxx, path)
    return path


def _compile(cxx: str, path: Path) -> None:
    root = Path(torch.__file__).parent
    unfinished = path.with_suffix(".unfinished")
    command = [
        cxx,
        *OPTIONS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{root / 'include'}",
        str(SOURCE),
        "-o",
        str(unfinished),
        f"-L{root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{root / 'lib'}",
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    unfinished.rename(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock of all processes on this machine."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(build())
