"""The few-bit codec's Triton kernels in Triton's interpreter on a CPU: the bits of plain PyTorch.

Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs the checks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = """
import numpy  # the interpreter's numbers
from hypothesis import HealthCheck, given, settings
import torch
from bit_cases import assert_same, cases, code
from kagome.kernels.quantize import triton as gpu_bits
from kagome.kernels.quantize.ops import ReferenceCodec as Plain
@settings(deadline=None, max_examples=60, database=None, suppress_health_check=list(HealthCheck))
@given(cases(most=20))
def run(case):
    x, index, row_ids, key, few = case
    assert_same(*(code(way, x, few, index=index, row_ids=row_ids, key=key) for way in (Plain, gpu_bits)))
run()
print("cases")
for few in (1, 2, 4, 8):
    x = torch.randn(11, 300)  # more columns than a program takes at once
    assert_same(code(Plain, x, few), code(gpu_bits, x, few))
    for value in (torch.nan, torch.inf, -torch.inf):
        spoiled = x.clone()
        spoiled[3, 299] = spoiled[10, 0] = value
        assert code(gpu_bits, spoiled, few).bad == 2
    assert code(gpu_bits, torch.tensor([(-3e38, 3e38), (0, 3.4e38), (0, 3e38)]), few).bad == 2
    for shape in ((0, 5), (5, 0)):
        assert code(gpu_bits, torch.empty(shape), few).bad == 0
print("edges")
"""

COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kagome.kernels.quantize import triton as gpu_bits
TYPES = {"x": "fp32", "low": "fp32", "out": "fp32", "index": "i64", "row_ids": "i64", "column": "i64",
         "span": "i16", "bad": "u8", "body": "u8"}
for name in ("encode_kernel", "decode_kernel"):
    kernel = getattr(gpu_bits, name)
    names = [p.name for p in kernel.params]
    for few in (1, 2, 4, 8):
        for single in (True, False):
            known = {"PICKED": not single, "BITS": few, "BLOCK": 1 if single else 128}
            known |= {"rows": 1, "width": 1} if single else {}  # what Triton makes of a size of 1
            known = {n: value for n, value in known.items() if n in names}
            types = {n: "constexpr" if n in known else "*" + TYPES[n] if n in TYPES else "i32" for n in names}
            source = ASTSource(kernel, types, constexprs=known)
            made = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
            # Each product, sum and quotient is rounded, and small numbers are not taken for zero.
            assert "fma." not in made.asm["ptx"] and ".ftz" not in made.asm["ptx"]
            assert "div.full" not in made.asm["ptx"] and "div.rn.f32" in made.asm["ptx"]
    print(name)
"""


def in_process(program: str, **more: str) -> list[str]:
    pytest.importorskip("triton", reason="Triton is not installed; torch's CUDA builds bring it")
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path, **more},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def test_the_triton_kernels_give_the_bits_of_plain() -> None:
    assert in_process(INTERPRETED, TRITON_INTERPRET="1") == ["cases", "edges"]


def test_the_triton_kernels_compile_without_fused_products() -> None:
    assert in_process(COMPILED) == ["encode_kernel", "decode_kernel"]
