"""Requests whose prompts, answers and keys carry marks, in every form that a gateway takes, and in wrong ones."""

import asyncio
import contextlib
import json
from typing import Any

import grpc.aio
import httpx

from weir.client import AsyncWeirClient, GenerateOptions, Turn
from weir.core.errors import WeirError
from weir.wire.v1 import inference_pb2

PROMPT, ANSWER, STRANGER = "pomegranateprompt", "quinceanswer", "medlarkey-of-a-stranger"
"""Of what nobody but who asks may see."""
MARKS = (PROMPT, ANSWER, STRANGER)
_TURN = {"role": "user", "content": f"Say {PROMPT}."}
_CHOICE = {"structured_outputs": {"choice": [ANSWER]}}
_TOOL = {"type": "function", "function": {"name": "f", "description": PROMPT, "parameters": {"type": "object"}}}
_CHAT = "/v1/chat/completions"

ASKED: list[tuple[str, Any]] = [
    (_CHAT, {"messages": [_TURN], "max_tokens": 12, **_CHOICE}),
    (_CHAT, {"messages": [_TURN], "max_tokens": 12, "stream": True, "logprobs": True, "top_logprobs": 2, **_CHOICE}),
    (_CHAT, {"messages": [_TURN], "max_tokens": 3, "stop": [PROMPT], "user": PROMPT, "metadata": {"a": PROMPT}}),
    (_CHAT, {"messages": [_TURN], "max_tokens": 3, "tools": [_TOOL]}),
    (_CHAT, {"messages": [{"role": PROMPT, "content": PROMPT}]}),
    (_CHAT, {"messages": [{"role": "assistant", "content": PROMPT}] * 2, "add_generation_prompt": True}),
    (_CHAT, {"messages": [_TURN], "continue_final_message": True, "add_generation_prompt": True}),
    (_CHAT, {"messages": [_TURN], "chat_template_kwargs": {PROMPT: PROMPT, "messages": 1}}),
    (_CHAT, {"messages": [{"role": "user", "content": [{"type": PROMPT, "image_url": PROMPT}]}]}),
    (_CHAT, {"messages": [_TURN], PROMPT: PROMPT}),
    (_CHAT, {"messages": [_TURN], "temperature": PROMPT, "model": PROMPT}),
    (_CHAT, {"messages": [_TURN], "structured_outputs": {"regex": f"({PROMPT}"}}),
    (_CHAT, {"messages": [_TURN], "structured_outputs": {"grammar": f"root ::= {PROMPT}"}}),
    (_CHAT, {"messages": [_TURN], "response_format": {"type": "json_schema", "json_schema": {"schema": PROMPT}}}),
    (_CHAT, {"messages": [_TURN], "model": PROMPT}),
    (_CHAT, {"messages": [_TURN], "lane": PROMPT}),
    (_CHAT, {"messages": PROMPT}),
    ("/v1/completions", {"prompt": f"\ud800 {PROMPT}", "max_tokens": 3}),
    ("/v1/completions", {"prompt": [PROMPT, PROMPT], "echo": True, "max_tokens": 2, "logprobs": 1}),
    ("/v1/completions", {"prompt": PROMPT * 40_000, "max_tokens": 2}),
    ("/v1/responses", {"input": PROMPT, "max_output_tokens": 12, "instructions": PROMPT}),
    ("/v1/responses", {"input": [{"type": PROMPT}]}),
    ("/v1/messages", {"messages": [_TURN], "max_tokens": 3, "system": PROMPT}),
    ("/v1/messages", {"messages": [{"role": PROMPT}], "max_tokens": 3}),
    ("/tokenize", {"prompt": PROMPT}),
    ("/tokenize", {"messages": [_TURN, {"role": PROMPT}]}),
    ("/detokenize", {"tokens": [PROMPT]}),
    ("/v1/batches", {"input_file_id": PROMPT, "endpoint": PROMPT}),
]
RAW: list[tuple[str, bytes]] = [
    (_CHAT, b'{"messages": [{"role": "user", "content": "' + PROMPT.encode()),
    (_CHAT, PROMPT.encode()),
    (_CHAT, b"\xff\xfe" + PROMPT.encode()),
    ("/v1/completions", b'{"prompt": "' + PROMPT.encode() + b'\\ud800\\ud800", "max_tokens": 2}'),
    ("/v1/files", b"--x\r\nContent-Disposition: form-data; name=" + PROMPT.encode()),
]


async def ask_everything(http_url: str, grpc_address: str, key: str) -> tuple[set[int], str]:
    """The statuses that came, and all that was answered."""
    statuses, said = set(), ""
    async with httpx.AsyncClient(base_url=http_url, timeout=120, headers={"Authorization": f"Bearer {key}"}) as http:
        for path, body in ASKED:
            answer = await http.post(path, content=json.dumps(body))
            statuses.add(answer.status_code)
            said += answer.text
        for path, content in RAW:
            answer = await http.post(path, content=content, headers={"Content-Type": "multipart/form-data; boundary=x"})
            statuses.add(answer.status_code)
        for headers in (
            {"Authorization": f"Bearer {STRANGER}"},
            {"Authorization": STRANGER},
            {"Authorization": "", "X-API-Key": STRANGER},
        ):
            for path in ("/v1/models", "/debug/stack", "/metrics"):
                statuses.add((await http.get(path, headers=headers)).status_code)
    await _leave_early(http_url, key)
    said += await _ask_grpc(grpc_address, key)
    await _ask_grpc(grpc_address, STRANGER)
    return statuses, said


async def _leave_early(http_url: str, key: str) -> None:
    """A client that goes away amid its answer."""
    body = {"messages": [_TURN], "max_tokens": 200, "stream": True, "ignore_eos": True}
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with (
            httpx.AsyncClient(base_url=http_url, headers={"X-API-Key": key}) as http,
            asyncio.timeout(20),
            http.stream("POST", _CHAT, json=body) as answer,
        ):
            async for _ in answer.aiter_lines():
                break


async def _ask_grpc(address: str, key: str) -> str:
    said = ""
    async with AsyncWeirClient(address, api_key=key, timeout_s=120) as client:
        for options in (GenerateOptions(max_tokens=4), GenerateOptions(max_tokens=4, lane=PROMPT, model=PROMPT)):
            for chunks in (client.generate(PROMPT, options), client.chat([Turn("user", PROMPT)], options)):
                with contextlib.suppress(WeirError):
                    async for chunk in chunks:
                        said += chunk.text
        for call in (client.tokenize(PROMPT), client.tokenize(PROMPT, model=PROMPT), client.cancel(PROMPT)):
            with contextlib.suppress(WeirError):
                await call
    async with grpc.aio.insecure_channel(address) as channel:
        metadata = (("authorization", f"Bearer {key}"), ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"))
        for method in ("Generate", "Chat"):
            stream: Any = channel.unary_stream(f"/weir.v1.Inference/{method}")
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in stream(PROMPT.encode(), metadata=metadata, timeout=20):
                    pass
        unary: Any = channel.unary_unary("/weir.v1.Inference/Tokenize")
        tokenize = inference_pb2.TokenizeRequest(text=PROMPT, model=PROMPT).SerializeToString()
        for data in (tokenize, PROMPT.encode()):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await unary(data, metadata=metadata, timeout=20)
    return said
