"""Doctor: reports what this machine offers, and whether two ranks can communicate on it.

Where it sits: ``kagome doctor`` calls :func:`examine`, which prints the findings.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import psutil

from kagome.errors import KagomeError
from kagome.kernels.base.kept_code import LOOPS, SECONDS, missing
from kagome.launch.environment import environment
from kagome.launch.launcher import start_local
from kagome.launch.threads import chosen, cores, local, quota

NEEDED = (
    *("torch", "torch-geometric", "numpy", "scipy", "numba", "pymetis", "tyro", "rich", "jinja2"),
    *("markupsafe", "psutil", "safetensors", "scikit-learn"),
)
"""The dependencies that ``pyproject.toml`` declares."""
OPTIONAL = {
    "pandas": "some PyG data sets",
    "tensorboard": "--report.tensorboard",
    "ogb": "--data.name ogb:...",
}


def examine() -> int:
    """Examine the machine, and print one line for each finding.

    Returns:
        0 if Kagome can train here, else 1.
    """
    import torch

    bad = 0
    _line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in NEEDED:
        found = _version(name)
        bad += found is None
        _line(name, found or "MISSING: pip install " + name)
    for name, use in OPTIONAL.items():
        _line(name, _version(name) or f"not there (only for {use})")
    limit, _ = quota()
    _line("cores", f"{len(cores())}" + ("" if limit is None else f", time for {limit:.3g} of them"))
    asked = chosen(os.environ)
    # What the launcher would give each rank.
    share = ", ".join(f"{local(n)} with {n}" for n in (1, 2, 4))
    _line("threads a rank", f"{share} ranks here" if asked is None else f"{asked}, by OMP_NUM_THREADS")
    memory = psutil.virtual_memory()
    _line("memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _line(
        "CUDA devices",
        ", ".join(torch.cuda.get_device_name(i) for i in range(count)) or "none: ranks run on the CPU",
    )
    _line("first start", _first_start())
    _line("started by", environment().source)
    _line("KAGOME_DATA", os.environ.get("KAGOME_DATA", "not set: data sets are looked up under --data.root"))
    # Under torchrun or Slurm this process is itself a rank, and two more would inherit its environment.
    if environment().source == "single":
        try:
            # Ranks 0 and 1: the sum is 1.
            total = start_local(2, talk)
            fine = total == 1.0
            _line("two local ranks", "exchange rows and sums" if fine else f"got {total} instead of 1.0")
            bad += not fine
        except KagomeError as error:
            bad += 1
            _line("two local ranks", f"FAIL: {error}")
    return 1 if bad else 0


def talk() -> float:
    """Run on each of two ranks: contribute the rank's number to an all-reduce, and return the sum."""
    import torch

    from kagome.comm.mesh import open_mesh

    with open_mesh(timeout=60.0) as mesh:
        mine = torch.tensor([float(mesh.rank)], device=mesh.device)
        return float(mesh.graph.all_reduce(mine, action="doctor", kind="other"))


def _first_start() -> str:
    """Describe what the next start of a training has to compile."""
    lacking, count = missing(), sum(map(len, LOOPS.values()))
    if not lacking:
        return f"the machine code of all {count} loops of a first epoch is on disk"
    # "file: name"; most loops take about the same.
    seconds = sum(SECONDS.get(each.partition(": ")[2], SECONDS[""]) for each in lacking)
    return (
        f"{len(lacking)} of {count} loops of a first epoch are not compiled yet: about {seconds:.0f} s of a "
        "core, most of it beside other work"
    )


def _line(name: str, text: str) -> None:
    print(f"{name:<18} {text}", flush=True)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        # A package without metadata, such as one on PYTHONPATH. Its version is unknown.
        return "there" if importlib.util.find_spec(name.replace("-", "_")) else None
