"""`weir models`: what is on this machine to be served; models added to a stack that runs, and taken away."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from weir.cli import EXIT_USAGE, options
from weir.cli.console import error_line, fail, size_text, stderr, stdout
from weir.cli.stack.models import need_model
from weir.core.device import Precision
from weir.core.errors import WeirError
from weir.core.fields import describe_type, parse_size, parse_text
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.control import ask_supervisor
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.models import ReasoningFormatName, StackModel, ToolFormatName

_SHOWN_COMMIT_CHARS = 12


_START_S = 3600.0
_END_S = 60.0
app = typer.Typer()


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the models that are here: the built-in one and those of the Hugging Face Hub's cache (HF_HOME).

    `add` and `remove` change what a running stack serves.

    What stands first is what --model takes. Those that Weir does not serve are listed with the reason.

    \b
    weir models
    weir models --json
    """
    if context.invoked_subcommand is not None:
        return
    from weir.model.hub.local_models import list_local_models

    found = list_local_models()
    if as_json:
        stdout.out(json.dumps([asdict(model) for model in found], indent=1), highlight=False)
        return
    width = max(len(model.name) for model in found)
    stdout.print(f"{'model':<{width}}  {'size':>9}  {'revision':<{_SHOWN_COMMIT_CHARS}}  usable", markup=False)
    for model in found:
        revision = model.revision[:_SHOWN_COMMIT_CHARS]
        line = f"{model.name:<{width}}  {size_text(model.size_bytes):>9}  {revision:<{_SHOWN_COMMIT_CHARS}}  "
        stdout.print(line, end="", markup=False, soft_wrap=True)
        stdout.print(
            model.obstacle or "yes", style="yellow" if model.obstacle else "green", markup=False, soft_wrap=True
        )
        stdout.print(f"  {model.path}", style="dim", markup=False, soft_wrap=True)
        if model.partial_bytes:
            kept = f"  {size_text(model.partial_bytes)} of files that are not whole: `weir pull` goes on with them"
            stderr.print(kept, style="yellow", markup=False, soft_wrap=True)


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What requests are to call it.")],
    model: Annotated[str, typer.Option(help="As for `weir up`. Empty: NAME.")] = "",
    load: Annotated[Literal["files", "dummy"], typer.Option(help="dummy: random numbers, for speed tests.")] = "files",
    model_shape: Annotated[str, typer.Option(help="Shape of dummy weights.")] = "",
    precision: Annotated[str, typer.Option(help="As for `weir up`.")] = "auto",
    exact: Annotated[bool, typer.Option("--exact", help="As for `weir up`.")] = False,
    prefill: Annotated[int, typer.Option(help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode workers.")] = 1,
    chat_template: Annotated[str, typer.Option(help="As for `weir up`.")] = "",
    tool_format: Annotated[str, typer.Option(help="As for `weir up`.")] = "auto",
    reasoning_format: Annotated[str, typer.Option(help="As for `weir up`.")] = "auto",
    alias: Annotated[list[str] | None, typer.Option(help="Another name for it; several times.")] = None,
    arena_bytes: Annotated[str, typer.Option(help="Memory for its pages, such as 4GiB. 0: what is free.")] = "0",
    max_context_tokens: Annotated[int, typer.Option(help="Prompt and output together. 0: what fits.")] = 0,
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Serve one more model in a running stack: returns when every gateway does. It gets an arena of its own.

    A stack that is started again has the models of its TOML file: write it down there too, as [models.NAME].

    \b
    weir models add fast --model smollm2-135m --precision int8 --arena-bytes 256MiB --alias small
    """
    try:
        wanted = StackModel(
            name=name,
            model=model or name,
            load=load,
            model_shape=model_shape,
            precision=_precision(precision),
            exact=exact,
            prefill=prefill,
            decode=decode,
            chat_template=chat_template,
            tool_format=cast("ToolFormatName", _one_of("tool_format", ToolFormatName, tool_format)),
            reasoning_format=cast(
                "ReasoningFormatName", _one_of("reasoning_format", ReasoningFormatName, reasoning_format)
            ),
            aliases=tuple(alias or ()),
            arena_bytes=_size(arena_bytes),
            max_context_tokens=max_context_tokens,
        )
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)
    request = {"do": "add", "model": asdict(need_model(wanted))}
    _ask(request, _START_S, instance, grpc_port, runtime_dir)
    stderr.print(f"{name} is served", markup=False)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The model, by its name or an alias.")],
    grace_s: Annotated[float, typer.Option(min=0, max=3600, help="Seconds that its requests have to end.")] = 30.0,
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Take a model out of a running stack: new requests get 404 at once, those that run may end first.

    \b
    weir models remove fast --grace-s 60
    """
    request = {"do": "remove", "name": name, "timeout_s": grace_s}
    answer = _ask(request, grace_s + _END_S, instance, grpc_port, runtime_dir)
    if answer["num_open"]:
        stderr.print(f"{answer['num_open']} requests had not ended after {grace_s:g} s", style="yellow", markup=False)
    stderr.print(f"{answer['name']} is gone", markup=False)


def _precision(text: str) -> Precision:
    try:
        return cast("Precision", parse_text(Precision, text))
    except ValueError as error:
        raise ValueError(f"precision {text!r}: must be {describe_type(Precision)}") from error


def _one_of(name: str, kind: object, text: str) -> object:
    try:
        return parse_text(kind, text)
    except ValueError as error:
        raise ValueError(f"{name} {text!r}: must be {describe_type(kind)}") from error


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"arena_bytes {text!r}: must be a number of bytes, or one with a unit: 16GiB") from error


def _ask(
    request: dict[str, Any], timeout_s: float, instance: str, grpc_port: int | None, runtime_dir: Path | None
) -> dict[str, Any]:
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
        return asyncio.run(ask_supervisor(paths.control_socket, request, timeout_s))
    except WeirError as error:
        fail(error_line(error))
