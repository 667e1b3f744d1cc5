"""`weir chat`: a conversation in the terminal."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from weir.cli import options
from weir.cli.console import error_line, stderr, stdout
from weir.client import (
    DEFAULT_TIMEOUT_S,
    ChatAnswer,
    ContentPart,
    GenerateOptions,
    ReasoningPart,
    ToolCall,
    ToolCallDelta,
    Turn,
    WeirClient,
)
from weir.client.chats import AnswerPart
from weir.core.errors import WeirError


def chat(
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    address: options.Address = options.DEFAULT_ADDRESS,
    model: options.ModelName = "",
    lane: options.Lane = "",
    ttft_target_ms: options.TtftTargetMs = None,
    itl_target_ms: options.ItlTargetMs = None,
    expected_output_tokens: options.ExpectedOutputTokens = None,
    api_key: options.ApiKey = "",
    ca: options.Ca = "",
    timeout_s: options.TimeoutS = DEFAULT_TIMEOUT_S,
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
    cache_salt: options.CacheSalt = "",
    skips_prefix_cache: options.SkipsPrefixCache = False,
    max_reasoning_tokens: options.MaxReasoningTokens = None,
) -> None:
    """Talk with the model; the conversation is kept. /reset forgets it, /quit or Ctrl-D ends.

    Ctrl-C breaks off an answer. Text from a pipe is taken line by line. What a model thinks goes to stderr.

    \b
    weir chat
    weir chat --system "Answer in one sentence." --temperature 0
    """
    chosen = options.generate_options(locals())
    opening = [Turn("system", system)] if system else []
    turns = list(opening)
    with options.Reach(address, timeout_s, api_key, ca).client() as client:
        while (line := _try_read()) is not None:
            match line:
                case "":
                    continue
                case "/quit":
                    return
                case "/reset":
                    turns = list(opening)
                    stderr.print("forgotten", style="dim")
                case _:
                    answer = _try_answer(client, [*turns, Turn("user", line)], chosen, max_reasoning_tokens)
                    if answer is not None:
                        turns += [Turn("user", line), answer.turn]


def _try_read() -> str | None:
    """One line without its end, or None when there is no more."""
    try:
        return stderr.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        stderr.print()
        return None


def _try_answer(
    client: WeirClient, turns: list[Turn], chosen: GenerateOptions, max_reasoning_tokens: int | None
) -> ChatAnswer | None:
    """Streams the answer to stdout. None if it failed or was broken off: the turn is then not kept."""
    parts: list[AnswerPart] = []
    printer = AnswerPrinter()
    try:
        for chunk in client.chat(turns, chosen, max_reasoning_tokens=max_reasoning_tokens):
            parts += chunk.parts
            printer.add(chunk.parts)
    except KeyboardInterrupt:
        stderr.print("\nbroken off", style="dim")
        return None
    except WeirError as error:
        stderr.print(f"\nerror: {error_line(error)}", style="red", markup=False)
        return None
    printer.finish()
    return ChatAnswer.of(parts)


class AnswerPrinter:
    """Shows one answer as it comes: content on stdout, reasoning on stderr, calls a line each at the end.

    Within one answer content and reasoning take turns at most once, so their ends are where lines end.
    """

    def __init__(self) -> None:
        self._parts: list[AnswerPart] = []
        self._open: Console | None = None
        """Where a line has begun."""

    def add(self, parts: Sequence[AnswerPart]) -> None:
        for part in parts:
            match part:
                case ContentPart(text):
                    self._write(stdout, text)
                case ReasoningPart(text):
                    self._write(stderr, text)
                case ToolCallDelta():
                    self._parts.append(part)

    def break_off(self) -> None:
        """Ends the line."""
        if self._open is not None:
            self._open.out("")
        self._open = None

    def finish(self) -> None:
        """Nothing follows: the last line ends, one of an answer without anything too."""
        calls = ChatAnswer.of(self._parts).tool_calls
        if self._open is None and not calls:
            stdout.out("")
        self.break_off()
        for call in calls:
            stdout.out(shown_call(call), highlight=False)

    def _write(self, console: Console, text: str) -> None:
        if self._open is not None and self._open is not console:
            self._open.out("")
        self._open = console
        console.out(text, end="", highlight=False)


def shown_call(call: ToolCall) -> str:
    """A line of the terminal."""
    return f"{call.name}({call.arguments})" if call.is_complete else f"{call.name}({call.arguments}… (cut off)"
