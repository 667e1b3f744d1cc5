"""`weir host`: one host of a stack of several, from its start to its end; and what `weir up --hosts` prints."""

import asyncio
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from weir.cli import EXIT_INTERRUPTED, EXIT_USAGE
from weir.cli.console import error_line, fail, need_extra, stderr, stdout
from weir.cli.stack.start import ConsoleReporter, need_startable, resolve_stack, service_environ, stack_option
from weir.core.errors import WeirError
from weir.runtime.config import ConfigError
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.host import HostConfig
from weir.runtime.stack.hosts_file import Hosts, host_command, read_hosts
from weir.runtime.stack.instances import run_stack


def host(
    join: Annotated[str | None, stack_option(HostConfig, "nats", "--join", "--nats")] = None,
    serve_nats: Annotated[bool | None, stack_option(HostConfig, "serve_nats")] = None,
    address: Annotated[str | None, stack_option(HostConfig, "address")] = None,
    instance: Annotated[str | None, stack_option(HostConfig, "instance")] = None,
    credentials_dir: Annotated[str | None, stack_option(HostConfig, "credentials_dir")] = None,
    insecure_listen: Annotated[bool | None, stack_option(HostConfig, "insecure_listen")] = None,
    prefill: Annotated[int | None, stack_option(HostConfig, "prefill")] = None,
    decode: Annotated[int | None, stack_option(HostConfig, "decode")] = None,
    schedulers: Annotated[int | None, stack_option(HostConfig, "schedulers")] = None,
    gateways: Annotated[int | None, stack_option(HostConfig, "gateways")] = None,
    model: Annotated[str | None, stack_option(HostConfig, "model")] = None,
    load: Annotated[str | None, stack_option(HostConfig, "load")] = None,
    model_shape: Annotated[str | None, stack_option(HostConfig, "model_shape")] = None,
    device: Annotated[str | None, stack_option(HostConfig, "device")] = None,
    precision: Annotated[str | None, stack_option(HostConfig, "precision")] = None,
    exact: Annotated[bool | None, stack_option(HostConfig, "exact")] = None,
    http_port: Annotated[int | None, stack_option(HostConfig, "http_port")] = None,
    grpc_port: Annotated[int | None, stack_option(HostConfig, "grpc_port")] = None,
    public_tls_cert: Annotated[str | None, stack_option(HostConfig, "public_tls_cert")] = None,
    public_tls_key: Annotated[str | None, stack_option(HostConfig, "public_tls_key")] = None,
    otlp_endpoint: Annotated[str | None, stack_option(HostConfig, "otlp_endpoint")] = None,
    limits_file: Annotated[str | None, stack_option(HostConfig, "limits_file")] = None,
    policy: Annotated[str | None, stack_option(HostConfig, "policy")] = None,
    arena_bytes: Annotated[str | None, stack_option(HostConfig, "arena_bytes")] = None,
    max_context_tokens: Annotated[int | None, stack_option(HostConfig, "max_context_tokens")] = None,
    page_files_dir: Annotated[str | None, stack_option(HostConfig, "page_files_dir")] = None,
    page_files_bytes: Annotated[str | None, stack_option(HostConfig, "page_files_bytes")] = None,
    page_valkey_url: Annotated[str | None, stack_option(HostConfig, "page_valkey_url")] = None,
    page_valkey_password_file: Annotated[str | None, stack_option(HostConfig, "page_valkey_password_file")] = None,
    page_valkey_ca_file: Annotated[str | None, stack_option(HostConfig, "page_valkey_ca_file")] = None,
    page_valkey_insecure: Annotated[bool | None, stack_option(HostConfig, "page_valkey_insecure")] = None,
    page_memory_bytes: Annotated[str | None, stack_option(HostConfig, "page_memory_bytes")] = None,
    log_level: Annotated[str | None, stack_option(HostConfig, "log_level")] = None,
    log_format: Annotated[str | None, stack_option(HostConfig, "log_format")] = None,
    first_port: Annotated[int | None, stack_option(HostConfig, "first_port")] = None,
    metrics_port: Annotated[int | None, stack_option(HostConfig, "metrics_port")] = None,
    probe_port: Annotated[int | None, stack_option(HostConfig, "probe_port")] = None,
    grace_s: Annotated[float | None, stack_option(HostConfig, "grace_s")] = None,
    start_timeout_s: Annotated[float | None, stack_option(HostConfig, "start_timeout_s")] = None,
    runtime_dir: Annotated[Path | None, stack_option(HostConfig, "runtime_dir")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file: [host] for this command, others for services.")
    ] = None,
) -> None:
    """Run one host of a stack of several: its workers and their arena, and whatever else is asked for. Ctrl-C ends it.

    Joins the stack by its NATS server, for which it waits, and may come back after it was lost. `weir up --hosts FILE`
    prints this command for each host; by hand, from systemd or srun it is the same.

    \b
    weir host --join tls://10.0.0.1:4222 --instance lab --address 10.0.0.2 --credentials-dir lab/b
    weir host --join nats://10.0.0.1:4222 --instance lab --address 10.0.0.2 --insecure-listen --prefill 2
    """
    given = {**locals(), "nats": join}
    stack = resolve_stack(HostConfig, "host", given, config)
    environ, models = service_environ(config), need_startable(stack, config, "weir host", stack.start_timeout_s)
    try:
        was_ready = asyncio.run(run_stack(stack, ConsoleReporter(stack.instance), environ, models))
    except (WeirError, OSError) as error:
        fail(error_line(error) if isinstance(error, WeirError) else str(error))
    if not was_ready:
        raise typer.Exit(EXIT_INTERRUPTED)


_OF_ONE_HOST = frozenset({"prefill", "decode", "schedulers", "gateways", "host", "nats", "instance", "runtime_dir"})


def print_host_commands(path: Path, out: Path | None, given: Mapping[str, Any]) -> None:
    """Of all hosts in the file, with what was `given` to `weir up` for all; makes their credentials."""
    names = {entry.name for entry in fields(StackConfig)}
    more = {name: value for name, value in given.items() if name in names and value is not None}
    wrong = sorted(_OF_ONE_HOST.intersection(more))
    if wrong:
        fail(f"--{wrong[0].replace('_', '-')}: with --hosts say it in {path}, for each host", code=EXIT_USAGE)
    try:
        hosts = read_hosts(path)
        folder = None if hosts.insecure_listen else _make_credentials(hosts, out or Path(hosts.instance))
    except ConfigError as error:
        fail(error.message, code=EXIT_USAGE)
    except (WeirError, OSError) as error:
        fail(error_line(error) if isinstance(error, WeirError) else str(error))
    for entry in hosts.hosts:
        own = "" if folder is None else str(folder / entry.name)
        stdout.out(f"# {entry.name}, {entry.address}", highlight=False)
        stdout.out(shlex.join(host_command(entry.config(hosts, own), more)), highlight=False)


def _make_credentials(hosts: Hosts, folder: Path) -> Path:
    need_extra("certs", "weir up --hosts")
    from weir.runtime.stack.host_secrets import DAYS, make_credentials

    make_credentials(hosts, folder)
    stderr.print(
        f"Copy {folder}/NAME, and nothing else of {folder}, to the host of that name. Certificates are valid for "
        f"{DAYS:g} days; the same command makes new ones, which hosts that run notice.",
        markup=False,
        soft_wrap=True,
    )
    return folder
