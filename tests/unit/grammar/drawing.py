"""Draws texts from grammars with no model at all: every allowed token is as likely as any other, or nearly."""

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


def toy_vocabulary() -> Vocabulary:
    """256 bytes, a few longer tokens, one that ends, a special one, and logits of no token: 32 does not divide."""
    token_bytes = [bytes([byte]) for byte in range(256)]
    token_bytes += [b'{"', b'":', b'", "', b"true", b"  ", "é".encode(), b"<end>", b"<tool>", b"", b"", b""]
    return Vocabulary(token_bytes, frozenset({262, 263}), (262,), lambda text: list(text.encode()))


def allowed_bits(matcher: Matcher, vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    words: Words = np.zeros(vocabulary.num_words, np.uint32)
    matcher.fill(words)
    assert matcher.error == ""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[: len(vocabulary.token_bytes)].astype(np.bool_)


def allowed_ids(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    return set(np.flatnonzero(allowed_bits(matcher, vocabulary)).tolist())


def draw(compiled: CompiledGrammar, vocabulary: Vocabulary, seed: int) -> bytes:
    """What an output says until its end token. It ends or closes half of the time where it may, to come to an end."""
    random, matcher, said = np.random.default_rng(seed), compiled.matcher(), b""
    closing = np.array([spelled[:1] in (b'"', b"}", b"]", b",") for spelled in vocabulary.token_bytes])
    for _ in range(MAX_TOKENS):
        bits = allowed_bits(matcher, vocabulary)
        assert bits.any(), said
        may_end = bits[list(vocabulary.end_token_ids)].any()
        bits[list(vocabulary.end_token_ids)] = False
        if may_end and (not bits.any() or random.random() < _END_WEIGHT):
            return said
        pool = bits & closing if random.random() < _END_WEIGHT and (bits & closing).any() else bits
        token_id = int(random.choice(np.flatnonzero(pool)))
        said += vocabulary.token_bytes[token_id]
        matcher.accept([token_id])
    raise AssertionError(f"no end after {MAX_TOKENS} tokens: {said[:200]!r}")


def schema(**keywords: object) -> Grammar:
    return Grammar.json_schema(keywords)
