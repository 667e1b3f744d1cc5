"""python -m benchmarks.clients http://127.0.0.1:8000

Wants openai, langchain-openai, litellm and anthropic, in an environment of their own: Weir needs none of them. Each
line is one call, with what its user sees, of errors their class.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import anthropic
import openai
from langchain_openai import ChatOpenAI, OpenAI
from litellm import completion
from pydantic import BaseModel

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "Name three rivers."}]
TIMEOUT_S = 300
MAX_SHOWN_CHARS = 160

Calls = dict[str, Callable[[], object]]


class River(BaseModel):
    """What a structured answer should be."""

    name: str


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
    }


def by_langchain(base: str) -> Calls:
    own: Any = {"model": MODEL, "base_url": f"{base}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 16}
    own |= {"max_retries": 0, "timeout": TIMEOUT_S}
    chat, texts = ChatOpenAI(**own), OpenAI(**own)
    calls: Calls = {
        "invoke": lambda: chat.invoke("Name three rivers.").content,
        "stream": lambda: "".join(str(chunk.content) for chunk in chat.stream("Name three rivers.")),
        "completions, two prompts": lambda: [found[0].text for found in texts.generate(["1 2 3", "a b"]).generations],
        "bind_tools": lambda: chat.bind_tools([River]).invoke("x"),
    }
    for method in ("json_schema", "function_calling", "json_mode"):
        structured = chat.with_structured_output(River, method=method)
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
    return calls


def by_anthropic(base: str) -> Calls:
    client = anthropic.Anthropic(base_url=base, api_key="unused", timeout=TIMEOUT_S, max_retries=0)
    same: Any = {"model": MODEL, "max_tokens": 16, "messages": QUESTION}

    def streamed() -> object:
        with client.messages.stream(**same) as stream:
            return "".join(stream.text_stream), stream.get_final_message().stop_reason

    tool: Any = {"name": "look", "input_schema": {"type": "object"}}
    return {
        "models": lambda: [model.id for model in client.models.list()],
        "messages": lambda: client.messages.create(**same).stop_reason,
        "messages, streamed": streamed,
        "count_tokens": lambda: client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens,
        "tools": lambda: client.messages.create(**same, tools=[tool]),
    }


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
