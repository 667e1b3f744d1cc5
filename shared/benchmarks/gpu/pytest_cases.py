"""A plugin of pytest: tests are the cases of `benchmarks.gpu.case_loop`, each recorded when it ends.

`pytest -p benchmarks.gpu.pytest_cases --out OUT --progress FILE`. A process whose CUDA context is lost ends at once:
all later tests in it would fail.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.case_loop import STICKY_EXIT, Selection, add_options, is_sticky, leave_at_once
from benchmarks.gpu.output import append_record

_PART = "tests"
_MAX_PROBLEM_CHARS = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser.getgroup("weir").addoption)


def pytest_configure(config: pytest.Config) -> None:
    selection = Selection(config.getoption("--progress"), config.getoption("--only"))
    config.pluginmanager.register(_RecordedTests(config.getoption("--out"), selection))


def _try_lost_context() -> str | None:
    """What a wait for the device raises. A fault shows in the first call that waits, which may be the next test's."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return None


class _RecordedTests:
    """`out` None: nothing is recorded."""

    def __init__(self, out: Path | None, selection: Selection) -> None:
        self._out = out
        self._selection = selection
        self._to_skip = selection.names_to_skip()
        self._problem = ""
        self._traceback = ""
        self._verdict = ""
        self._seconds = 0.0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        only = self._selection.only
        unwanted = [item for item in items if item.nodeid in self._to_skip or (only and item.nodeid != only)]
        if unwanted:
            config.hook.pytest_deselected(items=unwanted)
            items[:] = [item for item in items if item not in unwanted]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._verdict, self._problem, self._traceback, self._seconds = "ok", "", "", 0.0
        self._selection.note("begin", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed:
            self._verdict, self._problem = "failed", self._problem or _message_of(report)
            self._traceback += report.longreprtext
        elif report.skipped and self._verdict == "ok":
            self._verdict, self._problem = "skipped", _reason_of(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        lost = _try_lost_context()
        if lost is not None:
            self._verdict, self._problem = "failed", f"{self._problem} {lost}".strip()
        is_lost = lost is not None or is_sticky(self._traceback)
        if self._out is not None:
            record: dict[str, Any] = {"part": _PART, "case": nodeid, "verdict": self._verdict}
            if self._problem:
                record["problem"] = self._problem[:_MAX_PROBLEM_CHARS]
            append_record(self._out, record | {"seconds": round(self._seconds, 2)})
        if self._verdict == "failed":
            print(
                f"\n{nodeid}: {self._problem}\n{self._traceback}", flush=True
            )  # pytest prints it at its end, which may never come
        if is_lost:
            leave_at_once(STICKY_EXIT)
        self._selection.note("end", nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """All tests behind the one that ended the process before may have run."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._to_skip:
            session.exitstatus = pytest.ExitCode.OK


def _reason_of(report: pytest.TestReport) -> str:
    longrepr = report.longrepr
    return longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)


def _message_of(report: pytest.TestReport) -> str:
    """The error's own, without where it came from."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message) if crash is not None else report.longreprtext
