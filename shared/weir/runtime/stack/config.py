"""The settings of a stack on one machine."""

import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from weir.core.addresses import LOOPBACK
from weir.core.device import DEVICE_HELP, EXACT_HELP, PRECISION_HELP, Precision, check_exact, check_precision
from weir.core.fields import ByteSize, check_range
from weir.runtime.config import (
    LOAD_HELP,
    MODEL_HELP,
    MODEL_SHAPE_HELP,
    NATS_SCHEMES,
    OTLP_SCHEMES,
    PAGE_FILES_BYTES,
    check_instance,
    check_load,
    check_together,
    check_url,
    default_runtime_dir,
    model_reference,
    setting,
)
from weir.runtime.page_tiers import (
    PAGE_MEMORY_HELP,
    PAGE_VALKEY_HELP,
    PAGE_VALKEY_INSECURE_HELP,
    check_page_memory,
    check_page_valkey,
)
from weir.runtime.stack.credentials import HostCredentials, nats_role_of
from weir.runtime.stack.models import (
    CHAT_TEMPLATE_HELP,
    MAX_WORKERS,
    REASONING_FORMAT_HELP,
    TOOL_FORMAT_HELP,
    ReasoningFormatName,
    StackModel,
    ToolFormatName,
)
from weir.runtime.stack.paths import InstancePaths

_MAX_MACHINE_CHARS = 28  # with the rest of the name 40
_MAX_SCHEDULERS = 4
MAX_GATEWAYS = 4
IDLE_GRACE_S = 3.0


@dataclass(frozen=True)
class StackConfig:
    """A stack on this machine, as `weir up` starts it."""

    prefill: int = setting(1, "Number of prefill workers. 0: decode workers serve alone.")
    decode: int = setting(1, "Number of decode workers.")
    spares: int = setting(0, "Further decode workers that start drained: they are warm when the planner wants more.")
    schedulers: int = setting(1, "Number of schedulers: one leads, the others stand by.")
    gateways: int = setting(1, "Number of gateways, each with ports of its own: the next free ones.")
    model: str = setting("smollm2-135m", MODEL_HELP)
    load: Literal["files", "dummy"] = setting("files", LOAD_HELP)
    model_shape: str = setting("", MODEL_SHAPE_HELP)
    device: Literal["cpu", "cuda", "interpreter"] = setting("cpu", DEVICE_HELP)
    precision: Precision = setting("auto", PRECISION_HELP)
    exact: bool = setting(False, EXACT_HELP)
    chat_template: str = setting("", CHAT_TEMPLATE_HELP)
    tool_format: ToolFormatName = setting("auto", TOOL_FORMAT_HELP)
    reasoning_format: ReasoningFormatName = setting("auto", REASONING_FORMAT_HELP)
    host: str = setting(LOOPBACK, "Address that the gateway listens on.")
    http_port: int = setting(8000, "Port of the OpenAI-style HTTP API.")
    grpc_port: int = setting(50051, "Port of the gRPC API.")
    public_tls_cert: str = setting("", "File with the certificate of the gateway's ports. Empty: no TLS for clients.")
    public_tls_key: str = setting("", "File with its key.")
    nats: str = setting("", "NATS server to use, nats://[USER:PASSWORD@]HOST:PORT. Empty: start one.")
    otlp_endpoint: str = setting("", "OTLP/gRPC collector for traces, http://HOST:4317. Empty: tracing is off.")
    instance: str = setting(
        "", "Name of the instance. Empty: weir-<gRPC port>; with a NATS of others' weir-<machine>-<gRPC port>."
    )
    limits_file: str = setting("", "TOML file of lanes and tenants, followed while it changes. Empty: three lanes.")
    policy: str = setting("fcfs", "Scheduling policy: NAME or NAME:KEY=VALUE,…")
    arena_bytes: ByteSize = setting(
        0, "Memory for pages, in /dev/shm or on the device, such as 16GiB. 0: what the model can use, if it is free."
    )
    max_context_tokens: int = setting(
        0, "Prompt and output of a request together. 0: the model's context, or what fits in the arena."
    )
    page_files_dir: str = setting(
        "", "Folder where computed pages outlive the arena, also for the next start. Empty: they do not."
    )
    page_files_bytes: ByteSize = setting(PAGE_FILES_BYTES, "Bytes of files there, of all models together.")
    page_valkey_url: str = setting("", PAGE_VALKEY_HELP)
    page_valkey_password_file: str = setting("", "File with its password. Empty: it wants none.")
    page_valkey_ca_file: str = setting("", "File with the authorities of its certificate. Empty: the system's.")
    page_valkey_insecure: bool = setting(False, PAGE_VALKEY_INSECURE_HELP)
    page_memory_bytes: ByteSize = setting(0, PAGE_MEMORY_HELP)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe level that is logged.")
    log_format: Literal["text", "json"] = setting("text", "Form of the log lines.")
    grace_s: float = setting(10.0, "Seconds that running requests have to end after Ctrl-C or `weir down`.")
    start_timeout_s: float = setting(
        600.0, "Seconds that the stack has to become ready; the first start packs weights."
    )
    runtime_dir: Path = field(
        default_factory=default_runtime_dir,
        metadata={"help": "Folder that holds the folder of each instance: sockets, logs, state."},
    )

    least_of_each: ClassVar[int] = 1
    """Decode workers (of each model), schedulers and gateways that it has here."""

    def __post_init__(self) -> None:
        if self.instance:
            check_instance(self.instance)
        check_range(self, "prefill", 0, MAX_WORKERS)
        check_range(self, "decode", self.least_of_each, MAX_WORKERS)
        check_range(self, "spares", 0, MAX_WORKERS)
        check_range(self, "schedulers", self.least_of_each, _MAX_SCHEDULERS)
        check_range(self, "gateways", self.least_of_each, MAX_GATEWAYS)
        check_range(self, "http_port", 1, 65535)
        check_range(self, "grpc_port", 1, 65535)
        if self.http_port == self.grpc_port:
            raise ValueError(f"http_port {self.http_port}: is also the grpc_port; they must differ")
        if self.arena_bytes < 0:
            raise ValueError(f"arena_bytes {self.arena_bytes}: must not be negative")
        check_together(self, "public_tls_cert", "public_tls_key")
        if self.nats:
            check_url("nats", self.nats, NATS_SCHEMES)
        if self.otlp_endpoint:
            check_url("otlp_endpoint", self.otlp_endpoint, OTLP_SCHEMES)
        check_load(self.load, self.model_shape)
        check_precision(self.precision, self.device)
        check_exact(self.exact, self.precision, self.device)
        check_page_memory(self.page_memory_bytes, self.device)
        check_page_valkey(self)
        if self.max_context_tokens < 0:
            raise ValueError(f"max_context_tokens {self.max_context_tokens}: must not be negative")
        check_range(self, "grace_s", 0, 600)
        check_range(self, "start_timeout_s", 1, 3600)

    @property
    def instance_name(self) -> str:
        """Machines that share a NATS have default names of their own, or they would share subjects."""
        machine = socket.gethostname() if self.nats else ""
        return self.instance or default_instance(self.grpc_port, machine)

    @property
    def model_reference(self) -> str:
        """What `resolve_model` takes."""
        return model_reference(self.model, self.load, self.model_shape)

    @property
    def paths(self) -> InstancePaths:
        return InstancePaths(self.runtime_dir.resolve() / self.instance_name)

    @property
    def gateway_host(self) -> str:
        """Address that the gateway listens on."""
        return self.host

    def service_listen(self, role: str, index: int) -> str:
        """What a worker or a scheduler listens on."""
        del role, index
        return self.paths.sockets

    def pages_flags(self, index: int) -> Mapping[str, object]:
        """By which transfer services of other hosts get pages of this one; none: not at all."""
        del index
        return {}

    @property
    def metrics_host(self) -> str:
        """Where its processes show their figures."""
        return LOOPBACK

    @property
    def first_metrics_port(self) -> int:
        """Of its processes, each the next. 0: any free ones."""
        return 0

    @property
    def probe_address(self) -> tuple[str, int]:
        """Where its supervisor says whether all serve. Port 0: nowhere."""
        return LOOPBACK, 0

    def grace_of(self, role: str) -> float:
        """Seconds that work of a process has to end. Of all but the gateway few: once it is gone no request is wanted
        any more."""
        return self.grace_s if role == "gateway" else min(self.grace_s, IDLE_GRACE_S)

    @property
    def starts_nats(self) -> bool:
        return not self.nats

    @property
    def nats_host(self) -> str:
        """Address of the NATS that it starts."""
        return LOOPBACK

    @property
    def nats_port(self) -> int | None:
        """Of the NATS that it starts. None: one that is free."""
        return None

    @property
    def nats_knows_roles(self) -> bool:
        """Whether the NATS that it starts wants keys."""
        return True

    @property
    def credentials(self) -> HostCredentials | None:
        """Those that hosts of one stack share. None: keys are made at each start, for this machine alone."""
        return None

    def service_credentials(self, role: str) -> Mapping[str, object]:
        """Flags of a process by which it proves who it is, and knows others."""
        return {} if self.nats else {"nats-seed-file": self.paths.nats_seed_file(nats_role_of(role))}

    @property
    def default_model(self) -> StackModel:
        """The only model of a stack without tables of models; with them what each of them leaves out."""
        names = {entry.name for entry in fields(StackModel)}.intersection(entry.name for entry in fields(self))
        return StackModel(**{name: getattr(self, name) for name in names})


def default_instance(grpc_port: int, machine: str = "") -> str:
    """Two stacks with different ports have different names, and so share neither files nor subjects; nor do those of
    different machines."""
    if not machine:
        return f"weir-{grpc_port}"
    name = re.sub(r"[^A-Za-z0-9_-]", "-", machine)
    if (
        name != machine or len(name) > _MAX_MACHINE_CHARS
    ):  # what was changed or cut off may be what tells it from others
        name = f"{name[: _MAX_MACHINE_CHARS - 9]}-{zlib.crc32(machine.encode()):08x}"
    return f"weir-{name}-{grpc_port}"
