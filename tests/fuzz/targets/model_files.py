"""Models of strangers: GGUF files and folders, spoilt anywhere. All that is read of one before it serves is read, and
is refused as ModelError or is a model whose every tensor is there."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.fuzz.choices import Choices, edited, mutated_json
from tests.fuzz.target import Check, Target
from tests.fuzz.valid_files import CONFIGS, folder_files, gguf_bytes
from weir.core.errors import InvalidRequest
from weir.model.architecture import (
    local_rotary_frequencies,
    partial_rotary_order,
    rotary_frequencies,
    rotary_magnitudes,
    tensor_shapes,
)
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.hub_reference import parse_hub_reference
from weir.model.files.source import ModelKind, ModelSource, resolve_model
from weir.model.files.tensors import open_tensors
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer

_MEMORY = Path("/dev/shm")
_JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")


def read_weights(source: ModelSource) -> None:
    config = load_model_config(source)
    frequencies, magnitudes = rotary_frequencies(config), rotary_magnitudes(config)
    assert frequencies.shape == magnitudes.shape == (config.head_dim // 2,)
    local_rotary_frequencies(config)
    partial_rotary_order(config)
    assert config.page_geometry.page_bytes > 0
    tensors = open_tensors(source, config)
    for name, shape in tensor_shapes(config).items():
        assert tensors.shapes()[name] == shape
        values = tensors.read(name)
        assert values.shape == shape
        assert values.dtype == np.float32
        view = tensors.try_view(name)
        assert view is None or view.shape == shape
        with contextlib.suppress(ValueError):  # as the protocol says of integers that fit into no blocks
            tensors.try_read_blocks(name)


def read_texts(source: ModelSource) -> None:
    tokenizer = load_tokenizer(source)
    token_ids = tokenizer.encode("ab é\n<|im_end|>")
    tokenizer.decode(token_ids)
    tokenizer.decode(range(tokenizer.vocab_size + 2), skip_special=False)
    with contextlib.suppress(InvalidRequest):
        load_chat_template(source).render([{"role": "user", "content": "x"}])


@contextlib.contextmanager
def _gguf_weights() -> Iterator[Check]:
    valid = [gguf_bytes(architecture=name) for name in ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")]
    with _gguf_reader(valid, read_weights) as check:
        yield check


@contextlib.contextmanager
def _gguf_texts() -> Iterator[Check]:
    with _gguf_reader([gguf_bytes(kind) for kind in ("gpt2", "llama")], read_texts) as check:
        yield check


@contextlib.contextmanager
def _gguf_reader(valid: list[bytes], read: Callable[[ModelSource], None]) -> Iterator[Check]:
    """Weights follow the header, so that what is spoilt is nearly always in that."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        path = Path(folder) / "m.gguf"

        def check(data: bytes) -> None:
            choices = Choices(data)
            whole = choices.pick(valid)
            header = 5000 if read is read_weights else len(whole) - 70_000
            header = min(header, len(whole))
            spoilt = edited(choices, whole[:header]) + (b"" if choices.below(16) == 1 else whole[header:])
            path.write_bytes(choices.rest() if choices.below(32) == 1 else spoilt)
            read(ModelSource("m", path, ModelKind.GGUF))

        yield check


@contextlib.contextmanager
def _folders() -> Iterator[Check]:
    kinds = {kind: folder_files(kind) for kind in CONFIGS}
    with tempfile.TemporaryDirectory(dir=_MEMORY) as root:
        for kind, files in kinds.items():
            (Path(root) / kind).mkdir()
            for name, content in files.items():
                (Path(root) / kind / name).write_bytes(content)

        def check(data: bytes) -> None:
            choices = Choices(data)
            kind = choices.pick(list(kinds))
            name = choices.pick(("config.json", "model.safetensors", *_JSON_FILES))
            path = Path(root) / kind / name
            path.write_bytes(_spoilt(choices, name, kind, kinds[kind].get(name, b"")))
            source = ModelSource("m", path.parent, ModelKind.HF_FOLDER)
            try:
                read_weights(source)
                if name == "tokenizer_config.json":
                    read_texts(source)
            finally:
                path.write_bytes(kinds[kind][name]) if name in kinds[kind] else path.unlink()

        yield check


def _spoilt(choices: Choices, name: str, kind: str, valid: bytes) -> bytes:
    if choices.below(16) == 1:
        return choices.rest()
    if name == "config.json":
        return mutated_json(choices, CONFIGS[kind])
    if name == "model.safetensors.index.json":
        return mutated_json(choices, {"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}})
    if name == "model.safetensors":
        header = 8 + int.from_bytes(valid[:8], "little")
        return edited(choices, valid[:header]) + valid[header:]
    return mutated_json(choices, {"eos_token_id": [0, 1], "chat_template": "x", "bos_token": {"content": "a"}})


@contextlib.contextmanager
def _tokenizer_files() -> Iterator[Check]:
    valid = folder_files("plain")
    with tempfile.TemporaryDirectory(dir=_MEMORY) as root:
        for name, content in valid.items():
            (Path(root) / name).write_bytes(content)
        document = json.loads(valid["tokenizer.json"])

        def check(data: bytes) -> None:
            choices = Choices(data)
            spoilt = mutated_json(choices, document) if choices.byte() % 4 else edited(choices, valid["tokenizer.json"])
            (Path(root) / "tokenizer.json").write_bytes(spoilt)
            read_texts(ModelSource("m", Path(root), ModelKind.HF_FOLDER))

        yield check


@contextlib.contextmanager
def _names() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as cache:

        def check(data: bytes) -> None:
            text = data.decode("utf-8", "surrogateescape")
            with contextlib.suppress(ModelError):
                assert str(parse_hub_reference(text)) == text
            resolve_model(text, Path(cache))

        yield check


TARGETS = (
    Target("gguf_weights", _gguf_weights, (ModelError,), max_bytes=256),
    Target("gguf_texts", _gguf_texts, (ModelError,), max_bytes=256),
    Target("model_folders", _folders, (ModelError,), max_bytes=256),
    Target("tokenizer_files", _tokenizer_files, (ModelError, InvalidRequest), max_bytes=256, max_s=6.0),
    Target("model_names", _names, (ModelError,), lambda: (b"org/name:file.gguf@main", b"dummy:tiny"), max_bytes=400),
)
