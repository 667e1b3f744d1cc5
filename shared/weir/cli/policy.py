"""`weir policy`: by what rule a running stack orders and batches requests."""

from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import fail, stderr, stdout
from weir.cli.exit_codes import EXIT_USAGE
from weir.cli.schedulers import AdminKey, SchedulerAddress, open_scheduling

app = typer.Typer(help="The scheduling policy.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """Every policy with its parameters, their ranges and defaults."""
    from weir.policy.registry import describe_policy, policy_names

    for name in policy_names():
        try:
            described = describe_policy(name)
        except ValueError as error:  # another distribution's, and broken: the others can still be listed
            described = str(error)
        stdout.print(f"{name}: {described}" if described else name, markup=False, soft_wrap=True)


@app.command()
def show(
    scheduler: SchedulerAddress = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """The policy in force."""
    with open_scheduling(scheduler, admin_key, instance, grpc_port, runtime_dir) as client:
        stdout.print(client.describe().policy, markup=False)


@app.command("set")
def set_(
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
    with open_scheduling(scheduler, admin_key, instance, grpc_port, runtime_dir) as client:
        stderr.print(f"policy {client.set_policy(policy)}", markup=False)
