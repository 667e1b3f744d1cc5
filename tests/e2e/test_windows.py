"""A model that sees a window only, through a whole stack: a long context takes the pages of its window, from worker to
worker and after a kill, and its tokens are those of transformers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import gguf
import grpc
import pytest
import torch
from tests.unit.model.architectures import PHI3, PHI3_CHANGES, Variant, save_variant
from tests.unit.model.gguf_copy import write_gguf
from tests.unit.model.tiny import TinyLlama, prompt_ids

from weir.kv.geometry import ATTENTION_BLOCK_TOKENS, PAGE_TOKENS, first_page_read, num_pages_for
from weir.testing.load import StreamRecord, follow, greedy_request, open_stub
from weir.testing.stack import ProcessView, Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(300)]

WINDOW, CONTEXT_TOKENS, CHUNK_TOKENS = 160, 1408, 128
NUM_PROMPT_TOKENS, NUM_TOKENS = 900, 400
MODEL = {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT_TOKENS, "num_hidden_layers": 6}
FLAGS = ("--precision", "fp32", "--arena-bytes", str(128 << 20))
SPLIT = {"WEIR_SERVES_LOCALLY": "false", "WEIR_CHUNK_TOKENS": str(CHUNK_TOKENS), "WEIR_ADOPTER_WAIT_S": "30"}


def greedy_ids(tiny: TinyLlama, ids: list[int]) -> list[int]:
    """By transformers, which would take some tokens of the prompt for padding by itself."""
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        made = tiny.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            suppress_tokens=None,
            eos_token_id=-1,
            do_sample=False,
        )
    found: list[int] = made[0, len(ids) :].tolist()
    return found


async def answer(stack: Stack, ids: list[int]) -> tuple[StreamRecord, list[float]]:
    """With what its decode worker held meanwhile."""
    held: list[float] = []
    async with answering(stack, ids) as (record, stream):
        while not stream.done():
            held += [num_pages for _, num_pages in await asyncio.to_thread(busy_decoders, stack)]
        await stream
    return record, held


async def answer_amid_a_kill(stack: Stack, ids: list[int]) -> tuple[StreamRecord, int]:
    """Of its decode worker, when pages have fallen behind the window since the prompt; with how often it was asked for.
    Asks again where the kill came too late: on a machine with much to do a worker may be far ahead of what is seen."""
    for num_asked in range(1, 6):
        async with answering(stack, ids) as (record, stream):
            busy: list[tuple[ProcessView, float]] = []
            while not (busy or stream.done()):
                busy = await asyncio.to_thread(busy_decoders, stack)
            while len(record.token_ids) <= ATTENTION_BLOCK_TOKENS and not stream.done():
                await asyncio.wait((stream,), timeout=0.001)
            if busy:
                stack.kill(busy[0][0])
            await stream
        await asyncio.to_thread(wait_until, partial(is_whole, stack, busy[:1]), timeout_s=60, what="nothing is left")
        if await asyncio.to_thread(stack.metric, "gateway", "adoptions_total"):
            return record, num_asked
    raise AssertionError(f"none of {num_asked} answers was adopted by the other decode worker amid its tokens")


def is_whole(stack: Stack, killed: list[tuple[ProcessView, float]]) -> bool:
    return all(stack.has_restarted(process) for process, _ in killed) and stack.is_idle()


@asynccontextmanager
async def answering(stack: Stack, ids: list[int]) -> AsyncIterator[tuple[StreamRecord, "asyncio.Task[bool]"]]:
    channel, stub = open_stub(stack.grpc_address)
    record = StreamRecord()
    async with channel:
        call = stub.Generate(greedy_request(ids, max_tokens=NUM_TOKENS, ignore_eos=True), timeout=120)
        yield record, asyncio.create_task(follow(call, record))


def busy_decoders(stack: Stack) -> list[tuple[ProcessView, float]]:
    gauges = [(process, stack.metrics(process)) for process in stack.processes("decode") if process.state == "ready"]
    return [(process, metrics["num_used_pages"]) for process, metrics in gauges if metrics["num_used_pages"]]


def test_a_long_context_takes_the_pages_of_its_window(tmp_path: Path) -> None:
    tiny = save_variant(tmp_path / "hf", Variant("phi3", PHI3, PHI3_CHANGES | MODEL))
    path = tmp_path / "tiny-phi3.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32)
    ids = prompt_ids(NUM_PROMPT_TOKENS, seed=5)
    expected = greedy_ids(tiny, ids)
    flags = ("--model", str(path), *FLAGS)
    with Stack(tmp_path / "run", num_decode=2, flags=flags, environ=SPLIT) as stack:
        record, held = asyncio.run(answer(stack, ids))
        given_back = [stack.metric(role, "pages_behind_window_total") for role in ("prefill", "decode")]
        num_handed_off = stack.metric("prefill", "handed_off_total")
        wait_until(stack.is_idle, timeout_s=60, what="nothing is left")
        killed, num_asked = asyncio.run(answer_amid_a_kill(stack, ids))
        adopted = [stack.metric("gateway", "adoptions_total"), stack.metric("decode", "adopted_total")]
        computed = stack.metric("prefill", "prompt_tokens_computed_total")
        assert stack.integrity_errors() == []
    assert (record.code, record.token_ids) == (grpc.StatusCode.OK, expected)
    assert num_handed_off == 1
    last = first_page_read(NUM_PROMPT_TOKENS + NUM_TOKENS - 2, WINDOW)
    assert given_back == [first_page_read(NUM_PROMPT_TOKENS, WINDOW), last - first_page_read(NUM_PROMPT_TOKENS, WINDOW)]
    assert 0 < max(held) <= num_pages_for(WINDOW + ATTENTION_BLOCK_TOKENS) + 1
    assert (killed.code, killed.token_ids, killed.num_index_errors) == (grpc.StatusCode.OK, expected, 0)
    assert adopted == [1, 1]
    uncached = NUM_PROMPT_TOKENS - (NUM_PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert computed == NUM_PROMPT_TOKENS + num_asked * uncached, "all else was cached"
