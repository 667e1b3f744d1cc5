"""What a gateway loads at its start to predict output lengths: a predictor, and what its log needs of the model."""

from pathlib import Path

import numpy as np
import pytest
from tests.unit.predictors.words import QUICK, samples_of, word_table

from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.predictor_file import save_predictor
from weir.runtime.config import ConfigError
from weir.training.make import train_predictor
from weir.training.samples import Samples
from weir_gateway.config import GatewayConfig
from weir_gateway.lengths.loading import load_lengths

MODEL = "dummy:tiny"


def save_one_for_the_model(path: Path) -> None:
    source = resolve_model(MODEL)
    tokenizer = load_tokenizer(source)
    table = load_token_table(source, tokenizer, load_chat_template(source), num_dims=8)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tokenizer.vocab_size, 10).tolist() for _ in range(120)]
    samples = Samples(PromptFeatures(table).of(prompts), rng.integers(1, 100, 120))
    save_predictor(path, train_predictor(table, samples, MODEL, settings=QUICK))


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    save_one_for_the_model(tmp_path / "p.npz")
    predictor, log = str(tmp_path / "p.npz"), str(tmp_path / "log")
    for config, parts in (
        (GatewayConfig(model=MODEL), set()),
        (GatewayConfig(model=MODEL, predictor=predictor), {"prediction"}),
        (GatewayConfig(model=MODEL, request_log=log), {"log"}),
        (
            GatewayConfig(model=MODEL, predictor=predictor, request_log=log, request_log_text=True),
            {"prediction", "log"},
        ),
    ):
        lengths = load_lengths(config)
        metrics = lengths.metrics()
        lengths.close()
        found = {"prediction": "prediction_factor", "log": "request_log_written_total"}
        assert {part for part, metric in found.items() if metric in metrics} == parts


def test_a_predictor_of_another_model_stops_the_start(tmp_path: Path) -> None:
    table = word_table()
    save_predictor(
        tmp_path / "p.npz", train_predictor(table, samples_of(table, 120, noise=0.3), "words", settings=QUICK)
    )
    with pytest.raises(ConfigError, match=r"predictor: .*p\.npz: was made for another tokenizer"):
        load_lengths(GatewayConfig(model=MODEL, predictor=str(tmp_path / "p.npz")))
