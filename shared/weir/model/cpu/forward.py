"""The forward pass of one slice as one compiled function, run by all threads of a team at once.

Every phase is cut into chunks whose results do not depend on who computes them, nor on how many there are. So the bits
of a row depend on that row and its context alone: not on the batch, the cut into slices and chunks of prompts, or the
number of threads.
"""

from typing import Any

import numpy as np

from weir.model.cpu.slices import SliceArrays
from weir.model.cpu.workspace import (
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
    BrainFloats,
    Buffers,
    Bytes,
    Extent,
    Floats,
    Ints,
    Longs,
    Model,
)
from weir.ops.cpu.attention import NO_WINDOW, Scoring
from weir.ops.cpu.embedding import embedding_range
from weir.ops.cpu.gated import gated_quantize_range
from weir.ops.cpu.head_norm import norm_heads
from weir.ops.cpu.linear import linear_range, share_start
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS
from weir.ops.cpu.paged_decode import decode_blocks, decode_merge
from weir.ops.cpu.paged_prefill import paged_prefill
from weir.ops.cpu.quantize import quantize_range
from weir.ops.cpu.quantized_rows import GROUP
from weir.ops.cpu.rms_norm import rms_norm_add_range, rms_norm_quantize_range
from weir.ops.cpu.rotary_kv_write import rotary_kv_write
from weir.ops.cpu.sampling_scan import scan_rows
from weir.ops.cpu.softcap import cap_rows
from weir.ops.simd.jit import inlined, kernel
from weir.ops.simd.phases import PhaseState, chunk_is_done, now_ns, take_chunk, wait_for_phase

NORM, QKV, ROTARY, ATTEND, MERGE, OUTPUT, MLP_NORM, GATES, ACTIVATE, MLP_OUTPUT, NUM_STAGES = range(11)
LAST_NORM, LOGITS, SCAN, NUM_LOGITS_STAGES = range(4)
NUM_TIMES = NUM_STAGES + NUM_LOGITS_STAGES

_REPLACES, _ADDS = np.bool_(False), np.bool_(True)
_ZERO: Any = np.int64(0)
_ONE: Any = np.int64(1)
"""Not Python's own: of those numba compiles what they are handed to once for each."""


@kernel
def forward(
    model: Model,
    buffers: Buffers,
    arrays: SliceArrays,
    pages: BrainFloats,
    extent: Extent,
    times_ns: Longs | None,
    state: PhaseState,
    base: int,
    num_chunks: int,
) -> None:
    """What one thread of a team runs. `pages` [num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim].

    The time that a chunk's work takes is added to `times_ns` [chunks, NUM_TIMES]: those of a layer's stages, then those
    of the logits'. With None, what serves, nothing of that is compiled.
    """
    phase = 0
    for layer in range(extent.first_layer, extent.last_layer):
        first_stage = extent.first_stage if layer == extent.first_layer else 0
        last_stage = extent.last_stage if layer == extent.last_layer - 1 else NUM_STAGES
        for stage in range(first_stage, last_stage):
            chunk = take_chunk(state, base, phase, num_chunks)
            while chunk >= 0:
                if times_ns is not None:
                    times_ns[chunk, stage] -= now_ns()
                if stage <= MERGE:
                    _attention_stage(stage, model, buffers, arrays, pages, extent, layer, chunk, num_chunks)
                else:
                    _mlp_stage(stage, model, buffers, arrays.token_ids.size, layer, chunk, num_chunks)
                if times_ns is not None:
                    times_ns[chunk, stage] += now_ns()
                chunk_is_done(state)
                chunk = take_chunk(state, base, phase, num_chunks)
            phase = wait_for_phase(state, base, phase, num_chunks)
    is_whole = extent.last_layer == model.layer_parts.shape[0] and extent.last_stage == NUM_STAGES
    if not is_whole or arrays.logit_rows.size == 0:
        return
    for stage in range(NUM_LOGITS_STAGES):
        chunk = take_chunk(state, base, phase, num_chunks)
        while chunk >= 0:
            if times_ns is not None:
                times_ns[chunk, NUM_STAGES + stage] -= now_ns()
            _logits_stage(stage, model, buffers, arrays.logit_rows, chunk, num_chunks)
            if times_ns is not None:
                times_ns[chunk, NUM_STAGES + stage] += now_ns()
            chunk_is_done(state)
            chunk = take_chunk(state, base, phase, num_chunks)
        phase = wait_for_phase(state, base, phase, num_chunks)


@inlined
def _attention_stage(
    stage: int,
    model: Model,
    buffers: Buffers,
    arrays: SliceArrays,
    pages: BrainFloats,
    extent: Extent,
    layer: int,
    chunk: int,
    num_chunks: int,
) -> None:
    """One chunk of a stage from the residual stream to what attention gives."""
    num_rows = arrays.token_ids.size
    first_row, last_row = num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks
    rows, qkv = buffers.rows_hidden[:num_rows], buffers.qkv[:num_rows]
    if stage == NORM:
        hidden = buffers.hidden[:num_rows]
        if layer == 0:
            part = model.end_parts[EMBEDDING, 0]
            weights = model.data[part[OFFSET] : part[OFFSET] + part[NUM_BYTES]]
            factor = model.embedding_scale
            embedding_range(weights, part[BITS], factor, arrays.token_ids, hidden, first_row, last_row)
        elif model.post_norms.size > 0:
            before = model.post_norms[2 * layer - 1]
            rms_norm_add_range(buffers.branch[:num_rows], before, model.epsilon, hidden, first_row, last_row)
        rms_norm_quantize_range(hidden, model.norms[2 * layer], model.epsilon, rows, first_row, last_row)
    elif stage == QKV:
        parts = model.layer_parts[layer, QUERY_KEY_VALUE]
        linear_share(model.data, parts, rows, qkv, buffers.part, _REPLACES, chunk, num_chunks)
    elif stage == ROTARY:
        if model.query_key_value_bias.size > 0:
            _add_bias(qkv, model.query_key_value_bias[layer], first_row, last_row)
        if model.query_key_norms.size > 0:
            norms = model.query_key_norms[2 * layer : 2 * layer + 2]
            norm_heads(qkv, norms, model.num_heads, model.num_kv_heads, model.epsilon, first_row, last_row)
        is_local = model.windows[layer] < NO_WINDOW
        cosines = model.local_cosines if is_local else model.cosines
        sines = model.local_sines if is_local else model.sines
        rotary_kv_write(qkv, arrays.positions, arrays.page_ids, cosines, sines, pages, layer, chunk, num_chunks)
    elif stage == ATTEND:
        _attend(model, buffers, arrays, pages, extent, layer, chunk, num_chunks)
    else:
        _merge(model, buffers, arrays, extent, layer, chunk, num_chunks)


@inlined
def _attend(
    model: Model,
    buffers: Buffers,
    arrays: SliceArrays,
    pages: BrainFloats,
    extent: Extent,
    layer: int,
    chunk: int,
    num_chunks: int,
) -> None:
    """One chunk of the attention of all rows; that of decode rows is still in blocks."""
    num_rows, num_decodes = arrays.token_ids.size, arrays.decode_lengths.size
    group_heads = model.num_heads // model.num_kv_heads
    qkv = buffers.qkv[:num_rows]
    scoring = Scoring(model.windows[layer], model.scale, model.cap_factor)
    is_local = scoring.window < NO_WINDOW
    decode_blocks(
        qkv,
        arrays.decode_rows,
        arrays.decode_lengths,
        arrays.block_tables[:num_decodes],
        pages,
        layer,
        group_heads,
        scoring,
        buffers.window_items if is_local else buffers.decode_items,
        extent.num_window_items if is_local else extent.num_decode_items,
        buffers.partials,
        buffers.decode_scratch,
        chunk,
        num_chunks,
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
        scoring,
        buffers.prefill_items,
        extent.num_prefill_items,
        buffers.prefill_scratch,
        buffers.attended[:num_rows],
        chunk,
        num_chunks,
    )


@inlined
def _merge(
    model: Model, buffers: Buffers, arrays: SliceArrays, extent: Extent, layer: int, chunk: int, num_chunks: int
) -> None:
    """Merges one chunk of the decode rows and quantizes it, and one of the other rows."""
    num_rows, num_decodes = arrays.token_ids.size, arrays.decode_lengths.size
    attended, rows = buffers.attended[:num_rows], buffers.rows_heads[:num_rows]
    is_local = model.windows[layer] < NO_WINDOW
    decode_merge(
        arrays.decode_rows,
        buffers.window_items if is_local else buffers.decode_items,
        extent.num_window_items if is_local else extent.num_decode_items,
        model.num_heads // model.num_kv_heads,
        attended.shape[1] // model.num_heads,
        model.scale,
        buffers.partials,
        attended,
        chunk,
        num_chunks,
    )
    groups_a_row = attended.shape[1] // GROUP
    first, last = num_decodes * chunk // num_chunks, num_decodes * (chunk + 1) // num_chunks
    quantize_range(attended, rows, first * groups_a_row, last * groups_a_row)
    first_group, num_groups = num_decodes * groups_a_row, (num_rows - num_decodes) * groups_a_row
    quantize_range(
        attended,
        rows,
        first_group + num_groups * chunk // num_chunks,
        first_group + num_groups * (chunk + 1) // num_chunks,
    )


@inlined
def _mlp_stage(
    stage: int, model: Model, buffers: Buffers, num_rows: int, layer: int, chunk: int, num_chunks: int
) -> None:
    """One chunk of a stage from what attention gives to the residual stream, through the gated MLP.

    What is normed before it is added waits in `buffers.branch`; the next norm of `hidden` adds it.
    """
    hidden, rows = buffers.hidden[:num_rows], buffers.rows_hidden[:num_rows]
    has_branch = model.post_norms.size > 0
    added_to = buffers.branch[:num_rows] if has_branch else hidden
    is_added = _REPLACES if has_branch else _ADDS
    gate_up, rows_inner = buffers.gate_up[:num_rows], buffers.rows_inner[:num_rows]
    if stage == OUTPUT:
        parts = model.layer_parts[layer, ATTENTION_OUTPUT]
        rows_heads = buffers.rows_heads[:num_rows]
        linear_share(model.data, parts, rows_heads, added_to, buffers.part, is_added, chunk, num_chunks)
    elif stage == MLP_NORM:
        first_row, last_row = num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks
        if model.attention_output_bias.size > 0:
            _add_bias(added_to, model.attention_output_bias[layer], first_row, last_row)
        if has_branch:
            before = model.post_norms[2 * layer]
            rms_norm_add_range(added_to, before, model.epsilon, hidden, first_row, last_row)
        rms_norm_quantize_range(hidden, model.norms[2 * layer + 1], model.epsilon, rows, first_row, last_row)
    elif stage == GATES:
        parts = model.layer_parts[layer, GATE_UP]
        linear_share(model.data, parts, rows, gate_up, buffers.part, _REPLACES, chunk, num_chunks)
    elif stage == ACTIVATE:
        num_groups = num_rows * gate_up.shape[1] // (2 * GROUP)
        first_group, last_group = num_groups * chunk // num_chunks, num_groups * (chunk + 1) // num_chunks
        gated_quantize_range(gate_up, rows_inner, model.is_gelu, first_group, last_group)
    else:
        parts = model.layer_parts[layer, DOWN]
        linear_share(model.data, parts, rows_inner, added_to, buffers.part, is_added, chunk, num_chunks)


@inlined
def _logits_stage(stage: int, model: Model, buffers: Buffers, logit_rows: Ints, chunk: int, num_chunks: int) -> None:
    """Logits of the rows that want them: their norm, the head, and what sampling needs to know of all of them."""
    num_logits = logit_rows.size
    first, last = num_logits * chunk // num_chunks, num_logits * (chunk + 1) // num_chunks
    last_hidden, rows = buffers.last_hidden[:num_logits], buffers.rows_hidden[:num_logits]
    if stage == LAST_NORM:
        for number in range(first, last):
            for column in range(last_hidden.shape[1]):  # an assignment of rows takes the compiler seconds
                last_hidden[number, column] = buffers.hidden[logit_rows[number], column]
            if model.post_norms.size > 0:
                _add_branch(buffers.branch, logit_rows[number], model, last_hidden, number)
        rms_norm_quantize_range(last_hidden, model.norms[model.norms.shape[0] - 1], model.epsilon, rows, first, last)
    elif stage == LOGITS:
        logits = buffers.logits[:num_logits]
        linear_share(model.data, model.end_parts[HEAD], rows, logits, buffers.part, _REPLACES, chunk, num_chunks)
    else:
        if model.logit_softcap > 0:
            cap_rows(buffers.logits[first:last], model.logit_softcap)
        scan_rows(
            buffers.logits[first:last],
            buffers.block_maxima[first:last],
            buffers.highest[first:last],
            buffers.argmax[first:last],
        )


@inlined
def _add_branch(branch: Floats, row: int, model: Model, out: Floats, number: int) -> None:
    """What the last layer's MLP gives, to row `number` of `out`."""
    norm = model.post_norms[model.post_norms.shape[0] - 1]
    rms_norm_add_range(branch[row : row + 1], norm, model.epsilon, out[number : number + 1], _ZERO, _ONE)


@kernel
def linear_share(
    data: Bytes,
    parts: Longs,
    rows: Bytes,
    out: Floats,
    part_out: Floats,
    is_added: Any,
    chunk: int,
    num_chunks: int,
) -> None:
    """One chunk of `out` [m, outputs] = or += rows times a matrix of one or more parts [parts, 4]."""
    num_rows = out.shape[0]
    column = 0
    for part in parts:
        if part[BITS] == 0:
            return
        num_outputs = part[NUM_OUTPUTS]
        num_blocks = (num_outputs + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
        first = share_start(num_blocks, chunk, num_chunks, num_rows)
        last = share_start(num_blocks, chunk + 1, num_chunks, num_rows)
        weights = data[part[OFFSET] : part[OFFSET] + part[NUM_BYTES]]
        if num_outputs == out.shape[1]:
            linear_range(rows, weights, part[BITS], out, is_added, first, last)
        else:
            into = part_out[num_rows * column : num_rows * (column + num_outputs)].reshape(num_rows, num_outputs)
            linear_range(rows, weights, part[BITS], into, _REPLACES, first, last)
            first_column, last_column = first * BLOCK_OUTPUTS, min(last * BLOCK_OUTPUTS, num_outputs)
            for row in range(num_rows):
                for index in range(first_column, last_column):
                    value = into[row, index]
                    out[row, column + index] = out[row, column + index] + value if is_added else value
        column += num_outputs


@inlined
def _add_bias(out: Floats, bias: Floats, first_row: int, last_row: int) -> None:
    for row in range(first_row, last_row):
        for column in range(bias.size):
            out[row, column] += bias[column]
