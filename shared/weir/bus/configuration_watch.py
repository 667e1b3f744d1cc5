"""Follows one key of the configuration bucket: what the scheduler writes there reaches a callback."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Never, TypeVar

from weir.bus.codec import MalformedMessage, decode
from weir.bus.protocol import Bus, BusError, KvEntry
from weir.bus.subjects import Subjects

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_RETRY_S = 0.5

ValueT = TypeVar("ValueT", bound="DataclassInstance")


class ConfigurationWatch(Generic[ValueT]):
    """Outlives the loss of the bus and defects of the callback; what cannot be decoded changes nothing.

    The same value may come twice, and that of a scheduler that was replaced may come late: the callback compares
    epochs.
    """

    def __init__(
        self,
        key: str,
        value_type: type[ValueT],
        on_value: Callable[[ValueT], None],
        *,
        retried: tuple[type[Exception], ...] = (),
    ) -> None:
        """`retried`: raised by `on_value` for a value that it cannot take now and wants once more."""
        self._key = key
        self._value_type = value_type
        self._on_value = on_value
        self._retried: tuple[type[Exception], ...] = (BusError, *retried)
        self.num_malformed = 0
        self.num_failures = 0
        """Errors that are none of the bus and none of `retried`."""

    async def follow(self, bus: Bus, subjects: Subjects) -> Never:
        """Runs until it is cancelled. The bus stays the caller's."""
        while True:
            try:
                bucket = await bus.bucket(subjects.configuration_bucket, durable=True)
                async for entry in bucket.watch():
                    if entry.key == self._key:
                        self._take(entry)
            except self._retried as error:  # whoever watches anew gets the present value again
                logger.debug("watching the key %s: %s; again", self._key, error)
            except Exception:  # the boundary of a task that nobody awaits
                self.num_failures += 1
                if self.num_failures == 1:
                    logger.exception("watching the key %s failed (further failures are only counted)", self._key)
            await asyncio.sleep(_RETRY_S)

    def _take(self, entry: KvEntry) -> None:
        if entry.value is None:
            logger.warning("the key %s was deleted; its last value stays in force", self._key)
            return
        try:
            value = decode(self._value_type, entry.value)
        except MalformedMessage as error:
            self.num_malformed += 1
            logger.error("malformed value of the key %s, the last one stays in force: %s", self._key, error)
            return
        self._on_value(value)
