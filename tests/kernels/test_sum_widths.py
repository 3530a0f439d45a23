"""Sums of rows of any width: loops that the compiler knows the width of, and the general one, agree."""

from __future__ import annotations

import pytest
import torch

from kagome.kernels.base import reference
from kagome.kernels.base.csr import Structure
from kagome.kernels.cpu import dispatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 4, 7, 12, 16, 20, 36, 64, 68, 100, 256, 260])
def test_sums_of_every_width(width: int, dtype: torch.dtype) -> None:
    source, target = torch.randint(0, 40, (300,)), torch.randint(0, 30, (300,)).sort().values
    layout = Structure(source, target, 30, 40).by_target
    x, weight, scale = torch.randn(40, width, dtype=dtype), torch.rand(300, dtype=dtype), torch.rand(30)
    for given in (None, weight):
        for factor in (None, scale.to(dtype)):
            found = dispatch.sum_rows(layout, x, given, factor)
            wanted = reference.sum_rows(
                layout, x.double(), given, None if factor is None else factor.double()
            )
            error = 1e-5 if dtype == torch.float32 else 1e-13
            torch.testing.assert_close(found.double(), wanted.double(), rtol=error, atol=error)
