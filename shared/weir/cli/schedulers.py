"""How commands find the schedulers of an instance."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import error_line, fail
from weir.cli.exit_codes import EXIT_NOT_RUNNING
from weir.client.scheduling import SchedulingClient
from weir.core.errors import WeirError
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.state import try_read_state

SchedulerAddress = Annotated[
    str,
    typer.Option(
        "--scheduler", help="HOST:PORT of a scheduler that `weir up` did not start here.", envvar="WEIR_SCHEDULER"
    ),
]


AdminKey = Annotated[
    str,
    typer.Option(
        "--admin-key",
        help="An operator's key, where there are API keys. Not needed beside a stack of your own `weir up`.",
        envvar="WEIR_ADMIN_KEY",
        callback=options.check_key,
    ),
]


@contextmanager
def open_scheduling(
    scheduler: str, admin_key: str, instance: str, grpc_port: int | None, runtime_dir: Path | None
) -> Iterator[SchedulingClient]:
    """The client of the instance's leading scheduler. What it refuses ends the command with one line."""
    addresses = [scheduler]
    if not scheduler:
        paths = _paths(instance, grpc_port, runtime_dir)
        addresses, admin_key = _addresses(paths), admin_key or paths.try_read_admin_key() or ""
    with SchedulingClient(addresses, admin_key=admin_key) as client:
        try:
            yield client
        except WeirError as error:
            fail(error_line(error))


def _paths(instance: str, grpc_port: int | None, runtime_dir: Path | None) -> InstancePaths:
    try:
        return choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
    except WeirError as error:
        fail(error_line(error))


def _addresses(paths: InstancePaths) -> list[str]:
    state = try_read_state(paths.state_file)
    if state is None:
        hint = "start it with `weir up`, or name a scheduler with --scheduler"
        fail(f"{paths.folder.name} is not running here; {hint}", code=EXIT_NOT_RUNNING)
    addresses = [process.address for process in state.processes if process.role == "scheduler" and process.address]
    if not addresses:
        fail(f"{paths.folder.name} has no scheduler that runs", code=EXIT_NOT_RUNNING)
    return addresses
