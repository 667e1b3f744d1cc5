"""A batch outlives all that answers it: everything is killed in its middle, twice, and every line is answered once.

WEIR_BATCH_LINES: how many (`shared/docs/results/batch.md` has 2,000)."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

NUM_LINES = int(os.environ.get("WEIR_BATCH_LINES", "240"))
WAIT_S = 600


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    flags = ("--gateways", "2")
    with Stack(tmp_path, flags=flags, environ={"WEIR_BATCH_LEASE_S": "3"}) as stack:
        yield stack


def write_input(path: Path) -> None:
    """As `vllm run-batch` reads it."""
    with path.open("w") as lines:
        for index in range(NUM_LINES):
            body = {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": f"Say {index}."}],
                "max_completion_tokens": 4,
                "temperature": 0,
            }
            entry = {"custom_id": f"request-{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.write(json.dumps(entry) + "\n")


def counts_of(stack: Stack, batch_id: str) -> Counter[str]:
    """Empty while no gateway answers."""
    try:
        return Counter(httpx.get(f"{stack.http_url}/v1/batches/{batch_id}", timeout=30).json()["request_counts"])
    except (httpx.HTTPError, KeyError):
        return Counter()


def is_done(counts: Counter[str], num_lines: int) -> bool:
    assert not counts["failed"], "a line without fault has failed"
    return counts["completed"] >= num_lines


def kill_everything(stack: Stack) -> None:
    """The supervisor first, which would start the others again."""
    report = stack.status()
    pids = [report["supervisor_pid"], *(process["pid"] for process in report["processes"])]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_every_line_is_answered_once_though_everything_is_killed_twice(stack: Stack, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(source)
    submitted = stack.weir("batch", "submit", str(source), "--url", stack.http_url)
    assert submitted.returncode == 0, submitted.stderr
    batch_id = submitted.stdout.strip()
    for third in (1, 2):
        wait_until(
            lambda: is_done(counts_of(stack, batch_id), NUM_LINES * third // 3),  # noqa: B023 - called at once
            timeout_s=WAIT_S,
            what=f"{third} thirds of the lines are answered",
        )
        before = counts_of(stack, batch_id)
        assert 0 < before["completed"] < NUM_LINES, "it is killed in the middle"
        kill_everything(stack)
        print("killed after", dict(before))  # noqa: T201 - for the results' page
        stack.start()
    fetched = stack.weir(
        "batch", "fetch", batch_id, "--wait", "--output", str(output), "--url", stack.http_url, timeout_s=WAIT_S
    )
    assert fetched.returncode == 0, fetched.stderr
    answers: list[dict[str, Any]] = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"request-{index}" for index in range(NUM_LINES)]
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert all(answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers)
    print(fetched.stderr)  # noqa: T201
