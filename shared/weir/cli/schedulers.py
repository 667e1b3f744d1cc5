"""How commands find the schedulers of an instance."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from weir.cli.console import EXIT_NOT_RUNNING, error_line, fail
from weir.client.scheduling import SchedulingClient
from weir.core.errors import WeirError
from weir.runtime.config import default_runtime_dir
from weir.runtime.instances import choose_instance
from weir.runtime.state import try_read_state

SchedulerAddress = Annotated[
    str,
    typer.Option(
        "--scheduler", help="HOST:PORT of a scheduler that `weir up` did not start here.", envvar="WEIR_SCHEDULER"
    ),
]


@contextmanager
def open_scheduling(
    scheduler: str, instance: str, grpc_port: int | None, runtime_dir: Path | None
) -> Iterator[SchedulingClient]:
    """The client of the instance's leading scheduler. What it refuses ends the command with one line."""
    addresses = [scheduler] if scheduler else _addresses(instance, grpc_port, runtime_dir)
    with SchedulingClient(addresses) as client:
        try:
            yield client
        except WeirError as error:
            fail(error_line(error))


def _addresses(instance: str, grpc_port: int | None, runtime_dir: Path | None) -> list[str]:
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
    except WeirError as error:
        fail(error_line(error))
    state = try_read_state(paths.state_file)
    processes = () if state is None else state.processes
    addresses = [process.address for process in processes if process.role == "scheduler" and process.address]
    if not addresses:
        fail(f"{paths.folder.name} has no scheduler that runs", code=EXIT_NOT_RUNNING)
    return addresses
