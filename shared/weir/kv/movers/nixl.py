"""Pages of other hosts by NIXL (https://github.com/ai-dynamo/nixl): their receiver reads them from the source's memory,
over whatever UCX finds between the two: RDMA, shared memory of one machine, TCP.

NIXL has no deadlines, and what it reads may come late: a read that has begun is waited for until it has ended, well or
badly, and nobody gets its pages before. A source that cannot be reached any more ends it.
"""

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.kv.movers.pull import WantedPage
from weir.kv.movers.source import checksum_of

_MODULE = "nixl_cu12"
"""What the extra installs; the package `nixl` would import PyTorch to choose one."""
_BACKEND = "UCX"
_DRAM = "DRAM"
_NUM_AT_A_TIME = 16
_LOOK_S = 0.0001
_PROGRESS_S = 0.0005
_MAX_SOURCES = 64


class NixlError(OSError):
    """A read by NIXL failed; says why."""


class NixlAgent:
    """Of one arena in memory of the host. Any thread may use it."""

    def __init__(self, name: str, pages: NDArray[np.uint8]) -> None:
        """`pages`: [num_pages, page_bytes], to be read by others and read into. Raises NixlError."""
        api = _import_api()
        self._pages = pages
        self._scratch = np.zeros(pages.shape[1], np.uint8)
        self._errors = _errors_of(api)
        config = api.nixl_agent_config(
            enable_prog_thread=False,  # which would take a core also when nothing is read
            backends=[_BACKEND],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._sources: dict[bytes, Any] = {}
        self._lock = threading.Lock()
        self._num_read_by_others = 0
        self._wakes = threading.Condition()
        self._is_closed = False
        try:
            self._agent: Any = api.nixl_agent(name, config)
            ranges = [(array.ctypes.data, array.nbytes, 0, "") for array in (pages, self._scratch)]
            self._registered = self._agent.register_memory(ranges, _DRAM)
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise NixlError(f"no NIXL agent: {error}") from error
        self._progressing = threading.Thread(target=self._progress, name="NIXL progress", daemon=True)
        self._progressing.start()

    @property
    def address(self) -> int:
        """Of the first page."""
        return int(self._pages.ctypes.data)

    @contextmanager
    def read_by_others(self) -> Iterator[None]:
        """Meanwhile others may read: what cannot be read without this process's part is answered."""
        with self._wakes:
            self._num_read_by_others += 1
            self._wakes.notify_all()
        try:
            yield
        finally:
            with self._wakes:
                self._num_read_by_others -= 1

    def open(self, metadata: bytes, address: int) -> "NixlReader":
        """Reads from the agent that has this `metadata`, whose pages begin at `address`. Raises NixlError."""
        with self._lock:
            name = self._sources.get(metadata)
            if name is None:
                while len(self._sources) >= _MAX_SOURCES:
                    self._agent.remove_remote_agent(self._sources.pop(next(iter(self._sources))))
                name = self._guarded(lambda: self._agent.add_remote_agent(metadata))
                self._sources[metadata] = name
        return NixlReader(self, name, metadata, address)

    def forget(self, metadata: bytes) -> None:
        """It is connected anew the next time, if it is there."""
        with self._lock:
            name = self._sources.pop(metadata, None)
            if name is not None:
                self._guarded(lambda: self._agent.remove_remote_agent(name))

    def close(self) -> None:
        """Nobody reads by it any more."""
        with self._wakes:
            self._is_closed = True
            self._wakes.notify_all()
        self._progressing.join()
        for metadata in list(self._sources):
            self.forget(metadata)
        self._guarded(lambda: self._agent.deregister_memory(self._registered))

    def read(self, source: Any, pairs: Sequence[tuple[int, int]]) -> None:
        """`pairs`: address there, address here, of a page each. Raises NixlError; it has ended then too."""
        num_bytes, agent = self._pages.shape[1], self._agent
        there = agent.get_xfer_descs([(address, num_bytes, 0) for address, _ in pairs], _DRAM)
        here = agent.get_xfer_descs([(address, num_bytes, 0) for _, address in pairs], _DRAM)
        handle = self._guarded(lambda: agent.initialize_xfer("READ", here, there, source))
        try:
            state = self._guarded(lambda: agent.transfer(handle))
            while state == "PROC":
                time.sleep(_LOOK_S)
                state = self._guarded(lambda: agent.check_xfer_state(handle))
        finally:
            self._guarded(lambda: agent.release_xfer_handle(handle))
        if state != "DONE":
            raise NixlError(f"a read by NIXL ended as {state}")

    def probe(self, source: Any, address: int) -> int:
        """The checksum of the page that is at `address` there. Raises NixlError."""
        with self._lock:  # of the scratch
            self.read(source, [(address, self._scratch.ctypes.data)])
            return checksum_of(self._scratch.data)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._errors as error:
            raise NixlError(f"NIXL: {error or type(error).__name__}") from error

    def _progress(self) -> None:
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._is_closed or self._num_read_by_others > 0)
                if self._is_closed:
                    return
            self._guarded(self._agent.get_new_notifs)
            time.sleep(_PROGRESS_S)


class NixlReader:
    """`weir.kv.movers.direct.PageReader` of another host's memory."""

    num_at_a_time = _NUM_AT_A_TIME

    def __init__(self, agent: NixlAgent, source: Any, metadata: bytes, address: int) -> None:
        self._agent = agent
        self._source = source
        self._metadata = metadata
        self._address = address

    def probe(self, page_id: int, page_bytes: int) -> int:
        """The checksum of that page. Raises NixlError."""
        try:
            return self._agent.probe(self._source, self._address + page_id * page_bytes)
        except NixlError:
            self._agent.forget(self._metadata)
            raise

    def read(self, pages: Sequence[WantedPage]) -> None:
        places = [page.place.begin() for page in pages]
        pairs = [
            (self._address + page.page_id * len(place), np.frombuffer(place, np.uint8).ctypes.data)
            for page, place in zip(pages, places, strict=True)
        ]
        try:
            self._agent.read(self._source, pairs)
        except NixlError:
            self._agent.forget(self._metadata)
            raise
        for page, place in zip(pages, places, strict=True):
            page.place.end(place)

    def close(self) -> None:
        """The source stays connected."""


def _errors_of(api: Any) -> tuple[type[Exception], ...]:
    """Each of its own kinds is an Exception, of no common class."""
    found = (getattr(api.nixlBind, name) for name in dir(api.nixlBind))
    own = (kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))
    return (*own, RuntimeError, ValueError)


def _import_api() -> Any:
    try:
        return importlib.import_module(f"{_MODULE}._api")
    except ImportError as error:
        raise NixlError(f"NIXL cannot be imported: {error}") from error
