"""Float arithmetic as LLVM IR: the parts that kernels build their inner loops from.

`emit_*` take an IR builder and values of type `float` or `<N x float>` and return such values; they serve inside other
intrinsics. `exp`, `exp2` and `fma` are the same for one float32 inside compiled Python, where LLVM may make vectors of
a plain loop of them. All of it is generic IR: on every machine the same operations in the same order on every lane, so
that results have the same bits whatever the width of a vector.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FLOAT = ir.FloatType()
FLOAT_BYTES = 4
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)

# (2**f - 1) / f on [-0.5, 0.5] and (e**f - 1) / f on [-0.35, 0.35]: minimax of the relative error, 2e-9
_EXP2_COEFFICIENTS = (
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353361959569156,
)
_EXP_COEFFICIENTS = (
    1.0,
    0.4999999403953552,
    0.1666642129421234,
    0.041668057441711426,
    0.008374964818358421,
    0.0013842710759490728,
)
_LOG2_E = 1.4426950216293335
_LN2_HIGH = 0.693145751953125  # 15 bits: its product with an exponent is exact
_LN2_LOW = 1.428606765330187e-06
# Added to |x| < 2**22, this rounds x to an integer and leaves integer + 127, a float's exponent field, in the low bits.
_ROUND_TO_EXPONENT = 12582912.0 + 127.0
_MIN_EXPONENT = -127.0  # its exponent field is 0: the result is +0.0
_MAX_EXPONENT = 127.0


def vector_type(width: int) -> ir.Type:
    """`<width x float>`."""
    return ir.VectorType(FLOAT, width)


def emit_constant(value_type: ir.Type, value: float) -> ir.Constant:
    """`value` in every lane."""
    if isinstance(value_type, ir.VectorType):
        return ir.Constant(value_type, [ir.Constant(value_type.element, value)] * value_type.count)
    return ir.Constant(value_type, value)


def emit_splat(builder: ir.IRBuilder, scalar: ir.Value, width: int) -> ir.Value:
    """A scalar in every lane of a vector."""
    undefined = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, width), [0] * width))


def emit_load(builder: ir.IRBuilder, address: ir.Value, width: int) -> ir.Value:
    """`width` floats at a byte address (i64); needs no alignment beyond a float's."""
    value_type = vector_type(width) if width > 1 else FLOAT
    return builder.load(builder.inttoptr(address, value_type.as_pointer()), align=4)


def emit_store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """The opposite of `emit_load`."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """`a * b + c`, rounded once."""
    return builder.call(_llvm_intrinsic(builder, "llvm.fma", a.type, 3), [a, b, c])


def emit_max(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger one; `b` where either is not a number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def emit_halves(builder: ir.IRBuilder, vector: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The lower and the upper lanes."""
    count = vector.type.count
    undefined = ir.Constant(vector.type, ir.Undefined)
    lower, upper = (
        builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(INT32, count // 2), list(lanes)))
        for lanes in (range(count // 2), range(count // 2, count))
    )
    return lower, upper


def emit_horizontal(
    builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """All lanes (a power of two) combined in a fixed order: the lower half with the upper half until one is left."""
    while vector.type.count > 1:
        vector = combine(*emit_halves(builder, vector))
    return builder.extract_element(vector, ir.Constant(INT32, 0))


def emit_exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x to a relative error of 1.2e-7: exactly 1 at 0, +0 below -126.5, 2**127 from 127 on, NaN for NaN."""
    clamped = _emit_clamp(builder, x, _MIN_EXPONENT, _MAX_EXPONENT)
    exponent, scale = _emit_exponent(builder, clamped)
    fraction = builder.fsub(clamped, exponent)
    return builder.fmul(_emit_one_plus(builder, fraction, _EXP2_COEFFICIENTS), scale)


def emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x to a relative error of 1.2e-7: exactly 1 at 0, +0 below -87.7, 2**127 from 88.03 on, NaN for NaN.

    After Cephes' expf: x = n ln 2 + f with ln 2 in two parts, a polynomial for e**f, 2**n set by its exponent bits.
    """
    clamped = _emit_clamp(builder, x, _MIN_EXPONENT * 0.6931472, 88.02969)
    exponent, scale = _emit_exponent(builder, builder.fmul(clamped, emit_constant(x.type, _LOG2_E)))
    fraction = emit_fma(builder, exponent, emit_constant(x.type, -_LN2_HIGH), clamped)
    fraction = emit_fma(builder, exponent, emit_constant(x.type, -_LN2_LOW), fraction)
    return builder.fmul(_emit_one_plus(builder, fraction, _EXP_COEFFICIENTS), scale)


def emit_tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Hyperbolic tangent to an absolute error of 2e-7: 1 - 2 / (1 + e**2x)."""
    one, two = emit_constant(x.type, 1.0), emit_constant(x.type, 2.0)
    exponential = emit_exp(builder, builder.fmul(x, two))
    return builder.fsub(one, builder.fdiv(two, builder.fadd(one, exponential)))


def _emit_clamp(builder: ir.IRBuilder, x: ir.Value, lowest: float, highest: float) -> ir.Value:
    # the comparison is false for NaN, which passes
    low, high = emit_constant(x.type, lowest), emit_constant(x.type, highest)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    return builder.select(builder.fcmp_ordered(">", x, high), high, x)


def _emit_exponent(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """x rounded to an integer n, and 2**n."""
    round_to_exponent = emit_constant(x.type, _ROUND_TO_EXPONENT)
    biased = builder.fadd(x, round_to_exponent)
    integers = ir.VectorType(INT32, x.type.count) if isinstance(x.type, ir.VectorType) else INT32
    bits = builder.shl(builder.bitcast(biased, integers), emit_constant(integers, 23))
    return builder.fsub(biased, round_to_exponent), builder.bitcast(bits, x.type)


def _emit_one_plus(builder: ir.IRBuilder, fraction: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    """1 + fraction * polynomial(fraction)."""
    value = emit_constant(fraction.type, coefficients[-1])
    for coefficient in reversed((1.0, *coefficients[:-1])):
        value = emit_fma(builder, value, fraction, emit_constant(fraction.type, coefficient))
    return value


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value, cache_level: int = 1) -> None:
    """Asks for the cache line at a byte address (i64), which need not be readable, in the cache of that level (1-3)."""
    pointer_type = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer_type, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, locality, data = (ir.Constant(INT32, value) for value in (0, 4 - cache_level, 1))
    builder.call(function, [builder.inttoptr(address, pointer_type), read, locality, data])


def _llvm_intrinsic(builder: ir.IRBuilder, name: str, value_type: ir.Type, num_arguments: int) -> ir.Function:
    suffix = f"v{value_type.count}f32" if isinstance(value_type, ir.VectorType) else "f32"
    kind = ir.FunctionType(value_type, [value_type] * num_arguments)
    return cgutils.get_or_insert_function(builder.module, kind, f"{name}.{suffix}")


@intrinsic
def exp(typing_context: Any, x: Any) -> Any:
    """`emit_exp` of one float32."""
    return types.float32(types.float32), lambda context, builder, signature, args: emit_exp(builder, args[0])


@intrinsic
def exp2(typing_context: Any, x: Any) -> Any:
    """`emit_exp2` of one float32."""
    return types.float32(types.float32), lambda context, builder, signature, args: emit_exp2(builder, args[0])


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` of float32, rounded once."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, signature, args: emit_fma(builder, *args)
