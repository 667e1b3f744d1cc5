"""Trace context through headers, and tracing that is off."""

import logging
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc import exporter
from opentelemetry.sdk import _shared_internal
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NoOpTracerProvider

from weir.core.trace_context import context_of, extract, inject, traceparent_of
from weir.runtime.telemetry import QuietFilter, setup_tracing, shutdown_tracing
from weir.testing.otlp import OtlpReceiver


def test_a_traceparent_leads_back_to_its_span() -> None:
    span = TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("parent")
    here = span.get_span_context()
    there = trace.get_current_span(context_of(traceparent_of(span))).get_span_context()
    assert (there.trace_id, there.span_id, there.is_remote) == (here.trace_id, here.span_id, True)
    assert there.trace_flags.sampled


def test_headers_carry_the_current_context() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    headers: dict[str, str] = {"other": "kept"}
    with tracer.start_as_current_span("parent") as span:
        inject(headers)
    assert set(headers) == {"other", "traceparent"}
    carried = trace.get_current_span(extract(headers)).get_span_context()
    assert carried.span_id == span.get_span_context().span_id


def test_without_a_trace_nothing_is_added() -> None:
    headers: dict[str, str] = {}
    inject(headers)
    assert headers == {}
    assert traceparent_of(trace.INVALID_SPAN) == ""
    assert not trace.get_current_span(context_of("")).get_span_context().is_valid


@given(st.text())
def test_a_malformed_traceparent_is_as_good_as_none(text: str) -> None:
    context = trace.get_current_span(context_of(text)).get_span_context()
    assert not context.is_valid or text.strip().count("-") >= 3


def test_tracing_that_is_off_does_nothing() -> None:
    provider = setup_tracing("gateway", "i", "gateway-0-1", "")
    assert isinstance(provider, NoOpTracerProvider)
    assert not provider.get_tracer("test").start_span("a").is_recording()
    assert shutdown_tracing(provider, 0.0)


def test_a_hop_that_does_not_trace_passes_the_context_on() -> None:
    caller = TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("caller")
    silent = setup_tracing("gateway", "i", "gateway-0-1", "").get_tracer("test")
    span = silent.start_span("hop", context=context_of(traceparent_of(caller)))
    assert traceparent_of(span) == traceparent_of(caller)


def test_spans_arrive_with_who_sent_them() -> None:
    with OtlpReceiver() as receiver:
        provider = setup_tracing("decode", "i", "decode-1-abc", receiver.endpoint)
        provider.get_tracer("test").start_span("work").end()
        assert shutdown_tracing(provider, 5.0)
        assert [(s.name, s.service, s.process_id) for s in receiver.spans] == [("work", "weir-decode", "decode-1-abc")]


def test_a_sampler_by_the_standard_variables_goes_by_the_parent_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with OtlpReceiver() as receiver:
        provider = setup_tracing("decode", "i", "decode-1-abc", receiver.endpoint)
        tracer = provider.get_tracer("test")
        parents = {"root": "", "sampled": f"00-{'1' * 32}-{'2' * 16}-01", "not sampled": f"00-{'3' * 32}-{'4' * 16}-00"}
        for name, traceparent in parents.items():
            tracer.start_span(name, context=context_of(traceparent)).end()
        assert shutdown_tracing(provider, 5.0)
        assert [span.name for span in receiver.spans] == ["sampled"]


def test_an_exporter_that_cannot_reach_its_collector_says_so_once_a_minute() -> None:
    now_s = 0.0
    quiet = QuietFilter(quiet_s=60.0, now_s=lambda: now_s)
    record = logging.makeLogRecord({"msg": "Failed to export"})
    passed = []
    for now_s in (0.0, 1.0, 59.0, 60.0, 119.0, 120.0):  # noqa: B007 - read by the filter's clock
        passed.append(quiet.filter(record))
    assert passed == [True, False, False, True, False, True]


@pytest.mark.parametrize("module", [exporter, _shared_internal])
def test_the_loggers_that_are_quieted_are_those_that_the_sdk_uses(module: ModuleType) -> None:
    shutdown_tracing(setup_tracing("gateway", "i", "gateway-0-1", "http://127.0.0.1:9"), 0.5)
    used = [value for value in vars(module).values() if isinstance(value, logging.Logger)]
    assert len(used) == 1
    assert sum(isinstance(entry, QuietFilter) for entry in used[0].filters) == 1
