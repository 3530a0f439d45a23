"""Exponential function in plain arithmetic, which the compiler can vectorize.

Where it sits: used by the softmax loops. The C library's function takes one number per call, which is ten
times slower.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload


def exponential(x: Any) -> Any:
    """Return ``exp(x)`` for x <= 0, within 2 ulp; 0 where the result would be subnormal; NaN stays NaN."""
    # Python code runs this body. Compiled loops run the overload below.
    return np.exp(x)


@overload(exponential)  # type: ignore[untyped-decorator]
def _by_type(x: Any) -> Any:
    return _single if x == types.float32 else _double


def _single(x: Any) -> Any:
    # exp(x) = 2**n * exp(r) with |r| < 0.35; ln 2 in two parts keeps r exact (Cody and Waite).
    n = np.rint(x * np.float32(1.4426950408889634))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    # The Taylor series of exp(r) up to r**7, by Horner's rule; its truncation error is below 1e-8.
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(1 / 2)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    # 2**n from its bits: a biased exponent and an empty mantissa. For NaN n is undefined, but p is NaN, and
    # so is the product. Below x = -87 the exponent would leave the range of normal numbers.
    power = np.int32((np.int32(n) + 127) << 23).view(np.float32)
    return np.float32(0) if x < np.float32(-87) else p * power


def _double(x: Any) -> Any:
    # As in ``_single``, with the series up to r**13.
    n = np.rint(x * 1.4426950408889634)
    r = x - n * 6.93145751953125e-1
    r = r - n * 1.42860682030941723212e-6
    p = 1 / 6227020800
    p = p * r + 1 / 479001600
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 1 / 2
    p = p * r + 1.0
    p = p * r + 1.0
    power = np.int64((np.int64(n) + 1023) << 52).view(np.float64)
    return 0.0 if x < -708.0 else p * power
