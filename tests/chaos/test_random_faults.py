"""Half a minute of faults from a seed, amid streams of many kinds. `make chaos MINUTES=60` is the same for longer."""

from pathlib import Path

import pytest
from tests.chaos.driver.report import report
from tests.chaos.run import open_stack, run_chaos

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(420)]

SEED = 11
DURATION_S = 30.0


def test_no_stream_loses_a_token_whatever_dies_stands_still_or_is_cut_off(tmp_path: Path) -> None:
    with open_stack(tmp_path, SEED) as stack:
        outcome = run_chaos(stack, seed=SEED, duration_s=DURATION_S, num_clients=64)
    assert outcome.problems == [], report(outcome)
    assert outcome.tally.num_streams >= 64
