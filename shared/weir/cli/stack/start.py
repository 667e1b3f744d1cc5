"""What `weir up` and `weir host` have in common: settings, what is looked at before anything starts, and the lines that
tell how it goes."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import typer

from weir.cli import EXIT_USAGE
from weir.cli.console import error_line, fail, need_extra, stderr, stdout
from weir.cli.scheduling import read_limits_file
from weir.cli.stack.models import need_memory, need_model, read_stack_models
from weir.core.credentials import masked_url
from weir.core.errors import WeirError
from weir.model.device_check import check_device
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.runtime.config import ConfigError, ServiceConfig, resolve_config
from weir.runtime.page_tiers import check_valkey_here
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.host import DEFAULT_NATS_PORT
from weir.runtime.stack.leftovers import Removed
from weir.runtime.stack.models import StackModel, StackModels

_NATS_LIMIT_S = 5.0
_NATS_POLL_S = 0.5
_SERVICE_KEYS = frozenset(entry.name for entry in fields(ServiceConfig))
_ConfigT = TypeVar("_ConfigT", bound=StackConfig)


def stack_option(config_type: type[StackConfig], name: str, *flags: str) -> Any:
    """The option of a field; its default lives there, below the TOML file and the environment."""
    entry = next(entry for entry in fields(config_type) if entry.name == name)
    default = "" if callable(entry.default_factory) or entry.default == "" else f" [default: {entry.default}]"
    return typer.Option(*flags, help=entry.metadata["help"] + default, show_default=False)


def resolve_stack(config_type: type[_ConfigT], section: str, given: Mapping[str, Any], config: Path | None) -> _ConfigT:
    """`given`: what the command was called with, by its names; what is no field or None counts for nothing. Ends the
    command on a value that cannot be used."""
    names = frozenset(entry.name for entry in fields(config_type))
    flags = {name: value for name, value in given.items() if name in names and value is not None}
    path = config_file(config)
    try:
        return resolve_config(
            config_type, section, flags=flags, environ=os.environ, toml_path=path, ignored=_SERVICE_KEYS - names
        )
    except ConfigError as error:
        fail(error.message, code=EXIT_USAGE)


def config_file(config: Path | None) -> Path | None:
    return config or (Path(os.environ["WEIR_CONFIG"]) if os.environ.get("WEIR_CONFIG") else None)


def service_environ(config: Path | None) -> dict[str, str]:
    """Of the stack's processes, which read the same file."""
    return dict(os.environ) if config is None else {**os.environ, "WEIR_CONFIG": str(config.absolute())}


def need_startable(stack: StackConfig, config: Path | None, command: str, nats_wait_s: float = 0.0) -> StackModels:
    """Ends the command on what would keep processes from starting, which they would say later and in many lines; gets
    models that are not there. `nats_wait_s`: for the first answer of a NATS that is not this stack's own."""
    models = read_stack_models(stack, config_file(config))
    need_extra("worker", command)
    _need_rules(stack, models)
    try:
        check_valkey_here(stack)
    except ConfigError as error:
        fail(error.message, code=EXIT_USAGE)
    if not stack.starts_nats:
        _need_nats(stack.nats, nats_wait_s)
    _need_device(stack)
    need_memory(stack, models.models)
    models = replace(models, models=tuple(need_model(one) for one in models.models))
    for one in models.models:
        _need_exact(stack, one)
    return models


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


def _need_nats(url: str, wait_s: float) -> None:
    shown, ends_at_s = masked_url(url), time.monotonic() + wait_s
    problem = _try_find_nats_problem(url)
    if problem is not None and not wait_s:
        fail(f"--nats {shown}: no server answers there ({problem}); start one, or leave --nats out to get one")
    if problem is not None:
        stderr.print(f"waiting for the NATS server at {shown} ({problem})", markup=False, soft_wrap=True)
    while problem is not None:
        if time.monotonic() >= ends_at_s:
            fail(f"--join {shown}: no server answers there after {wait_s:g} s ({problem}); start the host that has it")
        time.sleep(_NATS_POLL_S)
        problem = _try_find_nats_problem(url)


def _try_find_nats_problem(url: str) -> str | None:
    """Why nobody answers there, without what may be a password."""
    try:
        where = urlsplit(url)
        socket.create_connection((where.hostname or "", where.port or DEFAULT_NATS_PORT), _NATS_LIMIT_S).close()
    except (OSError, ValueError) as error:
        return str(error) if masked_url(url) == url else type(error).__name__  # its text may quote a part of the URL
    return None


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


def print_in_use(removed: Removed) -> None:
    for path in removed.in_use:
        others = "processes that were not started from this runtime folder use it"
        stderr.print(f"left {path} as it is: {others}", style="yellow", markup=False, soft_wrap=True)


def print_endpoints(endpoints: Mapping[str, str], after_s: float, instance: str) -> None:
    """The one thing that goes to stdout."""
    stdout.print(f"ready after {after_s:.1f} s: instance {instance}", style="bold green", markup=False, soft_wrap=True)
    for what, where in endpoints.items():
        stdout.print(f"  {what:<8} {where}", markup=False, soft_wrap=True)


class ConsoleReporter:
    """Lines on the terminal of the command, or in its log."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def found_leftovers(self, removed: Removed) -> None:
        if removed.pids:
            pids = " ".join(str(pid) for pid in removed.pids)
            stderr.print(f"ended processes that an earlier `weir up` had left: {pids}", style="yellow", markup=False)
        for path in removed.files:
            stderr.print(f"removed {path}, left by an earlier run", style="yellow", markup=False, soft_wrap=True)
        print_in_use(removed)

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
        print_endpoints(endpoints, after_s, self._instance)
        stderr.print("Ctrl-C ends it", style="dim")

    def stopping(self) -> None:
        stderr.print("stopping: running requests may end first; Ctrl-C again does not wait", style="dim")
