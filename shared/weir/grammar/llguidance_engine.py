"""The engine of the package llguidance: Earley's algorithm over lexemes that are derived as they come.

Nearly nothing is computed ahead, so a schema compiles in milliseconds; each mask is a walk over the vocabulary as a
trie. A keyword of JSON Schema that it does not know is an error. Source: guidance-ai/llguidance, `docs/`.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from weir.core.grammar import Grammar
from weir.grammar.json_schema import engine_schema
from weir.grammar.lark import rule_of
from weir.grammar.protocol import ALL_TOKENS, CompiledGrammar, GrammarError, Matcher, Vocabulary, Words
from weir.grammar.sources import check_source

_MAX_SHOWN_CHARS = 300
_GBNF_RULE = re.compile(r"^\s*[a-zA-Z][\w-]*\s*::=", re.MULTILINE)
_REASON = re.compile(r"regex parse error:.*^error: ([^\n]*)", re.DOTALL | re.MULTILINE)


class LlguidanceEngine:
    """Implements `weir.grammar.protocol.GrammarEngine`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Takes some tenths of a second. Raises GrammarError for a vocabulary in which no output can end."""
        num_tokens = len(vocabulary.token_bytes)
        ends = [token_id for token_id in vocabulary.end_token_ids if token_id < num_tokens]
        if not ends:
            raise GrammarError("this model has no end-of-text token, so no grammar could say where its answer ends")
        wrapper = TokenizerWrapper(_TokenizerOfVocabulary(vocabulary, ends))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=num_tokens, eos_token=ends)
        self._limits = _limits()
        self._num_words = vocabulary.num_words

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Without the interpreter's lock, but for reading the source."""
        check_source(grammar)
        try:
            source = _llguidance_source(grammar)
        except ValueError as error:
            raise GrammarError(_shown(str(error))) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_shown(matcher.get_error()))
        compiled = _Compiled(matcher)
        # a grammar without any text, as of an endless recursion, shows at the first mask
        first = compiled.matcher()
        words = np.zeros(self._num_words, np.uint32)
        first.fill(words)
        if first.error or not words.any():
            raise GrammarError("has no text: it goes on for ever, or is too large for one step")
        return compiled


class _TokenizerOfVocabulary:
    """What `TokenizerWrapper` wants. One that takes no bytes is asked for texts."""

    def __init__(self, vocabulary: Vocabulary, end_token_ids: Sequence[int]) -> None:
        self.tokens = list(vocabulary.token_bytes)
        self.special_token_ids = sorted({*vocabulary.special_token_ids, *end_token_ids})
        self.eos_token_id = end_token_ids[0]
        self.bos_token_id = None
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("takes texts")
        return self._encode(text)


class _Compiled(NamedTuple):
    pristine: LLMatcher

    def matcher(self) -> Matcher:
        return _LlguidanceMatcher(self.pristine.deep_copy())


class _LlguidanceMatcher:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.is_error():
            self._matcher.consume_tokens(list(token_ids))

    def fill(self, words: Words) -> None:
        """Without the interpreter's lock."""
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words.fill(ALL_TOKENS)

    @property
    def error(self) -> str:
        return self._matcher.get_error() if self._matcher.is_error() else ""


def _limits() -> LLParserLimits:
    """What compiling and one mask may take: less than a second of a core, and some hundredths."""
    return LLParserLimits(
        initial_lexer_fuel=250_000,
        max_grammar_size=100_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_items_in_row=1_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def _llguidance_source(grammar: Grammar) -> str:
    """Raises ValueError and GrammarError."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(engine_schema(grammar.source))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_lark(f"start: {rule_of(grammar)}")
        case "grammar":
            is_gbnf = _GBNF_RULE.search(grammar.source) is not None
            return LLMatcher.grammar_from_lark(_lark_of_gbnf(grammar.source) if is_gbnf else grammar.source)


def _lark_of_gbnf(source: str) -> str:
    if not re.search(r"^\s*root\s*::=", source, re.MULTILINE):
        raise GrammarError('has no rule "root", with which a GBNF grammar begins')
    try:
        return gbnf_to_lark(source)
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - it raises no narrower one for a rule that is not there
        raise GrammarError(f"is no GBNF: {error}") from None


def _shown(message: str) -> str:
    """Of the engine's message what a person wants, on one line: of a regular expression's, what comes at its end."""
    reason = _REASON.search(message)
    line = " ".join((reason[1] if reason else message).replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_SHOWN_CHARS else line[: _MAX_SHOWN_CHARS - 1] + "…"
