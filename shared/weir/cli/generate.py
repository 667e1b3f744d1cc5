"""`weir generate`: one prompt to the terminal, or a file of prompts to a file of answers."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import EXIT_USAGE, error_line, fail, stdout
from weir.client import GenerateOptions, WeirClient
from weir.core.errors import WeirError


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    input_path: Annotated[Path | None, typer.Option("--input", help="JSONL: a prompt a line, see below.")] = None,
    output_path: Annotated[Path | None, typer.Option("--output", help="JSONL to write or to go on with.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once, with --input.")] = 32,
    address: options.Address = options.DEFAULT_ADDRESS,
    model: options.ModelName = "",
    lane: options.Lane = "",
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
) -> None:
    """Continue a prompt, or each prompt of a file.

    A line of --input is {"prompt": "…"} or {"prompt": [token ids]}, with an "id" if you like (else its line number).
    A line of --output has the id, text, finish_reason and token counts, or an error. Run the same command again to go
    on with a half-done output: finished ids are skipped, failed ones are tried again.

    \b
    weir generate --temperature 0 --max-tokens 24 "The capital of France is"
    weir generate --input prompts.jsonl --output answers.jsonl --max-tokens 64
    """
    from weir.cli.generate_file import generate_file

    if bool(prompt) == bool(input_path):
        fail("give either a PROMPT or --input FILE.jsonl", code=EXIT_USAGE)
    if bool(input_path) != bool(output_path):
        fail("--input and --output belong together", code=EXIT_USAGE)
    chosen = GenerateOptions(
        model=model,
        lane=lane,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    if input_path is not None and output_path is not None:
        raise typer.Exit(generate_file(address, input_path, output_path, chosen, concurrency))
    _print_answer(address, prompt, chosen)


def _print_answer(address: str, prompt: str, chosen: GenerateOptions) -> None:
    with WeirClient(address) as client:
        try:
            for chunk in client.generate(prompt, chosen):
                stdout.out(chunk.text, end="", highlight=False)
        except WeirError as error:
            stdout.out("")
            fail(error_line(error))
    stdout.out("")
