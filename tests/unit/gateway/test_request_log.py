"""The request log: what it has, what it never has unasked, and that it stays small."""

import json
import stat
import threading
import time
from pathlib import Path

import pytest
from tests.unit.predictors.words import PREFIX, SUFFIX, word_table

from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.log_record import LogRecord
from weir.training.samples import load_samples
from weir_gateway.request_log import RequestLog, RequestLogSettings

PROMPT = (*PREFIX, 20, 21, 22, *SUFFIX)
RECORD = LogRecord(12.0, "m", len(PROMPT), 34, 64, is_cut=False)


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_tokens_are_written_only_if_asked_for(tmp_path: Path) -> None:
    features = PromptFeatures(word_table())
    quiet = RequestLog(RequestLogSettings(tmp_path / "quiet", 1 << 20), features)
    open_log = RequestLog(RequestLogSettings(tmp_path / "open", 1 << 20, keeps_tokens=True), None)
    for log in (quiet, open_log):
        log.write(RECORD, PROMPT)
        log.close()
    assert "prompt_token_ids" not in lines_of(tmp_path / "quiet")[0]
    assert lines_of(tmp_path / "open")[0]["prompt_token_ids"] == list(PROMPT)
    one, other = (load_samples([tmp_path / name], features, "m").samples for name in ("quiet", "open"))
    assert one.features == pytest.approx(other.features, rel=1e-3, abs=1e-3)


def test_the_log_is_its_owners_alone_and_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "log"
    path.parent.mkdir()
    path.write_text('{"v": 1, "torn')
    path.unlink()
    for _ in range(2):
        log = RequestLog(RequestLogSettings(path, 1 << 20, keeps_tokens=True), None)
        log.write(RECORD, PROMPT)
        log.close()
        with path.open("a") as file:
            file.write('{"v": 1, "torn')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert len(whole) == 2


def test_a_log_goes_on_when_its_folder_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    log = RequestLog(RequestLogSettings(folder / "log", 500, keeps_tokens=True), None)

    def write_one(result: str) -> None:
        before = log.metrics()[result]
        log.write(RECORD, PROMPT)
        while log.metrics()[result] == before:
            time.sleep(0.001)

    write_one("request_log_written_total")
    folder.rename(tmp_path / "away")
    write_one("request_log_failed_total")
    write_one("request_log_failed_total")
    (tmp_path / "away").rename(folder)
    write_one("request_log_written_total")
    log.close()
    assert log.metrics()["request_log_failed_total"] == 2


def test_a_full_log_is_rotated_and_both_parts_stay_within_the_limit(tmp_path: Path) -> None:
    path, max_bytes = tmp_path / "log", 4000
    log = RequestLog(RequestLogSettings(path, max_bytes, keeps_tokens=True, max_waiting=1000), None)
    for _ in range(300):
        log.write(RECORD, PROMPT)
    log.close(10.0)
    old = path.with_name("log.1")
    assert path.stat().st_size + old.stat().st_size <= max_bytes
    assert lines_of(old)
    assert lines_of(path)
    assert log.metrics()["request_log_written_total"] == 300
    assert {item.name for item in tmp_path.iterdir()} == {"log", "log.1"}


class Stuck(PromptFeatures):
    """Features whose disk, so to say, does not answer."""

    def __init__(self) -> None:
        super().__init__(word_table())
        self.begun, self.go_on = threading.Event(), threading.Event()

    def of(self, prompts):  # type: ignore[no-untyped-def]
        self.begun.set()
        assert self.go_on.wait(10)
        return super().of(prompts)


def test_what_cannot_be_written_in_time_is_dropped_and_counted(tmp_path: Path) -> None:
    stuck = Stuck()
    log = RequestLog(RequestLogSettings(tmp_path / "log", 1 << 20, max_waiting=4), stuck)
    log.write(RECORD, PROMPT)
    assert stuck.begun.wait(10)
    for _ in range(10):
        log.write(RECORD, PROMPT)
    assert log.metrics()["request_log_dropped_total"] == 6
    stuck.go_on.set()
    log.close(10.0)
    assert log.metrics()["request_log_written_total"] == 5


def test_a_record_that_cannot_be_written_is_counted_and_the_next_one_is_written(tmp_path: Path) -> None:
    log = RequestLog(RequestLogSettings(tmp_path / "log", 1 << 20, keeps_tokens=True), None)
    log.write(RECORD, ["no token"])  # type: ignore[list-item]
    log.write(RECORD, [object()])  # type: ignore[list-item]
    log.write(RECORD, PROMPT)
    log.close(10.0)
    assert log.metrics()["request_log_failed_total"] == 1
    assert len(lines_of(tmp_path / "log")) == 2
