"""Which processes make up a stack on one machine, with which flags: plain data, nothing is started here."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from weir.bus.server import nats_server_command
from weir.core.addresses import LOOPBACK, UNIX, bracketed, check_listen
from weir.core.credentials import masked_url
from weir.core.device import check_exact, check_precision
from weir.core.fields import check_range
from weir.core.roles import WORKER_ROLES
from weir.runtime.config import flag_words
from weir.runtime.page_tiers import check_valkey_here
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.credentials import HostCredentials
from weir.runtime.stack.models import MAX_WORKERS, StackModel, StackModels
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.readiness import GrpcProbe, NatsProbe, Probe
from weir.wire.v1 import arena_pb2, inference_pb2, worker_pb2

STOP_ORDER: tuple[tuple[str, ...], ...] = (
    ("gateway",),
    WORKER_ROLES,
    ("scheduler",),
    ("transfer",),
    ("nats",),
)
"""Whoever takes requests goes first, and nobody goes before those who need him."""

_WORKER_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_HEALTH_NAMES = {
    "gateway": inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    "transfer": arena_pb2.DESCRIPTOR.services_by_name["Arena"].full_name,
    "prefill": _WORKER_NAME,
    "decode": _WORKER_NAME,
    "scheduler": "",
}


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
    credentials: HostCredentials | None = None
    """Of its host, where hosts share some: its supervisor asks it by its own certificate."""

    @property
    def module(self) -> str | None:
        """That Python runs; None: another program."""
        return self.command[2] if self.command[:2] == (sys.executable, "-m") else None

    @property
    def module_words(self) -> tuple[str, ...]:
        return self.command[3:]


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """Of one gateway."""

    grpc: int
    http: int


@dataclass(frozen=True)
class StackPlan:
    """All that a supervisor needs to know. `endpoints` are for people: what it is -> where it is. `stage_grace_s`: of
    each stage of STOP_ORDER."""

    paths: InstancePaths
    specs: tuple[ProcessSpec, ...]
    endpoints: Mapping[str, str]
    start_timeout_s: float
    stage_grace_s: tuple[float, ...]


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
    gateways = (GatewayPorts(config.grpc_port, config.http_port), *more_gateways)[: config.gateways]
    endpoints, scheme = {}, "https" if config.public_tls_cert else "http"
    for number, ports in enumerate(gateways, start=1):
        suffix = f" {number}" if number > 1 else ""
        endpoints[f"OpenAI{suffix}"] = f"{scheme}://{config.gateway_host}:{ports.http}/v1"
        endpoints[f"gRPC{suffix}"] = f"{config.gateway_host}:{ports.grpc}"
    endpoints["NATS"] = masked_url(nats_url_of(config, nats_port))
    stack_models = models or StackModels((config.default_model,))
    services = _plan_services(config, nats_url_of(config, nats_port), gateways, stack_models)
    services = with_metrics(services, metrics_ports, config.metrics_host)
    specs = (*((_nats_spec(config, nats_port),) if config.starts_nats else ()), *services)
    stage_grace_s = tuple(max(map(config.grace_of, roles)) for roles in STOP_ORDER)
    return StackPlan(config.paths, specs, endpoints, config.start_timeout_s, stage_grace_s)


def nats_url_of(config: StackConfig, nats_port: int) -> str:
    return config.nats or f"nats://{LOOPBACK}:{nats_port}"


def num_services(config: StackConfig, models: StackModels | None = None) -> int:
    """Processes of a stack but NATS."""
    stack_models = models or StackModels((config.default_model,))
    num_arenas = sum(stack_models.num_workers(model) > 0 for model in stack_models.models)
    return num_arenas + config.schedulers + stack_models.num_all_workers + config.gateways


def with_metrics(specs: Sequence[ProcessSpec], ports: Sequence[int], host: str = LOOPBACK) -> list[ProcessSpec]:
    """Each with a page of metrics at its port of `host`; without ports as they are."""
    return [_with_metrics(spec, host, port) for spec, port in zip(specs, ports, strict=True)] if ports else list(specs)


def _with_metrics(spec: ProcessSpec, host: str, port: int) -> ProcessSpec:
    command = (*spec.command, "--metrics-host", host, "--metrics-port", str(port))
    return replace(spec, command=command, metrics_url=f"http://{bracketed(host)}:{port}/metrics")


def _plan_services(
    config: StackConfig, nats_url: str, gateways: Sequence[GatewayPorts], models: StackModels
) -> list[ProcessSpec]:
    """All but NATS, by their roles."""
    numbers: Counter[str] = Counter()
    specs = [spec for model in models.models for spec in plan_model(config, nats_url, model, models, numbers)]
    for index in range(config.schedulers):
        scheduler_flags = _scheduler_flags(config, models, index)
        listen = config.service_listen("scheduler", index)
        specs.append(_service_spec(config, nats_url, "scheduler", index, listen, scheduler_flags))
    for index, ports in enumerate(gateways):
        flags: tuple[str, ...] = ("--http-host", config.gateway_host, "--http-port", str(ports.http))
        flags += ("--max-context-tokens", str(config.max_context_tokens))
        for name in ("public_tls_cert", "public_tls_key"):
            path = str(getattr(config, name))
            flags += flag_words(name, Path(path).absolute()) if path else ()
        flags += ("--models-file", str(config.paths.models_file))
        specs.append(_service_spec(config, nats_url, "gateway", index, f"{config.gateway_host}:{ports.grpc}", flags))
    order = ("transfer", "scheduler", "prefill", "decode", "gateway")
    return sorted(specs, key=lambda spec: order.index(spec.role))


def check_model(config: StackConfig, model: StackModel) -> None:
    """Raises ValueError for what the stack's device does not compute, and for a model that nobody decodes."""
    try:
        check_range(model, "decode", config.least_of_each, MAX_WORKERS)
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
    if not models.num_workers(model):
        return []
    context = ("--max-context-tokens", str(model.max_context_tokens))

    def spec_of(role: str, flags: Sequence[str], listen: str = "") -> ProcessSpec:
        index = numbers[role]
        numbers[role] += 1
        listen = listen or config.service_listen(role, index)
        check_listen("runtime_dir", listen)
        return _service_spec(config, nats_url, role, index, listen, flags, model)

    socket = config.paths.arena_socket(numbers["transfer"])
    size = ("--arena-bytes", str(model.arena_bytes)) if model.arena_bytes else ()
    share = ("--models-on-machine", str(len(models.models))) if len(models.models) > 1 else ()
    beside = ("--workers-on-machine", str(models.num_workers(model)))
    pages_flags = config.pages_flags(numbers["transfer"]).items()
    pages = (word for name, value in pages_flags for word in flag_words(name, value))
    own = (*size, *context, *share, *beside, *pages, *_tier_flags(config))
    specs = [spec_of("transfer", own, f"{UNIX}{socket}")]
    flags = ("--arena-socket", str(socket), "--workers-on-machine", str(models.num_all_workers))
    bounded = (*flags, *context) if model.max_context_tokens else flags
    groups = [(group.name, group.prefill, group.decode) for group in models.groups if group.has(model)]
    for group, num_prefill, num_decode in ((model.group, model.prefill, model.decode), *groups):
        in_group = ("--group", group) if group else ()
        for role, number in (("prefill", num_prefill), ("decode", num_decode)):
            specs += [spec_of(role, (*bounded, *in_group)) for _ in range(number)]
    in_group = ("--group", model.group) if model.group else ()
    return specs + [spec_of("decode", (*bounded, *in_group, "--is-spare")) for _ in range(model.spares)]


def _tier_flags(config: StackConfig) -> tuple[str, ...]:
    """Of those tiers that there are. Raises ConfigError."""
    check_valkey_here(config)
    flags: dict[str, object] = {"page_memory_bytes": config.page_memory_bytes}
    if config.page_files_dir:
        flags |= {"page_files_dir": Path(config.page_files_dir).absolute(), "page_files_bytes": config.page_files_bytes}
    flags["page_valkey_url"] = config.page_valkey_url
    for name in ("page_valkey_password_file", "page_valkey_ca_file"):
        path: str = getattr(config, name)
        flags[name] = path and Path(path).absolute()
    flags["page_valkey_insecure"] = config.page_valkey_insecure
    return tuple(word for name, value in flags.items() if value for word in flag_words(name, value))


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
    config_file = config.paths.nats_config_file if config.nats_knows_roles else None
    store = config.paths.nats_store
    return ProcessSpec(
        name="nats",
        role="nats",
        command=tuple(nats_server_command(port, store, host=config.nats_host, config_file=config_file)),
        log_path=config.paths.log_file("nats"),
        ready_file=config.paths.ready_file("nats"),
        probe=NatsProbe(config.nats_host, port),
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
        "grace-s": config.grace_of(role),
        "runtime-dir": config.runtime_dir.resolve(),
    }
    flags |= config.service_credentials(role)
    if model.name:
        flags["served-model-name"] = model.name
    shared = config.credentials
    probe = GrpcProbe(ready_file, _HEALTH_NAMES[role], None if shared is None else shared.certificate(role))
    common = [word for flag, value in flags.items() for word in flag_words(flag, value)]
    return ProcessSpec(
        name=name,
        role=role,
        command=(sys.executable, "-m", f"weir_{role}", *common, *own_flags),
        log_path=config.paths.log_file(name),
        ready_file=ready_file,
        probe=probe,
        environ={"WEIR_NATS_URL": nats_url},
        model=model.name,
        credentials=shared,
    )
