"""One process at a time does a piece of work; who waits says for what, and not for ever."""

import logging
import threading
from pathlib import Path

import pytest

from weir.core.file_lock import StillLocked, file_lock


def test_a_lock_that_is_given_back_is_had_and_the_wait_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "lock"
    is_done, has_lock = threading.Event(), threading.Event()

    def wait() -> None:
        with file_lock(path, "packing tiny", timeout_s=60):
            assert is_done.is_set()
            has_lock.set()

    waiting = threading.Thread(target=wait)
    with file_lock(path, "packing tiny", timeout_s=60):
        assert caplog.text == ""
        waiting.start()
        assert not has_lock.wait(0.3)
        is_done.set()
    waiting.join(10)
    assert has_lock.is_set()
    assert caplog.text.count(f"packing tiny: waiting for another process that does it, up to 60 s ({path})") == 1


def test_a_lock_that_is_not_given_back_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        file_lock(path, "packing tiny", timeout_s=60),
        pytest.raises(StillLocked, match=f"packing tiny: another process has held {path} for 0 s; end it"),
        file_lock(path, "packing tiny", timeout_s=0.2),
    ):
        raise AssertionError("two have it")


def test_work_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(KeyError), file_lock(tmp_path / "lock", "packing", timeout_s=0):
        raise KeyError
    with file_lock(tmp_path / "lock", "packing", timeout_s=0):
        pass
