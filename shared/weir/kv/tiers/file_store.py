"""Pages in files, of a disk of this host or of a file system that hosts share: processes need no locks for a folder.

    FOLDER/<layout>/<first byte of the hash>/<hash>      hex; 0600 in folders of 0700

The times of modification say when pages were last used. All layouts of a folder are under one bound: what an earlier
model left goes first, since nobody uses it. Each process counts what it writes, and looks at the whole folder after
every fiftieth part of the bound; above 90 % of it it removes down to 80 %. So several stay near the bound together.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weir.core.fields import format_size
from weir.core.trusted_folder import make_trusted_folder
from weir.kv.memory.page_access import PagePlace
from weir.kv.movers.pipes import Buffer
from weir.kv.prefixes import HASH_BYTES
from weir.kv.tiers.page_file import UNFINISHED, read_page, write_page
from weir.kv.tiers.page_header import DamagedPage, PageLayout
from weir.kv.tiers.page_store import StoreCounters

_log = logging.getLogger(__name__)
_NUM_FOLDERS = 256
HIGH_SHARE, LOW_SHARE = 0.9, 0.8
_LOOK_SHARE = 0.02
MIN_PAGES = 100
"""Fewer cannot be bounded by these shares."""
_STALE_S = 3600.0
"""A file that is not finished by then never will be."""
_SETTLED_S = 1.0
"""A folder that changed less long ago may change again and show the same time."""
_NAME = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")


@dataclass(frozen=True, slots=True)
class _File:
    used_at_ns: int
    num_bytes: int
    path: str


class PageFileStore:
    """Of one layout, in `folder`, which is made. Raises UntrustedFolder where others could put pages, ValueError for a
    bound of too few pages, OSError."""

    def __init__(
        self, folder: Path, layout: PageLayout, max_bytes: int, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        least_bytes = MIN_PAGES * layout.stored_bytes
        if max_bytes < least_bytes:
            raise ValueError(
                f"page_files_bytes {max_bytes}: holds {max_bytes // layout.stored_bytes} pages of this model; give at "
                f"least {least_bytes} ({format_size(least_bytes)})"
            )
        self._folder, self._layout, self._max_bytes, self._now_ns = folder, layout, max_bytes, now_ns
        self._own_folder = folder / layout.digest.hex()
        make_trusted_folder(self._own_folder, folder, "set page_files_dir to a folder of your own")
        self._known: list[set[bytes]] = [set() for _ in range(_NUM_FOLDERS)]
        self._changed_at_ns = [0] * _NUM_FOLDERS
        """Of each folder, when it was last listed; 0: list it again."""
        self._others_bytes = 0
        self._unlooked_bytes = 0
        """Written since the whole folder was looked at."""
        self.counters = StoreCounters()
        self.refresh()
        self._make_room()

    @property
    def is_away(self) -> bool:
        return False

    @property
    def num_pages(self) -> int:
        return sum(map(len, self._known))

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self._layout.stored_bytes + self._others_bytes

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._known[page_hash[0]]

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        return next((index for index, page_hash in enumerate(hashes) if page_hash not in self), len(hashes))

    def refresh(self) -> None:
        """Lists the folders that have changed. Raises nothing: what cannot be listed is not known."""
        for number in range(_NUM_FOLDERS):
            folder = self._folder_of(number)
            try:
                changed_at_ns = folder.stat().st_mtime_ns
                if changed_at_ns == self._changed_at_ns[number]:
                    continue
                names = [path.name for path in folder.iterdir()]
            except OSError:
                changed_at_ns, names = 0, []
            is_settled = self._now_ns() - changed_at_ns > _SETTLED_S * 1e9
            self._changed_at_ns[number] = changed_at_ns if is_settled else 0
            self._known[number] = {bytes.fromhex(name) for name in names if _NAME.fullmatch(name)}

    def try_put(self, page_hash: bytes, page: Buffer) -> bool:
        path = self._path_of(page_hash)
        is_there = _try_touch(path, self._now_ns())
        if not is_there:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_page(path, self._layout, page_hash, page)
            _try_touch(path, self._now_ns())
            self._unlooked_bytes += self._layout.stored_bytes
        self._known[page_hash[0]].add(page_hash)
        if self._unlooked_bytes > _LOOK_SHARE * self._max_bytes:
            self._make_room()
        return not is_there

    def try_get(self, page_hash: bytes, place: PagePlace) -> bool:
        path, memory = self._path_of(page_hash), place.begin()
        try:
            read_page(path, self._layout, page_hash, memory)
        except FileNotFoundError:
            self.counters.missing_total += 1
        except DamagedPage as error:
            self.counters.damaged_total += 1
            _log.warning("a page is computed again, its file is removed: %s", error)
            with suppress(OSError):
                path.unlink()
        except OSError as error:
            self.counters.failed_reads_total += 1
            _log.warning("a page is computed again, its file cannot be read: %s", error)
            return False
        else:
            place.end(memory)
            return True
        self._known[page_hash[0]].discard(page_hash)
        return False

    def touch(self, hashes: Iterable[bytes]) -> None:
        now_ns = self._now_ns()
        for index, page_hash in enumerate(hashes):
            with suppress(OSError):
                _try_touch(self._path_of(page_hash), now_ns - 1000 * index)

    def close(self) -> None: ...

    def _folder_of(self, number: int) -> Path:
        return self._own_folder / f"{number:02x}"

    def _path_of(self, page_hash: bytes) -> Path:
        return self._folder_of(page_hash[0]) / page_hash.hex()

    def _make_room(self) -> None:
        """Looks at all that is there, and evicts where it is too much."""
        self._unlooked_bytes = 0
        files = list(self._all_files())
        num_bytes = sum(file.num_bytes for file in files)
        if num_bytes > HIGH_SHARE * self._max_bytes:
            for file in sorted(files, key=lambda file: file.used_at_ns):
                if num_bytes <= LOW_SHARE * self._max_bytes:
                    break
                num_bytes -= file.num_bytes
                self._evict(file.path)
        self._others_bytes = max(0, num_bytes - self.num_pages * self._layout.stored_bytes)

    def _evict(self, path: str) -> None:
        """What another process has removed meanwhile counts as its own."""
        folder, name = os.path.split(path)
        if folder.startswith(str(self._own_folder)):
            page_hash = bytes.fromhex(name)
            self._known[page_hash[0]].discard(page_hash)
        try:
            Path(path).unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("a page's file cannot be removed: %s", error)
            return
        self.counters.evicted_total += 1

    def _all_files(self) -> Iterator[_File]:
        """Of all layouts. Removes what writers that died left; leaves alone whatever else is there."""
        stale_ns = self._now_ns() - int(_STALE_S * 1e9)
        for entry in _entries_below(self._folder):
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            if _NAME.fullmatch(entry.name):
                yield _File(found.st_mtime_ns, found.st_size, entry.path)
            elif entry.name.endswith(UNFINISHED) and found.st_mtime_ns < stale_ns:
                with suppress(OSError):
                    Path(entry.path).unlink()


def _entries_below(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Files where pages lie: two folders deep."""
    for layout in _scan(folder):
        if _NAME.fullmatch(layout.name) and layout.is_dir(follow_symlinks=False):
            for group in _scan(layout.path):
                if len(group.name) == 2 and group.is_dir(follow_symlinks=False):
                    yield from (entry for entry in _scan(group.path) if entry.is_file(follow_symlinks=False))


def _scan(folder: str | Path) -> Iterator["os.DirEntry[str]"]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _try_touch(path: Path, used_at_ns: int) -> bool:
    """False: there is no such file."""
    try:
        os.utime(path, ns=(used_at_ns, used_at_ns), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
