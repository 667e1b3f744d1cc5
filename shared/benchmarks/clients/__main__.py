"""python -m benchmarks.clients http://127.0.0.1:8000

Wants openai, langchain, langchain-openai, litellm and anthropic, in an environment of their own: Weir needs none of
them. Each line is one call, with what its user sees, of errors their class. Calls of tools are forced, since the
built-in model seldom calls one by itself, and want a stack with --chat-template hermes.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import anthropic
import openai
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI, OpenAI
from litellm import completion, stream_chunk_builder
from pydantic import BaseModel

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "Name three rivers."}]
TIMEOUT_S = 300
MAX_SHOWN_CHARS = 160

Calls = dict[str, Callable[[], object]]


class River(BaseModel):
    """What a structured answer should be."""

    name: str


class Look(BaseModel):
    """The weather in a city."""

    city: str


def look_up(city: str) -> str:
    """The weather in a city."""
    return f"Sun in {city}."


def by_openai(base: str) -> Calls:
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="unused", timeout=TIMEOUT_S, max_retries=0)
    same: Any = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    chat: Any = {"messages": QUESTION, **same}
    response: Any = {"model": MODEL, "input": "Name three rivers.", "temperature": 0}
    parts = ["The capital of France is", "1 2 3"]

    def streamed_response() -> object:
        with client.responses.stream(**response) as stream:
            return [event.type for event in stream][-1], stream.get_final_response().status

    return {
        "models": lambda: [model.id for model in client.models.list()],
        "chat": lambda: client.chat.completions.create(**chat).choices[0].message.content,
        "chat, streamed": lambda: _joined(client.chat.completions.create(**chat, stream=True)),
        "completions, two prompts": lambda: [
            choice.text for choice in client.completions.create(prompt=parts, **same).choices
        ],
        "responses": lambda: client.responses.create(**response, max_output_tokens=16).output_text,
        "responses, streamed": streamed_response,
        "structured answer": lambda: client.chat.completions.parse(response_format=River, **chat),
        "embeddings": lambda: client.embeddings.create(model=MODEL, input="x"),
        **_tools_of_openai(client),
    }


def _tools_of_openai(client: openai.OpenAI) -> Calls:
    tool: Any = openai.pydantic_function_tool(Look, name="look_up")
    flat: Any = {"type": "function", **tool["function"]}
    asked: Any = {"model": MODEL, "messages": QUESTION, "tools": [tool], "temperature": 0, "max_tokens": 100}

    def streamed_as_whole() -> object:
        whole = client.chat.completions.create(**asked, tool_choice="required").choices[0].message
        with client.chat.completions.stream(**asked, tool_choice="required") as stream:
            streamed = stream.get_final_completion().choices[0].message
        calls = [
            [(call.function.name, call.function.arguments) for call in one.tool_calls or ()]
            for one in (whole, streamed)
        ]
        return "the same" if calls[0] == calls[1] and whole.content == streamed.content else calls

    def answered() -> object:
        first = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
        message = first.choices[0].message
        result: Any = {"role": "tool", "tool_call_id": (message.tool_calls or [])[0].id, "content": "Sun."}
        turns = [*QUESTION, message.to_dict(), result]
        return client.chat.completions.create(**{**asked, "messages": turns, "tool_choice": "none"}).choices[0].message

    def by_responses() -> object:
        same: Any = {"model": MODEL, "tools": [flat], "temperature": 0, "max_output_tokens": 100}
        first = client.responses.create(input="The weather in Rome?", tool_choice="required", **same)
        outputs: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "Sun."}
            for item in first.output
            if item.type == "function_call"
        ]
        second = client.responses.create(input=outputs, previous_response_id=first.id, tool_choice="none", **same)
        return [item.type for item in first.output], second.output_text

    named: Any = {"type": "function", "function": {"name": "look_up"}}
    return {
        "tools, named": lambda: client.chat.completions.create(**asked, tool_choice=named).choices[0],
        "tools, parsed": lambda: (
            client.chat.completions.parse(**asked, tool_choice="required").choices[0].message.tool_calls
        ),
        "tools, streamed as whole": streamed_as_whole,
        "tools, answered": answered,
        "tools, responses": by_responses,
    }


def by_langchain(base: str) -> Calls:
    own: Any = {"model": MODEL, "base_url": f"{base}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 16}
    own |= {"max_retries": 0, "timeout": TIMEOUT_S}
    chat, texts, longer = ChatOpenAI(**own), OpenAI(**own), ChatOpenAI(**{**own, "max_tokens": 100})
    both: Any = [Look, River]
    calls: Calls = {
        "invoke": lambda: chat.invoke("Name three rivers.").content,
        "stream": lambda: "".join(str(chunk.content) for chunk in chat.stream("Name three rivers.")),
        "completions, two prompts": lambda: [found[0].text for found in texts.generate(["1 2 3", "a b"]).generations],
        "bind_tools": lambda: longer.bind_tools([Look]).invoke("The weather in Rome?"),
        "bind_tools, any": lambda: longer.bind_tools(both, tool_choice="any").invoke("The weather in Rome?"),
        "bind_tools, strict": lambda: (
            longer.bind_tools([Look], tool_choice="Look", strict=True).invoke("Rome?").tool_calls
        ),
        "bind_tools, streamed": lambda: [
            chunk.tool_call_chunks
            for chunk in longer.bind_tools([Look], tool_choice="any").stream("The weather in Rome?")
        ],
        "agent": lambda: create_agent(longer, [look_up]).invoke({"messages": QUESTION})["messages"][-1].content,
    }
    for method in ("json_schema", "function_calling", "json_mode"):
        structured = longer.with_structured_output(River, method=method)
        calls[f"with_structured_output, {method}"] = partial(structured.invoke, "A river.")
    return calls


def by_litellm(base: str) -> Calls:
    same: Any = {"api_key": "unused", "messages": QUESTION, "max_tokens": 16, "temperature": 0, "timeout": TIMEOUT_S}
    same["num_retries"] = 0
    calls: Calls = {"anthropic/": partial(_content, model=f"anthropic/{MODEL}", api_base=base, **same)}
    for provider in ("openai", "hosted_vllm"):
        asked: Any = {"model": f"{provider}/{MODEL}", "api_base": f"{base}/v1", **same}
        calls[f"{provider}/"] = partial(_content, **asked)
        calls[f"{provider}/, streamed"] = partial(_streamed_content, **asked)
        calls[f"{provider}/, another model"] = partial(_content, **{**asked, "model": f"{provider}/none"})
    tool = {"type": "function", "function": {"name": "look_up", "parameters": Look.model_json_schema()}}
    called: Any = {**same, "tools": [tool], "tool_choice": "required", "max_tokens": 100}
    for provider, url in (("openai", f"{base}/v1"), ("hosted_vllm", f"{base}/v1"), ("anthropic", base)):
        forced: Any = {"model": f"{provider}/{MODEL}", "api_base": url, **called}
        calls[f"{provider}/, tools"] = partial(_calls, **forced)
        calls[f"{provider}/, tools streamed"] = partial(_streamed_calls, **forced)
    return calls


def by_anthropic(base: str) -> Calls:
    client = anthropic.Anthropic(base_url=base, api_key="unused", timeout=TIMEOUT_S, max_retries=0)
    same: Any = {"model": MODEL, "max_tokens": 16, "messages": QUESTION}

    def streamed() -> object:
        with client.messages.stream(**same) as stream:
            return "".join(stream.text_stream), stream.get_final_message().stop_reason

    tool: Any = {"name": "look_up", "input_schema": Look.model_json_schema()}
    forced: Any = {**same, "max_tokens": 100, "tools": [tool], "tool_choice": {"type": "any"}}
    forced["extra_body"] = {"temperature": 0}

    def streamed_call() -> object:
        with client.messages.stream(**forced) as stream:
            return stream.get_final_message().content

    return {
        "models": lambda: [model.id for model in client.models.list()],
        "messages": lambda: client.messages.create(**same).stop_reason,
        "messages, streamed": streamed,
        "count_tokens": lambda: client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens,
        "tools": lambda: client.messages.create(**forced),
        "tools, streamed": streamed_call,
    }


def _calls(**asked: Any) -> object:
    message = completion(**asked).choices[0].message
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


def _streamed_calls(**asked: Any) -> object:
    """As LiteLLM joins the chunks."""
    whole: Any = stream_chunk_builder(list(completion(**asked, stream=True)))
    return [(call.function.name, call.function.arguments) for call in whole.choices[0].message.tool_calls]


def _content(**asked: Any) -> object:
    return completion(**asked).choices[0].message.content


def _streamed_content(**asked: Any) -> str:
    return _joined(completion(**asked, stream=True))


def _joined(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def main(base: str) -> int:
    clients = {
        "openai": by_openai,
        "langchain-openai": by_langchain,
        "litellm": by_litellm,
        "anthropic": by_anthropic,
    }
    for name, make in clients.items():
        print(name, version(name))
        for what, call in make(base).items():
            try:
                found = repr(call())
            except Exception as error:  # noqa: BLE001 - what its user sees is what is shown
                found = f"{type(error).__name__}: {error}"
            print(f"  {what}: {found[:MAX_SHOWN_CHARS]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
