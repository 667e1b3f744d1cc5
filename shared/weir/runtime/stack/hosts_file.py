"""Several hosts of one stack, as a file says them, and what each is started with.

instance = "lab"            # of all
nats_port = 4222            # of the server that one host runs; or nats = "tls://HOST:PORT", which is there already
insecure_listen = false     # true: no credentials, since the network between the hosts is private

[hosts.a]                   # names are for people, and for certificates
address = "10.0.0.1"        # or a name, by which the other hosts reach it
serve_nats = true
schedulers = 1
gateways = 1

[hosts.b]
address = "10.0.0.2"
prefill = 2
decode = 2
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from weir.core.addresses import bracketed
from weir.core.fields import check_range, describe_type, parse_toml
from weir.runtime.config import ConfigError, check_instance, flag_words
from weir.runtime.stack.host import DEFAULT_NATS_PORT, HostConfig

_MAX_HOSTS = 1000
_T = TypeVar("_T")


@dataclass(frozen=True)
class HostEntry:
    """One host. Raises ValueError."""

    name: str
    address: str = ""
    serve_nats: bool = False
    prefill: int = 1
    decode: int = 1
    schedulers: int = 0
    gateways: int = 0

    def config(self, hosts: "Hosts", credentials_dir: str) -> HostConfig:
        """What `weir host` is to have there. `credentials_dir`: empty: none. Raises ValueError."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "name"}
        return HostConfig(
            **own,
            nats=hosts.nats_url,
            instance=hosts.instance,
            credentials_dir=credentials_dir,
            insecure_listen=hosts.insecure_listen,
        )


@dataclass(frozen=True)
class Hosts:
    """All of a stack. Raises ValueError that names the field, its value and what it must be."""

    instance: str = ""
    nats: str = ""
    nats_port: int = DEFAULT_NATS_PORT
    insecure_listen: bool = False
    hosts: tuple[HostEntry, ...] = ()

    def __post_init__(self) -> None:
        check_instance(self.instance)
        check_range(self, "nats_port", 1, 65535)
        if not 1 <= len(self.hosts) <= _MAX_HOSTS:
            raise ValueError(f"hosts: {len(self.hosts)}, must be in [1, {_MAX_HOSTS}]")
        for what, least in (("decode", 1), ("schedulers", 1), ("gateways", 1)):
            if sum(getattr(host, what) for host in self.hosts) < least:
                raise ValueError(f"hosts: none has {what}; set it to 1 or more at one of them")
        servers = [host.name for host in self.hosts if host.serve_nats]
        if len(servers) != (0 if self.nats else 1):
            named = ", ".join(servers) or "none"
            wanted = "no host, since nats names a server" if self.nats else "one host"
            raise ValueError(f"hosts: serve_nats is set for {named}; must be so for {wanted}")
        seen: dict[str, str] = {}
        for host in self.hosts:
            other = seen.setdefault(host.address, host.name)
            if other != host.name:
                raise ValueError(f"hosts.{host.name}.address {host.address!r}: is also that of hosts.{other}")
            try:
                host.config(self, "" if self.insecure_listen else ".")
            except ValueError as error:
                raise ValueError(f"hosts.{host.name}.{error}") from error

    @property
    def nats_url(self) -> str:
        if self.nats:
            return self.nats
        address = next(host.address for host in self.hosts if host.serve_nats)
        return f"{'nats' if self.insecure_listen else 'tls'}://{bracketed(address)}:{self.nats_port}"


def read_hosts(path: Path) -> Hosts:
    """Raises ConfigError that begins with the path, OSError."""
    try:
        document = tomllib.loads(path.read_text())
        tables = document.pop("hosts", {})
        if not isinstance(tables, dict):
            raise ValueError("hosts: must be tables, each begun with [hosts.NAME]")
        entries = tuple(_read(HostEntry(name), table, f"hosts.{name}.") for name, table in tables.items())
        common = {name: _parsed(Hosts, name, value, "") for name, value in document.items()}
        return Hosts(**common, hosts=entries)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(base: _T, table: Any, where: str) -> _T:
    if not isinstance(table, dict):
        raise ValueError(f"{where[:-1]}: must be a table")
    return replace(base, **{name: _parsed(type(base), name, value, where) for name, value in table.items()})  # type: ignore[type-var]


def _parsed(kind: type[Any], name: str, value: Any, where: str) -> Any:
    hints = {field: hint for field, hint in get_type_hints(kind).items() if field not in ("name", "hosts")}
    if name not in hints:
        raise ValueError(f"{where}{name}: there is no such setting; known are {', '.join(hints)}")
    try:
        return parse_toml(hints[name], value)
    except ValueError as error:
        raise ValueError(f"{where}{name} = {value!r}: must be {describe_type(hints[name])}") from error


def host_command(config: HostConfig, more: Mapping[str, object]) -> list[str]:
    """`weir host …` with what differs from its defaults, and with `more`: settings of all hosts."""
    words = ["weir", "host", "--join", config.nats]
    values = {name: getattr(config, name) for name in ("instance", "address", "credentials_dir")}
    values |= {name: getattr(config, name) for name in ("serve_nats", "insecure_listen")}
    values |= {name: getattr(config, name) for name in ("prefill", "decode", "schedulers", "gateways")}
    defaults = {entry.name: entry.default for entry in fields(HostConfig)}
    for name, value in {**{name: value for name, value in values.items() if value != defaults[name]}, **more}.items():
        words += flag_words(name, value)
    return words
