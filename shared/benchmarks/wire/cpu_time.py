"""Processor time of processes, from /proc."""

import os
from collections.abc import Mapping
from pathlib import Path

_TICKS_A_S = os.sysconf("SC_CLK_TCK")


def cpu_times_s(pids: Mapping[str, int]) -> dict[str, float]:
    """User and system time of each process so far, all of its threads; in ticks of 10 ms on most machines.

    Raises RuntimeError for a process that is gone: figures of the others would say nothing.
    """
    return {name: _cpu_time_s(name, pid) for name, pid in pids.items()}


def _cpu_time_s(name: str, pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RuntimeError(f"{name} (pid {pid}) has ended while it was measured") from error
    fields = stat.rpartition(")")[2].split()  # the name before it may have spaces; utime and stime are 14 and 15
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_S
