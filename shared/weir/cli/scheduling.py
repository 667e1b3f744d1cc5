"""`weir limits` and `weir policy`: by what rules a running stack schedules, and their change."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weir.cli import EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_USAGE, options
from weir.cli.console import error_line, fail, stderr, stdout
from weir.client.scheduling import SchedulingClient, SchedulingView
from weir.core.credentials import MIN_KEY_CHARS, key_digest, make_key
from weir.core.errors import InvalidRequest, WeirError
from weir.rpc.tls.certificates import Certificate
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.state import ProcessState, try_read_state

if TYPE_CHECKING:
    from weir.scheduling.limits import CoreLimits

limits_app = typer.Typer(help="Lanes, tenants and their limits.", no_args_is_help=True)
policy_app = typer.Typer(help="The scheduling policy.", no_args_is_help=True)

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


@limits_app.command("show")
def show_limits(
    toml: Annotated[bool, typer.Option("--toml", help="Only the limits, as a limits file.")] = False,
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
    with _open_scheduling(scheduler, admin_key, instance, grpc_port, runtime_dir) as client:
        view = client.describe()
    if as_json:
        stdout.out(json.dumps(asdict(view)), highlight=False)
    elif toml:
        stdout.out(view.limits_toml, end="", highlight=False)
    else:
        _print_view(view)


@limits_app.command("check")
def check_limits(file: Annotated[Path, typer.Argument(help="A limits file.")]) -> None:
    """Check a limits file, without a stack. Exit code 1 names the key that is wrong.

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
    from weir.scheduling.limits import CoreLimits
    from weir.scheduling.limits_file import parse_limits

    try:
        return parse_limits(file.read_text(encoding="utf-8"), CoreLimits())
    except OSError as error:
        fail(f"limits file {file}: {error.strerror or error}", code=EXIT_USAGE)
    except UnicodeDecodeError as error:
        fail(f"limits file {file}: not UTF-8 text: {error}", code=EXIT_USAGE)
    except InvalidRequest as error:
        fail(f"limits file {file}: {error_line(error)}", code=EXIT_FAILED)


@limits_app.command("set")
def set_limits(
    settings: Annotated[list[str], typer.Argument(help="KEY=VALUE by the names of the limits file.")],
    scheduler: SchedulerAddress = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Change limits now, all of those given or none. They hold until the limits file changes.

    Says what each was and is. Bounds of workers, of a role or of one: a lower one ends nothing that runs.

    \b
    weir limits set lanes.batch.max_queued=100 tenants.acme.requests_per_min=60
    weir limits set tenants.acme.lanes='["batch"]' lanes.batch.max_output_tokens=256
    weir limits set workers.decode.max_num_seqs=16 workers.prefill-0.max_num_batched_tokens=512
    """
    changes = dict(_parse_setting(setting) for setting in settings)
    if len(changes) != len(settings):
        fail("a key comes twice; give each once", code=EXIT_USAGE)
    with _open_scheduling(scheduler, admin_key, instance, grpc_port, runtime_dir) as client:
        changed = client.change_limits(changes)
    if as_json:
        stdout.out(json.dumps([asdict(one) for one in changed]), highlight=False)
        return
    for one in changed:
        was = "not set" if one.was is None else one.was
        stderr.print(f"{one.key} = {one.now} (was {was})", markup=False, soft_wrap=True)


@limits_app.command("key")
def make_api_key(
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


@policy_app.command("list")
def list_policies() -> None:
    """Every policy with its parameters, their ranges and defaults."""
    from weir.policy.registry import describe_policy, policy_names

    for name in policy_names():
        try:
            described = describe_policy(name)
        except ValueError as error:  # another distribution's, and broken: the others can still be listed
            described = str(error)
        stdout.print(f"{name}: {described}" if described else name, markup=False, soft_wrap=True)


@policy_app.command("show")
def show_policy(
    scheduler: SchedulerAddress = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """The policy in force."""
    with _open_scheduling(scheduler, admin_key, instance, grpc_port, runtime_dir) as client:
        stdout.print(client.describe().policy, markup=False)


@policy_app.command("set")
def set_policy(
    policy: Annotated[str, typer.Argument(help="NAME, or NAME:KEY=VALUE,KEY=VALUE.")],
    scheduler: SchedulerAddress = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Change the policy of the scheduler and of every worker. Requests that wait or run are kept.

    \b
    weir policy set ltr
    weir policy set srtf:max_age=0.5
    """
    from weir.policy.registry import PolicySpec

    try:
        PolicySpec.parse(policy)
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)
    with _open_scheduling(scheduler, admin_key, instance, grpc_port, runtime_dir) as client:
        stderr.print(f"policy {client.set_policy(policy)}", markup=False)


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
    for what, values in (("tuned", view.tuned), ("on trial", view.trial)):
        for name, value in values.items():
            stdout.print(f"{what}: {name} = {value}", markup=False, soft_wrap=True)
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


@contextmanager
def _open_scheduling(
    scheduler: str, admin_key: str, instance: str, grpc_port: int | None, runtime_dir: Path | None
) -> Iterator[SchedulingClient]:
    """The client of the instance's leading scheduler. What it refuses ends the command with one line."""
    found = find_schedulers(scheduler, admin_key, instance, grpc_port, runtime_dir)
    with SchedulingClient(found.addresses, admin_key=found.admin_key, certificate=found.certificate) as client:
        try:
            yield client
        except WeirError as error:
            fail(error_line(error))


class FoundSchedulers(NamedTuple):
    """Where they are, and what an operator shows them."""

    addresses: Sequence[str]
    admin_key: str
    certificate: Certificate | None


def find_schedulers(
    scheduler: str, admin_key: str, instance: str, grpc_port: int | None, runtime_dir: Path | None
) -> FoundSchedulers:
    """Those given, else those of the stack that was started here. Ends the command where there are none."""
    if scheduler:
        return FoundSchedulers([scheduler], admin_key, options.operator_certificate())
    paths = _paths(instance, grpc_port, runtime_dir)
    schedulers = _schedulers(paths)
    key = admin_key or paths.try_read_admin_key() or ""
    certificate = options.operator_certificate(schedulers[0].credentials)
    return FoundSchedulers([process.address for process in schedulers], key, certificate)


def _paths(instance: str, grpc_port: int | None, runtime_dir: Path | None) -> InstancePaths:
    try:
        return choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
    except WeirError as error:
        fail(error_line(error))


def _schedulers(paths: InstancePaths) -> list[ProcessState]:
    state = try_read_state(paths.state_file)
    if state is None:
        hint = "start it with `weir up`, or name a scheduler with --scheduler"
        fail(f"{paths.folder.name} is not running here; {hint}", code=EXIT_NOT_RUNNING)
    schedulers = [process for process in state.processes if process.role == "scheduler" and process.address]
    if not schedulers:
        fail(f"{paths.folder.name} has no scheduler that runs here", code=EXIT_NOT_RUNNING)
    return schedulers
