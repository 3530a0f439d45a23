"""What the machine has: versions, the device, and the driver. The first thing to know where a step fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib import import_module
from shutil import which

from main import Row, Visit

NEEDED = (
    "torch",
    "torch_geometric",
    "numpy",
    "scipy",
    "numba",
    "pymetis",
    "tyro",
    "rich",
    "jinja2",
    "psutil",
)
HELPFUL = ("triton", "hypothesis", "cupy", "dgl")


def machine(visit: Visit) -> Iterator[Row]:
    """Import what Kagome needs, and describe the device.

    Raises:
        ImportError: If a package is missing that Kagome needs: nothing after this would run.
    """
    missing = []
    for name in (*NEEDED, *HELPFUL):
        try:
            yield {"name": name, "version": getattr(import_module(name), "__version__", "there")}
        except (
            Exception
        ) as error:  # numba raises ImportError or SystemError for a numpy that it does not know
            if name in NEEDED:
                missing.append(name)
            yield {"name": name, "ok": name not in NEEDED, "why": f"{type(error).__name__}: {error}"}
    if missing:
        raise ImportError(f"expected {', '.join(NEEDED)}; got no {', '.join(missing)}")
    import torch

    yield {"name": "host", "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    if not torch.cuda.is_available():
        yield {"name": "device", "of": "none: no GPU that torch can use"}
        return
    free, total = torch.cuda.mem_get_info()
    yield {
        "name": "device",
        "of": torch.cuda.get_device_name(0),
        "count": torch.cuda.device_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "cuda": str(torch.version.cuda),
        "free_gib": free / 2**30,
        "total_gib": total / 2**30,
    }
    if which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
        yield {"name": "driver", "of": subprocess.run(query, capture_output=True, text=True).stdout.strip()}
