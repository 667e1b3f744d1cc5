"""Which scheduler leads: one key, changed by compare-and-set only."""

import asyncio
import logging
import time
from collections.abc import Callable

from weir.bus.codec import MalformedMessage, decode, encode
from weir.bus.messages import LEADER_KEY, LeaderRecord
from weir.bus.protocol import BusError, KeyConflict, KvBucket, KvEntry
from weir.core.clock import Clock

logger = logging.getLogger(__name__)

LEADER_TTL_S = 1.5
STUCK_AFTER_S = 3.0
"""A server that has just started takes a moment until its store can be written."""
_RENEWAL_TIMEOUT_S = 0.5
"""The client's own, five seconds, would let a leader be deposed for one lost message."""
_MAX_LOOK_GAP_S = 0.75
"""Longer ago than this, what was seen before says nothing of the time since: the bus was away, or this process slow."""


class Leadership:
    """Takes the key when nobody renews it, and renews it.

    A leader is taken for dead when its record has not changed for `ttl_s` on this process's own clock, in which this
    process looked all the time: while the bus does not answer no leader can renew its record, and once it answers the
    leader has `ttl_s` to do so. Epochs only rise: by one, and at least to the seconds since 1970, so that they do even
    where the server lost the key.
    """

    def __init__(
        self,
        bucket: KvBucket,
        scheduler_id: str,
        clock: Clock,
        *,
        ttl_s: float = LEADER_TTL_S,
        unix_time_s: Callable[[], float] = time.time,
        is_connected: Callable[[], bool] = lambda: True,
        address: str = "",
    ) -> None:
        """`is_connected`: to the server of the bucket. `address`: where this process is asked how it does."""
        self._bucket = bucket
        self._scheduler_id = scheduler_id
        self._address = address
        self._clock = clock
        self._ttl_s = ttl_s
        self._unix_time_s = unix_time_s
        self._is_connected = is_connected
        self._seen_revision = 0
        self._seen_at_s = 0.0
        self._looked_at_s = float("-inf")
        self._epoch = 0
        self._revision = 0
        self._renewed_at_s = float("-inf")
        self._is_lost = False
        self._failing_since_s: float | None = None
        """No renewal has succeeded since, though the server was connected."""
        self._stuck_reason = ""

    @property
    def is_certain(self) -> bool:
        """Nobody else can lead yet: this process has renewed the key within its time to live. A leader that cannot know
        is to command nothing until it does."""
        return not self._is_lost and self._clock.now_s() - self._renewed_at_s <= self._ttl_s

    @property
    def stuck_reason(self) -> str:
        """Why the key cannot be written for longer than a moment, although the server is there, as when its disk is
        full. Empty: it can, or the server is away. A leader that is stuck is to answer nobody: who asks it waits for a
        scheduler, and not for a grant that never comes."""
        return self._stuck_reason

    async def try_take(self) -> int | None:
        """The epoch that this process leads in now; None while somebody else leads. Raises BusError."""
        try:
            entry = await self._bucket.get(LEADER_KEY)
        except BusError:
            self._looked_at_s = float("-inf")
            raise
        if entry is not None and not self._is_free(entry):
            return None
        present = _try_decode(entry)
        epoch = max((present.epoch if present else self._epoch) + 1, int(self._unix_time_s()))
        began_s = self._clock.now_s()
        try:
            self._revision = await self._put(epoch, revision=entry.revision if entry else 0)
        except KeyConflict:
            return None
        self._renewed_at_s = began_s
        self._epoch = epoch
        return epoch

    async def keep(self) -> bool:
        """Renews the key. False: somebody else leads. While the bus does not answer nobody can know, so True, and
        `stuck_reason` says whether that lasts."""
        began_s = self._clock.now_s()
        try:
            async with asyncio.timeout(_RENEWAL_TIMEOUT_S):
                try:
                    self._revision = await self._put(self._epoch, revision=self._revision)
                except KeyConflict:
                    self._is_lost = not await self._keep_after_conflict()
            self._renewed_at_s = began_s
            self._note_renewed()
        except (BusError, TimeoutError) as error:
            self._note_failed(began_s, str(error) or "no answer")
        return not self._is_lost

    async def release(self) -> None:
        """Lets the next one lead at once, if this one still leads."""
        if self._is_lost:
            return
        try:
            await self._put(self._epoch, revision=self._revision, is_released=True)
        except BusError as error:
            logger.info("could not release the leader key, a standby will wait for it: %s", error)

    def _note_renewed(self) -> None:
        self._failing_since_s = None
        if self._stuck_reason:
            self._stuck_reason = ""
            logger.warning("the leader key can be written again: requests are taken")

    def _note_failed(self, began_s: float, problem: str) -> None:
        logger.debug("could not renew the leader key: %s", problem)
        if not self._is_connected():
            self._failing_since_s, self._stuck_reason = None, ""
            return
        if self._failing_since_s is None:
            self._failing_since_s = began_s
        if self._stuck_reason or self._clock.now_s() - self._failing_since_s <= STUCK_AFTER_S:
            return
        self._stuck_reason = f"the leader key cannot be written: NATS refuses or does not answer ({problem})"
        logger.warning(
            "%s; no request is taken until it can. Look whether the disk of NATS is full; if there is room and this "
            "goes on, restart NATS (`weir restart --rolling nats`)",
            self._stuck_reason,
        )

    async def _keep_after_conflict(self) -> bool:
        """An earlier renewal may have arrived although its answer was lost, or the server may have lost the key."""
        entry = await self._bucket.get(LEADER_KEY)
        present = _try_decode(entry)
        if entry is not None and (present is None or (present.scheduler_id, present.epoch) != self._identity):
            return False
        try:
            self._revision = await self._put(self._epoch, revision=entry.revision if entry else 0)
        except KeyConflict:
            return False
        return True

    @property
    def _identity(self) -> tuple[str, int]:
        return self._scheduler_id, self._epoch

    def _is_free(self, entry: KvEntry) -> bool:
        present = _try_decode(entry)
        if present is not None and present.is_released:
            return True
        now_s = self._clock.now_s()
        was_looking = now_s - self._looked_at_s <= _MAX_LOOK_GAP_S
        self._looked_at_s = now_s
        if entry.revision != self._seen_revision or not was_looking:
            self._seen_revision, self._seen_at_s = entry.revision, now_s
        return now_s - self._seen_at_s > self._ttl_s

    async def _put(self, epoch: int, *, revision: int, is_released: bool = False) -> int:
        record = encode(LeaderRecord(self._scheduler_id, epoch, is_released, self._address))
        return await self._bucket.update(LEADER_KEY, record, revision=revision)


def _try_decode(entry: KvEntry | None) -> LeaderRecord | None:
    try:
        return decode(LeaderRecord, entry.value or b"") if entry else None
    except MalformedMessage as error:
        logger.warning("the leader key holds something else: %s", error)
        return None
