from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tests.unit.hub.hub_server import LocalHub, running_hub
from tests.unit.model.tiny import VOCAB_SIZE, TinyLlama, save_tiny_llama
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.random_gguf import write_random_gguf
from weir.model.files.dummy import shape_named
from weir.model.hub.blobs import RetryPolicy
from weir.model.hub.repository import Hub


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: LocalHub, tmp_path: Path) -> Hub:
    """The client's side."""
    return Hub(server.endpoint, tmp_path / "hub", RetryPolicy(first_wait_s=0.0))


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model of random numbers that Weir serves."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_random_gguf(shape_named("tiny"), path)
    return path.read_bytes()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """With a tokenizer, in two files of weights with their index, as a repository has it."""
    folder = tmp_path_factory.mktemp("tiny-hub-llama")
    tiny = save_tiny_llama(folder)
    tiny.model.save_pretrained(folder, max_shard_size="150KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE]
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return tiny


@pytest.fixture
def gguf(server: LocalHub, gguf_bytes: bytes) -> bytes:
    server.repositories["org/tiny"] = {"tiny.gguf": gguf_bytes, "README.md": b"read me"}
    return gguf_bytes


@pytest.fixture
def folder(server: LocalHub, tiny_folder: TinyLlama) -> dict[str, bytes]:
    server.add_folder("org/tiny", tiny_folder.folder)
    return server.repositories["org/tiny"]
