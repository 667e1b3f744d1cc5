"""Beginning and ending an instance from outside: `weir up` before its supervisor runs, and `weir down`."""

import asyncio
import signal
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weir.bus.server import NatsServerMissing
from weir.core.addresses import LOOPBACK, NoFreePort, hold_free_port, hold_port, server_ports
from weir.core.clock import SystemClock
from weir.core.errors import NotFound, WeirError
from weir.core.process import ProcessIdentity
from weir.runtime.change_log import HERE, Change, ChangeLog
from weir.runtime.config import check_instance
from weir.runtime.metrics_port import MetricsPort
from weir.runtime.process_tuning import find_shortage, raise_descriptor_limit
from weir.runtime.stack.config import StackConfig, default_instance
from weir.runtime.stack.control import serve_control
from weir.runtime.stack.leftovers import Removed, remove_leftovers
from weir.runtime.stack.model_changes import ModelChanges, write_models
from weir.runtime.stack.models import StackModels
from weir.runtime.stack.paths import InstanceBusy, InstancePaths, find_instances
from weir.runtime.stack.plan import (
    GatewayPorts,
    StackPlan,
    nats_url_of,
    num_services,
    plan_stack,
)
from weir.runtime.stack.processes import all_tagged, find_tagged, is_running, send_signal
from weir.runtime.stack.state import try_read_state
from weir.runtime.stack.supervised import StartPolicy
from weir.runtime.stack.supervisor import Reporter, Supervisor

_POLL_S = 0.05
_LOCK_S = 5.0
_NUM_OWN_DESCRIPTORS = 64  # of a supervisor that watches nobody
_STOP_LIMIT_S = 30.0  # of a supervisor that has not written its state yet
_MAX_PORT = 65_535
_SUPERVISOR = "supervisor"


class CannotStart(WeirError):
    """Nothing was started; says what is in the way."""


class PortBusy(WeirError):
    """Somebody listens there."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What `end_instance` did."""

    was_supervised: bool
    leftovers: Removed

    @property
    def was_running(self) -> bool:
        return self.was_supervised or bool(self.leftovers)


async def run_stack(
    config: StackConfig, reporter: Reporter, environ: Mapping[str, str], models: StackModels | None = None
) -> bool:
    """`weir up` from first to last; False if it was broken off before the stack was ready. `models`: None: the one that
    `config` names.

    Raises WeirError: what is in the way, or which process failed.

    Leftovers of a supervisor that was killed go first; then ports are checked, and held, so that no outgoing connection
    is given one before its server starts, or starts again; only then anything starts.
    """
    stack_models = models or StackModels((config.default_model,))
    shortage = find_shortage(raise_descriptor_limit(), _NUM_OWN_DESCRIPTORS + stack_models.num_all_workers)
    if shortage is not None:
        reporter.warn(shortage)

    changes = ChangeLog(config.paths.changes_file(_SUPERVISOR), _SUPERVISOR)

    def make_plan() -> StackPlan:
        if config.gateways:
            held.enter_context(_hold_port(config.gateway_host, config.grpc_port, "--grpc-port"))
            held.enter_context(_hold_port(config.gateway_host, config.http_port, "--http-port"))
        try:
            gateways = more_gateways(config, nats_port(), held)
            ports = hold_metrics_ports(num_services(config, stack_models), held, config)
            plan = plan_stack(config, nats_port(), gateways, ports, stack_models)
        except (NatsServerMissing, ValueError) as error:
            raise CannotStart(str(error)) from error
        _make_secrets(config, changes)
        for index in range(1, len(stack_models.models)):
            config.paths.make_arena_folder(index)
        write_models(config.paths.models_file, stack_models.models)
        return plan

    @cache
    def nats_port() -> int:
        return int(held.enter_context(hold_nats_port(config)).getsockname()[1]) if config.starts_nats else 0

    @asynccontextmanager
    async def serve_beside(supervisor: Supervisor) -> AsyncIterator[None]:
        url = nats_url_of(config, nats_port())
        models_of = ModelChanges(config, stack_models, url, supervisor, hold_metrics_ports)
        async with serve_control(config.paths.control_socket, models_of, changes), serve_probes(config, supervisor):
            yield

    with ExitStack() as held:
        return await run_planned(config.paths, make_plan, reporter, environ, beside=serve_beside)


@asynccontextmanager
async def serve_probes(config: StackConfig, supervisor: Supervisor) -> AsyncIterator[None]:
    """What the supervisor says of itself and its processes, until it is left. Raises Unavailable where the port is in
    use."""
    host, number = config.probe_address
    port = MetricsPort(host, number, None, is_ready=lambda: supervisor.is_serving, setting="probe_port")
    if number:
        await port.start()
    try:
        yield
    finally:
        await port.stop()


def _make_secrets(config: StackConfig, changes: ChangeLog) -> None:
    """An operator's key and what NATS knows roles by: the host's, where there are credentials, else new ones.

    Raises UnsafeFolder, CannotStart.
    """
    paths, shared = config.paths, config.credentials
    if shared is None:
        made = paths.make_admin_key()
        changes.write(Change(HERE, "make admin key", paths.admin_key_file.name, "done", after=made.hex()[:8]))
        if config.starts_nats and config.nats_knows_roles:
            paths.make_nats_keys()
        return
    try:
        if config.schedulers or config.gateways:
            paths.keep_admin_key(shared.admin_key.read_text().strip())
        if config.starts_nats:
            shown = shared.certificate("nats")
            paths.write_nats_config(shared.nats_public_keys(), cert_file=shown.cert, key_file=shown.key)
    except (OSError, ValueError) as error:
        raise CannotStart(f"credentials_dir {shared.folder}: {error}") from error


async def run_planned(
    paths: InstancePaths,
    make_plan: Callable[[], StackPlan],
    reporter: Reporter,
    environ: Mapping[str, str],
    policy: StartPolicy | None = None,
    beside: "Callable[[Supervisor], AbstractAsyncContextManager[None]] | None" = None,
) -> bool:
    """Holds the instance, removes what is left of an earlier run, and only then makes the plan and runs it, and
    `beside` it what looks after the supervisor's processes.

    Raises InstanceBusy, also where the folder of a stack that runs was deleted, and its lock with it.
    """
    with paths.locked():
        supervisor = try_find_supervisor(paths)
        if supervisor is not None:
            raise InstanceBusy(
                f"instance {paths.folder.name!r} is already running (process {supervisor.pid}), though its folder was "
                f"deleted; `weir down --instance {paths.folder.name}` ends it"
            )
        paths.name_supervisor()
        reporter.found_leftovers(await remove_leftovers(paths))
        paths.make()
        made = Supervisor(make_plan(), reporter, environ, policy)
        async with beside(made) if beside is not None else nullcontext():
            return await made.run()


async def end_instance(paths: InstancePaths, *, timeout_s: float | None = None) -> Ended:
    """`weir down`: asks the supervisor, kills it when it takes longer than `timeout_s`, removes what is left.

    None: as long as the supervisor says it may take.

    Nothing of the instance runs afterwards. Raises StillRunning if something survives SIGKILL.
    """
    if not (paths.folder.exists() or find_tagged(paths.folder)):
        return Ended(False, Removed((), ()))
    supervisor = try_find_supervisor(paths)
    was_supervised = supervisor is not None and send_signal(supervisor, signal.SIGTERM)
    if supervisor is not None and was_supervised:
        clock = SystemClock()
        state = try_read_state(paths.state_file)
        own_limit_s = _STOP_LIMIT_S if state is None else state.stop_limit_s
        deadline_s = clock.now_s() + (own_limit_s if timeout_s is None else timeout_s)
        # Polled: the exit of a process that is not a child wakes nobody.
        while is_running(supervisor) and clock.now_s() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        send_signal(supervisor, signal.SIGKILL)
    return Ended(was_supervised, await _remove_when_unlocked(paths))


def try_find_supervisor(paths: InstancePaths) -> ProcessIdentity | None:
    """Who supervises the instance now: as the lock says, or what it has started, should its folder be deleted."""
    by_tag = (process.supervisor for process in find_tagged(paths.folder))
    named = (supervisor for supervisor in (paths.try_find_supervisor(), *by_tag) if supervisor is not None)
    return next((supervisor for supervisor in named if is_running(supervisor)), None)


async def _remove_when_unlocked(paths: InstancePaths) -> Removed:
    clock = SystemClock()
    deadline_s = clock.now_s() + _LOCK_S
    while True:
        try:
            with paths.locked():
                return await remove_leftovers(paths)
        except InstanceBusy:  # its last holder is on the way out
            if clock.now_s() > deadline_s:
                raise
        await asyncio.sleep(_POLL_S)


def choose_instance(runtime_dir: Path, instance: str, grpc_port: int | None) -> InstancePaths:
    """The instance that is named, or that has the port, or the only one there is.

    Raises NotFound when several run and nothing says which, or for what cannot be a name.
    """
    if instance:
        try:
            check_instance(instance)
        except ValueError as error:
            raise NotFound("instance", str(error)) from error
    if instance:
        return InstancePaths(runtime_dir.resolve() / instance)
    tagged = (process.folder for process in all_tagged())
    by_tag = {folder.name for folder in tagged if folder.parent == runtime_dir.resolve()}
    names = sorted({*find_instances(runtime_dir), *by_tag})
    if grpc_port is not None:
        default, with_nats = default_instance(grpc_port), default_instance(grpc_port, socket.gethostname())
        return InstancePaths(runtime_dir.resolve() / (with_nats if with_nats in names else default))
    if len(names) > 1 and default_instance(StackConfig.grpc_port) not in names:
        raise NotFound("instance", f"several instances run: {', '.join(names)}; say which with --instance")
    name = names[0] if len(names) == 1 else default_instance(StackConfig.grpc_port)
    return InstancePaths(runtime_dir.resolve() / name)


def _hold_port(host: str, port: int, flag: str) -> socket.socket:
    """Raises PortBusy, naming the flag that chooses another port."""
    try:
        return hold_port(host, port)
    except OSError as error:
        problem = f"{flag} {port}: in use on {host}, or not allowed"
        raise PortBusy(f"{problem}; stop what listens there, or choose another") from error


def hold_nats_port(config: StackConfig) -> socket.socket:
    """Of a port that is free, the same one for an instance as long as it is, so that two seldom want the same.

    Raises PortBusy.
    """
    if config.nats_port is not None:
        return _hold_port(config.nats_host, config.nats_port, "--join: port")
    ports = server_ports()
    start = zlib.crc32(config.instance_name.encode())
    for offset in range(len(ports)):
        port = ports[(start + offset) % len(ports)]
        if port not in (config.grpc_port, config.http_port):
            with suppress(OSError):
                return hold_port(LOOPBACK, port)
    raise PortBusy(f"no port for NATS: none from {ports[0]} to {ports[-1]} is free on {LOOPBACK}; name one with --nats")


def more_gateways(config: StackConfig, nats_port: int, held: ExitStack) -> list[GatewayPorts]:
    """For all gateways but the first: the next free ports above its, kept by `held` from now on. Raises PortBusy."""
    taken = {config.grpc_port, config.http_port, nats_port}

    def next_free(first_port: int) -> int:
        for port in range(first_port + 1, _MAX_PORT + 1):
            if port not in taken:
                with suppress(OSError):
                    held.enter_context(hold_port(config.gateway_host, port))
                    taken.add(port)
                    return port
        raise PortBusy(f"no free port on {config.gateway_host} above {first_port} for another gateway")

    return [GatewayPorts(next_free(config.grpc_port), next_free(config.http_port)) for _ in range(1, config.gateways)]


def hold_metrics_ports(number: int, held: ExitStack, config: StackConfig | None = None) -> list[int]:
    """So many ports, kept by `held` from now on: of the loopback interface, free ones, unless `config` says which.
    Raises PortBusy; ValueError for ports that there are not."""
    if config is not None and config.first_metrics_port:
        named = range(config.first_metrics_port, config.first_metrics_port + number)
        if named.stop > _MAX_PORT + 1:
            highest = _MAX_PORT + 1 - number
            raise ValueError(
                f"metrics_port {named.start}: must be at most {highest}, for {number} processes have one each"
            )
        for port in named:
            held.enter_context(_hold_port(config.metrics_host, port, "--metrics-port"))
        return list(named)
    try:
        holders = [held.enter_context(hold_free_port()) for _ in range(number)]
    except NoFreePort as error:
        raise PortBusy(str(error)) from error
    return [holder.getsockname()[1] for holder in holders]
