"""States follow from grammar and tokens alone; one bad grammar is no other sequence's business; compiled once."""

import threading

import numpy as np
import pytest

from benchmarks.structured.drawing import schema
from weir.core.errors import InternalError
from weir.core.grammar import Grammar
from weir.core.sampling import SamplingParams
from weir.engine.masking import masking_runner
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.grammar.compiler import GrammarCompiler
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.masks import GrammarState, MaskFiller, UnusableGrammar
from weir.grammar.protocol import ALL_TOKENS, CompiledGrammar, GrammarEngine, GrammarError, Vocabulary, Words

TEXT = b'{"a":[1,-2.5,"x y"],"b":{"c":null}}'


def masks_of(filler: MaskFiller, states: list[GrammarState]) -> list[Words]:
    filler.begin(states)
    return [state.allowed().copy() for state in states]


def test_a_state_made_of_the_output_is_the_one_that_went_there_token_by_token(
    toy_engine: LlguidanceEngine, toy: Vocabulary
) -> None:
    """Whoever has the record has the state: after a hand-off, an adoption, a restart."""
    compiled, filler = toy_engine.compile(schema(type="object")), MaskFiller(toy.num_words)
    walked = GrammarState(compiled.matcher())
    for index, byte in enumerate(TEXT):
        made = GrammarState(compiled.matcher(), list(TEXT[:index]))
        beside = GrammarState(compiled.matcher(), list(TEXT[: index // 2]))
        one, _, other = masks_of(filler, [walked, beside, made])
        assert (one == other).all()
        assert one.any()
        walked.accept(byte)
    filler.close()


def test_a_grammar_that_fails_leaves_the_others_of_its_step_alone(
    toy_engine: LlguidanceEngine, toy: Vocabulary
) -> None:
    filler, compiled = MaskFiller(toy.num_words), toy_engine.compile(Grammar("regex", "[a-c]+"))
    good, wrong = GrammarState(compiled.matcher()), GrammarState(compiled.matcher(), [ord("x")])
    unusable, broken = GrammarState(UnusableGrammar("it is not to be had")), GrammarState(_Panics())
    masks = masks_of(filler, [wrong, good, unusable, broken])
    assert [bool((mask == ALL_TOKENS).all()) for mask in masks] == [True, False, True, True]
    assert good.error == ""
    assert "doesn't satisfy the grammar" in wrong.error
    assert unusable.error == "it is not to be had"
    assert broken.error == "KeyboardInterrupt: a panic"
    filler.close()


class _Panics:
    """As an engine written in Rust does, with what is no Exception."""

    error = ""

    def accept(self, token_ids: object) -> None:
        del token_ids

    def fill(self, words: Words) -> None:
        raise KeyboardInterrupt("a panic")


def test_a_mask_that_nobody_began_is_an_error(toy_engine: LlguidanceEngine) -> None:
    state = GrammarState(toy_engine.compile(Grammar("regex", "a")).matcher())
    with pytest.raises(InternalError, match="planned without a mask"):
        state.allowed()


def test_masks_are_begun_before_the_step_runs(toy_engine: LlguidanceEngine, toy: Vocabulary) -> None:
    filler = MaskFiller(toy.num_words)
    state = GrammarState(toy_engine.compile(Grammar("regex", "a")).matcher())
    spec = SampleSpec(SamplingParams(), 0, mask=state)

    class Runner:
        def run(self, plan: StepPlan) -> StepResult:
            assert plan.chunks[0].sample is not None
            words = plan.chunks[0].sample.allowed()
            assert words is not None
            return StepResult({0: int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0])})

    chunks = (ChunkPlan(0, 0, (1,), (0,), spec), ChunkPlan(1, 0, (1,), (1,), None))
    assert masking_runner(Runner(), filler.begin).run(StepPlan(1, chunks)).token_ids == {0: ord("a")}
    filler.close()


def test_min_tokens_hold_an_end_back_unless_the_grammar_has_ended(
    toy_engine: LlguidanceEngine, toy: Vocabulary
) -> None:
    (end,) = toy.end_token_ids
    compiled, filler = toy_engine.compile(Grammar("regex", "ab?")), MaskFiller(toy.num_words)

    def allowed_after(text: bytes) -> set[int]:
        state = GrammarState(compiled.matcher(), list(text))
        filler.begin([state])
        words = SampleSpec(SamplingParams(), 0, masked_token_ids=(end,), mask=state).allowed()
        assert words is not None
        return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())

    assert allowed_after(b"a") == {ord("b")}
    assert allowed_after(b"ab") == {end}
    filler.close()


class _Counting:
    """The real engine, and how often it was asked."""

    def __init__(self, engine: GrammarEngine) -> None:
        self._engine = engine
        self.num_compiled = 0

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.num_compiled += 1
        return self._engine.compile(grammar)


def test_a_grammar_is_compiled_once_and_the_last_ones_are_kept(toy_engine: LlguidanceEngine) -> None:
    engine = _Counting(toy_engine)
    compiler = GrammarCompiler(lambda: engine, max_kept=2)
    first, second, third = (Grammar("regex", text) for text in "abc")
    for grammar in (first, second, first, third, first, second):
        compiler.compile(grammar)
    assert engine.num_compiled == 4  # the second one twice: the third has taken its place
    assert compiler.metrics()["grammars_compiled_total"] == 4
    assert compiler.metrics()["grammar_cache_hits_total"] == 2


def test_a_refused_grammar_is_refused_again_without_being_compiled(toy_engine: LlguidanceEngine) -> None:
    engine = _Counting(toy_engine)
    compiler = GrammarCompiler(lambda: engine)
    for _ in range(3):
        with pytest.raises(GrammarError, match="unclosed group"):
            compiler.compile(Grammar("regex", "("))
    assert engine.num_compiled == 1
    assert compiler.metrics()["grammars_refused_total"] == 1


def test_the_engine_is_made_once_by_the_first_of_several_threads(toy_engine: LlguidanceEngine) -> None:
    made: list[int] = []

    def make() -> GrammarEngine:
        made.append(1)
        return toy_engine

    compiler = GrammarCompiler(make)
    threads = [threading.Thread(target=compiler.compile, args=(Grammar("regex", "a"),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert made == [1]
