"""`weir up` for a stack of fake processes: FOLDER START_TIMEOUT_S GRACE_S SPECS, each spec [NAME, FLAG …]."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.unit.runtime.stacks import FAST, fake_plan, fake_spec

from weir.core.errors import WeirError
from weir.runtime.stack.instances import run_planned
from weir.runtime.stack.leftovers import Removed
from weir.runtime.stack.paths import InstancePaths


def say(*words: object) -> None:
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


class LineReporter:
    """One line an event."""

    def found_leftovers(self, removed: Removed) -> None:
        say("leftovers", len(removed.pids))

    def process_ready(self, name: str, after_s: float) -> None:
        say("ready", name, after_s)

    def note(self, text: str) -> None:
        say("note:", text)

    def process_died(self, name: str, log_path: str) -> None:
        say("died", name, log_path)

    def warn(self, text: str) -> None:
        say("warning:", text)

    def state_not_written(self, path: str, error: OSError) -> None:
        say("not written:", path)

    def stack_ready(self, endpoints: Mapping[str, str], after_s: float) -> None:
        say("stack ready", endpoints, after_s)

    def stopping(self) -> None:
        say("stopping")


def main() -> int:
    paths = InstancePaths(Path(sys.argv[1]))
    specs = [fake_spec(paths, name, *flags) for name, *flags in json.loads(sys.argv[4])]
    plan = fake_plan(paths, specs, start_timeout_s=float(sys.argv[2]), grace_s=float(sys.argv[3]))
    try:
        was_ready = asyncio.run(run_planned(paths, lambda: plan, LineReporter(), os.environ, FAST))
    except WeirError as error:
        say("failed:", error.message)
        return 1
    return 0 if was_ready else 130


if __name__ == "__main__":
    sys.exit(main())
