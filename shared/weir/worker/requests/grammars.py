"""Gives each sequence with a grammar the state that the engine needs, before the engine gets it.

    request manager ── Add(with a grammar) ──> compile in a thread ── Add(with its state) ──> prefixes ──> engine
    request manager ── all else ───────────────────────────────────────────────────────────> prefixes ──> engine

No step waits for a grammar that is being compiled, only its own sequence does.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from weir.engine.masking import masking_runner
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    Command,
    FailAllSequences,
    FailSequence,
    SequenceKey,
)
from weir.engine.plan import ModelRunner
from weir.grammar.compiler import GrammarCompiler
from weir.grammar.masks import GrammarState, MaskFiller, UnusableGrammar
from weir.grammar.protocol import GrammarEngine, GrammarError, num_mask_words
from weir.worker.tasks import WorkerTasks


class WorkerGrammars:
    """Owns the thread that compiles and the one that fills masks."""

    def __init__(
        self, vocab_size: int, post: Callable[[Command], None], request_shutdown: Callable[[str], None]
    ) -> None:
        self._make_engine: Callable[[], GrammarEngine] | None = None
        self._compiler = GrammarCompiler(self._engine)
        self._masks = MaskFiller(num_mask_words(vocab_size))
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._post = post
        self._waiting: dict[SequenceKey, Arrival] = {}
        self._tasks = WorkerTasks(request_shutdown)

    def post(self, command: Command) -> None:
        """Passes a command on, a sequence with a grammar once that is compiled. Raises InboxFull."""
        match command:
            case AddSequence(arrival) if arrival.params.sampling.grammar is not None and arrival.finish_reason is None:
                key = SequenceKey.of(arrival.params)
                self._waiting[key] = arrival
                self._tasks.spawn(self._compile(key, arrival), f"grammar of {key.request_id}")
                return
            case CancelSequence(key) | FailSequence(key):
                self._post_at_once(key)
            case FailAllSequences():
                for key in list(self._waiting):
                    self._post_at_once(key)
            case _:
                pass
        self._post(command)

    def masking(self, runner: ModelRunner, make_engine: Callable[[], GrammarEngine]) -> ModelRunner:
        """`runner` with the masks of its steps. The model is loaded: its engine is what `make_engine` makes, which may
        raise GrammarError."""
        self._make_engine = make_engine
        return masking_runner(runner, self._masks.begin)

    def metrics(self) -> dict[str, float]:
        waiting = {"grammars_waiting": float(len(self._waiting))}
        return self._compiler.metrics() | self._masks.metrics() | waiting

    async def stop(self) -> None:
        """What waits is left where it is: a handed-off sequence in the arena, with its record."""
        await self._tasks.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._masks.close()

    def _engine(self) -> GrammarEngine:
        if self._make_engine is None:
            raise GrammarError("the model is not loaded yet")
        return self._make_engine()

    def _post_at_once(self, key: SequenceKey) -> None:
        """So that the engine ends it in the usual way; or it stays here: raises InboxFull."""
        arrival = self._waiting.get(key)
        if arrival is not None:
            self._post(AddSequence(replace(arrival, grammar=_unusable("it ended before its grammar was compiled"))))
            del self._waiting[key]

    async def _compile(self, key: SequenceKey, arrival: Arrival) -> None:
        loop = asyncio.get_running_loop()
        state = await loop.run_in_executor(self._executor, self._state_of, arrival)
        if self._waiting.get(key) is arrival:
            del self._waiting[key]
            self._post(AddSequence(replace(arrival, grammar=state)))

    def _state_of(self, arrival: Arrival) -> GrammarState:
        """After the output that is there. The gateway has compiled the grammar too: an error is a defect, or a gateway
        of another version."""
        grammar = arrival.params.sampling.grammar
        assert grammar is not None, "others do not wait"
        try:
            return GrammarState(self._compiler.compile(grammar).matcher(), arrival.output_token_ids)
        except GrammarError as error:
            return _unusable(str(error))


def _unusable(error: str) -> GrammarState:
    return GrammarState(UnusableGrammar(error))
