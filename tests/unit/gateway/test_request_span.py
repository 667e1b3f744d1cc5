"""One request is one span with what happened below it, part of the client's trace."""

from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode, format_span_id, format_trace_id
from tests.unit.gateway.fake_workers import NUM_CACHED_TOKENS
from tests.unit.gateway.world import World

from weir.bus.messages import RefusalReason, SubmitReply
from weir.core.clock import ManualClock
from weir.testing.load import greedy_request, stream
from weir_gateway.driving.request_span import RequestSpan
from weir_gateway.recent.store import RecentRequests, RecentSettings
from weir_gateway.requests.client_request import GRPC_NAMES, ClientRequest, Operation, Text

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
RECENT = RecentRequests("gateway-0-00000000", RecentSettings(), ManualClock())


def named(world: World, name: str) -> list[ReadableSpan]:
    return [span for span in world.spans.get_finished_spans() if span.name == name]


async def test_a_request_has_a_server_span_with_genai_attributes(world: World) -> None:
    world.scheduler.placement = replace(world.scheduler.placement, reason="shortest way")
    request = greedy_request("Say hello", max_tokens=5, request_id="mine")
    request.options.stop_conditions.stop.append("zzz")
    await stream(world.stub, request)
    await world.until_idle()
    [span] = named(world, "text_completion bytes")
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    attributes = dict(span.attributes or {})
    assert 0 < float(str(attributes.pop("gen_ai.response.time_to_first_chunk"))) < 5
    request_id = attributes.pop("weir.request.id")
    assert attributes.pop("gen_ai.response.id") == request_id
    assert isinstance(attributes.pop("gen_ai.request.seed"), int | str)
    assert attributes == {
        "weir.placement.reason": "shortest way",
        "weir.placement.is_local": False,
        "weir.placement.prefill_worker_id": world.prefill.worker_id,
        "weir.placement.decode_worker_id": world.decode.worker_id,
        "weir.request.client_id": "mine",
        "weir.tenant": "default",
        "weir.lane": "standard",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "weir",
        "gen_ai.request.stream": True,
        "gen_ai.request.model": "bytes",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "weir.request.num_stop": 1,
        "gen_ai.response.model": "bytes",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": NUM_CACHED_TOKENS,
    }
    phases = [event.name for event in span.events]
    if "handing_off" not in phases:  # the decode worker's stream was faster than the prefill worker's
        phases.insert(4, "handing_off")
    assert phases == ["received", "queued", "granted", "prefilling", "handing_off", "decoding", "finished"]


async def test_what_the_gateway_does_is_below_the_request_and_workers_are_given_it_as_parent(world: World) -> None:
    await stream(world.stub, greedy_request("x", max_tokens=5))
    await world.until_idle()
    [root] = named(world, "text_completion bytes")
    root_context = root.context
    assert root_context is not None
    for name in ("tokenize", "submit", "start"):
        [child] = named(world, name)
        assert child.parent is not None
        assert child.parent.span_id == root_context.span_id
    [start] = world.prefill.named("start")
    ids = f"{format_trace_id(root_context.trace_id)}-{format_span_id(root_context.span_id)}"
    assert start.traceparent.startswith(f"00-{ids}-")
    sends = [span for span in world.spans.get_finished_spans() if span.name.startswith("send ")]
    assert len(sends) >= 3  # submit, prefilled, finish
    assert {span.context.trace_id for span in sends if span.context is not None} == {root_context.trace_id}


async def test_the_clients_trace_goes_on_over_grpc_and_http(world: World) -> None:
    call = world.stub.Generate(greedy_request("x", max_tokens=2), metadata=(("traceparent", TRACEPARENT),))
    assert len([response async for response in call]) > 0
    async with world.http_client() as http:
        body = {"messages": [{"role": "user", "content": "x"}]}
        headers = {"traceparent": TRACEPARENT, "X-Request-Id": "mine"}
        await http.post("/v1/chat/completions", json=body, headers=headers)
    await world.until_idle()
    for name in ("text_completion bytes", "chat bytes"):
        [span] = named(world, name)
        assert span.parent is not None
        assert format_span_id(span.parent.span_id) == PARENT_ID
        assert format_trace_id(span.parent.trace_id) == TRACE_ID
    assert named(world, "chat bytes")[0].attributes is not None
    assert dict(named(world, "chat bytes")[0].attributes or {})["weir.request.client_id"] == "mine"


def test_the_first_chunk_alone_is_told_whether_or_not_anybody_records_it(caplog: pytest.LogCaptureFixture) -> None:
    request = ClientRequest(Operation.CHAT, Text("x"), GRPC_NAMES)
    unrecorded = RequestSpan(NoOpTracerProvider().get_tracer("test"), request, Context(), 10.0, RECENT)
    recorded = RequestSpan(TracerProvider(shutdown_on_exit=False).get_tracer("test"), request, Context(), 10.0, RECENT)
    ended = RequestSpan(TracerProvider(shutdown_on_exit=False).get_tracer("test"), request, Context(), 10.0, RECENT)
    ended.end_with(None)
    assert all(span.needs_first_chunk for span in (unrecorded, recorded, ended))
    for span in (unrecorded, recorded, ended):
        span.first_chunk(12.0)
        assert not span.needs_first_chunk, "from here on no time is read for it"
        span.first_chunk(15.0)
    shown = trace.get_current_span(recorded.context)
    assert isinstance(shown, ReadableSpan)
    assert dict(shown.attributes or {})["gen_ai.response.time_to_first_chunk"] == 2.0
    assert caplog.records == [], "nothing is set on a span that has ended"


async def test_a_refused_request_has_a_span_with_its_error(world: World) -> None:
    await stream(world.stub, greedy_request("", max_tokens=2))
    world.scheduler.refusal = SubmitReply(5, False, RefusalReason.QUEUE_FULL, "full", 1000)
    await stream(world.stub, greedy_request("x", max_tokens=2))
    await world.until_idle()
    invalid = named(world, "text_completion")
    refused = named(world, "text_completion bytes")
    assert [dict(span.attributes or {})["error.type"] for span in (*invalid, *refused)] == [
        "InvalidRequest",
        "Overloaded",
    ]
    assert all(span.status.status_code is StatusCode.ERROR for span in (*invalid, *refused))
