"""The kinds of workers, and the process that begins as one of them and can become the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from opentelemetry.trace import Tracer

from weir.runtime.config import ServiceConfig, load_config, resolve_config
from weir.runtime.service import ServiceContext, run_service
from weir.worker.assembly import WorkerModel, load_worker_model, make_shell
from weir.worker.config import WorkerConfig
from weir.worker.engine.model_loading import import_for_cpu, load_grammar_engine
from weir.worker.process import WorkerProcess
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.requests.servicer import SERVICE_NAME
from weir.worker.role import Role, RoleParts
from weir.worker.roles.config import DecodeConfig, PrefillConfig
from weir.worker.roles.decode import DecodeRole
from weir.worker.roles.prefill import PrefillRole
from weir.worker.shell import WorkerShell

_MAX_LIVE = 4096  # hand-offs are bounded by the arena's slots, prompts by the scheduler, which reserves decode slots
_OF_THE_PROCESS = (
    *(entry.name for entry in fields(ServiceConfig)),
    *("arena_socket", "num_threads", "group", "policy", "workers_on_machine"),
)
"""Settings that a process keeps whatever its role is."""


@dataclass(frozen=True)
class WorkerKind:
    """What a role adds to a worker."""

    config_type: type[WorkerConfig]
    limits_of: Callable[[Any], RequestLimits]
    make_role: Callable[[RoleParts, Any, Tracer], Role]


def _prefill_limits(config: PrefillConfig) -> RequestLimits:
    return RequestLimits(max_live=config.most_num_seqs + config.max_num_waiting, takes_hand_offs=False)


def _decode_limits(config: DecodeConfig) -> RequestLimits:
    del config
    return RequestLimits(max_live=_MAX_LIVE, takes_hand_offs=True)


KINDS: Mapping[str, WorkerKind] = MappingProxyType(
    {
        "prefill": WorkerKind(PrefillConfig, _prefill_limits, lambda parts, config, tracer: PrefillRole(parts, tracer)),
        "decode": WorkerKind(DecodeConfig, _decode_limits, DecodeRole),
    }
)


def run_worker(role: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """One worker process from start to end; returns its exit code."""

    async def build(context: ServiceContext[WorkerConfig]) -> WorkerProcess:
        model = await load_worker_model(context.config)
        return WorkerProcess(
            context,
            lambda role, worker_id: _prepare(context, model, role, worker_id, environ),
            model.connect_bus,
        )

    config = load_config(KINDS[role].config_type, argv, environ=environ)
    return run_service(role, config, build, [SERVICE_NAME])


def prepare_workers(role: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Before forks into workers of one model: what each would import and read of it anew. Raises ConfigError,
    ModelError, GrammarError."""
    config = load_config(KINDS[role].config_type, argv, environ=environ)
    if config.device == "cpu":
        import_for_cpu(config)
    load_grammar_engine(config)


def config_for(role: str, config: WorkerConfig, environ: Mapping[str, str]) -> WorkerConfig:
    """The configuration in another role: what is the process's as it is, all else as a process of that role would
    have it from its TOML file (that of WEIR_CONFIG) and environment. Raises ConfigError."""
    kept = {name: getattr(config, name) for name in _OF_THE_PROCESS}
    named_file = environ.get("WEIR_CONFIG")
    return resolve_config(
        KINDS[role].config_type, role, flags=kept, environ=environ, toml_path=Path(named_file) if named_file else None
    )


def _prepare(
    context: ServiceContext[WorkerConfig], model: WorkerModel, role: str, worker_id: str, environ: Mapping[str, str]
) -> Callable[[], WorkerShell]:
    """Raises KeyError for an unknown role, and ConfigError."""
    kind = KINDS[role]
    config = context.config if role == context.role else config_for(role, context.config, environ)
    return lambda: make_shell(
        context.in_role(role, worker_id, config),
        model,
        kind.limits_of(config),
        lambda parts: kind.make_role(parts, config, context.tracer),
    )
