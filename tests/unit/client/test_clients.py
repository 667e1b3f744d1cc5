"""The blocking and the asyncio client send and return the same."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.unit.client.scripted_gateway import ScriptedGateway, scripted_gateway

from weir.client import AsyncWeirClient, Chunk, FinishReason, GenerateOptions, Turn, WeirClient
from weir.core.errors import FieldViolation, InvalidRequest, Overloaded, Unavailable

OPTIONS = GenerateOptions(
    model="m", lane="batch", request_id="mine", temperature=0.5, top_k=3, top_p=0.25, seed=2**64 - 1, max_tokens=9,
    stop=("a", "b"), stop_token_ids=(1, 2), ignore_eos=True,
)  # fmt: skip
CHUNKS = [
    Chunk("r", 0, (5,), "one ", None, 0, 0, 0),
    Chunk("r", 1, (6, 7), "two", FinishReason.STOP, 4, 3, 2, model_digest="d1"),
]


@pytest.fixture
def served() -> Iterator[tuple[ScriptedGateway, str]]:
    with scripted_gateway() as served:
        yield served


@pytest.fixture
def client(served: tuple[ScriptedGateway, str]) -> Iterator[WeirClient]:
    with WeirClient(served[1], timeout_s=20) as client:
        yield client


@pytest.fixture
async def async_client(served: tuple[ScriptedGateway, str]) -> AsyncIterator[AsyncWeirClient]:
    async with AsyncWeirClient(served[1], timeout_s=20) as client:
        yield client


def assert_every_option_was_sent(gateway: ScriptedGateway) -> None:
    options = gateway.requests[0].options
    assert (options.model, options.lane, options.request_id) == ("m", "batch", "mine")
    sampling, stop = options.sampling, options.stop_conditions
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.25, 2**64 - 1)
    assert (stop.max_tokens, list(stop.stop), list(stop.stop_token_ids), stop.ignore_eos) == (
        *(9, ["a", "b"], [1, 2]),
        True,
    )
    assert 15 < gateway.deadlines_s[0] < 21  # gRPC rounds a time-out up on its way


def test_the_blocking_client_streams_a_continuation(served: tuple[ScriptedGateway, str], client: WeirClient) -> None:
    assert list(client.generate("hello", OPTIONS)) == CHUNKS
    assert served[0].requests[0].text == "hello"
    assert_every_option_was_sent(served[0])


async def test_the_asyncio_client_streams_a_continuation(
    served: tuple[ScriptedGateway, str], async_client: AsyncWeirClient
) -> None:
    assert [chunk async for chunk in async_client.generate("hello", OPTIONS)] == CHUNKS
    assert served[0].requests[0].text == "hello"
    assert_every_option_was_sent(served[0])


def test_options_that_are_left_out_are_absent_on_the_wire(
    served: tuple[ScriptedGateway, str], client: WeirClient
) -> None:
    list(client.generate([1, 2, 3]))
    request = served[0].requests[0]
    assert list(request.token_ids.ids) == [1, 2, 3]
    assert request.options.sampling.ListFields() == []
    assert request.options.stop_conditions.ListFields() == []


async def test_both_clients_chat(
    served: tuple[ScriptedGateway, str], client: WeirClient, async_client: AsyncWeirClient
) -> None:
    turns = [Turn("system", "Be kind."), Turn("user", "Hello")]
    assert list(client.chat(turns)) == [chunk async for chunk in async_client.chat(turns)] == CHUNKS
    for request in served[0].requests:
        assert [(message.role, message.content) for message in request.messages] == [
            ("system", "Be kind."),
            ("user", "Hello"),
        ]


def test_an_error_in_a_stream_comes_after_the_chunks_before_it(
    served: tuple[ScriptedGateway, str], client: WeirClient
) -> None:
    served[0].error = Overloaded("full", retry_after_s=2.5)
    chunks = client.generate("x")
    assert next(chunks) == CHUNKS[0]
    with pytest.raises(Overloaded, match="full") as refused:
        next(chunks)
    assert refused.value.retry_after_s == 2.5


async def test_errors_of_every_method_are_weirs_own(
    served: tuple[ScriptedGateway, str], client: WeirClient, async_client: AsyncWeirClient
) -> None:
    served[0].error = InvalidRequest([FieldViolation("text", "is bad")])
    for call in (lambda: client.tokenize("x"), client.list_models, client.describe):
        with pytest.raises(InvalidRequest) as blocked:
            call()
        assert blocked.value.violations == served[0].error.violations
    for awaitable in (async_client.tokenize("x"), async_client.list_models(), async_client.describe()):
        with pytest.raises(InvalidRequest):
            await awaitable
    with pytest.raises(InvalidRequest):
        _ = [chunk async for chunk in async_client.generate("x")]


async def test_the_small_methods(client: WeirClient, async_client: AsyncWeirClient) -> None:
    assert client.tokenize("ab") == await async_client.tokenize("ab") == [97, 98]
    assert client.list_models() == await async_client.list_models()
    assert [model.name for model in client.list_models()] == ["m"]
    assert (client.cancel("running"), await async_client.cancel("other")) == (True, False)
    assert client.describe() == await async_client.describe()
    assert (client.describe().uptime_s, client.describe().metrics) == (1.5, {"accepted_total": 3.0})


def test_leaving_a_blocking_stream_cancels_the_request(served: tuple[ScriptedGateway, str], client: WeirClient) -> None:
    served[0].never_ends = True
    chunks = client.generate("x")
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert served[0].was_cancelled.wait(5)


async def test_leaving_an_asyncio_stream_cancels_the_request(
    served: tuple[ScriptedGateway, str], async_client: AsyncWeirClient
) -> None:
    served[0].never_ends = True
    chunks = async_client.generate("x")
    await anext(chunks)
    await chunks.aclose()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(served[0].was_cancelled.wait, 5)


async def test_nobody_at_the_address_is_unavailable(served: tuple[ScriptedGateway, str]) -> None:
    with WeirClient("127.0.0.1:1") as client, pytest.raises(Unavailable):
        list(client.generate("x"))
    async with AsyncWeirClient("127.0.0.1:1") as async_client:
        with pytest.raises(Unavailable):
            await async_client.list_models()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (GenerateOptions(top_k=-1), "top_k"),
        (GenerateOptions(seed=-1), "seed"),
        (GenerateOptions(seed=2**64), "seed"),
        (GenerateOptions(max_tokens=-1), "max_tokens"),
        (GenerateOptions(stop_token_ids=(1, -2)), "stop_token_ids[1]"),
    ],
)
def test_numbers_that_the_wire_cannot_carry_are_named(client: WeirClient, options: GenerateOptions, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.generate("x", options)
    assert [violation.field for violation in refused.value.violations] == [field]
    with pytest.raises(InvalidRequest, match=r"token_ids\[1\]: is -7"):
        client.generate([1, -7])


def test_texts_that_the_wire_cannot_carry_are_named(client: WeirClient) -> None:
    torn = "ab\ud800"  # half of a character, as JSON and file names can have it
    for call, field in (
        (lambda: client.generate(torn), "text"),
        (lambda: client.chat([Turn("user", "x"), Turn("user", torn)]), r"messages\[1\].content"),
        (lambda: client.generate("x", GenerateOptions(stop=("x", torn))), r"stop\[1\]"),
        (lambda: client.generate("x", GenerateOptions(cache_salt=torn)), "cache_salt"),
        (lambda: client.tokenize(torn), "text"),
        (lambda: client.cancel(torn), "request_id"),
    ):
        with pytest.raises(InvalidRequest, match=rf"^{field}: has '\\ud800' at 2; must be valid Unicode"):
            call()
