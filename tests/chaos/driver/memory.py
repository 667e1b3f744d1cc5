"""How much memory each role takes during a run, beside what it may."""

import asyncio
import contextlib
from pathlib import Path

from tests.chaos.driver.stack import ChaosStack

_INTERVAL_S = 3.0
MAX_MIB = {"gateway": 256, "scheduler": 128, "prefill": 512, "decode": 768, "transfer": 192, "nats": 192}
"""Of a process's own memory and its share of files, pages of the arena left out: those have their bound in the file
system. With smollm2-135m, 64 streams; about twice what was seen in runs without faults."""


class MemoryWatch:
    """`max_mib`: the most that a process of each role had, and `problems`: who had more than its role may."""

    def __init__(self, stack: ChaosStack) -> None:
        self._stack = stack
        self.max_mib: dict[str, float] = {}

    @property
    def problems(self) -> list[str]:
        return [
            f"a {role} process had {used:.0f} MiB, more than its {MAX_MIB[role]}"
            for role, used in self.max_mib.items()
            if used > MAX_MIB[role]
        ]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(_INTERVAL_S)

    def _look(self) -> None:
        for view in self._stack.views():
            used = try_read_own_mib(view.pid)
            if used is not None:
                self.max_mib[view.role] = max(used, self.max_mib.get(view.role, 0.0))


def try_read_own_mib(pid: int) -> float | None:
    """Proportional set size without shared memory; None if there is no such process."""
    entries = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, kib = line.split()[:2]
            entries[name] = int(kib) / 1024
    return entries["Pss_Anon:"] + entries["Pss_File:"] if "Pss_File:" in entries else None
