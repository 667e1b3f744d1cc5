"""Draws texts from grammars with no model at all: every allowed token is as likely as any other, or nearly."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weir.core.grammar import Grammar
from weir.grammar.protocol import CompiledGrammar, Matcher, Vocabulary, Words
from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.config import load_model_config
from weir.model.files.source import resolve_model
from weir.model.tokens.tokenizer import Tokenizer, load_tokenizer
from weir.model.tokens.vocabulary import vocabulary_of

_END_WEIGHT = 0.5
MAX_TOKENS = 1000


def real_tokenizer() -> tuple[Tokenizer, Vocabulary]:
    """The built-in model's."""
    source = resolve_model(SMOLLM2_135M.name)
    config, tokenizer = load_model_config(source), load_tokenizer(source)
    return tokenizer, vocabulary_of(tokenizer, config.vocab_size, config.eos_token_ids)


_MERGED = ('{"', '":', '", "', "true", "  ", "é")


def toy_vocabulary(encode: Callable[[str], list[int]] = lambda text: list(text.encode())) -> Vocabulary:
    """256 bytes, a few longer tokens, one that ends, a special one, and logits of no token: 32 does not divide."""
    token_bytes = [bytes([byte]) for byte in range(256)] + [token.encode() for token in _MERGED]
    token_bytes += [b"<end>", b"<tool>", b"", b"", b""]
    return Vocabulary(token_bytes, frozenset({262, 263}), (262,), encode)


def encode_greedily(text: str) -> list[int]:
    """In the toy's longest tokens, across what a grammar takes for parts."""
    found, rest = list[int](), text
    while rest:
        merged = max((token for token in _MERGED if rest.startswith(token)), key=len, default=None)
        found += [256 + _MERGED.index(merged)] if merged else rest[0].encode()
        rest = rest[len(merged or rest[0]) :]
    return found


def allowed_bits(matcher: Matcher, vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    words: Words = np.zeros(vocabulary.num_words, np.uint32)
    matcher.fill(words)
    assert matcher.error == ""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[: len(vocabulary.token_bytes)].astype(np.bool_)


def allowed_ids(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    return set(np.flatnonzero(allowed_bits(matcher, vocabulary)).tolist())


def draw(compiled: CompiledGrammar, vocabulary: Vocabulary, seed: int) -> bytes:
    """What an output says until its end token. It ends or closes half of the time where it may, to come to an end."""
    said = try_draw(compiled, vocabulary, seed)
    assert said is not None, f"no end after {MAX_TOKENS} tokens"
    return said


def try_draw(
    compiled: CompiledGrammar, vocabulary: Vocabulary, seed: int, max_tokens: int = MAX_TOKENS
) -> bytes | None:
    """None: it has not ended by then."""
    random, matcher, said = np.random.default_rng(seed), compiled.matcher(), b""
    closing = _closing(vocabulary)
    ends = list(vocabulary.end_token_ids)
    for _ in range(max_tokens):
        bits = allowed_bits(matcher, vocabulary)
        assert bits.any(), said
        may_end = bits[ends].any()
        bits[ends] = False
        if may_end and (not bits.any() or random.random() < _END_WEIGHT):
            return said
        pool = bits & closing if random.random() < _END_WEIGHT and (bits & closing).any() else bits
        token_id = int(random.choice(np.flatnonzero(pool)))
        said += vocabulary.token_bytes[token_id]
        matcher.accept([token_id])
    return None


def _closing(vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    return np.array([spelled[:1] in (b'"', b"}", b"]", b",") for spelled in vocabulary.token_bytes])


def schema(**keywords: object) -> Grammar:
    return Grammar.json_schema(keywords)


def says(compiled: CompiledGrammar, vocabulary: Vocabulary, token_ids: list[int]) -> bool:
    """Whether these tokens can come one after another, and the output end after them."""
    matcher = compiled.matcher()
    for token_id in token_ids:
        if not allowed_bits(matcher, vocabulary)[token_id]:
            return False
        matcher.accept([token_id])
    return bool(allowed_bits(matcher, vocabulary)[list(vocabulary.end_token_ids)].all())
