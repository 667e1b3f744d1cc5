"""Where the time of an int8 decode step goes, by leaving parts of it out."""

import statistics
from collections.abc import Callable

from weir.bench.step_times import DecodeSplit, decode_plan, timed_ms
from weir.model.core_share import CoreShare
from weir.model.cpu_forward import linear_share
from weir.model.cpu_state import ATTENTION_OUTPUT, DOWN, GATE_UP, QUERY_KEY_VALUE, Buffers, Model
from weir.model.cpu_workspace import Workspace, make_model
from weir.model.crew import Crew
from weir.model.load import Int8Weights, Runner
from weir.ops.simd.barrier import BarrierState, wait_for_all
from weir.ops.simd.jit import kernel

_REPEATS = 15


def measure_split(weights: Int8Weights, runner: Runner, share: CoreShare, num_sequences: int) -> DecodeSplit:
    """What is a difference of two measurements has the noise of both."""
    model, buffers = make_model(weights.config, weights.packed), Workspace(weights.config, share.most).buffers
    crew = Crew(share)

    def linears(barrier: BarrierState, base: int, thread: int, num_threads: int) -> None:
        _linears(model, buffers, num_sequences, barrier, base, thread, num_threads)

    linear_ms = _median_ms(lambda: crew.run(linears))
    whole, headless = decode_plan(num_sequences), decode_plan(num_sequences, is_sampled=False)
    short = decode_plan(num_sequences, context_tokens=1, is_sampled=False)
    whole_ms = _median_ms(lambda: runner.run(whole))
    headless_ms = _median_ms(lambda: runner.run(headless))
    short_ms = _median_ms(lambda: runner.run(short))
    return DecodeSplit(
        num_sequences,
        linear_ms=linear_ms,
        head_ms=whole_ms - headless_ms,
        attention_ms=headless_ms - short_ms,
        rest_ms=short_ms - linear_ms,
    )


def _median_ms(call: Callable[[], object]) -> float:
    return statistics.median(timed_ms(call, _REPEATS))


@kernel
def _linears(
    model: Model, buffers: Buffers, num_rows: int, barrier: BarrierState, base: int, thread: int, num_threads: int
) -> None:
    """The linear layers of all layers and nothing else."""
    rows_hidden, rows_heads = buffers.rows_hidden[:num_rows], buffers.rows_heads[:num_rows]
    qkv, gate_up, hidden = buffers.qkv[:num_rows], buffers.gate_up[:num_rows], buffers.hidden[:num_rows]
    data, part = model.data, buffers.part
    passed = 0
    for parts in model.layer_parts:
        linear_share(data, parts[QUERY_KEY_VALUE], rows_hidden, qkv, part, False, thread, num_threads)
        passed = wait_for_all(barrier, base, passed, num_threads)
        linear_share(data, parts[ATTENTION_OUTPUT], rows_heads, hidden, part, True, thread, num_threads)
        passed = wait_for_all(barrier, base, passed, num_threads)
        linear_share(data, parts[GATE_UP], rows_hidden, gate_up, part, False, thread, num_threads)
        passed = wait_for_all(barrier, base, passed, num_threads)
        linear_share(data, parts[DOWN], buffers.rows_inner[:num_rows], hidden, part, True, thread, num_threads)
        passed = wait_for_all(barrier, base, passed, num_threads)
