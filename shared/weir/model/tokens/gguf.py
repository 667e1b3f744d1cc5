"""Builds a tokenizer from the vocabulary that a GGUF file carries."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from weir.model.errors import ModelError
from weir.model.files.gguf import GgufFile
from weir.model.tokens.gguf_sentencepiece import sentencepiece_from_gguf
from weir.model.tokens.gguf_vocabulary import TokenType, Vocabulary, read_vocabulary, strings
from weir.model.tokens.pre_tokenizers import PRE_TOKENIZATIONS, PreTokenization
from weir.model.tokens.spelling import byte_of_character

_INSTEAD = "Name the model's Hugging Face folder, with its tokenizer.json, instead"


def tokenizer_from_gguf(gguf: GgufFile) -> Tokenizer:
    """Byte-level BPE (`tokenizer.ggml.model` gpt2) or SentencePiece (llama).

    Raises:
        ModelError: another kind of vocabulary, or a pre-tokenizer that Weir does not know.
    """
    kind = gguf.get("tokenizer.ggml.model", str)
    if kind not in {"gpt2", "llama"}:
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.model {kind!r}; Weir reads 'gpt2' (byte-level BPE) and 'llama' "
            f"(SentencePiece) from GGUF files. {_INSTEAD}"
        )
    vocabulary = read_vocabulary(gguf)
    if kind == "llama":
        tokenizer = sentencepiece_from_gguf(gguf, vocabulary)
        _add_special_tokens(tokenizer, vocabulary, vocabulary.of_type(TokenType.CONTROL))
        _set_bos(tokenizer, gguf, vocabulary, adds_bos=True)
        return tokenizer
    pre_tokenization = _pre_tokenization(gguf)
    tokenizer = _byte_level(gguf, vocabulary, pre_tokenization)
    # A control token outside the byte alphabet is a mislabelled one; adding it would change its meaning.
    alphabet = byte_of_character().keys()
    control = (token for token in vocabulary.of_type(TokenType.CONTROL) if alphabet >= set(token))
    _add_special_tokens(tokenizer, vocabulary, control)
    _set_bos(tokenizer, gguf, vocabulary, pre_tokenization.adds_bos)
    return tokenizer


def _pre_tokenization(gguf: GgufFile) -> PreTokenization:
    name = gguf.find("tokenizer.ggml.pre", str, "default")
    found = PRE_TOKENIZATIONS.get(name or "default")
    if found is None:
        known = ", ".join(map(repr, PRE_TOKENIZATIONS))
        raise ModelError(f"{gguf.path}: tokenizer.ggml.pre {name!r}; Weir knows {known}. {_INSTEAD}")
    return found


def _byte_level(gguf: GgufFile, vocabulary: Vocabulary, pre_tokenization: PreTokenization) -> Tokenizer:
    merges = [_split_merge(vocabulary, merge) for merge in strings(gguf, "tokenizer.ggml.merges")]
    model = models.BPE(vocab=dict(vocabulary.id_of), merges=merges, ignore_merges=pre_tokenization.takes_whole_words)
    tokenizer = Tokenizer(model)
    if pre_tokenization.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenization.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, control: Iterable[str]) -> None:
    user_defined = vocabulary.of_type(TokenType.USER_DEFINED)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _set_bos(tokenizer: Tokenizer, gguf: GgufFile, vocabulary: Vocabulary, adds_bos: bool) -> None:
    if not gguf.find("tokenizer.ggml.add_bos_token", bool, adds_bos):
        return
    key = "tokenizer.ggml.bos_token_id"
    bos_id = gguf.get(key, int)
    bos = vocabulary.token(key, bos_id)
    tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])


def _split_merge(vocabulary: Vocabulary, merge: str) -> tuple[str, str]:
    """Checked here: the tokenizers library ends the process with a panic over some that do not fit."""
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{vocabulary.path}: tokenizer.ggml.merges has {merge!r}, expected two tokens and a space")
    for token in (left, right, left + right):
        if token not in vocabulary.id_of:
            raise ModelError(
                f"{vocabulary.path}: tokenizer.ggml.merges has {merge!r}, but tokenizer.ggml.tokens has no {token!r}"
            )
    return left, right
