"""The integers taken out of a GGUF tensor are the ones that its dequantization uses."""

import gguf
import numpy as np
import pytest

from weir.model.files.quant_blocks import try_split_blocks


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_blocks_give_the_values_of_the_gguf_library_to_the_bit(kind: str) -> None:
    values = np.random.default_rng(5).standard_normal((7, 96), dtype=np.float32)
    type_id = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(values, type_id)
    blocks = try_split_blocks(kind, raw)
    assert blocks is not None
    scales = np.repeat(blocks.scales, 32, axis=1)
    found = scales * blocks.quants.astype(np.float32)
    if blocks.minima is not None:
        found = found + np.repeat(blocks.minima, 32, axis=1)
    # (q - 8) * scale is computed by the library, q * scale - 8 * scale here: equal, since the scale has 11 bits
    assert np.array_equal(found, gguf.dequantize(raw, type_id))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q6_K"])
def test_other_types_have_no_blocks_to_take_over(kind: str) -> None:
    assert try_split_blocks(kind, np.zeros((2, 256), np.uint8)) is None
