"""From a client's request to a running one: room, checks, tokens, and a driver that takes charge."""

import asyncio
import contextlib
import uuid
from collections.abc import Iterator, Sequence
from functools import partial

from opentelemetry.context import Context

from weir.core.errors import FieldViolation, InvalidRequest, WeirError
from weir.core.life import Phase
from weir.core.options import MAX_CHOICES, GenerateOptions
from weir_gateway.access import Caller
from weir_gateway.audit import AuditWriter
from weir_gateway.driving.driver import Driver
from weir_gateway.driving.open_request import OpenRequest, choice_of, request_id_of
from weir_gateway.driving.output_pace import OutputPace
from weir_gateway.driving.request_span import RequestLife, RequestSpan, RequestSpans
from weir_gateway.entry.entry import Entry
from weir_gateway.entry.queue_view import Ticket
from weir_gateway.keys.keyed_requests import Accepted, KeyedRequests
from weir_gateway.output_lengths import OutputLengths
from weir_gateway.refusal_pace import RefusalPace
from weir_gateway.requests.cap_checks import check_caps
from weir_gateway.requests.client_request import ClientRequest, FieldNames
from weir_gateway.requests.models import ModelDirectory, ServedModel
from weir_gateway.requests.reasoning import with_reasoning_grammar
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_figures import LaneFigures, RequestFigures
from weir_gateway.requests.request_metrics import RequestMetrics
from weir_gateway.requests.request_state import RequestState
from weir_gateway.requests.request_times import RequestTimes
from weir_gateway.requests.succession import Succession
from weir_gateway.requests.tool_grammars import with_tool_grammar
from weir_gateway.requests.validation import (
    CheckedRequest,
    Counts,
    Limits,
    check_all_prompts,
    check_counts,
    check_fields,
    check_num_prompts,
    check_prompt,
)
from weir_gateway.tenant_threads import TenantThreads
from weir_gateway.tokenization import PromptTokenizer, Tokenization
from weir_gateway.work_shares import WorkShares

_NUM_THREADS = 2
_PREPARE_BURST_S = 0.1
"""Of work for one tenant at once, before its share counts."""
_LAST_DELTA_S = 0.1
"""What the last delta at a deadline needs to reach its client."""


class InputProcessor:
    """Accepts or refuses requests, and finds the running ones by their clients' names."""

    def __init__(
        self,
        models: ModelDirectory,
        entry: Entry,
        limits: Limits,
        lengths: OutputLengths,
        driver: Driver,
        keys: KeyedRequests,
        spans: RequestSpans,
    ) -> None:
        self.models = models
        self._entry = entry
        self.access = entry.access
        self._limits = limits
        self._lengths = lengths
        self._driver = driver
        self._keys = keys
        self.spans = spans
        self.audit: AuditWriter | None = None  # hears of each end
        self._clock = spans.clock
        self._pace = OutputPace(self._clock)
        shares = WorkShares(limits.prepare_share, _PREPARE_BURST_S, self._clock)
        self.threads = TenantThreads(_NUM_THREADS, "prompts", shares, max_wait_s=limits.prepare_wait_s)
        self.refusals = RefusalPace(self._clock)
        self._tokenizer = PromptTokenizer(self.threads)
        self.tokenization = Tokenization(models, limits, driver, self._tokenizer)
        self._metrics = RequestMetrics()
        self.figures = RequestFigures()
        self._by_client_id: dict[tuple[str, str], OpenRequest] = {}
        """(tenant, the client's name for the request): tenants neither see nor cancel each other's."""

    async def prepare(self, models: Sequence[ServedModel]) -> None:
        """Does what the first request of each would wait for; before they are served."""
        await self._tokenizer.grammars.prepare(models)

    def identify(self, api_key: str | None) -> Caller:
        """Who shows this key. Raises Unauthenticated, or Unavailable before it can be known."""
        try:
            return self.access.identify(api_key)
        except WeirError as error:
            self._metrics.count_rejection(error)
            raise

    async def open(
        self, client_request: ClientRequest, caller: Caller, parent: Context, call_left_s: float | None
    ) -> OpenRequest:
        """Accepts a request whose call lasts `call_left_s` more (None: as long as it takes). Raises WeirError."""
        self.threads.note(caller)
        with self._keys.returning(caller.tenant, client_request.options.idempotency_key) as is_back:
            attached = await self._try_attach(client_request, caller, parent) if is_back else None
            if attached is not None:
                return attached
        ticket = self._admit(client_request, caller)
        try:
            opened, is_new = await self._open(client_request, caller, parent, call_left_s)
        except BaseException:
            self._entry.leave(ticket)
            raise
        if is_new:
            self._entry.follow_request(ticket, opened)
        else:  # what runs has a ticket of its own
            self._entry.leave(ticket)
        return opened

    async def _try_attach(self, client_request: ClientRequest, caller: Caller, parent: Context) -> OpenRequest | None:
        """To a keyed request that was here when this one came; None if it has gone since."""
        with self._span_of(client_request, parent) as span, self._driver.reserve(0):
            await self._entry.turn()
            opened = self._keys.try_attach(await self._check(client_request, caller, span))
            if opened is None:
                span.end_with(None)
            else:
                span.attached(opened.request_id)
            return opened

    async def _open(
        self, client_request: ClientRequest, caller: Caller, parent: Context, call_left_s: float | None
    ) -> tuple[OpenRequest, bool]:
        """And whether it is new: one with a key may have come from another connection meanwhile."""
        now_s = self._clock.now_s()
        time_left_s = _time_left_s(client_request.options, call_left_s)
        deadline_at_s = None if time_left_s is None else now_s + time_left_s
        with self._span_of(client_request, parent) as span, self._driver.reserve(self._num_choices(client_request)):
            await self._entry.turn()
            by_prompt = await self._check_all(client_request, caller, span)
            if client_request.options.idempotency_key:
                return await self._open_keyed(by_prompt[0], span, deadline_at_s)
            self._check_name_is_free(client_request, caller.tenant)
            return self._accept(by_prompt, span, deadline_at_s, uuid.uuid4().hex), True

    @contextlib.contextmanager
    def _span_of(self, client_request: ClientRequest, parent: Context) -> Iterator[RequestSpan]:
        """Ended, and the rejection counted, if the request is not accepted."""
        span = self.spans.begin(client_request, parent)
        try:
            yield span
        except WeirError as error:
            self._metrics.count_rejection(error)
            span.end_with(error)
            raise
        except BaseException as error:
            span.end_with(error)
            raise

    def check_room(self, caller: Caller, idempotency_key: str) -> None:
        """Before a request is read. Raises Overloaded, or QuotaExceeded, if the caller's cannot be taken whatever it
        is. What is here already takes no room."""
        if self._keys.holds(caller.tenant, idempotency_key):
            return
        try:
            self._entry.check_caller(caller, [model.name for model in self.models.list_models()])
        except WeirError as error:
            self._metrics.count_rejection(error)
            raise

    def check_counts(self, model_name: str, names: FieldNames, counts: Counts) -> None:
        """Raises InvalidRequest for more entries than `open` would take, and NotFound."""
        try:
            check_counts(counts, names, self.models.find(model_name, names["model"]), self._limits)
        except WeirError as error:
            self._metrics.count_rejection(error)
            raise

    def cancel(self, caller: Caller, client_id: str) -> bool:
        """False: the caller has no such request running."""
        opened = self._by_client_id.get((caller.tenant, client_id))
        if opened is not None:
            opened.cancel("cancelled by the client")
        return opened is not None

    @property
    def num_open(self) -> int:
        """Requests of clients that were accepted and have not ended; one with several answers is one."""
        return len(self._by_client_id)

    def metrics(self) -> dict[str, float]:
        dropped = {"labels_dropped_total": float(self._metrics.num_labels_dropped + self.figures.num_dropped)}
        waiting = {"prompts_waiting": float(self.threads.num_waiting)}
        own = self._metrics.metrics() | self.figures.metrics() | dropped | waiting
        return own | self._lengths.metrics() | self._entry.metrics() | self._tokenizer.grammars.metrics()

    def check_integrity(self) -> list[str]:
        num_running, held = self._metrics.num_running, self._driver.requests
        num_held = sum(not state.phase.is_terminal for state in held.values())
        lost = [
            name
            for name, opened in self._by_client_id.items()
            if not any(state.request_id in held for state in opened.states)
        ]
        errors = [f"request {name!r} has ended and keeps its name" for name in lost]
        if num_running != num_held:
            errors.append(f"{num_running} accepted requests have not ended, {num_held} are held")
        return errors

    def close(self) -> None:
        self._tokenizer.close()
        self.threads.close()

    def _admit(self, client_request: ClientRequest, caller: Caller) -> Ticket:
        """Raises Overloaded, or QuotaExceeded: at once, and before anything is done for the request."""
        options, names = client_request.options, client_request.names
        lane, model = "", ""
        with contextlib.suppress(WeirError):  # `_check` says what is wrong with it
            lane = self.access.scope_of(caller, names, options.lane, client_request.priority, "").lane
            model = self.models.find(options.model, names["model"]).name
        try:
            return self._entry.admit(caller, model, lane, self._num_choices(client_request))
        except WeirError as error:
            self._metrics.count_rejection(error)
            raise

    async def _check_all(
        self, client_request: ClientRequest, caller: Caller, span: RequestSpan
    ) -> Sequence[CheckedRequest]:
        """One a prompt."""
        check_num_prompts(client_request, self._limits)
        by_prompt: list[CheckedRequest] = []
        for part in client_request.by_prompt():
            if by_prompt:
                await self._entry.turn()  # others have theirs between two prompts
            by_prompt.append(await self._check(part, caller, span))
        check_all_prompts(by_prompt, self._limits)
        return await asyncio.gather(*map(self._lengths.with_prediction, by_prompt))

    async def _check(self, client_request: ClientRequest, caller: Caller, span: RequestSpan) -> CheckedRequest:
        options, names = client_request.options, client_request.names
        model = self.models.find(options.model, names["model"])
        check_fields(client_request, model, self._limits)
        scope = self.access.scope_of(caller, names, options.lane, client_request.priority, options.cache_salt)
        check_caps(client_request, scope.caps, model.max_context_tokens)
        if not options.idempotency_key:  # else it may be the request that runs
            self._check_name_is_free(client_request, caller.tenant)
        client_request = with_tool_grammar(client_request, model)
        with span.child("tokenize"):
            grammars = self._tokenizer.grammars
            await grammars.check(client_request, model, scope.tenant)
            token_ids = await self._tokenizer.tokenize_prompt(client_request, model, caller)
            client_request = with_reasoning_grammar(client_request, model, token_ids)
            await grammars.check(client_request, model, scope.tenant, again=True)
        return check_prompt(client_request, model, self._limits, token_ids, scope)

    def _num_choices(self, client_request: ClientRequest) -> int:
        """Before it is checked: what is out of range is refused later, and takes the room of one meanwhile."""
        num_answers = client_request.options.n or 1
        is_in_range = 1 <= num_answers <= MAX_CHOICES and client_request.num_prompts <= self._limits.max_prompts
        return num_answers * client_request.num_prompts if is_in_range else 1

    def _check_name_is_free(self, client_request: ClientRequest, tenant: str) -> None:
        request_id = client_request.options.request_id
        if (tenant, request_id) in self._by_client_id:
            description = f"{request_id!r} is the id of a request that is running"
            raise InvalidRequest([FieldViolation(client_request.names["request_id"], description)])

    async def _open_keyed(
        self, checked: CheckedRequest, span: RequestSpan, deadline_at_s: float | None
    ) -> tuple[OpenRequest, bool]:
        is_new = False

        def start(accepted: Accepted) -> OpenRequest:
            nonlocal is_new
            self._check_name_is_free(accepted.checked.client_request, accepted.checked.scope.tenant)
            is_new = True
            return self._accept([accepted.checked], span, deadline_at_s, accepted.request_id, accepted.succession)

        opened = await self._keys.open(checked, start)
        if not is_new:
            span.attached(opened.request_id)
        return opened, is_new

    def _accept(
        self,
        by_prompt: Sequence[CheckedRequest],
        span: RequestSpan,
        deadline_at_s: float | None,
        request_id: str,
        succession: Succession = Succession(),  # noqa: B008 - frozen
    ) -> OpenRequest:
        tenant, num_answers = by_prompt[0].scope.tenant, by_prompt[0].client_request.options.n or 1
        choices = [choice_of(checked, index) for checked in by_prompt for index in range(num_answers)]
        span.describe_request(request_id, by_prompt, len(choices))
        has_output = asyncio.Event()
        spans = [span] if len(choices) == 1 else [span.open_choice(index) for index in range(len(choices))]
        model, lane = by_prompt[0].model, by_prompt[0].scope.lane
        figures = self.figures.of(model.name, lane, model.max_context_tokens)
        times_of_all = [RequestTimes(figures, self._clock, one.started_at_s, one.trace_id) for one in spans]
        states = [
            RequestState(
                request_id_of(request_id, index),
                choice,
                deadline_at_s=deadline_at_s,
                traceparent=choice_span.traceparent,
                has_output=has_output,
                clock=self._clock,
                observer=RequestLife(partial(self._metrics.count_phase, tenant), choice_span, times),
            )
            for index, (choice, choice_span, times) in enumerate(zip(choices, spans, times_of_all, strict=True))
        ]
        opened = OpenRequest(states, span, self._clock, self._pace)
        key = (tenant, opened.client_id)
        self._by_client_id[key] = opened
        opened.ended.add_done_callback(lambda _: self._on_end(key, opened, figures))
        if len(choices) > 1:
            opened.ended.add_done_callback(
                lambda ended: span.end(ended.result(), opened.num_output_tokens, self._clock.now_s())
            )
        self._metrics.count_prompt_tokens(tenant, opened.num_prompt_tokens)
        for state, choice_span, times in zip(states, spans, times_of_all, strict=True):
            state.succeed(succession)
            choice_span.remember(state.request_id, state.checked, times)
            state.ended.add_done_callback(partial(self._on_choice_end, state, times, choice_span))
            self._driver.drive(state, choice_span)
        return opened

    def _on_choice_end(
        self, state: RequestState, times: RequestTimes, span: RequestSpan, ended: "asyncio.Future[RequestEnd]"
    ) -> None:
        if state.checked.client_request.tools is not None:
            self._metrics.count_tool_calls(state.output.num_calls)
            span.called_tools(state.output.num_calls)
        if state.checked.model.answer_format.reasoning is not None:
            self._metrics.count_reasoning_tokens(state.output.num_reasoning_tokens)
            span.reasoned(state.output.num_reasoning_tokens)
        times.end(ended.result(), len(state.checked.prompt_token_ids), state.num_cached_tokens)
        self._lengths.observe(state, ended.result())
        if self.audit is not None:
            self.audit.note(state, ended.result(), times.ttft_s)

    def _on_end(self, key: tuple[str, str], opened: OpenRequest, figures: LaneFigures) -> None:
        self._by_client_id.pop(key, None)
        self._metrics.count_output_tokens(key[0], opened.num_output_tokens)
        for answers in opened.by_prompt:
            _count_prompt(figures, answers, is_finished=opened.ended.result().phase is Phase.FINISHED)


def _count_prompt(figures: LaneFigures, answers: Sequence[RequestState], *, is_finished: bool) -> None:
    """Of all answers to one prompt, which have ended. `is_finished`: their request has, as it should."""
    begun = [answer for answer in answers if answer.output.num_tokens]
    if begun:
        figures.num_prompt_tokens += len(answers[0].checked.prompt_token_ids)
        # What the first one computes is cached for the others: it was not before.
        figures.num_cached_tokens += min(answer.num_cached_tokens for answer in begun)
    if is_finished:
        figures.num_choices.observe(len(answers))
        figures.longest_output_tokens.observe(max(answer.output.num_tokens for answer in answers))
        figures.max_tokens.observe(answers[0].checked.stop_rules.max_tokens, len(answers))


def _time_left_s(options: GenerateOptions, call_left_s: float | None) -> float | None:
    """None: no deadline. What there is at the deadline must reach the client before the call itself is over."""
    if call_left_s is not None and options.partial_at_deadline:
        call_left_s -= min(_LAST_DELTA_S, call_left_s / 10)
    own_s = None if options.deadline_ms is None else options.deadline_ms / 1000
    return min((left_s for left_s in (own_s, call_left_s) if left_s is not None), default=None)
