"""`weir up` and `weir down`: a whole stack on this machine, from its start to its end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from weir.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, options
from weir.cli.console import error_line, fail, need_extra, stderr, stdout
from weir.cli.scheduling import read_limits_file
from weir.cli.stack_models import need_memory, need_model, read_stack_models
from weir.core.credentials import masked_url
from weir.core.errors import WeirError
from weir.model.device_check import check_device
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.runtime.config import ConfigError, ServiceConfig, default_runtime_dir, flag_words, resolve_config
from weir.runtime.stack.instances import choose_instance, end_instance, run_stack
from weir.runtime.stack.leftovers import Removed
from weir.runtime.stack.models import StackModel, StackModels
from weir.runtime.stack.plan import StackConfig
from weir.runtime.stack.state import StackState, try_read_state
from weir.runtime.stack.supervised import rotate

_POLL_S = 0.05
_STOP_S = 60.0
_NATS_PORT = 4222
_NATS_LIMIT_S = 5.0
_SERVICE_KEYS = frozenset(entry.name for entry in fields(ServiceConfig))


def _option(name: str) -> Any:
    """The option of a StackConfig field; its default lives there, below the TOML file and the environment."""
    entry = next(entry for entry in fields(StackConfig) if entry.name == name)
    default = "" if callable(entry.default_factory) or entry.default == "" else f" [default: {entry.default}]"
    return typer.Option(help=entry.metadata["help"] + default, show_default=False)


def up(
    prefill: Annotated[int | None, _option("prefill")] = None,
    decode: Annotated[int | None, _option("decode")] = None,
    schedulers: Annotated[int | None, _option("schedulers")] = None,
    gateways: Annotated[int | None, _option("gateways")] = None,
    model: Annotated[str | None, _option("model")] = None,
    load: Annotated[str | None, _option("load")] = None,
    model_shape: Annotated[str | None, _option("model_shape")] = None,
    device: Annotated[str | None, _option("device")] = None,
    precision: Annotated[str | None, _option("precision")] = None,
    exact: Annotated[bool | None, _option("exact")] = None,
    chat_template: Annotated[str | None, _option("chat_template")] = None,
    tool_format: Annotated[str | None, _option("tool_format")] = None,
    reasoning_format: Annotated[str | None, _option("reasoning_format")] = None,
    host: Annotated[str | None, _option("host")] = None,
    http_port: Annotated[int | None, _option("http_port")] = None,
    grpc_port: Annotated[int | None, _option("grpc_port")] = None,
    public_tls_cert: Annotated[str | None, _option("public_tls_cert")] = None,
    public_tls_key: Annotated[str | None, _option("public_tls_key")] = None,
    nats: Annotated[str | None, _option("nats")] = None,
    otlp_endpoint: Annotated[str | None, _option("otlp_endpoint")] = None,
    instance: Annotated[str | None, _option("instance")] = None,
    limits_file: Annotated[str | None, _option("limits_file")] = None,
    policy: Annotated[str | None, _option("policy")] = None,
    arena_bytes: Annotated[str | None, _option("arena_bytes")] = None,
    max_context_tokens: Annotated[int | None, _option("max_context_tokens")] = None,
    log_level: Annotated[str | None, _option("log_level")] = None,
    log_format: Annotated[str | None, _option("log_format")] = None,
    grace_s: Annotated[float | None, _option("grace_s")] = None,
    start_timeout_s: Annotated[float | None, _option("start_timeout_s")] = None,
    runtime_dir: Annotated[Path | None, _option("runtime_dir")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file: [up] for this command, others for services.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; `weir down` ends it.")] = False,
) -> None:
    """Start a stack on this machine: NATS, transfer, scheduler, workers, gateway. Ctrl-C ends all of it.

    Gets the model first if it is missing, as `weir pull` does. Each option can also come from WEIR_<NAME> or from the
    TOML file.

    \b
    weir up
    weir up --prefill 2 --decode 2 --grpc-port 50052 --http-port 8001
    weir up --gateways 2 --schedulers 2
    weir up --limits-file limits.toml --policy ltr
    weir up --model Qwen/Qwen2.5-0.5B-Instruct
    weir up --chat-template hermes
    weir up --load dummy --model-shape llama-3.2-1b
    weir up --device cuda --model ./Llama-3.1-8B-Instruct --arena-bytes 16GiB
    weir up --device cuda --exact
    weir up --public-tls-cert certs/public-localhost.pem --public-tls-key certs/public-localhost.key
    weir up --detach && weir status
    """
    given = {name: value for name, value in locals().items() if name in _stack_fields() and value is not None}
    stack = _resolve(given, config)
    environ = dict(os.environ) if config is None else {**os.environ, "WEIR_CONFIG": str(config.absolute())}
    models = read_stack_models(stack, _config_file(config))
    need_extra("worker", "weir up")
    _need_rules(stack, models)
    _need_nats(stack.nats)
    _need_device(stack)
    need_memory(stack, models.models)
    models = replace(models, models=tuple(need_model(one) for one in models.models))
    for one in models.models:
        _need_exact(stack, one)
    try:
        if detach:
            raise typer.Exit(_start_detached(stack, environ))
        was_ready = asyncio.run(run_stack(stack, _ConsoleReporter(stack.instance_name), environ, models))
    except (WeirError, OSError) as error:
        fail(error_line(error) if isinstance(error, WeirError) else str(error))
    if not was_ready:
        raise typer.Exit(EXIT_INTERRUPTED)


def down(
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0, max=3600, help="Then what still runs is killed. Default: --grace-s and more.")
    ] = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """End a stack: running requests may finish, then every process stops, and nothing of it is left.

    Also removes what is left of a stack whose `weir up` was killed. Exit code 0 if nothing was running, too.

    \b
    weir down
    weir down --instance weir-50052
    """
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
        ended = asyncio.run(end_instance(paths, timeout_s=timeout_s))
    except WeirError as error:
        fail(error_line(error))
    name = paths.folder.name
    if ended.leftovers.pids:
        pids = " ".join(str(pid) for pid in ended.leftovers.pids)
        stderr.print(f"ended processes that had no supervisor: {pids}", style="yellow", markup=False)
    _print_in_use(ended.leftovers)
    stderr.print(f"{name} has ended" if ended.was_running else f"{name} was not running", markup=False)


def _print_in_use(removed: Removed) -> None:
    for path in removed.in_use:
        others = "processes that were not started from this runtime folder use it"
        stderr.print(f"left {path} as it is: {others}", style="yellow", markup=False, soft_wrap=True)


def _stack_fields() -> frozenset[str]:
    return frozenset(entry.name for entry in fields(StackConfig))


def _resolve(given: Mapping[str, Any], config: Path | None) -> StackConfig:
    ignored = _SERVICE_KEYS - _stack_fields()
    try:
        return resolve_config(
            StackConfig, "up", flags=given, environ=os.environ, toml_path=_config_file(config), ignored=ignored
        )
    except ConfigError as error:
        fail(error.message, code=EXIT_USAGE)


def _config_file(config: Path | None) -> Path | None:
    return config or (Path(os.environ["WEIR_CONFIG"]) if os.environ.get("WEIR_CONFIG") else None)


def _need_rules(stack: StackConfig, models: StackModels) -> None:
    """Policy and limits. Checked here: a scheduler that does not start shows that after seconds, in many lines."""
    from weir.policy.registry import PolicySpec
    from weir.scheduling.limits import CoreLimits

    try:
        PolicySpec.parse(stack.policy)
    except ValueError as error:
        fail(f"--policy: {error}", code=EXIT_USAGE)
    limits = read_limits_file(Path(stack.limits_file)) if stack.limits_file else CoreLimits()
    try:
        models.check_lanes({lane.name: lane.worker_group for lane in limits.lanes})
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)


def _need_nats(url: str) -> None:
    """A server that is not this stack's own must be there already."""
    if not url:
        return
    try:
        where = urlsplit(url)
        socket.create_connection((where.hostname or "", where.port or _NATS_PORT), _NATS_LIMIT_S).close()
    except (OSError, ValueError) as error:
        shown = masked_url(url)
        reason = error if shown == url else type(error).__name__  # its text may quote a part of the URL
        fail(f"--nats {shown}: no server answers there ({reason}); start one, or leave --nats out to get one")


def _need_device(stack: StackConfig) -> None:
    """Checked here, before anything is started: no process of the stack could report it."""
    try:
        check_device(stack.device)
    except WeirError as error:
        fail(error_line(error))


def _need_exact(stack: StackConfig, model: StackModel) -> None:
    """Refuses a model that runs in fp32 on this CPU; says where the setting changes nothing."""
    if not model.exact or stack.device != "cpu":
        return
    from weir.model.files.config import load_model_config
    from weir.model.precision import choose_arithmetic

    try:
        files = load_model_config(resolve_model(model.reference))
        arithmetic = choose_arithmetic(model.precision, files, stack.device, exact=model.exact)
    except ModelError as error:
        fail(str(error))
    stderr.print(f"--exact changes nothing: {arithmetic} on a CPU is exact in any case", markup=False)


def _start_detached(stack: StackConfig, environ: Mapping[str, str]) -> int:
    """Starts the supervisor in a session of its own, and follows it by its state file until it is ready."""
    stack.paths.make()
    log_path = stack.paths.supervisor_log
    rotate(log_path)
    with log_path.open("ab") as log:
        supervisor = subprocess.Popen(
            detached_command(stack),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environ, "WEIR_NATS": stack.nats},
            start_new_session=True,
        )
    try:
        state = _follow(stack, supervisor)
    except KeyboardInterrupt:
        _end_detached(stack, supervisor)
        return EXIT_INTERRUPTED
    if state is None:
        log_text = log_path.read_text(errors="replace")
        # What comes before the error has been on the terminal already, as progress.
        stderr.out(log_text[max(0, log_text.find("error: ")) :].rstrip(), style="red", highlight=False)
        return EXIT_FAILED
    _print_endpoints(state.endpoints, time.time() - state.started_at, stack.instance_name)
    return 0


def _end_detached(stack: StackConfig, supervisor: "subprocess.Popen[bytes]") -> None:
    """Returns when it has ended, or with a line on what still runs after _STOP_S or another Ctrl-C."""
    supervisor.send_signal(signal.SIGTERM)
    try:
        supervisor.wait(_STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        remedy = f"`weir down --instance {stack.instance_name}` ends it"
        stderr.print(f"{stack.instance_name} is still stopping (process {supervisor.pid}); {remedy}", markup=False)


def _follow(stack: StackConfig, supervisor: "subprocess.Popen[bytes]") -> StackState | None:
    """The state of the stack once it is ready; None when its supervisor has ended instead."""
    with _DetachedProgress() as progress:
        while supervisor.poll() is None:
            state = try_read_state(stack.paths.state_file)
            if state is not None and state.supervisor.pid == supervisor.pid:
                progress.show(state)
                if state.phase == "ready":
                    return state
            time.sleep(_POLL_S)
    return None


def detached_command(stack: StackConfig) -> list[str]:
    """All settings but the NATS server, whose URL may hold a password: command lines are everybody's to read."""
    values = {entry.name: getattr(stack, entry.name) for entry in fields(stack) if entry.name != "nats"}
    flags = [word for name, value in values.items() for word in flag_words(name, value)]
    return [sys.executable, "-m", "weir.cli.main", "up", *flags]


def _print_endpoints(endpoints: Mapping[str, str], after_s: float, instance: str) -> None:
    """The one thing that goes to stdout."""
    stdout.print(f"ready after {after_s:.1f} s: instance {instance}", style="bold green", markup=False, soft_wrap=True)
    for what, where in endpoints.items():
        stdout.print(f"  {what:<8} {where}", markup=False, soft_wrap=True)


class _ConsoleReporter:
    """Lines on the terminal of `weir up`, or in its log."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def found_leftovers(self, removed: Removed) -> None:
        if removed.pids:
            pids = " ".join(str(pid) for pid in removed.pids)
            stderr.print(f"ended processes that an earlier `weir up` had left: {pids}", style="yellow", markup=False)
        for path in removed.files:
            stderr.print(f"removed {path}, left by an earlier run", style="yellow", markup=False, soft_wrap=True)
        _print_in_use(removed)

    def process_ready(self, name: str, after_s: float) -> None:
        stderr.print(f"  {name:<12} ready after {after_s:.1f} s", markup=False)

    def note(self, text: str) -> None:
        stderr.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)

    def process_died(self, name: str, log_path: str) -> None:
        line = f"  {name:<12} died; starting it again (log: {log_path})"
        stderr.print(line, style="yellow", markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        stderr.print(f"  {text}", style="yellow", markup=False, soft_wrap=True)

    def state_not_written(self, path: str, error: OSError) -> None:
        problem = f"{path} cannot be written ({error.strerror or error}): `weir status` has nothing to show;"
        ends_it = f"`weir down --instance {self._instance}` or Ctrl-C ends this stack"
        stderr.print(f"{problem} {ends_it}", style="red", markup=False, soft_wrap=True)

    def stack_ready(self, endpoints: Mapping[str, str], after_s: float) -> None:
        _print_endpoints(endpoints, after_s, self._instance)
        stderr.print("Ctrl-C ends it", style="dim")

    def stopping(self) -> None:
        stderr.print("stopping: running requests may end first; Ctrl-C again does not wait", style="dim")


class _DetachedProgress:
    """A status line on the terminal of `weir up --detach`, read from the supervisor's state file."""

    def __init__(self) -> None:
        self._status = stderr.status("starting")
        self._shown: set[str] = set()

    def show(self, state: StackState) -> None:
        ready = [process.name for process in state.processes if process.phase == "ready"]
        for name in ready:
            if name not in self._shown:
                self._shown.add(name)
                stderr.print(f"  {name:<12} ready after {time.time() - state.started_at:.1f} s", markup=False)
        for text in state.notes:
            if text not in self._shown:
                self._shown.add(text)
                stderr.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)
        waiting = [process.name for process in state.processes if process.name not in ready]
        self._status.update(f"waiting for {', '.join(waiting)}" if waiting else "all processes are ready")

    def __enter__(self) -> "_DetachedProgress":
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()
