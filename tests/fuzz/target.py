"""What a target is, and one input of it under bounds of time and memory."""

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).parents[2]
_OWN_FOLDERS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("shared", "services"))

Check = Callable[[bytes], None]
"""Reads an input. It raises what the target may raise, and AssertionError where what came of it is wrong."""


def _no_seeds() -> Sequence[bytes]:
    return ()


@dataclass(frozen=True)
class Target:
    """`open` gives the check, with whatever it needs (a folder, a gateway), until it is left.

    `seeds`: valid inputs to begin with. `max_s`: of the process' own time, and `max_growth_bytes` of its memory, that
    one input may take: generous, what is over is no matter of a slow machine.
    """

    name: str
    open: Callable[[], AbstractContextManager[Check]]
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], Sequence[bytes]] = _no_seeds
    max_bytes: int = 4096
    max_s: float = 2.0
    max_growth_bytes: int = 256 << 20
    ci_examples: int = 60

    def kept_inputs(self) -> Sequence[bytes]:
        """Those of the corpus, which were found once, and the seeds."""
        return [*(path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))), *self.seeds()]


class Finding(AssertionError):
    """An input did what none may. `place` tells findings apart."""

    def __init__(self, place: str, details: str) -> None:
        super().__init__(f"{place}\n{details}")
        self.place = place


def simple(check: Check) -> Callable[[], AbstractContextManager[Check]]:
    """`open` of a check that needs nothing."""

    @contextmanager
    def opened() -> Iterator[Check]:
        yield check

    return opened


def run_input(target: Target, check: Check, data: bytes) -> None:
    """Raises Finding."""
    forget_peak()
    began_bytes, began_s = peak_bytes(), time.process_time()
    try:
        check(data)
    except target.refusals:
        pass
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - which is what is looked for; a panic of Rust is no Exception
        raise Finding(_place_of(error), "".join(traceback.format_exception(error)[-12:])) from None
    took_s, growth_bytes = time.process_time() - began_s, peak_bytes() - began_bytes
    if took_s > target.max_s:
        raise Finding("too slow", f"{took_s:.1f} s of the process' time, at most {target.max_s:g}")
    if growth_bytes > target.max_growth_bytes:
        raise Finding("too large", f"{growth_bytes >> 20} MiB more memory, at most {target.max_growth_bytes >> 20}")


def forget_peak() -> None:
    """From now on the peak is what the process has now (proc_pid_clear_refs(5)). That of getrusage never falls: after
    something large nothing would be too large. Takes 7 µs, and reading it 20."""
    Path("/proc/self/clear_refs").write_bytes(b"5")


def peak_bytes() -> int:
    """The most memory that this process has had at a time since `forget_peak`."""
    [peak_kib] = re.findall(rb"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_bytes(), re.MULTILINE)
    return int(peak_kib) << 10


def _place_of(error: BaseException) -> str:
    """The kind of error, and the innermost line of Weir that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_OWN_FOLDERS)] or frames
    frame = own[-1]
    return f"{type(error).__name__} at {frame.filename.removeprefix(f'{ROOT}{os.sep}')}:{frame.name}:{frame.lineno}"
