"""A worker on the bus: its entry in the registry, and what the scheduler has it go by: policy and bounds."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from weir.bus.codec import encode
from weir.bus.configuration import POLICY_KEY, ConfigurationWatch, PolicyChoice, WorkerRules
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus, BusError, KvBucket
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir.core.tasks import end_tasks
from weir.engine.loop import InboxFull
from weir.policy.registry import PolicySpec
from weir.policy.seams import Policy
from weir.worker.bounds import RulesWatch

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_CALL_TIMEOUT_S = 2.0
_REGISTER_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 2.0


class BusLink:
    """Owns the connection of one shell: what its worker says and follows on the bus."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        subjects: Subjects,
        make_record: Callable[[], WorkerRecord],
        on_policy: Callable[[Policy], None],
        on_rules: Callable[[WorkerRules], None],
    ) -> None:
        """`connect` raises BusError."""
        self._connect = connect
        self._entry = RegistryEntry(subjects, make_record)
        self._policy_watch = PolicyWatch(subjects, on_policy)
        self._rules_watch = RulesWatch(subjects, on_rules)
        self._bus: Bus | None = None

    async def start(self) -> None:
        """Returns when the worker is registered. Raises Unavailable."""
        try:
            self._bus = await self._connect()
        except BusError as error:
            raise Unavailable(str(error)) from error
        self._policy_watch.start(self._bus)
        self._rules_watch.start(self._bus)
        await self._entry.start(self._bus, _REGISTER_TIMEOUT_S)

    def put_now(self) -> None:
        """The record has changed in a way that should be known soon."""
        self._entry.put_now()

    async def stop(self) -> None:
        await self._policy_watch.stop()
        await self._rules_watch.stop()
        await self._entry.stop()
        if self._bus is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._bus.close()
        except TimeoutError:
            _log.info("the connection to the bus did not close in time")

    def metrics(self) -> dict[str, float]:
        own = {"registry_failures_total": float(self._entry.num_failures)}
        return self._policy_watch.metrics() | self._rules_watch.metrics() | own


class RegistryEntry:
    """Put anew every second, gone soon after the worker is. Survives the loss of the bus: the entry expires meanwhile,
    and is put again once the bus is back."""

    def __init__(self, subjects: Subjects, make_record: Callable[[], WorkerRecord]) -> None:
        """`make_record` is asked for the present load each time."""
        self._subjects = subjects
        self._make_record = make_record
        self._bucket: KvBucket | None = None
        self._is_due = asyncio.Event()
        self._was_put = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_missing = False
        self._worker_id = ""
        self.num_failures = 0

    async def start(self, bus: Bus, timeout_s: float) -> None:
        """Returns when the worker is registered. The bus stays the caller's: to be closed after `stop`. Raises
        Unavailable if that takes longer."""
        self._task = asyncio.create_task(self._keep_putting(bus), name="registration")
        try:
            async with asyncio.timeout(timeout_s):
                await self._was_put.wait()
        except TimeoutError as error:
            raise Unavailable(f"not registered within {timeout_s:g} s: do NATS and a scheduler run?") from error

    def put_now(self) -> None:
        """The record has changed in a way that should be known soon."""
        self._is_due.set()

    async def stop(self) -> None:
        """Takes the entry away."""
        if self._task is not None:
            await end_tasks([self._task])
        if self._bucket is None or not self._worker_id:
            return
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await self._bucket.delete(self._worker_id)
        except (BusError, TimeoutError) as error:
            _log.info("the registry entry is left to expire: %s", error or "no answer")

    async def _keep_putting(self, bus: Bus) -> None:
        while True:
            try:
                await self._put(bus)
            except (BusError, TimeoutError) as error:
                self.num_failures += 1
                if not self._is_missing:
                    _log.warning("not in the registry: %s", error or "no answer")
                self._is_missing = True
            except Exception:  # noqa: BLE001 - the boundary of a task: without its entry the worker gets no work
                self.num_failures += 1
                if not self._is_missing:
                    _log.exception("not in the registry")
                self._is_missing = True
            else:
                if self._is_missing:
                    _log.info("in the registry again")
                self._is_missing = False
                self._was_put.set()
            try:
                async with asyncio.timeout(_INTERVAL_S):
                    await self._is_due.wait()
            except TimeoutError:
                continue
            self._is_due.clear()

    async def _put(self, bus: Bus) -> None:
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            if self._bucket is None:
                self._bucket = await bus.open_bucket(self._subjects.workers_bucket)
            record = self._make_record()
            self._worker_id = record.worker_id
            await self._bucket.put(record.worker_id, encode(record))


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
