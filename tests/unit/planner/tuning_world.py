"""Workers by a formula, for tests of the tuner: a step costs a base and something for each sequence, and noise."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weir.planner.tuning.observation import TuningTick, WorkerTick
from weir.planner.tuning.settings import Bound, Knob, TunerSettings
from weir.planner.tuning.steps import Deed, TuningStep
from weir.planner.tuning.tuner import Tuner

SEQS = Knob("decode", "max_num_seqs", 2, 64)
SETTINGS = TunerSettings((SEQS,), ttft_slo_s=2.0, itl_slo_s=0.08, window_s=10.0)
BASE_S, SEQUENCE_S = 0.040, 0.0025
BEST = 15
"""The largest batch whose steps are within the aim."""
IDS = tuple(f"decode-{number}" for number in range(4))


@dataclass(slots=True)
class TuningWorld:
    """As many requests as workers take, unless `demand` says how many each would run."""

    start: int
    tuner: Tuner = field(default_factory=lambda: Tuner(SETTINGS, random.Random(0)))
    ids: Sequence[str] = IDS
    seed: int = 0
    noise: float = 0.05
    demand: float = 1000.0
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Workers whose bound an operator has set."""
    slower: Callable[[str, int], float] = lambda worker_id, value: 1.0
    """Times that a step takes longer."""
    at_s: float = 0.0
    steps: list[TuningStep] = field(default_factory=list)
    bounds: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bounds = {one: self.fixed.get(one, self.start) for one in self.ids}

    def run(self, num_windows: int, *, acts: bool = True) -> list[TuningStep]:
        """The steps of so many windows more."""
        before = len(self.steps)
        source = random.Random(self.seed)
        for _ in range(num_windows * 5):
            step = self.tuner.look(self.tick(source))
            if step is None:
                continue
            self.steps.append(step)
            if acts:
                self.do(step)
                self.tuner.begun(step)
        return self.steps[before:]

    def do(self, step: TuningStep) -> None:
        for one in self.ids:
            if step.deed is Deed.KEEP and one not in self.fixed:
                self.bounds[one] = step.value
            elif one in step.worker_ids:
                self.bounds[one] = step.value if step.deed is Deed.TRY else step.was

    def tick(self, source: random.Random, bound: Bound = "max_num_seqs") -> TuningTick:
        """Of two seconds."""
        self.at_s += 2.0
        workers = []
        for one in self.ids:
            running = min(float(self.bounds[one]), self.demand)
            step_s = (BASE_S + SEQUENCE_S * running) * source.lognormvariate(0.0, self.noise)
            step_s *= self.slower(one, self.bounds[one])
            num_steps = 2.0 / step_s
            fixed = frozenset({bound} if one in self.fixed else set())
            bounds: dict[Bound, int] = {bound: self.bounds[one]}
            workers.append(WorkerTick(one, "decode", num_steps * running, num_steps, 2.0, running, bounds, fixed))
        is_full = any(self.demand >= self.bounds[one] for one in self.ids)
        return TuningTick(self.at_s, 2.0, 5.0 if is_full else 0.0, tuple(workers))

    @property
    def deeds(self) -> list[tuple[str, int]]:
        return [(str(step.deed), step.value) for step in self.steps]
