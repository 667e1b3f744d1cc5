"""Sends a fixed set of prompts to an OpenAI-style HTTP server and measures what its clients see."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """One run. `request_rate` in requests/s, infinite: all at once; `max_concurrency` bounds those in flight."""

    base_url: str
    model: str
    endpoint: str = "/v1/completions"
    num_prompts: int = 64
    input_len: int = 128
    output_len: int = 64
    request_rate: float = float("inf")
    max_concurrency: int = 32
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0
    vocab_low: int = 1000
    vocab_high: int = 40_000
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Fields that only this server knows."""


@dataclass(slots=True)
class RequestRecord:
    """What one client saw; times in seconds of this process's monotonic clock."""

    input_len: int
    started_s: float
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    output_len: int = 0
    text: str = ""
    error: str = ""


async def run_load(config: LoadConfig) -> tuple[list[RequestRecord], float]:
    """Returns one record a prompt, and how long all of them took."""
    prompts = random_prompts(config)
    gate = asyncio.Semaphore(config.max_concurrency)
    limits = httpx.Limits(max_connections=config.max_concurrency + 4)
    arrivals = random.Random(config.seed + 1)

    async with httpx.AsyncClient(base_url=config.base_url, timeout=config.timeout_s, limits=limits) as client:

        async def one(prompt: list[int]) -> RequestRecord:
            async with gate:
                return await _stream_one(client, config, prompt)

        started = time.monotonic()
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.create_task(one(prompt)))
            if config.request_rate != float("inf"):
                await asyncio.sleep(arrivals.expovariate(config.request_rate))
        records = await asyncio.gather(*tasks)
        return records, time.monotonic() - started


def random_prompts(config: LoadConfig) -> list[list[int]]:
    """Token ids, the same for the same seed."""
    source = random.Random(config.seed)
    return [
        [source.randrange(config.vocab_low, config.vocab_high) for _ in range(config.input_len)]
        for _ in range(config.num_prompts)
    ]


async def _stream_one(client: httpx.AsyncClient, config: LoadConfig, prompt: list[int]) -> RequestRecord:
    body = {
        "model": config.model,
        "prompt": prompt,
        "max_tokens": config.output_len,
        "temperature": config.temperature,
        "ignore_eos": config.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        **config.extra_body,
    }
    record = RequestRecord(input_len=len(prompt), started_s=time.monotonic())
    try:
        async with client.stream("POST", config.endpoint, json=body) as response:
            if response.status_code != httpx.codes.OK:
                record.error = f"HTTP {response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                return record
            await _read_events(response, record)
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


async def _read_events(response: httpx.Response, record: RequestRecord) -> None:
    last_s = record.started_s
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            break
        event = json.loads(payload)
        if "error" in event:
            record.error = str(event["error"])
            return
        now_s = time.monotonic()
        if event.get("choices"):
            record.text += event["choices"][0].get("text") or ""
            if record.ttft_s == 0.0:
                record.ttft_s = now_s - record.started_s
            else:
                record.gaps_s.append(now_s - last_s)
            last_s = now_s
            record.latency_s = now_s - record.started_s
        if event.get("usage"):
            record.output_len = event["usage"]["completion_tokens"]
