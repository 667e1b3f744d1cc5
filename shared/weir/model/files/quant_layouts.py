"""The tensors that checkpoints keep a quantized matrix in, and the integers that are in them.

An int32 word holds 32 / bits unsigned integers, the first in its lowest bits. Of a matrix of `out` x `in`:

    gptq             qweight [in words, out], qzeros [groups, out words], scales [groups, out], g_idx [in]
    awq              qweight [in, out words], qzeros [groups, out words], scales [groups, out]; integers of a word are
                     those of outputs 0, 2, 4, 6, 1, 3, 5, 7
    pack-quantized   weight_packed [out, in words], weight_scale [out, groups], weight_shape [2] = out, in;
                     weight_zero_point [out words, groups] where it is not symmetric; half of the range is added to all
    int-quantized    weight int8 [out, in], weight_scale [out, groups], weight_zero_point int8 [out, groups]

After `QuantLinear.pack` of AutoGPTQ and GPTQModel, `WQLinear_GEMM.from_linear` of AutoAWQ, and `pack_to_int32` of
compressed-tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weir.model.files.quant_blocks import QuantBlocks
from weir.model.files.quantization import QuantLayout, QuantScheme
from weir.ops.cpu.quantized_rows import GROUP

_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD_BITS = 32

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int16]

PARTS: Mapping[QuantLayout, str] = {
    QuantLayout.GPTQ: "qweight",
    QuantLayout.AWQ: "qweight",
    QuantLayout.PACKED: "weight_packed",
    QuantLayout.INTEGERS: "weight_scale",  # `weight` is what others have too
}
"""The tensor by which a quantized matrix is told from one that is not."""
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of a matrix: types that it may have, and its shape."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """value[r, c] = scales[r, g] * (integers[r, c] - zeros[r, g]), where g is c's group of equally many columns.

    `integers` uint8 [rows, columns], below 2**bits; `scales`, `zeros` [rows, groups].
    """

    bits: int
    integers: npt.NDArray[np.uint8]
    scales: Floats
    zeros: Integers

    def values(self) -> Floats:
        values = self._differences().astype(np.float32)
        values *= np.repeat(self.scales, self._group_columns, axis=1)
        return values

    def blocks(self) -> QuantBlocks:
        """The same values exactly: of 4 bits where scales and minima are float16 numbers, else of 8.

        Raises ValueError: groups cannot be cut into groups of 32, or an integer is too far from its zero for 8 bits.
        """
        if self._group_columns % GROUP:
            raise ValueError(f"groups of {self._group_columns} inputs, expected a multiple of {GROUP}")
        copies = self._group_columns // GROUP
        scales = np.repeat(self.scales, copies, axis=1)
        if self.bits == 4:
            # exact in fp32 where scales have 11 bits: zeros have 5
            minima = self.scales * -self.zeros.astype(np.float32)
            if _are_halves(self.scales) and _are_halves(minima):
                return QuantBlocks(self.integers, scales, np.repeat(minima, copies, axis=1))
        differences = self._differences()
        least, most = int(differences.min()), int(differences.max())
        if least < -128 or most > 127:
            raise ValueError(f"integers are {least} ... {most} from their zero points, expected -128 ... 127")
        return QuantBlocks(differences.astype(np.int8), scales, None)

    def _differences(self) -> Integers:
        differences = self.integers.astype(np.int16)
        differences -= np.repeat(self.zeros, self._group_columns, axis=1)
        return differences

    @property
    def _group_columns(self) -> int:
        return int(self.integers.shape[1] // self.scales.shape[1])


def _are_halves(values: Floats) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(np.float16), values)


def matrix_shape(
    scheme: QuantScheme, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Array]
) -> tuple[int, int] | None:
    """out, in, by the tensor that says it; None: it has not the dimensions for that."""
    if scheme.layout is QuantLayout.PACKED:
        if shapes.get("weight_shape") != (2,):
            return None
        num_outputs, num_inputs = read("weight_shape").tolist()
        return (num_outputs, num_inputs) if min(num_outputs, num_inputs) > 0 else None
    stored = shapes.get("weight" if scheme.layout is QuantLayout.INTEGERS else "qweight", ())
    if len(stored) != 2 or min(stored) < 1:
        return None
    in_a_word = _WORD_BITS // scheme.bits
    match scheme.layout:
        case QuantLayout.GPTQ:
            return stored[1], stored[0] * in_a_word
        case QuantLayout.AWQ:
            return stored[1] * in_a_word, stored[0]
        case _:
            return stored


def wanted_tensors(scheme: QuantScheme, num_outputs: int, num_inputs: int) -> dict[str, Wanted]:
    """Every tensor of a matrix, by the end of its name. `num_inputs` is a multiple of the group's size."""
    groups = num_inputs // (scheme.group_size or num_inputs)
    in_a_word = _WORD_BITS // scheme.bits
    out_words = -(-num_outputs // in_a_word)
    match scheme.layout:
        case QuantLayout.GPTQ | QuantLayout.AWQ as layout:
            is_gptq = layout is QuantLayout.GPTQ
            words = (num_inputs // in_a_word, num_outputs) if is_gptq else (num_inputs, out_words)
            found = {
                "qweight": Wanted(("I32",), words),
                "qzeros": Wanted(("I32",), (groups, out_words)),
                "scales": Wanted(_FLOATS, (groups, num_outputs)),
            }
            return found | ({"g_idx": Wanted(("I32",), (num_inputs,), is_optional=True)} if is_gptq else {})
        case QuantLayout.PACKED:
            integers = {
                "weight_packed": Wanted(("I32",), (num_outputs, -(-num_inputs // in_a_word))),
                "weight_shape": Wanted(("I64", "I32"), (2,)),
            }
            zeros = Wanted(("I32",), (out_words, groups))
        case QuantLayout.INTEGERS:
            integers = {"weight": Wanted(("I8",), (num_outputs, num_inputs))}
            zeros = Wanted(("I8",), (num_outputs, groups))
    integers |= {"weight_scale": Wanted(_FLOATS, (num_outputs, groups))}
    return integers | ({"weight_zero_point": zeros} if scheme.has_zeros else {})


def read_matrix(
    scheme: QuantScheme, shape: tuple[int, int], read: Callable[[str], Array], read_floats: Callable[[str], Floats]
) -> QuantMatrix:
    """`read` gives a tensor as it is stored, by the end of its name, and `read_floats` one in fp32."""
    bits, (num_outputs, num_inputs) = scheme.bits, shape
    match scheme.layout:
        case QuantLayout.GPTQ | QuantLayout.AWQ as layout:
            order = _AWQ_OUTPUTS if layout is QuantLayout.AWQ else None
            axis = 1 if layout is QuantLayout.AWQ else 0
            integers = _unpacked(read("qweight"), bits, axis, order).T
            zeros = _unpacked(read("qzeros"), bits, 1, order)[:, :num_outputs].T.astype(np.int16)
            zeros += np.int16(scheme.zeros_less_one)
            scales = read_floats("scales").T
        case QuantLayout.PACKED:
            integers = _unpacked(read("weight_packed"), bits, 1)[:, :num_inputs]
            scales = read_floats("weight_scale")
            zeros = _middle(scheme, scales)
            if scheme.has_zeros:
                zeros = _unpacked(read("weight_zero_point"), bits, 0)[:num_outputs].astype(np.int16)
        case QuantLayout.INTEGERS:
            scales = read_floats("weight_scale")
            zeros = _middle(scheme, scales)
            if scheme.has_zeros:
                zeros += read("weight_zero_point")
            integers = (read("weight").astype(np.int16) + _half(bits)).astype(np.uint8)
    return QuantMatrix(bits, np.ascontiguousarray(integers), np.ascontiguousarray(scales), np.ascontiguousarray(zeros))


def _half(bits: int) -> np.int16:
    return np.int16(1 << (bits - 1))


def _middle(scheme: QuantScheme, scales: Floats) -> Integers:
    return np.full(scales.shape, _half(scheme.bits), np.int16)


def _unpacked(words: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> npt.NDArray[np.uint8]:
    """The integers of words along `axis`; `order`: where those of a word belong, from its lowest bits on."""
    in_a_word = _WORD_BITS // bits
    shape = list(words.shape)
    shape[axis] *= in_a_word
    found = np.empty(shape, np.uint8)
    unsigned = words.view(np.uint32)
    for place, target in enumerate(order or range(in_a_word)):
        part = (unsigned >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)
        every = slice(target, None, in_a_word)
        found[(every, slice(None)) if axis == 0 else (slice(None), every)] = part
    return found
