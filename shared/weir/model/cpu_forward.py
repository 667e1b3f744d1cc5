"""The forward pass of one slice as one compiled function, run by all threads of a crew at once.

Every phase is shared among the threads by work items whose results do not depend on who computes them, and ends at a
barrier. So the bits of a row depend on that row and its context alone: not on the batch, the cut into slices and
chunks, or the number of threads.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weir.kv.geometry import PAGE_TOKENS
from weir.model.step_slices import SliceArrays
from weir.ops.linear_int8.cpu import linear_range
from weir.ops.linear_int8.embedding import embedding_range
from weir.ops.linear_int8.pack import BLOCK_OUTPUTS
from weir.ops.paged_decode.cpu import decode_blocks, decode_merge
from weir.ops.paged_prefill.cpu import paged_prefill
from weir.ops.quantize.cpu import quantize_range
from weir.ops.quantize.rows import GROUP
from weir.ops.rms_norm.cpu import rms_norm_quantize_range
from weir.ops.rotary_kv_write.cpu import rotary_kv_write
from weir.ops.silu_mul.cpu import silu_mul_quantize_range
from weir.ops.simd.barrier import BarrierState, wait_for_all
from weir.ops.simd.jit import kernel

Floats = npt.NDArray[np.float32]
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
    the attention kernels; `*_scratch` [threads, …]. `last_hidden` and `logits` [logits, …].
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


class Extent(NamedTuple):
    """How much of a slice one call computes: layers [first_layer, last_layer), and logits after the last of all."""

    num_decode_items: int
    num_prefill_items: int
    first_layer: int
    last_layer: int


@kernel
def forward(
    model: Model,
    buffers: Buffers,
    arrays: SliceArrays,
    pages: Floats,
    extent: Extent,
    barrier: BarrierState,
    base: int,
    thread: int,
    num_threads: int,
) -> None:
    """This thread's share. `pages` [num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim]."""
    num_rows = arrays.token_ids.size
    first_row, last_row = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
    hidden = buffers.hidden[:num_rows]
    rows = buffers.rows_hidden[:num_rows]
    passed = 0
    if extent.first_layer == 0:
        embedding = model.end_parts[EMBEDDING, 0]
        weights = model.data[embedding[OFFSET] : embedding[OFFSET] + embedding[NUM_BYTES]]
        embedding_range(weights, embedding[BITS], arrays.token_ids, hidden, first_row, last_row)
    for layer in range(extent.first_layer, extent.last_layer):
        # rows are shared as the embedding's were: no barrier between
        rms_norm_quantize_range(hidden, model.norms[2 * layer], model.epsilon, rows, first_row, last_row)
        passed = wait_for_all(barrier, base, passed, num_threads)
        passed = _attention(model, buffers, arrays, pages, extent, layer, barrier, base, passed, thread, num_threads)
        rms_norm_quantize_range(hidden, model.norms[2 * layer + 1], model.epsilon, rows, first_row, last_row)
        passed = wait_for_all(barrier, base, passed, num_threads)
        passed = _mlp(model, buffers, num_rows, layer, barrier, base, passed, thread, num_threads)
    if extent.last_layer == model.layer_parts.shape[0] and arrays.logit_rows.size > 0:
        _logits(model, buffers, arrays.logit_rows, barrier, base, passed, thread, num_threads)


@kernel
def _attention(
    model: Model,
    buffers: Buffers,
    arrays: SliceArrays,
    pages: Floats,
    extent: Extent,
    layer: int,
    barrier: BarrierState,
    base: int,
    passed: int,
    thread: int,
    num_threads: int,
) -> int:
    """From quantized normed rows to the residual stream; returns how many barriers are passed."""
    num_rows = arrays.token_ids.size
    num_decodes = arrays.decode_lengths.size
    group_heads = model.num_heads // model.num_kv_heads
    head_dim = pages.shape[4] // PAGE_TOKENS
    qkv, attended = buffers.qkv[:num_rows], buffers.attended[:num_rows]
    rows = buffers.rows_heads[:num_rows]
    parts = model.layer_parts[layer]
    _linear(
        model.data,
        parts[QUERY_KEY_VALUE],
        buffers.rows_hidden[:num_rows],
        qkv,
        buffers.part,
        False,
        thread,
        num_threads,
    )
    if model.query_key_value_bias.size > 0:
        passed = wait_for_all(barrier, base, passed, num_threads)
        _add_bias(qkv, model.query_key_value_bias[layer], thread, num_threads)
    passed = wait_for_all(barrier, base, passed, num_threads)
    rotary_kv_write(
        qkv, arrays.positions, arrays.page_ids, model.cosines, model.sines, pages, layer, thread, num_threads
    )
    passed = wait_for_all(barrier, base, passed, num_threads)
    decode_rows = arrays.decode_rows
    decode_blocks(
        qkv,
        decode_rows,
        arrays.decode_lengths,
        arrays.block_tables[:num_decodes],
        pages,
        layer,
        group_heads,
        buffers.decode_items,
        extent.num_decode_items,
        buffers.partials,
        buffers.decode_scratch,
        thread,
        num_threads,
    )
    paged_prefill(
        qkv,
        arrays.first_rows,
        arrays.num_tokens,
        arrays.ends,
        arrays.block_tables[num_decodes:],
        pages,
        layer,
        group_heads,
        buffers.prefill_items,
        extent.num_prefill_items,
        buffers.prefill_scratch,
        attended,
        thread,
        num_threads,
    )
    passed = wait_for_all(barrier, base, passed, num_threads)
    decode_merge(
        decode_rows,
        buffers.decode_items,
        extent.num_decode_items,
        group_heads,
        head_dim,
        buffers.partials,
        attended,
        thread,
        num_threads,
    )
    # the rows that this thread has merged just now, and its share of the others
    groups_a_row = attended.shape[1] // GROUP
    quantize_range(
        attended,
        rows,
        num_decodes * thread // num_threads * groups_a_row,
        num_decodes * (thread + 1) // num_threads * groups_a_row,
    )
    first, num_groups = num_decodes * groups_a_row, (num_rows - num_decodes) * groups_a_row
    quantize_range(
        attended, rows, first + num_groups * thread // num_threads, first + num_groups * (thread + 1) // num_threads
    )
    passed = wait_for_all(barrier, base, passed, num_threads)
    hidden = buffers.hidden[:num_rows]
    _linear(model.data, parts[ATTENTION_OUTPUT], rows, hidden, buffers.part, True, thread, num_threads)
    passed = wait_for_all(barrier, base, passed, num_threads)
    if model.attention_output_bias.size > 0:
        _add_bias(hidden, model.attention_output_bias[layer], thread, num_threads)
        passed = wait_for_all(barrier, base, passed, num_threads)
    return passed


@kernel
def _mlp(
    model: Model,
    buffers: Buffers,
    num_rows: int,
    layer: int,
    barrier: BarrierState,
    base: int,
    passed: int,
    thread: int,
    num_threads: int,
) -> int:
    """SwiGLU, from quantized normed rows to the residual stream; returns how many barriers are passed."""
    parts = model.layer_parts[layer]
    gate_up, rows = buffers.gate_up[:num_rows], buffers.rows_inner[:num_rows]
    _linear(
        model.data, parts[GATE_UP], buffers.rows_hidden[:num_rows], gate_up, buffers.part, False, thread, num_threads
    )
    passed = wait_for_all(barrier, base, passed, num_threads)
    num_groups = num_rows * gate_up.shape[1] // (2 * GROUP)
    silu_mul_quantize_range(gate_up, rows, num_groups * thread // num_threads, num_groups * (thread + 1) // num_threads)
    passed = wait_for_all(barrier, base, passed, num_threads)
    _linear(model.data, parts[DOWN], rows, buffers.hidden[:num_rows], buffers.part, True, thread, num_threads)
    return wait_for_all(barrier, base, passed, num_threads)


@kernel
def _logits(
    model: Model,
    buffers: Buffers,
    logit_rows: Ints,
    barrier: BarrierState,
    base: int,
    passed: int,
    thread: int,
    num_threads: int,
) -> None:
    """Logits of the rows that want them."""
    num_logits = logit_rows.size
    last_hidden, rows = buffers.last_hidden[:num_logits], buffers.rows_hidden[:num_logits]
    logits = buffers.logits[:num_logits]
    first, last = num_logits * thread // num_threads, num_logits * (thread + 1) // num_threads
    for number in range(first, last):
        last_hidden[number] = buffers.hidden[logit_rows[number]]
    rms_norm_quantize_range(last_hidden, model.norms[model.norms.shape[0] - 1], model.epsilon, rows, first, last)
    passed = wait_for_all(barrier, base, passed, num_threads)
    _linear(model.data, model.end_parts[HEAD], rows, logits, buffers.part, False, thread, num_threads)
    wait_for_all(barrier, base, passed, num_threads)


@kernel
def _linear(
    data: Bytes,
    parts: Longs,
    rows: Bytes,
    out: Floats,
    part_out: Floats,
    is_added: bool,
    thread: int,
    num_threads: int,
) -> None:
    """This thread's share of `out` [m, outputs] = or += rows times a matrix of one or more parts [parts, 4]."""
    num_rows = out.shape[0]
    column = 0
    for part in parts:
        if part[BITS] == 0:
            return
        num_outputs = part[NUM_OUTPUTS]
        num_blocks = (num_outputs + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
        first, last = num_blocks * thread // num_threads, num_blocks * (thread + 1) // num_threads
        weights = data[part[OFFSET] : part[OFFSET] + part[NUM_BYTES]]
        if num_outputs == out.shape[1]:
            linear_range(rows, weights, part[BITS], out, is_added, first, last)
        else:
            into = part_out[num_rows * column : num_rows * (column + num_outputs)].reshape(num_rows, num_outputs)
            linear_range(rows, weights, part[BITS], into, False, first, last)
            first_column, last_column = first * BLOCK_OUTPUTS, min(last * BLOCK_OUTPUTS, num_outputs)
            for row in range(num_rows):
                for index in range(first_column, last_column):
                    value = into[row, index]
                    out[row, column + index] = out[row, column + index] + value if is_added else value
        column += num_outputs


@kernel
def _add_bias(out: Floats, bias: Floats, thread: int, num_threads: int) -> None:
    """This thread's share of the rows."""
    num_rows = out.shape[0]
    for row in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
        for column in range(bias.size):
            out[row, column] += bias[column]
