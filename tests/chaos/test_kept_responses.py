"""A kept answer of the Responses API outlives the gateway that gave it, and the NATS server that keeps it."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(400)]

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run"), flags=("--gateways", "2")) as stack:
        yield stack


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)


async def test_a_response_is_gone_on_from_at_the_other_gateway_after_a_death(stack: Stack) -> None:
    first_url, other_url = await asyncio.to_thread(stack.http_urls)
    async with client_of(first_url) as first, client_of(other_url) as other:
        made = await first.responses.create(
            model=MODEL, input="What color is the sky?", max_output_tokens=12, temperature=0
        )
        assert (await other.responses.retrieve(made.id)).to_dict() == made.to_dict()
        expected = await other.responses.create(
            model=MODEL, input="And at night?", previous_response_id=made.id, max_output_tokens=8, temperature=0
        )

        victims = (stack.processes("gateway")[0], *stack.processes("nats"))
        assert len(victims) == 2
        for victim in victims:
            stack.kill(victim)
        await asyncio.to_thread(
            lambda: wait_until(lambda: all(map(stack.has_restarted, victims)), timeout_s=90, what="both are back")
        )

        async with asyncio.timeout(60):
            while (again := await try_to_go_on(other, made.id)) is None:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.5)
        assert again == expected.output_text
        await other.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await first.responses.retrieve(made.id)


async def try_to_go_on(client: openai.AsyncOpenAI, response_id: str) -> str | None:
    """None: NATS or the scheduler is not back for all."""
    try:
        response = await client.responses.create(
            model=MODEL, input="And at night?", previous_response_id=response_id, max_output_tokens=8, temperature=0
        )
    except (openai.InternalServerError, openai.RateLimitError):
        return None
    return str(response.output_text)
