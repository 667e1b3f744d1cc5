"""Sends a fixed set of requests to an OpenAI-style HTTP server and measures what its clients see."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx

from weir.bench.serving.jobs import BenchRequest, Mix, TraceReplay, mixed, random_jobs, trace_jobs

COLD: Mapping[str, object] = {"cache_prompt": False}
"""Of a request that finds nothing in a prefix cache: what an earlier run left there must not help a later one."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """One run. `request_rate` in requests/s, infinite: all at once; `max_concurrency` bounds those in flight.

    A trace has times and lengths of its own; `api_keys` are those of the tenants, by name, `""`: of the others.
    """

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
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Fields that only this server knows."""
    trace: TraceReplay | None = None
    lanes: Mix = field(default_factory=Mix)
    tenants: Mix = field(default_factory=Mix)
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(slots=True)
class ServedRequest:
    """What one client saw; times in seconds of this process's monotonic clock."""

    input_len: int
    started_s: float
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    output_len: int = 0
    text: str = ""
    error: str = ""
    lane: str = ""
    tenant: str = ""
    status: int = 0
    """Of HTTP; 0: no answer."""


def in_turns(sides: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, side): A B, B A, A B, … A machine that slows down slows all sides."""
    for number in range(rounds):
        for side in reversed(sides) if number % 2 else sides:
            yield number, side


async def run_load(config: LoadConfig) -> tuple[list[ServedRequest], float]:
    """Returns one record a request, and how long all of them took. Raises TraceError."""
    return await run_jobs(config, make_jobs(config))


def make_jobs(config: LoadConfig) -> list[BenchRequest]:
    """The same for the same configuration. Raises TraceError."""
    if config.trace is not None:
        jobs = trace_jobs(config.trace, config.num_prompts, config.seed)
    else:
        jobs = random_jobs(config.num_prompts, config.input_len, config.output_len, config.request_rate, config.seed)
    return mixed(jobs, config.lanes, config.tenants, config.seed)


async def run_jobs(
    config: LoadConfig, jobs: Sequence[BenchRequest], transport: httpx.AsyncBaseTransport | None = None
) -> tuple[list[ServedRequest], float]:
    """Sends each at its time, or as soon after as there is room below `max_concurrency`. `transport`: for tests."""
    gate = asyncio.Semaphore(config.max_concurrency)
    limits = httpx.Limits(max_connections=config.max_concurrency + 4)

    async with httpx.AsyncClient(
        base_url=config.base_url, timeout=config.timeout_s, limits=limits, transport=transport
    ) as client:

        async def one(job: BenchRequest) -> ServedRequest:
            async with gate:
                return await _stream_one(client, config, job)

        started = time.monotonic()
        tasks = []
        for job in jobs:
            await asyncio.sleep(max(0.0, started + job.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(one(job)))
        records = await asyncio.gather(*tasks)
        return records, time.monotonic() - started


async def run_cold(base_url: str, model: str, jobs: Sequence[BenchRequest], api_key: str = "") -> list[ServedRequest]:
    """Each at its time, whatever is in flight. Raises RuntimeError if one fails: figures of a part say nothing."""
    config = LoadConfig(base_url, model, max_concurrency=len(jobs), api_keys={"": api_key}, extra_body=COLD)
    records, _ = await run_jobs(config, jobs)
    errors = [record.error for record in records if record.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests to {base_url} failed: {errors[0]}")
    return records


async def _stream_one(client: httpx.AsyncClient, config: LoadConfig, job: BenchRequest) -> ServedRequest:
    body = {
        "model": config.model,
        "prompt": job.prompt,
        "max_tokens": job.output_len,
        "temperature": config.temperature,
        "ignore_eos": config.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"lane": job.lane} if job.lane else {}),
        **job.body,
        **config.extra_body,
    }
    record = ServedRequest(len(job.prompt), time.monotonic(), lane=job.lane, tenant=job.tenant)
    api_key = config.api_keys.get(job.tenant) or config.api_keys.get("", "")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with client.stream("POST", config.endpoint, json=body, headers=headers) as response:
            record.status = response.status_code
            if response.status_code != httpx.codes.OK:
                record.error = f"HTTP {response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                return record
            await _read_events(response, record)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


async def _read_events(response: httpx.Response, record: ServedRequest) -> None:
    last_s = record.started_s
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
    record.error = "the stream ended before [DONE]"


def read_keys(path: Path | None, default_key: str) -> dict[str, str]:
    """Tenant -> key, of lines `NAME=KEY`; `""` -> the key of requests that name no tenant. Raises ValueError."""
    keys = {"": default_key} if default_key else {}
    if path is None:
        return keys
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-keys {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, key = line.partition("=")
        if not (equals and name.strip() and key.strip()) or name.strip() in keys:
            raise ValueError(f"--api-keys {path}, line {number}: must be NAME=KEY, each name once")
        keys[name.strip()] = key.strip()
    return keys


def check_keys(config: LoadConfig) -> None:
    """Raises ValueError for a tenant of the mix whose key is not known: nothing else tells a server who asks."""
    missing = [name for name in config.tenants.shares if name not in config.api_keys]
    if missing:
        raise ValueError(f"--tenant-mix: no key of {', '.join(missing)}; name a file of keys with --api-keys")
