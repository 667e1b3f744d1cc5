"""`weir bench scheduler`: what a decision costs the scheduler's core, with every policy, by how many requests wait.

A decision is all that one request makes it do: it comes (submit), another ends and the next one is picked and placed
(finish), whose prompt is then prefilled; after each, `decide`. What starts only then, for a prefill worker has room
again, is prefilled in the next decision. With `news_a_second` prompts begin like earlier ones, and the arena of each
pair says so often a second what it has cached. All workers are busy and the queue stays as long as it is. Garbage
collection is on, as in service. The times are processor time of the deciding thread, which what else runs on the
machine still makes longer, through caches and clock rates. How much, shows a constant loop that the same clock times
after each decision: the same work each time, as much as a decision in the median, but hardly any memory.
"""

import gc
import random
import statistics
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from rich.table import Table

from weir.bench.prefix_news import ArenaNews, Beginnings
from weir.bench.report import run_and_print
from weir.bus.messages import Finish, Grant, Outcome, Prefilled, Submit, WorkerRecord
from weir.core.clock import ManualClock
from weir.core.cost import StepCost
from weir.core.roles import WORKER_ROLES
from weir.policy.registry import PolicySpec
from weir.runtime.process_tuning import short_collections
from weir.scheduling.commands import Command, SendGrant
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits

_COST = StepCost(5.75, 0.02, 1.1e-6, 0.006, 5e-5)
_MAX_NUM_SEQS = 64
_ARENA_PAGES = 60_000
_PAGE_BYTES = 2 << 20
"""Of a model of 8 billion parameters."""
_STEP_S = 0.002
_RENEW_S = 1.0
_NUM_TIMED_LOOPS = 200

_ValueT = TypeVar("_ValueT", int, float)


@dataclass(frozen=True, slots=True)
class SchedulerBenchConfig:
    """`pairs`: of a prefill and a decode worker, each pair on a host of its own."""

    policies: tuple[str, ...]
    queued: tuple[int, ...] = (100, 1000, 10_000)
    pairs: tuple[int, ...] = (1, 16)
    num_tenants: int = 8
    news_a_second: float = 0.0
    """Of each arena, of what it has cached; 0: no prompt has a prefix. Hosts exchange pages then."""
    num_decisions: int = 5000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """`loop_p99_us`: of the constant loop. `p99_num_picks`: requests that one decision starts, for an order that pauses
    some for others starts several in one, and none in another. `..._pick_us`: a decision over the number of requests
    that it starts; of those that start any."""

    policy: str
    num_pairs: int
    num_queued: int
    median_us: float
    p99_us: float
    p999_us: float
    max_us: float
    loop_p99_us: float
    p99_num_picks: int
    median_pick_us: float
    p99_pick_us: float
    news_us: float = 0.0
    """To take in one message of an arena."""
    news_share: float = 0.0
    """Of a core, for those of all arenas."""


class SchedulerBench:
    """One core with a queue of a given length."""

    def __init__(self, policy: str, num_pairs: int, config: SchedulerBenchConfig) -> None:
        lanes = tuple(
            LaneLimits(name, 10**6, 86_400.0, ttft_slo_ms=slo_ms, guaranteed_share=share)
            for name, slo_ms, share in (("interactive", 500, 0.3), ("standard", 5000, 0.1), ("batch", 60_000, 0.0))
        )
        tenants = tuple(TenantLimits(f"tenant-{number}") for number in range(config.num_tenants))
        limits = CoreLimits(lanes=lanes, tenants=tenants, max_queued=10**6, gather_s=0.0)
        self._clock = ManualClock(1000.0)
        self._core = SchedulerCore(limits, self._clock, 1, PolicySpec(policy).make())
        self._random = random.Random(config.seed)
        self._names = [(lane.name, tenant.name) for lane in lanes for tenant in tenants]
        self._num_pairs = num_pairs
        self._num_made = 0
        self._renewed_at_s = 0.0
        self._news_a_second = config.news_a_second
        self._beginnings = Beginnings(config.seed)
        self._news = [
            ArenaNews(_host(number), self._beginnings) for number in range(num_pairs if config.news_a_second else 0)
        ]
        self._num_news_due = 0.0
        self.news_s: list[float] = []
        """Seconds of processor time that each message of an arena took."""
        self._hashes: dict[str, array[int]] = {}
        """Of prompts that were not granted yet."""
        self._running: list[str] = []
        self._being_prefilled: list[str] = []
        """Of the running ones, those that started when others had been prefilled."""
        self.num_picks = 0
        """Of the last decision."""
        self._keep_workers()
        for number in range(len(self._news)):
            self._tell(number)

    def fill(self, num_queued: int) -> None:
        """All slots are taken, and so many wait."""
        while len(self._running) < self._num_pairs * _MAX_NUM_SEQS:
            self._core.submit(self._submit())
            self._take_grants()
        for _ in range(num_queued):
            self._core.submit(self._submit())
        self._take_grants()

    def decide_once(self) -> float:
        """Seconds of processor time that it took."""
        self._clock.advance(_STEP_S)
        self._keep_workers()
        self._num_news_due += _STEP_S * self._news_a_second * len(self._news)
        while self._num_news_due >= 1:
            self._num_news_due -= 1
            self._tell(self._random.randrange(len(self._news)))
        submit = self._submit()
        ended = self._running.pop(self._random.randrange(len(self._running)))
        finish = Finish(ended, "gateway", 1, Outcome.FINISHED, self._random.randint(1, 400))
        core = self._core
        begin = time.thread_time()
        core.submit(submit)
        grants = _grants(core.decide())
        core.finish(finish)
        grants += _grants(core.decide())
        for request_id in self._being_prefilled + [grant.request_id for grant in grants]:
            core.prefilled(Prefilled(request_id, "gateway", 1))
        later = _grants(core.decide())
        duration_s = time.thread_time() - begin
        self._being_prefilled = [grant.request_id for grant in later]
        self._compute(grants + later)
        picked = [grant.request_id for grant in grants + later]
        self._running += picked
        self.num_picks = len(picked)
        return duration_s

    def metrics(self) -> Mapping[str, float]:
        """The core's."""
        return self._core.metrics()

    def _take_grants(self) -> None:
        while started := _grants(self._core.decide()):
            for grant in started:
                self._core.prefilled(Prefilled(grant.request_id, "gateway", 1))
            self._running += [grant.request_id for grant in started]
            self._compute(started)

    def _compute(self, started: Sequence[Grant]) -> None:
        """Their prompts are cached where they were computed."""
        for grant in started:
            hashes = self._hashes.pop(grant.request_id, None)
            if hashes is not None:
                placement = grant.placement
                for worker_id in {placement.reading_worker_id, placement.prefill_worker_id}:
                    self._news[int(worker_id.rpartition("-")[2])].compute(hashes)

    def _tell(self, number: int) -> None:
        """What the arena has cached by now, and a prefix that another one gave it."""
        source = f"{_host(self._random.randrange(self._num_pairs))}:7000"
        message = self._news[number].take(source)
        begin = time.thread_time()
        self._core.prefixes_changed(message)
        self.news_s.append(time.thread_time() - begin)

    def _submit(self) -> Submit:
        self._num_made += 1
        lane, tenant = self._random.choice(self._names)
        num_prompt_tokens, num_output_tokens = self._random.randint(16, 2000), self._random.randint(1, 400)
        request_id, page_hashes = f"request-{self._num_made:09d}", b""
        if self._news:
            hashes = self._hashes[request_id] = self._beginnings.page_hashes(num_prompt_tokens)
            page_hashes = hashes.tobytes()
        return Submit(
            request_id=request_id,
            gateway_id="gateway",
            model="model",
            lane=lane,
            tenant=tenant,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=512,
            deadline_ms=0,
            predicted_output_tokens=float(num_output_tokens),
            output_score=-float(num_output_tokens),
            page_hashes=page_hashes,
        )

    def _keep_workers(self) -> None:
        if self._clock.now_s() - self._renewed_at_s < _RENEW_S:
            return
        self._renewed_at_s = self._clock.now_s()
        for number in range(self._num_pairs):
            for role in WORKER_ROLES:
                record = _record(number, role)
                if self._news:
                    record = replace(record, pages_address=f"{record.host_id}:7000", page_bytes=_PAGE_BYTES)
                self._core.worker_seen(record, int(self._renewed_at_s * 1000))
        self._core.tick()


def _grants(commands: Sequence[Command]) -> list[Grant]:
    """Of the requests that start."""
    return [command.grant for command in commands if isinstance(command, SendGrant)]


def _host(number: int) -> str:
    return f"host-{number:03d}"


def measure(policy: str, num_pairs: int, num_queued: int, config: SchedulerBenchConfig) -> DecisionCost:
    """After a tenth of the decisions, which are not counted."""
    bench = SchedulerBench(policy, num_pairs, config)
    bench.fill(num_queued)
    num_rounds = _rounds_in(statistics.median(bench.decide_once() for _ in range(config.num_decisions // 10)))
    gc.collect()
    bench.news_s.clear()
    durations_us: list[float] = []
    loop_us: list[float] = []
    num_picks: list[int] = []
    for _ in range(config.num_decisions):
        durations_us.append(bench.decide_once() * 1e6)
        num_picks.append(bench.num_picks)
        loop_us.append(_constant_loop_s(num_rounds) * 1e6)
    pick_us = [duration / num for duration, num in zip(durations_us, num_picks, strict=True) if num] or [0.0]
    return DecisionCost(
        policy,
        num_pairs,
        num_queued,
        median_us=statistics.median(durations_us),
        p99_us=_quantile(durations_us, 0.99),
        p999_us=_quantile(durations_us, 0.999),
        max_us=max(durations_us),
        loop_p99_us=_quantile(loop_us, 0.99),
        p99_num_picks=_quantile(num_picks, 0.99),
        median_pick_us=statistics.median(pick_us),
        p99_pick_us=_quantile(pick_us, 0.99),
        news_us=1e6 * statistics.median(bench.news_s or [0.0]),
        news_share=sum(bench.news_s) / (config.num_decisions * _STEP_S),
    )


def _constant_loop_s(num_rounds: int) -> float:
    """Seconds of processor time."""
    begin = time.thread_time()
    total = 0
    for number in range(num_rounds):
        total += number
    return time.thread_time() - begin


def _rounds_in(seconds: float) -> int:
    """Of the constant loop, in the median."""
    thousand_s = statistics.median(_constant_loop_s(1000) for _ in range(_NUM_TIMED_LOOPS))
    return round(1000 * seconds / thousand_s)


def _quantile(values: Sequence[_ValueT], share: float) -> _ValueT:
    return sorted(values)[int(len(values) * share)]


def main(config: SchedulerBenchConfig, *, as_json: bool) -> int:
    """Returns the exit code."""
    return run_and_print(
        "weir bench scheduler",
        lambda: measure_all(config),
        as_dict=lambda costs: {
            "config": asdict(config),
            "core": _core_kind(),
            "costs": [asdict(cost) for cost in costs],
        },
        tables=lambda costs: [_table(costs)],
        json_output=as_json,
    )


def measure_all(config: SchedulerBenchConfig) -> list[DecisionCost]:
    with short_collections():
        return [
            measure(policy, num_pairs, num_queued, config)
            for policy in config.policies
            for num_pairs in config.pairs
            for num_queued in config.queued
        ]


def _table(costs: Sequence[DecisionCost]) -> Table:
    table = Table(title=f"One arrival, one finish, one pick and its prefill: microseconds, core {_core_kind()}")
    times = ("median", "p99", "p99.9", "max", "loop p99")
    for name in ("policy", "pairs", "queued", *times, "picks p99", "a pick", "its p99", "news", "of a core"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for cost in costs:
        times_us = (cost.median_us, cost.p99_us, cost.p999_us, cost.max_us, cost.loop_p99_us)
        picks = (str(cost.p99_num_picks), f"{cost.median_pick_us:.0f}", f"{cost.p99_pick_us:.0f}")
        news = (f"{cost.news_us:.0f}", f"{cost.news_share:.1%}") if cost.news_us else ("", "")
        shown = [f"{time_us:.0f}" for time_us in times_us]
        table.add_row(cost.policy, str(cost.num_pairs), f"{cost.num_queued:,}", *shown, *picks, *news)
    return table


def _core_kind() -> str:
    """Compiled, if Weir was installed so."""
    return "interpreted" if str(sys.modules[SchedulerCore.__module__].__file__).endswith(".py") else "compiled"


def _record(number: int, role: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"{role}-{number:03d}",
        role=role,
        model="model",
        address=f"host-{number}:1",
        host_id=_host(number),
        max_context_tokens=8192,
        page_tokens=16,
        num_arena_pages=_ARENA_PAGES,
        max_num_seqs=_MAX_NUM_SEQS,
        num_running=0,
        num_waiting=0,
        max_num_batched_tokens=2048,
        cost=_COST,
    )
