"""Which requests are the same under one idempotency key."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.gateway.fake_scheduler import SCOPE
from tests.unit.gateway.test_validation import GOOD, LIMITS, MODEL

from weir_gateway.keys.body import body_digest
from weir_gateway.requests.models import ServedModel
from weir_gateway.requests.validation import check_prompt


def digest_of(model: ServedModel = MODEL, **options: Any) -> bytes:
    request = replace(GOOD, options=replace(GOOD.options, seed=7, **options))
    return body_digest(check_prompt(request, model, LIMITS, [1, 2, 3], SCOPE))


def test_the_same_request_is_the_same_at_a_gateway_that_has_heard_of_smaller_workers() -> None:
    smaller = replace(MODEL, max_context_tokens=8)
    for options in (
        {"max_tokens": MODEL.max_context_tokens},
        {"max_tokens": None},
        {"max_tokens": 20, "min_tokens": 9},
    ):
        assert digest_of(smaller, **options) == digest_of(**options), options


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 9}, {"min_tokens": 2}, {"temperature": 0.5}, {"stop": ("end",)}, {"stop_token_ids": (5,)}],
    ids=str,
)
def test_what_changes_the_answer_makes_another_request(options: dict[str, Any]) -> None:
    assert digest_of(**options) != digest_of()
