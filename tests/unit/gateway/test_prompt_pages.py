"""The hashes that a submit carries are those by which workers and arenas know the pages."""

from dataclasses import replace

from tests.unit.gateway.fake_model import byte_model
from tests.unit.gateway.fake_scheduler import STANDING

from weir.core.options import GenerateOptions
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.prefixes.hashing import page_hashes, prefix_seed
from weir_gateway.draft import GRPC_NAMES, Operation, RequestDraft, Text
from weir_gateway.requests.prompt_pages import pages_of
from weir_gateway.requests.validation import CheckedRequest, Limits, check_prompt

PROMPT = [number % 200 for number in range(3 * PAGE_TOKENS + 5)]
OPTIONS = GenerateOptions(max_tokens=4)


def checked(options: GenerateOptions = OPTIONS, *, digest: str = "d", salt: str = "") -> CheckedRequest:
    draft = RequestDraft(Operation.TEXT_COMPLETION, Text("x"), GRPC_NAMES, options)
    model = replace(byte_model(), digest=digest)
    return check_prompt(draft, model, Limits(), PROMPT, replace(STANDING, cache_salt=salt))


async def test_a_submit_says_the_first_bytes_of_the_workers_hashes_of_all_full_pages() -> None:
    expected = page_hashes(PROMPT, prefix_seed("d", salt="team"))
    packed = await pages_of(checked(salt="team"))
    assert [packed[start : start + 8] for start in range(0, len(packed), 8)] == [one[:8] for one in expected]
    assert len(expected) == 3
    assert packed != await pages_of(checked(salt="other"))


async def test_a_prompt_that_takes_nothing_from_the_cache_says_nothing() -> None:
    assert await pages_of(checked(replace(OPTIONS, skips_prefix_cache=True))) == b""
    assert await pages_of(checked(replace(OPTIONS, prompt_logprobs=0))) == b""
    assert await pages_of(checked(digest="")) == b""
