"""Attempts against a running stack to get in, to get at what is others', and to keep others from being served.

    python -m tests.attacks

Starts a stack, tries each, prints a line for each with what became of it, and ends with 1 if any was not refused as its
row says. What acts as other users of the machine needs root.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from tests.attacks import clients, machine
from tests.attacks.attempt import open_scene

ATTEMPTS = (*clients.ATTEMPTS, *machine.ATTEMPTS)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    num_open = 0
    print("| finding | attempt | what became of it | |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder, open_scene(Path(folder)) as scene:
        for attempt in ATTEMPTS:
            if attempt.needs_root and os.getuid() != 0:
                print(f"| {attempt.finding} | {attempt.what} | not tried: only root can be another user | |")
                continue
            found = asyncio.run(attempt.run(scene))
            is_refused = found == attempt.expected
            num_open += not is_refused
            mark = "" if is_refused else f"NOT REFUSED: expected {attempt.expected}"
            print(f"| {attempt.finding} | {attempt.what} | {found} | {mark} |", flush=True)
    print(f"{len(ATTEMPTS)} attempts, {num_open} not refused")
    return 1 if num_open else 0


if __name__ == "__main__":
    sys.exit(main())
