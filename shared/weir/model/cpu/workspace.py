"""What the compiled forward pass works on: the model, memory for a slice's numbers, and how much to compute.

Memory is made once and reused by every step.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weir.model.architecture import ModelConfig
from weir.model.cpu.packed_weights import PackedWeights
from weir.model.cpu.packing import Parts
from weir.model.cpu.slices import SliceArrays
from weir.ops.cpu.attention import NO_WINDOW, scoring_of
from weir.ops.cpu.paged_decode import decode_partial_floats, decode_scratch_floats, num_decode_items, plan_decode
from weir.ops.cpu.paged_prefill import num_prefill_items, plan_prefill, prefill_scratch_floats
from weir.ops.cpu.quantized_rows import empty_rows
from weir.ops.cpu.sampling_scan import num_scan_blocks

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

MAX_SLICE_ROWS = 128
"""More would make the buffers of a slice fall out of the core's own cache, and gain nothing: weights are read once."""
_FIRST_ITEMS = 256
_LAYER_MATRICES = ("query_key_value", "attention_output", "gate_up", "down")


class Model(NamedTuple):
    """What does not change.

    `data` holds all matrices; `layer_parts` [layers, 4 matrices, parts, 4] and `end_parts` [2 matrices, 1, 4] say where
    their parts are. `norms` [2 layers + 1, hidden]; `query_key_norms` [2 layers, head_dim], and biases [layers,
    outputs], `post_norms` [2 layers, hidden], or [0, 0] where there are none. `windows` [layers]: positions that a
    query sees at most. `cosines`, `sines` [positions, head_dim / 2], `local_*` those of layers with a window. `scale`
    and `cap_factor` are those of `Scoring`; `logit_softcap` 0: none.
    """

    data: Bytes
    layer_parts: Longs
    end_parts: Longs
    norms: Floats
    query_key_norms: Floats
    query_key_value_bias: Floats
    attention_output_bias: Floats
    post_norms: Floats
    windows: Longs
    cosines: Floats
    sines: Floats
    local_cosines: Floats
    local_sines: Floats
    scale: np.float32
    cap_factor: np.float32
    logit_softcap: np.float32
    embedding_scale: np.float32
    is_gelu: np.bool_
    epsilon: float
    num_heads: int
    num_kv_heads: int


class Buffers(NamedTuple):
    """Memory of a slice's numbers; [rows, …] but for what is said.

    `rows_*` are quantized rows. `branch` is what attention or the MLP gives where that is normed before it is added to
    `hidden`. `part` [elements] is for matrices of several parts. `partials`, `*_items` are those of the attention
    kernels, `window_items` those of decodes in layers with a window; `*_scratch` [chunks of a phase, …]. `last_hidden`
    and `logits` [logits, …], and what one pass over those finds (`weir.ops.cpu.sampling_scan`): `block_maxima` [logits,
    blocks], `highest`, `argmax` [logits].
    """

    hidden: Floats
    branch: Floats
    rows_hidden: Bytes
    qkv: Floats
    attended: Floats
    rows_heads: Bytes
    gate_up: Floats
    rows_inner: Bytes
    part: Floats
    decode_items: Ints
    window_items: Ints
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
    """How much of a slice one call computes: layers [first_layer, last_layer), and logits after the last of all.

    The first of them begins with `first_stage`, the last one ends before `last_stage` (`weir.model.cpu.forward`), and
    logits come only after a whole layer.
    """

    num_decode_items: int
    num_window_items: int
    num_prefill_items: int
    first_layer: int
    last_layer: int
    first_stage: int
    last_stage: int


def make_model(config: ModelConfig, packed: PackedWeights) -> Model:
    """What the compiled code needs of the weights; views of the mapped file, but for the tables of its parts."""
    most_parts = max(len(parts) for parts in packed.matrices.values())
    layer_parts = np.zeros((config.num_layers, len(_LAYER_MATRICES), most_parts, 4), np.int64)
    for layer in range(config.num_layers):
        for number, name in enumerate(_LAYER_MATRICES):
            _describe(packed, packed.matrices[f"layers.{layer}.{name}"], layer_parts[layer, number])
    end_parts = np.zeros((2, most_parts, 4), np.int64)
    _describe(packed, _embedding(packed.matrices), end_parts[0])
    _describe(packed, packed.matrices["head"], end_parts[1])
    none = np.zeros((0, 0), np.float32)
    none.flags.writeable = False  # as what is mapped: the same compiled code serves models with and without
    scoring = scoring_of(config.score_divisor, softcap=config.attention_softcap or 0.0)
    cosines, sines = packed.arrays["cosines"], packed.arrays["sines"]
    windows = [
        NO_WINDOW if (window := config.window_of(layer)) is None else window for layer in range(config.num_layers)
    ]
    return Model(
        data=packed.mapped,
        layer_parts=layer_parts,
        end_parts=end_parts,
        norms=packed.arrays["norms"],
        query_key_norms=packed.arrays.get("query_key_norms", none),
        query_key_value_bias=packed.arrays.get("query_key_value_bias", none),
        attention_output_bias=packed.arrays.get("attention_output_bias", none),
        post_norms=packed.arrays.get("post_norms", none),
        windows=np.array(windows, np.int64),
        cosines=cosines,
        sines=sines,
        local_cosines=packed.arrays.get("local_cosines", cosines),
        local_sines=packed.arrays.get("local_sines", sines),
        scale=scoring.scale,
        cap_factor=scoring.cap_factor,
        logit_softcap=np.float32(config.logit_softcap or 0.0),
        embedding_scale=np.float32(config.embedding_scale),
        is_gelu=np.bool_(config.activation == "gelu_tanh"),
        epsilon=config.rms_norm_eps,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )


class Workspace:
    """Buffers for slices of at most MAX_SLICE_ROWS rows whose phases have at most `num_chunks` chunks.

    Only what decode attention keeps of each block of context grows with the context, by doubling.
    """

    def __init__(self, config: ModelConfig, num_chunks: int) -> None:
        self._num_kv_heads = config.num_kv_heads
        self._window = None if config.window is None else config.window.num_tokens
        self._group_heads = config.num_heads // config.num_kv_heads
        self.buffers = _make_buffers(config, num_chunks)

    def plan_attention(self, arrays: SliceArrays) -> Extent:
        """Lists the work items of the slice's attention in the buffers. Its layers and stages are still none."""
        decodes = num_decode_items(arrays.decode_lengths, self._num_kv_heads, NO_WINDOW)
        prefills = num_prefill_items(arrays.num_tokens, self._num_kv_heads, self._group_heads)
        self._make_room(decodes, prefills)
        buffers = self.buffers
        plan_decode(arrays.decode_lengths, self._num_kv_heads, NO_WINDOW, buffers.decode_items)
        windowed = 0
        if self._window is not None:
            windowed = plan_decode(arrays.decode_lengths, self._num_kv_heads, self._window, buffers.window_items)
        plan_prefill(arrays.num_tokens, self._num_kv_heads, self._group_heads, buffers.prefill_items)
        return Extent(decodes, windowed, prefills, 0, 0, 0, 0)

    def gather(self, rows: Ints) -> None:
        """Makes `rows` the first rows of what the last layer's attention and all behind it read."""
        for numbers in (self.buffers.hidden, self.buffers.qkv):
            numbers[: len(rows)] = numbers[rows]

    def _make_room(self, num_decodes: int, num_prefills: int) -> None:
        buffers = self.buffers
        if num_decodes > len(buffers.decode_items):
            room = 1 << (num_decodes - 1).bit_length()
            self.buffers = buffers = buffers._replace(
                decode_items=np.zeros((room, 3), np.int32),
                window_items=np.zeros((room, 3), np.int32),
                partials=np.empty((room, buffers.partials.shape[1]), np.float32),
            )
        if num_prefills > len(buffers.prefill_items):
            room = 1 << (num_prefills - 1).bit_length()
            self.buffers = buffers._replace(prefill_items=np.zeros((room, 3), np.int32))


def _make_buffers(config: ModelConfig, num_chunks: int) -> Buffers:
    rows, hidden, inner = MAX_SLICE_ROWS, config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    group_heads = config.num_heads // config.num_kv_heads

    def floats(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.empty(shape, np.float32)

    return Buffers(
        hidden=floats(rows, hidden),
        branch=floats(rows if config.post_norms else 0, hidden),
        rows_hidden=empty_rows(rows, hidden),
        qkv=floats(rows, qkv),
        attended=floats(rows, heads),
        rows_heads=empty_rows(rows, heads),
        gate_up=floats(rows, 2 * inner),
        rows_inner=empty_rows(rows, inner),
        part=floats(rows * max(qkv, 2 * inner)),
        decode_items=np.zeros((_FIRST_ITEMS, 3), np.int32),
        window_items=np.zeros((_FIRST_ITEMS, 3), np.int32),
        prefill_items=np.zeros((_FIRST_ITEMS, 3), np.int32),
        partials=floats(_FIRST_ITEMS, decode_partial_floats(group_heads, config.head_dim)),
        decode_scratch=floats(num_chunks, decode_scratch_floats(group_heads)),
        prefill_scratch=floats(num_chunks, prefill_scratch_floats(group_heads, config.head_dim)),
        last_hidden=floats(rows, hidden),
        logits=floats(rows, config.vocab_size),
        block_maxima=floats(rows, num_scan_blocks(config.vocab_size)),
        highest=floats(rows),
        argmax=np.empty(rows, np.int32),
    )


def _embedding(matrices: Mapping[str, Parts]) -> Parts:
    return matrices.get("embedding", matrices["head"])


def _describe(packed: PackedWeights, parts: Parts, rows: Longs) -> None:
    for row, part in zip(rows, parts, strict=False):
        row[BITS], row[NUM_OUTPUTS] = part.kind, part.num_outputs
        row[OFFSET], row[NUM_BYTES] = packed.offset_of(part), part.data.nbytes
