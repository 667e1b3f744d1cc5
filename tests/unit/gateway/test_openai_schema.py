"""Whatever bytes come: a client_request, or InvalidRequest with named fields."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.errors import InvalidRequest
from weir_gateway.frontends.openai.schema import ChatBody, CompletionBody, chat_request, completion_request, parse_body
from weir_gateway.requests.client_request import ClientRequest

NAMES = (
    *("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop"),
    *("seed", "top_k", "ignore_eos", "stop_token_ids", "lane", "logprobs", "tools", "logit_bias", "echo", "unheard"),
)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def read_completion(raw: bytes) -> ClientRequest:
    return completion_request(parse_body(CompletionBody, raw), "id", "ignore").client_request


def read_chat(raw: bytes) -> ClientRequest:
    return chat_request(parse_body(ChatBody, raw), "id", "ignore").client_request


def read(raw: bytes) -> tuple[list[ClientRequest], list[InvalidRequest]]:
    """The client_requests that the bytes are, and the refusals; nothing else may be raised on the way."""
    client_requests, refusals = [], []
    for read_client_request in (read_completion, read_chat):
        try:
            client_requests.append(read_client_request(raw))
        except InvalidRequest as refusal:
            refusals.append(refusal)
    return client_requests, refusals


def assert_refusals_name_fields(raw: bytes) -> None:
    for refusal in read(raw)[1]:
        assert refusal.violations
        assert all(0 < len(violation.field) <= 200 for violation in refusal.violations)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read(raw: bytes) -> None:
    assert_refusals_name_fields(raw)


@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=8))
def test_random_fields_are_refused_or_read(body: dict[str, Any]) -> None:
    assert_refusals_name_fields(json.dumps(body).encode())


def test_a_sound_body_is_read() -> None:
    [client_request], _ = read(b'{"prompt": [1, 2], "stop": "x", "stream": true}')
    assert (client_request.options.stop, client_request.is_stream, client_request.correlation_id) == (
        ("x",),
        True,
        "id",
    )


def test_a_token_has_one_bias() -> None:
    assert read_completion(b'{"prompt": "x", "logit_bias": {"0": 2, "50": 1}}').options.logit_bias == ((0, 2), (50, 1))
    with pytest.raises(InvalidRequest, match="logit_bias: '05' is no token id"):
        read_completion(b'{"prompt": "x", "logit_bias": {"5": 1, "05": 2}}')
