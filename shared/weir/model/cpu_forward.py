"""The forward pass of one slice as one compiled function, run by all threads of a crew at once.

Every phase is shared among the threads by work items whose results do not depend on who computes them, and ends at a
barrier. So the bits of a row depend on that row and its context alone: not on the batch, the cut into slices and
chunks, or the number of threads.
"""

from weir.model.cpu_state import (
    ATTENTION_OUTPUT,
    BITS,
    DOWN,
    EMBEDDING,
    GATE_UP,
    HEAD,
    NUM_BYTES,
    NUM_OUTPUTS,
    OFFSET,
    QUERY_KEY_VALUE,
    Buffers,
    Bytes,
    Extent,
    Floats,
    Ints,
    Longs,
    Model,
)
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
from weir.ops.simd.jit import inlined, kernel


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


@inlined
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
    qkv, rows = buffers.qkv[:num_rows], buffers.rows_heads[:num_rows]
    hidden = buffers.hidden[:num_rows]
    parts = model.layer_parts[layer]
    linear_share(
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
    _attend(model, buffers, arrays, pages, extent, layer, thread, num_threads)
    passed = wait_for_all(barrier, base, passed, num_threads)
    _merge(model, buffers, arrays, extent, thread, num_threads)
    passed = wait_for_all(barrier, base, passed, num_threads)
    linear_share(model.data, parts[ATTENTION_OUTPUT], rows, hidden, buffers.part, True, thread, num_threads)
    passed = wait_for_all(barrier, base, passed, num_threads)
    if model.attention_output_bias.size > 0:
        _add_bias(hidden, model.attention_output_bias[layer], thread, num_threads)
        passed = wait_for_all(barrier, base, passed, num_threads)
    return passed


@inlined
def _attend(
    model: Model,
    buffers: Buffers,
    arrays: SliceArrays,
    pages: Floats,
    extent: Extent,
    layer: int,
    thread: int,
    num_threads: int,
) -> None:
    """This thread's share of the attention of all rows; that of decode rows is still in blocks."""
    num_rows, num_decodes = arrays.token_ids.size, arrays.decode_lengths.size
    group_heads = model.num_heads // model.num_kv_heads
    qkv = buffers.qkv[:num_rows]
    decode_blocks(
        qkv,
        arrays.decode_rows,
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
        buffers.attended[:num_rows],
        thread,
        num_threads,
    )


@inlined
def _merge(model: Model, buffers: Buffers, arrays: SliceArrays, extent: Extent, thread: int, num_threads: int) -> None:
    """Merges this thread's share of the decode rows and quantizes it, and its share of the other rows."""
    num_rows, num_decodes = arrays.token_ids.size, arrays.decode_lengths.size
    attended, rows = buffers.attended[:num_rows], buffers.rows_heads[:num_rows]
    decode_merge(
        arrays.decode_rows,
        buffers.decode_items,
        extent.num_decode_items,
        model.num_heads // model.num_kv_heads,
        attended.shape[1] // model.num_heads,
        buffers.partials,
        attended,
        thread,
        num_threads,
    )
    groups_a_row = attended.shape[1] // GROUP
    first, last = num_decodes * thread // num_threads, num_decodes * (thread + 1) // num_threads
    quantize_range(attended, rows, first * groups_a_row, last * groups_a_row)
    first_group, num_groups = num_decodes * groups_a_row, (num_rows - num_decodes) * groups_a_row
    quantize_range(
        attended,
        rows,
        first_group + num_groups * thread // num_threads,
        first_group + num_groups * (thread + 1) // num_threads,
    )


@inlined
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
    linear_share(
        model.data, parts[GATE_UP], buffers.rows_hidden[:num_rows], gate_up, buffers.part, False, thread, num_threads
    )
    passed = wait_for_all(barrier, base, passed, num_threads)
    num_groups = num_rows * gate_up.shape[1] // (2 * GROUP)
    silu_mul_quantize_range(gate_up, rows, num_groups * thread // num_threads, num_groups * (thread + 1) // num_threads)
    passed = wait_for_all(barrier, base, passed, num_threads)
    linear_share(model.data, parts[DOWN], rows, buffers.hidden[:num_rows], buffers.part, True, thread, num_threads)
    return wait_for_all(barrier, base, passed, num_threads)


@inlined
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
    linear_share(model.data, model.end_parts[HEAD], rows, logits, buffers.part, False, thread, num_threads)
    wait_for_all(barrier, base, passed, num_threads)


@kernel
def linear_share(
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


@inlined
def _add_bias(out: Floats, bias: Floats, thread: int, num_threads: int) -> None:
    """This thread's share of the rows."""
    num_rows = out.shape[0]
    for row in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
        for column in range(bias.size):
            out[row, column] += bias[column]
