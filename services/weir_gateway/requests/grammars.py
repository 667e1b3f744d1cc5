"""Grammars of requests, compiled once before anything is queued for them: what a worker could not use is refused here,
at once, and beside the event loop.

Of a tenant one grammar is compiled at a time: whoever sends what takes long waits for himself, and others have the next
thread that is free. A client waits a bounded time; what is compiled goes on to its end, for it to find there.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from weir.core.errors import FieldViolation, InvalidRequest, Overloaded, QuotaExceeded
from weir.core.grammar import Grammar
from weir.grammar.compiler import GrammarCompiler
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import GrammarEngine, GrammarError
from weir.grammar.sources import check_source
from weir.model.tokens.vocabulary import vocabulary_of
from weir.runtime.stack.models import MAX_MODELS
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.models import ServedModel, TextTokenizer
from weir_gateway.requests.request_end import RETRY_AFTER_S
from weir_gateway.tools.grammar import ToolSchemaError, schemas_of

logger = logging.getLogger(__name__)

_THREADS = 2
_MAX_WAITING = 64
"""Grammars that are being compiled, or wait for that."""
_MAX_WAITING_OF_TENANT = 16
"""Of one tenant, each grammar once."""
_COMPILE_TIMEOUT_S = 0.8
"""After which a client hears that it takes longer. What is compiled then is there when it asks again."""
_PREPARE_TIMEOUT_S = 30.0
"""For all models that come together."""


@dataclass(slots=True)
class _TenantTurn:
    """Whose grammars are compiled one after another."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


class GrammarChecks:
    """Owns its threads."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._compilers: OrderedDict[str, tuple[TextTokenizer, GrammarCompiler]] = OrderedDict()
        """By model; of one that was replaced by another the tokenizer is another."""
        self._compiling: dict[tuple[GrammarCompiler, bytes], asyncio.Task[None]] = {}
        self._turns: dict[str, _TenantTurn] = {}
        """Of tenants that wait."""

    async def prepare(self, models: Sequence[ServedModel]) -> None:
        """Reads their vocabularies, before anybody waits: it holds the interpreter's lock for tenths of a second, so
        that the first grammar would stall whatever runs. One that is known already costs nothing. Whatever fails, or
        takes too long, its model is served: who sends a grammar hears of it."""
        loop = asyncio.get_running_loop()
        preparing = {}
        for model in models:
            reading = loop.run_in_executor(self._executor, self._compiler_of(model).prepare)
            reading.add_done_callback(partial(_log_unread, model.name))
            preparing[reading] = model.name
        if preparing:
            _, late = await asyncio.wait(preparing, timeout=_PREPARE_TIMEOUT_S)
            for reading in late:
                name = preparing[reading]
                logger.warning("%s: its vocabulary is not ready for grammars after %g s", name, _PREPARE_TIMEOUT_S)

    async def check(
        self, client_request: ClientRequest, model: ServedModel, tenant: str, *, again: bool = False
    ) -> None:
        """Raises InvalidRequest for a grammar that cannot be used, or not with the other options, and Overloaded where
        it cannot be known within a second, QuotaExceeded where the tenant itself keeps it from that. `again`: it was
        fine already, and is a part of another one now."""
        grammar, names = client_request.options.grammar, client_request.names
        if grammar is None:
            return
        if client_request.options.ignore_eos:
            problem = "comes with a grammar, whose end is the answer's end; leave it out"
            raise InvalidRequest([FieldViolation(names["ignore_eos"], problem)])
        try:
            check_source(grammar)
            compiler = self._compiler_of(model)
            if compiler.try_get(grammar) is None:
                schemas = () if again or client_request.tools is None else schemas_of(client_request.tools)
                await self._compile(compiler, grammar, tenant, schemas)
        except GrammarError as error:
            field = names["grammar"]
            if isinstance(error, ToolSchemaError):
                field = f"{names['tools']}[{error.place}].{names['tool_schema']}"
            raise InvalidRequest([FieldViolation(field, str(error))]) from None

    def metrics(self) -> dict[str, float]:
        """Of all models together."""
        total = GrammarCompiler(_no_engine).metrics() | {"grammars_waiting": float(len(self._compiling))}
        for _, compiler in self._compilers.values():
            for name, value in compiler.metrics().items():
                total[name] += value
        return total

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for compiling in self._compiling.values():
            compiling.cancel()

    async def _compile(
        self, compiler: GrammarCompiler, grammar: Grammar, tenant: str, schemas: Sequence[tuple[int, Grammar]]
    ) -> None:
        key = compiler, grammar.digest
        compiling = self._compiling.get(key)
        if compiling is None:
            self._check_room(tenant)
            turn = self._turns.setdefault(tenant, _TenantTurn())
            turn.num_waiting += 1
            compiling = asyncio.create_task(self._compile_in_turn(turn.lock, compiler, grammar, schemas))
            self._compiling[key] = compiling
            compiling.add_done_callback(partial(self._forget, key, tenant))
        await asyncio.wait([compiling], timeout=_COMPILE_TIMEOUT_S)
        if not compiling.done():
            raise Overloaded("its grammar is being compiled still; try again", retry_after_s=RETRY_AFTER_S)
        compiling.result()

    def _check_room(self, tenant: str) -> None:
        num_all, turn = len(self._compiling), self._turns.get(tenant)
        if turn is not None and turn.num_waiting >= _MAX_WAITING_OF_TENANT:
            raise QuotaExceeded(
                f"tenant {tenant}: {turn.num_waiting} of its grammars wait to be compiled, at most "
                f"{_MAX_WAITING_OF_TENANT}; try again later",
                retry_after_s=RETRY_AFTER_S,
                tenant=tenant,
            )
        if num_all >= _MAX_WAITING:
            raise Overloaded(
                f"{num_all} grammars wait to be compiled, at most {_MAX_WAITING}; try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    async def _compile_in_turn(
        self,
        turn: asyncio.Lock,
        compiler: GrammarCompiler,
        grammar: Grammar,
        schemas: Sequence[tuple[int, Grammar]],
    ) -> None:
        loop = asyncio.get_running_loop()
        async with turn:
            await loop.run_in_executor(self._executor, _compile_all, compiler, grammar, schemas)

    def _forget(self, key: tuple[GrammarCompiler, bytes], tenant: str, compiled: "asyncio.Task[None]") -> None:
        del self._compiling[key]
        turn = self._turns[tenant]
        turn.num_waiting -= 1
        if turn.num_waiting == 0:
            del self._turns[tenant]
        if not compiled.cancelled():
            compiled.exception()  # told to those who wait for it, and kept for those who ask again

    def _compiler_of(self, model: ServedModel) -> GrammarCompiler:
        tokenizer, compiler = self._compilers.get(model.name, (None, None))
        if compiler is None or tokenizer is not model.tokenizer:
            compiler = GrammarCompiler(lambda: _engine_of(model))
            self._compilers[model.name] = model.tokenizer, compiler
        self._compilers.move_to_end(model.name)
        while len(self._compilers) > MAX_MODELS:
            self._compilers.popitem(last=False)
        return compiler


def _compile_all(compiler: GrammarCompiler, grammar: Grammar, schemas: Sequence[tuple[int, Grammar]]) -> None:
    """Raises GrammarError. `schemas`: of tools, by their places in the list, which are in `grammar`. There they begin
    amid a text, and what is wrong with one would only show when an answer comes to it."""
    for index, schema in schemas:
        try:
            compiler.try_out(schema)
        except GrammarError as error:
            raise ToolSchemaError(index, str(error)) from None
    compiler.compile(grammar)


def _engine_of(model: ServedModel) -> GrammarEngine:
    return LlguidanceEngine(vocabulary_of(model.tokenizer, model.vocab_size, model.eos_token_ids))


def _no_engine() -> GrammarEngine:
    raise GrammarError("there is none")


def _log_unread(model: str, reading: "asyncio.Future[None]") -> None:
    if not reading.cancelled() and (error := reading.exception()) is not None:
        logger.error("%s: its vocabulary cannot be read for grammars", model, exc_info=error)
