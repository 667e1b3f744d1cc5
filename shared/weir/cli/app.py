"""All commands of `weir`, and `weir serve`: one service in the foreground, as Compose and Kubernetes run it."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, metadata
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import weir
from weir.cli.loading import ends_quietly
from weir.runtime.extras import DISTRIBUTION

# What follows the role is not for this program: not even --help.
_SERVICE_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

# name: the module's function, or its commands, as `weir --help` orders them
_COMMANDS = {
    "up": "weir.cli.stack.up:up",
    "down": "weir.cli.stack.up:down",
    "host": "weir.cli.stack.host:host",
    "status": "weir.cli.status:status",
    "top": "weir.cli.top.command:top",
    "trace": "weir.cli.trace:trace",
    "audit": "weir.cli.audit:audit",
    "drain": "weir.cli.workers:drain",
    "role": "weir.cli.workers:role",
    "restart": "weir.cli.workers:restart",
    "serve": "weir.cli.app:serve",
    "generate": "weir.cli.generate:generate",
    "chat": "weir.cli.chat:chat",
    "pull": "weir.cli.pull:pull",
    "doctor": "weir.cli.doctor:doctor",
    "simulate": "weir.cli.simulate:simulate",
    "plan": "weir.cli.plan:plan",
    "planner": "weir.cli.planner.command:planner",
    "profile": "weir.cli.profile:profile",
    "train-predictor": "weir.cli.train_predictor:train_predictor",
    "models": "weir.cli.models:app",
    "batch": "weir.cli.batch:app",
    "bench": "weir.cli.bench:app",
    "certs": "weir.cli.certs:app",
    "limits": "weir.cli.scheduling:limits_app",
    "policy": "weir.cli.scheduling:policy_app",
}
_PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


class _Commands(Mapping[str, Any]):
    """Each is imported when it is asked for. After click's "Lazily loading subcommands" (complex applications)."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = _COMMANDS[name].partition(":")
        with ends_quietly():
            loaded: typer.Typer | Callable[..., None] = getattr(import_module(module), attribute)
        alone = typer.Typer(**_PLAIN)
        if isinstance(loaded, typer.Typer):
            alone.add_typer(loaded, name=name)
        else:
            alone.command(name, context_settings=_SERVICE_ARGUMENTS if name == "serve" else None)(loaded)
        return typer.main.get_group(alone).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _LoadedWhenAsked(TyperGroup):
    """Imports the command that is run and no other: all of them take a second."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return [*self.commands]


app = typer.Typer(cls=_LoadedWhenAsked, no_args_is_help=True, **_PLAIN)


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
