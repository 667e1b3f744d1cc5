"""Compiled grammars of one vocabulary: each compiled once, the last ones kept, and what that took."""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from weir.core.grammar import Grammar
from weir.grammar.protocol import CompiledGrammar, GrammarEngine, GrammarError
from weir.grammar.sources import check_source

MAX_KEPT_GRAMMARS = 64
"""The refused ones among them, so that one who asks again is refused at once."""


@dataclass(slots=True)
class CompilerCounts:
    """Since the process began."""

    num_compiled: int = 0
    num_refused: int = 0
    num_hits: int = 0
    compile_s: float = 0.0


class GrammarCompiler:
    """Compiles in the thread that asks; several may ask at once. The engine, which reads the whole vocabulary, is made
    once: by `prepare`, or when the first one asks."""

    def __init__(self, make_engine: Callable[[], GrammarEngine], *, max_kept: int = MAX_KEPT_GRAMMARS) -> None:
        """`make_engine` may raise GrammarError: then there are no grammars."""
        self._make_engine = make_engine
        self._max_kept = max_kept
        self._engine: GrammarEngine | GrammarError | None = None
        self._kept: OrderedDict[bytes, CompiledGrammar | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self.counts = CompilerCounts()

    def try_get(self, grammar: Grammar) -> CompiledGrammar | None:
        """None: it is not there, and `compile` takes a while. Raises GrammarError if it was refused."""
        with self._lock:
            found = self._kept.get(grammar.digest)
            if found is None:
                return None
            self._kept.move_to_end(grammar.digest)
            self.counts.num_hits += 1
        return _usable(found)

    def prepare(self) -> None:
        """Makes the engine, if it is to be had; else the first grammar that is compiled would."""
        with contextlib.suppress(GrammarError):
            self._require_engine()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises GrammarError."""
        check_source(grammar)  # nothing is kept of what is too large
        found = self.try_get(grammar)
        if found is not None:
            return found
        engine = self._require_engine()
        began_s = time.perf_counter()
        compiled: CompiledGrammar | GrammarError
        try:
            compiled = engine.compile(grammar)
        except GrammarError as error:
            compiled = error
        self._keep(grammar.digest, compiled, time.perf_counter() - began_s)
        return _usable(compiled)

    def try_out(self, grammar: Grammar) -> None:
        """Whether it can be compiled; nothing is kept of it. Raises GrammarError."""
        self._require_engine().compile(grammar)

    def metrics(self) -> dict[str, float]:
        counts = self.counts
        return {
            "grammars_compiled_total": float(counts.num_compiled),
            "grammars_refused_total": float(counts.num_refused),
            "grammar_cache_hits_total": float(counts.num_hits),
            "grammar_compile_s_total": counts.compile_s,
        }

    def _keep(self, digest: bytes, compiled: CompiledGrammar | GrammarError, took_s: float) -> None:
        with self._lock:
            self._kept[digest] = compiled
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
            self.counts.compile_s += took_s
            if isinstance(compiled, GrammarError):
                self.counts.num_refused += 1
            else:
                self.counts.num_compiled += 1

    def _require_engine(self) -> GrammarEngine:
        with self._making:
            if self._engine is None:
                try:
                    self._engine = self._make_engine()
                except GrammarError as error:
                    self._engine = error
            if isinstance(self._engine, GrammarError):
                raise GrammarError(str(self._engine))
            return self._engine


def _usable(compiled: CompiledGrammar | GrammarError) -> CompiledGrammar:
    if isinstance(compiled, GrammarError):
        raise GrammarError(str(compiled))  # an error of its own: one that is raised twice would grow its traceback
    return compiled
