"""How byte-level BPE vocabularies of GGUF files cut a text into words: what `tokenizer.ggml.pre` stands for.

The expressions are those of the models' tokenizer.json; llama.cpp's `llama-vocab.cpp` says which name means which.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """`expression` None: GPT-2's.

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
