"""One request is one connected trace, across gRPC and NATS, with hardly a gap."""

from collections.abc import Sequence

import httpx
import pytest

from weir.client import AsyncWeirClient, GenerateOptions
from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.otlp import OtlpReceiver, ReceivedSpan
from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

WORDS = ("word", "tree", "river")
"""A prompt is one of them again and again. A process that stands still for a moment leaves a gap: the best of so many
requests counts."""


def trace_of(spans: Sequence[ReceivedSpan], request_id: str) -> list[ReceivedSpan]:
    roots = [span for span in spans if span.attributes.get("weir.request.client_id") == request_id]
    return [span for span in spans if roots and span.trace_id == roots[0].trace_id]


def orphans_of(trace: Sequence[ReceivedSpan]) -> list[str]:
    ids = {span.span_id for span in trace}
    return [span.name for span in trace if span.parent_id and span.parent_id not in ids]


def covered_ns(root: ReceivedSpan, others: Sequence[ReceivedSpan]) -> int:
    """Length of the union of the other spans, cut to the root."""
    intervals = sorted((max(s.start_ns, root.start_ns), min(s.end_ns, root.end_ns)) for s in others)
    covered, reached = 0, root.start_ns
    for start, end in intervals:
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


async def trace_a_request(stack: Stack, receiver: OtlpReceiver, request_id: str, prompt: str) -> list[ReceivedSpan]:
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        record = await stream(stub, greedy_request(prompt, max_tokens=24, ignore_eos=True, request_id=request_id))
    assert record.num_terminal_events == 1, record

    def is_complete(spans: Sequence[ReceivedSpan]) -> bool:
        """Each process sends its spans when it likes: a parent may come after its children."""
        trace = trace_of(spans, request_id)
        names = {span.name for span in trace}
        return {"queue", "prefill", "prefill_chunk", "hand_off", "decode"} <= names and not orphans_of(trace)

    return trace_of(receiver.wait_for(is_complete, timeout_s=30), request_id)


def coverage(trace: Sequence[ReceivedSpan]) -> float:
    """The share of the root that some other span explains."""
    (root,) = [span for span in trace if not span.parent_id]
    return covered_ns(root, [span for span in trace if span is not root]) / (root.end_ns - root.start_ns)


async def test_a_request_is_one_connected_trace_through_all_processes(
    stack: Stack, otlp_receiver: OtlpReceiver
) -> None:
    traces: list[list[ReceivedSpan]] = []
    for word in WORDS:  # another prompt each time: nothing of it is cached
        traces.append(await trace_a_request(stack, otlp_receiver, f"trace-{word}", f"{word} " * 600))
        if coverage(traces[-1]) >= 0.95:
            break
    trace = max(traces, key=coverage)
    assert coverage(trace) >= 0.95, [coverage(one) for one in traces]
    (root,) = [span for span in trace if not span.parent_id]
    assert root.service == "weir-gateway"
    assert {"weir-gateway", "weir-scheduler", "weir-prefill", "weir-decode"} <= {span.service for span in trace}
    assert any(span.attributes.get("messaging.system") == "nats" for span in trace)
    assert len([span for span in trace if span.name == "prefill_chunk"]) >= 2

    decode = next(span for span in trace if span.name == "decode")
    assert len(decode.linked_span_ids) == 2
    linked = set(decode.linked_span_ids)
    otlp_receiver.wait_for(lambda spans: linked <= {span.span_id for span in spans}, timeout_s=30)
    assert root.attributes["gen_ai.usage.output_tokens"] == 24
    assert root.attributes["gen_ai.request.model"] == "smollm2-135m"
    assert float(str(decode.attributes["weir.waiting_ms"])) >= 0
    async with httpx.AsyncClient(base_url=stack.http_url, timeout=60) as http:
        record = (await http.get(f"/debug/requests/{root.attributes['weir.request.id']}")).json()
    assert record["summary"]["trace_id"] == root.trace_id
    assert record["summary"]["model_digest"] == root.attributes["weir.model.digest"]


async def test_answers_name_the_weights_that_they_come_from(stack: Stack) -> None:
    chunks = [chunk async for chunk in AsyncWeirClient(stack.grpc_address).generate("x", GenerateOptions(max_tokens=2))]
    digest = chunks[-1].model_digest
    assert digest
    assert all(not chunk.model_digest for chunk in chunks[:-1])
    async with httpx.AsyncClient(base_url=stack.http_url, timeout=60) as http:
        answer = (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})).json()
        assert answer["system_fingerprint"] == f"fp_{digest[:16]}"
        record = (await http.get(f"/debug/requests/{answer['id']}")).json()
    assert record["summary"]["model_digest"] == digest
