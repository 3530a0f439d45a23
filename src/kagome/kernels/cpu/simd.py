"""SIMD steps: LLVM vector operations on the columns of a head, for widths that the compiler knows.

Where it sits: used by the loops of ``spmm``, ``attention`` and ``gatv2_scores``. A loop of 16
columns is too short for the compiler to test for overlapping arrays each time, so it would compile it to
scalar code, which is ten times slower. These steps are whole vectors from the start, whatever vector length
the machine has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic


# ``prefer_literal`` passes ``width`` as a type that holds its value: LLVM's vector length is part of the
# code. ``contract`` allows fused multiply-adds, as in the loops around these steps. Numbers given to load,
# store and spread are positions among the arguments.
@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_two(typing: Any, width: Any, out: Any, at: Any, a: Any, p: Any, b: Any, q: Any) -> Any:
    """``out[at:] += p * a[at:] + q * b[at:]`` over ``width`` columns of three rows."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        fresh = builder.fmul(lanes.load(3, 2), lanes.spread(4), flags=("contract",))
        fresh = builder.fadd(fresh, builder.fmul(lanes.load(5, 2), lanes.spread(6)), flags=("contract",))
        lanes.store(1, 2, builder.fadd(lanes.load(1, 2), fresh, flags=("contract",)))
        return context.get_dummy_value()

    return types.void(width, out, types.int64, a, out.dtype, b, out.dtype), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_one(typing: Any, width: Any, out: Any, at: Any, a: Any, factor: Any) -> Any:
    """``out[at:] += factor * a[at:]`` over ``width`` columns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        fresh = builder.fmul(lanes.spread(4), lanes.load(3, 2), flags=("contract",))
        lanes.store(1, 2, builder.fadd(lanes.load(1, 2), fresh, flags=("contract",)))
        return context.get_dummy_value()

    return types.void(width, out, types.int64, a, out.dtype), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_from(typing: Any, width: Any, out: Any, at: Any, a: Any, begin: Any, factor: Any) -> Any:
    """``out[at:] += factor * a[begin:]`` over ``width`` columns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        fresh = builder.fmul(lanes.spread(5), lanes.load(3, 4), flags=("contract",))
        lanes.store(1, 2, builder.fadd(lanes.load(1, 2), fresh, flags=("contract",)))
        return context.get_dummy_value()

    return types.void(width, out, types.int64, a, types.int64, out.dtype), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_four(typing: Any, width: Any, out: Any, at: Any, a: Any, b: Any, c: Any, d: Any, factor: Any) -> Any:
    """``out[at:] += factor * ((a[at:] + b[at:]) + (c[at:] + d[at:]))`` over ``width`` columns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        one = builder.fadd(lanes.load(3, 2), lanes.load(4, 2))
        both = builder.fadd(one, builder.fadd(lanes.load(5, 2), lanes.load(6, 2)))
        fresh = builder.fmul(lanes.spread(7), both, flags=("contract",))
        lanes.store(1, 2, builder.fadd(lanes.load(1, 2), fresh, flags=("contract",)))
        return context.get_dummy_value()

    return types.void(width, out, types.int64, a, b, c, d, out.dtype), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_products(
    typing: Any, width: Any, out: Any, at: Any, a: Any, p: Any, b: Any, q: Any, c: Any, r: Any, d: Any, s: Any
) -> Any:
    """``out[at:] += (p * a[at:] + q * b[at:]) + (r * c[at:] + s * d[at:])`` over ``width`` columns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)

        def product(row: int) -> Any:
            return builder.fmul(lanes.load(row, 2), lanes.spread(row + 1), flags=("contract",))

        one = builder.fadd(product(3), product(5), flags=("contract",))
        other = builder.fadd(product(7), product(9), flags=("contract",))
        both = builder.fadd(one, other, flags=("contract",))
        lanes.store(1, 2, builder.fadd(lanes.load(1, 2), both, flags=("contract",)))
        return context.get_dummy_value()

    n = out.dtype
    return types.void(width, out, types.int64, a, n, b, n, c, n, d, n), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot(typing: Any, width: Any, a: Any, at: Any, b: Any) -> Any:
    """``sum(a[at:] * b[at:])`` over ``width`` columns, in the machine's order."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        return lanes.total(builder.fmul(lanes.load(1, 2), lanes.load(3, 2)))

    return a.dtype(width, a, types.int64, b), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def bent_dot(typing: Any, width: Any, a: Any, at: Any, b: Any, factor: Any, slope: Any) -> Any:
    """``sum(factor[at:] * leaky_relu(a[at:] + b[at:]))`` over ``width`` columns, in the machine's order."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        z = builder.fadd(lanes.load(1, 2), lanes.load(3, 2))
        over = builder.fcmp_ordered(">", z, lanes.zero)
        bent = builder.select(over, z, builder.fmul(z, lanes.spread(5)))
        return lanes.total(builder.fmul(bent, lanes.load(4, 2)))

    return a.dtype(width, a, types.int64, b, factor, a.dtype), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_bent(
    typing: Any, width: Any, out: Any, at: Any, a: Any, b: Any, steep: Any, gentle: Any, tally: Any, kept: Any
) -> Any:
    """Add leaky_relu gradients: ``z = a[at:] + b[at:]``, ``d = steep where z > 0 else gentle``.

    Over ``width`` columns, ``out[at:] += d``; if ``kept`` is true, also ``tally[at:] += z * d``.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        z = builder.fadd(lanes.load(3, 2), lanes.load(4, 2))
        over = builder.fcmp_ordered(">", z, lanes.zero)
        d = builder.select(over, lanes.spread(5), lanes.spread(6))
        lanes.store(1, 2, builder.fadd(lanes.load(1, 2), d))
        with builder.if_then(context.cast(builder, args[8], signature.args[8], types.boolean)):
            more = builder.fmul(z, d, flags=("contract",))
            lanes.store(7, 2, builder.fadd(lanes.load(7, 2), more, flags=("contract",)))
        return context.get_dummy_value()

    number = out.dtype
    return types.void(width, out, types.int64, a, b, number, number, tally, types.boolean), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def join_bent(typing: Any, width: Any, out: Any, at: Any, a: Any, b: Any, slope: Any, top: Any) -> Any:
    """``out[at:] = leaky_relu(a + b)`` over ``width`` columns, and ``top`` is the larger of it and itself."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        z, largest = builder.fadd(lanes.first(3), lanes.first(4)), lanes.first(6)
        bent = builder.select(builder.fcmp_ordered(">", z, lanes.zero), z, builder.fmul(z, lanes.spread(5)))
        lanes.store(1, 2, bent)
        # NaN counts as the largest, so that a diverged run shows NaN in place of a wrong number.
        above = builder.or_(
            builder.fcmp_ordered(">", bent, largest), builder.fcmp_unordered("uno", bent, bent)
        )
        lanes.put(6, builder.select(above, bent, largest))
        return context.get_dummy_value()

    return types.void(width, out, types.int64, a, b, out.dtype, top), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def subtract(typing: Any, width: Any, out: Any, at: Any, a: Any) -> Any:
    """``out[at:] -= a`` over ``width`` columns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        lanes.store(1, 2, builder.fsub(lanes.load(1, 2), lanes.first(3)))
        return context.get_dummy_value()

    return types.void(width, out, types.int64, a), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def gain(typing: Any, width: Any, out: Any, a: Any, at: Any) -> Any:
    """``out += a[at:]`` over ``width`` columns."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        lanes.put(1, builder.fadd(lanes.first(1), lanes.load(2, 3)))
        return context.get_dummy_value()

    return types.void(width, out, a, types.int64), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def gain_bent(
    typing: Any, width: Any, out: Any, p: Any, at: Any, a: Any, b: Any, slope: Any, factor: Any
) -> Any:
    """``out += factor * p[at:]`` over ``width`` columns, times the slope where ``a + b`` is not above 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature, args)
        over = builder.fcmp_ordered(">", builder.fadd(lanes.first(4), lanes.first(5)), lanes.zero)
        fresh = builder.fmul(lanes.first(7), lanes.load(2, 3))
        fresh = builder.select(over, fresh, builder.fmul(fresh, lanes.spread(6)))
        lanes.put(1, builder.fadd(lanes.first(1), fresh))
        return context.get_dummy_value()

    return types.void(width, out, p, types.int64, a, b, out.dtype, factor), code


class _Lanes:
    """Vector loads and stores of one call's arguments; the first argument is the vector length.

    Args:
        context: Numba's compilation context.
        builder: The LLVM builder that instructions are appended to.
        signature: The types of the call.
        args: The LLVM values of the call's arguments.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self._context, self._builder, self._types, self._args = context, builder, signature.args, args
        # Loops for any width have width 0, which LLVM does not allow for a vector: steps in them take 1.
        self.width = max(self._types[0].literal_value, 1)
        self.number = context.get_data_type(self._types[1].dtype)
        self.kind = ir.VectorType(self.number, self.width)
        self._bytes = self._types[1].dtype.bitwidth // 8

    def _place(self, which: int, at: int) -> Any:
        held = self._context.make_array(self._types[which])(self._context, self._builder, self._args[which])
        first = self._builder.gep(held.data, [self._args[at]])
        return self._builder.bitcast(first, self.kind.as_pointer())

    def load(self, which: int, at: int) -> Any:
        # A row begins at any number, not at a multiple of the vector length.
        return self._builder.load(self._place(which, at), align=self._bytes)

    def store(self, which: int, at: int, value: Any) -> None:
        self._builder.store(value, self._place(which, at), align=self._bytes)

    def first(self, which: int) -> Any:
        """Return the vector at an array's beginning."""
        return self._builder.load(self._begin(which), align=self._bytes)

    def put(self, which: int, value: Any) -> None:
        """Write a vector to an array's beginning."""
        self._builder.store(value, self._begin(which), align=self._bytes)

    def _begin(self, which: int) -> Any:
        held = self._context.make_array(self._types[which])(self._context, self._builder, self._args[which])
        return self._builder.bitcast(held.data, self.kind.as_pointer())

    def spread(self, which: int) -> Any:
        # The broadcast idiom of LLVM: insert the number into lane 0, then shuffle lane 0 into all lanes.
        one = self._builder.insert_element(
            ir.Constant(self.kind, ir.Undefined), self._args[which], ir.IntType(32)(0)
        )
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return self._builder.shuffle_vector(one, ir.Constant(self.kind, ir.Undefined), mask)

    @property
    def zero(self) -> Any:
        return ir.Constant(self.kind, [0.0] * self.width)

    def total(self, vector: Any) -> Any:
        """Return the sum of a vector's numbers, in the order that suits the machine."""
        form = ir.FunctionType(self.number, [self.number, self.kind])
        name = f"llvm.vector.reduce.fadd.v{self.width}f{8 * self._bytes}"
        module = self._builder.module
        add = module.globals.get(name) or ir.Function(module, form, name)
        # -0.0 is the neutral element of addition, since 0.0 + -0.0 is 0.0. Without ``reassoc`` LLVM would
        # have to add the lanes one after another.
        return self._builder.call(add, [self.number(-0.0), vector], fastmath=("reassoc",))
