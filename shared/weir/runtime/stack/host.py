"""The settings of one host of a stack of several, which `weir host` runs: it joins what the others are by NATS."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from weir.core.addresses import bare, bracketed, check_advertised, is_loopback
from weir.core.fields import check_range
from weir.core.roles import WORKER_ROLES
from weir.rpc.identities import check_certified_instance
from weir.runtime.config import check_url, setting
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.credentials import HostCredentials

DEFAULT_NATS_PORT = 4222
_LAST_PORT = 65_535
_PORT_ORDER = ("transfer", "page streams", "scheduler", *WORKER_ROLES)
_PORTS_OF_EACH = 20


@dataclass(frozen=True)
class HostConfig(StackConfig):
    """Its services are reached by TCP, and prove who they are by `credentials_dir`."""

    least_of_each: ClassVar[int] = 0

    schedulers: int = setting(0, "Number of schedulers at this host.")
    gateways: int = setting(0, "Number of gateways at this host, each with ports of its own: the next free ones.")
    host: str = setting("", "Address that the gateway listens on. Empty: `address`.")
    instance: str = setting("", "Name of the stack: the same at all of its hosts.")
    nats: str = setting("", "NATS server of the stack, nats://HOST:PORT, or tls://HOST:PORT with credentials.")
    serve_nats: bool = setting(False, "Whether this host runs that server.")
    address: str = setting("", "Address or name by which the other hosts reach this one, and on which it listens.")
    credentials_dir: str = setting(
        "", "Folder with this host's certificates and keys, as `weir up --hosts FILE --out FOLDER` makes it."
    )
    insecure_listen: bool = setting(
        False, "Whether to run without credentials, where the network between the hosts is private."
    )

    first_port: int = setting(
        0,
        "First of the ports at `address` for others of the stack, so that a firewall can name them: from it on "
        "20 each for transfer services, their page streams, schedulers, prefill and decode workers. 0: free ones.",
    )
    metrics_port: int = setting(
        0,
        "First of the ports of GET /metrics at `address`, one a process in the order of `weir status`; whoever reaches "
        "them may read them. 0: free ones of 127.0.0.1.",
    )
    probe_port: int = setting(
        0, "Port of /live and /ready at `address`, which say whether its processes run and serve. 0: none."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "first_port", 0, _LAST_PORT - len(_PORT_ORDER) * _PORTS_OF_EACH)
        check_range(self, "metrics_port", 0, _LAST_PORT)
        check_range(self, "probe_port", 0, _LAST_PORT)
        for name, what in (("instance", "the name of the stack"), ("address", "an address of this host")):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give {what}")
        if not self.nats:
            raise ValueError("nats is empty: give the URL of the stack's NATS server, by --join")
        if not (self.credentials_dir or self.insecure_listen):
            raise ValueError(
                "credentials_dir is empty: other hosts would not know who calls; make some with `weir up --hosts FILE "
                "--out FOLDER`, or set insecure_listen where the network between the hosts is private"
            )
        if self.credentials_dir:
            check_certified_instance(self.instance)
            check_url("nats", self.nats, ("tls://",))
        check_advertised(self.address, "address")
        if is_loopback(self.address):
            raise ValueError(f"address {self.address!r}: at every other host that is the host itself; give another")
        if self.prefill + self.decode + self.schedulers + self.gateways + self.serve_nats == 0:
            raise ValueError("decode 0: this host would have no process at all; give it some")

    @property
    def instance_name(self) -> str:
        return self.instance

    @property
    def gateway_host(self) -> str:
        return self.host or self._listen_host

    def service_listen(self, role: str, index: int) -> str:
        return f"{self._listen_host}:{self._port_of(role, index)}"

    def pages_flags(self, index: int) -> Mapping[str, object]:
        listen, streams = self.service_listen("transfer", index), self._port_of("page streams", index)
        return {"pages-listen": listen, "page-streams-port": streams}

    def _port_of(self, what: str, index: int) -> int:
        """0: any free one. Raises ValueError."""
        if not self.first_port:
            return 0
        if index >= _PORTS_OF_EACH:
            raise ValueError(f"first_port {self.first_port}: has ports for {_PORTS_OF_EACH} of each role; set it to 0")
        return self.first_port + _PORT_ORDER.index(what) * _PORTS_OF_EACH + index

    @property
    def metrics_host(self) -> str:
        return bare(self.address) if self.metrics_port else super().metrics_host

    @property
    def first_metrics_port(self) -> int:
        return self.metrics_port

    @property
    def probe_address(self) -> tuple[str, int]:
        return bare(self.address), self.probe_port

    def grace_of(self, role: str) -> float:
        """Workers serve gateways of other hosts, too."""
        return self.grace_s if role in WORKER_ROLES else super().grace_of(role)

    @property
    def starts_nats(self) -> bool:
        return self.serve_nats

    @property
    def nats_host(self) -> str:
        return self.address

    @property
    def _listen_host(self) -> str:
        return bracketed(self.address)

    @property
    def nats_port(self) -> int:
        return urlsplit(self.nats).port or DEFAULT_NATS_PORT

    @property
    def nats_knows_roles(self) -> bool:
        return bool(self.credentials_dir)

    @property
    def credentials(self) -> HostCredentials | None:
        return HostCredentials(Path(self.credentials_dir).absolute()) if self.credentials_dir else None

    def service_credentials(self, role: str) -> Mapping[str, object]:
        credentials = self.credentials
        if credentials is not None:
            return credentials.flags_of(role)
        return {"insecure-listen": True}
