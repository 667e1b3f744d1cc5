"""Small vocabularies of every kind, trained on a few sentences and written as GGUF files."""

import json
from pathlib import Path

import gguf
import tokenizers
from tests.unit.model.gguf_copy import add_metadata
from tokenizers import models, pre_tokenizers, trainers

from weir.model.files.source import ModelKind, ModelSource

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's used to foxes.",
    "In 2024 we counted 1234567 sheep, 3.14159 of them round. I'M SURE you'll agree they've counted.",
    "CamelCaseWords and HTTPServer errors // comments\n\n    def function(argument):\n        return argument\r\n",
    "naïve café déjà vu, Ελληνικά Русский 日本語 한국어 — “quotes” … and emoji 🦜🦜",
] * 3


def train_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, vocab_size: int = 500) -> models.BPE:
    """Words are those of `pre_tokenizer`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    assert isinstance(tokenizer.model, models.BPE)
    return tokenizer.model


def vocabulary_of(model: models.BPE) -> tuple[list[str], list[str]]:
    """Tokens by id, and merges as GGUF files write them."""
    tokenizer = tokenizers.Tokenizer(model)
    tokens = sorted(tokenizer.get_vocab(), key=lambda token: tokenizer.token_to_id(token) or 0)
    state = model.__getstate__()
    return tokens, [" ".join(pair) for pair in json.loads(state)["merges"]]


def write_vocabulary(path: Path, architecture: str, **metadata: object) -> ModelSource:
    """`metadata` under `tokenizer.ggml.`; None leaves a key out."""
    writer = gguf.GGUFWriter(path, arch=architecture)
    # transformers makes a configuration before it reads the tokenizer
    for name in ("block_count", "context_length", "embedding_length", "attention.head_count"):
        writer.add_uint32(f"{architecture}.{name}", 64)
    for key, value in metadata.items():
        add_metadata(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(path.stem, path, ModelKind.GGUF)
