"""Schemas against the engine alone, with no model: what is drawn is valid, and what is valid can be said."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from datetime import time as time_of_day
from random import Random
from typing import Any

import jsonschema
import referencing.exceptions

from benchmarks.structured.drawing import says, try_draw
from benchmarks.structured.public import PublicSchema
from benchmarks.structured.schemas import SchemaExample
from weir.core.grammar import Grammar
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import CompiledGrammar, GrammarError, Vocabulary

_SEPARATORS = ((",", ":"), (", ", ": "))
_MAX_DRAWN_TOKENS = 600
_MAX_PROBLEMS = 40
_FORMATS = ("date", "ipv4", "ipv6", "uuid", "email")
"""That `jsonschema` checks with no other package."""


@dataclass(slots=True)
class EngineCounts:
    """`problems` are the first ones, a line each."""

    num_schemas: int = 0
    num_taken: int = 0
    num_drawn: int = 0
    num_ended: int = 0
    num_invalid: int = 0
    num_documents: int = 0
    num_unsayable: int = 0
    num_wrong_verdicts: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    compile_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_problem(self, problem: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(" ".join(problem.split())[:300])

    def lines(self) -> list[str]:
        p50, p99 = percentiles(self.compile_ms)
        return [
            f"schemas {self.num_schemas}, taken {self.num_taken}, refused by name {self.num_schemas - self.num_taken}",
            f"compiled in ms, p50 {p50:.1f}, p99 {p99:.1f}, longest {max(self.compile_ms, default=0):.1f}",
            f"drawn {self.num_drawn}, ended {self.num_ended}, of these invalid {self.num_invalid}",
            f"valid documents {self.num_documents}, of these not sayable {self.num_unsayable}",
            f"invalid documents of suites that can be said {self.num_wrong_verdicts}",
            *(f"refused {number}: {reason}" for reason, number in self.refusals.most_common(12)),
            *self.problems,
        ]


class EngineChecks:
    """Over one vocabulary, in whose own way documents are said: where a text is forced, the engine allows no other."""

    def __init__(self, vocabulary: Vocabulary, draws: int) -> None:
        self._vocabulary = vocabulary
        self._engine = LlguidanceEngine(vocabulary)
        self._draws = draws
        self.counts = EngineCounts()

    def check_example(self, seed: int, example: SchemaExample) -> None:
        compiled = self._try_compile(example.schema)
        if compiled is None:
            return
        drawing = Random(seed)
        documents = [example.draw(drawing) for _ in range(2)]
        if all(self._is_valid(f"seed {seed}, its own document", example.schema, document) for document in documents):
            for document in documents:
                self._check_sayable(f"seed {seed}", compiled, document)
        self._check_draws(f"seed {seed}", compiled, example.schema, seed)

    def check_public(self, public: PublicSchema) -> None:
        compiled = self._try_compile(public.schema)
        if compiled is None:
            return
        for verdict in public.verdicts:
            if verdict.is_valid:
                self._check_sayable(public.name, compiled, verdict.document)
            elif self._says(compiled, _text(verdict.document, _SEPARATORS[0])):
                self.counts.num_wrong_verdicts += 1
                self.counts.add_problem(f"says what is not valid: {public.name}: {verdict.document!r}")
        if not public.verdicts:
            self._check_draws(public.name, compiled, public.schema, len(public.name))

    def _try_compile(self, schema: dict[str, Any]) -> CompiledGrammar | None:
        self.counts.num_schemas += 1
        began_s = time.perf_counter()
        try:
            compiled = self._engine.compile(Grammar.json_schema(schema))
        except GrammarError as error:
            self.counts.refusals[str(error)[:70]] += 1
            return None
        finally:
            self.counts.compile_ms.append((time.perf_counter() - began_s) * 1e3)
        self.counts.num_taken += 1
        return compiled

    def _check_sayable(self, name: str, compiled: CompiledGrammar, document: Any) -> None:
        for separators in _SEPARATORS:
            self.counts.num_documents += 1
            text = _text(document, separators)
            if not self._says(compiled, text):
                self.counts.num_unsayable += 1
                self.counts.add_problem(f"cannot be said: {name}: {text}")

    def _says(self, compiled: CompiledGrammar, text: str) -> bool:
        return says(compiled, self._vocabulary, self._vocabulary.encode(text))

    def _check_draws(self, name: str, compiled: CompiledGrammar, schema: dict[str, Any], seed: int) -> None:
        for number in range(self._draws):
            self.counts.num_drawn += 1
            said = try_draw(compiled, self._vocabulary, 1000 * seed + number, _MAX_DRAWN_TOKENS)
            if said is not None:
                self.counts.num_ended += 1
                self.counts.num_invalid += not self._is_valid(name, schema, json.loads(said))

    def _is_valid(self, name: str, schema: dict[str, Any], document: Any) -> bool:
        problem = validation_problem(schema, document)
        if problem:
            self.counts.add_problem(f"invalid: {name}: {document!r}: {problem}")
        return not problem


def validation_problem(schema: dict[str, Any], document: Any) -> str:
    """Of `jsonschema`, formats included; empty: there is none."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=_format_checker())
    try:
        error = next(validator.iter_errors(document), None)
    except (referencing.exceptions.Unresolvable, ValueError, TypeError) as broken:
        return f"{type(broken).__name__}: {broken}"
    return error.message if error is not None else ""


def _format_checker() -> jsonschema.FormatChecker:
    """Times are what Python can read."""
    checker = jsonschema.FormatChecker(_FORMATS)

    def reads(read: Callable[[str], object]) -> Callable[[object], bool]:
        return lambda value: not isinstance(value, str) or read(value) is not None

    checker.checks("date-time", ValueError)(reads(lambda text: datetime.fromisoformat(text.upper())))
    checker.checks("time", ValueError)(reads(lambda text: time_of_day.fromisoformat(text.upper())))
    return checker


def percentiles(values: Iterable[float]) -> tuple[float, float]:
    """p50 and p99."""
    found = sorted(values)
    if not found:
        return 0.0, 0.0
    return statistics.median(found), found[min(len(found) - 1, int(0.99 * len(found)))]


def _text(document: Any, separators: tuple[str, str]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=separators)
