"""Sequences with grammars in a batch: each is held to its own, whoever runs beside it, and fails alone."""

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.engine.world import Records, limits, params

from benchmarks.structured.drawing import toy_vocabulary
from weir.core.grammar import Grammar
from weir.core.life import FinishReason
from weir.engine.batching.running import RunningBatcher
from weir.engine.masking import masking_runner
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, Event, FailureReason, PageBundle, SequenceEnded, SequenceKey, TokenSampled
from weir.engine.plan import SampleSpec, StepPlan, StepResult
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.masks import GrammarState, MaskFiller, UnusableGrammar

TOY = toy_vocabulary()
(END,) = TOY.end_token_ids
MARKER = 263
"""A special token, at which the free part of a grammar ends, as reasoning does."""
REASONED = f"""
start: thought <[{MARKER}]> "[" /[0-9]{{3}}/ "]"
thought[max_tokens=5]: /(.|\\n)*/
"""
GRAMMARS = (
    *(Grammar("regex", source) for source in ("[a-d]{3,9}x", "(yes|no)+", '("[0-9]{2}", ){2}', "a(bc)*d")),
    Grammar("grammar", REASONED),
)
FREE = len(GRAMMARS)


@pytest.fixture(scope="module")
def engine() -> LlguidanceEngine:
    return LlguidanceEngine(TOY)


class AnyAllowed:
    """A model without taste: of the tokens that may come one, by the request's seed and the place."""

    def run(self, plan: StepPlan) -> StepResult:
        sampled = {chunk.slot: chunk.sample for chunk in plan.chunks if chunk.sample is not None}
        return StepResult({slot: self._token_of(sample) for slot, sample in sampled.items()})

    def _token_of(self, sample: SampleSpec) -> int:
        words = sample.allowed()
        if words is None:
            return ord("?")
        bits = np.unpackbits(words.view(np.uint8), count=len(TOY.token_bytes), bitorder="little")
        return int(np.random.default_rng((sample.params.seed, sample.output_index)).choice(np.flatnonzero(bits)))


def run_all(states: dict[int, GrammarState | None], earlier: dict[int, list[int]] | None = None) -> list[Event]:
    """Prompts with these grammars in one batch, each after the output that it had earlier, to their ends."""
    batch_limits = replace(limits(), vocab_size=len(TOY.token_bytes))
    batcher = RunningBatcher(batch_limits, PagePool(watermark_pages=0, watermark_slots=0), Records(40, 8).open)
    batcher.pool.give(PageBundle(tuple(range(40)), tuple(range(8))))
    filler = MaskFiller(TOY.num_words)
    runner = masking_runner(AnyAllowed(), filler.begin)
    for number, state in states.items():
        of_it = params((1, 2, 3), number, max_tokens=60, stop_token_ids=(END,), seed=number)
        batcher.add(Arrival(of_it, grammar=state, output_token_ids=tuple((earlier or {}).get(number, ()))))
    for step in range(200):
        plan = batcher.decide(float(step))
        if plan is None:
            break
        batcher.record(plan, runner.run(plan), float(step))
    filler.close()
    assert batcher.check_integrity() == ()
    return list(batcher.take_events())


def tokens_of(events: list[Event], number: int) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenSampled) and event.key == key_of(number)]


def key_of(number: int) -> SequenceKey:
    return SequenceKey.of(params((1,), number))


def end_of(events: list[Event], number: int) -> SequenceEnded:
    (end,) = [event for event in events if isinstance(event, SequenceEnded) and event.key == key_of(number)]
    return end


def states_of(engine: LlguidanceEngine) -> dict[int, GrammarState | None]:
    return {number: GrammarState(engine.compile(grammar).matcher()) for number, grammar in enumerate(GRAMMARS)}


def test_tokens_are_the_same_alone_and_in_a_batch_with_free_ones(engine: LlguidanceEngine) -> None:
    together = run_all({**states_of(engine), FREE: None})
    for number, state in states_of(engine).items():
        alone = run_all({number: state})
        assert tokens_of(together, number) == tokens_of(alone, number)
        assert tokens_of(alone, number)[-1] == END
        assert end_of(alone, number).reason is FinishReason.STOP
    assert tokens_of(together, FREE) == [ord("?")] * 60


def test_who_goes_on_after_any_of_the_output_samples_the_rest_of_it(engine: LlguidanceEngine) -> None:
    for number, grammar in enumerate(GRAMMARS):
        compiled = engine.compile(grammar)
        whole = tokens_of(run_all({number: GrammarState(compiled.matcher())}), number)
        for num_earlier in range(1, len(whole)):
            earlier = whole[:num_earlier]
            rest = run_all({number: GrammarState(compiled.matcher(), earlier)}, {number: earlier})
            assert tokens_of(rest, number) == whole[num_earlier:]


def test_a_grammar_that_cannot_go_on_ends_its_own_sequence_without_a_token(engine: LlguidanceEngine) -> None:
    events = run_all({**states_of(engine), FREE: GrammarState(UnusableGrammar("it is\nnot to be had")), FREE + 1: None})
    failure = end_of(events, FREE).failure
    assert failure is not None
    assert failure.reason is FailureReason.INTERNAL
    assert failure.message == "the grammar of its output cannot go on: it is not to be had"
    assert tokens_of(events, FREE) == []
    assert {end_of(events, number).failure for number in (*range(FREE), FREE + 1)} == {None}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("it is not to be had", "it is not to be had"),
        ('Parser Error: token "secret" doesn\'t satisfy the grammar', "Parser Error"),
        ("no way on from 'secret'", "no way on from"),
    ],
)
def test_what_a_grammar_says_of_an_answer_is_not_told(error: str, told: str) -> None:
    """The failure stands in logs and spans."""
    failure = end_of(run_all({FREE: GrammarState(UnusableGrammar(error))}), FREE).failure
    assert failure is not None
    assert failure.message == f"the grammar of its output cannot go on: {told}"
