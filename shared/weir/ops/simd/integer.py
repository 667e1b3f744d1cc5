"""Byte arithmetic as LLVM IR: sums of products of unsigned weights and signed activations, exact in 32 bits.

Vectors of bytes are typed `<N x i32>`, four bytes a lane. A dot product adds to lane i the four products of the bytes
of lane i. Weights are 4-bit (0 … 15) or 8-bit (1 … 255), activations are in -127 … 127, and one group is 8 steps, which
is what lets AVX2 add pairs in 16 bits: 8 * 2 * 15 * 127 = 30,480. There, 8-bit weights are summed as two 4-bit
halves, since a pair of 8-bit products (64,770) would saturate.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from llvmlite import ir
from numba.core import cgutils

from weir.ops.simd.features import InstructionSet
from weir.ops.simd.float import vector_type

INT8 = ir.IntType(8)
INT32 = ir.IntType(32)


def int_vector(width: int, bits: int = 32) -> ir.VectorType:
    """`<width x i32>`, or of another number of bits."""
    return ir.VectorType(ir.IntType(bits), width)


def emit_int_constant(value_type: ir.VectorType, value: int) -> ir.Constant:
    """`value` in every lane."""
    return ir.Constant(value_type, [value] * value_type.count)


def emit_load_lanes(builder: ir.IRBuilder, address: ir.Value, width: int, align: int) -> ir.Value:
    """`width` lanes of four bytes at an address (i64)."""
    return builder.load(builder.inttoptr(address, int_vector(width).as_pointer()), align=align)


def emit_load_splat(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, width: int) -> ir.Value:
    """The i32 or float at an address (i64), in every lane."""
    scalar = builder.load(builder.inttoptr(address, element.as_pointer()), align=4)
    undefined = ir.Constant(ir.VectorType(element, width), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, emit_int_constant(int_vector(width), 0))


def emit_load_half(builder: ir.IRBuilder, address: ir.Value, width: int, instruction_set: InstructionSet) -> ir.Value:
    """`width` float16 at an address (i64) as float32, subnormal ones too."""
    if instruction_set is not InstructionSet.PORTABLE:
        halves = ir.VectorType(ir.HalfType(), width)
        return builder.fpext(builder.load(builder.inttoptr(address, halves.as_pointer()), align=2), vector_type(width))
    bits = builder.load(builder.inttoptr(address, int_vector(width, 16).as_pointer()), align=2)
    bits = builder.zext(bits, int_vector(width))
    magnitude = builder.shl(builder.and_(bits, emit_int_constant(bits.type, 0x7FFF)), emit_int_constant(bits.type, 13))
    # the exponents' biases differ by 127 - 15
    rescale = ir.Constant(vector_type(width), [ir.Constant(ir.FloatType(), 2.0**112)] * width)
    value = builder.fmul(builder.bitcast(magnitude, vector_type(width)), rescale)
    sign = builder.shl(builder.and_(bits, emit_int_constant(bits.type, 0x8000)), emit_int_constant(bits.type, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, bits.type), sign), vector_type(width))


def emit_load_first(builder: ir.IRBuilder, address: ir.Value, width: int, count: ir.Value) -> ir.Value:
    """The first `count` (i64) of `width` floats at an address (i64), zero in the other lanes. Not more is read."""
    floats = vector_type(width)
    mask = _first_lanes(builder, width, count)
    arguments = [floats.as_pointer(), INT32, mask.type, floats]
    load = _declare(builder, f"llvm.masked.load.v{width}f32.p0", floats, arguments)
    zeros = ir.Constant(floats, [ir.Constant(floats.element, 0.0)] * width)
    pointer = builder.inttoptr(address, floats.as_pointer())
    return builder.call(load, [pointer, ir.Constant(INT32, 4), mask, zeros])


def emit_store_first(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, count: ir.Value) -> None:
    """Writes the first `count` (i64) lanes of floats to an address (i64), and nothing behind them."""
    width = value.type.count
    pointer = builder.inttoptr(address, value.type.as_pointer())
    is_whole = builder.icmp_signed(">=", count, ir.Constant(count.type, width))
    with builder.if_else(is_whole, likely=True) as (whole, part):
        with whole:
            builder.store(value, pointer, align=4)
        with part:
            mask = _first_lanes(builder, width, count)
            arguments = [value.type, value.type.as_pointer(), INT32, mask.type]
            store = _declare(builder, f"llvm.masked.store.v{width}f32.p0", ir.VoidType(), arguments)
            builder.call(store, [value, pointer, ir.Constant(INT32, 4), mask])


def emit_opaque(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """`value` (i64), of which LLVM knows nothing any more."""
    kind = ir.FunctionType(value.type, [value.type])
    assembly = ir.InlineAsm(kind, "", "=r,0", False)
    return builder.call(assembly, [value], attrs=("convergent",))


def emit_prefetch_for_write(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Asks for the cache line at an address (i64), to be written: `prefetchw`."""
    pointer_type = INT8.as_pointer()
    prefetch = _declare(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer_type, INT32, INT32, INT32])
    for_write, keep_in_all_caches, data = INT32(1), INT32(3), INT32(1)
    builder.call(prefetch, [builder.inttoptr(address, pointer_type), for_write, keep_in_all_caches, data])


def emit_nibbles(builder: ir.IRBuilder, packed: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The low and the high four bits of every byte."""
    mask = emit_int_constant(packed.type, 0x0F0F0F0F)
    return builder.and_(packed, mask), builder.and_(builder.lshr(packed, emit_int_constant(packed.type, 4)), mask)


class DotProduct(ABC):
    """How one instruction set sums a group's products. A sum is a tuple of vectors, handed from call to call."""

    width: int
    """Outputs a vector."""

    def __init__(self, bits: int) -> None:
        self._is_4_bit = bits == 4

    def prepare(self, builder: ir.IRBuilder, weights: ir.Value) -> list[tuple[ir.Value, ...]]:
        """Stored weights as `add` takes them, for each quad of inputs that they hold: done once for all rows."""
        return [(quad,) for quad in (emit_nibbles(builder, weights) if self._is_4_bit else [weights])]

    def start(self, builder: ir.IRBuilder, first: ir.Value | None) -> tuple[ir.Value, ...]:
        """The sum before the first step; `first` is what every lane begins with, None for zero."""
        return (emit_int_constant(int_vector(self.width), 0) if first is None else first,)

    @abstractmethod
    def add(
        self, builder: ir.IRBuilder, total: tuple[ir.Value, ...], weights: tuple[ir.Value, ...], row: ir.Value
    ) -> tuple[ir.Value, ...]:
        """The sum after one more step: four inputs of every output."""

    def finish(self, builder: ir.IRBuilder, total: tuple[ir.Value, ...], first: ir.Value | None) -> ir.Value:
        """The sum in 32 bits; `first` as in `start`."""
        return total[0]


class Vnni512Dot(DotProduct):
    """`vpdpbusd`, one instruction for 64 products (AVX512-VNNI)."""

    width = 16

    def add(
        self, builder: ir.IRBuilder, total: tuple[ir.Value, ...], weights: tuple[ir.Value, ...], row: ir.Value
    ) -> tuple[ir.Value, ...]:
        lanes = int_vector(self.width)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.width}"
        return (builder.call(_declare(builder, name, lanes, [lanes] * 3), [total[0], weights[0], row]),)


class Vnni256Dot(Vnni512Dot):
    """`vpdpbusd` of 32 products (AVX-VNNI; or AVX512-VNNI with AVX512-VL)."""

    width = 8


class Avx2Dot(DotProduct):
    """`vpmaddubsw` and 16-bit additions, widened once a group by `vpmaddwd`."""

    width = 8

    def prepare(self, builder: ir.IRBuilder, weights: ir.Value) -> list[tuple[ir.Value, ...]]:
        low, high = emit_nibbles(builder, weights)
        return [(low,), (high,)] if self._is_4_bit else [(low, high)]

    def start(self, builder: ir.IRBuilder, first: ir.Value | None) -> tuple[ir.Value, ...]:
        zero = emit_int_constant(int_vector(16, 16), 0)
        return (zero,) if self._is_4_bit else (zero, zero)

    def add(
        self, builder: ir.IRBuilder, total: tuple[ir.Value, ...], weights: tuple[ir.Value, ...], row: ir.Value
    ) -> tuple[ir.Value, ...]:
        pairs, octets = int_vector(16, 16), int_vector(32, 8)
        multiply = _declare(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, [octets] * 2)
        row = builder.bitcast(row, octets)
        return tuple(
            builder.add(part, builder.call(multiply, [builder.bitcast(weight, octets), row]))
            for part, weight in zip(total, weights, strict=True)
        )

    def finish(self, builder: ir.IRBuilder, total: tuple[ir.Value, ...], first: ir.Value | None) -> ir.Value:
        pairs = int_vector(16, 16)
        widen = _declare(builder, "llvm.x86.avx2.pmadd.wd", int_vector(8), [pairs] * 2)
        value = first
        for part, factor in zip(total, (1, 16), strict=False):
            wide = builder.call(widen, [part, emit_int_constant(pairs, factor)])
            value = wide if value is None else builder.add(value, wide)
        return value


class PortableDot(DotProduct):
    """32-bit products of bytes, which LLVM lowers to what the machine has."""

    width = 16

    def prepare(self, builder: ir.IRBuilder, weights: ir.Value) -> list[tuple[ir.Value, ...]]:
        return [
            tuple(
                builder.and_(
                    builder.lshr(quad, emit_int_constant(quad.type, 8 * byte)), emit_int_constant(quad.type, 0xFF)
                )
                for byte in range(4)
            )
            for (quad,) in super().prepare(builder, weights)
        ]

    def add(
        self, builder: ir.IRBuilder, total: tuple[ir.Value, ...], weights: tuple[ir.Value, ...], row: ir.Value
    ) -> tuple[ir.Value, ...]:
        value = total[0]
        for byte, weight in enumerate(weights):
            raised = builder.shl(row, emit_int_constant(row.type, 24 - 8 * byte))
            signed = builder.ashr(raised, emit_int_constant(row.type, 24))
            value = builder.add(value, builder.mul(weight, signed))
        return (value,)


_DOT_PRODUCTS: Mapping[InstructionSet, type[DotProduct]] = {
    InstructionSet.PORTABLE: PortableDot,
    InstructionSet.AVX2: Avx2Dot,
    InstructionSet.AVX_VNNI: Vnni256Dot,
    InstructionSet.AVX512_VNNI: Vnni512Dot,
}


def dot_product(instruction_set: InstructionSet, bits: int) -> DotProduct:
    """How `instruction_set` sums products of weights of 4 or 8 bits."""
    return _DOT_PRODUCTS[instruction_set](bits)


def _first_lanes(builder: ir.IRBuilder, width: int, count: ir.Value) -> ir.Value:
    undefined = ir.Constant(int_vector(width, 64), ir.Undefined)
    counts = builder.insert_element(undefined, count, ir.Constant(INT32, 0))
    counts = builder.shuffle_vector(counts, undefined, emit_int_constant(int_vector(width), 0))
    return builder.icmp_signed(">", counts, ir.Constant(counts.type, list(range(width))))


def _declare(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
