"""One engine that serves alone, driven in the caller's thread: jobs in, what each took and what the pages did out.

Everything of a worker but its process: the local batcher, real records, a pool that holds the whole arena. Time is a
`JobTimeline`, so that the same code runs against the wall clock and, in tests, against a cost model.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, PageBundle, SequenceEnded, TokenSampled
from weir.engine.plan import ModelRunner
from weir.kv.geometry import ArenaGeometry, num_pages_for
from weir.kv.layout import layout_of
from weir.kv.records.record import SequenceParams, SequenceRecord

_RECORD_PAGE_BYTES = 4096  # records do not depend on it
_GREEDY = SamplingParams(temperature=0.0)


class JobTimeline(Protocol):
    """A clock that one can wait by."""

    def now_s(self) -> float: ...

    def wait_until(self, at_s: float) -> None: ...


class WallTimeline:
    """`time.monotonic`."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - time.monotonic()))


@dataclass(frozen=True, slots=True)
class EngineJob:
    """One request: a prompt, and so many tokens out unless one of `stop_token_ids` is sampled before.

    `arrives_at_s` counts from the run's start.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    arrives_at_s: float = 0.0
    sampling: SamplingParams = _GREEDY
    stop_token_ids: tuple[int, ...] = ()

    @property
    def num_pages(self) -> int:
        return num_pages_for(len(self.prompt_token_ids) + self.num_output_tokens)


@dataclass(slots=True)
class JobRecord:
    """What one job saw, in seconds since it arrived."""

    arrived_at_s: float
    first_token_s: float = 0.0
    latency_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class SoloRun:
    """`page_waste`: of the pages that sequences have, the share without a token, averaged over the steps."""

    duration_s: float
    records: tuple[JobRecord, ...]
    num_steps: int
    page_waste: float
    counters: Mapping[str, int]

    @property
    def tokens_a_second(self) -> float:
        return sum(len(record.token_ids) for record in self.records) / self.duration_s

    @property
    def requests_a_second(self) -> float:
        return len(self.records) / self.duration_s


def run_alone(
    jobs: Sequence[EngineJob],
    runner: ModelRunner,
    limits: BatchLimits,
    settings: RunningSettings,
    num_pages: int,
    timeline: JobTimeline,
    on_end: Callable[[int, JobRecord], None] = lambda index, record: None,
) -> SoloRun:
    """Runs all jobs to their ends; `on_end` is called with a job's place among them.

    Raises RuntimeError if one fails, or if the engine's page counts do not add up.
    """
    engine = _Solo(jobs, runner, limits, settings, num_pages, timeline)
    engine.run(on_end)
    return engine.result()


class _Solo:
    def __init__(
        self,
        jobs: Sequence[EngineJob],
        runner: ModelRunner,
        limits: BatchLimits,
        settings: RunningSettings,
        num_pages: int,
        timeline: JobTimeline,
    ) -> None:
        self._runner = runner
        self._timeline = timeline
        self._num_slots = len(jobs)
        geometry = ArenaGeometry(_RECORD_PAGE_BYTES, num_pages, self._num_slots, limits.max_context_tokens)
        record_bytes = layout_of(geometry).record_bytes
        memory = [memoryview(bytearray(record_bytes)) for _ in jobs]
        pool = PagePool(watermark_pages=0, watermark_slots=0)
        pool.give(PageBundle(tuple(range(num_pages)), tuple(range(self._num_slots))))
        self._batcher = RunningBatcher(limits, pool, lambda slot: SequenceRecord(memory[slot], geometry), settings)
        self._coming = sorted(enumerate(jobs), key=lambda entry: -entry[1].arrives_at_s)  # next one last
        self._records: dict[str, JobRecord] = {}
        self._started_at_s = timeline.now_s()
        self._num_steps = 0
        self._waste_sum = 0.0

    def run(self, on_end: Callable[[int, JobRecord], None]) -> None:
        while self._coming or not self._batcher.is_idle:
            self._take_arrivals()
            plan = self._batcher.decide(self._timeline.now_s())
            if plan is not None:
                self._batcher.record(plan, self._runner.run(plan))
                self._num_steps += 1
                self._waste_sum += self._batcher.load.page_waste
            elif not self._batcher.has_events and (self._coming or not self._batcher.is_idle):
                self._wait()
            self._take_events(on_end)

    def result(self) -> SoloRun:
        if errors := [*self._batcher.check_integrity(), *(r.error for r in self._records.values() if r.error)]:
            raise RuntimeError("; ".join(errors[:3]))
        duration_s = self._timeline.now_s() - self._started_at_s
        records = tuple(self._records[request_id] for request_id in sorted(self._records))
        waste = self._waste_sum / max(1, self._num_steps)
        return SoloRun(duration_s, records, self._num_steps, waste, self._batcher.counters.snapshot())

    def _take_arrivals(self) -> None:
        now_s = self._timeline.now_s()
        while self._coming and self._started_at_s + self._coming[-1][1].arrives_at_s <= now_s:
            index, job = self._coming.pop()
            params = _params_of(index, job)
            self._records[params.request_id] = JobRecord(self._started_at_s + job.arrives_at_s)
            self._batcher.add(Arrival(params))

    def _take_events(self, on_end: Callable[[int, JobRecord], None]) -> None:
        now_s = self._timeline.now_s()
        for event in self._batcher.take_events():
            record = self._records[event.key.request_id]
            match event:
                case TokenSampled(_, index, token_id):
                    record.token_ids.append(token_id)
                    if index == 0:
                        record.first_token_s = now_s - record.arrived_at_s
                case SequenceEnded(_, _, failure):
                    record.latency_s = now_s - record.arrived_at_s
                    record.error = failure.message if failure is not None else ""
                    on_end(int(event.key.request_id, 16), record)
                case _:
                    pass
        surplus = self._batcher.pool.take_used()
        self._batcher.pool.give(PageBundle(tuple(page for used in surplus.used for page in used.page_ids)))

    def _wait(self) -> None:
        times_s = [self._started_at_s + self._coming[-1][1].arrives_at_s] if self._coming else []
        if self._batcher.next_deadline_s is not None:
            times_s.append(self._batcher.next_deadline_s)
        if not times_s:
            raise RuntimeError("the engine waits, and nothing is to come")
        self._timeline.wait_until(min(times_s))


def _params_of(index: int, job: EngineJob) -> SequenceParams:
    return SequenceParams(
        request_id=f"{index:032x}",
        attempt=Attempt(),
        gateway_id="bench",
        prompt_token_ids=job.prompt_token_ids,
        sampling=job.sampling,
        stop=StopRules(job.num_output_tokens, job.stop_token_ids),
        num_reserved_pages=job.num_pages,
        traceparent="",
    )
