"""A keyed answer goes on by itself when its stream breaks; others end with the error."""

import pytest
from tests.unit.client.scripted_gateway import scripted_gateway

from weir.client import AsyncWeirClient, Chunk, FinishReason, GenerateOptions, WeirClient
from weir.client.resumption import Resumption
from weir.core.errors import InvalidRequest, Unavailable

KEYED = GenerateOptions(idempotency_key="k", resume_from=None)
BROKEN = Unavailable("the gateway is gone", retry_after_s=0.01)


def test_a_keyed_answer_goes_on_after_the_token_that_came_last() -> None:
    with scripted_gateway() as (gateway, address), WeirClient(address, timeout_s=20) as client:
        gateway.error, gateway.num_errors = BROKEN, 3
        assert "".join(chunk.text for chunk in client.generate("hello", KEYED)) == "one two"
        assert [request.options.HasField("resume_from") for request in gateway.requests] == [False, True, True, True]
        assert {request.options.resume_from for request in gateway.requests[1:]} == {1}


async def test_the_asyncio_client_does_so_too_at_the_next_address_if_one_is_dead() -> None:
    with scripted_gateway() as (gateway, address):
        gateway.error, gateway.num_errors = BROKEN, 1
        async with AsyncWeirClient(f"ipv4:127.0.0.1:1,{address}", timeout_s=20) as client:
            assert "".join([chunk.text async for chunk in client.generate([1, 2], KEYED)]) == "one two"
        assert len(gateway.requests) == 2


def test_without_a_key_the_error_is_the_answers() -> None:
    with scripted_gateway() as (gateway, address), WeirClient(address, timeout_s=20) as client:
        gateway.error = BROKEN
        with pytest.raises(Unavailable, match="the gateway is gone"):
            list(client.generate("hello"))
        assert len(gateway.requests) == 1


class TestResumption:
    def test_other_errors_and_deadlines_end_it(self) -> None:
        going = Resumption(KEYED, 10.0, now_s=lambda: 0.0)
        assert going.try_pause_s(InvalidRequest([])) is None
        assert going.try_pause_s(Unavailable("away", retry_after_s=11.0)) is None
        assert going.try_pause_s(Unavailable("away", retry_after_s=2.0)) == 2.0

    def test_it_gives_up_after_so_many_calls_without_a_token(self) -> None:
        going = Resumption(KEYED, 1e6, now_s=lambda: 0.0)
        assert [going.try_pause_s(BROKEN) for _ in range(21)] == [0.01] * 20 + [None]
        going.had(Chunk("r", 4, (1, 2), "", None, 0, 0, 0))
        assert going.try_pause_s(BROKEN) == 0.01
        assert going.options.resume_from == 6
        going.had(Chunk("r", 6, (3,), "", FinishReason.STOP, 0, 0, 0))
        assert going.try_pause_s(BROKEN) is None, "nothing can follow"

    def test_all_calls_share_one_deadline(self) -> None:
        now_s = [0.0]
        going = Resumption(KEYED, 10.0, now_s=lambda: now_s[0])
        now_s[0] = 4.0
        assert going.left_s == 6.0
