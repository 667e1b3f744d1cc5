"""The worker's entry in the registry: put anew every second, gone soon after the worker is."""

import asyncio
import logging
from collections.abc import Callable

from weir.bus.codec import encode
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus, BusError, KvBucket
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.errors import Unavailable
from weir.core.tasks import end_tasks

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_CALL_TIMEOUT_S = 2.0


class RegistryEntry:
    """Survives the loss of the bus: the entry expires meanwhile, and is put again once the bus is back."""

    def __init__(self, subjects: Subjects, make_record: Callable[[], WorkerRecord]) -> None:
        """`make_record` is asked for the present load each time."""
        self._subjects = subjects
        self._make_record = make_record
        self._bucket: KvBucket | None = None
        self._is_due = asyncio.Event()
        self._was_put = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_missing = False
        self.num_failures = 0

    async def start(self, bus: Bus, timeout_s: float) -> None:
        """Returns when the worker is registered. The bus stays the caller's: to be closed after `stop`. Raises
        Unavailable if that takes longer."""
        self._task = asyncio.create_task(self._keep_putting(bus), name="registration")
        try:
            async with asyncio.timeout(timeout_s):
                await self._was_put.wait()
        except TimeoutError as error:
            raise Unavailable(f"not registered within {timeout_s:g} s: is NATS running?") from error

    def put_now(self) -> None:
        """The record has changed in a way that should be known soon."""
        self._is_due.set()

    async def stop(self) -> None:
        """Takes the entry away."""
        if self._task is not None:
            await end_tasks([self._task])
        if self._bucket is None:
            return
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await self._bucket.delete(self._make_record().worker_id)
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
                self._bucket = await bus.bucket(self._subjects.workers_bucket, ttl_s=WORKER_TTL_S)
            record = self._make_record()
            await self._bucket.put(record.worker_id, encode(record))
