"""Pages outlive the whole stack in files: what one stack computed another one reads, with the same tokens."""

import asyncio
from pathlib import Path

import pytest

from weir.kv.geometry import PAGE_TOKENS
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

pytestmark = pytest.mark.stack

LENGTHS = (90, 200, 333, 640)
DAMAGED_TOKENS = 320
MAX_TOKENS = 12


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return [seed, *((seed * 7919 + index * index * 31) % 400 for index in range(num_tokens - 1))]


async def answers(stack: Stack, prompts: list[list[int]]) -> list[StreamRecord]:
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        requests = [greedy_request(ids, max_tokens=MAX_TOKENS, ignore_eos=True) for ids in prompts]
        for request in requests:
            request.options.sampling.logprobs = 1
        records = await asyncio.gather(*(stream(stub, request) for request in requests))
    assert all(len(record.token_ids) == len(record.logprobs) == MAX_TOKENS for record in records), records
    return list(records)


def told(stack: Stack, name: str) -> float:
    return stack.metric("transfer", f"page_files_{name}")


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def wait_until_written(stack: Stack, folder: Path, num_pages: int) -> set[Path]:
    wait_until(lambda: told(stack, "written_pages_total") >= num_pages, timeout_s=30, what="the pages are in files")
    return files_in(folder)


def seen(records: list[StreamRecord]) -> list[tuple[list[int], list[float]]]:
    return [(record.token_ids, record.logprobs) for record in records]


async def test_another_stack_goes_on_from_the_pages_of_one_that_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    flags = ("--load", "dummy", "--model-shape", "tiny", "--arena-bytes", "64MiB", "--page-files-dir", str(folder))
    stack = Stack(tmp_path / "run", flags=flags)
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS, start=1)]
    harmed = prompt(9, DAMAGED_TOKENS)
    with stack:
        computed = await answers(stack, prompts)
        assert stack.metric("prefill", "prompt_tokens_cached_total") == 0
        before = wait_until_written(stack, folder, sum(length // PAGE_TOKENS for length in LENGTHS))
        [unharmed] = await answers(stack, [harmed])
        wait_until_written(stack, folder, len(before) + DAMAGED_TOKENS // PAGE_TOKENS)
    written = files_in(folder) - before
    assert len(written) >= DAMAGED_TOKENS // PAGE_TOKENS

    with stack:
        loaded = await answers(stack, prompts)
        assert seen(loaded) == seen(computed)
        assert told(stack, "loaded_pages_total") == sum((length - 1) // PAGE_TOKENS for length in LENGTHS)
        assert told(stack, "loads_failed_total") == 0
        path = sorted(written)[7]
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        assert seen(await answers(stack, [harmed])) == seen([unharmed])
        assert [told(stack, "damaged_total"), told(stack, "loads_failed_total")] == [1, 1]
        assert not stack.describe(stack.processes("transfer")[0]).integrity_errors
