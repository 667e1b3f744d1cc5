"""From a draft to a running request: room, checks, tokens, and a driver that takes charge."""

import asyncio
import uuid
from collections import Counter
from concurrent.futures import Executor
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from weir.core.clock import Clock
from weir.core.errors import FieldViolation, InvalidRequest, WeirError
from weir.core.life import LifeEvent, Phase
from weir.core.options import MAX_CHOICES
from weir_gateway.access.access import AccessControl, Caller
from weir_gateway.access.tenant_counts import TenantCounts
from weir_gateway.draft import Conversation, FieldNames, RequestDraft, Text, TokenIds
from weir_gateway.driving.call import RequestState
from weir_gateway.driving.choices import Choices, choice_of, request_id_of
from weir_gateway.driving.driver import Driver
from weir_gateway.driving.spans import RequestSpan
from weir_gateway.lengths.lengths import OutputLengths
from weir_gateway.requests.models import ModelDirectory, ServedModel
from weir_gateway.requests.output import Output, OutputOptions
from weir_gateway.requests.request import RequestIds, RequestRecord
from weir_gateway.requests.stops import StopMatcher
from weir_gateway.requests.tokens import TokenOrder
from weir_gateway.requests.validation import (
    CheckedRequest,
    Counts,
    Limits,
    check_counts,
    check_fields,
    check_prompt,
    check_text_size,
    prompt_field,
)

# Longer texts are tokenized in a thread, so that the loop goes on with the others.
_MAX_INLINE_BYTES = 2048
_TENANT_PHASES = {Phase.RECEIVED: "accepted", Phase.FINISHED: "finished", Phase.REFUSED: "refused"}


class OpenRequest:
    """What a door holds of a request. Leaving the context without having read to the end cancels it."""

    def __init__(
        self, choices: Choices, checked: CheckedRequest, ids: RequestIds, span: RequestSpan, clock: Clock
    ) -> None:
        self.choices = choices
        self.checked = checked
        self.ids = ids
        self._span = span
        self._clock = clock

    @property
    def client_id(self) -> str:
        return self.ids.client_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.checked.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, found in the prefix cache."""
        return self.choices.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        """Of all choices."""
        return self.choices.num_output_tokens

    def sent(self) -> None:
        """Something went out to the client."""
        self._span.first_chunk(self._clock.now_s())

    def leave(self) -> None:
        """The client is gone, or has everything."""
        self.choices.cancel("the client went away")
        self.choices.release()

    def __enter__(self) -> "OpenRequest":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class InputProcessor:
    """Accepts or refuses requests, and knows the running ones by their clients' names."""

    def __init__(
        self,
        models: ModelDirectory,
        access: AccessControl,
        limits: Limits,
        driver: Driver,
        tracer: Tracer,
        clock: Clock,
        executor: Executor,
        lengths: OutputLengths,
        gateway_id: str,
    ) -> None:
        self.models = models
        self._access = access
        self._limits = limits
        self._driver = driver
        self._tracer = tracer
        self._clock = clock
        self._executor = executor
        self._lengths = lengths
        self._gateway_id = gateway_id
        self._by_client_id: dict[tuple[str, str], Choices] = {}
        """(tenant, the client's name for the request): tenants neither see nor cancel each other's."""
        self._tenants = TenantCounts()
        self._counts: Counter[str] = Counter()
        self._rejections: set[str] = set()

    def identify(self, api_key: str | None) -> Caller:
        """Who shows this key. Raises Unauthenticated, or Unavailable before it can be known."""
        try:
            return self._access.identify(api_key)
        except WeirError as error:
            self._count_rejection(error)
            raise

    async def open(
        self, draft: RequestDraft, caller: Caller, parent: Context, time_left_s: float | None
    ) -> OpenRequest:
        """Accepts a request whose client waits `time_left_s` more (None: as long as it takes). Raises WeirError."""
        now_s = self._clock.now_s()
        deadline_at_s = None if time_left_s is None else now_s + time_left_s
        span = RequestSpan(self._tracer, draft, parent, now_s)
        try:
            with self._driver.arriving(_num_choices(draft)):
                checked = await self._lengths.predicted(await self._check(draft, caller, span))
                self._check_name_is_free(draft, caller)
                return self._accept(checked, span, deadline_at_s)
        except WeirError as error:
            self._count_rejection(error)
            span.end_refused(error)
            raise
        except BaseException as error:
            span.end_refused(error)
            raise

    def check_counts(self, model_name: str, names: FieldNames, counts: Counts) -> None:
        """Raises InvalidRequest for more entries than `open` would take, and NotFound."""
        try:
            check_counts(counts, names, self.models.find(model_name, names["model"]), self._limits)
        except WeirError as error:
            self._count_rejection(error)
            raise

    def cancel(self, caller: Caller, client_id: str) -> bool:
        """False: the caller has no such request running."""
        choices = self._by_client_id.get((caller.tenant, client_id))
        if choices is not None:
            choices.cancel("cancelled by the client")
        return choices is not None

    async def tokenize(self, model_name: str, text: str) -> list[int]:
        """Takes the place of a request meanwhile: its text may be as long, and waits for the same threads."""
        model = self.models.find(model_name, "model")
        check_text_size("text", text, self._limits)
        with self._driver.arriving(1):
            return await self._encode(model, text, add_bos=True, field="text")

    def metrics(self) -> dict[str, float]:
        """Counters of life's terminal phases, and of requests that never were accepted."""
        terminal = (Phase.FINISHED, Phase.CANCELLED, Phase.FAILED, Phase.REFUSED)
        names = {phase: f"{phase.value}_total" for phase in terminal} | {Phase.RECEIVED: "accepted_total"}
        counters = {name: float(self._counts[phase.value]) for phase, name in names.items()}
        others = {"rejected_total", "prompt_tokens_total", "output_tokens_total", *self._rejections}
        found = {name: float(self._counts[name]) for name in others}
        return counters | found | self._tenants.metrics() | self._lengths.metrics()

    def check_integrity(self) -> list[str]:
        metrics = self.metrics()
        num_ended = sum(metrics[f"{end}_total"] for end in ("finished", "cancelled", "failed", "refused"))
        num_running = metrics["accepted_total"] - num_ended
        held = sum(not call.request.phase.is_terminal for call in self._driver.calls())
        errors = [] if num_running == held else [f"{num_running:g} accepted requests have not ended, {held} are held"]
        lost = [name for name, choices in self._by_client_id.items() if choices.ended.done()]
        return errors + [f"request {name!r} has ended and keeps its name" for name in lost]

    def _count_rejection(self, error: WeirError) -> None:
        name = f"rejected_{type(error).__name__.lower()}_total"
        self._rejections.add(name)
        self._counts.update(("rejected_total", name))

    async def _check(self, draft: RequestDraft, caller: Caller, span: RequestSpan) -> CheckedRequest:
        model = self.models.find(draft.options.model, draft.names["model"])
        check_fields(draft, model, self._limits)
        options = draft.options
        scope = self._access.stand(caller, draft.names, options.lane, draft.priority, options.cache_salt)
        self._check_name_is_free(draft, caller)
        with span.child("tokenize"):
            token_ids = await self._prompt_token_ids(draft, model)
        return check_prompt(draft, model, self._limits, token_ids, scope)

    def _check_name_is_free(self, draft: RequestDraft, caller: Caller) -> None:
        if (caller.tenant, draft.options.request_id) in self._by_client_id:
            description = f"{draft.options.request_id!r} is the id of a request that is running"
            raise InvalidRequest([FieldViolation(draft.names["request_id"], description)])

    async def _prompt_token_ids(self, draft: RequestDraft, model: ServedModel) -> list[int]:
        match draft.prompt:
            case TokenIds(ids):
                return list(ids)
            case Text(text):
                return await self._encode(model, text, add_bos=True, field=prompt_field(draft))
            case Conversation(messages):
                rendered = model.chat_template.render(messages)
                # The template writes the beginning-of-sequence token itself.
                return await self._encode(model, rendered, add_bos=False, field=prompt_field(draft))

    async def _encode(self, model: ServedModel, text: str, *, add_bos: bool, field: str) -> list[int]:
        def encode() -> list[int]:
            return model.tokenizer.encode(text, add_bos=add_bos, field=field)

        if len(text) <= _MAX_INLINE_BYTES:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode)

    def _accept(self, checked: CheckedRequest, span: RequestSpan, deadline_at_s: float | None) -> OpenRequest:
        request_id = uuid.uuid4().hex
        ids = RequestIds(request_id, checked.draft.options.request_id or request_id, self._gateway_id)
        num_choices = _num_choices(checked.draft)
        span.describe_request(request_id, checked, num_choices)
        has_output = asyncio.Event()
        spans = [span] if num_choices == 1 else [span.open_choice(index) for index in range(num_choices)]
        calls = [
            self._make_call(
                choice_of(checked, index),
                request_id_of(request_id, index),
                ids,
                spans[index],
                deadline_at_s,
                has_output,
            )
            for index in range(num_choices)
        ]
        choices = Choices(calls, has_output)
        tenant = checked.scope.tenant
        self._by_client_id[tenant, ids.client_id] = choices
        choices.ended.add_done_callback(lambda _: self._on_end(tenant, ids.client_id, choices))
        if num_choices > 1:
            choices.ended.add_done_callback(
                lambda ended: span.end(ended.result(), choices.num_output_tokens, self._clock.now_s())
            )
        self._counts["prompt_tokens_total"] += len(checked.prompt_token_ids)
        self._tenants.add(tenant, "prompt_tokens", len(checked.prompt_token_ids))
        for call, call_span in zip(calls, spans, strict=True):
            self._driver.open(call, call_span)
        return OpenRequest(choices, checked, ids, span, self._clock)

    def _make_call(
        self,
        checked: CheckedRequest,
        request_id: str,
        ids: RequestIds,
        span: RequestSpan,
        deadline_at_s: float | None,
        has_output: asyncio.Event,
    ) -> RequestState:
        def on_event(event: LifeEvent) -> None:
            self._counts[event.phase.value] += 1
            if event.phase in _TENANT_PHASES:
                self._tenants.add(checked.scope.tenant, _TENANT_PHASES[event.phase], 1)
            span.phase_event(event.phase.value)
            has_output.set()

        request = RequestRecord(replace(ids, request_id=request_id), checked, deadline_at_s, self._clock, on_event)
        options = checked.draft.options
        output = Output(
            TokenOrder(request.attempt, checked.stop_rules.max_tokens),
            checked.model.tokenizer.detokenizer(),
            StopMatcher(options.stop, is_included=options.include_stop),
            OutputOptions(has_logprobs=options.logprobs is not None, min_tokens=checked.stop_rules.min_tokens),
        )
        call = RequestState(request, output, self._clock, span.traceparent, has_output)
        call.ended.add_done_callback(lambda _: self._lengths.ended(call))
        return call

    def _on_end(self, tenant: str, client_id: str, choices: Choices) -> None:
        self._by_client_id.pop((tenant, client_id), None)
        self._counts["output_tokens_total"] += choices.num_output_tokens
        self._tenants.add(tenant, "output_tokens", choices.num_output_tokens)


def _num_choices(draft: RequestDraft) -> int:
    """Before it is checked: what is out of range is refused later, and takes one place meanwhile."""
    num_choices = draft.options.n or 1
    return num_choices if 1 <= num_choices <= MAX_CHOICES else 1
