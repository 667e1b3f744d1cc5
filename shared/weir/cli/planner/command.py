"""`weir planner`: the command, and its loop."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from weir.cli import EXIT_USAGE, options
from weir.cli.console import error_line, fail, stdout
from weir.cli.scheduling import AdminKey, FoundSchedulers, SchedulerAddress, find_schedulers

if TYPE_CHECKING:
    from weir.cli.planner.loop import PlannerLoop
    from weir.cli.planner.page import PlannerPage
    from weir.planner.observation import Pools
    from weir.planner.settings import PlannerSettings
    from weir.sim.profile import CostProfile

Mode = Literal["advise", "switch", "scale", "tune"]


def planner(
    mode: Annotated[
        Mode,
        typer.Argument(
            help="advise: says what it would do. switch: changes roles too. scale: numbers for autoscalers. "
            "tune: bounds of workers, not their number."
        ),
    ] = "advise",
    ttft_ms: Annotated[float, typer.Option(min=1, help="SLO: time to first token.")] = 2000.0,
    itl_ms: Annotated[float, typer.Option(min=0.1, help="SLO: mean time of a token after the first.")] = 200.0,
    attainment: Annotated[float, typer.Option(help="Share of the requests that must meet both.")] = 0.95,
    min_workers: Annotated[str, typer.Option(help="PREFILL,DECODE that there are at least.")] = "1,1",
    max_workers: Annotated[str, typer.Option(help="PREFILL,DECODE that there are at most.")] = "16,16",
    fallback: Annotated[str, typer.Option(help="PREFILL,DECODE while the model is wrong. As many as there are.")] = "",
    start_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds from the order of a worker until it serves.")
    ] = 120.0,
    tick_s: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 5.0,
    window_s: Annotated[float, typer.Option(min=1.0, help="Seconds that a rate is measured over.")] = 60.0,
    down_after_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a worker must have been to spare.")
    ] = 300.0,
    dwell_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two changes of roles.")] = 60.0,
    grace_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds that a worker's sequences may go on.")
    ] = 30.0,
    spares: Annotated[
        int, typer.Option(min=0, help="With switch: so many workers that are not needed may rest as spares.")
    ] = 0,
    profile: Annotated[str, typer.Option(help="Cost profile, as of `weir plan`. Empty: as workers measure.")] = "",
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Page of metrics. 0: none.")] = 0,
    metrics_host: Annotated[str, typer.Option(help="Where that page is.")] = "127.0.0.1",
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="With tune: ROLE.BOUND=LOW,HIGH, such as decode.max_num_seqs=4,32; of each bound it may move."
        ),
    ] = None,
    canary_share: Annotated[float, typer.Option(help="With tune: of the workers of a role, to try on.")] = 0.25,
    max_error: Annotated[float, typer.Option(help="With tune: how often no gain is taken for one.")] = 0.05,
    apply: Annotated[bool, typer.Option("--apply", help="With tune: also do it.")] = False,
    revert: Annotated[bool, typer.Option("--revert", help="With tune: take back all that was tuned, and end.")] = False,
    num_looks: Annotated[int, typer.Option(min=0, help="End after so many. 0: never.")] = 0,
    gateway: Annotated[
        list[str] | None, typer.Option(help="http://HOST:PORT of a gateway; of each, where several.")
    ] = None,
    scheduler: SchedulerAddress = "",
    api_key: options.ApiKey = "",
    admin_key: AdminKey = "",
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Watch a stack and say how many prefill and decode workers it should have, one JSON line for each decision.

    It says nothing while a figure is missing, and never waits for what it only advises. Ctrl-C ends it.

    \b
    weir planner --ttft-ms 1000 --itl-ms 100
    weir planner switch --metrics-port 9464
    weir planner scale --metrics-port 9464 --gateway http://10.0.0.7:8000 --scheduler 10.0.0.8:50051
    weir planner tune --tune decode.max_num_seqs=4,32 --apply
    weir planner tune --revert
    """
    if mode == "tune":
        if metrics_port:
            fail("--metrics-port: tune has no page of metrics; it says its steps as lines of JSON", code=EXIT_USAGE)
        from weir.cli.planner.tune_command import TuneArgs, revert_tuned, tune_stack

        schedulers = find_schedulers(scheduler, admin_key, instance, grpc_port, runtime_dir)
        if revert:
            revert_tuned(schedulers)
            return
        urls, _ = options.find_gateways(gateway or [], admin_key, instance, grpc_port, runtime_dir)
        shares = (attainment, canary_share, max_error)
        args = TuneArgs(urls, api_key, schedulers, tuple(tune or ()), (ttft_ms / 1e3, itl_ms / 1e3), shares, window_s)
        tune_stack(args, tick_s, lambda step: _run(step, tick_s, num_looks), _print_line, acts=apply)
        return
    if tune or apply or revert:
        fail("--tune, --apply and --revert go with the mode tune", code=EXIT_USAGE)
    from weir.planner.settings import PlannerSettings
    from weir.sim.profile import load_profile

    if mode == "scale" and not metrics_port:
        fail("scale says its numbers by a page of metrics alone; give its port by --metrics-port", code=EXIT_USAGE)
    try:
        settings = PlannerSettings(
            ttft_ms / 1e3,
            itl_ms / 1e3,
            attainment,
            least=_pools(min_workers, "--min-workers"),
            most=_pools(max_workers, "--max-workers"),
            fallback=_pools(fallback, "--fallback") if fallback else None,
            window_s=window_s,
            tick_s=tick_s,
            start_s=start_s,
            floor_every_s=max(window_s, tick_s),
            down_after_s=down_after_s,
            dwell_s=dwell_s,
            may_switch=mode != "scale",
            keeps_orders=mode == "scale",
        )
        given = load_profile(profile) if profile else None
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)
    urls, _ = options.find_gateways(gateway or [], admin_key, instance, grpc_port, runtime_dir)
    found = find_schedulers(scheduler, admin_key, instance, grpc_port, runtime_dir)
    from weir.cli.planner.page import PlannerPage

    page = PlannerPage(max_age_s=3 * max(tick_s, 5.0))
    planned = _Planned(mode, settings, given, urls, api_key, found, grace_s, spares)
    with _open_loop(planned, page) as loop, _served_page(page, metrics_host, metrics_port):
        _run(loop.step, tick_s, num_looks)


class _Planned(NamedTuple):
    """Of the command."""

    mode: Mode
    settings: "PlannerSettings"
    profile: "CostProfile | None"
    urls: Sequence[str]
    api_key: str
    schedulers: FoundSchedulers
    grace_s: float
    spares: int


@contextmanager
def _open_loop(args: _Planned, page: "PlannerPage") -> Iterator["PlannerLoop"]:
    from weir.cli.planner.capacity import MeasuredCapacity
    from weir.cli.planner.loop import PlannerLoop
    from weir.cli.planner.page import DecisionLog
    from weir.cli.planner.watch import StackWatch
    from weir.client.workers import WorkersClient
    from weir.planner.planner import Planner
    from weir.scheduling.limits import CoreLimits
    from weir.sim.results.metrics import Slo

    settings, found = args.settings, args.schedulers
    log = DecisionLog(_print_line, every_s=settings.window_s, mode=args.mode)
    slo = Slo(ttft_s=settings.ttft_slo_s, tpot_s=settings.itl_slo_s)
    capacity = MeasuredCapacity(slo, CoreLimits())
    with (
        WorkersClient(found.addresses, admin_key=found.admin_key, certificate=found.certificate) as workers,
        closing(StackWatch(args.urls, args.api_key, workers, capacity, slo, args.profile)) as watch,
    ):
        actor = workers if args.mode == "switch" else None
        yield PlannerLoop(watch, Planner(settings, capacity), page, log, actor, args.grace_s, args.spares)


def _run(step: Callable[[], None], tick_s: float, num_looks: int) -> None:
    """A look that takes longer than a tick delays the next one; none is made up for."""
    next_s, num = time.monotonic(), 0
    while num_looks == 0 or num < num_looks:
        step()
        num += 1
        next_s = max(next_s + tick_s, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))


def _pools(text: str, name: str) -> "Pools":
    """Raises ValueError."""
    from weir.planner.observation import Pools

    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{name} {text!r}: must be two whole numbers, PREFILL,DECODE")
    return Pools(*(int(part) for part in parts))


def _print_line(line: str) -> None:
    stdout.out(line, highlight=False)


@contextmanager
def _served_page(page: "PlannerPage", host: str, port: int) -> Iterator[None]:
    """Nothing without a port. Ends the command where that cannot be had."""
    from weir.cli.planner.page_server import served
    from weir.core.errors import Unavailable
    from weir.runtime.metrics_port import MetricsPort

    try:
        with served(MetricsPort(host, port, page.families)) if port else nullcontext():
            yield
    except Unavailable as error:
        fail(error_line(error))
