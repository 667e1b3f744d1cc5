"""Bodies of `/v1/responses`: what is taken, what is refused, and by which name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.errors import InvalidRequest
from weir.core.grammar import Grammar
from weir_gateway.frontends.adapter_schema import MAX_VIOLATIONS
from weir_gateway.frontends.responses.schema import LOGPROBS_INCLUDE, AskedResponse, ResponsesBody, asked_response
from weir_gateway.requests.client_request import ClientRequest, Conversation

TOOL = {"type": "function", "name": "look", "parameters": {}}
NEW_TOOL = {"type": "a_type_of_next_year"}


def asked(**fields: Any) -> AskedResponse:
    return asked_response(ResponsesBody.model_validate({"input": "x", **fields}))


def turns_of(request: ClientRequest) -> list[tuple[str, str]]:
    assert isinstance(request.prompt, Conversation)
    return [(turn["role"], turn["content"]) for turn in request.prompt.messages]


def refused(**fields: Any) -> str:
    """The one field that is."""
    with pytest.raises(InvalidRequest) as error:
        asked(**fields)
    [violation] = error.value.violations
    return violation.field


def test_instructions_come_first_then_the_previous_turns_then_the_input() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
    ]
    request = asked(input=items, instructions="i").client_request(({"role": "user", "content": "before"},), "")
    expected = [("system", "i"), ("user", "before"), ("system", "d"), ("user", "ab"), ("assistant", "c")]
    assert turns_of(request) == expected


def test_an_answer_is_held_to_the_format_of_its_text() -> None:
    form = {"type": "json_schema", "name": "x", "strict": False, "schema": {"type": "null"}}
    request = asked(text={"format": form}).client_request((), "")
    assert request.options.grammar == Grammar.json_schema({"type": "null"})
    assert request.names["grammar"] == "text.format.schema"
    assert asked(text={"format": {"type": "json_object"}}).grammar == Grammar.json_object()
    assert asked(text={"format": {"type": "text"}}).grammar is None


def test_each_number_arrives_at_its_option() -> None:
    request = asked(
        max_output_tokens=7,
        temperature=0.25,
        top_p=0.5,
        top_logprobs=2,
        include=[LOGPROBS_INCLUDE],
        top_k=3,
        seed=11,
        lane="batch",
        deadline_ms=900,
        cache_prompt=False,
        stream=True,
    ).client_request((), "name")
    options = request.options
    assert (options.max_tokens, options.temperature, options.top_p, options.logprobs) == (7, 0.25, 0.5, 2)
    assert (options.top_k, options.seed, options.lane, options.deadline_ms) == (3, 11, "batch", 900)
    assert options.skips_prefix_cache
    assert (request.is_stream, request.correlation_id) == (True, "name")
    assert request.names["max_tokens"] == "max_output_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": None},
        {"reasoning": {"effort": "none", "summary": "auto"}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"truncation": "disabled"},
        {"background": False},
        {"include": []},
        {"include": ["reasoning.encrypted_content"]},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [TOOL, NEW_TOOL], "tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"top_logprobs": 0},
        {"conversation": None},
        {"client_metadata": {"a": "b"}, "prompt_cache_key": "k", "service_tier": "auto", "user": "u"},
        {"stream_options": {"include_obfuscation": False}},
        {"metadata": {"k" * 64: "v" * 512}},
    ],
    ids=str,
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert turns_of(asked(**fields).client_request((), "")) == [("user", "x")]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [NEW_TOOL], "tool_choice": "auto"}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "x"}]}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strictly": True}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": [1]}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stop": "x"}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"maxOutputTokens": 3}, "maxOutputTokens"),
        ({"n": 2}, "n"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "look", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": "5"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "custom_tool_call"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": ["message"], "id": "msg_1"}]}, "input[0]"),
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields) == field


def test_what_nobody_here_knows_is_ignored_and_named_or_refused() -> None:
    assert asked(of_next_year=1).ignored_fields == ("of_next_year",)
    with pytest.raises(InvalidRequest, match="of_next_year"):
        asked_response(ResponsesBody.model_validate({"input": "x", "of_next_year": 1}), "refuse")


def test_reasoning_of_earlier_answers_is_not_shown_to_the_model_again() -> None:
    items = [{"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": "x"}]
    assert turns_of(asked(input=items).client_request((), "")) == [("user", "x")]


def test_without_input_a_request_goes_on_from_the_previous_answer_alone() -> None:
    request = asked(input=None, previous_response_id="resp_1").client_request(
        ({"role": "assistant", "content": "a"},), ""
    )
    assert turns_of(request) == [("assistant", "a")]


def test_of_a_body_with_very_many_faults_a_few_are_told() -> None:
    items = [{"role": "user", "content": [{"type": "input_image"}] * 1000}] * 1000
    with pytest.raises(InvalidRequest) as error:
        asked(input=items)
    assert len(error.value.violations) == MAX_VIOLATIONS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "text"]), inner)
    ),
    max_leaves=12,
)


@given(JSON, JSON, JSON)
def test_whatever_input_tools_and_choice_are_they_are_taken_or_refused(items: Any, tools: Any, choice: Any) -> None:
    body = {"input": items, "tools": tools if isinstance(tools, list) else None, "tool_choice": choice}
    violations, texts = [], []
    try:
        texts = turns_of(asked(**body).client_request((), ""))
    except InvalidRequest as error:
        violations = [violation.field.split("[")[0] for violation in error.violations]
    assert set(violations) <= {"input", "tools", "tool_choice"}
    assert all(isinstance(text, str) for _, text in texts)
