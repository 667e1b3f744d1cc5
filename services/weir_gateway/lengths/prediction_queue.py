"""Output-length predictions: batched in a thread where they are slow, and never waited for long.

A prediction is a help. Whatever happens to it (late, failed, too many waiting) the request goes on without, and it is
counted.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from weir.policy.predictors.predictor import Predictions
from weir_gateway.requests.validation import OutputPrediction

logger = logging.getLogger(__name__)


class BatchPredictor(Protocol):
    """The part of `weir.policy.predictors.predictor.Predictor` that is used here. Called in a thread."""

    def predict(self, prompts: Sequence[Sequence[int]]) -> Predictions: ...


@dataclass(frozen=True, slots=True)
class PredictionLimits:
    """`wait_s` bounds what a prediction can add to a request's time to first token."""

    wait_s: float = 0.05
    max_batch: int = 64
    max_waiting: int = 1024
    inline_below_s: float = 0.0002
    """A predictor that takes less a prompt is asked in the event loop: handing over to a thread costs as much."""


class PredictionQueue:
    """Prompts that come while a batch is predicted are the next batch."""

    def __init__(self, predictor: BatchPredictor, cost_s: float, limits: PredictionLimits, executor: Executor) -> None:
        """`cost_s`: measured, of one prompt."""
        self._predictor = predictor
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
            found = _taken_apart(self._predictor.predict([prompt]))
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
            prompts = [prompt for prompt, _ in batch]
            try:
                found = _taken_apart(await loop.run_in_executor(self._executor, self._predictor.predict, prompts))
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


def _taken_apart(predictions: Predictions) -> list[OutputPrediction]:
    pairs = zip(predictions.output_tokens.tolist(), predictions.scores.tolist(), strict=True)
    return [OutputPrediction(tokens, score, uncalibrated_tokens=tokens) for tokens, score in pairs]
