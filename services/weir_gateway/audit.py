"""Writes the life events of requests, off their path: what the bus does not take in time is dropped and counted."""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from weir.bus.audit import MAX_BATCH, AuditBounds, AuditStream, LifeEvent
from weir.bus.endpoint import BusEndpoint
from weir.bus.protocol import Bus, BusError
from weir.bus.stores import ask_to_make
from weir.bus.subjects import Subjects
from weir.core.clock import Backoff
from weir.core.life import FinishReason
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_state import RequestState

logger = logging.getLogger(__name__)

_GATHER_S = 0.2
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class AuditSettings:
    bounds: AuditBounds
    max_waiting: int = 8192
    """Events that are not written yet: about 8 MB."""
    gather_s: float = _GATHER_S
    """Between an event and its being written, so that several go in one message."""


class AuditWriter:
    """`note` never waits. Batches keep their order and are in the stream once, unless NATS was away for minutes."""

    def __init__(
        self,
        bus: Bus,
        endpoint: BusEndpoint,
        subjects: Subjects,
        gateway_id: str,
        settings: AuditSettings,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._stream = AuditStream(bus, subjects)
        self._endpoint = endpoint
        self._subject_of_maker = subjects.make_audit
        self._gateway_id = gateway_id
        self._settings = settings
        self._unix_time_s = unix_time_s
        self._waiting: deque[LifeEvent] = deque()
        self._has_events = asyncio.Event()
        self._sending: tuple[LifeEvent, ...] = ()
        """The batch that is sent until it is taken: the first of those that wait."""
        self._num_batches = 0
        self._is_made = False
        self._counts: Counter[str] = Counter()

    def note(self, state: RequestState, ending: RequestEnd, ttft_s: float | None) -> None:
        """It has ended."""
        if len(self._waiting) >= self._settings.max_waiting:
            self._counts["dropped"] += 1
            return
        self._waiting.append(_event_of(state, ending, ttft_s, self._gateway_id, self._unix_time_s()))
        self._has_events.set()

    async def run(self) -> None:
        """Runs for ever: has the stream made, writes what waits, and goes on trying."""
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        self._has_events.set()
        while True:
            await self._has_events.wait()
            await asyncio.sleep(self._settings.gather_s)
            try:
                await self._write_all()
            except BusError as error:
                self._note_failure(error)
                await asyncio.sleep(backoff.next_delay_s())
            else:
                backoff.reset()

    async def close(self) -> None:
        """Once `run` has ended: writes what waits, as far as two seconds allow."""
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(_CLOSE_S):
                await self._write_all()
        self._counts["dropped"] += len(self._waiting)
        self._waiting.clear()

    def metrics(self) -> dict[str, float]:
        totals = {f"audit_{name}_total": float(self._counts[name]) for name in ("written", "dropped", "failed")}
        return {**totals, "audit_waiting": float(len(self._waiting))}

    async def _write_all(self) -> None:
        """Raises BusError, and keeps what is not known to be taken."""
        if not self._is_made:
            await ask_to_make(self._endpoint, self._subject_of_maker, self._settings.bounds)
            self._is_made = True
        while self._waiting:
            if not self._sending:
                self._sending = tuple(self._waiting[index] for index in range(min(MAX_BATCH, len(self._waiting))))
                self._num_batches += 1
            await self._stream.append(self._sending, f"{self._gateway_id}-{self._num_batches}")
            for _ in self._sending:
                self._waiting.popleft()
            self._counts["written"] += len(self._sending)
            self._sending = ()
        self._has_events.clear()

    def _note_failure(self, error: BusError) -> None:
        """The stream may be gone: it is made again before the next batch."""
        self._is_made = False
        if not self._counts["failed"]:
            logger.warning("life events cannot be written (%s); trying again, requests go on", error)
        self._counts["failed"] += 1


def _event_of(
    state: RequestState, ending: RequestEnd, ttft_s: float | None, gateway_id: str, now_s: float
) -> LifeEvent:
    checked, reason = state.checked, ending.finish_reason
    options, error = checked.client_request.options, ending.error
    return LifeEvent(
        request_id=state.request_id,
        gateway_id=gateway_id,
        arrival_s=now_s - state.age_s,
        at_s=now_s,
        model=checked.model.name,
        tenant=checked.scope.tenant,
        lane=checked.scope.lane,
        num_prompt_tokens=len(checked.prompt_token_ids),
        num_cached_tokens=state.num_cached_tokens,
        num_output_tokens=state.output.num_tokens,
        max_tokens=checked.stop_rules.max_tokens,
        outcome=ending.phase.value,
        reason=reason.value if reason is not None else type(error).__name__,
        is_cut=reason is FinishReason.LENGTH,
        ttft_s=ttft_s,
        predicted_output_tokens=checked.prediction.num_tokens or None,
        deadline_s=_seconds(options.deadline_ms),
        ttft_target_s=_seconds(options.ttft_target_ms),
        itl_target_s=_seconds(options.itl_target_ms),
    )


def _seconds(milliseconds: int | None) -> float | None:
    return None if not milliseconds else milliseconds / 1000
