"""Builds a tokenizer from the vocabulary and merges that a GGUF file carries."""

import enum

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from weir.model.errors import ModelError
from weir.model.gguf_file import GgufFile
from weir.model.spelling import byte_of_character


class _TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`, those that matter here."""

    CONTROL = 3
    USER_DEFINED = 4


def tokenizer_from_gguf(gguf: GgufFile) -> Tokenizer:
    """Byte-level BPE (`tokenizer.ggml.model` gpt2).

    Raises:
        ModelError: another kind of vocabulary, or a pre-tokenizer that Weir does not know.
    """
    kind = gguf.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.model {kind!r}; Weir reads 'gpt2' (byte-level BPE) from GGUF files. "
            "Name the model's Hugging Face folder, with its tokenizer.json, instead"
        )
    tokens = _strings(gguf, "tokenizer.ggml.tokens")
    merges = [_split_merge(gguf, merge) for merge in _strings(gguf, "tokenizer.ggml.merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{gguf.path}: tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} repeated entries")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises nothing narrower for merges of unknown tokens
        raise ModelError(f"{gguf.path}: tokenizer.ggml.merges do not fit the vocabulary ({error})") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(gguf)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, gguf, tokens)
    _set_bos(tokenizer, gguf, tokens)
    return tokenizer


def _pre_tokenizer(gguf: GgufFile) -> pre_tokenizers.PreTokenizer:
    name = gguf.find("tokenizer.ggml.pre", str, "default")
    by_gpt2_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in {"default", "gpt-2"}:
        return by_gpt2_regex
    if name == "smollm":
        # Digits apart *before* the regex, as SmolLM was trained: "x  1" keeps its two spaces together.
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_gpt2_regex])
    raise ModelError(
        f"{gguf.path}: tokenizer.ggml.pre {name!r}; Weir knows 'smollm', 'gpt-2' and 'default'. "
        "Name the model's Hugging Face folder, with its tokenizer.json, instead"
    )


def _add_special_tokens(tokenizer: Tokenizer, gguf: GgufFile, tokens: list[str]) -> None:
    types = gguf.find("tokenizer.ggml.token_type", list, []) or []
    alphabet = byte_of_character().keys()
    # A control token outside the byte alphabet is a mislabelled one; adding it would change its meaning.
    control = [
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens, types, strict=False)
        if kind == _TokenType.CONTROL and alphabet >= set(token)
    ]
    user_defined = [
        AddedToken(token, normalized=False, special=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind == _TokenType.USER_DEFINED
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _set_bos(tokenizer: Tokenizer, gguf: GgufFile, tokens: list[str]) -> None:
    if not gguf.find("tokenizer.ggml.add_bos_token", bool, False):
        return
    bos_id = gguf.get("tokenizer.ggml.bos_token_id", int)
    if not 0 <= bos_id < len(tokens):
        raise ModelError(f"{gguf.path}: tokenizer.ggml.bos_token_id is {bos_id}, past {len(tokens)} tokens")
    bos = tokens[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])


def _strings(gguf: GgufFile, key: str) -> list[str]:
    values = gguf.get(key, list)
    if not all(isinstance(value, str) for value in values):
        raise ModelError(f"{gguf.path}: {key} has entries that are not text")
    return values


def _split_merge(gguf: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{gguf.path}: tokenizer.ggml.merges has {merge!r}, expected two tokens and a space")
    return left, right
