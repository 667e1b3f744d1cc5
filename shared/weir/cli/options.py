"""Options that several commands share."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer

from weir.cli import EXIT_NOT_RUNNING, EXIT_USAGE
from weir.cli.console import error_line, fail
from weir.client import DEFAULT_TIMEOUT_S, AsyncWeirClient, GenerateOptions, Tool, Tools, WeirClient
from weir.client.chats import ToolMode
from weir.core.credentials import key_metadata
from weir.core.errors import WeirError
from weir.core.grammar import Grammar
from weir.rpc.tls.certificates import Certificate, CertificateError, CertificateFiles
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.credentials import HostCredentials
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.state import try_read_state

Address = Annotated[
    str,
    typer.Option(
        help="The gateway's gRPC port, HOST:PORT; with TLS by a public authority https://HOST:PORT.",
        envvar="WEIR_ADDRESS",
        show_default=True,
    ),
]
Ca = Annotated[str, typer.Option(help="File with the authorities of the gateway's certificate: TLS.", envvar="WEIR_CA")]
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
AsChat = Annotated[
    bool, typer.Option("--chat", help="PROMPT is what a user says, for the chat template; not a text to continue.")
]
ToolsFile = Annotated[
    Path | None,
    typer.Option("--tools", help="With --chat: a JSON file, a list of tools as OpenAI has it, that may be called."),
]
ToolChoice = Annotated[str, typer.Option(help="With --tools: auto, none, required, or the name of the tool to call.")]
NoParallelToolCalls = Annotated[bool, typer.Option("--no-parallel-tool-calls", help="At most one call an answer.")]
MaxReasoningTokens = Annotated[
    int | None, typer.Option(min=0, help="Chats: tokens after which reasoning must end; 0: no reasoning.")
]
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
_MODES: tuple[ToolMode, ...] = get_args(ToolMode)


def operator_certificate(credentials_dir: str = "") -> Certificate | None:
    """That of the environment, as processes have theirs, else that of a host in this folder: for commands that ask
    schedulers. None: there is none. Ends the command on one that cannot be used."""
    paths = [os.environ.get(f"WEIR_TLS_{part}", "") for part in ("CERT", "KEY", "CA")]
    if any(paths) and not all(paths):
        fail("WEIR_TLS_CERT, WEIR_TLS_KEY and WEIR_TLS_CA: give all three, or none", code=EXIT_USAGE)
    if not any(paths) and not credentials_dir:
        return None
    files = CertificateFiles(*paths) if any(paths) else HostCredentials(Path(credentials_dir)).operator
    try:
        found = files.load()
    except CertificateError as error:
        fail(error.message, code=EXIT_USAGE)
    if found.identity is None:
        fail(f"WEIR_TLS_CERT {files.cert}: names no process or operator of Weir", code=EXIT_USAGE)
    return found


@contextmanager
def usable_ca() -> Iterator[None]:
    """Ends the command on a file of the option --ca that cannot be used."""
    try:
        yield
    except CertificateError as error:
        fail(f"--{error.message}", code=EXIT_USAGE)


def find_gateways(
    given: Sequence[str], admin_key: str, instance: str, grpc_port: int | None, runtime_dir: Path | None
) -> tuple[list[str], str]:
    """URLs of the HTTP ports, the first gateway's first, and an operator's key: those given, else those of the stack
    that `weir up` started here. Ends the command where there is none."""
    if given:
        return list(given), admin_key
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
    except WeirError as error:
        fail(error_line(error))
    state = try_read_state(paths.state_file)
    if state is None:
        hint = "start it with `weir up`, or name a gateway with --gateway"
        fail(f"{paths.folder.name} is not running here; {hint}", code=EXIT_NOT_RUNNING)
    urls = [url.removesuffix("/v1") for url in state.endpoints.values() if url.endswith("/v1")]
    return urls, admin_key or paths.try_read_admin_key() or ""


class Reach(NamedTuple):
    """Where a gateway is, how long an answer may take, and who asks."""

    address: str
    timeout_s: float = DEFAULT_TIMEOUT_S
    api_key: str = ""
    ca: str = ""

    def client(self) -> WeirClient:
        """Ends the command on a file `ca` that cannot be used."""
        with usable_ca():
            return WeirClient(self.address, timeout_s=self.timeout_s, api_key=self.api_key, ca=self.ca)

    def async_client(self) -> AsyncWeirClient:
        """Within a running loop. As `client`."""
        with usable_ca():
            return AsyncWeirClient(self.address, timeout_s=self.timeout_s, api_key=self.api_key, ca=self.ca)


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


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat has beside its turns and `GenerateOptions`; None of a command: it continues texts."""

    tools: Tools | None = None
    max_reasoning_tokens: int | None = None


def chat_options(arguments: Mapping[str, Any]) -> ChatOptions | None:
    """Of a command's arguments (`locals()`). Ends the command on options that do not go together."""
    path, choice, is_single = (arguments[name] for name in ("tools_path", "tool_choice", "no_parallel_tool_calls"))
    budget = arguments["max_reasoning_tokens"]
    if path is None and (choice != "auto" or is_single):
        fail("--tool-choice and --no-parallel-tool-calls are of tools: give --tools FILE too", code=EXIT_USAGE)
    if not arguments["as_chat"]:
        if path is not None or budget is not None:
            fail("--tools and --max-reasoning-tokens are of chats: give --chat too", code=EXIT_USAGE)
        return None
    if path is None:
        return ChatOptions(max_reasoning_tokens=budget)
    tools = _read_tools(path)
    mode = next((mode for mode in _MODES if mode == choice), None)
    if mode is None and choice not in [tool.name for tool in tools]:
        known = ", ".join((*_MODES, *(tool.name for tool in tools)))
        fail(f"--tool-choice {choice}: must be one of {known}", code=EXIT_USAGE)
    names = () if mode is not None else (choice,)
    return ChatOptions(Tools(tools, mode or "required", names, is_parallel=not is_single), budget)


def _parse_bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        fail(f"--logit-bias {entry}: give ID=BIAS, such as 42=-5", code=EXIT_USAGE)


def _read_tools(path: Path) -> tuple[Tool, ...]:
    """In OpenAI's form; what is wrong with a tool itself the gateway says."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        fail(f"--tools {path}: {error}", code=EXIT_USAGE)
    if not isinstance(entries, list) or not entries:
        fail(f"--tools {path}: must be a JSON list of tools", code=EXIT_USAGE)
    return tuple(_tool_of(entry, f"--tools {path}, [{index}]") for index, entry in enumerate(entries))


def _tool_of(entry: object, where: str) -> Tool:
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        shown = '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
        fail(f"{where}: must be {shown}", code=EXIT_USAGE)
    unknown = sorted(function.keys() - {"type", "name", "description", "parameters", "strict"})
    if unknown:
        known = "known are name, description, parameters, strict"
        fail(f"{where}: has {unknown[0]!r}, which is not known; {known}", code=EXIT_USAGE)
    description, parameters, strict = (function.get(name) for name in ("description", "parameters", "strict"))
    if not isinstance(description, str | None):
        fail(f"{where}: description must be a text", code=EXIT_USAGE)
    if not isinstance(parameters, dict | None):
        fail(f"{where}: parameters must be a JSON schema, which is an object", code=EXIT_USAGE)
    if not isinstance(strict, bool | None):
        fail(f"{where}: strict must be true or false", code=EXIT_USAGE)
    return Tool(function["name"], description, parameters, bool(strict))
