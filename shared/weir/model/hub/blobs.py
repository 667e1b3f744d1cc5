"""One file of the hub into its cache's `blobs`: goes on where an earlier try ended, and is whole only with its digest.

Not by `hf_hub_download`: in huggingface_hub 2.4 that one removes what has come when it is broken off.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx2
from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from weir.model.errors import PullError

PARTIAL_SUFFIX = ".weir.incomplete"
"""Of a blob that is not whole. `hf cache prune` knows the ending, too."""

_SHA1_CHARS = 40
_READ_BYTES = 1 << 20
_MAX_FUTILE_TRIES = 5
_MOST_DOUBLINGS = 3
_LEAST_ADVANCE_BYTES = 1 << 16
_TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
_CHECK_HEAD_AT_BYTES = 32 << 20
"""A GGUF file's header, mostly its vocabulary, is a few megabytes."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit. `digest` is in hex: SHA-256 of a large file (64), git's SHA-1 of a small one (40)."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class FetchWatch:
    """Who is told. `progress`: the bytes of the file that are here. `check_head`: a file that is not whole, once; what
    it raises ends the download, and nothing of the file is kept."""

    progress: Callable[[int], None]
    check_head: Callable[[Path], None] | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`first_wait_s`: before a line that broke is tried again, twice as long each time. A line that gives less than
    64 KiB in `stalled_after_s` counts as broken."""

    first_wait_s: float = 1.0
    stalled_after_s: float = 60.0


class _Partial:
    """What has come of a file, and its digest so far."""

    def __init__(self, file: RemoteFile, out: IO[bytes]) -> None:
        self._file = file
        self._out = out
        self._digest = _new_digest(file)
        self.done_bytes = 0

    def take_up(self, watch: FetchWatch) -> None:
        """Reads what an earlier try has left."""
        self._out.seek(0)
        while chunk := self._out.read(_READ_BYTES):
            self._digest.update(chunk)
            self.done_bytes += len(chunk)
            watch.progress(min(self.done_bytes, self._file.size_bytes))
        if self.done_bytes > self._file.size_bytes:
            self.restart()

    def append(self, chunk: bytes) -> None:
        if self.done_bytes + len(chunk) > self._file.size_bytes:
            raise _Unfit(f"{self._file.name}: the server sends more than the {self._file.size_bytes} bytes it has told")
        rest = memoryview(chunk)
        while rest:  # a disk that is nearly full takes a part, and says so by the count alone
            taken_bytes = self._out.write(rest)
            self._digest.update(rest[:taken_bytes])
            self.done_bytes += taken_bytes
            rest = rest[taken_bytes:]

    def restart(self) -> None:
        self._out.truncate(0)
        self._digest = _new_digest(self._file)
        self.done_bytes = 0

    @property
    def is_right(self) -> bool:
        return self._digest.hexdigest() == self._file.digest

    def check(self) -> None:
        if not self.is_right:
            raise _Unfit(
                f"{self._file.name} has the digest {self._digest.hexdigest()}, the hub says {self._file.digest}; "
                "nothing of it was kept. A proxy or a mirror serves something else: try again, or without it"
            )


class _Unfit(PullError):
    """What came is of no use to a later try."""


def fetch_blob(url: str, file: RemoteFile, blobs_dir: Path, watch: FetchWatch, retries: RetryPolicy) -> Path:
    """The blob, after its digest was found right, whether it was there or came now. One caller at a time a file.

    Lines that break are taken up again, until five in a row together gave less than 64 KiB more than had ever come:
    what a server sends anew, because it knows no ranges, is no advance. What has come stays for the next call, also
    after KeyboardInterrupt, a full disk or `kill -9`.

    Raises:
        PullError: the server, the line or the bytes; says what to do.
        HfHubHTTPError: the hub refuses.
        OSError: the disk.
    """
    target = blobs_dir / file.digest
    if target.is_file():
        if _is_whole(target, file, watch):
            return target
        target.unlink()
    blobs_dir.mkdir(parents=True, exist_ok=True)
    partial_path = blobs_dir / f"{file.digest}{PARTIAL_SUFFIX}"
    try:
        # unbuffered: what was counted is in the file, whatever ends this process
        with partial_path.open("a+b", buffering=0) as out:
            partial = _Partial(file, out)
            partial.take_up(watch)
            has_kept = partial.done_bytes > 0
            progress = _with_head_check(watch, partial_path)
            _stream_rest(url, file, partial, progress, retries)
            if has_kept and not partial.is_right:  # a machine that lost power may have kept holes
                partial.restart()
                _stream_rest(url, file, partial, progress, retries)
            partial.check()
            os.fsync(out.fileno())  # else a machine that loses power may keep the name and lose the bytes
    except _Unfit:
        partial_path.unlink()
        raise
    partial_path.replace(target)
    return target


def kept_bytes(file: RemoteFile, blobs_dir: Path) -> int:
    """How much of it is here already."""
    for path in (blobs_dir / file.digest, blobs_dir / f"{file.digest}{PARTIAL_SUFFIX}"):
        if path.is_file():
            return min(path.stat().st_size, file.size_bytes)
    return 0


def _with_head_check(watch: FetchWatch, path: Path) -> Callable[[int], None]:
    is_due = watch.check_head is not None

    def progress(done_bytes: int) -> None:
        nonlocal is_due
        watch.progress(done_bytes)
        if is_due and watch.check_head is not None and done_bytes >= _CHECK_HEAD_AT_BYTES:
            is_due = False
            try:
                watch.check_head(path)
            except PullError as error:
                raise _Unfit(str(error)) from error

    return progress


def _stream_rest(
    url: str, file: RemoteFile, partial: _Partial, progress: Callable[[int], None], retries: RetryPolicy
) -> None:
    futile_tries = 0
    advanced_to_bytes = partial.done_bytes
    while partial.done_bytes < file.size_bytes:
        reason = _try_stream(url, file, partial, progress, retries.stalled_after_s)
        if partial.done_bytes == file.size_bytes:
            return
        futile_tries += 1
        if partial.done_bytes >= advanced_to_bytes + _LEAST_ADVANCE_BYTES:
            futile_tries, advanced_to_bytes = 0, partial.done_bytes
        if futile_tries == _MAX_FUTILE_TRIES:
            raise PullError(
                f"{file.name}: {reason}, {_MAX_FUTILE_TRIES} times in a row; {partial.done_bytes} of "
                f"{file.size_bytes} bytes are kept, and the same command goes on from there"
            )
        time.sleep(retries.first_wait_s * 2 ** min(futile_tries, _MOST_DOUBLINGS))


def _try_stream(
    url: str, file: RemoteFile, partial: _Partial, progress: Callable[[int], None], stalled_after_s: float
) -> str:
    """Returns why no more came. The hub's address each time: where it leads to is signed, and expires."""
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if partial.done_bytes:
        headers["Range"] = f"bytes={partial.done_bytes}-"
    try:
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout_s, follow_redirects=True) as response:
            if response.status_code in _TRANSIENT_STATUS:
                return f"the server answers {response.status_code}"
            hf_raise_for_status(response)
            _follow_range(response, file, partial)
            mark_bytes, mark_at_s = partial.done_bytes, time.monotonic()
            for chunk in response.iter_bytes():
                partial.append(chunk)
                progress(partial.done_bytes)
                if partial.done_bytes >= mark_bytes + _LEAST_ADVANCE_BYTES:
                    mark_bytes, mark_at_s = partial.done_bytes, time.monotonic()
                elif partial.done_bytes < file.size_bytes and time.monotonic() > mark_at_s + stalled_after_s:
                    return f"the server sends less than {_LEAST_ADVANCE_BYTES} bytes in {stalled_after_s:.0f} s"
    except httpx2.TransportError as error:
        return f"the connection was lost ({type(error).__name__})"
    return "the connection ended early"


def _follow_range(response: httpx2.Response, file: RemoteFile, partial: _Partial) -> None:
    """A server may answer with the whole file; another part than was asked for would make a wrong one."""
    if response.status_code != httpx2.codes.PARTIAL_CONTENT:
        if partial.done_bytes:
            partial.restart()
        return
    found = response.headers.get("Content-Range", "")
    if not found.startswith(f"bytes {partial.done_bytes}-"):
        raise PullError(f"{file.name}: asked for bytes from {partial.done_bytes}, the server answers {found[:60]!r}")


def _is_whole(path: Path, file: RemoteFile, watch: FetchWatch) -> bool:
    """Whether a file has the size and the digest that the hub says. Reads all of it."""
    if path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as blob:
        partial = _Partial(file, blob)
        partial.take_up(watch)
    return partial.is_right


def _new_digest(file: RemoteFile) -> "hashlib._Hash":
    if len(file.digest) == _SHA1_CHARS:
        return hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)  # as git names a file
    return hashlib.sha256()
