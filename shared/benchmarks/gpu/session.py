"""Runs parts in turn within a budget of time. Whatever becomes of one, the others run, and all that was known is kept.

A command that runs cases (`benchmarks.gpu.case_loop`) and dies, hangs or loses its CUDA context is started again behind
the case that did it, which is run once more alone, with CUDA_LAUNCH_BLOCKING=1, for a better traceback.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.case_loop import STICKY_EXIT, Progress, Selection
from benchmarks.gpu.output import Logs, PartOutcome, append_record, write_summary
from benchmarks.gpu.process_group import EndedCommand, run_group

_LEAST_S = 2.0
"""What is left for a command that is not worth its start."""
_MAX_RESTARTS = 4
_CULPRIT_S = 25.0
LIMIT_VARIABLE = "WEIR_GPU_LIMIT_S"
"""In a command's environment: when it will be ended."""


@dataclass(frozen=True, slots=True)
class Command:
    """Arguments of Python. `has_cases`: it takes `--progress FILE` and `--only CASE`.

    `max_silence_s`: without a case that begins or ends it is taken to hang.
    """

    name: str
    arguments: tuple[str, ...]
    has_cases: bool = True
    max_silence_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that together may take `max_s`, `num_at_a_time` of them side by side."""

    name: str
    commands: tuple[Command, ...]
    max_s: float
    num_at_a_time: int = 1
    are_tests: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """When all parts have to be done, on the monotonic clock."""

    ends_at_s: float

    @property
    def left_s(self) -> float:
        return self.ends_at_s - time.monotonic()


class Session:
    """One run of parts. `environ` is that of every command."""

    def __init__(self, folder: Path, logs: Logs, environ: Mapping[str, str], title: str) -> None:
        self._folder = folder
        self._logs = logs
        self._environ = {**environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        self._title = title
        self._outcomes: list[PartOutcome] = []
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """What runs is ended at once, and nothing more is started. May be called by a signal's handler."""
        self._is_stopped.set()

    def run(self, parts: Sequence[Part], budget: Budget) -> list[PartOutcome]:
        """The summary is written before the first and after each."""
        for number, part in enumerate(parts):
            self._write_summary(parts[number:])
            self._outcomes.append(self._run_part(part, budget))
            self._write_summary(parts[number + 1 :])
        return self._outcomes

    def _write_summary(self, waiting: Sequence[Part]) -> None:
        write_summary(self._folder, self._title, self._outcomes, [part.name for part in waiting])

    def _run_part(self, part: Part, budget: Budget) -> PartOutcome:
        left_s = budget.left_s
        if self._is_stopped.is_set():
            return PartOutcome(part.name, "skipped: stopped", 0.0)
        if left_s < _LEAST_S:
            return PartOutcome(part.name, "skipped: no time left", 0.0)
        started_s = time.monotonic()
        within = Budget(started_s + min(part.max_s, left_s))
        self._logs.write(f"== {part.name}: at most {within.left_s:.0f} s\n", is_of_tests=part.are_tests)
        with ThreadPoolExecutor(part.num_at_a_time) as threads, tempfile.TemporaryDirectory(prefix="weir-gpu-") as own:
            where = _Surroundings(self._folder, self._logs, self._environ, self._is_stopped)
            runs = [_CommandRun(where, part, command) for command in part.commands]
            verdicts = list(threads.map(lambda run: run.run(Path(own), within), runs))
        bad = [verdict for verdict in verdicts if verdict != "ok"]
        outcome = PartOutcome(part.name, "; ".join(dict.fromkeys(bad)) or "ok", time.monotonic() - started_s)
        self._logs.write(f"== {part.name}: {outcome.verdict}, {outcome.seconds:.1f} s\n", is_of_tests=part.are_tests)
        return outcome


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What the commands of a session share."""

    folder: Path
    logs: Logs
    environ: Mapping[str, str]
    is_stopped: threading.Event


class _CommandRun:
    """A command of a part, as often as it has to be started."""

    def __init__(self, where: _Surroundings, part: Part, command: Command) -> None:
        self._folder = where.folder
        self._logs = where.logs
        self._environ = where.environ
        self._is_stopped = where.is_stopped
        self._part = part
        self._command = command
        self._label = f"{part.name}/{command.name}" if len(part.commands) > 1 else part.name

    def run(self, own: Path, within: Budget) -> str:
        """The verdict: that of its first failure, or ok."""
        arguments = [*self._command.arguments, *(("--out", str(self._folder)) if self._command.has_cases else ())]
        if not self._command.has_cases:
            return self._start(arguments, within.left_s, {}, None).verdict
        progress, first_bad = own / f"{self._command.name}.progress", ""
        for _ in range(_MAX_RESTARTS + 1):
            if within.left_s < _LEAST_S or self._is_stopped.is_set():
                return first_bad or "skipped: no time left"
            ended = self._start([*arguments, "--progress", str(progress)], within.left_s, {}, progress)
            first_bad = first_bad or ("" if ended.verdict == "ok" else self._said(ended))
            if ended.code in (0, 1):
                return first_bad or "ok"
            culprit = Progress.read(progress).in_progress
            if culprit is None:  # it ended before its first case or between two
                return first_bad
            self._on_culprit(culprit, ended, arguments, within)
            Selection(progress).note("end", culprit)
        return first_bad

    def _said(self, ended: EndedCommand) -> str:
        return "lost its CUDA context" if ended.code == STICKY_EXIT else ended.verdict

    def _on_culprit(self, culprit: str, ended: EndedCommand, arguments: Sequence[str], within: Budget) -> None:
        """Notes what it did, and runs it alone, if it may come to an end."""
        said = self._said(ended)
        problem = f"{self._label}: the process {said} in this case; what is left goes on in a new one"
        append_record(self._folder, {"part": self._part.name, "case": culprit, "verdict": said, "problem": problem})
        self._logs.write(f"== {culprit}: {problem}\n", is_of_tests=self._part.are_tests)
        if ended.code is not None and within.left_s > _LEAST_S:
            limit_s = min(_CULPRIT_S, within.left_s)
            self._logs.write(f"== {culprit}: again alone, CUDA_LAUNCH_BLOCKING=1\n", is_of_tests=self._part.are_tests)
            self._start([*arguments, "--only", culprit], limit_s, {"CUDA_LAUNCH_BLOCKING": "1"}, None)

    def _start(
        self, arguments: Sequence[str], limit_s: float, environ: Mapping[str, str], progress: Path | None
    ) -> EndedCommand:
        def on_line(line: str) -> None:
            self._logs.write(f"[{self._label}] {line.rstrip()}\n", is_of_tests=self._part.are_tests)

        silence = _silence_of(progress, self._command.max_silence_s) if progress is not None else lambda: None

        def try_reason_to_end() -> str | None:
            return "stopped" if self._is_stopped.is_set() else silence()

        on_line(f"python3 {' '.join(arguments)}")
        environ = {**self._environ, LIMIT_VARIABLE: f"{limit_s:.0f}", **environ}
        return run_group([sys.executable, *arguments], environ, limit_s, on_line, try_reason_to_end)


def _silence_of(progress: Path, max_silence_s: float) -> Callable[[], str | None]:
    """A reason to end a process whose progress file has not grown for so long."""
    last_size, grew_at_s = -1, time.monotonic()

    def try_reason() -> str | None:
        nonlocal last_size, grew_at_s
        size = progress.stat().st_size if progress.exists() else 0
        if size != last_size:
            last_size, grew_at_s = size, time.monotonic()
        return f"was silent for {max_silence_s:.0f} s" if time.monotonic() - grew_at_s > max_silence_s else None

    return try_reason
