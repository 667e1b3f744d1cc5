"""Which processes make up a stack on one machine, with which flags: plain data, nothing is started here."""

import re
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from weir.bus.nats_users import NatsRole
from weir.bus.server import nats_server_command
from weir.core.addresses import LOOPBACK, UNIX, check_listen
from weir.core.credentials import masked_url
from weir.core.device import DEVICE_HELP, EXACT_HELP, PRECISION_HELP, Precision, check_exact, check_precision
from weir.core.fields import ByteSize, check_range
from weir.runtime.config import (
    LOAD_HELP,
    MODEL_HELP,
    MODEL_SHAPE_HELP,
    NATS_SCHEMES,
    OTLP_SCHEMES,
    check_instance,
    check_load,
    check_together,
    check_url,
    default_runtime_dir,
    flag_words,
    model_reference,
    setting,
)
from weir.runtime.stack.models import (
    CHAT_TEMPLATE_HELP,
    MAX_WORKERS,
    REASONING_FORMAT_HELP,
    TOOL_FORMAT_HELP,
    ReasoningFormatName,
    StackModel,
    StackModels,
    ToolFormatName,
)
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.readiness import GrpcProbe, NatsProbe, Probe
from weir.wire.v1 import arena_pb2, inference_pb2, worker_pb2

STOP_ORDER: tuple[tuple[str, ...], ...] = (
    ("gateway",),
    ("prefill", "decode"),
    ("scheduler",),
    ("transfer",),
    ("nats",),
)
"""Whoever takes requests goes first, and nobody goes before those who need him."""

IDLE_GRACE_S = 3.0
"""For all but the gateway: once it is gone no request is wanted any more."""

_WORKER_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_HEALTH_NAMES = {
    "gateway": inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    "transfer": arena_pb2.DESCRIPTOR.services_by_name["Arena"].full_name,
    "prefill": _WORKER_NAME,
    "decode": _WORKER_NAME,
    "scheduler": "",
}
_MAX_MACHINE_CHARS = 28  # with the rest of the name 40
_MAX_SCHEDULERS = 4
MAX_GATEWAYS = 4


@dataclass(frozen=True)
class StackConfig:
    """A stack on this machine, as `weir up` starts it."""

    prefill: int = setting(1, "Number of prefill workers. 0: decode workers serve alone.")
    decode: int = setting(1, "Number of decode workers.")
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

    def __post_init__(self) -> None:
        if self.instance:
            check_instance(self.instance)
        check_range(self, "prefill", 0, MAX_WORKERS)
        check_range(self, "decode", 1, MAX_WORKERS)
        check_range(self, "schedulers", 1, _MAX_SCHEDULERS)
        check_range(self, "gateways", 1, MAX_GATEWAYS)
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


@dataclass(frozen=True)
class ProcessSpec:
    """How to start one process and to see that it is ready. `environ` is for what must not be seen on command lines."""

    name: str
    role: str
    command: tuple[str, ...]
    log_path: Path
    ready_file: Path
    probe: Probe
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    metrics_url: str = ""
    """Of the page of its figures; empty: it has none."""
    model: str = ""
    """That it is for, by its name among several."""


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """Of one gateway."""

    grpc: int
    http: int


_NATS_ROLES: Mapping[str, NatsRole] = {"gateway": "gateway", "scheduler": "scheduler", "transfer": "transfer"}
"""Of roles that are not workers'."""


@dataclass(frozen=True)
class StackPlan:
    """All that a supervisor needs to know. `endpoints` are for people: what it is -> where it is."""

    paths: InstancePaths
    specs: tuple[ProcessSpec, ...]
    endpoints: Mapping[str, str]
    start_timeout_s: float
    grace_s: float


def plan_stack(
    config: StackConfig,
    nats_port: int,
    more_gateways: Sequence[GatewayPorts] = (),
    metrics_ports: Sequence[int] = (),
    models: StackModels | None = None,
) -> StackPlan:
    """The stack with its NATS at `nats_port`, unless that is elsewhere; `more_gateways`: all but the first;
    `metrics_ports`: one a process but NATS, or none at all. `models`: None: the one that `config` names.

    Raises NatsServerMissing, ValueError.
    """
    gateways = (GatewayPorts(config.grpc_port, config.http_port), *more_gateways)
    endpoints, scheme = {}, "https" if config.public_tls_cert else "http"
    for number, ports in enumerate(gateways, start=1):
        suffix = f" {number}" if number > 1 else ""
        endpoints[f"OpenAI{suffix}"] = f"{scheme}://{config.host}:{ports.http}/v1"
        endpoints[f"gRPC{suffix}"] = f"{config.host}:{ports.grpc}"
    endpoints["NATS"] = masked_url(nats_url_of(config, nats_port))
    stack_models = models or StackModels((config.default_model,))
    services = _plan_services(config, nats_url_of(config, nats_port), gateways, stack_models)
    services = with_metrics(services, metrics_ports)
    specs = (*(() if config.nats else (_nats_spec(config, nats_port),)), *services)
    return StackPlan(config.paths, specs, endpoints, config.start_timeout_s, config.grace_s)


def nats_url_of(config: StackConfig, nats_port: int) -> str:
    return config.nats or f"nats://{LOOPBACK}:{nats_port}"


def num_services(config: StackConfig, models: StackModels | None = None) -> int:
    """Processes of a stack but NATS."""
    stack_models = models or StackModels((config.default_model,))
    return len(stack_models.models) + config.schedulers + stack_models.num_all_workers + config.gateways


def with_metrics(specs: Sequence[ProcessSpec], ports: Sequence[int]) -> list[ProcessSpec]:
    """Each with a page of metrics at its port; without ports as they are."""
    return [_with_metrics(spec, port) for spec, port in zip(specs, ports, strict=True)] if ports else list(specs)


def _with_metrics(spec: ProcessSpec, port: int) -> ProcessSpec:
    command = (*spec.command, "--metrics-port", str(port))
    return replace(spec, command=command, metrics_url=f"http://{LOOPBACK}:{port}/metrics")


def _plan_services(
    config: StackConfig, nats_url: str, gateways: Sequence[GatewayPorts], models: StackModels
) -> list[ProcessSpec]:
    """All but NATS, by their roles."""
    numbers: Counter[str] = Counter()
    specs = [spec for model in models.models for spec in plan_model(config, nats_url, model, models, numbers)]
    for index in range(config.schedulers):
        scheduler_flags = _scheduler_flags(config, models, index)
        specs.append(_service_spec(config, nats_url, "scheduler", index, config.paths.sockets, scheduler_flags))
    for index, ports in enumerate(gateways):
        flags: tuple[str, ...] = ("--http-host", config.host, "--http-port", str(ports.http))
        flags += ("--max-context-tokens", str(config.max_context_tokens))
        for name in ("public_tls_cert", "public_tls_key"):
            path = str(getattr(config, name))
            flags += flag_words(name, Path(path).absolute()) if path else ()
        flags += ("--models-file", str(config.paths.models_file))
        specs.append(_service_spec(config, nats_url, "gateway", index, f"{config.host}:{ports.grpc}", flags))
    order = ("transfer", "scheduler", "prefill", "decode", "gateway")
    return sorted(specs, key=lambda spec: order.index(spec.role))


def check_model(config: StackConfig, model: StackModel) -> None:
    """Raises ValueError for what the stack's device does not compute."""
    try:
        check_precision(model.precision, config.device)
        check_exact(model.exact, model.precision, config.device)
    except ValueError as error:
        raise ValueError(f"models.{model.name}.{error}" if model.name else str(error)) from error


def plan_model(
    config: StackConfig, nats_url: str, model: StackModel, models: StackModels, numbers: "Counter[str]"
) -> list[ProcessSpec]:
    """A model's arena and its workers, those of groups too. `models`: all that share the memory from now on.
    `numbers`: by role, the next process's number; counted on. Raises ValueError.
    """
    check_model(config, model)
    context = ("--max-context-tokens", str(model.max_context_tokens))

    def spec_of(role: str, listen: str, flags: Sequence[str]) -> ProcessSpec:
        numbers[role] += 1
        return _service_spec(config, nats_url, role, numbers[role] - 1, listen, flags, model)

    socket = config.paths.arena_socket(numbers["transfer"])
    for listen in (f"{UNIX}{socket}", config.paths.sockets):
        check_listen("runtime_dir", listen)
    size = ("--arena-bytes", str(model.arena_bytes)) if model.arena_bytes else ()
    share = ("--models-on-machine", str(len(models.models))) if len(models.models) > 1 else ()
    beside = ("--workers-on-machine", str(models.num_workers(model)))
    specs = [spec_of("transfer", f"{UNIX}{socket}", (*size, *context, *share, *beside))]
    flags = ("--arena-socket", str(socket), "--workers-on-machine", str(models.num_all_workers))
    bounded = (*flags, *context) if model.max_context_tokens else flags
    groups = [(group.name, group.prefill, group.decode) for group in models.groups if group.has(model)]
    for group, num_prefill, num_decode in ((model.group, model.prefill, model.decode), *groups):
        in_group = ("--group", group) if group else ()
        for role, number in (("prefill", num_prefill), ("decode", num_decode)):
            specs += [spec_of(role, config.paths.sockets, (*bounded, *in_group)) for _ in range(number)]
    return specs


def _scheduler_flags(config: StackConfig, models: StackModels, index: int) -> tuple[str, ...]:
    own = [f"{lane}={group}" for lane, group in models.lane_groups.items()]
    lane_groups = ("--lane-groups", ",".join(own)) if own else ()
    limits = ("--limits-file", str(Path(config.limits_file).absolute())) if config.limits_file else ()
    files = {
        "--admin-key-file": config.paths.admin_key_file,
        "--changes-file": config.paths.changes_file(f"scheduler-{index}"),
    }
    own_files = (part for flag, path in files.items() for part in (flag, str(path)))
    return (*limits, *lane_groups, *own_files, "--policy", config.policy)


def _nats_spec(config: StackConfig, port: int) -> ProcessSpec:
    return ProcessSpec(
        name="nats",
        role="nats",
        command=tuple(
            nats_server_command(port, config.paths.nats_store, host=LOOPBACK, config_file=config.paths.nats_config_file)
        ),
        log_path=config.paths.log_file("nats"),
        ready_file=config.paths.ready_file("nats"),
        probe=NatsProbe(LOOPBACK, port),
    )


def _service_spec(
    config: StackConfig,
    nats_url: str,
    role: str,
    index: int,
    listen: str,
    own_flags: Sequence[str],
    for_model: StackModel | None = None,
) -> ProcessSpec:
    """`for_model`: None: it is for all."""
    model = for_model or config.default_model
    name = f"{role}-{index}"
    ready_file = config.paths.ready_file(name)
    flags = {
        "instance": config.instance_name,
        "index": index,
        "listen": listen,
        "otlp-endpoint": config.otlp_endpoint,
        "log-level": config.log_level,
        "log-format": config.log_format,
        "ready-file": ready_file,
        "model": model.model,
        "load": model.load,
        "model-shape": model.model_shape,
        "device": config.device,
        "precision": model.precision,
        "exact": model.exact,
        "grace-s": config.grace_s if role == "gateway" else min(config.grace_s, IDLE_GRACE_S),
        "runtime-dir": config.runtime_dir.resolve(),
    }
    if not config.nats:
        flags["nats-seed-file"] = config.paths.nats_seed_file(_NATS_ROLES.get(role, "worker"))
    if model.name:
        flags["served-model-name"] = model.name
    common = [word for flag, value in flags.items() for word in flag_words(flag, value)]
    return ProcessSpec(
        name=name,
        role=role,
        command=(sys.executable, "-m", f"weir_{role}", *common, *own_flags),
        log_path=config.paths.log_file(name),
        ready_file=ready_file,
        probe=GrpcProbe(ready_file, _HEALTH_NAMES[role]),
        environ={"WEIR_NATS_URL": nats_url},
        model=model.name,
    )
