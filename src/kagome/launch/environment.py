"""Rank environment: which rank this process is, read from the variables that torchrun or Slurm set.

Where it sits: ``comm.mesh`` asks it; ``launcher`` sets the variables for the processes that it starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kagome.errors import LaunchError

STORE = "KAGOME_STORE"
"""Variable with the name of the file through which local ranks meet."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Variable with the number of times all ranks were restarted; torchrun's own."""
PORTS = 65_535
"""The highest port number."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the address at which the ranks meet.

    Args:
        rank: This process among all processes.
        size: Number of all processes.
        local_rank: This process among those of its host.
        local_size: Number of processes on its host.
        host: Host at which the ranks meet; empty for a single process.
        port: Port at which the ranks meet.
        source: The program that started the ranks.
        store: File through which the ranks meet, instead of host and port; empty if there is none.
        restarts: Number of times all ranks were restarted after one had failed.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    port: int = 0
    source: Literal["single", "kagome", "torchrun", "slurm"] = "single"
    store: str = ""
    restarts: int = 0


def environment(env: Mapping[str, str] | None = None) -> Ranks:
    """Return the rank that torchrun (or anything that sets RANK and WORLD_SIZE) or Slurm gave this process.

    Args:
        env: The environment to read; this process's own by default.

    Returns:
        The ranks; a single one if neither is found, as in a batch script of Slurm without ``srun``.

    Raises:
        LaunchError: If a variable is missing or is not a number.
    """
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        size, store = _number(env, "WORLD_SIZE"), env.get(STORE, "")
        # A single rank meets nobody.
        if size > 1 and not store and not env.get("MASTER_ADDR"):
            raise LaunchError("MASTER_ADDR and MASTER_PORT beside RANK and WORLD_SIZE", "no MASTER_ADDR")
        return _checked(
            Ranks(
                rank=_number(env, "RANK"),
                size=size,
                local_rank=_number(env, "LOCAL_RANK", 0),
                local_size=_number(env, "LOCAL_WORLD_SIZE", size),
                host=env.get("MASTER_ADDR", "127.0.0.1"),
                port=_number(env, "MASTER_PORT", 29500),
                source="kagome" if store else "torchrun",
                store=store,
                restarts=_number(env, RESTARTS, 0),
            )
        )
    # srun sets the numbers of the step in each process that it starts. A batch script, which runs once for
    # all tasks, has rank and number of tasks too, but no step.
    step = any(name in env for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    if step and "SLURM_PROCID" in env and ("SLURM_STEP_NUM_TASKS" in env or "SLURM_NTASKS" in env):
        return _checked(_slurm(env))
    return Ranks()


def _slurm(env: Mapping[str, str]) -> Ranks:
    # Prefer the numbers of the step: one allocation may run several steps.
    size = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    job = _number(env, "SLURM_JOB_ID", 0)
    return Ranks(
        rank=_number(env, "SLURM_PROCID"),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        local_size=_tasks_on_node(tasks, _number(env, "SLURM_NODEID", 0)),
        host=env.get("MASTER_ADDR") or first_host(nodes),
        # Every host computes the same port by itself; it lies above the well-known ports.
        port=_number(env, "MASTER_PORT", 20000 + job % 20000),
        source="slurm",
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[007-009,12],login`` gives ``gpu007``."""
    # prefix, numbers in brackets, suffix: the first host is prefix + first
    # number + suffix, with the zeros before it.
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes.strip())
    assert match is not None  # every part may be empty
    before, numbers, after = match.groups()
    first = re.split(r"[,-]", numbers)[0] if numbers else ""
    return f"{before}{first}{after}"


def _tasks_on_node(tasks: str, node: int) -> int:
    """Return the number of tasks on one node from Slurm's ``4(x2),3``."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise LaunchError("SLURM_TASKS_PER_NODE in the form 4(x2),3", f"{tasks!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(f"{name} to be a number", f"{text!r}", where="environment") from None


def _checked(ranks: Ranks) -> Ranks:
    if not 0 <= ranks.port <= PORTS:
        raise LaunchError(
            f"MASTER_PORT to be a port from 0 to {PORTS}", f"{ranks.port}", where=f"set by {ranks.source}"
        )
    if ranks.size < 1:
        raise LaunchError(
            "the number of ranks to be 1 or more", f"{ranks.size}", where=f"set by {ranks.source}"
        )
    if not 0 <= ranks.rank < ranks.size:
        raise LaunchError(
            f"a rank from 0 to {ranks.size - 1}",
            f"{ranks.rank}",
            where=f"set by {ranks.source}",
        )
    return ranks
