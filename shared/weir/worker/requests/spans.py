"""Spans of the requests on a worker. Without tracing all of this costs a dictionary entry a request.

    prefill   Start received ─> token 0 sampled      children: prefill_chunk, one a chunk
    hand_off  around the call                      child: the transfer service's span
    decode    taken over ─> ended                  links: decode_step, its first and its last

A step serves many requests: decode_step spans are roots of their own, and made only for steps that are somebody's
first or last.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from weir.core.trace_context import context_of
from weir.engine.messages import (
    ChunkComputed,
    EngineReport,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
    StepTiming,
    TokenSampled,
)
from weir.kv.records.record import SequenceParams


class PrefillSpans:
    """The spans of a prefill worker."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[SequenceKey, Span] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def begin(self, params: SequenceParams) -> None:
        self._open[SequenceKey.of(params)] = self._tracer.start_span(
            "prefill",
            context=context_of(params.traceparent),
            attributes={
                "weir.request_id": params.request_id,
                gen_ai.GEN_AI_USAGE_INPUT_TOKENS: len(params.prompt_token_ids),
            },
        )

    def on_report(self, report: EngineReport) -> None:
        for event in report.events:
            span = self._open.get(event.key)
            if span is None:
                continue
            match event:
                case ChunkComputed() if report.timing is not None and span.is_recording():
                    self._add_chunk(span, event, report.timing)
                case TokenSampled():
                    self._open.pop(event.key).end()
                case SequenceEnded():
                    _end(self._open.pop(event.key), event)
                case _:
                    pass

    @contextmanager
    def hand_off(self, params: SequenceParams, to_worker_id: str, num_pages: int) -> Iterator[Span]:
        """The current span while the call runs, so that the transfer service's span becomes its child."""
        with self._tracer.start_as_current_span(
            "hand_off",
            context=context_of(params.traceparent),
            kind=SpanKind.CLIENT,
            attributes={
                "weir.request_id": params.request_id,
                "weir.decode_worker_id": to_worker_id,
                "weir.num_pages": num_pages,
            },
        ) as span:
            yield span

    def _add_chunk(self, parent: Span, event: ChunkComputed, timing: StepTiming) -> None:
        self._tracer.start_span(
            "prefill_chunk",
            context=set_span_in_context(parent, Context()),
            start_time=timing.started_ns,
            attributes={
                "weir.chunk.start": event.start,
                "weir.chunk.num_tokens": event.num_tokens,
                "weir.step": timing.step,
                "weir.batch.num_sequences": timing.num_sequences,
                "weir.batch.num_tokens": timing.num_tokens,
            },
        ).end(timing.ended_ns)


@dataclass(slots=True)
class _Decoding:
    span: Span
    num_output_tokens: int
    num_steps: int = 0
    max_batch_size: int = 0


class DecodeSpans:
    """The spans of a decode worker."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[SequenceKey, _Decoding] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def begin(self, params: SequenceParams, num_output_tokens: int) -> None:
        """Called at the hand-off or the adoption, with the tokens that are there already."""
        span = self._tracer.start_span(
            "decode",
            context=context_of(params.traceparent),
            attributes={"weir.request_id": params.request_id, "weir.adoption": params.attempt.adoption},
        )
        self._open[SequenceKey.of(params)] = _Decoding(span, num_output_tokens)

    def on_report(self, report: EngineReport) -> None:
        ended = {event.key: event for event in report.events if isinstance(event, SequenceEnded)}
        to_link = []
        for event in report.events:
            decoding = self._open.get(event.key)
            if decoding is None or not isinstance(event, TokenSampled) or report.timing is None:
                continue
            decoding.num_steps += 1
            decoding.num_output_tokens = event.index + 1
            decoding.max_batch_size = max(decoding.max_batch_size, report.timing.num_sequences)
            if decoding.span.is_recording() and (decoding.num_steps == 1 or event.key in ended):
                to_link.append(decoding.span)
        if to_link and report.timing is not None:
            self._link_step(to_link, report.timing)
        for event in report.events:
            if isinstance(event, SequenceEnded | SequenceForgotten) and event.key in self._open:
                self._finish(self._open.pop(event.key), event)

    def _link_step(self, spans: list[Span], timing: StepTiming) -> None:
        step = self._tracer.start_span(
            "decode_step",
            context=Context(),
            start_time=timing.started_ns,
            attributes={
                "weir.step": timing.step,
                "weir.batch.num_sequences": timing.num_sequences,
                "weir.batch.num_tokens": timing.num_tokens,
            },
        )
        step.end(timing.ended_ns)
        for span in spans:
            span.add_link(step.get_span_context(), {"weir.step": timing.step})

    def _finish(self, decoding: _Decoding, event: SequenceEnded | SequenceForgotten) -> None:
        if isinstance(event, SequenceEnded):
            waits = event.waits
            decoding.span.set_attributes(
                {
                    "weir.waiting_ms": round(waits.waiting_s * 1000, 3),
                    "weir.swapped_out_ms": round(waits.swapped_out_s * 1000, 3),
                    "weir.paused_ms": round(waits.paused_s * 1000, 3),
                    "weir.num_preemptions": waits.num_preemptions,
                    "weir.num_pauses": waits.num_pauses,
                }
            )
        elif event.is_adoption:
            decoding.span.add_event("moved")
        decoding.span.set_attributes(
            {
                "weir.num_steps": decoding.num_steps,
                "weir.batch.max_num_sequences": decoding.max_batch_size,
                gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: decoding.num_output_tokens,
            }
        )
        _end(decoding.span, event)


def _end(span: Span, event: SequenceEnded | SequenceForgotten) -> None:
    if isinstance(event, SequenceEnded):
        if event.reason is not None:
            span.set_attribute(gen_ai.GEN_AI_RESPONSE_FINISH_REASONS, [event.reason.value])
        if event.failure is not None:
            span.set_status(Status(StatusCode.ERROR, event.failure.message))
    span.end(time.time_ns())
