"""All commands of `weir`."""

from importlib import metadata
from typing import Annotated

import typer

import weir
from weir.cli import (
    bench,
    chat,
    doctor,
    down,
    generate,
    limits,
    plan,
    policy,
    profile,
    pull,
    serve,
    simulate,
    status,
    train_predictor,
    up,
)
from weir.runtime.extras import DISTRIBUTION

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


app.command()(up.up)
app.command()(down.down)
app.command()(status.status)
app.command(context_settings=serve.SETTINGS)(serve.serve)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(pull.pull)
app.command()(doctor.doctor)
app.command()(simulate.simulate)
app.command()(plan.plan)
app.command()(profile.profile)
app.command()(train_predictor.train_predictor)
app.add_typer(bench.app, name="bench")
app.add_typer(limits.app, name="limits")
app.add_typer(policy.app, name="policy")
