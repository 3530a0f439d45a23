"""Prefetch: request a row from memory some entries before it is read.

Where it sits: used in the numba loops. Neighbours may be anywhere in memory, so the hardware cannot predict
the next one, and a core that waits for each uses a fraction of the memory bandwidth. Prefetching at least
halves the time of a sum.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kagome.kernels.base.jit import inlined

LINE = 64
"""Bytes in one cache line."""
FLIGHT = 8192
"""Bytes to request ahead. Measured: the time is the same from 4 to 16 KiB."""
SMALL = 1 << 20
"""Bytes that fit a core's own cache; arrays up to this size need no prefetch."""


def ahead_of(x: Any, small: int = SMALL) -> int:
    """Return how many entries ahead to prefetch rows of this array; 0 means no prefetch.

    Args:
        x: A numpy array of two axes, whose rows the entries read.
        small: Bytes up to which it needs no prefetch.
    """
    if x.nbytes <= small or not x.shape[1]:
        return 0
    return int(min(max(FLIGHT // (x.shape[1] * x.itemsize), 4), 64))


@inlined
def fetch(x: Any, index: Any, k: int, ahead: int, offset: int) -> None:
    """Prefetch the row of x that entry ``k + ahead`` will read.

    Args:
        x: The array whose rows are read.
        index: The row of each entry, plus the offset.
        k: The current entry.
        ahead: The distance in entries, from ``ahead_of``.
        offset: Subtracted from the index.
    """
    if ahead > 0:
        # The last entries request the last row again, because the index list must not be read past its end.
        # An index beyond this thread's rows is harmless: another thread will read that row.
        row = index[min(k + ahead, index.size - 1)] - offset
        for byte in range(0, x.shape[1] * x.itemsize, LINE):
            _ask(x, row, byte)


@intrinsic  # type: ignore[untyped-decorator]
def _ask(typing: Any, array: Any, row: Any, byte: Any) -> Any:
    """Prefetch one cache line of one row; an invalid address does no harm."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held = context.make_array(signature.args[0])(context, builder, args[0])
        stride = builder.extract_value(held.strides, 0)
        whole = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        place = builder.add(builder.mul(args[1], stride), args[2])
        address = builder.gep(builder.bitcast(held.data, pointer), [place])
        kind = ir.FunctionType(ir.VoidType(), [pointer, whole, whole, whole])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, whole(0), whole(3), whole(1)])  # read access, keep in cache, data
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), code
