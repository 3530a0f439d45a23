"""The Triton kernels in Triton's interpreter on a CPU: the same checks as the loops.

Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs the checks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import numpy  # the interpreter's numbers
from hypothesis import HealthCheck, given, settings
from kernel_cases import CHECKS, cases
from kagome.kernels.triton import ops as gpu
for check in CHECKS:
    @settings(deadline=None, max_examples=8, database=None, suppress_health_check=list(HealthCheck))
    @given(cases(most=25))
    def run(case):
        check(gpu, case)
    run()
    print(check.__name__, flush=True)
"""


def test_the_triton_kernels_give_what_autograd_gives():
    pytest.importorskip("triton", reason="Triton is not installed; torch's CUDA builds bring it")
    place = str(Path(__file__).parent)
    path = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = "sums sums_turned extremes softmaxes leaky moves columns"
    assert done.stdout.split() == wanted.split()


COMPILE = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kagome.kernels.triton import heads as gpu_heads, rows as gpu_rows
LONG, SHORT = {"begin", "end"}, {"index", "edge", "column"}
SIZES = {"offset", "columns", "heads", "width", "rows", "share"}
KNOWN = {"BLOCK": 128, "HEADS": 8, "WIDTH": 16, "SLOPE": 0.2, "SIGN": -1.0, "TINY": 1e-16}
for module in (gpu_rows, gpu_heads):
    for name, kernel in vars(module).items():
        if not name.endswith("_kernel"):
            continue
        for kind in ("fp32", "fp64", "bf16", "fp16"):
            for on in (True, False):
                wide = "fp64" if kind == "fp64" else "fp32"
                types, known = {}, {}
                for p in kernel.params:
                    n = p.name
                    if n.isupper():
                        known[n] = getattr(tl, "float" + wide[2:]) if n == "WIDE" else KNOWN.get(n, on)
                    elif n in SIZES and not on:
                        known[n] = 1  # what Triton makes of a size of 1
                    types[n] = (
                        "constexpr" if n in known else "*i64" if n in LONG else "*i32" if n in SHORT
                        else "i32" if n in SIZES else "*" + (wide if n == "tally" else kind)
                    )
                made = compile(ASTSource(kernel, types, constexprs=known), target=GPUTarget("cuda", 90, 32))
                assert made.asm["ptx"]
        print(name, flush=True)
"""


def test_the_triton_kernels_compile_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton", reason="Triton is not installed; torch's CUDA builds bring it")
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.split()) == 10
