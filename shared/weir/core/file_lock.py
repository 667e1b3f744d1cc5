"""A lock between processes: a file that one of them holds. The kernel gives it back when its holder ends, however."""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weir.core.errors import WeirError

_log = logging.getLogger(__name__)
_POLL_S = 0.1


class StillLocked(WeirError):
    """Another process has held the lock for too long; names lock and work."""


@contextmanager
def file_lock(path: Path, work: str, *, timeout_s: float) -> Iterator[None]:
    """Holds `path`, which is made if need be, while one process of several does `work`, such as "compiling".

    Waits in the caller's thread and says so in the log. Raises StillLocked after `timeout_s`, and OSError.
    """
    ends_at_s = time.monotonic() + timeout_s
    is_waiting = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= ends_at_s:
                    raise StillLocked(
                        f"{work}: another process has held {path} for {timeout_s:.0f} s; end it "
                        f"(`fuser {path}` names it), then start again"
                    ) from None
            if not is_waiting:
                _log.info("%s: waiting for another process that does it, up to %.0f s (%s)", work, timeout_s, path)
                is_waiting = True
            time.sleep(_POLL_S)
        yield
