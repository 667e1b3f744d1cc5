"""Prompts from a JSONL file, answers into a JSONL file that can be gone on with."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, TypeGuard

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from weir.cli.console import error_line, fail, stderr, stdout
from weir.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from weir.cli.options import Reach
from weir.client import AsyncWeirClient, Chunk, GenerateOptions
from weir.core.errors import WeirError

_OPTION_NAMES = frozenset(entry.name for entry in fields(GenerateOptions))


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of the input; `key` is its id, or its line number from 1."""

    key: str | int
    prompt: str | list[int]


def generate_file(reach: Reach, source: Path, target: Path, chosen: GenerateOptions, concurrency: int) -> int:
    """Answers every job that `target` has no answer for. Returns the exit code: 1 if any failed."""
    jobs = read_jobs(source)
    try:
        done = keep_answered(target)
        left = [job for job in jobs if job.key not in done]
        num_failed = asyncio.run(_run(reach, left, target, chosen, concurrency, len(jobs)))
    except OSError as error:
        fail(f"--output {target}: {error.strerror or error}")
    stderr.print(f"{len(jobs) - num_failed} of {len(jobs)} answered, {num_failed} failed: {target}", markup=False)
    return EXIT_FAILED if num_failed else 0


def generate_json(reach: Reach, prompt: str, chosen: GenerateOptions) -> int:
    """Prints one answer as a line of an output file. Returns the exit code."""

    async def ask() -> dict[str, Any]:
        async with reach.async_client() as client:
            return await _answer(client, PromptLine(1, prompt), chosen)

    answer = asyncio.run(ask())
    stdout.out(json.dumps(answer, ensure_ascii=False), highlight=False)
    return EXIT_FAILED if "error" in answer else 0


def read_jobs(source: Path) -> list[PromptLine]:
    """Ends the command, naming the line, on anything that is not a job, and on an id that comes twice."""
    jobs: list[PromptLine] = []
    try:
        lines = source.read_bytes().split(b"\n")
    except OSError as error:
        fail(f"--input {source}: {error.strerror or error}", code=EXIT_USAGE)
    for number, line in enumerate(lines, 1):
        if line.strip():
            jobs.append(_parse_job(source, number, line))
    keys = [job.key for job in jobs]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        fail(f"--input {source}: id {twice!r} comes twice", code=EXIT_USAGE)
    return jobs


def _parse_job(source: Path, number: int, line: bytes) -> PromptLine:
    try:
        entry = json.loads(line)
    except ValueError as error:  # no JSON, or no UTF-8
        fail(f"--input {source}, line {number}: not JSON: {error}", code=EXIT_USAGE)
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not (isinstance(prompt, str) or _is_token_ids(prompt)):
        fail(f'--input {source}, line {number}: "prompt" must be a text or a list of token ids', code=EXIT_USAGE)
    key = entry.get("id", number)
    if not isinstance(key, str | int):
        fail(f'--input {source}, line {number}: "id" must be a text or a whole number', code=EXIT_USAGE)
    misplaced = sorted(_OPTION_NAMES.intersection(entry))
    if misplaced:
        problem = f'"{misplaced[0]}" is for all lines: give it on the command line; a line has "prompt" and "id"'
        fail(f"--input {source}, line {number}: {problem}", code=EXIT_USAGE)
    return PromptLine(key, prompt)


def _is_token_ids(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and all(isinstance(item, int) and item >= 0 for item in prompt)


def keep_answered(target: Path) -> set[str | int]:
    """Ids that `target` answers. Drops failed and torn lines from the file, in one step."""
    if not target.exists():
        return set()
    kept: dict[str | int, bytes] = {}
    # Bytes, and only \n ends a line: an answer may hold other line separators, and may be torn inside a character.
    for line in target.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if (
            isinstance(entry, dict)
            and ("text" in entry or "choices" in entry)
            and isinstance(entry.get("id"), str | int)
        ):
            kept[entry["id"]] = line
    scratch = target.with_name(target.name + ".partial")
    scratch.write_bytes(b"".join(line + b"\n" for line in kept.values()))
    scratch.replace(target)
    return set(kept)


async def _run(
    reach: Reach, jobs: list[PromptLine], target: Path, chosen: GenerateOptions, concurrency: int, num_all: int
) -> int:
    gate = asyncio.Semaphore(concurrency)
    num_failed = 0
    with target.open("a", encoding="utf-8") as output:
        async with reach.async_client() as client, _progress(num_all, num_all - len(jobs)) as (bar, task):

            async def one(job: PromptLine) -> bool:
                async with gate:
                    answer = await _answer(client, job, chosen)
                _write_line(output, answer)
                bar.advance(task)
                return "error" in answer

            num_failed = sum(await asyncio.gather(*(one(job) for job in jobs)))
    return num_failed


async def _answer(client: AsyncWeirClient, job: PromptLine, chosen: GenerateOptions) -> dict[str, Any]:
    try:
        chunks = [chunk async for chunk in client.generate(job.prompt, chosen)]
    except WeirError as error:
        return {"id": job.key, "error": error_line(error)}
    num_choices = chosen.n or 1
    choices = [_choice([chunk for chunk in chunks if chunk.choice == choice]) for choice in range(num_choices)]
    if any(choice["finish_reason"] is None for choice in choices):
        return {"id": job.key, "error": "the answer broke off without a reason"}
    counts = {"num_prompt_tokens": chunks[-1].num_prompt_tokens, "num_output_tokens": chunks[-1].num_output_tokens}
    answer = choices[0] if num_choices == 1 else {"choices": choices}
    return {"id": job.key, **answer, **counts}


def _choice(chunks: list[Chunk]) -> dict[str, Any]:
    logprobs = [
        {"token_id": entry.token_id, "logprob": entry.logprob, "rank": entry.rank, "top": entry.top}
        for chunk in chunks
        for entry in chunk.logprobs
    ]
    choice = {
        "text": "".join(chunk.text for chunk in chunks),
        "finish_reason": chunks[-1].finish_reason if chunks else None,
    }
    return choice | ({"logprobs": logprobs} if logprobs else {})


def _write_line(output: IO[str], answer: dict[str, Any]) -> None:
    output.write(json.dumps(answer, ensure_ascii=False) + "\n")
    output.flush()


@asynccontextmanager
async def _progress(num_all: int, num_done: int) -> AsyncIterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr) as bar:
        yield bar, bar.add_task("generating", total=num_all, completed=num_done)
