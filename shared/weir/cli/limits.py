"""`weir limits`: lanes and tenants of a running stack."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir.cli import options
from weir.cli.console import error_line, fail, stderr, stdout
from weir.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from weir.cli.schedulers import AdminKey, SchedulerAddress, open_scheduling
from weir.client.scheduling import SchedulingView
from weir.core.api_key import MIN_KEY_CHARS, key_digest, make_key
from weir.core.errors import InvalidRequest

if TYPE_CHECKING:
    from weir.scheduling.limits.core_limits import CoreLimits

app = typer.Typer(help="Lanes, tenants and their limits.", no_args_is_help=True)


@app.command()
def show(
    toml: Annotated[bool, typer.Option("--toml", help="Only the limits, as a file that would say them.")] = False,
    scheduler: SchedulerAddress = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what is in force, where it comes from, and how each lane and tenant is doing.

    \b
    weir limits show
    weir limits show --toml > limits.toml
    """
    with open_scheduling(scheduler, admin_key, instance, grpc_port, runtime_dir) as client:
        view = client.describe()
    if as_json:
        stdout.out(json.dumps(asdict(view)), highlight=False)
    elif toml:
        stdout.out(view.limits_toml, end="", highlight=False)
    else:
        _print_view(view)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A limits file.")]) -> None:
    """Say whether a limits file is right, without a stack. Exit code 1 names the key that is wrong.

    \b
    weir limits check limits.toml
    """
    limits = read_limits_file(file)
    num_keys = sum(len(tenant.api_key_digests) for tenant in (*limits.tenants, limits.default_tenant))
    lanes = ", ".join(lane.name for lane in limits.lanes)
    keys = f"{num_keys} keys, {len(limits.admin_key_digests)} admin keys"
    stdout.print(f"{file}: right: lanes {lanes}; {len(limits.tenants)} tenants, {keys}", markup=False, soft_wrap=True)
    if num_keys and not limits.admin_key_digests:
        stderr.print("without admin_key_digests only who started the stack changes limits at run time", soft_wrap=True)


def read_limits_file(file: Path) -> "CoreLimits":
    """Ends the command on a file that cannot be used, naming the key that is wrong."""
    from weir.scheduling.limits.core_limits import CoreLimits
    from weir.scheduling.limits.file import parse_limits

    try:
        return parse_limits(file.read_text(encoding="utf-8"), CoreLimits())
    except OSError as error:
        fail(f"limits file {file}: {error.strerror or error}", code=EXIT_USAGE)
    except UnicodeDecodeError as error:
        fail(f"limits file {file}: not UTF-8 text: {error}", code=EXIT_USAGE)
    except InvalidRequest as error:
        fail(f"limits file {file}: {error_line(error)}", code=EXIT_FAILED)


@app.command("set")
def set_(
    settings: Annotated[list[str], typer.Argument(help="KEY=VALUE by the names of the limits file.")],
    scheduler: SchedulerAddress = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Change limits now, all of those given or none. They hold until the limits file says something new.

    \b
    weir limits set lanes.batch.max_queued=100 tenants.acme.requests_per_min=60
    weir limits set tenants.acme.lanes='["batch"]' lane_order=weighted
    """
    changes = dict(_parse_setting(setting) for setting in settings)
    if len(changes) != len(settings):
        fail("a key comes twice; give each once", code=EXIT_USAGE)
    with open_scheduling(scheduler, admin_key, instance, grpc_port, runtime_dir) as client:
        client.set_limits(changes)
    for key, value in changes.items():
        stderr.print(f"{key} = {value}", markup=False)


@app.command()
def key(
    digest_only: Annotated[
        bool, typer.Option("--digest", help="Read a key from standard input and print its digest.")
    ] = False,
) -> None:
    """Make an API key: the client keeps the key, the limits file gets its digest.

    Into a tenant's `api_key_digests`, or into `admin_key_digests` for whoever may change limits and policy.

    \b
    weir limits key
    weir limits key --digest < key.txt
    """
    if not digest_only:
        made = make_key()
        stdout.print(f"key     {made}\ndigest  {key_digest(made).hex()}", markup=False, soft_wrap=True)
        return
    given = sys.stdin.read().strip()
    if len(given) < MIN_KEY_CHARS:
        fail(f"the key has {len(given)} characters: use at least {MIN_KEY_CHARS}", code=EXIT_USAGE)
    stdout.out(key_digest(given).hex(), highlight=False)


def _parse_setting(setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not (equals and key.strip()):
        fail(f"{setting}: give KEY=VALUE, such as lanes.batch.max_queued=100", code=EXIT_USAGE)
    return key.strip(), value.strip()


def _print_view(view: SchedulingView) -> None:
    source = f"{view.limits_path} ({view.limits_digest[:12]})" if view.limits_path else "no file"
    stdout.print(f"limits from {source}; policy {view.policy}; epoch {view.epoch}", markup=False, soft_wrap=True)
    if view.limits_error:
        stderr.print(f"the file as it is now is not in force: {view.limits_error}", style="red", soft_wrap=True)
    for name, value in view.overrides.items():
        stdout.print(f"changed at run time: {name} = {value}", markup=False, soft_wrap=True)
    _print_figures("lane", view.lanes)
    _print_figures("tenant", view.tenants)


def _print_figures(what: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    names = sorted({name for metrics in rows.values() for name in metrics})
    widths = [max(len(name), 9) + 2 for name in names]
    first = max(len(what), *(len(row) for row in rows), 0) + 2
    stdout.print()
    header = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    stdout.print(f"{what:<{first}}{header}", markup=False, soft_wrap=True)
    for row, metrics in rows.items():
        cells = (f"{metrics.get(name, 0.0):>{width}.10g}" for name, width in zip(names, widths, strict=True))
        stdout.print(f"{row:<{first}}{''.join(cells)}", markup=False, soft_wrap=True)
