"""Kept answers: shared by gateways, of one tenant, bounded."""

import asyncio
import dataclasses

import pytest
from opentelemetry.trace import NoOpTracer
from tests.unit.hubs import made_hub

from weir.bus import responses
from weir.bus.codec import encode
from weir.bus.endpoint import BusEndpoint
from weir.bus.in_memory import InMemoryHub
from weir.bus.in_memory_kv import InMemoryBucket
from weir.bus.protocol import Bus
from weir.bus.responses import MAX_RESPONSE_BYTES, ResponseRecord, tenant_name
from weir.bus.subjects import Subjects
from weir.core.clock import ManualClock
from weir.core.errors import Unavailable
from weir_gateway.frontends.json_parts import dump
from weir_gateway.frontends.openai.messages import call_turn
from weir_gateway.frontends.responses.store import ResponseStore
from weir_gateway.frontends.responses.turns import turns_to_json
from weir_scheduler.store_maker import StoreMaker

SUBJECTS = Subjects("test")
TURNS = (
    {"role": "user", "content": "Grüße"},
    {"role": "assistant", "content": "", "tool_calls": [call_turn("call_1", "f", {"a": 1})]},
    {"role": "assistant", "content": "hi"},
)


def response_id(number: int) -> str:
    return f"resp_{number:032x}"


def store(hub: InMemoryHub) -> ResponseStore:
    return store_on(hub.connect())


def store_on(bus: Bus, timeout_s: float = 2.0) -> ResponseStore:
    return ResponseStore(bus, BusEndpoint(bus, NoOpTracer()), SUBJECTS, timeout_s=timeout_s)


async def keep(one: ResponseStore, number: int, tenant: str = "a", text: str = "hi") -> bool:
    return await one.try_keep(tenant, response_id(number), text.encode(), TURNS)


async def has(one: ResponseStore, number: int, tenant: str = "a") -> bool:
    return await one.try_get(tenant, response_id(number)) is not None


async def test_the_first_answer_of_a_tenant_has_the_scheduler_make_a_bucket_and_a_look_up_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = made_hub("test")
    one = store(hub)
    assert not await has(one, 1)
    assert not await keep(one, 1)
    assert "nobody listens" in caplog.text
    maker, endpoint = hub.connect(), BusEndpoint(hub.connect(), NoOpTracer())
    await StoreMaker(maker, SUBJECTS, lambda tenant: tenant == "a").serve(endpoint)
    assert not await keep(one, 1, tenant="b")
    assert "there is no tenant 'b'" in caplog.text
    assert not await has(one, 1)
    assert await keep(one, 1)
    assert await has(one, 1)
    assert await keep(store(hub), 2)
    await endpoint.close()


async def test_another_gateway_finds_what_was_kept() -> None:
    hub = made_hub("test", "a", "b")
    assert await keep(store(hub), 1)
    found = await store(hub).try_get("a", response_id(1))
    assert found is not None
    assert found.turns == TURNS
    assert found.response == b"hi"


async def test_another_tenant_neither_finds_nor_deletes_it() -> None:
    one = store(made_hub("test", "a", "b"))
    await keep(one, 1)
    assert not await has(one, 1, "b")
    assert not await one.delete("b", response_id(1))
    assert await has(one, 1)


async def test_what_is_deleted_is_gone() -> None:
    one = store(made_hub("test", "a", "b"))
    await keep(one, 1)
    assert await one.delete("a", response_id(1))
    assert not await has(one, 1)
    assert not await one.delete("a", response_id(1))


async def test_it_expires() -> None:
    clock = ManualClock()
    one = store(InMemoryHub(clock=clock))
    await keep(one, 1)
    clock.advance(responses.RESPONSE_TTL_S + 1)
    assert not await has(one, 1)


async def test_over_the_number_of_a_tenant_its_oldest_go_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.hubs.MAX_RESPONSES", 2)
    one = store(made_hub("test", "a", "b"))
    await keep(one, 9, "b")
    for number in (1, 2, 3):
        await keep(one, number)
    assert [await has(one, number) for number in (1, 2, 3)] == [False, True, True]
    assert await has(one, 9, "b")


async def test_what_is_too_large_is_not_kept() -> None:
    one = store(made_hub("test", "a", "b"))
    assert not await keep(one, 1, text="x" * MAX_RESPONSE_BYTES)
    assert not await has(one, 1)
    assert one.metrics()["responses_too_large_total"] == 1


async def test_an_answer_whose_id_nobody_could_look_up_is_lost_and_not_too_large() -> None:
    one = store(made_hub("test", "a", "b"))
    assert not await one.try_keep("a", "resp_1", b"{}", TURNS)
    assert (one.metrics()["responses_lost_total"], one.metrics()["responses_too_large_total"]) == (1, 0)


async def test_what_fits_just_so_is_kept() -> None:
    one = store(made_hub("test", "a", "b"))
    assert await keep(one, 1, text="x" * (MAX_RESPONSE_BYTES - len(dump(turns_to_json(TURNS)).encode())))
    assert await has(one, 1)


async def test_while_the_bus_is_away_answers_are_not_kept_and_look_ups_say_so() -> None:
    hub = made_hub("test", "a", "b")
    one = store(hub)
    await keep(one, 1)
    hub.stop()
    assert not await keep(one, 2)
    with pytest.raises(Unavailable, match="cannot be looked up now") as error:
        await has(one, 1)
    assert error.value.retry_after_s is not None
    with pytest.raises(Unavailable):
        await one.delete("a", response_id(1))
    hub.start()
    assert await has(one, 1)
    assert one.metrics()["responses_lost_total"] == 1


async def test_a_bucket_that_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    one = store_on(made_hub("test", "a").connect(), timeout_s=0.01)
    await keep(one, 1)
    async with asyncio.timeout(20):
        monkeypatch.setattr(InMemoryBucket, "put", never)
        assert not await keep(one, 2)
        assert one.metrics()["responses_lost_total"] == 1
        assert "is not kept: no answer in time" in caplog.text
        monkeypatch.setattr(InMemoryBucket, "delete", never)
        with pytest.raises(Unavailable, match="no answer in time"):
            await one.delete("a", response_id(1))
        monkeypatch.setattr(InMemoryBucket, "get", never)
        with pytest.raises(Unavailable, match="no answer in time"):
            await has(one, 1)


@pytest.mark.parametrize("name", ["", "resp_", "resp_" + "A" * 32, "resp_" + "0" * 31, "*", "resp_>", "x" * 5000])
async def test_an_id_that_no_answer_has_is_not_looked_up(name: str) -> None:
    hub = made_hub("test", "a", "b")
    one = store(hub)
    hub.stop()  # a look-up would raise
    assert await one.try_get("a", name) is None
    assert not await one.delete("a", name)


@pytest.mark.parametrize("turns", [b"{", b"[1]", b'[["a"]]', b"5", b'[{"role": "a"}]', b"\xff"])
async def test_what_no_gateway_has_written_is_as_good_as_gone(turns: bytes) -> None:
    hub = made_hub("test", "a", "b")
    bucket = await hub.connect().bucket(SUBJECTS.responses_bucket(tenant_name("a")))
    await bucket.put(f"{1:032x}", encode(ResponseRecord(b"{}", turns)))
    await bucket.put(f"{2:032x}", b"\x00")
    one = store(hub)
    assert not await has(one, 1)
    assert not await has(one, 2)
    assert one.metrics()["responses_malformed_total"] == 2


def test_a_record_names_its_bound() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_RESPONSE_BYTES}"):
        dataclasses.replace(ResponseRecord(b"", b""), turns=bytes(MAX_RESPONSE_BYTES + 1))
