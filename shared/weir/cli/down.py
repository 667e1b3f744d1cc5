"""`weir down`: ends an instance, whatever state it is in."""

import asyncio
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import error_line, fail, stderr
from weir.core.errors import WeirError
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.instances import choose_instance, end_instance


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
    stderr.print(f"{name} has ended" if ended.was_running else f"{name} was not running", markup=False)
