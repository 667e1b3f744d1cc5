"""What is done to a stack amid streams: processes killed, ended, emptied, given another role, restarted in turn."""

import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from weir.testing.stack import ProcessView, Stack, wait_until

_BACK_S = 150.0
_COMMAND_S = 400.0


@dataclass(frozen=True)
class Disturbance:
    """`act` is called amid streams, `undo` after them; that returns when the stack is whole again. `is_long`: clients
    send one stream after the other until `act` returns."""

    act: Callable[[], None]
    undo: Callable[[], None]
    is_long: bool = False


@dataclass(frozen=True)
class How:
    """`is_keyed`: clients send what breaks again, at once, under its key."""

    prepare: Callable[[Stack, str], Disturbance]
    flags: tuple[str, ...] = ()
    is_keyed: bool = False


def prepare(how: str, stack: Stack, role: str) -> Disturbance:
    """Finds the victim now, so that no time is lost when it is wanted."""
    return HOWS[how].prepare(stack, role)


def weir(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    shown = stack.weir(*arguments, "--instance", stack.instance, timeout_s=_COMMAND_S)
    if shown.returncode:
        raise RuntimeError(f"weir {' '.join(arguments)}: {shown.stderr}")
    return shown


def _signalled(number: signal.Signals) -> Callable[[Stack, str], Disturbance]:
    def prepared(stack: Stack, role: str) -> Disturbance:
        candidates, killed = stack.processes(role), list[ProcessView]()

        def act() -> None:
            killed.append(max(candidates, key=lambda view: stack.metrics(view).get("num_running", 0.0)))
            stack.kill(killed[0], number)

        return Disturbance(act, lambda: _wait_back(stack, killed[0]))

    return prepared


def _drained(stack: Stack, role: str) -> Disturbance:
    name = stack.processes(role)[0].name
    return Disturbance(
        lambda: _do(stack, "drain", name, "--wait"),
        lambda: _do(stack, "drain", name, "--undo"),
    )


def _given_another_role(stack: Stack, role: str) -> Disturbance:
    name, other = stack.processes(role)[0].name, {"decode": "prefill", "prefill": "decode"}[role]
    return Disturbance(
        lambda: _do(stack, "role", name, other, "--wait"),
        lambda: _do(stack, "role", name, role, "--wait"),
    )


def _restarted_in_turn(stack: Stack, role: str) -> Disturbance:
    names = [view.name for view in stack.processes(role)]
    return Disturbance(lambda: _do(stack, "restart", "--rolling", *names), lambda: None, is_long=True)


def _leader_killed(stack: Stack, role: str) -> Disturbance:
    del role
    leader = next(view for view in stack.processes("scheduler") if _is_leader(stack, view))
    return Disturbance(lambda: stack.kill(leader), lambda: _wait_back(stack, leader))


def _is_leader(stack: Stack, view: ProcessView) -> bool:
    try:
        return stack.metrics(view)["is_leader"] == 1
    except grpc.RpcError:
        return False


def _gateway_killed(stack: Stack, role: str) -> Disturbance:
    del role
    victim = stack.processes("gateway")[0]
    return Disturbance(lambda: stack.kill(victim), lambda: _wait_back(stack, victim))


def _wait_back(stack: Stack, victim: ProcessView) -> None:
    wait_until(lambda: stack.has_restarted(victim), timeout_s=_BACK_S, what=f"{victim.name} is back")


def _do(stack: Stack, *arguments: str) -> None:
    weir(stack, *arguments)


HOWS: Mapping[str, How] = {
    "kill": How(_signalled(signal.SIGKILL)),
    "sigterm": How(_signalled(signal.SIGTERM)),
    "drain": How(_drained),
    "role": How(_given_another_role),
    "rolling": How(_restarted_in_turn),
    "gateway": How(_gateway_killed, flags=("--gateways", "2"), is_keyed=True),
    "leader": How(_leader_killed, flags=("--schedulers", "2")),
}
