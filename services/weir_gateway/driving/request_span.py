"""The request's span and its attributes (GenAI conventions), and the spans of what the gateway does for it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from weir.bus.messages import Placement
from weir.core.clock import Clock
from weir.core.errors import Cancelled, WeirError, told_to_others
from weir.core.life import Phase
from weir.core.trace_context import sampled_trace_id, traceparent_of
from weir.wire.v1 import worker_pb2
from weir_gateway.recent.store import RecentRequests
from weir_gateway.recent.timeline import RequestAbout, RequestTimeline
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_times import RequestTimes
from weir_gateway.requests.validation import CheckedRequest


class RequestSpans:
    """Makes the span of each request, which also writes its timeline in `recent`."""

    def __init__(self, tracer: Tracer, clock: Clock, recent: RecentRequests) -> None:
        self._tracer = tracer
        self.clock = clock
        self.recent = recent

    def begin(self, client_request: ClientRequest, parent: Context) -> "RequestSpan":
        return RequestSpan(self._tracer, client_request, parent, self.clock.now_s(), self.recent)


class RequestSpan:
    """The root of what Weir does for one request; a child of the client's span, if it sent one."""

    def __init__(
        self,
        tracer: Tracer,
        client_request: ClientRequest,
        parent: Context,
        started_at_s: float,
        recent: RecentRequests,
    ) -> None:
        self._tracer = tracer
        self._client_request = client_request
        self._recent = recent
        self._choice = 0
        self._timeline: RequestTimeline | None = None
        """Once it is accepted; of the root of several choices there is none."""
        self.started_at_s = started_at_s
        """When the request came."""
        self.needs_first_chunk = True
        """Nothing was sent to the client yet."""
        operation = client_request.operation.value
        # Model and lane follow once it is known that there are such ones.
        self._span: Span = tracer.start_span(operation, context=parent, kind=SpanKind.SERVER)
        self.context = trace.set_span_in_context(self._span, Context())
        self._span.set_attributes(
            {
                gen_ai.GEN_AI_OPERATION_NAME: operation,
                gen_ai.GEN_AI_PROVIDER_NAME: "weir",
                gen_ai.GEN_AI_REQUEST_STREAM: client_request.is_stream,
            }
        )
        client_id = client_request.options.request_id or client_request.correlation_id
        if client_id:
            self._span.set_attribute("weir.request.client_id", client_id)

    @property
    def traceparent(self) -> str:
        return traceparent_of(self._span)

    @property
    def trace_id(self) -> str:
        """Of a trace that was sampled; else empty."""
        return sampled_trace_id(self._span)

    def open_choice(self, index: int) -> "RequestSpan":
        """The span of one of several answers, below this one."""
        choice = RequestSpan(self._tracer, self._client_request, self.context, self.started_at_s, self._recent)
        choice._choice = index
        choice._span.set_attribute("weir.request.choice", index)
        choice.needs_first_chunk = False  # the client has one stream, and this span's first chunk is that of all
        return choice

    def describe_request(self, request_id: str, by_prompt: Sequence[CheckedRequest], num_choices: int) -> None:
        """What is known once the request is checked."""
        checked = by_prompt[0]
        client_request, sampling = checked.client_request, checked.sampling
        self._span.update_name(f"{client_request.operation.value} {checked.model.name}")
        self._span.set_attributes(
            {
                "weir.request.id": request_id,
                gen_ai.GEN_AI_REQUEST_MODEL: checked.model.name,
                gen_ai.GEN_AI_RESPONSE_MODEL: checked.model.name,
                gen_ai.GEN_AI_RESPONSE_ID: request_id,
                gen_ai.GEN_AI_REQUEST_MAX_TOKENS: checked.stop_rules.max_tokens,
                gen_ai.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
                gen_ai.GEN_AI_REQUEST_TOP_P: sampling.top_p,
                gen_ai.GEN_AI_REQUEST_TOP_K: sampling.top_k,
                gen_ai.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
                gen_ai.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
                # an attribute is a signed 64-bit integer, a seed an unsigned one
                gen_ai.GEN_AI_REQUEST_SEED: sampling.seed if sampling.seed < 2**63 else str(sampling.seed),
                "weir.request.num_stop": len(client_request.options.stop),  # the texts are the client's
                gen_ai.GEN_AI_USAGE_INPUT_TOKENS: sum(len(one.prompt_token_ids) for one in by_prompt),
            }
        )
        self._span.set_attributes({"weir.tenant": checked.scope.tenant, "weir.lane": checked.scope.lane})
        if client_request.options.lane:
            self._span.set_attribute("weir.request.lane", client_request.options.lane)
        if checked.model.digest:
            self._span.set_attribute("weir.model.digest", checked.model.digest)
            self._span.set_attribute(gen_ai.GEN_AI_OPENAI_RESPONSE_SYSTEM_FINGERPRINT, checked.model.fingerprint)
        if sampling.grammar is not None:
            self._span.set_attribute("weir.request.grammar", sampling.grammar.kind)
        if client_request.tools is not None:
            self._span.set_attribute("weir.request.num_tools", len(client_request.tools.tools))
        if num_choices > 1:
            self._span.set_attribute(gen_ai.GEN_AI_REQUEST_CHOICE_COUNT, num_choices)

    def remember(self, request_id: str, checked: CheckedRequest, times: RequestTimes) -> None:
        """The request was accepted: from now on it is among those that the gateway remembers."""
        options, clock = checked.client_request.options, times.clock
        about = RequestAbout(
            request_id=request_id,
            client_id=options.request_id or checked.client_request.correlation_id,
            gateway_id=self._recent.gateway_id,
            trace_id=self.trace_id,
            tenant=checked.scope.tenant,
            lane=checked.scope.lane,
            model=checked.model.name,
            model_digest=checked.model.digest,
            operation=checked.client_request.operation.value,
            choice=self._choice,
            num_prompt_tokens=len(checked.prompt_token_ids),
            max_tokens=checked.stop_rules.max_tokens,
            received_at_s=time.time() - (clock.now_s() - self.started_at_s),
            came_at_s=self.started_at_s,
        )
        self._timeline = self._recent.open(about, times)

    def placed(self, placement: Placement) -> None:
        """Where the request runs, and why there."""
        self._span.set_attributes(
            {
                "weir.placement.reason": placement.reason,
                "weir.placement.is_local": placement.is_local,
                "weir.placement.prefill_worker_id": placement.prefill_worker_id,
                "weir.placement.decode_worker_id": placement.decode_worker_id,
            }
        )
        if placement.prefix_worker_id:
            self._span.set_attribute("weir.placement.prefix_worker_id", placement.prefix_worker_id)

    def interrupted(self, error: WeirError, dispatch: int, num_output_tokens: int) -> None:
        """Its workers could not go on; what they had computed after these tokens is computed again."""
        attributes: dict[str, int | str] = {
            "weir.dispatch": dispatch,
            "weir.num_output_tokens": num_output_tokens,
            "error.message": told_to_others(error)[:200],
        }
        self._span.add_event("interrupted", attributes)
        if self._timeline is not None:
            self._timeline.interrupted(error, num_output_tokens)

    def adopted(self, error: WeirError, adoption: int, num_output_tokens: int, waited_s: float) -> None:
        """Another worker goes on with its sequence after these tokens, and computes none of them again. `waited_s`: for
        how long nobody did."""
        attributes: dict[str, float | str] = {
            "weir.adoption": adoption,
            "weir.num_output_tokens": num_output_tokens,
            "weir.move.duration_ms": round(waited_s * 1000, 3),
            "error.message": told_to_others(error)[:200],
        }
        self._span.add_event("adopted", attributes)
        if self._timeline is not None:
            self._timeline.adopted(error, num_output_tokens, waited_s)

    def moved(self, dispatch: int, num_output_tokens: int) -> None:
        """Other workers go on after these tokens: most of what it had computed is there."""
        attributes: dict[str, int] = {"weir.dispatch": dispatch, "weir.num_output_tokens": num_output_tokens}
        self._span.add_event("moved", attributes)

    def claimed(self, dispatch: int, num_output_tokens: int) -> None:
        """A worker goes on with the sequence of a gateway that died, which had so many tokens."""
        attributes: dict[str, int] = {"weir.dispatch": dispatch, "weir.num_output_tokens": num_output_tokens}
        self._span.add_event("claimed", attributes)
        if self._timeline is not None:
            self._timeline.claimed(num_output_tokens)

    def attached(self, request_id: str) -> None:
        """Ends the span: the request runs already, with a span of its own, and this was another connection to it."""
        self._span.set_attribute("weir.request.id", request_id)
        self._span.add_event("attached")
        self._span.end()

    @contextmanager
    def child(self, name: str) -> Iterator[Context]:
        """A span around one thing that the gateway does; yields the context for spans below it."""
        span = self._tracer.start_span(name, context=self.context)
        try:
            yield trace.set_span_in_context(span, Context())
        except Exception as error:
            span.set_attribute(ERROR_TYPE, type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, told_to_others(error)[:200]))
            raise
        finally:
            span.end()

    def on_phase(self, phase: Phase, placement: Placement | None) -> None:
        self._span.add_event(phase.value)
        if self._timeline is not None:
            self._timeline.on_phase(phase, placement)

    def on_waits(self, waits: worker_pb2.SequenceWaits) -> None:
        """How long it did not go on at the worker that ended it."""
        if self._timeline is not None:
            self._timeline.on_waits(waits)

    def first_chunk(self, now_s: float) -> None:
        """Something was sent to the client."""
        if self.needs_first_chunk:
            self.needs_first_chunk = False
            if self._span.is_recording():  # else it is not sampled, or has ended before its client read
                self._span.set_attribute(gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, now_s - self.started_at_s)

    def called_tools(self, num_calls: int) -> None:
        """Of a request with tools, at its end: complete calls."""
        self._span.set_attribute("weir.response.num_tool_calls", num_calls)

    def reasoned(self, num_tokens: int) -> None:
        """Of a model that reasons, at the request's end: tokens of its answer that were reasoning."""
        self._span.set_attribute(gen_ai.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS, num_tokens)

    def end(self, ending: RequestEnd, num_output_tokens: int, now_s: float) -> None:
        """An answer that came as a whole ends before anything of it is sent, which follows at once."""
        if ending.error is None and num_output_tokens:
            self.first_chunk(now_s)
        self._span.set_attribute(gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS, num_output_tokens)
        if ending.finish_reason is not None:
            self._span.set_attribute(gen_ai.GEN_AI_RESPONSE_FINISH_REASONS, (ending.finish_reason.value,))
        self._remember_end(ending)
        self.end_with(ending.error)

    def _remember_end(self, ending: RequestEnd) -> None:
        timeline = self._timeline
        if timeline is not None:
            timeline.end(ending)
            self._span.set_attribute(gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, timeline.num_cached_tokens)

    def end_with(self, error: BaseException | None) -> None:
        """Ends the span alone, as that of a request that never was accepted."""
        if error is not None:
            self._span.set_attribute(ERROR_TYPE, type(error).__name__)
            if not isinstance(error, Cancelled):
                self._span.set_status(Status(StatusCode.ERROR, told_to_others(error)[:200]))
        self._span.end()


class RequestLife:
    """Who hears of what happens to a request: counters, its span, its times.

    Implements `weir_gateway.requests.request_times.LifeObserver`.
    """

    def __init__(self, count_phase: Callable[[Phase], None], span: RequestSpan, times: RequestTimes) -> None:
        self._count_phase = count_phase
        self._span = span
        self._times = times
        self.on_tokens = times.on_tokens
        self.on_waits = span.on_waits

    def on_phase(self, phase: Phase, placement: Placement | None) -> None:
        self._count_phase(phase)
        self._span.on_phase(phase, placement)
        self._times.on_phase(phase, placement)
