"""How much memory processes take at most, sampled while something else is done."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

_EVERY_S = 0.5


@asynccontextmanager
async def watched(pids: Mapping[str, int]) -> AsyncIterator[dict[str, int]]:
    """Name -> the most bytes of a process's own (anonymous) memory until the end; the arena and weights are files."""
    most: dict[str, int] = dict.fromkeys(pids, 0)

    async def watch() -> None:
        while True:
            for name, pid in pids.items():
                most[name] = max(most[name], _anonymous_bytes(pid))
            await asyncio.sleep(_EVERY_S)

    task = asyncio.create_task(watch())
    try:
        yield most
    finally:
        task.cancel()


def _anonymous_bytes(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
