"""Sixteen-lane steps of the fast transform, as LLVM vectors: shuffles that Numba cannot express.

LLVM splits the vectors where a CPU's registers are shorter. Each lane's operations, and their
order, are those of `reference.py`.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

__all__ = ["LANES", "add16", "butterfly16", "sum16", "transform16"]

LANES = 16
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    base = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(base, [at]), _FLOATS.as_pointer())


def _words(values: list[int]) -> Any:
    return ir.Constant(_WORDS, values)


def _shuffle(builder: Any, v: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(v, ir.Constant(_FLOATS, ir.Undefined), _words(lanes))


def _stage(builder: Any, v: Any, h: int) -> Any:
    """Return sums in the lanes without bit `h` and differences in those with it."""
    swapped = _shuffle(builder, v, [i ^ h for i in range(LANES)])
    signs = _words([0x80000000 if i & h else 0 for i in range(LANES)])
    turned = builder.bitcast(builder.xor(builder.bitcast(v, _WORDS), signs), _FLOATS)
    return builder.fadd(swapped, turned)


def _transform(builder: Any, pointers: list[Any]) -> None:
    v = builder.load(pointers[0], align=4)
    for h in (1, 2, 4, 8):
        v = _stage(builder, v, h)
    builder.store(v, pointers[0], align=4)


def _butterfly(builder: Any, pointers: list[Any]) -> None:
    left, right = (builder.load(p, align=4) for p in pointers)
    builder.store(builder.fadd(left, right), pointers[0], align=4)
    builder.store(builder.fsub(left, right), pointers[1], align=4)


def _add(builder: Any, pointers: list[Any]) -> None:
    left, right = (builder.load(p, align=4) for p in pointers)
    builder.store(builder.fadd(left, right), pointers[0], align=4)


def _sum(builder: Any, pointers: list[Any]) -> Any:
    v = builder.load(pointers[0], align=4)
    for h in (8, 4, 2, 1):
        v = builder.fadd(v, _shuffle(builder, v, [min(i + h, LANES - 1) for i in range(LANES)]))
    return builder.extract_element(v, ir.Constant(ir.IntType(32), 0))


def _step(emit: Callable[..., Any], places: int, result: Any = types.void) -> Any:
    """Return an intrinsic on an fp32 array and `places` element offsets."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [_pointer(context, builder, signature.args[0], args[0], at) for at in args[1:]]
        value = emit(builder, pointers)
        return context.get_dummy_value() if value is None else value

    if places == 1:

        @intrinsic
        def one(typing_context, buffer, at):  # type: ignore[no-untyped-def]
            return result(buffer, types.intp), codegen

        return one

    @intrinsic
    def two(typing_context, buffer, left, right):  # type: ignore[no-untyped-def]
        return result(buffer, types.intp, types.intp), codegen

    return two


# Transform the 16 elements at an offset in place: strides 1, 2, 4, 8.
transform16 = _step(_transform, 1)
# Replace 16 elements at two offsets by their sums and differences.
butterfly16 = _step(_butterfly, 2)
# Add the 16 elements at the second offset to those at the first.
add16 = _step(_add, 2)
# Return the sum of 16 elements: halves added, then quarters, eighths and pairs.
sum16 = _step(_sum, 1, types.float32)
