"""Output lengths: predicted for the scheduler before a request is submitted, learned from when it has ended.

A client's own estimate comes before the predictor's, since it may know. It could claim too little to come first: that
helps it only among its own tenant's requests (tenants share by what they use, not by what they claim), and a tenant's
estimates are multiplied by how wrong they have been.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from weir.core.life import FinishReason
from weir.policy.predictors.calibration import Calibration, CalibrationLimits
from weir.policy.predictors.log_record import LogRecord
from weir.policy.predictors.predictor import Predictor
from weir_gateway.lengths.prediction_queue import PredictionLimits, PredictionQueue
from weir_gateway.lengths.request_log import RequestLog
from weir_gateway.requests.request_state import RequestEnd, RequestState
from weir_gateway.requests.validation import CheckedRequest, OutputPrediction

_MAX_TENANTS = 1024
_CLIENT_LIMITS = CalibrationLimits(memory=64.0, prior=4.0, smallest=0.1, largest=100.0)
_COST_PROMPTS, _COST_TOKENS = 20, 512


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
            else PredictionQueue(predictor, _cost_of(predictor), limits or PredictionLimits(), self._executor)
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
        if ending.finish_reason is None or not num_output:
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
