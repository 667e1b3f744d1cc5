"""Life events: kept by a real NATS server, exported, and replayed in the simulator."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.contract.worlds import NatsServer
from tests.unit.gateway.world import FAST, World, open_world
from typer.testing import CliRunner

from weir.bus.audit import AuditBounds, AuditStream, LifeEvent
from weir.bus.messages import RefusalReason, SubmitReply
from weir.bus.nats import NatsBus
from weir.bus.protocol import BusRefused
from weir.bus.subjects import Subjects
from weir.cli.app import app
from weir.policy.predictors.log_record import record_from_line
from weir.sim.workloads.traces import detect_format, read_trace
from weir_gateway.audit import AuditSettings

BOUNDS = AuditBounds(max_bytes=1 << 20, max_age_s=3600)
BODY = {"model": "bytes", "prompt": "Say hello", "max_tokens": 5, "temperature": 0}
SECRET = "nobody is to read this"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, name="contract-test")
    yield bus
    await bus.close()


def event(number: int, **changes: Any) -> LifeEvent:
    plain = LifeEvent(f"r{number}", "g", 1e9, 1e9 + 1, "m", "t", "standard", 10, 0, 4, 8, "finished", "stop", False)
    return replace(plain, **changes)


async def ids_of(stream: AuditStream) -> list[str]:
    return [json.loads(line)["request_id"] async for line in stream.lines()]


async def test_events_come_back_in_order_and_a_batch_that_is_sent_again_is_there_once(bus: NatsBus) -> None:
    stream = AuditStream(bus, Subjects("test"))
    await stream.make(BOUNDS)
    for name in ("g-1", "g-1", "g-2"):
        first = 2 * int(name[-1])
        await stream.append([event(first), event(first + 1)], name)
    assert await ids_of(stream) == ["r2", "r3", "r4", "r5"]


async def test_over_its_bytes_the_oldest_events_go_and_another_gateway_may_set_other_bounds(bus: NatsBus) -> None:
    stream = AuditStream(bus, Subjects("test"))
    await stream.make(AuditBounds(max_bytes=20_000, max_age_s=3600))
    for number in range(100):
        await stream.append([event(number)], f"g-{number}")
    kept = await ids_of(stream)
    assert 10 < len(kept) < 100
    assert kept == [f"r{number}" for number in range(100 - len(kept), 100)]
    await stream.make(AuditBounds(max_bytes=5_000, max_age_s=60))
    assert 0 < len(await ids_of(stream)) < len(kept)


async def test_where_no_gateway_keeps_events_a_reader_is_told_which_setting_does(bus: NatsBus) -> None:
    with pytest.raises(BusRefused, match="setting audit"):
        await ids_of(AuditStream(bus, Subjects("test")))


@pytest.fixture
async def audited(server: NatsServer) -> AsyncIterator[World]:
    settings = replace(FAST, audit=AuditSettings(BOUNDS, gather_s=0.01))

    buses: list[NatsBus] = []

    async def connect() -> NatsBus:
        buses.append(await NatsBus.connect(server.url, name="contract-test"))
        return buses[-1]

    async with open_world(settings, connect=connect) as world:
        yield world
    for bus in buses:
        await bus.close()


async def run(*arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


async def test_load_on_a_gateway_is_exported_and_the_simulator_takes_it(
    audited: World, server: NatsServer, tmp_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=audited.http_url, timeout=60) as http:
        bodies = [BODY, BODY | {"prompt": SECRET, "lane": "batch"}, BODY | {"n": 2, "deadline_ms": 50_000}]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200] * 3
        audited.scheduler.refusal = SubmitReply(5, False, RefusalReason.QUOTA, "over it", 1000)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 429
    await audited.until(lambda: audited.metric("audit_written_total") == 5, "all is written")
    out = tmp_path / "events.jsonl"
    said = await run("audit", "--nats-url", server.url, "--instance", "test", "--out", str(out))
    assert "5 events" in said
    text = out.read_text()
    assert SECRET not in text
    assert out.stat().st_mode & 0o077 == 0
    found = [json.loads(line) for line in text.splitlines()]
    assert sorted(one["outcome"] for one in found) == ["finished"] * 4 + ["refused"]
    for one in found:
        is_finished = one["outcome"] == "finished"
        assert one["reason"] == ("length" if is_finished else "QuotaExceeded")
        assert (one["num_output_tokens"], one["max_tokens"]) == (5 if is_finished else 0, 5)
        assert one["tenant"] == "default"
        assert ("ttft_s" in one) == is_finished
        assert one["at_s"] >= one["arrival_s"] > 1e9
    by_length = {one["num_prompt_tokens"]: one["lane"] for one in found}
    assert by_length == {len(BODY["prompt"]): "standard", len(SECRET): "batch"}  # type: ignore[arg-type]
    record = record_from_line(text.splitlines()[0])
    assert (record.num_output_tokens, record.is_cut) == (5, True)
    assert detect_format(out) == "capture"
    workload = read_trace(out)
    assert sorted(request.deadline_s for request in workload.requests) == [0, 0, 0, 50, 50]
    assert {request.lane for request in workload.requests} == {"standard", "batch"}
    report = json.loads(await run("simulate", str(out), "--local", "1", "--json"))
    assert "5" in json.dumps(report)


async def test_without_its_server_requests_are_served_and_events_wait_for_it(server: NatsServer) -> None:
    """The gateway's own bus is in memory, where there is no JetStream."""
    settings = replace(FAST, audit=AuditSettings(BOUNDS, max_waiting=3, gather_s=0.0))
    async with open_world(settings) as world, httpx.AsyncClient(base_url=world.http_url, timeout=60) as http:
        for _ in range(5):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        await world.until(lambda: world.metric("audit_failed_total") > 0, "it was tried")
        await world.until(lambda: world.metric("audit_dropped_total") == 2, "all have ended")
        assert world.metric("audit_waiting") == 3
        assert world.metric("finished_total") == 5


async def test_what_could_not_be_written_for_a_while_is_written_once_when_the_server_is_back(
    audited: World, server: NatsServer
) -> None:
    bus = await NatsBus.connect(server.url, name="contract-test")
    async with httpx.AsyncClient(base_url=audited.http_url, timeout=60) as http:
        await http.post("/v1/completions", json=BODY)
        await audited.until(lambda: audited.metric("audit_written_total") == 1, "the stream is there")
        await bus.request(f"$JS.API.STREAM.DELETE.{Subjects('test').audit_stream}", b"", timeout_s=10)
        await http.post("/v1/completions", json=BODY)
        await audited.until(lambda: audited.metric("audit_written_total") == 2, "a new stream has it")
    assert len(await ids_of(AuditStream(bus, Subjects("test")))) == 1
    assert audited.metric("audit_failed_total") >= 1
    await bus.close()


@pytest.mark.parametrize("bounds", [(0, 60.0), (-1, 60.0), (1 << 20, 0.0), (1 << 20, float("nan"))])
def test_bounds_that_keep_nothing_or_everything_are_refused(bounds: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        AuditBounds(*bounds)
