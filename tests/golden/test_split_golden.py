"""Through real prefill and decode workers the tokens are those of the golden file, however the work is cut up."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import xor
from pathlib import Path

import pytest
from tests.golden.generation import ALLOWED_DIFFERENCES, Golden, load_golden

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

SAMPLE = (0, 22, 35, 52)


@contextmanager
def stack_of(runtime_dir: Path, num_each: int, chunk_tokens: int) -> Iterator[Stack]:
    environ = {"WEIR_CHUNK_TOKENS": str(chunk_tokens), "WEIR_PRECISION": "fp32", "WEIR_SERVES_LOCALLY": "false"}
    with Stack(runtime_dir, num_prefill=num_each, num_decode=num_each, environ=environ) as stack:
        yield stack


async def answers(address: str, prompts: Sequence[Golden], *, at_once: int) -> list[StreamRecord]:
    gate = asyncio.Semaphore(at_once)
    channel, stub = open_stub(address)

    async def one(prompt: Golden) -> StreamRecord:
        async with gate:
            request = greedy_request(prompt.prompt_ids, max_tokens=len(prompt.expected_ids), ignore_eos=True)
            request.options.skips_prefix_cache = True  # every run is to compute every prompt
            return await stream(stub, request, timeout_s=600)

    async with channel:
        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def check_tokens(prompts: Sequence[Golden], records: Sequence[StreamRecord], num_allowed: int) -> None:
    """The one prompt that may differ is that of the runner's own test, where two logits lie within its margin."""
    assert [record for record in records if record.num_terminal_events != 1 or record.finish_reasons == []] == []
    different = [
        (prompt.name, place)
        for prompt, record in zip(prompts, records, strict=True)
        if (place := first_difference(prompt.expected_ids, record.token_ids)) is not None
    ]
    print(f"{len(prompts) - len(different)} of {len(prompts)} prompts equal; different: {different}")
    assert len(different) <= num_allowed


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    if len(expected) != len(found):
        return min(len(expected), len(found))
    return next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)


def check_split(stack: Stack, prompts: Sequence[Golden], num_runs: int) -> None:
    """Every prompt was computed by prefill workers, every answer by decode workers, and the pages are the same."""
    num_requests = num_runs * len(prompts)
    assert stack.metric("decode", "prompt_tokens_computed_total") == 0
    assert stack.metric("prefill", "decode_steps_total") == 0
    assert stack.metric("prefill", "prompt_tokens_computed_total") == num_runs * sum(
        len(prompt.prompt_ids) for prompt in prompts
    )
    assert stack.metric("prefill", "handed_off_total") == num_requests
    assert stack.metric("decode", "taken_over_total") == num_requests
    assert stack.metric("transfer", "handoffs_total") == num_requests
    assert stack.metric("transfer", "handoff_bytes_copied_total") == 0
    assert page_fingerprint(stack, "prefill") == page_fingerprint(stack, "decode") != 0
    assert stack.integrity_errors() == []


def page_fingerprint(stack: Stack, role: str) -> int:
    """Of requests and the ids of their pages, over all workers of a role."""
    workers = stack.processes(role)
    return reduce(xor, (int(stack.metrics(worker)["page_fingerprint"]) for worker in workers))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_each", "chunk_tokens", "at_once"),
    [
        (2, 16, len(SAMPLE)),
        pytest.param(1, 64, len(SAMPLE), marks=pytest.mark.long),
        pytest.param(1, 512, 1, marks=pytest.mark.long),
    ],
    ids=["2+2, chunks of 16, at once", "1+1, chunks of 64, at once", "1+1, chunks of 512, alone"],
)
def test_a_sample_through_the_pools_equals_transformers(
    tmp_path: Path, num_each: int, chunk_tokens: int, at_once: int
) -> None:
    golden = load_golden()
    prompts = [golden[number] for number in SAMPLE]
    with stack_of(tmp_path, num_each, chunk_tokens) as stack:
        records = asyncio.run(answers(stack.grpc_address, prompts, at_once=at_once))
        check_tokens(prompts, records, num_allowed=0)
        check_split(stack, prompts, num_runs=1)


@pytest.mark.golden
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
@pytest.mark.parametrize("num_each", [1, 2], ids=["1+1", "2+2"])
def test_every_prompt_through_the_pools_equals_transformers(tmp_path: Path, num_each: int, chunk_tokens: int) -> None:
    prompts = load_golden()
    with stack_of(tmp_path, num_each, chunk_tokens) as stack:
        alone = asyncio.run(answers(stack.grpc_address, prompts, at_once=1))
        check_tokens(prompts, alone, ALLOWED_DIFFERENCES)
        together = asyncio.run(answers(stack.grpc_address, prompts, at_once=len(prompts)))
        check_tokens(prompts, together, ALLOWED_DIFFERENCES)
        assert [record.token_ids for record in together] == [record.token_ids for record in alone]
        check_split(stack, prompts, num_runs=2)
