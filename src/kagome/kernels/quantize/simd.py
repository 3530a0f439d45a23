"""SIMD steps of the CPU quantization loops: the range of a row, and its codes.

Where it sits: used by ``cpu``, which chooses the vector length; ``kernels.cpu.simd`` explains why these are
written as vectors. All rows that share a byte are coded in one pass, so that the byte is written once.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kagome.kernels.quantize.ops import FIRST, SECOND

INT: Final = ir.IntType(32)
BYTE: Final = ir.IntType(8)
LONG: Final = ir.IntType(64)
FLOAT: Final = ir.FloatType()


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def extremes(typing: Any, lanes: Any, x: Any, row: Any) -> Any:
    """Return least and greatest number and greatest magnitude of a row of at least ``lanes`` columns.

    NaN shows only in the magnitude, which is then NaN or infinite.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = _Vectors(context, builder, signature, args)
        width, begin = v.size(1, 1), v.place(1, args[2], LONG(0))
        # Three running vectors in stack slots, which LLVM turns into registers: least, greatest, magnitude.
        first = v.load(begin, FLOAT)
        kept = [cgutils.alloca_once_value(builder, value) for value in (first, first, v.magnitude(first))]
        with cgutils.for_range_slice(builder, LONG(0), width, LONG(v.lanes)) as (at, _):
            number = v.load(builder.gep(begin, [v.fit(at, width)]), FLOAT)
            for slot, value, sign in zip(kept, (number, number, v.magnitude(number)), "<>>", strict=True):
                builder.store(v.better(sign, value, builder.load(slot)), slot)
        least, most, peak = (v.best(sign, builder.load(slot)) for slot, sign in zip(kept, "<>>", strict=True))
        return context.make_tuple(builder, signature.return_type, [least, most, builder.bitcast(peak, FLOAT)])

    return types.UniTuple(types.float32, 3)(lanes, x, types.int64), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def encode_columns(
    typing: Any,
    lanes: Any,
    bits: Any,
    x: Any,
    place: Any,
    k: Any,
    low: Any,
    factor: Any,
    state: Any,
    column: Any,
    body: Any,
    out: Any,
    at: Any,
) -> Any:
    """Encode ``lanes`` columns, from column ``at`` on, of the rows of x that share the bytes ``body[out]``.

    These rows are ``place[k]`` and the following ones. Entry j of ``low``, ``factor`` and ``state`` belongs
    to row ``place[j]``.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = _Vectors(context, builder, signature, args)
        bits, at = signature.args[1].literal_value, args[11]
        # [lanes] hashed column numbers; the loop below is unrolled while the code is generated: one round for
        # each row that shares the byte.
        levels, words = 2.0**bits - 1, v.load(v.place(8, at), INT)
        total = v.int_constant(0)
        for j in range(8 // bits):
            which = builder.add(args[4], LONG(j))
            number = v.load(v.place(2, builder.load(v.place(3, which)), at), FLOAT)
            low, factor, state = (v.spread(builder.load(v.place(a, which))) for a in (5, 6, 7))
            # The draw of ``ops.drawn``: the upper 24 bits of the hash fit a float32 exactly. They are below
            # 2^24, so the signed conversion is right.
            h = builder.mul(builder.xor(words, state), v.int_constant(FIRST))
            h = builder.mul(builder.xor(h, builder.lshr(h, v.int_constant(15))), v.int_constant(SECOND))
            drawn = builder.sitofp(builder.lshr(h, v.int_constant(8)), v.of(FLOAT))
            drawn = builder.fmul(drawn, v.float_constant(2.0**-24))
            exact = builder.fmul(builder.fsub(number, low), factor)
            value = builder.fadd(exact, drawn)
            if bits == 1:  # the value is below two in every case
                over = builder.fcmp_ordered(">=", value, v.float_constant(1.0))
                q = builder.select(over, v.int_constant(1 << j), v.int_constant(0))
            else:
                # The minimum with ``levels`` keeps a code from carrying into the bits of the next row.
                q = builder.fptosi(v.better("<", value, v.float_constant(levels)), v.of(INT))
                q = builder.shl(q, v.int_constant(j * bits))
            total = builder.or_(total, q)
        v.store(builder.trunc(total, v.of(BYTE)), v.place(9, args[10], at))
        return context.get_dummy_value()

    long = types.int64
    return types.void(lanes, bits, x, place, long, low, factor, state, column, body, long, long), code


class _Vectors:
    """Vector values and addresses of one call; its first argument is the vector length in columns.

    Args:
        context: Numba's compilation context.
        builder: The LLVM builder that instructions are appended to.
        signature: The types of the call.
        args: The LLVM values of the call's arguments.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self._context, self._builder, self._types, self._args = context, builder, signature.args, args
        self.lanes = signature.args[0].literal_value

    def of(self, kind: Any) -> Any:
        return ir.VectorType(kind, self.lanes)

    def int_constant(self, value: int) -> Any:
        return ir.Constant(self.of(INT), [value] * self.lanes)

    def float_constant(self, value: float) -> Any:
        return ir.Constant(self.of(FLOAT), [value] * self.lanes)

    def _array(self, which: int) -> Any:
        return self._context.make_array(self._types[which])(self._context, self._builder, self._args[which])

    def size(self, which: int, axis: int) -> Any:
        """Return the size of an array argument along an axis."""
        return self._builder.extract_value(self._array(which).shape, axis)

    def place(self, which: int, *at: Any) -> Any:
        """Return the address of an element of an array argument."""
        held = self._array(which)
        index = (
            at[0] if len(at) == 1 else self._builder.add(self._builder.mul(at[0], self.size(which, 1)), at[1])
        )
        return self._builder.gep(held.data, [index])

    def fit(self, at: Any, width: Any) -> Any:
        """Return ``at``, or the last column with room for a vector: the last columns may be met twice."""
        last = self._builder.sub(width, LONG(self.lanes))
        return self._builder.select(self._builder.icmp_signed("<", at, last), at, last)

    def load(self, place: Any, kind: Any) -> Any:
        place = self._builder.bitcast(place, self.of(kind).as_pointer())
        return self._builder.load(place, align=1)

    def store(self, value: Any, place: Any) -> None:
        self._builder.store(value, self._builder.bitcast(place, value.type.as_pointer()), align=1)

    def spread(self, value: Any) -> Any:
        """Return a vector with one number in all columns."""
        empty = ir.Constant(self.of(value.type), ir.Undefined)
        one = self._builder.insert_element(empty, value, INT(0))
        return self._builder.shuffle_vector(one, empty, self.int_constant(0))

    def magnitude(self, number: Any) -> Any:
        """Return a float's bits without its sign: they order as magnitudes do, with NaN above infinity."""
        return self._builder.and_(self._builder.bitcast(number, self.of(INT)), self.int_constant(0x7FFFFFFF))

    def better(self, sign: str, one: Any, other: Any) -> Any:
        """Return the lesser or the greater of two vectors, column by column."""
        floats = one.type.element == FLOAT
        compare = self._builder.fcmp_ordered if floats else self._builder.icmp_signed
        return self._builder.select(compare(sign, one, other), one, other)

    def best(self, sign: str, vector: Any) -> Any:
        """Return the least or greatest number of a vector."""
        lanes = self.lanes
        while lanes > 1:
            lanes //= 2
            empty = ir.Constant(vector.type, ir.Undefined)
            halves = [
                self._builder.shuffle_vector(
                    vector, empty, ir.Constant(ir.VectorType(INT, lanes), [*range(begin, begin + lanes)])
                )
                for begin in (0, lanes)
            ]
            vector = self.better(sign, *halves)
        return self._builder.extract_element(vector, INT(0))
