"""`weir planner tune`: bounds of workers moved towards the SLO, on canaries first."""

from collections.abc import Mapping

from weir.bus.subjects import is_worker_named
from weir.cli.planner.figures import Figures, FiguresMissing
from weir.cli.planner.page import DecisionLog
from weir.cli.planner.watch import GatewayPages
from weir.client.scheduling import SchedulingClient, SchedulingView
from weir.core.errors import InvalidRequest, PermissionDenied, Unauthenticated, WeirError
from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.tuning.observation import TuningTick, WorkerTick
from weir.planner.tuning.settings import BOUNDS, Bound, Knob
from weir.planner.tuning.steps import Deed, TuningStep
from weir.planner.tuning.tuner import Tuner
from weir.scheduling.limits import CoreLimits
from weir.scheduling.limits_file import parse_limits

_SHOWN_BOUNDS: Mapping[Bound, str] = {
    "max_num_seqs": "weir_worker_max_sequences",
    "max_num_batched_tokens": "weir_worker_max_batched_tokens",
}
_TOKENS: Mapping[WorkerRole, str] = {
    "decode": "weir_worker_tokens_generated_total",
    "prefill": "weir_worker_prompt_tokens_computed_total",
}
_NUM_STEPS, _STEP_S = "weir_step_seconds_count", "weir_step_seconds_sum"
_LEAST_LEASE_S, _LEASE_TICKS, _MOST_LEASE_S = 10.0, 6.0, 600.0
"""Of what is tried: several looks may fail before it ends. No scheduler takes a longer one."""
_MAX_REASON_CHARS = 400


def parse_knob(text: str) -> Knob:
    """`decode.max_num_seqs=4,32`. Raises ValueError."""
    key, _, bounds = text.partition("=")
    role, _, bound = key.partition(".")
    parts = bounds.split(",")
    if (
        role not in WORKER_ROLES
        or bound not in BOUNDS
        or len(parts) != 2
        or not all(part.isdecimal() for part in parts)
    ):
        forms = f"one of {', '.join(WORKER_ROLES)}, one of {', '.join(BOUNDS)}, and two whole numbers"
        raise ValueError(f"--tune {text!r}: must be ROLE.BOUND=LOW,HIGH: {forms}")
    return Knob(role, bound, int(parts[0]), int(parts[1]))


def lease_s_of(tick_s: float) -> float:
    """Of what is tried. Raises ValueError."""
    lease_s = max(_LEAST_LEASE_S, _LEASE_TICKS * tick_s)
    if lease_s > _MOST_LEASE_S:
        most_s = _MOST_LEASE_S / _LEASE_TICKS
        raise ValueError(f"--tick-s {tick_s:g}: must be at most {most_s:g} with tune: what is tried must be renewed")
    return lease_s


def slos_of_lanes(view: SchedulingView) -> tuple[float, float]:
    """The strictest TTFT and ITL of all lanes, in seconds; 0: none has one. Workers' figures are of all lanes."""
    lanes = parse_limits(view.limits_toml, CoreLimits()).lanes
    ttft_ms = min((lane.ttft_slo_ms for lane in lanes if lane.ttft_slo_ms), default=0)
    itl_ms = min((lane.itl_slo_ms for lane in lanes if lane.itl_slo_ms), default=0)
    return ttft_ms / 1e3, itl_ms / 1e3


def fixed_bounds(view: SchedulingView, worker_id: str) -> frozenset[Bound]:
    """Of a worker: those that an operator has set by hand, of it or of its whole role. 0 is not set."""
    by_hand = {key for key, value in view.overrides.items() if value.strip() != "0"}
    tuned = {*view.tuned, *view.trial} - by_hand
    limits = parse_limits(view.limits_toml, CoreLimits()).workers
    return frozenset(
        bound
        for bound in BOUNDS
        for one in limits
        if is_worker_named(worker_id, one.name) and getattr(one, bound) and f"workers.{one.name}.{bound}" not in tuned
    )


def tick_of(before: Figures, now: Figures, view: SchedulingView) -> TuningTick:
    """Of workers that serve: those that are drained, and spares, do nothing whatever their bounds are. One that has
    changed its role has another id than its process, by which figures are known, and is left out. Raises
    FiguresMissing."""
    workers = []
    for worker_id, role in _workers(now.of_those_that_serve()):
        bounds = {bound: now.of_process(name, worker_id) for bound, name in _SHOWN_BOUNDS.items()}
        num_tokens, num_steps, busy_s = (
            sum(value for labels, value in now.grown(before, name).items() if ("process", worker_id) in labels)
            for name in (_TOKENS[role], _NUM_STEPS, _STEP_S)
        )
        running = now.of_process("weir_worker_sequences_running", worker_id) or 0.0
        shown = {bound: round(value) for bound, value in bounds.items() if value is not None}
        fixed = fixed_bounds(view, worker_id)
        workers.append(WorkerTick(worker_id, role, num_tokens, num_steps, busy_s, running, shown, fixed))
    num_queued = now.gauge("weir_scheduler_requests_queued")
    return TuningTick(now.at_s, now.at_s - before.at_s, num_queued, tuple(workers))


def _workers(now: Figures) -> list[tuple[str, WorkerRole]]:
    """By id, as their processes are named."""
    found: dict[str, WorkerRole] = {}
    for labels in now.series.get(_SHOWN_BOUNDS["max_num_seqs"], {}):
        shown = dict(labels)
        for role in WORKER_ROLES:
            if shown.get("role") == role and shown.get("process", "").startswith(f"{role}-"):
                found[shown["process"]] = role
    return sorted(found.items())


class TuneLoop:
    """Looks, and does what the tuner says. While something is tried each look renews it, so that it ends with this."""

    def __init__(
        self,
        pages: GatewayPages,
        client: SchedulingClient,
        tuner: Tuner,
        log: DecisionLog,
        tick_s: float,
        *,
        acts: bool,
    ) -> None:
        """Without `acts` it only says what it would try. Raises ValueError for looks that are too rare."""
        self._pages = pages
        self._client = client
        self._tuner = tuner
        self._log = log
        self._lease_s = lease_s_of(tick_s)
        self._acts = acts
        self._before: Figures | None = None
        self._missing = ""
        self._tried: TuningStep | None = None
        self._advised: tuple[object, ...] = ()

    def step(self) -> None:
        """One look. What the stack refuses, or does not say, is told and is no end."""
        try:
            now = self._pages.read()
            view = self._client.describe()
            before, self._before = self._before, now
            if before is None:
                return
            tick = tick_of(before, now, view)
        except (FiguresMissing, WeirError) as problem:
            self._note_missing(str(problem))
            return
        self._missing = ""
        self._renew(view)
        step = self._tuner.look(tick)
        if step is not None and self._acts:
            self._do(step)
        elif step is not None:
            self._advise(step)

    def stop(self) -> None:
        """What is tried is taken back; what cannot be told now ends with its lease."""
        if self._tried is None:
            return
        try:
            self._client.end_trial(reason="the tuner was stopped")
            self._log.note("tune_end", cause="stopped")
        except WeirError as error:
            self._log.note("tune_failed", deed="end", problem=error.message)

    def _renew(self, view: SchedulingView) -> None:
        """Unless it is over: what an operator, a file or another tuner has ended does not come back."""
        tried = self._tried
        if tried is None:
            return
        if dict(view.trial) == _trial_of(tried):
            self._ask(tried)
            return
        self._tried = None
        self._tuner.lost()
        self._log.note("tune_lost", value=tried.value, workers=list(tried.worker_ids), on_trial=dict(view.trial))

    def _do(self, step: TuningStep) -> None:
        if self._ask(step):
            self._tried = step if step.deed is Deed.TRY else None
            self._log.note(f"tune_{step.deed}", **step.as_dict())
            self._tuner.begun(step)

    def _ask(self, step: TuningStep) -> bool:
        """Whether it is done. What is refused for good is dropped; else it is asked for again at the next look."""
        bound, reason = step.knob.bound, step.reason[:_MAX_REASON_CHARS]
        try:
            match step.deed:
                case Deed.TRY:
                    self._client.try_limits(_trial_of(step), lease_s=self._lease_s, reason=reason)
                case Deed.KEEP:
                    changes = {f"workers.{step.knob.role}.{bound}": str(step.value)}
                    self._client.keep_limits(changes, reason=reason)
                case Deed.END:
                    self._client.end_trial(reason=reason)
        except WeirError as error:
            is_final = isinstance(error, InvalidRequest | PermissionDenied | Unauthenticated)
            event = "tune_refused" if is_final else "tune_failed"
            self._log.note(event, deed=str(step.deed), value=step.value, problem=error.message)
            if is_final:
                self._tried = None
                self._tuner.refused(step)
            return False
        return True

    def _advise(self, step: TuningStep) -> None:
        """What is news."""
        news = (step.knob, step.value, step.was)
        if news != self._advised:
            self._advised = news
            self._log.note("tune_advice", **step.as_dict())

    def _note_missing(self, problem: str) -> None:
        if problem != self._missing:
            self._missing = problem
            self._log.note("missing", figure=problem)


def _trial_of(step: TuningStep) -> dict[str, str]:
    """As the scheduler has it."""
    return {f"workers.{one}.{step.knob.bound}": str(step.value) for one in step.worker_ids}
