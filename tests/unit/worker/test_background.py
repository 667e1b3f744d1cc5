"""Work that begins before anybody waits for it."""

import threading

import pytest

from weir.worker.engine.background import begin


def test_work_runs_before_its_result_is_asked_for() -> None:
    has_run = threading.Event()

    def work() -> int:
        has_run.set()
        return 7

    future = begin(work, "seven")
    assert has_run.wait(5)
    assert future.result(5) == 7


def test_an_error_reaches_whoever_asks_for_the_result() -> None:
    def fail() -> int:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        begin(fail, "failing").result(5)
