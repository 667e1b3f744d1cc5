"""The routes for tools, against the processes of a real stack and its real tokenizer."""

import httpx
import pytest

import weir
from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

MODEL = "smollm2-135m"
TEXT = "The capital of Frânce is <|im_end|>"
MESSAGES = [{"role": "user", "content": "Name three rivers."}]
CONTEXT = 8192


def posted(stack: Stack, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{stack.http_url}{path}", json={"model": MODEL, **body}, timeout=60)


def test_a_text_becomes_the_tokens_that_a_completion_counts_and_they_become_the_text(stack: Stack) -> None:
    asked = posted(stack, "/tokenize", prompt=TEXT, return_token_strs=True).json()
    assert asked["count"] == len(asked["tokens"]) == len(asked["token_strs"])
    assert asked["max_model_len"] == CONTEXT
    assert asked["token_strs"][:2] == ["The", "\u0120capital"]
    assert asked["token_strs"][-1] == "<|im_end|>"
    assert posted(stack, "/detokenize", tokens=asked["tokens"]).json() == {"prompt": TEXT}
    answer = posted(stack, "/v1/completions", prompt=TEXT, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == asked["count"]


def test_a_conversation_becomes_the_tokens_that_a_chat_counts(stack: Stack) -> None:
    asked = posted(stack, "/tokenize", messages=MESSAGES).json()
    answer = posted(stack, "/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == asked["count"]
    without = posted(stack, "/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    assert asked["tokens"][: without["count"]] == without["tokens"]
    added = posted(stack, "/detokenize", tokens=asked["tokens"][without["count"] :]).json()
    assert added == {"prompt": "<|im_start|>assistant\n"}


def test_a_token_past_the_vocabulary_is_named(stack: Stack) -> None:
    refused = posted(stack, "/detokenize", tokens=[1, 49_152])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    assert "[1] is 49152; must be from 0 to 49151" in refused.json()["error"]["message"]


def test_version_load_ping_and_one_model(stack: Stack) -> None:
    with httpx.Client(base_url=stack.http_url, headers={"X-Request-Id": "tools/1"}) as http:
        assert http.get("/version").json() == {"version": weir.__version__}
        assert http.get("/load").json() == {"server_load": 0}
        assert (http.post("/ping").status_code, http.get("/ping").content) == (200, b"")
        model = http.get(f"/v1/models/{MODEL}")
        assert (model.json()["id"], model.json()["max_model_len"]) == (MODEL, CONTEXT)
        assert http.get("/v1/models/none").status_code == 404
        assert model.headers["x-request-id"] == "tools/1"
