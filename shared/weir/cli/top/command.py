"""`weir top`: the stack in a terminal, as it is now."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import EXIT_NOT_RUNNING, EXIT_USAGE, options
from weir.cli.console import error_line, fail
from weir.cli.scheduling import AdminKey
from weir.core.errors import WeirError
from weir.rpc.tls.certificates import CertificateError
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.state import try_read_state

_OPENAI, _OPENAI_PATH = "OpenAI", "/v1"


def top(
    gateway: Annotated[str, typer.Option(help="http://HOST:PORT of a gateway that `weir up` did not start here.")] = "",
    interval_s: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two looks.")] = 1.0,
    admin_key: AdminKey = "",
    ca: options.Ca = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Watch a stack in the terminal: lanes, queues, workers, arenas, latencies and tenants. `q` quits.

    \b
    weir top
    weir top --gateway http://10.0.0.7:8000 --interval-s 2
    """
    url, key = _find_gateway(gateway, admin_key, instance, grpc_port, runtime_dir)
    from weir.cli.top.app import TopApp  # textual takes a while to load, and no other command needs it
    from weir.client.stack import StackClient

    try:
        client = StackClient(url, admin_key=key, ca=ca)
    except CertificateError as error:
        fail(f"--{error.message}", code=EXIT_USAGE)
    TopApp(client, interval_s).run()


def _find_gateway(
    gateway: str, admin_key: str, instance: str, grpc_port: int | None, runtime_dir: Path | None
) -> tuple[str, str]:
    """Its address and an operator's key: those given, else those of the stack that `weir up` started here."""
    if gateway:
        return gateway, admin_key
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
    except WeirError as error:
        fail(error_line(error))
    state = try_read_state(paths.state_file)
    if state is None or _OPENAI not in state.endpoints:
        hint = "start it with `weir up`, or name a gateway with --gateway"
        fail(f"{paths.folder.name} is not running here; {hint}", code=EXIT_NOT_RUNNING)
    return state.endpoints[_OPENAI].removesuffix(_OPENAI_PATH), admin_key or paths.try_read_admin_key() or ""
