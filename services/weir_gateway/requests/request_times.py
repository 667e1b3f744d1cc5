"""One request's times on its gateway's clock, counted as it goes.

    arrival   accepted        granted   started      first token    decode worker has it      last token
       │         │─── queue ────│─ start ──│── prefill ──│── hand_off ──│                         │
       │                                                 │──────────────── decode ────────────────│
       │──────────────────── TTFT ──────────────────────>│                                        │
       │────────────────────────────────────── e2e ──────────────────────────────────────────────>│

A request that is dispatched again goes through its stages again; each is counted once, with all its times added. Stages
are counted of requests that finish, as vLLM has it: those of one that was cut off say little of any.
"""

import time
from typing import Protocol

from weir.bus.messages import Placement
from weir.core.clock import Clock
from weir.core.life import FinishReason, Phase
from weir.wire.v1 import worker_pb2
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_figures import LaneFigures

_BEGINS = {Phase.RECEIVED: "queue", Phase.QUEUED: "queue", Phase.GRANTED: "start", Phase.PREFILLING: "prefill"}
_DECODE = "decode"
_ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class LifeObserver(Protocol):
    """Hears of everything that happens to one request."""

    def on_phase(self, phase: Phase, placement: Placement | None) -> None:
        """It is in another phase. `placement`: of its present dispatch, once it is granted."""
        ...

    def on_tokens(self, now_s: float, num_tokens: int) -> None:
        """A frame brought tokens: there are so many now. On the path of every token."""
        ...

    def on_waits(self, waits: worker_pb2.SequenceWaits) -> None:
        """The worker that ended it says how long it waited there; once, before its last phase."""
        ...


class RequestTimes:
    """Each answer of a request that has several has one of its own."""

    def __init__(self, figures: LaneFigures, clock: Clock, arrived_at_s: float, trace_id: str) -> None:
        """`trace_id`: where somebody may look at the trace; else empty."""
        self._figures = figures
        self.clock = clock
        self._arrived_at_s = arrived_at_s
        self._trace_id = trace_id
        self._stage = "queue"
        self._stage_since_s = clock.now_s()
        self._spent_s: dict[str, float] = {}
        self._token_at_s = 0.0
        self.first_token_at_s: float | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0
        """Of the prompt; known at the end."""

    def on_phase(self, phase: Phase, placement: Placement | None) -> None:
        """Terminal ones are left to `end`."""
        stage = _BEGINS.get(phase)
        if stage is not None:
            self._enter(stage, self.clock.now_s())
        elif phase is Phase.DECODING and placement is not None and not placement.is_local:
            # The decode worker may be the first to be heard.
            has_token = self._stage is _DECODE
            self._add("hand_off", self.clock.now_s() - self._stage_since_s if has_token else 0.0)

    def on_tokens(self, now_s: float, num_tokens: int) -> None:
        """The answer has so many tokens now. Called for every frame that brings some."""
        num_new = num_tokens - self.num_tokens
        if num_new <= 0:  # its end came alone
            return
        figures = self._figures
        if self.num_tokens:
            figures.itl.observe(now_s - self._token_at_s)
        if self._stage is not _DECODE:
            self._begin_decode(now_s)
        figures.num_output_tokens += num_new
        self.num_tokens = num_tokens
        self._token_at_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """None: there is no token yet."""
        return None if self.first_token_at_s is None else self.first_token_at_s - self._arrived_at_s

    def end(self, ending: RequestEnd, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Once, after everything else."""
        self.num_cached_tokens = num_cached_tokens
        reason = ending.finish_reason
        cut_off = "error" if ending.phase in (Phase.FAILED, Phase.REFUSED) else "abort"
        self._figures.ends[cut_off if reason is None else _ENDS.get(reason, "abort")] += 1
        if ending.phase is not Phase.FINISHED or not self.num_tokens:
            return
        self._enter(_DECODE, self._token_at_s)
        self._count_finished(num_prompt_tokens, num_cached_tokens)

    def _count_finished(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        figures, spent_s, trace_id = self._figures, self._spent_s, self._trace_id
        at_s = time.time() if trace_id else 0.0
        figures.e2e.observe_traced(self._token_at_s - self._arrived_at_s, trace_id, at_s)
        for stage, value_s in spent_s.items():
            figures.stages[stage].observe_traced(value_s, trace_id if stage == "hand_off" else "", at_s)
        figures.inference.observe(sum(spent_s.get(stage, 0.0) for stage in ("start", "prefill", _DECODE)))
        if self.num_tokens > 1 and self.first_token_at_s is not None:
            figures.tpot.observe((self._token_at_s - self.first_token_at_s) / (self.num_tokens - 1))
        figures.prompt_tokens.observe(num_prompt_tokens)
        figures.computed_prompt_tokens.observe(num_prompt_tokens - num_cached_tokens)
        figures.output_tokens.observe(self.num_tokens)

    def _begin_decode(self, now_s: float) -> None:
        self._enter(_DECODE, now_s)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
            at_s = time.time() if self._trace_id else 0.0
            self._figures.ttft.observe_traced(now_s - self._arrived_at_s, self._trace_id, at_s)

    def _enter(self, stage: str, now_s: float) -> None:
        self._add(self._stage, now_s - self._stage_since_s)
        self._stage, self._stage_since_s = stage, now_s

    def _add(self, stage: str, spent_s: float) -> None:
        self._spent_s[stage] = self._spent_s.get(stage, 0.0) + max(0.0, spent_s)
