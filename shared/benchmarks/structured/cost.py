"""What grammars add to a decode step, and how long schemas take to compile.

    python -m benchmarks.structured.cost
    python -m benchmarks.structured.cost --rounds 9 --sequences 32

Steps of the built-in model in int8, with no server around it: each round runs a batch without grammars and the same one
with them in turns, half of the sequences greedy, half sampled. The last line is the summary, with what the machine can
do at most: reading every weight once a step. Processor time is that of the thread that runs the step: on a busy machine
it says more than the clock.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.structured.drawing import real_tokenizer
from benchmarks.structured.engine_checks import percentiles
from benchmarks.structured.schemas import schema_example
from weir.bench.step import memory_bandwidth
from weir.bench.step_shapes import StepShape
from weir.core.grammar import Grammar
from weir.core.sampling import SamplingParams
from weir.engine.masking import masking_runner
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, StepPlan, StepResult
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.masks import GrammarState, MaskFiller
from weir.grammar.protocol import CompiledGrammar, Vocabulary
from weir.model.cpu.core_share import FixedShare
from weir.model.files.source import resolve_model
from weir.model.load import load_model
from weir.model.rows import SampledRow
from weir.model.sampler import sample_step, scan_of

_MODEL = "smollm2-135m"
_CONTEXT_TOKENS = 161
_STEPS_A_TURN = 12
_COMPILED_SCHEMAS = 300
_ROWS = 32
_ROW_STEPS = 60
_SPREAD = np.float32(4.0)
"""Of random logits: few tokens are likely, as a model's."""


class Grammars(NamedTuple):
    """`None`: the same batch without any."""

    name: str
    compiled: CompiledGrammar | None


class StepMs(NamedTuple):
    """`cpu`: of the thread that runs the step."""

    wall: float
    cpu: float


class _Batch:
    """Sequences that decode at one place again and again, each after its own tokens so far in its own grammar."""

    def __init__(self, plan: StepPlan, grammars: Grammars, end_token_ids: Sequence[int]) -> None:
        self._plan = plan
        self._compiled = grammars.compiled
        self._end_token_ids = end_token_ids
        self._states = [self._new_state() for _ in plan.chunks]

    def step(self, runner: ModelRunner, number: int) -> StepMs:
        chunks = tuple(
            chunk._replace(sample=SampleSpec(_params(index), number, mask=state))
            for index, (chunk, state) in enumerate(zip(self._plan.chunks, self._states, strict=True))
        )
        plan = replace(self._plan, chunks=chunks)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        result = runner.run(plan)
        took = StepMs((time.perf_counter() - began_s) * 1e3, (time.thread_time() - began_cpu_s) * 1e3)
        self._states = [self._next_state(*pair, result.token_ids) for pair in zip(chunks, self._states, strict=True)]
        return took

    def _new_state(self) -> GrammarState | None:
        return GrammarState(self._compiled.matcher()) if self._compiled is not None else None

    def _next_state(self, chunk: ChunkPlan, state: GrammarState | None, token_ids: Any) -> GrammarState | None:
        if state is None:
            return None
        assert state.error == "", state.error
        token_id = token_ids[chunk.slot]
        if token_id in self._end_token_ids:
            return self._new_state()
        state.accept(token_id)
        return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    _, vocabulary = real_tokenizer()
    engine = LlguidanceEngine(vocabulary)
    _show_compile_times(engine)
    kinds = [Grammars("none", None), *(Grammars(name, engine.compile(source)) for name, source in _sources().items())]
    row_costs = _show_row_costs(kinds, vocabulary)
    weights = load_model(resolve_model(_MODEL), "int8", FixedShare(asked.threads))
    floor_ms = weights.num_bytes / memory_bandwidth() * 1e3
    shapes = {number: StepShape(num_decodes=number, context_tokens=_CONTEXT_TOKENS) for number in asked.sequences}
    pages = np.empty((max(shape.num_pages for shape in shapes.values()), weights.page_geometry.page_bytes), np.uint8)
    pages.fill(0)
    runner = weights.runner_over(pages)
    runner.warm_up()
    filler = MaskFiller(vocabulary.num_words)
    masked = masking_runner(runner, filler.begin)
    worst = []
    for number, shape in shapes.items():
        batches = {
            kind.name: _Batch(shape.plan(len(vocabulary.token_bytes)), kind, vocabulary.end_token_ids) for kind in kinds
        }
        worst.append(_measure(number, batches, masked, asked.rounds, filler))
    filler.close()
    shares = ", ".join(f"{share:+.1%} at {number}" for number, share in zip(shapes, worst, strict=True))
    print(
        f"summary: grammars add at most {shares} sequences; {asked.threads} threads; this machine reads all weights in "
        f"{floor_ms:.2f} ms; {row_costs}"
    )


def _measure(number: int, batches: dict[str, _Batch], runner: ModelRunner, rounds: int, filler: MaskFiller) -> float:
    """Prints a line for each kind of grammar. Returns the largest share of a step that one adds."""
    medians: dict[str, list[StepMs]] = {name: [] for name in batches}
    for round_number in range(rounds + 1):
        for name, batch in batches.items():
            times = [batch.step(runner, step) for step in range(_STEPS_A_TURN)]
            if round_number > 0:  # the first one warms up
                medians[name].append(StepMs(*map(statistics.median, zip(*times, strict=True))))
    bare = statistics.median(step.wall for step in medians["none"])
    bare_cpu = statistics.median(step.cpu for step in medians["none"])
    added = []
    for name, found in medians.items():
        turns = [one.wall - other.wall for one, other in zip(found, medians["none"], strict=True)]
        wall, cpu = (statistics.median(times) for times in zip(*found, strict=True))
        added.append(statistics.median(turns))
        print(
            f"{number} sequences, {name}: {wall:.2f} ms, added {added[-1]:+.2f} "
            f"({min(turns):+.2f} to {max(turns):+.2f}), {added[-1] / bare:+.1%}; "
            f"processor {cpu:.2f} ms, added {cpu - bare_cpu:+.2f}",
            flush=True,
        )
    figures = filler.metrics()
    mean_us = figures["grammar_mask_s_total"] / figures["grammar_masks_total"] * 1e6
    print(f"masks so far: {mean_us:.0f} us each, in their thread")
    return max(added) / bare


class _RowCosts:
    """A runner without a model, whose logits are random: what masks and sampling take alone, in processor time, which a
    busy machine tells too."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._num_words = vocabulary.num_words
        logits = np.random.default_rng(0).standard_normal((_ROWS, len(vocabulary.token_bytes)), np.float32)
        self._scan = scan_of(logits * _SPREAD)
        self.mask_us: list[float] = []
        self.sample_us: list[float] = []

    def run(self, plan: StepPlan) -> StepResult:
        rows = [SampledRow(chunk.slot, 0, chunk.sample) for chunk in plan.chunks if chunk.sample is not None]
        began_s = time.thread_time()
        for row in rows:
            if isinstance(row.spec.mask, GrammarState):
                self._fill(row.spec.mask)
        filled_s = time.thread_time()
        result = sample_step(self._scan, rows)
        self.sample_us.append((time.thread_time() - filled_s) * 1e6 / len(rows))
        self.mask_us.append((filled_s - began_s) * 1e6 / len(rows))
        return result

    def _fill(self, state: GrammarState) -> None:
        words, filled = np.zeros(self._num_words, np.uint32), Future[None]()
        state.fill(words)
        filled.set_result(None)
        state.attach(filled, words)


def _show_row_costs(kinds: Sequence[Grammars], vocabulary: Vocabulary) -> str:
    """Returns the summary's part."""
    plan = StepShape(num_decodes=_ROWS, context_tokens=1).plan(len(vocabulary.token_bytes))
    bare_us, most_mask_us, most_added_us = 0.0, 0.0, 0.0
    for kind in kinds:
        costs, batch = _RowCosts(vocabulary), _Batch(plan, kind, vocabulary.end_token_ids)
        for number in range(_ROW_STEPS):
            batch.step(costs, number)
        mask_us, sample_us = statistics.mean(costs.mask_us), statistics.median(costs.sample_us)
        bare_us = bare_us or sample_us
        most_mask_us, most_added_us = max(most_mask_us, mask_us), max(most_added_us, sample_us - bare_us)
        print(
            f"a row, {kind.name}: mask {mask_us:.0f} us beside the step, sampling {sample_us:.0f} us in it", flush=True
        )
    return f"a row's mask takes at most {most_mask_us:.0f} us beside the step, sampling {most_added_us:+.0f} us in it"


def _show_compile_times(engine: LlguidanceEngine) -> None:
    generated = (Grammar.json_schema(schema_example(seed).schema) for seed in range(_COMPILED_SCHEMAS))
    p50, p99 = percentiles([_compile_ms(engine, source) for source in generated])
    print(f"compile, {_COMPILED_SCHEMAS} generated schemas: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    for name, source in _sources().items():
        print(f"compile, {name} ({source.num_bytes} bytes): {_compile_ms(engine, source):.1f} ms")


def _compile_ms(engine: LlguidanceEngine, source: Grammar) -> float:
    began_s = time.perf_counter()
    engine.compile(source)
    return (time.perf_counter() - began_s) * 1e3


def _sources() -> dict[str, Grammar]:
    """Of three sizes: strings without bounds, rows of records, and a form of many hundred keys."""
    record: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["tree", "bush", "herb", "moss"]},
            "height_m": {"type": "number", "minimum": 0, "maximum": 120},
            "found": {"type": "string", "format": "date"},
        },
        "required": ["name", "kind", "height_m", "found"],
        "additionalProperties": False,
    }
    form = {
        f"field {number}": {
            "anyOf": [record, {"type": "string", "pattern": f"^{number}-[A-Z]{{3}}$"}, {"type": "null"}]
        }
        for number in range(120)
    }
    return {
        "small": Grammar.json_schema(
            {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        ),
        "middle": Grammar.json_schema({"type": "array", "items": record, "minItems": 3}),
        "large": Grammar.json_schema({"type": "object", "properties": form}),
    }


def _params(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.0) if index % 2 else SamplingParams(temperature=0.9, top_p=0.95, seed=index)


if __name__ == "__main__":
    main()
