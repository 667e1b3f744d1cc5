"""What the command of a container comes to with its settings: read as the product itself reads them."""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import click
import typer.main
from tests.guard.test_compose import config_class
from tests.kubernetes.chart import Object, Objects

from weir.cli.app import app
from weir.runtime.config import ConfigError, ServiceConfig, read_config, resolve_config
from weir.runtime.stack.host import HostConfig
from weir.runtime.stack.plan import ProcessSpec, plan_stack

POD_IP = "10.1.2.3"
_CONFIG = "/etc/weir/config/weir.toml"
_OTHERS = frozenset({"WEIR_CONFIG", "WEIR_CACHE"})
"""Variables that are no setting of a process."""
_PORT = re.compile(r":(\d+)$")


class WrongCommand(Exception):
    """It would not start, or means nothing; says why."""


@dataclass(frozen=True, slots=True)
class Command:
    """`ports`: on which it listens at its pod's address, by what for. `files`: that its settings name. `grace_s`: that
    it takes to end its work."""

    ports: Mapping[str, int]
    files: tuple[str, ...]
    grace_s: float


def command_of(container: Object, objects: Objects) -> Command | None:
    """None for one that listens nowhere. Raises WrongCommand."""
    words, environ = _words(container), _environ(container)
    match words[:3]:
        case ["weir", "host", *_]:
            return _host(words[2:], environ, objects)
        case ["weir", "serve", role]:
            return _service(role, words[3:], environ, objects)
        case ["weir", name, *_]:
            _parse(name, words[2:], environ)
            return None
        case ["nats-server", "--config", path]:
            return _nats(objects.configuration[Path(path).name])
        case ["sh", "-c", _]:
            return None
    raise WrongCommand(f"{container['name']}: {' '.join(words)}: no command that is known here")


def _words(container: Object) -> list[str]:
    words = [*container.get("command", []), *container.get("args", [])]
    return [word.replace("$(POD_IP)", POD_IP) for word in words]


def _environ(container: Object) -> dict[str, str]:
    """What comes from elsewhere has a value that any setting takes."""
    return {one["name"]: str(one.get("value", "off")) for one in container.get("env", [])}


@cache
def _commands() -> Mapping[str, click.Command]:
    group: Any = typer.main.get_command(app)
    commands: Mapping[str, click.Command] = group.commands
    return commands


def _parse(name: str, words: list[str], environ: Mapping[str, str], *others: str) -> dict[str, Any]:
    """Options of `weir NAME` that are given, by their settings' names."""
    command = _commands()[name]
    variables = {entry.envvar for entry in command.params if getattr(entry, "envvar", None)}
    unknown = {one for one in environ if one.startswith("WEIR_")} - variables - _OTHERS - set(others)
    if unknown:
        raise WrongCommand(f"weir {name} knows no {', '.join(sorted(unknown))}")
    try:
        context = command.make_context(name, list(words))
    except Exception as error:  # typer has click's errors of its own
        raise WrongCommand(f"weir {name}: {getattr(error, 'message', error)}") from error
    return {key: value for key, value in context.params.items() if value is not None}


def _host(words: list[str], environ: Mapping[str, str], objects: Objects) -> Command:
    names = frozenset(entry.name for entry in fields(HostConfig))
    flags = _parse("host", words, environ, *(f"WEIR_{name.upper()}" for name in names))
    flags = {name: str(value) for name, value in flags.items() if name in names}
    ignored = frozenset(entry.name for entry in fields(ServiceConfig)) - names
    with tempfile.TemporaryDirectory() as folder:
        path = _file(Path(folder), environ, objects)
        try:
            config = resolve_config(HostConfig, "host", flags=flags, environ=environ, toml_path=path, ignored=ignored)
            plan = plan_stack(config, config.nats_port or 0)
            for role in {spec.role for spec in plan.specs}:  # they read the same file
                read_config(config_class(role), [], environ={}, toml_path=path)
        except (ConfigError, ValueError) as error:
            raise WrongCommand(f"weir host: {error}") from error
    ports = {"probe": config.probe_port}
    for index, spec in enumerate(plan.specs):
        ports[f"metrics-{index}"] = config.metrics_port + index
        ports |= _ports_of(spec)
    files = [word for spec in plan.specs for word in spec.command if word.startswith("/etc/weir/")]
    return Command(ports, tuple(files), sum(plan.stage_grace_s[1:]))


def _ports_of(spec: ProcessSpec) -> dict[str, int]:
    flags = dict(zip(spec.command, spec.command[1:], strict=False))
    if spec.role == "transfer":
        return {"pages": _port(flags["--pages-listen"]), "page-streams": int(flags["--page-streams-port"])}
    return {spec.name: _port(flags["--listen"])}


def _port(listen: str) -> int:
    found = _PORT.search(listen)
    assert found is not None, listen
    return int(found[1])


def _service(role: str, words: list[str], environ: Mapping[str, str], objects: Objects) -> Command:
    kind = config_class(role)
    known = {f"WEIR_{entry.name.upper()}" for entry in fields(kind)} | _OTHERS
    unknown = {name for name in environ if name.startswith("WEIR_")} - known
    if unknown:
        raise WrongCommand(f"weir serve {role} knows no {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        own = {name: value for name, value in environ.items() if name != "WEIR_CONFIG"}
        try:
            config: Any = read_config(kind, words, environ=own, toml_path=_file(Path(folder), environ, objects))
        except ConfigError as error:
            raise WrongCommand(f"weir serve {role}: {error.message}") from error
        except SystemExit as error:
            raise WrongCommand(f"weir serve {role}: {' '.join(words)}: no such flag") from error
    ports = {"grpc": _port(config.listen), "metrics": config.metrics_port}
    if role == "gateway":
        ports["http"] = config.http_port
    named = (getattr(config, entry.name) for entry in fields(kind))
    files = tuple(value for value in named if isinstance(value, str) and value.startswith("/etc/weir/"))
    return Command(ports, files, config.grace_s)


def _file(folder: Path, environ: Mapping[str, str], objects: Objects) -> Path:
    if environ.get("WEIR_CONFIG") != _CONFIG:
        raise WrongCommand(f"WEIR_CONFIG is {environ.get('WEIR_CONFIG')!r}, and the file is {_CONFIG}")
    path = folder / "weir.toml"
    path.write_text(objects.configuration["weir.toml"])
    return path


def _nats(conf: str) -> Command:
    found = dict(re.findall(r"^\s*(port|http_port): (\d+)$", conf, re.MULTILINE))
    clusters = re.search(r"cluster \{.*?port: (\d+)", conf, re.DOTALL)
    outer = re.search(r"^port: (\d+)$", conf, re.MULTILINE)
    assert outer is not None
    ports = {"nats": int(outer[1]), "http": int(found["http_port"])}
    if clusters:
        ports["cluster"] = int(clusters[1])
    files = re.findall(r"(/etc/nats/\S+)", conf) + (
        ["/etc/nats/credentials/nats-roles.conf"] if "include" in conf else []
    )
    drain = re.search(r"lame_duck_duration: (\d+)s", conf)
    return Command(ports, tuple(files), float(drain[1]) if drain else 0.0)
