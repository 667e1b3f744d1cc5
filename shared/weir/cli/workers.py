"""`weir drain`, `weir role` and `weir restart`: workers emptied and given another role, processes started anew."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from weir.cli import EXIT_USAGE, options
from weir.cli.console import error_line, fail, stderr
from weir.cli.scheduling import AdminKey, FoundSchedulers, SchedulerAddress, find_schedulers
from weir.client.workers import WorkersClient, WorkerView
from weir.core.addresses import bare
from weir.core.errors import NotFound, Unavailable, WeirError
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.observe import try_describe
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.rolling import RestartStep, RollingRestart
from weir.runtime.stack.state import ProcessState, try_read_state

_POLL_S = 0.2
_BEYOND_GRACE_S = 15.0
"""For what a worker does after the grace period: interrupted sequences end with the running step."""
_CHANGE_S = 180.0
_OUTAGE_S = 10.0

_WORKER_HELP = "A worker's id, or its process as `weir status` names it: decode-1."
Worker = Annotated[str, typer.Argument(help=_WORKER_HELP)]
Grace = Annotated[
    float,
    typer.Option(min=0, max=3600, help="Seconds in which what nobody takes over may end; then it goes on elsewhere."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also where no other worker could serve: streams and requests wait then.")
]


def drain(
    worker: Annotated[
        str,
        typer.Argument(help="A worker's id, or its process as `weir status` names it: decode-1.", show_default=False),
    ] = "",
    host: Annotated[str, typer.Option(help="All workers of this host, by its address or name in theirs.")] = "",
    grace_s: Grace = 30.0,
    wait: Wait = False,
    force: Force = False,
    spare: Annotated[bool, typer.Option("--spare", help="The planner may have it take work again.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="It takes work again.")] = False,
    scheduler: SchedulerAddress = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Empty a worker, or a host: it takes nothing new, and what it has goes on elsewhere, or ends. No client notices.

    Another decode worker of the same memory goes on at once with what a decode worker runs; nothing is computed again.
    Where there is none it goes on at another host, to which its pages go while it still runs here.

    \b
    weir drain decode-1 --wait
    weir drain decode-1 --undo
    weir drain --host 10.0.0.2 --wait
    """
    if bool(worker) == bool(host):
        fail("name one worker, or all of a host by --host", code=EXIT_USAGE)
    with _open_workers(scheduler, admin_key, instance, grpc_port, runtime_dir) as (client, processes):
        found = _workers_at(client, host) if host else [_find_worker(client, worker, processes)]
        for one in found:
            _begin_drain(client, one.worker_id, grace_s, force=force, undo=undo, as_spare=spare)
        for one in found if wait and not undo else ():
            after_s = _wait_for_duty(client, one.worker_id, "drained", grace_s + _BEYOND_GRACE_S)
            stderr.print(f"{one.worker_id} is drained after {after_s:.1f} s", markup=False)


def _workers_at(client: WorkersClient, host: str) -> list[WorkerView]:
    """Raises NotFound."""
    workers = client.list()
    found = [worker for worker in workers if _host_of(worker) == bare(host)]
    if not found:
        known = ", ".join(sorted({_host_of(worker) for worker in workers})) or "none"
        raise NotFound("host", f"{host!r} has no worker; hosts with workers: {known}")
    return found


def _host_of(worker: WorkerView) -> str:
    return bare(worker.address.rpartition(":")[0])


def _begin_drain(
    client: WorkersClient, worker_id: str, grace_s: float, *, force: bool, undo: bool, as_spare: bool
) -> None:
    if undo:
        before = client.end_drain(worker_id)
        stderr.print(f"{worker_id} takes work again; it was {before.duty}", markup=False)
        return
    before = client.drain(worker_id, grace_s=grace_s, force=force, as_spare=as_spare)
    stderr.print(
        f"{worker_id}: {before.duty} with {before.num_live} sequences; drains within {grace_s:g} s", markup=False
    )


def role(
    worker: Worker,
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="What it is to be.")],
    grace_s: Grace = 30.0,
    wait: Wait = False,
    force: Force = False,
    scheduler: SchedulerAddress = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Change a worker's role: it drains, and goes on in the other pool with the weights that it has.

    It has another id then. Once its process is started anew it has the role again that it was started with.

    \b
    weir role decode-1 prefill --wait
    """
    with _open_workers(scheduler, admin_key, instance, grpc_port, runtime_dir) as (client, processes):
        found = _find_worker(client, worker, processes)
        new_id = client.set_role(found.worker_id, role, grace_s=grace_s, force=force)
        if new_id == found.worker_id:
            stderr.print(f"{found.worker_id} is a {role} worker already", markup=False)
            return
        stderr.print(f"{found.worker_id} drains within {grace_s:g} s, and becomes {new_id}", markup=False)
        if wait:
            after_s = _wait_for_duty(client, new_id, "serving", grace_s + _CHANGE_S, is_awaited=True)
            stderr.print(f"{new_id} serves after {after_s:.1f} s", markup=False)


def restart(
    process: Annotated[
        list[str] | None, typer.Argument(help="As `weir status` names them: gateway-0. None: all.", metavar="PROCESS…")
    ] = None,
    rolling: Annotated[bool, typer.Option("--rolling", help="One after the other. Must be given.")] = False,
    grace_s: Grace = 30.0,
    timeout_s: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds that a process has to be ready again.")
    ] = 180.0,
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Restart processes of a running `weir up` one after the other, while it serves: for new code or settings.

    Standby schedulers come before the leader, workers are drained first, gateways let running requests end, NATS comes
    last. The supervisor itself goes on as it is.

    \b
    weir restart --rolling
    weir restart --rolling prefill-0 decode-0 decode-1
    """
    if not rolling:
        fail("give --rolling; `weir down && weir up` restarts all at once", code=EXIT_USAGE)
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
        asyncio.run(_restart(paths, process or [], grace_s, timeout_s))
    except WeirError as error:
        fail(error_line(error))


async def _restart(paths: InstancePaths, names: Sequence[str], grace_s: float, timeout_s: float) -> None:
    reporter = _RestartLines()

    async def drain_worker(address: str) -> None:
        await asyncio.to_thread(_drain_at, paths, address, grace_s)

    rolling = RollingRestart(paths, reporter, drain_worker, _find_leader, timeout_s)
    from weir.kv.arena.segment import segment_paths

    await rolling.run(names, segment_paths(paths.folder.name))
    stderr.print(f"restarted: {reporter.num_processes} processes", markup=False)


def _drain_at(paths: InstancePaths, address: str, grace_s: float) -> None:
    """Of the only worker of its kind, too: its streams wait until it is back. Raises WeirError."""
    schedulers = find_schedulers("", "", paths.folder.name, None, paths.folder.parent)
    with _client_of(schedulers) as client:
        found = next((worker for worker in client.list() if worker.address == address), None)
        if found is None:
            raise NotFound("worker", "the scheduler does not know it")
        client.drain(found.worker_id, grace_s=grace_s, force=True)
        _wait_for_duty(client, found.worker_id, "drained", grace_s + _BEYOND_GRACE_S)


async def _find_leader(processes: Sequence[ProcessState]) -> str | None:
    """The name of the scheduler that leads; None while none does, or answers."""
    schedulers = [process for process in processes if process.role == "scheduler" and process.address]
    answers = await asyncio.gather(*(try_describe(process) for process in schedulers))
    for process, answer in zip(schedulers, answers, strict=True):
        if answer is not None and answer.metrics.get("is_leader"):
            return process.name
    return None


@contextmanager
def _open_workers(
    scheduler: str, admin_key: str, instance: str, grpc_port: int | None, runtime_dir: Path | None
) -> Iterator[tuple[WorkersClient, Sequence[ProcessState]]]:
    """The client, and the processes of the stack here. What is refused ends the command with one line."""
    schedulers = find_schedulers(scheduler, admin_key, instance, grpc_port, runtime_dir)
    processes: Sequence[ProcessState] = ()
    if not scheduler:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
        state = try_read_state(paths.state_file)
        processes = () if state is None else state.processes
    with _client_of(schedulers) as client:
        try:
            yield client, processes
        except WeirError as error:
            fail(error_line(error))


def _find_worker(client: WorkersClient, name: str, processes: Sequence[ProcessState]) -> WorkerView:
    """By its id, or by the name of its process. Raises NotFound."""
    workers = client.list()
    address = next((process.address for process in processes if process.name == name and process.address), None)
    for worker in workers:
        if name == worker.worker_id or address == worker.address:
            return worker
    known = ", ".join(worker.worker_id for worker in workers) or "none"
    raise NotFound("worker", f"there is no worker {name!r}; there are: {known}")


def _wait_for_duty(
    client: WorkersClient, worker_id: str, duty: str, timeout_s: float, *, is_awaited: bool = False
) -> float:
    """Seconds until then. `is_awaited`: it need not be there yet. A scheduler that does not answer for a moment is
    asked again. Raises NotFound for a worker that goes, Unavailable when it takes too long."""
    began_s = last_answer_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        try:
            found = next((worker for worker in client.list() if worker.worker_id == worker_id), None)
            last_answer_s = now_s
        except Unavailable:
            if now_s - last_answer_s > _OUTAGE_S:
                raise
        else:
            if found is not None and found.duty == duty:
                return now_s - began_s
            if found is None and not is_awaited:
                raise NotFound("worker", f"{worker_id} has gone")
            if now_s - began_s > timeout_s:
                shown = "not there" if found is None else f"{found.duty} with {found.num_live} sequences"
                raise Unavailable(f"{worker_id} is {shown}, and not {duty}, after {timeout_s:g} s")
        time.sleep(_POLL_S)


class _RestartLines:
    """Implements `weir.runtime.stack.rolling.RestartReporter`."""

    def __init__(self) -> None:
        self.num_processes = 0

    def step_begins(self, step: RestartStep) -> None:
        if step.reason:
            together = f"cold start of {', '.join(step.names)} together: the arena cannot be kept ({step.reason})"
            stderr.print(together, style="yellow", markup=False, soft_wrap=True)

    def worker_drained(self, name: str, after_s: float, problem: str) -> None:
        if problem:
            stderr.print(f"  {name:<12} not drained: {problem}", style="yellow", markup=False, soft_wrap=True)
        else:
            stderr.print(f"  {name:<12} drained after {after_s:.1f} s", markup=False)

    def step_ended(self, step: RestartStep, after_s: float) -> None:
        self.num_processes += len(step.names)
        for name in step.names:
            stderr.print(f"  {name:<12} ready again after {after_s:.1f} s", markup=False)


def _client_of(schedulers: FoundSchedulers) -> WorkersClient:
    return WorkersClient(schedulers.addresses, admin_key=schedulers.admin_key, certificate=schedulers.certificate)
