"""Gives every Python process fake GPUs, as many as FAKE_GPUS says: this folder is on PYTHONPATH.

    FAKE_GPUS=4 PYTHONPATH=tests/device/fake_gpu/site:src kagome train --nproc 4

Python imports a module of this name when it starts. Processes that such a one starts inherit both variables.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("FAKE_GPUS"):
    sys.path.append(str(Path(__file__).parents[2]))
    from fake_gpu import cuda, nccl

    nccl.start(cuda.start(int(os.environ["FAKE_GPUS"])))
