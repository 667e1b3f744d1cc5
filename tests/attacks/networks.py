"""Two network namespaces with a cable between them: a stack in one, a stranger in the other. Needs root and `ip`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

_HOST, _STRANGER = "10.77.0.1", "10.77.0.2"
_TIMEOUT_S = 240.0
_STRANGER_TIMEOUT_S = 150.0
_MAX_ROUNDS, _ROUND_S = 50, 0.1
_WITH_OWN_MEMORY = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
"""An arena goes with the last of its processes, however they end: `ip` gives each mounts of its own."""
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
            _kill_all_in(name)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)


@contextmanager
def _killed_after(seconds: float, network: str) -> Iterator[threading.Event]:
    """Whatever still runs in it by then, the stack of a defender that hangs with it. The event: it was."""
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        _kill_all_in(network)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield is_over
    finally:
        timer.cancel()
        timer.join()


def _kill_all_in(network: str) -> None:
    """Some of them start others, until they are killed themselves."""
    command = ["ip", "netns", "pids", network]
    for _ in range(_MAX_ROUNDS):
        listed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30).stdout.split()
        if not listed:
            return
        for pid in listed:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(_ROUND_S)


def attack_from_another_network(folder: Path) -> Sequence[Row]:
    """What became of each attempt. Raises RuntimeError where the stack does not start, or end, in time."""
    with _networks() as (home, elsewhere), _killed_after(_TIMEOUT_S, home) as is_over:
        command = ["ip", "netns", "exec", home, *_WITH_OWN_MEMORY]
        command += [sys.executable, "-m", "tests.attacks.defender", str(folder), _HOST]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as defending:
            assert defending.stdout is not None  # its input is closed at the end, which ends it
            said = defending.stdout.readline()
            made = _attack(said, folder, elsewhere) if said else b""
        if is_over.is_set():
            when = "has not ended" if said else "did not start"
            raise RuntimeError(f"the stack {when} within {_TIMEOUT_S:g} s and was killed; see the logs in {folder}")
        if not said or defending.returncode:
            raise RuntimeError(f"the stack ended with {defending.returncode}; see the logs in {folder}")
    rows = [json.loads(line) for line in made.splitlines()]
    return [(finding, what, expected, found) for finding, what, expected, found in rows]


def _attack(said: bytes, folder: Path, elsewhere: str) -> bytes:
    """What the stranger says who hears this of the defender."""
    command = ["ip", "netns", "exec", elsewhere, sys.executable, "-m", "tests.attacks.stranger", str(folder)]
    made = subprocess.run(command, input=said, stdout=subprocess.PIPE, timeout=_STRANGER_TIMEOUT_S, check=True)
    return made.stdout


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
