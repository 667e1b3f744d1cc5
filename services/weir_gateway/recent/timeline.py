"""The timeline of one request, written as it goes: a few marks for each dispatch, and nothing for a token."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from weir.bus.messages import Placement
from weir.core.clock import Clock
from weir.core.errors import WeirError, told_to_others
from weir.core.life import Phase
from weir.telemetry.request_record import (
    Mark,
    PhaseName,
    PhaseShare,
    RequestEvent,
    RequestRecord,
    RequestSummary,
    longest_of,
    phases_of,
)
from weir.wire.v1 import worker_pb2
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_times import RequestTimes

_MAX_MARKS = 128
_MAX_EVENTS = 64
_MAX_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True)
class RequestAbout:
    """What does not change of a request. `came_at_s`: by its gateway's clock."""

    request_id: str
    client_id: str
    gateway_id: str
    trace_id: str
    tenant: str
    lane: str
    model: str
    model_digest: str
    operation: str
    choice: int
    num_prompt_tokens: int
    max_tokens: int
    received_at_s: float
    came_at_s: float


class RequestTimeline:
    """Hears of what happens to a request beside its span, and makes a record of it whenever one is asked for."""

    def __init__(
        self, about: RequestAbout, times: RequestTimes, clock: Clock, on_end: Callable[["RequestTimeline"], None]
    ) -> None:
        """It was accepted just now. `on_end` is called once, when it has ended; `times` knows of its tokens."""
        self.about = about
        self._times = times
        self._clock = clock
        self._on_end = on_end
        self._marks = [Mark(Phase.RECEIVED, clock.now_s())]
        self._events: list[RequestEvent] = []
        self._shares: dict[tuple[int, PhaseName], list[PhaseShare]] = {}
        self._counts: Counter[str] = Counter()
        self._dispatch = 1
        self._life = Phase.RECEIVED
        self._placement: Placement | None = None
        self._ending: RequestEnd | None = None
        self._ended_at_s: float | None = None

    def on_phase(self, phase: Phase, placement: Placement | None) -> None:
        is_again = phase is Phase.QUEUED and self._life is not Phase.RECEIVED
        self._dispatch += is_again
        self._life = phase
        if phase is Phase.PREFILLING and placement is not None:
            self._placement = placement
        if phase is Phase.HANDING_OFF and placement is not None and placement.is_local:
            return  # nothing is handed off
        if len(self._marks) < _MAX_MARKS:
            self._marks.append(Mark(phase, self._clock.now_s(), self._dispatch, _worker_of(phase, placement)))

    def interrupted(self, error: WeirError, num_output_tokens: int) -> None:
        self._add_event("interrupted", num_output_tokens, told_to_others(error))

    def adopted(self, error: WeirError, num_output_tokens: int, waited_s: float) -> None:
        """Another worker goes on, after `waited_s` without one."""
        self._counts["moves"] += 1
        self._add_share("decode", PhaseShare("moving", round(waited_s * 1000, 3)))
        self._add_event("adopted", num_output_tokens, told_to_others(error))

    def claimed(self, num_output_tokens: int) -> None:
        self._add_event("claimed", num_output_tokens)

    def on_waits(self, waits: worker_pb2.SequenceWaits) -> None:
        """Where one worker does all, it waits before the prompt is computed, else when it has been handed off."""
        is_local = self._placement is not None and self._placement.is_local
        self._add_share("prefill" if is_local else "decode", PhaseShare("waiting", waits.waiting_us / 1000))
        self._add_share("decode", PhaseShare("swapped_out", waits.swapped_out_us / 1000))
        self._add_share("decode", PhaseShare("paused", waits.paused_us / 1000))
        self._counts["preemptions"] += waits.num_preemptions

    def end(self, ending: RequestEnd) -> None:
        self._ending, self._ended_at_s, self._life = ending, self._clock.now_s(), ending.phase
        self._on_end(self)

    @property
    def age_ms(self) -> float:
        return (self._clock.now_s() - self.about.came_at_s) * 1000

    @property
    def num_cached_tokens(self) -> int:
        return self._times.num_cached_tokens

    def record(self) -> RequestRecord:
        about, ending, times = self.about, self._ending, self._times
        ended_at_s = self._clock.now_s() if self._ended_at_s is None else self._ended_at_s
        phases = phases_of(about.came_at_s, self._marks, ended_at_s, self._shares)
        longest = longest_of(phases)
        first_token_at_s = times.first_token_at_s
        error = None if ending is None else ending.error
        reason = None if ending is None else ending.finish_reason
        summary = RequestSummary(
            request_id=about.request_id,
            client_id=about.client_id,
            gateway_id=about.gateway_id,
            trace_id=about.trace_id,
            tenant=about.tenant,
            lane=about.lane,
            model=about.model,
            model_digest=about.model_digest,
            operation=about.operation,
            choice=about.choice,
            received_at_s=about.received_at_s,
            life=self._life.value,
            duration_ms=round((ended_at_s - about.came_at_s) * 1000, 3),
            time_to_first_token_ms=(
                None if first_token_at_s is None else round((first_token_at_s - about.came_at_s) * 1000, 3)
            ),
            finish_reason="" if reason is None else reason.value,
            error_type="" if error is None else type(error).__name__,
            num_prompt_tokens=about.num_prompt_tokens,
            num_cached_tokens=times.num_cached_tokens,
            num_output_tokens=times.num_tokens,
            num_dispatches=self._dispatch,
            num_moves=self._counts["moves"],
            num_preemptions=self._counts["preemptions"],
            longest_phase=longest.name,
            longest_phase_ms=longest.duration_ms,
            cause=longest.cause,
        )
        return RequestRecord(
            summary=summary,
            max_tokens=about.max_tokens,
            error="" if error is None else told_to_others(error)[:_MAX_TEXT_CHARS],
            placement_reason="" if self._placement is None else self._placement.reason[:_MAX_TEXT_CHARS],
            phases=phases,
            events=tuple(self._events),
        )

    def _add_event(self, name: str, num_output_tokens: int, detail: str = "") -> None:
        if len(self._events) < _MAX_EVENTS:
            at_ms = round((self._clock.now_s() - self.about.came_at_s) * 1000, 3)
            event = RequestEvent(name, at_ms, self._dispatch, num_output_tokens, detail[:_MAX_TEXT_CHARS])
            self._events.append(event)

    def _add_share(self, phase: PhaseName, share: PhaseShare) -> None:
        """Those of one name are added up."""
        shares = self._shares.setdefault((self._dispatch, phase), [])
        same = next((index for index, known in enumerate(shares) if known.name == share.name), None)
        if same is None:
            shares.append(share)
        else:
            shares[same] = PhaseShare(share.name, shares[same].duration_ms + share.duration_ms)


def _worker_of(phase: Phase, placement: Placement | None) -> str:
    if placement is None:
        return ""
    if phase is Phase.PREFILLING:
        return placement.prefill_worker_id
    return placement.decode_worker_id if phase in (Phase.HANDING_OFF, Phase.DECODING) else ""
