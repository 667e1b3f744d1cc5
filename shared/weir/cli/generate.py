"""`weir generate`: one prompt to the terminal, or JSONL prompts to a file of answers that can be gone on with."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Annotated, Any, TypeGuard

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from weir.cli import EXIT_FAILED, EXIT_USAGE, options
from weir.cli.chat import AnswerPrinter, shown_call
from weir.cli.console import error_line, fail, stderr, stdout
from weir.client import (
    DEFAULT_TIMEOUT_S,
    AsyncWeirClient,
    ChatAnswer,
    Chunk,
    GenerateOptions,
    TokenLogprobs,
    Turn,
    WeirClient,
)
from weir.client.chats import AnswerPart
from weir.core.errors import WeirError

_OPTION_NAMES = frozenset(entry.name for entry in fields(GenerateOptions))


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.", show_default=False)] = None,
    input_path: Annotated[Path | None, typer.Option("--input", help="JSONL: a prompt a line, see below.")] = None,
    output_path: Annotated[Path | None, typer.Option("--output", help="JSONL to write or to go on with.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once, with --input.")] = 32,
    address: options.Address = options.DEFAULT_ADDRESS,
    model: options.ModelName = "",
    lane: options.Lane = "",
    ttft_target_ms: options.TtftTargetMs = None,
    itl_target_ms: options.ItlTargetMs = None,
    expected_output_tokens: options.ExpectedOutputTokens = None,
    api_key: options.ApiKey = "",
    ca: options.Ca = "",
    timeout_s: options.TimeoutS = DEFAULT_TIMEOUT_S,
    partial_at_deadline: options.PartialAtDeadline = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    include_stop: options.IncludeStop = False,
    ignore_eos: options.IgnoreEos = False,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = "",
    as_chat: options.AsChat = False,
    tools_path: options.ToolsFile = None,
    tool_choice: options.ToolChoice = "auto",
    no_parallel_tool_calls: options.NoParallelToolCalls = False,
    max_reasoning_tokens: options.MaxReasoningTokens = None,
    n: options.NumChoices = None,
    logprobs: options.Logprobs = None,
    prompt_logprobs: options.PromptLogprobs = None,
    cache_salt: options.CacheSalt = "",
    skips_prefix_cache: options.SkipsPrefixCache = False,
    as_json: options.AsJson = False,
) -> None:
    """Continue a prompt, or each prompt of a file.

    A line of --input is {"prompt": "…"} or {"prompt": [token ids]}, with an "id" if you like (else its line number).
    A line of --output has the id, text, finish_reason and token counts, or an error; with --n it has choices, with
    --logprobs or --prompt-logprobs a list of them. --json prints such a line for one prompt. Run the same command again
    to go on with a half-done output: finished ids are skipped, failed ones are tried again.

    With --chat each prompt is what a user says; of tools that are called a line NAME(ARGUMENTS) is shown, reasoning
    goes to stderr, and lines of JSON have reasoning and tool_calls beside text.

    \b
    weir generate --temperature 0 --max-tokens 24 "The capital of France is"
    weir generate --n 3 --temperature 0.8 --frequency-penalty 0.5 --seed 1 "Once upon a time"
    weir generate --regex "1[0-9]{3}" "Columbus reached America in "
    weir generate --chat --tools tools.json --tool-choice required "What is the weather in Paris?"
    weir generate --timeout-s 2 --partial-at-deadline --json "Once upon a time"
    weir generate --input prompts.jsonl --output answers.jsonl --max-tokens 64
    """
    if (prompt is None) == (input_path is None):
        fail("give either a PROMPT or --input FILE.jsonl", code=EXIT_USAGE)
    if prompt == "":
        fail("PROMPT is empty: give at least one character", code=EXIT_USAGE)
    if (input_path is None) != (output_path is None):
        fail("--input and --output belong together", code=EXIT_USAGE)
    if prompt is not None and not as_json and (logprobs is not None or prompt_logprobs is not None):
        fail("--logprobs and --prompt-logprobs are shown as JSON: give --json too", code=EXIT_USAGE)
    grammar = options.grammar_of(json_schema, regex)
    asked = PromptRequest(options.generate_options(locals()), options.chat_options(locals()))
    reach = options.Reach(address, timeout_s, api_key, ca)
    if input_path is not None and output_path is not None:
        raise typer.Exit(_generate_file(reach, input_path, output_path, asked, concurrency))
    if prompt is not None and as_json:
        raise typer.Exit(_generate_json(reach, prompt, asked))
    if prompt is not None:
        _print_answer(reach, prompt, asked)


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """What is asked of each prompt. `chat` None: to be continued."""

    chosen: GenerateOptions
    chat: options.ChatOptions | None = None

    def send(self, client: WeirClient, prompt: str) -> Iterator[Chunk]:
        if self.chat is None:
            return client.generate(prompt, self.chosen)
        tools, budget = self.chat.tools, self.chat.max_reasoning_tokens
        return client.chat([Turn("user", prompt)], self.chosen, tools=tools, max_reasoning_tokens=budget)

    def send_async(self, client: AsyncWeirClient, prompt: str | list[int]) -> AsyncIterator[Chunk]:
        if self.chat is None or not isinstance(prompt, str):
            return client.generate(prompt, self.chosen)
        tools, budget = self.chat.tools, self.chat.max_reasoning_tokens
        return client.chat([Turn("user", prompt)], self.chosen, tools=tools, max_reasoning_tokens=budget)


def _print_answer(reach: options.Reach, prompt: str, asked: PromptRequest) -> None:
    printer = AnswerPrinter()
    with reach.client() as client:
        try:
            if asked.chosen.n is not None and asked.chosen.n > 1:
                _print_choices(client, prompt, asked)
                return
            for chunk in asked.send(client, prompt):
                printer.add(chunk.parts)
        except WeirError as error:
            printer.break_off()
            fail(error_line(error))
    printer.finish()


def _print_choices(client: WeirClient, prompt: str, asked: PromptRequest) -> None:
    """Each when it is complete, since they come at the same time."""
    parts: dict[int, list[AnswerPart]] = {}
    for chunk in asked.send(client, prompt):
        parts.setdefault(chunk.choice, []).extend(chunk.parts)
        if chunk.finish_reason is not None:
            answer = ChatAnswer.of(parts[chunk.choice])
            lines = filter(None, (answer.content, *map(shown_call, answer.tool_calls)))
            stdout.out(f"[{chunk.choice}] " + "\n".join(lines), highlight=False)


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of the input; `key` is its id, or its line number from 1."""

    key: str | int
    prompt: str | list[int]


def _generate_file(reach: options.Reach, source: Path, target: Path, asked: PromptRequest, concurrency: int) -> int:
    """Answers every prompt that `target` has no answer for. Returns the exit code: 1 if any failed."""
    jobs = read_jobs(source)
    if asked.chat is not None and any(not isinstance(job.prompt, str) for job in jobs):
        problem = "with --chat a prompt is a text, which the chat template turns into tokens"
        fail(f"--input {source}: {problem}", code=EXIT_USAGE)
    try:
        done = keep_answered(target)
        left = [job for job in jobs if job.key not in done]
        num_failed = asyncio.run(_run(reach, left, target, asked, concurrency, len(jobs)))
    except OSError as error:
        fail(f"--output {target}: {error.strerror or error}")
    stderr.print(f"{len(jobs) - num_failed} of {len(jobs)} answered, {num_failed} failed: {target}", markup=False)
    return EXIT_FAILED if num_failed else 0


def _generate_json(reach: options.Reach, prompt: str, asked: PromptRequest) -> int:
    """Prints one answer as a line of an output file. Returns the exit code."""

    async def ask() -> dict[str, Any]:
        async with reach.async_client() as client:
            return await _answer(client, PromptLine(1, prompt), asked)

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
    if not _is_key(key):
        fail(f'--input {source}, line {number}: "id" must be a text or a whole number', code=EXIT_USAGE)
    misplaced = sorted(_OPTION_NAMES.intersection(entry))
    if misplaced:
        problem = f'"{misplaced[0]}" is for all lines: give it on the command line; a line has "prompt" and "id"'
        fail(f"--input {source}, line {number}: {problem}", code=EXIT_USAGE)
    return PromptLine(key, prompt)


# type(), not isinstance, for numbers: JSON's true is none.
def _is_token_ids(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and all(type(item) is int and item >= 0 for item in prompt)


def _is_key(key: object) -> TypeGuard[str | int]:
    return isinstance(key, str) or type(key) is int


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
        if isinstance(entry, dict) and ("text" in entry or "choices" in entry) and _is_key(key := entry.get("id")):
            kept[key] = line
    scratch = target.with_name(target.name + ".partial")
    scratch.write_bytes(b"".join(line + b"\n" for line in kept.values()))
    scratch.replace(target)
    return set(kept)


async def _run(
    reach: options.Reach, jobs: list[PromptLine], target: Path, asked: PromptRequest, concurrency: int, num_all: int
) -> int:
    gate = asyncio.Semaphore(concurrency)
    num_failed = 0
    with target.open("a", encoding="utf-8") as output:
        async with reach.async_client() as client, _progress(num_all, num_all - len(jobs)) as (bar, task):

            async def one(job: PromptLine) -> bool:
                async with gate:
                    answer = await _answer(client, job, asked)
                _write_line(output, answer)
                bar.advance(task)
                return "error" in answer

            num_failed = sum(await asyncio.gather(*(one(job) for job in jobs)))
    return num_failed


async def _answer(client: AsyncWeirClient, job: PromptLine, asked: PromptRequest) -> dict[str, Any]:
    try:
        chunks = [chunk async for chunk in asked.send_async(client, job.prompt)]
    except WeirError as error:
        return {"id": job.key, "error": error_line(error)}
    num_choices = asked.chosen.n or 1
    choices = [_choice([chunk for chunk in chunks if chunk.choice == choice]) for choice in range(num_choices)]
    if any(choice["finish_reason"] is None for choice in choices):
        return {"id": job.key, "error": "the answer broke off without a reason"}
    last = chunks[-1]
    counts = {"num_prompt_tokens": last.num_prompt_tokens, "num_output_tokens": last.num_output_tokens}
    if last.num_reasoning_tokens:
        counts["num_reasoning_tokens"] = last.num_reasoning_tokens
    answer = choices[0] if num_choices == 1 else {"choices": choices}
    of_prompt = [_logprobs_json(entry) for chunk in chunks for entry in chunk.prompt_logprobs]
    return {"id": job.key, **answer, **({"prompt_logprobs": of_prompt} if of_prompt else {}), **counts}


def _choice(chunks: list[Chunk]) -> dict[str, Any]:
    logprobs = [_logprobs_json(entry) for chunk in chunks for entry in chunk.logprobs]
    answer = ChatAnswer.of(part for chunk in chunks for part in chunk.parts)
    choice = {
        "text": answer.content,
        **_parts_json(answer),
        "finish_reason": chunks[-1].finish_reason if chunks else None,
    }
    return choice | ({"logprobs": logprobs} if logprobs else {})


def _parts_json(answer: ChatAnswer) -> Mapping[str, Any]:
    """What a line of an answer file has beside `text`, where there is any of it."""
    calls = [
        {"id": call.id, "name": call.name, "arguments": call.arguments, "is_complete": call.is_complete}
        for call in answer.tool_calls
    ]
    reasoning = {"reasoning": answer.reasoning} if answer.reasoning else {}
    return {**reasoning, **({"tool_calls": calls} if calls else {})}


def _logprobs_json(entry: TokenLogprobs) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": entry.logprob, "rank": entry.rank, "top": entry.top}


def _write_line(output: IO[str], answer: dict[str, Any]) -> None:
    output.write(json.dumps(answer, ensure_ascii=False) + "\n")
    output.flush()


@asynccontextmanager
async def _progress(num_all: int, num_done: int) -> AsyncIterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr) as bar:
        yield bar, bar.add_task("generating", total=num_all, completed=num_done)
