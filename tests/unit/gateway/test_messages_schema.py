"""Bodies of `/v1/messages`: what is taken, what is refused, and by which name."""

from typing import Any

import pytest
from pydantic import ValidationError

from weir.core.errors import InvalidRequest
from weir_gateway.frontends.anthropic.schema import CountTokensBody, MessagesBody, count_request, messages_request
from weir_gateway.requests.client_request import ClientRequest, Conversation

USER = {"role": "user", "content": "x"}
TOOL = {"name": "look", "input_schema": {}}


def asked(**fields: Any) -> ClientRequest:
    body = MessagesBody.model_validate({"max_tokens": 5, "messages": [USER], **fields})
    return messages_request(body, "name").client_request


def turns_of(prompt: object) -> list[tuple[str, str]]:
    assert isinstance(prompt, Conversation)
    return [(turn["role"], turn["content"]) for turn in prompt.messages]


def refused(**fields: Any) -> str:
    """The one field that is."""
    with pytest.raises(InvalidRequest) as error:
        asked(**fields)
    [violation] = error.value.violations
    return violation.field


def test_the_system_comes_first_and_blocks_are_joined_as_they_are() -> None:
    cached = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    request = asked(
        system=[{"type": "text", "text": "a"}, cached],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "1"}, cached]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "2"}]},
            {"role": "user", "content": "3"},
        ],
    )
    assert turns_of(request.prompt) == [("system", "ab"), ("user", "1b"), ("assistant", "2"), ("user", "3")]


def test_each_number_arrives_at_its_option() -> None:
    request = asked(
        temperature=0.25, top_p=0.5, top_k=3, stop_sequences=["END", "."], stream=True, lane="batch", seed=2
    )
    options = request.options
    assert (options.max_tokens, options.temperature, options.top_p, options.top_k) == (5, 0.25, 0.5, 3)
    assert (options.stop, options.lane, options.seed) == (("END", "."), "batch", 2)
    assert (request.is_stream, request.correlation_id) == (True, "name")
    assert request.names["stop"] == "stop_sequences"


def test_an_answer_goes_on_with_the_assistants_turn_that_the_messages_end_with() -> None:
    prompt = asked(messages=[USER, {"role": "assistant", "content": "so"}]).prompt
    assert isinstance(prompt, Conversation)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    prompt = asked().prompt
    assert isinstance(prompt, Conversation)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (True, False)


def test_what_nobody_here_knows_is_ignored_and_named_or_refused() -> None:
    body = MessagesBody.model_validate({"max_tokens": 5, "messages": [USER], "of_next_year": 1})
    assert messages_request(body, "").ignored_fields == ("of_next_year",)
    with pytest.raises(InvalidRequest, match="of_next_year"):
        messages_request(body, "", "refuse")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": {"type": "auto"}},
        {"tools": [TOOL, {"type": "of_next_year"}], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}},
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        {"mcp_servers": [], "container": None, "output_config": {}},
        {"system": None},
    ],
    ids=str,
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert turns_of(asked(**fields).prompt) == [("user", "x")]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": ["none"]}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "high"}}, "output_config"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_sequence": ["x"]}, "stop_sequence"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[1].content[0].tool_use_id",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields) == field


def test_a_message_needs_its_number_of_tokens_and_a_count_does_not() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        MessagesBody.model_validate({"messages": [USER]})
    request = count_request(CountTokensBody.model_validate({"messages": [USER], "system": "s"})).request
    assert turns_of(request.prompt) == [("system", "s"), ("user", "x")]


def test_a_count_refuses_what_the_message_would() -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        count_request(CountTokensBody.model_validate({"messages": [USER], "tools": [TOOL, TOOL]}))
