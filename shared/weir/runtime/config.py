"""Configuration: defaults < TOML file < `WEIR_*` environment < flags, into one frozen dataclass a service.

A field `grace_s` is `grace_s` in TOML, `WEIR_GRACE_S` in the environment and `--grace-s` as a flag. Every value
remembers where it came from until the dataclass has checked it, so that an error names the source.
"""

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from weir.core.addresses import LOOPBACK, check_advertised, check_listen, is_of_this_machine
from weir.core.credentials import masked_url
from weir.core.device import DEVICE_HELP, EXACT_HELP, PRECISION_HELP, Precision, check_exact, check_precision
from weir.core.errors import WeirError
from weir.core.fields import ByteSize, check_range, choices_of, describe_type, format_size, parse_text, parse_toml
from weir.model.files.source import DUMMY_PREFIX
from weir.rpc.identities import check_certified_instance

ROLES = ("transfer", "scheduler", "prefill", "decode", "gateway")
COMMAND_TABLES = ("up", "host")
"""Of the TOML file, of commands that start processes of several roles."""
STACK_TABLES = ("models", "groups")
"""Of the TOML file, which `weir.runtime.stack.models` reads: they say which processes a stack has."""

_INSTANCE = re.compile(r"[A-Za-z0-9_-]{1,40}")
_ENVIRONMENT_PREFIX = "WEIR_"
_NUM_OWN_DESCRIPTORS = 256
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", ByteSize: "SIZE"}
_ConfigT = TypeVar("_ConfigT")
_T = TypeVar("_T")


NATS_SCHEMES = ("nats://", "tls://")
OTLP_SCHEMES = ("http://", "https://")

Load = Literal["files", "dummy"]

MODEL_HELP = "Model: a known name, ORG/NAME[:FILE.gguf][@REVISION] of the hub, a GGUF file or a Hugging Face folder."
LOAD_HELP = "Where weights come from: the model's files, or nowhere (dummy: seeded random numbers, for speed tests)."
PAGE_FILES_BYTES = 8 << 30
"""Of files of pages, where nobody says how many."""
MODEL_SHAPE_HELP = "Shape of dummy weights, such as llama-3.1-8b; the setting model is not looked at then."


class ConfigError(WeirError):
    """A value that cannot be used; the message names the field, the value and its source."""


def setting(default: _T, text: str) -> _T:
    """A config field with its default and its line of `--help`."""
    made: _T = field(default=default, metadata={"help": text})
    return made


def default_runtime_dir() -> Path:
    """$XDG_RUNTIME_DIR/weir, or /tmp/weir-<uid> where the session has none."""
    session_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(session_dir) / "weir" if session_dir else Path(f"/tmp/weir-{os.getuid()}")


@dataclass(frozen=True)
class ServiceConfig:
    """What every service has. A service extends it with a frozen dataclass of its own."""

    instance: str = setting("default", "Name of the instance that this process belongs to; instances never meet.")
    index: int = setting(0, "Number of this process among those of its role.")
    listen: str = setting(
        "127.0.0.1:0",
        "Address of the gRPC server: HOST:PORT (port 0: any free one), unix:/PATH or unix:/FOLDER/ (a new name there).",
    )
    insecure_listen: bool = setting(
        False, "Whether `listen` may be an address that other machines reach, though nobody proves there who calls."
    )
    tls_cert: str = setting(
        "", "File with this process' certificate among the stack's, for TCP. Empty: no TLS. `weir certs` makes some."
    )
    tls_key: str = setting("", "File with its key.")
    tls_ca: str = setting("", "File with the authorities whose certificates others of the stack must have.")
    advertise_host: str = setting("", "Host that others reach this process by. Empty: the one of `listen`.")
    nats_url: str = setting("nats://127.0.0.1:4222", "NATS server, nats://[USER:PASSWORD@]HOST:PORT.")
    nats_seed_file: str = setting("", "File with the seed of the NKEY that NATS knows this process by. Empty: none.")
    nats_ca_file: str = setting("", "File with the authorities of the NATS server's certificate. Empty: the system's.")
    otlp_endpoint: str = setting("", "OTLP/gRPC collector for traces, http://HOST:4317. Empty: tracing is off.")
    otlp_metrics_endpoint: str = setting("", "The same for the figures of GET /metrics. Empty: they are not sent.")
    otlp_metrics_interval_s: float = setting(10.0, "Seconds between two times that they are sent.")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe level that is logged.")
    log_format: Literal["text", "json"] = setting("text", "Form of the log lines.")
    ready_file: str = setting("", "File to write when ready. Empty: none.")
    model: str = setting("smollm2-135m", MODEL_HELP)
    load: Literal["files", "dummy"] = setting("files", LOAD_HELP)
    model_shape: str = setting("", MODEL_SHAPE_HELP)
    served_model_name: str = setting("", "What requests call the model. Empty: what its files are called.")
    device: Literal["cpu", "cuda", "interpreter"] = setting("cpu", DEVICE_HELP)
    precision: Precision = setting("auto", PRECISION_HELP)
    exact: bool = setting(False, EXACT_HELP)
    metrics_port: int = setting(
        0, "Port of GET /metrics of this process alone, for Prometheus, and of /live and /ready for probes. 0: none."
    )
    metrics_host: str = setting(LOOPBACK, "Address of that port. Whoever reaches it may read it.")
    grace_s: float = setting(10.0, "Seconds that running work has to end after SIGTERM.")
    runtime_dir: Path = field(
        default_factory=default_runtime_dir,
        metadata={"help": "Folder that holds the folder of each instance: sockets, logs, state."},
    )

    def __post_init__(self) -> None:
        check_instance(self.instance)
        if not 0 <= self.index < 10_000:
            raise ValueError(f"index {self.index}: must be in [0, 10000)")
        check_range(self, "metrics_port", 0, 65535)
        if not self.metrics_host:
            raise ValueError(f"metrics_host is empty: name an address, such as {LOOPBACK}")
        check_range(self, "grace_s", 0, 3600)
        check_listen("listen", self.listen)
        check_together(self, "tls_cert", "tls_key", "tls_ca")
        if self.tls_cert:
            check_certified_instance(self.instance)
        self.check_safe("listen", self.listen)
        check_advertised(self.advertise_host)
        check_load(self.load, self.model_shape)
        check_precision(self.precision, self.device)
        check_exact(self.exact, self.precision, self.device)
        check_url("nats_url", self.nats_url, NATS_SCHEMES)
        if self.otlp_endpoint:
            check_url("otlp_endpoint", self.otlp_endpoint, OTLP_SCHEMES)
        if self.otlp_metrics_endpoint:
            check_url("otlp_metrics_endpoint", self.otlp_metrics_endpoint, OTLP_SCHEMES)
        check_range(self, "otlp_metrics_interval_s", 0.1, 3600)

    def check_safe(self, name: str, listen: str) -> None:
        """Raises ValueError for an address of this setting at which anybody might call."""
        if not (self.is_public or self.tls_cert or self.insecure_listen or is_of_this_machine(listen)):
            raise ValueError(
                f"{name} {listen!r}: other machines reach it, and nobody proves there who calls; give tls_cert, "
                "tls_key and tls_ca, or set insecure_listen where the network between the processes is private, or "
                "listen on 127.0.0.1 or a Unix socket"
            )

    @property
    def is_public(self) -> bool:
        """Whether clients call its gRPC server, who have keys."""
        return False

    @property
    def changes_path(self) -> Path | None:
        """Where it keeps what operators change and who was denied; None: in its log alone."""
        return None

    @property
    def public_tls(self) -> tuple[str, str]:
        """Files with the certificate that clients see, and its key. Empty: no TLS for them."""
        return "", ""

    @property
    def model_reference(self) -> str:
        """What `resolve_model` takes."""
        return model_reference(self.model, self.load, self.model_shape)

    @property
    def num_descriptors(self) -> int:
        """Files and connections that can be open at a time by the bounds of this service; here what every one has."""
        return _NUM_OWN_DESCRIPTORS

    @property
    def instance_dir(self) -> Path:
        """Folder of this instance's sockets, logs and state."""
        return self.runtime_dir / self.instance


def flag_words(name: str, value: object) -> tuple[str, ...]:
    """How a field of a config is given on a command line; of a bool by its flag alone."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    return (f"--{flag}", str(value))


def check_instance(instance: str) -> None:
    """Raises ValueError: a name becomes part of paths, of the segment's name and of subjects."""
    if not _INSTANCE.fullmatch(instance):
        raise ValueError(f"instance {instance!r}: use 1 to 40 characters of A-Z a-z 0-9 _ -")


def check_together(config: object, *names: str) -> None:
    """Raises ValueError where some of these fields are given and others not, naming one of those that lack."""
    lacking = [name for name in names if not getattr(config, name)]
    if lacking and len(lacking) < len(names):
        given = next(name for name in names if name not in lacking)
        raise ValueError(f"{lacking[0]} is empty: {given} needs it; give {', '.join(names)} together, or none")


def check_url(name: str, url: str, schemes: tuple[str, ...]) -> None:
    """Raises ValueError, naming the field `name`."""
    if not url.startswith(schemes):
        raise ValueError(f"{name} {masked_url(url)!r}: must start with {' or '.join(schemes)}")


def check_load(load: Load, model_shape: str) -> None:
    """Raises ValueError: a shape and dummy weights go together."""
    if load == "dummy" and not model_shape:
        raise ValueError("load 'dummy': needs a model_shape, such as llama-3.1-8b")
    if load == "files" and model_shape:
        raise ValueError(f"model_shape {model_shape!r}: is for load 'dummy' only")


def model_reference(model: str, load: Load, model_shape: str) -> str:
    """What `weir.model.files.source.resolve_model` takes."""
    return f"{DUMMY_PREFIX}{model_shape}" if load == "dummy" else model


@dataclass(frozen=True)
class _Given:
    """A value with the words for where it came from."""

    value: Any
    source: str


def load_config(
    cls: type[_ConfigT],
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    toml_path: Path | None = None,
) -> _ConfigT:
    """The configuration of this process. On a bad one prints a line that names value and source, and exits with 2.

    The TOML file is `--config`, else `WEIR_CONFIG`, else `toml_path`. Its top-level keys are for every service; a
    table named after a role (`[gateway]`) is for that role alone and wins over them. A config class belongs to the
    role that its package is named after: `weir_gateway.config` reads `[gateway]`. One of the library names its `ROLE`.
    """
    try:
        return read_config(cls, argv, environ=environ, toml_path=toml_path)
    except ConfigError as error:
        print(f"{_program(cls)}: error: {error.message}", file=sys.stderr)  # noqa: T201 - before logging is set up
        raise SystemExit(2) from None


def read_config(
    cls: type[_ConfigT],
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    toml_path: Path | None = None,
) -> _ConfigT:
    """As `load_config`, but raises ConfigError. Unknown flags and `--help` still end the process, as argparse does."""
    flags = vars(_make_parser(cls, _kinds_of(cls)).parse_args(argv))
    named_file = flags.pop("config", None) or environ.get("WEIR_CONFIG") or toml_path
    return resolve_config(
        cls,
        _program(cls).removeprefix("weir_"),
        flags=flags,
        environ=environ,
        toml_path=Path(named_file) if named_file else None,
    )


def resolve_config(
    cls: type[_ConfigT],
    section: str,
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    toml_path: Path | None,
    ignored: Collection[str] = (),
) -> _ConfigT:
    """The configuration from its sources. Raises ConfigError.

    `flags`: those given, by field name, as text or as the field's type. `section`: the TOML table that is read beside
    the top level. `ignored`: keys of the top level that are meant for other programs.
    """
    kinds = _kinds_of(cls)
    given: dict[str, _Given] = {}
    if toml_path is not None:
        given |= _from_toml(kinds, toml_path, section, ignored)
    given |= _from_environment(kinds, environ)
    given |= _from_flags(kinds, flags)
    try:
        return cls(**{name: entry.value for name, entry in given.items()})
    except ValueError as error:
        raise ConfigError(f"{error}{_source_of(str(error), given)}") from error


def _kinds_of(cls: type[Any]) -> dict[str, Any]:
    return {
        name: kind for name, kind in get_type_hints(cls, include_extras=True).items() if name in _config_fields(cls)
    }


def _config_fields(cls: type[Any]) -> dict[str, Field[Any]]:
    return {entry.name: entry for entry in fields(cls) if entry.init}


def _program(cls: type[Any]) -> str:
    role = getattr(cls, "ROLE", "")
    return f"weir_{role}" if role else cls.__module__.partition(".")[0]


def _make_parser(cls: type[Any], kinds: Mapping[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_program(cls)}",
        description=(cls.__doc__ or "").partition("\n")[0],
        epilog="Every flag can also be set by the environment (--log-level: WEIR_LOG_LEVEL) or in the TOML file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings (or: WEIR_CONFIG).")
    for name, entry in _config_fields(cls).items():
        text = f"{entry.metadata.get('help', '')} Default: {_default_text(entry, kinds[name])}".replace(
            "%", "%%"
        ).strip()
        flag = "--" + name.replace("_", "-")
        if kinds[name] is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "|".join(choices_of(kinds[name])) or _METAVARS.get(kinds[name], "TEXT")
            parser.add_argument(flag, dest=name, metavar=metavar, help=text)
    return parser


def _default_text(entry: Field[Any], kind: Any) -> str:
    default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
    value = getattr(default, "value", default)
    if kind == ByteSize and isinstance(value, int) and value > 0:
        return format_size(value)
    return "(must be given)" if default is MISSING else f"{value!r}" if isinstance(value, str) else f"{value}"


def _from_toml(kinds: Mapping[str, Any], path: Path, section: str, ignored: Collection[str]) -> dict[str, _Given]:
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    tables = {
        name: document.pop(name)
        for name in (*ROLES, *COMMAND_TABLES, *STACK_TABLES)
        if isinstance(document.get(name), dict)
    }
    document = {key: value for key, value in document.items() if key not in ignored}
    given: dict[str, _Given] = {}
    for table, prefix in ((document, ""), (tables.get(section, {}), f"[{section}] ")):
        for key, value in table.items():
            source = f"{path}: {prefix}{key}"
            if key not in kinds:
                raise ConfigError(f"{source}: there is no such setting")
            try:
                given[key] = _Given(parse_toml(kinds[key], value), source)
            except ValueError as error:
                raise _bad_value(f"{source} = {value!r}", kinds[key]) from error
    return given


def _from_environment(kinds: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, _Given]:
    # A WEIR_* variable without a field here is no error: it may be meant for a process of another role.
    names = {_ENVIRONMENT_PREFIX + name.upper(): name for name in kinds}
    return {
        names[variable]: _parsed(kinds[names[variable]], text, variable, f"{variable}={text!r}")
        for variable, text in environ.items()
        if variable in names
    }


def _from_flags(kinds: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        is_text = isinstance(value, str)
        given[name] = _parsed(kinds[name], value, flag, f"{flag} {value!r}") if is_text else _Given(value, flag)
    return given


def _parsed(kind: Any, text: str, source: str, shown: str) -> _Given:
    try:
        return _Given(parse_text(kind, text), source)
    except ValueError as error:
        raise _bad_value(shown, kind) from error


def _bad_value(shown: str, kind: Any) -> ConfigError:
    return ConfigError(f"{shown}: must be {describe_type(kind)}")


def _source_of(message: str, given: Mapping[str, _Given]) -> str:
    """Where the first field that the message names was set; a default has no source to name."""
    mentioned = [word for word in re.findall(r"\w+", message) if word in given]
    return f" (from {given[mentioned[0]].source})" if mentioned else ""
