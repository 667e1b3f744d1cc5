"""Grammars of requests, compiled once before anything is queued for them: what a worker could not use is refused here,
at once, and beside the event loop."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from weir.core.errors import FieldViolation, InvalidRequest, Overloaded
from weir.core.grammar import Grammar
from weir.grammar.compiler import GrammarCompiler
from weir.grammar.protocol import GrammarEngine, GrammarError
from weir.grammar.sources import check_source
from weir.model.tokens.vocabulary import vocabulary_of
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.models import ServedModel, TextTokenizer
from weir_gateway.tools.grammar import schemas_of

_THREADS = 2
_MAX_WAITING = 64
"""Requests whose grammars are being compiled, or wait for that."""
_MAX_MODELS = 8
_COMPILE_TIMEOUT_S = 0.8
"""After which a client hears that it takes longer. What is compiled then is there when it asks again."""
_ENGINE_TIMEOUT_S = 30.0
_RETRY_AFTER_S = 1.0


class GrammarChecks:
    """Owns its threads."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._compilers: OrderedDict[str, tuple[TextTokenizer, GrammarCompiler]] = OrderedDict()
        """By model; of one that was replaced by another the tokenizer is another."""
        self._num_waiting = 0

    async def check(self, client_request: ClientRequest, model: ServedModel, *, again: bool = False) -> None:
        """Raises InvalidRequest for a grammar that cannot be used, or not with the other options, and Overloaded where
        it cannot be known within a second. `again`: it was fine already, and is a part of another one now."""
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
                await self._compile(compiler, grammar, schemas)
        except GrammarError as error:
            field = names["grammar"]
            if isinstance(error, _ToolSchemaError):
                field = f"{names['tools']}[{error.index}].{names['tool_schema']}"
            raise InvalidRequest([FieldViolation(field, str(error))]) from None

    def metrics(self) -> dict[str, float]:
        """Of all models together."""
        total = GrammarCompiler(_no_engine).metrics() | {"grammars_waiting": float(self._num_waiting)}
        for _, compiler in self._compilers.values():
            for name, value in compiler.metrics().items():
                total[name] += value
        return total

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _compile(
        self, compiler: GrammarCompiler, grammar: Grammar, schemas: Sequence[tuple[int, Grammar]]
    ) -> None:
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded(
                f"the grammars of {self._num_waiting} requests are being compiled, at most {_MAX_WAITING} may wait for "
                "that; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_waiting += 1
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                await loop.run_in_executor(self._executor, compiler.prepare)
            compiling = loop.run_in_executor(self._executor, _compile_all, compiler, grammar, schemas)
            await asyncio.wait([compiling], timeout=_COMPILE_TIMEOUT_S)
            if not compiling.done():
                compiling.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                raise TimeoutError
            compiling.result()
        except TimeoutError:
            raise Overloaded("its grammar is being compiled still; try again", retry_after_s=_RETRY_AFTER_S) from None
        finally:
            self._num_waiting -= 1

    def _compiler_of(self, model: ServedModel) -> GrammarCompiler:
        tokenizer, compiler = self._compilers.get(model.name, (None, None))
        if compiler is None or tokenizer is not model.tokenizer:
            compiler = GrammarCompiler(lambda: _engine_of(model))
            self._compilers[model.name] = model.tokenizer, compiler
        self._compilers.move_to_end(model.name)
        while len(self._compilers) > _MAX_MODELS:
            self._compilers.popitem(last=False)
        return compiler


class _ToolSchemaError(GrammarError):
    """Of the tool with this index."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def _compile_all(compiler: GrammarCompiler, grammar: Grammar, schemas: Sequence[tuple[int, Grammar]]) -> None:
    """Raises GrammarError. `schemas`: of tools, by their places in the list, which are in `grammar`. There they begin
    amid a text, and what is wrong with one would only show when an answer comes to it."""
    for index, schema in schemas:
        try:
            compiler.try_out(schema)
        except GrammarError as error:
            raise _ToolSchemaError(index, str(error)) from None
    compiler.compile(grammar)


def _engine_of(model: ServedModel) -> GrammarEngine:
    from weir.grammar.llguidance_engine import LlguidanceEngine  # noqa: PLC0415 - most gateways never need it

    return LlguidanceEngine(vocabulary_of(model.tokenizer, model.vocab_size, model.eos_token_ids))


def _no_engine() -> GrammarEngine:
    raise GrammarError("there is none")
