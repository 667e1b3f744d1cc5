"""`weir top`: the stack in a terminal, as it is now."""

from typing import Annotated

import typer

from weir.cli import options
from weir.cli.scheduling import AdminKey

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
    given = [gateway] if gateway else []
    urls, key = options.find_gateways(given, admin_key, instance, grpc_port, runtime_dir)
    from weir.cli.top.app import TopApp  # textual takes a while to load, and no other command needs it
    from weir.client.stack import StackClient

    with options.usable_ca():
        client = StackClient(urls[0], admin_key=key, ca=ca)
    TopApp(client, interval_s).run()
