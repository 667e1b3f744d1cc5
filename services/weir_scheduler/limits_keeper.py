"""Keeps the limits and the policy in force: follows the limits file, and writes what gateways, workers and the next
scheduler need.

A file that cannot be read or is wrong changes nothing: what was in force goes on, and the fault is logged, counted and
shown to whoever asks.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from weir.bus.codec import MalformedMessage, decode, encode
from weir.bus.configuration import (
    ACCESS_KEY,
    LIMITS_KEY,
    MESSAGE_TYPES,
    POLICY_KEY,
    WORKERS_KEY,
    LimitsInForce,
    PolicyChoice,
    Written,
)
from weir.bus.protocol import BusError, KeyConflict, KvBucket, KvEntry
from weir.core.errors import FieldViolation, InvalidRequest, Unavailable
from weir.runtime.change_log import Change, ChangeLog, Result, Told, new_correlation_id, outcome_of
from weir.scheduling.limits import CoreLimits
from weir.scheduling.limits_file import MAX_FILE_BYTES
from weir_scheduler.effective_limits import EffectiveLimits, LimitChange, changes_between

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_VERIFY_EVERY = 5
"""Looks at the file between two looks whether the bucket still has what was written."""
_WRITE_TIMEOUT_S = 2.0
_LIMITS_KEYS = (ACCESS_KEY, LIMITS_KEY, WORKERS_KEY)
_SHOWN_DIGITS = 8
_SETTLED_S = 2.0
"""Younger than this, a file can change again without a new time of change."""


class LimitsSource:
    """Reads the limits file, and again when it has changed. Errors are InvalidRequest, as those of its content.

    A change counts once two looks have found the same: whoever writes a file in place empties it first, and a file
    without keys would let everybody in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, ...] = ()
        self._seen: str | None = None
        """At the last look; None: it could not be read, or was returned already."""

    async def read(self) -> str:
        return await asyncio.to_thread(self._read)

    async def try_read_changed(self) -> str | None:
        """None: nothing has changed, or not for two looks yet."""
        return await asyncio.to_thread(self._try_read_changed)

    def _try_read_changed(self) -> str | None:
        stamp = self._stamp_now()
        if stamp and stamp == self._stamp and self._seen is None:
            return None
        seen, self._seen = self._seen, None
        text = self._read()
        if text != seen:
            self._seen = text
            return None
        return text

    def _read(self) -> str:
        self._stamp = self._stamp_now()
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            return content.decode()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError):  # what let nobody read it may pass and leave the file as it is
                self._stamp = ()
            raise InvalidRequest([FieldViolation("file", f"cannot be read: {error}")]) from error

    def _stamp_now(self) -> tuple[int, ...]:
        """Empty for a file that cannot be looked at, or has changed just now: it is read at the next look."""
        try:
            found = self.path.stat()
        except OSError:
            return ()
        is_settled = time.time() - found.st_mtime > _SETTLED_S
        return (found.st_mtime_ns, found.st_size, found.st_ino) if is_settled else ()


class LimitsKeeper:
    """Serves one leader. A change reaches the core before it is published."""

    def __init__(
        self,
        effective_limits: EffectiveLimits,
        source: LimitsSource | None,
        bucket: KvBucket,
        epoch: int,
        *,
        look_s: float = _LOOK_S,
        changes: ChangeLog | None = None,
    ) -> None:
        """`changes` hears of what the file changes."""
        self._changes = changes
        self._effective_limits = effective_limits
        self._source = source
        self._bucket = bucket
        self._epoch = epoch
        self._look_s = look_s
        self._num_changes = Counter(list(MESSAGE_TYPES))
        """Of what is to be written, by key."""
        self._num_written: Counter[str] = Counter()
        """How many of them the bucket has."""
        self._on_limits: Callable[[], None] = lambda: None
        self._on_policy: Callable[[], None] = lambda: None
        self._file_error = ""
        self._is_replaced = False
        self._num_reloads = 0
        self._num_errors = 0
        self._trial_ends_s = 0.0
        """Of the clock that `time.monotonic` reads; while something is tried."""

    @property
    def effective_limits(self) -> EffectiveLimits:
        """To be read only."""
        return self._effective_limits

    def knows_tenant(self, name: str) -> bool:
        """Now."""
        return name in self._effective_limits.limits.tenants_by_name

    @property
    def limits_path(self) -> Path | None:
        return None if self._source is None else self._source.path

    @property
    def file_error(self) -> str:
        """Why the file as it is now is not in force. Empty: it is."""
        return self._file_error

    async def load(self) -> None:
        """Reads the file, and what an earlier scheduler left. Raises BusError.

        Raises InvalidRequest for a file that is wrong when no earlier one is known.
        """
        kept = _try_decode(LIMITS_KEY, await self._bucket.get(LIMITS_KEY))
        choice = _try_decode(POLICY_KEY, await self._bucket.get(POLICY_KEY))
        if isinstance(kept, LimitsInForce):
            await self._load_limits(kept)
        elif self._source is not None:
            self._effective_limits.take_file(await self._source.read())
        if isinstance(choice, PolicyChoice):
            try:
                self._effective_limits.go_on_with(choice)
            except ValueError as error:
                logger.error("the policy of an earlier scheduler is not taken up: %s", error)

    def attach(self, on_limits: Callable[[], None], on_policy: Callable[[], None]) -> None:
        """From now on changes reach the core."""
        self._on_limits = on_limits
        self._on_policy = on_policy

    async def set_limits(
        self, changes: Sequence[tuple[str, str]], check: Callable[[CoreLimits], None] = lambda limits: None
    ) -> tuple[LimitChange, ...]:
        """Raises InvalidRequest (`check` may too), and changes nothing then; Unavailable where another scheduler leads
        by now, or what is in force here could not be written yet."""
        changed = self._effective_limits.change(changes, check)
        logger.info("limits changed: %s", ", ".join(f"{one.key} = {one.now} (was {one.was})" for one in changed))
        self._check_done(await self._limits_changed())
        return changed

    async def tune(
        self, changes: Sequence[tuple[str, str]], check: Callable[[CoreLimits], None], lease_s: float = 0.0
    ) -> tuple[LimitChange, ...]:
        """As `set_limits`, of bounds of workers that a tuner keeps, or with `lease_s` tries: unless the same is asked
        for again until then, what was before is in force again. So no trial outlives a tuner that has died, nor, since
        the next scheduler is not told of it, the scheduler that was asked."""
        changed = self._effective_limits.tune(changes, check, is_trial=lease_s > 0)
        self._trial_ends_s = time.monotonic() + lease_s
        return await self._tuned(changed)

    async def forget_tuned(self) -> tuple[LimitChange, ...]:
        """All that was kept or is tried. Raises Unavailable as `set_limits` does."""
        return await self._tuned(self._effective_limits.forget_tuned())

    async def set_policy(self, text: str) -> None:
        """Raises ValueError, and changes nothing then; Unavailable as `set_limits` does."""
        before = self._effective_limits.policy
        self._effective_limits.choose_policy(text)
        try:
            self._on_policy()
        except Exception:  # what a policy of another distribution raises when it is made or given what waits
            self._effective_limits.policy = before
            raise
        logger.info("policy %s", self._effective_limits.policy)
        self._check_done(await self._publish_change((POLICY_KEY,)))

    async def keep(self) -> None:
        """Runs for ever: follows the file, and sees to it that the bucket has what is in force."""
        num_looks = 0
        while True:
            await asyncio.sleep(self._look_s)
            await self._look_at_file()
            await self._end_overdue_trial()
            num_looks += 1
            if num_looks % _VERIFY_EVERY == 0:
                await self._verify()
            await self.publish()

    async def publish(self) -> None:
        """Writes what has changed; what cannot be written now is tried again at the next look."""
        for key in self._unpublished():
            try:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await self._put(key)
            except (BusError, TimeoutError) as error:
                logger.debug("%s cannot be written: %s; again", key, error or "no answer")

    def metrics(self) -> dict[str, float]:
        return {
            "limits_reloads_total": float(self._num_reloads),
            "limits_reload_errors_total": float(self._num_errors),
            "limits_file_is_wrong": float(bool(self._file_error)),
            "limits_overrides": float(len(self._effective_limits.overrides)),
            "limits_tuned": float(len(self._effective_limits.tuned.kept)),
            "limits_on_trial": float(len(self._effective_limits.tuned.trial)),
            "rules_unpublished": float(len(self._unpublished())),
        }

    async def _load_limits(self, kept: LimitsInForce) -> None:
        has_read_file = True
        if self._source is not None:
            try:
                self._effective_limits.take_file(await self._source.read())
            except InvalidRequest as error:
                if not kept.file_text:
                    raise
                has_read_file = False
                self._note_error(error, "the last one that was right goes on")
        try:
            self._effective_limits.go_on_from(kept, has_read_file=has_read_file)
        except InvalidRequest as error:
            logger.error("changes of an earlier scheduler are not taken up: %s", error.message)

    async def _look_at_file(self) -> None:
        if self._source is None:
            return
        before = self._effective_limits.file_digest[:_SHOWN_DIGITS]
        limits, tuned = self._effective_limits.limits, self._effective_limits.tuned
        try:
            text = await self._source.try_read_changed()
            if text is None:
                return
            has_changed = self._effective_limits.take_file(text)
        except InvalidRequest as error:
            self._note_error(error, "the limits stay as they are")
            return
        self._file_error = ""
        if has_changed:
            self._num_reloads += 1
            logger.info("limits file %s: in force", self._source.path)
            self._tell("done", before)
            keys = list(dict.fromkeys((*tuned.kept, *tuned.trial)))
            ended = changes_between(limits, self._effective_limits.limits, keys)
            self._tell_tuned("file", "revert tuned limits", ended, "limits file changed")
            await self._limits_changed()

    async def _tuned(self, changed: tuple[LimitChange, ...]) -> tuple[LimitChange, ...]:
        if changed:
            logger.info("limits tuned: %s", ", ".join(f"{one.key} = {one.now} (was {one.was})" for one in changed))
            self._check_done(await self._limits_changed())
        else:  # an earlier call may have been told that it is not published yet, and to ask again
            await self.publish()
            self._check_done([key for key in self._unpublished() if key in _LIMITS_KEYS])
        return changed

    async def _end_overdue_trial(self) -> None:
        """Whoever tried it has not renewed it."""
        if not self._effective_limits.tuned.trial or time.monotonic() < self._trial_ends_s:
            return
        changed = self._effective_limits.tune(())
        logger.warning("limits on trial were not renewed in time, and are taken back")
        self._tell_tuned("lease", "end trial", changed, "not renewed in time")
        await self._limits_changed()

    def _tell_tuned(self, actor: str, action: str, changed: Sequence[LimitChange], reason: str) -> None:
        """Of what no call has ended."""
        if self._changes is not None:
            told = [Told(one.key, one.was or "", one.now, reason) for one in changed]
            self._changes.write_all(actor, action, told, new_correlation_id())

    def _tell(self, result: Result, before: str = "", reason: str = "") -> None:
        """Of the file, whose change is known by its digest."""
        if self._changes is not None:
            after = self._effective_limits.file_digest[:_SHOWN_DIGITS] if result == "done" else ""
            self._changes.write(Change("file", "read limits", str(self.limits_path), result, before, after, reason))

    def _note_error(self, error: InvalidRequest, consequence: str) -> None:
        if error.message == self._file_error:
            return
        self._num_errors += 1
        self._file_error = error.message
        logger.error("limits file %s: %s; %s", self.limits_path, error.message, consequence)
        self._tell("refused", reason=outcome_of(error)[1])

    async def _limits_changed(self) -> list[str]:
        """As `_publish_change`."""
        # The core first: a gateway must not offer a lane that the core does not know yet.
        self._on_limits()
        return await self._publish_change(_LIMITS_KEYS)

    async def _publish_change(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys under which nobody finds the change yet."""
        self._num_changes.update(keys)
        wanted = {key: self._num_changes[key] for key in keys}
        await self.publish()
        return [key for key in sorted(keys) if self._num_written[key] < wanted[key]]

    def _unpublished(self) -> list[str]:
        return [key for key in sorted(MESSAGE_TYPES) if self._num_written[key] < self._num_changes[key]]

    def _check_done(self, unpublished: Sequence[str]) -> None:
        """Raises Unavailable where what was changed here is lost with this scheduler, or nobody else has it yet."""
        if self._is_replaced:
            raise Unavailable("another scheduler leads now; nothing was changed, ask that one", retry_after_s=_LOOK_S)
        if unpublished:
            message = (
                f"in force here, not published yet ({', '.join(unpublished)}): NATS refuses or does not answer. It is "
                "written as soon as it can be, and lost if this scheduler ends before that; ask again later"
            )
            raise Unavailable(message, retry_after_s=_LOOK_S)

    def _message_of(self, key: str) -> Written:
        if key == ACCESS_KEY:
            return self._effective_limits.access_rules(self._epoch)
        if key == POLICY_KEY:
            return self._effective_limits.policy_choice(self._epoch)
        if key == WORKERS_KEY:
            return self._effective_limits.worker_rules(self._epoch)
        return self._effective_limits.limits_in_force(self._epoch)

    async def _verify(self) -> None:
        """A server that lost its store has lost the rules, and a gateway that starts then would wait for ever."""
        try:
            for key in MESSAGE_TYPES:
                if await self._bucket.get(key) is None:
                    self._num_changes[key] += 1
        except BusError as error:
            logger.debug("the bucket cannot be read: %s", error)

    async def _put(self, key: str) -> None:
        """Raises BusError. A value of a later leader stays: this one was replaced, and will hear of it.

        What is written is what is in force once nobody else's write can come between.
        """
        while True:
            entry = await self._bucket.get(key)
            present = _try_decode(key, entry)
            if present is not None and present.epoch > self._epoch:
                self._is_replaced = True
                self._num_written[key] = self._num_changes[key]
                return
            num_changes, message = self._num_changes[key], encode(self._message_of(key))
            try:
                await self._bucket.update(key, message, revision=0 if entry is None else entry.revision)
            except KeyConflict:
                continue
            self._num_written[key] = max(num_changes, self._num_written[key])
            return


def _try_decode(key: str, entry: KvEntry | None) -> Written | None:
    """None: there is none, or none that can be read."""
    if entry is None or entry.value is None:
        return None
    try:
        return decode(MESSAGE_TYPES[key], entry.value)
    except MalformedMessage as error:
        logger.error("malformed entry %s in the configuration bucket, it is written anew: %s", key, error)
        return None
