"""How many files and connections this process may have open."""

import resource
import sys


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
    """What to tell if `limit` is below what the bounds of this process come to."""
    if limit >= num_needed:
        return None
    return (
        f"at most {limit} files and connections can be open, the bounds of this process come to {num_needed}: "
        f"connections beyond the limit fail; raise the hard limit of open files (`ulimit -Hn`, systemd's LimitNOFILE=, "
        "Compose's ulimits)"
    )
