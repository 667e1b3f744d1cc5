"""A submit carries the hashes by which workers and arenas know the pages, and a deadline that counts from now."""

from dataclasses import replace

from tests.unit.gateway.fake_model import byte_model
from tests.unit.gateway.fake_scheduler import SCOPE
from tests.unit.gateway.test_request_state import make_state

from weir.core.clock import ManualClock
from weir.core.options import GenerateOptions
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.prefixes import page_hashes, prefix_seed
from weir_gateway.driving.scheduler_port import prompt_page_hashes, submit_message
from weir_gateway.requests.client_request import GRPC_NAMES, ClientRequest, Operation, Text
from weir_gateway.requests.validation import CheckedRequest, Limits, check_prompt

PROMPT = [number % 200 for number in range(3 * PAGE_TOKENS + 5)]
OPTIONS = GenerateOptions(max_tokens=4)


def checked(options: GenerateOptions = OPTIONS, *, digest: str = "d", salt: str = "") -> CheckedRequest:
    client_request = ClientRequest(Operation.TEXT_COMPLETION, Text("x"), GRPC_NAMES, options)
    model = replace(byte_model(), digest=digest)
    return check_prompt(client_request, model, Limits(), PROMPT, replace(SCOPE, cache_salt=salt))


async def test_a_submit_carries_the_first_bytes_of_the_workers_hashes_of_all_full_pages() -> None:
    expected = page_hashes(PROMPT, prefix_seed("d", salt="team"))
    packed = await prompt_page_hashes(checked(salt="team"))
    assert [packed[start : start + 8] for start in range(0, len(packed), 8)] == [one[:8] for one in expected]
    assert len(expected) == 3
    assert packed != await prompt_page_hashes(checked(salt="other"))


async def test_a_prompt_that_takes_nothing_from_the_cache_has_no_hashes() -> None:
    assert await prompt_page_hashes(checked(replace(OPTIONS, skips_prefix_cache=True))) == b""
    assert await prompt_page_hashes(checked(replace(OPTIONS, prompt_logprobs=0))) == b""
    assert await prompt_page_hashes(checked(digest="")) == b""


async def test_the_deadline_that_the_scheduler_gets_counts_from_now() -> None:
    state = make_state([], ManualClock(), deadline_at_s=10.0)
    deadlines_ms = [submit_message(state, "g", now_s).deadline_ms for now_s in (0.0, 9.5, 14.5)]
    assert deadlines_ms == [10_000, 500, 1]
    assert submit_message(make_state([], ManualClock()), "g", 0.0).deadline_ms == 0
