"""OpenAI's Responses API and Anthropic's Messages API, with their own clients, against a real stack."""

import json

import anthropic
import httpx
import openai
import pytest
from anthropic.types import MessageParam, TextBlock

from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

MODEL = "smollm2-135m"
QUESTION = "What color is the sky on a clear day?"
MESSAGES: list[MessageParam] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def claude(stack: Stack) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.http_url, api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def chat_answer(client: openai.OpenAI) -> str:
    """What `/v1/chat/completions` says, greedily: the one answer of all three APIs."""
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, temperature=0
    )
    return answer.choices[0].message.content or ""


def test_a_response_is_the_chats_answer_whole_and_streamed(client: openai.OpenAI, chat_answer: str) -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=24, temperature=0)
    assert "blue" in whole.output_text
    assert whole.output_text == chat_answer
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(
        client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=24, temperature=0, stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == chat_answer
    assert events[-1].type in {"response.completed", "response.incomplete"}


def test_at_its_number_of_tokens_a_response_is_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=3, temperature=0)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage is not None
    assert cut.usage.output_tokens == 3


def test_a_response_is_retrieved_gone_on_from_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input=QUESTION, instructions="Answer in one sentence.", max_output_tokens=24, temperature=0
    )
    assert client.responses.retrieve(first.id).output_text == first.output_text
    follow_up = "And at night?"
    second = client.responses.create(
        model=MODEL, input=follow_up, previous_response_id=first.id, max_output_tokens=12, temperature=0
    )
    by_hand = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": follow_up},
        ],
        max_tokens=12,
        temperature=0,
    )
    assert second.output_text == by_hand.choices[0].message.content
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert missing.value.param == "previous_response_id"


def test_wrong_fields_of_a_response_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as background:
        client.responses.create(model=MODEL, input="x", background=True)
    assert background.value.param == "background"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="no-such-model", input="x")


def test_a_message_is_the_chats_answer_whole_and_streamed(claude: anthropic.Anthropic, chat_answer: str) -> None:
    whole = claude.messages.create(model=MODEL, max_tokens=24, messages=MESSAGES, extra_body=GREEDY)
    [block] = whole.content
    assert isinstance(block, TextBlock)
    assert block.text == chat_answer
    with claude.messages.stream(model=MODEL, max_tokens=24, messages=MESSAGES, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == chat_answer
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_message_ends_at_its_tokens_or_at_a_stop_sequence(claude: anthropic.Anthropic, chat_answer: str) -> None:
    cut = claude.messages.create(model=MODEL, max_tokens=3, messages=MESSAGES, extra_body=GREEDY)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    word = chat_answer.split()[3]
    stopped = claude.messages.create(
        model=MODEL, max_tokens=24, messages=MESSAGES, stop_sequences=["\u2603", word], extra_body=GREEDY
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    [block] = stopped.content
    assert isinstance(block, TextBlock)
    assert block.text == chat_answer.partition(word)[0]


def test_a_message_goes_on_with_the_assistants_turn(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    begun: list[MessageParam] = [*MESSAGES, {"role": "assistant", "content": "On a clear day the sky is"}]
    message = claude.messages.create(model=MODEL, max_tokens=8, messages=begun, extra_body=GREEDY)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=begun,
        max_tokens=8,
        temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    [block] = message.content
    assert isinstance(block, TextBlock)
    assert block.text == chat.choices[0].message.content


def test_a_count_is_what_the_message_uses(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    message = claude.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_wrong_messages_are_refused_in_anthropics_form(stack: Stack, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model=MODEL, max_tokens=0, messages=MESSAGES)
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="no-such-model", max_tokens=1, messages=MESSAGES)
    assert missing.value.type == "not_found_error"
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        claude.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES, extra_body={"tools": tools})
    refused = httpx.post(f"{stack.http_url}/v1/messages", content=b"{", timeout=60)
    assert refused.status_code == 400
    assert json.loads(refused.content)["error"]["type"] == "invalid_request_error"
