"""Two network namespaces with a cable between them: a stack in one, a stranger in the other. Needs root and `ip`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

_HOST, _STRANGER = "10.77.0.1", "10.77.0.2"
_TIMEOUT_S = 300.0
Row = tuple[str, str, str, str]
"""The finding, what was tried, what was to come of it, and what did."""


@contextmanager
def _networks() -> Iterator[tuple[str, str]]:
    """The names of both."""
    mark = uuid4().hex[:6]
    names = (f"weir-a-{mark}", f"weir-b-{mark}")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", f"wa{mark}", "netns", names[0], "type", "veth", "peer", f"wb{mark}", "netns", names[1])
        for name, link, address in zip(names, (f"wa{mark}", f"wb{mark}"), (_HOST, _STRANGER), strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            for one in (link, "lo"):
                _ip("-n", name, "link", "set", one, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)


def attack_from_another_network(folder: Path) -> Sequence[Row]:
    """What became of each attempt. Raises RuntimeError where the stack does not start, with what it said."""
    with _networks() as (home, elsewhere):
        command = ["ip", "netns", "exec", home, sys.executable, "-m", "tests.attacks.defender", str(folder), _HOST]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as defending:
            assert defending.stdout is not None  # its input is closed at the end, which ends it
            said = defending.stdout.readline()
            if not said:
                raise RuntimeError(f"the stack did not start; see the logs in {folder}")
            command = ["ip", "netns", "exec", elsewhere, sys.executable, "-m", "tests.attacks.stranger", str(folder)]
            made = subprocess.run(command, input=said, stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=True)
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    return [(finding, what, expected, found) for finding, what, expected, found in rows]


def is_possible() -> bool:
    """Whether namespaces can be made here."""
    if shutil.which("ip") is None:
        return False
    name = f"weir-{uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, timeout=30)
    if made.returncode == 0:
        _ip("netns", "delete", name)
    return made.returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
