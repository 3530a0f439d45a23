"""Warm: runs scripts in processes that are forked of one that has imported torch, PyG and Kagome.

Where it sits: in place of ``subprocess.run([sys.executable, script, ...])`` and of torchrun where neither is
what a test is about: the imports take seconds of each process's life, the rest of it often less than one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = ["kagome.train.trainer", "kagome.model.zoo", "torch_geometric.nn", "preloaded"]


def context() -> ForkServerContext:
    """The way to start processes of which the imports are done."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    # The server does not take over sys.path, and says nothing of a module that it does not find.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return found


def run(
    script: Path | str, *args: object, cwd: Path | str, timeout: float = 120, ranks: int = 1, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end.

    Args:
        script: A Python file.
        args: Its arguments.
        cwd: Where it runs.
        timeout: Seconds.
        ranks: Processes, told which rank they are as torchrun tells them.
        env: On top of this process's environment.

    Returns:
        The first exit code that is not 0, and what all processes wrote, by rank.
    """
    words, jobs = [str(Path(script).resolve()), *map(str, args)], []
    given = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    with tempfile.TemporaryDirectory() as name:
        for rank, one in enumerate(_environments(given, ranks)):
            files = [Path(name, f"{what}-{rank}") for what in ("out", "err")]
            job = context().Process(target=_run, args=(words, str(cwd), one, list(map(str, files))))
            job.start()
            jobs.append((job, files))
        deadline = time.monotonic() + timeout
        for job, _ in jobs:
            job.join(max(0.0, deadline - time.monotonic()))
        late = [job for job, _ in jobs if job.is_alive()]
        for job in late:
            job.kill()
            job.join()
        out, err = ("".join(files[place].read_text() for _, files in jobs) for place in (0, 1))
        assert not late, f"{' '.join(words)} took more than {timeout:g} s\n{out}{err}"
        codes = [job.exitcode for job, _ in jobs]
    return subprocess.CompletedProcess(words, next((code for code in codes if code), 0) or 0, out, err)


def _environments(env: Mapping[str, str], ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [dict(env)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    return [
        {**env, **world, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(ranks)
    ]


def _run(words: Sequence[str], cwd: str, env: Mapping[str, str], files: Sequence[str]) -> None:
    for place, name in zip((1, 2), files, strict=True):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), place)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    import torch

    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv, code = list(words), 0
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
