"""The gateway's record of one request: where it is in its life, and how it ended, once."""

from collections.abc import Callable
from dataclasses import dataclass

from weir.bus.messages import HeldRequest, Placement, Submit
from weir.core.attempt import Attempt
from weir.core.clock import Clock
from weir.core.errors import WeirError
from weir.core.life import FinishReason, LifeEvent, Phase, check_transition
from weir_gateway.requests.validation import CheckedRequest


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended. `error` is None for FINISHED alone, and then `finish_reason` is set."""

    phase: Phase
    error: WeirError | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class RequestIds:
    """`request_id` is the system's; `client_id` is what the client calls it by, given by it or else the same."""

    request_id: str
    client_id: str
    gateway_id: str


class RequestRecord:
    """Changed only through the methods below; each transition is one event, and the last one is terminal."""

    def __init__(
        self,
        ids: RequestIds,
        checked: CheckedRequest,
        deadline_at_s: float | None,
        clock: Clock,
        on_event: Callable[[LifeEvent], None],
    ) -> None:
        self.ids = ids
        self.checked = checked
        self.deadline_at_s = deadline_at_s
        self._clock = clock
        self._on_event = on_event
        self._phase = Phase.RECEIVED
        self._placement: Placement | None = None
        self._dispatch = 1
        self._ending: RequestEnd | None = None
        self._is_prefilled = False
        self._is_admitted = False
        self._received_at_s = clock.now_s()
        self._emit()

    @property
    def age_s(self) -> float:
        return self._clock.now_s() - self._received_at_s

    @property
    def request_id(self) -> str:
        return self.ids.request_id

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def dispatch(self) -> int:
        """How many times it was submitted. Whatever speaks of an earlier time comes too late."""
        return self._dispatch

    @property
    def placement(self) -> Placement | None:
        """Set by the grant of the present dispatch."""
        return self._placement

    @property
    def is_admitted(self) -> bool:
        """Whether the scheduler took it, however it ended."""
        return self._is_admitted

    @property
    def attempt(self) -> Attempt:
        """Workers' news of older ones are dropped."""
        return Attempt(self._dispatch)

    @property
    def ending(self) -> RequestEnd | None:
        return self._ending

    def submit_message(self, page_hashes: bytes = b"") -> Submit:
        """What the scheduler has to know; the deadline counts from now."""
        left_ms = 0
        if self.deadline_at_s is not None:
            left_ms = max(1, round((self.deadline_at_s - self._clock.now_s()) * 1000))
        options, scope = self.checked.draft.options, self.checked.scope
        return Submit(
            request_id=self.request_id,
            gateway_id=self.ids.gateway_id,
            model=self.checked.model.name,
            lane=scope.lane,
            tenant=scope.tenant,
            num_prompt_tokens=len(self.checked.prompt_token_ids),
            max_tokens=self.checked.stop_rules.max_tokens,
            deadline_ms=left_ms,
            ttft_target_ms=options.ttft_target_ms or 0,
            itl_target_ms=options.itl_target_ms or 0,
            expected_output_tokens=options.expected_output_tokens or 0,
            predicted_output_tokens=self.checked.prediction.num_tokens,
            output_score=self.checked.prediction.score,
            page_hashes=page_hashes,
            dispatch=self._dispatch,
        )

    def held_message(self, num_output_tokens: int) -> HeldRequest:
        """`num_output_tokens`: that have come."""
        return HeldRequest(self.submit_message(), self._placement, self._is_prefilled, num_output_tokens)

    def queued(self) -> None:
        """The scheduler took it. A grant can overtake this news, which then says nothing new."""
        if self._phase is Phase.RECEIVED:
            self._is_admitted = True
            self._enter(Phase.QUEUED)

    def granted(self, placement: Placement) -> None:
        if placement.dispatch != self._dispatch:
            raise ValueError(f"request {self.request_id}: dispatch {placement.dispatch}, not {self._dispatch}")
        self.queued()
        self._enter(Phase.GRANTED)
        self._placement = placement

    def queued_again(self) -> None:
        """Its grant came to nothing before any worker was told of it: it waits for that of the next dispatch."""
        self._enter(Phase.QUEUED)
        self._placement = None
        self._dispatch += 1

    def started(self) -> None:
        self._enter(Phase.PREFILLING)

    def prefilled(self) -> None:
        """The first token is there."""
        self._is_prefilled = True
        if self._phase is Phase.PREFILLING:
            self._enter(Phase.HANDING_OFF)

    def handed_off(self) -> None:
        """The decode worker has it, as either worker may be the first to say."""
        if self._phase in (Phase.PREFILLING, Phase.HANDING_OFF):
            self._enter(Phase.DECODING)

    def end(self, ending: RequestEnd) -> None:
        """Raises IllegalTransition when it has ended before."""
        self._enter(ending.phase)
        self._ending = ending

    def _enter(self, phase: Phase) -> None:
        check_transition(self.request_id, self._phase, phase)
        self._phase = phase
        self._emit()

    def _emit(self) -> None:
        self._on_event(LifeEvent(self.request_id, self._phase, self._clock.now_s()))
