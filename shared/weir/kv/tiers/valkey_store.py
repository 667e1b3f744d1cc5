"""Pages in a Valkey or Redis server, which hosts share: a header, then the page's bytes, under a key of its own.

    weir:page:<layout>:<hash>      hex

The server bounds what it keeps, by its `maxmemory` and `maxmemory-policy`, and forgets what nobody uses for `ttl_s`.
One that does not answer is not asked again by who reads: `refresh` and `try_put` try it now and then.
"""

import errno
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from weir.core.clock import Clock, SystemClock
from weir.kv.memory.page_access import PagePlace
from weir.kv.movers.pipes import Buffer
from weir.kv.prefixes import HASH_BYTES
from weir.kv.tiers.circuit import Circuit
from weir.kv.tiers.page_header import HEADER_BYTES, DamagedPage, PageLayout, check_page, make_header
from weir.kv.tiers.page_store import StoreCounters
from weir.kv.tiers.valkey_client import ValkeySettings, asking, make_client

_log = logging.getLogger(__name__)
_KEYS_AT_A_TIME = 1000
_LOOK_S = 5.0
"""That one look at the keys may take: the next one goes on where it was."""
_MAX_KNOWN_PAGES = 1 << 20
_WRONG_KIND = "WRONGTYPE"


class ValkeyPageStore:
    """Of one layout. Whether the server is there shows later: without it nothing is known, and nothing is written."""

    def __init__(self, settings: ValkeySettings, layout: PageLayout, clock: Clock = SystemClock()) -> None:  # noqa: B008
        self._address, self._ttl_s, self._layout, self._clock = settings.address, settings.ttl_s, layout, clock
        self._client = make_client(settings)
        self._prefix = f"weir:page:{layout.digest.hex()}:".encode()
        self._known: set[bytes] = set()
        self._seen: set[bytes] = set()
        """By a look that goes on at `_cursor`."""
        self._cursor = 0
        self._num_bytes = 0
        self._advice = ""
        self._circuit = Circuit(clock)
        self.counters = StoreCounters()
        self.refresh()

    @property
    def num_pages(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Of the server, whoever uses it."""
        return self._num_bytes

    @property
    def is_away(self) -> bool:
        return self._circuit.is_open

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._known

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        if self._circuit.is_open:
            return 0
        return next((index for index, page_hash in enumerate(hashes) if page_hash not in self._known), len(hashes))

    def refresh(self) -> None:
        """Raises nothing."""
        if not self._circuit.may_try():
            return
        was_open = self._circuit.is_open
        try:
            with asking():
                self._look()
                memory = self._client.info("memory")
                num_bytes = int(memory.get("used_memory", 0))
        except (RedisError, OSError) as error:
            self._on_failure(error)
            return
        self._num_bytes = num_bytes
        self._advise(memory)
        self._on_success(was_open=was_open)

    def try_put(self, page_hash: bytes, page: Buffer) -> bool:
        if not self._circuit.may_try():
            raise ConnectionError(f"{self._address} is away")
        was_open = self._circuit.is_open
        try:
            with asking():
                is_new = self._write(page_hash, page)
        except OutOfMemoryError as error:
            self._on_success(was_open=was_open)
            raise OSError(errno.ENOSPC, f"{self._address} is full ({error})") from error
        except (RedisError, OSError) as error:
            self._on_failure(error)
            raise ConnectionError(f"{self._address}: {error}") from error
        self._on_success(was_open=was_open)
        self._known.add(page_hash)
        if self._cursor:
            self._seen.add(page_hash)
        return is_new

    def try_get(self, page_hash: bytes, place: PagePlace) -> bool:
        if self._circuit.is_open:
            return False
        memory = place.begin()
        try:
            with asking():
                is_read = self._try_read(page_hash, memory)
        except (RedisError, OSError) as error:
            self.counters.failed_reads_total += 1
            self._on_failure(error)
            return False
        if is_read:
            place.end(memory)
        else:
            self._known.discard(page_hash)
        return is_read

    def touch(self, hashes: Iterable[bytes]) -> None:
        """The server keeps longer what is named later: the beginning is named last."""
        keys = [self._key_of(page_hash) for page_hash in reversed(list(hashes))]
        for first in range(0, len(keys), _KEYS_AT_A_TIME):
            if self._circuit.is_open:
                return
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys[first : first + _KEYS_AT_A_TIME]:
                    pipeline.expire(key, self._ttl_s)
                try:
                    with asking():
                        pipeline.execute()
                except (RedisError, OSError) as error:
                    self._on_failure(error)

    def close(self) -> None:
        self._client.connection_pool.disconnect()

    def _key_of(self, page_hash: bytes) -> bytes:
        return self._prefix + page_hash.hex().encode()

    def _write(self, page_hash: bytes, page: Buffer) -> bool:
        """False: it was there already. Raises RedisError, OSError."""
        key = self._key_of(page_hash)
        if self._client.expire(key, self._ttl_s):
            return False
        stored = b"".join((make_header(self._layout, page_hash, page), page))
        return bool(self._client.set(key, stored, nx=True, ex=self._ttl_s))

    def _look(self) -> None:
        """For the pages of this layout. Of more keys than are seen in one look the next one sees the rest; what was
        known stays so until all were seen. Raises RedisError, OSError."""
        ends_at_s = self._clock.now_s() + _LOOK_S
        while True:
            self._cursor, keys = self._client.scan(self._cursor, match=self._prefix + b"*", count=_KEYS_AT_A_TIME)
            self._seen.update(filter(None, (self._try_hash_of(_bytes_of(key)) for key in keys)))
            if (is_full := len(self._seen) > _MAX_KNOWN_PAGES) or not self._cursor:
                if is_full:
                    _log.warning("%s has more than %d pages: the others are not read", self._address, _MAX_KNOWN_PAGES)
                self._known, self._seen, self._cursor = self._seen, set(), 0
                return
            if self._clock.now_s() > ends_at_s:
                self._known |= self._seen
                return

    def _try_hash_of(self, key: bytes) -> bytes | None:
        try:
            page_hash = bytes.fromhex(key.removeprefix(self._prefix).decode())
        except ValueError:
            return None
        return page_hash if len(page_hash) == HASH_BYTES else None

    def _try_read(self, page_hash: bytes, memory: memoryview) -> bool:
        """False: it is not there; nor is it from now on, if it was damaged. Raises RedisError, OSError."""
        key = self._key_of(page_hash)
        try:
            stored = memoryview(self._fetch(key))
            if not stored and not self._client.exists(key):
                self.counters.missing_total += 1
                return False
            stored = stored or memoryview(self._fetch(key))  # it may have been written since
            self._check(key, stored, page_hash)
        except DamagedPage as error:
            self._remove(key, str(error))
            return False
        except ResponseError as error:
            if not str(error).startswith(_WRONG_KIND):
                raise
            self._remove(key, f"{key.decode()} is no string")
            return False
        memory[:] = stored[HEADER_BYTES:]
        return True

    def _fetch(self, key: bytes) -> bytes:
        """Empty also where there is none; of what is longer than a page a byte more."""
        return _bytes_of(self._client.getrange(key, 0, self._layout.stored_bytes))

    def _check(self, key: bytes, stored: memoryview, page_hash: bytes) -> None:
        """Raises DamagedPage."""
        if len(stored) != self._layout.stored_bytes:
            raise DamagedPage(f"{key.decode()} has not the {self._layout.stored_bytes} bytes of a page")
        check_page(key.decode(), stored[:HEADER_BYTES], stored[HEADER_BYTES:], self._layout, page_hash)

    def _remove(self, key: bytes, why: str) -> None:
        """Somebody else may have removed it meanwhile."""
        if not self._client.unlink(key):
            self.counters.missing_total += 1
            return
        self.counters.damaged_total += 1
        _log.warning("a page is computed again, it is removed from %s: %s", self._address, why)

    def _advise(self, memory: Mapping[str, Any]) -> None:
        """Says once what the server should have been told."""
        advice, policy = "", memory.get("maxmemory_policy", "")
        if not memory.get("maxmemory", 0):
            advice = "has no maxmemory: pages take what it can get until they expire"
        elif policy == "noeviction":
            advice = "has maxmemory-policy noeviction: when it is full no page is written until others expire"
        if advice and advice != self._advice:
            _log.warning("%s %s; give it a maxmemory, and maxmemory-policy allkeys-lru", self._address, advice)
        self._advice = advice

    def _on_failure(self, error: Exception) -> None:
        if self._circuit.on_failure():
            _log.warning("%s does not answer, its pages are computed: %s", self._address, error)

    def _on_success(self, *, was_open: bool) -> None:
        """`was_open`: when it was asked. Else a reader may have seen since then that it does not answer."""
        if was_open and self._circuit.on_success():
            _log.warning("%s answers again", self._address)


def _bytes_of(answer: bytes | str) -> bytes:
    """The client's types allow for text, which this one is not asked for."""
    return answer if isinstance(answer, bytes) else answer.encode()
