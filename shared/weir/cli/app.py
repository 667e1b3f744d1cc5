"""All commands of `weir`, and `weir serve`: one service in the foreground, as Compose and Kubernetes run it."""

import os
import sys
from importlib import metadata
from typing import Annotated, Literal

import typer

import weir
from weir.cli import (
    audit,
    batch,
    bench,
    certs,
    chat,
    doctor,
    generate,
    models,
    plan,
    profile,
    pull,
    scheduling,
    simulate,
    status,
    trace,
    train_predictor,
    workers,
)
from weir.cli.planner import command as planner
from weir.cli.stack import host, up
from weir.cli.top import command as top
from weir.runtime.extras import DISTRIBUTION

# What follows the role is not for this program: not even --help.
_SERVICE_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:  # a checkout on the path, not installed
            version = weir.__version__
        typer.echo(f"weir {version}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Weir serves large language models from separate prefill and decode pools."""


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


app.command()(up.up)
app.command()(up.down)
app.command()(host.host)
app.command()(status.status)
app.command()(top.top)
app.command()(trace.trace)
app.command()(audit.audit)
app.command()(workers.drain)
app.command()(workers.role)
app.command()(workers.restart)
app.command(context_settings=_SERVICE_ARGUMENTS)(serve)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(pull.pull)
app.command()(doctor.doctor)
app.command()(simulate.simulate)
app.command()(plan.plan)
app.command()(planner.planner)
app.command()(profile.profile)
app.command()(train_predictor.train_predictor)
app.add_typer(models.app, name="models")
app.add_typer(batch.app, name="batch")
app.add_typer(bench.app, name="bench")
app.add_typer(certs.app, name="certs")
app.add_typer(scheduling.limits_app, name="limits")
app.add_typer(scheduling.policy_app, name="policy")
