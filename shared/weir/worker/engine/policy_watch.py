"""Follows the scheduler's choice of the policy that this worker's batches are made by."""

import asyncio
import logging
from collections.abc import Callable

from weir.bus.configuration import POLICY_KEY, PolicyChoice
from weir.bus.configuration_watch import ConfigurationWatch
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.tasks import end_tasks
from weir.engine.loop import InboxFull
from weir.policy.registry import PolicySpec
from weir.policy.seams import Policy

_log = logging.getLogger(__name__)


class PolicyWatch:
    """A choice that this worker does not know changes nothing, and is counted."""

    def __init__(self, subjects: Subjects, on_policy: Callable[[Policy], None]) -> None:
        """`on_policy` gets a policy of its own at each change; it may raise InboxFull."""
        self._subjects = subjects
        self._on_policy = on_policy
        self._watch = ConfigurationWatch(POLICY_KEY, PolicyChoice, self._take, retried=(InboxFull,))
        self._task: asyncio.Task[None] | None = None
        self._choice: PolicyChoice | None = None
        self._num_unknown = 0

    @property
    def policy_name(self) -> str:
        """The policy of the last choice that was taken; empty: none."""
        return "" if self._choice is None else PolicySpec.parse(self._choice.policy).name

    def start(self, bus: Bus) -> None:
        """Returns at once: without a choice the worker goes on as it was configured. The bus stays the caller's:
        to be closed after `stop`."""
        following = self._watch.follow(bus, self._subjects)
        self._task = asyncio.create_task(following, name="policy watch")

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    def metrics(self) -> dict[str, float]:
        return {
            "policy_choices_refused_total": float(self._watch.num_malformed + self._num_unknown),
            "policy_watch_failures_total": float(self._watch.num_failures),
        }

    def _take(self, choice: PolicyChoice) -> None:
        """The same choice comes again after each reconnect, and that of a deposed scheduler may come late."""
        known = self._choice
        if known is not None and choice.epoch < known.epoch:
            return
        if known is None or choice.policy != known.policy:
            try:
                policy = PolicySpec.parse(choice.policy).make()
            except ValueError as error:
                self._num_unknown += 1
                _log.error("the scheduler's policy is not taken, the worker goes on as before: %s", error)
                return
            self._on_policy(policy)
            _log.info("policy %s", choice.policy)
        self._choice = choice
