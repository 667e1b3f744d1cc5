from pathlib import Path

import pytest
import transformers
from tests.unit.model.tiny import TinyLlama, save_tiny_llama

from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.source import resolve_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    folder: Path = tmp_path_factory.mktemp("tiny-llama")
    return save_tiny_llama(folder)


@pytest.fixture(scope="session")
def smollm2() -> transformers.PreTrainedTokenizerBase:
    """The built-in model's tokenizer as transformers reads it from the same file."""
    path = resolve_model(SMOLLM2_135M.name).path
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
