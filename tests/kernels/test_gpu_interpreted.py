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
import sys
import numpy  # the interpreter's numbers
import torch
from hypothesis import HealthCheck, given, settings
from kernel_cases import CHECKS, cases
from kagome.kernels.triton import dropout, ops as gpu, segments
from kagome.model.exact.dropout import plain_scaled
segments.SPLIT = int(sys.argv[1])  # a row of more entries than that is a hub

def shared(gpu, case):
    s, (h, c) = case.structure, (case.heads, case.width)
    x, w, own = case.draw(s.edges, 1, c), case.draw(s.edges, h), case.draw(s.own, h, c)
    each = x.expand(-1, h, c).contiguous()
    layout = s.by_target.by_edge
    case.same(gpu.sum_rows(layout, x, w), gpu.sum_rows(layout, each, w).double())
    case.same(gpu.dot_edges(layout, own, x), gpu.dot_edges(layout, own, each).double())

for check in (*CHECKS, shared):
    @settings(deadline=None, max_examples=6, database=None, suppress_health_check=list(HealthCheck))
    @given(cases(most=25))
    def run(case):
        check(gpu, case)
    run()
    print(check.__name__, flush=True)

ids = torch.randint(-2**62, 2**62, (37,))
for dtype in (torch.float32, torch.float64, torch.float16):
    x = torch.randn(37, 70).to(dtype)
    for key, first in ((5, 0), (-7123456789012345, 3)):
        found = dropout.drop(x, ids, key, round(0.7 * 2**32), 1 / 0.7, first)
        assert torch.equal(found, plain_scaled(x, ids, key, 0.3, first))
print("dropout")

from kagome.kernels.base.csr import Structure
few = Structure(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), 2, 3)
z, m = torch.randn(2, 3, 4).half()
out, top, total = gpu.column_softmax(few.by_target, z, m)
assert out.dtype == top.dtype == torch.float16 and total.dtype == torch.float32
total = total + 70_000  # of a hub: beyond float16
for found in gpu.column_softmax_back(few.by_source, z, m, out, top, total, torch.ones_like(out)):
    assert found.dtype == torch.float16 and bool((found != 0).any())
print("totals")
"""


@pytest.mark.parametrize("split", [3, 1024])
def test_the_triton_kernels_give_what_autograd_gives(split):
    pytest.importorskip("triton", reason="Triton is not installed; torch's CUDA builds bring it")
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(split)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = "sums sums_turned extremes softmaxes leaky moves columns shared dropout totals"
    assert done.stdout.split() == wanted.split()


COMPILE = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kagome.kernels.triton import dropout, heads, rows, sums
LONG = {"begin", "end", "slot", "hubs", "rows", "middle", "ids"}
SHORT = {"index", "edge", "column"}
SIZES = {"offset", "columns", "heads", "width", "segments", "programs", "blocks", "entries", "first"}
SIZES |= {"row_stride", "head_stride", "key", "limit"}
KNOWN = {"BLOCK": 128, "HEADS": 8, "WIDTH": 16, "EDGES": 8, "PARTS": 8, "ROWS": 8}
KNOWN |= {"SLOPE": 0.2, "SIGN": -1.0, "TINY": 1e-16, "SCALE": 2.0}
for module in (rows, heads, sums, dropout):
    for name, kernel in vars(module).items():
        if not name.endswith("_kernel"):
            continue
        for kind in ("fp32", "fp64", "bf16", "fp16"):
            for on in (True, False):
                wide = "fp64" if kind == "fp64" else "fp32"
                types, known = {}, {}
                for p in kernel.params:
                    n = p.name
                    size = n in SIZES or (n == "rows" and name == "drop_kernel")
                    if n.isupper():
                        known[n] = getattr(tl, "float" + wide[2:]) if n == "WIDE" else KNOWN.get(n, on)
                        known[n] = False if n == "HALO" and known.get("OWN") else known[n]
                    elif size and not on and n not in ("key", "limit"):
                        known[n] = 1  # what Triton makes of a size of 1
                    row = "*i32" if name == "dot_kernel" else "*i64"
                    types[n] = (
                        "constexpr" if n in known else ("i64" if n in ("key", "limit") else "i32") if size
                        else row if n == "row" else "*i64" if n in LONG else "*i32" if n in SHORT
                        else "*" + (wide if n in ("tally", "scratch") else kind)
                    )
                made = compile(ASTSource(kernel, types, constexprs=known), target=GPUTarget("cuda", 90, 32))
                assert made.asm["ptx"]
        print(name, flush=True)
"""


def test_the_triton_kernels_compile_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton", reason="Triton is not installed; torch's CUDA builds bring it")
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.split()) == 12
