"""`weir chat`: a conversation in the terminal."""

from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import error_line, stderr, stdout
from weir.client import DEFAULT_TIMEOUT_S, GenerateOptions, Turn, WeirClient
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
) -> None:
    """Talk with the model; the conversation is kept. /reset forgets it, /quit or Ctrl-D ends.

    Ctrl-C breaks off an answer. Text from a pipe is taken line by line.

    \b
    weir chat
    weir chat --system "Answer in one sentence." --temperature 0
    """
    chosen = options.generate_options(locals())
    opening = [Turn("system", system)] if system else []
    turns = list(opening)
    with options.Reach(address, timeout_s, api_key).client() as client:
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
                    answer = _try_answer(client, [*turns, Turn("user", line)], chosen)
                    if answer is not None:
                        turns += [Turn("user", line), Turn("assistant", answer)]


def _try_read() -> str | None:
    """One line without its end, or None when there is no more."""
    try:
        return stderr.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        stderr.print()
        return None


def _try_answer(client: WeirClient, turns: list[Turn], chosen: GenerateOptions) -> str | None:
    """Streams the answer to stdout. None if it failed or was broken off: the turn is then not kept."""
    stream = client.chat(turns, chosen)
    text = ""
    try:
        for chunk in stream:
            text += chunk.text
            stdout.out(chunk.text, end="", highlight=False)
    except KeyboardInterrupt:
        stderr.print("\nbroken off", style="dim")
        return None
    except WeirError as error:
        stderr.print(f"\nerror: {error_line(error)}", style="red", markup=False)
        return None
    stdout.out("")
    return text
