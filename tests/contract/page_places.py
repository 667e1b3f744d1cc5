"""Places where stores of pages keep them, as somebody sees them who may write there too."""

import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

from tests.contract.valkey_server import ValkeyServer

from weir.kv.memory.page_access import InPlace
from weir.kv.tiers.file_store import MIN_PAGES, PageFileStore
from weir.kv.tiers.memory_store import PageMemoryStore
from weir.kv.tiers.page_header import PageLayout
from weir.kv.tiers.page_store import PageStore
from weir.kv.tiers.valkey_address import parse_valkey_url
from weir.kv.tiers.valkey_client import ValkeySettings
from weir.kv.tiers.valkey_store import ValkeyPageStore

LAYOUT = PageLayout("digest", 500)
MAX_BYTES = MIN_PAGES * LAYOUT.stored_bytes
HASHES = [bytes([number % 3, number]) * 8 for number in range(200)]


def page_of(page_hash: bytes) -> bytes:
    return random.Random(page_hash).randbytes(LAYOUT.page_bytes)


def got(store: PageStore, page_hash: bytes) -> bytes | None:
    memory = bytearray(LAYOUT.page_bytes)
    return bytes(memory) if store.try_get(page_hash, InPlace(memoryview(memory))) else None


def put(store: PageStore, *hashes: bytes) -> None:
    for page_hash in hashes:
        store.try_put(page_hash, page_of(page_hash))


class Place(Protocol):
    """Stores that it opens are closed with it. `full_share`: of MAX_BYTES, what is there after many were put."""

    full_share: float

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def open(self, layout: PageLayout = LAYOUT) -> PageStore: ...

    def stored(self, foreign_to: PageLayout | None = None) -> dict[bytes, bytes]:
        """Of LAYOUT, by hash; `foreign_to` that: of others."""
        ...

    def overwrite(self, page_hash: bytes, raw: bytes) -> None:
        """The page of LAYOUT, which counts as used when it was."""
        ...

    def remove(self, page_hash: bytes) -> None: ...


class FilesPlace:
    full_share = 0.92

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def open(self, layout: PageLayout = LAYOUT) -> PageStore:
        return PageFileStore(self.folder, layout, MAX_BYTES)

    def stored(self, foreign_to: PageLayout | None = None) -> dict[bytes, bytes]:
        own = LAYOUT.digest.hex()
        files = [path for path in self.folder.glob("*/*/*") if (path.parts[-3] == own) == (foreign_to is None)]
        return {bytes.fromhex(path.name): path.read_bytes() for path in files}

    def overwrite(self, page_hash: bytes, raw: bytes) -> None:
        path = self._path_of(page_hash)
        used_ns = path.stat().st_mtime_ns
        path.write_bytes(raw)
        os.utime(path, ns=(used_ns, used_ns))

    def remove(self, page_hash: bytes) -> None:
        self._path_of(page_hash).unlink()

    def _path_of(self, page_hash: bytes) -> Path:
        [path] = (self.folder / LAYOUT.digest.hex()).glob(f"*/{page_hash.hex()}")
        return path


class ValkeyPlace:
    """Empty at first."""

    full_share = 1.0

    def __init__(self, server: ValkeyServer) -> None:
        self._server, self._client, self._url = server, server.client, server.url
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._client.flushdb()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def open(self, layout: PageLayout = LAYOUT) -> ValkeyPageStore:
        store = ValkeyPageStore(ValkeySettings(parse_valkey_url(self._url), answer_s=30.0), layout)
        self._closing.callback(store.close)
        return store

    def stored(self, foreign_to: PageLayout | None = None) -> dict[bytes, bytes]:
        own = LAYOUT.digest.hex()
        pages = {tuple(key.split(":")[2:]): raw for key, raw in self._server.pages().items()}
        wanted = {name: raw for (digest, name), raw in pages.items() if (digest == own) == (foreign_to is None)}
        return {bytes.fromhex(name): raw for name, raw in wanted.items()}

    def overwrite(self, page_hash: bytes, raw: bytes) -> None:
        self._client.set(self._key_of(page_hash), raw)

    def remove(self, page_hash: bytes) -> None:
        assert self._client.delete(self._key_of(page_hash)) == 1

    def _key_of(self, page_hash: bytes) -> str:
        return f"weir:page:{LAYOUT.digest.hex()}:{page_hash.hex()}"


class MemoryPlace:
    """Of one store."""

    full_share = 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def open(self, layout: PageLayout = LAYOUT) -> PageStore:
        self._store = PageMemoryStore(
            layout.page_bytes, MIN_PAGES * layout.page_bytes, lambda n: memoryview(bytearray(n * layout.page_bytes))
        )
        return self._store

    def stored(self, foreign_to: PageLayout | None = None) -> dict[bytes, bytes]:
        return {page_hash: bytes(self._store.slot_of(page_hash)) for page_hash in HASHES if page_hash in self._store}

    def overwrite(self, page_hash: bytes, raw: bytes) -> None:
        self._store.slot_of(page_hash)[:] = raw

    def remove(self, page_hash: bytes) -> None:
        self._store.forget(page_hash)
