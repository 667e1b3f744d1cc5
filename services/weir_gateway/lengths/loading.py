"""Loads what output lengths need: the predictor's file, the model's token table. Blocks; for a thread, at the start."""

import logging
from pathlib import Path

from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.predictor import PredictorFileError
from weir.policy.predictors.predictor_file import load_predictor
from weir.policy.predictors.token_table import digest_of_tokens
from weir.runtime.config import ConfigError
from weir_gateway.config import GatewayConfig
from weir_gateway.lengths.output_lengths import OutputLengths
from weir_gateway.lengths.request_log import RequestLog, RequestLogSettings

logger = logging.getLogger(__name__)


def load_lengths(config: GatewayConfig) -> OutputLengths:
    """Raises ConfigError for a predictor that cannot be used with this model, OSError for a log that cannot be written,
    ModelError."""
    predictor = None
    if config.predictor:
        tokenizer = load_tokenizer(resolve_model(config.model_reference))
        digest = digest_of_tokens([tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)])
        try:
            predictor = load_predictor(Path(config.predictor), digest)
        except PredictorFileError as error:
            raise ConfigError(f"predictor: {error}") from error
        info = predictor.info
        logger.info(
            "output lengths are predicted by %s (%s, trained on %d requests of %s, tau %.2f on those held out)",
            config.predictor,
            predictor.head.kind,
            info.num_training,
            info.model,
            info.held_out_tau,
        )
    return OutputLengths(predictor, _open_log(config) if config.request_log else None)


def _open_log(config: GatewayConfig) -> RequestLog:
    path = Path(config.request_log)
    settings = RequestLogSettings(path, config.request_log_mb << 20, keeps_tokens=config.request_log_text)
    if config.request_log_text:
        return RequestLog(settings, features=None)
    source = resolve_model(config.model_reference)
    table = load_token_table(source, load_tokenizer(source), load_chat_template(source))
    return RequestLog(settings, PromptFeatures(table))
