"""Logs stay small while their writer goes on."""

import os
from pathlib import Path

from weir.runtime.stack.logfile import last_lines, open_for_child, rotate, trim


def test_a_log_that_is_too_long_is_emptied_under_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = open_for_child(path)
    os.write(log, b"x" * 100 + b"\n")
    assert not trim(path, 101)
    assert trim(path, 100)
    os.write(log, b"after\n")
    os.close(log)
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100 + b"\n"
    assert not trim(tmp_path / "none.log", 0)


def test_the_log_of_the_last_start_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    rotate(path)
    path.write_text("first")
    rotate(path)
    assert not path.exists()
    assert (tmp_path / "a.log.1").read_text() == "first"


def test_last_lines_are_the_last_ones_whatever_bytes_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(5000)) + b"\xff\xfe\n")
    assert last_lines(path, 3) == ["line 4998", "line 4999", "\ufffd\ufffd"]
    assert last_lines(tmp_path / "none.log") == []
