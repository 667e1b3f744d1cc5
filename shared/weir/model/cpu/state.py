"""What the compiled forward pass is given: the model, memory to work in, and how much to compute."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
BrainFloats = npt.NDArray[np.uint16]
"""bfloat16: the upper half of a float32."""
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

QUERY_KEY_VALUE, ATTENTION_OUTPUT, GATE_UP, DOWN = range(4)
EMBEDDING, HEAD = range(2)
BITS, NUM_OUTPUTS, OFFSET, NUM_BYTES = range(4)
"""Columns of a part's row in `Model.layer_parts` and `Model.end_parts`; unused rows have 0 bits."""


class Model(NamedTuple):
    """What does not change.

    `data` holds all matrices; `layer_parts` [layers, 4 matrices, parts, 4] and `end_parts` [2 matrices, 1, 4] say where
    their parts are. `norms` [2 layers + 1, hidden]. Biases are [layers, outputs], or [0, 0] where there are none.
    `cosines`, `sines` [positions, head_dim / 2].
    """

    data: Bytes
    layer_parts: Longs
    end_parts: Longs
    norms: Floats
    query_key_value_bias: Floats
    attention_output_bias: Floats
    cosines: Floats
    sines: Floats
    epsilon: float
    num_heads: int
    num_kv_heads: int


class Buffers(NamedTuple):
    """Memory of a slice's numbers; [rows, …] but for what is said.

    `rows_*` are quantized rows. `part` [elements] is for matrices of several parts. `partials`, `*_items` are those of
    the attention kernels; `*_scratch` [chunks of a phase, …]. `last_hidden` and `logits` [logits, …], and what one pass
    over those finds (`weir.ops.sampling.cpu_scan`): `block_maxima` [logits, blocks], `highest`, `argmax` [logits].
    """

    hidden: Floats
    rows_hidden: Bytes
    qkv: Floats
    attended: Floats
    rows_heads: Bytes
    gate_up: Floats
    rows_inner: Bytes
    part: Floats
    decode_items: Ints
    prefill_items: Ints
    partials: Floats
    decode_scratch: Floats
    prefill_scratch: Floats
    last_hidden: Floats
    logits: Floats
    block_maxima: Floats
    highest: Floats
    argmax: Ints


class Extent(NamedTuple):
    """How much of a slice one call computes: layers [first_layer, last_layer), and logits after the last of all."""

    num_decode_items: int
    num_prefill_items: int
    first_layer: int
    last_layer: int
