"""Vocabularies of every kind in GGUF files give the ids that the models were trained on."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex  # type: ignore[import-untyped]
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.gguf_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    SENTENCES,
    UNKNOWN,
    USER_DEFINED,
    train_byte_level,
    vocabulary_of,
    write_vocabulary,
)

from weir.model.errors import ModelError
from weir.model.files.source import ModelSource
from weir.model.tokens.gguf import PRE_TOKENIZATIONS
from weir.model.tokens.tokenizer import Tokenizer, load_tokenizer

# as they stand in tokenizer.json of meta-llama/Meta-Llama-3-8B and Qwen/Qwen2.5-7B, and in Mistral's tekken_240718.json
AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + AFTER_DIGITS,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + AFTER_DIGITS,
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPECIAL = ["<|begin_of_text|>", "<|eot_id|>", "<|im_start|>"]
# of characters yet to be named two libraries need not think alike
assigned_text = st.text(st.characters(exclude_categories=["Cs", "Cn"]))
TEXTS = [*SENTENCES[:4], "I'M  123456", "<|eot_id|>user<|im_start|>", "", " ", "a \n b\r\n\r\n  c", "x<|eot"]


def byte_level_source(folder: Path, pre: str, architecture: str = "llama", **metadata: object) -> ModelSource:
    tokens, merges = vocabulary_of(train_byte_level(PRE_TOKENIZATIONS[pre].pre_tokenizer))
    vocabulary = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens + SPECIAL,
        "token_type": [NORMAL] * len(tokens) + [CONTROL] * len(SPECIAL),
        "merges": merges,
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
    }
    return write_vocabulary(folder / f"{pre}.gguf", architecture, **(vocabulary | metadata))


@pytest.mark.parametrize("pre", EXPRESSIONS)
@settings(max_examples=300, deadline=None)
@given(text=assigned_text | st.text("aB é日'\u017fmsS1٣ \n\r\t/.,"))
def test_words_are_those_of_the_models_expression(pre: str, text: str) -> None:
    words = [text[start:end] for _, (start, end) in PRE_TOKENIZATIONS[pre].pre_tokenizer.pre_tokenize_str(text)]
    assert words == regex.findall(EXPRESSIONS[pre], text)


@pytest.mark.parametrize(("pre", "architecture"), [("llama-bpe", "llama"), ("gpt-2", "llama"), ("qwen2", "qwen2")])
def test_ids_are_those_of_transformers(pre: str, architecture: str, tmp_path: Path) -> None:
    source = byte_level_source(tmp_path, pre, architecture)
    tokenizer = load_tokenizer(source)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=source.path.name)
    for text in TEXTS:
        assert tokenizer.encode(text, add_bos=False) == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special=False) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", ["I", "'M", " HTTPServer", " ", "123", "45"]),
        ("qwen2", ["I", "'M", " HTTPServer", " ", "1", "2", "3", "4", "5"]),
        ("tekken", ["I", "'M", " HTTPServer", " ", "1", "2", "3", "4", "5"]),
        ("smollm", ["I", "'", "M", " HTTPServer", " ", "1", "2", "3", "4", "5"]),
        ("gpt-2", ["I", "'", "M", " HTTPServer", " 12345"]),
    ],
)
def test_kinds_of_vocabulary_differ_in_their_words(pre: str, words: list[str]) -> None:
    text = "I'M HTTPServer 12345"
    found = PRE_TOKENIZATIONS[pre].pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == words


@pytest.mark.parametrize(("pre", "num_tokens"), [("llama-bpe", 1), ("tekken", 1), ("qwen2", 3), ("gpt-2", 3)])
def test_a_whole_word_of_the_vocabulary_is_one_token_where_the_model_has_it_so(
    pre: str, num_tokens: int, tmp_path: Path
) -> None:
    tokens = [*map(chr, range(0x21, 0x7F)), "ab", "qux"]
    source = write_vocabulary(
        tmp_path / "whole.gguf",
        "llama",
        tokens=tokens,
        token_type=[NORMAL] * len(tokens),
        model="gpt2",
        pre=pre,
        merges=["a b"],
        add_bos_token=False,
    )
    assert len(load_tokenizer(source).encode("qux")) == num_tokens


def test_qwen_composes_characters_and_llama_does_not(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    qwen2 = load_tokenizer(byte_level_source(tmp_path, "qwen2", "qwen2"))
    llama = load_tokenizer(byte_level_source(tmp_path, "llama-bpe"))
    assert qwen2.encode(decomposed) == qwen2.encode(composed)
    assert llama.encode(decomposed) != llama.encode(composed)


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "is_added"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("gpt-2", None, False),
    ],
)
def test_the_first_token_is_added_by_the_file_or_else_by_its_kind(
    pre: str, add_bos_token: bool | None, is_added: bool, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(byte_level_source(tmp_path, pre, add_bos_token=add_bos_token))
    without = tokenizer.encode("dog", add_bos=False)
    assert tokenizer.encode("dog") == ([tokenizer.vocab_size - 3] if is_added else []) + without


PIECES = ["\u2581", *"abcdeé", "\u2581a", "ab", "\u2581ab", "abc", "bc", "cd", "cde", "de", "\u2581\u2581", "eé", "aa"]
SCORE_OF = {piece: -float(number * 7 % len(PIECES)) for number, piece in enumerate(PIECES)}
TOKENS = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *PIECES, "[INST]"]
TYPES = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES) + [USER_DEFINED]
SCORES = [0.0] * 259 + list(SCORE_OF.values()) + [0.0]
pieces_text = st.text("abcdeé 日")


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(sentencepiece_source(tmp_path_factory.mktemp("sentencepiece")))


def sentencepiece_source(folder: Path, **metadata: object) -> ModelSource:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    vocabulary = {"model": "llama", "tokens": TOKENS, "token_type": TYPES, "scores": SCORES}
    return write_vocabulary(folder / "sentencepiece.gguf", "llama", **(vocabulary | ids | metadata))


def pieces_by_definition(text: str) -> list[str]:
    """SentencePiece's BPE: join the neighbours whose join scores best, the leftmost of equals, until none can be."""
    symbols = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = ["".join(pair) for pair in pairwise(symbols)]
        joins = [(SCORE_OF[pair], -place) for place, pair in enumerate(pairs) if pair in SCORE_OF]
        if not joins:
            return symbols
        place = -max(joins)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]


@cache
def ids_of(piece: str) -> list[int]:
    return [TOKENS.index(piece)] if piece in SCORE_OF else [3 + byte for byte in piece.encode()]


@settings(max_examples=500, deadline=None)
@given(text=pieces_text)
def test_pieces_are_joined_by_score(text: str, sentencepiece: Tokenizer) -> None:
    expected = [token_id for piece in pieces_by_definition(text) for token_id in ids_of(piece)]
    assert sentencepiece.encode(text, add_bos=False) == expected
    assert sentencepiece.encode(text) == [1, *expected]
    assert sentencepiece.decode(expected) == text


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    # which does not add a space where the text begins with one, as SentencePiece itself does
    tokenizer = load_tokenizer(sentencepiece_source(tmp_path))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="sentencepiece.gguf")
    for text in ["abc cde", "a  b", "日 abé", "bcde deabc", ""]:
        assert tokenizer.encode(text) == reference.encode(text)


def test_tokens_that_users_defined_are_found_in_the_text_as_a_whole(sentencepiece: Tokenizer) -> None:
    assert TOKENS.index("[INST]") in sentencepiece.encode("a[INST]b")
    assert sentencepiece.encode("a</s>", add_bos=False)[-1] == 2
    assert sentencepiece.decode(sentencepiece.encode("a[INST]")) == "a[INST]"


def test_a_space_before_the_text_can_be_left_out(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_source(tmp_path, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("ab") == [TOKENS.index("ab")]
    assert tokenizer.decode([TOKENS.index("\u2581ab")]) == " ab"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert'; Weir reads 'gpt2' .* and 'llama'"),
        ({"model": "gpt2", "pre": "hubert", "merges": ["a b"]}, "tokenizer.ggml.pre 'hubert'; Weir knows 'default', "),
        ({"scores": [1.0, 2.0]}, f"tokenizer.ggml.scores has 2 entries for {len(TOKENS)} tokens"),
        ({"scores": None}, "has no tokenizer.ggml.scores"),
        ({"bos_token_id": 9999}, f"tokenizer.ggml.bos_token_id is 9999, past {len(TOKENS)} tokens"),
        ({"unknown_token_id": 9999}, "tokenizer.ggml.unknown_token_id is 9999"),
        ({"token_type": [1, 2]}, f"tokenizer.ggml.token_type has 2 entries for {len(TOKENS)} tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "scores": [1.0, 1.0]}, "tokens has 1 repeated"),
        ({"model": "gpt2", "merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', expected two tokens and a space"),
        ({"model": "gpt2", "merges": ["q a"]}, "merges has 'q a', but tokenizer.ggml.tokens has no 'q'"),
        ({"model": "gpt2", "merges": ["a z"]}, "merges has 'a z', but tokenizer.ggml.tokens has no 'z'"),
        ({"model": "gpt2", "merges": ["a c"]}, "merges has 'a c', but tokenizer.ggml.tokens has no 'ac'"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused(change: dict[str, object], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=problem):
        load_tokenizer(sentencepiece_source(tmp_path, **change))
