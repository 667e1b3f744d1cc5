"""A minute of faults from a seed, amid streams of many kinds. `make chaos MINUTES=60` is the same for longer."""

from pathlib import Path

import pytest
from tests.chaos.run import open_stack, report, run_chaos

pytestmark = [pytest.mark.stack, pytest.mark.timeout(420)]


def test_no_stream_loses_a_token_whatever_dies_but_its_gateway(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        outcome = run_chaos(stack, seed=11, duration_s=60, num_clients=12)
    assert outcome.problems == [], report(outcome)
    assert outcome.tally.num_streams >= 20
