"""Options that several commands share."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from weir.cli import EXIT_USAGE
from weir.cli.console import fail
from weir.client import DEFAULT_TIMEOUT_S, AsyncWeirClient, GenerateOptions, WeirClient
from weir.client.messages import key_metadata
from weir.core.grammar import Grammar

Address = Annotated[
    str, typer.Option(help="The gateway's gRPC port, HOST:PORT.", envvar="WEIR_ADDRESS", show_default=True)
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; range [0, 2].")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability; (0, 1].")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens this likely, beside the likeliest; [0, 1].")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: fewer tokens of prompt and output again; [0.125, 8].")
]
PresencePenalty = Annotated[float | None, typer.Option(help="Taken from tokens of the output; [-2, 2].")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="As presence, for each time; [-2, 2].")]
LogitBias = Annotated[list[str] | None, typer.Option(help="ID=BIAS, added to a token's logit; several times.")]
Logprobs = Annotated[int | None, typer.Option(help="Each token's log-probability and so many likely ones, by --json.")]
PromptLogprobs = Annotated[int | None, typer.Option(help="As --logprobs, of the tokens of the prompt.")]
NumChoices = Annotated[int | None, typer.Option("--n", help="Answers to the same prompt; 1 to 16.")]
MinTokens = Annotated[int | None, typer.Option(help="No stop before so many tokens.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="A token id that ends the answer; several times.")
]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="The stop text is part of the answer.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")]
MaxTokens = Annotated[int | None, typer.Option(help="At most this many tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-text token.")]
JsonSchema = Annotated[Path | None, typer.Option(help="A file with a JSON schema: the answer is JSON that it allows.")]
Regex = Annotated[str, typer.Option(help="The whole answer matches this regular expression (Rust's syntax).")]
Lane = Annotated[str, typer.Option(help="Lane to queue in. Empty: the default lane.")]
TtftTargetMs = Annotated[int | None, typer.Option(help="When the first token is wanted, in ms from now.")]
ItlTargetMs = Annotated[int | None, typer.Option(help="Wanted between two tokens, in ms.")]
ExpectedOutputTokens = Annotated[int | None, typer.Option(help="How long the answer will be, as far as you know.")]
CacheSalt = Annotated[str, typer.Option(help="Share cached pages only with requests that have the same salt.")]
SkipsPrefixCache = Annotated[
    bool, typer.Option("--skip-prefix-cache", help="Take no page from the prefix cache, and leave none there.")
]
PartialAtDeadline = Annotated[
    bool,
    typer.Option("--partial-at-deadline", help="After --timeout-s take what there is of the answer; else it fails."),
]
TimeoutS = Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the whole answer: its deadline.")]


def check_key(key: str) -> str:
    """For keys in options: one that no header can carry is wrong usage. It is not repeated."""
    try:
        key_metadata(key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return key


ApiKey = Annotated[
    str,
    typer.Option(
        help="Who asks, where the gateway wants to know.",
        envvar="WEIR_API_KEY",
        show_envvar=True,
        callback=check_key,
    ),
]
ModelName = Annotated[str, typer.Option(help="Model to ask. Empty: the only one served.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]

Instance = Annotated[
    str, typer.Option(help="Name of the instance. Default: the only one that runs.", envvar="WEIR_INSTANCE")
]
InstancePort = Annotated[int | None, typer.Option("--grpc-port", help="Its gRPC port, instead of its name.")]
RuntimeDir = Annotated[
    Path | None, typer.Option(help="Folder that holds the folder of each instance.", envvar="WEIR_RUNTIME_DIR")
]

DEFAULT_ADDRESS = "127.0.0.1:50051"


class Reach(NamedTuple):
    """Where a gateway is, how long an answer may take, and who asks."""

    address: str
    timeout_s: float = DEFAULT_TIMEOUT_S
    api_key: str = ""

    def client(self) -> WeirClient:
        return WeirClient(self.address, timeout_s=self.timeout_s, api_key=self.api_key)

    def async_client(self) -> AsyncWeirClient:
        """Within a running loop."""
        return AsyncWeirClient(self.address, timeout_s=self.timeout_s, api_key=self.api_key)


def generate_options(arguments: Mapping[str, Any]) -> GenerateOptions:
    """Of a command's arguments (`locals()`) those that are options of a request, by the names of its fields.

    Ends the command, naming the option, on a bias that is none.
    """
    given = {entry.name: arguments[entry.name] for entry in fields(GenerateOptions) if entry.name in arguments}
    given |= {name: tuple(given[name] or ()) for name in ("stop", "stop_token_ids")}
    given["logit_bias"] = tuple(_parse_bias(entry) for entry in given["logit_bias"] or ())
    return GenerateOptions(**given)


def grammar_of(json_schema: Path | None, regex: str) -> Grammar | None:
    """Ends the command on both, and on a file that cannot be read. What is wrong with the grammar the gateway says."""
    if json_schema is None:
        return Grammar("regex", regex) if regex else None
    if regex:
        fail("--json-schema and --regex: give one of them", code=EXIT_USAGE)
    try:
        return Grammar("json_schema", json_schema.read_text())
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--json-schema {json_schema}: {error}", code=EXIT_USAGE)


def _parse_bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        fail(f"--logit-bias {entry}: give ID=BIAS, such as 42=-5", code=EXIT_USAGE)
