"""Builds a tokenizer from the vocabulary that a GGUF file carries."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from weir.model.errors import ModelError
from weir.model.files.gguf import GgufFile
from weir.model.tokens.decoders import SPACE_MARK, byte_of_character

_INSTEAD = "Name the model's Hugging Face folder, with its tokenizer.json, instead"

# The expressions are those of the models' tokenizer.json.
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`, those that matter here."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """How a byte-level BPE vocabulary cuts a text into words. `expression` None: as GPT-2's.

    `takes_whole_words`: a word that is a token is that token, whatever the merges say. `composes`: text is brought to
    Unicode's composed form (NFC) first. `adds_bos`: unless the file says otherwise.
    """

    expression: str | None = None
    splits_digits: bool = False
    takes_whole_words: bool = False
    composes: bool = False
    adds_bos: bool = False

    @property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.splits_digits:
            # Digits apart *before* the regex, as SmolLM was trained: "x  1" keeps its two spaces together.
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_gpt2])
        if self.expression is None:
            return by_gpt2
        by_expression = pre_tokenizers.Split(Regex(self.expression), behavior="isolated")
        return pre_tokenizers.Sequence(
            [by_expression, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_GPT2 = PreTokenization()
_SMOLLM = PreTokenization(splits_digits=True)
_LLAMA_3 = PreTokenization(
    "|".join([_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _SYMBOLS, _SPACES]), takes_whole_words=True, adds_bos=True
)
_QWEN_2 = PreTokenization("|".join([_CONTRACTIONS, _WORDS, r"\p{N}", _SYMBOLS, _SPACES]), composes=True)
_TEKKEN = PreTokenization(
    "|".join([_CASED_WORDS, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES]), takes_whole_words=True, adds_bos=True
)

# what `tokenizer.ggml.pre` stands for, as llama.cpp's `llama-vocab.cpp` has it
PRE_TOKENIZATIONS: Mapping[str, PreTokenization] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "tekken": _TEKKEN,
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens by id, as many types, and ids by token."""

    path: Path
    tokens: list[str]
    types: list[int]
    id_of: Mapping[str, int]

    def of_type(self, kind: TokenType) -> list[str]:
        return [token for token, found in zip(self.tokens, self.types, strict=True) if found == kind]

    def token(self, key: str, token_id: int) -> str:
        """Raises ModelError, naming the metadata `key` that has the id, if there is no such token."""
        if not 0 <= token_id < len(self.tokens):
            raise ModelError(f"{self.path}: {key} is {token_id}, past {len(self.tokens)} tokens")
        return self.tokens[token_id]


def read_vocabulary(gguf: GgufFile) -> GgufVocabulary:
    """Raises ModelError: tokens are missing, occur twice, or do not fit their types."""
    tokens = strings(gguf, "tokenizer.ggml.tokens")
    id_of = {token: token_id for token_id, token in enumerate(tokens)}
    if len(id_of) != len(tokens):
        raise ModelError(f"{gguf.path}: tokenizer.ggml.tokens has {len(tokens) - len(id_of)} repeated entries")
    types = gguf.find("tokenizer.ggml.token_type", list) or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens) or not all(isinstance(kind, int) for kind in types):
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens, "
            "expected as many integers"
        )
    return GgufVocabulary(gguf.path, tokens, types, id_of)


def strings(gguf: GgufFile, key: str) -> list[str]:
    """Raises ModelError if `key` is missing or has anything but text."""
    values = gguf.get(key, list)
    if not all(isinstance(value, str) for value in values):
        raise ModelError(f"{gguf.path}: {key} has entries that are not text")
    return values


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


def _byte_level(gguf: GgufFile, vocabulary: GgufVocabulary, pre_tokenization: PreTokenization) -> Tokenizer:
    merges = [_split_merge(vocabulary, merge) for merge in strings(gguf, "tokenizer.ggml.merges")]
    model = models.BPE(vocab=dict(vocabulary.id_of), merges=merges, ignore_merges=pre_tokenization.takes_whole_words)
    tokenizer = Tokenizer(model)
    if pre_tokenization.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenization.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary, control: Iterable[str]) -> None:
    user_defined = vocabulary.of_type(TokenType.USER_DEFINED)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _set_bos(tokenizer: Tokenizer, gguf: GgufFile, vocabulary: GgufVocabulary, adds_bos: bool) -> None:
    if not gguf.find("tokenizer.ggml.add_bos_token", bool, adds_bos):
        return
    key = "tokenizer.ggml.bos_token_id"
    bos_id = gguf.get(key, int)
    bos = vocabulary.token(key, bos_id)
    tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])


def _split_merge(vocabulary: GgufVocabulary, merge: str) -> tuple[str, str]:
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


def sentencepiece_from_gguf(gguf: GgufFile, vocabulary: GgufVocabulary) -> Tokenizer:
    """BPE by scores, single bytes for what the vocabulary lacks; a space before the text unless the file says no.

    Raises:
        ModelError: `tokenizer.ggml.scores` does not fit the tokens.
    """
    scores = _scores(gguf, len(vocabulary.tokens))
    unknown_id = gguf.find("tokenizer.ggml.unknown_token_id", int, 0) or 0
    model = models.BPE(
        vocab=dict(vocabulary.id_of),
        merges=merges_by_score(dict(zip(vocabulary.tokens, scores, strict=True))),
        unk_token=vocabulary.token("tokenizer.ggml.unknown_token_id", unknown_id),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    plain = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.find("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces])
        tokenizer.decoder = decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(plain)
    return tokenizer


def merges_by_score(score_of: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs that make a token, best token first.

    SentencePiece joins the neighbours whose join has the best score. BPE joins by the rank of the pair: ranked by the
    score of what they make, and pairs of one token by their parts' ranks in `score_of`, both come to the same (as
    transformers' conversion of Llama's tokenizer has it).
    """
    index_of = {token: index for index, token in enumerate(score_of)}
    ranked = []
    for token, score in score_of.items():
        for cut in range(1, len(token)):
            left, right = index_of.get(token[:cut]), index_of.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score, index_of[token], left, right, cut))
    ranked.sort()
    tokens = list(score_of)
    return [(tokens[index][:cut], tokens[index][cut:]) for _, index, _, _, cut in ranked]


def _scores(gguf: GgufFile, num_tokens: int) -> list[float]:
    scores = gguf.get("tokenizer.ggml.scores", list)
    if len(scores) != num_tokens or not all(isinstance(score, float) for score in scores):
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.scores has {len(scores)} entries for {num_tokens} tokens, "
            "expected as many numbers"
        )
    return scores
