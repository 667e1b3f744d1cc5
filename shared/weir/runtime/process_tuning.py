"""What a process sets for itself: how many files and connections it may have open, when Python looks for garbage."""

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A full collection looks at every object that waits: with 20,000 queued the longest of 20,000 decisions took 122 and
# 139 ms with Python's own threshold, 0.18 of it with this one, and as long without any collection. The median and the
# 99th percentile are the same either way. `gc.freeze` after start, too, spares nothing of what is queued later; larger
# thresholds for the young make collections of the middle generation longer.
_NUM_MIDDLE_A_FULL = 1000


def raise_descriptor_limit() -> int:
    """Raises the soft limit to the hard one, for this process and those it starts; returns what the limit is now.

    The soft one is often 1024, for the sake of programs that call select(2): none of ours does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # a hard limit that the kernel itself has come to be below
            return soft
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def find_shortage(limit: int, num_needed: int) -> str | None:
    """A warning if `limit` is below what the bounds of this process come to."""
    if limit >= num_needed:
        return None
    return (
        f"at most {limit} files and connections can be open, the bounds of this process come to {num_needed}: "
        f"connections beyond the limit fail; raise the hard limit of open files (`ulimit -Hn`, systemd's LimitNOFILE=, "
        "Compose's ulimits)"
    )


def spare_what_is_there() -> None:
    """Collections look at nothing of what this process has made until now: modules, tokenizer, tables. For when it has
    started: a full collection took gateways and workers 50 to 80 ms, and 100 to 160 amid a flood, in which they serve
    nobody; a gateway's 99th percentile of refusals was 62 ms for it, and is 22 without."""
    gc.collect()
    gc.freeze()


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Full collections are a hundred times as rare meanwhile: what is in cycles and old is freed as much later."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, _NUM_MIDDLE_A_FULL)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
