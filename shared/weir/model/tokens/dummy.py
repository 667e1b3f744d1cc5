"""A tokenizer for random weights: every byte of a text is a token, and every token stands for some text."""

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weir.model.tokens.decoders import byte_of_character

DUMMY_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
_SPACE = "\u0120"  # in GPT-2's alphabet


def dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids 0 to 255 are the bytes; the others, which only a model samples, are a space and a word of their own."""
    alphabet = byte_of_character()
    vocabulary = alphabet | {_SPACE + _word(number): number for number in range(len(alphabet), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word(number: int) -> str:
    letters = ""
    while number:
        number, rest = divmod(number, 26)
        letters += string.ascii_lowercase[rest]
    return letters
