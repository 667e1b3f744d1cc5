"""Sends a set of requests at their times and measures what its clients see."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx

from weir.bench.serving.config import LoadConfig
from weir.bench.serving.jobs import as_text, at_times, mixed
from weir.bench.serving.records import BenchRequest, ServedRequest, TurnMessage
from weir.bench.serving.senders import Asked, RequestSender, check_grpc_fields, open_sender

COLD: Mapping[str, object] = {"cache_prompt": False}
"""Of a request that finds nothing in a prefix cache: what an earlier run left there must not help a later one."""

_WARM_UP_SEED = 1_000_003
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

T = TypeVar("T")
OnDone = Callable[[ServedRequest], None]


def in_turns(sides: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, side): A B, B A, A B, … A machine that slows down slows all sides."""
    for number in range(rounds):
        for side in reversed(sides) if number % 2 else sides:
            yield number, side


async def run_load(config: LoadConfig) -> tuple[list[ServedRequest], float]:
    """Returns one record a request, and how long all of them took. Raises TraceError."""
    return await run_jobs(config, make_jobs(config))


def make_jobs(config: LoadConfig) -> list[BenchRequest]:
    """The same for the same configuration. Raises ValueError, of a trace TraceError."""
    if config.dataset.is_of_chats and not config.is_chat:
        raise ValueError(f"backend {config.backend}: chats of several turns need openai-chat or grpc-chat")
    jobs = config.dataset.requests(config.num_prompts, config.seed)
    if not config.dataset.has_times:
        jobs = at_times(jobs, config.arrivals.times_s(len(jobs), config.seed + 1))
    if config.sends_texts or config.is_chat:
        jobs = [replace(job, prompt=as_text(job.prompt)) for job in jobs]
    if config.is_grpc:
        check_grpc_fields({*config.extra_body, *(name for job in jobs for name in job.body)})
    return mixed(jobs, config.lanes, config.tenants, config.seed)


async def run_jobs(
    config: LoadConfig,
    jobs: Sequence[BenchRequest],
    transport: httpx.AsyncBaseTransport | None = None,
    on_done: OnDone = lambda _: None,
) -> tuple[list[ServedRequest], float]:
    """Sends each at its time, or as soon after as there is room below `max_concurrency`. `transport`: for tests.

    Of a chat whose turn fails the later turns are not asked.
    """
    async with open_sender(config, transport) as sender:
        run = _Run(config, sender, on_done)
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, job in enumerate(jobs):
                await asyncio.sleep(max(0.0, started_s + job.at_s - time.monotonic()))
                tasks.append(group.create_task(run.converse(number, job, started_s + job.at_s)))
        return [record for task in tasks for record in task.result()], time.monotonic() - started_s


class _Run:
    """One run's bound on what is in flight, and its way to the server."""

    def __init__(self, config: LoadConfig, sender: RequestSender, on_done: OnDone) -> None:
        self._config = config
        self._sender = sender
        self._on_done = on_done
        self._gate = None if config.max_concurrency is None else asyncio.Semaphore(config.max_concurrency)

    async def converse(self, number: int, job: BenchRequest, due_s: float) -> list[ServedRequest]:
        """All turns of a job: each after the answer to the one before and its pause."""
        messages = (TurnMessage("system", job.system),) if job.system else ()
        prompt, output_len, records = job.prompt, job.output_len, list[ServedRequest]()
        for turn in range(job.num_turns):
            if self._config.is_chat:
                messages = (*messages, TurnMessage("user", as_text(prompt)))
            request_id = f"{self._config.request_id_prefix}{number}" if self._config.request_id_prefix else ""
            if request_id and turn:
                request_id += f"-{turn}"
            asked = Asked(prompt, output_len, job.lane, job.tenant, messages, job.body, request_id)
            record = await self._ask(asked, due_s)
            record.turn = turn
            records.append(record)
            self._on_done(record)
            if record.error or turn == job.num_turns - 1:
                break
            following = job.follow_ups[turn]
            messages = (*messages, TurnMessage("assistant", record.text))
            prompt, output_len = following.text, following.output_len
            due_s = time.monotonic() + following.pause_s
            await asyncio.sleep(following.pause_s)
        return records

    async def _ask(self, asked: Asked, due_s: float) -> ServedRequest:
        """Latency counts from when it was due: a client that is late must not look like a fast server.

        Where there is no room, it counts from when there is: what waits here is not the server's to serve yet.
        """
        came_s = time.monotonic()
        words = sum(len(text.split()) for _, text in asked.messages)
        num_input = words or (len(asked.prompt.split()) if isinstance(asked.prompt, str) else len(asked.prompt))
        record = ServedRequest(num_input, due_s, lane=asked.lane, tenant=asked.tenant, late_s=max(0.0, came_s - due_s))
        if self._gate is None:
            await self._send(asked, record)
            return record
        must_wait = self._gate.locked()
        async with self._gate:
            if must_wait:
                record.started_s = time.monotonic()
                record.queued_s = record.started_s - came_s
                record.late_s = 0.0
            await self._send(asked, record)
        return record

    async def _send(self, asked: Asked, record: ServedRequest) -> None:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._sender.send(asked, record)
        except TimeoutError:
            record.error = f"no whole answer within {self._config.timeout_s:g} s"
        if record.has_chunk and not record.output_len:  # a server that does not count: a chunk for a token
            record.output_len = 1 + len(record.gaps_s)
        if not record.has_chunk and not record.error:
            record.latency_s = time.monotonic() - record.started_s
            record.ttft_s = record.latency_s


async def warm_up(config: LoadConfig, num: int) -> None:
    """`num` requests of this kind with other prompts, at once. Raises RuntimeError if one fails."""
    if num == 0:
        return
    jobs = make_jobs(replace(config, seed=config.seed + _WARM_UP_SEED))[:num]
    records, _ = await run_jobs(config, [replace(job, at_s=0.0, follow_ups=()) for job in jobs])
    if errors := [record.error for record in records if record.error]:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests to warm up {config.base_url} failed: {errors[0]}")


async def wait_ready(config: LoadConfig, timeout_s: float) -> None:
    """Until a request of this kind is served. Raises RuntimeError with what it last said."""
    ends_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while True:
        try:
            return await warm_up(replace(config, timeout_s=timeout_s), 1)
        except RuntimeError as error:
            if time.monotonic() + pause_s >= ends_s:
                raise RuntimeError(f"not ready within {timeout_s:g} s: {error}") from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def run_cold(base_url: str, model: str, jobs: Sequence[BenchRequest], api_key: str = "") -> list[ServedRequest]:
    """Each at its time, whatever is in flight. Raises RuntimeError if one fails: figures of a part say nothing."""
    config = LoadConfig(base_url, model, max_concurrency=len(jobs), api_keys={"": api_key}, extra_body=COLD)
    records, _ = await run_jobs(config, jobs)
    errors = [record.error for record in records if record.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests to {base_url} failed: {errors[0]}")
    return records


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
