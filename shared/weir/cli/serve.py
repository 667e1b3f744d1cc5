"""`weir serve`: one service in the foreground, as Compose and Kubernetes run it."""

import os
import sys
from typing import Annotated, Literal

import typer

# What follows the role is not for this program: not even --help.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def serve(
    context: typer.Context,
    role: Annotated[Literal["gateway", "scheduler", "prefill", "decode", "transfer"], typer.Argument()],
) -> None:
    """Run one service in this process. Its own flags follow its name; `weir serve ROLE --help` lists them.

    \b
    weir serve scheduler --nats-url nats://127.0.0.1:4222
    weir serve decode --help
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"weir_{role}", *context.args])
