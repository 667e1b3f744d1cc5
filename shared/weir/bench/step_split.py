"""Where the milliseconds of an int8 step go: a clock around every chunk of every stage, in a step that is whole."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from weir.bench.step_shapes import StepShape
from weir.model.cpu import forward
from weir.model.cpu.core_share import FixedShare
from weir.model.cpu.runner import CpuRunner
from weir.model.cpu.threads import most_chunks
from weir.model.cpu.workspace import Longs
from weir.model.load import Int8Weights, Pages

_REPEATS = 9
_HEAD = tuple(forward.NUM_STAGES + stage for stage in (forward.LAST_NORM, forward.LOGITS, forward.SCAN))
_STAGES: Mapping[str, Sequence[int]] = {
    "query, key, value": (forward.QKV,),
    "attention output": (forward.OUTPUT,),
    "gate, up": (forward.GATES,),
    "down": (forward.MLP_OUTPUT,),
    "attention": (forward.ATTEND,),
    "merge, quantize": (forward.MERGE,),
    "rotary, KV write": (forward.ROTARY,),
    "norms, embedding": (forward.NORM, forward.MLP_NORM),
    "SiLU": (forward.ACTIVATE,),
    "head": _HEAD,
}


@dataclass(frozen=True, slots=True)
class StepSplit:
    """One step, the median of some. `parts_ms` add up to `whole_ms`: what n threads do counts an nth.

    `waiting`: threads that begin, end or wait for others' chunks; `Python`: between the compiled calls.
    """

    name: str
    whole_ms: float
    parts_ms: Mapping[str, float]


class _TimedShare(FixedShare):
    """Adds up how long the compiled calls last."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.calls_ns = 0

    def begin(self) -> int:
        self.calls_ns -= time.perf_counter_ns()
        return super().begin()

    def end(self) -> None:
        self.calls_ns += time.perf_counter_ns()


def measure_splits(
    weights: Int8Weights, shapes: Mapping[str, StepShape], pages: Pages, num_threads: int
) -> tuple[StepSplit, ...]:
    """Of each step under its name. The clocks, two calls a chunk, are in the times of the chunks."""
    share = _TimedShare(num_threads)
    times_ns = np.zeros((most_chunks(num_threads), forward.NUM_TIMES), np.int64)
    runner = CpuRunner(weights.config, weights.packed, pages, share, times_ns)
    runner.warm_up()
    splits = []
    for name, shape in shapes.items():
        plan = shape.plan(weights.config.vocab_size)
        runner.run(plan)
        found = [_measure_once(name, partial(runner.run, plan), times_ns, share) for _ in range(_REPEATS)]
        splits.append(sorted(found, key=lambda split: split.whole_ms)[_REPEATS // 2])
    return tuple(splits)


def _measure_once(name: str, run: Callable[[], object], times_ns: Longs, share: _TimedShare) -> StepSplit:
    times_ns[:] = 0
    share.calls_ns = 0
    start_ns = time.perf_counter_ns()
    run()
    whole_ns = time.perf_counter_ns() - start_ns
    by_stage = times_ns.sum(axis=0) / share.most
    parts_ns = {part: float(sum(by_stage[stage] for stage in stages)) for part, stages in _STAGES.items()}
    parts_ns |= {"waiting": share.calls_ns - float(by_stage.sum()), "Python": float(whole_ns - share.calls_ns)}
    return StepSplit(name, whole_ns / 1e6, {part: time_ns / 1e6 for part, time_ns in parts_ns.items()})
