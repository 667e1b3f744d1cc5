"""`weir up` and `weir down`: a whole stack on this machine, from its start to its end."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from weir.cli import EXIT_FAILED, EXIT_INTERRUPTED, options
from weir.cli.console import error_line, fail, stderr
from weir.cli.stack.host import print_host_commands
from weir.cli.stack.start import (
    ConsoleReporter,
    need_startable,
    print_endpoints,
    print_in_use,
    resolve_stack,
    service_environ,
    stack_option,
)
from weir.core.errors import WeirError
from weir.runtime.config import default_runtime_dir, flag_words
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.instances import choose_instance, end_instance, run_stack
from weir.runtime.stack.state import StackState, try_read_state
from weir.runtime.stack.supervised import rotate

_POLL_S = 0.05
_STOP_S = 60.0


def up(
    prefill: Annotated[int | None, stack_option(StackConfig, "prefill")] = None,
    decode: Annotated[int | None, stack_option(StackConfig, "decode")] = None,
    spares: Annotated[int | None, stack_option(StackConfig, "spares")] = None,
    schedulers: Annotated[int | None, stack_option(StackConfig, "schedulers")] = None,
    gateways: Annotated[int | None, stack_option(StackConfig, "gateways")] = None,
    model: Annotated[str | None, stack_option(StackConfig, "model")] = None,
    load: Annotated[str | None, stack_option(StackConfig, "load")] = None,
    model_shape: Annotated[str | None, stack_option(StackConfig, "model_shape")] = None,
    device: Annotated[str | None, stack_option(StackConfig, "device")] = None,
    precision: Annotated[str | None, stack_option(StackConfig, "precision")] = None,
    exact: Annotated[bool | None, stack_option(StackConfig, "exact")] = None,
    chat_template: Annotated[str | None, stack_option(StackConfig, "chat_template")] = None,
    tool_format: Annotated[str | None, stack_option(StackConfig, "tool_format")] = None,
    reasoning_format: Annotated[str | None, stack_option(StackConfig, "reasoning_format")] = None,
    host: Annotated[str | None, stack_option(StackConfig, "host")] = None,
    http_port: Annotated[int | None, stack_option(StackConfig, "http_port")] = None,
    grpc_port: Annotated[int | None, stack_option(StackConfig, "grpc_port")] = None,
    public_tls_cert: Annotated[str | None, stack_option(StackConfig, "public_tls_cert")] = None,
    public_tls_key: Annotated[str | None, stack_option(StackConfig, "public_tls_key")] = None,
    nats: Annotated[str | None, stack_option(StackConfig, "nats")] = None,
    otlp_endpoint: Annotated[str | None, stack_option(StackConfig, "otlp_endpoint")] = None,
    instance: Annotated[str | None, stack_option(StackConfig, "instance")] = None,
    limits_file: Annotated[str | None, stack_option(StackConfig, "limits_file")] = None,
    policy: Annotated[str | None, stack_option(StackConfig, "policy")] = None,
    arena_bytes: Annotated[str | None, stack_option(StackConfig, "arena_bytes")] = None,
    max_context_tokens: Annotated[int | None, stack_option(StackConfig, "max_context_tokens")] = None,
    page_files_dir: Annotated[str | None, stack_option(StackConfig, "page_files_dir")] = None,
    page_files_bytes: Annotated[str | None, stack_option(StackConfig, "page_files_bytes")] = None,
    page_valkey_url: Annotated[str | None, stack_option(StackConfig, "page_valkey_url")] = None,
    page_valkey_password_file: Annotated[str | None, stack_option(StackConfig, "page_valkey_password_file")] = None,
    page_valkey_ca_file: Annotated[str | None, stack_option(StackConfig, "page_valkey_ca_file")] = None,
    page_valkey_insecure: Annotated[bool | None, stack_option(StackConfig, "page_valkey_insecure")] = None,
    page_memory_bytes: Annotated[str | None, stack_option(StackConfig, "page_memory_bytes")] = None,
    log_level: Annotated[str | None, stack_option(StackConfig, "log_level")] = None,
    log_format: Annotated[str | None, stack_option(StackConfig, "log_format")] = None,
    grace_s: Annotated[float | None, stack_option(StackConfig, "grace_s")] = None,
    start_timeout_s: Annotated[float | None, stack_option(StackConfig, "start_timeout_s")] = None,
    runtime_dir: Annotated[Path | None, stack_option(StackConfig, "runtime_dir")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file: [up] for this command, others for services.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; `weir down` ends it.")] = False,
    hosts: Annotated[
        Path | None, typer.Option(help="Start nothing: print the command of each host that this TOML file names.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --hosts: folder for their credentials. Default: the stack's name.")
    ] = None,
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
    weir up --hosts hosts.toml --model smollm2-135m
    """
    given = locals()
    if hosts is not None:
        print_host_commands(hosts, out, given)
        return
    stack = resolve_stack(StackConfig, "up", given, config)
    environ, models = service_environ(config), need_startable(stack, config, "weir up")
    try:
        if detach:
            raise typer.Exit(_start_detached(stack, environ))
        was_ready = asyncio.run(run_stack(stack, ConsoleReporter(stack.instance_name), environ, models))
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
    print_in_use(ended.leftovers)
    stderr.print(f"{name} has ended" if ended.was_running else f"{name} was not running", markup=False)


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
    print_endpoints(state.endpoints, time.time() - state.started_at, stack.instance_name)
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
