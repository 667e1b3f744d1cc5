"""The split is real: prefill workers compute prompts, decode workers write answers, and no byte moves between."""

import asyncio

import pytest

from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

COUNTERS = {
    "prefill": ("prompt_tokens_computed_total", "prompt_tokens_cached_total", "decode_steps_total", "handed_off_total"),
    "decode": ("prompt_tokens_computed_total", "decode_steps_total", "taken_over_total"),
    "transfer": ("handoffs_total", "handoff_bytes_copied_total"),
}


def read_counters(stack: Stack) -> dict[tuple[str, str], float]:
    return {(role, name): stack.metric(role, name) for role, names in COUNTERS.items() for name in names}


async def test_counters_prove_the_split_and_that_no_byte_was_copied(stack: Stack) -> None:
    before = read_counters(stack)
    prompts = [[1000 + number] * (10 + 37 * number) for number in range(6)]
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        records = await asyncio.gather(
            *(stream(stub, greedy_request(ids, max_tokens=5, ignore_eos=True)) for ids in prompts)
        )
    assert [len(record.token_ids) for record in records] == [5] * len(prompts)
    after = read_counters(stack)
    change = {key: after[key] - before[key] for key in after}

    assert change["decode", "prompt_tokens_computed_total"] == 0
    assert change["prefill", "decode_steps_total"] == 0
    num_cached = change["prefill", "prompt_tokens_cached_total"]
    assert change["prefill", "prompt_tokens_computed_total"] + num_cached == sum(len(ids) for ids in prompts)
    assert change["decode", "decode_steps_total"] > 0
    assert change["prefill", "handed_off_total"] == change["decode", "taken_over_total"] == len(prompts)
    assert change["transfer", "handoffs_total"] == len(prompts)
    assert change["transfer", "handoff_bytes_copied_total"] == 0
