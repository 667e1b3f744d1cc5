"""A vocabulary of words, and prompts whose answers' lengths follow from their words."""

import itertools

import numpy as np
import numpy.typing as npt

from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.token_table import ChatFrame, TokenTable, make_token_table
from weir.training.ranking import RankingSettings
from weir.training.samples import Samples

PREFIX, SUFFIX = (1, 2), (3,)
FRAME = ChatFrame(PREFIX, SUFFIX, before_answer=(0, 3), after_answer=(0, 1))
TOKEN_BYTES = [
    b"<end>",
    b"<user>",
    b"\n",
    b"<bot>",
    b"?",
    b" list",
    b"Write",
    b" words",
    b" 5",
    b"0",
    b"```py",
    b" none",
]
NUM_WORDS = 120
QUICK = RankingSettings(num_members=2, least_steps=100, num_epochs=8)


def token_bytes(token_id: int) -> bytes:
    return TOKEN_BYTES[token_id] if token_id < len(TOKEN_BYTES) else f" w{token_id}".encode()


def word_table(num_dims: int = 16, seed: int = 3) -> TokenTable:
    vectors = np.random.default_rng(seed).normal(size=(NUM_WORDS, num_dims)).astype(np.float32)
    return make_token_table(vectors, token_bytes, FRAME)


def prompts_and_lengths(
    table: TokenTable, num: int, noise: float, seed: int = 0
) -> tuple[list[list[int]], npt.NDArray[np.int64]]:
    """Answers are longer the further a prompt's mean vector goes along one direction; prompts' lengths say nothing."""
    source = np.random.default_rng(seed)
    prompts = [source.integers(len(TOKEN_BYTES), NUM_WORDS, source.integers(4, 20)).tolist() for _ in range(num)]
    vectors = table.vectors * table.scales
    along = np.array([vectors[prompt].mean(axis=0)[0] for prompt in prompts])
    logs = 4 + along / along.std() + noise * source.normal(size=num)
    return [[*PREFIX, *prompt, *SUFFIX] for prompt in prompts], np.maximum(1, np.exp(logs)).astype(np.int64)


def conversation(*lengths: int) -> list[int]:
    """Answers of these lengths, each to a question of two tokens, and a last question."""
    answers = [[*FRAME.before_answer, *[40] * length, *FRAME.after_answer, 20, 21] for length in lengths]
    return [*PREFIX, 20, 21, *itertools.chain.from_iterable(answers), *SUFFIX]


def samples_of(table: TokenTable, num: int, noise: float, seed: int = 0) -> Samples:
    prompts, lengths = prompts_and_lengths(table, num, noise, seed)
    return Samples(PromptFeatures(table).of(prompts), lengths)
