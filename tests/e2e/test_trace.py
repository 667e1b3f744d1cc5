"""One request is one connected trace, across gRPC and NATS, with hardly a gap."""

from collections.abc import Sequence

import pytest

from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.otlp import OtlpReceiver, ReceivedSpan
from weir.testing.stack import Stack

pytestmark = pytest.mark.stack


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


async def test_a_request_is_one_connected_trace_through_all_processes(
    stack: Stack, otlp_receiver: OtlpReceiver
) -> None:
    request_id = "trace-me"
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        record = await stream(
            stub, greedy_request("word " * 600, max_tokens=24, ignore_eos=True, request_id=request_id)
        )
    assert record.num_terminal_events == 1, record

    def is_complete(spans: Sequence[ReceivedSpan]) -> bool:
        """Each process sends its spans when it likes: a parent may come after its children."""
        trace = trace_of(spans, request_id)
        names = {span.name for span in trace}
        return {"queue", "prefill", "prefill_chunk", "hand_off", "decode"} <= names and not orphans_of(trace)

    trace = trace_of(otlp_receiver.wait_for(is_complete, timeout_s=15), request_id)
    roots = [span for span in trace if not span.parent_id]
    assert [root.service for root in roots] == ["weir-gateway"]
    root = roots[0]
    assert {"weir-gateway", "weir-scheduler", "weir-prefill", "weir-decode"} <= {span.service for span in trace}
    assert any(span.attributes.get("messaging.system") == "nats" for span in trace)
    assert len([span for span in trace if span.name == "prefill_chunk"]) >= 2

    descendants = [span for span in trace if span is not root]
    assert covered_ns(root, descendants) >= 0.95 * (root.end_ns - root.start_ns)

    decode = next(span for span in trace if span.name == "decode")
    assert len(decode.linked_span_ids) == 2
    linked = set(decode.linked_span_ids)
    otlp_receiver.wait_for(lambda spans: linked <= {span.span_id for span in spans}, timeout_s=15)
    assert root.attributes["gen_ai.usage.output_tokens"] == 24
    assert root.attributes["gen_ai.request.model"] == "smollm2-135m"
