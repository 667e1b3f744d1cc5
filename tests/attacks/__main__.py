"""Attempts against a running stack to get in, to get at what is others', and to keep others from being served.

    python -m tests.attacks             # on one machine
    python -m tests.attacks --networks  # a stack of processes that meet by TCP, and a stranger in another network

Starts a stack, tries each, prints a line for each with what became of it, and ends with 1 if any was not refused as its
row says. What acts as other users of the machine needs root, and so do networks.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.attacks import clients, logs, machine
from tests.attacks.attempt import open_scene
from tests.attacks.networks import Row, attack_from_another_network

ATTEMPTS = (*clients.ATTEMPTS, *logs.ATTEMPTS, *machine.ATTEMPTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", action="store_true", help="from another network than the stack's")
    print("| finding | attempt | what became of it | |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = _from_another_network if parser.parse_args().networks else _on_one_machine
        is_refused = [_print_row(*row) for row in rows(Path(folder))]
    print(f"{len(is_refused)} attempts, {is_refused.count(False)} not refused")
    return 0 if all(is_refused) else 1


def _from_another_network(folder: Path) -> Iterable[Row]:
    return attack_from_another_network(folder)


def _on_one_machine(folder: Path) -> Iterable[Row]:
    with open_scene(folder) as scene:
        for attempt in ATTEMPTS:
            if attempt.needs_root and os.getuid() != 0:
                print(f"| {attempt.finding} | {attempt.what} | not tried: only root can be another user | |")
            else:
                yield attempt.finding, attempt.what, attempt.expected, asyncio.run(attempt.run(scene))


def _print_row(finding: str, what: str, expected: str, found: str) -> bool:
    """Whether it was refused."""
    mark = "" if found == expected else f"NOT REFUSED: expected {expected}"
    print(f"| {finding} | {what} | {found} | {mark} |", flush=True)
    return not mark


if __name__ == "__main__":
    sys.exit(main())
