"""Output lengths: predicted for the scheduler before a request is submitted, learned from when it has ended.

A client's own estimate comes before the predictor's, since it may know. It could claim too little to come first: that
helps it only among its own tenant's requests (tenants share by what they use, not by what they claim), and a tenant's
estimates are multiplied by how wrong they have been.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from weir.core.life import FinishReason
from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.log_record import LogRecord
from weir.policy.predictors.predictor import Calibration, CalibrationLimits, Predictions, Predictor
from weir.policy.predictors.predictor_file import PredictorFileError, load_predictor
from weir.policy.predictors.token_table import digest_of_tokens
from weir.runtime.config import ConfigError
from weir_gateway.config import GatewayConfig
from weir_gateway.request_log import RequestLog, RequestLogSettings
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_state import RequestState
from weir_gateway.requests.validation import CheckedRequest, OutputPrediction

logger = logging.getLogger(__name__)

_MAX_TENANTS = 1024
_CLIENT_LIMITS = CalibrationLimits(memory=64.0, prior=4.0, smallest=0.1, largest=100.0)
_COST_PROMPTS, _COST_TOKENS = 20, 512


@dataclass(frozen=True, slots=True)
class PredictionLimits:
    """`wait_s` bounds what a prediction can add to a request's time to first token."""

    wait_s: float = 0.05
    max_batch: int = 64
    max_waiting: int = 1024
    inline_below_s: float = 0.0002
    """A predictor that takes less a prompt is asked in the event loop: handing over to a thread costs as much."""


class PredictionQueue:
    """Prompts that come while a batch is predicted are the next batch, in a thread; never waited for long.

    A prediction is a help. Whatever happens to it (late, failed, too many waiting) the request goes on without, and it
    is counted.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Sequence[int]]], Predictions],
        cost_s: float,
        limits: PredictionLimits,
        executor: Executor,
    ) -> None:
        """`predict` is called in `executor`, or in the event loop where `cost_s`, measured of one prompt, is small."""
        self._predict = predict
        self._is_inline = cost_s < limits.inline_below_s
        self._limits = limits
        self._executor = executor
        self._waiting: list[tuple[Sequence[int], asyncio.Future[OutputPrediction]]] = []
        self._pump: asyncio.Task[None] | None = None
        self._counts: Counter[str] = Counter()

    async def try_predict(self, prompt: Sequence[int]) -> OutputPrediction | None:
        """None: it failed, came too late, or too many were waiting."""
        if self._is_inline:
            return self._try_now(prompt)
        if len(self._waiting) >= self._limits.max_waiting:
            self._counts["skipped"] += 1
            return None
        asked: asyncio.Future[OutputPrediction] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, asked))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="predict output lengths")
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await asked
        except TimeoutError:
            self._counts["late"] += 1
        except Exception:  # noqa: BLE001 - the boundary to a predictor: counted here, and logged where it was run
            self._counts["failed"] += 1
        return None

    def metrics(self) -> dict[str, float]:
        return {
            f"predictions_{name}_total": float(self._counts[name]) for name in ("made", "failed", "late", "skipped")
        }

    def _try_now(self, prompt: Sequence[int]) -> OutputPrediction | None:
        try:
            found = _split(self._predict([prompt]))
        except Exception:  # noqa: BLE001 - as in try_predict
            self._note_failure()
            self._counts["failed"] += 1
            return None
        self._counts["made"] += 1
        return found[0]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[: self._limits.max_batch], self._waiting[self._limits.max_batch :]
            batch = [(prompt, asked) for prompt, asked in batch if not asked.done()]
            if not batch:
                continue
            prompts = [prompt for prompt, _ in batch]
            try:
                found = _split(await loop.run_in_executor(self._executor, self._predict, prompts))
            except Exception as error:  # noqa: BLE001 - as in try_predict
                self._note_failure()
                for _, asked in batch:
                    if not asked.done():
                        asked.set_exception(error)
                continue
            self._counts["made"] += len(found)
            for (_, asked), prediction in zip(batch, found, strict=True):
                if not asked.done():
                    asked.set_result(prediction)

    def _note_failure(self) -> None:
        """The first is logged in full: the others are likely the same."""
        if not self._counts["failed"]:
            logger.exception("the output-length predictor failed; requests go on without")


class OutputLengths:
    """Without a predictor only clients' estimates are passed on; without a log nothing is written."""

    def __init__(
        self,
        predictor: Predictor | None = None,
        log: RequestLog | None = None,
        limits: PredictionLimits | None = None,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._predictor = predictor
        self._log = log
        self._unix_time_s = unix_time_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._queue = (
            None
            if predictor is None
            else PredictionQueue(predictor.predict, _cost_of(predictor), limits or PredictionLimits(), self._executor)
        )
        self._calibration = Calibration()
        self._calibrations: OrderedDict[str, Calibration] = OrderedDict()
        """Of clients' estimates, by tenant; the one that was used last comes last."""

    async def with_prediction(self, checked: CheckedRequest) -> CheckedRequest:
        """The request with what is known of its length. Never raises for what a predictor does."""
        estimate = checked.client_request.options.expected_output_tokens
        if estimate is not None:
            return replace(checked, prediction=self._prediction_from(estimate, checked))
        if self._queue is None:
            return checked
        found = await self._queue.try_predict(checked.prompt_token_ids)
        if found is None:
            return checked
        num_tokens = _bounded(found.uncalibrated_tokens * self._calibration.factor, checked)
        return replace(checked, prediction=replace(found, num_tokens=num_tokens))

    def observe(self, state: RequestState, ending: RequestEnd) -> None:
        """Learns from a request that finished by itself; from no other."""
        checked, num_output = state.checked, state.output.num_tokens
        if ending.finish_reason in (None, FinishReason.DEADLINE) or not num_output:
            return
        max_tokens, prediction = checked.stop_rules.max_tokens, checked.prediction
        estimate = checked.client_request.options.expected_output_tokens
        if estimate is not None:
            self._calibration_of(checked.scope.tenant).observe(float(estimate), num_output, max_tokens)
        elif prediction.uncalibrated_tokens:
            self._calibration.observe(prediction.uncalibrated_tokens, num_output, max_tokens)
        if self._log is not None:
            now_s = self._unix_time_s()
            record = LogRecord(
                at_s=now_s,
                model=checked.model.name,
                num_prompt_tokens=len(checked.prompt_token_ids),
                num_output_tokens=num_output,
                max_tokens=max_tokens,
                is_cut=ending.finish_reason is FinishReason.LENGTH,
                arrival_s=now_s - state.age_s,
            )
            self._log.write(record, checked.prompt_token_ids)

    def metrics(self) -> dict[str, float]:
        """A part that is off has none."""
        queue = {} if self._queue is None else self._queue.metrics()
        factor = {} if self._queue is None else {"prediction_factor": self._calibration.factor}
        return queue | factor | ({} if self._log is None else self._log.metrics())

    def close(self) -> None:
        """Blocks until the log is written, or two seconds."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._log is not None:
            self._log.close()

    def _prediction_from(self, estimate: int, checked: CheckedRequest) -> OutputPrediction:
        num_tokens = _bounded(estimate * self._calibration_of(checked.scope.tenant).factor, checked)
        if self._predictor is None:
            return OutputPrediction(num_tokens)
        score = self._predictor.head.score_of(num_tokens / self._calibration.factor)
        return OutputPrediction(num_tokens, score)

    def _calibration_of(self, tenant: str) -> Calibration:
        """Of its clients' estimates; kept of the tenants that came last."""
        calibration = self._calibrations.setdefault(tenant, Calibration(_CLIENT_LIMITS))
        self._calibrations.move_to_end(tenant)
        if len(self._calibrations) > _MAX_TENANTS:
            self._calibrations.popitem(last=False)
        return calibration


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


def _bounded(num_tokens: float, checked: CheckedRequest) -> float:
    return min(max(1.0, num_tokens), float(checked.stop_rules.max_tokens))


def _cost_of(predictor: Predictor) -> float:
    """Seconds of one prediction alone, of a long prompt: the fastest of a few, once everything is in memory."""
    prompt = list(range(min(_COST_TOKENS, predictor.features.table.vocab_size)))
    fastest_s = float("inf")
    for _ in range(_COST_PROMPTS):
        started_s = time.perf_counter()
        predictor.predict([prompt])
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return fastest_s


def _split(predictions: Predictions) -> list[OutputPrediction]:
    pairs = zip(predictions.output_tokens.tolist(), predictions.scores.tolist(), strict=True)
    return [OutputPrediction(tokens, score, uncalibrated_tokens=tokens) for tokens, score in pairs]
