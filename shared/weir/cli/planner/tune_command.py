"""`weir planner tune`: the command."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

from weir.cli import EXIT_USAGE
from weir.cli.console import error_line, fail, stderr
from weir.cli.planner.page import DecisionLog
from weir.cli.planner.tune import TuneLoop, lease_s_of, parse_knob, slos_of_lanes
from weir.cli.planner.watch import GatewayPages
from weir.cli.scheduling import FoundSchedulers
from weir.client.scheduling import SchedulingClient
from weir.core.errors import WeirError
from weir.planner.tuning.settings import TunerSettings
from weir.planner.tuning.tuner import Tuner


class TuneArgs(NamedTuple):
    """Of the command. `slos_s`: of the first token and of the others, where lanes have none; `shares`: attainment,
    canaries, error."""

    urls: Sequence[str]
    api_key: str
    schedulers: FoundSchedulers
    knobs: tuple[str, ...]
    slos_s: tuple[float, float]
    shares: tuple[float, float, float]
    window_s: float

    def settings(self, slos_s: tuple[float, float]) -> TunerSettings:
        """Raises ValueError."""
        target, canary_share, max_error = self.shares
        knobs = tuple(map(parse_knob, self.knobs))
        return TunerSettings(knobs, *slos_s, target, self.window_s, canary_share, max_error)


def tune_stack(
    args: TuneArgs,
    tick_s: float,
    run: Callable[[Callable[[], None]], None],
    write: Callable[[str], None],
    *,
    acts: bool,
) -> None:
    """Until `run`, which is given what one look does, returns or is interrupted."""
    log = DecisionLog(write, every_s=args.window_s, mode="tune")
    try:
        args.settings(args.slos_s)
        lease_s_of(tick_s)
        with _scheduling(args.schedulers) as client, closing(GatewayPages(args.urls, args.api_key)) as pages:
            lanes_s = slos_of_lanes(client.describe())
            settings = args.settings((lanes_s[0] or args.slos_s[0], lanes_s[1] or args.slos_s[1]))
            slos = {"ttft_slo_s": settings.ttft_slo_s, "itl_slo_s": settings.itl_slo_s}
            log.note("tune_begin", bounds=list(args.knobs), acts=acts, **slos)
            loop = TuneLoop(pages, client, Tuner(settings, random.Random()), log, tick_s, acts=acts)
            try:
                run(loop.step)
            finally:
                loop.stop()
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)


def revert_tuned(schedulers: FoundSchedulers) -> None:
    """All that was ever tuned, and says what."""
    with _scheduling(schedulers) as client:
        changed = client.revert_tuned(reason="weir planner tune --revert")
    for one in changed:
        stderr.print(f"{one.key}: was {one.was}, is {one.now or 'not set'}", markup=False, soft_wrap=True)
    if not changed:
        stderr.print("nothing is tuned")


@contextmanager
def _scheduling(found: FoundSchedulers) -> Iterator[SchedulingClient]:
    """What is refused ends the command with one line."""
    with SchedulingClient(found.addresses, admin_key=found.admin_key, certificate=found.certificate) as client:
        try:
            yield client
        except WeirError as error:
            fail(error_line(error))
