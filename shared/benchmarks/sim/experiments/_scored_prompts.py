"""Prompts with the lengths of their answers and the scores of predictors that were trained on other prompts.

alpaca_eval, three models   real answers (AlpacaEval, CC BY-NC 4.0, read from WEIR_TEST_DATA), token table of the
                            built-in model
made up                     lengths follow from the words of a prompt, with noise: for runs without data and model
"""

import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from benchmarks.predictors.data import KEPT_COSTS, DataSet, Prompter, alpaca_sets
from benchmarks.predictors.measure import ScoredLength, scored_lengths
from benchmarks.sim.experiment import TracesMissing, traces_folder
from weir.model.errors import ModelNotFound
from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.token_table import TokenTable, make_token_table
from weir.training.ranking import RankingSettings

ALPACA = "alpaca_eval, "
MADE_UP = "made up"
_BUILT_IN_MODEL = "smollm2-135m"
_NUM_WORDS, _NUM_DIMS, _NUM_MADE_UP = 120, 16, 240
_QUICK = RankingSettings(num_members=2, least_steps=60, num_epochs=4)


@lru_cache(maxsize=8)
def scored(name: str) -> Sequence[ScoredLength]:
    """Of `made up`, or of the set that `alpaca_eval, MODEL` names; once a process, seconds. Raises TracesMissing if its
    file or the built-in model is not on this machine."""
    if name == MADE_UP:
        return scored_lengths(*_made_up(), num_parts=2, settings=_QUICK)
    data_sets, table = _alpaca()
    return scored_lengths(data_sets[name], table)


@lru_cache(maxsize=1)
def _alpaca() -> tuple[dict[str, DataSet], TokenTable]:
    traces_folder()
    try:
        source = resolve_model(_BUILT_IN_MODEL)
        tokenizer, template = load_tokenizer(source), load_chat_template(source)
        data_sets = alpaca_sets(Prompter(tokenizer, template))
    except (ModelNotFound, FileNotFoundError) as error:
        raise TracesMissing(str(error)) from error
    return {data_set.name: data_set for data_set in data_sets}, load_token_table(source, tokenizer, template)


def _made_up() -> tuple[DataSet, TokenTable]:
    """Answers are longer the further the mean vector of a prompt's words goes along one direction."""
    source = np.random.default_rng(5)
    vectors = source.normal(size=(_NUM_WORDS, _NUM_DIMS)).astype(np.float32)
    prompts = [tuple(source.integers(0, _NUM_WORDS, source.integers(8, 60)).tolist()) for _ in range(_NUM_MADE_UP)]
    along = np.array([vectors[list(prompt)].mean(axis=0)[0] for prompt in prompts])
    logs = 5 + 0.7 * along / along.std() + 0.6 * source.normal(size=len(prompts))
    lengths = np.maximum(1, np.exp(logs)).astype(np.int64)
    table = make_token_table(vectors, lambda token_id: f" w{token_id}".encode())
    return DataSet(MADE_UP, MADE_UP, prompts, lengths), table


@lru_cache(maxsize=1)
def prediction_s() -> float:
    """What a prediction of one short prompt alone took on one core, p99, as `benchmarks.predictors` measured it."""
    alone = [cost for cost in json.loads(KEPT_COSTS.read_text())["costs"] if cost["batch"] == 1]
    return float(min(alone, key=lambda cost: cost["prompt_tokens"])["p99_ms"]) / 1e3
