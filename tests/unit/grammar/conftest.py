import pytest

from benchmarks.structured.drawing import real_tokenizer, toy_vocabulary
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import Vocabulary
from weir.model.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def loaded() -> tuple[Tokenizer, Vocabulary]:
    return real_tokenizer()


@pytest.fixture(scope="session")
def tokenizer(loaded: tuple[Tokenizer, Vocabulary]) -> Tokenizer:
    return loaded[0]


@pytest.fixture(scope="session")
def vocabulary(loaded: tuple[Tokenizer, Vocabulary]) -> Vocabulary:
    return loaded[1]


@pytest.fixture(scope="session")
def engine(vocabulary: Vocabulary) -> LlguidanceEngine:
    return LlguidanceEngine(vocabulary)


@pytest.fixture(scope="session")
def toy() -> Vocabulary:
    return toy_vocabulary()


@pytest.fixture(scope="session")
def toy_engine(toy: Vocabulary) -> LlguidanceEngine:
    return LlguidanceEngine(toy)
