"""The gateway of a simulated system: submits requests, starts them where they were granted, and notes what came out."""

from collections import Counter
from collections.abc import Callable, Sequence

from weir.bus.messages import Cancel, Finish, Grant, Outcome, Prefilled, Revoke, Submit, SubmitReply
from weir.scheduling.fairness import DECODE_PRICE, PREFILL_PRICE
from weir.sim.profile import CostProfile
from weir.sim.request_state import GATEWAY_ID, PromptHashes, SimRequestState
from weir.sim.results.metrics import RequestOutcome
from weir.sim.scheduler import SimScheduler
from weir.sim.timeline import NS_PER_MS, NS_PER_S, Timeline, ns_of_ms, ns_of_s
from weir.sim.workloads.workload import SimRequest, Workload

MODEL = "model"


class SimGateway:
    """Times are those at which the client would have it: a message's way is added, streams keep their order."""

    def __init__(
        self,
        workload: Workload,
        profile: CostProfile,
        timeline: Timeline,
        scheduler: SimScheduler,
        *,
        hashes: PromptHashes | None,
        start: Callable[[SimRequestState], None],
        cancel: Callable[[SimRequestState], None],
    ) -> None:
        """`start`, `cancel`: to the workers; called when the message is there. `hashes`: of prompts; None: no
        prefixes are kept."""
        self.states: dict[str, SimRequestState] = {}
        self.outcomes: list[RequestOutcome] = []
        self.gap_counts_by_ms: Counter[int] = Counter()
        self.num_left = len(workload.requests)
        self._requests: Sequence[SimRequest] = workload.requests
        self._num_arrived = 0
        self.service: dict[str, float] = {}
        """By tenant, as the last report found it."""
        self._granted: dict[str, SimRequestState] = {}
        """Those that were over a moment ago included."""
        self._hashes = hashes
        self._timeline = timeline
        self._bus_ns = ns_of_ms(profile.bus_ms)
        self._stream_ns = ns_of_ms(profile.stream_ms)
        self._start = start
        self._cancel = cancel
        self._scheduler = scheduler

    def begin(self) -> None:
        """From here on requests arrive."""
        self._plan_arrival()

    def on_grant(self, grant: Grant) -> None:
        state = self.states[grant.request_id]
        state.placement = grant.placement
        if state.is_over:
            self._send_finish(state, Outcome.CANCELLED)
            return
        self._granted[grant.request_id] = state
        state.outcome.granted_s = self._timeline.since_start_s(self._timeline.now_ns)
        state.outcome.is_local = grant.placement.is_local
        state.outcome.prefill_worker_id = grant.placement.prefill_worker_id
        self._timeline.after(self._stream_ns, lambda: self._start(state))

    def on_revoke(self, revoke: Revoke) -> None:
        state = self.states[revoke.request_id]
        if not state.is_over:
            self._end(state, self._timeline.now_ns, revoke.reason.value)
            self._cancel_at_workers(state)

    def on_token(self, state: SimRequestState, *, is_last: bool) -> None:
        """A worker has sampled one and sends it now."""
        now_ns = self._timeline.now_ns + self._stream_ns
        if state.is_over or (state.expires_ns is not None and now_ns >= state.expires_ns):
            return
        outcome, now_s = state.outcome, self._timeline.since_start_s(now_ns)
        outcome.num_output_tokens += 1
        if outcome.first_token_s is None:
            outcome.first_token_s = now_s
            self._timeline.at(now_ns + self._bus_ns, lambda: self._send_prefilled(state))
        else:
            gap_ns = now_ns - state.last_token_ns
            outcome.worst_gap_s = max(outcome.worst_gap_s, gap_ns / NS_PER_S)
            self.gap_counts_by_ms[gap_ns // NS_PER_MS] += 1
        state.last_token_ns = now_ns
        outcome.last_token_s = now_s
        if is_last:
            self._end(state, now_ns, "")
            self._timeline.at(now_ns + self._bus_ns, lambda: self._send_finish(state, Outcome.FINISHED))

    def on_tokens(self, state: SimRequestState, num_tokens: int, last_ns: int, longest_gap_ns: int) -> None:
        """Several, none of which is its first or its last."""
        outcome = state.outcome
        outcome.num_output_tokens += num_tokens
        outcome.worst_gap_s = max(outcome.worst_gap_s, longest_gap_ns / NS_PER_S)
        state.last_token_ns = last_ns + self._stream_ns
        outcome.last_token_s = self._timeline.since_start_s(state.last_token_ns)

    def on_gaps(self, gap_ns: int, num_gaps: int) -> None:
        """Of the tokens that `on_tokens` reports."""
        self.gap_counts_by_ms[gap_ns // NS_PER_MS] += num_gaps

    def report_progress(self) -> None:
        """How far each granted request has come, as a gateway reports it every second."""
        over = []
        for request_id, state in self._granted.items():
            num_tokens = state.outcome.num_output_tokens
            if num_tokens > state.num_reported_tokens:
                self._note_service(state, num_tokens)
                if not state.is_over:
                    self._scheduler.progressed(request_id, num_tokens)
            if state.is_over:
                over.append(request_id)
        for request_id in over:
            del self._granted[request_id]

    def _note_service(self, state: SimRequestState, num_tokens: int) -> None:
        service = DECODE_PRICE * (num_tokens - state.num_reported_tokens)
        if state.num_reported_tokens == 0:
            service += PREFILL_PRICE * (state.request.num_prompt_tokens - state.outcome.num_cached_tokens)
        state.num_reported_tokens = num_tokens
        tenant = state.request.tenant
        self.service[tenant] = self.service.get(tenant, 0.0) + service

    def live_by_worker(self) -> Counter[str]:
        """Granted requests that have not ended, by the worker that has them or is to get them."""
        live: Counter[str] = Counter()
        for state in self._granted.values():
            if not state.is_over and state.placement is not None:
                placement = state.placement
                is_prefilled = state.outcome.first_token_s is not None
                live.update({placement.decode_worker_id} | (set() if is_prefilled else {placement.prefill_worker_id}))
        return live

    def on_failure(self, state: SimRequestState, reason: str) -> None:
        """A worker gave it up, or is dead; its stream breaks."""
        self._timeline.after(self._stream_ns, lambda: self._fail(state, reason))

    def _plan_arrival(self) -> None:
        if self._num_arrived < len(self._requests):
            arrives_ns = self._timeline.start_ns + ns_of_s(self._requests[self._num_arrived].arrival_s)
            self._timeline.at(arrives_ns, self._arrive)

    def _arrive(self) -> None:
        request = self._requests[self._num_arrived]
        self._num_arrived += 1
        self._plan_arrival()
        outcome = RequestOutcome(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            lane=request.lane,
            tenant=request.tenant,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        hashes = () if self._hashes is None else self._hashes.hashes_of(request)
        expires_ns = self._timeline.now_ns + ns_of_s(request.deadline_s) if request.deadline_s > 0 else None
        state = SimRequestState(request, outcome, hashes, expires_ns)
        self.states[request.request_id] = state
        self.outcomes.append(outcome)
        if expires_ns is not None:
            self._timeline.at(expires_ns, lambda: self._expire(state))
        self._timeline.after(self._bus_ns, lambda: self._submit(state))

    def _submit(self, state: SimRequestState) -> None:
        reply = self._scheduler.submit(submit_of(state))
        if not reply.queued:
            self._timeline.after(self._bus_ns, lambda: self._refuse(state, reply))

    def _refuse(self, state: SimRequestState, reply: SubmitReply) -> None:
        if not state.is_over:
            assert reply.reason is not None, "a refusal has a reason"
            self._end(state, self._timeline.now_ns, reply.reason.value)

    def _expire(self, state: SimRequestState) -> None:
        if state.is_over:
            return
        self._end(state, self._timeline.now_ns, "deadline")
        self._cancel_at_workers(state)
        self._timeline.after(self._bus_ns, lambda: self._send_end(state))

    def _fail(self, state: SimRequestState, reason: str) -> None:
        if not state.is_over:
            self._end(state, self._timeline.now_ns, reason)
            self._cancel_at_workers(state)
            self._timeline.after(self._bus_ns, lambda: self._send_finish(state, Outcome.FAILED))

    def _cancel_at_workers(self, state: SimRequestState) -> None:
        if state.placement is not None:
            self._timeline.after(self._stream_ns, lambda: self._cancel(state))

    def _end(self, state: SimRequestState, now_ns: int, refusal: str) -> None:
        if state.settle is not None:
            state.settle(state)
        state.is_over = True
        state.outcome.ended_s = self._timeline.since_start_s(now_ns)
        state.outcome.refusal = refusal
        self.num_left -= 1

    def _send_prefilled(self, state: SimRequestState) -> None:
        assert state.placement is not None, "only a granted request has tokens"
        self._scheduler.prefilled(Prefilled(state.request.request_id, GATEWAY_ID, state.placement.dispatch))

    def _send_end(self, state: SimRequestState) -> None:
        if state.placement is None:
            self._scheduler.cancel(Cancel(state.request.request_id, GATEWAY_ID))
        else:
            self._send_finish(state, Outcome.CANCELLED)

    def _send_finish(self, state: SimRequestState, outcome: Outcome) -> None:
        assert state.placement is not None, "only a granted request finishes"
        num_tokens = state.outcome.num_output_tokens
        finish = Finish(state.request.request_id, GATEWAY_ID, state.placement.dispatch, outcome, num_tokens)
        self._scheduler.finish(finish)


def submit_of(state: SimRequestState) -> Submit:
    """What the scheduler may know: never the true length of the answer."""
    request = state.request
    return Submit(
        request_id=request.request_id,
        gateway_id=GATEWAY_ID,
        model=MODEL,
        lane=request.lane,
        tenant=request.tenant,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        deadline_ms=round(request.deadline_s * 1000),
        ttft_target_ms=round(request.ttft_target_s * 1000),
        itl_target_ms=round(request.itl_target_s * 1000),
        predicted_output_tokens=request.predicted_output_tokens,
        output_score=request.output_score,
        page_hashes=b"".join(page_hash[:8] for page_hash in state.hashes),
    )
