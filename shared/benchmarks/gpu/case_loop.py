"""The cases of a part: run in turn, each recorded when it is known, so that what ends one costs no other its result.

A progress file says which cases have begun and ended. Who starts the process again with the same file goes on behind
the case that was its last: `python -m benchmarks.gpu.smoke --out OUT --progress FILE`. `--only CASE` runs one, whatever
the file says.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.output import Record, append, append_record, short_problem

STICKY_EXIT = 17
"""Of a process whose CUDA context is lost: nothing more can be run in it."""

_STICKY = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "device-side assert",
    "unspecified launch failure",
    "the launch timed out",
    "uncorrectable ECC error",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
)


class CaseSkipped(Exception):
    """This machine lacks what the case needs; says what."""


def is_sticky(text: str) -> bool:
    """Whether an error's text names one after which every later call of the CUDA context fails too.

    Source: CUDA Driver API, "Data types used by CUDA driver": the results that leave a process inconsistent.
    """
    return any(part in text for part in _STICKY)


def leave_at_once(code: int) -> NoReturn:
    """Destructors of what was on the device would fail, some by ending the process another way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True)
class Progress:
    """Cases by what the file says of them, in order."""

    begun: tuple[str, ...]
    ended: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "Progress":
        names: dict[str, list[str]] = {"begin": [], "end": []}
        if path.exists():
            for line in path.read_text().splitlines():
                event, name = json.loads(line)
                names[event].append(name)
        return cls(tuple(names["begin"]), tuple(names["end"]))

    @property
    def in_progress(self) -> str | None:
        """What had begun when the process ended, and had not ended itself."""
        return next((name for name in reversed(self.begun) if name not in self.ended), None)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which cases a process runs. `progress` None: there is no such file."""

    progress: Path | None = None
    only: str = ""

    def names_to_skip(self) -> frozenset[str]:
        return frozenset() if self.only or self.progress is None else frozenset(Progress.read(self.progress).begun)

    def note(self, event: str, name: str) -> None:
        """`event` is begin or end."""
        if self.progress is not None and not self.only:
            append(self.progress, json.dumps([event, name]) + "\n")


def add_options(add: Callable[..., object]) -> None:
    """To a parser of arguments, by its function that adds one."""
    add("--out", type=Path, default=None, help="folder of the results; without it they are only printed")
    add("--progress", type=Path, default=None, help="cases that this file says have begun are not run again")
    add("--only", default="", help="the one case to run")


Case = Callable[[], Iterable[Record]]
"""Figures, each recorded when it comes. A record may say its own `verdict`."""


class CaseLoop:
    """Runs the cases of `part` that are wanted, and ends the process when its CUDA context is lost."""

    def __init__(self, part: str, out: Path | None, selection: Selection) -> None:
        self._part = part
        self._out = out
        self._selection = selection
        self._to_skip = selection.names_to_skip()
        self._num_bad = 0

    @classmethod
    def from_command_line(cls, part: str, doc: str | None, arguments: list[str] | None = None) -> "CaseLoop":
        parser = argparse.ArgumentParser(description=doc)
        add_options(parser.add_argument)
        parsed = parser.parse_args(arguments)
        return cls(part, parsed.out, Selection(parsed.progress, parsed.only))

    @property
    def out(self) -> Path | None:
        return self._out

    @property
    def exit_code(self) -> int:
        return 1 if self._num_bad else 0

    def wants(self, name: str) -> bool:
        return name == self._selection.only if self._selection.only else name not in self._to_skip

    def run(self, name: str, case: Case) -> bool:
        """Whether it was wanted and all its results are good. Does not return if the CUDA context is lost."""
        if not self.wants(name):
            return False
        self._selection.note("begin", name)
        started_s = time.monotonic()
        count, bad_before = 0, self._num_bad
        try:
            for record in case():
                count += 1
                self._record(name, {"verdict": "ok"} | dict(record))
            if count == 0:
                self._record(name, {"verdict": "ok", "seconds": round(time.monotonic() - started_s, 2)})
        except CaseSkipped as reason:
            self._record(name, {"verdict": "skipped", "problem": str(reason)})
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is this case's result
            traceback.print_exc()
            self._record(name, {"verdict": "failed", "problem": short_problem(error)})
            if is_sticky(str(error)):
                leave_at_once(STICKY_EXIT)
        self._selection.note("end", name)
        return self._num_bad == bad_before

    def _record(self, name: str, fields: Record) -> None:
        record = {"part": self._part, "case": name, **fields}
        if record["verdict"] not in ("ok", "skipped"):
            self._num_bad += 1
        print(" ".join(f"{key}={value}" for key, value in record.items()), flush=True)
        if self._out is not None:
            append_record(self._out, record)
