"""shared/docs/results/compose-test.md: what a run did, what it saw, and on what machine."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.containers.checks import Seen


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Of one run. `command`: that repeats it."""

    command: str
    engine: str
    compose: str
    load_before: float
    load_after: float
    stand_ins: Sequence[str]


def load_now() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def write_report(path: Path, seen: Sequence[Seen], of: Circumstances) -> None:
    """Only after a run in which all was well."""
    day = datetime.now(UTC).date().isoformat()
    lines = [
        f"# The stack in containers: `{of.command}`",
        "",
        f"Made by that command on {day}; {os.cpu_count()} cores of {platform.machine()} that had other work, load "
        f"{of.load_before:.0f} before and {of.load_after:.0f} after. Docker {of.engine}, Compose {of.compose}, classic "
        "builder, CPU build, int8, `NUM_THREADS=1`, arena of 512 MiB. Times are of that load.",
        "",
        "Images by the names of `compose/`, made here, since no registry of images was reached: "
        f"{'; '.join(of.stand_ins)}. Grafana never ran. What that cannot show is in "
        "[0068](../../adr/0068-the-stack-is-started-in-containers-of-its-own-engine.md).",
        "",
        "| what was done | what was seen |",
        "|---|---|",
        *(f"| {one.done} | {one.seen} |" for one in seen),
        "",
    ]
    path.write_text("\n".join(lines))
