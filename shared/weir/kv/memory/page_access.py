"""The bytes of an arena's pages, for who takes them elsewhere and brings them back: in place where the host has them,
through memory of the host where a device has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weir.kv.memory.cuda import CudaDriverError
from weir.kv.memory.device import DeviceMemory


class PageMemoryAway(OSError):
    """The pages are on a device, which does not give them, or no worker has given their memory back yet."""


class HostMemoryFull(PageMemoryAway):
    """The host gives no more memory that the device of the pages reads fast."""


class PagePlace(Protocol):
    """Where the bytes of one page come to."""

    def begin(self) -> memoryview:
        """Memory of a page's length to write them to. May be called again: what came before means nothing then."""
        ...

    def end(self, memory: memoryview) -> None:
        """They have come whole to what `begin` returned, and are the page's from here on."""
        ...

    def take(self, page: memoryview) -> None:
        """Copies a page that the host has: at once where a device reads that memory fast."""
        ...

    def copy_from(self, memory: DeviceMemory, offset: int) -> None:
        """The page is what is at `offset` there. Raises ValueError where that is beyond its end, and PageMemoryAway,
        also where this page is not on a device."""
        ...

    def read(self) -> memoryview:
        """The page, or a copy of it. Raises PageMemoryAway."""
        ...


class PageAccess(Protocol):
    """By page id. Any thread may use it, for different pages at the same time."""

    def read(self, page_id: int) -> memoryview:
        """The page, or a copy of it. Raises PageMemoryAway."""
        ...

    def place(self, page_id: int) -> PagePlace: ...

    def host_buffer(self, num_pages: int = 1) -> memoryview:
        """Memory of the host, of so many pages' length, which the device of the pages reads fast. Raises
        PageMemoryAway, and where there is no more of it HostMemoryFull or MemoryError."""
        ...


@dataclass(frozen=True, slots=True)
class InPlace:
    """In `memory` itself."""

    memory: memoryview

    def begin(self) -> memoryview:
        return self.memory

    def end(self, memory: memoryview) -> None: ...

    def take(self, page: memoryview) -> None:
        self.memory[:] = page

    def copy_from(self, memory: DeviceMemory, offset: int) -> None:
        raise PageMemoryAway("this page is in memory of the host: nothing is copied to it from a device's")

    def read(self) -> memoryview:
        return self.memory


class HostPageAccess:
    """`pages`: uint8 [num_pages, page_bytes]."""

    def __init__(self, pages: NDArray[np.uint8]) -> None:
        self._pages = pages

    def read(self, page_id: int) -> memoryview:
        page: NDArray[np.uint8] = self._pages[page_id]
        return page.data

    def place(self, page_id: int) -> PagePlace:
        return InPlace(self.read(page_id))

    def host_buffer(self, num_pages: int = 1) -> memoryview:
        return memoryview(bytearray(num_pages * self._pages.shape[1]))


class DevicePageAccess:
    """One page after the other from the beginning of the device's memory. A page's bytes wait in memory of the host
    only from when they are asked for until they are the page's."""

    def __init__(self, memory: Callable[[], DeviceMemory | None], page_bytes: int) -> None:
        """`memory`: what this process has of it now."""
        self._memory = memory
        self._page_bytes = page_bytes

    def read(self, page_id: int) -> memoryview:
        return self.place(page_id).read()

    def place(self, page_id: int) -> PagePlace:
        return _OnDevice(self, page_id * self._page_bytes, self._page_bytes)

    def host_buffer(self, num_pages: int = 1) -> memoryview:
        with self.mapped() as memory:
            try:
                return memory.host_buffer(num_pages * self._page_bytes)
            except CudaDriverError as error:
                raise HostMemoryFull(str(error)) from error

    @contextmanager
    def mapped(self) -> Iterator[DeviceMemory]:
        """Raises PageMemoryAway, also for what the device does not do."""
        memory = self._memory()
        if memory is None:
            raise PageMemoryAway("its workers have the memory of the pages; it is here again when one attaches")
        try:
            yield memory
        except CudaDriverError as error:
            raise PageMemoryAway(str(error)) from error


@dataclass(frozen=True, slots=True)
class _OnDevice:
    pages: DevicePageAccess
    offset: int
    page_bytes: int

    def begin(self) -> memoryview:
        return self.pages.host_buffer()

    def end(self, memory: memoryview) -> None:
        self.take(memory)

    def take(self, page: memoryview) -> None:
        with self.pages.mapped() as device:
            device.write(self.offset, page)

    def copy_from(self, memory: DeviceMemory, offset: int) -> None:
        if offset + self.page_bytes > memory.num_bytes:
            raise ValueError(f"a page at {offset}: the memory that is mapped has {memory.num_bytes} bytes")
        with self.pages.mapped() as device:
            device.copy_from(self.offset, memory.pointer + offset, self.page_bytes)

    def read(self) -> memoryview:
        copied = self.begin()
        with self.pages.mapped() as device:
            device.read(self.offset, copied)
        return copied
