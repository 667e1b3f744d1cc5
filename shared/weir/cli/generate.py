"""`weir generate`: one prompt to the terminal, or a file of prompts to a file of answers."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import error_line, fail, stdout
from weir.cli.exit_codes import EXIT_USAGE
from weir.client import DEFAULT_TIMEOUT_S, GenerateOptions, WeirClient
from weir.core.errors import WeirError


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
    stop_token_id: options.StopTokenId = None,
    include_stop: options.IncludeStop = False,
    ignore_eos: options.IgnoreEos = False,
    n: options.NumChoices = None,
    logprobs: options.Logprobs = None,
    as_json: options.AsJson = False,
) -> None:
    """Continue a prompt, or each prompt of a file.

    A line of --input is {"prompt": "…"} or {"prompt": [token ids]}, with an "id" if you like (else its line number).
    A line of --output has the id, text, finish_reason and token counts, or an error; with --n it has choices, with
    --logprobs a list of them. --json prints such a line for one prompt. Run the same command again to go on with a
    half-done output: finished ids are skipped, failed ones are tried again.

    \b
    weir generate --temperature 0 --max-tokens 24 "The capital of France is"
    weir generate --n 3 --temperature 0.8 --frequency-penalty 0.5 --seed 1 "Once upon a time"
    weir generate --input prompts.jsonl --output answers.jsonl --max-tokens 64
    """
    from weir.cli.generate_file import generate_file, generate_json

    if (prompt is None) == (input_path is None):
        fail("give either a PROMPT or --input FILE.jsonl", code=EXIT_USAGE)
    if prompt == "":
        fail("PROMPT is empty: give at least one character", code=EXIT_USAGE)
    if (input_path is None) != (output_path is None):
        fail("--input and --output belong together", code=EXIT_USAGE)
    chosen = GenerateOptions(
        model=model,
        lane=lane,
        ttft_target_ms=ttft_target_ms,
        itl_target_ms=itl_target_ms,
        expected_output_tokens=expected_output_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=options.parse_logit_bias(logit_bias),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        include_stop=include_stop,
        n=n,
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    reach = options.Reach(address, timeout_s, api_key)
    if input_path is not None and output_path is not None:
        raise typer.Exit(generate_file(reach, input_path, output_path, chosen, concurrency))
    if prompt is not None and as_json:
        raise typer.Exit(generate_json(reach, prompt, chosen))
    if prompt is not None:
        _print_answer(reach, prompt, chosen)


def _print_answer(reach: options.Reach, prompt: str, chosen: GenerateOptions) -> None:
    has_open_line = False
    with reach.client() as client:
        try:
            if chosen.n is not None and chosen.n > 1:
                _print_choices(client, prompt, chosen)
                return
            for chunk in client.generate(prompt, chosen):
                stdout.out(chunk.text, end="", highlight=False)
                has_open_line = True
        except WeirError as error:
            if has_open_line:
                stdout.out("")
            fail(error_line(error))
    stdout.out("")


def _print_choices(client: WeirClient, prompt: str, chosen: GenerateOptions) -> None:
    """Each when it is complete, since they come at the same time."""
    texts: dict[int, str] = {}
    for chunk in client.generate(prompt, chosen):
        texts[chunk.choice] = texts.get(chunk.choice, "") + chunk.text
        if chunk.finish_reason is not None:
            stdout.out(f"[{chunk.choice}] {texts[chunk.choice]}", highlight=False)
