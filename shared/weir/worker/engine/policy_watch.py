"""Hears from the scheduler by which policy this worker's batches are to be made."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from weir.bus.codec import MalformedMessage, decode
from weir.bus.configuration import POLICY_KEY, PolicyChoice
from weir.bus.protocol import Bus, BusError
from weir.bus.subjects import Subjects
from weir.core.tasks import end_tasks
from weir.engine.loop import InboxFull
from weir.policy.registry import PolicySpec
from weir.policy.seams import Policy

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_CLOSE_TIMEOUT_S = 2.0


class PolicyWatch:
    """Survives the loss of the bus. A choice that this worker does not know changes nothing, and is counted."""

    def __init__(
        self, connect: Callable[[], Awaitable[Bus]], subjects: Subjects, on_policy: Callable[[Policy], None]
    ) -> None:
        """`on_policy` gets a policy of its own at each change."""
        self._connect = connect
        self._subjects = subjects
        self._on_policy = on_policy
        self._task: asyncio.Task[None] | None = None
        self._choice: PolicyChoice | None = None
        self._num_refused = 0
        self._num_failures = 0

    @property
    def policy_name(self) -> str:
        """Of the last choice that was heard; empty: none."""
        return "" if self._choice is None else PolicySpec.parse(self._choice.policy).name

    def start(self) -> None:
        """Returns at once: a worker without word from the scheduler goes on as it was configured."""
        self._task = asyncio.create_task(self._keep_watching(), name="policy watch")

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    def metrics(self) -> dict[str, float]:
        return {
            "policy_choices_refused_total": float(self._num_refused),
            "policy_watch_failures_total": float(self._num_failures),
        }

    async def _keep_watching(self) -> None:
        while True:
            try:
                await self._watch()
            except (BusError, InboxFull) as error:  # whoever watches anew is told the choice again
                _log.debug("watching the policy: %s", error)
            except Exception:  # noqa: BLE001 - the boundary of a task that nobody awaits
                self._num_failures += 1
                if self._num_failures == 1:
                    _log.exception("watching the policy failed (further failures are only counted); again")
            await asyncio.sleep(_RETRY_S)

    async def _watch(self) -> None:
        bus = await self._connect()
        try:
            bucket = await bus.bucket(self._subjects.configuration_bucket, durable=True)
            async for entry in bucket.watch():
                if entry.key == POLICY_KEY and entry.value is not None:
                    self._take(entry.value)
        finally:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await bus.close()
            except TimeoutError:
                _log.info("the connection to the bus did not close in time")

    def _take(self, value: bytes) -> None:
        """The same choice is told again after each reconnect, and a deposed scheduler may speak late."""
        try:
            choice = decode(PolicyChoice, value)
            known = self._choice
            if known is not None and choice.epoch < known.epoch:
                return
            if known is None or choice.policy != known.policy:
                self._on_policy(PolicySpec.parse(choice.policy).make())
                _log.info("policy %s", choice.policy)
            self._choice = choice
        except (MalformedMessage, ValueError) as error:
            self._num_refused += 1
            _log.error("the scheduler's policy is not taken, the worker goes on as before: %s", error)
