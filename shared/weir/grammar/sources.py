"""What is wrong with the source of a grammar that can be seen without compiling it."""

import json

from weir.core.grammar import GRAMMAR_KINDS, MAX_GRAMMAR_BYTES, Grammar
from weir.grammar.protocol import GrammarError

MAX_CHOICES = 1024
"""Texts of a `choice`."""


def check_source(grammar: Grammar) -> None:
    """Raises GrammarError. Costs little, whatever it is."""
    if grammar.kind not in GRAMMAR_KINDS:
        raise GrammarError(f"is of kind {grammar.kind[:32]!r}; must be one of {', '.join(GRAMMAR_KINDS)}")
    if not grammar.source:
        raise GrammarError(f"is empty; give a {grammar.kind}")
    if grammar.num_bytes > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"has {grammar.num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
    try:
        grammar.source.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"has a lone surrogate at character {error.start}; must be valid Unicode") from None
    if "\0" in grammar.source:
        raise GrammarError(f"has a NUL at character {grammar.source.index(chr(0))}, which no grammar may have")


def choices_of(grammar: Grammar) -> list[str]:
    """The texts of a choice, each once. Raises GrammarError."""
    try:
        texts = json.loads(grammar.source)
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise GrammarError("must be a list of at least one text")
    if len(texts) > MAX_CHOICES:
        raise GrammarError(f"has {len(texts)} texts; at most {MAX_CHOICES} are taken")
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise GrammarError(f"[{index}] has a lone surrogate; must be valid Unicode") from None
    return list(dict.fromkeys(texts))
