"""The bounds that a worker runs under: what it was started with, or less by the scheduler's rules."""

import asyncio
import logging
from collections.abc import Callable

from weir.bus.configuration import WORKERS_KEY, ConfigurationWatch, WorkerRules
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.tasks import end_tasks
from weir.engine.batching.step_shares import StepShares
from weir.engine.loop import InboxFull
from weir.engine.messages import Command, SetBounds
from weir.worker.config import WorkerConfig

_log = logging.getLogger(__name__)


class RunningBounds:
    """Owned by the shell; `post` is the engine's inbox."""

    def __init__(self, worker_id: str, config: WorkerConfig, post: Callable[[Command], None]) -> None:
        self._worker_id = worker_id
        self._post = post
        self.most = SetBounds(config.most_num_seqs, config.max_num_batched_tokens)
        """As it was started: buffers and captured graphs have that size."""
        self.now = self.most

    def follow(self, rules: WorkerRules) -> None:
        """Raises InboxFull, and ValueError for shares that are none; changes nothing then."""
        StepShares.of(rules.step_shares)
        most = self.most
        bounds = SetBounds(
            min(_bound(rules, self._worker_id, "max_num_seqs") or most.max_num_seqs, most.max_num_seqs),
            min(
                _bound(rules, self._worker_id, "max_num_batched_tokens") or most.max_num_batched_tokens,
                most.max_num_batched_tokens,
            ),
            rules.step_shares,
        )
        if bounds == self.now:
            return
        self._post(bounds)
        self.now = bounds
        _log.info(
            "max_num_seqs %d, max_num_batched_tokens %d, step shares %s",
            bounds.max_num_seqs,
            bounds.max_num_batched_tokens,
            " ".join(f"{share:g}" for share in bounds.step_shares) or "none",
        )

    def metrics(self) -> dict[str, float]:
        return {
            "max_num_seqs": float(self.now.max_num_seqs),
            "max_num_batched_tokens": float(self.now.max_num_batched_tokens),
        }


class RulesWatch:
    """Rules of a scheduler that was replaced change nothing."""

    def __init__(self, subjects: Subjects, on_rules: Callable[[WorkerRules], None]) -> None:
        """`on_rules` may raise InboxFull."""
        self._subjects = subjects
        self._on_rules = on_rules
        self._watch = ConfigurationWatch(WORKERS_KEY, WorkerRules, self._take, retried=(InboxFull,))
        self._task: asyncio.Task[None] | None = None
        self._epoch = -1

    def start(self, bus: Bus) -> None:
        """Returns at once: without rules the worker goes on as it was started. The bus stays the caller's: to be closed
        after `stop`."""
        self._task = asyncio.create_task(self._watch.follow(bus, self._subjects), name="rules watch")

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    def metrics(self) -> dict[str, float]:
        return {
            "worker_rules_refused_total": float(self._watch.num_malformed),
            "worker_rules_failures_total": float(self._watch.num_failures),
        }

    def _take(self, rules: WorkerRules) -> None:
        if rules.epoch < self._epoch:
            return
        self._on_rules(rules)
        self._epoch = rules.epoch


def _bound(rules: WorkerRules, worker_id: str, name: str) -> int:
    """Of the longest name that is this worker's and says something of it; 0: none does."""
    entries = [one for one in rules.bounds if one.is_of(worker_id) and getattr(one, name)]
    return getattr(max(entries, key=lambda one: len(one.name)), name) if entries else 0
