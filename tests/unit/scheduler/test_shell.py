"""The scheduler over the in-memory bus: grants, refusals, faults, traces, malformed messages."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.unit.scheduler.rig import make_limits, make_worker
from tests.unit.scheduler.scripted import SUBJECTS, Stack, eventually

from weir.bus.in_memory import LOST, REPEATED, Leg, RandomFaults, ScriptedFaults
from weir.bus.messages import RefusalReason
from weir.bus.protocol import BusTimeout


@pytest.fixture
def faults() -> ScriptedFaults:
    return ScriptedFaults()


@pytest.fixture
async def stack(faults: ScriptedFaults) -> AsyncIterator[Stack]:
    whole = Stack(faults=faults)
    yield whole
    await whole.close()


async def test_a_request_is_granted_finished_and_leaves_nothing(stack: Stack) -> None:
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    reply = await gateway.submit("a")
    await eventually(lambda: gateway.grants != [])
    grant = gateway.grants[0]
    assert reply.queued
    assert (grant.request_id, grant.epoch) == ("a", reply.epoch)
    assert (grant.placement.prefill_address, grant.placement.num_reserved_pages) == ("address-of-p", 2)
    await gateway.finish("a")
    description = scheduler.describe()
    assert description.integrity_errors == ()
    metrics = description.metrics
    assert (metrics["granted"], metrics["reserved_pages"], metrics["is_leader"]) == (0, 0, 1)
    assert (metrics["submitted_total"], metrics["ended_finished_total"], metrics["messages_under_way"]) == (1, 1, 0)


async def test_a_refusal_says_why(stack: Stack) -> None:
    await stack.add_scheduler()
    gateway = await stack.add_gateway()
    await asyncio.sleep(0.3)
    reply = await gateway.submit("a", "vip")
    assert (reply.reason, reply.queued) == (RefusalReason.UNKNOWN_LANE, False)


async def test_a_lost_grant_or_answer_is_sent_again_and_a_repeated_one_does_no_harm(
    stack: Stack, faults: ScriptedFaults
) -> None:
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    subject = SUBJECTS.grant("g0")
    faults.script(subject, LOST, REPEATED)
    faults.script(subject, LOST, LOST, leg=Leg.BACK)
    await gateway.submit("a")
    await eventually(lambda: len(gateway.grants) >= 3)
    await eventually(lambda: scheduler.describe().metrics["messages_under_way"] == 0)
    assert len(set(gateway.grants)) == 1
    assert scheduler.describe().metrics["granted"] == 1


async def test_a_grant_that_the_gateway_declines_is_free_for_the_next(stack: Stack) -> None:
    stack.workers["d"] = make_worker("d", "decode", seqs=1)
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    gateway.accepts = False
    await gateway.submit("a")
    await eventually(lambda: scheduler.describe().metrics.get("ended_declined_total") == 1)
    gateway.accepts = True
    await gateway.submit("b")
    await eventually(lambda: gateway.granted_ids == ["a", "b"])


async def test_a_worker_that_takes_its_record_back_gets_nothing_new_at_once_and_ends_nothing(stack: Stack) -> None:
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    await gateway.submit("a")
    await eventually(lambda: gateway.grants != [])
    await stack.delete_worker("d")
    await eventually(lambda: scheduler.describe().metrics["workers"] == 1)
    reply = await gateway.submit("b")
    assert reply.reason is RefusalReason.NO_WORKER
    assert scheduler.describe().metrics["reserved_pages"] == 2
    await gateway.finish("a")
    await eventually(lambda: scheduler.describe().metrics["reserved_pages"] == 0)
    assert gateway.ends == {"b": "refused", "a": "finished"}


async def test_a_revoke_that_was_lost_is_told_by_reconciliation(stack: Stack, faults: ScriptedFaults) -> None:
    stack.workers["d"] = make_worker("d", "decode", seqs=1)
    await stack.add_scheduler()
    gateway = await stack.add_gateway()
    faults.script(SUBJECTS.revoke("g0"), *[LOST] * 50)
    await gateway.submit("a", max_tokens=800)
    await eventually(lambda: gateway.grants != [])
    await gateway.submit("b", max_tokens=800)
    stack.workers["d"] = make_worker("d", "decode", seqs=1, pages=2)  # now it can never start
    await eventually(lambda: gateway.ends == {"b": "refused by reconciliation"})


async def test_malformed_messages_on_every_subject_are_counted_and_ignored(stack: Stack) -> None:
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    raw = stack.hub.connect()
    subjects = (SUBJECTS.submit, SUBJECTS.cancel, SUBJECTS.finish, SUBJECTS.prefilled, SUBJECTS.reconcile)
    for subject in subjects:
        with pytest.raises(BusTimeout):
            await raw.request(subject, b"\xff\x00 not a message", timeout_s=0.02)
    registry = await raw.bucket(SUBJECTS.workers_bucket)
    await registry.put("junk", b"\xc1")
    await registry.put("impostor", b"")
    await eventually(lambda: scheduler.describe().metrics["malformed_messages_total"] == len(subjects) + 2)
    assert (await gateway.submit("a")).queued
    await eventually(lambda: gateway.grants != [])


async def test_fifty_requests_over_a_bad_wire_all_end_once() -> None:
    stack = Stack(faults=RandomFaults(7, lost=0.1, repeated=0.1, delayed=0.2, max_delay_s=0.1))
    scheduler = await stack.add_scheduler()
    gateways = [await stack.add_gateway(f"g{number}") for number in range(2)]
    lanes = ("interactive", "standard")
    submits = [gateways[n % 2].submit(f"r{n}", lanes[n % 3 % 2]) for n in range(50)]
    running = asyncio.gather(*submits)
    async with asyncio.timeout(30):
        while sum(len(gateway.ends) for gateway in gateways) < 50:
            for gateway in gateways:
                for request_id in [i for i, entry in gateway.held.items() if entry.placement is not None]:
                    await gateway.finish(request_id)
            await asyncio.sleep(0.01)
    await running
    assert {how for gateway in gateways for how in gateway.ends.values()} == {"finished"}
    await eventually(lambda: scheduler.describe().metrics["granted"] + scheduler.describe().metrics["queued"] == 0)
    assert scheduler.describe().integrity_errors == ()
    await stack.close()


async def test_the_queue_is_a_span_between_submit_and_grant(stack: Stack) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stack.tracer = provider.get_tracer("test")
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    with stack.tracer.start_as_current_span("request") as request:
        await gateway.submit("a", "interactive")
    await eventually(lambda: gateway.grants != [])
    await eventually(lambda: scheduler.describe().metrics["messages_under_way"] == 0)
    # The first of each name: what is not answered in time is sent again.
    spans = {span.name: span for span in reversed(exporter.get_finished_spans())}
    names = {
        "process weir.{instance}.gateway.{gateway_id}.grant": "send weir.{instance}.gateway.{gateway_id}.grant",
        "send weir.{instance}.gateway.{gateway_id}.grant": "queue",
        "queue": "process weir.{instance}.scheduler.submit",
        "process weir.{instance}.scheduler.submit": "send weir.{instance}.scheduler.submit",
        "send weir.{instance}.scheduler.submit": "request",
    }
    for child, parent in names.items():
        parent_of_child, context_of_parent = spans[child].parent, spans[parent].context
        assert parent_of_child is not None
        assert context_of_parent is not None
        assert parent_of_child.span_id == context_of_parent.span_id, f"{child} is not a child of {parent}"
        assert parent_of_child.trace_id == request.get_span_context().trace_id
    attributes = spans["queue"].attributes
    assert attributes is not None
    assert attributes["weir.lane"] == "interactive"
    assert attributes["weir.queue.outcome"] == "granted"
    assert scheduler.describe().metrics["open_queue_spans"] == 0
    provider.shutdown()


async def test_a_queue_span_ends_with_a_cancel(stack: Stack) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stack.tracer = provider.get_tracer("test")
    stack.workers.clear()
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    with stack.tracer.start_as_current_span("request"):
        await gateway.submit("a")
    await gateway.cancel("a")
    queued = [span for span in exporter.get_finished_spans() if span.name == "queue"]
    outcomes = [(span.attributes or {}).get("weir.queue.outcome") for span in queued]
    assert outcomes == ["cancelled"]
    assert scheduler.describe().metrics["open_queue_spans"] == 0
    provider.shutdown()


async def test_while_the_bus_is_away_everything_waits_and_then_goes_on(stack: Stack) -> None:
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    await gateway.submit("a")
    await eventually(lambda: gateway.grants != [])
    stack.hub.stop()
    submitting = asyncio.create_task(gateway.submit("b"))
    await asyncio.sleep(0.5)
    assert not submitting.done()
    stack.hub.start()
    assert (await submitting).queued
    await eventually(lambda: gateway.granted_ids == ["a", "b"])
    assert gateway.ends == {}
    assert scheduler.describe().metrics["granted"] == 2
    assert stack.shutdowns == []


async def test_silence_while_the_bus_is_away_is_held_against_nobody() -> None:
    # What this process stands still for is excused, so that only the outage can be held against somebody.
    stack = Stack(limits=make_limits(gather_s=0.1, worker_ttl_s=1.0, gateway_ttl_s=1.0, max_stall_s=0.3))
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    await gateway.submit("a")
    await eventually(lambda: gateway.held["a"].placement is not None)
    stack.hub.stop()
    await asyncio.sleep(2.0)
    stack.hub.start()
    await asyncio.sleep(0.5)
    metrics = scheduler.describe().metrics
    assert (metrics["granted"], metrics["workers"], gateway.ends) == (1, 2, {})
    assert metrics["workers_lost_total"] == 0
    assert metrics["gateways_lost_total"] == 0
    await stack.close()
