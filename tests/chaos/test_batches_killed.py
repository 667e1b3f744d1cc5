"""A batch outlives what answers it. `python -m tests.chaos.batches --lines 2000` does it at length."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.batches import BatchJob, num_answered, run, wait_answered

from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

LEASE_S = "2"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, environ = tmp_path_factory.mktemp("stack"), {"WEIR_BATCH_LEASE_S": LEASE_S, "WEIR_BATCH_AT_ONCE": "8"}
    with Stack(folder, flags=("--gateways", "2"), environ=environ) as stack:
        yield stack


def test_two_gateways_share_a_batch_and_one_is_killed(stack: Stack, tmp_path: Path) -> None:
    job = BatchJob(tmp_path, num_lines=48, max_tokens=48)  # sixteen at a time: the first ones leave two thirds
    victim, survivor = stack.processes("gateway")
    _, survivor_url = stack.http_urls()
    batch_id = job.submit(stack)
    wait_answered(survivor_url, batch_id, 10)
    had = {one.name: stack.metrics(one)["batch_lines_answered_total"] for one in (victim, survivor)}
    stack.kill(victim)
    assert num_answered(survivor_url, batch_id) < job.num_lines, "it is killed in the middle"
    assert min(had.values()) > 0, "both have answered lines"
    wait_answered(survivor_url, batch_id, job.num_lines)
    assert stack.metrics(survivor)["batch_lines_answered_total"] > had[survivor.name]
    wait_until(lambda: stack.has_restarted(victim), timeout_s=90, what="it is back")
    assert job.problems(job.fetch(stack, batch_id)) == []


@pytest.mark.long
def test_every_line_is_answered_once_though_everything_is_killed_twice(stack: Stack, tmp_path: Path) -> None:
    assert run(stack, BatchJob(tmp_path, num_lines=120), num_kills=2) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_so_it_is_with_many_lines_and_kills(stack: Stack, tmp_path: Path) -> None:
    assert run(stack, BatchJob(tmp_path, num_lines=2000), num_kills=5) == []
