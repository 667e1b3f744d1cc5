"""One request over the wire, and its answer, written into its record: HTTP as OpenAI's clients speak it, or gRPC."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, cast

import httpx

from weir.bench.serving.config import LoadConfig
from weir.bench.serving.records import ServedRequest, TurnMessage
from weir.client import AsyncWeirClient, GenerateOptions
from weir.client.chats import Turn
from weir.core.errors import Overloaded, Unavailable, WeirError
from weir.rpc.tls.public import https_context

_OPTIONS = {entry.name for entry in fields(GenerateOptions)}
_MAX_ERROR_BYTES = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """One call. `messages` where it is one of a chat, else `prompt`."""

    prompt: Any
    output_len: int
    lane: str = ""
    tenant: str = ""
    messages: tuple[TurnMessage, ...] = ()
    body: Mapping[str, object] = field(default_factory=dict)
    request_id: str = ""


class RequestSender(Protocol):
    """Sends a request and reads its whole answer. What goes wrong is the record's `error`."""

    async def send(self, asked: Asked, record: ServedRequest) -> None: ...


@asynccontextmanager
async def open_sender(config: LoadConfig, transport: httpx.AsyncBaseTransport | None) -> AsyncIterator[RequestSender]:
    """`transport` of HTTP: for tests."""
    if config.is_grpc:
        async with GrpcSender(config) as sender:
            yield sender
        return
    limits = httpx.Limits(max_connections=None if config.max_concurrency is None else config.max_concurrency + 4)
    async with httpx.AsyncClient(
        base_url=config.base_url,
        timeout=config.timeout_s,
        limits=limits,
        transport=transport,
        verify=https_context(config.ca),
    ) as client:
        yield HttpSender(client, config)


def api_key_of(config: LoadConfig, tenant: str) -> str:
    return config.api_keys.get(tenant) or config.api_keys.get("", "")


class HttpSender:
    """Completions or chat, streamed."""

    def __init__(self, client: httpx.AsyncClient, config: LoadConfig) -> None:
        self._client = client
        self._config = config

    async def send(self, asked: Asked, record: ServedRequest) -> None:
        headers, body = self._headers(asked), self._body(asked)
        try:
            async with self._client.stream("POST", self._config.path, headers=headers, json=body) as response:
                record.status = response.status_code
                if response.status_code != httpx.codes.OK:
                    said = (await response.aread())[:_MAX_ERROR_BYTES].decode(errors="replace")
                    record.error = f"HTTP {response.status_code}: {said}"
                    return
                await _read_events(response, record)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"

    def _headers(self, asked: Asked) -> dict[str, str]:
        headers = dict(self._config.headers)
        if api_key := api_key_of(self._config, asked.tenant):
            headers["Authorization"] = f"Bearer {api_key}"
        if asked.request_id:
            headers["X-Request-Id"] = asked.request_id
        return headers

    def _body(self, asked: Asked) -> dict[str, object]:
        if asked.messages:
            content: object = [{"role": role, "content": text} for role, text in asked.messages]
        else:
            content = asked.prompt
        return {
            "model": self._config.model,
            "messages" if asked.messages else "prompt": content,
            "max_tokens": asked.output_len,
            "temperature": self._config.temperature,
            "ignore_eos": self._config.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"lane": asked.lane} if asked.lane else {}),
            **asked.body,
            **self._config.extra_body,
        }


async def _read_events(response: httpx.Response, record: ServedRequest) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        event = json.loads(payload)
        if "error" in event:
            record.error = str(event["error"])
            return
        for choice in event.get("choices") or ():
            _read_choice(choice, record, time.monotonic())
        if usage := event.get("usage"):
            record.output_len = usage.get("completion_tokens") or 0
            record.input_len = usage.get("prompt_tokens") or record.input_len
    record.error = "the stream ended before [DONE]"


def _read_choice(choice: Mapping[str, Any], record: ServedRequest, now_s: float) -> None:
    """A chat opens with a chunk that has a role and no token yet: that is no first token."""
    if (delta := choice.get("delta")) is None:
        record.text += choice.get("text") or ""
    else:
        text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        record.text += text
        if not text:
            return
    record.saw_chunk(now_s)


class GrpcSender:
    """`weir.v1.Inference`: Generate, or Chat. A channel for each key."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._clients: dict[str, AsyncWeirClient] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "GrpcSender":
        for key in {"", *self._config.api_keys.values()}:
            timeout_s, ca = self._config.timeout_s, self._config.ca
            client = AsyncWeirClient(self._config.base_url, timeout_s=timeout_s, api_key=key, ca=ca)
            self._clients[key] = await self._stack.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def send(self, asked: Asked, record: ServedRequest) -> None:
        client = self._clients[api_key_of(self._config, asked.tenant)]
        options = _options(self._config, asked)
        try:
            if asked.messages:
                chunks = client.chat([Turn(cast(Any, role), text) for role, text in asked.messages], options)
            else:
                chunks = client.generate(asked.prompt, options)
            async for chunk in chunks:
                if chunk.token_ids:
                    record.saw_chunk(time.monotonic())
                record.text += chunk.text
                record.output_len = chunk.num_output_tokens or record.output_len
                record.input_len = chunk.num_prompt_tokens or record.input_len
            record.status = httpx.codes.OK
        except WeirError as error:
            record.error = f"{type(error).__name__}: {error.message}"
            record.status = _status(error)


def check_grpc_fields(names: set[str]) -> None:
    """Raises ValueError for fields of a body that the gRPC API does not have."""
    if unknown := sorted(names - _OPTIONS - {"cache_prompt"}):
        raise ValueError(f"extra-body {', '.join(unknown)}: gRPC has {', '.join(sorted(_OPTIONS))}")


def _options(config: LoadConfig, asked: Asked) -> GenerateOptions:
    fields_of_body: dict[str, Any] = {**asked.body, **config.extra_body}
    if "cache_prompt" in fields_of_body:
        fields_of_body["skips_prefix_cache"] = not fields_of_body.pop("cache_prompt")
    for name in ("stop", "stop_token_ids"):
        if name in fields_of_body:
            fields_of_body[name] = tuple(fields_of_body[name])
    given: dict[str, Any] = {
        "model": config.model,
        "lane": asked.lane,
        "request_id": asked.request_id,
        "max_tokens": asked.output_len,
        "temperature": config.temperature,
        "ignore_eos": config.ignore_eos,
    }
    return GenerateOptions(**(given | fields_of_body))


def _status(error: WeirError) -> int:
    """The HTTP status of the same refusal; 0: of no kind that is counted apart."""
    if isinstance(error, Overloaded):
        return httpx.codes.TOO_MANY_REQUESTS
    return httpx.codes.SERVICE_UNAVAILABLE if isinstance(error, Unavailable) else 0
