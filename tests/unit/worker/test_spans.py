"""What a request leaves in its trace on the two workers."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.unit.worker.rig import TIMEOUT_S, Rig, cancel_command, connected, resume_command, running_rig, start_command

from weir.engine.plan import StepPlan

GATEWAY = "gateway-0-44444444"
TRACE_ID = 0xA0 << 120 | 1
PARENT_ID = 0xB0 << 56 | 2
TRACEPARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def rig(exporter: InMemorySpanExporter) -> AsyncIterator[Rig]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with running_rig(provider.get_tracer("test")) as made:
        yield made
    provider.shutdown()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    spans = [span for span in exporter.get_finished_spans() if span.name == name]
    return sorted(spans, key=lambda span: span.start_time or 0)


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[name]


async def test_a_request_has_its_chunks_its_hand_off_and_its_decoding(rig: Rig, exporter: InMemorySpanExporter) -> None:
    start = start_command(rig.decode.worker_id, traceparent=TRACEPARENT)
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode:
        await decode.send(resume=resume_command(start))
        await prefill.send(start=start)
        await decode.receive_all(start.request_id)
    await rig.wait_idle()
    (prefilling,), (hand_off,), (decoding,) = (named(exporter, name) for name in ("prefill", "hand_off", "decode"))
    for span in (prefilling, hand_off, decoding):
        assert (span.context.trace_id, parent_id(span)) == (TRACE_ID, PARENT_ID)
    chunks = named(exporter, "prefill_chunk")
    assert [(attribute(chunk, "weir.chunk.start"), attribute(chunk, "weir.chunk.num_tokens")) for chunk in chunks] == [
        (0, 32),
        (32, 8),
    ]
    assert {parent_id(chunk) for chunk in chunks} == {prefilling.context.span_id}
    assert attribute(decoding, "weir.num_steps") == 11
    assert attribute(decoding, "gen_ai.usage.output_tokens") == 12
    for waited in ("waiting_ms", "swapped_out_ms", "paused_ms", "num_preemptions", "num_pauses"):
        assert attribute(decoding, f"weir.{waited}") == 0 or waited == "waiting_ms"
    steps = named(exporter, "decode_step")
    assert [link.context.span_id for link in decoding.links] == [step.context.span_id for step in steps]
    assert len(steps) == 2
    assert rig.prefill.metrics()["num_open_spans"] == rig.decode.metrics()["num_open_spans"] == 0


async def test_the_spans_follow_each_other_without_a_gap(rig: Rig, exporter: InMemorySpanExporter) -> None:
    """Decoding begins before the hand-off's call is back, the hand-off once the first token is sampled."""
    called_at_ns: list[int] = []
    rig.arena.before_hand_off = lambda request_id: called_at_ns.append(time.time_ns())
    start = start_command(rig.decode.worker_id, traceparent=TRACEPARENT)
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode:
        await prefill.send(start=start)
        await decode.receive_all(start.request_id)
    await rig.wait_idle()
    (prefilling,), (hand_off,), (decoding,) = (named(exporter, name) for name in ("prefill", "hand_off", "decode"))
    assert prefilling.end_time is not None
    assert hand_off.start_time is not None
    assert hand_off.end_time is not None
    assert decoding.start_time is not None
    assert prefilling.end_time <= hand_off.start_time <= called_at_ns[0]
    assert decoding.start_time <= hand_off.end_time


async def test_a_cancelled_and_a_failed_prompt_close_their_spans(rig: Rig, exporter: InMemorySpanExporter) -> None:
    refused = start_command("decode-9-00000000", traceparent=TRACEPARENT)
    async with connected(rig.prefill, GATEWAY) as prefill:
        await prefill.send(start=refused)
        await prefill.receive_all(refused.request_id)
        cancelled = start_command(rig.decode.worker_id, traceparent=TRACEPARENT, prompt_token_ids=range(390))
        in_step, release = threading.Event(), threading.Event()

        def hold(plan: StepPlan) -> None:
            in_step.set()
            assert release.wait(TIMEOUT_S)

        rig.on_run["prefill"] = hold
        await prefill.send(start=cancelled)
        await asyncio.to_thread(in_step.wait, TIMEOUT_S)
        await prefill.send(cancel=cancel_command(cancelled))
        await prefill.wait_taken()
        release.set()
        await prefill.receive_all(cancelled.request_id)
    await rig.wait_idle()
    assert rig.prefill.metrics()["num_open_spans"] == 0
    (hand_off,) = named(exporter, "hand_off")
    assert hand_off.status.status_code is StatusCode.ERROR
    assert attribute(named(exporter, "prefill")[-1], "gen_ai.response.finish_reasons") == ("cancelled",)


async def test_a_request_without_a_trace_begins_one_of_its_own(rig: Rig, exporter: InMemorySpanExporter) -> None:
    start = start_command(rig.decode.worker_id, traceparent="nonsense", max_tokens=1)
    async with connected(rig.prefill, GATEWAY) as prefill:
        await prefill.send(start=start)
        await prefill.receive_all(start.request_id)
    await rig.wait_idle()
    assert named(exporter, "prefill")[0].parent is None
