"""A batch that a gate rules: sequences come, take pages, get a token a step, and leave."""

from dataclasses import dataclass, field

from weir.policy.seams import BatchView, Gate, GateDecision, Member

STEP_S = 0.01


@dataclass(slots=True)
class Job:
    """`num_left`: tokens still to come, which no gate knows."""

    request_id: str
    arrives_at_s: float
    num_prompt_tokens: int
    num_left: int
    predicted: float | None
    lane_priority: int = 0
    num_output_tokens: int = 0
    served_at_s: float = 0.0

    def member(self, is_waiting: bool) -> Member:
        return Member(
            request_id=self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            waits_since_s=self.served_at_s,
            predicted_output_tokens=self.predicted,
            lane_priority=self.lane_priority,
            num_missing_tokens=self.num_prompt_tokens if is_waiting else 0,
        )


@dataclass(slots=True)
class GateWorld:
    """Steps of `STEP_S`; while nothing is computed, time goes on to the gate's deadline or the next arrival."""

    gate: Gate
    jobs: list[Job]
    max_running: int = 8
    num_pool_tokens: int = 20_000
    now_s: float = 0.0
    waiting: list[Job] = field(default_factory=list)
    batch: list[Job] = field(default_factory=list)
    paused: set[str] = field(default_factory=set)
    num_pauses: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    log: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    idle_since_s: float | None = None
    longest_idle_s: float = 0.0
    peak_tokens: int = 0

    def run(self, max_decisions: int = 5000) -> None:
        self.jobs.sort(key=lambda job: job.arrives_at_s)
        for _ in range(max_decisions):
            while self.jobs and self.jobs[0].arrives_at_s <= self.now_s:
                job = self.jobs.pop(0)
                job.served_at_s = self.now_s
                self.waiting.append(job)
            if not self.waiting and not self.batch:
                if not self.jobs:
                    return
                self.now_s = self.jobs[0].arrives_at_s
                continue
            self._step(self.gate.decide(self.view(), self.now_s))
        raise AssertionError(f"after {max_decisions} decisions there are {len(self.waiting) + len(self.batch)} left")

    def view(self) -> BatchView:
        waiting = [job.member(is_waiting=True) for job in self.waiting]
        running = [job.member(is_waiting=False) for job in self.batch]
        return BatchView(waiting, running, self.max_running, self.num_pool_tokens, self._num_free())

    def _num_free(self) -> int:
        return self.num_pool_tokens - sum(job.num_prompt_tokens + job.num_output_tokens for job in self.batch)

    def _step(self, decision: GateDecision) -> None:
        paused, joining = list(decision.paused), list(decision.joining)
        assert len(set(paused)) == len(paused)
        assert set(paused) <= set(range(len(self.batch)))
        assert len(set(joining)) == len(joining)
        assert set(joining) <= set(range(len(self.waiting)))
        assert len(self.batch) - len(paused) + len(joining) <= self.max_running
        now_paused = {self.batch[index].request_id for index in paused}
        for request_id in now_paused - self.paused:
            self.num_pauses[request_id] = self.num_pauses.get(request_id, 0) + 1
        self.paused = now_paused
        computed = [job for job in self.batch if job.request_id not in now_paused]
        for job in [self.waiting[index] for index in joining]:
            if job.num_prompt_tokens > self._num_free():
                break
            self.waiting.remove(job)
            self.batch.append(job)
            computed.append(job)
        self.log.append((self.now_s, tuple(job.request_id for job in computed)))
        if computed:
            self._compute(computed)
        else:
            self._idle()

    def _compute(self, computed: list[Job]) -> None:
        self.idle_since_s = None
        self.now_s += STEP_S
        self.peak_tokens = max(self.peak_tokens, self.num_pool_tokens - self._num_free() + len(computed))
        for job in computed:
            job.num_output_tokens += 1
            job.num_left -= 1
            job.served_at_s = self.now_s
            if job.num_left == 0:
                self.batch.remove(job)
                self.ended.append(job.request_id)

    def _idle(self) -> None:
        if self.idle_since_s is None:
            self.idle_since_s = self.now_s
        times = [job.arrives_at_s for job in self.jobs[:1]]
        if self.gate.next_deadline_s is not None:
            times.append(self.gate.next_deadline_s)
        assert times, "a gate that holds everything back must say when to ask it again"
        assert min(times) > self.now_s, "a deadline that has passed is no deadline"
        self.now_s = min(times)
        self.longest_idle_s = max(self.longest_idle_s, self.now_s - self.idle_since_s)
