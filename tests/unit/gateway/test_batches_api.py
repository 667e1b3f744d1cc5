"""`/v1/files` and `/v1/batches` with the official client, against a whole gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types import Batch
from tests.unit.gateway.world import World, open_world, with_batches

from weir.bus.configuration import AccessRules, TenantAccess
from weir.bus.messages import RefusalReason, SubmitReply
from weir.core.credentials import key_digest

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(with_batches(tmp_path)) as world:
        yield world


@pytest.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(world) as client:
        yield client


def client_of(world: World, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key=key, max_retries=0)


def chat(custom_id: str, **fields: object) -> dict[str, Any]:
    """A line as `vllm run-batch` reads it too."""
    body = {"model": "bytes", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def jsonl(*entries: object) -> bytes:
    return "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries).encode()


async def submit(client: openai.AsyncOpenAI, *entries: object, endpoint: Any = CHAT) -> Batch:
    file = await client.files.create(file=("in.jsonl", jsonl(*entries)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(120):  # a busy machine
        while (found := await client.batches.retrieve(batch.id)).status not in ENDED:  # noqa: ASYNC110 - HTTP
            await asyncio.sleep(0.02)
    return found


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_of_chats_is_answered_in_the_lane_for_batches(world: World, client: openai.AsyncOpenAI) -> None:
    made = await submit(client, *(chat(f"r{index}", lane="interactive") for index in range(20)))
    assert (made.status, made.completion_window) == ("in_progress", "24h")
    done = await ended(client, made)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (20, 20, 0)
    lines = await lines_of(client, done.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"r{index}" for index in range(20)]
    whole = await client.chat.completions.create(**chat("x")["body"])
    for line in lines:
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        body = line["response"]["body"]
        assert body["choices"] == whole.model_dump(exclude_unset=True)["choices"]
        assert body["id"] == f"chatcmpl-{line['response']['request_id']}"
    assert {one.lane for one in world.scheduler.submits[:20]} == {"batch"}
    assert world.metric("keys_kept") == 0, "nobody comes back for a line"
    assert world.metric("batch_lines_answered_total") == 20


async def test_completions_several_prompts_and_several_answers(client: openai.AsyncOpenAI) -> None:
    body = {"model": "bytes", "prompt": ["a", "b"], "max_tokens": 2, "n": 2}
    line = {"custom_id": "c", "method": "POST", "url": COMPLETIONS, "body": body}
    done = await ended(client, await submit(client, line, endpoint=COMPLETIONS))
    [answer] = await lines_of(client, done.output_file_id)
    assert len(answer["response"]["body"]["choices"]) == 4


async def test_bad_lines_are_named_and_refused_requests_have_their_status(client: openai.AsyncOpenAI) -> None:
    made = await submit(client, chat("good"), "{", chat("good"), chat("hot", temperature=9), chat("m", model="none"))
    assert made.errors is not None
    assert [entry.line for entry in made.errors.data or []] == [2, 3]
    done = await ended(client, made)
    assert done.request_counts is not None
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 4)
    bad, twice, hot, unknown = await lines_of(client, done.error_file_id)
    assert (bad["error"]["line"], twice["error"]["line"]) == (2, 3)
    assert (hot["custom_id"], hot["response"]["status_code"]) == ("hot", 400)
    assert "temperature" in hot["response"]["body"]["error"]["message"]
    assert unknown["response"]["status_code"] == 404


async def test_a_cancelled_batch_ends_and_nothing_of_it_runs_on(world: World, client: openai.AsyncOpenAI) -> None:
    made = await submit(client, *(chat(f"r{index}", max_tokens=5) for index in range(300)))
    assert (await client.batches.cancel(made.id)).status == "cancelling"
    done = await ended(client, made)
    assert done.status == "cancelled"
    assert done.request_counts is not None
    assert done.request_counts.completed + done.request_counts.failed == 300
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        await client.batches.cancel(made.id)


async def test_files_are_listed_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = [await client.files.create(file=(f"{index}.jsonl", b"x"), purpose="batch") for index in range(5)]
    listed = [one.id async for one in client.files.list(limit=2, order="asc")]
    assert sorted(listed) == sorted(one.id for one in made)
    assert (await client.files.retrieve(made[0].id)).to_dict() == made[0].to_dict()
    assert (await client.files.content(made[0].id)).content == b"x"
    assert (await client.files.delete(made[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(made[0].id)


async def test_batches_are_listed_in_pages(client: openai.AsyncOpenAI) -> None:
    made = [await submit(client, chat("r")) for _ in range(5)]
    assert {one.id async for one in client.batches.list(limit=2)} == {one.id for one in made}
    for one in made:
        await ended(client, one)


async def test_wrong_fields_are_named(world: World, client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=("f", jsonl(chat("r"))), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="31d")
    with pytest.raises(openai.NotFoundError, match="input_file_id"):
        await client.batches.create(input_file_id="file-no", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("f", b"x"), purpose="fine-tune")
    async with world.http_client() as http:
        assert (await http.post("/v1/files", content=b"x")).status_code == 400
        assert (await http.get("/v1/files?limit=0")).json()["error"]["param"] == "limit"


async def test_a_file_over_the_bound_is_refused_by_its_size(tmp_path: Path) -> None:
    async with open_world(with_batches(tmp_path, max_file_bytes=1 << 16)) as world, client_of(world) as client:
        with pytest.raises(openai.APIStatusError, match="batch_file_mb"):
            await client.files.create(file=("f", b"x" * (1 << 18)), purpose="batch")


async def test_a_tenant_sees_nothing_of_another(tmp_path: Path) -> None:
    keys = {"a": "a-key-of-32-characters-0123456789", "b": "b-key-of-32-characters-0123456789"}
    tenants = tuple(TenantAccess(name, key_digests=(key_digest(key),)) for name, key in keys.items())
    rules = AccessRules(
        epoch=1, lanes=("interactive", "batch"), default_lane="interactive", default_tenant="default", tenants=tenants
    )
    async with (
        open_world(with_batches(tmp_path), rules=rules) as world,
        client_of(world, keys["a"]) as own,
        client_of(world, keys["b"]) as other,
    ):
        done = await ended(own, await submit(own, chat("r")))
        assert done.status == "completed"
        for refused in (
            other.batches.retrieve(done.id),
            other.batches.cancel(done.id),
            other.files.content(done.output_file_id or ""),
            other.files.delete(done.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused
        assert (await other.batches.list()).data == []


async def test_a_gateway_without_a_store_says_so() -> None:
    async with open_world() as world, client_of(world) as client:
        with pytest.raises(openai.NotFoundError, match="batch_store is off"):
            await client.batches.list()


async def test_another_gateway_goes_on_with_a_batch_without_answering_a_line_twice(tmp_path: Path) -> None:
    async with open_world(with_batches(tmp_path)) as world, client_of(world) as client:
        made = await submit(client, *(chat(f"r{index}") for index in range(60)))
        await world.until(lambda: world.metric("batch_lines_answered_total") >= 10, "some lines are answered")
    async with open_world(with_batches(tmp_path)) as world, client_of(world) as client:
        done = await ended(client, made)
        assert done.status == "completed"
        lines = await lines_of(client, done.output_file_id)
        assert [line["custom_id"] for line in lines] == [f"r{index}" for index in range(60)]
        assert world.metric("batch_lines_answered_total") <= 50


async def test_lines_wait_for_the_first_worker_of_their_model(world: World, client: openai.AsyncOpenAI) -> None:
    unknown = SubmitReply(5, False, RefusalReason.NO_WORKER, "no worker yet", 0)
    world.scheduler.refusal = unknown
    made = await submit(client, chat("early"))
    await world.until(lambda: world.metric("batch_lines_retried_total") >= 1, "the line was tried")
    world.scheduler.refusal = None
    done = await ended(client, made)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)
